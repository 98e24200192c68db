"""FBN: frozen BN with statistics that move, against centralized steps and passes over
the union, in float64.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from fedbn_flwr.batchnorm.reestimation import Moments, moments_of, pool
from fedbn_flwr.client import TorchClient
from fedbn_flwr.errors import DivergedError
from fedbn_flwr.messages.records import tensors, to_record
from fedbn_flwr.server.methods.method import RunSettings
from fedbn_flwr.strategies import FBN, HBN, FedAvg, FixBN
from fedbn_flwr.strategies.fbn import GlobalStatistics, Pooled, trimmed
from tests.support.bad_replies import spoiling

SIZES = (6, 13, 9)
RATE = 0.01


def loaded(make: Any, state: Mapping[str, Any]) -> nn.Module:
    model = make()
    model.load_state_dict(
        tensors({name: np.asarray(value) for name, value in state.items()})
    )
    return model


def union(datasets: list) -> tuple[Tensor, Tensor]:
    inputs = torch.cat([data.inputs for data in datasets])
    return inputs, torch.cat([data.targets for data in datasets])


def inputs_of_layers(model: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    """The input (values, C) of each BN layer in a pass, by path."""
    seen: dict[str, Tensor] = {}
    for path, layer in model.named_modules():
        if isinstance(layer, _BatchNorm):

            def note(_: Any, args: Any, path: str = path) -> None:
                seen[path] = args[0].detach().movedim(1, -1).flatten(0, -2)

            layer.register_forward_pre_hook(note)
    with torch.no_grad():
        model(inputs)
    return seen


def step(model: nn.Module, datasets: list) -> Mapping[str, Tensor]:
    """One plain centralized step on the union, in the model's present modes."""
    inputs, targets = union(datasets)
    F.cross_entropy(model(inputs), targets).backward()
    torch.optim.SGD(model.parameters(), RATE).step()
    return model.state_dict()


