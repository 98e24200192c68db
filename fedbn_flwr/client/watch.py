"""``Watch`` finds the mistakes that only a user's training loop can make.

The loop of the package does not need it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fedbn_flwr.client.noted_model import NotedModel
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.problems import Known
from fedbn_flwr.training.client_hook import Session, overrides
from fedbn_flwr.training.freezing import is_forced_eval, layers_of
from fedbn_flwr.training.layer_calls import add_hook, in_checkpoint
from fedbn_flwr.training.model_state import not_compiled, unwrap
from fedbn_flwr.training.optimizer_hooks import (
    facts_of,
    parameters_of,
    stepping_optimizers,
)


class Watch:
    """Watches a user's loop during a session.

    Args:
        session: the client hooks of the loop.
        called: the model with its wrappers, as the loop calls it.
        refuse: raises the problems that the methods have with the facts of the loop.

    Attributes:
        wrapped: the optimizers that take the steps.
        called: the model with its wrappers, as the loop calls it.
        has_gradients: whether a backward pass has followed the last call of ``passes``.
        handles: closes the hooks of torch that the watch uses.
    """

    def __init__(
        self, session: Session, called: nn.Module, refuse: Callable[[Known], None]
    ) -> None:
        self.wrapped: list[torch.optim.Optimizer] = []
        self.has_gradients = False
        self.handles = ExitStack()
        self._session, self._model, self._refuse = session, session.model, refuse
        hooks = session.hooks.values()
        # Note the weights at two times: when the hooks stored them, and after the last
        # step. A user's loop may load other weights in between.
        self._at_start = NotedModel(self._model)
        self._after_step = NotedModel(self._model)
        # New gradients distinguish a step from the step before. Several optimizers may
        # share a backward pass, and a closure may make several passes in a step.
        self._watched: set[nn.Parameter] = set()
        self._stepped: list[torch.optim.Optimizer] = []
        self._new_gradients = self._new_step = True
        self._used = self._trained = False
        # Whether a BatchNorm layer was in train mode in a pass with gradients; None if
        # there was no such pass.
        self._batchnorm_trains: bool | None = None
        # Whether the results of a hook fit only the weights of the last step.
        self._of_all_steps = any(hook.of_all_steps for hook in hooks)
        # Whether a hook that acts in steps stores values of the model at the start.
        self._stores = any(overrides(hook, "begin") for hook in session.acting)
        self.called = called
        self._compares = any(hook.compares_with_start for hook in hooks)
        self._facts: dict[torch.optim.Optimizer, Known] = {}
        if self._compares or self._stores:
            self._at_start.note()

    def _add(self, handle: Any) -> None:
        self.handles.callback(handle.remove)

    def _note(self, module: nn.Module, hook: Callable[..., None]) -> None:
        self.handles.callback(add_hook(module, hook))

    def open(self) -> None:
        """Watch the steps and passes until ``handles`` are closed.

        The hooks have begun, because some of them train or try the model before.
        """
        # Compare with the received weights before the first pass with gradients, because
        # the pass itself may limit weights.
        # Only hooks of the layers notice the pass in every kind of loop.
        self._note(self.called, self._note_pass)
        if self._session.hooks:
            note = not_compiled(self._note_pass)
            for layer in layers_of(self._model).values():
                self._note(layer, note)
        # Torch's hooks for all optimizers of the process also notice optimizers that
        # the loop did not wrap.
        if self._of_all_steps or self._session.acting:
            self._add(register_optimizer_step_pre_hook(self._before_any_step))
        if self._of_all_steps:
            self._add(register_optimizer_step_post_hook(self._after_any_step))
        if any(hook.in_batchnorm for hook in self._session.hooks.values()):
            for layer in layers_of(self._model).values():
                self._note(layer, self._note_mode)

    # Before each call of the loop.

    def wrap(self, optimizer: torch.optim.Optimizer) -> None:
        """Check an optimizer that the loop wraps.

        Raises:
            ConfigError: it belongs to another model, was wrapped before, or does not
                suit the method; or the model has changed.
        """
        own = parameters_of(optimizer)
        if any(own & parameters_of(other) for other in self.wrapped):
            raise ConfigError(
                "rules.wrap was called twice in a block for the same parameters: create"
                " and wrap one optimizer for all epochs"
            )
        if not self._session.acting:
            return
        # If a hook has stored the model before ``start``, the model must be unchanged.
        # Otherwise, the hooks take the present model.
        if self._stores:
            if not self._session.steps:
                self._at_start.check_parameters()
        elif not self.wrapped:
            self._at_start.note()
        # Without a parameter of this model, the hooks would change nothing.
        if own.isdisjoint(self._model.parameters()):
            raise ConfigError(
                "the optimizer has no parameter of the model that was passed to"
                " `bn_rules`: pass the same model to both, not a copy"
            )
        self._check_facts(optimizer)

    def _check_facts(self, optimizer: torch.optim.Optimizer) -> None:
        """Let each method refuse an optimizer that it cannot use."""
        # Schedules change an optimizer, and loops add groups.
        facts = facts_of(optimizer)
        if facts != self._facts.get(optimizer):
            self._refuse(facts)
            self._facts[optimizer] = facts

    def passes(self) -> None:
        """Notice the gradients of the next backward pass."""
        self._watch_gradients()
        self.has_gradients = False

    def act(self, optimizer: torch.optim.Optimizer) -> bool:
        """Check the model and the optimizer before the hooks act in a step.

        Return whether another optimizer has already begun this step.
        """
        self._check_facts(optimizer)
        hooks = self._session.hooks.values()
        if any(overrides(hook, "begin", "start") for hook in hooks):
            if not self._trained:
                self._at_start.check_parameters()
            self._at_start.forget()
        again, self._new_step = not self._new_step, False
        return again

    # The hooks of torch.

    def _watch_gradients(self) -> None:
        """Notice the gradients of a backward pass, even of newly unfrozen parameters."""
        for p in self._model.parameters():
            if p.requires_grad and p not in self._watched:
                self._watched.add(p)
                note = self._note_gradients
                self._add(p.register_post_accumulate_grad_hook(note))  # type: ignore[no-untyped-call]
                self._new_gradients |= p.grad is not None

    def _note_gradients(self, *_: Any) -> None:
        self.has_gradients = self._new_gradients = True

    def _note_pass(self, *_: Any) -> None:
        """Notice a training pass, even if the optimizer is not wrapped."""
        self._used = True
        trains = self._model.training and torch.is_grad_enabled()
        if self._trained or not trains or torch.compiler.is_compiling():
            return
        self._trained = True
        self._at_start.check_parameters()

    def _note_mode(self, layer: nn.Module, _: Any) -> None:
        """Note the mode of a BatchNorm layer in a pass with gradients."""
        if torch.is_grad_enabled() or in_checkpoint():
            # If a hook keeps the layer in eval mode, the mode of the model decides.
            deciding = unwrap(self._model) if is_forced_eval(layer) else layer
            self._batchnorm_trains = self._batchnorm_trains or deciding.training

    def _before_any_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Check a step of any optimizer of the process.

        Raises:
            ConfigError: the optimizer belongs to this model and is not wrapped, but the
                method acts in every step; or a hook needs the weights of the last step,
                and they have changed.
        """
        # If ``optimizer`` wraps another optimizer (Opacus), the inner optimizer takes
        # the step and is checked then.
        if optimizer not in stepping_optimizers(optimizer):
            return
        own = parameters_of(optimizer)
        names = [name for name, p in self._model.named_parameters() if p in own]
        if not names:
            return
        if self._session.acting and optimizer not in self.wrapped:
            raise ConfigError(
                f"{type(optimizer).__name__} steps {len(names)} of the model's"
                f" parameters ('{names[0]}', ...) and was not wrapped, but the method"
                " acts in every step. Write: optimizer = rules.wrap(optimizer). A loop"
                " with several optimizers wraps each."
            )
        self._check_last_step(self._after_step.replaced())
        if self._of_all_steps and not self._stepped:
            self._after_step.note()  # shows the changes of the first step
        self._watch_gradients()
        if self._new_gradients or optimizer in self._stepped:
            self._stepped = []
            self._new_gradients, self._new_step = False, True
        self._stepped.append(optimizer)

    def _after_any_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer in stepping_optimizers(optimizer):
            self._after_step.note(parameters_of(optimizer))

    # At the end of the block.

    def check(self) -> None:
        """Check that every client hook took part, and that the weights fit its results.

        Raises:
            ConfigError: a call is missing, or other weights were loaded; the error
                names the call or the weights.
        """
        steps = self._session.steps
        # Use ``thorough``, because loading weights by ``.data`` does not change a
        # tensor's version.
        if self._of_all_steps:
            self._check_last_step(self._after_step.replaced(thorough=True))
        self._refuse(Known(local_steps=steps or None))
        # Refuse a hook that took no part: it has changed nothing, so the run would be
        # plain FedAvg.
        for name, hook in self._session.hooks.items():
            acts = hook in self._session.acting or overrides(hook, "around")
            if acts and not (self._used or self.wrapped):
                raise ConfigError(
                    f"client hook '{name}' acts only in the model that was passed to"
                    " `bn_rules`, and nothing in the block has used this object."
                    " Another object was trained, such as a copy or a model that a"
                    " library has built. Pass the object that trains, for example in a"
                    " callback of the library, or use a method without client hooks,"
                    " such as FedBN."
                )
            if hook in self._session.acting and not steps:
                missing = "took no step" if self.wrapped else "was not wrapped"
                raise ConfigError(
                    f"client hook '{name}' acts in every step, but the optimizer"
                    f" {missing} inside `with bn_rules(...) as rules`. Write: optimizer"
                    " = rules.wrap(optimizer)."
                )
            if overrides(hook, "around") and not self._session.passes:
                raise ConfigError(
                    f"client hook '{name}' acts around the first step. Write: with"
                    " rules.step(len(inputs)): loss = ...; loss.backward()"
                )
            if hook.in_batchnorm and self._batchnorm_trains is False:
                raise ConfigError(
                    f"client hook '{name}' acts only in BatchNorm layers in train mode,"
                    " but all BatchNorm layers were in eval mode in each pass. Call"
                    " model.train(), and leave BatchNorm in train mode."
                )

    def _check_last_step(self, changed: list[str]) -> None:
        """Refuse weights that no step has computed, if a hook depends on all steps."""
        if not changed:
            return
        for name, hook in self._session.hooks.items():
            if hook.of_all_steps:
                raise ConfigError(
                    f"{len(changed)} of the model's parameters ('{changed[0]}', ...)"
                    " changed inside `with bn_rules(...)` after a step, for example by"
                    " loading the best epoch or an average. Client hook"
                    f" '{name}': {hook.of_all_steps}. If the loop limits all weights,"
                    " limit them in optimizer.register_step_post_hook."
                )
