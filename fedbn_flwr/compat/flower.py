"""All uses of Flower's internals.

No other module uses undocumented parts of Flower. If a new version of Flower changes
an internal, a test in ``tests/compat/test_flower.py`` or any run fails in the function
that uses it. Supported versions are Flower 1.28 to 1.43.
"""

from __future__ import annotations

import gc
import inspect
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any, TypeVar

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
from flwr.client.mod.utils import make_ffn
from flwr.clientapp import ClientApp
from flwr.clientapp.client_app import ClientAppException
from flwr.clientapp.typing import ClientAppCallable
from flwr.common.constant import (
    NUM_PARTITIONS_KEY,
    PARTITION_ID_KEY,
    SUPERLINK_NODE_ID,
    ErrorCode,
)
from flwr.serverapp import Grid
from flwr.serverapp.strategy.strategy_utils import (
    aggregate_metricrecords,
    log_strategy_start_info,
)

try:
    from flwr.compat.common import recorddict_compat
except ImportError:  # before Flower 1.32
    from flwr.common import recorddict_compat  # type: ignore[no-redef]
try:
    from flwr.supercore.run import Run
except ModuleNotFoundError:  # before Flower 1.32
    from flwr.common.typing import Run  # type: ignore[attr-defined, no-redef]
try:
    from flwr.supercore.task_identity import TaskIdentity
except ModuleNotFoundError:
    # Before Flower 1.38, messages need no identity. Only the command's name identifies
    # a process that a SuperNode starts for an app.
    class TaskIdentity:  # type: ignore[no-redef]
        """The identity of this process."""

        task_id = run_id = 1
        node_id = SUPERLINK_NODE_ID + (Path(sys.argv[0]).name == "flwr-clientapp")


__all__ = [
    "DP_WRAPPERS",
    "LEGACY_NAMES",
    "NUM_PARTITIONS_KEY",
    "PARTITION_ID_KEY",
    "QUERY_FUNCTION",
    "SECURE_WORKFLOWS",
    "BufferArray",
    "Mod",
    "Run",
    "address_reply",
    "aggregate_metricrecords",
    "app_error",
    "array_of_bytes",
    "as_error",
    "calling_object",
    "changed",
    "copied_context",
    "copied_message",
    "earlier_mods",
    "empty_run",
    "filled",
    "has_function",
    "identify_process",
    "is_app_error",
    "is_mod_refusal",
    "is_network_grid",
    "is_simulation_grid",
    "lacks_function",
    "later_mods",
    "legacy_records",
    "loaded_apps",
    "log_strategy_start_info",
    "on_network_node",
    "proxy_error",
    "refuse_legacy_names",
    "retry_http_500",
    "set_reply_source",
    "values_of",
    "with_mods",
]

LEGACY_NAMES = {
    "fraction_fit": "fraction_train",
    "min_fit_clients": "min_train_nodes",
    "min_evaluate_clients": "min_evaluate_nodes",
    "min_available_clients": "min_available_nodes",
    "fit_metrics_aggregation_fn": "train_metrics_aggr_fn",
    "evaluate_metrics_aggregation_fn": "evaluate_metrics_aggr_fn",
    "initial_parameters": "start(grid, initial_arrays)",
    "on_fit_config_fn": "start(train_config=...), or configure_train",
    "on_evaluate_config_fn": "start(evaluate_config=...), or configure_evaluate",
    "evaluate_fn": "start(evaluate_fn=...)",
    "accept_failures": "nothing: clients may always fail",
    "inplace": "nothing",
}
"""Arguments of Flower's legacy FedAvg, with what a strategy has instead."""


def refuse_legacy_names(names: Iterable[str]) -> None:
    """Raise TypeError for an argument of Flower's legacy FedAvg; it names the new one."""
    for name in names:
        if name in LEGACY_NAMES:
            raise TypeError(
                f"{name} is an argument of Flower's legacy strategies. The strategies"
                f" here have Flower's new arguments: {LEGACY_NAMES[name]}. In the legacy"
                " loop, to_legacy(FedBN(...), ...) takes on_fit_config_fn, evaluate_fn"
                " and the metrics functions."
            )


# Flower has this type since 1.32.
Mod = Callable[[Message, Context, ClientAppCallable], Message]

T = TypeVar("T")
R = TypeVar("R", ArrayRecord, ConfigRecord, MetricRecord, RecordDict)
QUERY_FUNCTION = f"{MessageType.QUERY}.default"  # name in an app's list of functions
_SERVER_ERROR = 500
_TRIES = 8  # for a request that the SuperLink answers with HTTP 500


