"""Reading and checking the clients' replies."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord

from fedbn_flwr.batchnorm.array_types import State
from fedbn_flwr.batchnorm.averaging import check_finite, check_state
from fedbn_flwr.batchnorm.parts import Parts
from fedbn_flwr.compat.flower import is_mod_refusal
from fedbn_flwr.errors import (
    MOD_ORDER,
    ClientPartError,
    ReplyError,
    one_line,
    split_code,
)
from fedbn_flwr.messages.protocol import NUM_EXAMPLES, ReplyInfo
from fedbn_flwr.messages.records import num_bytes, of_kind, views
from fedbn_flwr.server.methods.method import Facts, Node, Reply, Size, far_from_others
from fedbn_flwr.server.methods.phases import Extra
from fedbn_flwr.server.runs.round_outcome import RoundOutcome, odd_values

__all__ = [
    "FAR_WEIGHTS",
    "Refused",
    "Terms",
    "Usable",
    "error_text",
    "read_arrays",
    "read_metrics",
    "read_replies",
    "tested_nothing",
    "warn_of_far_values",
    "warn_of_odd_metrics",
    "warn_of_other_counts",
]

logger = logging.getLogger("flwr")

Read = TypeVar("Read")
# the words that Flower adds to the text of a client's exception
_OF_FLOWER = re.compile(
    r"<class '[\w.]+'>:<'\s*Exception ClientAppException occurred\. Message: (.*)'>",
    re.DOTALL,
)
_FAR = 1000  # times the median of the nodes
FAR_WEIGHTS = 50
"""The largest norm of a node's weights without a warning, times the median of the nodes.
"""
_LONGEST_NAME = 200  # characters of the name of a metric
# A reply's metrics are averaged and logged. Per-class lists of 20,000 classes fit.
_MOST_METRICS, _MOST_NUMBERS = 1000, 100_000
# A round may pass a batch through a layer several times (SAM, two losses, micro-batches
# of one example, re-estimation), and take many epochs, but no more calls than these:
# a thousand for each example, or a million, which take minutes in the fastest network.
_CALLS_OF_AN_EXAMPLE, _CALLS = 1000, 10**6


@dataclass(frozen=True)
class Usable(Generic[Read]):
    """A usable reply, with its sender, its message and the result of reading it."""

    node: Node
    message: Message
    read: Read


@dataclass(frozen=True)
class Refused:
    """A refused reply, with its sender, its message and the error."""

    node: Node
    message: Message
    error: ReplyError


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The requirements for a reply to a round's training messages.

    Attributes:
        strategy: name of the strategy, for errors.
        facts: the round.
        hooks: the client hooks that the reply must name as applied.
        arrays_key: name of the model's record.
        count_key: the metric that weights the reply.
    """

    strategy: str
    facts: Facts
    hooks: frozenset[str]
    arrays_key: str
    count_key: str

    def read(self, node: Node, message: Message) -> Reply:
        """Return the reply of a node after checking that its model fits.

        ``check`` checks the requirements of the methods.

        Raises:
            ReplyError: the reply is an error, has no count, or its arrays are missing,
                misshapen or not finite.
            ClientPartError: the reply reveals that the app lacks the method's client
                code.
        """
        metrics = read_metrics(message, self.count_key)
        # All other records belong to the user.
        keys = [record.key for record in self.facts.phase.records]
        state, extras, sizes = read_arrays(message, self.arrays_key, keys)
        info = ReplyInfo.read(message)
        # First refuse an app that lacks the method's client code, so that the error
        # names the fault of the app instead of its effect.
        local = set(self.facts.local)
        kept = [name for name in state if name in local]
        if kept:
            raise ClientPartError(
                f"the reply contains {len(kept)} of the entries that stay with the"
                f" client under strategy '{self.strategy}' ('{kept[0]}', ...). Make the"
                " app `ClientApp(mods=[bn_mod])`, from fedbn_flwr.mods."
            )
        missing = sorted(self.hooks - info.applied)
        if missing:
            raise ClientPartError(
                f"the client did not apply the client hook '{missing[0]}' of strategy"
                f" '{self.strategy}'. Run its training inside `with bn_rules(model,"
                " msg, context) as rules:` (help(bn_rules) shows the calls"
                " inside), and make its app `ClientApp(mods=[bn_mod])`, both from"
                " fedbn_flwr.mods."
            )
        expected = self.facts.shared
        if expected and not state:
            raise ReplyError(
                f"the ArrayRecord '{self.arrays_key}' of the reply has no arrays:"
                " return the model in it"
            )
        norm, of_weights = check_state(state, expected, self.facts.parts)
        for extra in self.facts.phase.records:
            # A copy of local entries may have large values, if the model has them.
            if extra.size != "local":
                record = extras.get(extra.key, {})
                norm += check_finite(record, f"record '{extra.key}': ")
        # Use the count in the node's answer to the query. A sum that begins before the
        # last reply has already used this count.
        count = metrics[self.count_key]
        if self.count_key == NUM_EXAMPLES and node.num_examples is not None:
            count = node.num_examples
        self._check_counters(state, count)
        return Reply(node, count, state, metrics, extras, sizes, info, norm, of_weights)

    def check(self, reply: Reply) -> None:
        """Check the additional records, and that frozen entries are unchanged.

        Raises:
            ReplyError: a record or a metric is missing or does not fit.
            ClientPartError: a frozen entry has changed.
        """
        for extra in self.facts.phase.extras:
            if extra.size == "scalar":
                self._check_metric(reply, extra)
            else:
                self._check_record(reply.extras.get(extra.key, {}), extra)
        for name in self.facts.frozen:
            if not np.array_equal(reply.state[name], self.facts.before[name]):
                raise ClientPartError(
                    f"entry '{name}' changed, but strategy '{self.strategy}' freezes it"
                    f" in this round (phase '{self.facts.phase.name}'), and the client"
                    " hooks were applied. Run the training inside `with bn_rules(model,"
                    " msg, context):`, and without what resets it, such as"
                    " torch.optim.swa_utils.update_bn"
                    f"{_no_batchnorm_hint(self.facts.parts)}."
                )

    def _check_counters(self, state: State, count: float) -> None:
        most = max(_CALLS, _CALLS_OF_AN_EXAMPLE * count)
        for name in self.facts.parts.whole.counters:
            if name in state:
                calls = int(state[name].max()) - int(self.facts.before[name].max())
                if calls > most:
                    raise ReplyError(
                        f"entry '{name}' grew by {calls}, but a client with {count:g}"
                        f" examples makes at most {most:g} calls of a layer in a round"
                    )

    def _check_metric(self, reply: Reply, extra: Extra) -> None:
        value = reply.metrics.get(extra.key)
        if extra.required and (value is None or not 0 <= value < math.inf):
            raise ReplyError(
                f"metric '{extra.key}' is {value}, but strategy '{self.strategy}'"
                " needs a finite number >= 0:"
                f" {self._hooks_to_apply()}{_no_batchnorm_hint(self.facts.parts)}"
            )

    def _check_record(self, record: State, extra: Extra) -> None:
        facts = self.facts
        if extra.required and not record:
            raise ReplyError(
                f"record '{extra.key}' is missing, but strategy '{self.strategy}'"
                f" needs it: {self._hooks_to_apply()}"
            )
        if extra.size == "local":
            local = {name: facts.before[name] for name in facts.local}
            if record:
                check_state(record, local, facts.parts)
        else:
            _refuse_misshapen(extra.key, record, facts.before)

    def _hooks_to_apply(self) -> str:
        named = ", ".join(f"'{hook}'" for hook in sorted(self.hooks))
        return f"the client's training must apply the client hook {named}"


