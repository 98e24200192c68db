"""The client half of a method inside a training loop that is not ours: ``bn_rules``.

The same rules as in ``TorchClient``, hung into the user's model and optimizer. What they report, and that they were
applied, goes into the reply through the mod ``local_bn``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message
from torch import nn

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.client.replay_log import seat
from fedbn_flwr.client.local_state import LocalState
from fedbn_flwr.messages.records import from_record, listed, merged_config, tensors, to_record, to_state
from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.training.optimizer_hooks import before_steps
from fedbn_flwr.strategies import client_hooks
from fedbn_flwr.training.loop import ClientHook
from fedbn_flwr.messages.numpy_client import APPLIED, ARRAY_NAMES
from fedbn_flwr.training.wrappers import view_with_names

__all__ = ["INBOX", "OUTBOX", "Rules", "bn_rules"]

INBOX = "fedbn-flwr.inbox"  # in Context.state, from the mod to the block: what was sent beside the model
OUTBOX = "fedbn-flwr.outbox"  # in Context.state, from the end of the block to the mod


class Rules:
    """What ``bn_rules`` yields.

    Attributes:
        metrics: after the block: what the rules report, and ``rules-applied``. The mod puts them into the reply; a
            ``NumPyClient`` returns them among its own.
    """

    def __init__(self, model: nn.Module, rules: Mapping[str, ClientHook]) -> None:
        self.metrics: dict[str, Any] = {}
        self._model = model
        self._rules = rules
        self._optimizer: torch.optim.Optimizer | None = None
        self._steps = 0
        self._passes = 0
        self._exit = ExitStack()

    def wrap(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Let the rules act before every step of ``optimizer`` (a hook of torch's); return it.

        Raises:
            ConfigError: a rule needs plain SGD, or refuses its settings; an optimizer was wrapped before.
        """
        if self._optimizer is not None:
            raise ConfigError("rules.wrap was called twice in a block: make and wrap one optimizer for all epochs")
        for name, rule in self._rules.items():
            if not _overrides(rule, "start"):
                continue
            if not isinstance(optimizer, torch.optim.SGD):
                raise ConfigError(f"rule '{name}' works with torch.optim.SGD; this is {type(optimizer).__name__}")
            rule.start(self._model, optimizer)
        self._exit.callback(before_steps(optimizer, self._act).remove)
        self._optimizer = optimizer
        return optimizer

    @contextmanager
    def step(self, batch_size: int) -> Iterator[None]:
        """Wrap forward and backward pass of a step: FedTAN synchronises the round's first one, others are left alone.

        Args:
            batch_size: examples in this batch.
        """
        with ExitStack() as stack:
            for rule in self._rules.values():
                stack.enter_context(rule.around(self._passes, self._model, batch_size))
            yield
        self._passes += 1

    def _act(self) -> float:
        """Act on the gradients; return the sum of the penalties."""
        total = 0.0
        for rule in self._rules.values():
            with torch.enable_grad():
                penalty = rule.penalty(self._model)
            if penalty is not None:
                total += penalty.item()
                trainable = [p for p in self._model.parameters() if p.requires_grad]
                for p, grad in zip(trainable, torch.autograd.grad(penalty, trainable), strict=True):
                    p.grad = grad if p.grad is None else p.grad.add_(grad)
        for rule in self._rules.values():
            rule.gradients(self._model)
        self._steps += 1
        return total

    def _finish(self) -> None:
        """Check that every rule had its part; collect what they report.

        Raises:
            ConfigError: naming the call that is missing.
        """
        for name, rule in self._rules.items():
            if _overrides(rule, "start", "penalty", "gradients") and not self._steps:
                missing = "took no step" if self._optimizer else "was not wrapped"
                raise ConfigError(
                    f"rule '{name}' acts in every step, and the optimizer {missing} inside `with bn_rules(...) as "
                    "rules`. Write: optimizer = rules.wrap(optimizer)."
                )
            if _overrides(rule, "around") and not self._passes:
                raise ConfigError(
                    f"rule '{name}' acts around the first step. Write: with rules.step(len(inputs)): loss = ...; "
                    "loss.backward()"
                )
        self.metrics = {key: value for rule in self._rules.values() for key, value in rule.end(self._model).items()}
        self.metrics[APPLIED] = ",".join(self._rules)


