"""Rules for the model and its state, and ``RULES``: all rules, the causes first.

A rule is one function from the measurements to a finding, or None. Each reads in the
same order: when it is no finding, the evidence, what to try, and the finding.
"""

from __future__ import annotations

from fedbn_flwr.doctor import data_rules, remedies
from fedbn_flwr.doctor.findings import Finding, listed
from fedbn_flwr.doctor.measured import Measured
from fedbn_flwr.doctor.thresholds import EXTREME_SHARE
from fedbn_flwr.norms.replaced_layers import shown_path

__all__ = [
    "RULES",
    "averaged_counters",
    "extreme_variance",
    "findings",
    "name_filter",
    "tested_by_batch",
    "unusable_statistics",
]


def unusable_statistics(m: Measured) -> Finding | None:
    """Values that make every test nonsense: a variance below 0, NaN or infinity."""
    if not m.unusable:
        return None
    evidence = [f"{name}: {what}." for name, what in [*m.unusable.items()][:3]]
    tries = remedies.UNUSABLE
    if m.diverged:
        # Weights are broken too, so the cause is training, not the server's arithmetic.
        tries = remedies.DIVERGED
    return Finding(
        "unusable-statistics",
        "The state holds running variances below 0, or values that are not finite.",
        evidence,
        {"entries": dict(m.unusable)},
        tries,
    )


def averaged_counters(m: Measured) -> Finding | None:
    """``num_batches_tracked`` as a float: counters were averaged with the weights."""
    if not m.counters:
        return None
    evidence = [
        f"{name} is {what}; an int64 of at least 0 belongs there."
        for name, what in [*m.counters.items()][:3]
    ]
    evidence.append(
        f"{len(m.counters)} counters in all. A float 9.999999 loads as 9, and then"
        " counts on from there."
    )
    return Finding(
        "averaged-counters",
        "BatchNorm's counters were averaged: num_batches_tracked is a number of"
        " batches, and an integer.",
        evidence,
        {"entries": dict(m.counters)},
        remedies.COUNTERS,
    )


def name_filter(m: Measured) -> Finding | None:
    """A split that keeps some BatchNorm layers local and misses others."""
    missed = m.missed
    if missed is None or not missed.entries:
        return None
    layers, entries = missed.layers, missed.entries
    evidence = [
        f"{len(layers)} of {missed.num_layers} BatchNorm layers are missed,"
        f" found by their type: {', '.join(layers[:3])}.",
        f"{len(entries)} entries are sent and averaged: {', '.join(entries[:3])}, ...",
    ]
    if missed.kept_layers:
        what, tries = (
            "The split by names misses BatchNorm layers.",
            remedies.NAME_FILTER,
        )
        if missed.by_letters:
            evidence.append(
                f"A filter `{missed.by_letters!r} in name` keeps exactly the other"
                " layers: names do not tell a layer's type. A layer in a Sequential has"
                " a number, torchvision's shortcut is called downsample.1."
            )
    else:
        # Nothing stays local: this FedBN is FedAvg, and the first remedy says so.
        what = "The split keeps no BatchNorm layer at all."
        tries = remedies.NOTHING_KEPT
    numbers = {"layers": layers, "entries": entries, "letters": missed.by_letters}
    return Finding("name-filter", what, evidence, numbers, tries)


def tested_by_batch(m: Measured) -> Finding | None:
    """Tests that normalise by the test batch, for one of three reasons."""
    # Layers in train mode go first: they move the running statistics as well.
    layers = m.training_layers or m.untracked
    tries = remedies.TRAIN_MODE
    if m.training_layers:
        reason = (
            f"{len(layers)} of {m.num_layers} BatchNorm layers are in train mode in the"
            " model as it was given: a test normalises by the test batch, and moves"
            " the running statistics."
        )
    elif m.untracked:
        reason = (
            f"{len(layers)} of {m.num_layers} BatchNorm layers have no running"
            f" statistics ({listed(layers)})."
        )
        tries = remedies.NO_RUNNING_STATISTICS
    elif m.training.tested_by_batch:
        reason = (
            "The run's first test is global-batch-statistics: it normalises by the test"
            " batch."
        )
    else:
        return None
    evidence = [reason]
    numbers: dict[str, object] = {"layers": [*layers]}
    gap = m.gap
    if gap and gap.running_accuracy is not None:
        # How much hangs on the batch: the same examples, tested in both ways.
        evidence.append(
            f"The same examples: accuracy {gap.batch_accuracy:.3f} by the statistics"
            f" of mixed batches, {gap.running_accuracy:.3f} in eval mode."
        )
        numbers |= {"mixed": gap.batch_accuracy, "eval": gap.running_accuracy}
    return Finding(
        "tested-with-batch-statistics",
        "Tests use the statistics of the test batch: a prediction depends on the"
        " examples beside it.",
        evidence,
        numbers,
        tries,
    )


def extreme_variance(m: Measured) -> Finding | None:
    """Running variances near zero in half of a layer, or above 1e8 in any channel."""
    extreme = {}
    for path, counts in m.extremes.items():
        low, high, channels = counts
        # A few channels that never fire are usual, one that explodes is not.
        if high or low >= EXTREME_SHARE * channels:
            extreme[path] = counts
    if not extreme:
        return None
    evidence = [
        f"{shown_path(path)}: of {channels} channels {low} have a variance below eps,"
        f" {high} one above 1e8."
        for path, (low, high, channels) in [*extreme.items()][:3]
    ]
    tries = remedies.EXTREME_INSIDE
    if m.first_layer in extreme:
        # Behind a first layer that is sound, the scale of the inputs is not the cause.
        tries = remedies.EXTREME_VARIANCE
    what = "Running variances are near zero or explode."
    return Finding("extreme-variance", what, evidence, {"layers": extreme}, tries)


# The order is that of causes: what spoils later measurements comes before them, and
# a model that is wrong as it stands before clients that differ.
RULES = (
    unusable_statistics,
    averaged_counters,
    name_filter,
    tested_by_batch,
    data_rules.unmoved_statistics,
    data_rules.small_batch,
    extreme_variance,
    data_rules.client_inputs,
    data_rules.client_classes,
    data_rules.client_repeats,
    data_rules.label_skew,
    data_rules.feature_shift,
    data_rules.clients_differ,
    data_rules.client_below,
    data_rules.train_test_mismatch,
)
"""Each rule returns a finding, or None."""


def findings(m: Measured) -> tuple[list[Finding], list[str]]:
    """Return the findings, the cause first, and a note for each that is handled.

    A finding is handled where the run's method is a remedy for it already.
    """
    found, notes = [], []
    for rule in RULES:
        finding = rule(m)
        if finding is None:
            continue
        if finding.id in m.training.handled:
            notes.append(
                f"no finding, since {m.training.method or 'the method'} is a remedy:"
                f" {finding.what} {finding.evidence[0]}"
            )
        else:
            found.append(finding)
    return found, notes
