"""Rules for the model and its state, and the list of all rules, ``RULES``.

A rule is a function from the measurements to a finding or None. All rules have the same
order: first the conditions without a finding, then the evidence, the remedies and the
finding.
"""

from __future__ import annotations

from fedbn_flwr.doctor import data_rules, remedies
from fedbn_flwr.doctor.findings import Finding, listed
from fedbn_flwr.doctor.measured import Measurements
from fedbn_flwr.doctor.thresholds import EXTREME_SHARE
from fedbn_flwr.norms.replaced_layers import shown_path


def unusable_statistics(m: Measurements) -> Finding | None:
    """Report values that make every test meaningless, such as negative variances."""
    if not m.unusable:
        return None
    evidence = [f"{name}: {what}." for name, what in [*m.unusable.items()][:3]]
    tries = remedies.UNUSABLE
    if m.diverged:
        # The weights are not finite either, so the training is the cause, not the
        # server's arithmetic.
        tries = remedies.DIVERGED
    return Finding(
        "unusable-statistics",
        "The state contains running variances below 0 or non-finite values.",
        evidence,
        {"entries": dict(m.unusable)},
        tries,
    )


def averaged_counters(m: Measurements) -> Finding | None:
    """Report counters ``num_batches_tracked`` that are floats or negative.

    A counter is a float if it was averaged with the weights.
    """
    if not m.counters:
        return None
    evidence = [
        f"{name} is {what}, but it must be an int64 of at least 0."
        for name, what in [*m.counters.items()][:3]
    ]
    evidence.append(
        f"{len(m.counters)} counters are affected. A float 9.999999 loads as 9, and"
        " counting continues from there."
    )
    return Finding(
        "averaged-counters",
        "BatchNorm's counters were averaged, but num_batches_tracked is a number of"
        " batches, an integer.",
        evidence,
        {"entries": dict(m.counters)},
        remedies.COUNTERS,
    )


def name_filter(m: Measurements) -> Finding | None:
    """Report a split that keeps some BatchNorm layers local and misses others."""
    missed = m.missed
    if missed is None or not missed.entries:
        return None
    layers, entries = missed.layers, missed.entries
    evidence = [
        f"The split misses {len(layers)} of {missed.num_layers} BatchNorm layers,"
        f" found by their type: {', '.join(layers[:3])}.",
        f"Entries sent and averaged ({len(entries)}): {', '.join(entries[:3])}, ...",
    ]
    if missed.kept_layers:
        what, tries = (
            "The split by names misses BatchNorm layers.",
            remedies.NAME_FILTER,
        )
    else:
        # Nothing stays local, so this FedBN is FedAvg, as the first remedy explains.
        what = "The split keeps no BatchNorm layer at all."
        tries = remedies.NOTHING_KEPT
    numbers = {"layers": layers, "entries": entries}
    return Finding("name-filter", what, evidence, numbers, tries)


def tested_by_batch(m: Measurements) -> Finding | None:
    """Report tests that normalise by the test batch, with one of three reasons."""
    # Report layers in train mode first, because they also change the running
    # statistics.
    layers = m.training_layers or m.untracked
    tries = remedies.TRAIN_MODE
    if m.training_layers:
        reason = (
            f"{len(layers)} of {m.num_layers} BatchNorm layers are in train mode in the"
            " model as passed. A test normalises by the test batch and updates the"
            " running statistics."
        )
    elif m.untracked:
        reason = (
            f"{len(layers)} of {m.num_layers} BatchNorm layers have no running"
            f" statistics ({listed(layers)})."
        )
        tries = remedies.NO_RUNNING_STATISTICS
    elif m.training.tested_by_batch:
        reason = (
            "The run's first test ends in -test-bn, so it normalises by the test batch."
        )
    else:
        return None
    evidence = [reason]
    numbers: dict[str, object] = {"layers": [*layers]}
    gap = m.gap
    if gap and gap.running_accuracy is not None:
        # Show the effect of the batch by testing the same examples in both ways.
        evidence.append(
            f"On the same examples, accuracy is {gap.batch_accuracy:.3f} with the"
            " statistics of mixed batches and"
            f" {gap.running_accuracy:.3f} in eval mode."
        )
        numbers |= {"mixed": gap.batch_accuracy, "eval": gap.running_accuracy}
    return Finding(
        "tested-with-batch-statistics",
        "Tests use the statistics of the test batch, so a prediction depends on the"
        " other examples in the batch.",
        evidence,
        numbers,
        tries,
    )


def frozen_but_moving(m: Measurements) -> Finding | None:
    """Report frozen BatchNorm layers whose running statistics move in training."""
    # If no parameter trains, the model was passed only for its values.
    if not (m.moving and m.trained):
        return None
    evidence = [
        f"No parameter of {len(m.moving)} of {m.num_layers} BatchNorm layers trains"
        f" ({listed(m.moving)}), but train mode updates their running statistics."
    ]
    return Finding(
        "frozen-but-moving",
        "The frozen part of the model changes in training.",
        evidence,
        {"layers": m.moving},
        remedies.frozen_but_moving(m.trained),
    )


def extreme_variance(m: Measurements) -> Finding | None:
    """Report running variances near zero in half of a layer, or above 1e8 anywhere."""
    extreme = {}
    for path, counts in m.extremes.items():
        low, high, channels = counts
        # A few channels with variances near zero are normal, but a single exploding
        # channel is not.
        if high or low >= EXTREME_SHARE * channels:
            extreme[path] = counts
    if not extreme:
        return None
    evidence = [
        f"Layer {shown_path(path)}: {low} of {channels} channels have a variance below eps,"
        f" and {high} have a variance above 1e8."
        for path, (low, high, channels) in [*extreme.items()][:3]
    ]
    tries = remedies.EXTREME_INSIDE
    if m.first_layer in extreme:
        # The scale of the inputs is a possible cause only if the first layer is
        # extreme.
        tries = remedies.EXTREME_VARIANCE
    what = "Running variances are near zero or explode."
    return Finding("extreme-variance", what, evidence, {"layers": extreme}, tries)


# The rules are in the order of causes. A fault that spoils later measurements comes
# before them, and a faulty model comes before clients that differ.
RULES = (
    unusable_statistics,
    averaged_counters,
    name_filter,
    tested_by_batch,
    frozen_but_moving,
    data_rules.unmoved_statistics,
    data_rules.small_batch,
    extreme_variance,
    data_rules.damaged_data,
    data_rules.label_skew,
    data_rules.feature_shift,
    data_rules.train_test_mismatch,
)
"""All rules; each returns a finding or None."""


def findings(m: Measurements) -> tuple[list[Finding], list[str]]:
    """Return the findings, the cause first, and notes on the handled findings.

    A finding is handled if the run's method already remedies it. A handled mismatch of
    training and test has no note.
    """
    found, notes = [], []
    for rule in RULES:
        finding = rule(m)
        if finding is None:
            continue
        if finding.id not in m.training.handled:
            found.append(finding)
        # Such a method does not test the state that has the mismatch.
        elif finding.id != "train-test-mismatch":
            notes.append(
                f"{m.training.method or 'The method'} handles this, so it is no finding:"
                f" {finding.what} {finding.evidence[0]}"
            )
    return found, notes
