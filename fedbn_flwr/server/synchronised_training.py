"""A round of training whose first step is synchronised: who takes part, which transport, whom the step lost."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.messages.protocol import FIRST_BATCH, NUM_EXAMPLES, ReplyInfo
from fedbn_flwr.server.failures import MOD_ORDER
from fedbn_flwr.server.flower import Server
from fedbn_flwr.server.step_by_messages import step_by_messages
from fedbn_flwr.server.synchronised_step import Limits, StepResult, step_by_barrier, step_by_channel, with_config
from fedbn_flwr.transport import BarrierGrid, Member
from fedbn_flwr.transport.grpc_channel import ChannelServer

__all__ = ["SynchronisedTraining"]

logger = logging.getLogger("flwr")

_ANSWER = (
    "answer the query with num-examples and batch-size (fedbn_flwr.client_app around a TorchClient does; in an app of "
    "your own register `@app.query()` and return answer_query(msg, context, loader))."
)
_AFTER_THE_STEP = (
    "sent all its exchanges, but no model: the synchronised step keeps its batch; the average of the models leaves it "
    "out"
)


class SynchronisedTraining:
    """Trains the clients of a round; their first step is one step on the union of their batches.

    Args:
        server: the strategy, whose nodes, report and protection are used.
        transport: "messages" or "channel"; a grid with barriers, as in process, needs neither.
        timeout: seconds that an exchange waits for its last client.
        bind: address of the channel on the server.
        address: address that clients connect to; "" = ``bind`` with the port in use.
        tls_dir: folder of the channel's certificates; "" = loopback only.
    """

    def __init__(
        self, server: Server[Any], transport: str, timeout: float, bind: str, address: str, tls_dir: str
    ) -> None:
        self._server = server
        self._transport = transport
        self._timeout = timeout
        self._addresses = bind, address, tls_dir
        self._channel: ChannelServer | None = None
        self._without_query: set[int] = set()

    def begin(self) -> None:
        """Forget which nodes have no function for exchanges."""
        self._without_query = set()

    def close(self) -> None:
        """Close the channel, if one is open."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def run(self, server_round: int, messages: Sequence[Message], grid: Grid) -> list[Message]:
        """Send the training messages, answer the exchanges of the first step, and return the replies.

        Clients that were lost are named in the report and in the log.

        Raises:
            ConfigError: no node has reported what the step needs.
        """
        step = self._step(messages, grid)
        report, nodes = self._server.run.report, self._server.nodes
        report.train = report.train.plus(step.traffic)
        trained = {reply.metadata.src_node_id for reply in step.replies if reply.has_content()}
        lost = {node_id: _AFTER_THE_STEP for node_id in step.members if node_id not in trained}
        end = "the step was redone without it" if step.members else "the step was not finished"
        lost |= {node_id: f"{reason}; {end}" for node_id, reason in step.dropped.items()}
        for node_id, reason in lost.items():
            report.reject(node_id, f"{nodes.node(node_id)}: {reason}")
            logger.warning("round %d: %s %s", server_round, nodes.node(node_id), reason)
        # A dropped client's model is not used. A reply without any applied hook is passed on: it is then refused with
        # the name of what the app lacks.
        return [
            r
            for r in step.replies
            if r.has_error() or r.metadata.src_node_id not in step.dropped or not ReplyInfo.read(r).applied
        ]

    def _step(self, messages: Sequence[Message], grid: Grid) -> StepResult:
        members = self._members(messages)
        messages = [
            with_config(m, {FIRST_BATCH: members[m.metadata.dst_node_id].batch_size})
            for m in messages
            if m.metadata.dst_node_id in members
        ]
        reply_timeout = max(self._timeout, self._server.dispatcher.timeout)
        limits = Limits(self._timeout, reply_timeout, self._server.params.min_replies)
        limits = self._server.protection.limits(limits, members)
        if isinstance(grid, BarrierGrid):
            return step_by_barrier(grid, grid, messages, members, limits)
        if self._transport == "messages":
            return step_by_messages(grid, messages, members, limits, self._without_query)
        if self._channel is None:
            self._channel = ChannelServer(*self._addresses)
        return step_by_channel(grid, self._channel, messages, members, limits)

    def _members(self, messages: Iterable[Message]) -> dict[int, Member]:
        """Return the members of the step; refuse nodes that have not reported what the step needs.

        Raises:
            ConfigError: no node has, or the replies are weighed by something else than their examples.
        """
        if self._server.weighted_by_key != NUM_EXAMPLES:
            raise ConfigError(
                f"strategy {self._server.name!r} synchronises with the weights of {NUM_EXAMPLES!r}, and "
                f"weighted_by_key={self._server.weighted_by_key!r} averages by others: leave it out"
            )
        nodes = [self._server.nodes.node(message.metadata.dst_node_id) for message in messages]
        members = {
            n.node_id: Member(n.num_examples, n.batch_size, str(n)) for n in nodes if n.num_examples and n.batch_size
        }
        for node in (node for node in nodes if node.node_id not in members):
            problem = (
                f"strategy {self._server.name!r} needs to know the training examples and the first batch's size of "
                f"{node} before the round: "
            ) + (f"{node.refusal} {MOD_ORDER}." if node.refusal else _ANSWER)
            if not members:
                raise ConfigError(problem)
            logger.warning("%s", problem)
            self._server.run.report.reject(node.node_id, problem)
        return members
