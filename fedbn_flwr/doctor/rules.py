"""Rules for the model and its state; and all rules in the order of causes, with those
of ``data_rules``.

Each rule is one function, from the measurements to a finding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from fedbn_flwr.doctor import data_rules, remedies
from fedbn_flwr.doctor.findings import Finding, listed
from fedbn_flwr.doctor.measured import Measured
from fedbn_flwr.doctor.thresholds import EXTREME_SHARE
from fedbn_flwr.norms.report import shown_path

__all__ = [
    "RULES",
    "averaged_counters",
    "extreme_variance",
    "findings",
    "name_filter",
    "tested_by_batch",
    "unusable_statistics",
]

V = TypeVar("V")


def unusable_statistics(m: Measured) -> Finding | None:
    """A running variance that is negative, or weights or statistics that are not
    finite: every test is nonsense.
    """
    if not m.unusable:
        return None
    return Finding(
        "unusable-statistics",
        "The state holds running variances below 0, or values that are not finite.",
        [f"{name}: {what}." for name, what in _first(m.unusable)],
        {"entries": dict(m.unusable)},
        remedies.DIVERGED if m.diverged else remedies.UNUSABLE,
    )


def averaged_counters(m: Measured) -> Finding | None:
    """``num_batches_tracked`` as a float: the counters were averaged with the weights."""
    if not m.counters:
        return None
    return Finding(
        "averaged-counters",
        "BatchNorm's counters were averaged: num_batches_tracked is a number of"
        " batches, and an integer.",
        [
            f"{name} is {what}; an int64 of at least 0 belongs there."
            for name, what in _first(m.counters)
        ]
        + [
            f"{len(m.counters)} counters in all. A float 9.999999 loads as 9, and then"
            " counts on from there."
        ],
        {"entries": dict(m.counters)},
        remedies.COUNTERS,
    )


def name_filter(m: Measured) -> Finding | None:
    """A split that keeps some BatchNorm layers local and misses others."""
    missed = m.missed
    if missed is None or not missed.entries:
        return None
    evidence = [
        (
            f"{len(missed.layers)} of {missed.num_layers} BatchNorm layers are missed,"
            f" found by their type: {', '.join(missed.layers[:3])}."
        ),
        (
            f"{len(missed.entries)} entries are sent and averaged:"
            f" {', '.join(missed.entries[:3])}, ..."
        ),
    ]
    if missed.by_letters and missed.kept_layers:
        evidence.append(
            f"A filter `{missed.by_letters!r} in name` keeps exactly the other layers:"
            " names do not tell a layer's type. A layer in a Sequential has a number,"
            " torchvision's shortcut is called downsample.1."
        )
    kept = missed.kept_layers
    return Finding(
        "name-filter",
        (
            "The split by names misses BatchNorm layers."
            if kept
            else "The split keeps no BatchNorm layer at all."
        ),
        evidence,
        {
            "layers": missed.layers,
            "entries": missed.entries,
            "letters": missed.by_letters,
        },
        remedies.NAME_FILTER if kept else remedies.NOTHING_KEPT,
    )


def tested_by_batch(m: Measured) -> Finding | None:
    """BatchNorm in train mode at test time, or layers that have no running statistics
    to test with.
    """
    layers = m.training_layers or m.untracked
    if not layers and not m.training.tested_by_batch:
        return None
    evidence = []
    if m.training_layers:
        evidence.append(
            f"{len(layers)} of {m.num_layers} BatchNorm layers are in train mode in the"
            " model as it was given: a test normalises by the test batch, and moves"
            " the running statistics."
        )
    elif layers:
        evidence.append(
            f"{len(layers)} of {m.num_layers} BatchNorm layers have no running"
            f" statistics ({listed(layers)})."
        )
    else:
        evidence.append(
            "The run's first test is global-batch-statistics: it normalises by the test"
            " batch."
        )
    numbers: dict[str, object] = {"layers": [*layers]}
    if m.gap and m.gap.running_accuracy is not None:
        evidence.append(
            f"The same examples: accuracy {m.gap.batch_accuracy:.3f} by the statistics"
            f" of mixed batches, {m.gap.running_accuracy:.3f} in eval mode."
        )
        numbers |= {"mixed": m.gap.batch_accuracy, "eval": m.gap.running_accuracy}
    chosen = (
        remedies.TRAIN_MODE
        if m.training_layers or not layers
        else remedies.NO_RUNNING_STATISTICS
    )
    return Finding(
        "tested-with-batch-statistics",
        "Tests use the statistics of the test batch: a prediction depends on the"
        " examples beside it.",
        evidence,
        numbers,
        chosen,
    )


def extreme_variance(m: Measured) -> Finding | None:
    """Running variances near zero in half of a layer, or above 1e8 in any channel."""
    extreme = {
        path: c
        for path, c in m.extremes.items()
        if c[1] or c[0] >= EXTREME_SHARE * c[2]
    }
    if not extreme:
        return None
    evidence = [
        f"{path}: of {all_} channels {low} have a variance below eps, {high} one above"
        " 1e8."
        for path, (low, high, all_) in _first(extreme)
    ]
    # Behind a first layer that is sound, the scale of the inputs is not the cause.
    chosen = (
        remedies.EXTREME_VARIANCE
        if m.first_layer in extreme
        else remedies.EXTREME_INSIDE
    )
    what = "Running variances are near zero or explode."
    return Finding("extreme-variance", what, evidence, {"layers": extreme}, chosen)


def _first(by_path: Mapping[str, V]) -> list[tuple[str, V]]:
    return [(shown_path(path), value) for path, value in list(by_path.items())[:3]]


RULES: tuple[Callable[[Measured], Finding | None], ...] = (
    unusable_statistics,
    averaged_counters,
    name_filter,
    tested_by_batch,
    data_rules.unmoved_statistics,
    data_rules.small_batch,
    extreme_variance,
    data_rules.client_inputs,
    data_rules.client_classes,
    data_rules.label_skew,
    data_rules.feature_shift,
    data_rules.clients_differ,
    data_rules.client_below,
    data_rules.train_test_mismatch,
)
"""Each rule returns a finding, or None."""


def findings(m: Measured) -> tuple[list[Finding], list[str]]:
    """Return the findings, the cause first; and a note for each that the method is a
    remedy for already.
    """
    results = [finding for rule in RULES if (finding := rule(m)) is not None]
    handled = [finding for finding in results if finding.id in m.training.handled]
    notes = [
        f"no finding, since {m.training.method or 'the method'} is a remedy:"
        f" {finding.what} {finding.evidence[0]}"
        for finding in handled
    ]
    return [finding for finding in results if finding not in handled], notes
