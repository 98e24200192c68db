"""The form of a number in tables, sentences and pages."""

from __future__ import annotations

import math

from fedbn_flwr.training.tasks import higher_is_better, in_percent


def shown(value: float | None, metric: str = "", sign: str = "") -> str:
    """Return a value of a metric as text, or a count or a mean of counts without one.

    A share is in per cent with one decimal, another metric has four, and a mean of
    counts has one unless it is whole. Zero has no minus. An unknown value is "-".
    """
    if value is None or math.isnan(value):
        return "-"
    form = ".4f"
    if not metric:
        form = ",.0f" if value == round(value) else ",.1f"
    elif in_percent(metric):
        value, form = 100 * value, ".1f"
    return f"{value:{sign}z{form}}"


def with_unit(value: float | None, metric: str) -> str:
    """Return a value of a metric, with its unit if it has one."""
    return shown(value, metric) + (" %" if in_percent(metric) else "")


def directed(metric: str) -> str:
    """Return a metric with a note if lower values are better."""
    return metric if higher_is_better(metric) else f"{metric} (lower is better)"


def label_of(metric: str) -> str:
    """Return the name of a metric with its unit, and its direction if lower is better."""
    return f"{metric}, %" if in_percent(metric) else directed(metric)
