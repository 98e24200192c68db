"""Losses by hand, and metrics by scikit-learn or by definition."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import (
    f1_score,
    jaccard_score,
    r2_score,
    recall_score,
    roc_auc_score,
)
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr.errors import ConfigError, DataError
from fedbn_flwr.training import LocalTraining, TrainResult, train
from fedbn_flwr.training.evaluation import evaluate
from fedbn_flwr.training.tasks import (
    BINARY,
    CLASSIFICATION,
    MULTI_LABEL,
    REGRESSION,
    SEGMENTATION,
    Task,
    higher_is_better,
    in_percent,
    quantity_of,
)
from tests.support.points import Points

NAN = math.nan


class Identity(nn.Module):
    """A model that returns its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.one


def pixels() -> tuple[Tensor, Tensor]:
    """Return random logits and classes of 3 by 6 pixels.

    A third of the pixels and one complete image are ignored. Class 2 is only predicted,
    class 3 is only a target, and class 4 is neither.
    """
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5, 5, 3, 6, generator=generator, dtype=torch.float64)
    logits[:, 3:] -= 100
    targets = torch.randint(3, (5, 3, 6), generator=generator)
    targets[targets == 2] = 3
    targets[torch.rand(targets.shape, generator=generator) < 0.3] = 255
    targets[2] = 255
    return logits, targets


def train_once(model: nn.Module, data: Points, task: Task, **more: Any) -> TrainResult:
    """Train with one step on all data."""
    settings = LocalTraining(learning_rate=0.1, batch_size=0, **more)
    generators = lambda _: torch.Generator()  # noqa: E731
    return train(model, data, settings, learning_rate=0.1, stream=generators, task=task)


def check_refused(model: nn.Module, data: Points, task: Task, names: str) -> None:
    """Check that neither the test nor the training takes the data."""
    with pytest.raises(DataError, match=names):
        evaluate(model, data, task=task)
    with pytest.raises(DataError, match=names):
        train_once(model, data, task)


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_evaluation_of_pixels_for_every_batch_size(batch_size: int) -> None:
    logits, targets = pixels()
    task = SEGMENTATION.scored_by("dice")
    data = Points(logits, targets)
    result = evaluate(Identity(), data, task=task, batch_size=batch_size)
    predicted, counted = logits.argmax(1), targets != 255
    each = [
        -F.log_softmax(logits[n, :, y, x], 0)[targets[n, y, x]].item()
        for n, y, x in counted.nonzero().tolist()
    ]
    assert result.loss == pytest.approx(math.fsum(each) / len(each), rel=1e-12)
    right = int((predicted == targets).sum())
    assert result.metrics["accuracy"] == right / len(each)
    for name, score in (("miou", jaccard_score), ("dice", f1_score)):
        overlap = score(targets[counted], predicted[counted], average="macro")
        assert result.metrics[name] == pytest.approx(overlap, rel=1e-12)
    assert result.num_examples == int(counted.flatten(1).any(1).sum()) == 4
    names = ("loss", "accuracy", "miou", "dice")
    assert list(result.named("test-")) == [f"test-{name}" for name in names]


PLAIN_BINARY = Task(loss=F.binary_cross_entropy_with_logits)