def narrow_densenet() -> nn.Module:
    """A narrow DenseNet of torchvision for 3 classes, in float64, always the same."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torchvision.models.DenseNet(8, (2, 2, 2), 8, num_classes=3).double()


@pytest.mark.parametrize(
    ("measure", "momentum", "net"),
    [
        ("steps", 1.0, "shufflenet"),
        ("steps", 0.3, "densenet"),
        ("pass", 0.3, "shufflenet"),
    ],
)
def test_a_round_of_one_step_is_a_centralized_step_with_frozen_bn(
    federate, points, torchvision_net, measure: str, momentum: float, net: str
) -> None:
    """And the new statistics are the union's: by steps at every layer, by a pass at the
    first. It is not BN's step.
    """
    if net == "densenet":
        torchvision_net = narrow_densenet
    datasets = [points(n, i, (3, 40, 40)) for i, n in enumerate(SIZES)]
    strategy = FBN(fbn_measure=measure, statistics_momentum=momentum)
    run = federate(
        strategy, torchvision_net, datasets, rate=RATE, batch_size=0, local_steps=1
    )
    assert [report.phase for report in strategy.reports] == [
        "warm-up",
        "train",
        "train",
    ]
    parameters = dict(torchvision_net().named_parameters())
    for server_round in (2, 3):
        before = run.history[server_round - 1]
        after = run.history[server_round]
        frozen = step(loaded(torchvision_net, before).eval(), datasets)
        batchnorm = step(loaded(torchvision_net, before).train(), datasets)
        off = [abs(after[name] - frozen[name].numpy()).max() for name in parameters]
        assert max(off) < 1e-14
        other = [
            abs(after[name] - batchnorm[name].numpy()).max() for name in parameters
        ]
        assert max(other) > 1e-3, "not a step of BN"
        # mean and variance of each layer, in the order of the layers
        model = loaded(torchvision_net, before).train(measure == "pass")
        wrong = []
        for path, values in inputs_of_layers(model, union(datasets)[0]).items():
            moments = {"running_mean": values.mean(0), "running_var": values.var(0)}
            for leaf, new in moments.items():
                name = f"{path}.{leaf}"
                want = (1 - momentum) * before[name] + momentum * new.numpy()
                wrong.append(abs(after[name] - want).max())
        if measure == "steps":
            assert max(wrong) < 1e-13
        else:
            # A pass normalises by each client's own batches: from the second layer on
            # its inputs are not the union's.
            assert max(wrong[:2]) < 1e-13
            assert min(wrong[2:4]) > 1e-4


@pytest.mark.parametrize("measure", ["steps", "pass"])
def test_the_warm_up_is_fedavg_and_without_momentum_it_is_fixbn_from_then_on(
    federate, datasets, mlp, same_bits, measure: str
) -> None:
    settings = {"rate": RATE, "local_steps": 1, "batch_size": 0}
    run = federate(
        FBN(fbn_measure=measure, statistics_momentum=0.0), mlp, datasets, **settings
    )
    plain = federate(FedAvg(), mlp, datasets, rounds=1, **settings)
    weights = [name for name, _ in mlp().named_parameters()]
    same_bits(
        {n: run.history[1][n] for n in weights}, {n: plain.state[n] for n in weights}
    )
    path, hidden = next(
        iter(inputs_of_layers(mlp().train(), union(datasets)[0]).items())
    )
    np.testing.assert_allclose(
        run.history[1][f"{path}.running_mean"], hidden.mean(0), rtol=1e-12
    )
    np.testing.assert_allclose(
        run.history[1][f"{path}.running_var"], hidden.var(0), rtol=1e-12
    )

    trained = functools.partial(loaded, mlp, run.history[1])
    fixed = federate(FixBN(freeze_at=0), trained, datasets, rounds=2, **settings)
    for mine, theirs in zip(run.history[1:], fixed.history, strict=True):
        same_bits(mine, theirs)
    at_once = FBN(fbn_measure=measure, statistics_momentum=0.0, statistics_warm_up=0)
    same_bits(
        *(
            federate(one, trained, datasets, rounds=2).state
            for one in (at_once, FixBN(freeze_at=0))
        )
    )


@pytest.mark.parametrize(
    ("method", "net"),
    [("steps", "mlp"), ("pass", "mlp"), ("hbn", "mlp"), ("steps", "torchvision_net")],
)
def test_batches_of_one_example_are_used(
    federate, points, request, method: str, net: str
) -> None:
    make, shape = request.getfixturevalue(net), (5,) if net == "mlp" else (3, 20, 20)
    datasets = [points(n, i, shape) for i, n in enumerate(SIZES)]
    strategy = METHODS[method](statistics_warm_up=0)
    run = federate(
        strategy, make, datasets, rounds=1, rate=RATE, batch_size=1, local_steps=3
    )
    for client in strategy.reports[0].clients.values():
        assert (client["steps"], client["dropped-batches"]) == (3, 0)
    moved = [
        (value != 0).any()
        for name, value in run.state.items()
        if name.endswith("running_mean")
    ]
    assert moved == [True] * len(inputs_of_layers(make(), datasets[0].inputs))


def test_far_statistics_are_named_when_the_run_diverges(
    federate, datasets, mlp
) -> None:
    far = {**mlp().state_dict(), "1.running_var": torch.full((4,), 1e-300).double()}
    for measure, said in (
        ("steps", "a fifth of the learning-rate."),
        ("pass", "learning-rate. fbn-measure=steps helped, too."),
    ):
        strategy = FBN(fbn_measure=measure, statistics_warm_up=0)
        run = federate(
            strategy,
            functools.partial(loaded, mlp, far),
            datasets,
            rate=1e300,
            fails=DivergedError,
        )
        assert (
            "Likely cause: the global statistics are those of earlier weights"
            in str(run.error)
        )
        assert said in str(run.error)


def test_a_test_in_the_middle_of_the_training_is_not_measured_and_the_layers_are_restored(
    mlp, points
) -> None:
    model, hook, data = mlp().train(), GlobalStatistics(warm_up=False), points(8, 1)
    hook.begin(model)
    model.train()(data.inputs)
    with torch.no_grad():
        model(1e6 * data.inputs)
    model.eval()(1e6 * data.inputs)
    hook.end(model.train())
    hidden = model[0](data.inputs).detach()
    torch.testing.assert_close(
        hook.reply()["bn-moments"]["1.mean"], hidden.mean(0), rtol=1e-13, atol=1e-13
    )
    model(data.inputs)
    assert model[1].training
    assert model[1].num_batches_tracked == 1


class Layers(nn.Sequential):
    """BN of a kind, in part without gamma and beta, one layer called twice."""

    def __init__(self, kind: str) -> None:
        conv, norm = getattr(nn, f"Conv{kind}"), getattr(nn, f"BatchNorm{kind}")
        twice = norm(3)
        layers = (
            conv(2, 3, 3),
            norm(3, affine=False, eps=1e-2),
            nn.ReLU(),
            conv(3, 3, 1),
            twice,
            nn.ReLU(),
            twice,
        )
        super().__init__(*layers, nn.Flatten(), nn.LazyLinear(3))
        self.eval()(torch.zeros(2, 2, *[5] * int(kind[0])))
        self.double()


METHODS = {"steps": FBN, "pass": functools.partial(FBN, fbn_measure="pass"), "hbn": HBN}


@pytest.mark.parametrize(
    ("method", "kind", "amp"),
    [
        *((method, kind, False) for method in METHODS for kind in ("1d", "2d", "3d")),
        ("steps", "2d", True),
    ],
)
def test_kinds_of_batchnorm_with_half_of_the_clients(
    federate, points, method: str, kind: str, amp: bool
) -> None:
    """The pooled moments of every call of the round's clients: of the steps by shares,
    of a pass by counts.

    Under amp of the inputs in bfloat16, computed in float32 or wider.
    """
    torch.manual_seed(0)
    by_steps = method == "steps"
    net = Layers(kind).to(torch.float32 if amp else torch.float64)
    datasets = [points(n, i, (2, *[5] * int(kind[0]))) for i, n in enumerate(SIZES)]
    datasets = [lower(data) for data in datasets] if amp else datasets
    seen: dict[int, dict[str, list[Tensor]]] = {}

    class Watched(TorchClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            mine = seen[self.partition_id] = {path: [] for path in ("1", "4")}
            for path, values in mine.items():
                layer: Any = self.model[int(path)]
                layer.register_forward_pre_hook(functools.partial(self.note, values))
            return super().fit(parameters, config)

        def note(self, values: list[Tensor], layer: nn.Module, args: Any) -> None:
            if (
                torch.is_grad_enabled()
                if by_steps
                else layer.training and not torch.is_grad_enabled()
            ):
                values.append(args[0].detach())

    settings = {
        "statistics_momentum": 0.25,
        "statistics_warm_up": 0,
        "fraction_train": 0.6,
        "min_train_nodes": 2,
    }
    strategy = METHODS[method](**settings)
    options = {"rounds": 1, "local_steps": 3, "client": Watched, "amp": amp}
    run = federate(strategy, lambda: copy.deepcopy(net), datasets, **options)
    chosen = strategy.reports[0].participants
    assert len(chosen) == 2
    exact = {"rtol": 1e-5, "atol": 1e-6} if amp else {"rtol": 1e-12}
    for path, calls in (("1", 1), ("4", 2)):
        assert not amp or seen[chosen[0]][path][0].dtype == torch.bfloat16
        each = []
        for i in chosen:
            # all inputs of the client, a row of channels each
            rows = [x.movedim(1, -1).flatten(0, -2) for x in seen[i][path]]
            each.append(torch.cat(rows).double().numpy())
        passes = [3 if by_steps else -(-SIZES[i] // 4) for i in chosen]
        assert [len(seen[i][path]) for i in chosen] == [
            calls * number for number in passes
        ]
        sizes = np.array(
            [
                SIZES[i] if by_steps else len(values)
                for i, values in zip(chosen, each, strict=True)
            ]
        )
        shares = sizes / sizes.sum()
        mean = sum(p * values.mean(0) for p, values in zip(shares, each, strict=True))
        var = sum(
            p * (values.var(0) + (values.mean(0) - mean) ** 2)
            for p, values in zip(shares, each, strict=True)
        )
        n = sum(map(len, each))
        np.testing.assert_allclose(
            run.state[f"{path}.running_mean"], 0.25 * mean, **exact
        )
        np.testing.assert_allclose(
            run.state[f"{path}.running_var"], 0.75 + 0.25 * var * n / (n - 1), **exact
        )
        assert run.state[f"{path}.num_batches_tracked"] == 0
    same = run.state["6.running_mean"], run.state["4.running_mean"]
    assert np.array_equal(*same), "two paths of one layer"


def lower(data: Any) -> Any:
    return type(data)(data.inputs.float(), data.targets)


def test_in_each_round_of_a_longer_warm_up_the_pooled_statistics_replace_the_global_ones(
    federate, datasets, mlp
) -> None:
    strategy = FBN(statistics_warm_up=2, statistics_momentum=0.3)
    run = federate(strategy, mlp, datasets, local_steps=1, batch_size=0)
    assert [report.phase for report in strategy.reports] == [
        "warm-up",
        "warm-up",
        "train",
    ]
    for server_round, share in ((1, 1.0), (2, 1.0), (3, 0.3)):
        before, after = run.history[server_round - 1], run.history[server_round]
        hidden = loaded(mlp, before)[0](union(datasets)[0]).detach()
        for leaf, new in (
            ("running_mean", hidden.mean(0)),
            ("running_var", hidden.var(0)),
        ):
            want = (1 - share) * before[f"1.{leaf}"] + share * new.numpy()
            np.testing.assert_allclose(after[f"1.{leaf}"], want, rtol=1e-12)


def test_replies_without_moments_are_named(federate, datasets, mlp, caplog) -> None:
    def spoil(content: Any) -> None:
        content["bn-moments"] = to_record({})

    run = federate(
        FBN(),
        mlp,
        datasets,
        rounds=2,
        wrap=functools.partial(spoiling, spoil, rounds=(2,)),
    )
    assert not run.strategy.reports[1].rejected
    text = (
        "round 2: 1 of 3 replies have no moments of BatchNorm's inputs; the statistics"
        " are of the others"
    )
    assert [message for message in caplog.messages if "no moments" in message] == [text]


class Teacher(nn.Module):
    """A network beside a copy that runs without gradients."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.student, self.teacher = make(), make()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x)
        return self.student(x) + target


