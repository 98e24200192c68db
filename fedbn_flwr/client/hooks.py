"""Client code for a user's own training loop: ``bn_rules``.

It attaches the client hooks of ``TorchClient`` to the user's model and optimizer. The
mod ``bn_mod`` adds the names and the metrics of the hooks to the reply.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fedbn_flwr.batchnorm.parts import (
    name_once,
    refuse_other_head,
    tied_apart,
    tied_entries,
)
from fedbn_flwr.client.kept import KeptState
from fedbn_flwr.client.mailbox import fill_outbox, is_filled, records_in
from fedbn_flwr.client.model_spec import ModelSpec, StateLocation
from fedbn_flwr.client.noted_model import NotedModel
from fedbn_flwr.client.replay_log import replay
from fedbn_flwr.errors import ConfigError, StateError
from fedbn_flwr.messages.protocol import (
    APPLIED,
    ARRAY_NAMES,
    INBOX,
    TrainConfig,
    merged_config,
)
from fedbn_flwr.messages.records import from_record, of_kind, tensors
from fedbn_flwr.problems import Known, tell
from fedbn_flwr.server.methods.method import HookContext
from fedbn_flwr.strategies import make_hooks, refuse_on_client
from fedbn_flwr.training.batches import Batches
from fedbn_flwr.training.checkpointing import in_checkpoint
from fedbn_flwr.training.client_hook import (
    ClientHook,
    NamedHooks,
    around_step,
    begun,
    change_gradients,
    overrides,
)
from fedbn_flwr.training.first_look import makes_no_entries
from fedbn_flwr.training.freezing import is_forced_eval, layers_of
from fedbn_flwr.training.loaded import LoadedBatches
from fedbn_flwr.training.model_state import (
    not_compiled,
    unwrap,
    view_with_names,
    without_wrappers,
)
from fedbn_flwr.training.optimizer_hooks import (
    before_steps,
    facts_of,
    parameters_of,
    stepping_optimizers,
)
from fedbn_flwr.training.optimizers import dense_gradient

# Methods of hooks that act once in a round, or sum values over the round.
_PER_ROUND = ("start", "penalty", "gradients", "survey", "reply", "keep")


@contextmanager
def bn_rules(
    model: nn.Module,
    message_or_config: Message | Mapping[str, Any],
    context: Context | None = None,
) -> Iterator[Hooks]:
    """Apply the client hooks of the strategy to the training inside the block.

    Example::

        >>> import torch
        >>> from torch.nn.functional import cross_entropy
        >>> from fedbn_flwr.mods import bn_rules
        >>> def train(model, loader, msg, context):
        ...     model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        ...     with bn_rules(model, msg, context) as rules:
        ...         rules.survey(loader)  # HBN, and FBN by a pass
        ...         sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        ...         optimizer = rules.wrap(sgd)  # FedProx, SCAFFOLD, momentum, AGC
        ...         for x, y in loader:
        ...             optimizer.zero_grad()
        ...             with rules.step(len(x)):  # FedTAN, FedDNA
        ...                 loss = cross_entropy(model(x), y)
        ...                 loss.backward()
        ...             optimizer.step()

    FixBN needs only the ``with``, and for FixBN ``msg.content["config"]`` is enough.
    Frozen layers stay frozen if the block calls ``model.train()``. A strategy without
    client hooks changes nothing. The mod ``bn_mod`` sends and keeps the arrays of the
    hooks: ``ClientApp(mods=[bn_mod])``.

    The hooks measure the model at the end of the block: return this model. A loop may
    load other weights inside the block, such as the weights of its best epoch or an
    average. If a hook cannot accept these weights, the error names the remedy.

    Args:
        model: the model on its device, with the received state loaded. It may be
            compiled or wrapped in DDP.
        message_or_config: the training message or its config; in a ``NumPyClient``, the
            config of ``fit``.
        context: Flower's context, needed if a hook keeps or sends arrays.

    Raises:
        ConfigError: at the start, if the message or the context is needed and missing,
            or if a block has already ended in this message. In a step of an unwrapped
            optimizer, if the method acts in every step. At the end, if the model has
            created new entries, if a hook took no part in the training (the optimizer
            was not wrapped, or no step was taken), or if a hook needs the weights of
            the last step and the model has other weights.
    """
    message: Message | None = None
    if isinstance(message_or_config, Message):
        message = message_or_config
        config: Mapping[str, Any] = merged_config(message)
    else:
        config = dict(message_or_config)
    sent = TrainConfig.read(config)
    local = frozenset(sent.local_entries)
    hooks = make_hooks(sent.hooks, HookContext(config, local, replay(context, config)))
    _refuse_second_block(context, hooks.values())
    # Some hooks, such as FixBN's, change only the model. A hook with arrays of its own
    # also needs two other things: the context, because the mod has put the arrays
    # there, and the names of the entries on the server.
    kept: KeptState | None = None
    with_arrays = {
        hook_name: hook
        for hook_name, hook in hooks.items()
        if overrides(hook, "receive", "reply", "keep", "around")
    }
    # Entries and paths use the names of the server's model. If no hook has arrays, a
    # model with other names is allowed, such as a model with a second head.
    with nullcontext() if with_arrays else suppress(StateError):
        whole = _whole(message, config, model)
        if whole is not None:
            model = view_with_names(model, whole)
    if with_arrays:
        if context is None or whole is None:
            raise ConfigError(
                f"client hook '{next(iter(with_arrays))}' sends or keeps arrays: write `with"
                " bn_rules(model, msg, context)`; in a NumPyClient (ClientApp with"
                " mods=[bn_mod]) `with bn_rules(model, config, context)`"
            )
        spec = None
        if local:
            # Use the saved shapes, as the mod does, because a personal entry may have
            # another shape on the server.
            place = StateLocation.of(context, sent.continuity)
            spec = ModelSpec.load(context, place)
        kept = (spec or ModelSpec.of(whole)).store(context, None, sent.start_id)
        extras = {
            record_name: tensors(from_record(record))
            for record_name, record in records_in(context, INBOX).items()
        }
        kept.hand_over(with_arrays, extras)
    name_once(model)
    tell(tied_apart(tied_entries(unwrap(model)), set(map(without_wrappers, local))))
    refuse_other_head(model, sent.head)
    refuse = functools.partial(refuse_on_client, sent.hooks, config)
    rules = Hooks(model, hooks, refuse)
    with rules.block():
        yield rules
    # These lines run only if the block did not raise, because a round counts completely
    # or not at all. The mod moves the outbox into the reply, and saves the local state.
    if context is not None:
        fill_outbox(context, rules.metrics, hooks.values())
    if kept is not None:
        kept.save_hook_state(hooks, sent.server_round)


def _refuse_second_block(context: Context | None, hooks: Iterable[ClientHook]) -> None:
    if context is None or not is_filled(context):
        return
    if any(overrides(hook, *_PER_ROUND) for hook in hooks):
        raise ConfigError(
            "a second `with bn_rules(...)` in the training of one message: the hooks of"
            " the strategy would start again and lose their results from the first"
            " block. Write one block around all epochs."
        )


def _whole(
    message: Message | None, config: Mapping[str, Any], model: nn.Module
) -> Mapping[str, Any] | None:
    """Return the whole model under the server's names.

    The model comes from the message, or from a NumPyClient's loaded model.

    Raises:
        StateError: the names do not fit the model.
    """
    if message is not None:
        return next(iter(of_kind(message.content, ArrayRecord).values()))
    if ARRAY_NAMES not in config:
        return None
    names = json.loads(str(config[ARRAY_NAMES]))
    state = view_with_names(model, names).state_dict()
    return {name: state[name] for name in names}


class Hooks:
    """The client hooks of a round in a user's training loop.

    It is the value of ``with bn_rules(...) as rules``. Call ``survey``, ``wrap`` and
    ``step`` if the method needs them; otherwise they do nothing.

    Args:
        model: the model.
        hooks: the client hooks by name.
        refuse: raises the problems that the methods have with the facts of the loop.
        called: the model with its wrappers, as the loop calls it. None means ``model``.

    Attributes:
        metrics: the hooks' metrics and ``fedbn-flwr.hooks-applied``, set at the end of
            the block. The mod adds them to the reply; a ``NumPyClient`` returns them
            with its own metrics.
        surveyed: whether the hooks need no further survey of the data.
    """

    def __init__(
        self,
        model: nn.Module,
        hooks: NamedHooks,
        refuse: Callable[[Known], None] = lambda known: None,
        called: nn.Module | None = None,
    ) -> None:
        self.metrics: dict[str, Any] = {}
        self._refuse = refuse
        self._model = model
        self._hooks = hooks
        # Note the weights at two times: when the hooks stored them, and after the last
        # step. A user's loop may load other weights in between.
        self._at_start, self._after_step = NotedModel(model), NotedModel(model)
        # The optimizers that take the steps.
        self._wrapped: list[torch.optim.Optimizer] = []
        self._steps = 0
        self._passes = 0
        # New gradients distinguish a step from the step before. Several optimizers may
        # share a backward pass, and a closure may make several passes in a step.
        self._watched: set[nn.Parameter] = set()
        self._stepped: list[torch.optim.Optimizer] = []
        self._new_gradients = self._new_step = True
        # Whether the open pass of ``begin_step`` has made gradients.
        self._has_gradients = False
        self.surveyed = False
        self._trained = False
        # Whether a BatchNorm layer was in train mode in a pass with gradients; None if
        # there was no such pass.
        self._batchnorm_trains: bool | None = None
        self._exit = ExitStack()
        self._open_step = ExitStack()
        self._in_step = False
        self._watching = ExitStack()
        self._acting = [
            hook
            for hook in hooks.values()
            if overrides(hook, "start", "penalty", "gradients")
        ]
        self._compares = any(hook.compares_with_start for hook in hooks.values())
        if self._compares or self._acting_stores:
            self._at_start.note()
        # Compare with the received weights before the first pass with gradients, because
        # the pass itself may limit weights. A survey must come before this pass as well.
        # Only hooks of the layers notice the pass in every kind of loop.
        called = model if called is None else called
        if not isinstance(called, torch.jit.ScriptModule):
            self._exit.callback(called.register_forward_pre_hook(self._note).remove)
        if self._compares or any(overrides(hook, "survey") for hook in hooks.values()):
            self._exit.callback(self._watching.close)
            note = not_compiled(self._note)
            for layer in layers_of(model).values():
                handle = layer.register_forward_pre_hook(note)
                self._watching.callback(handle.remove)

    @property
    def _acting_stores(self) -> bool:
        """Whether a hook that acts in steps stores values of the model at the start."""
        return any(overrides(hook, "begin") for hook in self._acting)

    def survey(self, batches: Any, forward: Callable[[Any], Any] | None = None) -> None:
        """Pass the training data through the model before the first step.

        Methods that measure statistics need this call. For other methods it does
        nothing.
        No gradient is computed, and running statistics do not change.

        Args:
            batches: a ``DataLoader`` whose batches are (inputs, targets). There is one
                pass, in the order of the data set and including the last batch. The
                statistics depend on the examples as the loader returns them: use a
                loader without random transforms.
            forward: called with the inputs of each batch instead of the model. Pass it
                if the training calls BatchNorm layers that the model's own forward does
                not reach: ``lambda x: net.decoder(net.encoder(x))``.

        Raises:
            ConfigError: a step was taken before, or the model had a forward pass in
                train mode with gradients.
            DataError: the data set has no length, or a batch is not a pair.
        """
        if self._steps or self._passes or self._trained:
            raise ConfigError(
                "rules.survey(loader) was called after a step, or after a forward pass"
                " in train mode. Call it first. To try the model before, use"
                " torch.no_grad()"
            )
        data = LoadedBatches(batches)
        self.survey_data(data, data.batch_size, 0, forward)

    def survey_data(
        self,
        data: Batches,
        batch_size: int,
        seed: int,
        forward: Callable[[Any], Any] | None = None,
    ) -> None:
        """Let the hooks survey data without a loader."""
        # The passes of the survey are not passes of the training.
        self._watching.close()
        self.surveyed = True
        for hook in self._hooks.values():
            if overrides(hook, "survey"):
                hook.passes = forward
                hook.survey(self._model, data, batch_size, seed)

    def wrap(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Let the client hooks act before every step of ``optimizer``, and return it.

        A loop may have several optimizers, each with its own parameters: wrap each. If
        an optimizer wraps another (Opacus, sharpness-aware minimisation), the hooks act
        in the steps of the inner optimizer. They are attached as a torch hook.

        Raises:
            ConfigError: the optimizer belongs to another model or is not from torch
                (fastai's is refused only if a client hook acts in every step), a client
                hook needs plain SGD or refuses its settings, an optimizer with the same
                parameters was already wrapped, or the model has changed or moved to
                another device inside the block. If the model changes later, the first
                step raises the error.
        """
        # Hooks cannot act in the steps of an optimizer that is not torch's, such as
        # fastai's. If no hook acts in steps, the loop may use it.
        is_of_torch = isinstance(optimizer, torch.optim.Optimizer)
        if not self._acting and hasattr(optimizer, "zero_grad") and not is_of_torch:
            return optimizer
        for stepping in stepping_optimizers(optimizer):
            self._wrap(stepping)
        return optimizer

    def _wrap(self, optimizer: torch.optim.Optimizer) -> None:
        own = parameters_of(optimizer)
        if any(own & parameters_of(other) for other in self._wrapped):
            raise ConfigError(
                "rules.wrap was called twice in a block for the same parameters: create"
                " and wrap one optimizer for all epochs"
            )
        if self._acting:
            # If a hook has stored the model before ``start``, the model must be
            # unchanged. Otherwise, the hooks take the present model.
            if self._acting_stores:
                if not self._steps:
                    self._at_start.check_device()
                    self._at_start.check_parameters()
            elif not self._wrapped:
                self._at_start.note()
            # Without a parameter of this model, the hooks would change nothing.
            if own.isdisjoint(self._model.parameters()):
                raise ConfigError(
                    "the optimizer has no parameter of the model that was passed to"
                    " `bn_rules`: pass the same model to both, not a copy"
                )
            # Each method refuses the optimizers that it cannot use.
            self._refuse(facts_of(optimizer))
            for hook in self._acting:
                hook.start(self._model, optimizer)
            self._exit.callback(before_steps(optimizer, self._act).remove)
        self._wrapped.append(optimizer)

    @contextmanager
    def step(self, batch_size: int) -> Iterator[None]:
        """Wrap forward and backward pass of a step with ``batch_size`` examples.

        FedTAN synchronises the first step.
        """
        self.begin_step(batch_size)
        try:
            with self._open_step:
                yield
        finally:
            self._in_step = False
        self._passes += 1

    def begin_step(self, batch_size: int) -> None:
        """Begin ``step`` before a forward pass that a framework controls.

        Call it in the framework's callbacks, together with ``end_step``. An exception
        that leaves the block of ``bn_rules`` ends the step. If a step had no backward
        pass, the next step ends it, as in an epoch that measures BatchNorm's
        statistics.

        Raises:
            ConfigError: the step before has not ended.
        """
        self._end_without_backward()
        if self._in_step:
            raise ConfigError(
                "a step began inside another step: call rules.begin_step(batch_size)"
                " before each training batch and no other batch, and rules.end_step()"
                " after its backward pass"
            )
        self._open_step.enter_context(
            around_step(self._hooks.values(), self._passes, self._model, batch_size)
        )
        self._watch_gradients()
        self._in_step, self._has_gradients = True, False

    def _watch_gradients(self) -> None:
        """Notice the gradients of a backward pass, even of newly unfrozen parameters."""
        for p in self._model.parameters():
            if p.requires_grad and p not in self._watched:
                self._watched.add(p)
                handle = p.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    self._note_gradients
                )
                self._exit.callback(handle.remove)
                self._new_gradients |= p.grad is not None

    def _note_gradients(self, *_: Any) -> None:
        self._has_gradients = self._new_gradients = True

    def _end_without_backward(self) -> None:
        """End an open step that had no backward pass.

        An epoch that measures BatchNorm's statistics has such steps.
        """
        alone = self._in_step and not self._has_gradients
        if alone and not any(
            h.synchronises(self._passes) for h in self._hooks.values()
        ):
            self.end_step()

    def end_step(self) -> None:
        """End ``step`` after the backward pass.

        Raises:
            ConfigError: no step has begun.
        """
        if not self._in_step:
            raise ConfigError(
                "rules.end_step() was called, but no step is open. In the same block,"
                " call rules.begin_step(batch_size) before each training batch"
            )
        self._in_step = False
        self._open_step.close()
        self._passes += 1

    def _note(self, *_: Any) -> None:
        """Notice a training pass, even if the optimizer is not wrapped."""
        trains = self._model.training and torch.is_grad_enabled()
        if self._trained or not trains or torch.compiler.is_compiling():
            return
        self._trained = True
        self._at_start.check_parameters()

    def _act(self, optimizer: torch.optim.Optimizer) -> float | Tensor:
        """Apply the hooks to the gradients of the optimizer's parameters.

        Return the sum of the penalties.
        """
        if any(overrides(hook, "begin", "start") for hook in self._hooks.values()):
            self._at_start.check_device()
            if not self._trained:
                self._at_start.check_parameters()
            self._at_start.forget()
        # Hide the gradients of parameters that another optimizer steps. Otherwise the
        # hooks would change them once in the step of each optimizer.
        own = parameters_of(optimizer)
        trained: list[nn.Parameter] = []
        set_aside: dict[nn.Parameter, Tensor] = {}
        for p in self._model.parameters():
            if p in own:
                if p.requires_grad:
                    trained.append(p)
            elif p.grad is not None:
                set_aside[p] = p.grad
                p.grad = None
        if self._new_step:
            self._steps, self._new_step = self._steps + 1, False
        total = self._change_gradients(trained)
        for p, grad in set_aside.items():
            p.grad = grad
        return total

    def _change_gradients(self, parameters: list[nn.Parameter]) -> float | Tensor:
        """Add the gradients of the penalties, then let the hooks change the sums.

        Return the sum of the penalties.
        """
        total: float | Tensor = 0.0
        for hook in self._hooks.values():
            with torch.enable_grad():  # a step runs without gradients
                penalty = hook.penalty(self._model)
            if penalty is None or not parameters:
                continue
            # Add up tensors, because converting a tensor to a number would wait for the
            # device in each step.
            total = total + penalty.detach()
            gradients = torch.autograd.grad(penalty, parameters, allow_unused=True)
            for p, grad in zip(parameters, gradients, strict=True):
                if grad is not None:
                    present = dense_gradient(p)
                    p.grad = grad if present is None else present.add_(grad)
        change_gradients(self._hooks.values(), self._model, self._steps - 1)
        return total

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
        if self._acting and optimizer not in self._wrapped:
            raise ConfigError(
                f"{type(optimizer).__name__} steps {len(names)} of the model's"
                f" parameters ('{names[0]}', ...) and was not wrapped, but the method"
                " acts in every step. Write: optimizer = rules.wrap(optimizer). A loop"
                " with several optimizers wraps each."
            )
        self._check_last_step(self._after_step.replaced())
        if self._belongs_to_all_steps and not self._stepped:
            self._after_step.note()  # shows what the first step moves
        self._watch_gradients()
        if self._new_gradients or optimizer in self._stepped:
            self._stepped = []
            self._new_gradients, self._new_step = False, True
        self._stepped.append(optimizer)

    def _note_mode(self, layer: nn.Module, _: Any) -> None:
        """Note the mode of a BatchNorm layer in a pass with gradients."""
        if torch.is_grad_enabled() or in_checkpoint():
            # If a hook keeps the layer in eval mode, the mode of the model decides.
            deciding = unwrap(self._model) if is_forced_eval(layer) else layer
            self._batchnorm_trains = self._batchnorm_trains or deciding.training

    def _after_any_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer in stepping_optimizers(optimizer):
            self._after_step.note(parameters_of(optimizer))

    def _check_last_step(self, changed: list[str]) -> None:
        """Refuse weights that no step has computed, if a hook depends on all steps."""
        if not changed:
            return
        for name, hook in self._hooks.items():
            if hook.of_all_steps:
                raise ConfigError(
                    f"{len(changed)} of the model's parameters ('{changed[0]}', ...)"
                    " changed inside `with bn_rules(...)` after a step, for example by"
                    " loading the best epoch or an average. Client hook"
                    f" '{name}': {hook.of_all_steps}. If the loop limits all weights,"
                    " use optimizer.register_step_post_hook for it."
                )

    def _check(self) -> None:
        """Check that every client hook took part, and that the weights fit its results.

        Raises:
            ConfigError: a call is missing, or other weights were loaded; the error
                names the call or the weights.
        """
        # A step that is still open is an error: the hooks have not acted after its
        # backward pass.
        self._end_without_backward()
        if self._in_step:
            raise ConfigError(
                "the block ended inside a step: call rules.end_step() after each"
                " backward pass"
            )
        # Use ``thorough``, because loading weights by ``.data`` does not change a
        # tensor's version.
        if self._belongs_to_all_steps:
            self._check_last_step(self._after_step.replaced(thorough=True))
        self._refuse(Known(local_steps=self._steps or None))
        # Refuse a hook that took no part: it has changed nothing, so the run would be
        # plain FedAvg.
        for name, hook in self._hooks.items():
            if overrides(hook, "start", "penalty", "gradients") and not self._steps:
                missing = "took no step" if self._wrapped else "was not wrapped"
                raise ConfigError(
                    f"client hook '{name}' acts in every step, but the optimizer"
                    f" {missing} inside `with bn_rules(...) as rules`. Write: optimizer"
                    " = rules.wrap(optimizer)."
                )
            if overrides(hook, "survey") and not self.surveyed:
                raise ConfigError(
                    f"client hook '{name}' measures statistics of the training data"
                    " with the received weights. Write before the first step:"
                    " rules.survey(loader)."
                )
            if overrides(hook, "around") and not self._passes:
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

    @contextmanager
    def block(self) -> Iterator[None]:
        """Begin the hooks, and end them after the block.

        At the end, check that each hook took part, and collect the metrics.
        """
        with self._exit:
            # Torch's hooks for all optimizers of the process also notice optimizers
            # that the loop did not wrap.
            if self._belongs_to_all_steps or self._acting:
                before = register_optimizer_step_pre_hook(self._before_any_step)
                self._exit.callback(before.remove)
            if self._belongs_to_all_steps:
                after = register_optimizer_step_post_hook(self._after_any_step)
                self._exit.callback(after.remove)
            if any(hook.in_batchnorm for hook in self._hooks.values()):
                for layer in layers_of(self._model).values():
                    noted = layer.register_forward_pre_hook(self._note_mode)
                    self._exit.callback(noted.remove)
            with begun(self._hooks.values(), self._model), self._open_step:
                # An exception may leave a framework's loop between its callbacks. The
                # open step is closed in that case as well.
                with makes_no_entries(self._model):
                    yield
                self._check()
            self.metrics = {}
            for hook in self._hooks.values():
                self.metrics |= hook.end(self._model)
            if self._hooks:
                self.metrics[APPLIED] = ",".join(self._hooks)

    @property
    def _belongs_to_all_steps(self) -> bool:
        """Whether the results of a hook fit only the weights of the last step."""
        return any(hook.of_all_steps for hook in self._hooks.values())
