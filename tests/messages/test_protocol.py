"""Configs and answers are read back without a change."""

from __future__ import annotations

from dataclasses import replace

import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

from fedbn_flwr.messages.protocol import (
    Continuity,
    MessageConfig,
    NodeProperties,
    ReplyInfo,
    TrainConfig,
)


@pytest.mark.parametrize(
    "config",
    [
        MessageConfig(),
        MessageConfig(
            server_round=3,
            local_entries=("a.b", 'c"d'),
            local_sha256="",
            continuity=Continuity("r"),
        ),
        TrainConfig(
            server_round=2, hooks=("a", "b"), continuity=Continuity("r", (1, 2))
        ),
        TrainConfig(
            local_sha256="0" * 64, seed=3, frozen=True, attempt=0, extras=("a,b",)
        ),
    ],
)
def test_a_config_comes_back(config: MessageConfig) -> None:
    record = ConfigRecord({**config.write(), "a-users-key": 1})
    assert type(config).read(record) == config


def test_what_is_not_said_is_not_written() -> None:
    assert TrainConfig().write() == {"server-round": 1}
    assert MessageConfig.read({}) == MessageConfig()
    assert ReplyInfo().write() == {}


def reply(records) -> Message:
    return Message(RecordDict(records), reply_to=Message(RecordDict(), 1, "query"))


@pytest.mark.parametrize(
    "properties",
    [
        NodeProperties(),
        NodeProperties(0, 5, 2),
        NodeProperties(1, 0, None, "no data"),
        NodeProperties(2, num_partitions=3),
    ],
)
def test_a_nodes_properties_come_back(properties: NodeProperties) -> None:
    assert NodeProperties.read(reply(properties.write())) == properties


def test_numbers_below_zero_are_not_said() -> None:
    numbers = {"partition-id": -1, "num-examples": 3, "batch-size": 2.5}
    said = NodeProperties.read(reply({"metrics": MetricRecord(numbers)}))
    assert said == NodeProperties(num_examples=3)


@pytest.mark.parametrize(
    "info",
    [
        ReplyInfo(),
        ReplyInfo(local_sha256="ab"),
        ReplyInfo(frozenset(), "ab", True, True),
    ],
)
@pytest.mark.parametrize("partition_id", [None, 0, 3])
def test_what_a_client_part_says_comes_back(
    info: ReplyInfo, partition_id: int | None
) -> None:
    named = {} if partition_id is None else {"partition-id": partition_id}
    said = reply({"properties": ConfigRecord(info.write() | named)})
    assert ReplyInfo.read(said) == replace(info, partition_id=partition_id)
