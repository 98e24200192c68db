"""A strategy: a method with Flower's arguments and its own settings, and its rounds.

The calls of Flower are in ``server.flower_calls``.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedbn_flwr.batchnorm.parts import Parts
from fedbn_flwr.compat.flower import (
    aggregate_metricrecords,
    log_strategy_start_info,
    refuse_legacy_names,
)
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.messages.protocol import Continuity, refuse_own_keys
from fedbn_flwr.problems import Known
from fedbn_flwr.server.flower_calls import FlowerCalls
from fedbn_flwr.server.methods.combination import FLOWERS, Combination
from fedbn_flwr.server.methods.method import Method
from fedbn_flwr.server.methods.params import extras_of
from fedbn_flwr.server.methods.together import Methods
from fedbn_flwr.server.rounds.recalibration import (
    collect_class_moments,
    reestimate_before_tests,
)
from fedbn_flwr.server.runs import failures
from fedbn_flwr.server.runs.protection import Protection
from fedbn_flwr.server.runs.round_report import RoundReport, average_metrics
from fedbn_flwr.server.runs.run_state import (
    AggregateMetrics,
    OnReplies,
    OnRoundEnd,
)
from fedbn_flwr.training.run_memory import memory_of_run
from fedbn_flwr.transport.polling_grid import ImmediateGrid, polling

__all__ = ["AggregateMetrics", "ShouldStop", "Strategy", "TestModel"]

logger = logging.getLogger("flwr")

TestModel = Callable[[int, ArrayRecord], MetricRecord | None]
ShouldStop = Callable[[int, Result], bool]


class Strategy(FlowerCalls):
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
            complete and test the global model yourself (``Run.completed``).
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
        refuse_legacy_names(settings)
        bound = self.combination.arguments.bind(*flowers, **settings)
        bound.apply_defaults()
        given = bound.arguments
        for name in ("fraction_train", "fraction_evaluate"):
            share = given[name]
            if not isinstance(share, Real) or not 0 <= float(share) <= 1:
                raise ConfigError(
                    f"strategy {self.name!r}: {name}={share!r} must be a number from 0"
                    " to 1"
                )
        if methods is None:
            values = {}
            for name, field in self.Params.model_fields.items():
                value = values[name] = given[name]
                if extras_of(field).get("is_list") and not isinstance(value, str):
                    values[name] = ",".join(value)
            # The given split of the model's state may name personal entries.
            if parts is not None and not values["personal"]:
                values["personal"] = ",".join(parts.personal)
            methods = Methods(self.combination.kinds, self.Params(**values))
            methods.raise_or_warn(Known(parts=parts), ["settings"])
        self.methods = methods
        super().__init__(**{name: given[name] for name in FLOWERS})
        # Flower's function divides by the weight of all clients, even of clients that
        # do not report the metric.
        if self.train_metrics_aggr_fn is aggregate_metricrecords:
            self.train_metrics_aggr_fn = average_metrics
        if self.evaluate_metrics_aggr_fn is aggregate_metricrecords:
            self.evaluate_metrics_aggr_fn = average_metrics
        self.params = self.methods.params
        self.on_round_end, self.on_replies = on_round_end, on_replies
        self.completes_tests, self.num_partitions = completes_tests, num_partitions
        self.site_names: Mapping[str, str] = {}
        self.protection = Protection()
        self._saved: tuple[int, Mapping[str, Any]] | None = None
        self.forget_run(split=parts)

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
    def reports(self) -> list[RoundReport]:
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
        return self.run.start.split

    @parts.setter
    def parts(self, parts: Parts | None) -> None:
        if parts and parts.personal and not self.methods.params.personal:
            raise ConfigError(
                f"strategy.parts has the personal entry '{parts.personal[0]}', but the"
                " strategy was made without personal entries, and would share it. Pass"
                " parts= or personal= to the constructor"
            )
        self.run.start.split = parts
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
        return self.methods.advice(self.run.states, server_round, self.run.start.split)

    def for_evaluate_fn(self, server_round: int, arrays: ArrayRecord) -> ArrayRecord:
        """Return the model for a round's test, with averaged BN if configured."""
        run = self.run
        if self.completes_tests and server_round:
            if run.methods.reestimates and not run.tests_after(server_round):
                logger.warning(
                    "round %d: the model of evaluate_fn and on_round_end has statistics"
                    " that are not re-estimated. Statistics are re-estimated after every"
                    " %d rounds, and with eval_every=1 after each round",
                    server_round,
                    self.params.eval_every,
                )
            run.warn_of_nothing_shared()
        return run.completed(arrays, averaged=self.completes_tests)

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
            result.arrays = run.completed(result.arrays)
        finally:
            self._in_start = False
            self.run.close()
            # The flag applies to this run, not to the next one.
            self.stopped = False
        if self.completes_tests:
            self.run.warn_of_nothing_shared()
        failures.raise_if_ends(self.run, result)
        failures.raise_if_untrained(self.run, result)
        failures.warn_of_unused_end(self.run)
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
            if last and run.methods.all_phases.class_moments and not run.ends_diverged:
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
        return self.run.completed(arrays)
