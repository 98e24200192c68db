"""The data that a NumPyClient gets from a message and sends in a reply."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from fedbn_flwr.compat.flower import identify_process
from fedbn_flwr.errors import StateError
from fedbn_flwr.messages.numpy_client import (
    describe,
    open_message,
    reply_to_evaluate,
    reply_to_fit,
)
from fedbn_flwr.messages.protocol import INFO
from fedbn_flwr.messages.records import to_record


def test_arrays_of_a_message_are_copies_or_on_request_views() -> None:
    record = to_record({"w": np.arange(3.0)})
    identify_process(1)
    message = Message(
        RecordDict({"arrays": record, "config": ConfigRecord()}), 1, MessageType.TRAIN
    )
    raw = np.frombuffer(record["w"].data, np.uint8)
    (copy,), config = open_message(message)
    (shared,), same = open_message(message, copy=False)
    assert config == same
    assert np.array_equal(copy, shared)
    assert (copy.flags.writeable, np.shares_memory(copy, raw)) == (True, False)
    assert (shared.flags.writeable, np.shares_memory(shared, raw)) == (False, True)


def test_metrics_of_numpy_and_torch_are_sent_as_pythons_and_nothing_is_left_out() -> (
    None
):
    identify_process(1)
    message = Message(
        RecordDict({"arrays": to_record({"w": np.zeros(1)})}), 1, MessageType.TRAIN
    )
    mean = np.float32(0.5)
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
    assert dict(
        describe(message, {"num-examples": np.int64(7)}).content["metrics"]
    ) == {"num-examples": 7}
    with pytest.raises(
        StateError,
        match=(
            r"^fit returned best=\{'loss': 1\}, a dict. Only numbers, lists of numbers,"
            r" text"
        ),
    ):
        reply_to_fit(message, [np.zeros(1)], 7, {"best": {"loss": 1}})


def test_what_a_client_returns_counts_and_not_a_metric_of_that_name() -> None:
    identify_process(1)
    message = Message(
        RecordDict({"arrays": to_record({"w": np.zeros(1)})}), 1, MessageType.TRAIN
    )
    fit = reply_to_fit(message, [np.zeros(1)], 7, {"num-examples": 1})
    test = reply_to_evaluate(message, 0.25, 7, {"loss": 99.0, "num-examples": 1})
    assert dict(fit.content["metrics"]) == {"num-examples": 7}
    assert dict(test.content["metrics"]) == {"num-examples": 7, "loss": 0.25}
