"""The testing half of a round, in the order of ``server.round``: address, read, average."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid

from fedbn_flwr.server import completion, health
from fedbn_flwr.server.dispatch import NOTHING, Sent, address, in_order, raise_shared_test_error
from fedbn_flwr.server.failures import losses_not_finite
from fedbn_flwr.server.nodes import Node
from fedbn_flwr.server.replies import read_metrics, read_replies, tested_nothing
from fedbn_flwr.server.run import Run
from fedbn_flwr.training.settings import share_of

__all__ = ["address_tests", "read_tests", "test_metrics"]


def address_tests(run: Run, number: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Sent:
    """Return the evaluation messages of a round; none if clients do not test, or must not say how they do."""
    options = run.options
    if options.fraction_evaluate == 0.0 or not run.protection.publishes_metrics:
        return NOTHING
    at_least = max(options.min_available_nodes, options.min_evaluate_nodes)
    present = [node for node in run.nodes.present(grid, at_least) if not node.unusable]
    count = max(share_of(options.fraction_evaluate, len(present)), options.min_evaluate_nodes)
    nodes = run.nodes.sample(present, count, "evaluate", number)
    entries = {**config, **run.message_config(number).write()}
    # A client without BN parts of its own is tested with the averaged ones, and with the initial ones before these.
    model = completion.completed(run, arrays)
    return address(run, nodes, MessageType.EVALUATE, model, entries, run.report.evaluate)


def read_tests(run: Run, sent: Sent, replies: Iterable[Message]) -> list[Message]:
    """Return the usable replies of clients that have tested; write their metrics to the report."""
    count_key = run.options.weighted_by_key

    def read(node: Node, message: Message) -> dict[str, float]:
        return read_metrics(message, count_key)

    received = [pair for pair in in_order(run, sent, replies) if not tested_nothing(pair[1], count_key)]
    usable, refused = read_replies(received, read, run.report, "evaluation")
    # A client that lost its own part needs the whole state again.
    run.nodes.initialised.difference_update(node.node_id for node, message, _ in refused if message.has_error())
    raise_shared_test_error(run, sent, refused)
    run.report.evaluations |= {node.label: metrics for node, _, metrics in usable}
    run.tested |= bool(usable)
    health.note_losses(run, losses_not_finite(run.report.evaluations))
    return [message for _, message, _ in usable]


def test_metrics(run: Run, tests: Sequence[Message]) -> MetricRecord | None:
    """Return the averaged metrics of the clients' tests; None if there was no test."""
    if not tests:
        return None
    contents = [message.content for message in tests]
    metrics = run.options.average_test_metrics(contents, run.options.weighted_by_key)
    run.metrics["evaluate_metrics_clientapp"] = metrics
    return metrics