def warn_of_other_counts(
    replies: Iterable[Reply], count_key: str, warned: set[tuple[int, str]]
) -> None:
    """Warn about nodes that report two different numbers of training examples.

    The number in the answer to the query is used, not the number in the reply.
    ``warned`` has the ids of the nodes with earlier warnings, each with ``count_key``.
    """
    for reply in replies:
        node, said, used = reply.node, reply.metrics.get(count_key), reply.num_examples
        if said is None or said == used or (node.node_id, count_key) in warned:
            continue
        warned.add((node.node_id, count_key))
        logger.warning(
            "%s: its reply has %s=%s, but it answered the query with %s. %s is used"
            " as its weight. Report the number of its training examples in both.",
            node,
            count_key,
            said,
            used,
            used,
        )


def warn_of_far_values(
    what: str,
    values: Mapping[Node, float],
    warned: set[tuple[int, str]],
    most: float = _FAR,
) -> str:
    """Warn about nodes with a value far above the median of the nodes.

    Args:
        what: a text that names the value.
        values: a value of each node.
        warned: ids of nodes with earlier warnings, and ``what`` of each.
        most: the largest ratio of a value and the median without a warning.

    Returns:
        a text about the last such node, or "".
    """
    text = ""
    for node, why in far_from_others(what, values, most).items():
        text = f"{node}: {why}"
        if (node.node_id, what) not in warned:
            warned.add((node.node_id, what))
            logger.warning("%s. Check this node.", text)
    return text


