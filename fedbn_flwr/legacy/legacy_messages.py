"""Conversion of the legacy loop's messages, so that a mod works in both loops.

The messages of Flower's legacy loop number their arrays. ``to_legacy`` sends the names
in ``config["fedbn-flwr.array-names"]``, as ``messages.numpy_client`` does. A reply has
only a config of scalars and one list of arrays, so the entries of ``ReplyInfo`` are
added to its metrics.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp.typing import ClientAppCallable
from flwr.common import Code

from fedbn_flwr.batchnorm.array_types import Array
from fedbn_flwr.compat.flower import Mod
from fedbn_flwr.errors import StateError
from fedbn_flwr.messages.numpy_client import to_records
from fedbn_flwr.messages.protocol import (
    ARRAY_NAMES,
    EXTRAS,
    INFO,
    PARTITION_ID,
    SITE_NAME,
    partition_of,
    site_name_of,
)
from fedbn_flwr.messages.records import to_record, view

_REPLY = {"fitins": "fitres", "evaluateins": "evaluateres"}
_ASKED, _KNOWN = "getpropertiesins.config", "getpropertiesres"


def with_names(mod: Mod) -> Mod:
    """Return the mod, extended to messages of the legacy loop.

    Messages without array names skip the mod, because they are from strategies other
    than ``to_legacy``.
    """

    @functools.wraps(mod)
    def either(
        message: Message, context: Context, call_next: ClientAppCallable
    ) -> Message:
        if _ASKED in message.content:
            return _introduced(call_next(message, context), context)
        for kind in _REPLY:
            if f"{kind}.config" not in message.content:
                continue
            # A message without names of arrays comes from a strategy of another
            # package.
            if ARRAY_NAMES not in message.content.config_records[f"{kind}.config"]:
                return call_next(message, context)
            return _through(mod, kind, message, context, call_next)
        return mod(message, context, call_next)

    return either


def _through(
    mod: Mod,
    kind: str,
    message: Message,
    context: Context,
    call_next: ClientAppCallable,
) -> Message:
    """Call the mod with named arrays, and number the arrays of its reply."""
    # Before the mod, the list of arrays becomes records according to the names.
    key, result = f"{kind}.parameters", _REPLY[kind]
    config = message.content.config_records[f"{kind}.config"]
    names = json.loads(str(config[ARRAY_NAMES]))
    received = _decoded(message.content.array_records[key])
    entries = dict(zip(names, received, strict=True))
    extras = json.loads(str(config.get(EXTRAS, "[]")))
    for name, record in to_records(key, entries, extras).items():
        message.content[name] = record

    def by_number(message: Message, context: Context) -> Message:
        """Call the client, and add names to the arrays that it returns."""
        # The mod may have removed or added entries, so use their current order.
        names = list(message.content.array_records[key])
        config[ARRAY_NAMES] = json.dumps(names)
        reply = call_next(message, context)
        if not _answered(reply, result):
            raise _Unanswered(reply)
        if f"{result}.parameters" in reply.content:
            returned = _decoded(reply.content.array_records.pop(f"{result}.parameters"))
            if len(returned) != len(names):
                raise StateError(
                    f"fit returned {len(returned)} arrays, but it must return the whole"
                    f" state dict, {len(names)} arrays in the order received. The mod"
                    " removes the local entries"
                )
            reply.content[key] = to_record(dict(zip(names, returned, strict=True)))
        return reply

    # After the mod, convert its reply to the loop's form.
    try:
        reply = mod(message, context, by_number)
    except _Unanswered as unanswered:
        return unanswered.reply
    if reply.has_content():
        _numbered(reply, key, result)
    return reply


class _Unanswered(Exception):
    """The client failed, so its reply is returned unchanged, without the mod."""

    def __init__(self, reply: Message) -> None:
        super().__init__()
        self.reply = reply


def _answered(reply: Message, result: str) -> bool:
    """Return whether the client succeeded. A failed client's reply has the reason.

    Raises:
        StateError: the reply is not a reply of the legacy loop.
    """
    if not reply.has_content():
        return False
    if f"{result}.status" not in reply.content:
        raise StateError(
            "the app answers the Message API, but the server runs Flower's legacy loop"
            " (to_legacy). For this loop, use ClientApp(client_fn, mods=[bn_mod])"
        )
    return reply.content.config_records[f"{result}.status"]["code"] == Code.OK.value


def _decoded(record: ArrayRecord) -> list[Array]:
    # An empty list is sent as one empty array.
    return [view(array) for array in record.values() if array.data]


def _numbered(reply: Message, key: str, result: str) -> None:
    """Give a reply the legacy form, with one list of arrays and the rest in metrics."""
    records = reply.content.array_records
    metrics = reply.content.config_records[f"{result}.metrics"]
    # Join the records to one list, and put its names into the metrics.
    if key in records:
        entries = {}
        for record in list(records):
            for name, array in records.pop(record).items():
                entries[name if record == key else f"{record}/{name}"] = array
        metrics[ARRAY_NAMES] = json.dumps(list(entries))
        arrays = {name: view(array) for name, array in entries.items()}
        reply.content[f"{result}.parameters"] = to_record(arrays)

    # The loop reads one number of examples, and scalars among the metrics.
    reported = {}
    counted = reply.content.metric_records[f"{result}.num_examples"]
    for name in list(counted):
        if name != "num_examples":
            reported[name] = counted.pop(name)
    info: Mapping[str, Any] = reply.content.config_records.pop(INFO, {})
    reported |= info
    # Remove the partition id, because metrics are averaged. The properties contain it
    # as well. The average of a name would be an error.
    for key in (PARTITION_ID, SITE_NAME):
        reported.pop(key, None)
    metrics.update(reported)


def _introduced(reply: Message, context: Context) -> Message:
    """Return the client's properties, if any, with its partition id and site name."""
    partition_id = partition_of(context)
    if reply.has_content() and partition_id is not None:
        known: Mapping[str, Any] = reply.content.config_records.get(
            f"{_KNOWN}.properties", {}
        )
        stated = known.get(PARTITION_ID)
        # Use only a whole number, because the server does not read a text or a float.
        number = stated if type(stated) is int else partition_id
        entries = {**known, PARTITION_ID: number}
        name = site_name_of(context)
        if name:
            entries[SITE_NAME] = name
        reply.content[f"{_KNOWN}.properties"] = ConfigRecord(entries)
        # Flower's NumPyClient sets the same status.
        reply.content[f"{_KNOWN}.status"] = ConfigRecord(
            {"code": Code.OK.value, "message": "Success"}
        )
    return reply
