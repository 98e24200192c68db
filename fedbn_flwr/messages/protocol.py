"""All names in the messages, and in a client's ``Context.state``.

The file first declares the keys. Configs and answers with several keys follow, as
values with ``read`` and ``write``.

Each record name and key that more than one module uses is declared here. The keys of a
single method are declared in the method's file. No other file may contain such a name
(``tests/messages/test_protocol.py``). ``make generate`` writes the table of the keys
without ``PREFIX`` in ``docs/reference/python.md`` from the declarations.

Keys begin with ``PREFIX`` if the server or the codec adds them to a config that also
has keys of users. The exceptions are Flower's own ``server-round``, and ``test-sets``,
which the caller adds. Some names are older than the terms of the code:
``fedbn-flwr.rules`` belongs to client hooks; ``frame`` and ``whole`` are the model's
spec.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from flwr.app import ConfigRecord, Context, Message, MessageType, MetricRecord

from fedbn_flwr.compat.flower import values_of
from fedbn_flwr.errors import ConfigError, StateError
from fedbn_flwr.messages.records import of_kind
from fedbn_flwr.messages.site_names import fault_of
from fedbn_flwr.training.randomness import derive_seed

__all__ = [
    "Continuity",
    "EvaluateConfig",
    "Key",
    "MessageConfig",
    "NodeProperties",
    "ReplyInfo",
    "TrainConfig",
    "add_info",
    "comma_list",
    "merged_config",
    "named_state",
    "num_partitions_of",
    "own_node_id",
    "partition_of",
    "refuse_own_keys",
    "round_in",
    "site_name_of",
    "without_empty",
]

NO_NODE_ID = -1
"""The node id that Flower's ``start_client`` gives to every client."""

PREFIX = "fedbn-flwr."
"""The beginning of every key that this package adds to a user's config."""


