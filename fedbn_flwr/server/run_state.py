"""The state of a run: what the server knows of the model, the rounds and the clients, and what it checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord, Message

from fedbn_flwr.batchnorm.averaging import State
from fedbn_flwr.batchnorm.parts import Parts, split_state
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.messages.protocol import Continuity, ReplyInfo
from fedbn_flwr.server.nodes import Node
from fedbn_flwr.server.report import RoundReport
from fedbn_flwr.server.shared_bn import LatestBN

__all__ = ["RunState"]

logger = logging.getLogger("flwr")


@dataclass
class RunState:
    """What the server knows of a run.

    Attributes:
        strategy: the name of the method, for messages.
        known_parts: the split of the model's state; None until the first arrays, where it was not given.
        num_rounds: R; None where a loop of Flower's keeps it to itself.
        own_loop: whether the loop over the rounds is ``server.rounds``.
        begun: whether the method's ``begin`` was called for this run.
        reports: what happened, round by round.
        arrays: the global model, as training goes on with it; tests may complete it.
        before: the global state that was sent in this round.
        hooks_told: the client hooks that were asked for in this round.
        num_able: nodes with training data, N of the papers.
        reestimated: running statistics for the model after this round.
        latest_bn: what clients shared of their BN for tests.
        local_hashes: the SHA-256 of what each client keeps, by label.
        volatile: clients that keep something in memory alone.
        continuity: what clients are told of the run, for their state folders.
    """

    strategy: str
    known_parts: Parts | None = None
    continuity: Continuity | None = None
    num_rounds: int | None = None
    own_loop: bool = False
    begun: bool = False
    reports: list[RoundReport] = field(default_factory=list)
    arrays: ArrayRecord = field(default_factory=ArrayRecord)
    before: State = field(default_factory=dict)
    hooks_told: frozenset[str] = frozenset()
    num_able: int = 0
    reestimated: dict[str, Any] = field(default_factory=dict)
    latest_bn: LatestBN = field(default_factory=LatestBN)
    local_hashes: dict[str, str] = field(default_factory=dict)
    volatile: list[str] = field(default_factory=list)

    @property
    def report(self) -> RoundReport:
        """The report of this round."""
        return self.reports[-1]

    @property
    def parts(self) -> Parts:
        """The split of the model's state; ConfigError before the first arrays, where it was not given."""
        if self.known_parts is None:
            raise ConfigError(
                "the split of the state is not known before the first arrays; pass parts=split_state(model)"
            )
        return self.known_parts

    @property
    def total_rounds(self) -> int:
        """The number of rounds of the run; ConfigError where the loop that runs them keeps it to itself."""
        if self.num_rounds is None:
            raise ConfigError(
                f"strategy {self.strategy!r} needs the number of rounds, which is not known where its own start() is "
                "not called: give it rounds (int), not fractions; in Flower's legacy loop pass num_rounds= to "
                "to_legacy."
            )
        return self.num_rounds

    def know(self, arrays: ArrayRecord) -> None:
        """Split the state by the names of the arrays, or check that a given split fits them.

        Raises:
            ConfigError: it does not.
        """
        if self.known_parts is None:
            self.known_parts = split_state(arrays)
        if unknown := [name for name in arrays if name not in self.known_parts.part_of]:
            raise ConfigError(
                f"parts= does not know {len(unknown)} of the arrays ({unknown[0]}, ...): it was made from another model"
            )

    def note_kept(self, node: Node, message: Message) -> None:
        """Note the hash of what the client keeps now, whether its reply is used or not, and whether it is durable."""
        info = ReplyInfo.read(message)
        if not info.local_sha256:
            return
        if info.began and node.label in self.local_hashes:
            logger.warning(
                "%s had lost what it kept between rounds (its memory went with its process), and began anew; "
                "give it a state folder (state-dir)",
                node,
            )
        self.local_hashes[node.label] = info.local_sha256
        others = [label for label in self.volatile if label != node.label]
        self.volatile = sorted(others if info.durable else [*others, node.label])

    def checkpoint(self, initialised: Sequence[str]) -> dict[str, Any]:
        """Return what a checkpoint keeps of the run: JSON values and arrays by name.

        Args:
            initialised: the labels of the nodes that have had the common start.
        """
        return {
            "local_hashes": self.local_hashes,
            "volatile": self.volatile,
            "started": list(initialised),
            "gathered": self.reestimated,
            "shared_bn": self.latest_bn.tree,
        }

    def restore(self, saved: dict[str, Any]) -> list[str]:
        """Take out of ``saved`` what ``checkpoint`` returned; return the labels of the initialised nodes."""
        self.local_hashes, self.volatile = saved.pop("local_hashes"), saved.pop("volatile")
        self.reestimated, self.latest_bn = saved.pop("gathered"), LatestBN(saved.pop("shared_bn"))
        labels: list[str] = saved.pop("started")
        return labels
