"""BN-SCAFFOLD against a slow reference; where it is SCAFFOLD; its forward law, and that
it has none for gradients.
"""

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
from torch.nn import functional as F
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


class Reference:
    """A client's BN layers written out; ``notes``: their inputs, a row a value."""

    def __init__(
        self,
        model: nn.Module,
        common: dict[str, Any],
        own: dict[str, Any],
        floor: float,
    ) -> None:
        self.notes: dict[str, list[Tensor]] = {}
        self.low = self.seen = 0
        for path, layer in model.named_modules():
            if isinstance(layer, _BatchNorm):
                # without variates of its own a client trains as in FedAvg
                pairs = None
                if path in common and path in own:
                    pairs = (common[path], own[path])
                layer.forward = functools.partial(
                    self.normalise, path, layer, pairs, floor
                )  # type: ignore[method-assign]

    def normalise(
        self, path: str, layer: _BatchNorm, pairs: Any, floor: float, x: Tensor
    ) -> Tensor:
        rows = x.movedim(1, -1).reshape(-1, x.shape[1])
        self.notes.setdefault(path, []).append(rows.detach())
        mean, var = rows.mean(0), rows.var(0, correction=0)
        if pairs:
            (u, s), (u_i, s_i) = pairs
            mean, var = mean - u_i + u, var - s_i + s
            self.low += int((var < floor * s).sum())
            self.seen += len(s)
            var = torch.where(var < floor * s, floor * s, var)
        with torch.no_grad():
            layer.num_batches_tracked += 1
            share = layer.momentum
            if share is None:  # a cumulative average
                share = 1 / int(layer.num_batches_tracked)
            unbiased = var * len(rows) / (len(rows) - 1)
            layer.running_mean += share * (mean - layer.running_mean)
            layer.running_var += share * (unbiased - layer.running_var)
        out = (rows - mean) / (var + layer.eps).sqrt()
        if layer.weight is not None:
            out = out * layer.weight + layer.bias
        return out.reshape(x.movedim(1, -1).shape).movedim(-1, 1)

    def variates(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Mean and biased variance of all inputs of each layer."""
        whole = {path: torch.cat(rows) for path, rows in self.notes.items()}
        return {
            path: (rows.mean(0), rows.var(0, correction=0))
            for path, rows in whole.items()
        }


def steps(
    model: nn.Module, data: Any, rate: float, correction: dict[str, Tensor]
) -> int:
    """Plain full passes in order, every gradient corrected; the number of steps."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    count = 0
    for inputs, targets in zip(
        data.inputs.split(4), data.targets.split(4), strict=True
    ):
        grads = torch.autograd.grad(F.cross_entropy(model(inputs), targets), parameters)
        for name, p, g in zip(names, parameters, grads, strict=True):
            p.data -= rate * (g + correction[name])
        count += 1
    return count


@pytest.mark.parametrize("kind", ["1d", "3d", "torchvision"])
def test_it_equals_a_slow_reference(
    federate, points, torchvision_net, monkeypatch, kind: str
) -> None:
    """Half of the clients a round, uneven sizes and steps, channels at the floor."""
    monkeypatch.setattr(torch, "randperm", lambda n, generator=None: torch.arange(n))
    make = (
        torchvision_net if kind == "torchvision" else functools.partial(network, kind)
    )
    shape, rate = ((3, 20, 20), 1e-3) if kind == "torchvision" else (SHAPES[kind], 0.1)
    datasets = [points(n, i, shape) for i, n in enumerate(SIZES)]
    strategy = BNScaffold(
        fraction_train=0.5, min_train_nodes=2, variance_floor=FLOOR, seed=3
    )
    rounds = 3 if kind == "torchvision" else ROUNDS
    run = federate(strategy, make, datasets, rounds=rounds, rate=rate, batch_size=4)
    assert len({tuple(report.participants) for report in strategy.reports}) > 1

    model, low = make(), 0
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    c, own = dict(zeros), [dict(zeros) for _ in datasets]
    latest: dict[int, dict[str, tuple[Tensor, Tensor]]] = {}
    for report in strategy.reports:
        # the common moments u, s of each layer: all latest ones, pooled by size
        total, common = sum(SIZES[i] for i in latest), {}
        for path in next(iter(latest.values()), {}):
            u = sum(SIZES[i] / total * mine[path][0] for i, mine in latest.items())
            s = 0
            for i, mine in latest.items():
                mean, var = mine[path]
                s = s + SIZES[i] / total * (var + (mean - u) ** 2)
            common[path] = (u, s)
        # the clients: corrected steps through corrected BN layers
        x, before, ends, shares = copy.deepcopy(model.state_dict()), list(own), [], []
        for i in report.participants:
            client = copy.deepcopy(model).train()
            bn = Reference(client, common, latest.get(i, {}), FLOOR)
            correction = {name: c[name] - own[i][name] for name in zeros}
            count = steps(client, datasets[i], rate, correction)
            y = client.state_dict()
            ends.append(y)
            own[i] = {
                name: own[i][name] - c[name] + (x[name] - y[name]) / (count * rate)
                for name in zeros
            }
            shares.append(bn.low / max(bn.seen, 1))
            latest[i] = bn.variates()
            low += bn.low
        sizes = [SIZES[i] for i in report.participants]
        weights = [size / sum(sizes) for size in sizes]
        assert report.metrics[SHARE] == pytest.approx(
            sum(w * s for w, s in zip(weights, shares, strict=True))
        )
        # the server: c moves by the changes of all four, which are 0 for the absent
        for name in zeros:
            changes = [own[i][name] - before[i][name] for i in report.participants]
            c[name] = c[name] + sum(changes) / 4
        for name, entry in model.state_dict().items():
            if entry.is_floating_point():
                by = [1 / len(ends)] * len(ends) if name in zeros else weights
                entry.copy_(sum(w * end[name] for w, end in zip(by, ends, strict=True)))
            else:
                entry.copy_(torch.as_tensor(run.history[report.server_round][name]))
    got = tensors(run.state)
    for name, want in model.state_dict().items():
        if want.is_floating_point():
            torch.testing.assert_close(got[name], want, rtol=1e-8, atol=1e-10, msg=name)
    assert low > 0, "the floor was reached"


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


def test_the_mean_gradient_is_not_the_centralized_one(union) -> None:
    """Where the forward pass is the centralized one, each client still has its own
    gradients through it.
    """
    model, data, whole = union
    hooks, _ = frozen_rounds(model, [x.inputs for x in data], len(whole) + 1)
    parameters, total = list(model.parameters()), sum(UNEVEN)

    def gradients(inputs: Tensor, targets: Tensor) -> tuple[Tensor, list[Tensor]]:
        out = model.train()(inputs)
        return out.detach(), list(
            torch.autograd.grad(F.cross_entropy(out, targets), parameters)
        )

    outs, sums = [], [torch.zeros_like(p) for p in parameters]
    for hook, x in zip(hooks, data, strict=True):
        hook.begin(model)
        out, grads = gradients(x.inputs, x.targets)
        hook.end(model)
        outs.append(out)
        sums = [g + len(x) / total * own for g, own in zip(sums, grads, strict=True)]
    out, want = gradients(
        torch.cat([x.inputs for x in data]), torch.cat([x.targets for x in data])
    )
    torch.testing.assert_close(torch.cat(outs), out, rtol=1e-9, atol=1e-10)
    distance = max(
        apart(g, w) / float(w.abs().max())
        for g, w in zip(sums, want, strict=True)
        if w.abs().max() > 1e-8
    )
    assert distance > 0.05


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
