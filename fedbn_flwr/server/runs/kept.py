"""The entries that clients keep between rounds, as known to the server.

They are the local states of the clients, and the fixed entries of the global model.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message

from fedbn_flwr.compat.flower import is_app_error
from fedbn_flwr.messages.protocol import (
    FIXED_ENTRIES,
    LOCAL_SHA256,
    USED_SHA256,
    ReplyInfo,
    named_state,
)
from fedbn_flwr.messages.records import select, state_sha256, views
from fedbn_flwr.server.methods.method import Node, Reply
from fedbn_flwr.server.methods.shared_bn import SHARED_BN, LatestBN

logger = logging.getLogger("flwr")


@dataclass(frozen=True)
class Kept:
    """The local states of the clients, as a value.

    Attributes:
        hashes: the SHA-256 of each client's local state, by label, from the last reply
            that arrived. If the method undoes rounds whose reply is not used, it is
            from the last used reply.
        volatile: labels of the clients whose local state is only in memory.
        shared: the BN parts that clients shared for tests.
        is_resumed: whether the run was resumed.
        answered: labels of the clients that have answered since the resume.
    """

    hashes: Mapping[str, str] = field(default_factory=dict)
    volatile: frozenset[str] = frozenset()
    shared: LatestBN = field(default_factory=LatestBN)
    is_resumed: bool = False
    answered: frozenset[str] = frozenset()

    def config(self, node: Node) -> dict[str, str]:
        """Return the config entries that name the local state a node continues from.

        A client whose reply was lost or late returns to its earlier state. So the
        server knows each client's state, and a resumed run repeats it. A node that may
        be a known client under a new node id gets no such entry, because it may have
        the right state already.
        """
        sha256 = self.hashes.get(node.label, "")
        unnamed = node.partition_id is None
        entries: dict[str, str] = {}
        # After a resume, the node must have this state. After the node's first answer,
        # it has the restored state.
        if self.is_resumed and node.label not in self.answered and not unnamed:
            entries[LOCAL_SHA256] = named_state(sha256)
        # This entry also asks the node to keep the state before the round.
        if not (self.hashes and unnamed and not sha256):
            entries[USED_SHA256] = named_state(sha256)
        return entries

    def with_answers(self, replies: Sequence[tuple[Node, Message]]) -> Kept:
        """Return a copy that records which clients have answered since the resume."""
        labels = {
            node.label
            for node, message in replies
            if message.has_content() or is_app_error(message)
        }
        return replace(self, answered=self.answered | labels)

    def noted(
        self,
        usable: Sequence[Reply],
        refused: Sequence[tuple[Node, Message]] = (),
    ) -> Kept:
        """Return a copy with the senders' local states, and the BN parts they share.

        Only usable replies share BN parts.
        """
        # A refused reply, even an error, also reports the client's local state.
        infos = [(reply.node, reply.info) for reply in usable]
        infos += [(node, ReplyInfo.read(message)) for node, message in refused]
        hashes, volatile = dict(self.hashes), set(self.volatile)
        for node, info in infos:
            if not info.local_sha256:
                continue
            if info.began and node.label in hashes:
                logger.warning(
                    "%s had lost its local state, and started again: %s.",
                    node,
                    "its state folder has no file of this client. If the node has"
                    " another folder than before, or has taken the place of another"
                    " node, copy the files of the earlier folder before it starts"
                    if info.durable
                    else "its process had ended, or another node has taken its place."
                    " Give it a state folder (state-dir), and in a project of your own"
                    " also set strategy.continuity",
                )
            hashes[node.label] = info.local_sha256
            if info.durable:
                volatile.discard(node.label)
            else:
                volatile.add(node.label)
        copies = [
            (reply.node.order, reply.extras[SHARED_BN], reply.num_examples)
            for reply in usable
            if SHARED_BN in reply.extras
        ]
        shared = self.shared.with_latest(copies) if copies else self.shared
        return replace(self, hashes=hashes, volatile=frozenset(volatile), shared=shared)

    def saved(self) -> dict[str, Any]:
        """Return the content for a checkpoint, as JSON values and arrays."""
        return {
            "hashes": dict(self.hashes),
            "volatile": sorted(self.volatile),
            "shared": self.shared.tree,
        }

    @classmethod
    def resumed(cls, saved: Mapping[str, Any]) -> Kept:
        """Return the local states from ``saved``, at the start of a resumed run."""
        return cls(
            dict(saved["hashes"]),
            frozenset(saved["volatile"]),
            LatestBN(saved["shared"]),
            is_resumed=True,
        )


@dataclass(frozen=True)
class Fixed:
    """The entries of the global model that do not change in a run, as a value.

    Attributes:
        names: their names; empty without ``train_only``.
        record: their values.
        sha256: the hash of the values, "" without entries.
    """

    names: frozenset[str] = frozenset()
    record: ArrayRecord = field(default_factory=ArrayRecord)
    sha256: str = ""

    def of(self, arrays: ArrayRecord, names: frozenset[str]) -> Fixed:
        """Return the entries of a model, or this object if the values are equal."""
        if not names:
            return Fixed()
        record = select(arrays, names)
        before, now = views(self.record), views(record)
        # Hash only new values. A user's loop may send another model.
        if [*before] == [*now] and all(np.array_equal(before[n], now[n]) for n in now):
            return self
        return Fixed(names, record, state_sha256(now))

    def naming(self) -> dict[str, str]:
        """Return the config entries that name the entries to a client."""
        return {FIXED_ENTRIES: json.dumps([*self.record])}