def test_layers_that_no_training_measures_are_named_once(
    federate, datasets, mlp, caplog
) -> None:
    federate(FBN(), lambda: Teacher(mlp), datasets, rounds=2)
    (told,) = [
        message for message in caplog.messages if "no reply has moments" in message
    ]
    assert told.startswith(
        "round 1: no reply has moments of the inputs of teacher.1, which keep"
        " their present statistics"
    )


def test_false_moments_are_refused_and_a_round_without_replies_does_not_end_the_warm_up(
    federate, datasets, mlp
) -> None:
    def spoil(content: Any) -> None:
        record = content["bn-moments"]
        content["bn-moments"] = type(record)(
            {**record, "1.m2": type(record["1.m2"])(-record["1.m2"].numpy())}
        )

    strategy = FBN(min_replies=3)
    run = federate(
        strategy, mlp, datasets, wrap=functools.partial(spoiling, spoil, rounds=(1,))
    )
    assert "layer '1': count is" in run.reason(1)
    assert [report.phase for report in strategy.reports] == [
        "warm-up",
        "warm-up",
        "train",
    ]


@pytest.mark.parametrize("method", [FBN, HBN])
def test_a_round_whose_replies_have_no_moments_does_not_end_the_warm_up(
    federate, datasets, mlp, method
) -> None:
    """Nothing was pooled: the statistics are still those of the start."""

    def spoil(content: Any) -> None:
        content["bn-moments"] = to_record({})

    strategy = method()
    run = federate(
        strategy,
        mlp,
        datasets,
        wrap=functools.partial(spoiling, spoil, rounds=(1,), who=range(3)),
    )
    assert [report.participants for report in strategy.reports] == [[0, 1, 2]] * 3
    assert [report.phase for report in strategy.reports] == [
        "warm-up",
        "warm-up",
        "train",
    ]
    for leaf in ("running_mean", "running_var"):
        start, first, second = (state[f"1.{leaf}"] for state in run.history[:3])
        np.testing.assert_array_equal(first, start)
        assert (second != start).all()


