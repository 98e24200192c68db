"""FBN's warm-up, clients without moments, false moments and unmeasured layers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fedbn_flwr.batchnorm.reestimation import Moments, moments_of, pool
from fedbn_flwr.errors import DivergedError
from fedbn_flwr.messages.records import tensors, to_record
from fedbn_flwr.problems import Known
from fedbn_flwr.strategies import FBN, HBN
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
    assert moved
    assert all(moved)


def test_far_statistics_are_named_when_the_run_diverges(
    federate, datasets, mlp
) -> None:
    far = {**mlp().state_dict(), "1.running_var": torch.full((4,), 1e-300).double()}
    for measure, said in (
        ("steps", "a fifth of the learning-rate helped."),
        ("pass", "learning-rate helped. fbn-measure=steps also helped."),
    ):
        strategy = FBN(fbn_measure=measure, statistics_warm_up=0)
        run = federate(
            strategy,
            functools.partial(loaded, mlp, far),
            datasets,
            rate=1e300,
            fails=DivergedError,
        )
        assert "Likely cause: the global statistics belong to earlier weights" in str(
            run.error
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


METHODS = {"steps": FBN, "pass": functools.partial(FBN, fbn_measure="pass"), "hbn": HBN}


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
        " come from the other replies"
    )
    assert [message for message in caplog.messages if "no moments" in message] == [text]


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
    assert "layer '1': the count is" in run.reason(1)
    assert [report.phase for report in strategy.reports] == [
        "warm-up",
        "warm-up",
        "train",
    ]


@pytest.mark.parametrize("method", [FBN, HBN])
def test_a_round_whose_replies_have_no_moments_does_not_end_the_warm_up(
    federate, datasets, mlp, method
) -> None:
    """No moments were pooled, so the statistics keep their initial values."""

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
        "a trim of 0.3 leaves out none of 3 clients"
    )


def test_a_trim_that_leaves_nobody_out_is_told(federate, points, mlp, caplog) -> None:
    data = [points(8, i) for i in range(4)]
    for share, told in ((0.3, False), (0.2, True)):
        strategy = FBN(statistics_aggregation=f"trimmed-mean:{share}")
        federate(strategy, mlp, data, rounds=1)
        assert ("leaves nobody out" in caplog.text) == told


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
    assert "statistics_warm_up=2 means" in caplog.text
    problems = method(statistics_warm_up=1).methods.problems(Known(num_rounds=2))
    assert not [problem for problem in problems if problem.effect == "warn"]


class Checkpointed(nn.Sequential):
    """A chain whose first three layers run again in the backward pass."""

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