class Key(str):
    """The name of a record or of an entry.

    Attributes:
        kind: type and content. All attributes are columns in the table of keys.
        writer: the part of the system that writes it.
        reader: the part of the system that reads it.
    """

    kind: str
    writer: str
    reader: str

    def __new__(cls, name: str, kind: str, writer: str, reader: str) -> Self:
        """Make the key ``name``, with the columns of its row in the table."""
        key = super().__new__(cls, name)
        key.kind, key.writer, key.reader = kind, writer, reader
        return key

    @classmethod
    def down(cls, name: str, kind: str) -> Self:
        """Make a key that the server writes and a client reads."""
        return cls(name, kind, "server", "client")

    @classmethod
    def up(cls, name: str, kind: str) -> Self:
        """Make a key that a client writes and the server reads."""
        return cls(name, kind, "client", "server")

    @classmethod
    def both(cls, name: str, kind: str) -> Self:
        """Make a key that the server and a client write and read."""
        return cls(name, kind, "server, client", "client, server")

    @classmethod
    def inside(cls, name: str, kind: str) -> Self:
        """Make a key that stays in a client."""
        return cls(name, kind, "client", "client")

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Copy and pickle a key as a plain ``str``, the type used in messages."""
        return str, (str(self),)


# --- records of a message -------------------------------------------------------------
METRICS = Key.up("metrics", "MetricRecord of a reply")
INFO = Key.up("properties", "ConfigRecord of a reply: ReplyInfo")
EXCHANGE = Key.both("fedtan", "ArrayRecord: one exchange of a synchronised step")
EXCHANGE_QUERY = Key.down(
    "query.exchange", "message type: one exchange of a synchronised step"
)
PACKED = Key.both(
    "fedbn-flwr.packed", "ArrayRecord: all arrays of the message in one piece"
)
STATISTICS_QUERY = Key.down("query.statistics", "message type: re-estimated statistics")

# --- config of a message from the server ----------------------------------------------
SERVER_ROUND = Key.down("server-round", "int")
SEED = Key.down(
    "fedbn-flwr.seed", "int: seed of the run, for the clients' default generators"
)
HOOKS = Key.down("fedbn-flwr.hooks", "str, comma list: client hooks to apply")
EXTRAS = Key.down("fedbn-flwr.extras", "str, comma list: the method's further records")
LOCAL_ENTRIES = Key.down(
    "fedbn-flwr.local-entries", "str, JSON list: entries that stay with the client"
)
LAYERS = Key.down(
    "fedbn-flwr.layers",
    "str, JSON list: paths of the BatchNorm layers that the method treats, if it does"
    " not treat all",
)
PERSONAL = Key.down(
    "fedbn-flwr.personal",
    "str, JSON list: the local entries that the user has named; a client may have them"
    " in another shape",
)
CLASS_MOMENTS = Key.down(
    "fedbn-flwr.class-moments",
    "bool, in a query of statistics: the answer has the moments of each class",
)
FINE_TUNE = Key.down(
    "fedbn-flwr.fine-tune", "int: steps by which a client trains before its test"
)
NO_STATE = "none"  # sent instead of a hash if there is no state
LOCAL_SHA256 = Key.both(
    "fedbn-flwr.local-sha256",
    "str: SHA-256 of the kept state; from the server `none` means no state",
)
USED_SHA256 = Key.down(
    "fedbn-flwr.used-sha256",
    "str: SHA-256 of the kept state after the last round whose reply was used; `none`"
    " if it does not exist",
)
START_ID = Key.down(
    "fedbn-flwr.start", "str: id of a second or further start in one run"
)
RUN = Key.down("fedbn-flwr.run", "str: id of the run and its resumptions")
COMMITTED = Key.down(
    "fedbn-flwr.committed", "str, comma list: rounds of the checkpoints"
)
TEST_SETS = Key.down("test-sets", "str, comma list")
# an element of TEST_SETS that means the client's validation data
VALIDATION = "validation"
OWN = "own"  # an element of TEST_SETS that means the client's own test data
FROZEN = Key.down("fedbn-flwr.frozen", "bool: BN is frozen in this round")
BARRIER = Key.down(
    "fedbn-flwr.fedtan-barrier", "str: id of the barrier in this process"
)
CHANNEL_ADDRESS = Key.down("fedbn-flwr.fedtan-address", "str, host:port")
CHANNEL_TOKEN = Key.down(
    "fedbn-flwr.fedtan-token", "str: this node's token for this round"
)
CHANNEL_CA = Key.down("fedbn-flwr.fedtan-ca", "bytes, PEM")
CHANNEL_TIMEOUT = Key.down("fedbn-flwr.fedtan-timeout", "float, seconds")
ATTEMPT = Key.down(
    "fedbn-flwr.fedtan-attempt", "int: attempt of a step that travels in messages"
)
STEP_ONLY = Key.down(
    "fedbn-flwr.fedtan-step-only", "bool: the training ends after its first step"
)
UNION = Key.down(
    "fedbn-flwr.fedtan-union", "int: examples in the union of the first batches"
)
FIRST_BATCH = Key.down(
    "fedbn-flwr.fedtan-batch-size", "int: examples of this client's first batch"
)


# --- arrays as a NumPyClient takes them -----------------------------------------------
ARRAY_NAMES = Key(
    "fedbn-flwr.array-names",
    "str, JSON list: names of the arrays, in order",
    "codec, NumPyClient",
    "NumPyClient",
)
MOD = Key(
    "fedbn-flwr.client-mod",
    "str: name of the mod with the client code",
    "mod",
    "TorchClient",
)

# --- metrics of a reply ---------------------------------------------------------------
NUM_EXAMPLES = Key.up("num-examples", "int: training examples, the weight")
VALIDATION_LOSS = Key.up(
    "validation-loss", "float: after training, on the client's validation data"
)
LOSS = Key.up("loss", "float: mean loss on the first test set")
TRAIN_LOSS = Key.up("train-loss", "float")
TRAIN_ACCURACY = Key.up("train-accuracy", "float")
EXAMPLES_PROCESSED = Key.up("examples-processed", "int")
STEPS = Key.up("steps", "int")
DROPPED_BATCHES = Key.up("dropped-batches", "int")
EXAMPLES_TESTED = Key.up("examples-tested", "int")

# --- entries of ReplyInfo and the query -----------------------------------------------
APPLIED = Key.up("fedbn-flwr.hooks-applied", "str, comma list: client hooks applied")
LOCAL_HOME = Key.up("fedbn-flwr.local-home", "str: folder or memory")
LOCAL_BEGAN = Key.up(
    "fedbn-flwr.local-began", "str: the kept state began in this round"
)
PARTITION_ID = Key("partition-id", "int", "client, node config", "server, client")
BATCH_SIZE = Key.up("batch-size", "int: examples of the first batch")
UNUSABLE = Key.up("unusable", "str: why the node cannot take part")
REFUSAL = Key.up("refusal", "str: why a mod of the app has refused the query")
VERSIONS = Key.up(
    "node-versions", "str: of the node's fedbn-flwr, torch and flwr, over a network"
)
PACKS = Key.up(
    "fedbn-flwr.packs", "int: the form of arrays in one piece that the app reads"
)
SYNCHRONISES = Key.down(
    "fedbn-flwr.synchronises", "bool, in the query: BN layers are synchronised"
)

# --- config of a node -----------------------------------------------------------------
NUM_PARTITIONS = Key("num-partitions", "int", "client, node config", "server, client")
STATE_DIR = Key(
    "state-dir",
    "str: absolute folder of the kept state",
    "node config, run config",
    "client",
)
SITE_NAME = Key(
    "site-name",
    "str: name of the site for the log and the results",
    "client, node config",
    "server, client",
)
DATA_PATH = Key("data-path", "str: the node's own data", "node config", "client")
REPORT_DATA = Key(
    "report-data",
    "bool: whether the server may receive the texts of errors about data",
    "node config",
    "client",
)
ALLOW_PATHS = Key(
    "allow-paths",
    "str, comma list: folders whose paths a run may name",
    "node config",
    "client",
)
ALLOW_MODULES = Key(
    "allow-modules",
    "str, comma list: modules that a run may name",
    "node config",
    "client",
)

NODE_KEYS = (
    PARTITION_ID,
    NUM_PARTITIONS,
    SITE_NAME,
    STATE_DIR,
    DATA_PATH,
    REPORT_DATA,
    ALLOW_PATHS,
    ALLOW_MODULES,
)
"""Keys of a node's config that the default app uses."""

