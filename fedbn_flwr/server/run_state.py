"""The server's state of a run: model, rounds and clients, and the part of it that a checkpoint holds."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp import Grid

from fedbn_flwr.batchnorm.averaging import State, check_state
from fedbn_flwr.batchnorm.parts import Parts, split_state
from fedbn_flwr.errors import ConfigError, ReplyError
from fedbn_flwr.messages.protocol import Continuity, ReplyInfo
from fedbn_flwr.server.nodes import Node
from fedbn_flwr.server.report import RoundReport
from fedbn_flwr.server.shared_bn import LatestBN

__all__ = ["RunState"]

# How often a strategy was started on a grid: the clients' Context.state outlives a start, and a later one tells them to
# forget what was kept in it (start_id).
_STARTS: WeakKeyDictionary[Grid, int] = WeakKeyDictionary()

logger = logging.getLogger("flwr")


@dataclass
class RunState:
    """The server's state of a run.

    Attributes:
        strategy: the name of the strategy, for errors.
        parts_or_none: the split of the model's state; if the user gives none, None before the first arrays.
        continuity: the run as it is sent to clients with a state folder.
        start_id: id of a start after the first in one run of a ServerApp; None if what clients have kept counts.
        num_rounds: R; None if Flower's loop does not say.
        by_run_rounds: whether the loop over the rounds is ``server.rounds``, and not one of Flower's.
        after: the last round before this start; 0 if the run is not resumed.
        begun: whether the method's ``begin`` was called for this run.
        reports: the report of each round.
        arrays: the global model that training continues with; tests may complete it.
        metrics: the metrics of this round so far, under the names of Flower's ``Result``.
        before: the global state that was sent in this round.
        configured: the strategy's configure method that was called last, and its round.
        hooks_sent: the client hooks that this round's messages name.
        extras_sent: the method's records beside the model, in this round's messages and in their replies.
        num_able: number of nodes with training data, N of the papers.
        smallest: training examples of the node among them that has fewest; 0 if none says how many it has.
        reestimated: re-estimated running statistics of the model after this round.
        statistics_at_start: those of the model at the start of this round.
        latest_bn: the BN parts that clients shared for tests.
        local_hashes: the SHA-256 of each client's kept state, by label; after its last used reply, where a round whose
            reply is not used is undone.
        volatile: labels of clients whose kept state is in memory only.
        shapes: the shapes of the model's entries.
        trained: labels of the clients whose training was used since the start or the resumption.
        tested: whether a client was tested since then.
        other_counts: ids of the nodes whose reply had another count of examples than their answer to the query.
    """

    strategy: str
    parts_or_none: Parts | None = None
    continuity: Continuity | None = None
    num_rounds: int | None = None
    start_id: str | None = None
    by_run_rounds: bool = False
    after: int = 0
    begun: bool = False
    reports: list[RoundReport] = field(default_factory=list)
    arrays: ArrayRecord = field(default_factory=ArrayRecord)
    metrics: dict[str, MetricRecord] = field(default_factory=dict)
    before: State = field(default_factory=dict)
    configured: tuple[str, int] = ("", 0)
    hooks_sent: frozenset[str] = frozenset()
    extras_sent: frozenset[str] = frozenset()
    num_able: int = 0
    smallest: int = 0
    reestimated: dict[str, Any] = field(default_factory=dict)
    statistics_at_start: dict[str, Any] = field(default_factory=dict)
    latest_bn: LatestBN = field(default_factory=LatestBN)
    local_hashes: dict[str, str] = field(default_factory=dict)
    volatile: set[str] = field(default_factory=set)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    trained: set[str] = field(default_factory=set)
    tested: bool = False
    other_counts: set[int] = field(default_factory=set)

    @property
    def report(self) -> RoundReport:
        """The report of this round."""
        return self.reports[-1]

    @property
    def parts(self) -> Parts:
        """The split of the model's state; ConfigError if it is not known yet."""
        if self.parts_or_none is None:
            raise ConfigError(
                "the split of the state is not known before the first arrays; pass parts=split_state(model)"
            )
        return self.parts_or_none

    @property
    def total_rounds(self) -> int:
        """The number of rounds of the run; ConfigError if Flower's loop does not say."""
        if self.num_rounds is None:
            raise ConfigError(
                f"strategy {self.strategy!r} needs the number of rounds, which only its own start() knows: set rounds "
                "(int), not fractions; in Flower's legacy loop pass num_rounds= to to_legacy."
            )
        return self.num_rounds

    @property
    def rounds_left(self) -> int:
        """The number of rounds from this one to the last; ConfigError if Flower's loop does not say."""
        return self.total_rounds - self.after - len(self.reports) + 1

    def count_start(self, grid: Grid) -> None:
        """Count the start on this grid; a later one has an id, so that its clients forget what they have kept."""
        earlier = _STARTS.get(grid, 0)
        _STARTS[grid] = earlier + 1
        if earlier and not self.after and self.continuity is None:
            self.start_id = str(earlier)

    def begin_round_statistics(self) -> None:
        """Begin a round: what was re-estimated after the last one is of the model that this one begins with."""
        kept = self.statistics_at_start if self.reports and self.reports[-1].kept_previous else {}
        self.statistics_at_start, self.reestimated = self.reestimated or kept, {}

    def set_model(self, arrays: ArrayRecord) -> None:
        """Note the shapes; split the state by the names of the arrays, or check that the given split fits them.

        Raises:
            ConfigError: this is no ArrayRecord, the given split does not fit, or entries of the first model are
                missing.
        """
        if not isinstance(arrays, ArrayRecord):
            raise ConfigError(f"the arrays are a {type(arrays).__name__}: pass ArrayRecord(model.state_dict())")
        lost = [name for name in self.shapes if name not in arrays]
        if lost and self.shapes.keys() > {*arrays}:  # with other names it is another model, of another run
            raise ConfigError(
                f"the model of round {self.after + len(self.reports) + 1} lacks {len(lost)} entries that it had at the "
                f"start ('{lost[0]}', ...): an aggregate_train of your own must return the whole model; override "
                "`combine`, or call super()"
            )
        self.shapes = {name: tuple(array.shape) for name, array in arrays.items()}
        if self.parts_or_none is None or self.parts_or_none.by_names:  # an earlier run may have had another model
            self.parts_or_none = split_state(arrays)
        if unknown := [name for name in arrays if name not in self.parts_or_none.part_of]:
            raise ConfigError(
                f"parts= does not know {len(unknown)} of the arrays ({unknown[0]}, ...): it was made from another model"
            )

    def check_initial(self, state: State) -> None:
        """Raise ConfigError if the initial state is not finite."""
        try:
            check_state(state, state, self.parts)
        except ReplyError as error:
            raise ConfigError(
                f"initial_arrays: {error}. Every reply with it would be refused. A constant, such as a mask of -inf, "
                "stays out of the state dict with register_buffer(..., persistent=False)"
            ) from None

    def note_kept(self, node: Node, message: Message) -> None:
        """Note the hash of the client's kept state, and whether it is durable."""
        info = ReplyInfo.read(message)
        if not info.local_sha256:
            return
        if info.began and node.label in self.local_hashes:
            logger.warning(
                "%s had lost what it kept between rounds, and started again. If its process had ended, give it a state "
                "folder (state-dir).",
                node,
            )
        self.local_hashes[node.label] = info.local_sha256
        if info.durable:
            self.volatile.discard(node.label)
        else:
            self.volatile.add(node.label)

    def checkpoint(self, initialised: Sequence[str]) -> dict[str, Any]:
        """Return the run's entries of a checkpoint, given the labels of the initialised nodes."""
        return {
            "local_hashes": self.local_hashes,
            "volatile": sorted(self.volatile),
            "started": list(initialised),  # two names of older versions, so that their checkpoints can be read
            "gathered": self.reestimated,
            "shared_bn": self.latest_bn.tree,
        }

    def restore(self, saved: dict[str, Any]) -> list[str]:
        """Restore and remove the entries of ``checkpoint`` in ``saved``; return the labels of the initialised nodes."""
        self.local_hashes, self.volatile = saved.pop("local_hashes"), set(saved.pop("volatile"))
        self.reestimated, self.latest_bn = saved.pop("gathered"), LatestBN(saved.pop("shared_bn"))
        labels: list[str] = saved.pop("started")
        return labels
