"""The verdict from labels, against scipy and scikit-learn, and its rates of error."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn import metrics

from fedbn_flwr.lab.report.words import of_mean
from fedbn_flwr.lab.results.columns import column_facts, evidence
from fedbn_flwr.lab.results.intervals import Interval, interval
from fedbn_flwr.lab.results.label_verdict import (
    _decided,
    threshold_of_sites,
    verdict,
)
from fedbn_flwr.lab.results.predictions import SiteTest
from fedbn_flwr.lab.results.sites import CLASSES, Comparison, _two_classes
from fedbn_flwr.training.tasks import BINARY, CLASSIFICATION


def drawn(seed: int, count: int, signal: float, share: float = 0.5) -> SiteTest:
    """Return a test of a binary model whose logits carry a signal of the labels."""
    draw = np.random.default_rng(seed)
    targets = (draw.random(count) < share).astype(np.float32)
    logits = (
        signal * (2 * targets - 1)
        + draw.normal(size=count)
        + np.log(share / (1 - share))
    )
    outputs = torch.tensor(logits, dtype=torch.float32)
    return SiteTest(BINARY, outputs, torch.tensor(targets), np.arange(count))


def repeated(test: SiteTest, times: int) -> SiteTest:
    """Return a test that has each example so many times."""
    outputs, targets = test.outputs.repeat(times), test.targets.repeat(times)
    return replace(test, outputs=outputs, targets=targets)


@pytest.mark.parametrize("seed", range(3))
def test_the_figures_are_those_of_the_libraries(seed: int) -> None:
    test = drawn(seed, 200, 0.8, 0.3)
    diverged = replace(test, outputs=test.outputs / 0)
    cut = threshold_of_sites([test, diverged])
    rows = verdict(test, cut).rows
    y, logits = test.targets.numpy(), test.outputs.numpy()
    for place, at in enumerate((0.0, cut)):
        called = logits > at
        expected = {
            "accuracy": metrics.accuracy_score(y, called),
            "sensitivity": metrics.recall_score(y, called),
            "specificity": metrics.recall_score(y, called, pos_label=0),
            "called positive": called.mean(),
        }
        for name, value in expected.items():
            assert rows[name][place].value == pytest.approx(value)
    # One kind of interval: the accuracy of the verdict is the accuracy of a table.
    assert rows["accuracy"][0] == interval(test.scored_by("accuracy"))
    assert rows["AUROC"][0].value == pytest.approx(metrics.roc_auc_score(y, logits))
    at_half = {name: both[0].value for name, both in rows.items() if name != "AUROC"}
    assert _two_classes(test, 1)[CLASSES] == at_half
    # No other threshold has a larger sensitivity plus specificity.
    best = max(metrics.balanced_accuracy_score(y, logits > at) for at in logits)
    assert metrics.balanced_accuracy_score(y, logits > cut) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("signal", [0.5, -0.5])
def test_a_reversed_order_is_named_if_it_is_beyond_chance(
    signal: float, seed: int
) -> None:
    site = drawn(seed, 120, signal, 0.3)
    found = _two_classes(site, 1)[CLASSES]
    assert ("reversed" in found) is (signal < 0)
    assert "reversed" not in _two_classes(site, 10**12)[CLASSES], "of so many sites"
    rows = [{"site": "Nord", CLASSES: found}]
    plain = Comparison(rows, Interval(0.5, 0.1), Interval(), Interval(), [], {}, 120)
    assert ("beyond chance, at Nord" in of_mean(plain, "auroc", 0)) is (signal < 0)


@pytest.mark.parametrize(
    ("signal", "count", "wrong"),
    [(0.0, 60, {"good", "bad"}), (-1.0, 15, {"good"}), (1.0, 15, {"bad"})],
)
def test_a_wrong_verdict_is_rare(
    signal: float, count: int, wrong: set[str], monkeypatch
) -> None:
    """Without a reason, at most one model in twenty is called better or worse.

    The count is at most the 95 % quantile of the draws with this rate.
    """
    monkeypatch.setattr("fedbn_flwr.lab.results.intervals._RESAMPLES", 100)
    states = Counter(verdict(drawn(seed, 74, signal)).state for seed in range(count))
    for state in wrong:
        assert states[state] <= stats.binom.ppf(0.95, count, 1 / 20)


def test_the_examples_of_a_patient_say_as_much_as_one() -> None:
    """If each example is there three times, nothing becomes more certain."""
    test = drawn(1, 40, 0.25)
    thrice = replace(repeated(test, 3), units=np.tile(test.units, 3))
    one, other = verdict(test, 0.2), verdict(thrice, 0.2)
    assert (other.state, other.labels) == (one.state, 3 * one.labels)
    for name, numbers in one.rows.items():
        for mine, theirs in zip(numbers, other.rows[name], strict=True):
            assert mine.ends() == pytest.approx(theirs.ends())


@pytest.mark.parametrize("count", [24, 40, 300])
def test_an_open_verdict_names_the_labels_that_would_decide(count: int) -> None:
    """With so many labels and the same shares, the exact test decides."""
    for wins, losses in itertools.product(range(13), repeat=2):
        state, labels = _decided(wins, losses, count, 1.0)
        assert (labels > count) == (state == "undecided")
        if count < labels < 10_000:
            of_more = (round(one * labels / count) for one in (wins, losses))
            assert _decided(*of_more, labels, 1.0)[0] != "undecided", (wins, losses)


def test_reversed_labels_are_named_and_classes_are_judged() -> None:
    reversed_labels = verdict(drawn(2, 100, -1.5))
    assert reversed_labels.state == "bad"
    assert "below 50" in reversed_labels.answer
    classes = torch.arange(60) % 3
    outputs = torch.nn.functional.one_hot(classes, 3).float()
    right = SiteTest(CLASSIFICATION, outputs, classes, np.arange(60))
    for shift, state in ((0, "good"), (1, "bad")):
        shifted = replace(right, targets=(classes + shift) % 3)
        assert verdict(shifted).state == state


FAULTS = {
    "not scaled": lambda x: x * torch.tensor([9.0, 40.0, 2.0, 1.0]) + 50,
    "another unit": lambda x: torch.cat([x[:, :1] / 40 - 2, x[:, 1:]], 1),
    "rolled": lambda x: x.roll(1, 1),
    "reversed": lambda x: x.flip(1),
    "signs": lambda x: -x,
    "constant": lambda x: torch.cat([x[:, :1], 0 * x[:, 1:2], x[:, 2:]], 1),
}


@pytest.mark.parametrize("seed", range(8))
def test_a_bad_table_is_not_silent_and_a_good_table_is(seed: int) -> None:
    """Two columns of numbers, one of two values and one of four, of 200 patients."""
    draw = torch.Generator().manual_seed(seed)

    def table(count: int) -> torch.Tensor:
        numbers = torch.randn(count, 2, generator=draw)
        two = (torch.rand(count, 1, generator=draw) < 0.6) * 2.0 - 1.2
        four = torch.randint(4, (count, 1), generator=draw) / 1.1 - 1.4
        return torch.cat([numbers, two, four], 1)

    known = column_facts(table(600), ["age", "crp", "sex", "cp"])
    good = table(200)
    for fault, change in {"none": torch.clone, **FAULTS}.items():
        remarks = [remark for _, _, remark in evidence(known, change(good))]
        assert any(remarks) == (fault != "none"), fault
    names = ["crp", "age", "sex", "cp"]
    remarks = {name: remark for name, _, remark in evidence(known, good, names)}
    assert "the sites have age here" in remarks["crp"]
