"""The model that is tested after a round.

It is also the model that a run returns: the global model, completed with BN
entries: averages of BN parts that stay with the clients (``server.methods.shared_bn``),
or re-estimated statistics (``server.rounds.recalibration``). Training does not use them.
"""

from __future__ import annotations

import logging

from flwr.app import ArrayRecord

from fedbn_flwr.batchnorm.array_types import State
from fedbn_flwr.messages.records import to_record
from fedbn_flwr.server.methods.params import RECALIBRATED
from fedbn_flwr.server.methods.shared_bn import SHARED_BN
from fedbn_flwr.server.runs.run_state import Run

logger = logging.getLogger("flwr")


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


def completed(run: Run, arrays: ArrayRecord, averaged: bool = True) -> ArrayRecord:
    """Return the model with averaged BN parts and re-estimated statistics, if used.

    The averages are used if ``averaged`` and a test asks for them. The statistics are
    used if the run uses them in every test.
    """
    entries = dict(completing_entries(run, SHARED_BN)) if averaged else {}
    if run.methods.reestimates:
        entries |= run.reestimated
    return ArrayRecord({**arrays, **to_record(entries)}) if entries else arrays


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
    if number:
        warn_of_nothing_shared(run)
    return completed(run, arrays)


def warn_of_nothing_shared(run: Run) -> None:
    """Warn, after a round, if a test needs averages and there are none."""
    if SHARED_BN in run.methods.tests and not run.kept.shared.tree:
        logger.warning(
            "no client has shared its BN parts, but eval_on='averaged-bn' needs them:"
            " in tests and in the result they have their initial values. A client with"
            " its own training loop shares them if it trains inside `with"
            " bn_rules(...)`."
        )
