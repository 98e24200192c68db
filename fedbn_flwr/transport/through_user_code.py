"""A client's reducer, and its way through a user's training code.

A synchronised step waits inside a BatchNorm layer, in the middle of a forward or
backward pass. Code of other authors is between that layer and the message that asks for
the step: the user's app and training loop, and other mods.

On the way in, the functions of these authors have no argument for a reducer. Therefore
the engine leaves it in a context variable.

On the way out, with the transport "messages", the client must send a tensor and end its
work in the middle of the step. Only an exception can leave the functions of others from
inside. A waiting thread would need the process to live until the next message, but
Flower may end it. Later the step runs again from its beginning, with the answers so
far. ``StopStep`` is not an error, and must pass a user's ``except Exception``, so it is
a BaseException. The receiver of the message (``TorchClient.fit``, ``bn_mod``) catches
it and turns it into a value. ``RetryStep`` works in the same way, but begins the round
again immediately.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from torch import Tensor

from fedbn_flwr.errors import EngineError, FedBNError
from fedbn_flwr.training.client_hook import RetryStep

__all__ = [
    "Dropped",
    "Reducer",
    "RetryStep",
    "StopStep",
    "in_process_reducer",
    "use_reducer",
]


class Dropped(FedBNError):
    """This client is out of the round.

    It was late or sent an unusable tensor, or too few clients remain.
    """

    code = "dropped"


class Reducer(Protocol):
    """Sends a client's tensors, and returns the reduced tensors of all clients."""

    def begin(self) -> int:
        """Begin the step, or repeat it after ``RetryStep``.

        Returns:
            Number of examples in all clients' batches.

        Raises:
            Dropped: this client is out of the round.
        """

    def reduce(self, tag: str, tensor: Tensor) -> Tensor:
        """Send ``tensor``, and return the reduced tensor of exchange ``tag``.

        Raises:
            RetryStep: the step must be repeated.
            Dropped: this client is out of the round.
        """

    def close(self) -> None:
        """End the step, so that this client sends no more exchanges."""


class StopStep(BaseException):
    """Leaves the user's training and ends the work on its message.

    Attributes:
        sent: the content of the client's reply instead of a trained model: the tensor
            of the next exchange, by its tag; empty if the step has all its answers.
    """

    def __init__(self, sent: Mapping[str, Tensor]) -> None:
        super().__init__(f"the client sends {list(sent)} and waits for an answer")
        self.sent = sent


_REDUCER: ContextVar[Reducer | None] = ContextVar("reducer", default=None)


@contextmanager
def use_reducer(reducer: Reducer) -> Iterator[None]:
    """Let ``in_process_reducer`` return this reducer inside the block.

    An engine calls it around a client's work.
    """
    token = _REDUCER.set(reducer)
    try:
        yield
    finally:
        _REDUCER.reset(token)


def in_process_reducer() -> Reducer:
    """Return this client's reducer at a barrier in this process.

    Raises:
        EngineError: no engine of this process has put this client at a barrier.
    """
    reducer = _REDUCER.get()
    if reducer is None:
        raise EngineError(
            "this client is at no barrier in this process. Set fedtan-transport to"
            " messages or channel"
        )
    return reducer
