"""The words and numbers of pages and commands."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from shlex import quote

import jinja2
from markupsafe import Markup, escape

from fedbn_flwr.lab.files import site_label
from fedbn_flwr.lab.output.intervals import Comparison, Interval
from fedbn_flwr.training.tasks import higher_is_better, in_percent, quantity_of


def of_mean(found: Comparison, metric: str, against: object = None) -> str:
    """Return the mean over the sites in a sentence, maybe with the difference."""
    unit = " %" if in_percent(metric) else ""
    sites = f"{len(found.sites)} site{'' if len(found.sites) == 1 else 's'}"
    text = f"Mean test {directed(metric)} of {sites}: {shown(found.mean.value, metric)}"
    text += unit + ("" if against else _ends(found.mean, metric, found.examples))
    if against and found.gap.value is not None:
        side = found.gap.side() * (1 if higher_is_better(metric) else -1)
        words = {1: "better", -1: "worse", 0: "not decided"}[side]
        text += (
            f". {against} has {shown(found.other.value, metric)}{unit} at the same"
            f" sites; difference {shown(found.gap.value, metric, '+')}"
            f"{_ends(found.gap, metric, found.examples, '+')}: {words}"
        )
    without = ", ".join(f"{site} ({why})" for site, why in found.left_out.items())
    return f"{text}. Without {without}." if without else f"{text}."


def _ends(number: Interval, metric: str, examples: int, sign: str = "") -> str:
    low, high = (shown(end, metric, sign) for end in number.ends())
    if number.error is None:
        return f" (no interval: {number.why})" if number.why else ""
    return f" (95 % interval {low} to {high} from {examples:,} test examples)"


@functools.cache
def template(path: Path) -> jinja2.Template:
    """Return a template of the laboratory. The templates have the words."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(path.parent),
        autoescape=path.suffix == ".html",
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.tests |= {"percent": in_percent, "rising": higher_is_better}
    environment.filters |= {"shown": shown, "label": site_label, "quoted": quote}
    environment.filters |= {"directed": directed}
    environment.filters |= {"quantity": quantity_of, "key": label_of, "code": _code}
    return environment.get_template(path.name)


def _code(text: object) -> Markup:
    """Return a text of a page, with code elements instead of backticks."""
    # ``re.sub`` of a Markup would escape the elements.
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def shown(value: float | None, key: str, sign: str = "") -> str:
    """Return a value of a metric in the form of the page."""
    if value is None:
        return "-"
    return f"{100 * value:{sign}.1f}" if in_percent(key) else f"{value:{sign}.4f}"


def directed(metric: str) -> str:
    """Return a metric with a note if lower values are better."""
    return metric if higher_is_better(metric) else f"{metric} (lower is better)"


def label_of(metric: str) -> str:
    """Return the name of a metric with its unit, and its direction if lower is better."""
    return f"{metric}, %" if in_percent(metric) else directed(metric)
