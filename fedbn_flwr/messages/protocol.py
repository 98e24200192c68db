"""All names in the messages between server and clients, and in a client's
``Context.state``.

This file declares each record name and key that more than one module uses. The keys of
a single method are declared in the method's file. No other file may write such a name
(``tests/messages/test_protocol.py``). ``make generate`` writes the table of all keys,
``docs/reference/messages.md``, from the declarations.

Keys that the server or the codec adds to a config in which users have keys of their own
begin with ``PREFIX``. The exceptions are Flower's own ``server-round``, and
``test-sets``, which the caller puts there. Some names are older than the words of the
code: ``fedbn-flwr.rules`` belongs to client hooks, ``frame`` and ``whole`` are the
model's spec.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from flwr.app import ConfigRecord, Context, Message, MessageType, MetricRecord

from fedbn_flwr.errors import ConfigError, StateError
from fedbn_flwr.messages.kinds import of_kind
from fedbn_flwr.seeds import derive_seed

__all__ = [
    "SERIES_PATTERN",
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
    "partition_of",
    "refuse_own_keys",
    "round_in",
    "without_empty",
]

PREFIX = "fedbn-flwr."
"""The beginning of every key that this package adds to a user's config."""


class Key(str):
    """The name of a record or of an entry, with the columns of the table in
    ``docs/reference/messages.md``.
    """

    kind: str
    writer: str
    reader: str

    def __new__(cls, name: str, kind: str, writer: str, reader: str) -> Self:
        """Make the key ``name``; the other arguments are its row in the table."""
        key = super().__new__(cls, name)
        key.kind, key.writer, key.reader = kind, writer, reader
        return key

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Make a copied or pickled key a plain ``str``: messages do not carry this
        class.
        """
        return str, (str(self),)


# --- records of a message -------------------------------------------------------------
METRICS = Key("metrics", "MetricRecord of a reply", "client", "server")
INFO = Key("properties", "ConfigRecord of a reply: ReplyInfo", "client", "server")
EXCHANGE = Key(
    "fedtan",
    "ArrayRecord: one exchange of a synchronised step",
    "server, client",
    "client, server",
)
EXCHANGE_QUERY = Key(
    "query.exchange",
    "message type: one exchange of a synchronised step",
    "server",
    "client",
)
PACKED = Key(
    "fedbn-flwr.packed",
    "ArrayRecord: all arrays of the message in one piece",
    "server, client",
    "client, server",
)
STATISTICS_QUERY = Key(
    "query.statistics", "message type: re-estimated statistics", "server", "client"
)

# --- config of a message from the server ----------------------------------------------
SERVER_ROUND = Key("server-round", "int", "server", "client")
SEED = Key(
    "fedbn-flwr.seed",
    "int: seed of the run, for the clients' default generators",
    "server",
    "client",
)
HOOKS = Key(
    "fedbn-flwr.hooks", "str, comma list: client hooks to apply", "server", "client"
)
EXTRAS = Key(
    "fedbn-flwr.extras",
    "str, comma list: the method's further records",
    "server",
    "client",
)
LOCAL_ENTRIES = Key(
    "fedbn-flwr.local-entries",
    "str, JSON list: names of the entries that stay",
    "server",
    "client",
)
NO_STATE = "none"  # in the place of a hash
LOCAL_SHA256 = Key(
    "fedbn-flwr.local-sha256",
    "str: SHA-256 of the kept state; from the server `none` = no state",
    "server, client",
    "client, server",
)
USED_SHA256 = Key(
    "fedbn-flwr.used-sha256",
    "str: SHA-256 of the kept state after the last round whose reply was used; `none` ="
    " there was none",
    "server",
    "client",
)
START_ID = Key(
    "fedbn-flwr.start",
    "str: id of a second or further start in one run",
    "server",
    "client",
)
SERIES = Key("fedbn-flwr.series", "str: experiment id", "server", "client")
RUN = Key("fedbn-flwr.run", "str: this run and its resumptions", "server", "client")
COMMITTED = Key(
    "fedbn-flwr.committed",
    "str, comma list: rounds of the checkpoints",
    "server",
    "client",
)
TEST_SETS = Key("test-sets", "str, comma list", "server", "client")
VALIDATION = "validation"  # in TEST_SETS: the client's validation data
OWN = "own"  # in TEST_SETS: the client's own test data
FROZEN = Key(
    "fedbn-flwr.frozen", "bool: BN is frozen in this round", "server", "client"
)
BARRIER = Key(
    "fedbn-flwr.fedtan-barrier",
    "str: id of the barrier in this process",
    "server",
    "client",
)
CHANNEL_ADDRESS = Key("fedbn-flwr.fedtan-address", "str, host:port", "server", "client")
CHANNEL_TOKEN = Key(
    "fedbn-flwr.fedtan-token",
    "str: this node's token for this round",
    "server",
    "client",
)
CHANNEL_CA = Key("fedbn-flwr.fedtan-ca", "bytes, PEM", "server", "client")
CHANNEL_TIMEOUT = Key("fedbn-flwr.fedtan-timeout", "float, seconds", "server", "client")
ATTEMPT = Key(
    "fedbn-flwr.fedtan-attempt",
    "int: attempt of a step that travels in messages",
    "server",
    "client",
)
STEP_ONLY = Key(
    "fedbn-flwr.fedtan-step-only",
    "bool: the training ends after its first step",
    "server",
    "client",
)
UNION = Key(
    "fedbn-flwr.fedtan-union",
    "int: examples in the union of the first batches",
    "server",
    "client",
)
FIRST_BATCH = Key(
    "fedbn-flwr.fedtan-batch-size",
    "int: examples of this client's first batch",
    "server",
    "client",
)


# --- masked sums ----------------------------------------------------------------------
MASK_STAGE = Key(
    "fedbn-flwr.mask-stage",
    "str, in a query: keys, shares or reveal",
    "server",
    "client",
)
MASK_REPLY = Key(
    "masks", "ConfigRecord of the answer to such a query", "client", "server"
)
MASK_NUMBER = Key(
    "fedbn-flwr.mask-number",
    "int: this client's number in the round",
    "server",
    "client",
)
MASK_NUMBERS = Key(
    "fedbn-flwr.mask-numbers",
    "list of int: clients, by number",
    "server, client",
    "client, server",
)
MASK_KEYS = Key(
    "fedbn-flwr.mask-keys",
    "list of bytes: two public keys of each",
    "server, client",
    "client, server",
)
MASK_SHARES = Key(
    "fedbn-flwr.mask-shares",
    "list of bytes: a share for or of each",
    "server, client",
    "client, server",
)
MASK_THRESHOLD = Key("fedbn-flwr.mask-threshold", "int: t", "server", "client")
MASK_ANSWERED = Key(
    "fedbn-flwr.mask-answered",
    "list of int: clients whose model has arrived",
    "server",
    "client",
)
MASK_LOST = Key(
    "fedbn-flwr.mask-lost",
    "list of int: clients whose model has not",
    "server",
    "client",
)
MASK_PRESENT = Key(
    "fedbn-flwr.mask-present",
    "list of int: the other clients of the round",
    "server",
    "client",
)
MASK_WEIGHT = Key("fedbn-flwr.mask-weight", "float: w_i", "server", "client")
MASK_TOTAL = Key("fedbn-flwr.mask-total-weight", "float: W", "server", "client")
MASK_EQUAL = Key(
    "fedbn-flwr.mask-equal-weights", "bool: all weights are 1", "server", "client"
)
FRESH_BATCHES = Key(
    "fedbn-flwr.fresh-batches",
    "int: number of the attempt; clients draw new batches for it",
    "server",
    "client",
)
MASKED = Key(
    "fedbn-flwr.masked",
    "int64 vector, in the model's record: the masked update",
    "client",
    "server",
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
    "str: name of the mod with the client part",
    "mod",
    "TorchClient",
)

# --- metrics of a reply ---------------------------------------------------------------
NUM_EXAMPLES = Key(
    "num-examples", "int: training examples, the weight", "client", "server"
)
VALIDATION_LOSS = Key(
    "validation-loss",
    "float: after training, on the client's validation data",
    "client",
    "server",
)
LOSS = Key("loss", "float: mean loss on the first test set", "client", "server")
TRAIN_LOSS = Key("train-loss", "float", "client", "server")
TRAIN_ACCURACY = Key("train-accuracy", "float", "client", "server")
EXAMPLES_PROCESSED = Key("examples-processed", "int", "client", "server")
STEPS = Key("steps", "int", "client", "server")
DROPPED_BATCHES = Key("dropped-batches", "int", "client", "server")
EXAMPLES_TESTED = Key("examples-tested", "int", "client", "server")

# --- entries of ReplyInfo and the query -----------------------------------------------
APPLIED = Key(
    "fedbn-flwr.hooks-applied",
    "str, comma list: client hooks applied",
    "client",
    "server",
)
LOCAL_HOME = Key("fedbn-flwr.local-home", "str: folder or memory", "client", "server")
LOCAL_BEGAN = Key(
    "fedbn-flwr.local-began",
    "str: the kept state began in this round",
    "client",
    "server",
)
PARTITION_ID = Key("partition-id", "int", "client, node config", "server, client")
BATCH_SIZE = Key("batch-size", "int: examples of the first batch", "client", "server")
UNUSABLE = Key("unusable", "str: why the node cannot take part", "client", "server")
REFUSAL = Key(
    "refusal", "str: why a mod of the app has refused the query", "client", "server"
)
VERSIONS = Key(
    "node-versions",
    "str: of the node's fedbn-flwr, torch and flwr, over a network",
    "client",
    "server",
)
PACKS = Key(
    "fedbn-flwr.packs",
    "int: the form of arrays in one piece that the app reads",
    "client",
    "server",
)
SYNCHRONISES = Key(
    "fedbn-flwr.synchronises",
    "bool, in the query: BN layers are synchronised",
    "server",
    "client",
)

# --- config of a node -----------------------------------------------------------------
NUM_PARTITIONS = Key("num-partitions", "int", "client, node config", "server, client")
STATE_DIR = Key(
    "state-dir",
    "str: absolute folder of the kept state",
    "node config, run config",
    "client",
)
DATA_PATH = Key("data-path", "str: the node's own data", "node config", "client")
REPORT_DATA = Key(
    "report-data",
    "bool: the server may have texts of errors about data",
    "node config",
    "client",
)
DATA_CLASSES = Key(
    "data-classes",
    "str, comma list: classes of the node's own data",
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
    STATE_DIR,
    DATA_PATH,
    REPORT_DATA,
    DATA_CLASSES,
    ALLOW_PATHS,
    ALLOW_MODULES,
)
"""Keys of a node's config that the default app knows."""

