"""``ClientHook``, the client code of a method.

It has one function for each point in a round of local training. Torch only.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

__all__ = [
    "OWN_MODEL",
    "ClientHook",
    "Entries",
    "Extras",
    "LossAndOutputs",
    "NamedHooks",
    "Purpose",
    "RetryStep",
    "overrides",
]

# The batch's mean loss without penalties, and the outputs. Both are detached.
LossAndOutputs = tuple[Tensor, Tensor]
Entries = Mapping[str, Tensor]
Extras = Mapping[str, Entries]
Purpose = Literal["choose", "change", "correct", "count"]
"""The purposes of ``ClientHook.gradients``, in the order in which they act."""
OWN_MODEL = "own-model"
"""Value of ``ClientHook.kept_as``: the kept state is the client's own model."""


class RetryStep(BaseException):
    """Leaves a step because another client was lost.

    The client begins the round again, with the remaining clients. The exception may pass
    through a user's training loop, so it is not a subclass of Exception (see
    ``transport.through_user_code``).
    """


class ClientHook:
    """The client code of a method in local training.

    The functions of this class do nothing; a method overrides those that it needs.
    Calls in a round: ``receive``, ``begin``, ``start``; for each step
    ``around``, ``penalty`` and ``gradients``; then ``end``, ``reply``, ``keep``.

    Attributes:
        compares_with_start: whether ``end`` compares the model with its state at
            ``begin``, and the hook does not wrap the optimizer. Such a hook would
            mistake a state loaded by a user's loop for training.
        of_all_steps: "" if the sent or kept values fit any weights that a user's loop
            returns. Otherwise the values depend on all steps, and this text is the
            advice if the loop loads other weights after a step, such as the weights of
            the best epoch.
        kept_as: the name for storing the result of ``keep``. "" means the name of the
            hook. ``OWN_MODEL`` means that the result is the client's own model, used
            in tests and exports.
        purpose: when ``gradients`` acts, independent of the order of the methods.
            "choose": it drops the gradients of parameters that do not train in this
            step. "change": it changes the gradients of the loss, such as by clipping.
            "correct": it adds to the gradients. "count": it reads the gradients that
            the optimizer will apply.
        in_batchnorm: whether the hook acts only in forward passes of BatchNorm layers in
            train mode. A user's loop is refused if all these layers are in eval mode in
            each pass.
        step: the number of the current step, from 0, in ``gradients``. Optimizers that
            step after the same backward pass have the same number. In a loop of the
            user's, it counts inside the block of ``bn_rules``.
    """

    compares_with_start: ClassVar[bool] = False
    of_all_steps: ClassVar[str] = ""
    kept_as: ClassVar[str] = ""
    purpose: ClassVar[Purpose] = "change"
    in_batchnorm: bool = False
    step: int = 0

    def receive(self, sent: Extras, kept: Entries) -> None:
        """Take the server's extra records and the entries kept in the last round."""

    def begin(self, model: nn.Module) -> None:
        """Prepare the model before the first step.

        The model has the state from the server and is in train mode.
        """

    def start(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Prepare the optimizer, after its learning rate was set.

        A user's loop may have several optimizers, each with its own parameters.
        Then ``penalty`` and ``gradients`` are called before the steps of each
        optimizer, and only its parameters have gradients.
        """

    def penalty(self, model: nn.Module) -> Tensor | None:
        """Return a term to add to the loss of a step, or None.

        The reported loss does not include the term.
        """
        return None

    def gradients(self, model: nn.Module) -> None:
        """Change the gradients of a step.

        The call comes after the clipping of their norm, and before weight decay and
        momentum. ``purpose`` determines the order of several hooks.
        """

    def synchronises(self, step: int) -> bool:
        """Return whether BN in step ``step`` (from 0) uses all clients' batches.

        A batch of one example is enough in such a step.
        """
        return False

    def around(
        self, step: int, model: nn.Module, batch_size: int
    ) -> AbstractContextManager[object]:
        """Return a context for the forward and backward pass of a step.

        If the hook ``synchronises`` a step, the context may raise RetryStep. The client
        then begins the round again with another copy of the model.
        """
        return nullcontext()

    def end(self, model: nn.Module) -> dict[str, float]:
        """Return metrics for the reply, and undo the changes of ``begin``.

        Only changes of the model's settings are undone.
        """
        return {}

    def reply(self) -> Extras:
        """Return the extra records for the server, in addition to the model."""
        return {}

    def keep(self) -> Entries:
        """Return the entries that the client keeps until its next round."""
        return {}


NamedHooks = Mapping[str, ClientHook]
"""The client hooks of a method by name, in the order of the message."""


def overrides(hook: ClientHook, *names: str) -> bool:
    """Return whether the hook's class overrides at least one of these methods."""
    return any(
        getattr(type(hook), name) is not getattr(ClientHook, name) for name in names
    )
