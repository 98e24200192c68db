"""The state of a run: its methods and their states, nodes, reports, what clients keep."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp import Grid

from fedbn_flwr.batchnorm.averaging import State, check_state
from fedbn_flwr.batchnorm.parts import (
    LAST_LAYER,
    Parts,
    equal_entries,
    refuse_tied,
    split_state,
)
from fedbn_flwr.errors import ConfigError, ReplyError
from fedbn_flwr.messages.protocol import Continuity, MessageConfig, TrainConfig
from fedbn_flwr.messages.records import views
from fedbn_flwr.server.methods.method import Ask, Facts, Node, Reply
from fedbn_flwr.server.methods.params import RECALIBRATED
from fedbn_flwr.server.methods.together import Methods, States
from fedbn_flwr.server.methods.travels import Travels
from fedbn_flwr.server.runs.kept import Kept
from fedbn_flwr.server.runs.nodes import NodeRegistry
from fedbn_flwr.server.runs.protection import Protection
from fedbn_flwr.server.runs.report import RoundReport
from fedbn_flwr.training.model_state import without_wrappers
from fedbn_flwr.transport.step import Transport

__all__ = ["OnReplies", "OnRoundEnd", "Options", "Run"]

# How often a strategy was started on a grid: the clients' Context.state outlives a
# start, and a later one tells them to forget what was kept in it (start_id).
_STARTS: WeakKeyDictionary[Grid, int] = WeakKeyDictionary()

logger = logging.getLogger("flwr")

# torch's names
_OBSERVED = ("activation_post_process.min_val", "activation_post_process.max_val")

Average = Callable[..., MetricRecord]
OnReplies = Callable[[int, Sequence[Reply], State, State], None]
OnRoundEnd = Callable[[int, ArrayRecord, Mapping[str, MetricRecord]], None]


@dataclass(frozen=True)
class Options:
    """The arguments of Flower's own FedAvg, and what else a strategy lets its users
    set, as they are in a round.
    """

    fraction_train: float
    fraction_evaluate: float
    min_train_nodes: int
    min_evaluate_nodes: int
    min_available_nodes: int
    weighted_by_key: str
    arrays_key: str
    config_key: str
    average_train_metrics: Average
    average_test_metrics: Average
    on_replies: OnReplies | None = None
    on_round_end: OnRoundEnd | None = None


@dataclass
class Run:
    """The server's knowledge of a run.

    Attributes:
        methods: the methods, with their settings.
        nodes: the nodes.
        protection: what happens to the replies before the methods see them.
        options: Flower's arguments, as they are in this round.
        timeout: seconds to wait for replies.
        parts_or_none: the split of the model's state; if the user gives none, None
            before the first arrays.
        continuity: the run as it is sent to clients with a state folder.
        start_id: id of a start after the first in one run of a ServerApp; None if what
            clients have kept counts.
        num_rounds: R; None if Flower's loop does not say.
        after: the last round before this start; 0 if the run is not resumed.
        begun: whether the methods have begun.
        states: the state of each method, after the last round; before a run of those
            that say its class.
        kept: what the clients keep.
        reports: the report of each round.
        reestimated: re-estimated running statistics of the model after this round.
        not_finite_since: the first of the latest rounds of which all replies were not
            finite; 0 = the last is none.
        most_able: the largest ``num_able`` of a round so far, used or not.
        seen: labels of the clients with training data in any round so far, used or not;
            of those that have said their partition.
        measured: labels of the clients with whose data statistics were re-estimated
            last.
        shapes: the shapes of the model's entries.
        trained: labels of the clients whose training was used since the start or the
            resumption.
        tested: whether a client was tested since then.
        other_counts: ids of the nodes whose reply had another count of examples than
            their answer to the query.
        transport: the way of synchronised steps; made in the first round that has one.
        arrays: the global model that training continues with; tests may complete it.
        before: the global state that was sent in this round.
        travels: the phase of this round: what travels in it.
        metrics: the metrics of this round so far, under the names of Flower's
            ``Result``.
        num_able: number of nodes with training data, N of the papers.
        statistics_at_start: re-estimated statistics at the start of this round.
        delivery: the nodes that messages of this half of the round went to, and the
            replies that came; None where another loop than our ``start`` sends them.
    """

    # Given to the start.
    methods: Methods
    nodes: NodeRegistry
    protection: Protection
    options: Options
    timeout: float = 3600.0
    parts_or_none: Parts | None = None
    continuity: Continuity | None = None
    start_id: str | None = None
    num_rounds: int | None = None
    after: int = 0

    # What the rounds so far have left; ``saved`` writes what a resumed run must know.
    begun: bool = False
    states: States = field(default_factory=dict)
    kept: Kept = field(default_factory=Kept)
    reports: list[RoundReport] = field(default_factory=list)
    reestimated: dict[str, Any] = field(default_factory=dict)
    not_finite_since: int = 0
    most_able: int = 0
    seen: set[str] = field(default_factory=set)
    measured: list[str] = field(default_factory=list)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    trained: set[str] = field(default_factory=set)
    tested: bool = False
    other_counts: set[int] = field(default_factory=set)
    transport: Transport | None = None

    # Of this round.
    arrays: ArrayRecord = field(default_factory=ArrayRecord)
    before: State = field(default_factory=dict)
    travels: Travels = field(default_factory=Travels)
    metrics: dict[str, MetricRecord] = field(default_factory=dict)
    num_able: int = 0
    statistics_at_start: dict[str, Any] = field(default_factory=dict)
    delivery: tuple[frozenset[int], Sequence[Message]] | None = None

    @property
    def report(self) -> RoundReport:
        """The report of this round."""
        return self.reports[-1]

    @property
    def local_hashes(self) -> Mapping[str, str]:
        """The SHA-256 of what each client keeps, by label."""
        return self.kept.hashes

    @property
    def parts(self) -> Parts:
        """The split of the model's state; ConfigError if it is not known yet."""
        if self.parts_or_none is None:
            raise ConfigError(
                "the split of the state is not known before the first arrays; pass"
                " parts=split_state(model)"
            )
        return self.parts_or_none

    @property
    def local_entries(self) -> tuple[str, ...]:
        """The entries that stay with the clients."""
        return self.parts.select(self.methods.local)

    @property
    def _head(self) -> tuple[str, ...]:
        """The entries of the head, if only names and shapes have shown it."""
        parts = self.parts
        if not parts.by_names or LAST_LAYER not in self.methods.params.personal:
            return ()
        return tuple(map(without_wrappers, parts.with_personal(LAST_LAYER).personal))

    @property
    def layers(self) -> tuple[str, ...]:
        """The paths of the BatchNorm layers on which the methods act; () = all."""
        if not self.parts.averaged:
            return ()
        return tuple(layer.path for layer in self.parts.layers)

    @property
    def known_statistics(self) -> dict[str, Any]:
        """Statistics that were re-estimated before this round, of the model as it is
        now; empty if it has changed.
        """
        changed = bool(self.reports) and not self.report.kept_previous
        return {} if changed else self.statistics_at_start

    @property
    def tests_need_statistics(self) -> bool:
        """Whether a test, or the result, uses re-estimated statistics."""
        return self.methods.reestimates or RECALIBRATED in self.methods.tests

    @property
    def synchronises(self) -> bool:
        """Whether the first local step of this round is synchronised."""
        return self.travels.exchanges is not None

    @property
    def ends_diverged(self) -> bool:
        """Whether the run ends after this round because it diverged."""
        stops = self.methods.params.on_divergence == "stop"
        return stops and bool(self.reports) and bool(self.report.diverged)

    def facts(self, number: int, travels: Travels | None = None) -> Facts:
        """Return what the methods know of a round; 0 = before the first."""
        return Facts(
            number,
            self.num_rounds,
            self.parts,
            self.before,
            travels=travels or self.methods.whole,
            num_able=self.num_able,
            most_able=self.most_able,
            known=frozenset(self.seen.union(self.kept.hashes)),
        )

    def begin(self) -> None:
        """Let methods and protection begin, once in a run.

        Raises:
            ConfigError: a setting or the model does not fit.
        """
        self.begun = True
        self.states = self.methods.begin(self.facts(0))
        self.protection.begin(self.methods, self.options.weighted_by_key)

    def close(self) -> None:
        """Close what is open between rounds."""
        if self.transport is not None:
            self.transport.close()
            self.transport = None

    def open_round(self, number: int) -> None:
        """Begin a round with the model of ``set_model``."""
        self.travels = self.methods.phase(self.states, number)
        if self.reports and self.travels.phase != self.report.phase:
            logger.info("Round %d begins the phase %r.", number, self.travels.phase)
        self.metrics = {}
        # The model of the last round's end is that of this one's start. Before the new
        # report: ``known_statistics`` looks at the last one.
        self.statistics_at_start = self.reestimated or self.known_statistics
        self.reestimated = {}
        self.reports.append(RoundReport(number, self.travels.phase))

    def present(self, grid: Grid, at_least: int) -> list[Node]:
        """Return the nodes that are there in this round, at least so many."""
        number, key = self.report.server_round, self.options.config_key
        return self.nodes.present(grid, at_least, number, key)

    def message_config(self, number: int) -> MessageConfig:
        """Return the config entries of every message with the model."""
        return MessageConfig(
            server_round=number,
            local_entries=self.local_entries,
            layers=self.layers,
            personal=self.parts.personal,
            head=self._head,
            fine_tune=self.methods.params.fine_tune,
            continuity=self.continuity,
            start_id=self.start_id,
            seed=self.methods.params.seed,
        )

    def train_config(
        self, facts: Facts, asks: Sequence[Ask], extras: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """Return the config entries of a message by which clients train, with those of
        the hooks.
        """
        config = TrainConfig(
            **vars(self.message_config(facts.number)),
            hooks=tuple(ask.hook for ask in asks),
            extras=extras,
            # Of statistics that are frozen in every round there is no freeze to wait for.
            frozen=self.methods.freezes_bn and bool(facts.travels.frozen),
        )
        entries = config.write()
        for ask in asks:
            entries |= ask.config
        return entries

    def test_config(self, number: int) -> dict[str, Any]:
        """Return the config entries of a message that asks clients to test after a
        round, and to train before as they did in it.
        """
        if not self.methods.params.fine_tune:
            return self.message_config(number).write()
        facts = self.facts(number, self.methods.phase(self.states, number))
        return self.train_config(facts, self.methods.tuning(self.states, facts))

    def tests_after(self, number: int) -> bool:
        """Return whether clients test, and statistics are re-estimated, after this
        round.
        """
        return number % self.methods.params.eval_every == 0 or number == self.num_rounds

    def count_start(self, grid: Grid) -> None:
        """Count the start on this grid; a later one has an id, so that its clients
        forget what they have kept.
        """
        # A resumed run goes on from what they have kept, and a continuity names the run.
        earlier = _STARTS.get(grid, 0)
        _STARTS[grid] = earlier + 1
        if earlier and not self.after and self.continuity is None:
            self.start_id = str(earlier)

    def set_model(self, arrays: ArrayRecord) -> None:
        """Note the global state; split it by the names of the arrays, or check that the
        given split fits them.

        Raises:
            ConfigError: this is no ArrayRecord, the given split does not fit, or
                entries of the first model are missing.
        """
        if not isinstance(arrays, ArrayRecord):
            raise ConfigError(
                f"the arrays are a {type(arrays).__name__}: pass"
                " ArrayRecord(model.state_dict())"
            )
        # A user's aggregate_train may return less than the model. With other names it
        # is another model, of another run.
        lost = [name for name in self.shapes if name not in arrays]
        if lost and self.shapes.keys() > {*arrays}:
            raise ConfigError(
                f"the model of round {self.after + len(self.reports) + 1} lacks"
                f" {len(lost)} entries that it had at the start ('{lost[0]}', ...): an"
                " aggregate_train of your own must return the whole model; give the"
                " strategy a method with an `aggregate`, or call super()"
            )
        self.shapes = {name: tuple(array.shape) for name, array in arrays.items()}
        self.before = views(arrays)
        # A split by names is made anew: an earlier run may have had another model.
        if self.parts_or_none is None or self.parts_or_none.by_names:
            self.parts_or_none = split_state(arrays)
        params = self.methods.params
        parts = self.parts_or_none.only(params.layers)
        self.parts_or_none = parts.with_personal(params.personal)
        unknown = [name for name in arrays if name not in self.parts_or_none.part_of]
        if unknown:
            raise ConfigError(
                f"parts= does not know {len(unknown)} of the arrays ({unknown[0]},"
                " ...): it was made from another model"
            )
        absent = [name for name in self.parts_or_none.names if name not in arrays]
        if absent:
            raise ConfigError(
                f"the arrays lack {len(absent)} entries that parts= has ({absent[0]},"
                " ...): pass ArrayRecord(model.state_dict()); parameters() has no"
                " buffers, such as running statistics"
            )

    def refuse_tied(self) -> None:
        """Raise ConfigError if one of two names of a tensor stays with the clients."""
        local = set(self.local_entries)
        if not local or local.issuperset(self.before):
            return
        tied, unless = self.parts.tied, ""
        if self.parts.by_names:
            tied = equal_entries(self.before)
            unless = (
                " If they are two tensors that begin with the same numbers, pass"
                " parts=split_state(model)."
            )
        refuse_tied(tied, local, unless)

    def check_initial(self) -> None:
        """Raise ConfigError if the initial state is not finite."""
        # Against itself: only what is not finite can be wrong.
        try:
            check_state(self.before, self.before, self.parts)
        except ReplyError as error:
            remedy = (
                "A constant, such as a mask of -inf, stays out of the state dict with"
                " register_buffer(..., persistent=False)"
            )
            if any(name.endswith(_OBSERVED) for name in self.before):
                remedy = (
                    "The observers of quantisation-aware training begin so: pass a"
                    " batch through the model where it is built, on the server and on"
                    " the clients, or quantise the trained model"
                )
            raise ConfigError(
                f"initial_arrays: {error}. Every reply with it would be refused."
                f" {remedy}"
            ) from None

    def saved(self) -> dict[str, Any]:
        """Return the strategy state to checkpoint, without the model: JSON values and
        arrays by name.
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
        """Go on after a round, with what ``saved`` returned then; the run has begun.

        Raises:
            ConfigError: the state belongs to another strategy, or to another version.
        """
        needed = self.saved().keys()
        if saved.keys() != needed:
            raise ConfigError(
                f"this state does not fit strategy {self.methods.name!r}. Needed:"
                f" {', '.join(sorted(needed))}. Found: {', '.join(sorted(saved))}."
            )
        # What the clients hold is not known: each is told the hash to restore.
        self.after = after
        # Another method is named before what it keeps.
        self.states = self.methods.restored(self.states, saved["methods"])
        stay = [*self.local_entries]
        stayed = saved["kept"].get("entries", stay)
        if stayed != stay:
            other = sorted({*stayed} ^ {*stay})
            raise ConfigError(
                f"this state is of a run in which each client keeps {len(stayed)}"
                f" entries; with this strategy it keeps {len(stay)}. {other[0]!r} is"
                " kept in only one of the two. Give the strategy the method, layers and"
                " personal of that run."
            )
        self.kept = Kept.resumed(saved["kept"])
        self.reestimated = dict(saved["reestimated"])
        self.statistics_at_start = dict(saved["known_statistics"])
        self.measured, self.most_able = saved["measured"], saved["most_able"]
        self.seen = set(saved["seen"])
        self.not_finite_since = saved["not_finite_since"]
        self.nodes.expect_initialised(saved["initialised"])
        self.protection.load_state_dict(saved.get("protection", {}))
