"""``Session``: the client hooks of a method in one round of local training.

Each loop uses it: the loop of this package, and a user's loop (``client.bn_rules``). It is
the only code that calls the hooks while a model trains. Torch only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, get_args

import torch
from torch import Tensor, nn

from fedbn_flwr.training.client_hook import (
    ClientHook,
    NamedHooks,
    Purpose,
    overrides,
)
from fedbn_flwr.training.optimizer_hooks import parameters_of
from fedbn_flwr.training.optimizers import dense_gradient

_PURPOSES = get_args(Purpose)


class Session:
    """The client hooks of a method in one round.

    A step of the package's loop::

        with session.step(size):
            session.penalised(loss).backward()
        session.change_gradients()
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

    def start(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the hooks prepare an optimizer."""
        for hook in self.acting:
            hook.start(self.model, optimizer)

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

    def penalised(self, loss: Tensor) -> Tensor:
        """Return the loss of a step with the penalties of the hooks."""
        for penalty in self._penalties():
            loss = loss + penalty
        return loss

    def _penalties(self) -> Iterator[Tensor]:
        for hook in self.acting:
            penalty = hook.penalty(self.model)
            if penalty is not None:
                yield penalty

    def change_gradients(self, again: bool = False) -> None:
        """Let the hooks change the gradients of a step, in the order of their purposes.

        ``again`` is true if another optimizer has already begun this step.
        """
        self.steps += not again
        for hook in self._by_purpose:
            hook.step = self.steps - 1
            hook.gradients(self.model)

    def act(self, optimizer: torch.optim.Optimizer, again: bool) -> float | Tensor:
        """Add the gradients of the penalties, and let the hooks change the sums.

        Only the gradients of the optimizer's parameters change. Return the sum of the
        penalties.
        """
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
            penalties = list(self._penalties())
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
        self.change_gradients(again)
        for p, grad in set_aside.items():
            p.grad = grad
        return total
