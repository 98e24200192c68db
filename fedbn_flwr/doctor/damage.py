"""Damage in the data of clients, a sentence for each damage of a client.

Examples at two clients are counted. If two clients have an example twice together, both
copies are at different clients by chance with p = 2 n_1 n_2 / (n (n - 1)), n = n_1 + n_2.
So rows of a table that are equal by chance are not named.

The columns of a table are compared with the same columns of the other clients. For the
correlations a of a client and b of the others (centred at each client), the slope is
sum(a b) / sum(b^2). It is about 1 at a client of the same kind. Between the columns, it
is about 0 if they have another order. Between the columns and the classes, it is negative
if the labels are reversed.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fedbn_flwr.doctor.clients import ClientExamples, classes_of
from fedbn_flwr.doctor.findings import listed
from fedbn_flwr.doctor.thresholds import (
    CONSTANT,
    COPIES,
    FEW_ROWS,
    KINDS,
    OTHER_ORDER,
    TARGET,
    TRAINED_TESTS,
    UNSCALED,
    VARIES,
    Z_OF_COPIES,
    Z_OF_REVERSE,
)

_COLUMNS = 200  # most columns that are compared
_SHARED = 20  # most clients of an example that counts as a copy


def damage(
    clients: Sequence[ClientExamples],
    columns: Sequence[str],
    tests: Sequence[ClientExamples] = (),
) -> list[list[str]]:
    """Return the sentences of each client.

    ``columns`` are the names of the columns, if the inputs are rows of a table, and
    ``tests`` the test examples of clients.
    """
    found, inputs = _copies(clients), clients[0].inputs
    for k, sentence in _repeated(clients):
        found[k].append(sentence)
    names = [client.name for client in clients]
    trained = trained_tests(
        [one.inputs for one in clients], [one.inputs for one in tests]
    )
    for test, count in zip(tests, trained, strict=True):
        if count and test.name in names:
            found[names.index(test.name)].append(
                f"{count} of {len(test)} test examples are also training examples, so the"
                " tests say nothing about new examples. Remove them from one part."
            )
    if inputs.dim() != 2 or not inputs.is_floating_point():
        return found
    sizes = [*map(len, clients)]
    tables = [
        _table(client.inputs[:, :_COLUMNS].double(), own.double())
        for client, own in zip(clients, _labels_of(clients), strict=True)
    ]
    total = _total(tables)
    for sentences, table in zip(found, tables, strict=True):
        sentences += _of_columns(table, total.without(table), columns)
    large = [k for k, size in enumerate(sizes) if size >= FEW_ROWS]
    for score, sentence in (
        (
            _order,
            "The columns have other relations than elsewhere. Compare their order.",
        ),
        (_labels, "The classes depend on the columns in reverse. Compare the labels."),
    ):
        for k in _in_turn({k: tables[k] for k in large}, score):
            found[k].append(sentence)
    return found


def _copies(clients: Sequence[ClientExamples]) -> list[list[str]]:
    """Return a sentence for each client whose examples are also at another client."""
    owners: dict[bytes, Counter[int]] = {}
    for k, client in enumerate(clients):
        for x in _bytes(client.inputs):
            owners.setdefault(x, Counter())[k] += 1
    twice, shared = Counter[int](), Counter[tuple[int, int]]()
    for counts in owners.values():
        twice.update(k for k, count in counts.items() if count == 2)
        once = [k for k, count in counts.items() if count == 1]
        # A row that many clients have is usual, such as a row of zeros.
        if len(once) <= _SHARED:
            shared.update(itertools.combinations(once, 2))
    found: list[list[str]] = [[] for _ in clients]
    for pair, count in shared.items():
        mine, theirs = (len(clients[k]) for k in pair)
        chance = 2 * mine * theirs / ((mine + theirs) * (mine + theirs - 1))
        pairs = count + twice[pair[0]] + twice[pair[1]]
        score = count - chance * pairs
        deviation = (chance * (1 - chance) * pairs) ** 0.5
        if count < COPIES * min(mine, theirs) or score < Z_OF_COPIES * deviation:
            continue
        for k, other in (pair, pair[::-1]):
            found[k].append(
                f"{count} of {len(clients[k])} examples are also at client"
                f" {clients[other].name}. Keep each example at one client."
            )
    return found


def _repeated(clients: Sequence[ClientExamples]) -> Iterator[tuple[int, str]]:
    """Yield a client that has examples twice, unlike the others, and a sentence.

    Of a unit, such as a patient, the first example counts.
    """
    firsts = [client.inputs[client.first_of_units] for client in clients]
    twice = [
        sum(count > 1 for count in Counter(_bytes(one)).values()) for one in firsts
    ]
    rows = [*map(len, firsts)]
    for k, count in enumerate(twice):
        others = (sum(twice) - count) / max(sum(rows) - rows[k], 1)
        # Rows that are equal by chance are at other clients as well.
        if count >= max(COPIES, 5 * others) * rows[k]:
            yield (
                k,
                f"{count} examples are there twice, unlike at the other clients. Keep"
                " each example once.",
            )


def trained_tests(train: Sequence[Tensor], tests: Sequence[Tensor]) -> list[int]:
    """Return how many test inputs of each client are training inputs of any client.

    A number that chance explains is 0: training inputs of few values, such as answers
    to a form, are equal to each other as often.
    """
    every = [one for inputs in train for one in _bytes(inputs)]
    known = {*every}
    by_chance = 1 - len(known) / max(len(every), 1)
    found = []
    for inputs in tests:
        count = sum(one in known for one in _bytes(inputs))
        named = count > max(TRAINED_TESTS, 2 * by_chance) * len(inputs)
        found.append(count if named else 0)
    return found


def _bytes(inputs: Tensor) -> list[bytes]:
    return [one.tobytes() for one in inputs.cpu().numpy()]


class _Table(NamedTuple):
    """Facts about the columns of a client. Those of several clients are sums.

    Attributes:
        tables: the number of clients, 1.
        rows: the number of rows.
        squares: sum of the squares of each column, (D,).
        most: rows with the most frequent value of each column, (D,).
        codes: whether a column has few different values, (D,).
        numbers: whether a column has many different values, (D,).
        within: moments of the columns within the classes, (D, D).
        products: moments of the columns and the classes, (D + C, D + C).
    """

    tables: Tensor
    rows: Tensor
    squares: Tensor
    most: Tensor
    codes: Tensor
    numbers: Tensor
    within: Tensor
    products: Tensor

    def without(self, other: _Table) -> _Table:
        """Return the sums of all clients but one."""
        return _Table(*(all_ - one for all_, one in zip(self, other, strict=True)))


def _labels_of(clients: Sequence[ClientExamples]) -> Sequence[Tensor]:
    """Return a column for each class, or the targets if they are one number each."""
    sizes, classes = [*map(len, clients)], classes_of(clients)
    if classes is not None:
        found = torch.unique(classes, return_inverse=True)[1]
        return torch.split(functional.one_hot(found), sizes)
    if all(client.targets.numel() == len(client) for client in clients):
        return [client.targets.reshape(-1, 1) for client in clients]
    return torch.split(torch.empty(sum(sizes), 0), sizes)


def _table(values: Tensor, labels: Tensor) -> _Table:
    """Return the facts about a client's rows."""
    both = torch.cat([values, labels], 1)
    counts = [torch.unique(one, return_counts=True)[1] for one in values.T]
    kinds = torch.tensor([len(one) for one in counts])
    ones = values.new_ones(len(values), 1)
    return _Table(
        torch.tensor(1),
        torch.tensor(len(values)),
        values.square().sum(0),
        torch.stack([one.max() for one in counts]),
        (kinds <= KINDS[0]).int(),
        (kinds > KINDS[1]).int(),
        _moments(values, torch.cat([ones, labels], 1)),
        _moments(both, ones),
    )


