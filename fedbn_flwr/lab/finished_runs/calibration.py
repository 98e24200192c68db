"""Can a model's probabilities be believed, and from which one on is it a yes? For the card of an exported model."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.data import Subset
from fedbn_flwr.training.evaluation import evaluate
from fedbn_flwr.training.metrics import BINS
from fedbn_flwr.training.tasks import LabelTask, RegressionTask, Task

__all__ = ["Bin", "Calibration", "Stated", "Threshold", "calibrated", "has_probabilities", "reliability_png"]

_ROUNDING = 1e-9
Which = Literal["sensitivity", "specificity"]


@dataclass(frozen=True)
class Stated:
    """The least sensitivity or specificity that a threshold is to have on validation examples."""

    which: Which
    at_least: float

    @classmethod
    def read(cls, text: str) -> Stated:
        """Return what a text such as ``sensitivity:0.9`` states.

        Raises:
            ConfigError: it is none.
        """
        which, _, number = text.partition(":")
        try:
            at_least = float(number)
        except ValueError:
            at_least = 0.0
        if which not in get_args(Which) or not 0 < at_least < 1:
            raise ConfigError(
                f"threshold={text!r}: state sensitivity:NUMBER or specificity:NUMBER, a number between 0 and 1, e.g. "
                "sensitivity:0.9."
            )
        return cls("sensitivity" if which == "sensitivity" else "specificity", at_least)


@dataclass(frozen=True)
class Threshold:
    """From this probability on an example is a yes.

    Attributes:
        label: the label or the positive class.
        probability: the threshold.
        stated: what it was chosen by.
        chosen_on: the number of validation examples.
        sensitivity: on the test examples; None = there is no yes among them.
        specificity: on the test examples; None = there is no no among them.
    """

    label: str
    probability: float
    stated: Stated
    chosen_on: int
    sensitivity: float | None
    specificity: float | None


@dataclass(frozen=True)
class Bin:
    """The test examples whose confidence falls into one of ``BINS`` bins of equal width."""

    low: float
    high: float
    count: int
    confidence: float
    right: float


@dataclass(frozen=True)
class Calibration:
    """What the probabilities of a model are worth on test examples.

    Attributes:
        examples: how many.
        brier: see ``training.metrics``; lower is better.
        ece: the expected calibration error.
        bins: those with examples. The confidence is that of the predicted class, or of labels the probability of yes.
        thresholds: one for each label, if a sensitivity or specificity was stated.
    """

    examples: int
    brier: float
    ece: float
    bins: tuple[Bin, ...]
    thresholds: tuple[Threshold, ...]


def has_probabilities(task: Task) -> bool:
    """Return whether an output of the task is a probability of one example."""
    return not task.by_pixel and not isinstance(task, RegressionTask)


def calibrated(
    model: nn.Module,
    tests: Subset,
    validation: Subset | None,
    task: Task,
    names: tuple[str, ...],
    stated: Stated | None,
) -> Calibration:
    """Return the calibration on the test examples, and thresholds that are chosen on the validation examples.

    Args:
        model: the model.
        tests: one or more.
        validation: examples that were not trained on; None or empty = there are none.
        task: a task that ``has_probabilities``.
        names: of the classes or labels.
        stated: what the thresholds are to reach; None = no threshold.

    Raises:
        ConfigError: a threshold is asked for, and the task has more than two classes, or there are no validation
            examples with both yes and no.
    """
    outputs, targets, found = _outputs(model, tests, task)
    confidences, right = _confidences(task, outputs, targets)
    numbers = (confidences * BINS).long().clamp_(max=BINS - 1)
    bins = []
    for number in range(BINS):
        inside = numbers == number
        if inside.any():
            mean, share = float(confidences[inside].mean()), float(right[inside].double().mean())
            bins.append(Bin(number / BINS, (number + 1) / BINS, int(inside.sum()), mean, share))
    thresholds = _thresholds(model, validation, task, names, stated, outputs, targets) if stated else ()
    return Calibration(len(tests), found["brier"], found["ece"], tuple(bins), thresholds)


def _outputs(model: nn.Module, data: Subset, task: Task) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Return the outputs (N, ...), the targets (N, ...) and the metrics of a test."""
    kept: list[tuple[Tensor, Tensor]] = []
    metrics = evaluate(
        model,
        data,
        task=task.measuring(["brier", "ece"]),
        on_batch=lambda outputs, targets: kept.append((outputs.cpu().double(), targets.cpu())),
    ).named()
    outputs, targets = (torch.cat(parts) for parts in zip(*kept, strict=True))
    return outputs, targets, metrics


