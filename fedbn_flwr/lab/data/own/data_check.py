"""The data check: columns of a table that a model should not learn from, and one name that is written in several ways.

It looks for what makes numbers wrong without an error: numbers of rows or patients, a column that holds the target, a
category that one client alone has, names that differ by case, spaces or Unicode form only, and a number that stands for
a missing value. Each finding has its evidence. Chance must be an unlikely reason, so small tables have few findings.
"""

from __future__ import annotations

import itertools
import math
import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from fedbn_flwr.lab.data.own.features import stated_features
from fedbn_flwr.lab.data.own.records import Records
from fedbn_flwr.lab.data.own.request import OwnData, shown

__all__ = ["check_records"]

_FEWEST = 10  # rows of which something is said
_IN_ORDER = 20  # rows that are no longer in order by the sorting of a small table
_MOST_ROWS = 50_000  # of more rows every k-th is looked at
_MOST_COLUMNS = 100  # without names: more are pixels, say
_CHANCE = 1e-3  # of a finding that is none
_CHANCE_APART = 0.05  # the same, where two clients have no category in common
_ALMOST = 0.99  # AUROC, or share of the rows, from which a column separates the targets
_CODES = 10  # different whole numbers that may be categories
_OF_PATIENTS = ("patient", "subject", "study", "person", "record", "case", "row", "sample", "mrn")
_REPEATED = 0.25  # different ids in a row, of a column that is called so
_IDS = {"id", "ids", "uid", "mrn"}
_OF_NUMBERS = {"id", "ids", "nr", "no", "num", "number", "nummer", "index", "idx", "uid", "key"}


def check_records(request: OwnData, records: Records) -> tuple[str, ...]:
    """Return what looks wrong in the columns and names of own data, one line each; what the config states is meant."""
    return tuple(_findings(request, records))


def _findings(request: OwnData, records: Records) -> Iterator[str]:
    stated = {name for name, categories in stated_features(request.feature_columns) if categories}
    yield from _of_names(request, records)
    columns = _columns(records)
    yield from _alike("the columns", [column.name for column in columns], "Is one of them enough?")
    for column in columns:
        yield from _of_one_client(column)
        if len(column.values) >= _FEWEST:
            yield from filter(None, [_as_ids(column) or _as_repeated_ids(column), _separates(column, len(columns))])
        if column.categories and column.name in stated:
            continue
        if column.categories:
            what = f"categories of column {column.name!r}"
            counts = [int(np.sum(column.values == at)) for at in range(len(column.categories))]
            yield from _alike(what, column.categories, "Write them alike", counts)
        else:
            yield from filter(None, [_far_outside(column)])


class _Column(NamedTuple):
    """A column: numbers, or the number of the category of each row; NaN where it has none.

    Attributes:
        name: its name.
        values: float64 (N,).
        categories: the texts of the categories; () for numbers.
        targets: float64 (N,) or (N, K).
        classes: whether targets are classes, or labels 0 and 1.
        clients: the client of each row, (N,); zeros without clients.
        client_names: their names; () without clients.
    """

    name: str
    values: Any
    categories: tuple[str, ...]
    targets: Any
    classes: bool
    clients: Any
    client_names: tuple[str, ...]


