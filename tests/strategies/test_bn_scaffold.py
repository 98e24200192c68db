"""BN-SCAFFOLD's forward law, and its equality to SCAFFOLD for equal variates."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedbn_flwr.batchnorm.reestimation import moments_of, reestimate_statistics
from fedbn_flwr.client import TorchClient
from fedbn_flwr.messages.records import from_record, tensors, to_record
from fedbn_flwr.strategies import BNScaffold, Scaffold
from fedbn_flwr.strategies.bn_scaffold import _track
from tests.support.bad_replies import spoiling
from tests.support.points import Points

SIZES = (6, 14, 10, 8)

SHARE = "variance-floor-share"
FULL = {"batch_size": 0, "local_steps": 1}


def network() -> nn.Module:
    """Return a network with two BN layers."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Conv2d(2, 4, 2), nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 3, 2)]
        return nn.Sequential(*layers, nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 3))


@pytest.mark.parametrize("clients", [1, 2])
def test_with_equal_variates_it_is_scaffold_bit_for_bit_unless_a_variance_is_at_the_floor(
    federate, points, mlp, same_bits, clients: int
) -> None:
    """One client, or two clients with equal data, have the server's variates."""
    data = [points(10, 0)] * clients
    alone = {"min_train_nodes": 1, "min_evaluate_nodes": 1, "min_available_nodes": 1}
    plain = federate(Scaffold(**alone), mlp, data, rounds=4, **FULL)
    for floor, differs in ((1e-6, False), (1.0, True)):
        strategy = BNScaffold(**alone, variance_floor=floor)
        run = federate(strategy, mlp, data, rounds=4, **FULL)
        share = strategy.reports[-1].metrics[SHARE]
        assert (0 < share < 1) == differs == bool(share)
        if not differs:
            same_bits(run.state, plain.state)
    assert (run.state["0.weight"] != plain.state["0.weight"]).any()


@pytest.mark.parametrize("counter", [True, False])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_corrected_step_tracks_statistics_as_torch_does_with_and_without_a_counter(
    momentum, counter: bool
) -> None:
    """Without a counter, only an uncorrected step once moved the statistics."""
    ours = nn.BatchNorm1d(5, momentum=momentum).double()
    torchs = nn.BatchNorm1d(5, momentum=momentum).double()
    for layer in (ours, torchs) if not counter else ():
        layer.num_batches_tracked = None
    for seed in range(3):
        x = torch.randn(7, 5, generator=torch.Generator().manual_seed(seed)).double()
        torchs(x)
        _track(ours, x.mean(0), x.var(0, correction=0), 7)
        torch.testing.assert_close(ours.running_mean, torchs.running_mean)
        torch.testing.assert_close(ours.running_var, torchs.running_var)
    assert (
        ours.num_batches_tracked
        == torchs.num_batches_tracked
        == (3 if counter else None)
    )


UNEVEN = (5, 12, 8)


def test_under_fixed_weights_layer_l_has_the_unions_statistics_from_round_l_plus_one_on(
    federate, points
) -> None:
    """The moments measured in a round become (u, s) of the next round.

    After as many rounds as there are layers, the forward pass equals the centralized
    pass.
    """
    data = [points(n, i, (2, 4, 4)) for i, n in enumerate(UNEVEN)]
    inputs, targets = (
        torch.cat([getattr(one, leaf) for one in data])
        for leaf in ("inputs", "targets")
    )
    union = Points(inputs, targets)
    wanted = reestimate_statistics(network().double(), union, batch_size=0)
    run = federate(
        BNScaffold(variance="pooled", variance_floor=1e-9, fraction_evaluate=0.0),
        lambda: network().double(),
        data,
        rounds=len(wanted) + 2,
        rate=1e-300,
        **FULL,
    )
    apart: dict[str, list[float]] = {path: [] for path in wanted}
    for message in run.grid.sent[:: len(data)]:
        if message.content.array_records.get("bn-variates"):
            sent = tensors(from_record(message.content["bn-variates"]))
            for path, layer in wanted.items():
                mean, var = sent[f"{path}.mean"], sent[f"{path}.var"]
                off = [mean - layer.mean, var - layer.m2 / layer.count]
                apart[path].append(float(torch.stack(off).abs().max()))
    for at, found in enumerate(apart.values()):
        assert len(found) == len(wanted) + 1
        assert max(found[at:]) < 1e-12
    assert found[0] > 1e-2, "one exchange is not enough"


def test_under_bfloat16_autocast_the_variates_are_those_of_float32(
    federate, points
) -> None:
    """Only the inputs are rounded to bfloat16."""
    datasets = [points(8, i, (2, 4, 4)) for i in range(2)]
    datasets = [type(data)(data.inputs.float(), data.targets) for data in datasets]
    seen: dict[int, dict[str, list[Tensor]]] = {}

    class Watched(TorchClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            mine = seen[self.partition_id] = {"1": [], "4": []}
            for path, values in mine.items():
                layer: Any = self.model[int(path)]
                layer.register_forward_pre_hook(
                    lambda _, args, values=values: values.append(args[0].detach())
                )
            return super().fit(parameters, config)

    run = federate(
        BNScaffold(),
        network,
        datasets,
        rounds=3,
        amp=True,
        client=Watched,
    )
    for i, layers in seen.items():
        kept = from_record(run.context(i).state.array_records["fedbn-flwr.rules"])
        for path, batches in layers.items():
            assert {batch.dtype for batch in batches} == {torch.bfloat16}
            want = moments_of(torch.cat(batches))
            for leaf in ("mean", "m2"):
                found = kept[f"bn-variates/bn-variates/{path}.{leaf}"]
                np.testing.assert_allclose(
                    found, getattr(want, leaf).numpy(), rtol=1e-5, atol=1e-6
                )
    assert all(report.rejected == {} for report in run.strategy.reports)
    records = [
        m.content.array_records["bn-variates"]
        for m in run.grid.sent
        if "bn-variates" in m.content
    ]
    assert {
        entry.dtype for record in records for entry in from_record(record).values()
    } == {np.dtype(np.float32)}
    assert all(torch.isfinite(entry).all() for entry in tensors(run.state).values())


def test_a_reply_without_variates_names_the_hook_that_sends_them(
    federate, points, mlp
) -> None:
    def spoil(content: Any) -> None:
        content["variates"] = to_record({})

    data, app = [points(8, i) for i in range(2)], functools.partial(spoiling, spoil)
    run = federate(BNScaffold(), mlp, data, rounds=1, wrap=app)
    assert run.reason(1).endswith(
        "the client's training must apply the client hook 'bn-variates'"
    )