def _moments(values: Tensor, known: Tensor) -> Tensor:
    """Return the moments of the columns that remain after least squares on others."""
    inverse = torch.linalg.pinv(known.T @ known, hermitian=True)
    rest = values - known @ (inverse @ (known.T @ values))
    # The fit of a column that is explained is rounded.
    rest *= rest.abs().amax(0) > 1e-9 * values.abs().amax(0)
    return torch.mm(rest.T, rest)


def _total(tables: Collection[_Table]) -> _Table:
    return _Table(*(torch.stack(ones).sum(0) for ones in zip(*tables, strict=True)))


def _of_columns(table: _Table, others: _Table, names: Sequence[str]) -> Iterator[str]:
    """Yield the damage of single columns of a client."""

    def named(chosen: Tensor) -> str:
        return listed([names[j] for j in chosen.nonzero().flatten().tolist()])

    large = table.squares > UNSCALED**2 * table.rows
    if large.any():
        yield f"{named(large)}: sizes above {UNSCALED:g}. Scale the columns."
    if table.rows < FEW_ROWS:
        return
    constant = table.most >= CONSTANT * table.rows
    constant &= others.most < VARIES * others.rows
    if constant.any():
        yield f"{named(constant)}: constant here, but not elsewhere. Is it measured?"
    # A column that the classes explain has no variance within them.
    left = table.within.diagonal()
    variance = table.products.diagonal()[: len(left)]
    copied = (left <= (1 - TARGET) * variance) & (variance > 0)
    if copied.any():
        yield f"{named(copied)}: nearly the target. Remove the column."