# --- Context.state --------------------------------------------------------------------
KEPT_STATES = Key.inside(
    "fedbn-flwr.kept", "ConfigRecord: ROUND.SHA256, a kept state as a checked file"
)
KEPT = Key.inside(
    "fedbn-flwr.local", "in a kept state: the entries that stay with the client"
)
KEPT_BY_HOOKS = Key(
    "fedbn-flwr.rules",
    "in a kept state: HOOK/NAME, entries of client hooks; ArrayRecord between the mod"
    " and bn_rules",
    "mod, bn_rules",
    "mod, bn_rules",
)
INBOX = Key(
    "fedbn-flwr.inbox",
    "ArrayRecords inbox/RECORD: further records of the message",
    "mod",
    "bn_rules",
)
OUTBOX = Key(
    "fedbn-flwr.outbox",
    "ConfigRecord, ArrayRecords outbox/RECORD: additions to the reply",
    "bn_rules",
    "mod",
)
STEP_MODEL = Key.inside("fedbn-flwr.step.model", "ArrayRecord: the round's model")
STEP_ANSWERS = Key.inside(
    "fedbn-flwr.step.answers", "ArrayRecord: exchanges answered so far"
)
STEP_SENT = Key(
    "fedbn-flwr.step.sent", "ArrayRecord: exchanges sent so far", "mod", "mod"
)
STEP_ABOUT = Key.inside("fedbn-flwr.step", "ConfigRecord: round and attempt")
FINGERPRINT = Key.inside(
    "fingerprint", "str, in fedbn-flwr.kept: fingerprint of the model"
)
SHAPES = Key(
    "shapes", "dict, in fedbn-flwr.kept: shapes of the whole model", "mod", "mod"
)
STEP_ATTEMPT = Key.inside("attempt", "int, in fedbn-flwr.step")

