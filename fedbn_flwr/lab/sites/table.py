"""The table by site: the metric with its interval, the difference to another run, the decision, what to do next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedbn_flwr.lab.sites.intervals import LEVEL, Estimate, Gap, holm
from fedbn_flwr.lab.sites.measured import Measured, gap
from fedbn_flwr.training.tasks import higher_is_better, in_percent

__all__ = [
    "EXAMPLES",
    "HELD_OUT",
    "Site",
    "columns",
    "decisions",
    "sentences",
    "site_table",
    "table_of_estimates",
    "unit_of",
]

EXAMPLES = "examples"
HELD_OUT = "held-out"
"""The key of a row whose site took no part in the training."""
_SHOWN = 20  # sites of a screen
_FAR = 100  # times the groups: a difference that needs more is none to wait for
_INTERVAL, _BETTER, _WORSE, _SAME = "interval", "better", "worse", "same predictions"
_NEXT = {
    _BETTER: "use this model here",
    _WORSE: "keep the other model here",
    _SAME: "either model will do",
}


@dataclass(frozen=True)
class Site:
    """A site's test, by one run or several with other seeds, and by others to compare with.

    Attributes:
        name: of the site.
        runs: the outputs of the model, a run each.
        against: those of the other model on the same examples; () = there is none.
        held_out: whether it took no part in the training.
    """

    name: str
    runs: Sequence[Measured]
    against: Sequence[Measured] = ()
    held_out: bool = False


def unit_of(group_column: str, has_units: bool) -> str:
    """Return what a group is called: patients, after the column ``patient``."""
    if not has_units:
        return EXAMPLES
    plain = group_column.isalpha() and not group_column.endswith("s")
    return f"{group_column}s" if plain else "groups"


def site_table(sites: Sequence[Site], unit: str, against: str = "") -> dict[str, Any]:
    """Return the table as JSON holds it: counts, figures and decisions, no example.

    Args:
        sites: one or more, with outputs.
        unit: what a group is called.
        against: what the others are, such as the run's folder; "" = there are none.
    """
    metric = sites[0].runs[0].task.score
    firsts = [(site.name, site.runs[0]) for site in sites]
    estimates = [(name, len(first), first.num_groups, first.estimate()) for name, first in firsts]
    table = table_of_estimates(metric, estimates, unit)
    rows = table["sites"]
    for row, site in zip(rows, sites, strict=True):
        if site.held_out:
            row[HELD_OUT] = True
    if against:
        gaps = [gap(site.runs, site.against) if site.against else Gap(None) for site in sites]
        _add_gaps(rows, gaps, metric, unit)
        table["against"] = against
        if len(sites[0].runs) > 1:
            table["runs"] = len(sites[0].runs)
        table |= {name: sum(row["decision"] == name for row in rows) for name in (_BETTER, _WORSE)}
        table["undecidable"] = _undecided(rows)
    return table


def table_of_estimates(
    metric: str, found: Sequence[tuple[str, int, int | None, Estimate]], unit: str
) -> dict[str, Any]:
    """Return the table without a comparison.

    Args:
        metric: its name.
        found: of each site its name, its examples, its groups (None = not known) and the estimate.
        unit: what a group is called.
    """
    rows: list[dict[str, Any]] = []
    for name, examples, groups, one in found:
        row: dict[str, Any] = {"site": name, "examples": examples, "groups": groups}
        rows.append({**row, "value": one.value, "low": one.low, "high": one.high, **_decided(one, row, unit)})
    values = {row["site"]: row["value"] for row in rows if row["value"] is not None}
    worst = (min if higher_is_better(metric) else max)(values, key=values.__getitem__, default=None)
    spread = max(values.values()) - min(values.values()) if values else None
    about = {"metric": metric, "level": LEVEL, "unit": unit, "sites": rows, "worst": worst, "spread": spread}
    return {**about, "undecidable": _undecided(rows)}


def _undecided(rows: Sequence[Mapping[str, Any]]) -> int:
    return sum(row["decision"] not in (_INTERVAL, _BETTER, _WORSE, _SAME) for row in rows)


def _decided(found: Estimate, row: Mapping[str, Any], unit: str) -> dict[str, Any]:
    """Return the decision on an interval, how many groups are needed, and what to do."""
    if not found.reason:
        return {"decision": _INTERVAL, "needed": None, "next": ""}
    return {"decision": _undecidable(row, unit, found), "needed": found.needed, "next": _wait(found.needed, unit)}


def _undecidable(row: Mapping[str, Any], unit: str, found: Estimate) -> str:
    groups = row["groups"]
    text = "undecidable" if groups is None else f"undecidable with {groups:,} {_one_or_more(groups, unit)}"
    return f"{text}, about {found.needed:,} needed" if found.needed else f"{text}: {found.reason}"


def _one_or_more(count: int, unit: str) -> str:
    return unit.removesuffix("s") if count == 1 else unit


def _wait(needed: int | None, unit: str) -> str:
    return f"test about {needed:,} {unit}" if needed else f"look at the {unit} of this site"


def _add_gaps(rows: Sequence[dict[str, Any]], gaps: Sequence[Gap], metric: str, unit: str) -> None:
    """Add the differences to the rows, with Holm's correction over the sites, and decide by them."""
    tested = [at for at, found in enumerate(gaps) if found.p is not None]
    corrected = dict(zip(tested, holm([float(gaps[at].p or 0.0) for at in tested]), strict=True))
    sign = 1 if higher_is_better(metric) else -1
    for at, (row, found) in enumerate(zip(rows, gaps, strict=True)):
        interval = {"difference-low": found.low, "difference-high": found.high}
        row |= {"difference": found.difference, **interval, "p": found.p, "p-holm": corrected.get(at)}
        if found.p is None:
            if row["low"] is not None:
                absent = found.difference is None
                reason = f"the other model has no {metric}" if absent else "no interval of the difference can be given"
                row |= {"decision": f"undecidable with {row['groups']:,} {unit}: {reason}"}
                row |= {"needed": None, "next": _wait(None, unit)}
            continue
        difference = found.difference or 0.0
        if not difference and found.low == found.high:
            row |= {"decision": _SAME, "needed": None, "next": _NEXT[_SAME]}
        elif corrected[at] < 1 - LEVEL:
            decision = _BETTER if sign * difference > 0 else _WORSE
            row |= {"decision": decision, "needed": None, "next": _NEXT[decision]}
        else:
            row |= _not_shown(row["groups"], found.needed, unit)


