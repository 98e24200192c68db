"""Reading and checking the clients' replies."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from flwr.app import Message

from fedbn_flwr.batchnorm.averaging import State, check_finite, check_state
from fedbn_flwr.batchnorm.parts import Part, Parts
from fedbn_flwr.compat.flower import is_mod_refusal
from fedbn_flwr.errors import ClientPartError, ReplyError
from fedbn_flwr.messages.protocol import NUM_EXAMPLES, ReplyInfo
from fedbn_flwr.messages.records import num_bytes, views
from fedbn_flwr.server.failures import error_text
from fedbn_flwr.server.nodes import Node
from fedbn_flwr.server.report import RoundReport

__all__ = [
    "Refused",
    "Reply",
    "Terms",
    "no_batchnorm_hint",
    "read_arrays",
    "read_metrics",
    "read_replies",
    "refuse_changed",
    "refuse_misshapen",
    "tested_nothing",
    "warn_of_other_counts",
]

logger = logging.getLogger("flwr")

Size = tuple[int, int]  # bytes of floats, and of others
Read = TypeVar("Read")
Refused = Sequence[tuple[Node, Message, ReplyError]]
"""Refused replies: sender, reply, and what is wrong with it."""


@dataclass(frozen=True)
class Reply:
    """A usable reply.

    Attributes:
        node: the sender.
        num_examples: |D_i|, for the weight.
        state: the shared entries; read-only views of the message.
        metrics: metrics of the client's training.
        extras: further records that the method reads, by name; read-only as well.
        sizes: bytes of each record.
        info: what the client part reports.
    """

    node: Node
    num_examples: float
    state: State
    metrics: Mapping[str, float]
    extras: Mapping[str, State] = field(default_factory=dict)
    sizes: Sequence[Size] = ()
    info: ReplyInfo = field(default_factory=ReplyInfo)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The requirements for a reply to a round's training messages.

    Attributes:
        strategy: name of the strategy, for errors.
        parts: the split of the model's state.
        local: the parts that stay with the client.
        expected: arrays like those that the reply must hold.
        hooks: the client hooks that the reply must name as applied.
        extras: names of the further records that the method reads; others are the user's.
        arrays_key: name of the model's record.
        count_key: the metric that weights the reply.
    """

    strategy: str
    parts: Parts
    local: frozenset[Part]
    expected: State
    hooks: frozenset[str]
    extras: frozenset[str]
    arrays_key: str
    count_key: str

    def read(self, node: Node, message: Message) -> Reply:
        """Return the checked reply of a node.

        Raises:
            ReplyError: the reply is an error, has no count, or its arrays are missing, misshapen or not finite.
            ClientPartError: the reply shows that the app lacks the method's client part.
        """
        metrics = read_metrics(message, self.count_key)
        state, extras, sizes = read_arrays(message, self.arrays_key, self.extras)
        self._refuse_missing_part(state, message)
        check_state(state, self.expected, self.parts)
        for key, extra in extras.items():
            check_finite(extra, f"record '{key}': ")
        count = metrics[self.count_key]
        if self.count_key == NUM_EXAMPLES and node.num_examples is not None:
            count = node.num_examples
        return Reply(node, count, state, metrics, extras, sizes, ReplyInfo.read(message))

    def _refuse_missing_part(self, state: State, message: Message) -> None:
        """Refuse a reply from an app without the method's client part; the error names what is missing."""
        part_of = self.parts.part_of
        if kept := [name for name in state if part_of.get(name) in self.local]:
            raise ClientPartError(
                f"the reply holds {len(kept)} entries that stay with the client under strategy '{self.strategy}' "
                f"('{kept[0]}', ...). Make the app `ClientApp(mods=[local_bn])`, from fedbn_flwr.mods."
            )
        if missing := sorted(self.hooks - ReplyInfo.read(message).applied):
            raise ClientPartError(
                f"the client did not apply the client hook '{missing[0]}' of strategy '{self.strategy}'. Run its "
                "training inside `with bn_rules(model, msg, context) as rules:` (docs/flower-projects.md says what to "
                "call there), and make its app `ClientApp(mods=[local_bn])`, both from fedbn_flwr.mods."
            )


