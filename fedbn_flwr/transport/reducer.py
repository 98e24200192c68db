"""The interface through which a client takes part in the exchanges of a synchronised step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from torch import Tensor

from fedbn_flwr.errors import EngineError, FedBNError

__all__ = ["Dropped", "Reducer", "RetryStep", "Signal", "wrap_reducers", "wrapped"]


class Signal(BaseException):
    """Leaves a synchronised step to repeat or to end it. It is no error: a user's ``except Exception`` lets it pass."""


class RetryStep(Signal):
    """Another client was lost during the step. Repeat the step with the remaining clients."""


class Dropped(FedBNError):
    """This client is out of the round: it was too late, sent an unusable tensor, or too few clients remain."""

    code = "dropped"


class Reducer(Protocol):
    """Sends a client's tensors and returns the reduced tensors of all clients, by any transport."""

    def begin(self) -> int:
        """Begin the step, or repeat it after ``RetryStep``; return the number of examples in all clients' batches.

        Raises:
            Dropped: this client is out of the round.
        """

    def reduce(self, tag: str, tensor: Tensor) -> Tensor:
        """Send ``tensor`` and return the reduced tensor of all clients in exchange ``tag``.

        Raises:
            RetryStep: the step must be repeated.
            Dropped: this client is out of the round.
        """

    def close(self) -> None:
        """End the step: this client sends no more exchanges."""


_WRAP: ContextVar[Callable[[Reducer], Reducer]] = ContextVar("wrap")  # a mod sets it around a client's training


@contextmanager
def wrap_reducers(wrap: Callable[[Reducer], Reducer]) -> Iterator[None]:
    """Let ``wrapped`` return ``wrap(reducer)`` inside the block."""
    token = _WRAP.set(wrap)
    try:
        yield
    finally:
        _WRAP.reset(token)


def wrapped(reducer: Reducer, required: bool) -> Reducer:
    """Return the reducer as a mod of the client wraps it.

    Args:
        reducer: the reducer.
        required: whether nothing may leave the client without such a mod.

    Raises:
        EngineError: it is required, and the training runs in another thread than the mod.
    """
    wrap = _WRAP.get(None)
    if wrap is None and required:
        raise EngineError(
            "the server asks for masked sums, and this training runs where the mod masked_update does not reach it: "
            "make it the app's first mod, and train in the thread that calls the app"
        )
    return wrap(reducer) if wrap else reducer
