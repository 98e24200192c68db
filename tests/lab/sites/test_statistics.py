"""A metric of weighted groups is the metric of the examples repeated as often, whatever the metric."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedbn_flwr.lab.sites.measured import Measured, measure
from fedbn_flwr.training.evaluation import evaluate
from fedbn_flwr.training.metrics import AT
from fedbn_flwr.training.tasks import BINARY, CLASSIFICATION, MULTI_LABEL, REGRESSION, SEGMENTATION, Task
from tests.support.outputs import Identity, Outputs

GROUPS = 9


def examples(task: Task, count: int = 40, seed: int = 0) -> Outputs:
    """Outputs with ties, and targets of which some are ignored or unknown, also all targets of an example."""
    generator = torch.Generator().manual_seed(seed)
    draw = {"generator": generator, "dtype": torch.float64}
    width = {"binary": 1, "regression": 2}.get(task.name, 3)
    pixels = (2, 3) if task.by_pixel else ()
    outputs = torch.randn(count, width, *pixels, **draw).mul(2).round(decimals=1)
    if task.name == "regression":
        targets = outputs + torch.randn(count, width, **draw) + 1e3
    elif task.name in ("binary", "multi-label"):
        targets = (torch.rand(count, width, **draw) < 0.4).double()
    else:
        targets = torch.randint(3, (count, *pixels), generator=generator)
    unknown = torch.rand(targets.shape, **draw) < 0.1
    unknown[3] = True
    targets[unknown] = task.ignore if task.name in ("classification", "segmentation") else math.nan
    return Outputs(outputs, targets, torch.randint(GROUPS, (count,), generator=generator) * 7)


ALL = [
    (task, f"{name}:0.7" if name in AT else name)
    for task in (CLASSIFICATION, BINARY, MULTI_LABEL, REGRESSION, SEGMENTATION)
    for name in (*task.allowed, "loss")
]


@pytest.mark.parametrize(("task", "metric"), ALL, ids=lambda value: value if isinstance(value, str) else value.name)
def test_weights_are_repetitions(task: Task, metric: str) -> None:
    task, data = task.scored_by(metric), examples(task)
    measured = measure(Identity(), data, task)
    assert measured.num_groups == GROUPS
    draw = np.random.default_rng(1)
    weights = np.concatenate([np.ones((1, GROUPS)), 1 - np.eye(GROUPS), draw.integers(0, 3, (6, GROUPS))])
    found = measured.statistic().at(weights)
    for value, times in zip(found, weights[:, measured.groups].astype(int), strict=True):
        rows = torch.repeat_interleave(torch.arange(len(data)), torch.as_tensor(times))
        again = Outputs(data.outputs[rows], data.targets[rows], None)
        want = evaluate(Identity(), again, task=task).named()[metric]
        assert value == pytest.approx(want, rel=1e-9, nan_ok=True)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("metric", ["brier", "ece"])
def test_a_model_that_is_sure_has_no_overflow(metric: str) -> None:
    outputs, targets = torch.tensor([[-2000.0], [2000.0]], dtype=torch.float64), torch.tensor([[0.0], [1.0]])
    found = Measured(BINARY.scored_by(metric), outputs, targets, np.arange(2), 2).statistic()
    assert found.at(np.ones((1, 2)))[0] == 0


def test_many_groups_are_left_out_in_blocks_and_the_metric_stays() -> None:
    task = BINARY.scored_by("auroc")
    data = examples(task, 1200)
    data.units = None
    measured = measure(Identity(), data, task)
    assert (measured.num_groups, measured.statistic().num_groups) == (1200, 500)
    blocks = measured.statistic().at(np.ones((1, 500)))[0]
    assert blocks == pytest.approx(evaluate(Identity(), data, task=task).metrics["auroc"], rel=1e-9)
    found = measured.estimate()
    assert found.low is not None
    one_by_one = Measured(task, measured.outputs[:500], measured.targets[:500], measured.groups[:500], 500).estimate()
    assert one_by_one.low is not None
    assert one_by_one.high is not None
    assert found.high is not None
    ratio = (one_by_one.high - one_by_one.low) / (found.high - found.low)
    assert ratio == pytest.approx(math.sqrt(1200 / 500), rel=0.15)
