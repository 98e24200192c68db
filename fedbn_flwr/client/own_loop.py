"""Train with a user's loop, as ``TorchClient`` does in the rounds and before tests.

A loop takes the steps of one round. Batches, order and number of steps come from the
settings of the run, so each method gets the same batches as with the loop of the
package. Example::

    >>> import torch
    >>> from torch.nn.functional import cross_entropy
    >>> def train_site(model, batches, rules, learning_rate):
    ...     adam = torch.optim.Adam(model.parameters(), lr=learning_rate)
    ...     optimizer, losses = rules.wrap(adam), []
    ...     for inputs, targets in batches:
    ...         optimizer.zero_grad()
    ...         with rules.step(len(targets)):
    ...             loss = cross_entropy(model(inputs), targets)
    ...             loss.backward()
    ...         optimizer.step()
    ...         losses.append(loss.item())
    ...     return sum(losses) / len(losses)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedbn_flwr.client.hooks import Hooks
from fedbn_flwr.errors import ConfigError, DataError
from fedbn_flwr.problems import Known
from fedbn_flwr.training.batches import (
    Batches,
    device_of,
    inputs_for,
    refuse_not_finite,
    with_positions,
)
from fedbn_flwr.training.client_hook import ClientHook
from fedbn_flwr.training.loop import TrainResult, nothing_trained
from fedbn_flwr.training.model_state import Layout, unwrap
from fedbn_flwr.training.randomness import seeded
from fedbn_flwr.training.settings import LocalTraining
from fedbn_flwr.training.single_examples import SingleExamples
from fedbn_flwr.training.tasks import CLASSIFICATION, Task


def train_by(
    loop: Callable[..., Any],
    refuse: Callable[[Known], None],
    model: nn.Module,
    data: Batches,
    settings: LocalTraining,
    *,
    learning_rate: float,
    stream: Callable[[str], torch.Generator],
    hooks: Sequence[ClientHook] = (),
    task: Task = CLASSIFICATION,
    layout: Layout | None = None,
    surveys: bool = True,
) -> TrainResult:
    """Train ``model`` in place for one round with a user's loop.

    The arguments from ``model`` on are those of ``training.train``. ``loop`` is called as
    ``loop(model, batches, rules, learning_rate)``: ``model`` is in train mode and on its
    device, ``batches`` yields (inputs, targets) on this device, and ``rules`` is the
    value of ``with bn_rules(...)``; the survey is already done. The loop takes a step
    with each batch, and returns the mean training loss. ``refuse`` raises the problems
    that the methods have with the facts of the loop.

    Raises:
        ConfigError: the loop returned no number, or it left out a call of the method.
        DataError: there are no examples, every batch had one example and was dropped,
            or the loss is not finite because of an input.
    """
    if len(data) == 0:
        raise DataError("no training examples: leave this client out or give it data")
    layout = layout or Layout(unwrap(model))
    device, prepared = device_of(layout), inputs_for(layout)
    model.train()
    sizes: list[int] = []
    singles = SingleExamples(model, hooks)

    def batches() -> Iterator[tuple[Any, Tensor]]:
        order = settings.batches(len(data), stream("batches"))
        for positions, (inputs, targets) in with_positions(
            data, order, stream("augment")
        ):
            inputs, targets = prepared(inputs), task.on_device(targets, device)
            size = positions.shape[0]
            if size == 1 and singles.drop(len(sizes), inputs):
                continue
            sizes.append(size)
            yield inputs, targets

    rules = Hooks(model, {type(hook).__name__: hook for hook in hooks}, refuse)
    with rules.block():
        rules.surveyed = not surveys
        if surveys:
            seed = stream("survey").initial_seed()
            rules.survey_data(data, settings.batch_size, seed)
        with seeded(stream("dropout").initial_seed()):
            returned = loop(model, batches(), rules, learning_rate)
    name = getattr(loop, "__qualname__", loop)
    if not sizes and not singles.dropped:
        raise ConfigError(
            f"loop {name} took no batch. Write: for inputs, targets in batches."
        )
    if not sizes:
        raise nothing_trained(singles.dropped, len(data), settings.batch_size)
    try:
        loss = float(returned)
    except (TypeError, ValueError):
        raise ConfigError(
            f"loop {name} returned {returned!r:.80}. Return the mean training loss, a"
            " number."
        ) from None
    if not math.isfinite(loss):
        refuse_not_finite(data, prepared)
    return TrainResult(
        loss, None, sum(sizes), len(sizes), singles.dropped, rules.metrics
    )