def warn_of_odd_metrics(
    metrics: Mapping[Node, Mapping[str, float]], warned: set[tuple[int, str]]
) -> None:
    """Warn once about each metric of a node that the means leave out.

    ``warned`` has the ids of the nodes with earlier warnings, each with the metric.
    """
    names = dict.fromkeys(name for values in metrics.values() for name in values)
    for name in names:
        given = {node: own[name] for node, own in metrics.items() if name in own}
        for node in odd_values(name, given, names):
            if (node.node_id, name) not in warned:
                warned.add((node.node_id, name))
                logger.warning(
                    "%s: its metric '%s' is %g, and is left out of the mean. Check this"
                    " node.",
                    node,
                    name,
                    given[node],
                )


def _refuse_misshapen(record: str, entries: State, model: State) -> None:
    """Raise ReplyError if an entry of a record has not the model's shape and kind."""
    for name, array in entries.items():
        like = model.get(name)
        if like is None or (like.shape, like.dtype.kind) != (
            array.shape,
            array.dtype.kind,
        ):
            raise ReplyError(
                f"record '{record}': entry '{name}', {array.dtype} of shape"
                f" {array.shape}, does not fit the model: build the client's model like"
                " the server's"
            )


def _no_batchnorm_hint(parts: Parts) -> str:
    """Return another possible cause, for an error about layers found by their names.

    The text is empty if the layers were found by type.
    """
    if not parts.by_names:
        return ""
    return (
        ". Or the layers are not BatchNorm: pass parts=split_state(model) to the"
        " strategy to find layers by their types"
    )


def read_replies(
    replies: Iterable[tuple[Node, Message]],
    read: Callable[[Node, Message], Read],
    report: RoundOutcome,
    what: str = "",
) -> tuple[list[Usable[Read]], list[Refused]]:
    """Read all replies, and return the usable and the refused replies in order.

    ``read`` raises ReplyError for a bad reply, and ``report`` records it. ``what`` is
    the kind of reply; empty for training.
    """
    usable, refused = [], []
    for node, message in replies:
        try:
            usable.append(Usable(node, message, read(node, message)))
        except ReplyError as error:
            kind = f"{what}: " if what else ""
            report.reject(node, f"{kind}{error.reason}")
            text = one_line(split_code(str(error))[1])
            logger.warning(
                "round %d: %s of %s refused: %s",
                report.server_round,
                what or "reply",
                node,
                text,
            )
            refused.append(Refused(node, message, error))
    return usable, refused


