"""What a client remembers of a step that is carried by messages: the round's model and the answers so far.

It lies in Flower's ``Context.state`` from the first message of the round to the last; the engine keeps it or, where the
app failed, puts it back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context

from fedbn_flwr.batchnorm.averaging import Array
from fedbn_flwr.transport import Pending, Replay
from fedbn_flwr.errors import StateError
from fedbn_flwr.messages.records import from_record, tensors, to_record

__all__ = ["ANSWERS", "forget", "note_sent", "recall", "seat"]

ANSWERS = "fedtan"  # the ArrayRecord of an exchange: one entry, named by its tag
_MODEL, _GIVEN, _ABOUT = "fedbn-flwr.step.model", "fedbn-flwr.step.answers", "fedbn-flwr.step"
_SENT = "fedbn-flwr.step.sent"
_NAMES = "array-names"


def recall(
    context: Context | None, parameters: list[Array], config: dict[str, Any]
) -> tuple[list[Array], dict[str, Any]]:
    """Take in one message of the step; return the round's model and a config that holds the seat to replay from.

    Args:
        context: where the journal lies.
        parameters: the model in the round's first message, and the newest answer in every later one.
        config: with ``array-names`` (JSON; answers are called ``fedtan/TAG``), ``fedtan-attempt`` and ``fedtan-union``.

    Raises:
        StateError: there is no context, or it has forgotten the round's model.
    """
    if context is None:
        raise StateError("FedTAN by messages keeps the step in the client's Context; pass context= from client_fn")
    state, server_round, attempt = context.state, int(config["server-round"]), int(config["fedtan-attempt"])
    arrays = dict(zip(json.loads(config[_NAMES]), parameters, strict=True))
    prefix = f"{ANSWERS}/"
    answers = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
    model = {name: array for name, array in arrays.items() if not name.startswith(prefix)}
    about = dict(state.config_records.get(_ABOUT, {}))
    if model:
        state[_MODEL], state[_GIVEN] = to_record(model), ArrayRecord()
        state.pop(_SENT, None)
    elif about.get("server-round") != server_round:
        raise StateError(f"the model of round {server_round} was sent to this client in an earlier message, now lost")
    elif about.get("attempt") != attempt:
        state[_GIVEN] = ArrayRecord()
        state.pop(_SENT, None)
    state[_ABOUT] = ConfigRecord({"server-round": server_round, "attempt": attempt})
    state.array_records[_GIVEN].update(to_record(answers))
    kept = from_record(state.array_records[_MODEL])
    return list(kept.values()), {**config, _NAMES: json.dumps(list(kept)), "fedtan-seat": seat(context, config)}


def seat(context: Context, config: Mapping[str, Any]) -> Replay:
    """Return the seat that answers from the journal."""
    records = context.state.array_records
    sent = tensors(from_record(records[_SENT])) if _SENT in records else None
    return Replay(tensors(from_record(records[_GIVEN])), int(config["fedtan-union"]), sent)


def note_sent(context: Context, exchange: Pending) -> None:
    """Write down what was sent, for a training that is not known to repeat itself."""
    before = context.state.array_records.get(_SENT, ArrayRecord())
    context.state[_SENT] = ArrayRecord({**before, **to_record({exchange.tag: exchange.tensor})})


def forget(context: Context | None) -> None:
    """Drop the journal: the round is done."""
    for key in (_MODEL, _GIVEN, _SENT, _ABOUT):
        if context is not None and key in context.state:
            del context.state[key]
