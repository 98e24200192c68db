"""Flower's calls, in terms of the run.

``server.rounds.round`` does the work. The calls of Flower are an adapter around it:
they send its messages, and give it the replies. The run sees the strategy only as
Flower's FedAvg, for the arguments that a user may change.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast
from weakref import proxy

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from fedbn_flwr.batchnorm.averaging import check_state, statistics_moved
from fedbn_flwr.batchnorm.parts import Part
from fedbn_flwr.compat.flower import DP_WRAPPERS, calling_object
from fedbn_flwr.errors import ConfigError, NothingTrainedError, ReplyError
from fedbn_flwr.messages.protocol import SYNCHRONISES, refuse_own_keys
from fedbn_flwr.problems import Known, raise_or_warn
from fedbn_flwr.server.methods.shared_bn import SHARED_BN
from fedbn_flwr.server.methods.together import Methods
from fedbn_flwr.server.rounds.dispatch import whole_model
from fedbn_flwr.server.rounds.round import HalfRound, one_round, one_test
from fedbn_flwr.server.rounds.synchronised_training import train_synchronised
from fedbn_flwr.server.runs import failures
from fedbn_flwr.server.runs.nodes import NodeRegistry
from fedbn_flwr.server.runs.protection import Protection, of_wrapper
from fedbn_flwr.server.runs.round_report import average_metrics
from fedbn_flwr.server.runs.run_state import OnReplies, OnRoundEnd, Run, Start
from fedbn_flwr.transport.polling_grid import polling

logger = logging.getLogger("flwr")


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


class FlowerCalls(FlowerFedAvg):
    """The calls of Flower's loop around the rounds of a run.

    A loop of Flower, ``Strategy.start`` and ``to_legacy`` use them.
    """

    methods: Methods
    protection: Protection
    on_round_end: OnRoundEnd | None
    on_replies: OnReplies | None
    completes_tests: bool
    num_partitions: int | None
    site_names: Mapping[str, str]
    _run: Run | None = None
    _open: _Open | None = None
    _in_start = False  # whether ``start`` runs the rounds

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy. An open round belongs to the original."""
        return {**vars(self), "_open": None}

    # --- its run ----------------------------------------------------------------------

    @property
    def run(self) -> Run:
        """The state of the run. It reads Flower's arguments from this strategy."""
        # A copied strategy has a run that refers to the original, so set the reference
        # at each access. It is weak, because a strong reference would keep the models
        # in memory until the next garbage collection.
        run = cast(Run, self._run)
        run.flower_args = proxy(self)
        return run

    def forget_run(self, **changed: Any) -> None:
        """Make a new run. Its start differs from the earlier start in ``changed``."""
        earlier: dict[str, Any] = {}
        if self._run is not None:
            lasting = ("timeout", "num_rounds", "split", "continuity")
            earlier = {name: getattr(self._run.start, name) for name in lasting}
            # Close the earlier run here, because Flower's loops do not, and its address
            # must be free again.
            self._run.close()
        self._open = None
        start = Start(**{**earlier, **changed})
        # A client of a synchronised step reports whether its model can take part.
        synchronises = self.methods.all_phases.exchanges is not None
        nodes = NodeRegistry(
            self.methods.params.seed,
            start.timeout,
            {SYNCHRONISES: True} if synchronises else {},
            self.num_partitions,
            # A name would reveal more of a protected client than its number.
            site_names=self.site_names if self.protection.publishes_metrics else None,
        )
        # The states are there before a run begins, for methods that declare them.
        states = {one.name: one.State() for one in self.methods if one.State}
        self._run = Run(
            self.methods, nodes, self.protection, proxy(self), start, states=states
        )

    def begin(self, own_loop: bool = False, is_new: bool = False) -> None:
        """Check the settings and the model, begin the run, and warn of surprises.

        Args:
            own_loop: whether another loop than ``start`` runs the rounds.
            is_new: whether the initial values are checked. The model of a checkpoint may
                have diverged (on_divergence=continue).

        Raises:
            ConfigError: a setting or the model does not fit, or a value is not finite.
        """
        run, methods = self.run, self.methods
        if is_new:
            # Compare the state with itself, so that only non-finite values can be wrong.
            try:
                check_state(run.round.before, run.round.before, run.parts)
            except ReplyError as error:
                raise ConfigError(
                    f"initial_arrays: {error}. Every reply with such a value would be"
                    " refused. To keep a constant, such as a mask of -inf, out of the"
                    " state dict, use register_buffer(..., persistent=False). If the"
                    " layer finds its values in data, such as the range of a quantizer,"
                    " pass a batch through the model before the start."
                ) from None
        split, untrained = run.start.split, ""
        if split and split.layers and not run.parts.layers:
            by = f"train_only={methods.params.train_only} freezes all of them"
            untrained = f"{split.named_layers()}, and {by}"
        known = Known(
            num_rounds=run.start.num_rounds,
            recorded=not self.completes_tests,
            weighted_by_key=self.weighted_by_key,
            parts=run.parts,
            shapes=run.start.shapes,
            untrained=untrained,
            moved=statistics_moved(run.round.before, run.parts.moments()),
        )
        methods.raise_or_warn(known, ["run", "model"])
        run.start.begun = True
        fixed, counters = run.parts.fixed, run.parts.whole.counters
        if fixed:
            sizes = {name: one.nbytes for name, one in run.round.before.items()}
            others = sizes.keys() - {*fixed, *counters}
            logger.info(
                "train_only: %d entries (%d bytes) do not change and travel once; the"
                " others have %d bytes.",
                len(fixed),
                sum(sizes[name] for name in fixed),
                sum(sizes[name] for name in others),
            )
        facts = run.facts(0)
        run.states = {method.name: method.begin(facts) for method in methods}
        run.protection.begin(methods)
        if self.completes_tests:
            self._warn_of_incomplete_models(own_loop)

    def _warn_of_incomplete_models(self, own_loop: bool) -> None:
        """Warn about models that the user gets without some entries."""
        run, methods = self.run, self.methods
        stay = run.local_entries
        if stay and SHARED_BN not in methods.tests:
            advice = "evaluation on the clients tests each client with its own values."
            # If the clients keep the whole model, an average cannot complete a global
            # model.
            if Part.REST not in methods.local:
                average = "eval_on='averaged-bn' uses the average of the clients' values there;"
                advice = f"{average} {advice}"
            # A protection refuses this average, and does not ask clients for tests.
            if not run.protection.publishes_metrics:
                advice = "Each client can test its own model in its training function."
            logger.warning(
                "strategy %r keeps %d of the model's entries with its clients (%r, ...): in"
                " evaluate_fn, in the final arrays and in what the server saves they have"
                " their initial values."
                " %s",
                methods.name,
                len(stay),
                stay[0],
                advice,
            )

        # The user's own functions save and test a model, unless ``on_round_end`` does.
        if self.on_round_end is not None or not (own_loop or self._own_aggregate):
            return
        if SHARED_BN in methods.tests or methods.reestimates:
            logger.warning(
                "strategy %r re-estimates or averages BN entries for tests, but your own"
                " %s() gets a model without these entries. After configure_evaluate, call"
                " strategy.for_evaluate_fn(server_round, arrays), because it returns the"
                " model with them, or pass on_round_end= to the strategy.",
                methods.name,
                "start" if own_loop else "aggregate_train",
            )
        if methods.all_phases.class_moments and own_loop:
            logger.warning(
                "class_moments=True has no effect, because this run uses your own start()."
                " Use the start() of the strategy."
            )

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
        # A strategy has no sign of Flower's wrapper around it but the call stack.
        wrapper = None if run.reports else calling_object(DP_WRAPPERS)
        if wrapper is not None:
            raise_or_warn(of_wrapper(type(wrapper).__name__, run.methods, run.parts))
        # ``start`` and ``to_legacy`` have begun the run.
        if not run.start.begun:
            self.begin(own_loop=True)
            run.count_start(grid)
        if not self._in_start:
            self._close_left(arrays)
        # A user may override these methods in a class, or assign them to the object, and
        # then read whole replies.
        sends = getattr(self.send_training, "__func__", None)
        only_methods_read = (
            self._in_start
            and self.on_replies is None
            and not self._own_aggregate
            and sends is FlowerCalls.send_training
            and self.train_metrics_aggr_fn is average_metrics
        )
        steps = one_round(
            run, server_round, arrays, config, grid, self.on_replies, only_methods_read
        )
        try:
            messages: Sequence[Message] = next(steps)
        except NothingTrainedError as error:
            raise failures.with_refusals(run, error) from None
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
        has_begun = bool(self.run.reports)
        if has_begun and half and (half.call, half.number) == (call, server_round):
            if half.early_replies:
                replies = [*half.early_replies, *replies]
            return half.steps.send(replies)
        # Nothing to read: a user's class may ask no client in a round.
        if [*replies] or not has_begun:
            raise ConfigError(
                f"{call} of {type(self).__name__} did not call super().{call}(): call"
                " it, and remove the messages that you do not want from its result"
            )
        return nothing

    @property
    def _own_aggregate(self) -> bool:
        """Whether a user has overridden ``aggregate_train``, or assigned it."""
        # A function assigned to the object has no __func__.
        aggregate = getattr(self.aggregate_train, "__func__", None)
        return aggregate is not FlowerCalls.aggregate_train

    def send_training(
        self, messages: Iterable[Message], grid: Grid
    ) -> Sequence[Message]:
        """Send the training messages, and return the replies that come in time.

        In a synchronised round it also answers the exchanges of the step.
        """
        messages = list(messages)
        if messages and self.run.round.phase.exchanges is not None:
            replies: Sequence[Message] = train_synchronised(self.run, messages, grid)
        else:
            timeout = self.run.start.timeout
            replies = polling(grid).receive(messages, timeout=timeout)
        # A user's own ``aggregate_train`` sees whole models.
        if self._own_aggregate and self.run.fixed.names:
            replies = [whole_model(self.run, reply) for reply in replies]
        return replies

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
            model = run.completed(run.arrays)
            self.on_round_end(server_round, model, dict(run.round.metrics))
