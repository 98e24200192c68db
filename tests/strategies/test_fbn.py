"""FBN's warm-up, clients without moments, and false moments."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fedbn_flwr.messages.records import to_record
from fedbn_flwr.strategies import FBN, HBN
from fedbn_flwr.strategies.fbn import GlobalStatistics, Pooled
from tests.support.bad_replies import spoiling
from tests.support.fast import thinned

SIZES = (6, 13, 9)
RATE = 0.01


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


@pytest.mark.parametrize(("last", "phases"), [(None, 3), (2, 2), (0, 0)])
def test_the_warm_up_has_its_last_round(last: int | None, phases: int) -> None:
    (method,) = FBN().methods
    told = [method.phase(Pooled(warmed_up_after=last), number) for number in (1, 2, 3)]
    assert told == ["warm-up"] * phases + [""] * (3 - phases)


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
    "method", thinned([FBN, functools.partial(FBN, statistics_warm_up=0), HBN], 2)
)
def test_a_layer_that_activation_checkpointing_calls_twice_counts_once(
    federate, datasets, mlp, same_bits, method: Any, kind: type[Checkpointed]
) -> None:
    runs = [
        federate(method(), make, datasets, rounds=3)
        for make in (lambda: kind(*mlp()), mlp)
    ]
    same_bits(*(run.state for run in runs))
