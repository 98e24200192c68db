"""What one pass of a copy shows of a model before it trains: entries that the pass
makes, and a sigmoid or softmax before a loss of logits. Torch only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.training.batches import inputs_for
from fedbn_flwr.training.losses import pixel_cross_entropy
from fedbn_flwr.training.model_state import copied
from fedbn_flwr.training.randomness import seeded
from fedbn_flwr.training.tasks import LabelTask, RegressionTask, Task

__all__ = ["first_look", "makes_no_entries", "refuse_made", "was_looked_at"]

# What this process has looked at: a model may be built for every message.
_SEEN: set[tuple[object, ...]] = set()
_ENDS = {"SigmoidBackward0": "sigmoid", "SoftmaxBackward0": "softmax"}
# Of torch's operations on the way from there to the outputs, those that change no value.
_SAME_VALUES = ("View", "Squeeze", "Unsqueeze", "Reshape", "Alias", "Clone", "ToCopy")


def was_looked_at(model: nn.Module, task: Task) -> bool:
    """Return whether this process has had the first look at such a model."""
    return _key(model, task) in _SEEN


def first_look(model: nn.Module, inputs: Callable[[], Any], task: Task) -> str:
    """Look at the model in one pass of a copy.

    Args:
        model: it does not change.
        inputs: returns the inputs of two examples.
        task: what its outputs are for.

    Returns:
        What to tell the user of its outputs, after "model ...", or "".

    Raises:
        ConfigError: the pass makes entries, which the server and other clients lack.
    """
    outputs: Any = None
    made: list[str] = []
    # The user's code may raise anything, and raises it again where it is told of.
    with suppress(Exception), seeded(0), torch.enable_grad():
        trial = copied(model).train()
        before = trial.state_dict().keys()
        try:
            outputs = trial(inputs_for(trial)(inputs()))
        finally:
            made = [name for name in trial.state_dict() if name not in before]
    refuse_made(made)
    _SEEN.add(_key(model, task))
    end = _end_of(outputs)
    if not end or not _takes_logits(task):
        return ""
    return (
        f"seems to end with a {end}: the loss of {task.name}, and its tests, take"
        f" outputs without {end}. Leave it out."
    )


def refuse_made(names: Sequence[str]) -> None:
    """Raise ConfigError if there are entries that a forward pass has made."""
    if names:
        raise ConfigError(
            f"the model makes {len(names)} entries in its first forward pass"
            f" ('{names[0]}', ...): the model of the server, which had none, lacks them,"
            " and so do new clients. Make them where the model is built, or pass a"
            " batch through it there."
        )


@contextmanager
def makes_no_entries(model: nn.Module) -> Iterator[None]:
    """Refuse entries that the block makes, once in a process for such a model.

    Raises:
        ConfigError: at the end of the block, if there are any.
    """
    key = _key(model)
    if key in _SEEN:
        yield
        return
    before = model.state_dict().keys()
    yield
    refuse_made([name for name in model.state_dict() if name not in before])
    _SEEN.add(key)


def _key(model: nn.Module, task: Task | None = None) -> tuple[object, ...]:
    return (task and task.name, *map(type, model.modules()))


def _takes_logits(task: Task) -> bool:
    """Return whether a sigmoid or softmax is applied to the outputs of a model."""
    if isinstance(task, RegressionTask):
        return False
    loss = task.training_loss or task.loss
    loss = getattr(loss, "func", loss)
    if loss in (F.cross_entropy, pixel_cross_entropy):
        return True
    # Tests of labels decide at logit 0, whatever the loss is.
    return isinstance(task, LabelTask) or isinstance(loss, nn.CrossEntropyLoss)


def _end_of(outputs: Any) -> str:
    """Return the function that made the outputs, if it is sigmoid or softmax."""
    if not isinstance(outputs, Tensor):
        return ""
    node = outputs.grad_fn
    while node is not None and node.name() not in _ENDS:
        if not node.name().lstrip("_").startswith(_SAME_VALUES):
            node = None
        else:
            node = node.next_functions[0][0]
    if node is not None:
        return _ENDS[node.name()]
    # A softmax of another kind: no logits are positive with a sum of 1.
    values = outputs.detach().float()
    if values.dim() < 2 or values.shape[1] < 2 or (values < 0).any():
        return ""
    sums = values.sum(1)
    return "softmax" if torch.allclose(sums, torch.ones_like(sums)) else ""