def _order(table: _Table, others: _Table) -> float:
    """Return a score that is negative if the columns seem to have another order."""
    width = len(table.squares)
    codes, numbers = others.codes == others.tables, others.numbers == others.tables
    constant = table.within.diagonal() == 0
    odd = codes & (table.numbers > 0) | numbers & (table.codes > 0) & ~constant
    if int(odd.sum()) > 1:
        return -1.0
    a, b = _related(table.within, others.within, others.rows)
    pairs = torch.triu(constant.new_ones(width, width), 1)
    a, b = a[pairs] - a[pairs].mean(), b[pairs] - b[pairs].mean()
    size, rows = float(b.square().sum()), float(table.rows)
    slope, error = float((a * b).sum()), math.sqrt(size / rows)
    return max(slope + error - OTHER_ORDER * size, slope + 4 * error - size)


def _labels(table: _Table, others: _Table) -> float:
    """Return a score that is negative if the labels seem to be reversed."""
    width = len(table.squares)
    a, b = _related(table.products, others.products, others.rows)
    mine, theirs = a[:width, width:], b[:width, width:]
    # The variance of the sum if the classes do not depend on the columns.
    variance = (b[:width, :width] @ theirs) * (theirs @ a[width:, width:])
    deviation = math.sqrt(max(float(variance.sum()) / float(table.rows), 0.0))
    return float((mine * theirs).sum()) + Z_OF_REVERSE * deviation


def _related(mine: Tensor, theirs: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the correlations of both, the others' if they are beyond chance.

    ``rows`` is the number of the others' rows.
    """
    a, b = _correlations(mine), _correlations(theirs)
    # A column that is constant here has no correlations to compare.
    known = a.diagonal() * a.diagonal()[:, None] * (b.abs() > 3 / rows.sqrt())
    return a, b * known


def _in_turn(
    tables: Mapping[int, _Table], score: Callable[[_Table, _Table], float]
) -> list[int]:
    """Return the clients with negative scores.

    The lowest one is named first and left out of the next comparison.
    """
    left, named = dict(tables), list[int]()
    while len(left) > 1:
        total = _total(left.values())
        scores = {k: score(one, total.without(one)) for k, one in left.items()}
        lowest = min(scores, key=scores.__getitem__)
        if scores[lowest] >= 0:
            break
        # Two clients differ from each other.
        for k in [*left] if len(left) == 2 else [lowest]:
            named.append(k)
            del left[k]
    return named


def _correlations(products: Tensor) -> Tensor:
    """Return the correlations of a matrix of moments; 0 for a constant column."""
    deviations = products.diagonal().sqrt()
    return (products / deviations / deviations[:, None]).nan_to_num(0.0, 0.0, 0.0)
