"""The protocol has one place: keys are declared once, read and written by type, and written nowhere else as strings."""

from __future__ import annotations

import ast
import copy
import importlib
import pickle
from collections.abc import Iterator
from pathlib import Path

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
COMMON = {name: key for name, key in vars(protocol).items() if isinstance(key, Key)}
# These files read and write formats of their own (config files, metrics.jsonl, summary.json, the channel's frames),
# some of whose names are the same words. They may not touch a message or a Context.state, which the test checks.
OTHER_FORMATS = {
    *(f"lab/runs/{name}.py" for name in ("cluster", "simulation")),
    *("lab/partitioned/splitting.py", "lab/finished_runs/evaluate.py"),
    *(f"lab/config/{name}.py" for name in ("config", "fields", "method_settings", "unused")),
    *(f"lab/output/{name}.py" for name in ("checkpoint", "curves", "folder")),
    *(f"lab/studies/{name}.py" for name in ("results", "sweep")),
    "lab/cli/console.py",
    *("transport/grpc_channel.py", "client/state_folder.py", "engines/flower_run.py"),
}


TORCH_ONLY = ("training", "norms", "batchnorm", "lab/data", "lab/models", "doctor")  # packages that know no message
TORCHS_OWN = {("strategies/scaffold.py", "momentum")}  # a setting of torch's SGD


def declared_in(path: Path) -> set[str]:
    """The keys that a file declares, and so may write."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name))
    return {node.args[0].value for node in calls if node.func.id == "Key" and isinstance(node.args[0], ast.Constant)}


def keys_of_methods() -> dict[Key, list[str]]:
    """The keys that methods and options declare, and the modules that do so."""
    modules: dict[Key, list[str]] = {}
    for path in sorted([*PACKAGE.glob("strategies/*.py"), *PACKAGE.glob("server/*.py")]):
        if declared := declared_in(path):
            module = importlib.import_module(f"fedbn_flwr.{path.parent.name}.{path.stem}")
            for key in (value for value in vars(module).values() if isinstance(value, Key) and value in declared):
                modules.setdefault(key, []).append(module.__name__)
    return modules


METHODS = keys_of_methods()


def strings_used_as_keys(tree: ast.AST) -> Iterator[ast.Constant]:
    """Constants where a key stands: an index, an entry of a dict, an argument of get, pop or setdefault, an ``in``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript):
            places = [node.slice]
        elif isinstance(node, ast.Dict):
            places = [key for key in node.keys if key is not None]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            places = node.args[:1] if node.func.attr in ("get", "pop", "setdefault") else []
        elif isinstance(node, ast.Compare) and any(isinstance(op, ast.In | ast.NotIn) for op in node.ops):
            places = [node.left]
        else:
            continue
        yield from (place for place in places if isinstance(place, ast.Constant) and isinstance(place.value, str))


def test_no_key_is_written_outside_its_declaration() -> None:
    """Hyphenated names may stand nowhere as a string; ordinary words not where a key stands."""
    every = {str(key) for key in (*COMMON.values(), *METHODS)}
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        if name in OTHER_FORMATS or name == "messages/protocol.py" or name.startswith(TORCH_ONLY):
            continue
        tree, own = ast.parse(path.read_text(encoding="utf-8")), declared_in(path)
        documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        constants = {id(node): node for node in strings_used_as_keys(tree)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
                is_key = id(node) in constants or "-" in node.value or "." in node.value
                if is_key and node.value in every - own and (name, node.value) not in TORCHS_OWN:
                    wrong.append(f"{name}:{node.lineno} writes {node.value!r}")
    assert wrong == []


def test_files_of_other_formats_touch_no_message() -> None:
    words = ("config_records", "metric_records", "array_records", "RecordDict(", "context.state")
    wrong = [f"{n}: {word}" for n in OTHER_FORMATS for word in words if word in (PACKAGE / n).read_text()]
    assert wrong == []
    assert all((PACKAGE / name).is_file() for name in OTHER_FORMATS)


def test_a_key_is_declared_once() -> None:
    assert len(set(COMMON.values())) == len(COMMON)
    assert not set(COMMON.values()) & set(METHODS)
    assert {key: modules for key, modules in METHODS.items() if len(modules) > 1} == {}


def test_every_key_has_a_row_in_the_table() -> None:
    page = (PACKAGE.parent / "docs/reference/messages.md").read_text()
    rows = [line.split("|")[1].strip(" `") for line in page.splitlines() if line.startswith("| `")]
    assert sorted(rows) == sorted({*COMMON.values(), *METHODS})


def test_keys_added_to_a_users_config_have_the_prefix() -> None:
    not_added = {"server-round", "test-sets"}  # Flower's own, and the caller's
    scalars = [key for key in (*COMMON.values(), *METHODS) if "Record" not in key.kind and "message" not in key.kind]
    added = [key for key in scalars if "server" in key.writer and "client" in key.reader]
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
        MessageConfig(server_round=3, local_entries=("a.b", 'c"d'), local_sha256="", continuity=Continuity("s", "r")),
        TrainConfig(server_round=2, hooks=("a", "b"), continuity=Continuity("s", "r", (1, 2))),
        TrainConfig(frozen=True, attempt=0, fresh_batches=2),
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
    with InProcessGrid(lambda message, context: message, 1) as grid:  # gives this process Flower's identity
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
def test_a_nodes_properties_come_back(message: Message, properties: NodeProperties) -> None:
    assert NodeProperties.read(Message(RecordDict(properties.write()), reply_to=message)) == properties


def test_numbers_below_zero_are_not_said(message: Message) -> None:
    records = {"metrics": MetricRecord({"partition-id": -1, "num-examples": 3, "batch-size": 2.5})}
    assert NodeProperties.read(Message(RecordDict(records), reply_to=message)) == NodeProperties(num_examples=3)


@pytest.mark.parametrize("info", [ReplyInfo(), ReplyInfo(local_sha256="ab"), ReplyInfo(frozenset(), "ab", True, True)])
def test_what_a_client_part_says_comes_back(message: Message, info: ReplyInfo) -> None:
    reply = Message(RecordDict({"properties": ConfigRecord(info.write())}), reply_to=message)
    assert ReplyInfo.read(reply) == info