CLIENT_KEYS = (ARRAY_NAMES, APPLIED, LOCAL_SHA256, LOCAL_HOME, LOCAL_BEGAN)
"""Keys of the client code among a ``NumPyClient``'s metrics, left out of averages."""

# the name of the round in projects on Flower's legacy strategies
_USERS_ROUND = SERVER_ROUND.replace("-", "_")

# A client uses the name of a run as a folder name.
_RUN = re.compile(r"[A-Za-z0-9_-]{1,64}")


def partition_of(context: Context) -> int | None:
    """Return the partition id in a node's config, or None without one.

    Raises:
        ConfigError: it is not a number.
    """
    number = context.node_config.get(PARTITION_ID)
    if number is None:
        return None
    if not str(number).isdecimal():
        raise ConfigError(
            f"partition-id={number!r} in the node's config must be a whole number, not"
            " negative"
        )
    return int(number)


def num_partitions_of(context: Context) -> int | None:
    """Return the number of partitions of the data, or None if it is unknown."""
    # The node's own data are not a partition of a larger data set.
    if DATA_PATH in context.node_config:
        return None
    number = str(context.node_config.get(NUM_PARTITIONS, ""))
    return int(number) if number.isdecimal() else None


def site_name_of(context: Context) -> str:
    """Return the name of the site in a node's config, or "" without one.

    Raises:
        ConfigError: it is not the name of a site.
    """
    name = context.node_config.get(SITE_NAME)
    if name is None:
        return ""
    fault = fault_of(name)
    if fault:
        raise ConfigError(f"site-name in the node's config: {fault}")
    return str(name)


