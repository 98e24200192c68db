"""How BatchNorm's statistics move over the rounds of a run: FixBN's Fig. 3 from the lines of ``statistics.jsonl``."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
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
    clients = list(dict.fromkeys(client for line in lines for client in line["clients"] or ()))
    found: dict[str, Any] = {"rounds": [line["round"] for line in lines], "window": window}
    found["change-l1"] = _sums([{p: layer["change"]["l1"] for p, layer in line["layers"].items()} for line in lines])
    found["local-l1"] = {client: _sums([_local(line, client, _l1) or {} for line in lines]) for client in clients}
    samples = {client: [_local(line, client, _sampled) for line in lines] for client in clients}
    width = max((len(row) for rows in samples.values() for row in rows if row), default=0)
    for client, rows in samples.items():  # a round in which a layer did not track has fewer columns
        samples[client] = [row if row and len(row) == width else None for row in rows]
    found["window-variance"] = {client: _rolling(rows, window) for client, rows in samples.items()}
    deltas = {
        client: [value if value is None else [value] for value in row] for client, row in found["local-l1"].items()
    }
    found["delta-variance"] = {client: _rolling(rows, window) for client, rows in deltas.items()}
    own = {client: [_local(line, client, _l1) or {} for line in lines] for client in clients}
    found["layers"] = {
        path: {
            "change-l1": [line["layers"].get(path, {}).get("change", {}).get("l1") for line in lines],
            "local-l1": {client: [row.get(path) for row in rows] for client, rows in own.items()},
        }
        for path in dict.fromkeys(path for line in lines for path in line["layers"])
    }
    return found


def _local(line: Mapping[str, Any], client: str, read: Any) -> Any:
    """Return what ``read`` finds of a client in a line; None if it took no part, or tracked nothing."""
    if client not in (line["clients"] or ()):
        return None
    return read(line["layers"], line["clients"].index(client))


def _l1(layers: Mapping[str, Any], at: int) -> dict[str, float | None]:
    return {path: layer["clients"]["l1"][at] for path, layer in layers.items()}


def _sampled(layers: Mapping[str, Any], at: int) -> list[float] | None:
    rows = [layer["sample"][name][at] for layer in layers.values() for name in Statistics._fields]
    values = [value for row in rows if row for value in row]
    return values if values and None not in values else None


def _sums(rows: Sequence[Mapping[str, float | None]]) -> list[float | None]:
    """Return the sum of each row over the layers that any row knows; None where one is missing."""
    known = dict.fromkeys(path for row in rows for path, value in row.items() if value is not None)
    columns = [[value for path in known if (value := row.get(path)) is not None] for row in rows]
    return [sum(values) if values and len(values) == len(known) else None for values in columns]


def _rolling(rows: Sequence[Sequence[float] | None], window: int) -> list[float | None]:
    """Return, for each row, the variance of the last ``window`` rows that are known, the mean over the columns."""
    found: list[float | None] = []
    last: deque[Sequence[float]] = deque(maxlen=window)
    for row in rows:
        if row is not None:
            last.append(row)
        known = row is not None and len(last) > 1
        found.append(float(torch.tensor([*last], dtype=torch.float64).var(0).mean()) if known else None)
    return found
