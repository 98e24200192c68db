"""What passes of a copy show of a model before it trains: entries that they make, and a
sigmoid or softmax before a loss of logits. Torch only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.training.batches import inputs_for
from fedbn_flwr.training.model_state import copied
from fedbn_flwr.training.randomness import seeded
from fedbn_flwr.training.tasks import LabelTask, RegressionTask, Task

__all__ = ["first_look", "makes_no_entries", "refuse_made", "was_looked_at"]

# What this process has looked at: a model may be built for every message.
_SEEN: set[tuple[object, ...]] = set()
# Weights that are drawn before a model is told to end in a function.
_DRAWS = 8


def was_looked_at(model: nn.Module, task: Task) -> bool:
    """Return whether this process has had the first look at such a model."""
    return _key(model, task) in _SEEN


def first_look(model: nn.Module, inputs: Callable[[], Any], task: Task) -> str:
    """Look at the model in passes of a copy, in train and in eval mode.

    Args:
        model: it does not change.
        inputs: returns the inputs of two examples.
        task: what its outputs are for.

    Returns:
        What to tell the user of its outputs, after "model ...", or "".

    Raises:
        ConfigError: the passes make entries, which the server and other clients lack,
            or give them another shape.
    """
    trial, end = model, ""
    # The user's code may raise anything, and raises it again where it is told of.
    with suppress(Exception), seeded(0), torch.enable_grad():
        trial = copied(model)
        end = _end_of(trial, inputs_for(trial)(inputs()), task)
    refuse_made(_made(_shapes(model), _shapes(trial)))
    _SEEN.add(_key(model, task))
    if not end:
        return ""
    return (
        f"seems to end with a {end}: the loss of {task.name}, and its tests, take"
        f" outputs without {end}. Leave it out; a loss of your own then takes logits, as"
        " binary_cross_entropy_with_logits does."
    )


def refuse_made(names: Sequence[str]) -> None:
    """Raise ConfigError if there are entries that a forward pass has made."""
    if names:
        raise ConfigError(
            f"the model makes {len(names)} entries in a forward pass, or gives them"
            f" another shape ('{names[0]}', ...): the model of the server, which had"
            " none, lacks them, and so do new clients. Make them where the model is"
            " built, or pass a batch through it there."
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
    before = _shapes(model)
    yield
    refuse_made(_made(before, _shapes(model)))
    _SEEN.add(key)


def _made(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the entries that are new, or have another shape."""
    return [name for name in now if (name, now[name]) not in before.items()]


def _shapes(model: nn.Module) -> dict[str, Any]:
    shapes = {}
    for name, entry in model.state_dict(keep_vars=True).items():
        # A lazy one raises where it is asked; what is no tensor has none.
        shapes[name] = None if is_lazy(entry) else getattr(entry, "shape", None)
    return shapes


def _key(model: nn.Module, task: Task | None = None) -> tuple[object, ...]:
    return (task and task.name, *map(type, model.modules()))


def _end_of(trial: nn.Module, inputs: Any, task: Task) -> str:
    """Return the function with which the model ends in a mode, if its outputs are those
    of one whatever the weights are, and the task takes logits; else "".

    Outputs may be between 0 and 1 by chance, and a sigmoid may be hidden in a clamp or
    be there in eval mode alone: so many weights are drawn, and only outputs are looked
    at.
    """
    ends: dict[bool, set[str]] = {}
    for mode in (True, False):
        outputs = trial.train(mode)(inputs)
        if _takes_logits(task, outputs):
            ends[mode] = _possible_ends(outputs, task)
    draws = 0
    while any(ends.values()) and draws < _DRAWS:
        _redraw(trial.parameters())
        for mode, possible in ends.items():
            possible &= _possible_ends(trial.train(mode)(inputs), task)
        draws += 1
    # The outputs of a softmax are those of a sigmoid, too.
    return min(set().union(*ends.values()), key=_ENDS.index, default="")


_ENDS = ("softmax", "sigmoid", "log-sigmoid")


def _possible_ends(outputs: Any, task: Task) -> set[str]:
    """Return the functions that may have made the outputs."""
    found = set()
    values = outputs.detach().float()
    if ((values >= 0) & (values <= 1)).all():
        found.add("sigmoid")
        several = values.dim() > 1 and values.shape[1] > 1
        if several and ((values.sum(1) - 1).abs() < 0.01).all():
            found.add("softmax")
    # Labels are decided at 0; log-probabilities of classes are logits, too.
    if isinstance(task, LabelTask) and (values <= 0).all():
        found.add("log-sigmoid")
    return found


def _takes_logits(task: Task, outputs: Any) -> bool:
    """Return whether a sigmoid or softmax is applied to the outputs of a model."""
    if isinstance(task, RegressionTask) or not isinstance(outputs, Tensor):
        return False
    # Tests of labels decide at logit 0, whatever the loss is.
    if isinstance(task, LabelTask):
        return True
    # A softmax in the loss does not see a constant that all logits have.
    loss = task.training_loss or task.loss
    classes = outputs.new_zeros(len(outputs), *outputs.shape[2:], dtype=torch.int64)
    return torch.allclose(loss(outputs + 1, classes), loss(outputs, classes), 1e-3)


def _redraw(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        fan_in = parameter[0].numel() if parameter.dim() > 1 else 1
        parameter.data.normal_(0, 2 / math.sqrt(max(fan_in, 1)))
