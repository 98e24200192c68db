"""The data that a NumPyClient gets from a message and sends in a reply."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict

from fedbn_flwr.errors import StateError
from fedbn_flwr.messages.numpy_client import (
    describe,
    open_message,
    reply_to_evaluate,
    reply_to_fit,
)
from fedbn_flwr.messages.protocol import INFO
from fedbn_flwr.messages.records import to_record


def training() -> Message:
    """Return a training message with an array."""
    arrays = to_record({"w": np.arange(3.0)})
    return Message(RecordDict({"arrays": arrays, "config": ConfigRecord()}), 1, "train")


def test_arrays_of_a_message_are_copies_or_on_request_views() -> None:
    message = training()
    raw = np.frombuffer(message.content["arrays"]["w"].data, np.uint8)
    (copy,), config = open_message(message)
    (shared,), same = open_message(message, copy=False)
    assert config == same
    assert np.array_equal(copy, shared)
    assert (copy.flags.writeable, np.shares_memory(copy, raw)) == (True, False)
    assert (shared.flags.writeable, np.shares_memory(shared, raw)) == (False, True)


def test_metrics_of_numpy_and_torch_are_sent_as_pythons_and_nothing_is_left_out() -> (
    None
):
    message, mean = training(), np.float32(0.5)
    metrics = {
        "loss": mean,
        "n": np.int64(3),
        "t": torch.tensor(0.25),
        "each": [1, 2.0],
        "counts": (True, 2),
        "all": np.ones(2),
        "who": "me",
    }
    sent = {
        "loss": 0.5,
        "n": 3,
        "t": 0.25,
        "each": [1.0, 2.0],
        "counts": [1, 2],
        "all": [1.0, 1.0],
    }
    for reply in (
        reply_to_fit(message, [np.zeros(1)], 7, metrics),
        reply_to_evaluate(message, mean, 7, metrics),
    ):
        assert dict(reply.content["metrics"]) == {"num-examples": 7, **sent}
        assert dict(reply.content[INFO]) == {"who": "me"}
    about = describe(message, {"num-examples": np.int64(7)})
    assert dict(about.content["metrics"]) == {"num-examples": 7}
    said = r"^fit returned best=\{'loss': 1\}, a dict. Only numbers, lists of numbers, text"
    with pytest.raises(StateError, match=said):
        reply_to_fit(message, [np.zeros(1)], 7, {"best": {"loss": 1}})


def test_what_a_client_returns_counts_and_not_a_metric_of_that_name() -> None:
    fit = reply_to_fit(training(), [np.zeros(1)], 7, {"num-examples": 1})
    test = reply_to_evaluate(training(), 0.25, 7, {"loss": 99.0, "num-examples": 1})
    assert dict(fit.content["metrics"]) == {"num-examples": 7}
    assert dict(test.content["metrics"]) == {"num-examples": 7, "loss": 0.25}
