"""Train with a user's loop.

``TorchClient`` does this in the rounds and before tests. A loop takes the steps of one
round. Batches, order and number of steps come from the settings of the run, so each
method gets the same batches as with the loop of the package. Example::

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

import copy
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fedbn_flwr.client.bn_rules import Hooks
from fedbn_flwr.compat.flower import on_network_node
from fedbn_flwr.errors import ConfigError, FedBNError, described
from fedbn_flwr.problems import Known
from fedbn_flwr.training.batches import Batches, map_inputs, refuse_not_finite
from fedbn_flwr.training.borrowed import Lend
from fedbn_flwr.training.client_hook import NamedHooks
from fedbn_flwr.training.loop import Feed, TrainResult
from fedbn_flwr.training.model_state import refuse_waiting
from fedbn_flwr.training.randomness import seeded
from fedbn_flwr.training.run_memory import first_time
from fedbn_flwr.training.settings import LocalTraining
from fedbn_flwr.training.tasks import CLASSIFICATION, Task

logger = logging.getLogger("flwr")


def train_by(
    loop: Callable[..., Any],
    refuse: Callable[[Known], None],
    model: nn.Module,
    data: Batches,
    settings: LocalTraining,
    *,
    learning_rate: float,
    stream: Callable[[str], torch.Generator],
    hooks: NamedHooks,
    task: Task = CLASSIFICATION,
    second: Lend | None = None,
) -> TrainResult:
    """Train ``model`` in place for one round with a user's loop.

    ``training.train`` explains the arguments from ``model`` on. The loop is called as
    ``loop(model, batches, rules, learning_rate)``. The model is in train mode and on its
    device, and ``batches`` yields (inputs, targets) on this device. ``rules`` is the
    value of ``with bn_rules(...)``. The loop takes a step with each
    batch, and returns the mean training loss. ``refuse`` raises the problems that the
    methods have with the facts of the loop.

    Raises:
        ConfigError: the loop raised an error, took no batch, changed no parameter,
            changed the model's modules, renamed a parameter, returned no number, or
            left out a call of the method.
        DataError: there are no examples, every batch had one example and was dropped,
            or the loss is not finite because of an input.
    """
    feed = Feed(model, data, settings, stream, task, second)
    named = f"loop {getattr(loop, '__qualname__', loop)}"
    # Hooks see the names without a wrapper's prefix; the loop uses the wrapper.
    rules = Hooks(feed.plain, hooks, refuse, called=model)
    modules = dict(model.named_modules())
    trained = {
        name: p.detach().clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    with rules.block():
        refuse_waiting(model)
        try:
            with (
                feed.batches(rules.session) as batches,
                torch.enable_grad(),  # restores the gradient mode if the loop changes it
            ):
                given = _in_columns(feed, batches) if task.in_columns else batches
                loss = float(loop(model, given, rules, learning_rate))
                sizes = [*feed.sizes]
                left = bool(sizes) and next(given, None) is not None
        except FedBNError:
            raise
        except Exception as error:  # the user's code may raise anything
            # A mean over no batches divides by zero. The reason is the batches.
            feed.refuse_nothing()
            # On a node of a network, the text may quote data.
            why = described(error, with_text=not on_network_node())
            raise ConfigError(f"{named} raised {why}") from error
    feed.refuse_nothing()
    if not sizes:
        raise ConfigError(
            f"{named} took no batch. Write: for inputs, targets in batches."
        )
    if left and first_time("skips batches", named):
        logger.warning(
            "%s leaves out batches: in a round, it took %d and left others. Take a step"
            " with each batch.",
            named,
            len(sizes),
        )
    for path, module in model.named_modules():
        if modules.get(path) is not module:
            raise ConfigError(
                f"{named} replaced module {path!r}, so its weights are not in the"
                " reply. Load the weights into the module that is there."
            )
    if not math.isfinite(loss):
        refuse_not_finite(data, feed.prepared)
    now = dict(model.named_parameters())
    gone = [name for name in trained if name not in now]
    if gone:
        raise ConfigError(
            f"{named} removed or renamed parameter '{gone[0]}' ({len(gone)} such), so"
            " its weights are not in the reply. Undo this at the end of the loop, for"
            " example with torch.nn.utils.prune.remove."
        )
    same = (torch.equal(p, now[name].to(p)) for name, p in trained.items())
    if trained and all(same):
        raise ConfigError(
            f"{named} changed no parameter of the model in {len(sizes)} steps. The loop"
            " may train a copy, or skip its steps. Train the model that it gets."
        )
    return TrainResult(loss, None, sum(sizes), len(sizes), feed.dropped, rules.metrics)


def _in_columns(
    feed: Feed, batches: Iterator[tuple[Any, Tensor]]
) -> Iterator[tuple[Any, Tensor]]:
    """Yield the batches with targets of the shape and dtype of the outputs.

    Losses of torch compare outputs and targets of one shape and dtype. Targets are
    float32 if the outputs are less precise, as in the losses of the package.
    """
    like: Tensor | None = None
    for inputs, targets in batches:
        if like is None:  # ask the model once for the shape and dtype of its outputs
            with feed.second() as (trial, _), seeded(0), torch.no_grad():
                # The model may change its inputs.
                like = trial.eval()(map_inputs(copy.deepcopy, inputs))
        shape = (len(targets), -1) if like.ndim == 2 else (-1,)
        dtype = torch.promote_types(like.dtype, torch.float32)
        yield inputs, targets.reshape(shape).to(dtype)