@pytest.mark.parametrize(
    ("task", "shape", "targets", "names"),
    [
        (PLAIN_BINARY, (6, 1), torch.ones(6, 1), r"\(6, 1\).*task=binary"),
        (PLAIN_BINARY, (6,), torch.ones(6), r"\(6,\).*task=binary"),
        (CLASSIFICATION, (6, 2), torch.ones(6, 2), r"float32 of shape \(6, 2\)"),
        (CLASSIFICATION, (6, 2), torch.ones(6), r"float32 of shape \(6,\)"),
        (CLASSIFICATION, (6, 2), torch.ones(6, 1).long(), r"int64 of shape \(6, 1\)"),
        (BINARY, (4, 2), torch.ones(4, 2), "task binary"),
        (BINARY, (4, 1), torch.tensor([1.0, 2, -1, NAN]), "2 labels"),
        (BINARY, (4, 1), torch.tensor([1, 2, 1, 0]), "1 labels"),
        (MULTI_LABEL, (4, 3), torch.ones(4, 2), r"\(4, 2\)"),
        (REGRESSION, (4, 2), torch.ones(4), r"\(4, 2\); task regression"),
        (
            REGRESSION,
            (4,),
            torch.tensor([1, 2, math.inf, 0]),
            "1 targets are infinite",
        ),
    ],
)
def test_what_a_task_cannot_judge_is_refused_in_both_loops(
    task: Task, shape: tuple[int, ...], targets: Tensor, names: str
) -> None:
    check_refused(Identity(), Points(torch.ones(shape), targets), task, names)


class Returns(nn.Module):
    def __init__(self, returned) -> None:
        super().__init__()
        self.layer, self.returned = nn.Linear(2, 3), returned

    def forward(self, x: Tensor) -> Any:
        return self.returned(self.layer(x))


class Words(Points):
    """Examples whose labels are words."""

    def batch(self, positions: Tensor, generator: Any = None) -> Any:
        inputs, targets = super().batch(positions)
        return inputs, ("a",) * len(targets)


@pytest.mark.parametrize("task", [CLASSIFICATION, BINARY, MULTI_LABEL, REGRESSION])
@pytest.mark.parametrize(
    ("returned", "kind", "count", "names"),
    [
        (lambda y: {"out": y}, Points, 4, r"returns a dict,.*result\['out'\]"),
        (lambda y: (y, y), Points, 4, "returns a tuple,"),
        (lambda y: SimpleNamespace(logits=y), Points, 4, "Namespace,.*result.logits"),
        (lambda y: y.squeeze(), Points, 1, r"\(3,\) for a batch of 1,.*squeeze\(1\)"),
        (
            lambda y: y[:, :1].squeeze(),
            Points,
            1,
            r"\(\) for a batch of 1,.*squeeze\(1\)",
        ),
        (lambda y: y, Words, 4, r"labels of a batch are \('a',.*number"),
    ],
)
def test_what_is_not_a_tensor_with_a_row_for_each_example_is_refused_in_a_sentence(
    task: Task, returned, kind: type[Points], count: int, names: str
) -> None:
    data = kind(torch.ones(count, 2), torch.ones(count))
    check_refused(Returns(returned), data, task, names)


@pytest.mark.parametrize("label", [156, 255])
def test_every_class_of_images_counts(label: int) -> None:
    """The ignored class -100 is 156 in a byte, and 255 is only for pixels."""
    labels = torch.full((4,), label, dtype=torch.uint8)
    model = nn.Linear(2, 300)
    byte, plain = (
        evaluate(model, Points(torch.ones(4, 2), each), task=CLASSIFICATION)
        for each in (labels, labels.long())
    )
    assert byte == plain
    assert math.isfinite(byte.loss)


# Tasks with a number for each label or target.


def columns(task: Task, count: int = 61) -> tuple[Tensor, Tensor]:
    """Return outputs and targets with many special cases.

    They have ties, uneven classes, an absent class and unknown values.
    """
    draw = np.random.default_rng(5)
    widths = {"classification": 5, "binary": 1, "multi-label": 4, "regression": 3}
    size = (count, widths[task.name])
    outputs = torch.tensor(3 * draw.normal(size=size)).round(decimals=1)
    if task.name == "classification":
        outputs[:, 4] -= 100  # neither a target nor predicted
        outputs[::2] *= 300  # softmaxes of 1 in float64
        # Class 3 is predicted, but it is not a target.
        return outputs, torch.tensor(draw.random(count) ** 3 * 3).long()
    if task.name == "regression":
        targets = 2 * outputs + draw.normal(size=size) + 1e4
    else:
        targets = torch.tensor(draw.random(size) < 0.3).double()
    targets[torch.tensor(draw.random(size) < 0.1)] = NAN
    if task.name == "multi-label":
        targets[:, 2] = targets[:, 2] * 0  # a label that no example has
    return outputs, targets