def _columns(records: Records) -> list[_Column]:
    """Return the columns of rows; none for other examples."""
    inputs, targets = records.inputs.values, records.targets.values
    if not isinstance(inputs, Tensor) or not isinstance(targets, Tensor) or inputs.ndim != 2:
        return []
    places = records.inputs.columns or tuple((f"column {at} of x", "") for at in range(inputs.shape[1]))
    if not records.inputs.columns and len(places) > _MOST_COLUMNS:
        return []
    some = slice(None, None, -(-len(inputs) // _MOST_ROWS))
    rows, goals = inputs[some].double().numpy(), targets[some].double().numpy()
    clients = np.zeros(len(rows), np.int64) if records.clients is None else records.clients[some]
    classes = records.targets.task.name != "regression"
    columns = []
    for name, group in itertools.groupby(enumerate(places), key=lambda place: place[1][0]):
        numbers, categories = [at for at, _ in group], list[str]()
        values = rows[:, numbers[0]]
        if categories := [places[at][1] for at in numbers if places[at][1]]:
            one_hot = rows[:, numbers]
            values = np.where(one_hot.any(1), one_hot.argmax(1).astype(np.float64), np.nan)
        columns.append(_Column(name, values, tuple(categories), goals, classes, clients, records.client_names))
    return columns


def _of_names(request: OwnData, records: Records) -> Iterator[str]:
    """Yield the names of classes, and of clients, that are one name written in several ways."""
    names, targets = records.targets.class_names, records.targets.values
    counts = None
    if isinstance(targets, Tensor) and targets.ndim == 1 and not targets.is_floating_point():
        counts = np.bincount(targets.numpy(), minlength=len(names)).tolist()
    if not request.classes:
        yield from _alike("the classes", names, "Write them alike, or they are learned as different classes", counts)
    counts = None if records.clients is None else np.bincount(records.clients).tolist()
    yield from _alike("the clients", records.client_names, "Write them alike, or they are different clients", counts)


def _alike(what: str, names: Sequence[str], remedy: str, counts: Sequence[int] | None = None) -> Iterator[str]:
    """Yield a line for names that differ by case, spaces or Unicode form only."""
    spelled: dict[str, list[str]] = {}
    for at, name in enumerate(names):
        # Unicode's own rule for names that are one, whatever their case (caseless matching, UAX 15).
        key = "".join(unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold()).split())
        spelled.setdefault(key, []).append(f"{name!r}" + (f" ({counts[at]} rows)" if counts else ""))
    for twins in spelled.values():
        if len(twins) > 1:
            yield f"{what} {', '.join(twins)} differ by case, spaces or Unicode form only. {remedy}"


def _as_ids(column: _Column) -> str:
    """Return why a column looks like numbers of rows or patients; "" if it does not.

    All numbers are whole and different, within each client. So may be a measurement: n numbers drawn from R numbers all
    differ by a chance of R! / (R - n)! / R^n. So R must be small for that, or the numbers must rise or fall from row to
    row, or the column must be called so.
    """
    if column.categories:
        return _as_ids_in_text(column)
    log_chance, in_order, seen = 0.0, True, 0
    for part in _parts(column):
        values = column.values[part]
        values = values[~np.isnan(values)]
        if len(values) < _FEWEST:
            continue
        if (values % 1 != 0).any() or len(np.unique(values)) < len(values):
            return ""
        steps = np.diff(values)
        in_order &= len(values) >= _IN_ORDER and bool((steps > 0).all() or (steps < 0).all())
        numbers = float(np.ptp(values)) + 1
        log_chance += _log_ways(numbers, len(values)) + math.lgamma(len(values) + 1) - len(values) * math.log(numbers)
        seen += len(values)
    if not seen or not (in_order or log_chance < math.log(_CHANCE) or _is_called_so(column.name)):
        return ""
    low, high = np.nanmin(column.values), np.nanmax(column.values)
    within = " within each client" if column.client_names else ""
    return (
        f"column {column.name!r}: {seen} different whole numbers in {seen} rows{within} ({low:g} to {high:g}), as "
        "those of rows or patients are. Leave it out of feature-columns"
    )


def _as_ids_in_text(column: _Column) -> str:
    """Return that each row of a column of text has a category of its own; "" if not."""
    known = column.values[~np.isnan(column.values)]
    if len(known) < _FEWEST or len(column.categories) < len(known):
        return ""
    return (
        f"column {column.name!r}: {len(known)} different texts in {len(known)} rows, as names or ids are. Leave it out "
        "of feature-columns"
    )


def _as_repeated_ids(column: _Column) -> str:
    """Return that a column which is called an id has many of them, as of patients with several rows; "" if not."""
    known = column.values[~np.isnan(column.values)]
    kinds, words = len(np.unique(known)), _words(column.name)
    if not _IDS & {*words} or kinds < max(_FEWEST, _REPEATED * len(known)) or (known % 1 != 0).any():
        return ""
    return (
        f"column {column.name!r}: {kinds} different values in {len(known)} rows, and a name as of ids. Leave it out of "
        "feature-columns; group-column keeps the rows of a patient together"
    )


def _parts(column: _Column) -> list[Any]:
    """Return the rows of each client with enough of them; without any, all rows."""
    parts = [np.flatnonzero(column.clients == client) for client in np.unique(column.clients)]
    return [part for part in parts if len(part) >= _FEWEST] or [np.arange(len(column.values))]


def _is_called_so(name: str) -> bool:
    return any(word in _OF_NUMBERS or word.startswith(_OF_PATIENTS) for word in _words(name))


def _words(name: str) -> list[str]:
    return re.findall(r"[^\W\d_]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower())


def _separates(column: _Column, num_columns: int) -> str:
    """Return how a column alone gives the targets; "" if it does not."""
    allowed = math.log(_CHANCE / num_columns)
    missing = np.isnan(column.values)
    goals = column.targets if column.targets.ndim == 2 else column.targets[:, None]
    for at, goal in enumerate(goals.T):
        known = ~missing & ~np.isnan(goal)
        which = f" {at} of {goals.shape[1]}" if goals.shape[1] > 1 else ""
        way = _way_to(column, column.values[known], goal[known], allowed)
        if not way and column.classes and missing.any():
            way = _by_value(missing[~np.isnan(goal)].astype(np.float64), goal[~np.isnan(goal)], allowed)
            way = way and f"by where it is missing, {way}"
        if way:
            return (
                f"column {column.name!r} alone separates the targets{which} ({way}). Is it known before the target is? "
                "Else leave it out of feature-columns"
            )
    return ""


def _way_to(column: _Column, values: Any, goal: Any, allowed: float) -> str:
    """Return how values separate targets, with figures; "" if they do not."""
    if len(values) < _FEWEST:
        return ""
    if not column.classes:
        return _by_rank(values, goal)
    few = column.categories or len(np.unique(values)) <= _CODES
    return (few and _by_value(values, goal, allowed)) or ("" if column.categories else _by_order(values, goal, allowed))


def _by_rank(values: Any, goal: Any) -> str:
    """Return the rank correlation of values and numbers if it is 1 but for a rest."""
    if min(len(np.unique(values)), len(np.unique(goal))) <= _CODES:
        return ""
    correlation = float(np.corrcoef(_ranks(values), _ranks(goal))[0, 1])
    return f"rank correlation {correlation:.4f} in {len(values)} rows" if abs(correlation) > 0.9999 else ""


def _by_value(values: Any, goal: Any, allowed: float) -> str:
    """Return the share of rows whose class is that of most rows with their value, if it is high and no accident."""
    kinds, of_row = np.unique(values, return_inverse=True)
    classes, of_class = np.unique(goal, return_inverse=True)
    table = np.zeros((len(kinds), len(classes)), np.int64)
    np.add.at(table, (of_row, of_class), 1)
    sizes, count = table.sum(0), len(values)
    rare, wrong = count - int(sizes.max()), count - int(table.max(1).sum())
    # Each value belongs to one class: a choice for each value, against the ways to choose the rarer rows.
    if wrong > (1 - _ALMOST) * rare or len(kinds) * math.log(len(classes) or 1) - _log_ways(count, rare) > allowed:
        return ""
    return f"its value gives the class in {count - wrong} of {count} rows"


def _by_order(values: Any, goal: Any, allowed: float) -> str:
    """Return the AUROC of values, the lowest of neighbouring classes, if it is high and no accident."""
    classes = np.unique(goal)
    parts = sorted((values[goal == each] for each in classes), key=lambda part: float(part.mean()))
    lowest = 1.0
    for low, high in itertools.pairwise(parts):
        both = np.concatenate([low, high])
        above = _ranks(both)[len(low) :].sum() - len(high) * (len(high) - 1) / 2
        lowest = min(lowest, float(above / (len(low) * len(high))))
    sizes = [len(part) for part in parts]
    if len(classes) < 2 or lowest < _ALMOST or math.log(2) - _log_ways(len(values), len(values) - max(sizes)) > allowed:
        return ""
    return f"AUROC {lowest:.4f} in {len(values)} rows"


def _ranks(values: Any) -> Any:
    """Return the ranks from 0; equal values have their mean rank."""
    _, of_row, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[of_row]


def _log_ways(count: float, chosen: int) -> float:
    """Return the logarithm of the number of ways to choose some of so many."""
    return math.lgamma(count + 1) - math.lgamma(chosen + 1) - math.lgamma(count - chosen + 1)


def _of_one_client(column: _Column) -> Iterator[str]:
    """Yield the categories, or whole numbers that may be some, that one client alone has, unless chance may do it."""
    known = ~np.isnan(column.values)
    values, clients = column.values[known], column.clients[known]
    kinds = np.unique(values)
    if len(column.client_names) < 2 or not len(kinds) or (kinds % 1 != 0).any():
        return
    if not column.categories and len(kinds) > _CODES:
        return
    shares = np.bincount(clients, minlength=len(column.client_names)) / len(values)
    if (shares > 0).sum() < 2:
        return
    alone: dict[str, list[str]] = {}
    rows, log_chances = 0, list[float]()
    for kind in kinds:
        having = clients[values == kind]
        if len(np.unique(having)) > 1:
            continue
        name = column.categories[int(kind)] if column.categories else f"{kind:g}"
        alone.setdefault(column.client_names[having[0]], []).append(name)
        rows += len(having)
        log_chances.append((len(having) - 1) * math.log(shares[having[0]]))
    sets = [set(values[clients == client].tolist()) for client in np.flatnonzero(shares)]
    apart = bool(column.categories) and any(not one & other for one, other in itertools.combinations(sets, 2))
    allowed = math.log(_CHANCE_APART) if apart else math.log(_CHANCE / len(kinds))
    if alone and sum(log_chances) < allowed:
        where = "; ".join(f"{shown(names)} only at {client}" for client, names in alone.items())
        yield (
            f"column {column.name!r}: {where} ({rows} of {len(values)} rows). Is it one thing written, or coded, in "
            "several ways? Then write it alike: a model learns the client from it"
        )


def _far_outside(column: _Column) -> str:
    """Return the numbers that may stand for a missing value: as 999, repeated, and far from all others; "" if none."""
    parts = _parts(column)
    whole = np.arange(len(column.values))
    for part in [whole] if len(parts) < 2 else [whole, *parts]:
        values = column.values[part]
        values = values[~np.isnan(values)]
        if not (found := _codes_of_missing(values)):
            continue
        rest = values[~np.isin(values, found)]
        count = len(values) - len(rest)
        at = "" if part is whole else f" of {column.client_names[column.clients[part[0]]]}"
        which = ", ".join(f"{value:g}" for value in found)
        return (
            f"column {column.name!r}: {which} in {count} of {len(values)} rows{at}, and the others are {rest.min():g} "
            f"to {rest.max():g}. If it stands for a missing value, leave the cell empty (missing=mean)"
        )
    return ""


def _codes_of_missing(values: Any) -> list[float]:
    """Return up to three numbers at each end of all that may stand for a missing value; the most that there are."""
    kinds, counts = np.unique(values, return_counts=True)
    best: list[float] = []
    for low, high in itertools.product(range(4), repeat=2):
        stop = len(kinds) - high
        if stop - low <= 5:
            continue
        both = [(kinds[:low], counts[:low]), (kinds[stop:][::-1], counts[stop:][::-1])]
        ends = [(end, number) for end, number in both if len(end)]
        found = [float(kind) for end, _ in ends for kind in end]
        if len(found) <= len(best) or not all(_may_be_codes(end, number) for end, number in ends):
            continue
        rest = np.repeat(kinds[low:stop], counts[low:stop])
        if len(rest) >= _FEWEST and all(_is_far(end, number, rest) for end, number in ends):
            best = sorted(found)
    return best


def _may_be_codes(end: Any, counts: Any) -> bool:
    """Return whether numbers are whole or of the usual look, and repeated, negative and usual ones twice at least."""
    plain = all(number % 1 == 0 or _is_usual(number) for number in end)
    return bool(plain and counts.max() >= (2 if end[0] < 0 or _is_usual(end[0]) else 3))


def _is_usual(number: float) -> bool:
    return set(f"{abs(number):.7g}") - {"."} == {"9"}  # 99.9, too, in the digits of float32


def _is_far(end: Any, counts: Any, rest: Any) -> bool:
    """Return whether the numbers at one end of all, the outermost first, are far from the rest."""
    nearest, middle = float(end[-1]), float(np.median(rest))
    if nearest == 0 and counts.sum() > len(rest):  # a dose is 0 in most rows
        return False
    gap = float(rest.min()) - nearest if nearest < middle else nearest - float(rest.max())
    if gap > np.ptp(rest) / 2 and gap > 1:
        return True
    if nearest < 0 <= rest.min():
        return True
    low, high = np.quantile(rest, [0.25, 0.75])
    spread = (high - low) / 1.349  # the standard deviation of a normal distribution
    return bool(
        (nearest == 0 or _is_usual(nearest)) and spread > 0 and gap > spread and abs(nearest - middle) > 3 * spread
    )
