"""A round of training whose first step is synchronised: who takes part, which
transport, whom the step lost.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from flwr.app import Message
from flwr.serverapp import Grid

from fedbn_flwr.errors import ConfigError, split_code
from fedbn_flwr.messages.protocol import FIRST_BATCH, NUM_EXAMPLES, ReplyInfo
from fedbn_flwr.server.methods.travels import LinkSettings
from fedbn_flwr.server.rounds.step_by_messages import step_by_messages
from fedbn_flwr.server.rounds.synchronised_step import (
    Limits,
    StepResult,
    step_by_barrier,
    step_by_channel,
    with_config,
)
from fedbn_flwr.server.runs.failures import MOD_ORDER
from fedbn_flwr.transport import BarrierGrid, Member

if TYPE_CHECKING:  # a run has its link
    from fedbn_flwr.server.runs.run import Run
    from fedbn_flwr.transport.channel_server import ChannelServer

__all__ = ["Link"]

logger = logging.getLogger("flwr")

_ANSWER = (
    "answer the query with num-examples and batch-size (fedbn_flwr.client_app around a"
    " TorchClient does; in an app of your own register `@app.query()` and return"
    " answer_query(msg, context, loader))."
)
_AFTER_THE_STEP = "sent all its exchanges, but no model"
_KEPT = "the synchronised step keeps its batch; the average of the models leaves it out"


class Link:
    """The way of a synchronised step between the server and the clients of a run: a
    channel, or messages.

    A grid with barriers, as in process, needs neither.
    """

    def __init__(self) -> None:
        self._channel: ChannelServer | None = None
        # nodes whose app has no function for exchanges
        self._without_query: set[int] = set()

    def close(self) -> None:
        """Close the channel, if one is open."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def train(self, run: Run, messages: Sequence[Message], grid: Grid) -> list[Message]:
        """Send the training messages, answer the exchanges of the first step, and
        return the replies.

        Clients that were lost are named in the report and in the log.

        Raises:
            ConfigError: no node has reported what the step needs.
        """
        step = self._step(run, messages, grid)
        run.report.train = run.report.train.plus(step.traffic)
        trained = {
            reply.metadata.src_node_id for reply in step.replies if reply.has_content()
        }
        lost = {
            node_id: _AFTER_THE_STEP
            for node_id in step.members
            if node_id not in trained
        } | dict(step.dropped)
        redone = (
            "the step was redone without it"
            if step.members
            else "the step was not finished"
        )
        for node_id, why in lost.items():
            reason = (
                f"{why}: {_KEPT}" if node_id in step.members else f"{why}; {redone}"
            )
            node = run.nodes.node(node_id)
            run.report.reject(node_id, f"{node}: {reason}")
            logger.warning(
                "round %d: %s %s", run.report.server_round, node, split_code(reason)[1]
            )
        return [reply for reply in step.replies if _is_read(reply, step)]

    def _step(self, run: Run, messages: Sequence[Message], grid: Grid) -> StepResult:
        exchanges = run.travels.exchanges
        link = exchanges.link if exchanges else LinkSettings()
        members = _members(run, messages)
        messages = [
            with_config(
                message, {FIRST_BATCH: members[message.metadata.dst_node_id].batch_size}
            )
            for message in messages
            if message.metadata.dst_node_id in members
        ]
        limits = Limits(
            link.timeout, max(link.timeout, run.timeout), run.methods.params.min_replies
        )
        limits = run.protection.limits(limits, members)
        if isinstance(grid, BarrierGrid):
            return step_by_barrier(grid, grid, messages, members, limits)
        if link.transport == "messages":
            return step_by_messages(
                grid, messages, members, limits, self._without_query
            )
        if self._channel is None:
            from fedbn_flwr.transport.channel_server import ChannelServer

            self._channel = ChannelServer(link.bind, link.address, link.tls_dir)
        return step_by_channel(grid, self._channel, messages, members, limits)


def _is_read(reply: Message, step: StepResult) -> bool:
    """Return whether a reply is read: the model of a dropped client is not used.

    A reply without any applied hook is read: it is then refused with the name of what
    the app lacks.
    """
    used = reply.metadata.src_node_id not in step.dropped.keys() - step.members
    return reply.has_error() or used or not ReplyInfo.read(reply).applied


def _members(run: Run, messages: Iterable[Message]) -> dict[int, Member]:
    """Return the members of the step; refuse nodes that have not reported what the step
    needs.

    Raises:
        ConfigError: no node has, or the replies are weighed by something else than
            their examples.
    """
    name, key = run.methods.name, run.options.weighted_by_key
    if key != NUM_EXAMPLES:
        raise ConfigError(
            f"strategy {name!r} synchronises with the weights of {NUM_EXAMPLES!r}, and"
            f" weighted_by_key={key!r} averages by others: leave it out"
        )
    nodes = [run.nodes.node(message.metadata.dst_node_id) for message in messages]
    members = {
        node.node_id: Member(node.num_examples, node.batch_size, str(node))
        for node in nodes
        if node.num_examples and node.batch_size
    }
    for node in nodes:
        if node.node_id in members:
            continue
        remedy = _ANSWER
        if node.refusal:
            remedy = f"{node.refusal} {MOD_ORDER}."
        elif node.failure:
            remedy = f"its answer to the query failed: {node.failure}"
        problem = (
            f"strategy {name!r} needs to know the training examples and the first"
            f" batch's size of {node} before the round: {remedy}"
        )
        if not members:
            raise ConfigError(problem)
        logger.warning("%s", problem)
        run.report.reject(node.node_id, problem)
    return members
