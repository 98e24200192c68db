"""Calibration and thresholds of a model card, against counts by hand; what no threshold can be chosen of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.finished_runs.calibration import Stated, calibrated
from fedbn_flwr.lab.finished_runs.export import export
from fedbn_flwr.training.evaluation import evaluate
from fedbn_flwr.training.tasks import BINARY, CLASSIFICATION, MULTI_LABEL, Task
from tests.support.outputs import Identity, Outputs


def drawn(task: Task, count: int, seed: int) -> Outputs:
    """Outputs with ties that tell the targets, of which some are unknown."""
    generator = torch.Generator().manual_seed(seed)
    width = {"binary": 1, "multi-label": 2, "classification": 2}[task.name]
    labels = torch.randint(2, (count, 1 if width == 1 else width), generator=generator)
    noise = torch.randn(count, width, generator=generator, dtype=torch.float64)
    if task is CLASSIFICATION:
        return Outputs((noise + torch.eye(2)[labels[:, 0]]).round(decimals=1), labels[:, 0])
    targets = labels.double()
    targets[::7] = float("nan")
    return Outputs((noise + 1.5 * labels - 0.5).round(decimals=1), targets)


@pytest.mark.parametrize("task", [BINARY, MULTI_LABEL, CLASSIFICATION], ids=lambda task: task.name)
@pytest.mark.parametrize("which", ["sensitivity", "specificity"])
def test_a_threshold_is_the_best_that_reaches_what_is_stated(task: Task, which: str) -> None:
    tests, validation = drawn(task, 80, 1), drawn(task, 60, 2)
    found = calibrated(Identity(), tests, validation, task, ("healthy", "ill"), Stated.read(f"{which}:0.8"))  # type: ignore[arg-type]

    def columns(data: Outputs) -> list[tuple[np.ndarray, np.ndarray]]:
        if task is CLASSIFICATION:
            return [(data.outputs.softmax(1)[:, 1].numpy(), data.targets.numpy() == 1)]
        known = [~data.targets[:, at].isnan() for at in range(data.targets.shape[1])]
        chances = data.outputs.sigmoid()
        return [(chances[k, at].numpy(), data.targets[k, at].numpy() == 1) for at, k in enumerate(known)]

    assert [one.label for one in found.thresholds] == (["healthy", "ill"] if task is MULTI_LABEL else ["ill"])
    for one, (scores, yes), (tested, truth) in zip(found.thresholds, columns(validation), columns(tests), strict=True):
        assert one.chosen_on == len(yes)

        def reached(threshold: float, scores: np.ndarray = scores, yes: np.ndarray = yes) -> bool:
            share = (scores[yes] >= threshold).mean() if which == "sensitivity" else (scores[~yes] < threshold).mean()
            return bool(share >= 0.8 - 1e-9)

        assert reached(one.probability)
        same = scores[scores >= one.probability].min(initial=1)  # as a threshold it tells what the midway tells
        better = [t for t in [*scores, 1.1] if (t > same if which == "sensitivity" else t < one.probability)]
        assert better
        assert not any(map(reached, better))
        assert one.sensitivity == pytest.approx((tested[truth] >= one.probability).mean())
        assert one.specificity == pytest.approx((tested[~truth] < one.probability).mean())


def test_many_validation_examples_need_no_table_of_scores_by_thresholds() -> None:
    count = 200_000  # the table would have 40 GB
    targets = (torch.arange(count) % 2).double()[:, None]
    outputs = torch.linspace(-4, 4, count, dtype=torch.float64)[:, None]
    given = Outputs(outputs, targets)
    found = calibrated(Identity(), given, given, BINARY, (), Stated.read("sensitivity:0.9")).thresholds[0]  # type: ignore[arg-type]
    assert found.sensitivity == pytest.approx(0.9, abs=1e-5)


def test_a_specificity_that_no_threshold_reaches_is_refused() -> None:
    sure = Outputs(torch.full((20, 1), 50.0, dtype=torch.float64), (torch.arange(20) % 2).double()[:, None])
    with pytest.raises(ConfigError, match="no threshold reaches it"):
        calibrated(Identity(), sure, sure, BINARY, (), Stated.read("specificity:0.9"))  # type: ignore[arg-type]


def test_bins_hold_every_example_and_give_the_calibration_error() -> None:
    tests = drawn(BINARY, 80, 3)
    found = calibrated(Identity(), tests, None, BINARY, (), None)  # type: ignore[arg-type]
    want = evaluate(Identity(), tests, task=BINARY.measuring(["brier", "ece"])).metrics
    assert (found.brier, found.ece) == (want["brier"], want["ece"])
    counts = [one.count for one in found.bins]
    known = int((~tests.targets.isnan()).sum())
    assert sum(counts) == known
    gaps = [one.count * abs(one.confidence - one.right) for one in found.bins]
    assert sum(gaps) / known == pytest.approx(found.ece)
    assert all(one.low <= one.confidence <= one.high for one in found.bins)


@pytest.mark.parametrize("text", ["sensitivity", "sensitivity:90", "recall:0.9", "specificity:0"])
def test_a_threshold_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="state sensitivity:NUMBER or specificity:NUMBER"):
        Stated.read(text)


def test_no_threshold_without_validation_examples_of_both_kinds_or_with_many_classes(quick_run, tmp_path: Path) -> None:
    one_class = drawn(BINARY, 20, 1)
    one_class.targets.fill_(1.0)
    for validation, said in ((None, "is chosen on validation examples"), (one_class, "are all of one class")):
        with pytest.raises(ConfigError, match=said):
            calibrated(Identity(), drawn(BINARY, 20, 2), validation, BINARY, (), Stated.read("sensitivity:0.9"))  # type: ignore[arg-type]
    summary, run = quick_run(metrics="brier,ece", **{"num-server-rounds": 1})
    with pytest.raises(ConfigError, match="has 10 classes, and a threshold decides between two"):
        export(run, tmp_path / "a/model.safetensors", "torch", threshold="sensitivity:0.9")
    assert not (tmp_path / "a").exists()
    card = export(run, tmp_path / "b/model.safetensors", "torch").card.read_text()
    final = summary["final"]
    figures = f"Brier score {final['test-brier']:.4f}, expected calibration error {final['test-ece']:.4f} (15 bins)"
    assert f"On the 359 test examples: {figures}" in card
    assert "![Share of right ones over confidence](reliability.png)" in card
    assert (tmp_path / "b/reliability.png").read_bytes().startswith(b"\x89PNG")