@contextmanager
def bn_rules(model: nn.Module, told: Message | Mapping[str, Any], context: Context | None = None) -> Iterator[Rules]:
    """Apply inside the block what the strategy tells its clients to do in training.

    ::

        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        with bn_rules(model, msg, context) as rules:
            optimizer = rules.wrap(torch.optim.SGD(model.parameters(), lr=0.1))   # FedProx, SCAFFOLD, momentum, AGC
            for x, y in loader:
                optimizer.zero_grad()
                with rules.step(len(x)):                                         # FedTAN, FedDNA
                    loss = criterion(model(x), y)
                    loss.backward()
                optimizer.step()

    FixBN needs the ``with`` alone, and ``told=msg.content["config"]`` is enough for it; frozen layers stay frozen when
    the block calls ``model.train()``. Where the strategy tells nothing, nothing is done. What the rules send and keep
    travels with the mod ``local_bn``: ``ClientApp(mods=[local_bn])``.

    Args:
        model: with the received state in it, on its device; it may be compiled or in DDP.
        told: the message, or its config; in a ``NumPyClient`` the config of ``fit``, the received state loaded.
        context: Flower's context, where a rule keeps something or answers.

    Raises:
        ConfigError: at once where the message or the context is needed and not there; at the end where a rule had no
            part in the training (the optimizer was not wrapped, no step was).
    """
    message = told if isinstance(told, Message) else None
    config: dict[str, Any] = merged_config(message) if message else dict(told)  # type: ignore[arg-type]
    if "fedtan-attempt" in config and context is not None:
        config["fedtan-seat"] = seat(context, config)
    config["local-names"] = json.loads(config.get("local-entries", "[]"))
    rules = dict(zip(listed(config, "rules"), client_hooks(config), strict=True))
    needy = [name for name, rule in rules.items() if _overrides(rule, "receive", "reply", "keep", "around")]
    store: LocalState | None = None
    whole = _whole(message, config, model) if needy and context is not None else None
    if whole is not None:
        model = view_with_names(model, whole)
        store = LocalState(context, split_state(whole), whole)
    elif needy:
        raise ConfigError(
            f"rule '{needy[0]}' sends or keeps arrays: write `with bn_rules(model, msg, context)`; in a NumPyClient "
            "(ClientApp with mods=[local_bn]) `with bn_rules(model, config, context)`"
        )
    for name in needy:
        rules[name].receive(_sent(context), tensors(store.remembered(type(rules[name]).__name__)) if store else {})
    session = Rules(model, rules)
    with session._exit:
        with ExitStack() as undo:
            for rule in rules.values():
                rule.begin(model)
                undo.callback(rule.end, model)
            yield session
            undo.pop_all()
        session._finish()
    if context is not None:
        _post(context, session.metrics, list(rules.values()))
    if store is not None:
        server_round = int(config.get("server-round", 1))
        store.remember({type(rule).__name__: to_state(rule.keep()) for rule in rules.values()}, server_round)


def _overrides(rule: ClientHook, *hooks: str) -> bool:
    return any(getattr(type(rule), hook) is not getattr(ClientHook, hook) for hook in hooks)


def _whole(message: Message | None, config: Mapping[str, Any], model: nn.Module) -> Mapping[str, Any] | None:
    """Return the whole model as the server knows it: the message's, or what a NumPyClient loaded into its own.

    Raises:
        StateError: the names are not the model's.
    """
    if message is not None:
        return next(iter(message.content.array_records.values()))
    if ARRAY_NAMES not in config:
        return None
    names = json.loads(str(config[ARRAY_NAMES]))
    state = view_with_names(model, names).state_dict()
    return {name: state[name] for name in names}


def _sent(context: Context | None) -> dict[str, dict[str, torch.Tensor]]:
    """Return what came beside the model, by record."""
    records = context.state.array_records if context else {}
    return {
        name.removeprefix(f"{INBOX}/"): tensors(from_record(record))
        for name, record in records.items()
        if name.startswith(f"{INBOX}/")
    }


def _post(context: Context, metrics: Mapping[str, Any], rules: Sequence[ClientHook]) -> None:
    """Lay out what the mod puts into the reply."""
    context.state[OUTBOX] = ConfigRecord(dict(metrics))
    for record, entries in ((r, e) for rule in rules for r, e in rule.reply().items()):
        context.state[f"{OUTBOX}/{record}"] = to_record(to_state(entries))
