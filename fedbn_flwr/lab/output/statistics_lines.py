"""The BatchNorm statistics of a run, round by round: a line of ``statistics.jsonl`` for each recorded round.

The server of a run with ``watch-statistics=N`` writes a line in every N-th round and in the last; by default in rounds
1, 10, 20, ..., 90, 100, 200, ... and in the last, where it sees the statistics of each client. A line has what the
server sees: the running statistics that it sent, those that the clients sent back, and their average. ::

    {"round": 12, "phase": "train", "num-clients": 2, "clients": ["0", "1"],
     "layers": {"layer1.0.norm1": {
        "change": {"l1": 0.81, "mean": 0.021, "variance": 0.034},
        "clients": {"l1": [9.2, 8.7], "mean": [0.31, 0.28], "variance": [0.4, 0.38], "weight": [0.1, 0.1]},
        "sample": {"channels": [0, 5, 10, 15],
                   "mean": [[0.1, -0.3, 0.7, 0.2], [...]], "variance": [[1.2, 0.8, 0.5, 2.1], [...]]}}}}

``clients``
    partition ids of the replies that were used; every list below has one value for each, in this order.
``layers``
    by path, every BatchNorm layer whose running statistics are sent. "" is a model that is a layer itself.
``change``
    distance of the global statistics after the round from those before it (FixBN, Fig. 3 (a), "global").
``layers.*.clients``
    distance of each client's local batch statistics from the global ones that it got (Fig. 3 (a), "local"). The three
    distances are those of ``doctor.by_batch``; the figure is the sum of ``l1`` over the layers.
``weight``
    w, the share of the local batch statistics in what the client sent back; see ``local_statistics``. 0 = the layer did
    not track in this round (FixBN after T*), and the client's distances and sample are null. 1 = not known.
``sample``
    the local batch statistics themselves, of up to four channels evenly spread: lists of clients by channels. Their
    variance over a window of lines is Fig. 3 (b) for these channels; the spread of a client's distance over a window is
    the variance of FixBN's section B.6.

With more than 64 clients in a round, ``clients`` is null, and a layer has ``quantiles`` instead of its ``clients`` and
``sample``: for ``l1``, ``mean`` and ``variance`` the minimum, the three quartiles and the maximum over the clients.
Numbers have six significant digits; null is a number that is not finite. Each line is computed from its round alone, so
a resumed run has the same lines as one that was never interrupted.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedbn_flwr.batchnorm.parts import entry_name
from fedbn_flwr.doctor.by_batch import Distance, Statistics, distance, layers_of
from fedbn_flwr.doctor.state import TensorState

__all__ = [
    "MAX_CLIENTS",
    "Tracked",
    "local_statistics",
    "sample",
    "statistics_line",
    "tracked_layers",
    "trends",
    "weight",
]

MAX_CLIENTS = 64
"""With more clients in a round a line holds quantiles: it would have hundreds of kilobytes."""

_SAMPLE = 4
_QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)


class Tracked(NamedTuple):
    """A BatchNorm layer with running statistics: its path, eps and momentum (None = cumulative average)."""

    path: str
    eps: float
    momentum: float | None

    def entry(self, leaf: str) -> str:
        """Return the name of an entry of the layer."""
        return entry_name(self.path, leaf)

    def statistics(self, state: TensorState) -> Statistics:
        """Return the layer's running statistics."""
        return Statistics(state[self.entry("running_mean")].double(), state[self.entry("running_var")].double())

    def steps(self, state: TensorState) -> int | None:
        """Return how many batches the layer has seen; None if it does not count."""
        counter = state.get(self.entry("num_batches_tracked"))
        return None if counter is None else int(counter)


def tracked_layers(model: nn.Module) -> list[Tracked]:
    """Return the BatchNorm layers of a model that have running statistics, by type; in the order of the model."""
    layers = layers_of(model, every_path=True)
    tracking = {path: layer for path, layer in layers.items() if layer.running_mean is not None}
    return [Tracked(path, layer.eps, layer.momentum) for path, layer in tracking.items()]


