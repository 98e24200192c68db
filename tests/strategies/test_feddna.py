"""FedDNA: FedTAN's forward half, own gradients; one client is FedTAN."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedbn_flwr.strategies import FedDNA, FedTAN
from tests.support.synchronised import (
    LEARNING_RATE,
    TRANSPORTS,
    client_data,
    synchronised,
)

ONE_CLIENT = {"min_train_nodes": 1, "min_available_nodes": 1}


@pytest.fixture
def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)
        ).double()


@pytest.mark.parametrize("exchanges", ["3L+1", "2L+1"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_with_one_client_feddna_is_fedtan(
    run_step, model, same_bits, transport: str, exchanges: str
) -> None:
    data = client_data((5,), (9,))
    settings = {"transport": transport, "rounds": 2, "local_steps": 2, "batch_size": 4}
    own = run_step(
        synchronised(FedDNA, transport, fedtan_exchanges=exchanges, **ONE_CLIENT),
        model,
        data,
        **settings,
    )
    shared = run_step(
        synchronised(FedTAN, transport, fedtan_exchanges=exchanges, **ONE_CLIENT),
        model,
        data,
        **settings,
    )
    same_bits(own.state, shared.state)
    assert [r.train.exchanges for r in own.strategy.reports] == [
        {"3L+1": 3, "2L+1": 2}[exchanges]
    ] * 2


def test_the_first_step_uses_own_gradients_and_the_unions_statistics(
    run_step, model
) -> None:
    """In autograd: mean and variance of the union, each client's derivatives."""
    data = client_data((5,), (4, 6))
    run = run_step(synchronised(FedDNA), model, data)
    start, want = model.state_dict(), {name: 0 for name, _ in model.named_parameters()}
    with torch.no_grad():
        union = torch.cat([model[0](d.inputs) for d in data])
        mean, var = union.mean(0), union.var(0, correction=0)
    for own, p in zip(data, (0.4, 0.6), strict=True):
        y = model[0](own.inputs)
        own_mean = y.mean(0) - y.mean(0).detach() + mean
        # The variance is a function of y at a mean that is held: the path through the
        # mean is not counted.
        spread = (y - mean).square().mean(0)
        x = (y - own_mean) / (
            spread - spread.detach() + var + model[1].eps
        ).sqrt() * model[1].weight + model[1].bias
        loss = nn.functional.cross_entropy(model[3](x.tanh()), own.targets)
        for (name, value), gradient in zip(
            model.named_parameters(),
            torch.autograd.grad(loss, list(model.parameters())),
            strict=True,
        ):
            want[name] = want[name] + p * (value - LEARNING_RATE * gradient).detach()
    for name, value in want.items():
        torch.testing.assert_close(
            run.tensors[name], value, rtol=1e-12, atol=1e-13, msg=name
        )
    torch.testing.assert_close(
        run.tensors["1.running_mean"], 0.9 * start["1.running_mean"] + 0.1 * mean
    )
    torch.testing.assert_close(
        run.tensors["1.running_var"], 0.9 * start["1.running_var"] + 0.1 * var * 10 / 9
    )
