"""SCAFFOLD against a slow reference with its own variates; what it is without them;
what it refuses.
"""

from __future__ import annotations

import copy
import dataclasses
import functools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedbn_flwr.client.hooks import Hooks
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.runs.inspection import inspect_model
from fedbn_flwr.messages.records import from_record, tensors
from fedbn_flwr.server.methods.method import Replies
from fedbn_flwr.strategies import FedAvg, Scaffold
from fedbn_flwr.strategies.scaffold import (
    VARIATES,
    ControlVariates,
    ScaffoldMethod,
    Variates,
)

SIZES = (6, 14, 10, 8)
SERVER_RATE, ROUNDS = 0.7, 5


def local(model, data, rate: float, correction: dict) -> int:
    """Plain full passes in order, every gradient corrected; returns the steps."""
    steps = 0
    for inputs, targets in zip(
        data.inputs.split(4), data.targets.split(4), strict=True
    ):
        loss = F.cross_entropy(model(inputs), targets)
        names, parameters = zip(*model.named_parameters(), strict=True)
        for name, p, g in zip(
            names, parameters, torch.autograd.grad(loss, parameters), strict=True
        ):
            p.data -= rate * (g + correction[name])
        steps += 1
    return steps


class TiedNet(nn.Sequential):
    """An encoder and a decoder with one weight, as language models have it, and BN:
    names 0.weight and 3.weight.
    """

    def __init__(self) -> None:
        layers = (
            nn.Linear(5, 5),
            nn.BatchNorm1d(5),
            nn.ReLU(),
            nn.Linear(5, 5),
            nn.ReLU(),
            nn.Linear(5, 3),
        )
        super().__init__(*layers)
        self[3].weight = self[0].weight


class ComplexLinear(nn.Module):
    """A layer with complex weights, as in a Fourier layer; its output is real."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5, dtype=torch.cdouble))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs.to(torch.cdouble) @ self.weight).abs()


@pytest.fixture
def complex_net() -> functools.partial:
    """A model with complex weights before BN, the same every time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = ComplexLinear(), nn.BatchNorm1d(5), nn.Linear(5, 3)
        return functools.partial(copy.deepcopy, nn.Sequential(*layers).double())


