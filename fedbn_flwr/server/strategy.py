"""Flower's interface, in terms of the run.

``server.rounds.round`` does the work; a strategy sends its messages. The run sees the
strategy only as Flower's FedAvg, for the arguments that a user may change.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import proxy

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.serverapp.strategy import Result

from fedbn_flwr.batchnorm.parts import Parts
from fedbn_flwr.compat.flower import (
    is_default_aggregation,
    log_strategy_start_info,
)
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.messages.protocol import SYNCHRONISES, Continuity, refuse_own_keys
from fedbn_flwr.server.methods.method import Method
from fedbn_flwr.server.methods.together import (
    FLOWERS,
    Combination,
    Methods,
)
from fedbn_flwr.server.rounds import run_start, testing
from fedbn_flwr.server.rounds.recalibration import (
    collect_class_moments,
    reestimate_before_tests,
)
from fedbn_flwr.server.rounds.round import HalfRound, one_round, one_test
from fedbn_flwr.server.rounds.synchronised_training import train_synchronised
from fedbn_flwr.server.runs import failures
from fedbn_flwr.server.runs.nodes import NodeRegistry
from fedbn_flwr.server.runs.protection import Protection
from fedbn_flwr.server.runs.round_outcome import RoundOutcome, average_metrics
from fedbn_flwr.server.runs.run_state import (
    AggregateMetrics,
    OnReplies,
    OnRoundEnd,
    Run,
    Start,
)
from fedbn_flwr.training.run_memory import memory_of_run
from fedbn_flwr.transport.polling_grid import ImmediateGrid, polling

__all__ = ["AggregateMetrics", "ShouldStop", "Strategy", "TestModel"]

logger = logging.getLogger("flwr")

TestModel = Callable[[int, ArrayRecord], MetricRecord | None]
ShouldStop = Callable[[int, Result], bool]


@dataclass
class _Open:
    """A half of a round whose replies were not read yet.

    Attributes:
        call: the call of Flower that made the messages.
        number: the round.
        arrays: the model in the messages, as the loop passed it.
        messages: the messages.
        steps: the half, which awaits the replies.
        early_replies: replies of a synchronised round, which runs during the call of
            ``configure_train``.
    """

    call: str
    number: int
    arrays: ArrayRecord
    messages: Sequence[Message]
    steps: HalfRound
    early_replies: Sequence[Message] = ()


class Strategy(FlowerFedAvg):
    """A method as a strategy of Flower, with Flower's arguments and its own settings.

    ``start`` runs all rounds. Flower's own loops use the single calls instead. A class
    may override Flower's methods (``configure_train``, ``aggregate_train``, ...) and
    call ``super()``.

    A checkpoint consists of ``state_dict()`` and the global model. After
    ``load_state_dict`` the next ``start`` continues from it.

    The constructor is made from the settings. ``help`` shows all its arguments, and the
    generated file ``strategies/constructors.pyi`` shows them to editors and type checkers.

    Args:
        *flowers: the arguments of ``flwr.serverapp.strategy.FedAvg``, with their
            defaults. They may also be given by name.
        parts: the split of the model's state (``split_state(model)``); by default it
            follows from the names of the initial arrays.
        on_round_end: called as ``on_round_end(server_round, arrays, metrics)`` at the
            end of each round. It receives the model that the run would return if it
            ended there, and the round's metrics by the names of Flower's ``Result``
            (``train_metrics_clientapp``, ...). An exception raised by it ends the run.
        on_replies: called with the used replies of a round, and the global state before
            and after it. The function must not change these arguments.
        completes_tests: whether ``evaluate_fn`` receives averaged BN parts, and
            warnings report BN parts that are not averaged. Set it to False if you
            complete and test the global model yourself (``server.rounds.testing``).
        num_partitions: number of data partitions that every node holding one must
            report. 0 accepts any number that all nodes report; None disables the
            check.
        methods: the class's methods with checked settings, instead of ``settings``.
        **settings: the settings by name, fields of ``Params``. All methods share the
            settings of ``server.methods.params.Params``.

    Attributes:
        method: the method's class, or the result of ``combined``.
        name: the name of the strategy.
        combination: the class's methods.
        params: the settings.
        methods: the options and methods in use.
        run: the server's knowledge of the run.
        on_replies: the argument.
        on_round_end: the argument.
        completes_tests: the argument.
        num_partitions: the argument.
        stopped: if set to True, for example in ``evaluate_fn``, ``start`` runs no
            further round. ``should_stop`` sets it as well.
        protection: the protection of the replies before the method sees them.
        site_names: names of the clients' sites by partition id as a text, for the log;
            a ``site-name`` in a node's config replaces the name.

    Raises:
        TypeError: an argument does not exist.
        ConfigError: a value is out of range, or a setting has no effect.
    """

    method: ClassVar[type[Method[Any, Any] | Strategy] | Combination] = Method
    combination: ClassVar[Combination] = Combination((Method,), Method.Params)
    name: ClassVar[str]
    Params: ClassVar[type[Any]] = Method.Params

    stopped = False
    __signature__: ClassVar[inspect.Signature | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Take the name, the settings and the arguments from the class's method."""
        super().__init_subclass__(**kwargs)
        # The result of ``combined`` is a strategy, with a combination of its own.
        method: Any = getattr(cls.method, "combination", cls.method)
        if not isinstance(method, Combination):
            method = Combination((method,), method.Params)
        cls.combination = method
        cls.name, cls.Params = method.name, method.Params
        # Help shows this signature, unless the class has a constructor of its own.
        cls.__signature__ = None
        if cls.__init__ is Strategy.__init__:
            named = [*method.arguments.parameters.values()]
            for own in inspect.signature(Strategy.__init__).parameters.values():
                if own.kind is inspect.Parameter.KEYWORD_ONLY:
                    named.append(own)
            cls.__signature__ = inspect.Signature(named)

    def __init__(
        self,
        *flowers: Any,
        parts: Parts | None = None,
        on_round_end: OnRoundEnd | None = None,
        on_replies: OnReplies | None = None,
        completes_tests: bool = True,
        num_partitions: int | None = None,
        methods: Methods | None = None,
        **settings: Any,
    ) -> None:
        bound = self.combination.arguments.bind(*flowers, **settings)
        bound.apply_defaults()
        given = bound.arguments
        self.methods = methods or self.combination.methods_given(given, parts)
        super().__init__(**{name: given[name] for name in FLOWERS})
        # Flower's function divides by the weight of all clients, even of clients that
        # do not report the metric.
        if is_default_aggregation(self.train_metrics_aggr_fn):
            self.train_metrics_aggr_fn = average_metrics
        if is_default_aggregation(self.evaluate_metrics_aggr_fn):
            self.evaluate_metrics_aggr_fn = average_metrics
        self.params = self.methods.params
        self.on_round_end, self.on_replies = on_round_end, on_replies
        self.completes_tests, self.num_partitions = completes_tests, num_partitions
        self.site_names: Mapping[str, str] = {}
        self.protection = Protection()
        self._saved: tuple[int, Mapping[str, Any]] | None = None
        self._open: _Open | None = None
        self._in_start = False  # whether ``start`` runs the rounds
        self._run = self._new_run(Start(parts_or_none=parts))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy. An open round belongs to the original."""
        return {**vars(self), "_open": None}

    def protect(self, protection: Protection) -> None:
        """Apply ``protection`` to the clients' replies before the method sees them.

        Under client-level privacy, BatchNorm's counters count rounds
        instead of batches. The server cannot see which layers use the counters: do not
        give it a model with ``momentum=None``.

        Raises:
            ConfigError: there is a protection already, or the strategy has reports of
                unprotected rounds.
        """
        if type(self.protection) is not Protection:
            raise ConfigError(
                f"strategy {self.name!r} has a protection already: make a new strategy"
                " for another protection"
            )
        if self.run.reports:
            raise ConfigError(
                f"strategy {self.name!r} has reports of {len(self.run.reports)} unprotected"
                " rounds: call protect() before the first round, or make a new"
                " strategy"
            )
        self.protection = protection
        self.forget_run()

    # --- its run ----------------------------------------------------------------------

    @property
    def run(self) -> Run:
        """The state of the run. It reads Flower's arguments from this strategy."""
        # A copied strategy has a run that refers to the original, so set the reference
        # at each access. It is weak, because a strong reference would keep the models
        # in memory until the next garbage collection.
        self._run.options = proxy(self)
        return self._run

    @property
    def reports(self) -> list[RoundOutcome]:
        """The report of each round, oldest first."""
        return self.run.reports

    @property
    def state(self) -> Any:
        """The method's state as a value, such as ``FixBN().state.frozen_after``.

        With several methods, it is a mapping by name.
        """
        names = self.name.split("+")
        if len(names) == 1:
            return self.run.states.get(self.name)
        return {name: self.run.states.get(name) for name in names}

    @property
    def parts(self) -> Parts | None:
        """The split of the model's state, or None if it is still unknown."""
        return self.run.start.parts_or_none

    @parts.setter
    def parts(self, parts: Parts | None) -> None:
        if parts and parts.personal and not self.methods.params.personal:
            raise ConfigError(
                f"strategy.parts has the personal entry '{parts.personal[0]}', but the"
                " strategy was made without personal entries, and would share it. Pass"
                " parts= or personal= to the constructor"
            )
        self.run.start.parts_or_none = parts
        self.run.start.shapes = {}  # of the next model, which is checked with this split

    @property
    def continuity(self) -> Continuity | None:
        """The id of the run for clients with a state folder, or None if not sent."""
        return self.run.start.continuity

    @continuity.setter
    def continuity(self, continuity: Continuity | None) -> None:
        self.run.start.continuity = continuity

    def advice(self, server_round: int) -> list[str]:
        """Return the causes and the remedies of a non-finite loss in this round."""
        return self.methods.advice(
            self.run.states, server_round, self.run.start.parts_or_none
        )

    def for_evaluate_fn(self, server_round: int, arrays: ArrayRecord) -> ArrayRecord:
        """Return the model for a round's test, with averaged BN if configured."""
        if not self.completes_tests:
            return testing.completed(self.run, arrays, averaged=False)
        return testing.tested_by_server(self.run, server_round, arrays)

    def outcome(self, num_rounds: int) -> dict[str, Any]:
        """Return the summary's entries about the methods and the protection."""
        return {
            **self.methods.outcome(self.run.states, num_rounds),
            **self.protection.outcome(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON values and arrays."""
        return self.run.saved()

    # --- the rounds -------------------------------------------------------------------

    @memory_of_run()
    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: TestModel | None = None,
        should_stop: ShouldStop | None = None,
    ) -> Result:
        """Run the rounds as Flower's own loop does, without its pauses.

        ``timeout`` also limits the wait for nodes.

        ``should_stop(server_round, result)`` is called after each round's test, and
        before ``on_round_end``, with the model and the metrics so far. If it returns
        True, ``start`` runs no further round. Flower has this argument since 1.43.

        After ``load_state_dict`` the run continues after the given round;
        ``initial_arrays`` is then the global model of that round.

        With ``eval_on="averaged-bn"``, ``evaluate_fn`` and the result's arrays contain
        the average of the clients' values for entries that stay with the clients.
        Without this setting, both contain the initial values of these entries, and a
        warning is logged.

        Raises:
            EngineError: not enough nodes connect within the timeout.
            ConfigError: a setting does not fit this run, a config contains a key of
                this package, or all asked clients raised this error before any client
                has worked.
            DivergedError: a loss is not finite. With ``on_divergence="continue"`` it is
                only logged.
            NothingTrainedError: no round had enough usable replies. This error and
                DivergedError contain the result.
        """
        refuse_own_keys(train_config=train_config, evaluate_config=evaluate_config)
        configs = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
        self._in_start = True
        try:
            self.prepare(initial_arrays, num_rounds, timeout)
            self.run.count_start(grid)
            grid = polling(grid)
            result = self._rounds(grid, num_rounds, configs, evaluate_fn, should_stop)
            # A run that was stopped between two tests has no statistics for its last
            # weights yet.
            run = self.run
            last = run.reports[-1].server_round if run.reports else num_rounds
            untested = not run.tests_after(last)
            if run.methods.reestimates and untested and not run.ends_diverged:
                reestimate_before_tests(run, result.arrays, grid)
            result.arrays = testing.completed(run, result.arrays)
        finally:
            self._in_start = False
            self.run.close()
            # The flag applies to this run, not to the next one.
            self.stopped = False
        if self.completes_tests:
            testing.warn_of_nothing_shared(self.run)
        failures.raise_if_ends(self.run, result)
        failures.raise_if_untrained(self.run, result)
        return result

    def _rounds(
        self,
        grid: ImmediateGrid,
        num_rounds: int,
        configs: tuple[ConfigRecord, ConfigRecord],
        evaluate_fn: TestModel | None,
        should_stop: ShouldStop | None,
    ) -> Result:
        """Run the rounds like Flower's loop, but starting at any round.

        ``configs`` are the configs of training and of tests.
        """
        arrays, after = self.run.arrays, self.run.start.after
        train_config, test_config = configs
        logger.info("Starting %s strategy:", self.name)
        log_strategy_start_info(num_rounds, arrays, *configs)
        self.summary()
        if after:
            logger.info("Continuing after round %d", after)
        result = Result(arrays=arrays)

        def test(server_round: int, evaluate_fn: TestModel) -> MetricRecord | None:
            model = self.for_evaluate_fn(server_round, arrays)
            metrics = evaluate_fn(server_round, model)
            if metrics is not None:
                logger.info(
                    "Evaluation of the global model, round %d: %s",
                    server_round,
                    metrics,
                )
                result.evaluate_metrics_serverapp[server_round] = metrics
            return metrics

        # As in Flower's loop, round 0 tests the initial model. A resumed run skips it.
        if evaluate_fn is not None and not after:
            test(0, evaluate_fn)
        for server_round in range(after + 1, num_rounds + 1):
            if self.ends:
                break
            logger.info("[ROUND %d/%d]", server_round, num_rounds)

            # Train. Keep the last model if too few replies arrive for a new model.
            messages = self.configure_train(server_round, arrays, train_config, grid)
            replies = self.send_training(messages, grid)
            averaged, metrics = self.aggregate_train(server_round, replies)
            if averaged is not None:
                result.arrays = arrays = averaged
            if metrics is not None:
                logger.info("Training: %s", metrics)
                result.train_metrics_clientapp[server_round] = metrics

            # Test on the clients.
            messages = self.configure_evaluate(server_round, arrays, test_config, grid)
            timeout = self.run.start.timeout
            replies = grid.receive(list(messages), timeout=timeout)
            metrics = self.aggregate_evaluate(server_round, replies)
            if metrics is not None:
                logger.info("Evaluation: %s", metrics)
                result.evaluate_metrics_clientapp[server_round] = metrics

            # Test on the server. The result may stop the run after this round.
            tested = test(server_round, evaluate_fn) if evaluate_fn else None
            if should_stop is not None and should_stop(server_round, result):
                self.stopped = True
            # Ask before the end of the round, which writes its traffic.
            run = self.run
            last = server_round == num_rounds or self.ends
            if last and run.methods.whole.class_moments and not run.ends_diverged:
                collect_class_moments(run, arrays, grid)
            self.end_round(server_round, tested)
        return result

    @property
    def ends(self) -> bool:
        """Whether the run ends after this round, because it diverged or was stopped."""
        return self.stopped or self.run.ends_diverged

    def prepare(
        self, initial_arrays: ArrayRecord, num_rounds: int | None, timeout: float
    ) -> int:
        """Prepare a new run and forget an earlier run. ``start`` calls this first.

        Args:
            initial_arrays: the initial state of the global model.
            num_rounds: rounds of the run; None if Flower's loop does not report them.
            timeout: seconds to wait for nodes and for replies.

        Returns:
            The last finished round: 0, or the round given to ``load_state_dict``.

        Raises:
            ConfigError: a setting does not fit this run, or the initial arrays are not
                finite.
        """
        self.forget_run(num_rounds=num_rounds, timeout=timeout)
        self.run.arrays = initial_arrays
        self.run.set_model(initial_arrays)
        self.begin(is_new=self._saved is None)
        if self._saved is None:
            return 0
        after, saved = self._saved
        self.run.resume(after, saved)
        # Forget the state only now, so that a state that does not fit is refused again
        # in the next start.
        self._saved = None
        return after

    def forget_run(self, **changed: Any) -> None:
        """Make a new run. Its start differs from the earlier start in ``changed``."""
        # Close the earlier run here, because Flower's loops do not, and its address
        # must be free again.
        self.run.close()
        self._open = None
        earlier = self.run.start
        limits = {
            "timeout": earlier.timeout,
            "num_rounds": earlier.num_rounds,
            **changed,
        }
        start = Start(
            parts_or_none=earlier.parts_or_none, continuity=earlier.continuity, **limits
        )
        self._run = self._new_run(start)

    def _new_run(self, start: Start) -> Run:
        # A client of a synchronised step reports whether its model can take part.
        synchronises = self.methods.whole.exchanges is not None
        nodes = NodeRegistry(
            self.params.seed,
            start.timeout,
            {SYNCHRONISES: True} if synchronises else {},
            self.num_partitions,
            # A name would reveal more of a protected client than its number.
            site_names=self.site_names if self.protection.publishes_metrics else None,
        )
        # The states are there before a run begins, for methods that declare them.
        states = {one.name: one.State() for one in self.methods if one.State}
        own = proxy(self)
        return Run(self.methods, nodes, self.protection, own, start, states=states)

    def begin(self, own: str = "", is_new: bool = False) -> None:
        """Check the model and begin the run, once.

        Args:
            own: "start" if the rounds are not those of ``prepare``.
            is_new: whether the model is not that of a checkpoint.
        """
        # A function assigned to the object has no __func__.
        aggregate = getattr(self.aggregate_train, "__func__", None)
        if aggregate is not Strategy.aggregate_train:
            own = own or "aggregate_train"
        if self.on_round_end is not None:
            own = ""
        tests = self.completes_tests
        run_start.begin(self.run, is_new=is_new, completes_tests=tests, own=own)

    # --- Flower's calls ---------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return a training message for each sampled node with data.

        Flower's own loops send the returned messages once. A synchronised round needs
        several messages: in such a loop it runs completely within this call, which then
        returns no messages.
        """
        refuse_own_keys(config=config)
        # If round 1 comes again, another loop has started a new run.
        if self.run.reports and server_round <= self.run.reports[0].server_round:
            self.forget_run()
        run = self.run
        run.set_model(arrays)
        if not run.reports:
            run_start.check_wrapper(run)
        # ``start`` and ``to_legacy`` have begun the run.
        if not run.start.begun:
            self.begin("start")
            run.count_start(grid)
        if not self._in_start:
            self._close_left(arrays)
        # A user may override these methods in a class, or assign them to the object, and
        # then read whole replies.
        own = (self.aggregate_train, self.send_training)
        only_methods_read = (
            self._in_start
            and self.on_replies is None
            and [getattr(method, "__func__", method) for method in own]
            == [Strategy.aggregate_train, Strategy.send_training]
            and self.train_metrics_aggr_fn is average_metrics
        )
        steps = one_round(
            run, server_round, arrays, config, grid, self.on_replies, only_methods_read
        )
        messages: Sequence[Message] = next(steps)
        self._open = _Open("configure_train", server_round, arrays, messages, steps)
        if self._in_start or run.round.phase.exchanges is None:
            return messages
        # Another loop sends messages once, but a synchronised step sends several.
        self._open.early_replies = self.send_training(messages, grid)
        return ()

    def _close_left(self, arrays: ArrayRecord) -> None:
        """Finish a training whose replies were not read, although a call follows.

        Flower's wrappers skip ``aggregate_train`` if a reply is an error. If the model
        has changed to ``arrays``, the loop has aggregated the replies itself.
        """
        left = self._open
        if left is None or left.call != "configure_train":
            return
        # The messages of a training with early replies were already answered.
        if left.messages and not left.early_replies and arrays is left.arrays:
            self._open = None
            left.steps.send([])
            failures.raise_if_nothing_trains(self.run)

    def _read(
        self, call: str, server_round: int, replies: Iterable[Message], nothing: Any
    ) -> Any:
        """Return the result of the half round that awaits the replies.

        The result is ``nothing`` if it never began.

        Args:
            call: the call of Flower that made the messages.
            server_round: the round.
            replies: the replies.
            nothing: the result without messages.

        Raises:
            ConfigError: the user's method that makes the messages did not call the
                method of this package in this round.
        """
        half, self._open = self._open, None
        known = bool(self.run.reports)
        if known and half and (half.call, half.number) == (call, server_round):
            if half.early_replies:
                replies = [*half.early_replies, *replies]
            return half.steps.send(replies)
        # Nothing to read: a user's class may ask no client in a round.
        if [*replies] or not known:
            raise ConfigError(
                f"{call} of {type(self).__name__} did not call super().{call}(): call"
                " it, and remove the messages that you do not want from its result"
            )
        return nothing

    def send_training(
        self, messages: Iterable[Message], grid: Grid
    ) -> Sequence[Message]:
        """Send the training messages, and return the replies that come in time.

        In a synchronised round it also answers the exchanges of the step.
        """
        messages = list(messages)
        if messages and self.run.round.phase.exchanges is not None:
            return train_synchronised(self.run, messages, grid)
        return polling(grid).receive(messages, timeout=self.run.start.timeout)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the usable replies and report the refused replies.

        With fewer than ``min_replies`` usable replies, the previous model is kept.

        Raises:
            NothingTrainedError: no round so far had enough usable replies. Only loops
                other than our ``start`` raise it here, in the last round, or in the
                second round if the number of rounds is unknown.
        """
        trained: tuple[ArrayRecord | None, MetricRecord | None] = self._read(
            "configure_train", server_round, replies, (None, None)
        )
        # Flower's loops would end without an error.
        if not self._in_start:
            failures.raise_if_nothing_trains(self.run)
        return trained

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the evaluation messages if due, after a re-estimation if necessary."""
        refuse_own_keys(config=config)
        if not self._in_start:
            self._close_left(arrays)
        steps = one_test(self.run, server_round, arrays, config, grid)
        messages: Sequence[Message] = next(steps)
        self._open = _Open("configure_evaluate", server_round, arrays, messages, steps)
        return messages

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Average the clients' metrics, and report the metrics of each client."""
        metrics: MetricRecord | None = self._read(
            "configure_evaluate", server_round, replies, None
        )
        # In other loops, this is the last call of a round. In ``start``, the server's
        # own test follows.
        if not self._in_start:
            self.end_round(server_round, None)
            failures.raise_if_ends(self.run)
        return metrics

    def end_round(self, server_round: int, server_test: MetricRecord | None) -> None:
        """End a round after the server's own test, if any. ``start`` calls this."""
        run = self.run
        if server_test is not None:
            run.round.metrics["evaluate_metrics_serverapp"] = server_test
            losses = failures.losses_not_finite({"": server_test})
            failures.note_losses(run, losses)
        if self.on_round_end is not None:
            model = testing.completed(run, run.arrays)
            self.on_round_end(server_round, model, dict(run.round.metrics))

    # --- checkpoints -------------------------------------------------------------------

    def load_state_dict(self, state: Mapping[str, Any], server_round: int) -> None:
        """Let the next ``start`` continue after a round, with its ``state_dict``.

        ``start`` raises ConfigError if the state belongs to another strategy.
        """
        self._saved = server_round, dict(state)

    def go_back(
        self, arrays: ArrayRecord, state: Mapping[str, Any], server_round: int
    ) -> ArrayRecord:
        """Go back to the end of an earlier round, and return its result's model.

        Args:
            arrays: the global model of that round.
            state: ``state_dict()`` of that round.
            server_round: the round.
        """
        reports = [
            report for report in self.run.reports if report.server_round <= server_round
        ]
        self.load_state_dict(state, server_round)
        start = self.run.start
        self.prepare(arrays, start.num_rounds, start.timeout)
        self.run.reports = reports
        return testing.completed(self.run, arrays)
