"""What a NumPyClient is given of a message."""

from __future__ import annotations

import numpy as np
from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from fedbn_flwr.compat.flower import identify_process
from fedbn_flwr.messages.numpy_client import open_message
from fedbn_flwr.messages.records import to_record


def test_arrays_of_a_message_are_copies_or_on_request_views() -> None:
    record = to_record({"w": np.arange(3.0)})
    identify_process(1)
    message = Message(RecordDict({"arrays": record, "config": ConfigRecord()}), 1, MessageType.TRAIN)
    raw = np.frombuffer(record["w"].data, np.uint8)
    (copy,), config = open_message(message)
    (shared,), same = open_message(message, copy=False)
    assert config == same
    assert np.array_equal(copy, shared)
    assert (copy.flags.writeable, np.shares_memory(copy, raw)) == (True, False)
    assert (shared.flags.writeable, np.shares_memory(shared, raw)) == (False, True)
