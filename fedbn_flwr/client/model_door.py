"""The door, where a process looks once at the model of a user.

Unusual models are refused here. Behind the door, each message has a model of its own,
so nothing that training leaves in a model reaches another client.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedbn_flwr.batchnorm.array_types import State
from fedbn_flwr.batchnorm.parts import Parts, split_state
from fedbn_flwr.batchnorm.sync import try_synchronised_step
from fedbn_flwr.errors import ConfigError, NormLayerError, StateError
from fedbn_flwr.messages.records import to_state
from fedbn_flwr.training.batches import Batches, inputs_for, set_memory_format
from fedbn_flwr.training.copying import Template, template_of
from fedbn_flwr.training.freezing import force_eval_as_built, unlike_in_tests
from fedbn_flwr.training.model_state import compiled_modules, no_tensors, unwrap
from fedbn_flwr.training.randomness import seeded
from fedbn_flwr.training.run_memory import first_time, is_noted, kept_for_run, note

logger = logging.getLogger("flwr")

BuildModel = Callable[[], nn.Module]
Example = Callable[[], Any]
"""Returns the inputs of two examples."""


@dataclass(frozen=True)
class LentModel:
    """The model of one message, or the model of which each message gets a copy.

    Attributes:
        model: the model in its memory format, possibly compiled or wrapped in DDP.
        template: the template of the copies; None if it is compiled, because each copy
            would be compiled again.
        parts: the split of its state.
        fingerprint: the fingerprint of the parts and the shapes, which local state must
            match.
        initial: the state of the model when it was built.
    """

    model: nn.Module
    template: Template[nn.Module] | None
    parts: Parts
    fingerprint: str
    initial: State

    def lend(self) -> LentModel:
        """Return a copy for one message, or a compiled model itself."""
        if self.template is None:
            return self
        return replace(self, model=self.template.copy())

    @property
    def plain(self) -> nn.Module:
        """The module inside wrappers."""
        return unwrap(self.model)

    @property
    def state(self) -> Mapping[str, Tensor]:
        """The entries by name. They share memory with the model."""
        return self.plain.state_dict()

    def arrays(self) -> State:
        """Return the entries as arrays that no later message changes."""
        state = to_state(self.state)
        if self.template is not None:
            return state
        return {name: array.copy() for name, array in state.items()}


def look_at(model: nn.Module, example: Example | None = None) -> LentModel:
    """Return the values that are derived from a model, and put it into its format.

    ``example`` is the argument of ``set_memory_format``.

    Raises:
        StateError: a lazy layer has no shapes yet, or the model cannot be copied.
        ConfigError: the state has entries that are not tensors.
        NormLayerError: a module is in TorchScript.
    """
    plain = unwrap(model)
    why = no_tensors(plain)
    if why:
        raise ConfigError(why)
    state = plain.state_dict(keep_vars=True)
    lazy = [name for name, entry in state.items() if is_lazy(entry)]
    if lazy:
        raise StateError(
            f"entry '{lazy[0]}' of the model is lazy, and has no shape yet ({len(lazy)}"
            " entries). Run one batch through the model first, in the function that"
            " builds it."
        )
    for warning in (force_eval_as_built(plain), unlike_in_tests(plain)):
        if warning and first_time(warning):
            logger.warning("%s", warning)
    model = set_memory_format(model, example)
    initial, template = to_state(plain.state_dict()), None
    if compiled_modules(model):
        initial = {name: array.copy() for name, array in initial.items()}
    else:
        template = template_of(model)
    parts = split_state(plain)
    shapes = {name: tuple(array.shape) for name, array in initial.items()}
    return LentModel(model, template, parts, parts.fingerprint(shapes), initial)


def door(
    model: nn.Module | BuildModel, example: Example | None = None
) -> Callable[[], AbstractContextManager[LentModel]]:
    """Return a function that lends a model for a message.

    A model that a function builds is built once in a process. Each message gets a copy
    of it, or of a given model. A compiled model is lent itself; what training leaves
    outside its state dict stays in it. If it was built, one message at a time has it.
    """
    if isinstance(model, nn.Module):
        return lambda: nullcontext(look_at(model, example).lend())
    return functools.partial(_built, model, example)


@contextmanager
def _built(build: BuildModel, example: Example | None) -> Iterator[LentModel]:
    # The models that are not in use, by the function that built them.
    looks: WeakKeyDictionary[BuildModel, list[LentModel]] = kept_for_run(
        "models", WeakKeyDictionary
    )
    free = looks.setdefault(build, [])
    if free:
        look = free.pop()
    else:
        # Build the model under a fixed seed, because only some processes build it here.
        with seeded(0):
            look = look_at(build(), example)
    if look.template:
        free.append(look)
        yield look.lend()
        return
    yield look.lend()
    # A compiled model is not free again after an exception.
    for parameter in look.model.parameters():
        parameter.grad = None
    free.append(look)


def try_step(lent: LentModel, data: Batches) -> None:
    """Try a synchronised step with two examples, once for a model.

    Raises:
        NormLayerError: BN layers of this model cannot be synchronised.
    """
    key = ("tried", *map(type, lent.plain.modules()))
    if is_noted(*key):
        return
    positions = torch.arange(min(2, len(data)))
    try:
        inputs = inputs_for(lent.plain)(data.batch(positions)[0])
        try_synchronised_step(lent.plain, inputs, len(positions))
        note(*key)
    except NormLayerError:
        raise
    # The user's code may raise any exception. If training raises it as well, the client
    # reports it to the server then.
    except Exception as error:
        logger.warning(
            "the model could not be tried in a synchronised step: %s: %s",
            type(error).__name__,
            error,
        )
