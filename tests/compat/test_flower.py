"""Canaries for the internals of Flower that ``compat/flower.py`` uses.

Each test has the name of a function there, and its docstring states the fact that must
remain true. If a test fails, mend that function. A function without a test fails in
every run of the in-process engine. If the package can no longer be imported, run the
tests with ``pytest --noconftest tests/compat/test_flower.py``: the first test then
names the moved imports.
"""

from __future__ import annotations

import ast
import copy
import functools
import importlib
import importlib.util
import inspect
import pickle
import queue
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import flwr
import httpx
import numpy as np
import pytest
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, message_size_mod
from flwr.common import ndarrays_to_parameters
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.serverapp.strategy import FedAvg

SEAM = "fedbn_flwr/compat/flower.py"
SPEC = find_spec("fedbn_flwr")
assert SPEC is not None
assert SPEC.origin is not None
PACKAGE = Path(SPEC.origin).parent  # found without importing it
ADAPTERS = (
    PACKAGE / "compat",
    PACKAGE / "legacy",
)  # Flower's internals and its older loop
RELEASE = tuple(int(number) for number in flwr.__version__.split(".")[:2])
# Compare the number, because a version that moves them must fail.
RECENT = pytest.mark.skipif(RELEASE < (1, 40), reason="internals of recent Flower")


@pytest.fixture
def seam() -> ModuleType:
    return importlib.import_module("fedbn_flwr.compat.flower")


@pytest.fixture
def message(seam) -> Message:
    seam.identify_process(1)
    content = RecordDict({"config": ConfigRecord({"lr": 0.1})})
    return Message(content, 4, MessageType.TRAIN, ttl=60, group_id="3")


def metadata(message: Message) -> dict:
    """Return the public values of a message's metadata."""
    found = inspect.getmembers(
        type(message.metadata), lambda value: isinstance(value, property)
    )
    return {name: getattr(message.metadata, name) for name, _ in found}


def imported(path: Path) -> Iterator[tuple[str, str, int]]:
    """Yield (module, name or "", line) of every import of Flower in a file.

    Imports inside functions are included.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [(node.module or "", alias.name) for alias in node.names]
        else:
            continue
        for module, name in found:
            if module.split(".")[0] in ("flwr", "flwr_datasets"):
                yield module, name, node.lineno


@RECENT
def test_every_name_is_where_it_was() -> None:
    """A name may have an old and a new place, and one of them must exist."""
    places = defaultdict(set)
    for path in (path for room in ADAPTERS for path in room.glob("*.py")):
        for module, name, _ in imported(path):
            places[path.name, name].add(module)
    for place, modules in places.items():
        found = [importlib.import_module(module) for module in modules]
        assert any(hasattr(module, place[1]) for module in found), (place, modules)


@RECENT
def test_identify_process(seam, monkeypatch) -> None:
    """TaskIdentity's ids raise RuntimeError until they are set.

    Messages contain the ids.
    """
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(seam.TaskIdentity, name, None)
    with pytest.raises(RuntimeError):
        Message(RecordDict(), 4, MessageType.TRAIN)
    seam.identify_process(5)
    made = Message(RecordDict(), 4, MessageType.TRAIN).metadata
    assert (made.run_id, made.src_node_id) == (5, seam.SUPERLINK_NODE_ID)
    seam.identify_process(6)
    assert seam.TaskIdentity.run_id == 5


@RECENT
def test_on_network_node(seam, monkeypatch) -> None:
    """Flwr-clientapp notes the node's id in TaskIdentity, and simulation does not."""
    clientapp = importlib.import_module("flwr.supernode.runtime.run_clientapp")
    assert "TaskIdentity.node_id = res.context.node_id" in inspect.getsource(clientapp)
    actor = importlib.import_module("flwr.simulation.ray_transport.ray_actor")
    assert "TaskIdentity" not in inspect.getsource(actor)
    for node_id, on_node in ((None, False), (seam.SUPERLINK_NODE_ID, False), (7, True)):
        monkeypatch.setattr(seam.TaskIdentity, "_node_id", node_id)
        assert seam.on_network_node() is on_node


ENGINES = {
    "InMemoryGrid": "flwr.simulation.run_simulation",
    "HttpGrid": "flwr.superlink.runtime.run_serverapp",
    "GrpcGrid": "",  # the name of HttpGrid before Flower 1.31
}