# --- Context.state --------------------------------------------------------------------
KEPT = Key(
    "fedbn-flwr.local",
    "ArrayRecord: entries that stay with the client",
    "client",
    "client",
)
KEPT_BY_HOOKS = Key(
    "fedbn-flwr.rules",
    "ArrayRecord: HOOK/NAME, entries of client hooks",
    "client",
    "client",
)
KEPT_ABOUT = Key(
    "fedbn-flwr.local.about",
    "ConfigRecord: version, fingerprint, start, round, begun, SHA-256",
    "client",
    "client",
)
KEPT_BEFORE = Key(
    "fedbn-flwr.before",
    "records before/NAME: the kept state before the round",
    "client",
    "client",
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
MODEL_SPEC = Key(
    "fedbn-flwr.whole",
    "ConfigRecord: names and shapes of the whole model",
    "mod",
    "mod",
)
STEP_MODEL = Key(
    "fedbn-flwr.step.model", "ArrayRecord: the round's model", "client", "client"
)
STEP_ANSWERS = Key(
    "fedbn-flwr.step.answers",
    "ArrayRecord: exchanges answered so far",
    "client",
    "client",
)
STEP_SENT = Key(
    "fedbn-flwr.step.sent", "ArrayRecord: exchanges sent so far", "mod", "mod"
)
STEP_ABOUT = Key(
    "fedbn-flwr.step", "ConfigRecord: round and attempt", "client", "client"
)
VERSION = Key(
    "version",
    "int, in fedbn-flwr.local.about: version of the format",
    "client",
    "client",
)
FINGERPRINT = Key(
    "fingerprint",
    "str, in fedbn-flwr.local.about: fingerprint of the model",
    "client",
    "client",
)
BEGUN = Key(
    "begun",
    "int, in fedbn-flwr.local.about: the round that made the kept state anew, else 0",
    "client",
    "client",
)
STEP_ATTEMPT = Key("attempt", "int, in fedbn-flwr.step", "client", "client")
MASK_PARTY = Key(
    "fedbn-flwr.masks",
    "ConfigRecord: this client in a round of masked sums",
    "client",
    "client",
)
MASK_SECRETS = Key("secrets", "bytes, in fedbn-flwr.masks", "client", "client")
SPEC_SHAPES = Key("frame", "str, JSON, in fedbn-flwr.whole", "mod", "mod")

CLIENT_KEYS = (ARRAY_NAMES, APPLIED, LOCAL_SHA256, LOCAL_HOME, LOCAL_BEGAN)
"""Keys of the client part among the metrics of a ``NumPyClient``; they are left out of
averages.
"""

# as projects on Flower's legacy strategies write it
_USERS_ROUND = SERVER_ROUND.replace("-", "_")

# A client makes a folder name of it: no separator, no "..".
SERIES_PATTERN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}")
_RUN = re.compile(r"[A-Za-z0-9_-]{1,64}")


