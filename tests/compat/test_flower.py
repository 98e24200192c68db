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
from collections.abc import Callable, Iterator
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
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, message_size_mod
from flwr.common import (
    ndarrays_to_parameters,
)
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
def message(seam: ModuleType) -> Message:
    seam.identify_process(1)
    content = RecordDict({"config": ConfigRecord({"lr": 0.1})})
    return Message(content, 4, MessageType.TRAIN, ttl=60, group_id="3")


def metadata(message: Message) -> dict[str, Any]:
    """Return the public values of a message's metadata."""
    names = [
        name
        for name, value in inspect.getmembers(type(message.metadata))
        if isinstance(value, property)
    ]
    return {name: getattr(message.metadata, name) for name in names}


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imported(path: Path) -> Iterator[tuple[str, str, int]]:
    """Yield (module, name or "", line) of every import of Flower in a file.

    Imports inside functions are included.
    """
    for node in nodes_of(path):
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
    for path in (path for room in ADAPTERS for path in sorted(room.glob("*.py"))):
        places = defaultdict[str, list[str]](list)
        for module, name, _ in imported(path):
            places[name].append(module)
        for name, modules in places.items():
            found = [importlib.import_module(module) for module in modules]
            assert any(hasattr(module, name) for module in found), (
                f"{path.relative_to(PACKAGE)}: {name} in {', '.join(modules)}"
            )


