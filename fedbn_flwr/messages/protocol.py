"""All names in the messages, and in a client's ``Context.state``.

The file first declares the keys. Configs and answers with several keys follow, as
values with ``read`` and ``write``.

Each record name and key that more than one module uses is declared here, with its type
and content. The keys of a single method are declared in the method's file.

Keys begin with ``PREFIX`` if the server or the codec adds them to a config that also
has keys of users. The exceptions are Flower's own ``server-round``, and ``test-sets``,
which the caller adds. Some names are older than the terms of the code:
``fedbn-flwr.rules`` belongs to client hooks.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from flwr.app import ConfigRecord, Context, Message, MessageType, MetricRecord

from fedbn_flwr.compat.flower import values_of
from fedbn_flwr.errors import ConfigError, StateError, one_line
from fedbn_flwr.messages.records import of_kind
from fedbn_flwr.messages.site_names import fault_of
from fedbn_flwr.training.randomness import derive_seed

__all__ = [
    "Continuity",
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

# --- records of a message -------------------------------------------------------------
METRICS = "metrics"  # MetricRecord of a reply
INFO = "properties"  # ConfigRecord of a reply: ReplyInfo
EXCHANGE = "fedtan"  # ArrayRecord: one exchange of a synchronised step
EXCHANGE_QUERY = "query.exchange"  # message type: one exchange of a synchronised step
PACKED = "fedbn-flwr.packed"  # ArrayRecord: all arrays of the message in one piece
STATISTICS_QUERY = "query.statistics"  # message type: re-estimated statistics

# --- config of a message from the server ----------------------------------------------
# ``MessageConfig`` and ``TrainConfig`` have further keys, named after their fields.
SERVER_ROUND = "server-round"  # int
SEED = "fedbn-flwr.seed"  # int: seed of the run, for the clients' default generators
HOOKS = "fedbn-flwr.hooks"  # str, JSON list: client hooks to apply
EXTRAS = "fedbn-flwr.extras"  # str, JSON list: the method's further records
# bool, in a query of statistics: the answer has the moments of each class
CLASS_MOMENTS = "fedbn-flwr.class-moments"
NO_STATE = "none"  # sent instead of a hash if no state exists
# str: SHA-256 of the kept state; from the server `none` means no state
LOCAL_SHA256 = "fedbn-flwr.local-sha256"
# str: SHA-256 of the kept state after the last round whose reply was used; `none` if it
# does not exist
USED_SHA256 = "fedbn-flwr.used-sha256"
# str: SHA-256 of the fixed entries of the run, see batchnorm.train_only
FIXED_SHA256 = "fedbn-flwr.fixed-sha256"
# str, JSON list: names of the fixed entries, in a message that contains them
FIXED_ENTRIES = "fedbn-flwr.fixed-entries"
START_ID = "fedbn-flwr.start-id"  # str: id of a second or further start in one run
RUN = "fedbn-flwr.run"  # str: id of the run and its resumptions
COMMITTED = "fedbn-flwr.committed"  # str, comma list: rounds of the checkpoints
TEST_SETS = "test-sets"  # str, comma list
# an element of TEST_SETS that means the client's validation data
VALIDATION = "validation"
OWN = "own"  # an element of TEST_SETS that means the client's own test data
BARRIER = "fedbn-flwr.fedtan-barrier"  # str: id of the barrier in this process
CHANNEL_ADDRESS = "fedbn-flwr.fedtan-address"  # str, host:port
CHANNEL_TOKEN = "fedbn-flwr.fedtan-token"  # str: this node's token for this round
CHANNEL_CA = "fedbn-flwr.fedtan-ca"  # bytes, PEM
CHANNEL_TIMEOUT = "fedbn-flwr.fedtan-timeout"  # float, seconds
ATTEMPT = "fedbn-flwr.attempt"  # int: attempt of a step that uses messages
# bool: the training ends after its first step
STEP_ONLY = "fedbn-flwr.fedtan-step-only"
UNION = "fedbn-flwr.fedtan-union"  # int: examples in the union of the first batches
# int: examples of this client's first batch
FIRST_BATCH = "fedbn-flwr.fedtan-batch-size"


# --- arrays as a NumPyClient takes them -----------------------------------------------
ARRAY_NAMES = "fedbn-flwr.array-names"  # str, JSON list: names of the arrays, in order
MOD = "fedbn-flwr.client-mod"  # str: name of the mod with the client code

# --- metrics of a reply ---------------------------------------------------------------
NUM_EXAMPLES = "num-examples"  # int: training examples, the weight
# float: after training, on the client's validation data
VALIDATION_LOSS = "validation-loss"
LOSS = "loss"  # float: mean loss on the first test set
TRAIN_LOSS = "train-loss"  # float
TRAIN_ACCURACY = "train-accuracy"  # float
EXAMPLES_PROCESSED = "examples-processed"  # int
STEPS = "steps"  # int
DROPPED_BATCHES = "dropped-batches"  # int
EXAMPLES_TESTED = "examples-tested"  # int

# --- entries of ReplyInfo and the query -----------------------------------------------
APPLIED = "fedbn-flwr.hooks-applied"  # str, comma list: client hooks applied
LOCAL_HOME = "fedbn-flwr.local-home"  # str: folder or memory
LOCAL_BEGAN = "fedbn-flwr.local-began"  # str: the kept state began in this round
# FIXED_SHA256: the fixed entries that the client has
PARTITION_ID = "partition-id"  # int
BATCH_SIZE = "batch-size"  # int: examples of the first batch
UNUSABLE = "unusable"  # str: why the node cannot take part
REFUSAL = "refusal"  # str: why a mod of the app has refused the query
# str: of the node's fedbn-flwr, torch and flwr, over a network
VERSIONS = "node-versions"
PACKS = "fedbn-flwr.packs"  # int: the form of arrays in one piece that the app reads
# bool, in the query: BN layers are synchronised
SYNCHRONISES = "fedbn-flwr.synchronises"

# --- config of a node -----------------------------------------------------------------
NUM_PARTITIONS = "num-partitions"  # int
STATE_DIR = "state-dir"  # str: absolute folder of the kept state
SITE_NAME = "site-name"  # str: name of the site for the log and the results
DATA_PATH = "data-path"  # str: the node's own data
# bool: whether the server may receive the texts of errors about data
REPORT_DATA = "report-data"
ALLOW_PATHS = "allow-paths"  # str, comma list: folders whose paths a run may name
ALLOW_MODULES = "allow-modules"  # str, comma list: modules that a run may name

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
# ConfigRecord: ROUND.SHA256, a kept state as a checked file
KEPT_STATES = "fedbn-flwr.kept"
KEPT = "fedbn-flwr.local"  # in a kept state: the entries that stay with the client
# in a kept state: HOOK/NAME, entries of client hooks; ArrayRecord between the mod and
# bn_rules
KEPT_BY_HOOKS = "fedbn-flwr.rules"
# ArrayRecord, ConfigRecord: the fixed entries, and their hash and place in the model
FIXED = "fedbn-flwr.fixed"
FIXED_ABOUT = "fedbn-flwr.fixed-about"
INBOX = "fedbn-flwr.inbox"  # ArrayRecords inbox/RECORD: further records of the message
# ConfigRecord, ArrayRecords outbox/RECORD: additions to the reply
OUTBOX = "fedbn-flwr.outbox"
STEP_MODEL = "fedbn-flwr.step.model"  # ArrayRecord: the round's model
STEP_ANSWERS = "fedbn-flwr.step.answers"  # ArrayRecord: exchanges answered so far
STEP_SENT = "fedbn-flwr.step.sent"  # ArrayRecord: exchanges sent so far
STEP_ABOUT = "fedbn-flwr.step"  # ConfigRecord: round and attempt
FINGERPRINT = "fingerprint"  # str, in a kept state: fingerprint of the model
SHAPES = "shapes"  # dict, in a kept state: shapes of the whole model
STEP_ATTEMPT = "attempt"  # int, in fedbn-flwr.step

CLIENT_KEYS = (ARRAY_NAMES, APPLIED, LOCAL_SHA256, LOCAL_HOME, LOCAL_BEGAN)
"""Keys of the client code among a ``NumPyClient``'s metrics, left out of averages."""