def empty_run(run_id: int) -> Run:
    """Return a ``Run`` without a SuperLink."""
    return Run.create_empty(run_id=run_id)


def later_mods(call_next: ClientAppCallable) -> tuple[list[Mod], ClientAppCallable]:
    """Return the mods between a mod and the app's function, and the function itself."""
    # Flower wraps the app's function in one mod after the other, and the first mod is
    # the outermost. All wrappers are closures of the same function, so their code
    # identifies them. The variables of a closure are the mod and the wrapped function.
    mods = []
    while isinstance(call_next, FunctionType) and call_next.__code__ is _CHAINED:
        variables = inspect.getclosurevars(call_next).nonlocals
        mods.append(variables["_mod"])
        call_next = variables["_ffn"]
    return mods, call_next


def earlier_mods() -> int:
    """Return the number of the app's mods that come before the calling mod."""
    # Start at -1, because the calling mod is one of them.
    count, frame = -1, sys._getframe(1)
    while frame is not None:
        count += frame.f_code is _CHAINED
        frame = frame.f_back  # type: ignore[assignment]
    return max(count, 0)


with_mods: Callable[[ClientAppCallable, list[Mod]], ClientAppCallable] = make_ffn
"""Return an app's function with mods around it, the first mod outermost."""

_CHAINED = make_ffn(
    lambda message, context: message, [lambda message, context, call_next: message]
).__code__


def identify_process(run_id: int) -> None:
    """Give this process an identity, as Flower's engines do, unless it has one."""
    # Without an identity, Flower cannot make messages.
    try:
        _ = TaskIdentity.run_id
    except RuntimeError:
        TaskIdentity.task_id = 1
        TaskIdentity.run_id = run_id
        TaskIdentity.node_id = SUPERLINK_NODE_ID


def on_network_node() -> bool:
    """Return whether this process works for a SuperNode."""
    # In a process of a SuperNode, Flower sets the id of the node. In a process of the
    # server, it sets the SuperLink's id.
    try:
        return TaskIdentity.node_id != SUPERLINK_NODE_ID
    except RuntimeError:  # the process has no identity, for example in simulation
        return False


def is_simulation_grid(grid: Grid) -> bool:
    """Return whether the grid belongs to Flower's simulation."""
    return _is_instance(grid, "InMemoryGrid")


def is_network_grid(grid: Grid) -> bool:
    """Return whether the grid's nodes are separate processes that may come and go."""
    # ``GrpcGrid`` is the class before Flower 1.35.
    return _is_instance(grid, "HttpGrid", "GrpcGrid")


def _is_instance(grid: Grid, *class_names: str) -> bool:
    """Return whether the grid is an instance of one of these Flower classes."""
    # Compare names, because the classes have moved between modules, and importing them
    # also imports SQLAlchemy and FastAPI (0.7 s).
    return any(
        kind.__name__ in class_names and kind.__module__.startswith("flwr.")
        for kind in type(grid).__mro__
    )


def changed(
    message: Message, content: RecordDict | None = None, **metadata: Any
) -> Message:
    """Return a copy of the message with other content, and other metadata by name.

    Flower's own engines change metadata as well, such as ``message_id``.
    """
    # Flower's constructor cannot set all metadata.
    about = _shallow(message.__dict__["_metadata"])
    about.__dict__.update({f"_{name}": value for name, value in metadata.items()})
    copied = _shallow(message)
    copied.__dict__["_metadata"] = about
    if content is not None:
        copied.__dict__["_content"] = content
    return copied


def copied_message(message: Message) -> Message:
    """Return an equal message whose records and metadata may be changed."""
    return changed(message, _copied(message.__dict__["_content"]))


def copied_context(context: Context) -> Context:
    """Return an equal context whose records and configs may be changed."""
    # The copy keeps attributes that an app may have added.
    copied = _shallow(context)
    copied.state = _copied(context.state)
    copied.node_config = dict(context.node_config)
    copied.run_config = dict(context.run_config)
    return copied


def _shallow(value: T) -> T:
    """Return ``copy.copy(value)`` of an object with its attributes in its dict."""
    # This function takes a fifth of the time of copy.copy.
    copied = object.__new__(type(value))
    copied.__dict__.update(value.__dict__)
    return copied


def _copied(records: RecordDict) -> RecordDict:
    """Return a copy of the records that shares their constant arrays."""
    copied = {}
    for key, record in values_of(records).items():
        values = dict(record.__dict__["_data"])
        # Copy the lists as well, because Flower's copy of a record shares them.
        if not isinstance(record, ArrayRecord):
            for name, value in values.items():
                if isinstance(value, list):
                    values[name] = list(value)
        copied[key] = _shallow(record)
        copied[key].__dict__["_data"] = values
    return filled(RecordDict, copied)


