"""The testing half of a round, and the tested model.

The tested model, which a run also returns, is the global model, completed with BN
entries: averages of BN parts that stay with the clients (``server.methods.shared_bn``),
or re-estimated statistics (``server.rounds.recalibration``). Training does not use them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType
from flwr.serverapp import Grid

from fedbn_flwr.batchnorm.array_types import State
from fedbn_flwr.messages.records import to_record
from fedbn_flwr.server.methods.method import Node
from fedbn_flwr.server.methods.params import RECALIBRATED
from fedbn_flwr.server.methods.shared_bn import SHARED_BN
from fedbn_flwr.server.rounds.dispatch import (
    NOTHING,
    Sent,
    address,
    in_order,
    raise_shared_test_error,
)
from fedbn_flwr.server.rounds.replies import read_metrics, read_replies, tested_nothing
from fedbn_flwr.server.runs.failures import losses_not_finite, note_losses
from fedbn_flwr.server.runs.run_state import Run
from fedbn_flwr.training.settings import share_of

logger = logging.getLogger("flwr")


def address_tests(
    run: Run, number: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
) -> Sent:
    """Return the evaluation messages of a round.

    There are none if clients do not test, or if a protection hides their results.
    """
    options = run.options
    if options.fraction_evaluate == 0.0 or not run.protection.publishes_metrics:
        return NOTHING
    least = options.min_evaluate_nodes
    present = run.present(grid, max(options.min_available_nodes, least))
    able = [node for node in present if not node.unusable]
    count = max(share_of(options.fraction_evaluate, len(able)), least)
    nodes = run.nodes.sample(able, count, "evaluate", number)
    entries = {**config, **run.test_config(number)}
    # A client without BN parts of its own is tested with the averaged parts, or with
    # the initial parts if there is no average yet.
    model = completed(run, arrays)
    return address(
        run, nodes, MessageType.EVALUATE, model, entries, run.report.evaluate
    )


def read_tests(run: Run, sent: Sent, replies: Iterable[Message]) -> list[Message]:
    """Return the usable replies of testing clients, and report their metrics."""
    count_key = run.options.weighted_by_key

    def read(node: Node, message: Message) -> dict[str, float]:
        return read_metrics(message, count_key)

    # A client without test data is not a failure, but has nothing to average.
    received = [
        (node, message)
        for node, message in in_order(run, sent, replies)
        if not tested_nothing(message, count_key)
    ]
    usable, refused = read_replies(received, read, run.report, "evaluation")
    raise_shared_test_error(run, sent, refused)
    run.report.evaluations |= {test.node.label: test.read for test in usable}
    run.start.tested |= bool(usable)
    note_losses(run, losses_not_finite(run.report.evaluations, run.nodes.names))
    return [test.message for test in usable]


def completing_entries(run: Run, test: str) -> State:
    """Return the entries that replace the global entries in a test.

    Only the tests "recalibrated" and "averaged-bn" have such entries. For
    "recalibrated" they exist after ``configure_evaluate`` of a round with a test.
    """
    if test == SHARED_BN and SHARED_BN in run.methods.tests:
        return run.kept.shared.average(run.parts, run.methods.params.variance)
    if test == RECALIBRATED:
        return run.reestimated
    return {}


def completed(run: Run, arrays: ArrayRecord) -> ArrayRecord:
    """Return the model with averaged BN parts and re-estimated statistics, if used.

    The averages are used if a test asks for them. The statistics are used if the run
    uses them in every test.
    """
    entries = dict(completing_entries(run, SHARED_BN))
    if run.methods.reestimates:
        entries |= run.reestimated
    return _replaced(arrays, entries)


def with_statistics(run: Run, arrays: ArrayRecord) -> ArrayRecord:
    """Return the model with re-estimated statistics, if every test uses them."""
    if not run.methods.reestimates:  # only the test "recalibrated" uses the statistics
        return arrays
    return _replaced(arrays, run.reestimated)


def tested_by_server(run: Run, number: int, arrays: ArrayRecord) -> ArrayRecord:
    """Return the completed model for the server's test after a round.

    Round 0 is the state before the first round. Warn about entries that are missing.
    """
    if run.methods.reestimates and number and not run.tests_after(number):
        logger.warning(
            "round %d: the model of evaluate_fn and on_round_end has statistics that"
            " are not re-estimated. Statistics are re-estimated after every %d rounds,"
            " and with eval_every=1 after each round",
            number,
            run.methods.params.eval_every,
        )
    if SHARED_BN in run.methods.tests and number and not run.kept.shared.tree:
        logger.warning(
            "round %d: no client has shared its BN parts, so the test of the global"
            " model uses untrained BN parts",
            number,
        )
    return completed(run, arrays)


def warn_of_nothing_shared(run: Run) -> None:
    """Warn, after the last round, if a test needs averages and there are none."""
    if SHARED_BN in run.methods.tests and not run.kept.shared.tree:
        logger.warning(
            "no client has shared its BN parts, but eval_on='averaged-bn' needs them:"
            " in the returned arrays they have their initial values. A client with its"
            " own training loop shares them if it trains inside `with"
            " bn_rules(...)`."
        )


def _replaced(arrays: ArrayRecord, entries: State) -> ArrayRecord:
    """Return the record with ``entries`` replaced."""
    if not entries:
        return arrays
    return ArrayRecord({**arrays, **to_record(entries)})
