"""The replies of a training round: read, checked and reported; and what their senders keep afterwards.

What a client keeps is used in its next round. A method that ``undoes_lost_rounds`` lets it go back, if its reply is not
used; so its reply counts as kept once it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flwr.app import Message

from fedbn_flwr.server.dispatch import Dispatcher
from fedbn_flwr.server.method import Method
from fedbn_flwr.server.nodes import Node
from fedbn_flwr.server.protection import Protection
from fedbn_flwr.server.replies import Refused, Reply, Terms, read_replies, warn_of_other_counts
from fedbn_flwr.server.shared_bn import SHARED_BN

__all__ = ["TrainingReplies"]

Usable = Sequence[tuple[Node, Message, Reply]]


class TrainingReplies:
    """Reads the replies of training rounds, and notes in the run what their senders keep.

    Args:
        method: the method; its ``check`` sees each reply.
        dispatcher: the messages of the run.
        protection: what a reply must hold besides, and what of it may be told.
    """

    def __init__(self, method: Method[Any], dispatcher: Dispatcher, protection: Protection) -> None:
        self._method = method
        self._dispatcher = dispatcher
        self._protection = protection
        self._run = dispatcher.run
        self._nodes = dispatcher.nodes

    def read(self, server_round: int, replies: Sequence[Message]) -> tuple[Usable, Refused]:
        """Return the usable and the refused replies, in the order of partition ids; report both."""
        report = self._run.report
        pairs = self._dispatcher.in_order(replies, report.rejected)
        report.replied = len(pairs)
        if not self._method.undoes_lost_rounds:
            self._note_kept(pairs)
        usable, refused = read_replies(pairs, self._reader(server_round), report)
        self._nodes.initialised.difference_update(node.node_id for node, _, _ in refused)
        found = [reply for _, _, reply in usable]
        self._report(found)
        if not self._method.undoes_lost_rounds:
            self._note_shared(found)
        warn_of_other_counts(found, self._method.weighted_by_key, self._run.other_counts)
        return usable, refused

    def note_used(self, usable: Usable) -> None:
        """Note what the senders keep: their replies were used."""
        if self._method.undoes_lost_rounds:
            self._note_kept([(node, message) for node, message, _ in usable])
            self._note_shared([reply for _, _, reply in usable])

    def note_unused(self, usable: Usable) -> None:
        """Send the whole state again to clients whose first round is undone: they have nothing left of their own."""
        if self._method.undoes_lost_rounds:
            anew = {node.node_id for node, _, _ in usable if node.label not in self._run.local_hashes}
            self._nodes.initialised.difference_update(anew)

    def _reader(self, server_round: int) -> Callable[[Node, Message], Reply]:
        method, before, part_of = self._method, self._run.before, self._run.parts.part_of
        terms = Terms(
            strategy=method.name,
            parts=self._run.parts,
            local=method.local,
            expected={name: array for name, array in before.items() if part_of[name] not in method.local},
            hooks=self._run.hooks_sent - method.implicit_hooks,
            extras=self._run.extras_sent,
            arrays_key=method.arrayrecord_key,
            count_key=method.weighted_by_key,
        )
        terms = self._protection.terms(terms)

        def read(node: Node, message: Message) -> Reply:
            reply = terms.read(node, message)
            if self._protection.reads_each:
                method.check(server_round, reply, before)
            self._protection.check(self._run, reply, before)
            return reply

        return read

    def _report(self, usable: Sequence[Reply]) -> None:
        """Note who trained, with which metrics and bytes."""
        report = self._run.report
        for reply in usable:
            self._nodes.initialised.add(reply.node.node_id)
            for size in reply.sizes:
                report.train.count_up(size)
        if not self._protection.secret_sampling:
            report.participants = [reply.node.partition_id for reply in usable]
        if self._protection.publishes_metrics:
            report.clients = {reply.node.label: dict(reply.metrics) for reply in usable}
        self._run.trained.update(reply.node.label for reply in usable)

    def _note_kept(self, pairs: Sequence[tuple[Node, Message]]) -> None:
        for node, message in pairs:
            self._run.note_kept(node, message)

    def _note_shared(self, usable: Sequence[Reply]) -> None:
        """Note the BN parts that the clients share for tests: copies of what they keep."""
        for reply in usable:
            self._run.latest_bn.take(reply.node.order, reply.extras.get(SHARED_BN, {}), reply.num_examples)
