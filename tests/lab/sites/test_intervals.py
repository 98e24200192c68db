"""Intervals and paired tests against DeLong's formula, scipy and counts by hand; what is too little for them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from fedbn_flwr.lab.sites.intervals import Estimate, holm, mcnemar, needed_for
from fedbn_flwr.lab.sites.measured import Measured, gap
from fedbn_flwr.training.tasks import BINARY, CLASSIFICATION, MULTI_LABEL, REGRESSION, Task

AUROC, ACCURACY = BINARY.scored_by("auroc"), BINARY.scored_by("accuracy")


def measured(task: Task, outputs: object, targets: object, groups: object = None) -> Measured:
    given = [torch.as_tensor(np.asarray(values)) for values in (outputs, targets)]
    count = len(given[0])
    of_rows = np.arange(count) if groups is None else np.asarray(groups)
    rows: Tensor = given[0].double().reshape(count, -1) if count else torch.empty(0, 1)
    return Measured(task, rows, given[1], of_rows, len(set(of_rows.tolist())))


def two_models(count: int = 40) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    draw = np.random.default_rng(2)
    truth = draw.random(count) < 0.4
    return truth + draw.normal(size=count), 0.5 * truth + draw.normal(size=count), truth.astype(float)


def placements(scores: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """DeLong's components: of each yes the share of no below it, of each no the share of yes above it."""
    wins = (scores[truth == 1][:, None] > scores[truth == 0]).astype(float)
    return wins.mean(1), wins.mean(0)


def test_the_variance_of_auroc_is_delongs_to_known_factors() -> None:
    first, second, truth = two_models()
    yes, no = [a - b for a, b in zip(placements(first, truth), placements(second, truth), strict=True)]
    total, many = len(truth), (int(truth.sum()), int((1 - truth).sum()))
    parts = [of_class.var(ddof=1) / (n - 1) for of_class, n in zip((yes, no), many, strict=True)]
    variance = (total - 1) / total * sum(parts)  # DeLong has n in the place of n - 1, and no first factor
    freedom = sum(parts) ** 2 / sum(part**2 / (n - 1) for part, n in zip(parts, many, strict=True))
    found = gap([measured(AUROC, first, truth)], [measured(AUROC, second, truth)])
    value = yes.mean()
    half = stats.t.ppf(0.975, freedom) * np.sqrt(variance)
    assert found.difference == pytest.approx(value, rel=1e-12)
    assert (found.low, found.high) == pytest.approx((value - half, value + half), rel=1e-9)
    assert found.p == pytest.approx(2 * stats.t.sf(abs(value) / np.sqrt(variance), freedom), rel=1e-9)


def test_the_interval_of_a_share_of_single_examples_is_wilsons() -> None:
    outputs = np.where(np.arange(50) < 41, 1.0, -1.0)
    found = measured(ACCURACY, outputs, np.ones(50)).estimate()
    share, count = 0.82, 49  # the jackknife's variance of a share is p (1 - p) / (n - 1)
    z = stats.t.ppf(0.975, 49)
    ends = [(share + z * z / 98 + s * z * np.sqrt(share * 0.18 / count + z * z / (4 * count**2))) for s in (-1, 1)]
    assert (found.low, found.high) == pytest.approx([end / (1 + z * z / count) for end in ends], rel=1e-9)
    perfect = measured(ACCURACY, np.ones(50), np.ones(50)).estimate()
    assert perfect == Estimate(1.0, pytest.approx(50 / (50 + z * z), rel=1e-9), 1.0)


def test_the_rows_of_a_patient_count_once() -> None:
    """Each patient ten times, in one group, has the interval of one row for each patient."""
    first, second, truth = two_models()
    rows, groups = np.repeat(np.arange(40), 10), np.repeat(np.arange(40), 10)
    for task in (AUROC, ACCURACY, BINARY.scored_by("brier")):
        once, ten = measured(task, first, truth), measured(task, first[rows], truth[rows], groups)
        assert np.array(list(vars(once.estimate()).values())[:3]) == pytest.approx(
            np.array(list(vars(ten.estimate()).values())[:3]), rel=1e-9
        )
    of_rows = gap([measured(AUROC, first, truth)], [measured(AUROC, second, truth)])
    of_groups = gap(
        [measured(AUROC, first[rows], truth[rows], groups)], [measured(AUROC, second[rows], truth[rows], groups)]
    )
    assert of_rows.p == pytest.approx(of_groups.p, rel=1e-9)


def test_positive_errors_have_an_interval_above_0_and_r2_one_up_to_1() -> None:
    draw = np.random.default_rng(0)
    truth, errors = draw.normal(size=30), draw.exponential(size=30)
    found = measured(REGRESSION, truth + errors, truth).estimate()
    factor = np.exp(stats.t.ppf(0.975, 29) * errors.std(ddof=1) / np.sqrt(30) / errors.mean())
    assert found.value == pytest.approx(errors.mean())
    assert (found.low, found.high) == pytest.approx((errors.mean() / factor, errors.mean() * factor), rel=1e-9)
    of_r2 = measured(REGRESSION.scored_by("r2"), truth + 0.01 * errors, truth).estimate()
    assert of_r2.low is not None
    assert of_r2.low < of_r2.value < of_r2.high <= 1
    assert measured(REGRESSION, truth + 1, truth).estimate().reason == "the errors do not vary"