def partition_of(context: Context) -> int | None:
    """Return the partition id in a node's config; None if it has none.

    Raises:
        ConfigError: it is no number.
    """
    number = context.node_config.get(PARTITION_ID)
    if number is not None and not str(number).isdecimal():
        raise ConfigError(
            f"partition-id={number!r} of the node's config must be a whole number"
            " from 0"
        )
    return None if number is None else int(number)


def num_partitions_of(context: Context) -> int | None:
    """Return the number of parts of which the node has one; None if its config does not
    say so, or for own data.
    """
    number = str(context.node_config.get(NUM_PARTITIONS, ""))
    return (
        int(number)
        if number.isdecimal() and DATA_PATH not in context.node_config
        else None
    )


def comma_list(config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return the words of the comma list ``key``; none if the key is missing."""
    return _words(config.get(key, ""))


def merged_config(message: Message) -> dict[str, Any]:
    """Return the entries of all ConfigRecords of the message."""
    merged: dict[str, Any] = {}
    for record in of_kind(message.content, ConfigRecord).values():
        merged.update(record.items())
    return merged


def round_in(config: Mapping[str, Any]) -> int | None:
    """Return the round in a message's config; None if it has none."""
    number = config.get(SERVER_ROUND, config.get(_USERS_ROUND))
    return None if number is None else int(number)


def message_seed(message: Message, context: Context) -> int:
    """Return the seed of the default generators in a client's work on a message.

    It depends on the strategy's seed, the round, the partition id and the kind of work,
    and not on the engine. The exchanges of a synchronised step have the seed of the
    training that repeats the step.
    """
    config, kind = merged_config(message), message.metadata.message_type
    node = context.node_config.get(PARTITION_ID, context.node_id)
    purpose = MessageType.TRAIN if kind == EXCHANGE_QUERY else kind
    return derive_seed(
        int(config.get(SEED, 0)),
        "client",
        purpose,
        int(config.get(SERVER_ROUND, 0)),
        str(node),
    )


def refuse_own_keys(**configs: Mapping[str, Any] | None) -> None:
    """Refuse keys of users' configs, given by the argument's name, that begin with
    ``PREFIX``.

    Raises:
        ConfigError: there are such keys; all are named.
    """
    taken = []
    for name, config in configs.items():
        taken += [f"{name}[{key!r}]" for key in config or () if key.startswith(PREFIX)]
    if taken:
        raise ConfigError(
            f"{', '.join(taken)}: keys that begin with {PREFIX!r} are those that this"
            " package adds. Rename yours."
        )


@dataclass(frozen=True)
class Continuity:
    """Which run this is, for clients with a state folder; and the rounds that it can
    resume from.

    Attributes:
        series: experiment id; runs of one experiment continue with the same client
            state.
        run: id of the run and its resumptions.
        committed: rounds of the server's checkpoints; a resume starts from one of them.
    """

    series: str
    run: str
    committed: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check the ids: a client makes paths of them."""
        if not SERIES_PATTERN.fullmatch(self.series) or not _RUN.fullmatch(self.run):
            raise StateError(
                f"series {self.series!r} and run {self.run!r} must be 1 to 64 letters,"
                " digits, '-' or '_' (a series: '.' inside, too)"
            )

    def write(self) -> dict[str, str]:
        """Return the entries of a message's config."""
        return without_empty(
            {
                SERIES: self.series,
                RUN: self.run,
                COMMITTED: ",".join(map(str, self.committed)),
            }
        )

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Continuity | None:
        """Return the run in a message's config; None if the server does not send it."""
        if SERIES not in config:
            return None
        return cls(
            str(config[SERIES]),
            str(config[RUN]),
            tuple(map(int, comma_list(config, COMMITTED))),
        )


def without_empty(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a config without empty text, bytes and lists, for which
    Flower's message_size_mod fails.

    An entry that is not there reads as an empty one.
    """
    return {
        key: value
        for key, value in entries.items()
        if not isinstance(value, (str, bytes, list)) or value
    }


def named_state(sha256: str) -> str:
    """Return how the hash of a kept state travels: ``NO_STATE`` in the place of "", no
    state.
    """
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
    """Declare a field of a ``MessageConfig``: its key, its default, which is not sent,
    and how its value travels.
    """
    return field(default=default, metadata={"key": key, "read": read, "write": write})


@functools.cache
def _readers(kind: type[MessageConfig]) -> list[tuple[str, Key, Callable[[Any], Any]]]:
    """Return the name, the key and the function that reads it for each field that is an
    entry of its own.
    """
    entries = [(entry.name, entry.metadata) for entry in fields(kind) if entry.metadata]
    return [(name, about["key"], about["read"]) for name, about in entries]


@dataclass(frozen=True, kw_only=True)
class MessageConfig:
    """The config of every message with the model. ``read`` returns what ``write`` has
    written.

    Attributes:
        server_round: counted from 1.
        seed: the seed of the run, see ``message_seed``.
        continuity: the run, for the client's state folder.
        start_id: id of a second start in one run of a ServerApp, or of a further one; a
            client forgets what it kept in another. None = it does not.
        local_entries: names of the entries that stay with the client.
        local_sha256: hash of the state that the client must restore, "" for no state;
            None = the client decides.
        used_sha256: hash of the state that the client kept in the last round whose
            reply was used, "" if there was none; None = rounds are not undone.
    """

    server_round: int = 1
    seed: int = _entry(SEED, 0, int)
    continuity: Continuity | None = None
    start_id: str | None = _entry(START_ID, None)
    local_entries: tuple[str, ...] = _entry(LOCAL_ENTRIES, (), _from_json, _to_json)
    local_sha256: str | None = _entry(LOCAL_SHA256, None, _state_named, named_state)
    used_sha256: str | None = _entry(USED_SHA256, None, _state_named, named_state)

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """Return the values of a message's config; other keys are ignored."""
        server_round = round_in(config)
        values: dict[str, Any] = {
            "server_round": 1 if server_round is None else server_round
        }
        values["continuity"] = Continuity.read(config)
        for name, key, read in _readers(cls):  # type: ignore[arg-type]  # a class is hashable
            if key in config:
                values[name] = read(config[key])
        return cls(**values)

    def write(self) -> dict[str, Any]:
        """Return the entries of a message's config, without values that are not set."""
        entries: dict[str, Any] = {SERVER_ROUND: self.server_round}
        for entry in fields(self):
            value = getattr(self, entry.name)
            is_set = value is not None if entry.default is None else bool(value)
            if isinstance(value, Continuity):
                entries |= value.write()
            elif entry.metadata and is_set:
                entries[entry.metadata["key"]] = entry.metadata["write"](value)
        return entries


@dataclass(frozen=True, kw_only=True)
class TrainConfig(MessageConfig):
    """The config of a training message. The entries of a client hook are declared in
    the method's file.

    Attributes:
        hooks: names of the client hooks to apply, in order.
        extras: names of the method's records beside the model; others are the user's.
        frozen: whether BN is frozen in this round, for the learning rate. The method
            writes it.
        attempt: attempt of a synchronised step by messages, of which this message is
            part; None = it is part of none. ``transport.step_by_messages`` writes
            it.
        fresh_batches: attempt of a round of masked sums, which draws batches of its
            own; 0 = the first. ``privacy.masked_sums`` writes it.
    """

    hooks: tuple[str, ...] = _entry(HOOKS, (), _words, ",".join)
    extras: tuple[str, ...] = _entry(EXTRAS, (), _words, ",".join)
    frozen: bool = _entry(FROZEN, False, bool)
    attempt: int | None = _entry(ATTEMPT, None, int)
    fresh_batches: int = _entry(FRESH_BATCHES, 0, int)


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(MessageConfig):
    """The config of an evaluation message.

    Attributes:
        test_sets: names of the test sets to use; empty for all.
    """

    test_sets: tuple[str, ...] = _entry(TEST_SETS, (), _words, ",".join)


@dataclass(frozen=True)
class ReplyInfo:
    """What the client part reports in a reply.

    Attributes:
        applied: names of the client hooks that the training applied.
        local_sha256: hash of the kept state, "" if nothing is kept.
        durable: whether the kept state is also in a state folder.
        began: whether the kept state began in this round.
        partition_id: the client's partition; None if the reply does not name it.
    """

    applied: frozenset[str] = frozenset()
    local_sha256: str = ""
    durable: bool = False
    began: bool = False
    partition_id: int | None = None

    @classmethod
    def read(cls, reply: Message) -> ReplyInfo:
        """Return the report of a reply; an empty one for an error or for a client
        without a client part.
        """
        configs = of_kind(reply.content, ConfigRecord) if reply.has_content() else {}
        info: dict[str, Any] = dict(configs[INFO].items()) if INFO in configs else {}
        partition_id = info.get(PARTITION_ID)
        return cls(
            frozenset(comma_list(info, APPLIED)),
            str(info.get(LOCAL_SHA256, "")),
            info.get(LOCAL_HOME) == "folder",
            LOCAL_BEGAN in info,
            (
                partition_id
                if isinstance(partition_id, int) and partition_id >= 0
                else None
            ),
        )

    def write(self) -> dict[str, str]:
        """Return the entries about the kept state: ``local_sha256``, ``durable``,
        ``began``; empty if nothing is kept.

        The others are written where they are known: the hooks by the training, the
        partition by the client app.
        """
        if not self.local_sha256:
            return {}
        info: dict[str, str] = {
            LOCAL_SHA256: self.local_sha256,
            LOCAL_HOME: "folder" if self.durable else "memory",
        }
        return info | ({LOCAL_BEGAN: "anew"} if self.began else {})


def add_info(reply: Message, entries: Mapping[str, Any]) -> None:
    """Add entries to the record of a reply that ``ReplyInfo`` and ``NodeProperties``
    read.
    """
    known: Mapping[str, Any] = of_kind(reply.content, ConfigRecord).get(INFO, {})
    if entries:
        reply.content[INFO] = ConfigRecord({**known, **entries})


@dataclass(frozen=True)
class NodeProperties:
    """A node's answer to the query; None for what it does not say.

    Attributes:
        partition_id: the part of the data that it holds.
        num_examples: number of its training examples.
        batch_size: examples of its first batch.
        unusable: why it cannot take part; "" if it can.
        refusal: why a mod of its app has refused the query; "" if none has.
        num_partitions: number of the parts of the data, of which it holds one.
        versions: those of its packages, see ``messages.versions``.
        packs: the form of arrays in one piece that its app reads; the mod ``packed``
            writes it.
    """

    partition_id: int | None = None
    num_examples: int | None = None
    batch_size: int | None = None
    unusable: str = ""
    refusal: str = ""
    num_partitions: int | None = None
    versions: str = ""
    packs: object = None

    @classmethod
    def read(cls, reply: Message) -> NodeProperties:
        """Return the properties in a reply to the query; negative numbers are ignored."""
        numbers: dict[str, int] = {}
        for metrics in of_kind(reply.content, MetricRecord).values():
            numbers |= {
                key: value
                for key, value in metrics.items()
                if isinstance(value, int) and value >= 0
            }
        info: Mapping[str, Any] = of_kind(reply.content, ConfigRecord).get(INFO, {})
        known = (
            numbers.get(PARTITION_ID),
            numbers.get(NUM_EXAMPLES),
            numbers.get(BATCH_SIZE),
        )
        unusable, refusal = (str(info.get(key, "")) for key in (UNUSABLE, REFUSAL))
        parts, versions = numbers.get(NUM_PARTITIONS), str(info.get(VERSIONS, ""))
        return cls(*known, unusable, refusal, parts, versions, info.get(PACKS))

    def write(self) -> dict[str, MetricRecord | ConfigRecord]:
        """Return the records of a reply."""
        numbers = {
            PARTITION_ID: self.partition_id,
            NUM_EXAMPLES: self.num_examples,
            BATCH_SIZE: self.batch_size,
        }
        numbers[NUM_PARTITIONS] = self.num_partitions
        records: dict[str, MetricRecord | ConfigRecord] = {}
        records[METRICS] = MetricRecord(
            {str(key): value for key, value in numbers.items() if value is not None}
        )
        info: dict[str, Any] = {UNUSABLE: self.unusable, REFUSAL: self.refusal}
        info[VERSIONS] = self.versions
        if any(info.values()):
            records[INFO] = ConfigRecord(
                {str(key): text for key, text in info.items() if text}
            )
        return records