def moments_with(count: int, mean: float, var: float) -> Moments:
    return Moments(
        count, torch.full((2,), mean).double(), torch.full((2,), var * count).double()
    )


def test_a_trimmed_mean_without_trim_is_the_plain_one_and_false_moments_have_no_effect() -> (
    None
):
    own = [
        moments_of(
            torch.randn(7, 2, generator=torch.Generator().manual_seed(i)).double() + i
        )
        for i in range(5)
    ]
    for leaf in ("count", "mean", "m2"):
        plain = torch.as_tensor(getattr(pool(own, [1.0] * 5), leaf))
        torch.testing.assert_close(
            torch.as_tensor(getattr(trimmed(own, 0.0), leaf)),
            plain,
            rtol=1e-13,
            atol=1e-13,
        )
    false = [moments_with(1, 1e9, 1e12), moments_with(10**9, -1e9, 0.0)]
    for spoilt in (false, false[:1] * 2, false[1:] * 2):
        found = trimmed([*[moments_with(8, 3.0, 2.0)] * 3, *spoilt], 0.4)
        assert (found.count, found.mean.tolist()) == (40, [3.0] * 2)
        torch.testing.assert_close(
            found.m2 / found.count, torch.full((2,), 2.0).double()
        )
    assert trimmed([*[moments_with(8, 3.0, 2.0)] * 2, false[0]], 0.3).mean[0] > 1e8, (
        "0.3 of 3 leave out nobody"
    )


