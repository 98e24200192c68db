"""The answer of a run in a few facts, for its page and the end of its command."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from statistics import fmean
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup, escape

from fedbn_flwr.errors import FedBNError
from fedbn_flwr.lab.files import ledger_of, site_label, trained
from fedbn_flwr.lab.references import (
    ALONE,
    Comparison,
    Mean,
    alone_command,
    changed_command,
    half_of,
    mean_of,
    name_of,
    with_alone,
)
from fedbn_flwr.lab.run_files import RunFiles
from fedbn_flwr.training.tasks import (
    REGRESSION,
    higher_is_better,
    in_percent,
    quantity_of,
)


@dataclass(frozen=True)
class Fact:
    """One fact of the answer.

    Attributes:
        about: the subject.
        value: the number with its unit.
        more: the explanation.
        tone: "good" or "bad" news, or "".
    """

    about: str
    value: str
    more: str
    tone: str = ""


def facts_of(
    run: RunFiles,
    sites: Sequence[Mapping[str, Any]],
    comparisons: Sequence[Comparison] = (),
) -> list[Fact]:
    """Return the result, the worst site, the comparisons and the cost.

    Held-out sites have a fact of their own.

    Args:
        run: the run.
        sites: rows of ``site_rows``.
        comparisons: the comparisons with other runs.
    """
    contents = {
        "run": run,
        "sites": sites,
        "comparisons": comparisons,
        "mean": mean_of(sites),
        "totals": run.summary.get("ledger") or ledger_of(run.lines),
    }
    made: Any = template(Path(__file__).with_name("facts.txt")).make_module(contents)
    return [Fact(*map(str, fact)) for fact in made.facts]


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
    environment.filters |= {"shown": shown, "interval": interval_text}
    environment.filters |= {"named": name_of, "label": site_label, "quoted": quote}
    environment.filters |= {"directed": directed, "trained": trained}
    environment.filters |= {"quantity": quantity_of, "key": label_of, "code": _code}
    return environment.get_template(path.name)


def _code(text: object) -> Markup:
    """Return a text of a page, with code elements instead of backticks."""
    # ``re.sub`` of a Markup would escape the elements.
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def interval_text(mean: Mean, metric: str, sign: str = "") -> str:
    """Return "; 95 % interval ..." with the sites that are not in it, or "".

    Without a sign, the text also has the mean of the other sites.
    """
    if mean.half is None:
        return f"; no interval: {mean.why}" if mean.why else ""
    ends = [mean.value - mean.half, mean.value + mean.half]
    if in_percent(metric):
        ends = [min(max(end, -1 if sign else 0), 1) for end in ends]
    low, high = (shown(end, metric, sign) for end in ends)
    text = f"95 % interval {low} to {high} from {mean.examples:,} test examples"
    without = ", ".join(f"{site} ({why})" for site, why in mean.left_out.items())
    if without and sign:
        return f"; {text}, without {without}"
    if without:
        return f"; without {without}: {shown(mean.value, metric)}, {text}"
    return f"; {text}"


def odd_site(
    sites: Sequence[Mapping[str, Any]], key: str = "", of: int = 1
) -> dict[str, Any]:
    """Return the row of the site furthest from the mean of the others in a number.

    The row has in addition this ``mean``, ``half`` of the interval of the difference,
    and the number of ``sites`` with an interval. The furthest of n sites is often far
    by chance, so the interval has the level 1 - 0.05 / n / of (Bonferroni). Fewer than
    three intervals give no row.

    Args:
        sites: rows of ``site_rows``.
        key: the beginning of the keys of the number, such as "yes-".
        of: how many numbers are compared.
    """
    value, spread = f"{key}value", f"{key}spread"
    rows = [row for row in trained(sites) if row.get(spread) is not None]
    n, found = len(rows), []
    for row in rows if n > 2 else ():
        others = [other for other in rows if other is not row]
        spreads = [row[spread], *(other[spread] / (n - 1) for other in others)]
        half = half_of(spreads, [one["groups"] for one in (row, *others)], of=of * n)
        mean = fmean(other[value] for other in others)
        excess = abs(row[value] - mean) - half
        found.append({**row, "mean": mean, "half": half, "excess": excess, "sites": n})
    return max(found, key=lambda row: row["excess"], default={})


def ask_alone(run: RunFiles) -> str:
    """Return the command that trains each site alone, "" if it is of no use."""
    if run.config.strategy == ALONE or run.diverged_at or not run.sites():
        return ""
    return alone_command(run.config, run.folder.parent / ALONE)


def next_step(
    run: RunFiles,
    comparisons: Sequence[Comparison],
    findings: Sequence[Mapping[str, Any]],
) -> Fact | None:
    """Return the one thing to try next, or None while the run is running.

    Args:
        run: the run.
        comparisons: the comparisons with other runs.
        findings: the doctor's findings, as in ``doctor.json``.
    """
    resume = f"fedbn-flwr run --out {quote(str(run.folder))} --resume"
    if not run.has_model:
        rate = run.config.learning_rate
        lower = min(rate / 10, 0.1)  # a usual rate, however high the rate was
        why = f"Use a lower learning rate: it was {rate:g}. Try {lower:g}."
        if quantity_of(run.headline) in REGRESSION.allowed:
            why = f"First scale the targets to about -1 to 1. {why}"
        return _step(why, changed_command(run, f"learning-rate={lower:g}"))
    if not run.summary:
        return None if run.running else _step("Continue the run.", resume)
    compared = [f"strategy={one.reference.config.strategy}" for one in comparisons]
    for finding in findings:
        for remedy in finding["remedies"]:
            if remedy["setting"] in compared:  # the page has its result
                continue
            # a remedy in words, or one that does not fit the run
            with suppress(FedBNError):
                command = changed_command(run, *remedy["setting"].split())
                why = f"{finding['what']} Use {remedy['setting']}: {remedy['why']}."
                return _step(why, command)
    alone = with_alone(comparisons)
    command = ask_alone(run)
    if command and not alone:
        return _step(
            "Train each site alone, to see whether the federation helps. The command has"
            " the learning rate of this run; training alone may need another one.",
            command,
        )
    rounds = run.config.num_server_rounds
    if run.summary["rounds"] == rounds and _still_improves(run):
        why = f"The test {quantity_of(run.headline)} still improves. Train more rounds."
        return _step(why, f"{resume} --set num-server-rounds={2 * rounds}")
    for one in alone:
        if one.established and one.gain < 0 and run.config.strategy != "fedbn":
            rows = one.by_site.values()
            row = min(rows, key=lambda site: one.sign * site["difference"])
            why = (
                f"Look at {site_label(row)}, the site that loses most against training"
                " alone. Keep BatchNorm at the sites."
            )
            # settings of the run's method may not fit FedBN
            with suppress(FedBNError):
                return _step(why, changed_command(run, "strategy=fedbn"))
    if any("calibrated" in row for row in run.sites()):
        command = (
            f"fedbn-flwr calibrate {quote(str(run.folder))} --dataset NEW --out DIR"
        )
        return _step("Fit the model to a site that did not train.", command)
    again = changed_command(run, f"seed={run.config.seed + 1}")
    return _step("Repeat the run with other seeds, because seeds differ.", again)


def _step(why: str, command: str) -> Fact:
    return Fact("Try next", command, why)


def _still_improves(run: RunFiles) -> bool:
    """Return whether the last test is better than all in the first four fifths.

    The difference must be a twentieth of the range of all tests.
    """
    curve = pd.Series(run.curve(run.headline))
    if curve.empty:  # the metric is undefined in all tests
        return False
    if not higher_is_better(run.headline):
        curve = -curve
    early = curve[curve.index <= 0.8 * curve.index.max()].max()
    return bool(curve.iloc[-1] - early > 0.05 * (curve.max() - curve.min()))


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
