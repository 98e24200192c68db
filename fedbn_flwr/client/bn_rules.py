"""Client code for a user's own training loop.

``bn_rules`` attaches the client hooks of ``TorchClient`` to the user's model and
optimizer. The mod ``bn_mod`` adds the names and the metrics of the hooks to the reply.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
from flwr.app import Context, Message
from torch import Tensor, nn

from fedbn_flwr.batchnorm.parts import refuse_other_layers, tied_apart, tied_entries
from fedbn_flwr.client.kept import hand_over, kept_by
from fedbn_flwr.client.mailbox import (
    fill_outbox,
    is_filled,
    of_client_hooks,
    records_in,
)
from fedbn_flwr.client.model_door import freeze_here
from fedbn_flwr.client.named_hooks import make_hooks, refuse_on_client
from fedbn_flwr.client.replay_log import reducer_of
from fedbn_flwr.client.watch import Watch
from fedbn_flwr.errors import ConfigError, StateError
from fedbn_flwr.messages.protocol import (
    APPLIED,
    ARRAY_NAMES,
    INBOX,
    KEPT_BY_HOOKS,
    TrainConfig,
    merged_config,
)
from fedbn_flwr.messages.records import (
    from_record,
    model_record,
    tensors,
    to_record,
)
from fedbn_flwr.problems import Known, raise_or_warn
from fedbn_flwr.training.client_hook import ClientHook, NamedHooks, Session, overrides
from fedbn_flwr.training.layer_calls import without_traces
from fedbn_flwr.training.model_state import (
    named_by_state,
    refuse_waiting,
    unwrap,
    view_with_names,
    without_wrappers,
)
from fedbn_flwr.training.optimizer_hooks import before_steps, stepping_optimizers
from fedbn_flwr.transport.hook_context import HookContext

# Methods of hooks that act once in a round, or sum values over the round.
_PER_ROUND = ("start", "penalty", "gradients", "reply", "keep")


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
    wrapped = model
    if isinstance(message_or_config, Message):
        message = message_or_config
        config: Mapping[str, Any] = merged_config(message)
    else:
        config = dict(message_or_config)
    sent = TrainConfig.read(config)
    refuse_other_layers(model, sent.batchnorm)
    local = frozenset(sent.local_entries)
    hooks = make_hooks(
        sent.hooks, HookContext(config, local, reducer_of(context, config))
    )
    _refuse_second_block(context, hooks.values())
    # Some hooks, such as FixBN's, change only the model. A hook with arrays of its own
    # also needs two other things: the context, because the mod has put the arrays
    # there, and the names of the entries on the server.
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
        named_by_state(unwrap(model))
        if context is None or whole is None:
            raise ConfigError(
                f"client hook '{next(iter(with_arrays))}' sends or keeps arrays: write `with"
                " bn_rules(model, msg, context)`; in a NumPyClient (ClientApp with"
                " mods=[bn_mod]) `with bn_rules(model, config, context)`"
            )
        extras = {
            record_name: tensors(from_record(record))
            for record_name, record in records_in(context, INBOX).items()
        }
        hand_over(with_arrays, extras, of_client_hooks(context))
    raise_or_warn(
        tied_apart(tied_entries(unwrap(model)), set(map(without_wrappers, local)))
    )
    refuse = functools.partial(refuse_on_client, sent.hooks, config)
    rules = Hooks(model, hooks, refuse)
    with freeze_here(unwrap(model), sent), rules.block():
        refuse_waiting(wrapped)
        yield rules
    # These lines run only if the block did not raise, because a round counts completely
    # or not at all. The mod moves the outbox into the reply, and saves the local state.
    if context is not None:
        fill_outbox(context, rules.metrics, hooks.values())
        earlier = of_client_hooks(context)
        entries = kept_by(hooks, earlier)
        if entries or earlier:
            context.state[KEPT_BY_HOOKS] = to_record(entries)


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
        return model_record(message)[1]
    if ARRAY_NAMES not in config:
        return None
    names = json.loads(str(config[ARRAY_NAMES]))
    state = view_with_names(model, names).state_dict()
    return {name: state[name] for name in names}


class Hooks:
    """The client hooks of a round in a user's training loop.

    It is the value of ``with bn_rules(...) as rules``. Call ``wrap`` and
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
        session: calls the hooks.
        watch: finds the mistakes of the loop.
    """

    def __init__(
        self,
        model: nn.Module,
        hooks: NamedHooks,
        refuse: Callable[[Known], None] = lambda known: None,
        called: nn.Module | None = None,
    ) -> None:
        self.session = Session(model, hooks)
        self.metrics = self.session.metrics
        self.watch = Watch(self.session, model if called is None else called, refuse)
        self._open_step = ExitStack()
        self._in_step = False

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
        acts = self.session.acting
        if not acts and hasattr(optimizer, "zero_grad") and not is_of_torch:
            return optimizer
        for stepping in stepping_optimizers(optimizer):
            self.watch.wrap(stepping)
            if acts:
                for hook in acts:
                    hook.start(self.session.model, stepping)
                handle = before_steps(stepping, self._act)
                self.watch.handles.callback(handle.remove)
            self.watch.wrapped.append(stepping)
        return optimizer

    def _act(self, optimizer: torch.optim.Optimizer) -> float | Tensor:
        return self.session.act(optimizer, again=self.watch.act(optimizer))

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
        self._open_step.enter_context(self.session.step(batch_size))
        self.watch.passes()
        self._in_step = True

    def _end_without_backward(self) -> None:
        """End an open step that had no backward pass.

        An epoch that measures BatchNorm's statistics has such steps.
        """
        alone = self._in_step and not self.watch.has_gradients
        if alone and not self.session.synchronises:
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

    @contextmanager
    def block(self) -> Iterator[None]:
        """Begin the hooks, and end them after the block.

        At the end, check that each hook took part, and collect the metrics.
        """
        # An exception may leave a framework's loop between its callbacks. The open step
        # is closed in that case as well.
        hidden = without_traces(self.watch.called)
        with hidden, self.watch.handles, self.session.block(), self._open_step:
            self.watch.open()
            yield
            # A step that is still open is an error: the hooks have not acted after its
            # backward pass.
            self._end_without_backward()
            if self._in_step:
                raise ConfigError(
                    "the block ended inside a step: call rules.end_step() after each"
                    " backward pass"
                )
            self.watch.check()
        if self.session.hooks:
            self.metrics[APPLIED] = ",".join(self.session.hooks)
