"""The replayed step and the replay log that a client keeps between the messages of a round."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict

from fedbn_flwr.client.replay_log import clear_log, log_answer, replay
from fedbn_flwr.errors import StateError
from fedbn_flwr.transport import NextExchange, Replay, StopStep

MODEL = {"w": np.arange(3.0), "n": np.array(4)}


def test_a_replay_answers_from_the_log_and_stops_at_its_end() -> None:
    reducer = Replay({"mean/0": torch.ones(2)}, union_batch_size=9)
    assert reducer.begin() == 9
    assert torch.equal(reducer.reduce("mean/0", torch.zeros(2)), torch.ones(2))
    with pytest.raises(StopStep) as stop:
        reducer.reduce("variance/0", torch.full((2,), 5.0))
    assert list(stop.value.exchange.tensors) == ["variance/0"]
    assert torch.equal(stop.value.exchange.tensors["variance/0"], torch.full((2,), 5.0))
    reducer.close()
    with pytest.raises(StopStep) as done:
        Replay({}, union_batch_size=9, step_only=True).close()
    assert done.value.exchange == NextExchange({})
    assert not isinstance(done.value, Exception), "a user's `except Exception` lets it pass"


@pytest.fixture
def context() -> Context:
    return Context(1, 1, {}, RecordDict(), {})


def message(arrays, *, server_round: int = 1, attempt: int = 0, union: int = 9):
    config = {"server-round": server_round, "fedbn-flwr.fedtan-attempt": attempt, "fedbn-flwr.fedtan-union": union}
    return list(arrays.values()), {**config, "fedbn-flwr.array-names": json.dumps(list(arrays))}


def received(context: Context, arrays, **about) -> tuple[dict, dict]:
    """Return the model and the answers that a client has after a message."""
    parameters, config = log_answer(context, *message(arrays, **about))
    reducer = replay(context, config)
    assert reducer.begin() == about.get("union", 9)
    return dict(zip(json.loads(config["fedbn-flwr.array-names"]), parameters, strict=True)), {
        tag: reducer.reduce(tag, torch.zeros(1)).tolist() for tag in ("mean/0", "variance/0") if tag in reducer._answers
    }


def same_model(model) -> bool:
    return list(model) == list(MODEL) and all(
        np.array_equal(model[name], MODEL[name]) and model[name].dtype == MODEL[name].dtype for name in MODEL
    )


def test_the_model_and_every_answer_are_sent_once(context) -> None:
    model, answers = received(context, MODEL)
    assert same_model(model)
    assert answers == {}
    for given, known in (
        ({"fedtan/mean/0": np.ones(1)}, {"mean/0": [1.0]}),
        ({"fedtan/variance/0": np.zeros(1)}, {"mean/0": [1.0], "variance/0": [0.0]}),
    ):
        model, answers = received(context, given)
        assert same_model(model)
        assert answers == known


def test_a_new_attempt_drops_the_answers_and_a_new_round_the_model(context) -> None:
    received(context, MODEL)
    received(context, {"fedtan/mean/0": np.ones(1)})
    model, answers = received(context, {}, attempt=1, union=5)
    assert same_model(model)
    assert answers == {}
    received(context, {"fedtan/mean/0": np.ones(1)}, attempt=1)
    _, answers = received(context, {**MODEL, "w": np.zeros(3)}, server_round=2)
    assert answers == {}
    with pytest.raises(StateError, match="the model of round 3 came in an earlier message"):
        log_answer(context, *message({"fedtan/mean/0": np.ones(1)}, server_round=3))


def test_a_finished_round_leaves_nothing_behind(context) -> None:
    received(context, MODEL)
    received(context, {"fedtan/mean/0": np.ones(1)})
    clear_log(context)
    assert len(context.state) == 0
    clear_log(context)
    clear_log(None)


def test_without_a_context_there_is_no_replay_log() -> None:
    with pytest.raises(StateError, match="FedTAN by messages keeps the step in the client's Context"):
        log_answer(None, *message(MODEL))