@RECENT
def test_identify_process(seam: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_on_network_node(seam: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flwr-clientapp notes the node's id in TaskIdentity, and simulation does not."""
    clientapp = importlib.import_module("flwr.supernode.runtime.run_clientapp")
    assert "TaskIdentity.node_id = res.context.node_id" in inspect.getsource(clientapp)
    actor = importlib.import_module("flwr.simulation.ray_transport.ray_actor")
    assert "TaskIdentity" not in inspect.getsource(actor)
    for node_id, on_node in ((None, False), (seam.SUPERLINK_NODE_ID, False), (7, True)):
        monkeypatch.setattr(seam.TaskIdentity, "_node_id", node_id)
        assert seam.on_network_node() is on_node


def check_grid(
    function: Callable[[Any], bool], engine: str, name: str, other: str
) -> None:
    """Check the engine's grid class and that the function recognises it.

    The function does not recognise the other class.
    """
    module, grids = (
        importlib.import_module(engine),
        importlib.import_module("flwr.superlink.grid"),
    )
    assert f"{name}(" in inspect.getsource(module)
    grid = getattr(module, name)
    assert function(grid.__new__(grid))
    grid = getattr(grids, other)
    assert not function(grid.__new__(grid))


@RECENT
def test_is_simulation_grid(seam: ModuleType) -> None:
    check_grid(
        seam.is_simulation_grid,
        "flwr.simulation.run_simulation",
        "InMemoryGrid",
        "HttpGrid",
    )


@RECENT
def test_is_network_grid(seam: ModuleType) -> None:
    check_grid(
        seam.is_network_grid,
        "flwr.superlink.runtime.run_serverapp",
        "HttpGrid",
        "InMemoryGrid",
    )


@pytest.mark.parametrize("name", ["InMemoryGrid", "GrpcGrid"])
def test_grids_of_older_versions(seam: ModuleType, name: str) -> None:
    """Before Flower 1.31 the grids are in flwr.server.grid, one by another name."""
    grid = type(name, (), {"__module__": "flwr.server.grid"})()
    assert seam.is_simulation_grid(grid) is (name == "InMemoryGrid")
    assert seam.is_network_grid(grid) is (name == "GrpcGrid")


@pytest.mark.parametrize("command", ["flwr-clientapp", "pytest"])
def test_a_process_without_identity(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_copied_message(seam: ModuleType, message: Message) -> None:
    """Metadata.__dict__ contains all public values of a message's metadata."""
    seam.set_message_id(message, "first")
    told = metadata(message)
    copied = seam.copied_message(message)
    assert metadata(copied) == told
    copied.content["config"]["lr"] = 0.2
    copied.metadata.dst_node_id = 5
    seam.set_message_id(copied, "second")
    assert metadata(message) == told, "the copy's own"
    assert message.content["config"]["lr"] == 0.1


@pytest.mark.parametrize("error", [False, True], ids=["reply", "reply to an error"])
def test_answer(seam: ModuleType, message: Message, error: bool) -> None:
    """A reply's metadata follows from the message's."""
    seam.set_message_id(message, "asked")
    if error:
        message = Message(Error(1, "lost"), reply_to=message)
    usual, made = (
        Message(RecordDict(), reply_to=message),
        seam.answer(message, content := RecordDict()),
    )
    expected, told = metadata(usual), metadata(made)
    for key in ("created_at", "ttl"):
        assert told.pop(key) == pytest.approx(expected.pop(key), abs=5)
    assert told == expected
    assert made.content is content
    assert not made.has_error()
    assert vars(made).keys() == vars(usual).keys()


def test_array_of_bytes(seam: ModuleType) -> None:
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


def test_buffer_array(seam: ModuleType) -> None:
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
def test_proxy_error(seam: ModuleType, message: Message) -> None:
    """A bridge of the older loop that is closed means that its client is lost."""
    bridge = importlib.import_module(
        "flwr.server.superlink.fleet.grpc_bidi.grpc_bridge"
    )
    lost = seam.proxy_error(message, bridge.GrpcBridgeClosed()).error
    failed = seam.proxy_error(message, ValueError("no data")).error
    assert lost.code == seam.ErrorCode.NODE_UNAVAILABLE
    assert failed.code == seam.ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    assert "no data" in failed.reason


def test_app_error(seam: ModuleType, message: Message) -> None:
    """The reply for an app that raised is an error with that code and text.

    Flower's simulation makes this reply in its own worker.
    """
    stop, asked, answered = (
        threading.Event(),
        queue.Queue[Message](),
        queue.Queue[Message](),
    )

    def process_message(*_: Any) -> Any:
        stop.set()
        raise seam.ClientAppException("no data")

    worker = importlib.import_module("flwr.server.superlink.fleet.vce.vce_api").worker
    asked.put(message)
    backend = SimpleNamespace(process_message=process_message)
    worker(asked, answered, {4: MagicMock()}, backend, stop, MagicMock())
    theirs, ours = (
        answered.get(timeout=0).error,
        seam.app_error(message, ValueError("no data")).error,
    )
    assert (ours.code, ours.reason) == (theirs.code, theirs.reason)
    assert seam.app_error(message, "in words").error.reason == "in words"


def test_is_app_error(seam: ModuleType, message: Message) -> None:
    """Code 2 is CLIENT_APP_RAISED_EXCEPTION.

    Codes 3 to 5 are lost messages and nodes.
    """
    codes = seam.ErrorCode
    assert codes.CLIENT_APP_RAISED_EXCEPTION == 2, "the number that travels"
    assert (
        codes.MESSAGE_UNAVAILABLE,
        codes.REPLY_MESSAGE_UNAVAILABLE,
        codes.NODE_UNAVAILABLE,
    ) == (3, 4, 5)
    replies = [Message(Error(code, ""), reply_to=message) for code in (2, 3, 4, 5)]
    assert [seam.is_app_error(reply) for reply in replies] == [
        True,
        False,
        False,
        False,
    ]


def test_is_mod_refusal(seam: ModuleType, message: Message) -> None:
    """A mod that expects one ArrayRecord replies with an error of its own code."""
    refused = LocalDpMod(1.0, 1.0, 1.0, 0.1)(
        message, Context(1, 1, {}, RecordDict(), {}), lambda m, c: m
    )
    assert seam.is_mod_refusal(refused)
    assert not seam.is_mod_refusal(Message(Error(2, ""), reply_to=message))
    assert not seam.is_mod_refusal(Message(RecordDict(), reply_to=message))


def chained(
    message: Message, seam: ModuleType
) -> tuple[list[Any], Any, Any, Callable[..., Any]]:
    """Return two mods and the function that Flower gives the first mod of an app.

    This function would call the second mod and the app's function.
    """
    given: list[Any] = []

    def first(message: Message, context: Context, call_next: Any) -> Message:
        given.append(call_next)
        return message

    def second(message: Message, context: Context, call_next: Any) -> Message:
        return call_next(message, context)

    def function(message: Message, context: Context) -> Message:
        return message

    app = ClientApp(mods=[first])
    app.train(mods=[second])(function)
    app(message, Context(1, 1, {}, RecordDict(), {}))
    return given, second, function, given[0]


def test_later_mods(seam: ModuleType, message: Message) -> None:
    """A mod with later mods receives a function of make_ffn with _mod and _ffn."""
    _, second, function, call_next = chained(message, seam)
    assert seam.later_mods(call_next) == ([second], function)
    assert seam.later_mods(function) == ([], function)


def test_earlier_mods(seam: ModuleType, message: Message) -> None:
    """One function of make_ffn calls every mod of an app."""
    counts: list[int] = []

    def counting(message: Message, context: Context, call_next: Any) -> Message:
        counts.append(seam.earlier_mods())
        return call_next(message, context)

    app = ClientApp(mods=[counting, message_size_mod, counting])
    app.train(mods=[counting])(lambda message, context: message)
    app(message, Context(1, 1, {}, RecordDict(), {}))
    assert counts == [0, 2, 3]
    assert seam.earlier_mods() == 0


def test_loaded_apps(seam: ModuleType, tmp_path: Path, monkeypatch) -> None:
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


def test_lacks_function(seam: ModuleType, message: Message) -> None:
    """An app without a function for a message's action raises these words."""
    message.metadata.__dict__["_message_type"] = "query.some"
    with pytest.raises(ValueError) as error:
        ClientApp()(message, Context(1, 1, {}, RecordDict(), {}))
    assert seam.lacks_function(seam.app_error(message, error.value), "query.some")
    assert not seam.lacks_function(seam.app_error(message, error.value), "query.other")
    assert not seam.lacks_function(seam.app_error(message, "no data"), "query.some")
    assert not seam.lacks_function(
        Message(RecordDict(), reply_to=message), "query.some"
    )


@pytest.mark.parametrize(
    ("module", "call"),
    [
        ("flwr.serverapp.strategy", "configure_train"),
        ("flwr.server.strategy", "configure_fit"),
    ],
)
def test_calling_object(seam: ModuleType, module: str, call: str) -> None:
    """Both kinds of wrapper are in modules dp_..., and call a method.

    So does the workflow of secure aggregation.
    """
    strategies, found = importlib.import_module(module), list[Any]()

    class Wrapped(strategies.FedAvg):  # type: ignore[misc, name-defined]
        def note(self, *args: Any) -> list[Any]:
            known = seam.DP_WRAPPERS + seam.SECURE_WORKFLOWS
            found.append(seam.calling_object(known))
            return []

        configure_train = configure_fit = note

    arrays = (
        (ndarrays_to_parameters([]),)
        if call == "configure_fit"
        else (ArrayRecord(), ConfigRecord())
    )
    wrapper = strategies.DifferentialPrivacyServerSideFixedClipping(
        Wrapped(), 0.0, 1.0, 2
    )
    getattr(wrapper, call)(1, *arrays, None)
    flow = SecAggPlusWorkflow(3, 2)
    flow.setup_stage(MagicMock(), MagicMock(strategy=Wrapped()), MagicMock())
    assert found == [wrapper, flow]
    assert seam.calling_object(seam.DP_WRAPPERS) is None


def test_is_default_aggregation(seam: ModuleType) -> None:
    """If nothing is given, FedAvg averages metrics with aggregate_metricrecords."""
    told, own = FedAvg(), lambda records, key: None
    assert seam.is_default_aggregation(told.train_metrics_aggr_fn)
    assert seam.is_default_aggregation(told.evaluate_metrics_aggr_fn)
    assert not seam.is_default_aggregation(
        FedAvg(train_metrics_aggr_fn=own).train_metrics_aggr_fn
    )


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
            self.send_response(left.pop(0))
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


def connected(address: str) -> Any:
    grid = importlib.import_module("flwr.superlink.grid").HttpGrid(
        address, insecure=True, token="token"
    )
    for _ in range(2):  # a second time changes nothing
        importlib.import_module("fedbn_flwr.transport.polling_grid").PollingGrid(grid)
    grid._retry_invoker.wait_function = lambda seconds: None
    return grid


@RECENT
def test_retry_http_500(seam: ModuleType) -> None:
    """The _retry_invoker of HttpGrid calls should_giveup and on_success.

    Flower's own grid and HTTP client call a SuperLink that fails.
    """
    with superlink(*[500] * 7, 200, *[500] * 7, 200) as address:
        grid = connected(address)
        assert [list(grid.get_node_ids()), list(grid.get_node_ids())] == [
            [],
            [],
        ], "each request has its tries"
        grid._disconnect()
    for statuses, message in (([500] * 8, "500"), ([503, 404], "404")):
        with superlink(*statuses) as address:
            grid = connected(address)
            with pytest.raises(httpx.HTTPStatusError, match=message):
                list(grid.get_node_ids())
            grid._disconnect()


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
