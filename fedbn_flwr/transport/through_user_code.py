"""A client's reducer, and what passes through a user's training code.

A synchronised step waits inside a BatchNorm layer, in the middle of a forward or
backward pass. Between that layer and the message that asks for the step lies code that
is not ours: the user's app and training loop, other mods.

In: their functions have no argument for a reducer, so the engine and the mods leave it
in a context variable.

Out: by messages the client must send a tensor and end its work in mid-step. Nothing but
an exception leaves a function of others from the inside; a thread that waits in the
layer would need the process to live until the next message, and Flower may end it. The
step then runs again from its beginning, with the answers so far. ``StopStep`` is no
error, and a user's ``except Exception`` must let it pass: it is a BaseException. It is
caught where the message came in (``TorchClient.train``, ``bn_mod``), and becomes a
value. So is ``RetryStep``, which repeats the step at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from fedbn_flwr.errors import EngineError, FedBNError
from fedbn_flwr.training.client_hook import RetryStep

__all__ = [
    "Dropped",
    "NextExchange",
    "Reducer",
    "RetryStep",
    "StopStep",
    "in_process_reducer",
    "use_reducers",
    "wrap_reducers",
    "wrapped",
]


class Dropped(FedBNError):
    """This client is out of the round.

    It was too late, sent an unusable tensor, or too few clients remain.
    """

    code = "dropped"


class Reducer(Protocol):
    """Sends a client's tensors; returns those of all clients, reduced."""

    def begin(self) -> int:
        """Begin the step, or repeat it after ``RetryStep``.

        Returns:
            Examples in all clients' batches.

        Raises:
            Dropped: this client is out of the round.
        """

    def reduce(self, tag: str, tensor: Tensor) -> Tensor:
        """Send ``tensor``, and return the reduced one of exchange ``tag``.

        Raises:
            RetryStep: the step must be repeated.
            Dropped: this client is out of the round.
        """

    def close(self) -> None:
        """End the step: this client sends no more exchanges."""


@dataclass(frozen=True)
class NextExchange:
    """What a client sends in mid-step, in place of a trained model.

    Attributes:
        tensors: the tensor of the next exchange, by its tag; empty once the step has
            all its answers.
    """

    tensors: Mapping[str, Tensor]


class StopStep(BaseException):
    """Leaves the user's training: its message ends here.

    Attributes:
        exchange: what the client sends.
    """

    def __init__(self, exchange: NextExchange) -> None:
        super().__init__(
            f"the client sends {list(exchange.tensors)} and waits for the next message"
        )
        self.exchange = exchange


class _OfClient(NamedTuple):
    """What the engine and the mods give to a client's training."""

    find: Callable[[str], Reducer] | None = None
    wrap: Callable[[Reducer], Reducer] | None = None


_OF_CLIENT: ContextVar[_OfClient] = ContextVar("of_client")
_NOTHING = _OfClient()


def use_reducers(find: Callable[[str], Reducer]) -> AbstractContextManager[None]:
    """Let ``in_process_reducer`` use ``find(barrier_id)`` inside the block.

    An engine calls it around a client's work.
    """
    return _with(find=find)


def wrap_reducers(wrap: Callable[[Reducer], Reducer]) -> AbstractContextManager[None]:
    """Let ``wrapped`` return ``wrap(reducer)`` inside the block.

    A mod calls it around a client's training.
    """
    return _with(wrap=wrap)


@contextmanager
def _with(**given: Any) -> Iterator[None]:
    token = _OF_CLIENT.set(_OF_CLIENT.get(_NOTHING)._replace(**given))
    try:
        yield
    finally:
        _OF_CLIENT.reset(token)


def in_process_reducer(barrier_id: str) -> Reducer:
    """Return this client's reducer at a barrier in this process.

    Raises:
        EngineError: no engine of this process has such a barrier.
    """
    find = _OF_CLIENT.get(_NOTHING).find
    if find is not None:
        with suppress(KeyError):
            return find(barrier_id)
    raise EngineError(
        f"no barrier {barrier_id!r} in this process; fedtan-transport must be messages"
        " or channel"
    )


def wrapped(reducer: Reducer, required: bool) -> Reducer:
    """Return the reducer as a mod of the client wraps it.

    Args:
        reducer: the reducer.
        required: whether nothing may leave the client without such a mod.

    Raises:
        EngineError: it is required, and the training runs in another thread than the
            mod.
    """
    wrap = _OF_CLIENT.get(_NOTHING).wrap
    if wrap is None and required:
        raise EngineError(
            "the server asks for masked sums, and this training runs where the mod"
            " masked_update does not reach it: make it the app's first mod, and train"
            " in the thread that calls the app"
        )
    return wrap(reducer) if wrap else reducer