@pytest.fixture
def tied() -> functools.partial:
    """A model with tied weights, float64, the same every time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return functools.partial(copy.deepcopy, TiedNet().double())


@pytest.fixture(params=["mlp", "tied", "complex_net", "torchvision_net"])
def subject(request, points) -> tuple:
    """Three own models, one of torchvision's; data of four clients of uneven sizes; a
    rate that keeps it in hand.
    """
    shape, sizes, rate = {
        "mlp": ((5,), (6, 14, 10, 8), 0.1),
        "tied": ((5,), (6, 14, 10, 8), 0.1),
        "complex_net": ((5,), (6, 14, 10, 8), 0.1),
        "torchvision_net": ((3, 40, 40), (8, 16, 12, 8), 1e-3),
    }[request.param]
    return (
        request.getfixturevalue(request.param),
        [points(n, i, shape) for i, n in enumerate(sizes)],
        rate,
    )


def test_scaffold_equals_a_slow_reference(federate, subject, monkeypatch) -> None:
    """Five rounds, half of the clients a round, uneven steps: server and client
    variates, model and statistics.
    """
    make, datasets, rate = subject
    monkeypatch.setattr(torch, "randperm", lambda n, generator=None: torch.arange(n))
    strategy = Scaffold(
        fraction_train=0.5, min_train_nodes=2, server_learning_rate=SERVER_RATE, seed=3
    )
    run = federate(strategy, make, datasets, rounds=ROUNDS, rate=rate, batch_size=4)
    chosen = [report.participants for report in strategy.reports]
    assert len({tuple(c) for c in chosen}) > 1
    assert all(len(c) == 2 for c in chosen)

    reference = make()
    names = [name for name, _ in reference.named_parameters()]
    c = {name: torch.zeros_like(p) for name, p in reference.named_parameters()}
    own = [{name: v.clone() for name, v in c.items()} for _ in datasets]
    for round_ in chosen:
        x = {name: value.clone() for name, value in reference.state_dict().items()}
        total = sum(len(datasets[i]) for i in round_)
        moved = {name: torch.zeros_like(c[name]) for name in names}
        change = {name: torch.zeros_like(c[name]) for name in names}
        averaged = {
            name: torch.zeros_like(v) for name, v in x.items() if "running" in name
        }
        for i in round_:
            # the client half: corrected steps from x to y
            client = copy.deepcopy(reference).train()
            correction = {name: c[name] - own[i][name] for name in names}
            steps = local(client, datasets[i], rate, correction)
            y = client.state_dict()
            for name in names:
                # option II of the paper: c_i+ = c_i - c + (x - y) / (K eta)
                new = own[i][name] - c[name] + (x[name] - y[name]) / (steps * rate)
                change[name] += (new - own[i][name]) / len(round_)
                moved[name] += (y[name] - x[name]) / len(round_)
                own[i][name] = new
            for name in averaged:
                averaged[name] += len(datasets[i]) / total * y[name]
        # the server half: variates and parameters by plain means, BN by |D_i|
        for name in names:
            c[name] += len(round_) / len(datasets) * change[name]
        with torch.no_grad():  # by parameter, not by name: a tied one has two names
            for name, parameter in reference.named_parameters():
                parameter += SERVER_RATE * moved[name]
            for name, buffer in reference.named_buffers():
                buffer.copy_(averaged.get(name, buffer))

    got = tensors(run.state)
    for name, want in reference.state_dict().items():
        if want.is_floating_point() or want.is_complex():
            torch.testing.assert_close(
                got[name], want, rtol=1e-10, atol=1e-12, msg=name
            )
    for name in names:
        np.testing.assert_allclose(
            strategy.state.variates[name], c[name].numpy(), rtol=1e-9, atol=1e-12
        )
    for i, variate in enumerate(own):
        state = run.context(i).state
        if any(i in c for c in chosen):
            kept = from_record(state.array_records["fedbn-flwr.rules"])
            for name in names:
                np.testing.assert_allclose(
                    kept[f"ControlVariates/{name}"],
                    variate[name].numpy(),
                    rtol=1e-9,
                    atol=1e-12,
                )
        else:
            assert "fedbn-flwr.rules" not in state


def test_variates_use_the_rate_of_each_step_and_group(mlp, points) -> None:
    """c_i+ is the mean of the client's own gradients over its steps, each weighted by
    the rate of that step.
    """
    model, data = mlp(), points(20, 1)
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    server = {name: torch.full_like(p, 0.3) for name, p in zeros.items()}
    own = {name: torch.full_like(p, -0.2) for name, p in zeros.items()}
    groups = [
        {"params": model[0].parameters(), "lr": 0.05},
        {"params": [*model[1].parameters()]},
    ]
    # 3.bias takes no step
    optimizer = torch.optim.SGD(
        [*groups, {"params": [model[3].weight], "lr": 0.5}], 0.005
    )
    scheduler = torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda epoch: 0.44)
    hook = ControlVariates()
    hook.receive({"variates": server}, own)
    rules = Hooks(model, {"variates": hook})
    hook.begin(model)
    rules.wrap(optimizer)
    weighted = {name: v.clone() for name, v in zeros.items()}
    rates = dict.fromkeys(zeros, 0.0)
    for inputs, targets in zip(
        data.inputs.split(4), data.targets.split(4), strict=True
    ):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        for name, p in model.named_parameters():
            for group in optimizer.param_groups:
                if any(p is q for q in group["params"]):
                    weighted[name] += group["lr"] * p.grad
                    rates[name] += group["lr"]
        optimizer.step()
        scheduler.step()
    hook.end(model)
    assert rates.pop("3.bias") == 0
    for name, rate in rates.items():
        torch.testing.assert_close(
            hook.keep()[name], weighted[name] / rate, rtol=1e-9, atol=1e-12, msg=name
        )
    assert torch.equal(hook.keep()["3.bias"], own["3.bias"]), (
        "without a step nothing is known of its gradient"
    )
    assert torch.equal(hook.reply()["variates"]["3.bias"], zeros["3.bias"])


def corrected(
    model: nn.Module, data, optimizer, unfreeze: bool = True
) -> tuple[ControlVariates, dict]:
    """Three steps; layer 0 trains from the second. Returns the hook, and the sums of
    the corrected gradients.
    """
    hook, parameters = ControlVariates(), dict(model.named_parameters())
    server = {name: torch.full_like(p, 0.3) for name, p in parameters.items()}
    hook.receive(
        {"variates": server}, {name: 0 * c - 0.2 for name, c in server.items()}
    )
    rules, seen = (
        Hooks(model, {"variates": hook}),
        {name: torch.zeros_like(p) for name, p in parameters.items()},
    )
    model[0].requires_grad_(False)
    rules.wrap(optimizer)
    for step in range(3):
        model[0].requires_grad_(unfreeze and step > 0)
        model.zero_grad()
        F.cross_entropy(model(data.inputs), data.targets).backward()
        plain = {
            name: p.grad.clone() for name, p in parameters.items() if p.grad is not None
        }
        optimizer.step()
        for name, gradient in plain.items():
            torch.testing.assert_close(parameters[name].grad, gradient + 0.5, msg=name)
            seen[name] += parameters[name].grad
    hook.end(model)
    return hook, seen


@pytest.mark.parametrize("unfreeze", [True, False])
def test_a_layer_that_begins_to_train_in_the_round_is_corrected_from_then_on(
    mlp, points, unfreeze: bool
) -> None:
    model = mlp()
    hook, seen = corrected(
        model, points(8, 1), torch.optim.SGD(model.parameters(), 0.1), unfreeze=unfreeze
    )
    sent, layer = hook.reply()["variates"], {"0.weight", "0.bias"}
    assert (
        sent.keys()
        == hook.keep().keys()
        == {name for name in seen if unfreeze or name not in layer}
    )
    # y = x - sum of rate * gradient, so dc_i = -c + the gradients' mean
    for name, change in sent.items():
        torch.testing.assert_close(
            change, seen[name] / (2 if name in layer else 3) - 0.3, msg=name
        )


@pytest.mark.parametrize("wrong", [{"momentum": 0.5}, {"maximize": True}])
def test_an_optimizer_with_one_group_that_is_not_plain_sgd_is_refused(
    mlp, wrong
) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters()}, {"params": model[3].parameters(), **wrong}],
        0.1,
    )
    (name,) = wrong
    with pytest.raises(
        ConfigError, match=f"scaffold corrects plain SGD: .*{name}=.* must be"
    ):
        ControlVariates().start(model, optimizer)


@pytest.mark.parametrize("name", ["mlp", "tied"])
def test_variates_are_counted_and_carry_no_statistics(
    federate, datasets, name: str, request
) -> None:
    model = request.getfixturevalue(name)
    run = federate(Scaffold(), model, datasets, rounds=2)
    sent = [
        from_record(m.content.array_records["variates"])
        for m in run.grid.received
        if m.has_content() and "variates" in m.content.array_records
    ]
    parameters = dict(model().named_parameters(remove_duplicate=False))
    assert sent
    assert all(list(variates) == list(parameters) for variates in sent)
    size = sum(p.numel() * 8 for p in parameters.values())
    floats = sum(v.nbytes for v in run.state.values() if v.dtype.kind == "f")
    first, second = (report.train for report in run.strategy.reports)
    assert (first.down, first.up) == (floats, len(datasets) * (floats + size))
    assert (second.down, second.up) == (floats + size, len(datasets) * (floats + size))
    predicted = inspect_model(model(), "scaffold", len(datasets))
    assert [predicted.first, predicted.later] == [first, second]


def test_extra_records_of_tied_weights_have_all_names_as_the_model(
    federate, datasets, tied
) -> None:
    """Momentum, too: what inspect predicts is what travels."""
    run = federate(
        FedAvg(momentum_scope="global"), tied, datasets, rounds=2, sgd_momentum=0.9
    )
    config = Config.make({"sgd-momentum": 0.9, "momentum-scope": "global"})
    predicted = inspect_model(tied(), "fedavg", len(datasets), config)
    assert [predicted.first, predicted.later] == [
        report.train for report in run.strategy.reports
    ]
    momentum = run.strategy.run.states["momentum-scope"].momentum
    assert np.array_equal(momentum["0.weight"], momentum["3.weight"])


def test_an_entry_that_a_client_does_not_train_has_a_change_of_zero(
    federate, datasets, mlp, same_bits
) -> None:
    """Whichever client it is: the first one has no say in which entries have variates."""
    strategy, seen = Scaffold(), []
    strategy.on_replies = lambda *found: seen.append(found)
    federate(strategy, mlp, datasets, rounds=1)
    _, replies, before, _ = seen[0]
    for at in (0, 2):
        sent = replies[at].extras[VARIATES]
        frozen = {name for name in sent if name.startswith("0.")}
        ends = []
        for change in (
            {name: array for name, array in sent.items() if name not in frozen},
            {name: array * (name not in frozen) for name, array in sent.items()},
        ):
            changed = [
                *replies[:at],
                dataclasses.replace(replies[at], extras={VARIATES: change}),
                *replies[at + 1 :],
            ]
            method, facts = ScaffoldMethod(strategy.params), strategy.run.facts(2)
            model, state = method.aggregate(
                Variates(), facts, Replies(changed), dict(before)
            )
            ends.append((model, state.variates))
        for ours, theirs in zip(*ends, strict=True):
            same_bits({name: ours[name] for name in theirs}, theirs)
