"""Flower's calls, the same for every method: who is asked, what travels, what is refused, what is noted down.

Two kinds of message a round, training and evaluation; each is addressed by ``strategies.post``, each reply read by
``strategies.replies``. What a method does is in the hooks of ``strategies.method``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from logging import INFO, WARNING
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedbn_flwr.batchnorm.averaging import State
from fedbn_flwr.errors import ClientPartError
from fedbn_flwr.transport.polling_grid import prompt
from fedbn_flwr.batchnorm.reestimation import Moments
from fedbn_flwr.messages.records import from_record, listed, to_record
from fedbn_flwr.server.recalibration import QUERY, from_entries, pooled
from fedbn_flwr.server.replies import Reply, Terms, read_arrays, read_metrics, sort_out, tested_nothing
from fedbn_flwr.server.report import RoundReport, Traffic
from fedbn_flwr.server.nodes import Node
from fedbn_flwr.server.rounds import run_rounds
from fedbn_flwr.server.run_state import RunState
from fedbn_flwr.server.shared_bn import SHARED_BN

__all__ = ["Server"]


class Server(RunState):
    """A method as Flower runs it: through ``start``, or through the calls of a loop of Flower's."""

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the rounds as Flower's own loop does, with a prompt grid. ``timeout`` also bounds the wait for nodes.

        After ``load_state_dict`` the rounds go on where it says, and ``initial_arrays`` are the global model of then.

        Raises:
            EngineError: not enough nodes within the timeout.
            ConfigError: settings that do not fit this run.
        """
        after = self.prepare(initial_arrays, num_rounds, timeout)

        def tested(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            self.arrays = arrays
            return evaluate_fn(server_round, self._tested(arrays)) if evaluate_fn else None

        result = run_rounds(
            self,
            prompt(grid),
            initial_arrays,
            after,
            num_rounds,
            timeout,
            train_config,
            evaluate_config,
            tested,
        )
        if not result.arrays:  # no round had enough usable replies: the previous global model is the initial one
            result.arrays = initial_arrays
        result.arrays = self._tested(_over(result.arrays, self.completion(SHARED_BN)))
        return result

    # --- training ----------------------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample nodes with data and address a message to each; see ``flwr.serverapp.strategy.Strategy``."""
        self._know(arrays)
        if not self._begun:  # a start() of the user's own, which calls this method
            self._begin()
        self._before, self.gathered = from_record(arrays), {}
        self.reports.append(RoundReport(server_round, self.phase(server_round)))
        if self.fraction_train == 0.0:
            return []
        present = self._present(grid, self.min_train_nodes)
        for node in present:
            if node.unusable:
                self.reports[-1].reject(node.node_id, f"{node}: {node.unusable}")
        for node_id, why in self._post.roster.silent.items():
            self.reports[-1].reject(node_id, f"node {node_id} did not say who it is: {why}")
        able = [node for node in present if node.num_examples != 0]
        self.num_able = len(able)
        count = max(_share(self.fraction_train, len(able)), self.min_train_nodes)
        nodes = self._post.roster.sample(able, count, "train", server_round)
        log(INFO, "configure_train: Sampled %s nodes (out of %s)", len(nodes), len(able))
        method = self.client_config(server_round)
        self._rules_told = frozenset(listed(method, "rules"))
        told = {**config, **self._common(server_round), **method}
        extras = {key: to_record(state) for key, state in self.extras(server_round).items()}
        return self._address(nodes, MessageType.TRAIN, arrays, told, self.reports[-1].train, extras)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Refuse bad replies by name, average the rest; below ``min_replies`` keep the previous model."""
        report, started = self.reports[-1], self._post.roster.started
        pairs = self._post.in_order(replies, report)
        for node, message in pairs:
            self._note_kept(node, message)
        good, refused = sort_out(pairs, self._reader(server_round), report)
        started.difference_update(node.node_id for node, _, _ in refused)
        usable = [reply for _, _, reply in good]
        for reply in usable:
            started.add(reply.node.node_id)
            self.latest_bn.take(reply.node.order, reply.extras.get(SHARED_BN, {}), reply.num_examples)
            for size in reply.sizes:
                report.train.count_up(size)
        report.participants = [reply.node.partition_id for reply in usable]
        report.clients = {reply.node.label: dict(reply.metrics) for reply in usable}
        lacking = [error for _, _, error in refused if isinstance(error, ClientPartError)]
        if lacking and not usable:  # every further round would end like this one
            raise lacking[0]
        if len(usable) < self.params.min_replies:
            report.kept_previous = True
            log(
                WARNING,
                "round %d: %d usable replies, %d needed (min_replies): the previous global model is kept.",
                server_round,
                len(usable),
                self.params.min_replies,
            )
            return None, None
        state = {**self._before, **self.combine(server_round, usable, self._before)}
        metrics = self.train_metrics_aggr_fn([message.content for _, message, _ in good], self.weighted_by_key)
        report.metrics = {key: value for key, value in metrics.items() if isinstance(value, (int, float))}
        return to_record(state), metrics

    def _reader(self, server_round: int) -> Callable[[Node, Message], Reply]:
        terms = Terms(
            strategy=self.name,
            parts=self._known_parts,
            local=self.local,
            before=self._before,
            rules=self._rules_told - self.implicit_hooks,
            arrays_key=self.arrayrecord_key,
            count_key=self.weighted_by_key,
        )

        def read(node: Node, message: Message) -> Reply:
            reply = terms.read(node, message)
            self.check(server_round, reply, self._before)
            return reply

        return read

    # --- tests -------------------------------------------------------------------------------------------------------

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Every ``eval_every`` rounds and in the last: gather statistics where asked, and ask nodes to evaluate."""
        if server_round % self.params.eval_every and server_round != self.num_rounds:
            return []
        if (self.recalibrates or "recalibrated" in self._tests) and any(self._known_parts.moments()):
            self._gather(server_round, arrays, grid)
        if self.fraction_evaluate == 0.0:
            return []
        present = [node for node in self._present(grid, self.min_evaluate_nodes) if not node.unusable]
        count = max(_share(self.fraction_evaluate, len(present)), self.min_evaluate_nodes)
        nodes = self._post.roster.sample(present, count, "evaluate", server_round)
        told = {**config, **self._common(server_round)}
        # A client without BN parts of its own takes the average, where there is one, in place of the initial ones.
        arrays = self._tested(_over(arrays, self.completion(SHARED_BN)))
        return self._address(nodes, MessageType.EVALUATE, arrays, told, self.reports[-1].evaluate, {})

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average the clients' metrics; keep each client's own in the report."""
        report, count_key = self.reports[-1], self.weighted_by_key
        pairs = [pair for pair in self._post.in_order(replies, report) if not tested_nothing(pair[1], count_key)]
        good, refused = sort_out(pairs, lambda _, message: read_metrics(message, count_key), report, "evaluation")
        # A client that lost its own part needs the start again.
        self._post.roster.started.difference_update(node.node_id for node, m, _ in refused if m.has_error())
        report.evaluations |= {node.label: numbers for node, _, numbers in good}
        return self.evaluate_metrics_aggr_fn([message.content for _, message, _ in good], count_key) if good else None

    @property
    def recalibrates(self) -> bool:
        """Whether every test and the final model take gathered statistics."""
        return self.gathers or self.params.recalibrate

    def completion(self, test: str) -> State:
        """Return the entries to put over the global state for "recalibrated" or "averaged-bn"; empty where not asked.

        "recalibrated" is there in rounds with a test, from ``configure_evaluate`` on.
        """
        if test == SHARED_BN and SHARED_BN in self._tests:
            return self.latest_bn.average(self._known_parts, self.params.variance)
        return self.gathered if test == "recalibrated" else {}

    def _tested(self, arrays: ArrayRecord) -> ArrayRecord:
        return _over(arrays, self.gathered) if self.recalibrates else arrays

    def _gather(self, server_round: int, arrays: ArrayRecord, grid: Grid) -> None:
        """Gather the statistics of all clients with data under ``arrays``; without usable replies there are none."""
        report, like, parts = self.reports[-1], from_record(arrays), self._known_parts
        # What the method needs is a cost of its training; what only a further test needs is one of testing.
        traffic = report.train if self.recalibrates else report.evaluate
        nodes = [node for node in self._present(grid, 1) if node.num_examples != 0]
        messages = self._address(nodes, QUERY, arrays, self._common(server_round), traffic, {})
        replies = grid.send_and_receive(messages, timeout=self._post.timeout)

        def read(node: Node, message: Message) -> Mapping[str, Moments]:
            read_metrics(message, self.weighted_by_key)
            state, _, sizes = read_arrays(message, self.arrayrecord_key)
            moments = from_entries(state, like, parts)
            for size in sizes:
                traffic.count_up(size)
            return moments

        good, _ = sort_out(self._post.in_order(replies, report), read, report, "statistics")
        found = [moments for _, _, moments in good]
        self.gathered = pooled(found, like, parts) if len(found) >= self.params.min_replies else {}
        if not self.gathered:
            log(WARNING, "round %d: no statistics gathered from %d usable replies", server_round, len(found))

    # --- what the calls share ----------------------------------------------------------------------------------------

    def _present(self, grid: Grid, at_least: int) -> list[Node]:
        return self._post.roster.present(grid, max(self.min_available_nodes, at_least))

    def _common(self, server_round: int) -> dict[str, Any]:
        """Return what clients are told with every message that carries the model."""
        local = {"local-parts": ",".join(sorted(self.local))} if self.local else {}
        return {"server-round": server_round, **(self.continuity.told() if self.continuity else {}), **local}

    def _address(
        self,
        nodes: Sequence[Node],
        message_type: str,
        arrays: ArrayRecord,
        told: Mapping[str, Any],
        traffic: Traffic,
        extras: Mapping[str, ArrayRecord],
    ) -> list[Message]:
        local = self._known_parts.select(self.local)
        return self._post.address(nodes, message_type, arrays, local, ConfigRecord(dict(told)), traffic, extras)


def _over(arrays: ArrayRecord, entries: State) -> ArrayRecord:
    """Return the record with some entries replaced; itself where there are none to replace."""
    return ArrayRecord({**arrays, **to_record(entries)}) if entries else arrays


def _share(fraction: float, count: int) -> int:
    """Return floor(fraction * count), the fraction taken as the decimal it is written as: 0.29 of 100 is 29."""
    return math.floor(Fraction(str(fraction)) * count)