# the name of the round in projects on Flower's legacy strategies
_USERS_ROUND = SERVER_ROUND.replace("-", "_")

_SHA256 = 64  # characters of a hash

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
    return tuple(word for word in str(config.get(key, "")).split(",") if word)


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


@functools.cache
def _entries(kind: type[MessageConfig]) -> list[tuple[str, str, Any]]:
    """Return name, key and default of each field that is an entry of its own."""
    # The result is cached, because ``fields`` takes longer than reading a config.
    found = []
    for entry in fields(kind):
        if entry.name not in ("server_round", "continuity"):
            key = PREFIX + entry.name.replace("_", "-")
            found.append((entry.name, key, entry.default))
    return found


@dataclass(frozen=True, kw_only=True)
class MessageConfig:
    """The config of every message with the model.

    ``read`` restores the values from the entries of ``write``. The key of a field is
    ``PREFIX`` with its name. The value is a number or a text; several texts are a JSON
    list.

    Attributes:
        server_round: counted from 1.
        seed: the seed of the run, see ``message_seed``.
        continuity: the run, for the client's state folder.
        start_id: id of a second or later start in one run of a ServerApp. A client
            forgets its state from another start. With None it keeps its state.
        local_entries: names of the entries that stay with the client.
        layers: paths of the BatchNorm layers that the method treats; () means all.
        personal: names of the local entries that the user has named.
        fine_tune: number of training steps of the client before a test.
        recalibrate: whether the client measures its statistics before a test.
        local_sha256: hash of the state that the client must restore, "" for no state.
            With None the client decides.
        used_sha256: hash of the state that the client kept in the last round whose
            reply was used, "" if that state does not exist. With None, rounds are not
            undone.
        fixed_sha256: hash of the entries that do not change in the run. With None there
            are none.
        fixed_entries: their names. Only a message that contains the entries names them;
            ``client.fixed`` adds the names to the others.
    """

    server_round: int = 1
    continuity: Continuity | None = None
    seed: int = 0
    start_id: str | None = None
    local_entries: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    personal: tuple[str, ...] = ()
    fine_tune: int = 0
    recalibrate: bool = False
    local_sha256: str | None = None
    used_sha256: str | None = None
    fixed_sha256: str | None = None
    fixed_entries: tuple[str, ...] = ()

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """Return the values of a message's config, ignoring other keys."""
        values: dict[str, Any] = {}
        if RUN in config:
            values["continuity"] = Continuity.read(config)
        server_round = round_in(config)
        if server_round is not None:
            values["server_round"] = server_round
        for name, key, default in _entries(cls):  # type: ignore[arg-type]  # a class is hashable
            if key in config:
                value = config[key]
                if isinstance(default, tuple):
                    value = tuple(json.loads(str(value)))
                values[name] = "" if value == NO_STATE else value
        return cls(**values)

    def write(self) -> dict[str, Any]:
        """Return the entries of a message's config, without values that are not set."""
        entries: dict[str, Any] = {SERVER_ROUND: self.server_round}
        if self.continuity:
            entries |= self.continuity.write()
        for name, key, default in _entries(type(self)):  # type: ignore[arg-type]
            value = getattr(self, name)
            if value == default:
                continue
            if isinstance(default, tuple):
                value = json.dumps(list(value))
            entries[key] = named_state(value) if value == "" else value
        return entries