def weight(momentum: float | None, before: int | None, after: int | None) -> float:
    """Return w, the share of a round's batches in the running statistics after it; 1 if the layer does not count.

    A step does S <- (1 - rho) S + rho S_batch, so after E steps w = 1 - (1 - rho)^E. Without momentum S is the average
    of all n + E batches, and w = E / (n + E).

    Args:
        momentum: rho; None = cumulative average.
        before: n, batches seen before the round.
        after: n + E.
    """
    if before is None or after is None:
        return 1.0
    if momentum is None:
        return (after - before) / after if after else 0.0
    return 1 - (1 - momentum) ** (after - before)


def local_statistics(before: Statistics, after: Statistics, w: float) -> Statistics:
    """Return the average of a client's batch statistics, S + (S' - S) / w; the variance is the unbiased one.

    S is what the client got, S' what it sent back. With one step these are the statistics of the batch (FixBN's S_m,B),
    with more steps an average over the batches that gives later ones more weight. The variance is at least 0.
    """
    mean = before.mean + (after.mean - before.mean) / w
    return Statistics(mean, (before.variance + (after.variance - before.variance) / w).clamp(min=0))


def sample(num_channels: int) -> list[int]:
    """Return the channels whose statistics are recorded: up to four, evenly spread."""
    count = min(_SAMPLE, num_channels)
    return [index * num_channels // count for index in range(count)]


def statistics_line(
    layers: Sequence[Tracked], before: TensorState, after: TensorState, replies: Sequence[tuple[str, TensorState]]
) -> dict[str, Any]:
    """Return the entries ``num-clients``, ``clients`` and ``layers`` of a line.

    Args:
        layers: the layers to record; those whose statistics are not in the replies are left out.
        before: the global state that was sent.
        after: the global state after the round.
        replies: the label and the state of each client, in order.
    """
    few = len(replies) <= MAX_CLIENTS
    states = [state for _, state in replies]
    of_layers = {}
    for layer in layers:
        if all(layer.entry("running_mean") in state for state in states):
            of_layers[layer.path] = _layer(layer, before, after, states, few)
    clients = [label for label, _ in replies] if few else None
    return {"num-clients": len(replies), "clients": clients, "layers": of_layers}


def _layer(
    layer: Tracked, before: TensorState, after: TensorState, replies: Sequence[TensorState], few: bool
) -> dict[str, Any]:
    reference, seen = layer.statistics(before), layer.steps(before)
    line: dict[str, Any] = {"change": _named(distance(layer.statistics(after), reference, layer.eps))}
    weights = [weight(layer.momentum, seen, layer.steps(reply)) for reply in replies]
    local: list[Statistics | None] = []
    for reply, w in zip(replies, weights, strict=True):
        local.append(local_statistics(reference, layer.statistics(reply), w) if w > 0 else None)
    distances = [statistics and distance(statistics, reference, layer.eps) for statistics in local]
    if not few:
        quantiles = {name: _quantiles(_column(distances, name)) for name in Distance._fields}
        return {**line, "quantiles": quantiles}
    channels = sample(len(reference.mean))
    line["clients"] = {name: list(map(_shown, _column(distances, name))) for name in Distance._fields}
    line["clients"]["weight"] = list(map(_shown, weights))
    line["sample"] = {"channels": channels}
    for name in Statistics._fields:
        chosen = [None if values is None else values[channels] for values in _column(local, name)]
        line["sample"][name] = [None if values is None else _row(values) for values in chosen]
    return line


def _column(rows: Sequence[Any], name: str) -> list[Any]:
    """Return one value of each row; None for a row that is None."""
    return [None if row is None else getattr(row, name) for row in rows]


def _named(distance: Distance) -> dict[str, float | None]:
    return {name: _shown(value) for name, value in distance._asdict().items()}


def _quantiles(values: Sequence[float | None]) -> list[float | None]:
    known = torch.tensor([value for value in values if value is not None], dtype=torch.float64)
    if not len(known):
        return [None] * len(_QUANTILES)
    return _row(torch.quantile(known, torch.tensor(_QUANTILES, dtype=torch.float64)))


def _row(values: Tensor) -> list[float | None]:
    return [_shown(value) for value in values.tolist()]


def _shown(value: float | None) -> float | None:
    """Return a number with six significant digits; None if it is not finite."""
    return float(f"{value:.6g}") if value is not None and abs(value) < float("inf") else None


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
        of_clients = {client: _entries(rows, path) for client, rows in local.items()}
        of_layers[path] = {"change-l1": _entries(changes, path), "local-l1": of_clients}
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


def _entries(rows: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
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
