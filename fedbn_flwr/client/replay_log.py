"""A client's reducer in a synchronised step, and its replay log with messages.

The log is in Flower's ``Context.state`` from the first message of the round to the last
message. If the app raises an error, the engine restores the context, including the log.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context
from torch import Tensor

from fedbn_flwr.batchnorm.array_types import Array
from fedbn_flwr.errors import StateError
from fedbn_flwr.messages.protocol import (
    ARRAY_NAMES,
    ATTEMPT,
    BARRIER,
    EXCHANGE,
    SERVER_ROUND,
    STEP_ABOUT,
    STEP_ANSWERS,
    STEP_ATTEMPT,
    STEP_MODEL,
    STEP_ONLY,
    STEP_SENT,
    UNION,
)
from fedbn_flwr.messages.records import from_record, of_kind, tensors, to_record
from fedbn_flwr.transport import Reducer, Replay, in_process_reducer
from fedbn_flwr.transport.transports import TRANSPORTS


def log_answer(
    context: Context, parameters: list[Array], config: dict[str, Any]
) -> tuple[list[Array], dict[str, Any]]:
    """Add one message of the step to the log, and return the round's model.

    Also return the config with the names of the model's arrays.

    Args:
        context: the context with the log.
        parameters: the arrays of the message: the model in the round's first message,
            or the newest answer in a later message.
        config: the config of the message. It has ``ARRAY_NAMES`` (JSON; an answer has
            the name ``fedtan/TAG``), ``ATTEMPT`` and ``UNION``.

    Raises:
        StateError: the context has lost the round's model.
    """
    state = context.state
    server_round, attempt = int(config[SERVER_ROUND]), int(config[ATTEMPT])
    # A message has the round's model, or answers, or both.
    model: dict[str, Array] = {}
    answers: dict[str, Array] = {}
    prefix = f"{EXCHANGE}/"
    for name, array in zip(json.loads(config[ARRAY_NAMES]), parameters, strict=True):
        if name.startswith(prefix):
            answers[name.removeprefix(prefix)] = array
        else:
            model[name] = array
    about = dict(of_kind(state, ConfigRecord).get(STEP_ABOUT, {}))
    # The first message of a round starts a new log and discards an earlier round's log.
    if model:
        state[STEP_MODEL], state[STEP_ANSWERS] = to_record(model), ArrayRecord()
        state.pop(STEP_SENT, None)
    elif about.get(SERVER_ROUND) != server_round:
        raise StateError(
            f"the model of round {server_round} came in an earlier message, but this"
            " client's Context no longer has it: the node was restarted in the middle"
            " of the synchronised step. The client leaves this step, and takes part in"
            " the next round. If this happens in every round, use"
            " fedtan-transport=channel, because it needs no earlier message."
        )
    elif about.get(STEP_ATTEMPT) != attempt:
        # Another client was lost, so the step starts again with the same model.
        state[STEP_ANSWERS] = ArrayRecord()
        state.pop(STEP_SENT, None)
    state[STEP_ABOUT] = ConfigRecord(
        {SERVER_ROUND: server_round, STEP_ATTEMPT: attempt}
    )
    of_kind(state, ArrayRecord)[STEP_ANSWERS].update(to_record(answers))
    kept = from_record(of_kind(state, ArrayRecord)[STEP_MODEL])
    return list(kept.values()), {**config, ARRAY_NAMES: json.dumps(list(kept))}


def reducer_of(context: Context | None, config: Mapping[str, Any]) -> Reducer | None:
    """Return the client's reducer, or None outside a synchronised step.

    A client waits at a barrier of this process, answers from the log, or uses the
    transport that the message names.

    Raises:
        EngineError: the message asks for a barrier, but there is none.
    """
    if BARRIER in config:
        return in_process_reducer()
    if context is None or ATTEMPT not in config:
        found = (transport.reducer(config) for transport in TRANSPORTS.values())
        return next((reducer for reducer in found if reducer is not None), None)
    records = of_kind(context.state, ArrayRecord)
    sent = None
    if STEP_SENT in records:
        sent = tensors(from_record(records[STEP_SENT]))
    return Replay(
        tensors(from_record(records[STEP_ANSWERS])),
        int(config[UNION]),
        sent,
        STEP_ONLY in config,
    )


def log_sent(context: Context, sent: Mapping[str, Tensor]) -> None:
    """Add the sent tensor to the log.

    At the next message, the training runs again, and its tensor must equal the logged
    tensor.
    """
    earlier = of_kind(context.state, ArrayRecord).get(STEP_SENT, ArrayRecord())
    context.state[STEP_SENT] = ArrayRecord({**earlier, **to_record(sent)})


def clear_log(context: Context | None) -> None:
    """Remove the log at the end of the round."""
    if context is None:
        return
    log = {STEP_MODEL, STEP_ANSWERS, STEP_SENT, STEP_ABOUT}
    for key in log.intersection(context.state.keys()):
        del context.state[key]
