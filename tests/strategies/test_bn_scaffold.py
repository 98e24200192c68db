"""BN-SCAFFOLD: when it is SCAFFOLD, and its forward law."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.batchnorm.averaging import Variance
from fedbn_flwr.batchnorm.reestimation import Moments, mixture, moments_of
from fedbn_flwr.client import TorchClient
from fedbn_flwr.messages.records import from_record, tensors, to_record
from fedbn_flwr.strategies import BNScaffold, Scaffold
from fedbn_flwr.strategies.bn_scaffold import BNControlVariates, _track
from tests.support.bad_replies import spoiling

SIZES = (6, 14, 10, 8)

ROUNDS, FLOOR = 4, 0.7
SHARE = "variance-floor-share"


SHAPES = {"1d": (5,), "2d": (2, 4, 4), "3d": (2, 3, 3, 3)}


def network(kind: str) -> nn.Module:
    """Two BN layers of a kind, float64; the 3d ones without gamma and beta, the 1d ones
    with a cumulative average.
    """
    conv: Any
    norm: Any
    if kind == "1d":
        conv, norm = nn.Linear, functools.partial(nn.BatchNorm1d, momentum=None)
        first, features = 5, 3
    elif kind == "2d":
        conv, norm = functools.partial(nn.Conv2d, kernel_size=2), nn.BatchNorm2d
        first, features = 2, 12
    else:
        conv = functools.partial(nn.Conv3d, kernel_size=2)
        norm = functools.partial(nn.BatchNorm3d, affine=False)
        first, features = 2, 3
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [
            conv(first, 4),
            norm(4),
            nn.Tanh(),
            conv(4, 3),
            norm(3),
            nn.Flatten(),
            nn.Linear(features, 3),
        ]
        return nn.Sequential(*layers).double()


@pytest.mark.parametrize(
    ("clients", "net"), [(1, "mlp"), (2, "mlp"), (2, "torchvision_net")]
)
def test_with_equal_variates_it_is_scaffold_bit_for_bit_unless_a_variance_is_at_the_floor(
    federate, points, same_bits, request, monkeypatch, clients: int, net: str
) -> None:
    """One client, or two with the same data: their variates are the server's."""
    monkeypatch.setattr(torch, "randperm", lambda n, generator=None: torch.arange(n))
    make, shape = request.getfixturevalue(net), (5,) if net == "mlp" else (3, 20, 20)
    data = [points(10, 0, shape)] * clients
    settings = (
        {"rounds": 4}
        if net == "mlp"
        else {"rounds": 2, "rate": 1e-2, "batch_size": 0, "local_steps": 2}
    )
    alone = dict.fromkeys(
        ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes"), 1
    )
    both = BNScaffold(**alone, variance_floor=1e-6), Scaffold(**alone)
    ours, plain = (federate(strategy, make, data, **settings) for strategy in both)
    assert both[0].reports[-1].metrics[SHARE] == 0
    same_bits(ours.state, plain.state)
    strategy = BNScaffold(**alone, variance_floor=1.0)
    floored = federate(strategy, make, data, **settings)
    first = next(name for name, _ in make().named_parameters())
    assert (floored.state[first] != plain.state[first]).any()
    assert 0 < strategy.reports[-1].metrics[SHARE] < 1


@pytest.mark.parametrize("counter", [True, False])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_corrected_step_tracks_statistics_as_torch_does_with_and_without_a_counter(
    momentum, counter: bool
) -> None:
    """Without a counter a corrected step left the statistics as they were, and an
    uncorrected one moved them.
    """
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


