"""The entries of the model that do not change in a run, at the client.

The server sends them once (``batchnorm.train_only``). A client keeps them under the
hash that came with them, and completes later messages, so that the app always receives
the whole model. All clients of a process share one copy. On a node of a network, a
process may work on a single message, so the copy is in ``Context.state``.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp.typing import ClientAppCallable

from fedbn_flwr.compat.flower import filled, on_network_node, values_of
from fedbn_flwr.errors import FIXED_LOST, ConfigError, StateError, coded
from fedbn_flwr.messages.protocol import (
    ATTEMPT,
    FIXED,
    FIXED_ABOUT,
    FIXED_ENTRIES,
    FIXED_SHA256,
    MessageConfig,
    add_info,
    merged_config,
)
from fedbn_flwr.messages.records import (
    model_record,
    of_kind,
    select,
    to_record,
    view,
    views,
)
from fedbn_flwr.training.run_memory import is_noted, kept_for_run

_ORDER = "order"  # str, JSON list, in FIXED_ABOUT: the entries of the whole model


class Held(NamedTuple):
    """The fixed entries that a client has, and the order of the whole model."""

    record: ArrayRecord
    order: list[str]


def with_fixed(
    message: Message, context: Context, call_next: ClientAppCallable
) -> Message:
    """Call the app with the whole model, and return its reply without fixed entries.

    This function is a Flower mod. The reply confirms that the client has the entries.

    Raises:
        StateError: the client has lost them. The server sends them again.
        ConfigError: an entry has changed, although it was frozen.
    """
    sent = MessageConfig.read(merged_config(message))
    if sent.fixed_sha256 is None:
        return call_next(message, context)
    held = _held(message, context, sent)
    if held and of_kind(message.content, ArrayRecord):
        _complete(message, held)
    # The app gets a context without the copy, because some apps copy their context.
    records = {key: context.state.pop(key, None) for key in (FIXED, FIXED_ABOUT)}
    try:
        reply = call_next(message, context)
    finally:
        for key, record in records.items():
            if record is not None:
                context.state[key] = record
    if held and reply.has_content():
        for key in [*of_kind(message.content, ArrayRecord)][:1]:  # the model
            record = of_kind(reply.content, ArrayRecord).get(key, ArrayRecord())
            # A changed entry stays in the reply, because the server refuses it by name.
            same = {name for name in record if _is_equal(record, held.record, name)}
            # The server also refuses non-finite values by name.
            values = views(record)
            moved = [
                n
                for n in values
                if n in held.record and n not in same and np.isfinite(values[n]).all()
            ]
            if moved and is_noted("frozen", sent.fixed_sha256):
                raise ConfigError(
                    f"train_only freezes entry '{moved[0]}' ({len(moved)} such), but the"
                    " training changes it without an optimizer: the model's forward pass"
                    " or the loop sets it, such as a moving average of weights, or loads"
                    " other weights. Add its module to train_only, or leave out"
                    " train_only and keep the module at the clients with personal."
                )
            if same:
                reply.content[key] = select(record, record.keys() - same)
        add_info(reply, {FIXED_SHA256: sent.fixed_sha256})
    return reply


def _held(message: Message, context: Context, sent: MessageConfig) -> Held | None:
    """Return the fixed entries of this message, or those of an earlier message.

    A query without a model may come to a client that has none.
    """
    records = of_kind(message.content, ArrayRecord)
    received = model_record(message)[1] if records else ArrayRecord()
    shared: dict[str | None, Held] = kept_for_run("fixed", dict)
    about = of_kind(context.state, ConfigRecord).get(FIXED_ABOUT)
    if set(sent.fixed_entries).issubset(received) and sent.fixed_entries:
        return _keep(received, context, sent, shared)
    held = shared.get(sent.fixed_sha256)
    if about is not None and about[FIXED_SHA256] == sent.fixed_sha256:
        record = of_kind(context.state, ArrayRecord)[FIXED]
        held = Held(record, json.loads(str(about[_ORDER])))
    if records and (held is None or not {*received} <= {*held.order}):
        text = "this client does not have the entries that train_only leaves fixed"
        raise StateError(coded(FIXED_LOST, f"{text}; the server sends them again"))
    return held


def _keep(
    received: ArrayRecord,
    context: Context,
    sent: MessageConfig,
    shared: dict[str | None, Held],
) -> Held:
    """Keep the received entries, and return them."""
    # The arrays of a message may be parts of a large buffer, so keep a copy.
    held = shared.get(sent.fixed_sha256)
    if held is None or not {*received} <= {*held.order}:
        own = select(received, sent.fixed_entries)
        held = Held(to_record(views(own)), [*received])
    if on_network_node():
        order = json.dumps(held.order)
        about: dict[str, Any] = {FIXED_SHA256: sent.fixed_sha256, _ORDER: order}
        context.state[FIXED], context.state[FIXED_ABOUT] = (
            held.record,
            ConfigRecord(about),
        )
    else:
        shared.clear()  # the entries of an earlier model
        shared[sent.fixed_sha256] = held
    return held


def _complete(message: Message, held: Held) -> None:
    """Put the whole model, in its order, and the names of fixed entries in a message."""
    key, received = model_record(message)
    config = next(iter(of_kind(message.content, ConfigRecord).values()))
    config[FIXED_ENTRIES] = json.dumps([*held.record])
    # A later message of a synchronised step has no model.
    if not received and ATTEMPT in merged_config(message):
        return
    entries = {**values_of(held.record), **values_of(received)}
    whole = {name: entries[name] for name in held.order if name in entries}
    message.content[key] = filled(ArrayRecord, whole)


def _is_equal(state: ArrayRecord, fixed: ArrayRecord, name: str) -> bool:
    return name in fixed and np.array_equal(view(state[name]), view(fixed[name]))