values_of: Callable[[Any], dict[str, Any]] = attrgetter("_data")
"""Return the dict inside a record. Flower's access needs two calls each time."""


def filled(kind: type[R], values: Mapping[str, Any]) -> R:
    """Return a record of this class with these values, without checking them."""
    # The values are not checked, because Flower checks each one in four to nine calls:
    # a MetricRecord of 8 entries takes 105 us instead of 3, and an ArrayRecord of 16
    # entries 560 us instead of 1. A message of one step takes about 1,500 us.
    record = object.__new__(kind)
    record.__dict__.update(_EMPTY[kind].__dict__, _data=dict(values))
    return record


_EMPTY: dict[type, Any] = {
    kind: kind() for kind in (ArrayRecord, ConfigRecord, MetricRecord, RecordDict)
}


def array_of_bytes(
    dtype: str, shape: tuple[int, ...], data: bytes, stype: str = "numpy.ndarray"
) -> Array:
    """Return ``Array(dtype, shape, stype, data)``."""
    # Do not call Flower's constructor: 16 arrays take 296 us instead of 27.
    array = Array.__new__(Array)
    array.__dict__.update(dtype=dtype, shape=shape, stype=stype, data=data)
    return array


class BufferArray(Array):
    """An ``Array`` over any buffer of bytes. ``data`` returns a copy of the buffer."""

    def __init__(
        self, dtype: str, shape: tuple[int, ...], stype: str, buffer: bytes | memoryview
    ) -> None:
        self.__dict__.update(dtype=dtype, shape=shape, stype=stype, buffer=buffer)

    buffer: bytes | memoryview

    @property
    def data(self) -> bytes:
        """The bytes."""
        return bytes(self.buffer)

    @data.setter
    def data(self, value: bytes) -> None:
        self.buffer = value

    def __eq__(self, other: object) -> bool:
        """Compare like ``Array``, including with a plain ``Array``."""
        if not isinstance(other, Array):
            return False
        own = (self.dtype, self.shape, self.stype, self.data)
        return own == (other.dtype, other.shape, other.stype, other.data)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[type[Array], tuple[str, tuple[int, ...], str, bytes]]:
        """Pickle and copy it as a plain ``Array``."""
        return Array, (self.dtype, self.shape, self.stype, self.data)


def set_reply_source(reply: Message, node_id: int) -> None:
    """Set the node that sent a reply, because error replies for lost nodes lack it."""
    reply.metadata.__dict__["_src_node_id"] = node_id


def address_reply(reply: Message, message: Message, message_id: str) -> None:
    """Give a reply its id, and address it to ``message``, as Flower's engines do."""
    # A mod of Flower that refuses its app's reply makes an answer to this reply instead
    # of to the message. Flower's own engines lose such an answer.
    sent, about = (one.__dict__["_metadata"].__dict__ for one in (message, reply))
    about["_message_id"] = message_id
    about["_reply_to_message_id"] = sent["_message_id"]
    about["_src_node_id"] = sent["_dst_node_id"]


def app_error(message: Message, reason: str | Exception) -> Message:
    """Return the error reply of a node whose app failed.

    Args:
        message: the message to the node.
        reason: the text of the reply, or an exception. The text of an exception gets
            the words that Flower's own engines add.
    """
    if isinstance(reason, Exception):
        raised = ClientAppException(str(reason))
        reason = f"{type(raised)}:<'{raised}'>"
    return Message(
        Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message
    )


def proxy_error(message: Message, error: Exception) -> Message:
    """Return the reply of a client whose proxy in the older loop raised an exception."""
    # Imported here, because only the older loop has this server.
    from flwr.server.superlink.fleet.grpc_bidi.grpc_bridge import GrpcBridgeClosed

    if not isinstance(error, GrpcBridgeClosed):
        return app_error(message, str(error))
    reason = "the client is lost: its connection has ended"
    return Message(Error(ErrorCode.NODE_UNAVAILABLE, reason), reply_to=message)


def as_error(reply: Message, reason: str) -> Message:
    """Return the reply with an error instead of its content."""
    failed = _shallow(reply)
    failed.__dict__.update(_content=None, _error=Error(ErrorCode.UNKNOWN, reason))
    return failed


def is_app_error(reply: Message) -> bool:
    """Return whether the reply is the error of an app, and not of a lost node."""
    raised = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    return reply.has_error() and reply.error.code == raised


def is_mod_refusal(reply: Message) -> bool:
    """Return whether the reply comes from a mod of Flower that refuses a message."""
    return reply.has_error() and reply.error.code == ErrorCode.MOD_FAILED_PRECONDITION


