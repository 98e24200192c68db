"""The callbacks of docs/guides/own-training-loop.md.

Lightning's callback runs in the real library if it is installed. Otherwise, loops call
the callbacks in the same order. Lightning's order is ``on_train_start``,
``on_train_batch_start``, and ``optimizer.step(closure)`` with forward pass,
``zero_grad``, backward pass and ``on_after_backward`` inside. fastai's order is
``before_fit``, ``before_batch``, forward and backward pass, ``after_backward``, step,
and the batches of a validation.
"""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedbn_flwr.client.bn_rules import Hooks
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.training import ClientHook
from tests.support.loops_of_others import METHODS, compare_with_ours

PAGE = (Path(__file__).parents[2] / "docs/guides/own-training-loop.md").read_text()
RATE = 0.1


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(3072, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)
    )


def callback_of_the_page(library: str) -> Any:
    """Return the class of the page's program that imports ``library``."""
    (program,) = (
        text
        for text in re.findall(r"^```python.*\n((?:.*\n)*?)```$", PAGE, re.M)
        if f" {library}" in text
    )
    names: dict[str, Any] = {}
    exec(program, names)
    return names["BNRules"]


# Lightning.


class LightningsOrder:
    """Lightning 2.5's automatic optimization."""

    def __init__(self, callbacks: list[Any], **_: Any) -> None:
        (self.callback,) = callbacks

    def fit(self, module: Any, loader: Any) -> None:
        optimizer = module.configure_optimizers()
        self.optimizers = [optimizer]
        self.callback.on_train_start(self, module)
        for index, batch in enumerate(loader):
            self.callback.on_train_batch_start(self, module, batch, index)

            def closure(batch: Any = batch, index: int = index) -> Any:
                loss = module.training_step(batch, index)
                optimizer.zero_grad()
                loss.backward()
                self.callback.on_after_backward(self, module)
                return loss

            optimizer.step(closure)


LIGHTNING = SimpleNamespace(
    Callback=object, LightningModule=nn.Module, Trainer=LightningsOrder
)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("library", ["in its order", "pytorch_lightning"])
def test_lightning(library: str, method: str, same_bits, monkeypatch) -> None:
    """Its gradients are computed inside ``optimizer.step(closure)``."""
    lightning: Any = (
        LIGHTNING if library == "in its order" else pytest.importorskip(library)
    )
    monkeypatch.setitem(sys.modules, "pytorch_lightning", lightning)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: torch.Tensor) -> Any:
            return self.net(x)

        def training_step(self, batch: Any, index: int) -> Any:
            return F.cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=RATE)

    rules_of = callback_of_the_page("pytorch_lightning")

    def loop(net: Module, loader: Any, rules: Any) -> None:
        quiet = dict.fromkeys(
            (
                "logger",
                "enable_checkpointing",
                "enable_progress_bar",
                "enable_model_summary",
            ),
            False,
        )
        lightning.Trainer(
            max_epochs=1, accelerator="cpu", callbacks=[rules_of(rules)], **quiet
        ).fit(net, loader)

    compare_with_ours(method, Module, Module, loop, same_bits)


# fastai.


class OfALearner:
    """A fastai Callback that takes missing attributes from the learner."""

    run_valid = True
    learn: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.learn, name)


class FastaisOrder:
    """A Learner of fastai 2.8.

    It runs the training batches, then the validation batches without a backward pass.
    """

    def __init__(self, dls: Any, model: nn.Module, opt_func: Any) -> None:
        self.dls, self.model, self.opt_func = dls, model, opt_func

    def fit(self, epochs: int, lr: float, cbs: Any) -> None:
        cbs.learn = self
        self.opt = self.opt_func(self.model.parameters(), lr=lr)
        cbs.before_fit()
        for training in (True, False):
            for x, y in self.dls:
                self.xb = (x,)
                self.model.train(training)
                if training or cbs.run_valid:
                    cbs.before_batch()
                with torch.set_grad_enabled(training):
                    loss = F.cross_entropy(self.model(x), y)
                if training:
                    loss.backward()
                    cbs.after_backward()
                    self.opt.step()
                    self.opt.zero_grad()


