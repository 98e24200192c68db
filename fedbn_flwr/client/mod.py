"""``bn_mod`` is the client code of the strategies as a mod of Flower's Message API.

::

    app = ClientApp(mods=[bn_mod])

``bn_mod`` needs only the arrays of the messages, not the model. It keeps the entries
that stay with the client, adds the partition and the names of the applied client hooks
(``bn_rules``) to the reply, and sends FedTAN's exchanges.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp.typing import ClientAppCallable
from torch import Tensor

from fedbn_flwr.batchnorm.array_types import State
from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.batchnorm.train_only import warn_if_moved
from fedbn_flwr.client.kept import KeptState
from fedbn_flwr.client.mailbox import of_client_hooks, open_outbox, take_records
from fedbn_flwr.client.replay_log import clear_log, log_answer, log_sent
from fedbn_flwr.compat.flower import is_mod_refusal
from fedbn_flwr.errors import ConfigError, StateError
from fedbn_flwr.messages.numpy_client import open_message, to_records
from fedbn_flwr.messages.protocol import (
    ARRAY_NAMES,
    EXCHANGE,
    INBOX,
    KEPT_BY_HOOKS,
    METRICS,
    MOD,
    NUM_EXAMPLES,
    OUTBOX,
    PARTITION_ID,
    PREFIX,
    SITE_NAME,
    NodeProperties,
    TrainConfig,
    add_info,
    merged_config,
    partition_of,
    site_name_of,
)
from fedbn_flwr.messages.records import (
    from_record,
    model_record,
    of_kind,
    to_record,
    views,
)
from fedbn_flwr.transport import RetryStep, StopStep

_LOST = (
    "were neither sent nor kept by this client; the server will send the whole state"
    " again"
)


def apply_mod(
    message: Message, context: Context, call_next: ClientAppCallable
) -> Message:
    """Return the reply of the app to a message with named arrays, as ``bn_mod`` does."""
    # Queries without arrays, and the app's own messages, need only the answer.
    if not of_kind(message.content, ArrayRecord):
        return _sign(_answered(message, call_next(message, context)), context)
    config = TrainConfig.read(merged_config(message))
    trains = message.metadata.message_type.partition(".")[0] == MessageType.TRAIN
    if (config.fine_tune or config.recalibrate) and not trains:
        raise ConfigError(
            "fine-tune and recalibrate of own models need a TorchClient. Leave them out,"
            " and change the model in your app's own function for tests.",
            code="change-before-test-in-a-loop",
        )
    # Before the app: put the whole model, and nothing else, into the message.
    if config.attempt is not None:
        _reopen(message, context)
    key, received = _set_aside_extras(message, context, config.extras)
    whole, kept = _completed(received, context, config)
    if config.local_entries or config.extras or config.attempt is not None:
        # Mark the message: a TorchClient keeps its local state itself, and refuses to
        # work with the mod.
        next(iter(of_kind(message.content, ConfigRecord).values()))[MOD] = "bn_mod"
    if trains:
        open_outbox(context)
    context.state[KEPT_BY_HOOKS] = to_record(kept.of_hooks)
    ours = {
        name: record
        for name, record in context.state.items()
        if name.startswith(PREFIX)
    }
    try:
        reply = _call(call_next, message, context, key, whole, bool(config.hooks))
    except StopStep as stop:
        log_sent(context, stop.sent)
        return _exchange_reply(message, key, stop.sent)
    # The app may have replaced the state in the context: restore our records.
    for name in ours.keys() - context.state.keys():
        context.state[name] = ours[name]
    # After the app: keep and remove the local entries, and add the hooks' records.
    of_hooks = of_client_hooks(context)
    del context.state[KEPT_BY_HOOKS]
    if trains:
        clear_log(context)
        take_records(context, INBOX)
        if reply.has_content():
            record = of_kind(reply.content, ArrayRecord).get(key, ArrayRecord())
            warn_if_moved(
                config.fixed_sha256,
                lambda: (split_state(kept.shapes), views(whole), views(record)),
            )
            _keep_own(reply, key, config, kept, of_hooks)
            _add_outbox(reply, context)
    return _sign(reply, context)


def _exchange_reply(message: Message, key: str, sent: Mapping[str, Tensor]) -> Message:
    """Return the reply with the tensor of an exchange.

    It has no tensor if the step has all its answers.
    """
    # Flower's strategies expect arrays and a number of examples in each reply.
    content: RecordDict = RecordDict(
        {
            key: ArrayRecord(),
            EXCHANGE: to_record(sent),
            METRICS: MetricRecord({NUM_EXAMPLES: 1}),
        }
    )
    return Message(content, reply_to=message)


def _call(
    call_next: ClientAppCallable,
    message: Message,
    context: Context,
    key: str,
    whole: ArrayRecord,
    hooks: bool,
) -> Message:
    """Call the app, and repeat the call if a synchronised step lost a client.

    A call that stops within the step runs again, now or in the next message, so its
    changes of ``Context.state`` are undone. Without client hooks there is no such step.
    """
    while True:
        message.content[key] = ArrayRecord(dict(whole))
        before = copy.deepcopy(context.state) if hooks else context.state
        try:
            return call_next(message, context)
        except RetryStep:
            context.state = before
        except StopStep:
            context.state = before
            raise


def _completed(
    received: ArrayRecord, context: Context, config: TrainConfig
) -> tuple[ArrayRecord, KeptState]:
    """Return the whole model in the server's order, and the local state.

    Raises:
        StateError: entries are missing, or are not in the model of the run's start.
    """
    kept = KeptState(context, config, partition_of(context))
    # The mod has no model. Names, order and shapes come from the first message of the
    # run, which contains the whole model, and are kept for later messages.
    if set(config.local_entries) <= set(received):
        kept.shapes = {name: array.shape for name, array in received.items()}
    shapes = kept.shapes
    if not shapes:
        raise StateError(f"entries {_LOST}")
    kept.check(split_state(shapes).fingerprint(shapes))
    entries = {**received, **to_record(kept.load(config.local_entries))}
    missing = [name for name in shapes if name not in entries]
    if missing:
        raise StateError(
            f"entries ({len(missing)} of the model's, '{missing[0]}', ...) {_LOST}"
        )
    extra = [name for name in received if name not in shapes]
    if extra:
        raise StateError(
            f"received '{extra[0]}', but the model of this run did not have this entry"
            " at its start"
        )
    return ArrayRecord({name: entries[name] for name in shapes}), kept


def _keep_own(
    reply: Message, key: str, config: TrainConfig, kept: KeptState, of_hooks: State
) -> None:
    """Keep the client's own entries, and remove them from the reply."""
    own: State = {}
    local = config.local_entries
    if local:
        state = _whole_reply(reply, key, local)
        own = from_record(ArrayRecord({name: state[name] for name in local}))
        shared = {name: array for name, array in state.items() if name not in own}
        reply.content[key] = ArrayRecord(shared)
    kept.keep(own, of_hooks, config.server_round)
    add_info(reply, kept.reply_metadata())


