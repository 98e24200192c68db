"""A client's reducer in a synchronised step, and its replay log with messages.

For every message, the step runs again from its beginning, with the same batch and the
same random numbers. Each exchange uses its recorded answer. The first exchange without
an answer stops the step, and the client sends it next. If all exchanges have answers,
the end of the step also stops it, except in the training message. There the training
continues.

The log is in Flower's ``Context.state`` from the first message of the round to the last
message. If the app raises an error, the engine restores the context, including the log.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from torch import Tensor

from fedbn_flwr.batchnorm.array_types import Array
from fedbn_flwr.errors import DataError, StateError
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
from fedbn_flwr.transport import Reducer, StopStep, in_process_reducer
from fedbn_flwr.transport.transports import TRANSPORTS

# Relative and absolute tolerance: larger than rounding errors of sums on a GPU, far
# smaller than the difference to another batch.
_SAME = 1e-2, 1e-5


class Replay:
    """A reducer that returns recorded answers.

    Args:
        answers: the recorded answers by tag.
        union_batch_size: number of examples in all clients' batches together.
        sent: the tensors that this client sent before, by tag. Pass them for a user's
            training, because it may not repeat itself exactly.
        step_only: whether the training ends with the step.
    """

    def __init__(
        self,
        answers: Mapping[str, Tensor],
        union_batch_size: int,
        sent: Mapping[str, Tensor] | None = None,
        step_only: bool = False,
    ) -> None:
        self._answers = answers
        self._union = union_batch_size
        self._sent = sent or {}
        self._step_only = step_only

    def begin(self) -> int:
        """See ``Reducer.begin``."""
        return self._union

    def reduce(self, tag: str, tensor: Tensor) -> Tensor:
        """Return the recorded answer.

        Raises:
            StopStep: there is no answer yet.
            DataError: the step did not repeat itself exactly.
        """
        if tag not in self._answers:
            raise StopStep({tag: tensor})
        # With another batch, the answer would be wrong, because it includes the first
        # batch.
        if tag in self._sent and not torch.allclose(
            tensor.cpu(), self._sent[tag], *_SAME
        ):
            raise DataError(
                "the step was run again and sent a different tensor in exchange"
                f" '{tag}'. With messages, the first batch must be the same each time"
                " the training function is called in a round. Draw it from a generator"
                " seeded with the round, or use the channel."
            )
        return self._answers[tag]

    def close(self) -> None:
        """See ``Reducer.close``.

        Raises:
            StopStep: the training ends here.
        """
        # No exchange is left to send. The client reports this, and its next message
        # trains.
        if self._step_only:
            raise StopStep({})


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