def loaded_apps(seconds: float) -> list[ClientApp]:
    """Return the complete ClientApps of this process.

    The list is empty if no app is complete after the given seconds. A simulation loads
    its app in its server's process while the server starts.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        # Wait until no module is being imported, because an app gets its functions
        # while its module is imported.
        specs = [getattr(one, "__spec__", None) for one in [*sys.modules.values()]]
        if not any(getattr(spec, "_initializing", False) for spec in specs):
            # Do not use isinstance, because a lazy object would then load its target.
            apps = [one for one in gc.get_objects() if issubclass(type(one), ClientApp)]
            if apps:
                return apps
        time.sleep(0.05)
    return []


def has_function(app: Any, message_type: str) -> bool:
    """Return whether the app has a function for such messages."""
    # An app with a client_fn, or another object, accepts all messages.
    functions = getattr(app, "_registered_funcs", {message_type: app})
    return message_type in functions or getattr(app, "_call", None) is not None


def lacks_function(reply: Message, message_type: str) -> bool:
    """Return whether the reply reports that the app lacks a function for messages."""
    if not is_app_error(reply):
        return False
    # An example of ``message_type`` is query.exchange. Flower reports a missing
    # function only by this text.
    category, _, action = message_type.partition(".")
    missing = f"No {category} function registered with name '{action}'"
    return missing in str(reply.error.reason)


DP_WRAPPERS = ("flwr.serverapp.strategy.dp_", "flwr.server.strategy.dp_")
SECURE_WORKFLOWS = ("flwr.server.workflow.secure_aggregation.",)


def calling_object(modules: tuple[str, ...]) -> Any:
    """Return the object of Flower that calls the caller, or None.

    ``modules`` are the beginnings of the names of its modules: ``DP_WRAPPERS`` or
    ``SECURE_WORKFLOWS``.
    """
    # A strategy has no reference to its wrapper or its workflow, neither in the Message
    # API nor in the legacy loop. Find the call of the object on the stack.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(modules):
            return frame.f_locals.get("self")
        frame = frame.f_back
    return None


def legacy_records(
    kind: str,
) -> tuple[Callable[[Any], RecordDict], Callable[[RecordDict], Any]]:
    """Return two functions for calls of the legacy loop with this message type.

    The first writes a call as records, the second reads its result.
    """
    legacy = recorddict_compat
    if kind == "get_properties":
        return (
            legacy.getpropertiesins_to_recorddict,
            legacy.recorddict_to_getpropertiesres,
        )
    # The second argument decides whether the arrays also stay in the source.
    if kind == "train":
        return (
            lambda ins: legacy.fitins_to_recorddict(ins, True),
            lambda content: legacy.recorddict_to_fitres(content, False),
        )
    return (
        lambda ins: legacy.evaluateins_to_recorddict(ins, True),
        legacy.recorddict_to_evaluateres,
    )


def retry_http_500(grid: Grid) -> None:
    """Make Flower's HTTP grid repeat a request after an answer 500.

    Flower itself repeats requests after 502 to 504. A SuperLink answers 500 while
    writes of the nodes lock its SQLite database. Other grids do not change.
    """
    # Repeat the request, not ``pull_messages``. The latter has already taken messages
    # from the SuperLink, and they would be lost.
    invoker = getattr(grid, "_retry_invoker", None)
    if invoker is None or isinstance(invoker.should_giveup, _GiveUp):
        return
    give_up = _GiveUp(invoker.should_giveup)
    invoker.should_giveup = give_up
    succeeded = invoker.on_success

    def on_success(state: Any) -> None:
        give_up.reset()
        if succeeded is not None:
            succeeded(state)

    invoker.on_success = on_success


class _GiveUp:
    """Decides when to give up a request, including after repeated answers 500."""

    def __init__(self, otherwise: Callable[[Exception], bool]) -> None:
        self._otherwise = otherwise
        # Count per thread, and therefore per request, because Flower's own threads use
        # the same grid.
        self._thread = threading.local()

    def reset(self) -> None:
        """Start at 0 again for the thread's next request."""
        self._thread.failures = 0

    def __call__(self, error: Exception) -> bool:
        response = getattr(error, "response", None)
        failed = getattr(response, "status_code", None) == _SERVER_ERROR
        if failed:
            failures: int = getattr(self._thread, "failures", 0) + 1
            self._thread.failures = failures
            give_up = failures >= _TRIES
        else:
            give_up = self._otherwise(error)
        if give_up:
            self.reset()
        elif failed:
            logging.getLogger("flwr").warning(
                "The SuperLink failed (500; its database may be locked); trying again."
            )
        return give_up
