"""All rules in the order of causes: a broken state or test first, then batches and layers, clients, consequences."""

from __future__ import annotations

from collections.abc import Callable

from fedbn_flwr.doctor import data_rules, model_rules
from fedbn_flwr.doctor.findings import Finding
from fedbn_flwr.doctor.measured import Measured

__all__ = ["RULES", "findings"]

RULES: tuple[Callable[[Measured], Finding | None], ...] = (
    model_rules.unusable_statistics,
    data_rules.inputs_not_finite,
    model_rules.averaged_counters,
    model_rules.name_filter,
    model_rules.tested_by_batch,
    data_rules.small_batch,
    model_rules.dead_layers,
    model_rules.extreme_variance,
    data_rules.label_skew,
    data_rules.feature_shift,
    data_rules.clients_differ,
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