def auprc(truth: Any, scores: Any) -> float:
    """Return the mean precision at the score of each yes example."""
    return float(np.mean([truth[scores >= score].mean() for score in scores[truth]]))


def from_the_definitions(
    task: Task, outputs: Tensor, targets: Tensor
) -> dict[str, float]:
    """Compute each metric label by label and target by target if it is defined."""
    pairs = []
    for i, column in enumerate(targets.T.reshape(-1, len(targets))):
        known = ~column.isnan()
        pairs.append((column[known].numpy(), outputs[known, i].numpy()))
    if task.name == "regression":
        errors = np.concatenate([t - o for t, o in pairs])
        return {
            "mae": abs(errors).mean(),
            "rmse": math.sqrt((errors**2).mean()),
            "r2": np.mean([r2_score(t, o) for t, o in pairs]),
        }
    if task.name == "classification":
        told, chance = outputs.argmax(1).numpy(), outputs.log_softmax(1).numpy()
        truth = targets.numpy()
        labels = [(truth == c, told == c, chance[:, c]) for c in range(chance.shape[1])]
        right = told == truth
    else:
        labels = [(t == 1, o > 0, o) for t, o in pairs]
        right = np.concatenate([yes == told for yes, told, _ in labels])
    some = [label for label in labels if label[0].any()]
    recalls = []
    for yes, told, _ in labels:
        both = [(yes, told)]
        if task.name != "classification":
            # The recall of its absence as well. A test set may lack one of the two.
            both.append((~yes, ~told))
        each = [recall_score(*one) for one in both if one[0].any()]
        recalls += [np.mean(each)] * bool(each)
    f1s = [f1_score(yes, told) for yes, told, _ in labels if (yes | told).any()]
    found = {
        "accuracy": right.mean(),
        "balanced-accuracy": np.mean(recalls),
        "macro-f1": np.mean(f1s),
        "auroc": np.mean([roc_auc_score(yes, scores) for yes, _, scores in some]),
        "auprc": np.mean([auprc(yes, scores) for yes, _, scores in some]),
    }
    return {**found, "f1": found["macro-f1"]} if task is BINARY else found


@pytest.mark.parametrize(
    "task",
    [CLASSIFICATION, BINARY, MULTI_LABEL, REGRESSION],
    ids=lambda task: task.name,
)
def test_every_metric_of_a_task_is_its_definition(task: Task) -> None:
    """This includes a softmax or sigmoid of 1 in float32 and targets far from 0."""
    outputs, targets = columns(task)
    # The loss of training is in no test.
    everything = replace(task.measuring(task.allowed), training_loss=F.l1_loss)
    found = evaluate(
        Identity(), Points(outputs, targets), task=everything, batch_size=7
    )
    want = from_the_definitions(task, outputs, targets)
    assert found.metrics.keys() == set(everything.metrics)
    for name, value in found.metrics.items():
        assert value == pytest.approx(want[name], rel=1e-12), name
    whole = float(task.loss(outputs, targets))
    assert found.loss == pytest.approx(whole, rel=1e-12)
    counting = task.counting(targets).reshape(61, -1).any(1)
    assert found.num_examples == int(counting.sum())
    if task is not CLASSIFICATION:
        plain = F.mse_loss if task is REGRESSION else F.binary_cross_entropy_with_logits
        known = ~targets.isnan()
        of_known = float(plain(outputs[known], targets[known]))
        assert whole == pytest.approx(of_known, rel=1e-12)