@RECENT
@pytest.mark.parametrize("name", ENGINES)
def test_grids(seam, name: str) -> None:
    """Each engine makes the grid of this name. Older grids are in flwr.server.grid.

    A class of a user may have the same name.
    """
    grid = type(name, (), {"__module__": "flwr.server.grid"})()
    if engine := ENGINES[name]:
        module = importlib.import_module(engine)
        assert f"{name}(" in inspect.getsource(module)
        grid = object.__new__(getattr(module, name))
    assert seam.is_simulation_grid(grid) is (name == "InMemoryGrid")
    assert seam.is_network_grid(grid) is (name != "InMemoryGrid")
    theirs = type(name, (), {})()
    assert not seam.is_simulation_grid(theirs)
    assert not seam.is_network_grid(theirs)


@pytest.mark.parametrize("command", ["flwr-clientapp", "pytest"])
def test_a_process_without_identity(command: str, monkeypatch) -> None:
    """Before Flower 1.38 TaskIdentity does not exist.

    The command's name identifies a node.
    """
    monkeypatch.setitem(sys.modules, "flwr.supercore.task_identity", None)
    monkeypatch.setattr(sys, "argv", [f"/bin/{command}"])
    spec = importlib.util.spec_from_file_location("_seam", PACKAGE.parent / SEAM)
    assert spec is not None
    assert spec.loader is not None
    seam = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(seam)
    seam.identify_process(5)
    assert seam.on_network_node() is (command == "flwr-clientapp")


def test_a_copy_is_equal_and_its_own(seam, message) -> None:
    """Metadata.__dict__ contains all public values of a message's metadata."""
    lists = {"config": ConfigRecord({"rates": [0.1]}), "w": ArrayRecord([np.ones(1)])}
    message.content.update({**lists, "metrics": MetricRecord({"losses": [0.1]})})
    context = Context(1, 1, {"a": 1}, message.content, {"b": 2})
    told, records = metadata(message), repr(message.content)
    copied, of = seam.copied_message(message), seam.copied_context(context)
    assert metadata(copied) == told
    assert repr(copied.content) == repr(of.state) == records
    assert (of.node_config, of.run_config) == ({"a": 1}, {"b": 2})
    copied.metadata.dst_node_id = 5
    copied.metadata.__dict__["_message_id"] = "second"
    for content in (copied.content, of.state):
        content["config"]["rates"].append(0.2)
        content["metrics"]["losses"].append(0.2)
        content["w"].clear()
        content["more"] = ConfigRecord()
    of.node_config["c"] = of.run_config["c"] = 3
    assert (metadata(message), repr(message.content)) == (told, records)
    assert (context.node_config, context.run_config) == ({"a": 1}, {"b": 2})


def test_array_of_bytes(seam) -> None:
    """An Array is dtype, shape, stype and data, and notices its own changes."""
    like = Array(np.arange(6.0).reshape(2, 3))
    array = seam.array_of_bytes(like.dtype, like.shape, like.data)
    assert vars(array) == {
        name: value for name, value in vars(like).items() if name != "_is_dirty"
    }
    assert array == like
    assert (array.is_dirty, array.object_id) == (True, like.object_id)
    array.data = Array(np.zeros((2, 3))).data
    assert array.object_id != like.object_id
    assert seam.array_of_bytes("any", (), b"b", "own") == Array("any", (), "own", b"b")


def test_buffer_array(seam) -> None:
    """An Array is its dtype, shape, stype and data.

    Records and pickles copy them.
    """
    like = Array(np.arange(6.0).reshape(2, 3))
    array = seam.BufferArray(like.dtype, like.shape, like.stype, memoryview(like.data))
    assert isinstance(array, Array)
    assert array == like
    assert ArrayRecord({"w": array}) == ArrayRecord({"w": like})
    assert pickle.loads(pickle.dumps(array)) == copy.deepcopy(array) == like
    assert type(copy.deepcopy(array)) is Array


@RECENT
def test_proxy_error(seam, message) -> None:
    """A bridge of the older loop that is closed means that its client is lost."""
    bridge = importlib.import_module(
        "flwr.server.superlink.fleet.grpc_bidi.grpc_bridge"
    )
    lost = seam.proxy_error(message, bridge.GrpcBridgeClosed()).error
    failed = seam.proxy_error(message, ValueError("no data")).error
    assert lost.code == seam.ErrorCode.NODE_UNAVAILABLE
    assert failed.code == seam.ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    assert "no data" in failed.reason


def test_app_error(seam, message) -> None:
    """The reply for an app that raised is an error with that code and text.

    Flower's simulation makes this reply in its own worker.
    """
    stop, asked, answered = threading.Event(), queue.Queue(), queue.Queue()

    def process_message(*_: Any):
        stop.set()
        raise seam.ClientAppException("no data")

    worker = importlib.import_module("flwr.server.superlink.fleet.vce.vce_api").worker
    asked.put(message)
    backend = SimpleNamespace(process_message=process_message)
    worker(asked, answered, {4: MagicMock()}, backend, stop, MagicMock())
    theirs = answered.get(timeout=0).error
    ours = seam.app_error(message, ValueError("no data")).error
    assert (ours.code, ours.reason) == (theirs.code, theirs.reason)
    assert seam.app_error(message, "in words").error.reason == "in words"