@pytest.mark.parametrize("method", METHODS)
def test_fastai(method: str, same_bits, monkeypatch) -> None:
    """The validation after the epoch runs in eval mode and has no steps."""
    core = ModuleType("fastai.callback.core")
    core.Callback = OfALearner  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fastai.callback.core", core)
    rules_of = callback_of_the_page("fastai.callback.core")

    def loop(net: nn.Module, loader: Any, rules: Any) -> None:
        FastaisOrder(loader, net, torch.optim.SGD).fit(1, RATE, cbs=rules_of(rules))

    compare_with_ours(method, network, network, loop, same_bits)


# A step in two calls.


class Around(ClientHook):
    """A hook that records how its step ends."""

    def __init__(self, synchronised: bool = False) -> None:
        self.ends: list[str] = []
        self.synchronised = synchronised

    def synchronises(self, step: int) -> bool:
        return self.synchronised

    def around(self, step: int, model: nn.Module, batch_size: int) -> Any:
        return self

    def __enter__(self) -> None:
        self.ends.append("open")

    def __exit__(self, kind: Any, *_: Any) -> None:
        self.ends[-1] = kind.__name__ if kind else "closed"


class Left(BaseException):
    """An exception that leaves a loop in mid-step, like FedTAN's exception."""


@pytest.mark.parametrize("by_hand", [False, True])
def test_an_exception_between_the_two_calls_ends_the_step(by_hand: bool) -> None:
    """Otherwise, BatchNorm would stay synchronised until the step is collected."""
    hook = Around()
    rules = Hooks(network(), {"hook": hook})
    entered = []  # callbacks keep entered contexts like this

    def train() -> None:
        with rules.block():
            for _ in range(2):
                rules.begin_step(4)
                rules.end_step()
            if by_hand:
                entered.append(rules.step(4))
                entered[0].__enter__()
            else:
                rules.begin_step(4)
            raise Left

    with pytest.raises(Left):
        train()
    assert hook.ends == ["closed", "closed", "Left"]


def test_a_step_that_raises_is_over() -> None:
    """A loop may leave out a batch."""
    hook = Around()
    rules = Hooks(network(), {"hook": hook})
    with rules.block():
        with contextlib.suppress(RuntimeError), rules.step(4):
            raise RuntimeError
        with rules.step(4):
            pass
    assert hook.ends == ["RuntimeError", "closed"]


@pytest.mark.parametrize(
    ("calls", "why"),
    [
        (["begin", "begin"], "a step began inside another step"),
        (["begin", "block"], "a step began inside another step"),
        (
            ["begin", "end", "end"],
            r"rules.end_step\(\) was called, but no step is open",
        ),
        (["begin"], r"the block ended inside a step: call rules.end_step\(\)"),
    ],
)
@pytest.mark.parametrize("synchronised", [False, True])
def test_calls_out_of_order_are_refused(
    calls: list[str], why: str, synchronised: bool
) -> None:
    """A step with a backward pass or with other clients must end."""
    hook, net = Around(synchronised), network()
    rules = Hooks(net, {"hook": hook})

    def begin() -> None:
        rules.begin_step(4)
        if not synchronised:
            net(torch.ones(4, 3072)).sum().backward()

    def train() -> None:
        with rules.block():
            for call in calls:
                {
                    "begin": begin,
                    "end": rules.end_step,
                    "block": rules.step(4).__enter__,
                }[call]()

    with pytest.raises(ConfigError, match=why):
        train()
    assert "open" not in hook.ends


@pytest.mark.parametrize("hooks", [{}, {"hook": Around()}])
def test_an_epoch_of_forward_passes_has_steps_of_its_own(
    hooks: dict[str, Around], monkeypatch
) -> None:
    """Lightning's StochasticWeightAveraging has such a last epoch for BatchNorm."""
    monkeypatch.setitem(sys.modules, "pytorch_lightning", LIGHTNING)
    net, loader = network(), [(torch.randn(4, 3072), torch.arange(4) % 3)] * 2
    module = SimpleNamespace(
        training_step=lambda batch, _: F.cross_entropy(net(batch[0]), batch[1]),
        configure_optimizers=lambda: torch.optim.SGD(net.parameters(), RATE),
    )
    rules = Hooks(net, hooks)
    callback = callback_of_the_page("pytorch_lightning")(rules)
    trainer = LightningsOrder([callback])
    with rules.block():
        trainer.fit(module, loader)
        for index, batch in enumerate(loader):
            callback.on_train_batch_start(trainer, module, batch, index)
            module.training_step(batch, index)
    for hook in hooks.values():
        assert hook.ends == ["closed"] * 4
