"""Flower's calls, the same for every method: who is asked, what travels, what is refused, what is noted.

A round has two kinds of message, training and evaluation. ``server.dispatch`` addresses them, ``server.replies`` reads
the replies. What a method does is in the hooks of ``server.method``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedbn_flwr.batchnorm.averaging import State
from fedbn_flwr.batchnorm.parts import Parts
from fedbn_flwr.batchnorm.reestimation import Moments
from fedbn_flwr.errors import ClientPartError, ConfigError
from fedbn_flwr.messages.protocol import STATISTICS_QUERY, Continuity, MessageConfig, TrainConfig
from fedbn_flwr.messages.records import from_record, to_record
from fedbn_flwr.server.dispatch import Dispatcher
from fedbn_flwr.server.method import Method, P
from fedbn_flwr.server.nodes import Node, NodeRegistry
from fedbn_flwr.server.recalibration import from_entries, pooled
from fedbn_flwr.server.replies import Reply, Terms, read_arrays, read_metrics, sort_out, tested_nothing
from fedbn_flwr.server.report import RoundReport, Traffic
from fedbn_flwr.server.rounds import run_rounds
from fedbn_flwr.server.run_state import RunState
from fedbn_flwr.server.shared_bn import SHARED_BN, LatestBN
from fedbn_flwr.training.settings import share_of
from fedbn_flwr.transport.polling_grid import polling

__all__ = ["RECALIBRATED", "Server"]

RECALIBRATED = "recalibrated"  # the name in eval-on

logger = logging.getLogger("flwr")


class Server(Method[P]):
    """A method as Flower runs it: through ``start``, or through the calls of a loop of Flower's.

    Attributes:
        run: the state of the run.
        nodes: the nodes of the run.
        dispatcher: addresses the messages.
        reports: what happened, round by round.
        parts: the split of the model's state; None until the first arrays, where it was not given.
        continuity: what clients are told of the run, for their state folders; None = nothing.
    """

    def __init__(self, *args: Any, parts: Parts | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        tests = self.params.eval_on.split(",")
        self.tests = tuple(name.strip() for name in tests)
        self._saved: tuple[int, dict[str, Any]] | None = None
        self._early_replies: list[Message] = []
        self.run = RunState(self.name, parts)
        self._connect(3600.0)

    # --- a run -------------------------------------------------------------------------------------------------------

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
        """Run the rounds as Flower's own loop does, without its pauses. ``timeout`` also bounds the wait for nodes.

        After ``load_state_dict`` the rounds go on where it says, and ``initial_arrays`` are the global model of then.

        Raises:
            EngineError: not enough nodes within the timeout.
            ConfigError: settings that do not fit this run.
        """
        after = self.prepare(initial_arrays, num_rounds, timeout)
        self.run.own_loop = True

        def test(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            self.run.arrays = arrays
            return evaluate_fn(server_round, self._for_tests(arrays)) if evaluate_fn else None

        result = run_rounds(
            self,
            polling(grid),
            initial_arrays,
            after,
            num_rounds,
            timeout,
            train_config,
            evaluate_config,
            test,
        )
        if not result.arrays:  # no round had enough usable replies: the previous global model is the initial one
            result.arrays = initial_arrays
        result.arrays = self._for_tests(_over(result.arrays, self.completion(SHARED_BN)))
        return result

    def prepare(self, initial_arrays: ArrayRecord, num_rounds: int | None, timeout: float) -> int:
        """Forget an earlier run and get ready for this one; ``start`` does this first.

        Args:
            initial_arrays: the common start.
            num_rounds: rounds of the run; None where a loop of Flower's keeps it to itself.
            timeout: seconds to wait for nodes and for replies.

        Returns:
            The round to go on after: 0, or the one given to ``load_state_dict``.

        Raises:
            ConfigError: settings that do not fit this run.
        """
        self.run = RunState(self.name, self.parts, self.continuity, num_rounds)
        self._connect(timeout)
        self.run.know(initial_arrays)
        self._begin()
        if self._saved is None:
            return 0
        (after, saved), self._saved = self._saved, None
        self.nodes.expect_initialised(self.run.restore(saved))
        for name, value in saved.items():
            setattr(self, name, value)
        self.dispatcher.expect_hashes(self.run.local_hashes)
        return after

    def state_dict(self) -> dict[str, Any]:
        """Return what to checkpoint of a begun run, without the model: JSON values and arrays by name."""
        own = {name: getattr(self, name) for name in self._checkpoint_keys()}
        return {**self.run.checkpoint(self.nodes.initialised_labels), **own}

    def load_state_dict(self, state: Mapping[str, Any], server_round: int) -> None:
        """Let the next ``start`` go on after ``server_round`` with what ``state_dict`` returned then.

        Raises:
            ConfigError: it is the state of another method.
        """
        wanted = {*self._checkpoint_keys(), *RunState("").checkpoint([])}
        if set(state) != wanted:
            found, needed = ", ".join(sorted(state)), ", ".join(sorted(wanted))
            raise ConfigError(f"the state of a strategy {self.name!r} holds {needed}; this one holds {found}")
        self._saved = server_round, dict(state)

    @property
    def reports(self) -> list[RoundReport]:
        """What happened, round by round."""
        return self.run.reports

    @property
    def parts(self) -> Parts | None:
        """The split of the model's state; None until the first arrays, where it was not given."""
        return self.run.known_parts

    @parts.setter
    def parts(self, parts: Parts | None) -> None:
        self.run.known_parts = parts

    @property
    def continuity(self) -> Continuity | None:
        """What clients are told of the run, for their state folders; None = nothing."""
        return self.run.continuity

    @continuity.setter
    def continuity(self, continuity: Continuity | None) -> None:
        self.run.continuity = continuity

    def _connect(self, timeout: float) -> None:
        self.nodes = NodeRegistry(self.params.seed, timeout)
        self.dispatcher = Dispatcher(self.nodes, timeout, self.arrayrecord_key, self.configrecord_key)

    def _begin(self) -> None:
        self.run.begun, self.run.reestimated, self.run.latest_bn = True, {}, LatestBN()
        self.begin()

    def _checkpoint_keys(self) -> list[str]:
        return [name for kind in reversed(type(self).__mro__) for name in vars(kind).get("checkpoint_keys", ())]

    # --- training ----------------------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample nodes with data and address a message to each; see ``flwr.serverapp.strategy.Strategy``.

        A loop of Flower's sends what is returned here once. Under such a loop a synchronised round therefore runs here
        to its last reply, and nothing is left to send.
        """
        self.run.know(arrays)
        if not self.run.begun:
            self._begin()
        self.run.before, self.run.reestimated = from_record(arrays), {}
        self.run.reports.append(RoundReport(server_round, self.phase(server_round)))
        messages = self._training_messages(server_round, arrays, config, grid)
        if self.synchronises and not self.run.own_loop:
            self._early_replies = self.run_training(server_round, messages, grid)
            return []
        return messages

    def _training_messages(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        if self.fraction_train == 0.0:
            return []
        present, report = self._present(grid, self.min_train_nodes), self.run.report
        for node in present:
            if node.unusable:
                report.reject(node.node_id, f"{node}: {node.unusable}")
        for node_id, why in self.nodes.silent.items():
            report.reject(node_id, f"node {node_id} did not say who it is: {why}")
        able = [node for node in present if node.num_examples != 0]
        self.run.num_able = len(able)
        count = max(share_of(self.fraction_train, len(able)), self.min_train_nodes)
        nodes = self.nodes.sample(able, count, "train", server_round)
        logger.info("configure_train: Sampled %s nodes (out of %s)", len(nodes), len(able))
        hooks = self.hooks_for(server_round)
        self.run.hooks_told = frozenset(hooks)
        told = TrainConfig(**vars(self._common(server_round)), hooks=tuple(hooks)).write()
        for own in hooks.values():
            told |= own
        extras = {key: to_record(state) for key, state in self.extras(server_round).items()}
        return self._address(nodes, MessageType.TRAIN, arrays, {**config, **told}, report.train, extras)

    def run_training(self, server_round: int, messages: Iterable[Message], grid: Grid) -> list[Message]:
        """Send the training messages and return the replies that came in time."""
        return list(grid.send_and_receive(messages, timeout=self.dispatcher.timeout))

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Refuse bad replies by name, average the rest; below ``min_replies`` keep the previous model."""
        report, initialised = self.run.report, self.nodes.initialised
        pairs = self.dispatcher.in_order([*self._early_replies, *replies], report)
        self._early_replies = []
        for node, message in pairs:
            self.run.note_kept(node, message)
        good, refused = sort_out(pairs, self._reader(server_round), report)
        initialised.difference_update(node.node_id for node, _, _ in refused)
        usable = [reply for _, _, reply in good]
        for reply in usable:
            initialised.add(reply.node.node_id)
            self.run.latest_bn.take(reply.node.order, reply.extras.get(SHARED_BN, {}), reply.num_examples)
            for size in reply.sizes:
                report.train.count_up(size)
        report.participants = [reply.node.partition_id for reply in usable]
        report.clients = {reply.node.label: dict(reply.metrics) for reply in usable}
        lacking = [error for _, _, error in refused if isinstance(error, ClientPartError)]
        if lacking and not usable:  # every further round would end like this one
            raise lacking[0]
        if len(usable) < self.params.min_replies:
            report.kept_previous = True
            logger.warning(
                "round %d: %d usable replies, %d needed (min_replies): the previous global model is kept.",
                server_round,
                len(usable),
                self.params.min_replies,
            )
            return None, None
        before = self.run.before
        state = {**before, **self.combine(server_round, usable, before)}
        metrics = self.train_metrics_aggr_fn([message.content for _, message, _ in good], self.weighted_by_key)
        report.metrics = {key: value for key, value in metrics.items() if isinstance(value, (int, float))}
        return to_record(state), metrics

    def _reader(self, server_round: int) -> Callable[[Node, Message], Reply]:
        before = self.run.before
        terms = Terms(
            strategy=self.name,
            parts=self.run.parts,
            local=self.local,
            before=before,
            hooks=self.run.hooks_told - self.implicit_hooks,
            arrays_key=self.arrayrecord_key,
            count_key=self.weighted_by_key,
        )

        def read(node: Node, message: Message) -> Reply:
            reply = terms.read(node, message)
            self.check(server_round, reply, before)
            return reply

        return read

    # --- tests -------------------------------------------------------------------------------------------------------

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Every ``eval_every`` rounds and in the last: re-estimate where asked, and ask nodes to evaluate."""
        if server_round % self.params.eval_every and server_round != self.run.num_rounds:
            return []
        if (self.recalibrates or RECALIBRATED in self.tests) and any(self.run.parts.moments()):
            self._reestimate(server_round, arrays, grid)
        if self.fraction_evaluate == 0.0:
            return []
        present = [node for node in self._present(grid, self.min_evaluate_nodes) if not node.unusable]
        count = max(share_of(self.fraction_evaluate, len(present)), self.min_evaluate_nodes)
        nodes = self.nodes.sample(present, count, "evaluate", server_round)
        told = {**config, **self._common(server_round).write()}
        # A client without BN parts of its own takes the average, where there is one, in place of the initial ones.
        arrays = self._for_tests(_over(arrays, self.completion(SHARED_BN)))
        return self._address(nodes, MessageType.EVALUATE, arrays, told, self.run.report.evaluate, {})

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average the clients' metrics; keep each client's own in the report."""
        report, count_key = self.run.report, self.weighted_by_key
        pairs = [pair for pair in self.dispatcher.in_order(replies, report) if not tested_nothing(pair[1], count_key)]
        good, refused = sort_out(pairs, lambda _, message: read_metrics(message, count_key), report, "evaluation")
        # A client that lost its own part needs the start again.
        self.nodes.initialised.difference_update(node.node_id for node, m, _ in refused if m.has_error())
        report.evaluations |= {node.label: numbers for node, _, numbers in good}
        return self.evaluate_metrics_aggr_fn([message.content for _, message, _ in good], count_key) if good else None

    @property
    def recalibrates(self) -> bool:
        """Whether every test and the final model take re-estimated statistics."""
        return self.reestimates or self.params.recalibrate

    def completion(self, test: str) -> State:
        """Return the entries to put over the global state for "recalibrated" or "averaged-bn"; empty where not asked.

        "recalibrated" is there in rounds with a test, from ``configure_evaluate`` on.
        """
        if test == SHARED_BN and SHARED_BN in self.tests:
            return self.run.latest_bn.average(self.run.parts, self.params.variance)
        return self.run.reestimated if test == RECALIBRATED else {}

    def _for_tests(self, arrays: ArrayRecord) -> ArrayRecord:
        return _over(arrays, self.run.reestimated) if self.recalibrates else arrays

    def _reestimate(self, server_round: int, arrays: ArrayRecord, grid: Grid) -> None:
        """Re-estimate the statistics from all clients with data under ``arrays``; none without usable replies."""
        report, like, parts = self.run.report, from_record(arrays), self.run.parts
        # What the method needs is a cost of its training; what only a further test needs is one of testing.
        traffic = report.train if self.recalibrates else report.evaluate
        nodes = [node for node in self._present(grid, 1) if node.num_examples != 0]
        messages = self._address(nodes, STATISTICS_QUERY, arrays, self._common(server_round).write(), traffic, {})
        replies = grid.send_and_receive(messages, timeout=self.dispatcher.timeout)

        def read(node: Node, message: Message) -> Mapping[str, Moments]:
            read_metrics(message, self.weighted_by_key)
            state, _, sizes = read_arrays(message, self.arrayrecord_key)
            moments = from_entries(state, like, parts)
            for size in sizes:
                traffic.count_up(size)
            return moments

        good, _ = sort_out(self.dispatcher.in_order(replies, report), read, report, "statistics")
        found = [moments for _, _, moments in good]
        self.run.reestimated = pooled(found, like, parts) if len(found) >= self.params.min_replies else {}
        if not self.run.reestimated:
            logger.warning("round %d: no statistics gathered from %d usable replies", server_round, len(found))

    # --- what the calls share ----------------------------------------------------------------------------------------

    def _present(self, grid: Grid, at_least: int) -> list[Node]:
        return self.nodes.present(grid, max(self.min_available_nodes, at_least))

    def _local_entries(self) -> tuple[str, ...]:
        return self.run.parts.select(self.local)

    def _common(self, server_round: int) -> MessageConfig:
        """Return what clients are told with every message that carries the model."""
        return MessageConfig(server_round=server_round, local_entries=self._local_entries(), continuity=self.continuity)

    def _address(
        self,
        nodes: Sequence[Node],
        message_type: str,
        arrays: ArrayRecord,
        told: Mapping[str, Any],
        traffic: Traffic,
        extras: Mapping[str, ArrayRecord],
    ) -> list[Message]:
        return self.dispatcher.address(nodes, message_type, arrays, self._local_entries(), told, traffic, extras)


def _over(arrays: ArrayRecord, entries: State) -> ArrayRecord:
    """Return the record with some entries replaced; itself where there are none to replace."""
    return ArrayRecord({**arrays, **to_record(entries)}) if entries else arrays
