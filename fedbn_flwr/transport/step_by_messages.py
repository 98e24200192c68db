"""The transport "messages", with the exchanges in Flower's messages.

It needs no port and no barrier, but each exchange is a round trip. The client's half is
its log of answers, in ``client.replay_log``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid

from fedbn_flwr.batchnorm.sync import combine, exchange_bytes, refuse_unusable
from fedbn_flwr.compat.flower import lacks_function
from fedbn_flwr.errors import ReplyError
from fedbn_flwr.messages.protocol import (
    ATTEMPT,
    EXCHANGE,
    EXCHANGE_QUERY,
    STEP_ONLY,
    UNION,
)
from fedbn_flwr.messages.records import (
    Traffic,
    from_record,
    of_kind,
    tensors,
    to_record,
)
from fedbn_flwr.transport.barrier import Member, TaggedTensor, odd_ones
from fedbn_flwr.transport.step_transport import (
    Enough,
    Limits,
    LinkSettings,
    StepResult,
    Transport,
    send_until,
    with_config,
)

logger = logging.getLogger("flwr")


class ByMessages(Transport):
    """The server sends the exchanges as queries, then the training messages."""

    def __init__(self, settings: LinkSettings) -> None:
        super().__init__(settings)
        # Nodes whose app has no function for the queries of a step. They get training
        # messages instead, and answer the last message with the model.
        self._without_query: set[int] = set()

    def step(
        self,
        grid: Grid,
        messages: Sequence[Message],
        members: Mapping[int, Member],
        limits: Limits,
    ) -> StepResult:
        """Send the exchanges as queries, then the training messages, and return models.

        Messages after the first contain only the newest answer. The model, the batch
        and earlier answers stay in the client's ``Context.state``. A client that fails,
        stalls or sends an unusable tensor is dropped, and the others repeat the step.
        Clients that have finished the step do the whole round: the step again, with its
        answers, and local steps 2..E. They reply with the model within
        ``limits.reply_timeout``. If no client finishes, the replies are the clients'
        errors.
        """
        post = _Post(grid, messages, limits, self._without_query)
        left = dict(members)
        dropped: dict[int, str] = {}
        failed: list[Message] = []
        traffic = Traffic()
        attempt, answer = 0, ArrayRecord()
        while len(left) >= limits.min_members:
            config: dict[str, Any] = {
                ATTEMPT: attempt,
                UNION: sum(member.batch_size for member in left.values()),
            }
            replies = post.exchange(list(left), answer, config)
            sent, done, lost = _sort(left, replies, limits)
            for node_id in lost:
                if node_id in replies and replies[node_id].has_error():
                    failed.append(replies[node_id])

            # Nobody has sent another tensor, so the step is finished.
            if done and not sent:
                # If the step had exchanges, all clients in ``left`` took part in them,
                # so their batches stay in the step, even if a client is lost now. Such
                # a client is dropped only if it sent a wrong tensor, not if its reply
                # is missing or an error.
                included = list(left if answer else done)
                for node_id, reason in lost.items():
                    reply = replies.get(node_id)
                    fell_silent = reply is None or reply.has_error()
                    if node_id not in included or not fell_silent:
                        dropped[node_id] = reason
                trained = post.train(done, config)
                return StepResult([*trained, *failed], traffic, included, dropped)

            # All have sent the same exchange, and get its answer in the next turn.
            if not lost:
                (tag, _), *_ = sent.values()
                local = [sent[node_id][1] for node_id in left]
                weights = [member.weight for member in left.values()]
                total = combine(tag, local, weights)
                answer = to_record({tag: total})
                traffic.exchanges += 1
                traffic.count_down(exchange_bytes(tag, total))
                for tensor in local:
                    traffic.count_up(exchange_bytes(tag, tensor))

            # The answers so far include the batch of a lost client, so start again.
            if lost:
                dropped |= lost
                for node_id in lost:
                    del left[node_id]
                attempt, answer = attempt + 1, ArrayRecord()
        return StepResult(failed, traffic, (), dropped)


class _Post:
    """Sends the messages of one step.

    Args:
        grid: the nodes.
        messages: the training message of each node.
        limits: the limits of a wait.
        without_query: ids of nodes whose app has no function for such queries. Nodes
            that are found here are added.
    """

    def __init__(
        self,
        grid: Grid,
        messages: Sequence[Message],
        limits: Limits,
        without_query: set[int],
    ) -> None:
        self._grid = grid
        self._first = {message.metadata.dst_node_id: message for message in messages}
        self._limits = limits
        self._without_query = without_query
        self._begun: set[int] = set()  # nodes that have received the model

    def exchange(
        self, nodes: Sequence[int], answer: ArrayRecord, config: Mapping[str, Any]
    ) -> dict[int, Message]:
        """Send the newest answer, and return the replies by node id.

        The first time, the messages also contain the model.
        """
        replies = self._send(nodes, answer, config)
        lacking = [
            node_id
            for node_id, reply in replies.items()
            if lacks_function(reply, EXCHANGE_QUERY)
        ]
        if lacking:
            logger.warning(
                "The app of %d node(s) has no function for FedTAN's exchanges. They are"
                " sent as training messages, so mods of the training see all of them."
                " Write @app.query('exchange') above @app.train().",
                len(lacking),
            )
            # Flower refused the query, and with it the model, before the app saw it.
            self._without_query.update(lacking)
            self._begun.difference_update(lacking)
            replies |= self._send(lacking, answer, config)
        return replies

    def train(
        self, done: Mapping[int, Message], config: Mapping[str, Any]
    ) -> list[Message]:
        """Start the training of clients that finished the step.

        Return the replies of these clients.

        Args:
            done: the last reply of each client. Replies to training messages contain
                the model already.
            config: the config of the last exchange.
        """
        models, messages = [], []
        for node_id, reply in done.items():
            if node_id in self._without_query:
                models.append(reply)
            else:
                messages.append(self._message(node_id, None, config))
        timeout = self._limits.reply_timeout
        replies = send_until(self._grid, messages, lambda _, seconds: seconds > timeout)
        return [*models, *replies.values()]

    def _send(
        self, nodes: Sequence[int], answer: ArrayRecord, config: Mapping[str, Any]
    ) -> dict[int, Message]:
        messages = [self._message(node_id, answer, config) for node_id in nodes]
        self._begun.update(nodes)
        queries = self._without_query.isdisjoint(nodes)
        return send_until(self._grid, messages, self._patience(queries))

    def _message(
        self, node_id: int, answer: ArrayRecord | None, config: Mapping[str, Any]
    ) -> Message:
        """Return the message with an answer, or the training message without one."""
        by_query = answer is not None and node_id not in self._without_query
        entries = {**config, STEP_ONLY: True} if by_query else config
        message = with_config(self._first[node_id], entries)
        # The client has kept the model and the records that are sent with it.
        if node_id in self._begun:
            for key in of_kind(message.content, ArrayRecord):
                message.content[key] = ArrayRecord()
        if answer is not None:
            message.content[EXCHANGE] = answer
        if by_query:
            return Message(message.content, node_id, EXCHANGE_QUERY)
        return message

    def _patience(self, queries: bool) -> Enough:
        """Return the rule that ends a wait.

        A wait lasts ``exchange_timeout`` after the first tensor, and ``reply_timeout``
        without a tensor. If all messages are ``queries``, a reply without a tensor
        comes from a client that has finished the step, so it counts like a tensor.
        """
        limits = self._limits
        first: float | None = None  # seconds until the first tensor

        def enough(replies: Mapping[int, Message], seconds: float) -> bool:
            nonlocal first
            if first is None:
                for reply in replies.values():
                    if reply.has_content() and (queries or _tensors_of(reply)):
                        first = seconds
            if first is None:
                return seconds > limits.reply_timeout
            return seconds > first + limits.exchange_timeout

        return enough


def _sort(
    left: Mapping[int, Member], replies: Mapping[int, Message], limits: Limits
) -> tuple[dict[int, TaggedTensor], dict[int, Message], dict[int, str]]:
    """Sort the replies into tensors, replies of finished clients, and lost clients.

    Each lost client has a reason.
    """
    sent: dict[int, TaggedTensor] = {}
    done: dict[int, Message] = {}
    lost: dict[int, str] = {}
    for node_id in left:
        reply = replies.get(node_id)
        if reply is None:
            continue
        if reply.has_error():
            lost[node_id] = "failed during the step"
        elif not _tensors_of(reply):
            done[node_id] = reply
        else:
            try:
                sent[node_id] = _read(_tensors_of(reply))
            except ReplyError as error:
                lost[node_id] = error.reason
    limit = f"within {limits.reply_timeout:g} s"
    if sent:
        limit = f"within {limits.exchange_timeout:g} s of the first"
    for node_id in left:
        if node_id not in replies:
            lost[node_id] = f"did not answer an exchange {limit}"
    # Drop clients that call other layers than most clients, or have finished before
    # most clients. These stay in ``done``, which is read only if nobody has sent.
    odd = odd_ones({i: sent.get(i) for i in left if i not in lost})
    sent = {node_id: own for node_id, own in sent.items() if node_id not in odd}
    return sent, done, lost | odd


def _tensors_of(reply: Message) -> ArrayRecord:
    return of_kind(reply.content, ArrayRecord).get(EXCHANGE, ArrayRecord())


def _read(record: ArrayRecord) -> TaggedTensor:
    """Return the tag and the tensor of an exchange.

    Raises:
        ReplyError: the record is not one usable tensor.
    """
    if len(record) != 1:
        raise ReplyError(f"sent {len(record)} tensors in one exchange")
    try:
        ((tag, tensor),) = tensors(from_record(record)).items()
    except Exception as error:  # bytes from outside: NumPy's parser may raise anything
        raise ReplyError(
            f"sent a tensor that cannot be read: {type(error).__name__}: {error}"
        ) from error
    refuse_unusable(tag, tensor)
    return tag, tensor
