"""The server reads replies in place, with the memory of a few models.

The memory does not depend on the number of replies.
"""

from __future__ import annotations

import tracemalloc

import numpy as np
from flwr.app import Message, MessageType, MetricRecord, RecordDict

from fedbn_flwr.batchnorm.averaging import average
from fedbn_flwr.batchnorm.parts import Part, split_state
from fedbn_flwr.messages.records import encode, to_record
from fedbn_flwr.server.methods.method import Facts, Node
from fedbn_flwr.server.methods.phases import Extra, Phase
from fedbn_flwr.server.methods.shared_bn import LatestBN
from fedbn_flwr.server.rounds.replies import Terms, read_arrays

STATE = {
    **{f"{i}.weight": np.ones((256, 512), np.float32) for i in range(3)},
    "bn.running_mean": np.zeros(512, np.float32),
    "bn.running_var": np.ones(512, np.float32),
    "bn.num_batches_tracked": np.asarray(3),
}
SIZE = sum(array.nbytes for array in STATE.values())
MORE = Extra("more", "trainable", "")
PHASE = Phase(local=frozenset({Part.COUNTERS}), extras=(MORE,))
TERMS = Terms(
    strategy="fedavg",
    facts=Facts(1, None, split_state(STATE), STATE, PHASE),
    hooks=frozenset(),
    arrays_key="arrays",
    count_key="num-examples",
)


def reply(value: float) -> Message:
    state = {
        name: (array * value).astype(array.dtype)
        for name, array in STATE.items()
        if array.ndim
    }
    content = RecordDict({"arrays": to_record(state), "more": to_record(state)})
    content["metrics"] = MetricRecord({"num-examples": 2})
    return Message(content, 1, MessageType.TRAIN)


def test_reading_checking_averaging_and_writing_takes_less_than_three_models_for_any_number_of_replies() -> (
    None
):
    messages = [reply(1.0 + i) for i in range(12)]
    tracemalloc.start()
    try:
        replies = [TERMS.read(Node(i), message) for i, message in enumerate(messages)]
        mean = average(
            [read.state for read in replies],
            [read.num_examples for read in replies],
            TERMS.facts.parts,
        )
        averaging = tracemalloc.get_traced_memory()[1]
        record = to_record(mean)
        everything = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    blocks = 2 * 2**18 * 8
    assert averaging < 1.1 * SIZE + blocks
    assert everything < 2.1 * SIZE + blocks
    assert record["0.weight"].data == encode(STATE["0.weight"] * np.float32(6.5)).data


def test_parts_that_the_server_keeps_do_not_hold_on_to_the_message() -> None:
    """The parts stay until the client's next reply.

    The message may be in memory that a client's process shares.
    """
    message, latest = reply(2.0), LatestBN()
    state, _, _ = read_arrays(message, "arrays", like={})
    ((_, _, kept, _),) = latest.with_latest([((False, 0, 7), state, 2.0)]).tree
    for name, array in state.items():
        assert np.array_equal(kept[name], array)
        assert not np.shares_memory(kept[name], array)


def test_the_latest_parts_of_clients_without_a_partition_id_are_by_node() -> None:
    """The sum is in the order of partition ids, and nodes without an id come last."""
    named, other, silent = Node(8, 1), Node(5, 0), [Node(9), Node(4)]
    latest = LatestBN()
    for nodes in ([named, *silent], [other, silent[0]], [Node(6, 1)]):
        sent = [(one.order, {"w": np.ones(1) * one.node_id}, 2.0) for one in nodes]
        latest = latest.with_latest(sent)
    # The node of partition 1 has restarted with another id.
    assert [int(state["w"][0]) for state, _ in latest.latest] == [5, 6, 4, 9]
