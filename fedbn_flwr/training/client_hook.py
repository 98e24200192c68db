"""``ClientHook`` is the client code of a method. ``Session`` calls it.

A hook has one function for each point in a round of local training. Each loop uses a
session: the loop of this package, and a user's loop (``client.bn_rules``). It is the
only code that calls the hooks while a model trains. Torch only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    suppress,
)
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from fedbn_flwr.training.optimizer_hooks import (
    dense_gradient,
    parameters_of,
    separate_gradients,
)

__all__ = [
    "OWN_MODEL",
    "ClientHook",
    "Entries",
    "Extras",
    "LossAndOutputs",
    "NamedHooks",
    "Purpose",
    "RetryStep",
    "Session",
    "overrides",
]

# The batch's mean loss without penalties, and the outputs. Both are detached.
LossAndOutputs = tuple[Tensor, Tensor]
Entries = Mapping[str, Tensor]
Extras = Mapping[str, Entries]
Purpose = Literal["choose", "change", "correct", "count"]
"""The purposes of ``ClientHook.gradients``, in the order in which they act."""
_PURPOSES = get_args(Purpose)
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
        of_zero: whether a parameter that trains, but is not in the loss of a step, has a
            gradient of 0 in this step. Otherwise it has none, as in torch, and the
            optimizer skips it. Then None means in ``gradients`` that a hook has chosen
            other parameters for this step.
        step: the number of the current step, from 0, in ``gradients``. Optimizers that
            step after the same backward pass have the same number. In a loop of the
            user's, it counts inside the block of ``bn_rules``.
    """

    compares_with_start: ClassVar[bool] = False
    of_all_steps: ClassVar[str] = ""
    kept_as: ClassVar[str] = ""
    purpose: ClassVar[Purpose] = "change"
    in_batchnorm: bool = False
    of_zero: bool = False
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


class Session:
    """The client hooks of a method in one round.

    A step of the package's loop::

        with session.step(size):
            sum(session.penalties(), loss).backward()
        session.change_gradients(trained)
        optimizer.step()

    In a user's loop, torch calls ``act`` before ``optimizer.step()``.

    Args:
        model: the model without wrappers, as the hooks see it.
        hooks: the hooks by name, in the order of the message.

    Attributes:
        acting: the hooks that act in each step.
        passes: the number of passes, each forward and backward.
        steps: the number of steps.
        metrics: the metrics of the hooks, set at the end of ``block``.
    """

    def __init__(self, model: nn.Module, hooks: NamedHooks) -> None:
        self.model, self.hooks = model, hooks
        self.acting: list[ClientHook] = []
        self.passes = self.steps = 0
        self.metrics: dict[str, Any] = {}
        for hook in hooks.values():
            if overrides(hook, "start", "penalty", "gradients"):
                self.acting.append(hook)
        # Hooks of the same purpose keep their order, because sorting is stable.
        self._by_purpose = sorted(
            self.acting, key=lambda hook: _PURPOSES.index(hook.purpose)
        )

    @contextmanager
    def block(self) -> Iterator[None]:
        """Begin the hooks, and end them after the block.

        If the block raises, the end of the hooks restores the model, because a later
        round may use it again.
        """
        begun: list[ClientHook] = []
        try:
            for hook in self.hooks.values():
                hook.begin(self.model)
                begun.append(hook)
            yield
        except BaseException:
            for hook in reversed(begun):
                with suppress(Exception):  # the first error is the useful one
                    hook.end(self.model)
            raise
        for hook in begun:
            self.metrics |= hook.end(self.model)

    @property
    def synchronises(self) -> bool:
        """Whether BatchNorm in the next pass uses the batches of all clients."""
        return any(hook.synchronises(self.passes) for hook in self.hooks.values())

    @contextmanager
    def step(self, batch_size: int) -> Iterator[None]:
        """Let the hooks act around the forward and backward pass of a step."""
        with ExitStack() as stack:
            for hook in self.hooks.values():
                context = hook.around(self.passes, self.model, batch_size)
                stack.enter_context(context)
            yield
        self.passes += 1

    def penalties(self) -> Iterator[Tensor]:
        """Yield the terms that the hooks add to the loss of a step."""
        for hook in self.acting:
            penalty = hook.penalty(self.model)
            if penalty is not None:
                yield penalty

    def change_gradients(self, trained: Iterable[Tensor], again: bool = False) -> None:
        """Let the hooks change the gradients of a step, in the order of their purposes.

        ``trained`` are the parameters of the optimizer. ``again`` is true if another
        optimizer has already begun this step.
        """
        self.steps += not again
        if any(hook.of_zero for hook in self.acting):
            # Before the hooks that choose parameters, because these leave None.
            for p in trained:
                if p.grad is None and p.requires_grad:
                    p.grad = torch.zeros_like(p)
        if self.acting:
            separate_gradients(self.model.parameters())
        for hook in self._by_purpose:
            hook.step = self.steps - 1
            hook.gradients(self.model)

    def act(self, optimizer: torch.optim.Optimizer, again: bool) -> float | Tensor:
        """Add the gradients of the penalties, and let the hooks change the sums.

        Only the gradients of the optimizer's parameters change. Return the sum of the
        penalties.
        """
        # Two optimizers may share a gradient, and the penalties change gradients, too.
        separate_gradients(self.model.parameters())
        # Hide the gradients of parameters that another optimizer steps. Otherwise the
        # hooks would change them once in the step of each optimizer.
        own = parameters_of(optimizer)
        trained: list[nn.Parameter] = []
        set_aside: dict[nn.Parameter, Tensor] = {}
        for p in self.model.parameters():
            if p in own:
                if p.requires_grad:
                    trained.append(p)
            elif p.grad is not None:
                set_aside[p] = p.grad
                p.grad = None
        with torch.enable_grad():  # a step runs without gradients
            penalties = list(self.penalties())
        total: float | Tensor = 0.0
        for penalty in penalties if trained else ():
            # Add up tensors, because converting a tensor to a number would wait for the
            # device in each step.
            total = total + penalty.detach()
            gradients = torch.autograd.grad(penalty, trained, allow_unused=True)
            for p, grad in zip(trained, gradients, strict=True):
                if grad is not None:
                    present = dense_gradient(p)
                    p.grad = grad if present is None else present.add_(grad)
        self.change_gradients(trained, again)
        for p, grad in set_aside.items():
            p.grad = grad
        return total