def test_a_run_with_trimmed_statistics_leaves_false_ones_out_or_says_that_it_leaves_nobody_out(
    federate, points, mlp, caplog
) -> None:
    def spoil(content: Any) -> None:
        record = content["bn-moments"]
        content["bn-moments"] = type(record)(
            {**record, "1.mean": type(record["1.mean"])(np.full(4, 1e6))}
        )

    data, ends = points(8, 1), {}
    for aggregation in ("mean", "trimmed-mean:0.3"):
        strategy = FBN(statistics_aggregation=aggregation)
        app = functools.partial(spoiling, spoil)
        ends[aggregation] = federate(
            strategy, mlp, [data] * 4, rounds=1, batch_size=0, local_steps=1, wrap=app
        ).state
    assert "leaves nobody out" not in caplog.text
    federate(
        FBN(statistics_aggregation="trimmed-mean:0.2"),
        mlp,
        [data] * 4,
        rounds=1,
        batch_size=0,
        local_steps=1,
    )
    assert "trimmed-mean:0.2 of 4 clients leaves nobody out" in caplog.text
    hidden = mlp()[0](data.inputs).detach()
    np.testing.assert_allclose(
        ends["trimmed-mean:0.3"]["1.running_mean"], hidden.mean(0), rtol=1e-12
    )
    assert (ends["mean"]["1.running_mean"] > 1e5).all()


@pytest.mark.parametrize(("last", "phases"), [(None, 3), (2, 2), (0, 0)])
def test_the_warm_up_has_its_last_round(last: int | None, phases: int) -> None:
    (method,) = FBN().methods
    told = [method.phase(Pooled(warmed_up_after=last), number) for number in (1, 2, 3)]
    assert told == ["warm-up"] * phases + [""] * (3 - phases)


@pytest.mark.parametrize("method", [FBN, HBN])
def test_a_warm_up_as_long_as_the_run_is_told(
    method, federate, datasets, mlp, caplog
) -> None:
    federate(method(statistics_warm_up=2), mlp, datasets, rounds=2)
    assert "statistics-warm-up=2 lasts as long as the run of 2 rounds" in caplog.text
    problems = method(statistics_warm_up=1).methods.problems(RunSettings(2))
    assert not [problem for problem in problems if problem.kind == "warn"]


class Checkpointed(nn.Sequential):
    """Its first three layers run again in the backward pass."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            x = x.detach().requires_grad_()
            return self[3](
                checkpoint(
                    lambda inner: self[2](self[1](self[0](inner))),
                    x,
                    use_reentrant=self.reentrant,
                )
            )
        return super().forward(x)


class Reentrant(Checkpointed):
    reentrant = True


@pytest.mark.parametrize("kind", [Checkpointed, Reentrant])
@pytest.mark.parametrize(
    "method", [FBN, functools.partial(FBN, statistics_warm_up=0), HBN]
)
def test_a_layer_that_activation_checkpointing_calls_twice_counts_once(
    federate, datasets, mlp, same_bits, method: Any, kind: type[Checkpointed]
) -> None:
    runs = [
        federate(method(), make, datasets, rounds=3)
        for make in (lambda: kind(*mlp()), mlp)
    ]
    same_bits(*(run.state for run in runs))