def test_mcnemar_counts_every_outcome() -> None:
    """The share of the coin's outcomes at least as far from half as this one."""
    for only_one, only_other in ((0, 0), (1, 7), (5, 5), (9, 2)):
        total = only_one + only_other
        outcomes = [sum(coins) for coins in itertools.product((0, 1), repeat=total)]
        extreme = [heads for heads in outcomes if abs(heads - total / 2) >= abs(only_one - total / 2)]
        assert mcnemar(only_one, only_other) == pytest.approx(len(extreme) / len(outcomes))
    truth = np.ones(20)
    one, other = np.where(np.arange(20) < 18, 1, -1), np.where(np.arange(20) % 2, 1, -1)
    found = gap([measured(ACCURACY, one, truth)], [measured(ACCURACY, other, truth)])
    assert found.p == mcnemar(9, 1)
    clustered = [measured(ACCURACY, outputs, truth, np.arange(20) // 2) for outputs in (one, other)]
    assert gap(clustered[:1], clustered[1:]).p != mcnemar(9, 1)


def test_a_difference_that_is_the_same_for_all_is_no_proof_that_there_is_none() -> None:
    right, wrong = np.ones(12), -np.ones(12)
    found = gap([measured(ACCURACY, right, np.ones(12))], [measured(ACCURACY, wrong, np.ones(12))])
    assert (found.difference, found.low, found.high, found.p) == (1.0, None, None, 2 / 2**12)  # McNemar's
    truth = np.arange(24) % 2
    found = gap([measured(AUROC, truth - 0.5, truth)], [measured(AUROC, 0.5 - truth, truth)])
    assert (found.difference, found.low, found.high, found.p) == (1.0, None, None, None)  # no variance, no test
    found = gap([measured(AUROC, truth - 0.5, truth)], [measured(AUROC, truth - 0.5, truth)])
    assert (found.difference, found.low, found.high, found.p) == (0.0, 0.0, 0.0, 1.0)


def test_holm_corrects_as_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    assert holm([0.5, 0.6]) == [1.0, 1.0]


def test_the_mean_over_seeds_is_paired_by_patient() -> None:
    first, second, truth = two_models()
    one, other = measured(AUROC, first, truth), measured(AUROC, second, truth)
    single, same = gap([one], [other]), gap([one, one], [other, other])
    assert (single.low, single.p) == pytest.approx((same.low, same.p), rel=1e-9)
    nothing = gap([one], [one])
    assert (nothing.difference, nothing.low, nothing.p, nothing.needed) == (0, 0, 1, None)


@pytest.mark.parametrize(
    ("task", "outputs", "targets", "reason", "needed"),
    [
        (AUROC, [], [], "no test examples", None),
        (AUROC, [1.0], [1.0], "all of one class", None),
        (AUROC, [0.1 * i for i in range(30)], [1.0] * 30, "all of one class", None),
        (AUROC, [float("nan")] * 12, [0.0, 1.0] * 6, "the model's outputs are not finite", None),
        (ACCURACY, [1.0] * 9, [1.0] * 9, "too few", 10),
        (AUROC, [0.1 * i for i in range(20)], [1.0] * 3 + [0.0] * 17, "too few", 40),
        (BINARY.scored_by("sensitivity-at-specificity:0.9"), range(20), [1.0] * 8 + [0.0] * 12, "too few", 30),
        (MULTI_LABEL, [[1.0, 2.0]] * 12, [[0.0, 1.0]] * 12, "all of one class", None),
        (CLASSIFICATION.scored_by("macro-f1"), [[1.0, 2.0, 0]] * 20, [0] * 18 + [1, 2], "too few", 120),
    ],
)
def test_too_little_has_a_reason_and_no_interval(
    task: Task, outputs: object, targets: object, reason: str, needed: int | None
) -> None:
    found = measured(task, outputs, targets).estimate()
    assert (found.reason, found.needed, found.low, found.high) == (reason, needed, None, None)
    assert found.value is None or 0 <= found.value <= 1


def test_how_many_patients_a_difference_needs_is_the_formula_of_two_normal_quantiles() -> None:
    exact = 100 * ((stats.norm.ppf(0.975) + stats.norm.ppf(0.8)) * 0.04 / 0.05) ** 2
    assert exact == pytest.approx(502.3, abs=0.1)
    assert needed_for(0.05, 0.04, 100) == needed_for(-0.05, 0.04, 100) == 510
    assert needed_for(0.0, 0.04, 100) is None
