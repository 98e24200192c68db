"""Flower's calls, the same for every method: sample nodes, send messages, check replies, report the round.

A round has two kinds of message, training and evaluation. ``server.dispatch`` builds them, ``server.replies`` reads the
replies. What differs between methods is in the hooks of ``server.method``.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedbn_flwr.batchnorm.averaging import State, check_state
from fedbn_flwr.batchnorm.parts import Part, Parts
from fedbn_flwr.compat.flower import is_app_error, lacks_function
from fedbn_flwr.data import Scale
from fedbn_flwr.errors import (
    ClientPartError,
    ConfigError,
    DivergedError,
    NothingTrainedError,
    ReplyError,
    raise_shared_config_error,
)
from fedbn_flwr.messages.protocol import (
    NUM_EXAMPLES,
    STATISTICS_QUERY,
    SYNCHRONISES,
    Continuity,
    MessageConfig,
    TrainConfig,
    refuse_own_keys,
)
from fedbn_flwr.messages.records import to_record, views
from fedbn_flwr.server.dispatch import Dispatcher
from fedbn_flwr.server.dp_wrappers import check_wrapper
from fedbn_flwr.server.failures import (
    MOD_ORDER,
    account,
    all_not_finite,
    divergence,
    error_text,
    losses_not_finite,
    nothing_trained,
    training_losses,
)
from fedbn_flwr.server.method import Method, P
from fedbn_flwr.server.nodes import Node, NodeRegistry
from fedbn_flwr.server.params import RECALIBRATED, tests_in
from fedbn_flwr.server.protection import Protection
from fedbn_flwr.server.recalibration import running_statistics_of
from fedbn_flwr.server.replies import (
    Reply,
    Terms,
    read_arrays,
    read_metrics,
    read_replies,
    tested_nothing,
    warn_of_other_counts,
)
from fedbn_flwr.server.report import RoundReport, Traffic
from fedbn_flwr.server.rounds import run_rounds
from fedbn_flwr.server.run_state import RunState
from fedbn_flwr.server.shared_bn import SHARED_BN, LatestBN
from fedbn_flwr.training.settings import share_of
from fedbn_flwr.transport.polling_grid import polling

__all__ = ["Server"]

_PROTECTION = "protection"  # in the state to checkpoint
# How often a strategy was started on a grid: the clients' Context.state outlives a start, and a later one tells them to
# forget what was kept in it (start_id).
_STARTS: WeakKeyDictionary[Grid, int] = WeakKeyDictionary()

logger = logging.getLogger("flwr")

Refused = Sequence[tuple[Node, Message, ReplyError]]
OnRoundEnd = Callable[[int, ArrayRecord, Mapping[str, MetricRecord]], None]
OnReplies = Callable[[int, Sequence[Reply], State, State], None]


class Server(Method[P]):
    """The part of a method that Flower calls: ``start`` for a whole run, or a loop of Flower's call by call.

    Attributes:
        run: the state of the run.
        nodes: the nodes of the run.
        dispatcher: builds the messages.
        tests: the tests of ``eval_on`` (``tests_in``).
        on_replies: called with the replies that a round used, and the global state before and after it; it reads only.
        on_round_end: called at the end of each round, with the model to test or save and the round's metrics.
        completes_tests: whether ``evaluate_fn`` gets averaged BN parts, or a warning; a caller who completes the global
            model with ``completion`` sets it to False.
        input_scale: mean and std of inputs that only the nodes have; every message with the model has them.
        stopped: set it to True, in ``evaluate_fn`` say, and ``start`` does no further round.
        protection: what happens to the replies before the method sees them.
        num_partitions: number of the parts of the data that nodes with one of them must name; 0 = any, all the same;
            None = not compared.
    """

    completes_tests = True
    stopped = False
    on_replies: OnReplies | None = None
    num_partitions: int | None = None

    def __init__(
        self, *args: Any, parts: Parts | None = None, on_round_end: OnRoundEnd | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.on_round_end = on_round_end
        self.tests = tests_in(self.params.eval_on)
        self.input_scale: Scale | None = None
        self.protection = Protection()
        self._saved: tuple[int, dict[str, Any]] | None = None
        self._early_replies: list[Message] = []
        self.run = RunState(self.name, parts)
        self._connect(3600.0)

    def protect(self, protection: Protection) -> None:
        """Let ``protection`` stand between the clients' replies and the method.

        Under client-level privacy and masked sums BatchNorm's counters count rounds, not batches. The server does not
        see which layers use them: give it no model with batch renormalisation, whose warm-up would not end, nor with
        ``momentum=None``.

        Raises:
            ConfigError: there is one already.
        """
        if type(self.protection) is not Protection:
            raise ConfigError(f"strategy {self.name!r} has a protection already; make a new strategy for another one")
        self.protection = protection
        self._connect(self.dispatcher.timeout)

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
        """Run the rounds as Flower's own loop does, without its pauses. ``timeout`` also limits the wait for nodes.

        After ``load_state_dict`` the run continues after the given round; ``initial_arrays`` is then the global model
        of that round.

        With ``eval_on="averaged-bn"``, ``evaluate_fn`` and the result's arrays hold the average of the clients' values
        for entries that stay with them. Without it they hold the initial values there, and a warning says so.

        Raises:
            EngineError: not enough nodes connect within the timeout.
            ConfigError: a setting does not fit this run, a config holds a key of this package, or all asked clients
                raised this error before any client has worked.
            DivergedError: a loss is not finite; with ``on_divergence="continue"`` it is only logged.
            NothingTrainedError: no round had enough usable replies. This error and the one before hold the result.
        """
        refuse_own_keys(train_config=train_config, evaluate_config=evaluate_config)
        after = self.prepare(initial_arrays, num_rounds, timeout)
        self.run.by_run_rounds = True
        self._count_start(grid)

        def test_and_end_round(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            self.run.arrays = arrays
            metrics = evaluate_fn(server_round, self.for_evaluate_fn(server_round, arrays)) if evaluate_fn else None
            if metrics is not None:
                self.run.metrics["evaluate_metrics_serverapp"] = metrics
            if server_round:
                self.note_divergence(losses_not_finite({"": metrics or {}}))
                self._end_round(server_round)
            return metrics

        try:
            result = run_rounds(
                self,
                polling(grid),
                initial_arrays,
                after,
                num_rounds,
                timeout,
                train_config,
                evaluate_config,
                test_and_end_round,
            )
        finally:
            self.stopped = False  # of this run, not of a next one
        arrays = result.arrays or initial_arrays  # empty: no round had enough usable replies
        last = self.reports[-1].server_round if self.reports else num_rounds
        if self.recalibrates and not self._ends_diverged and not self._tests_after(last):
            self._reestimate(last, arrays, polling(grid))  # the run was stopped between two tests
        result.arrays = self._completed(arrays)
        if self.completes_tests and SHARED_BN in self.tests and not self.completion(SHARED_BN):
            logger.warning(
                "no client has shared its BN parts, which eval_on='averaged-bn' asks for: in the returned arrays they "
                "have their initial values. A client with a training loop of its own shares them if it trains inside "
                "`with bn_rules(...)`."
            )
        self._refuse_failed_run(result)
        return result

    def _refuse_failed_run(self, result: Result) -> None:
        """Raise DivergedError or NothingTrainedError, with the result, if the finished run is one."""
        reports = self.reports
        if reports and self._ends_diverged:
            raise self._diverged(result)
        # A resumed run may have trained before: its earlier rounds are not known here.
        trains = self.fraction_train > 0 and not self.run.after
        # A run that continues after divergence may have no usable reply for that reason alone.
        diverged = any(report.diverged for report in reports)
        if reports and trains and not diverged and all(report.kept_previous for report in reports):
            raise NothingTrainedError(nothing_trained(self.params.min_replies, reports), result)

    def note_divergence(self, losses: Sequence[str], since: int | None = None) -> None:
        """Note and log that losses of this round are not finite.

        Args:
            losses: the losses in words (``losses_not_finite``); empty = all are finite.
            since: the round in which this began; None = this round.
        """
        report = self.run.report
        if losses:
            known = any(earlier.diverged for earlier in self.reports[-2:])
            report.diverged += [loss for loss in losses if loss not in report.diverged]
            report.diverged_at = min(since or report.server_round, report.diverged_at or report.server_round)
            advice = [] if known else self.divergence_advice(report.server_round)
            logger.error("%s", " ".join([f"round {report.server_round} diverged: {'; '.join(losses)}.", *advice]))

    def _diverged(self, result: Result | None = None) -> DivergedError:
        report = self.run.report
        text = divergence(report, " ".join(self.divergence_advice(report.server_round)))
        return DivergedError(text, report.diverged_at, result)

    def stops_after(self, server_round: int) -> bool:
        """Return whether the run ends after this round: it diverged, was stopped, or has no privacy left to spend."""
        return self.stopped or self._ends_diverged or self.protection.stops_after(server_round)

    @property
    def _ends_diverged(self) -> bool:
        return self.params.on_divergence == "stop" and bool(self.reports) and bool(self.run.report.diverged)

    def go_back(self, arrays: ArrayRecord, state: Mapping[str, Any], server_round: int) -> ArrayRecord:
        """Go back to the end of an earlier round of this run; return the model that the run returns there.

        Args:
            arrays: the global model of that round.
            state: ``state_dict()`` of that round.
            server_round: the round.
        """
        reports = [report for report in self.reports if report.server_round <= server_round]
        self.load_state_dict(state, server_round)
        self.prepare(arrays, self.run.num_rounds, self.dispatcher.timeout)
        self.run.reports = reports
        return self._completed(arrays)

    def prepare(self, initial_arrays: ArrayRecord, num_rounds: int | None, timeout: float) -> int:
        """Prepare a new run and forget an earlier one; ``start`` calls this first.

        Args:
            initial_arrays: the initial state of the global model.
            num_rounds: rounds of the run; None if Flower's loop does not say.
            timeout: seconds to wait for nodes and for replies.

        Returns:
            The last finished round: 0, or the round given to ``load_state_dict``.

        Raises:
            ConfigError: a setting does not fit this run, or the initial arrays are not finite.
        """
        self.run = RunState(self.name, self.parts, self.continuity, num_rounds)
        self._connect(timeout)
        self.run.set_model(initial_arrays)
        if self._saved is None:
            self._check_initial(views(initial_arrays))
        self._begin()
        if self._saved is None:
            return 0
        (after, saved), self._saved = self._saved, None
        self.run.after = after
        self.nodes.expect_initialised(self.run.restore(saved))
        self.protection.load_state_dict(saved.pop(_PROTECTION, {}))
        for name, value in saved.items():
            setattr(self, name, value)
        self.dispatcher.expect_hashes(self.run.local_hashes)
        return after

    def _check_initial(self, state: State) -> None:
        try:
            check_state(state, state, self.run.parts)
        except ReplyError as error:
            raise ConfigError(
                f"initial_arrays: {error}. Every reply with it would be refused. A constant, such as a mask of -inf, "
                "stays out of the state dict with register_buffer(..., persistent=False)"
            ) from None

    def state_dict(self) -> dict[str, Any]:
        """Return the strategy state to checkpoint, without the model: JSON values and arrays by name."""
        own = {name: getattr(self, name) for name in self.every("checkpoint_keys")}
        protected = {_PROTECTION: state} if (state := self.protection.state_dict()) else {}
        return {**self.run.checkpoint(self.nodes.initialised_labels), **own, **protected}

    def load_state_dict(self, state: Mapping[str, Any], server_round: int) -> None:
        """Let the next ``start`` continue after ``server_round`` with the ``state_dict`` of that round.

        Raises:
            ConfigError: the state belongs to another method.
        """
        wanted = {*self.every("checkpoint_keys"), *RunState("").checkpoint([])}
        wanted |= {_PROTECTION} if self.protection.state_dict() else set()
        if set(state) != wanted:
            found, needed = ", ".join(sorted(state)), ", ".join(sorted(wanted))
            raise ConfigError(f"this state does not fit strategy {self.name!r}. Needed: {needed}. Found: {found}.")
        self._saved = server_round, dict(state)

    @property
    def reports(self) -> list[RoundReport]:
        """The report of each round, oldest first."""
        return self.run.reports

    @property
    def parts(self) -> Parts | None:
        """The split of the model's state; without ``parts=`` it is None before the first arrays."""
        return self.run.parts_or_none

    @parts.setter
    def parts(self, parts: Parts | None) -> None:
        self.run.parts_or_none = parts

    @property
    def continuity(self) -> Continuity | None:
        """The run as it is sent to clients with a state folder; None = not sent."""
        return self.run.continuity

    @continuity.setter
    def continuity(self, continuity: Continuity | None) -> None:
        self.run.continuity = continuity

    def _connect(self, timeout: float) -> None:
        seed = secrets.randbits(63) if self.protection.secret_sampling else self.params.seed
        query: dict[str, Any] = {SYNCHRONISES: True} if self.synchronises else {}
        self.nodes = NodeRegistry(seed, timeout, query, self.num_partitions)
        self.dispatcher = Dispatcher(self.nodes, timeout, self.arrayrecord_key, self.configrecord_key)

    def _begin(self) -> None:
        self.run.begun, self.run.reestimated, self.run.latest_bn = True, {}, LatestBN()
        self.begin()
        self.protection.begin(self)
        if self.completes_tests and SHARED_BN not in self.tests and (stay := self._local_entries()):
            average = "eval_on='averaged-bn' puts the average of the clients' values there; "
            logger.warning(
                "strategy %r keeps %d entries of the model with its clients (%r, ...): in evaluate_fn and in the final "
                "arrays they have their initial values, which are not trained. %sevaluation on the clients tests each "
                "with its own.",
                self.name,
                len(stay),
                stay[0],
                "" if Part.REST in self.local else average,
            )

    def _count_start(self, grid: Grid) -> None:
        """Count the start on this grid; a later one has an id, so that its clients forget what they have kept."""
        earlier = _STARTS.get(grid, 0)
        _STARTS[grid] = earlier + 1
        if earlier and not self.run.after and self.continuity is None:
            self.run.start_id = str(earlier)

    def _warn_of_own_start(self) -> None:
        """Warn that only our ``start`` completes the model of ``evaluate_fn`` and of the result."""
        if self.completes_tests and self.on_round_end is None and (SHARED_BN in self.tests or self.recalibrates):
            logger.warning(
                "strategy %r re-estimates or averages BN entries for tests, and this run has a start() of your own: "
                "there evaluate_fn and the result do not have them. After configure_evaluate call "
                "strategy.for_evaluate_fn(server_round, arrays), which returns the model with them, or pass "
                "on_round_end= to the strategy.",
                self.name,
            )

    @classmethod
    def every(cls, attribute: str) -> list[str]:
        """Return the names in ``attribute`` of the method's class and of all its bases."""
        return [name for kind in reversed(cls.__mro__) for name in vars(kind).get(attribute, ())]

    # --- training ----------------------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return a training message for each sampled node with data; see ``flwr.serverapp.strategy.Strategy``.

        One of Flower's own loops sends the returned messages once. A synchronised round needs several messages: under
        such a loop it runs completely in this call, which then returns no messages.
        """
        refuse_own_keys(config=config)
        self.run.configured = "configure_train", server_round
        self.run.set_model(arrays)
        check_wrapper(self, self.run.parts, warn=not self.run.begun)
        if not self.run.begun:  # neither our start nor to_legacy calls: a loop of the user's or of Flower's
            self._begin()
            self._count_start(grid)
            self._warn_of_own_start()
        self.run.before, self.run.metrics = views(arrays), {}
        self.run.begin_round_statistics()
        self.run.reports.append(RoundReport(server_round, self.phase(server_round)))
        messages = self._training_messages(server_round, arrays, config, grid)
        self.run.report.asked = len(messages)
        pairs = [(self.nodes.node(message.metadata.dst_node_id), message) for message in messages]
        messages = self.protection.open_round(self.run, pairs, grid, self.dispatcher.timeout)
        if self.synchronises and not self.run.by_run_rounds:
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
        if present and all(node.unusable for node in present):
            raise ConfigError(f"no node can train; {present[0]}: {present[0].unusable}")
        for node_id, why in self.nodes.silent.items():
            report.reject(node_id, f"node {node_id} did not say who it is: {why}")
        able = self._unblocked([node for node in present if node.num_examples != 0])
        self.run.num_able = len(able)
        self.run.smallest = min((node.num_examples for node in able if node.num_examples), default=0)
        count = max(share_of(self.fraction_train, len(able)), self.min_train_nodes)
        nodes = self.nodes.sample(able, count, "train", server_round)
        if nodes and not self.protection.admits(self.run, len(nodes)):
            return []
        logger.info("configure_train: Sampled %s nodes (out of %s)", len(nodes), len(able))
        hooks = self.hooks_for(server_round)
        extras = {key: to_record(state) for key, state in self.extras(server_round).items()}
        self.run.hooks_sent, self.run.extras_sent = frozenset(hooks), frozenset(extras)
        own = TrainConfig(**vars(self._common(server_round)), hooks=tuple(hooks), extras=tuple(extras))
        sent = {**config, **own.write()}
        sent |= self.protection.config()
        for entries in hooks.values():
            sent |= entries
        return self._address(nodes, MessageType.TRAIN, arrays, sent, report.train, extras)

    def _unblocked(self, nodes: list[Node]) -> list[Node]:
        """Return the nodes without those on which a mod would refuse every reply, which lacks the entries that stay.

        Raises:
            ClientPartError: it would do so on all nodes.
        """
        if not self.local:
            return nodes
        refused = {node.node_id: f"{node}: {node.refusal} {MOD_ORDER}." for node in nodes if node.behind_mod}
        for node_id, why in refused.items():
            self.run.report.reject(node_id, why)
        if refused and len(refused) == len(nodes):
            raise ClientPartError(why)
        return [node for node in nodes if not node.behind_mod]

    def run_training(self, server_round: int, messages: Iterable[Message], grid: Grid) -> list[Message]:
        """Send the training messages and return the replies that came in time."""
        return list(grid.send_and_receive(messages, timeout=self.dispatcher.timeout))

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the usable replies and report the refused ones; below ``min_replies`` keep the previous model."""
        replies = self._of_own_messages("configure_train", server_round, [*self._early_replies, *replies])
        self._early_replies = []
        report = self.run.report
        pairs = self.dispatcher.in_order(replies, report, report.rejected)
        if not self.undoes_lost_rounds:
            for node, message in pairs:
                self.run.note_kept(node, message)
        good, refused = read_replies(pairs, self._reader(server_round), report)
        self.nodes.initialised.difference_update(node.node_id for node, _, _ in refused)
        usable = [reply for _, _, reply in good]
        report.replied = len(pairs)
        self._note_usable(usable)
        if not self.undoes_lost_rounds:
            self._note_shared(usable)
        warn_of_other_counts(usable, self.weighted_by_key, self.run.other_counts)
        lacking = [error for _, _, error in refused if isinstance(error, ClientPartError)]
        if lacking and not usable:  # every further round would fail in the same way
            raise lacking[0]
        self._raise_shared_error(refused, bool(self.run.trained))
        if len(usable) < self.params.min_replies and not (self.protection.always_releases and report.asked):
            self._keep_previous(len(usable))
            self._forget_undone(usable)
            return None, None
        self.note_divergence(losses_not_finite(training_losses(report.clients)))
        before = self.run.before
        released = self.protection.pool(self.run, usable, before)
        if not released:
            report.kept_previous = True
            self._forget_undone(usable)
            return None, None
        state = {**before, **self.combine(server_round, released, before)}
        if self.undoes_lost_rounds:
            for node, message, _ in good:
                self.run.note_kept(node, message)
            self._note_shared(usable)
        if self.on_replies is not None:
            self.on_replies(server_round, released, before, state)
        if not self.protection.publishes_metrics:
            return to_record(state), None
        metrics = self.train_metrics_aggr_fn([message.content for _, message, _ in good], self.weighted_by_key)
        report.metrics = {key: value for key, value in metrics.items() if isinstance(value, (int, float))}
        self.run.metrics["train_metrics_clientapp"] = metrics
        return to_record(state), metrics

    def _note_usable(self, usable: Sequence[Reply]) -> None:
        """Note who trained, with which metrics and bytes."""
        report = self.run.report
        for reply in usable:
            self.nodes.initialised.add(reply.node.node_id)
            for size in reply.sizes:
                report.train.count_up(size)
        if not self.protection.secret_sampling:
            report.participants = [reply.node.partition_id for reply in usable]
        if self.protection.publishes_metrics:
            report.clients = {reply.node.label: dict(reply.metrics) for reply in usable}
        self.run.trained.update(reply.node.label for reply in usable)

    def _note_shared(self, usable: Sequence[Reply]) -> None:
        """Note the BN parts that the clients share for tests: copies of what they keep."""
        for reply in usable:
            self.run.latest_bn.take(reply.node.order, reply.extras.get(SHARED_BN, {}), reply.num_examples)

    def _forget_undone(self, unused: Sequence[Reply]) -> None:
        """Send the whole state again to clients whose first round is undone: they have nothing left of their own."""
        if self.undoes_lost_rounds:
            anew = {r.node.node_id for r in unused if r.node.label not in self.run.local_hashes}
            self.nodes.initialised.difference_update(anew)

    def _keep_previous(self, num_usable: int) -> None:
        """Note and log a round with too few usable replies, and divergence where all replies are not finite."""
        report = self.run.report
        report.kept_previous = True
        logger.warning(
            "round %d: %d usable replies, %d needed (min_replies): the previous global model is kept. %s.",
            report.server_round,
            num_usable,
            self.params.min_replies,
            account([report]),
        )
        latest = self.reports[-2:]
        if all(map(all_not_finite, latest)) and (len(latest) == 2 or self.run.num_rounds == 1):
            since = latest[0].diverged_at or latest[0].server_round
            self.note_divergence([f"since round {since} all replies hold values that are not finite"], since)

    def _reader(self, server_round: int) -> Callable[[Node, Message], Reply]:
        before, part_of = self.run.before, self.run.parts.part_of
        terms = Terms(
            strategy=self.name,
            parts=self.run.parts,
            local=self.local,
            expected={name: array for name, array in before.items() if part_of[name] not in self.local},
            hooks=self.run.hooks_sent - self.implicit_hooks,
            extras=self.run.extras_sent,
            arrays_key=self.arrayrecord_key,
            count_key=self.weighted_by_key,
        )
        terms = self.protection.terms(terms)

        def read(node: Node, message: Message) -> Reply:
            reply = terms.read(node, message)
            if self.protection.reads_each:
                self.check(server_round, reply, before)
            self.protection.check(self.run, reply, before)
            return reply

        return read

    # --- tests -------------------------------------------------------------------------------------------------------

    def _tests_after(self, server_round: int) -> bool:
        """Return whether clients test, and statistics are re-estimated, after this round."""
        return server_round % self.params.eval_every == 0 or server_round == self.run.num_rounds

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the evaluation messages in every ``eval_every``-th and the last round; re-estimate if needed."""
        refuse_own_keys(config=config)
        self.run.configured = "configure_evaluate", server_round
        self.run.arrays = arrays
        if not self._tests_after(server_round):
            return []
        if (self.recalibrates or RECALIBRATED in self.tests) and any(self.run.parts.moments()):
            self._reestimate(server_round, arrays, grid)
        if self.fraction_evaluate == 0.0 or not self.protection.publishes_metrics:
            return []
        present = [node for node in self._present(grid, self.min_evaluate_nodes) if not node.unusable]
        count = max(share_of(self.fraction_evaluate, len(present)), self.min_evaluate_nodes)
        nodes = self.nodes.sample(present, count, "evaluate", server_round)
        sent = {**config, **self._common(server_round).write()}
        # A client without BN parts of its own is tested with the averaged ones, and with the initial ones before these.
        arrays = self._completed(arrays)
        return self._address(nodes, MessageType.EVALUATE, arrays, sent, self.run.report.evaluate, {})

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average the clients' metrics; write each client's metrics to the report."""
        replies = self._of_own_messages("configure_evaluate", server_round, replies)
        report, count_key = self.run.report, self.weighted_by_key
        pairs = [pair for pair in self.dispatcher.in_order(replies, report) if not tested_nothing(pair[1], count_key)]
        good, refused = read_replies(pairs, lambda _, message: read_metrics(message, count_key), report, "evaluation")
        # A client that lost its own part needs the whole state again.
        self.nodes.initialised.difference_update(node.node_id for node, m, _ in refused if m.has_error())
        self._raise_shared_test_error(refused)
        report.evaluations |= {node.label: numbers for node, _, numbers in good}
        self.run.tested |= bool(good)
        self.note_divergence(losses_not_finite(report.evaluations))
        metrics = (
            self.evaluate_metrics_aggr_fn([message.content for _, message, _ in good], count_key) if good else None
        )
        if metrics is not None:
            self.run.metrics["evaluate_metrics_clientapp"] = metrics
        if not self.run.by_run_rounds:  # the last call in a round of a loop of Flower's
            self._end_round(server_round)
            if self._ends_diverged:
                raise self._diverged()
        return metrics

    def outcome(self, num_rounds: int) -> dict[str, Any]:
        """Return what the summary of a run says of the method and of the protection."""
        return {**super().outcome(num_rounds), **self.protection.outcome()}

    @property
    def recalibrates(self) -> bool:
        """Whether every test and the final model use re-estimated statistics."""
        return self.reestimates or self.params.recalibrate

    def completion(self, test: str) -> State:
        """Return the entries that replace the global ones in test "recalibrated" or "averaged-bn"; else empty.

        The entries of "recalibrated" exist after ``configure_evaluate`` of a round with a test.
        """
        if test == SHARED_BN and SHARED_BN in self.tests:
            return self.run.latest_bn.average(self.run.parts, self.params.variance)
        return self.run.reestimated if test == RECALIBRATED else {}

    def _end_round(self, server_round: int) -> None:
        if self.on_round_end is not None:
            self.on_round_end(server_round, self._completed(self.run.arrays), dict(self.run.metrics))

    def _completed(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the model that clients test and that the run returns: with averaged or re-estimated BN entries."""
        return self._for_tests(_replaced(arrays, self.completion(SHARED_BN)))

    def for_evaluate_fn(self, server_round: int, arrays: ArrayRecord) -> ArrayRecord:
        """Return the global model for the test after a round, with averaged BN parts if these are asked for."""
        if self.completes_tests and self.recalibrates and server_round and not self._tests_after(server_round):
            logger.warning(
                "round %d: the model of evaluate_fn and on_round_end has statistics that are not re-estimated: that is "
                "done after every %d rounds, with eval_every=1 after each",
                server_round,
                self.params.eval_every,
            )
        if not self.completes_tests or SHARED_BN not in self.tests:
            return self._for_tests(arrays)
        if server_round and not self.completion(SHARED_BN):
            logger.warning(
                "round %d: no client has shared its BN parts: they are not trained in the test of the global model",
                server_round,
            )
        return self._completed(arrays)

    def _for_tests(self, arrays: ArrayRecord) -> ArrayRecord:
        return _replaced(arrays, self.run.reestimated) if self.recalibrates else arrays

    def _reestimate(self, server_round: int, arrays: ArrayRecord, grid: Grid) -> None:
        """Re-estimate the statistics of ``arrays`` from all clients with data; none below ``min_replies``."""
        report, like, parts = self.run.report, views(arrays), self.run.parts
        if report.kept_previous and self.run.statistics_at_start:  # they are those of the same weights on the same data
            self.run.reestimated = self.run.statistics_at_start
            return
        # Re-estimation that the method needs counts as training traffic, else as evaluation traffic.
        traffic = report.train if self.recalibrates else report.evaluate
        nodes = [node for node in self._present(grid, 1) if node.num_examples != 0]
        messages = self._address(nodes, STATISTICS_QUERY, arrays, self._common(server_round).write(), traffic, {})
        pairs = [(self.nodes.node(message.metadata.dst_node_id), message) for message in messages]
        messages = self.protection.open_statistics(self.run, pairs, grid, self.dispatcher.timeout)
        replies = list(grid.send_and_receive(messages, timeout=self.dispatcher.timeout))

        def read(node: Node, message: Message) -> State:
            read_metrics(message, NUM_EXAMPLES)  # whatever weighs the models
            state, _, sizes = read_arrays(message, self.arrayrecord_key)
            self.protection.check_statistics(self.run, state, like)
            for size in sizes:
                traffic.count_up(size)
            return state

        good, refused = read_replies(self.dispatcher.in_order(replies, report), read, report, "statistics")
        self._raise_shared_test_error(refused)
        self._refuse_apps_without_statistics(replies)
        moments = self.protection.statistics(self.run, [(node, state) for node, _, state in good], like)
        self.run.reestimated = (
            running_statistics_of(moments, like, parts) if len(good) >= self.params.min_replies else {}
        )
        if not self.run.reestimated:
            logger.warning("round %d: no statistics re-estimated from %d usable replies", server_round, len(good))

    def _refuse_apps_without_statistics(self, replies: Sequence[Message]) -> None:
        """Raise ClientPartError if no app can answer, and none has yet: the statistics would be those of the start."""
        failed = [reply for reply in replies if reply.has_error() and is_app_error(reply)]
        if not self.recalibrates or not failed or len(failed) < len(replies) or self.run.reestimated:
            return
        if lacks_function(failed[0], STATISTICS_QUERY):
            raise ClientPartError(
                f"the clients' app does not answer the query {STATISTICS_QUERY.partition('.')[2]!r}, by which strategy "
                f"{self.name!r} re-estimates statistics. Add to it a function with @app.query('statistics') that "
                "returns answer_statistics(msg, context, Net(), trainloader)."
            )
        raise ClientPartError(f"no client could measure its statistics: {error_text(failed[0])}")

    def _of_own_messages(self, configure: str, server_round: int, replies: Iterable[Message]) -> list[Message]:
        """Return the replies.

        Raises:
            ConfigError: the method ``configure`` is the user's own, and has not called the strategy's in this round.
        """
        found = list(replies)
        if not self.reports or (found and self.run.configured != (configure, server_round)):
            raise ConfigError(
                f"{configure} of {type(self).__name__} did not call super().{configure}(): take the messages that it "
                "returns, and leave out those that you do not want"
            )
        return found

    # --- shared by the calls ----------------------------------------------------------------------------------------

    def _present(self, grid: Grid, at_least: int) -> list[Node]:
        return self.nodes.present(grid, max(self.min_available_nodes, at_least))

    def _raise_shared_error(self, refused: Refused, any_works: bool) -> None:
        """Raise the ConfigError that all asked clients raised, unless a client is known to work.

        Args:
            refused: the refused replies.
            any_works: whether a client is known to work.
        """
        if not any_works and not self.run.after:  # clients of a resumed run worked before
            reasons = [str(message.error.reason) for _, message, _ in refused if message.has_error()]
            raise_shared_config_error(reasons, self.dispatcher.num_asked)

    def _raise_shared_test_error(self, refused: Refused) -> None:
        """Raise the ConfigError of a test that all asked clients raised, unless a client is known to work.

        It is if it was tested before, or has trained and has not failed now.
        """
        failed = {node.label for node, _, _ in refused}
        self._raise_shared_error(refused, self.run.tested or bool(self.run.trained - failed))

    def _local_entries(self) -> tuple[str, ...]:
        return self.run.parts.select(self.local)

    def _common(self, server_round: int) -> MessageConfig:
        """Return the config entries of every message with the model."""
        return MessageConfig(
            server_round=server_round,
            local_entries=self._local_entries(),
            continuity=self.continuity,
            start_id=self.run.start_id,
            seed=self.params.seed,
            input_mean=self.input_scale.mean if self.input_scale else (),
            input_std=self.input_scale.std if self.input_scale else (),
        )

    def _address(
        self,
        nodes: Sequence[Node],
        message_type: str,
        arrays: ArrayRecord,
        config: Mapping[str, Any],
        traffic: Traffic,
        extras: Mapping[str, ArrayRecord],
    ) -> list[Message]:
        used = self.run.local_hashes if self.undoes_lost_rounds else None
        return self.dispatcher.address(
            nodes, message_type, arrays, self._local_entries(), config, traffic, extras, used
        )


def _replaced(arrays: ArrayRecord, entries: State) -> ArrayRecord:
    """Return the record with ``entries`` replaced."""
    return ArrayRecord({**arrays, **to_record(entries)}) if entries else arrays