def test_is_app_error_and_is_mod_refusal(seam, message) -> None:
    """The numbers travel. Numbers 3 to 5 are lost messages and nodes.

    A mod that expects one ArrayRecord replies with an error of its own code.
    """
    codes, context = seam.ErrorCode, Context(1, 1, {}, RecordDict(), {})
    lost = codes.MESSAGE_UNAVAILABLE, codes.REPLY_MESSAGE_UNAVAILABLE
    assert (*lost, codes.NODE_UNAVAILABLE) == (3, 4, 5)
    refused = LocalDpMod(1.0, 1.0, 1.0, 0.1)(message, context, lambda m, c: m)
    replies = [Message(Error(code, ""), reply_to=message) for code in (2, 3, 4, 5)]
    replies += [refused, Message(RecordDict(), reply_to=message)]
    assert [*map(seam.is_app_error, replies)] == [True] + [False] * 5
    assert [*map(seam.is_mod_refusal, replies)] == [False] * 4 + [True, False]


def test_address_reply(seam, message) -> None:
    """A reply to another message, or from another node, is changed to a right one."""
    message = seam.changed(message, message_id="asked")
    right = metadata(Message(RecordDict(), reply_to=message)) | {"message_id": "own"}
    for name, wrong in (
        ("message_id", ""),
        ("reply_to_message_id", "x"),
        ("src_node_id", 9),
    ):
        reply = Message(RecordDict(), reply_to=message)
        reply = seam.changed(reply, created_at=right["created_at"], ttl=right["ttl"])
        reply = seam.changed(reply, **{name: wrong})
        seam.address_reply(reply, message, "own")
        assert metadata(reply) == right


@pytest.mark.parametrize("of_app", range(4))
def test_earlier_and_later_mods(seam, message, of_app: int) -> None:
    """One function of make_ffn calls every mod, with _mod and _ffn in its closure."""
    found = []

    def noting(message: Message, context: Context, call_next: Any) -> Message:
        found.append((seam.earlier_mods(), *seam.later_mods(call_next)))
        return call_next(message, context)

    def function(message: Message, context: Context) -> Message:
        return message

    mods = [functools.partial(noting) for _ in range(3)]
    mods.insert(1, message_size_mod)
    app = ClientApp(mods=mods[:of_app])
    app.train(mods=mods[of_app:])(function)
    app(message, Context(1, 1, {}, RecordDict(), {}))
    assert found == [(at, mods[at + 1 :], function) for at in (0, 2, 3)]
    assert seam.earlier_mods() == 0
    assert seam.later_mods(function) == ([], function)


def test_loaded_apps(seam, tmp_path, monkeypatch) -> None:
    """The garbage collector finds each app when no module is being loaded."""
    late = "import time; app = ClientApp(); time.sleep(0.2); app.query()(print)"
    (tmp_path / "late.py").write_text(f"from flwr.clientapp import ClientApp; {late}")
    monkeypatch.syspath_prepend(tmp_path)
    thread = threading.Thread(target=lambda: importlib.import_module("late"))
    thread.start()
    while "late" not in sys.modules:
        time.sleep(0.001)
    apps = seam.loaded_apps(60)
    made = sys.modules.pop("late").app
    assert seam.has_function(made, "query.default")
    assert any(one is made for one in apps)
    thread.join()
    assert seam.loaded_apps(0) == []


def test_lacks_function(seam, message) -> None:
    """An app without a function for a message's action raises these words."""
    message.metadata.__dict__["_message_type"] = "query.some"
    with pytest.raises(ValueError) as error:
        ClientApp()(message, Context(1, 1, {}, RecordDict(), {}))
    failed = seam.app_error(message, error.value)
    kinds = ("query.some", "query.other", "train.some")
    assert [seam.lacks_function(failed, one) for one in kinds] == [True, False, False]
    for other in (seam.app_error(message, ""), Message(RecordDict(), reply_to=message)):
        assert not seam.lacks_function(other, "query.some")


