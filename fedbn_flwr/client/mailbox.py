"""Records that ``bn_mod`` and ``bn_rules`` exchange during a message.

The records are in ``Context.state``. The mod moves the method's further records from
the message to the inbox, and ``bn_rules`` reads them. ``bn_rules`` writes its additions
to the reply to the outbox, and the mod adds them to the reply.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context

from fedbn_flwr.batchnorm.array_types import Array
from fedbn_flwr.messages.protocol import KEPT_BY_HOOKS, OUTBOX
from fedbn_flwr.messages.records import from_record, of_kind, to_record, to_state
from fedbn_flwr.training.client_hook import ClientHook


def records_in(context: Context | None, box: str) -> dict[str, ArrayRecord]:
    """Return the records of ``box`` (INBOX or OUTBOX) by name."""
    if context is None:
        return {}
    return {
        name.removeprefix(f"{box}/"): record
        for name, record in of_kind(context.state, ArrayRecord).items()
        if name.startswith(f"{box}/")
    }


def take_records(context: Context, box: str) -> dict[str, ArrayRecord]:
    """Return the records of ``box`` (INBOX or OUTBOX) by name.

    Remove them from the context.
    """
    records = records_in(context, box)
    for name in records:
        del context.state[f"{box}/{name}"]
    return records


def of_client_hooks(context: Context) -> dict[str, Array]:
    """Return the kept entries of the client hooks.

    They come from the mod before the training, and from ``bn_rules`` after it.
    """
    records = of_kind(context.state, ArrayRecord)
    return from_record(records.get(KEPT_BY_HOOKS, ArrayRecord()))


def open_outbox(context: Context) -> None:
    """Add an empty outbox to the context, for the training of one message."""
    take_records(context, OUTBOX)
    context.state[OUTBOX] = ConfigRecord()


def is_filled(context: Context) -> bool:
    """Return whether ``bn_rules`` has filled the outbox of this message."""
    return bool(context.state.get(OUTBOX))


def fill_outbox(
    context: Context, metrics: Mapping[str, Any], hooks: Iterable[ClientHook]
) -> None:
    """Store the metrics and records of the client hooks for the reply.

    Nothing is stored if the mod has not opened the outbox.
    """
    if OUTBOX not in context.state:  # without the mod, nobody would empty it
        return
    context.state[OUTBOX] = ConfigRecord(dict(metrics))
    for hook in hooks:
        for record, entries in hook.reply().items():
            context.state[f"{OUTBOX}/{record}"] = to_record(to_state(entries))
