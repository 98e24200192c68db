"""A round of training whose first step is synchronised.

This module determines the members of the step, its transport, and the clients it lost.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from flwr.app import Message
from flwr.serverapp import Grid

from fedbn_flwr.errors import MOD_ORDER, ConfigError, one_line, split_code
from fedbn_flwr.messages.protocol import FIRST_BATCH, ReplyInfo
from fedbn_flwr.messages.records import Traffic
from fedbn_flwr.server.runs.run_state import Run
from fedbn_flwr.transport import BarrierGrid, Member
from fedbn_flwr.transport.step_by_barrier import step_by_barrier
from fedbn_flwr.transport.step_transport import (
    Limits,
    LinkSettings,
    StepResult,
    with_config,
)
from fedbn_flwr.transport.transports import TRANSPORTS

logger = logging.getLogger("flwr")

_ANSWER = (
    "answer the query with num-examples and batch-size (fedbn_flwr.client_app around a"
    " TorchClient does this; in your own app, register `@app.query()` and return"
    " answer_query(msg, context, loader))."
)
_AFTER_THE_STEP = "sent all its exchanges, but no model"
_KEPT = "its batch stays in the synchronised step, but the average lacks its model"


def train_synchronised(
    run: Run, messages: Sequence[Message], grid: Grid
) -> list[Message]:
    """Send the training messages, answer the exchanges, and return the replies.

    The exchanges belong to the first step. The report and the log name lost clients.

    Raises:
        ConfigError: no node has reported the values that the step needs.
    """
    step = _step(run, messages, grid)
    run.report.train = run.report.train.plus(step.traffic)
    logger.info(
        "round %d: %d exchanges in the synchronised step",
        run.report.server_round,
        step.traffic.exchanges,
    )
    for node_id, why in _lost(step).items():
        node = run.nodes.node(node_id)
        run.report.reject(node, why)
        text = one_line(split_code(why)[1])
        logger.warning("round %d: %s %s", run.report.server_round, node, text)
    # The model of a dropped client is not used. A reply without any applied hook is
    # read: it is then refused with the name of the part that the app lacks.
    unused = step.dropped.keys() - step.members
    received = []
    for reply in step.replies:
        used = reply.has_error() or reply.metadata.src_node_id not in unused
        if used or not ReplyInfo.read(reply).applied:
            received.append(reply)
    return received


def _step(run: Run, messages: Sequence[Message], grid: Grid) -> StepResult:
    """Run the step at the grid's barrier, if any, or by the configured transport."""
    link = run.round.phase.exchanges or LinkSettings()
    members = _members(run, messages)
    # Send each member its batch size. The member must use it, because the other clients
    # compute with the sum of all batch sizes.
    own = []
    for message in messages:
        member = members.get(message.metadata.dst_node_id)
        if member is not None:
            own.append(with_config(message, {FIRST_BATCH: member.batch_size}))
    limits = Limits(
        exchange_timeout=link.timeout,
        reply_timeout=max(link.timeout, run.start.timeout),
        min_members=run.methods.params.min_replies,
    )
    run.report.asked = len(own)
    if len(members) < limits.min_members:
        run.report.asked = 0
        reason = (
            "it was not asked: the synchronised step needs"
            f" {limits.min_members} clients (min_replies), but only {len(members)} can"
            " take part"
        )
        return StepResult([], Traffic(), (), dict.fromkeys(members, reason))
    if isinstance(grid, BarrierGrid):
        return step_by_barrier(grid, grid, own, members, limits)
    # Use one transport for all rounds: a channel stays open, and the transport
    # remembers its findings about the nodes' apps.
    if run.start.transport is None:
        run.start.transport = TRANSPORTS[link.transport](link)
    return run.start.transport.step(grid, own, members, limits)


def _lost(step: StepResult) -> dict[int, str]:
    """Return, by node id, why the step lost a client, and the effect on the step."""
    trained = {
        reply.metadata.src_node_id for reply in step.replies if reply.has_content()
    }
    # A member that is lost now cannot be removed from the step, because the answers to
    # the other clients include its batch.
    silent = [node_id for node_id in step.members if node_id not in trained]
    reasons = dict.fromkeys(silent, _AFTER_THE_STEP) | dict(step.dropped)
    lost = {}
    for node_id, reason in reasons.items():
        if node_id in step.members:
            lost[node_id] = f"{reason}: {_KEPT}"
        elif step.members:
            lost[node_id] = f"{reason}; the step was redone without it"
        else:
            lost[node_id] = f"{reason}; the step was not finished"
    return lost


def _members(run: Run, messages: Iterable[Message]) -> dict[int, Member]:
    """Return the members of the step, and refuse nodes that lack the needed values.

    Raises:
        ConfigError: no node has reported the values.
    """
    # Weight and batch size come from the answer to the query, because an exchange is
    # combined before any reply.
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
            f"strategy {run.methods.name!r} needs the number of training examples and"
            f" the size of the first batch before the round: {remedy}"
        )
        if not members:
            raise ConfigError(f"{node}: {problem}")
        logger.warning("%s: %s", node, problem)
        run.report.reject(node, problem)
    return members
