"""How BatchNorm's statistics move over the rounds of a run: FixBN's Fig. 3 from the lines of ``statistics.jsonl``."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from fedbn_flwr.doctor.distances import Statistics

__all__ = ["trends"]


def trends(lines: Sequence[Mapping[str, Any]], window: int = 20) -> dict[str, Any]:
    """Return FixBN's Fig. 3 (a) and (b) of recorded lines, over all layers.

    Args:
        lines: of ``statistics.jsonl``; those without layers are left out.
        window: recorded lines of a variance; the paper has 200 rounds.

    Returns:
        ``rounds``; ``change-l1``: norm of the global change, by round; ``local-l1``: by client, norm of the deviation
        of its batch statistics over the layers that it ever tracked; ``window-variance``: by client, the variance of
        its recorded statistics over the last ``window`` lines in which it took part, the mean over layers and channels;
        ``delta-variance``: the same of its ``local-l1`` (section B.6); ``layers``: ``change-l1`` and ``local-l1`` of
        each layer by path. A value is None where the client has none, or not two in the window, and a sum where one of
        its layers has none. Variances are unbiased; the paper's B.6 divides by W.
    """
    lines = [line for line in lines if "layers" in line]
    clients = _union(line["clients"] or () for line in lines)
    paths = _union(line["layers"] for line in lines)
    changes = list(map(_changes, lines))
    local: dict[str, list[dict[str, float | None]]] = {}
    for client in clients:
        local[client] = [_local(line, client, _l1) or {} for line in lines]
    local_sums = {client: _sums(rows) for client, rows in local.items()}
    of_layers = {}
    for path in paths:
        of_clients = {client: _column(rows, path) for client, rows in local.items()}
        of_layers[path] = {"change-l1": _column(changes, path), "local-l1": of_clients}
    return {
        "rounds": [line["round"] for line in lines],
        "window": window,
        "change-l1": _sums(changes),
        "local-l1": local_sums,
        "window-variance": {client: _rolling(rows, window) for client, rows in _samples(lines, clients).items()},
        "delta-variance": {client: _rolling(_as_rows(sums), window) for client, sums in local_sums.items()},
        "layers": of_layers,
    }


def _union(collections: Iterable[Iterable[str]]) -> list[str]:
    """Return every name once, in the order of its first place."""
    return list(dict.fromkeys(itertools.chain.from_iterable(collections)))


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    return [row.get(name) for row in rows]


def _as_rows(values: Sequence[float | None]) -> list[list[float] | None]:
    return [None if value is None else [value] for value in values]


def _samples(lines: Sequence[Mapping[str, Any]], clients: Sequence[str]) -> dict[str, list[Any]]:
    """Return each client's recorded statistics by line; None where a layer did not track: the row has fewer columns."""
    samples: dict[str, list[Any]] = {}
    for client in clients:
        samples[client] = [_local(line, client, _sampled) for line in lines]
    width = max((len(row) for row in itertools.chain(*samples.values()) if row), default=0)
    for client, rows in samples.items():
        samples[client] = [row if row and len(row) == width else None for row in rows]
    return samples


def _local(line: Mapping[str, Any], client: str, read: Any) -> Any:
    """Return what ``read`` finds of a client in a line; None if it took no part, or tracked nothing."""
    if client not in (line["clients"] or ()):
        return None
    return read(line["layers"], line["clients"].index(client))


def _changes(line: Mapping[str, Any]) -> dict[str, float | None]:
    return {path: layer["change"]["l1"] for path, layer in line["layers"].items()}


def _l1(layers: Mapping[str, Any], at: int) -> dict[str, float | None]:
    return {path: layer["clients"]["l1"][at] for path, layer in layers.items()}


def _sampled(layers: Mapping[str, Any], at: int) -> list[float] | None:
    values: list[float] = []
    for layer in layers.values():
        for name in Statistics._fields:
            values += layer["sample"][name][at] or ()
    return values if values and None not in values else None


def _sums(rows: Sequence[Mapping[str, float | None]]) -> list[float | None]:
    """Return the sum of each row over the layers that any row knows; None where one is missing."""
    known = dict.fromkeys(path for row in rows for path, value in row.items() if value is not None)
    sums: list[float | None] = []
    for row in rows:
        values = [value for path in known if (value := row.get(path)) is not None]
        sums.append(sum(values) if values and len(values) == len(known) else None)
    return sums


def _rolling(rows: Sequence[Sequence[float] | None], window: int) -> list[float | None]:
    """Return, for each row, the variance of the last ``window`` rows that are known, the mean over the columns."""
    variances: list[float | None] = []
    last: deque[Sequence[float]] = deque(maxlen=window)
    for row in rows:
        if row is not None:
            last.append(row)
        known = row is not None and len(last) > 1
        variances.append(float(torch.tensor([*last], dtype=torch.float64).var(0).mean()) if known else None)
    return variances
