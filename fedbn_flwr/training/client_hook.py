"""``ClientHook``: the client half of a method, by the calls that a round of local
training makes. Torch only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from fedbn_flwr.training.batches import Batches

__all__ = [
    "OWN_MODEL",
    "ClientHook",
    "Entries",
    "Extras",
    "LossAndOutputs",
    "RetryStep",
    "Stage",
    "around_step",
    "begun",
    "change_gradients",
    "overrides",
]

# the batch's mean loss without penalties, and the outputs, both detached
LossAndOutputs = tuple[Tensor, Tensor]
Entries = Mapping[str, Tensor]
Extras = Mapping[str, Entries]
Stage = Literal["choose", "change", "correct", "count"]
"""The stages of ``ClientHook.gradients`` in a step, in order."""
OWN_MODEL = "own-model"
"""Of ``ClientHook.kept_as``: what a hook keeps is the client's own model."""


class RetryStep(BaseException):
    """Leaves a step: another client was lost. Repeat it with the remaining clients.

    It may pass through a user's training loop, so it is no Exception; see
    ``transport.through_user_code``.
    """


class ClientHook:
    """The client half of a method in local training. Here every hook does nothing; a
    method overrides what it needs.

    Calls in a round: ``receive``, ``begin``, ``survey``, ``start``; for each step
    ``around``, ``penalty`` and ``gradients``; then ``end``, ``reply``, ``keep``.

    Attributes:
        compares_with_start: whether ``end`` compares the model with what ``begin``
            found, and the optimizer need not be wrapped: a state that a user's loop
            loads in between would be taken for training.
        of_all_steps: "" if what it sends or keeps fits any weights that a user's loop
            returns. Else it belongs to all steps, and this is the advice where other
            weights are loaded after one, e.g. those of the best epoch.
        kept_as: where what ``keep`` returns is stored; "" = under the name of its class.
            ``OWN_MODEL`` = it is the client's own model, and tests and exports use it.
        stage: when ``gradients`` acts, whatever order the methods have. "choose" = it
            drops the gradients of parameters that do not train in this step; "change" =
            it changes those of the loss, as clipping does; "correct" = it adds to them;
            "count" = it reads the gradients that the optimizer will apply.
        passes: what ``survey`` calls with the inputs of each batch; None = the model
            itself.
        step: the number of the present step, from 0, in ``gradients``. Optimizers that
            step after the same backward pass have the same number.
    """

    compares_with_start: ClassVar[bool] = False
    of_all_steps: ClassVar[str] = ""
    kept_as: ClassVar[str] = ""
    stage: ClassVar[Stage] = "change"
    passes: Callable[[Any], Any] | None = None
    step: int = 0

    def receive(self, sent: Extras, kept: Entries) -> None:
        """Take the server's extra records, and the entries that this hook kept in the
        last round.
        """

    def begin(self, model: nn.Module) -> None:
        """Prepare the model before the first step; it has the state from the server and
        is in train mode.
        """

    def survey(
        self, model: nn.Module, data: Batches, batch_size: int, seed: int
    ) -> None:
        """Pass the client's data through the model, which has the weights from the
        server; after ``begin``.

        Args:
            model: as ``begin`` left it.
            data: the client's training data, taken without a generator, so without
                augmentation.
            batch_size: examples per batch; 0 = all in one.
            seed: for dropout and other random layers.
        """

    def start(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Prepare the optimizer, which has the learning rate of the round.

        A user's loop may have several, each with parameters of its own; ``penalty`` and
        ``gradients`` are then called before the steps of each, and only its parameters
        have gradients.
        """

    def penalty(self, model: nn.Module) -> Tensor | None:
        """Return a term to add to the loss of a step, or None; the reported loss does
        not include it.
        """
        return None

    def gradients(self, model: nn.Module) -> None:
        """Change the gradients of a step, after their norm was clipped, before weight
        decay and momentum; ``stage`` says in which order.
        """

    def synchronises(self, step: int) -> bool:
        """Return whether BN in step ``step`` (from 0) uses all clients' batches, so
        that a batch of one is enough.
        """
        return False

    def takes_one_value(self, layer: nn.Module) -> bool:
        """Return whether this BatchNorm layer, in train mode, can use a batch with one
        value per channel.
        """
        return False

    def around(
        self, step: int, model: nn.Module, batch_size: int
    ) -> AbstractContextManager[object]:
        """Return a context for the forward and backward pass of a step.

        Where the hook ``synchronises`` a step, the context may raise RetryStep: the
        step is repeated from the same state and batch.
        """
        return nullcontext()

    def end(self, model: nn.Module) -> dict[str, float]:
        """Undo the changes of ``begin`` to the model's settings; return metrics for the
        reply.
        """
        return {}

    def reply(self) -> Extras:
        """Return the extra records for the server, besides the model."""
        return {}

    def keep(self) -> Entries:
        """Return the entries that the client keeps until its next round."""
        return {}


@contextmanager
def begun(hooks: Iterable[ClientHook], model: nn.Module) -> Iterator[None]:
    """Begin the hooks. If the block raises, end them: the model may be used again, for
    another round.
    """
    done: list[ClientHook] = []
    try:
        for hook in hooks:
            hook.begin(model)
            done.append(hook)
        yield
    except BaseException:
        for hook in reversed(done):
            with contextlib.suppress(Exception):  # the first error is the one to see
                hook.end(model)
        raise


@contextmanager
def around_step(
    hooks: Iterable[ClientHook], step: int, model: nn.Module, batch_size: int
) -> Iterator[None]:
    """Let the hooks act around the forward and backward pass of a step."""
    with ExitStack() as stack:
        for hook in hooks:
            stack.enter_context(hook.around(step, model, batch_size))
        yield


def change_gradients(hooks: Iterable[ClientHook], model: nn.Module, step: int) -> None:
    """Let the hooks change the gradients of a step, in the order of their stages."""
    stages = get_args(Stage)
    # Sorting keeps the order of hooks of the same stage.
    for hook in sorted(hooks, key=lambda hook: stages.index(hook.stage)):
        hook.step = step
        hook.gradients(model)


def overrides(hook: ClientHook, *names: str) -> bool:
    """Return whether the hook's class has its own form of one of these methods."""
    return any(
        getattr(type(hook), name) is not getattr(ClientHook, name) for name in names
    )
