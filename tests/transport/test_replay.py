"""A client keeps a replay log between the messages of a round.

tests/strategies/test_fedtan_dropouts.py shows that a replay has the bits of an
uninterrupted step.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from fedbn_flwr.client.replay_log import (
    Replay,
    clear_log,
    log_answer,
    log_sent,
    reducer_of,
)
from fedbn_flwr.errors import DataError, StateError
from tests.support.in_process import empty_context

MODEL = {"w": np.arange(3.0), "n": np.array(4)}
ANSWER = {"fedtan/mean/0": np.ones(1)}


def message(arrays: dict, server_round: int, attempt: int = 0) -> tuple[list, dict]:
    return list(arrays.values()), {
        "server-round": server_round,
        "fedbn-flwr.attempt": attempt,
        "fedbn-flwr.fedtan-union": 9,
        "fedbn-flwr.array-names": json.dumps(list(arrays)),
    }


def test_an_answer_without_the_model_of_its_round_is_refused(same_bits) -> None:
    context = empty_context()
    log_answer(context, *message(MODEL, 2))
    parameters, config = log_answer(context, *message(ANSWER, 2))
    names = json.loads(config["fedbn-flwr.array-names"])
    same_bits(dict(zip(names, parameters, strict=True)), MODEL)
    reducer = reducer_of(context, config)
    assert reducer.begin() == 9
    assert reducer.reduce("mean/0", torch.zeros(1)) == torch.ones(1)
    with pytest.raises(StateError, match="the model of round 3"):
        log_answer(context, *message(ANSWER, 3))
    clear_log(context)
    assert len(context.state) == 0


@pytest.mark.parametrize(
    "following",
    [(MODEL, 3, 0), (MODEL, 2, 1), (ANSWER, 2, 1)],
    ids=["the next round", "the same round again", "the next attempt"],
)
def test_a_step_that_begins_anew_is_compared_with_none_before_it(
    following: tuple[dict, int, int],
) -> None:
    """The first batch or the statistics of the first layers may differ."""
    context = empty_context()
    log_answer(context, *message(MODEL, 2))
    log_sent(context, {"mean/0": torch.zeros(1)})
    log_answer(context, *message(ANSWER, 2))
    log_answer(context, *message(*following))
    _, config = log_answer(context, *message(ANSWER, *following[1:]))
    assert reducer_of(context, config).reduce("mean/0", torch.ones(1)) == torch.ones(1)


@pytest.mark.parametrize("step_only", [True, False])
def test_another_first_batch_is_refused_also_where_the_training_goes_on(
    step_only: bool,
) -> None:
    answers, sent = {"mean/0": torch.ones(1)}, {"mean/0": torch.zeros(1)}
    reducer = Replay(answers, 9, sent, step_only)
    assert reducer.reduce("mean/0", torch.zeros(1)) == torch.ones(1)
    with pytest.raises(DataError, match="'mean/0'"):
        reducer.reduce("mean/0", torch.ones(1))