def warn_of_other_counts(replies: Iterable[Reply], count_key: str, warned: set[int]) -> None:
    """Warn of nodes whose reply has another count than the one that is used; ``warned`` are those told before."""
    for reply in replies:
        said, used, node = reply.metrics.get(count_key), reply.num_examples, reply.node
        if said is not None and said != used and node.node_id not in warned:
            warned.add(node.node_id)
            logger.warning(
                "%s: its reply has %s=%s, and it answered the query with %s. %s is used as its weight. Let both be the "
                "number of its training examples.",
                *(node, count_key, said, used, used),
            )


def refuse_misshapen(record: str, entries: State, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ReplyError for an entry of a further record that the model does not have in this shape."""
    for name, array in entries.items():
        if shapes.get(name) != array.shape:
            raise ReplyError(
                f"record '{record}': entry '{name}' of shape {array.shape} does not fit the model: build the client's "
                "model as the server's"
            )


def no_batchnorm_hint(parts: Parts) -> str:
    """Return what else may be wrong where layers were found by names, to add to an error, or ""."""
    if not parts.by_names:
        return ""
    return ". Or the layers are no BatchNorm: pass parts=split_state(model) to the strategy, which goes by their types"


def refuse_changed(reply: Reply, before: State, names: Iterable[str], why: str, parts: Parts | None = None) -> None:
    """Refuse a reply in which an entry changed that the method's client part leaves as it is.

    Raises:
        ClientPartError: "entry '...' changed", ``why``, and what to call.
    """
    for name in names:
        if not np.array_equal(reply.state[name], before[name]):
            raise ClientPartError(
                f"entry '{name}' changed {why}. Run the client's training inside `with bn_rules(model, msg, context):`"
                f"{no_batchnorm_hint(parts) if parts else ''}."
            )


def read_replies(
    replies: Iterable[tuple[Node, Message]], read: Callable[[Node, Message], Read], report: RoundReport, what: str = ""
) -> tuple[list[tuple[Node, Message, Read]], list[tuple[Node, Message, ReplyError]]]:
    """Read all replies; return the usable replies, and the refused ones with the error, both in the given order.

    ``read`` raises ReplyError for a bad reply, ``report`` notes it, ``what`` is the kind of reply ("" = training).
    """
    usable, refused = [], []
    for node, message in replies:
        try:
            usable.append((node, message, read(node, message)))
        except ReplyError as error:
            report.reject(node.node_id, f"{node}: {what}{': ' if what else ''}{error}")
            logger.warning("round %d: %s of %s refused: %s", report.server_round, what or "reply", node, error)
            refused.append((node, message, error))
    return usable, refused


def read_metrics(message: Message, count_key: str) -> dict[str, float]:
    """Return the numbers of a reply, including its count.

    Raises:
        ReplyError: the reply is an error or has not one MetricRecord, or its count is not a finite number above 0.
        ClientPartError: a mod of the client's app has refused the message.
    """
    if message.has_error():
        kind = ClientPartError if is_mod_refusal(message) else ReplyError  # a mod refuses the next message, too
        raise kind(error_text(message))
    if len(message.content.metric_records) != 1:
        found = len(message.content.metric_records)
        raise ReplyError(f"the reply has {found} MetricRecords; return exactly one, which contains '{count_key}'")
    (metrics,) = message.content.metric_records.values()
    count = metrics.get(count_key)
    if not isinstance(count, (int, float)) or not math.isfinite(count) or count <= 0:
        raise ReplyError(f"'{count_key}' is {count}, which must be a finite number above 0")
    return {key: value for key, value in metrics.items() if isinstance(value, (int, float))}


def read_arrays(
    message: Message, arrays_key: str, extras: Collection[str] = ()
) -> tuple[State, dict[str, State], list[Size]]:
    """Return the model's entries, the records ``extras`` by name, and the bytes of all records.

    Arrays are read-only views.

    Raises:
        ReplyError: the model's record is missing, or an array cannot be read.
    """
    try:
        records = message.content.array_records
        state = views(records[arrays_key])
        further: dict[str, State] = {key: views(records[key]) for key in extras if key in records}
        return state, further, [num_bytes(record) for record in records.values()]
    except KeyError as error:
        raise ReplyError(f"the reply has no ArrayRecord '{arrays_key}': return the model under this key") from error
    except Exception as error:  # bytes from outside: NumPy's parser may raise anything
        raise ReplyError(f"arrays that cannot be read: {type(error).__name__}: {error}") from error


def tested_nothing(message: Message, count_key: str) -> bool:
    """Return whether a client without test data answered an evaluation: nothing to average, but no error."""
    if not message.has_content():
        return False
    return [metrics.get(count_key) for metrics in message.content.metric_records.values()] == [0]
