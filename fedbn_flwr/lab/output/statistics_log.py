"""``statistics.jsonl``, with distances of the clients' statistics (FixBN, Fig. 3).

The server writes a line in rounds 1, 10, 20, ..., 90, 100, 200, ... and in the last
round, if it sees the statistics of each client. ::

    {"round": 20, "phase": "train", "clients": ["0", "1"],
     "layers": {"layer1.0.norm1": {
        "change": {"l1": 0.81, "mean": 0.021, "variance": 0.034},
        "clients": {"l1": [9.2, 8.7], "mean": [0.31, 0.28], "variance": [0.4, 0.38]}}}}

``clients``
    partition ids of the first 64 used replies. Each list below has a value for each of
    these clients, in this order.
``layers``
    every BatchNorm layer that sends its running statistics, by its path. The path is ""
    if the whole model is one layer.
``change``
    distance between the global statistics after and before the round (Fig. 3 a,
    "global").
``layers.*.clients``
    distance between each client's local batch statistics and the global statistics that
    it received (Fig. 3 a, "local"); null if the layer did not track in this round
    (FixBN after T*). ``doctor.by_batch`` defines the three distances. The figure shows
    the sum of ``l1`` over the layers.

Numbers have six significant digits; null is a non-finite number. Each line depends only
on its round, so a resumed run has the same lines as an uninterrupted run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.batchnorm.averaging import State
from fedbn_flwr.batchnorm.parts import Part, entry_name
from fedbn_flwr.doctor.by_batch import Distance, Statistics, distance
from fedbn_flwr.messages.records import tensors
from fedbn_flwr.server.methods.method import Reply
from fedbn_flwr.strategies import Strategy
from fedbn_flwr.training.freezing import layers_of

__all__ = ["StatisticsLog", "local_statistics", "rounds_with_statistics", "weight"]

# largest number of clients in a line, because more clients would need hundreds of
# kilobytes
_CLIENTS = 64

Tensors = Mapping[str, Tensor]


def rounds_with_statistics(rounds: int) -> frozenset[int]:
    """Return the rounds that get a line in ``statistics.jsonl``.

    ``rounds`` is the number of rounds of the run.
    """
    # Write lines often in the first rounds, when the statistics change most. In total,
    # the lines cost 1 % of a run.
    due = {1, rounds}
    every = 10
    while every <= rounds:
        due.update(range(every, min(10 * every, rounds + 1), every))
        every *= 10
    return frozenset(due)


class StatisticsLog:
    """Computes the lines of a run from its model and strategy."""

    def __init__(self, model: nn.Module, strategy: Strategy) -> None:
        self._strategy = strategy
        self._layers: dict[str, _BatchNorm] = {}
        for path, layer in layers_of(model, every_path=True).items():
            if layer.running_mean is not None:
                self._layers[path] = layer

    def line(
        self, server_round: int, replies: Sequence[Reply], before: State, after: State
    ) -> dict[str, Any]:
        """Return the line of a round from its replies and the global states around it.

        The line is empty if the model has no BatchNorm or the method sends no
        statistics.
        """
        run = self._strategy.run
        replies = replies[:_CLIENTS]
        names = run.parts.whole.select([Part.STATISTICS, Part.COUNTERS])

        def statistics_of(state: State) -> Tensors:
            return tensors({name: state[name] for name in names if name in state})

        sent, then = statistics_of(before), statistics_of(after)
        states = [statistics_of(reply.state) for reply in replies]
        layers = {}
        for path, layer in self._layers.items():
            if all(entry_name(path, "running_mean") in state for state in states):
                layers[path] = _distances(path, layer, sent, then, states)
        if not layers:
            return {}
        return {
            "round": server_round,
            "phase": run.report.phase,
            "clients": [reply.node.label for reply in replies],
            "layers": layers,
        }


def _distances(
    path: str,
    layer: _BatchNorm,
    before: Tensors,
    after: Tensors,
    states: Sequence[Tensors],
) -> Any:
    """Return a layer's entry in a line, with the keys "change" and "clients"."""

    def statistics(state: Tensors) -> Statistics:
        mean = state[entry_name(path, "running_mean")]
        variance = state[entry_name(path, "running_var")]
        return Statistics(mean.double(), variance.double())

    # Compute the statistics of each client's batches from the change of its running
    # statistics. A layer that saw no batch has None.
    reference = statistics(before)
    counter = entry_name(path, "num_batches_tracked")
    local: list[Distance | None] = []
    for state in states:
        w = weight(layer.momentum, before.get(counter), state.get(counter))
        if w > 0:
            own = local_statistics(reference, statistics(state), w)
            local.append(distance(own, reference, layer.eps))
        else:
            local.append(None)

    change = distance(statistics(after), reference, layer.eps)
    of_clients = {}
    for name in Distance._fields:
        of_clients[name] = [d and _shown(getattr(d, name)) for d in local]
    return {
        "change": {name: _shown(value) for name, value in change._asdict().items()},
        "clients": of_clients,
    }


def weight(
    momentum: float | None, before: Tensor | None, after: Tensor | None
) -> float:
    """Return w, the share of a round's batches in the running statistics after it.

    w is 1 if the layer does not count its batches. A step does
    S <- (1 - rho) S + rho S_batch, so after E steps w = 1 - (1 - rho)^E. If there is no
    momentum, S is the average of all n + E batches, and w = E / (n + E).

    Args:
        momentum: rho, or None for a cumulative average.
        before: n, batches seen before the round.
        after: n + E.
    """
    if before is None or after is None:
        return 1.0
    steps = int(after) - int(before)
    if momentum is None:
        return steps / max(int(after), 1)
    return 1 - (1 - momentum) ** steps


def local_statistics(before: Statistics, after: Statistics, w: float) -> Statistics:
    """Return the average of a client's batch statistics, S + (S' - S) / w.

    The client received the statistics S and returned S'. After one step, the
    result is the statistics of the batch (FixBN's S_m,B). After more steps, it is an
    average over the batches that gives later batches more weight. The variance is
    unbiased, and at least 0.
    """
    mean = before.mean + (after.mean - before.mean) / w
    variance = before.variance + (after.variance - before.variance) / w
    return Statistics(mean, variance.clamp(min=0))


def _shown(value: float) -> float | None:
    return float(f"{value:.6g}") if abs(value) < float("inf") else None
