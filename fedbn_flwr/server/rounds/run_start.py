"""The checks and the warnings before the first round of a run."""

from __future__ import annotations

import logging

from fedbn_flwr.batchnorm.check_state import check_state
from fedbn_flwr.batchnorm.parts import Part
from fedbn_flwr.compat.flower import DP_WRAPPERS, calling_object
from fedbn_flwr.errors import ConfigError, ReplyError
from fedbn_flwr.problems import Known, raise_or_warn
from fedbn_flwr.server.methods.check_protections import of_wrapper
from fedbn_flwr.server.methods.shared_bn import SHARED_BN
from fedbn_flwr.server.runs.run_state import Run

logger = logging.getLogger("flwr")


def begin(run: Run, *, is_new: bool, completes_tests: bool, own: str) -> None:
    """Check the settings and the model, and begin the run.

    Args:
        run: the run.
        is_new: whether the initial values are checked. The model of a checkpoint may
            have diverged (on_divergence=continue).
        completes_tests: see ``Strategy``.
        own: the user's own function that saves or tests the model, "start" or
            "aggregate_train", or "".

    Raises:
        ConfigError: a setting or the model does not fit, or a value is not finite.
    """
    if is_new:
        # Compare the state with itself, so that only non-finite values can be wrong.
        try:
            check_state(run.round.before, run.round.before, run.parts)
        except ReplyError as error:
            raise ConfigError(
                f"initial_arrays: {error}. Every reply with such a value would be"
                " refused. To keep a constant, such as a mask of -inf, out of the state"
                " dict, use register_buffer(..., persistent=False)"
            ) from None
    methods = run.methods
    known = Known(
        num_rounds=run.start.num_rounds,
        recorded=not completes_tests,
        weighted_by_key=run.options.weighted_by_key,
        parts=run.parts,
        shapes=run.start.shapes,
    )
    methods.raise_or_warn(known, ["run", "model"])
    run.start.begun = True
    facts = run.facts(0)
    run.states = {method.name: method.begin(facts) for method in methods}
    run.protection.begin(methods)

    # Warn about surprises in the model that the run returns.
    stay = run.local_entries
    if completes_tests and stay and SHARED_BN not in run.methods.tests:
        advice = "evaluation on the clients tests each client with its own values."
        # If the clients keep the whole model, an average cannot complete a global model.
        if Part.REST not in run.methods.local:
            average = (
                "eval_on='averaged-bn' uses the average of the clients' values there;"
            )
            advice = f"{average} {advice}"
        # A protection refuses this average, and does not ask clients for tests.
        if not run.protection.publishes_metrics:
            advice = "Each client can test its own model in its training function."
        logger.warning(
            "strategy %r keeps %d of the model's entries with its clients (%r, ...): in"
            " evaluate_fn and in the final arrays they have their untrained initial values."
            " %s",
            run.methods.name,
            len(stay),
            stay[0],
            advice,
        )
    if completes_tests and own:
        _warn_of_own_code(run, own)


def check_wrapper(run: Run) -> None:
    """Refuse a strategy of Flower around this strategy if it does not suit the run."""
    # Look for Flower's wrapper on the call stack, because the wrapped strategy has no
    # other sign of it.
    caller = calling_object(DP_WRAPPERS)
    if caller is not None:
        wrapper = type(caller).__name__
        raise_or_warn(of_wrapper(wrapper, run.methods, run.parts))


def _warn_of_own_code(run: Run, own: str) -> None:
    """Warn that the user's own function gets a model that is not complete."""
    if SHARED_BN in run.methods.tests or run.methods.reestimates:
        logger.warning(
            "strategy %r re-estimates or averages BN entries for tests, but your own"
            " %s() gets a model without these entries. After configure_evaluate, call"
            " strategy.for_evaluate_fn(server_round, arrays), because it returns the"
            " model with them, or pass on_round_end= to the strategy.",
            run.methods.name,
            own,
        )
    if run.methods.whole.class_moments and own == "start":
        logger.warning(
            "class_moments=True has no effect, because this run uses your own start()."
            " Use the start() of the strategy."
        )