def _whole_reply(reply: Message, key: str, local: Sequence[str]) -> ArrayRecord:
    """Return the record of the reply with the whole model.

    Raises:
        StateError: the record lacks an entry that stays here.
    """
    records = of_kind(reply.content, ArrayRecord)
    state = records.get(key, ArrayRecord())
    missing = [name for name in local if name not in state]
    if missing:
        raise StateError(
            f"the app's reply lacks '{missing[0]}' ({len(missing)} such) in its"
            f" ArrayRecord '{key}'; it has the ArrayRecords {list(records)}. Reply with"
            " the whole state dict under this key, with the names received: the mod"
            " removes the entries that stay."
        )
    return state


def _add_outbox(reply: Message, context: Context) -> None:
    """Add the metrics and records of the client hooks to the reply."""
    report: Mapping[str, Any] = context.state.pop(OUTBOX, {})
    # A MetricRecord can only have numbers, because strategies average it.
    numbers: dict[str, Any] = {}
    texts: dict[str, Any] = {}
    for name, value in report.items():
        if isinstance(value, (int, float)):
            numbers[name] = value
        elif isinstance(value, str):
            texts[name] = value
    for metrics in of_kind(reply.content, MetricRecord).values():
        metrics.update(numbers)
    add_info(reply, texts)
    for name, record in take_records(context, OUTBOX).items():
        reply.content[name] = record


def _set_aside_extras(
    message: Message, context: Context, names: Sequence[str]
) -> tuple[str, ArrayRecord]:
    """Return the key and the record of the model.

    Move the method's records into the context. Further records belong to the user, and
    are not changed.
    """
    records = of_kind(message.content, ArrayRecord)
    key, received = model_record(message)
    take_records(context, INBOX)
    for name in names:
        if name in records:  # a NumPyClient's message has no empty record
            context.state[f"{INBOX}/{name}"] = message.content.pop(name)
    return key, received


def _answered(query: Message, reply: Message) -> Message:
    """Return the reply, or an answer about a later mod's refusal of the query."""
    if query.metadata.message_type != MessageType.QUERY or not is_mod_refusal(reply):
        return reply
    # Replace the error by an answer, because an error has no details of the node. With
    # the answer the server can name the mod.
    properties = NodeProperties(refusal=str(reply.error.reason)).write()
    return Message(RecordDict(dict(properties)), reply_to=query)


def _sign(reply: Message, context: Context) -> Message:
    """Add this client's partition id and the name of its site to the reply."""
    partition_id, name = partition_of(context), site_name_of(context)
    if reply.has_content() and partition_id is not None:
        about: dict[str, Any] = {PARTITION_ID: partition_id}
        add_info(reply, {**about, SITE_NAME: name} if name else about)
    return reply


def _reopen(message: Message, context: Context) -> None:
    """Restore the round's model in a message of FedTAN's exchange."""
    first, _ = model_record(message)
    arrays, config = open_message(message)
    model, config = log_answer(context, arrays, config)
    _, *further = of_kind(message.content, ArrayRecord)
    entries = dict(zip(json.loads(config[ARRAY_NAMES]), model, strict=True))
    for key, record in to_records(first, entries, further).items():
        message.content[key] = record
    message.content.pop(EXCHANGE, None)  # the answer is already in the log
