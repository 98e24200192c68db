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
    unit, points = (" %", " points") if in_percent(metric) else ("", "")
    best, worst, extreme = max, min, "Lowest"
    if not higher_is_better(metric):
        best, worst, extreme = min, max, "Highest"
    known = [row for row in sites if row.get("value") is not None]
    facts = []

    if run.diverged_at:
        more = f"in round {run.diverged_at}: {run.divergence}"
        facts.append(Fact("The run", "diverged", more, "bad"))
    curve = run.curve(run.headline)
    if curve and run.final.get(run.headline) is not None:
        about = f"Test {metric}"
        if run.headline.startswith("personal-"):
            about = f"Mean {metric} of {len(known)} sites"
        at = best(curve, key=lambda tested: curve[tested])
        more = (
            f"after round {run.final['round']}; best {shown(curve[at], metric)} after"
        )
        value = shown(run.final[run.headline], metric) + unit
        facts.append(Fact(about, value, f"{more} round {at}"))
    if len(known) > 1:
        row = worst(known, key=lambda site: site["value"])
        more = site_label(row)
        if row.get("low") is not None:
            low, high = shown(row["low"], metric), shown(row["high"], metric)
            more += f", 95 % interval {low} to {high}"
        facts.append(Fact(f"{extreme} site", shown(row["value"], metric) + unit, more))
    for one in comparisons:
        better, worse, every = one.count(1), one.count(-1), len(one.by_site)
        tone = ""
        if one.established:
            tone = "good" if one.gain > 0 else "bad"
        facts.append(
            Fact(
                f"Compared with {name_of(one.reference)}",
                shown(one.difference, metric, "+") + points,
                f"better at {better}, equal at {every - better - worse}, worse at"
                f" {worse} of {every} sites",
                tone,
            )
        )
    totals = run.summary.get("ledger") or ledger_of(run.lines)
    mebibytes = (totals.get("bytes-down", 0) + totals.get("bytes-up", 0)) / 2**20
    more = f"sent and received; {sum(line['seconds'] for line in run.lines):,.1f} s"
    if totals.get("exchanges"):
        more += f", exchanges: {totals['exchanges']:,}"
    facts.append(Fact("Cost", f"{mebibytes:,.2f} MiB", more))
    return facts


def ask_alone(run: RunFiles) -> str:
    """Return the command that trains each site alone, "" if it is of no use."""
    if run.config.strategy == ALONE or run.diverged_at or not run.sites():
        return ""
    return alone_command(run.config, run.folder.parent / ALONE)


def shown(value: float | None, key: str, sign: str = "") -> str:
    """Return a value of a metric in the form of the page."""
    if value is None:
        return "-"
    return f"{100 * value:{sign}.1f}" if in_percent(key) else f"{value:{sign}.4f}"
