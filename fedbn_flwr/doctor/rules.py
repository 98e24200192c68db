"""All rules in the order of causes: a broken state or test first, then batches and layers, clients, consequences."""

from __future__ import annotations

from collections.abc import Callable

from fedbn_flwr.doctor import data_rules, model_rules
from fedbn_flwr.doctor.findings import Finding
from fedbn_flwr.doctor.measured import Measured

__all__ = ["RULES", "findings"]

RULES: tuple[Callable[[Measured], Finding | None], ...] = (
    model_rules.unusable_statistics,
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


def findings(m: Measured) -> list[Finding]:
    """Return the findings, the cause first."""
    found = [rule(m) for rule in RULES]
    return [finding for finding in found if finding is not None]
