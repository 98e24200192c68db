"""Reading and checking the clients' replies."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

from fedbn_flwr.batchnorm.array_types import Array, State
from fedbn_flwr.batchnorm.averaging import check_finite, check_state
from fedbn_flwr.batchnorm.parts import Parts
from fedbn_flwr.compat.flower import BufferArray, filled, is_mod_refusal, values_of
from fedbn_flwr.errors import (
    MOD_ORDER,
    ClientPartError,
    ReplyError,
    one_line,
    split_code,
)
from fedbn_flwr.messages.protocol import NUM_EXAMPLES, ReplyInfo
from fedbn_flwr.messages.records import num_bytes, of_kind, views
from fedbn_flwr.server.methods.method import (
    Facts,
    Freed,
    Node,
    Replies,
    Reply,
    Size,
    far_from_others,
)
from fedbn_flwr.server.methods.phases import Extra
from fedbn_flwr.server.runs.kept import Fixed
from fedbn_flwr.server.runs.round_report import RoundReport, odd_values
from fedbn_flwr.server.runs.run_state import Run

__all__ = [
    "Refused",
    "Terms",
    "Usable",
    "error_text",
    "freed",
    "read_arrays",
    "read_metrics",
    "read_replies",
    "refuse",
    "tested_nothing",
    "warn_of_replies",
    "warn_of_tests",
]

logger = logging.getLogger("flwr")

Read = TypeVar("Read")
# the words that Flower adds to the text of a client's exception
_OF_FLOWER = re.compile(
    r"<class '[\w.]+'>:<'\s*Exception ClientAppException occurred\. Message: (.*)'>",
    re.DOTALL,
)
_FAR = 1000  # times the median of the nodes
_FAR_WEIGHTS = 50
# An array has at most so many times the bytes of the largest entry, which has more than
# ``_SMALL``. Moments of classes, in float64, are larger than the entries of a tiny model.
_LARGER, _SMALL = 4, 2**20
_LONGEST_NAME = 200  # characters of the name of a metric
# A reply's metrics are averaged and logged. Per-class lists of 20,000 classes fit.
_MOST_METRICS, _MOST_NUMBERS = 1000, 100_000
# A round may pass a batch through a layer several times (SAM, two losses, micro-batches
# of one example, re-estimation), and take many epochs, but no more calls than these:
# a thousand for each example, or a million, which take minutes in the fastest network.
_CALLS_OF_AN_EXAMPLE, _CALLS = 1000, 10**6
# A channel of an example has no more values than these: a volume of 640 x 640 x 640.
_VALUES_OF_AN_EXAMPLE = 2**28
_EXAMPLES = 10**6  # of a client that does not report their number


@dataclass(frozen=True)
class Usable(Generic[Read]):
    """A usable reply, with its sender, its message and the result of reading it."""

    node: Node
    message: Message
    value: Read


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
        fixed: the entries that a reply may omit.
    """

    strategy: str
    facts: Facts
    hooks: frozenset[str]
    arrays_key: str
    count_key: str
    fixed: Fixed = field(default_factory=Fixed)

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
        state, extras, sizes = read_arrays(
            message, self.arrays_key, keys, self.fixed.record, like=self.facts.before
        )
        fixed = {n: state[n] for n in state if n in self.fixed.names}
        state = {n: array for n, array in state.items() if n not in fixed}
        info = ReplyInfo.read(message)
        # First refuse an app that lacks the method's client code, so that the error
        # names the fault of the app instead of its effect.
        local = [name for name in self.facts.local if name in state]
        if local:
            raise ClientPartError(
                f"the reply contains {len(local)} of the entries that stay with the"
                f" client under strategy '{self.strategy}' ('{local[0]}', ...). Make the"
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
        for name, array in fixed.items():
            if not np.array_equal(array, self.facts.before[name]):
                raise ClientPartError(
                    f"entry '{name}' changed, but train_only leaves it fixed. Only the"
                    " model that is passed to `with bn_rules(model, msg, context)` is"
                    " frozen, and only in the block: train this object, not a model"
                    " that is built anew, and set no requires_grad in the block."
                )
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
        return Reply(node, count, state, metrics, extras, sizes, info, norm, of_weights)

    def check(self, reply: Reply) -> None:
        """Check counters and additional records, and that frozen entries are unchanged.

        Raises:
            ReplyError: a record or a metric is missing or does not fit, or a counter has
                grown by more than the calls of a round.
            ClientPartError: a frozen entry has changed.
        """
        for extra in self.facts.phase.extras:
            if extra.size == "scalar":
                self._check_metric(reply, extra)
            else:
                self._check_record(reply.extras.get(extra.key, {}), extra)
        facts = self.facts
        of_values = facts.parts.counters if facts.phase.measures else ()
        # ``reply.num_examples`` is the weight, which may be another metric.
        examples: float | None = reply.node.num_examples
        if examples is None:
            examples = max(1, reply.metrics.get(NUM_EXAMPLES, _EXAMPLES))
        for name in facts.parts.whole.counters:
            most = max(_CALLS, _CALLS_OF_AN_EXAMPLE * examples)
            if name in of_values:
                most = _VALUES_OF_AN_EXAMPLE * examples
            counts = reply.state.get(name, facts.before[name])
            grown = int(counts.max()) - int(facts.before[name].max())
            if grown > most:
                raise ReplyError(
                    f"entry '{name}' grew by {grown}, but a client with"
                    f" {examples:g} examples counts at most {most:g} in a"
                    " layer in a round"
                )
        for name in self.facts.frozen:
            if not np.array_equal(reply.state[name], self.facts.before[name]):
                raise ClientPartError(
                    f"entry '{name}' changed, but strategy '{self.strategy}' freezes it"
                    f" in this round (phase '{self.facts.phase.name}'), and the client"
                    " hooks were applied. Another object was trained than the model of"
                    " `with bn_rules(model, msg, context):`, or it was trained outside"
                    " the block, or something changes the statistics, such as"
                    " torch.optim.swa_utils.update_bn or a layer that ignores its"
                    " track_running_stats: train this model in the block"
                    f"{_no_batchnorm_hint(self.facts.parts)}."
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
        # A record is empty if no shared parameter trains in this phase.
        trained = facts.parts.parameters.intersection(facts.shared) - {*facts.frozen}
        if extra.required and trained and not record:
            raise ReplyError(
                f"record '{extra.key}' is missing, but strategy '{self.strategy}'"
                f" needs it: {self._hooks_to_apply()}"
            )
        if extra.size == "local":
            local = {name: facts.before[name] for name in facts.local}
            if record:
                subject = (
                    f"record '{extra.key}': {extra.why}, so use {extra.instead} if they"
                    " do not fit the server's model: "
                )
                check_state(record, local, facts.parts, subject)
            return
        known = {*trained}
        if facts.parts.by_names:
            # Names do not reveal all parameters. Integers have no gradients.
            tracked = {*facts.parts.whole.statistics, *facts.parts.whole.counters}
            for name in facts.shared.keys() - tracked - {*facts.frozen}:
                if facts.shared[name].dtype.kind in "fc":
                    known.add(name)
        for name, array in record.items():
            like = facts.shared[name] if name in known else None
            if like is None or (like.shape, like.dtype.kind) != (
                array.shape,
                array.dtype.kind,
            ):
                raise ReplyError(
                    f"record '{extra.key}': entry '{name}', {array.dtype} of shape"
                    f" {array.shape}, does not fit the model: build the client's model"
                    " like the server's"
                )

    def _hooks_to_apply(self) -> str:
        named = ", ".join(f"'{hook}'" for hook in sorted(self.hooks))
        return f"the client's training must apply the client hook {named}"


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
    report: RoundReport,
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
            refused.append(refuse(report, node, message, error, what))
    return usable, refused


def refuse(
    report: RoundReport, node: Node, message: Message, error: ReplyError, what: str = ""
) -> Refused:
    """Record and log the error of a reply, and return the refused reply.

    ``what`` is the kind of reply; empty for training.
    """
    report.reject(node, f"{what}: {error.reason}" if what else error.reason)
    text = one_line(split_code(str(error))[1])
    kind, number = what or "reply", report.server_round
    logger.warning("round %d: %s of %s refused: %s", number, kind, node, text)
    return Refused(node, message, error)


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
    # The count of a test set is a weight as well.
    counts = {count_key: metrics.get(count_key)}
    for key, value in metrics.items():
        # The names are in the log and in the results.
        if len(key) > _LONGEST_NAME or not key.isprintable():
            raise ReplyError(f"a metric has the name {key[:_LONGEST_NAME]!r}")
        is_count = key.endswith(f"-{NUM_EXAMPLES}") and not isinstance(value, list)
        if is_count and value != 0:
            counts[key] = value
    for key, count in counts.items():
        if not isinstance(count, (int, float)) or not 0 < count < math.inf:
            raise ReplyError(f"'{key}' is {count}, but must be a finite number above 0")
    return {
        key: value for key, value in metrics.items() if isinstance(value, (int, float))
    }


def read_arrays(
    message: Message,
    arrays_key: str,
    extras: Collection[str] = (),
    ours: ArrayRecord | None = None,
    *,
    like: State,
) -> tuple[State, dict[str, State], list[Size]]:
    """Return the model's entries, the records ``extras`` by name, and all sizes.

    Arrays are read-only views. Arrays of ``ours``, which the server itself has added to
    the reply, are left out. An array is read only if it is not far larger than the
    largest entry of the model ``like``.

    Raises:
        ReplyError: the model's record is missing, or an array is too large or cannot be
            read.
    """
    records = of_kind(message.content, ArrayRecord)
    most = _LARGER * max([_SMALL, *(entry.nbytes for entry in like.values())])
    for key in (arrays_key, *extras):
        for name, array in records.get(key, {}).items():
            data = array.buffer if isinstance(array, BufferArray) else array.data
            if len(data) > most:
                raise ReplyError(
                    f"record '{key}': entry '{name:.80}' has {len(data)} bytes, but in"
                    f" this model it can have at most {most}"
                )
    try:
        model, added = records[arrays_key], values_of(ours or ArrayRecord())
        theirs = {n: a for n, a in model.items() if a is not added.get(n)}
        records[arrays_key] = filled(ArrayRecord, theirs)
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


def freed(reply: Reply, message: Message, remain: Collection[str]) -> Reply:
    """Return the reply, and free its floating entries that are not in ``remain``."""
    # Copy the entries, because a view would keep the memory of the whole message.
    state: dict[str, Array | None] = dict.fromkeys(reply.state)
    for name, array in reply.state.items():
        if name in remain or array.dtype.kind != "f":
            copy = state[name] = array.copy()
            copy.flags.writeable = False  # as in the other replies
    # The app may keep the content of its reply, so do not change that object.
    records = values_of(message.content).items()
    others = {key: one for key, one in records if not isinstance(one, ArrayRecord)}
    message.content = filled(RecordDict, others)
    return replace(reply, state=Freed(state))


def tested_nothing(message: Message, count_key: str) -> bool:
    """Return whether a client without test data answered an evaluation.

    Such an answer has nothing to average, but it is not an error.
    """
    if not message.has_content():
        return False
    records = of_kind(message.content, MetricRecord).values()
    return [metrics.get(count_key) for metrics in records] == [0]


# --- warnings about replies that the round uses -----------------------------------------


def warn_of_replies(
    run: Run, usable: Sequence[Usable[Reply]], released: Replies
) -> None:
    """Warn about counts, metrics, weights and models of the training.

    The weight of a node is the number in its answer to the query, not in its reply. The
    log also has the largest share of a client. A protection hides all but the counts.
    """
    key = run.flower_args.weighted_by_key
    counts = {}
    for reply in [one.value for one in usable]:
        if reply.metrics[key] != reply.num_examples:
            counts[reply.node] = (
                f"its reply has {key}={reply.metrics[key]}, but it answered the query"
                f" with {reply.num_examples}, which is its weight"
            )
    _warn_once(run, key, counts)
    if not run.protection.publishes_metrics:
        return
    _warn_of_metrics(run, usable)
    nodes = [reply.node for reply in released]
    weights = dict(zip(nodes, released.weights, strict=True))
    largest = max(weights, key=weights.__getitem__)
    logger.info(
        "round %d: the largest share of one client is %.1f %% (%s)",
        run.report.server_round,
        100 * weights[largest] / sum(weights.values()),
        largest,
    )
    _warn_of_far(run, "its weight in the average", weights)
    norms = {reply.node: reply.norm for reply in released}
    of_weights = {reply.node: reply.norm_of_weights for reply in released}
    far = _warn_of_far(run, "the norm of its model", norms)
    far = far or _warn_of_far(run, "the norm of its weights", of_weights, _FAR_WEIGHTS)
    run.start.far_model = far or run.start.far_model


def warn_of_tests(run: Run, tests: Sequence[Usable[dict[str, float]]]) -> None:
    """Warn about metrics and weights of the clients' tests."""
    key = run.flower_args.weighted_by_key
    _warn_of_metrics(run, tests)
    counts = {test.node: test.value[key] for test in tests}
    _warn_of_far(run, "its weight in the test", counts)


def _warn_of_metrics(run: Run, usable: Sequence[Usable[Any]]) -> None:
    """Warn about metrics of another shape, out of their range or far from the others."""
    values_of: dict[str, dict[Node, Any]] = {}
    for one in usable:
        (metrics,) = of_kind(one.message.content, MetricRecord).values()
        for name, value in metrics.items():
            values_of.setdefault(name, {})[one.node] = value
    for name, values in values_of.items():
        odd = odd_values(name, values, values_of)
        _warn_once(run, name, odd)
        # A metric may be near 0. NaN means that a client's test does not define it.
        sizes = {
            node: 1 + float(np.nanmax(np.abs(np.append(value, 0.0))))
            for node, value in values.items()
            if node not in odd
        }
        if name != run.flower_args.weighted_by_key:
            _warn_of_far(run, f"1 + the size of its metric '{name}'", sizes)


def _warn_of_far(
    run: Run, what: str, values: Mapping[Node, float], most: float = _FAR
) -> str:
    return _warn_once(run, what, far_from_others(what, values, most))


def _warn_once(run: Run, what: str, texts: Mapping[Node, str]) -> str:
    """Warn about the nodes with a text. Return the last text with its node, or ""."""
    text = ""
    for node, why in texts.items():
        text = f"{node}: {why}"
        if (node.node_id, what) not in run.start.warned:
            run.start.warned.add((node.node_id, what))
            logger.warning("%s. Check this node.", text)
    return text
