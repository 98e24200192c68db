r"""Re-estimation: BN statistics from a pass over the clients' data, under the current global weights.

The field calls it "precise BN". No data of the server's is used, and training does not see the result.

## Algorithm

The server asks every client with data for the count, the mean and the sum of squared deviations $(n_i, m_i, M_i)$ per
layer and channel (`batchnorm/reestimation.py`). It merges the answers, in the order of partition ids:

$$n = \sum_i n_i, \qquad m = \sum_i \frac{n_i}{n} m_i, \qquad M = \sum_i \left( M_i + n_i (m_i - m)^2 \right)$$

## What travels

| | before each test |
|---|---|
| sent down | the whole state (a method whose statistics are local: without them) |
| sent up | $m_i$ and $M_i$ of each BN layer, as many floats as its running statistics; an int64 count |
| cost | $F$ floats down (one broadcast), $S$ up per client, in one exchange before each test |

$S$ = floats of the running statistics.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid

from fedbn_flwr.batchnorm.averaging import State
from fedbn_flwr.batchnorm.parts import Parts
from fedbn_flwr.batchnorm.reestimation import Moments, merge
from fedbn_flwr.compat.flower import is_app_error, lacks_function
from fedbn_flwr.errors import ClientPartError
from fedbn_flwr.messages.protocol import NUM_EXAMPLES, STATISTICS_QUERY
from fedbn_flwr.messages.records import views
from fedbn_flwr.server.dispatch import Dispatcher
from fedbn_flwr.server.failures import error_text
from fedbn_flwr.server.method import Method
from fedbn_flwr.server.nodes import Node
from fedbn_flwr.server.protection import Protection
from fedbn_flwr.server.replies import read_arrays, read_metrics, read_replies

__all__ = ["Recalibration"]

logger = logging.getLogger("flwr")


class Recalibration:
    """Asks clients for the statistics of their data under a model, and merges the answers.

    Args:
        method: the method, and its settings.
        dispatcher: the messages of the run.
        protection: what happens to the answers before they are merged.
    """

    def __init__(self, method: Method[Any], dispatcher: Dispatcher, protection: Protection) -> None:
        self._method = method
        self._dispatcher = dispatcher
        self._protection = protection
        self._run = dispatcher.run

    def ask(self, nodes: Sequence[Node], arrays: ArrayRecord, config: Mapping[str, Any], grid: Grid) -> dict[str, Any]:
        """Return the running statistics of ``arrays`` on the nodes' data; none below ``min_replies`` usable answers.

        Args:
            nodes: the nodes with training data.
            arrays: the model.
            config: the config of the messages.
            grid: the nodes' grid.

        Raises:
            ClientPartError: no app can answer.
            ConfigError: all asked clients raised it, and none has worked before.
        """
        report, before = self._run.report, views(arrays)
        # Re-estimation that the method needs counts as training traffic, else as evaluation traffic.
        traffic = report.train if self._method.recalibrates else report.evaluate
        messages = self._dispatcher.address(nodes, STATISTICS_QUERY, arrays, config, traffic)
        pairs = list(zip(nodes, messages, strict=True))
        messages = self._protection.open_statistics(self._run, pairs, grid, self._dispatcher.timeout, before)
        replies = list(grid.send_and_receive(messages, timeout=self._dispatcher.timeout))

        def read(node: Node, message: Message) -> State:
            read_metrics(message, NUM_EXAMPLES)  # whatever weighs the models
            state, _, sizes = read_arrays(message, self._method.arrayrecord_key)
            self._protection.check_statistics(self._run, state, before)
            for size in sizes:
                traffic.count_up(size)
            return state

        good, refused = read_replies(self._dispatcher.in_order(replies), read, report, "statistics")
        self._dispatcher.raise_shared_test_error(refused)
        self._refuse_apps_without_answer(replies)
        usable = [(node, state) for node, _, state in good] if len(good) >= self._method.params.min_replies else []
        moments = self._protection.statistics(self._run, usable, before)
        statistics = _running_statistics(moments, before, self._run.parts)
        if not statistics:
            logger.warning(
                "round %d: no statistics re-estimated from %d usable replies", report.server_round, len(good)
            )
        return statistics

    def _refuse_apps_without_answer(self, replies: Sequence[Message]) -> None:
        """Raise ClientPartError if no app can answer: the statistics would be those of the start."""
        failed = [reply for reply in replies if reply.has_error() and is_app_error(reply)]
        if not self._method.recalibrates or not failed or len(failed) < len(replies):
            return
        if lacks_function(failed[0], STATISTICS_QUERY):
            raise ClientPartError(
                f"the clients' app does not answer the query {STATISTICS_QUERY.partition('.')[2]!r}, by which strategy "
                f"{self._method.name!r} re-estimates statistics. Add to it a function with @app.query('statistics') "
                "that returns answer_statistics(msg, context, Net(), trainloader)."
            )
        raise ClientPartError(f"no client could measure its statistics: {error_text(failed[0])}")


def _running_statistics(replies: Sequence[Mapping[str, Moments]], like: State, parts: Parts) -> dict[str, Any]:
    """Return the running statistics of all clients' data together, by entry, in the global state's dtypes.

    A layer with fewer than two values is left out, and so are counters, which count training batches.
    """
    entries: dict[str, Any] = {}
    for layer in parts.layers:
        own = [reply[layer.path] for reply in replies if layer.path in reply]
        if own and (total := merge(own)).count > 1:
            for leaf, value in (("running_mean", total.mean), ("running_var", total.variance)):
                name = layer.entries[leaf]
                entries[name] = value.numpy().astype(like[name].dtype)
    return entries
