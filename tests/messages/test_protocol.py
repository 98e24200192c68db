"""The protocol is one module; keys are declared once and have a type."""

from __future__ import annotations

import copy
import importlib
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, MessageType, MetricRecord, RecordDict

import fedbn_flwr
from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.protocol import (
    Continuity,
    EvaluateConfig,
    Key,
    MessageConfig,
    NodeProperties,
    ReplyInfo,
    TrainConfig,
)

PACKAGE = Path(fedbn_flwr.__file__).parent


def declared() -> list[Key]:
    """Return the key objects of the protocol, methods and options, each once."""
    found = {
        id(value): value for value in vars(protocol).values() if isinstance(value, Key)
    }
    for folder in ("strategies", "server"):
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            parts = path.relative_to(PACKAGE).with_suffix("").parts
            module = importlib.import_module(".".join(("fedbn_flwr", *parts)))
            for value in vars(module).values():
                if isinstance(value, Key):
                    found[id(value)] = value
    return list(found.values())


KEYS = declared()


def test_a_key_is_declared_once() -> None:
    assert len(KEYS) == len(set(KEYS))


def test_every_key_without_a_prefix_has_a_row_in_the_table() -> None:
    text = (PACKAGE.parent / "docs/reference/python.md").read_text()
    page = text.partition("<!-- keys -->")[2].partition("<!-- /keys -->")[0]
    rows = [
        line.split("|")[1].strip(" `")
        for line in page.splitlines()
        if line.startswith("| `")
    ]
    internal = f", in {protocol.PREFIX}"  # inside an internal record
    assert sorted(rows) == sorted(
        key
        for key in KEYS
        if not key.startswith(protocol.PREFIX) and internal not in key.kind
    )


def test_keys_added_to_a_users_config_have_the_prefix() -> None:
    # the key of Flower and the key of the caller
    not_added = {"server-round", "test-sets"}
    scalars = [
        key for key in KEYS if "Record" not in key.kind and "message" not in key.kind
    ]
    added = [
        key for key in scalars if "server" in key.writer and "client" in key.reader
    ]
    assert added
    assert {key for key in added if not key.startswith(protocol.PREFIX)} == not_added


def test_a_copy_of_a_key_is_a_plain_name() -> None:
    key = protocol.SERVER_ROUND
    for copied in (copy.deepcopy(key), pickle.loads(pickle.dumps(key))):
        assert copied == key
        assert type(copied) is str


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
        EvaluateConfig(local_sha256="0" * 64, test_sets=("own", "global")),
    ],
)
def test_a_config_comes_back(config: MessageConfig) -> None:
    record = ConfigRecord({**config.write(), "a-users-key": 1})
    assert type(config).read(record) == config


def test_what_is_not_said_is_not_written() -> None:
    assert TrainConfig().write() == {"server-round": 1}
    assert MessageConfig.read({}) == MessageConfig()
    assert ReplyInfo().write() == {}


@pytest.fixture
def message() -> Message:
    # The grid gives this process Flower's identity.
    with InProcessGrid(lambda message, context: message, 1) as grid:
        return Message(RecordDict(), grid.get_node_ids()[0], MessageType.QUERY)


@pytest.mark.parametrize(
    "properties",
    [
        NodeProperties(),
        NodeProperties(0, 5, 2),
        NodeProperties(1, 0, None, "no data"),
        NodeProperties(2, num_partitions=3),
    ],
)
def test_a_nodes_properties_come_back(
    message: Message, properties: NodeProperties
) -> None:
    assert (
        NodeProperties.read(Message(RecordDict(properties.write()), reply_to=message))
        == properties
    )


def test_numbers_below_zero_are_not_said(message: Message) -> None:
    records = {
        "metrics": MetricRecord(
            {"partition-id": -1, "num-examples": 3, "batch-size": 2.5}
        )
    }
    assert NodeProperties.read(
        Message(RecordDict(records), reply_to=message)
    ) == NodeProperties(num_examples=3)


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
    message: Message, info: ReplyInfo, partition_id: int | None
) -> None:
    named: Any = {} if partition_id is None else {"partition-id": partition_id}
    properties = ConfigRecord(info.write() | named)
    reply = Message(RecordDict({"properties": properties}), reply_to=message)
    assert ReplyInfo.read(reply) == replace(info, partition_id=partition_id)
