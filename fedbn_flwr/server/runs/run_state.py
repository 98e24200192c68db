"""The state of a run, with methods, nodes, reports and local states."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from flwr.app import ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from fedbn_flwr.batchnorm.array_types import State
from fedbn_flwr.batchnorm.class_moments import ClassMoments
from fedbn_flwr.batchnorm.parts import Parts, paths_in, split_state
from fedbn_flwr.batchnorm.train_only import fixed_by
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.messages.protocol import Continuity, TrainConfig
from fedbn_flwr.messages.records import to_record, views
from fedbn_flwr.server.methods.method import Ask, Facts, Node, Reply
from fedbn_flwr.server.methods.params import RECALIBRATED
from fedbn_flwr.server.methods.phases import Phase, acts_on_batchnorm
from fedbn_flwr.server.methods.shared_bn import SHARED_BN
from fedbn_flwr.server.methods.together import Methods, States
from fedbn_flwr.server.runs.kept import Fixed, Kept
from fedbn_flwr.server.runs.nodes import NodeRegistry
from fedbn_flwr.server.runs.protection import Protection
from fedbn_flwr.server.runs.round_report import RoundReport
from fedbn_flwr.transport.step_transport import Transport

__all__ = [
    "AggregateMetrics",
    "OnReplies",
    "OnRoundEnd",
    "Round",
    "Run",
    "Start",
]

# This registry has the number of starts of a strategy on each grid. The clients'
# Context.state outlasts a start, so a later start tells the clients to discard its
# content (start_id). The number is not stored in the grid, because the grid may be an
# object of Flower.
_STARTS: WeakKeyDictionary[Grid, tuple[int, Run]] = WeakKeyDictionary()

logger = logging.getLogger("flwr")

AggregateMetrics = Callable[[list[RecordDict], str], MetricRecord]
"""Merges the replies' metric records into one, as in Flower; the second argument is the
key of the weights.
"""
OnReplies = Callable[[int, Sequence[Reply], State, State], None]
OnRoundEnd = Callable[[int, ArrayRecord, Mapping[str, MetricRecord]], None]


@dataclass
class Start:
    """The facts of one start of a run. A checkpoint contains none of them.

    Attributes:
        timeout: seconds to wait for replies.
        num_rounds: R; None if Flower's loop does not report it.
        split: the split of the model's state. If the user gives none, it is
            None before the first arrays.
        continuity: the form of the run for clients with a state folder.
        after: the last round before this start; 0 if the run is not resumed.
        start_id: id of a later start in one run of a ServerApp; None if the clients'
            local state remains valid.
        begun: whether the methods have begun.
        shapes: the shapes of the model's entries.
        trained: labels of the clients with a usable reply.
        untrained: labels of the clients that were tested with untrained local state.
        tested: whether a client was tested.
        reasons: the reasons of the refused replies, by node, while no client works.
        warned: ids of the nodes with a warning about a value, each with its name; 0
            for all nodes.
        far_model: a text about the last node whose model was far from the others'.
        transport: the transport of synchronised steps; created in the first such round.
        training_parts: the split with the entries that ``train_only`` leaves fixed.
    """

    timeout: float = 3600.0
    num_rounds: int | None = None
    split: Parts | None = None
    continuity: Continuity | None = None
    after: int = 0
    start_id: str | None = None
    begun: bool = False
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    trained: set[str] = field(default_factory=set)
    untrained: set[str] = field(default_factory=set)
    tested: bool = False
    reasons: dict[int, str] = field(default_factory=dict)
    warned: set[tuple[int, str]] = field(default_factory=set)
    far_model: str = ""
    transport: Transport | None = None
    training_parts: Parts | None = None


@dataclass
class Round:
    """The server's knowledge of one round. The next round begins with a new value.

    Attributes:
        phase: the declaration of this round's phase.
        before: the global state that was sent in this round.
        num_able: number of nodes with training data; N in the papers.
        statistics_at_start: re-estimated statistics at the start of this round.
        metrics: the metrics of this round so far, under the names of Flower's
            ``Result``.
    """

    phase: Phase = field(default_factory=Phase)
    before: State = field(default_factory=dict)
    num_able: int = 0
    statistics_at_start: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, MetricRecord] = field(default_factory=dict)


@dataclass
class Run:
    """The server's knowledge of a run, with everything that a checkpoint saves.

    Attributes:
        methods: the methods, with their settings.
        nodes: the nodes.
        protection: the protection of the replies before the methods see them.
        flower_args: the strategy, for Flower's arguments, which may change between rounds.
        start: the facts of this start.
        round: the facts of this round.
        arrays: the global model that training continues with; tests may complete it.
        states: the state of each method after the last round. Before a run, only the
            states of methods that declare their class.
        kept: the clients' local states.
        reports: the report of each round.
        reestimated: re-estimated running statistics of the model after this round.
        measured: labels of the clients whose data gave the last re-estimated
            statistics.
        class_moments: the class moments of all sites, after the last round.
        most_able: the largest ``num_able`` so far, including unused rounds.
        seen: labels of the clients that had training data in some round, used or not,
            and have reported their partition.
        not_finite_since: the first round of the latest series of rounds without a
            finite reply; 0 if the last round is not such a round.
        fixed: the entries that do not change, and are sent once.
    """

    methods: Methods
    nodes: NodeRegistry
    protection: Protection
    flower_args: FlowerFedAvg
    start: Start
    round: Round = field(default_factory=Round)

    # ``saved`` writes these, except the model, the reports and the class moments.
    arrays: ArrayRecord = field(default_factory=ArrayRecord)
    states: States = field(default_factory=dict)
    kept: Kept = field(default_factory=Kept)
    reports: list[RoundReport] = field(default_factory=list)
    reestimated: dict[str, Any] = field(default_factory=dict)
    measured: list[str] = field(default_factory=list)
    class_moments: ClassMoments | None = None
    most_able: int = 0
    seen: set[str] = field(default_factory=set)
    not_finite_since: int = 0
    fixed: Fixed = field(default_factory=Fixed)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the strategy. A copied strategy sets itself."""
        return {**vars(self), "flower_args": None}

    @property
    def report(self) -> RoundReport:
        """The report of this round."""
        return self.reports[-1]

    @property
    def parts(self) -> Parts:
        """The split of the model's state.

        Raises:
            ConfigError: the split is still unknown.
        """
        if self.start.split is None:
            raise ConfigError(
                "the split of the state is unknown before the first arrays: pass"
                " parts=split_state(model)"
            )
        return self.start.training_parts or self.start.split

    @property
    def local_entries(self) -> tuple[str, ...]:
        """The entries that stay with the clients."""
        return self.parts.select(self.methods.local)

    @property
    def known_statistics(self) -> dict[str, Any]:
        """Re-estimated statistics from before this round that are still valid.

        They are empty if the model has changed.
        """
        changed = bool(self.reports) and not self.report.kept_previous
        return {} if changed else self.round.statistics_at_start

    @property
    def ends_diverged(self) -> bool:
        """Whether the run ends after this round because it diverged."""
        stops = self.methods.params.on_divergence == "stop"
        return stops and bool(self.reports) and bool(self.report.diverged)

    def may_end_by(self, num_nodes: int) -> bool:
        """Return whether so many nodes may end the run: several, or its only node."""
        return num_nodes > 1 or self.most_able < 2

    def facts(self, number: int, phase: Phase | None = None) -> Facts:
        """Return a round's facts for the methods. Round 0 is before the first round."""
        return Facts(
            number,
            self.start.num_rounds,
            self.parts,
            self.round.before,
            phase=phase or self.methods.all_phases,
            num_able=self.round.num_able,
            most_able=self.most_able,
            known=frozenset(self.seen.union(self.kept.hashes)),
        )

    def close(self) -> None:
        """Close the transport that stays open between rounds."""
        if self.start.transport is not None:
            self.start.transport.close()
            self.start.transport = None

    def open_round(self, number: int) -> None:
        """Begin a round with the model of ``set_model``."""
        phase = self.methods.phase(self.states, number)
        if self.reports and phase.name != self.report.phase:
            logger.info("Round %d begins the phase %r.", number, phase.name)
        # The model at the end of the last round is the model at the start of this
        # round. Read its statistics before the new report is added, because
        # ``known_statistics`` reads the last report.
        at_start = self.reestimated or self.known_statistics
        self.round = Round(phase, self.round.before, statistics_at_start=at_start)
        self.reestimated = {}
        self.reports.append(RoundReport(number, phase.name))

    def present(self, grid: Grid, at_least: int) -> list[Node]:
        """Return the connected nodes of this round, at least ``at_least`` of them."""
        number, key = self.report.server_round, self.flower_args.configrecord_key
        return self.nodes.present(grid, at_least, number, key)

    def config(
        self,
        number: int,
        facts: Facts | None = None,
        asks: Sequence[Ask] = (),
        extras: tuple[str, ...] = (),
    ) -> dict[str, Any]:
        """Return the config entries of a message with the model.

        Args:
            number: the round.
            facts: the facts of the round, if the client trains.
            asks: the hooks of the training.
            extras: the names of further records.
        """
        params = self.methods.params
        # Name the BatchNorm layers only if the method does not treat all. Clients
        # freeze the fixed layers themselves.
        parts = self.start.split or self.parts
        layers = tuple(layer.path for layer in parts.layers) if parts.averaged else ()
        # Until a client has trained, let the clients compare the names with the types.
        named: tuple[str, ...] = ()
        if parts.by_names and not self.start.trained:
            named = tuple(layer.path for layer in parts.whole.layers)
        # Tell the clients that statistics are frozen only if another phase trains them.
        frozen = facts is not None and self.methods.freezes_bn and facts.phase.frozen
        entries = TrainConfig(
            server_round=number,
            local_entries=self.local_entries,
            layers=layers,
            personal=parts.personal,
            fine_tune=params.fine_tune,
            recalibrate=self.methods.own_statistics,
            continuity=self.start.continuity,
            start_id=self.start.start_id,
            seed=params.seed,
            fixed_sha256=self.fixed.sha256 or None,
            hooks=tuple(ask.hook for ask in asks),
            extras=extras,
            frozen=bool(frozen),
            batchnorm=named if acts_on_batchnorm(self.methods.all_phases) else (),
        ).write()
        for ask in asks:
            entries |= ask.config
        return entries

    def test_config(self, number: int) -> dict[str, Any]:
        """Return the config entries of a message for tests after a round.

        With ``fine_tune``, the clients train before the test in the same way as in the
        round.
        """
        if not self.methods.params.fine_tune:
            return self.config(number)
        facts = self.facts(number, self.methods.phase(self.states, number))
        return self.config(number, facts, self.methods.tuning(self.states, facts))

    def tests_after(self, number: int) -> bool:
        """Return whether clients test after this round.

        If they do, statistics are re-estimated as well.
        """
        return (
            number % self.methods.params.eval_every == 0
            or number == self.start.num_rounds
        )

    def completing_entries(self, test: str) -> State:
        """Return the entries that replace the global entries in a test.

        Only the tests "recalibrated" and "averaged-bn" have such entries. For
        "recalibrated" they exist after ``configure_evaluate`` of a round with a test.
        """
        if test == SHARED_BN and SHARED_BN in self.methods.tests:
            return self.kept.shared.average(self.parts, self.methods.params.variance)
        return self.reestimated if test == RECALIBRATED else {}

    def completed(self, arrays: ArrayRecord, averaged: bool = True) -> ArrayRecord:
        """Return the model that is tested after a round, and that the run returns.

        It has averages of the BN parts that stay with the clients, if ``averaged`` and
        a test asks for them, and re-estimated statistics, if every test uses them.
        Training uses neither.
        """
        entries = dict(self.completing_entries(SHARED_BN)) if averaged else {}
        if self.methods.reestimates:
            entries |= self.reestimated
        return ArrayRecord({**arrays, **to_record(entries)}) if entries else arrays

    def warn_of_nothing_shared(self) -> None:
        """Warn, after a round, if a test needs averages and there are none."""
        if SHARED_BN in self.methods.tests and not self.kept.shared.tree:
            logger.warning(
                "no client has shared its BN parts, but eval_on='averaged-bn' needs them:"
                " in tests and in the result they have their initial values. A client"
                " with its own training loop shares them if it trains inside `with"
                " bn_rules(...)`."
            )

    def count_start(self, grid: Grid) -> None:
        """Count the start on this grid.

        A later start has an id, so that its clients discard their local state.
        """
        # A resumed run gets no id, because its clients must keep their local states. A
        # run with a continuity already has a name.
        earlier, last = _STARTS.get(grid, (0, self))
        _STARTS[grid] = earlier + 1, self
        if earlier and not self.start.after and self.start.continuity is None:
            self.start.start_id = str(earlier)
            local = [*self.local_entries]
            shared = self.arrays.keys() - {*local}
            if local and all(last.arrays.get(n) == self.arrays[n] for n in shared):
                logger.warning(
                    "this start continues with the model of the start before, but it is"
                    " another run: the %d entries that stay with the clients ('%s', ...)"
                    " begin again with the given arrays. To change what trains, use one"
                    " start, and freeze in the training function by the round.",
                    len(local),
                    local[0],
                )

    def set_model(self, arrays: ArrayRecord) -> None:
        """Store the global state, and split it or check the given split.

        If no split is given, it follows from the names of the arrays.

        Raises:
            ConfigError: the value is not an ArrayRecord, the given split does not fit,
                or entries of the first model are missing.
        """
        if not isinstance(arrays, ArrayRecord):
            raise ConfigError(
                f"the arrays are a {type(arrays).__name__}: pass"
                " ArrayRecord(model.state_dict())"
            )
        # A user's aggregate_train may return only a part of the model. A model with
        # other names belongs to another run.
        lost = [name for name in self.start.shapes if name not in arrays]
        if lost and self.start.shapes.keys() > {*arrays}:
            raise ConfigError(
                f"the model of round {self.start.after + len(self.reports) + 1} lacks"
                f" {len(lost)} of the entries that it had at the start ('{lost[0]}',"
                " ...): your own aggregate_train must return the whole model. Give the"
                " strategy a method with an `aggregate`, or call super()"
            )
        self.round.before = views(arrays)
        # The entries of a run keep their names, so split them once in a start.
        if [*self.start.shapes] != [*arrays]:
            self._split(arrays)
        self.fixed = self.fixed.of(arrays, self.parts.fixed)

    def _split(self, arrays: ArrayRecord) -> None:
        """Split a new model. Raises ConfigError as ``set_model``."""
        # Make a split by names again, because an earlier run may have had another
        # model.
        if self.start.split is None or self.start.split.by_names:
            self.start.split = split_state(arrays)
        parts, params = self.start.split, self.methods.params
        parts = parts.only(params.layers)
        if params.personal or parts.personal:
            parts = parts.with_personal(params.personal)
        self.start.split = parts
        unknown = [name for name in arrays if name not in parts.part_of]
        if unknown:
            raise ConfigError(
                f"parts= lacks {len(unknown)} of the arrays ({unknown[0]},"
                " ...): it was made from another model"
            )
        absent = [name for name in parts.names if name not in arrays]
        if absent:
            raise ConfigError(
                f"the arrays lack {len(absent)} of the entries of parts= ({absent[0]},"
                " ...): pass ArrayRecord(model.state_dict()); parameters() has no"
                " buffers, such as running statistics"
            )
        shapes = {name: tuple(array.shape) for name, array in arrays.items()}
        if paths_in(params.train_only):
            fixed = fixed_by(parts, params.train_only, arrays)
            self.start.training_parts = parts.with_fixed(fixed)
        self.start.shapes = shapes

    def saved(self) -> dict[str, Any]:
        """Return the strategy's state for a checkpoint, without the model.

        It consists of JSON values, and of arrays by name.
        """
        saved = {
            "kept": {**self.kept.saved(), "entries": [*self.local_entries]},
            "initialised": self.nodes.initialised_labels,
            "reestimated": self.reestimated,
            "known_statistics": self.known_statistics,
            "measured": self.measured,
            "most_able": self.most_able,
            "seen": sorted(self.seen),
            "not_finite_since": self.not_finite_since,
            "methods": self.methods.saved(self.states),
        }
        protection = self.protection.state_dict()
        if protection:
            saved["protection"] = protection
        return saved

    def resume(self, after: int, saved: Mapping[str, Any]) -> None:
        """Continue after a round with the result of ``saved``, in a run that has begun.

        Raises:
            ConfigError: the state belongs to another strategy or protection, or to
                another version.
        """
        needed = self.saved().keys()
        if saved.keys() != needed:
            raise ConfigError(
                "this state was saved by another version of the package, or with"
                " another protection (dp). Resume with the version and"
                " the protection of that run. Expected entries:"
                f" {', '.join(sorted(needed))}. Saved entries:"
                f" {', '.join(sorted(saved))}."
            )
        # The clients' present local states are unknown. Send each client the hash of
        # the local state that it must restore.
        self.start.after = after
        # Restore the methods first, because the error about another method must precede
        # the error about its entries.
        self.states = self.methods.restored(self.states, saved["methods"])
        stay = [*self.local_entries]
        stayed = saved["kept"].get("entries", stay)
        if stayed != stay:
            other = sorted({*stayed} ^ {*stay})
            raise ConfigError(
                f"in the run of this state, each client keeps {len(stayed)}"
                f" entries, but with this strategy it keeps {len(stay)}. {other[0]!r}"
                " is kept in only one of the two. Give the strategy the method, layers"
                " and personal of that run."
            )
        self.kept = Kept.resumed(saved["kept"])
        self.reestimated = dict(saved["reestimated"])
        self.round.statistics_at_start = dict(saved["known_statistics"])
        self.measured, self.most_able = saved["measured"], saved["most_able"]
        self.seen = set(saved["seen"])
        self.not_finite_since = saved["not_finite_since"]
        self.nodes.expect_initialised(saved["initialised"])
        self.protection.load_state_dict(saved.get("protection", {}))
