"""The answer of a run in a few facts, for its page and the end of its command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedbn_flwr.lab.files import ledger_of, site_label
from fedbn_flwr.lab.references import ALONE, Comparison, alone_command, name_of
from fedbn_flwr.lab.run_files import RunFiles
from fedbn_flwr.training.tasks import higher_is_better, in_percent, quantity_of


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

    Args:
        run: the run.
        sites: rows of ``site_rows``.
        comparisons: the comparisons with other runs.
    """
    metric = quantity_of(run.headline)
    unit = " %" if in_percent(metric) else ""
    best, worst, extreme = max, min, "Lowest"
    if not higher_is_better(metric):
        best, worst, extreme = min, max, "Highest"
    known = [row for row in sites if row.get("value") is not None]
    facts = []
    rounds, values = run.curve(run.headline)
    value = run.final.get(run.headline)
    if value is not None:
        about = f"Test {metric}"
        if run.headline.startswith("personal-"):
            about = f"Mean {metric} of {len(known) or 'the'} sites"
        more = f"after round {run.final['round']}"
        if values:
            top = best(values)
            at = rounds[values.index(top)]
            more += f"; best {top:{form_of(metric)}} after round {at}"
        facts.append(Fact(about, shown(value, metric) + unit, more))
    if len(known) > 1:
        row = worst(known, key=lambda one: one["value"])
        more = site_label(row)
        if row.get("low") is not None:
            ends = [shown(row[end], metric) for end in ("low", "high")]
            more += f", 95 % interval {' to '.join(ends)}"
        facts.append(Fact(f"{extreme} site", shown(row["value"], metric) + unit, more))
    for one in comparisons:
        count = len(one.by_site)
        equal = count - one.better - one.worse
        more = (
            f"better at {one.better}, equal at {equal}, worse at {one.worse} of"
            f" {count} sites"
        )
        change = signed(one.difference, metric) + (" points" if unit else "")
        tone = ""
        if one.established:
            tone = "good" if one.gain > 0 else "bad"
        about = f"Compared with {name_of(one.reference)}"
        facts.append(Fact(about, change, more, tone))
    totals = run.summary.get("ledger") or ledger_of(run.lines)
    mebibytes = (totals.get("bytes-down", 0) + totals.get("bytes-up", 0)) / 2**20
    seconds = sum(line["seconds"] for line in run.lines)
    more = f"sent and received; {seconds:,.1f} s"
    if totals.get("exchanges"):
        more += f", exchanges: {totals['exchanges']:,}"
    facts.append(Fact("Cost", f"{mebibytes:,.2f} MiB", more))
    return facts


def ask_alone(run: RunFiles) -> str:
    """Return the command that trains each site alone, "" if it is of no use."""
    if run.config.strategy == ALONE or run.diverged_at or not run.sites():
        return ""
    return alone_command(run.config, run.folder.parent / ALONE)


def form_of(key: str) -> str:
    """Return the format of a metric in its shown unit."""
    return ".1f" if in_percent(key) else ".4f"


def shown(value: float | None, key: str) -> str:
    """Return a value of a metric in the form of the page."""
    return "-" if value is None else f"{scale_of(key) * value:{form_of(key)}}"


def signed(value: float | None, key: str) -> str:
    """Return a difference in the form of the page."""
    return "-" if value is None else f"{scale_of(key) * value:+{form_of(key)}}"


def scale_of(key: str) -> int:
    """Return the factor of a metric in tables, 100 for shares in per cent."""
    return 100 if in_percent(key) else 1


def label_of(key: str) -> str:
    """Return the name of a metric with its unit."""
    return f"{key}, %" if in_percent(key) else key
