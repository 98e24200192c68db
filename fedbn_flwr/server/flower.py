"""Flower's calls, the same for every method: sample nodes, send messages, check replies, report the round.

Every round has training messages, a tested one also evaluation messages. Some methods and options add queries:
exchanges of a step, statistics, keys of masked sums. ``server.dispatch`` builds the two kinds of messages,
``server.training_replies`` and ``server.replies`` read the replies. Before a test ``server.recalibration`` may
re-estimate statistics; ``server.model_completion`` is the model that is tested. ``server.run_state`` is what the server
knows of a run, and ``server.run_health`` says whether it has failed. What differs between methods is in the hooks of
``server.method``.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedbn_flwr.batchnorm.averaging import State
from fedbn_flwr.batchnorm.parts import Parts
from fedbn_flwr.data import Scale
from fedbn_flwr.errors import ClientPartError, ConfigError
from fedbn_flwr.messages.protocol import SYNCHRONISES, Continuity, MessageConfig, TrainConfig, refuse_own_keys
from fedbn_flwr.messages.records import to_record, views
from fedbn_flwr.server.able_nodes import able_to_train
from fedbn_flwr.server.dispatch import Dispatcher
from fedbn_flwr.server.dp_wrappers import check_wrapper
from fedbn_flwr.server.failures import losses_not_finite, training_losses
from fedbn_flwr.server.method import Method, P
from fedbn_flwr.server.model_completion import ModelCompletion
from fedbn_flwr.server.nodes import Node, NodeRegistry
from fedbn_flwr.server.params import RECALIBRATED
from fedbn_flwr.server.protection import Protection
from fedbn_flwr.server.recalibration import Recalibration
from fedbn_flwr.server.replies import Refused, Reply, read_metrics, read_replies, tested_nothing
from fedbn_flwr.server.report import RoundReport
from fedbn_flwr.server.rounds import Evaluate, run_rounds
from fedbn_flwr.server.run_health import RunHealth
from fedbn_flwr.server.run_state import RunState
from fedbn_flwr.server.training_replies import TrainingReplies
from fedbn_flwr.training.settings import share_of
from fedbn_flwr.transport.polling_grid import polling

__all__ = ["Server"]

_PROTECTION = "protection"  # in the state to checkpoint

logger = logging.getLogger("flwr")

OnRoundEnd = Callable[[int, ArrayRecord, Mapping[str, MetricRecord]], None]
ShouldStop = Callable[[int, Result], bool]
OnReplies = Callable[[int, Sequence[Reply], State, State], None]


class Server(Method[P]):
    """The part of a method that Flower calls: ``start`` for a whole run, or a loop of Flower's call by call.

    ``start`` and ``to_legacy`` begin a run with ``prepare``, which makes its state and calls ``begin``, the method's
    own beginning. Under any other loop the first ``configure_train`` calls ``begin``.

    Attributes:
        run: the state of the run.
        nodes: the nodes of the run.
        dispatcher: builds the messages.
        on_replies: called with the replies that a round used, and the global state before and after it; it reads only.
        on_round_end: called at the end of each round, with the model to test or save and the round's metrics.
        completes_tests: whether ``evaluate_fn`` gets averaged BN parts, or a warning; a caller who completes the global
            model with ``model_completion`` sets it to False.
        input_scale: mean and std of inputs that only the nodes have; every message with the model has them.
        stopped: set it to True, in ``evaluate_fn`` say, and ``start`` does no further round; ``should_stop`` sets it.
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
        self.input_scale: Scale | None = None
        self.protection = Protection()
        self._saved: tuple[int, dict[str, Any]] | None = None
        self._early_replies: list[Message] = []
        self.run = RunState(self.name, parts)
        self._make_nodes_and_dispatcher(3600.0)

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
        self._make_nodes_and_dispatcher(self.dispatcher.timeout)

    def _make_nodes_and_dispatcher(self, timeout: float) -> None:
        seed = secrets.randbits(63) if self.protection.secret_sampling else self.params.seed
        query: dict[str, Any] = {SYNCHRONISES: True} if self.synchronises else {}
        self.nodes = NodeRegistry(seed, timeout, query, self.num_partitions)
        self.dispatcher = Dispatcher(
            self.run,
            self.nodes,
            timeout,
            local=self.local,
            undoes_lost_rounds=self.undoes_lost_rounds,
            arrays_key=self.arrayrecord_key,
            config_key=self.configrecord_key,
        )

    # Made when they are used. They have no state of their own; stored, they would keep a finished run in memory.

    @property
    def _training_replies(self) -> TrainingReplies:
        return TrainingReplies(self, self.dispatcher, self.protection)

    @property
    def _recalibration(self) -> Recalibration:
        return Recalibration(self, self.dispatcher, self.protection)

    @property
    def model_completion(self) -> ModelCompletion:
        """The completed global model, which is tested and returned."""
        return ModelCompletion(self, self.run)

    @property
    def _health(self) -> RunHealth:
        return RunHealth(self, self.run)

    # --- a run --------------------------------------------------------------------------------------------------------

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        should_stop: ShouldStop | None = None,
    ) -> Result:
        """Run the rounds as Flower's own loop does, without its pauses. ``timeout`` also limits the wait for nodes.

        ``should_stop(server_round, result)`` is called after each round's test, with the model and the metrics so far,
        and before ``on_round_end``; where it returns True, ``start`` does no further round. Flower has it from 1.43 on.

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
        self.run.count_start(grid)
        polled = polling(grid)
        try:
            result = run_rounds(
                self,
                polled,
                initial_arrays,
                after=after,
                num_rounds=num_rounds,
                timeout=timeout,
                train_config=train_config,
                evaluate_config=evaluate_config,
                test_model=partial(self._test_model, evaluate_fn),
                after_round=partial(self._after_round, should_stop),
            )
        finally:
            self.stopped = False  # of this run, not of a next one
        last = self.reports[-1].server_round if self.reports else num_rounds
        if self.recalibrates and not self._health.ends_run and not self._tests_after(last):
            self._reestimate(last, result.arrays, polled)  # the run was stopped between two tests
        result.arrays = self.model_completion.complete(result.arrays)
        if self.completes_tests:
            self.model_completion.warn_of_nothing_shared()
        self._health.raise_if_failed(result)
        return result

    def _test_model(self, evaluate_fn: Evaluate | None, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Return the result of ``evaluate_fn``; round 0 is before the first."""
        self.run.arrays = arrays
        metrics = evaluate_fn(server_round, self.for_evaluate_fn(server_round, arrays)) if evaluate_fn else None
        if metrics is not None:
            self.run.metrics["evaluate_metrics_serverapp"] = metrics
        if server_round:
            self.note_divergence(losses_not_finite({"": metrics or {}}))
        return metrics

    def _after_round(self, should_stop: ShouldStop | None, server_round: int, result: Result) -> None:
        """Ask whether the run goes on, then end the round: ``on_round_end`` can know whether it was the last."""
        if should_stop is not None and should_stop(server_round, result):
            self.stopped = True
        self._end_round(server_round)

    def stops_after(self, server_round: int) -> bool:
        """Return whether the run ends after this round: it diverged, was stopped, or has no privacy left to spend."""
        return self.stopped or self._health.ends_run or self.protection.stops_after(server_round)

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
        self._forget_run(num_rounds, timeout)
        self.run.set_model(initial_arrays)
        if self._saved is None:
            self.run.check_initial(views(initial_arrays))
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

    def _forget_run(self, num_rounds: int | None, timeout: float) -> None:
        self.run = RunState(self.name, self.parts, self.continuity, num_rounds)
        self._early_replies = []
        self._make_nodes_and_dispatcher(timeout)

    def _begin(self) -> None:
        """Begin the method and the protection, once in a run; ``run.begun`` says that it is done."""
        self.run.begun = True
        self.begin()
        self.protection.begin(self)
        if self.completes_tests:
            self.model_completion.warn_of_initial_values()

    def _end_round(self, server_round: int) -> None:
        if self.on_round_end is not None:
            self.on_round_end(server_round, self.model_completion.complete(self.run.arrays), dict(self.run.metrics))

    # --- training -----------------------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return a training message for each sampled node with data; see ``flwr.serverapp.strategy.Strategy``.

        One of Flower's own loops sends the returned messages once. A synchronised round needs several messages: under
        such a loop it runs completely in this call, which then returns no messages.
        """
        refuse_own_keys(config=config)
        if self.reports and not self.run.by_run_rounds and server_round <= self.reports[0].server_round:
            self._forget_run(self.run.num_rounds, self.dispatcher.timeout)  # a loop of the user's begins anew
        self.run.configured = "configure_train", server_round
        self.run.set_model(arrays)
        check_wrapper(self, self.run.parts, warn=not self.run.begun)
        if not self.run.begun:  # neither our start nor to_legacy calls: a loop of the user's or of Flower's
            self._begin()
            self.run.count_start(grid)
            if self.completes_tests and self.on_round_end is None:
                self.model_completion.warn_of_own_start()
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
        nodes = self._sample_for_training(server_round, grid)
        if nodes and not self.protection.admits(self.run, len(nodes)):
            return []
        logger.info("configure_train: Sampled %s nodes (out of %s)", len(nodes), self.run.num_able)
        hooks = self.hooks_for(server_round)
        extras = {key: to_record(state) for key, state in self.extras(server_round).items()}
        self.run.hooks_sent, self.run.extras_sent = frozenset(hooks), frozenset(extras)
        own = TrainConfig(**vars(self._common(server_round)), hooks=tuple(hooks), extras=tuple(extras))
        sent = {**config, **own.write(), **self.protection.config()}
        for entries in hooks.values():
            sent |= entries
        return self.dispatcher.address(nodes, MessageType.TRAIN, arrays, sent, self.run.report.train, extras)

    def _sample_for_training(self, server_round: int, grid: Grid) -> list[Node]:
        present = self._present(grid, self.min_train_nodes)
        able = able_to_train(present, self.nodes.silent, bool(self.local), self.run.report)
        self.run.num_able = len(able)
        self.run.smallest = min((node.num_examples for node in able if node.num_examples), default=0)
        count = max(share_of(self.fraction_train, len(able)), self.min_train_nodes)
        return self.nodes.sample(able, count, "train", server_round)

    def run_training(self, server_round: int, messages: Iterable[Message], grid: Grid) -> list[Message]:
        """Send the training messages and return the replies that came in time."""
        return list(grid.send_and_receive(messages, timeout=self.dispatcher.timeout))

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the usable replies and report the refused ones; below ``min_replies`` keep the previous model."""
        replies = self._require_super_call("configure_train", server_round, [*self._early_replies, *replies])
        self._early_replies = []
        usable, refused = self._training_replies.read(server_round, replies)
        self._refuse_useless_apps(bool(usable), refused)
        before, released = self.run.before, self._replies_to_combine([reply for _, _, reply in usable])
        if not released:
            self._training_replies.note_unused(usable)
            return None, None
        state = {**before, **self.combine(server_round, released, before)}
        self._training_replies.note_used(usable)
        if self.on_replies is not None:
            self.on_replies(server_round, released, before, state)
        return to_record(state), self._training_metrics([message for _, message, _ in usable])

    def _refuse_useless_apps(self, any_usable: bool, refused: Refused) -> None:
        """Raise ClientPartError or ConfigError if no app works: every further round would fail in the same way."""
        lacking = [error for _, _, error in refused if isinstance(error, ClientPartError)]
        if lacking and not any_usable:
            raise lacking[0]
        self.dispatcher.raise_shared_error(refused, bool(self.run.trained))

    def _replies_to_combine(self, usable: Sequence[Reply]) -> Sequence[Reply]:
        """Return the replies to combine; none if too few are usable, or if the protection releases none."""
        report = self.run.report
        if len(usable) < self.params.min_replies and not (self.protection.always_releases and report.asked):
            self._health.note_too_few(len(usable))
            return []
        self.note_divergence(losses_not_finite(training_losses(report.clients)))
        released = self.protection.pool(self.run, usable, self.run.before)
        if not released:
            report.kept_previous = True
        return released

    def _training_metrics(self, used: Sequence[Message]) -> MetricRecord | None:
        """Return the averaged metrics of the replies that were used; write them to the report."""
        if not self.protection.publishes_metrics:
            return None
        metrics = self.train_metrics_aggr_fn([message.content for message in used], self.weighted_by_key)
        self.run.report.metrics = {key: value for key, value in metrics.items() if isinstance(value, (int, float))}
        self.run.metrics["train_metrics_clientapp"] = metrics
        return metrics

    # --- tests --------------------------------------------------------------------------------------------------------

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
        arrays = self.model_completion.complete(arrays)
        return self.dispatcher.address(nodes, MessageType.EVALUATE, arrays, sent, self.run.report.evaluate)

    def _tests_after(self, server_round: int) -> bool:
        """Return whether clients test, and statistics are re-estimated, after this round."""
        return server_round % self.params.eval_every == 0 or server_round == self.run.num_rounds

    def _reestimate(self, server_round: int, arrays: ArrayRecord, grid: Grid) -> None:
        """Re-estimate the statistics of ``arrays``, the model after this round, on all clients with data."""
        run = self.run
        if run.report.kept_previous and run.statistics_at_start:  # they are those of the same weights on the same data
            run.reestimated = run.statistics_at_start
            return
        nodes = [node for node in self._present(grid, 1) if node.num_examples != 0]
        run.reestimated = self._recalibration.ask(nodes, arrays, self._common(server_round).write(), grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average the clients' metrics; write each client's metrics to the report."""
        replies = self._require_super_call("configure_evaluate", server_round, replies)
        report, count_key = self.run.report, self.weighted_by_key
        pairs = [pair for pair in self.dispatcher.in_order(replies) if not tested_nothing(pair[1], count_key)]
        good, refused = read_replies(pairs, lambda _, message: read_metrics(message, count_key), report, "evaluation")
        # A client that lost its own part needs the whole state again.
        self.nodes.initialised.difference_update(node.node_id for node, m, _ in refused if m.has_error())
        self.dispatcher.raise_shared_test_error(refused)
        report.evaluations |= {node.label: numbers for node, _, numbers in good}
        self.run.tested |= bool(good)
        self.note_divergence(losses_not_finite(report.evaluations))
        contents = [message.content for _, message, _ in good]
        metrics = self.evaluate_metrics_aggr_fn(contents, count_key) if contents else None
        if metrics is not None:
            self.run.metrics["evaluate_metrics_clientapp"] = metrics
        if not self.run.by_run_rounds:  # the last call in a round of a loop of Flower's
            self._end_round(server_round)
            self._health.raise_if_ends()
        return metrics

    # --- shared by the calls ------------------------------------------------------------------------------------------

    def _present(self, grid: Grid, at_least: int) -> list[Node]:
        return self.nodes.present(grid, max(self.min_available_nodes, at_least))

    def _common(self, server_round: int) -> MessageConfig:
        """Return the config entries of every message with the model."""
        return MessageConfig(
            server_round=server_round,
            local_entries=self.run.parts.select(self.local),
            continuity=self.continuity,
            start_id=self.run.start_id,
            seed=self.params.seed,
            input_mean=self.input_scale.mean if self.input_scale else (),
            input_std=self.input_scale.std if self.input_scale else (),
        )

    def _require_super_call(self, configure: str, server_round: int, replies: Iterable[Message]) -> list[Message]:
        """Return the replies as a list, after checking that the strategy's own ``configure`` made the messages.

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

    # --- what callers and checkpoints use -----------------------------------------------------------------------------

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

    def note_divergence(self, losses: Sequence[str]) -> None:
        """Note and log that losses of this round, in words (``losses_not_finite``), are not finite; empty = all are."""
        self._health.note_losses(losses)

    def for_evaluate_fn(self, server_round: int, arrays: ArrayRecord) -> ArrayRecord:
        """Return the global model for the test after a round, with averaged BN parts if these are asked for."""
        if not self.completes_tests:
            return self.model_completion.with_statistics(arrays)
        return self.model_completion.for_evaluate_fn(server_round, arrays, self._tests_after(server_round))

    def outcome(self, num_rounds: int) -> dict[str, Any]:
        """Return what the summary of a run says of the method and of the protection."""
        return {**super().outcome(num_rounds), **self.protection.outcome()}

    @classmethod
    def names_in_bases(cls, attribute: str) -> list[str]:
        """Return the names in ``attribute`` of the method's class and of all its bases."""
        return [name for kind in reversed(cls.__mro__) for name in vars(kind).get(attribute, ())]

    def state_dict(self) -> dict[str, Any]:
        """Return the strategy state to checkpoint, without the model: JSON values and arrays by name."""
        own = {name: getattr(self, name) for name in self.names_in_bases("checkpoint_keys")}
        protected = {_PROTECTION: state} if (state := self.protection.state_dict()) else {}
        return {**self.run.checkpoint(self.nodes.initialised_labels), **own, **protected}

    def load_state_dict(self, state: Mapping[str, Any], server_round: int) -> None:
        """Let the next ``start`` continue after ``server_round`` with the ``state_dict`` of that round.

        Raises:
            ConfigError: the state belongs to another method.
        """
        wanted = {*self.names_in_bases("checkpoint_keys"), *RunState("").checkpoint([])}
        wanted |= {_PROTECTION} if self.protection.state_dict() else set()
        if set(state) != wanted:
            found, needed = ", ".join(sorted(state)), ", ".join(sorted(wanted))
            raise ConfigError(f"this state does not fit strategy {self.name!r}. Needed: {needed}. Found: {found}.")
        self._saved = server_round, dict(state)

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
        return self.model_completion.complete(arrays)