def _confidences(task: Task, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the confidences that the calibration error is of, and whether they were right, each (n,)."""
    if isinstance(task, LabelTask):
        flat = targets.double().flatten()
        known = ~flat.isnan()
        return outputs.sigmoid().flatten()[known], flat[known] == 1
    kept = targets != task.ignore
    confidences, predicted = outputs[kept].softmax(1).max(1)
    return confidences, predicted == targets[kept]


def _of_yes(task: Task, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the probabilities of yes (N, labels) and the labels, 0, 1 or NaN; the second of two classes is yes."""
    if isinstance(task, LabelTask):
        return outputs.sigmoid().reshape(len(outputs), -1), targets.double().reshape(len(outputs), -1)
    labels = targets.double().masked_fill(targets == task.ignore, float("nan"))
    return outputs.softmax(1)[:, 1:], labels[:, None]


def _thresholds(
    model: nn.Module,
    validation: Subset | None,
    task: Task,
    names: tuple[str, ...],
    stated: Stated,
    outputs: Tensor,
    targets: Tensor,
) -> tuple[Threshold, ...]:
    if not isinstance(task, LabelTask) and outputs.shape[1] != 2:
        raise ConfigError(
            f"threshold={stated.which}:{stated.at_least}: task {task.name} has {outputs.shape[1]} classes, and a "
            "threshold decides between two. Leave it out."
        )
    if not validation:
        raise ConfigError(
            f"threshold={stated.which}:{stated.at_least} is chosen on validation examples, and the run has none. Run "
            "with validation-share=0.2, say, or leave it out."
        )
    chosen, truth = _of_yes(task, *_outputs(model, validation, task)[:2])
    tested, truth_of_tests = _of_yes(task, outputs, targets)
    if isinstance(task, LabelTask) and not task.single:
        labels = [names[at] if at < len(names) else f"label {at}" for at in range(truth.shape[1])]
    else:
        labels = [names[-1] if names else "1"]
    found = []
    for at, label in enumerate(labels):
        known = ~truth[:, at].isnan()
        yes, scores = truth[known, at] == 1, chosen[known, at]
        if yes.all() or not yes.any():
            raise ConfigError(
                f"threshold={stated.which}:{stated.at_least}: the {len(yes)} validation examples of {label} are all of "
                "one class. Use a larger validation-share, or leave it out."
            )
        probability = _chosen(scores, yes, stated)
        if probability is None:
            raise ConfigError(
                f"threshold={stated.which}:{stated.at_least}: no threshold reaches it on the {len(yes)} validation "
                f"examples of {label}, since the model gives too many of one class the probability 1. Leave it out."
            )
        after = ~truth_of_tests[:, at].isnan()
        positive, told = truth_of_tests[after, at] == 1, tested[after, at] >= probability
        sensitivity, specificity = _share(told[positive]), _share(~told[~positive])
        found.append(Threshold(label, probability, stated, len(yes), sensitivity, specificity))
    return tuple(found)


def _chosen(scores: Tensor, yes: Tensor, stated: Stated) -> float | None:
    """Return the best threshold that reaches what is stated: midway between two scores, which other data fall between.

    For a sensitivity it is the highest one, for a specificity the lowest one; None = there is none.
    """
    levels = torch.unique(scores)
    edges = torch.cat([levels[:1] / 2, (levels[1:] + levels[:-1]) / 2, (levels[-1:] + 1) / 2])
    of_interest = scores[yes if stated.which == "sensitivity" else ~yes].sort().values
    below = torch.searchsorted(of_interest, edges)  # scores below each edge
    right = len(of_interest) - below if stated.which == "sensitivity" else below
    reached = edges[right.double() / len(of_interest) >= stated.at_least - _ROUNDING]
    if not len(reached):
        return None
    return float(reached.max() if stated.which == "sensitivity" else reached.min())


def _share(values: Tensor) -> float | None:
    return float(values.double().mean()) if len(values) else None


def reliability_png(found: Calibration) -> bytes:
    """Return the reliability picture: the share of right ones over the confidence, bin by bin, and their numbers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5, 4.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    above.plot([0, 1], [0, 1], color="0.6", linewidth=1)
    above.plot([one.confidence for one in found.bins], [one.right for one in found.bins], marker="o")
    above.set(xlim=(0, 1), ylim=(0, 1), ylabel="share of right ones")
    width = 1 / BINS
    below.bar([one.low for one in found.bins], [one.count for one in found.bins], width=width, align="edge")
    below.set(xlabel="confidence", ylabel="examples")
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=120, metadata={"Software": None})
    return written.getvalue()