def error_text(reply: Message) -> str:
    """Return the error of an error reply, with advice if its cause is known."""
    reason = _OF_FLOWER.sub(r"\1", str(reply.error.reason))
    text = f"error {reply.error.code}: {one_line(reason)}"
    if is_mod_refusal(reply):
        return f"{text.removesuffix('.')}. {MOD_ORDER}."
    # Flower's adapter of a NumPyClient looks for this key in a message and does not
    # find it.
    if "fitins.parameters" in reason:
        return (
            f"{text}. This ClientApp is built from a NumPyClient: make it with"
            " fedbn_flwr.client_app(client_fn)"
        )
    return text


def read_metrics(message: Message, count_key: str) -> dict[str, float]:
    """Return the numbers of a reply, including its count.

    Raises:
        ReplyError: the reply is an error, does not have exactly one MetricRecord, or
            its count is not a finite number above 0.
        ClientPartError: a mod of the client's app has refused the message.
    """
    if message.has_error():
        # A client whose mod refuses this message would refuse the next message as well.
        kind = ClientPartError if is_mod_refusal(message) else ReplyError
        raise kind(error_text(message))
    records = list(of_kind(message.content, MetricRecord).values())
    if len(records) != 1:
        raise ReplyError(
            f"the reply has {len(records)} MetricRecords: return exactly one, with the"
            f" metric '{count_key}'"
        )
    metrics = records[0]
    numbers = sum(len(v) if isinstance(v, list) else 1 for v in metrics.values())
    if len(metrics) > _MOST_METRICS or numbers > _MOST_NUMBERS:
        raise ReplyError(
            f"the reply has {len(metrics)} metrics with {numbers} numbers: return at"
            f" most {_MOST_METRICS} metrics with {_MOST_NUMBERS} numbers in all"
        )
    _refuse_count(count_key, metrics.get(count_key))
    for key, value in metrics.items():
        # The names are in the log and in the results, and such a count is a weight.
        if len(key) > _LONGEST_NAME or not key.isprintable():
            raise ReplyError(f"a metric has the name {key[:_LONGEST_NAME]!r}")
        if key.endswith(f"-{NUM_EXAMPLES}") and value != 0:
            _refuse_count(key, value)
    return {
        key: value for key, value in metrics.items() if isinstance(value, (int, float))
    }


def _refuse_count(key: str, count: object) -> None:
    if not isinstance(count, (int, float)) or not 0 < count < math.inf:
        raise ReplyError(f"'{key}' is {count}, but must be a finite number above 0")


def read_arrays(
    message: Message, arrays_key: str, extras: Collection[str] = ()
) -> tuple[State, dict[str, State], list[Size]]:
    """Return the model's entries, the records ``extras`` by name, and all sizes.

    Arrays are read-only views.

    Raises:
        ReplyError: the model's record is missing, or an array cannot be read.
    """
    try:
        records = of_kind(message.content, ArrayRecord)
        state = views(records[arrays_key])
        further: dict[str, State] = {
            key: views(records[key]) for key in extras if key in records
        }
        return state, further, [num_bytes(record) for record in records.values()]
    except KeyError as error:
        raise ReplyError(
            f"the reply has no ArrayRecord '{arrays_key}': return the model under"
            " this key"
        ) from error
    except Exception as error:  # NumPy's parser may raise anything for foreign bytes
        raise ReplyError(
            f"arrays that cannot be read: {type(error).__name__}: {error}"
        ) from error


def tested_nothing(message: Message, count_key: str) -> bool:
    """Return whether a client without test data answered an evaluation.

    Such an answer has nothing to average, but it is not an error.
    """
    if not message.has_content():
        return False
    records = of_kind(message.content, MetricRecord).values()
    return [metrics.get(count_key) for metrics in records] == [0]