def comma_list(config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return the words of the comma list ``key``, or () if the key is missing."""
    return _words(config.get(key, ""))


def merged_config(message: Message) -> dict[str, Any]:
    """Return the entries of all ConfigRecords of the message."""
    merged: dict[str, Any] = {}
    for record in of_kind(message.content, ConfigRecord).values():
        merged.update(values_of(record))
    return merged


def round_in(config: Mapping[str, Any]) -> int | None:
    """Return the round in a message's config, or None without one."""
    number = config.get(SERVER_ROUND, config.get(_USERS_ROUND))
    return None if number is None else int(number)


def own_node_id(context: Context) -> int:
    """Return the node id, used for the draws of a node without a partition id.

    Raises:
        ConfigError: the node has no id, for example under ``start_client``. All clients
            would then draw the same numbers.
    """
    if context.node_id == NO_NODE_ID:
        raise ConfigError(
            "start_client gives its clients no id, so all of them would draw the same"
            " batches. Give each client its partition id:"
            " to_client_fn(app, {'partition-id': 0}) or TorchClient(...,"
            " partition_id=0)."
        )
    return context.node_id


def message_seed(message: Message, context: Context) -> int:
    """Return the seed of the default generators in a client's work on a message.

    The seed depends on the strategy's seed, the round, the partition id and the kind of
    work, but not on the engine. The exchanges of a synchronised step have the seed of
    the training that repeats the step.
    """
    config = merged_config(message)
    node = context.node_config.get(PARTITION_ID)
    if node is None:
        node = own_node_id(context)
    purpose, server_round = message.metadata.message_type, config.get(SERVER_ROUND, 0)
    if purpose == EXCHANGE_QUERY:
        purpose = MessageType.TRAIN
    # Use round 0, because a node answers this query when it joins, in any round.
    if purpose == MessageType.QUERY:
        server_round = 0
    return derive_seed(
        int(config.get(SEED, 0)), "client", purpose, int(server_round), str(node)
    )


def refuse_own_keys(**configs: Mapping[str, Any] | None) -> None:
    """Refuse keys of users' configs that begin like the keys of this package.

    Args:
        configs: the configs, by the name for the message.

    Raises:
        ConfigError: there are such keys; the message names all of them.
    """
    taken = []
    for name, config in configs.items():
        taken += [f"{name}[{key!r}]" for key in config or () if key.startswith(PREFIX)]
    if taken:
        raise ConfigError(
            f"{', '.join(taken)}: keys that begin with {PREFIX!r} are reserved for this"
            " package. Rename yours."
        )


@dataclass(frozen=True)
class Continuity:
    """The identity of a run, for clients with a state folder.

    Attributes:
        run: id of the run and its resumptions.
        committed: rounds of the server's checkpoints; a resume starts from one of them.
    """

    run: str
    committed: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check the id, because a client uses it in paths."""
        if not _RUN.fullmatch(self.run):
            raise StateError(
                f"run {self.run!r} must be 1 to 64 letters, digits, '-' or '_'"
            )

    def write(self) -> dict[str, str]:
        """Return the entries of a message's config."""
        committed = ",".join(map(str, self.committed))
        return without_empty({RUN: self.run, COMMITTED: committed})

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Continuity | None:
        """Return the run in a message's config, or None if it is missing."""
        if RUN not in config:
            return None
        return cls(str(config[RUN]), tuple(map(int, comma_list(config, COMMITTED))))


def without_empty(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a config without empty text, bytes and lists.

    Readers treat a missing entry like an empty entry.
    """
    # Flower's message_size_mod fails for empty values.
    return {
        key: value
        for key, value in entries.items()
        if not isinstance(value, (str, bytes, list)) or value
    }


def named_state(sha256: str) -> str:
    """Return the hash of a kept state in the form for messages."""
    # Send a word for no state, because an empty text is not sent (``without_empty``).
    return sha256 or NO_STATE


def _state_named(value: object) -> str:
    return "" if value == NO_STATE else str(value)


def _words(text: object) -> tuple[str, ...]:
    return tuple(word for word in str(text).split(",") if word)


@functools.lru_cache(maxsize=64)
def _from_json(text: object) -> tuple[str, ...]:
    return tuple(json.loads(str(text)))


def _to_json(names: Collection[str]) -> str:
    return json.dumps(list(names))


def _as_it_is(value: Any) -> Any:
    return value


def _entry(
    key: Key,
    default: Any,
    read: Callable[[Any], Any] = _as_it_is,
    write: Callable[[Any], Any] = _as_it_is,
) -> Any:
    """Declare a field of a ``MessageConfig``.

    Args:
        key: its entry in the message.
        default: its value if the entry is missing. The default is not sent.
        read: converts the entry's value to the field's value.
        write: converts the field's value to the entry's value.
    """
    return field(default=default, metadata={"key": key, "read": read, "write": write})


@functools.cache
def _readers(kind: type[MessageConfig]) -> list[tuple[str, Key, Callable[[Any], Any]]]:
    """Return name, key and reading function of each field declared by ``_entry``."""
    # The result is cached, because ``fields`` takes longer than reading a config.
    found = []
    for entry in fields(kind):
        if entry.metadata:
            found.append((entry.name, entry.metadata["key"], entry.metadata["read"]))
    return found


@dataclass(frozen=True, kw_only=True)
class MessageConfig:
    """The config of every message with the model.

    ``read`` restores the values from the entries of ``write``.

    Attributes:
        server_round: counted from 1.
        seed: the seed of the run, see ``message_seed``.
        continuity: the run, for the client's state folder.
        start_id: id of a second or later start in one run of a ServerApp. A client
            forgets its state from another start. With None it keeps its state.
        local_entries: names of the entries that stay with the client.
        layers: paths of the BatchNorm layers that the method treats; () means all.
        personal: names of the local entries that the user has named.
        head: names of the personal entries that the server, without the model, has
            identified as the head, without a wrapper's prefix.
        fine_tune: number of training steps of the client before a test.
        local_sha256: hash of the state that the client must restore, "" for no state.
            With None the client decides.
        used_sha256: hash of the state that the client kept in the last round whose
            reply was used, "" if that state does not exist. With None, rounds are not
            undone.
    """

    server_round: int = 1
    seed: int = _entry(SEED, 0, int)
    continuity: Continuity | None = None
    start_id: str | None = _entry(START_ID, None)
    local_entries: tuple[str, ...] = _entry(LOCAL_ENTRIES, (), _from_json, _to_json)
    layers: tuple[str, ...] = _entry(LAYERS, (), _from_json, _to_json)
    personal: tuple[str, ...] = _entry(PERSONAL, (), _from_json, _to_json)
    fine_tune: int = _entry(FINE_TUNE, 0, int)
    local_sha256: str | None = _entry(LOCAL_SHA256, None, _state_named, named_state)
    used_sha256: str | None = _entry(USED_SHA256, None, _state_named, named_state)

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """Return the values of a message's config, ignoring other keys."""
        values: dict[str, Any] = {"continuity": Continuity.read(config)}
        server_round = round_in(config)
        if server_round is not None:
            values["server_round"] = server_round
        for name, key, read in _readers(cls):  # type: ignore[arg-type]  # a class is hashable
            if key in config:
                values[name] = read(config[key])
        return cls(**values)

    def write(self) -> dict[str, Any]:
        """Return the entries of a message's config, without unset values."""
        entries: dict[str, Any] = {SERVER_ROUND: self.server_round}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, Continuity):
                entries |= value.write()
                continue
            # If the default is None, 0 and "" are meaningful values.
            is_set = value is not None if entry.default is None else bool(value)
            if entry.metadata and is_set:
                entries[entry.metadata["key"]] = entry.metadata["write"](value)
        return entries


@dataclass(frozen=True, kw_only=True)
class TrainConfig(MessageConfig):
    """The config of a training message, without the entries of hooks.

    The entries of a hook are declared in the method's file.

    Attributes:
        hooks: names of the client hooks to apply, in order.
        extras: names of the method's records in addition to the model; other records
            belong to the user.
        frozen: whether BN is frozen in this round but not in all rounds; the learning
            rate depends on it.
        attempt: if the message is a part of a synchronised step by messages, the
            attempt of the step, otherwise None. ``transport.step_by_messages`` writes
            it.
    """

    hooks: tuple[str, ...] = _entry(HOOKS, (), _words, ",".join)
    extras: tuple[str, ...] = _entry(EXTRAS, (), _words, ",".join)
    frozen: bool = _entry(FROZEN, False, bool)
    attempt: int | None = _entry(ATTEMPT, None, int)


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(MessageConfig):
    """The config of an evaluation message.

    Attributes:
        test_sets: names of the test sets to use; empty for all.
    """

    test_sets: tuple[str, ...] = _entry(TEST_SETS, (), _words, ",".join)


@dataclass(frozen=True)
class ReplyInfo:
    """The report of the client code in a reply.

    Attributes:
        applied: names of the client hooks that the training applied.
        local_sha256: hash of the kept state, "" if nothing is kept.
        durable: whether the kept state is also in a state folder.
        began: whether the kept state began in this round.
        partition_id: the client's partition; None if the reply does not contain it.
        site_name: the name of the client's site, or "".
    """

    applied: frozenset[str] = frozenset()
    local_sha256: str = ""
    durable: bool = False
    began: bool = False
    partition_id: int | None = None
    site_name: str = ""

    @classmethod
    def read(cls, reply: Message) -> ReplyInfo:
        """Return the report of a reply, or an empty report for an error."""
        info: Mapping[str, Any] = {}
        if reply.has_content():
            records = of_kind(reply.content, ConfigRecord)
            info = values_of(records[INFO]) if INFO in records else {}
        # Check the value, because a foreign app may use the same name for any value.
        partition_id = info.get(PARTITION_ID)
        if not isinstance(partition_id, int) or partition_id < 0:
            partition_id = None
        return cls(
            applied=frozenset(comma_list(info, APPLIED)),
            local_sha256=str(info.get(LOCAL_SHA256, "")),
            durable=info.get(LOCAL_HOME) == "folder",
            began=LOCAL_BEGAN in info,
            partition_id=partition_id,
            site_name=str(info.get(SITE_NAME, "")),
        )

    def write(self) -> dict[str, str]:
        """Return the entries about the kept state, none if nothing is kept.

        Other functions write the other entries: the training writes the hooks, and the
        client app writes the partition.
        """
        if not self.local_sha256:
            return {}
        info: dict[str, str] = {
            LOCAL_SHA256: self.local_sha256,
            LOCAL_HOME: "folder" if self.durable else "memory",
        }
        if self.began:
            info[LOCAL_BEGAN] = "anew"
        return info


def add_info(reply: Message, entries: Mapping[str, Any]) -> None:
    """Add entries to the record that ``ReplyInfo`` and ``NodeProperties`` read."""
    if entries:
        known: Mapping[str, Any] = of_kind(reply.content, ConfigRecord).get(INFO, {})
        reply.content[INFO] = ConfigRecord({**known, **entries})


@dataclass(frozen=True)
class NodeProperties:
    """A node's answer to the query, with None for missing values.

    Attributes:
        partition_id: the node's partition of the data.
        num_examples: the number of its training examples.
        batch_size: the number of examples in its first batch.
        unusable: the reason if the node cannot take part, otherwise "".
        refusal: the reason if a mod of its app has refused the query, otherwise "".
        num_partitions: the number of partitions of the data.
        site_name: the name of the node's site, or "".
        versions: the versions of its packages, see ``messages.versions``.
        packs: the version of packed arrays that its app reads; the mod ``packed``
            writes it.
    """

    partition_id: int | None = None
    num_examples: int | None = None
    batch_size: int | None = None
    unusable: str = ""
    refusal: str = ""
    num_partitions: int | None = None
    site_name: str = ""
    versions: str = ""
    packs: object = None

    @classmethod
    def read(cls, reply: Message) -> NodeProperties:
        """Return the properties in a reply to the query, without negative numbers."""
        # Read all records, because the app chooses the name of the record.
        numbers: dict[str, int] = {}
        for metrics in of_kind(reply.content, MetricRecord).values():
            for key, value in metrics.items():
                if isinstance(value, int) and value >= 0:
                    numbers[key] = value
        info: Mapping[str, Any] = of_kind(reply.content, ConfigRecord).get(INFO, {})
        return cls(
            partition_id=numbers.get(PARTITION_ID),
            num_examples=numbers.get(NUM_EXAMPLES),
            batch_size=numbers.get(BATCH_SIZE),
            unusable=str(info.get(UNUSABLE, "")),
            refusal=str(info.get(REFUSAL, "")),
            num_partitions=numbers.get(NUM_PARTITIONS),
            site_name=str(info.get(SITE_NAME, "")),
            versions=str(info.get(VERSIONS, "")),
            packs=info.get(PACKS),
        )

    def write(self) -> dict[str, MetricRecord | ConfigRecord]:
        """Return the records of a reply."""
        numbers = {
            PARTITION_ID: self.partition_id,
            NUM_EXAMPLES: self.num_examples,
            BATCH_SIZE: self.batch_size,
            NUM_PARTITIONS: self.num_partitions,
        }
        known: dict[str, Any] = {
            str(key): number for key, number in numbers.items() if number is not None
        }
        records: dict[str, MetricRecord | ConfigRecord] = {METRICS: MetricRecord(known)}
        texts = {
            UNUSABLE: self.unusable,
            REFUSAL: self.refusal,
            SITE_NAME: self.site_name,
            VERSIONS: self.versions,
        }
        info: dict[str, Any] = {str(key): text for key, text in texts.items() if text}
        if info:
            records[INFO] = ConfigRecord(info)
        return records
