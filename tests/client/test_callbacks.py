"""The callbacks of docs/guides/own-training-loop.md.

Loops call the callbacks in the order of the libraries. Lightning's order is
``on_train_start``, ``on_train_batch_start``, and ``optimizer.step(closure)`` with
forward pass, ``zero_grad``, backward pass and ``on_after_backward`` inside. fastai's
order is ``before_fit``, ``before_batch``, forward and backward pass,
``after_backward``, step, and the batches of a validation.
"""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.checkout import ROOT
from tests.support.loops_of_others import METHODS, compare_with_ours

PAGE = (ROOT / "docs/guides/own-training-loop.md").read_text()
RATE = 0.1


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(3072, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)
    )


def callback_of_the_page(library: str):
    """Return the class of the page's program that imports ``library``."""
    (program,) = (
        text
        for text in re.findall(r"^```python.*\n((?:.*\n)*?)```$", PAGE, re.M)
        if f" {library}" in text
    )
    names = {}
    exec(program, names)
    return names["BNRules"]


# Lightning.


def in_lightnings_order(module, loader, callback) -> None:
    """Train as Lightning 2.5's automatic optimization does."""
    optimizer = torch.optim.SGD(module.parameters(), RATE)
    trainer = SimpleNamespace(optimizers=[optimizer])
    callback.on_train_start(trainer, module)
    for index, batch in enumerate(loader):
        callback.on_train_batch_start(trainer, module, batch, index)

        def closure(batch=batch):
            loss = F.cross_entropy(module(batch[0]), batch[1])
            optimizer.zero_grad()
            loss.backward()
            callback.on_after_backward(trainer, module)
            return loss

        optimizer.step(closure)


LIGHTNING = SimpleNamespace(Callback=object)


@pytest.mark.parametrize("method", METHODS)
def test_lightning(method: str, same_bits, monkeypatch) -> None:
    """Its gradients are computed inside ``optimizer.step(closure)``."""
    monkeypatch.setitem(sys.modules, "pytorch_lightning", LIGHTNING)
    rules_of = callback_of_the_page("pytorch_lightning")

    def loop(net: nn.Module, loader: Any, rules: Any) -> None:
        in_lightnings_order(net, loader, rules_of(rules))

    compare_with_ours(method, network, loop, same_bits)


# fastai.


class OfALearner:
    """A fastai Callback that takes missing attributes from the learner."""

    run_valid = True
    learn = None

    def __getattr__(self, name: str):
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
    core = SimpleNamespace(Callback=OfALearner)
    monkeypatch.setitem(sys.modules, "fastai.callback.core", core)
    rules_of = callback_of_the_page("fastai.callback.core")

    def loop(net: nn.Module, loader: Any, rules: Any) -> None:
        FastaisOrder(loader, net, torch.optim.SGD).fit(1, RATE, cbs=rules_of(rules))

    compare_with_ours(method, network, loop, same_bits)
