"""Rules for the model and its state; and all rules in the order of causes, with those of ``data_rules``.

Each rule is one function, from the measurements to a finding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from fedbn_flwr.doctor import client_rules, data_rules, remedies
from fedbn_flwr.doctor.findings import Finding, listed
from fedbn_flwr.doctor.measured import Measured
from fedbn_flwr.doctor.thresholds import DEAD_SHARE
from fedbn_flwr.norms.report import shown_path

__all__ = [
    "RULES",
    "averaged_counters",
    "dead_layers",
    "extreme_variance",
    "findings",
    "name_filter",
    "tested_by_batch",
    "unusable_statistics",
]

V = TypeVar("V")


def unusable_statistics(m: Measured) -> Finding | None:
    """A running variance that is negative, or weights or statistics that are not finite: every test is nonsense."""
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
        "BatchNorm's counters were averaged: num_batches_tracked is a number of batches, and an integer.",
        [f"{name} is {what}; an int64 of at least 0 belongs there." for name, what in _first(m.counters)]
        + [f"{len(m.counters)} counters in all. A float 9.999999 loads as 9, and then counts on from there."],
        {"entries": dict(m.counters)},
        remedies.COUNTERS,
    )


def name_filter(m: Measured) -> Finding | None:
    """A split that keeps some BatchNorm layers local and misses others."""
    missed = m.missed
    if missed is None or not missed.entries:
        return None
    evidence = [
        f"{len(missed.layers)} of {missed.num_layers} BatchNorm layers are missed, found by their type: "
        f"{', '.join(missed.layers[:3])}.",
        f"{len(missed.entries)} entries are sent and averaged: {', '.join(missed.entries[:3])}, ...",
    ]
    if missed.by_letters and missed.kept_layers:
        evidence.append(
            f"A filter `{missed.by_letters!r} in name` keeps exactly the other layers: names do not tell a layer's "
            "type. A layer in a Sequential has a number, torchvision's shortcut is called downsample.1."
        )
    if missed.others:
        evidence.append(f"It also keeps {len(missed.others)} entries that are no BatchNorm ({missed.others[0]}, ...).")
    kept = missed.kept_layers
    return Finding(
        "name-filter",
        "The split by names misses BatchNorm layers." if kept else "The split keeps no BatchNorm layer at all.",
        evidence,
        {"layers": missed.layers, "entries": missed.entries, "letters": missed.by_letters},
        remedies.NAME_FILTER if kept else remedies.NOTHING_KEPT,
    )


def tested_by_batch(m: Measured) -> Finding | None:
    """BatchNorm in train mode at test time, or layers that have no running statistics to test with."""
    layers = m.training_layers or m.untracked
    if not layers and not m.training.tested_by_batch:
        return None
    evidence = []
    if m.training_layers:
        evidence.append(
            f"{len(layers)} of {m.num_layers} BatchNorm layers are in train mode in the model as it was given: a test "
            "normalises by the test batch, and moves the running statistics."
        )
    elif layers:
        evidence.append(
            f"{len(layers)} of {m.num_layers} BatchNorm layers have no running statistics ({listed(layers)})."
        )
    else:
        evidence.append("The run's first test is global-batch-statistics: it normalises by the test batch.")
    numbers: dict[str, object] = {"layers": [*layers]}
    if m.gap and m.gap.running_accuracy is not None and m.sorted_accuracy is not None:
        evidence.append(
            f"The same examples, accuracy with all BatchNorm layers in train mode: {m.gap.batch_accuracy:.3f} in mixed "
            f"batches, {m.sorted_accuracy:.3f} if they come sorted by class"
            + ("." if m.untracked else f", {m.gap.running_accuracy:.3f} in eval mode in any order.")
        )
        numbers |= {"mixed": m.gap.batch_accuracy, "sorted": m.sorted_accuracy, "eval": m.gap.running_accuracy}
    chosen = remedies.TRAIN_MODE if m.training_layers or not layers else remedies.NO_RUNNING_STATISTICS
    return Finding(
        "tested-with-batch-statistics",
        "Tests use the statistics of the test batch: a prediction depends on the examples beside it.",
        evidence,
        numbers,
        chosen,
    )


def dead_layers(m: Measured) -> Finding | None:
    """Layers of which half of the gammas are 0, or a dead layer of another kind."""
    by_gamma = {path: counts for path, counts in m.gammas.items() if counts[0] >= DEAD_SHARE * counts[1]}
    if not by_gamma:
        return _dead_elsewhere(m)
    evidence = [f"{path}: gamma of {zero} of {all_} channels is 0." for path, (zero, all_) in _first(by_gamma)]
    layers = sorted(by_gamma)
    what = "A BatchNorm layer is dead." if len(layers) == 1 else f"{len(layers)} BatchNorm layers are dead."
    return Finding("dead-layer", what, evidence, {"layers": layers}, remedies.DEAD_LAYER)


def _dead_elsewhere(m: Measured) -> Finding | None:
    """A layer is dead behind BatchNorm, or of another kind: behind it all examples are the same."""
    same_output = m.same_output and not m.fresh
    if not m.blocked and not same_output:
        return None
    evidence = []
    if m.blocked:
        evidence.append(
            f"The examples differ, but the input of {shown_path(m.blocked)} is the same for all of them, in every "
            "channel. A layer in front of it lets nothing through, such as a ReLU whose inputs are all negative."
        )
    if same_output:
        evidence.append("The model has the same output for all examples.")
    what = f"A layer in front of {shown_path(m.blocked)} is dead." if m.blocked else "The last layers are dead."
    return Finding("dead-layer", what, evidence, {"layers": [], "in-front-of": m.blocked}, remedies.DEAD_LAYER)


def extreme_variance(m: Measured) -> Finding | None:
    """Running variances near zero in half of a layer, or above 1e8 in any channel."""
    extreme = {path: c for path, c in m.extremes.items() if c[1] or c[0] >= DEAD_SHARE * c[2]}
    if not extreme:
        return None

    def seen(path: str, kind: int) -> str:
        return f" ({m.in_data[path][kind]} in the data)" if path in m.in_data else ""

    # Where the data are not extreme, it is the statistics that are wrong.
    of_data = [path for path in extreme if path not in m.in_data or any(m.in_data[path])]
    # Behind a first layer that is sound, the scale of the inputs is not the cause.
    if m.first_layer in of_data:
        chosen = remedies.EXTREME_VARIANCE
    elif of_data:
        chosen = remedies.EXTREME_INSIDE
    else:
        chosen = remedies.WRONG_VARIANCE
    return Finding(
        "extreme-variance",
        "Running variances are near zero or explode.",
        [
            f"{shown_path(path)}: of {all_} channels {low} have a variance below eps{seen(path, 0)}, {high} one above "
            f"1e8{seen(path, 1)}."
            for path, (low, high, all_) in list(extreme.items())[:3]
        ],
        {"layers": {path: {"near-zero": c[0], "exploding": c[1], "channels": c[2]} for path, c in extreme.items()}},
        chosen,
    )


def _first(by_path: Mapping[str, V]) -> list[tuple[str, V]]:
    return [(shown_path(path), value) for path, value in list(by_path.items())[:3]]


RULES: tuple[Callable[[Measured], Finding | None], ...] = (
    unusable_statistics,
    data_rules.inputs_not_finite,
    averaged_counters,
    name_filter,
    tested_by_batch,
    data_rules.unmoved_statistics,
    data_rules.small_batch,
    dead_layers,
    extreme_variance,
    client_rules.client_units,
    client_rules.client_inputs,
    client_rules.client_classes,
    data_rules.label_skew,
    data_rules.feature_shift,
    data_rules.clients_differ,
    client_rules.client_below,
    data_rules.train_test_mismatch,
)
"""Each rule returns a finding, or None."""


def findings(m: Measured) -> tuple[list[Finding], list[str]]:
    """Return the findings, the cause first; and a note for each that the method is a remedy for already."""
    results = [finding for rule in RULES if (finding := rule(m)) is not None]
    handled = [finding for finding in results if finding.id in m.training.handled]
    notes = [
        f"no finding, since {m.training.method or 'the method'} is a remedy: {finding.what} {finding.evidence[0]}"
        for finding in handled
    ]
    return [finding for finding in results if finding not in handled], notes