def _not_shown(groups: int, needed: int | None, unit: str) -> dict[str, Any]:
    """Return the decision where a difference may be chance."""
    text = f"undecidable with {groups:,} {_one_or_more(groups, unit)}"
    if needed is None or needed > _FAR * groups:
        return {"decision": f"{text}: hardly any difference", "needed": None, "next": _NEXT[_SAME]}
    if needed <= groups:  # Holm's correction leaves it undecided
        return {"decision": f"{text}: it may be chance among the sites", "needed": None, "next": "repeat on new data"}
    return {"decision": f"{text}, about {needed:,} needed", "needed": needed, "next": _wait(needed, unit)}


def columns(table: Mapping[str, Any], most: int = _SHOWN) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the figures as text, the worst sites if there are more than ``most``."""
    metric, unit = table["metric"], table["unit"]
    percent, level = " (%)" if in_percent(metric) else "", f"{table['level']:.0%}"
    head = ["site", unit, *([EXAMPLES] if unit != EXAMPLES else []), f"{metric}{percent}", f"{level} interval"]
    if "against" in table:
        head += [f"difference{percent}", f"{level} interval", "p (Holm)"]
    texts = []
    for row in _worst(table, most):
        cells = [_named(row), "-" if row["groups"] is None else f"{row['groups']:,}"]
        cells += [f"{row['examples']:,}"] if unit != EXAMPLES else []
        cells += [_figure(metric, row["value"]), _interval(metric, row["low"], row["high"])]
        if "against" in table:
            interval = _interval(metric, row["difference-low"], row["difference-high"], "+")
            cells += [_figure(metric, row["difference"], "+"), interval, _p(row["p-holm"])]
        texts.append(cells)
    return head, texts


def decisions(table: Mapping[str, Any], most: int = _SHOWN) -> list[tuple[str, str, str]]:
    """Return (site, decision, what to do next) for each of the rows of ``columns`` that has a decision."""
    decided = [(_named(row), row["decision"], row["next"]) for row in _worst(table, most)]
    return [row for row in decided if row[2]]


def _named(row: Mapping[str, Any]) -> str:
    return f"{row['site']} (never trained)" if row.get(HELD_OUT) else str(row["site"])


def _worst(table: Mapping[str, Any], most: int) -> list[Mapping[str, Any]]:
    rows, sign = list(table["sites"]), 1 if higher_is_better(table["metric"]) else -1
    if len(rows) > most:
        rows.sort(key=lambda row: sign * row["value"] if row["value"] is not None else float("-inf"))
    return rows[:most]


def sentences(table: Mapping[str, Any], most: int = _SHOWN) -> list[str]:
    """Return what the table says in sentences, and what its figures are."""
    rows, metric, unit = table["sites"], table["metric"], table["unit"]
    texts = []
    if table["worst"] is not None and len(rows) > 1:
        values = {row["site"]: row["value"] for row in rows}
        spread = _figure(metric, table["spread"])
        texts.append(f"Worst site: {table['worst']} ({_figure(metric, values[table['worst']])}); spread {spread}.")
    if any(row.get(HELD_OUT) for row in rows):
        texts.append("A site that never trained has the model that a new site gets: global, or with averaged BN parts.")
    if "against" in table:
        texts.append(
            f"Against {table['against']}: {table[_BETTER]} of {len(rows)} sites gain, {table[_WORSE]} lose, at "
            f"{table['undecidable']} it is undecidable."
        )
        if table.get("runs"):
            texts.append(f"A difference is the mean over {table['runs']} seeds; the value is that of the first.")
    else:
        if table["undecidable"]:
            texts.append(f"{table['undecidable']} of {len(rows)} sites have too little for an interval.")
        texts.append(
            "Is it better than training alone? fedbn-flwr evaluate THIS_RUN --against RUN, with RUN of "
            "strategy=standalone and the same split."
        )
    if len(rows) > most:
        texts.append(f"{len(rows) - most} more sites are left out here, the best ones.")
    if "statistics" in table:
        texts.append(f"BN statistics: {table['statistics']}; the intervals take them as given.")
    by = f"{unit} of the site" if unit != EXAMPLES else "examples of the site"
    texts.append(f"The intervals speak of other {by}, not of other seeds.")
    return texts


def _p(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if value >= 0.001 else "< 0.001"


def _figure(metric: str, value: float | None, sign: str = "") -> str:
    if value is None:
        return "-"
    return f"{100 * value:{sign}.1f}" if in_percent(metric) else f"{value:{sign}.4g}"


def _interval(metric: str, low: float | None, high: float | None, sign: str = "") -> str:
    return "-" if low is None or high is None else f"{_figure(metric, low, sign)} to {_figure(metric, high, sign)}"