def frozen_rounds(
    model: nn.Module, data: Sequence[Tensor], count: int, variance: Variance = "pooled"
) -> tuple[list[BNControlVariates], list[dict[str, Tensor]]]:
    """The rule alone under fixed weights and full batches, ``count`` rounds.

    Returns:
        The hooks for the next round, and for each round the outputs of each BN layer
        for all clients together.
    """
    paths = [
        path for path, layer in model.named_modules() if isinstance(layer, _BatchNorm)
    ]
    kept: list[dict[str, Tensor]] = [{} for _ in data]
    outputs: list[dict[str, Tensor]] = []

    def next_hooks() -> list[BNControlVariates]:
        common: dict[str, Tensor] = {}
        for path in paths if any(kept) else ():
            clients = [moments(own, path) for own in kept]
            u, s = mixture(clients, [len(x) for x in data], spread=variance == "pooled")
            common |= {f"{path}.mean": u, f"{path}.var": s}
        hooks = [BNControlVariates(floor=1e-9) for _ in data]
        for hook, own in zip(hooks, kept, strict=True):
            hook.receive({"bn-variates": common}, own)
        return hooks

    for number in range(count):
        seen = {path: [] for path in paths}
        shares = []
        for at, (hook, x) in enumerate(zip(next_hooks(), data, strict=True)):
            hook.begin(model)
            with noted(model, seen), torch.no_grad():
                model.train()(x)
            shares.append(hook.end(model)[SHARE])
            kept[at] = dict(hook.keep())
        outputs.append({path: torch.cat(parts) for path, parts in seen.items()})
        assert number < len(paths) or not any(shares), (
            "in the end no variance is at the floor"
        )
    return next_hooks(), outputs


@contextmanager
def noted(model: nn.Module, seen: dict[str, list[Tensor]]) -> Iterator[None]:
    """Note the outputs of the layers at these paths."""

    def note(path: str, _: nn.Module, args: Any, out: Tensor) -> None:
        seen[path].append(out.detach())

    marks = [
        model.get_submodule(path).register_forward_hook(functools.partial(note, path))
        for path in seen
    ]
    yield
    for mark in marks:
        mark.remove()


def moments(entries: dict[str, Tensor], path: str) -> Moments:
    count = entries[f"bn-variates/{path}.count"]
    mean = entries[f"bn-variates/{path}.mean"]
    m2 = entries[f"bn-variates/{path}.m2"]
    return Moments(int(count), mean, m2)


@pytest.fixture
def union(torchvision_net, points) -> tuple[nn.Module, list[Any], dict[str, Tensor]]:
    """A torchvision model, uneven clients, and the output of each BN layer for all
    examples in one batch.
    """
    model, data = (
        torchvision_net(),
        [points(n, i, (3, 20, 20)) for i, n in enumerate(UNEVEN)],
    )
    whole = {
        path: []
        for path, layer in model.named_modules()
        if isinstance(layer, _BatchNorm)
    }
    with noted(model, whole), torch.no_grad():
        copy.deepcopy(model).train()(torch.cat([x.inputs for x in data]))
    return model, data, {path: parts[0] for path, parts in whole.items()}


def apart(found: Tensor, want: Tensor) -> float:
    return float((found - want).abs().max())


def test_under_fixed_weights_layer_l_has_the_statistics_of_the_union_from_round_l_plus_one_on(
    union,
) -> None:
    """So after as many rounds as layers the forward pass is the centralized one; with
    variance=mean it never is.
    """
    model, data, whole = union
    rounds = len(whole) + 2
    _, outputs = frozen_rounds(model, [x.inputs for x in data], rounds)
    for at, (path, want) in enumerate(whole.items()):
        for number in range(at + 1, rounds):  # rounds count from 0 here
            assert apart(outputs[number][path], want) < 1e-12, (path, number)
        assert apart(outputs[0][path], want) > 1e-2
    last = list(whole)[-1]
    assert apart(outputs[1][last], whole[last]) > 1e-2, "one exchange is not enough"
    _, without = frozen_rounds(model, [x.inputs for x in data], 3, "mean")
    for found in without:
        assert apart(found[next(iter(whole))], whole[next(iter(whole))]) > 1e-2
        assert apart(found[last], whole[last]) > 1e-2


def test_under_bfloat16_autocast_the_variates_are_those_of_float32(
    federate, points
) -> None:
    """Of inputs that are rounded to bfloat16, and of nothing else."""
    datasets = [points(8, i, SHAPES["2d"]) for i in range(2)]
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
        lambda: network("2d").float(),
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
                found = kept[f"BNControlVariates/bn-variates/{path}.{leaf}"]
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