@pytest.mark.parametrize(
    ("task", "outputs", "targets", "wanted"),
    [
        (
            BINARY,
            [-3, -1],
            [0, 0],
            {"accuracy": 1, "f1": NAN, "auroc": NAN, "auprc": NAN},
        ),
        (BINARY, [2, 1], [1, 1], {"auprc": 1, "auroc": NAN}),
        (BINARY, [NAN, 1], [0, 1], {"auroc": NAN}),
        (BINARY, [-math.inf, 1, math.inf], [0, 1, 0], {"auroc": 0.5}),
        (REGRESSION, [2], [1], {"r2": NAN}),
        (REGRESSION, [2, 1], [3, 3], {"r2": NAN}),
        (REGRESSION, [2e-6, 1e-6], [1e-6, 1e-6], {"mae": 5e-7}),
        (REGRESSION, [2e-6, 1e-6], [1e-6, 3e-6], {"r2": -1.5}),
        (REGRESSION, [math.inf, 1], [0, 1], {"mae": NAN}),
        (REGRESSION, [1, 1], [NAN, NAN], {"mae": NAN, "r2": NAN}),
    ],
)
def test_a_metric_that_a_test_set_does_not_define_is_nan(
    task: Task, outputs: list[float], targets: list[float], wanted: dict[str, float]
) -> None:
    data = Points(torch.tensor(outputs).double(), torch.tensor(targets).double())
    found = evaluate(Identity(), data, task=task)
    assert found.metrics == pytest.approx(found.metrics | wanted, nan_ok=True)
    assert found.num_examples == sum(one == one for one in targets)


def test_the_main_metric_is_one_that_the_task_has() -> None:
    assert BINARY.scored_by("auroc").score == "auroc"
    assert REGRESSION.scored_by("rmse").metrics == ("mae", "r2", "rmse")
    by_loss = SEGMENTATION.scored_by("loss")
    assert by_loss.metrics == ("accuracy", "miou")
    assert (by_loss.by_pixel, by_loss.higher_is_better) == (True, False)
    for metric in ("auroc:0.9", "dice", "mae"):
        said = (
            f"^metrics={metric} is not allowed for task classification. Use accuracy, b"
        )
        with pytest.raises(ConfigError, match=said):
            CLASSIFICATION.scored_by(metric)


@pytest.mark.parametrize(
    ("metric", "quantity", "share", "higher"),
    [
        ("test-recalibrated-accuracy", "accuracy", True, True),
        ("personal-own-auroc-weighted", "personal-own-auroc-weighted", True, True),
        ("personal-own-auroc-clients", "personal-own-auroc-clients", False, True),
        ("test-global-rmse", "rmse", False, False),
        ("test-dice", "dice", True, True),
        ("held-out-global-loss", "loss", False, False),
        ("own-number", "own-number", True, True),
    ],
)
def test_what_a_metric_is_by_its_name(
    metric: str, quantity: str, share: bool, higher: bool
) -> None:
    assert quantity_of(metric) == quantity
    assert (in_percent(metric), higher_is_better(metric)) == (share, higher)


@pytest.mark.parametrize(
    "task", [BINARY, MULTI_LABEL, REGRESSION], ids=lambda task: task.name
)
def test_mixed_precision_rounds_neither_targets_nor_counts(task: Task) -> None:
    """A tenth of the targets is unknown. They neither train nor count."""
    _, targets = columns(task, 601)
    model = nn.Linear(1, targets.shape[1], bias=False)
    nn.init.zeros_(model.weight)
    data = Points(torch.ones(601, 1), targets.float())
    result = train_once(model, data, task, amp=True)
    known = targets[~targets.isnan()]
    if task is REGRESSION:
        loss, accuracy = known.square().mean().item(), None
    else:  # every output is 0, which is no
        loss, accuracy = math.log(2), (known == 0).double().mean().item()
    assert result.loss == pytest.approx(loss, rel=1e-5)
    assert result.accuracy == pytest.approx(accuracy)