@pytest.mark.parametrize(
    ("module", "call"),
    [
        ("flwr.serverapp.strategy", "configure_train"),
        ("flwr.server.strategy", "configure_fit"),
    ],
)
def test_calling_object(seam, module: str, call: str) -> None:
    """Both kinds of wrapper are in modules dp_..., and call a method.

    So does the workflow of secure aggregation.
    """
    strategies, found = importlib.import_module(module), []

    class Wrapped(strategies.FedAvg):  # type: ignore[misc, name-defined]
        def note(self, *args: Any) -> list:
            known = seam.DP_WRAPPERS + seam.SECURE_WORKFLOWS
            found.append(seam.calling_object(known))
            return []

        configure_train = configure_fit = note

    arrays = ArrayRecord(), ConfigRecord()
    if call == "configure_fit":
        arrays = (ndarrays_to_parameters([]),)
    wrapper = strategies.DifferentialPrivacyServerSideFixedClipping(
        Wrapped(), 0.0, 1.0, 2
    )
    getattr(wrapper, call)(1, *arrays, None)
    flow = SecAggPlusWorkflow(3, 2)
    flow.setup_stage(MagicMock(), MagicMock(strategy=Wrapped()), MagicMock())
    assert found == [wrapper, flow]
    assert seam.calling_object(seam.DP_WRAPPERS) is None


def test_aggregate_metricrecords(seam) -> None:
    """If nothing is given, FedAvg averages metrics with aggregate_metricrecords."""
    told, own = FedAvg(), FedAvg(train_metrics_aggr_fn=lambda records, key: None)
    given = [told.train_metrics_aggr_fn, told.evaluate_metrics_aggr_fn]
    given.append(own.train_metrics_aggr_fn)
    default = seam.aggregate_metricrecords
    assert [one is default for one in given] == [True, True, False]


def test_start_takes_what_flowers_takes() -> None:
    """Our start has every argument of Strategy.start, and then our own."""
    ours = importlib.import_module("fedbn_flwr.strategies").FedBN.start
    described = []
    for start in (ours, FedAvg.start):
        parameters = inspect.signature(start).parameters.values()
        described.append([(each.name, each.default) for each in parameters])
    mine, theirs = described
    assert mine[: len(theirs)] == theirs
    assert {name for name, _ in mine[len(theirs) :]} <= {"should_stop"}


@contextmanager
def superlink(*statuses: int) -> Iterator[str]:
    """Serve empty answers with these statuses on loopback, and yield the address."""
    left = list(statuses)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(left.pop(0) if left else 400)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.01}
        )
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
    assert left == [], "every answer was asked for"


def connected(address: str):
    grid = importlib.import_module("flwr.superlink.grid").HttpGrid(
        address, insecure=True, token="token"
    )
    for _ in range(2):  # a second time changes nothing
        importlib.import_module("fedbn_flwr.transport.polling_grid").PollingGrid(grid)
    grid._retry_invoker.wait_function = lambda seconds: None
    return grid


@RECENT
def test_retry_http_500(seam) -> None:
    """The _retry_invoker of HttpGrid calls should_giveup and on_success.

    Flower's own grid and HTTP client call a SuperLink that fails.
    """
    with superlink(*[500] * 7, 200, *[500] * 7, 200) as address:
        grid = connected(address)
        for _ in range(2):
            assert list(grid.get_node_ids()) == [], "each request has its tries"
        grid._disconnect()
    for statuses, message in (([500] * 8, "500"), ([503, 404], "404")):
        with superlink(*statuses) as address:
            grid = connected(address)
            with pytest.raises(httpx.HTTPStatusError, match=message):
                list(grid.get_node_ids())
            grid._disconnect()


def test_each_thread_has_its_tries(seam) -> None:
    error = httpx.HTTPError("")
    error.response = SimpleNamespace(status_code=500)  # type: ignore[attr-defined]
    give_up = seam._GiveUp(lambda error: True)
    assert [give_up(error) for _ in range(7)] == [False] * 7
    other = []
    thread = threading.Thread(target=lambda: other.append(give_up(error)))
    thread.start()
    thread.join()
    assert other == [False]
    assert give_up(error)


DOCUMENTED = (
    "flwr.app",
    "flwr.client",
    "flwr.clientapp",
    "flwr.clientapp.typing",
    "flwr.server",
    "flwr.serverapp",
    "flwr.serverapp.strategy",
    "flwr_datasets",
    "flwr_datasets.partitioner",
)
LEGACY = {"flwr.common": ("Code",)}  # types of the legacy loop


def test_no_other_module_imports_what_flower_does_not_document() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        # Most files need no parser. Parsing all of them takes seconds.
        if path.parent in ADAPTERS or "flwr" not in path.read_text("utf-8"):
            continue
        for module, name, line in imported(path):
            internal = module not in DOCUMENTED or name.startswith("_")
            if internal and name not in LEGACY.get(module, ()):
                found.append(f"{path.relative_to(PACKAGE)}:{line}: {module} {name}")
    assert found == [], f"import it in {SEAM}, behind a function with a canary here"
