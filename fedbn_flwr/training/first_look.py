"""Search for faults of a model before the training, by trial passes of a copy.

The passes find entries that are created in a forward pass, and a sigmoid or softmax
before a loss of logits. Torch only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.training.batches import inputs_for
from fedbn_flwr.training.model_state import copied
from fedbn_flwr.training.randomness import seeded
from fedbn_flwr.training.run_memory import is_noted, note
from fedbn_flwr.training.tasks import LabelTask, RegressionTask, Task

# Number of draws of random weights. In each draw, the outputs must show the function at
# the end of a model.
_DRAWS = 8


def was_looked_at(model: nn.Module, task: Task) -> bool:
    """Return whether this run has checked these layer types for this task."""
    return is_noted(*_key(model, task))


def first_look(model: nn.Module, inputs: Callable[[], Any], task: Task) -> str:
    """Check the model in passes of a copy, in train and in eval mode.

    Args:
        model: the model; it does not change.
        inputs: returns the inputs of two examples.
        task: the task of the model.

    Returns:
        A warning about the outputs, as the rest of a sentence that begins with "model".
        "" means no warning.

    Raises:
        ConfigError: the passes create entries or change their shape. The server and
            the other clients would not have these entries.
    """
    trial, end = model, ""
    # The user's code may raise any exception. The training will raise the exception
    # again and report it.
    with suppress(Exception), seeded(0), torch.enable_grad():
        trial = copied(model)
        end = _end_of(trial, inputs_for(trial)(inputs()), task)
    refuse_made(_made(_shapes(model), _shapes(trial)))
    note(*_key(model, task))
    if not end:
        return ""
    return (
        f"seems to end with a {end}, but the loss and the tests of {task.name} take"
        f" outputs without {end}. Remove it. If you have your own loss, it then takes"
        " logits, as binary_cross_entropy_with_logits does."
    )


def refuse_made(names: Sequence[str]) -> None:
    """Raise ConfigError if a forward pass has created the named entries."""
    if names:
        raise ConfigError(
            f"the model creates {len(names)} of its entries in a forward pass, or"
            f" changes their shape ('{names[0]}', ...). The server and new clients do"
            " not run such a pass, so their models lack these entries. Create them"
            " when the model is built, or pass a batch through it there."
        )


@contextmanager
def makes_no_entries(model: nn.Module) -> Iterator[None]:
    """Refuse entries that are created in the block.

    A process checks each kind of model once in a run.

    Raises:
        ConfigError: the block has created entries. The error is raised at the end of
            the block.
    """
    key = _key(model)
    if is_noted(*key):
        yield
        return
    before = _shapes(model)
    yield
    refuse_made(_made(before, _shapes(model)))
    note(*key)


def _made(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the names of entries that are new or have another shape."""
    return [name for name in now if (name, now[name]) not in before.items()]


def _shapes(model: nn.Module) -> dict[str, Any]:
    shapes = {}
    for name, entry in model.state_dict(keep_vars=True).items():
        # The shape of a lazy entry raises an exception. Objects that are not tensors
        # have no shape.
        shapes[name] = None if is_lazy(entry) else getattr(entry, "shape", None)
    return shapes


def _key(model: nn.Module, task: Task | None = None) -> tuple[Hashable, ...]:
    return ("looked at", task and task.name, *map(type, model.modules()))


def _end_of(trial: nn.Module, inputs: Any, task: Task) -> str:
    """Return the name of the function at the end of the model, or "".

    The name is "softmax", "sigmoid" or "log-sigmoid", and "" if the task takes no
    logits. The search looks only at outputs, because a sigmoid may be hidden in a
    clamp, or exist only in eval mode. It draws the weights many times, because outputs
    may be between 0 and 1 by chance.
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
    # Prefer softmax to sigmoid, because the outputs of a softmax also look like outputs
    # of a sigmoid.
    return min(set().union(*ends.values()), key=_ENDS.index, default="")


_ENDS = ("softmax", "sigmoid", "log-sigmoid")


def _possible_ends(outputs: Any, task: Task) -> set[str]:
    """Return the functions that may have produced the outputs."""
    found = set()
    values = outputs.detach().float()
    if ((values >= 0) & (values <= 1)).all():
        found.add("sigmoid")
        several = values.dim() > 1 and values.shape[1] > 1
        if several and ((values.sum(1) - 1).abs() < 0.01).all():
            found.add("softmax")
    # Look for log-probabilities only if the task has labels, because a label is decided
    # by the sign of its logit. For classes, log-probabilities are valid logits.
    if isinstance(task, LabelTask) and (values <= 0).all():
        found.add("log-sigmoid")
    return found


def _takes_logits(task: Task, outputs: Any) -> bool:
    """Return whether the task applies a sigmoid or softmax to the model's outputs."""
    if isinstance(task, RegressionTask) or not isinstance(outputs, Tensor):
        return False
    # A label is decided by the sign of its logit, and the loss does not matter.
    if isinstance(task, LabelTask):
        return True
    # A softmax in the loss ignores a constant that is added to all logits.
    loss = task.training_loss or task.loss
    classes = outputs.new_zeros(len(outputs), *outputs.shape[2:], dtype=torch.int64)
    return torch.allclose(loss(outputs + 1, classes), loss(outputs, classes), 1e-3)


def _redraw(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        fan_in = parameter[0].numel() if parameter.dim() > 1 else 1
        parameter.data.normal_(0, 2 / math.sqrt(max(fan_in, 1)))