@dataclass(frozen=True, kw_only=True)
class TrainConfig(MessageConfig):
    """The config of a training message, without the entries of hooks.

    The entries of a hook are declared in the method's file.

    Attributes:
        hooks: names of the client hooks to apply, in order.
        extras: names of the method's records in addition to the model; other records
            belong to the user.
        frozen: whether BN is frozen in this round, under a method that may also train
            it; the learning rate depends on it.
        attempt: if the message is a part of a synchronised step by messages, the
            attempt of the step, otherwise None. ``transport.step_by_messages`` writes
            it.
        batchnorm: paths of the BatchNorm layers that the server has found by names, for
            a comparison with the types; () if it needs none.
    """

    hooks: tuple[str, ...] = ()
    batchnorm: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    frozen: bool = False
    attempt: int | None = None


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
        fixed_sha256: hash of the fixed entries that the client has, or "".
    """

    applied: frozenset[str] = frozenset()
    local_sha256: str = ""
    durable: bool = False
    began: bool = False
    partition_id: int | None = None
    site_name: str = ""
    fixed_sha256: str = ""

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
            local_sha256=str(info.get(LOCAL_SHA256, ""))[:_SHA256],
            durable=info.get(LOCAL_HOME) == "folder",
            began=LOCAL_BEGAN in info,
            partition_id=partition_id,
            site_name=str(info.get(SITE_NAME, "")),
            fixed_sha256=str(info.get(FIXED_SHA256, ""))[:_SHA256],
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
        values: dict[str, Any] = {"packs": info.get(PACKS)}
        for name, key in _NUMBERS.items():
            values[name] = numbers.get(key)
        for name, key in _TEXTS.items():
            text = str(info.get(key, ""))
            values[name] = text if key == SITE_NAME else one_line(text)
        return cls(**values)

    def write(self) -> dict[str, MetricRecord | ConfigRecord]:
        """Return the records of a reply."""
        numbers = {key: getattr(self, name) for name, key in _NUMBERS.items()}
        known = {key: value for key, value in numbers.items() if value is not None}
        records: dict[str, MetricRecord | ConfigRecord] = {METRICS: MetricRecord(known)}
        info = without_empty({key: getattr(self, name) for name, key in _TEXTS.items()})
        if info:
            records[INFO] = ConfigRecord(info)
        return records


# The keys of the fields of ``NodeProperties``.
_NUMBERS = {
    "partition_id": PARTITION_ID,
    "num_examples": NUM_EXAMPLES,
    "batch_size": BATCH_SIZE,
    "num_partitions": NUM_PARTITIONS,
}
_TEXTS = {
    "unusable": UNUSABLE,
    "refusal": REFUSAL,
    "site_name": SITE_NAME,
    "versions": VERSIONS,
}
