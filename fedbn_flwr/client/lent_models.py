"""The models of this process: each is built once, and lent to one client at a time.

To build a model and draw its first weights for every message takes longer than many
clients' training. A client's message brings every entry of the model's state dict, and
buffers that are not in it are put back, so one model serves all clients. What a model
keeps in other Python attributes stays: let ``client_fn`` build such a model itself.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedbn_flwr.batchnorm.parts import Parts, split_state, tied_entries
from fedbn_flwr.batchnorm.sync import try_synchronised_step
from fedbn_flwr.errors import ConfigError, NormLayerError, StateError
from fedbn_flwr.training.batches import Batches, inputs_for, set_memory_format
from fedbn_flwr.training.freezing import keep_eval, unlike_in_tests
from fedbn_flwr.training.layout import Layout
from fedbn_flwr.training.randomness import seeded
from fedbn_flwr.training.wrappers import load_state, loads_by_copy, no_tensors, unwrap

__all__ = ["BuildModel", "LentModel", "lender"]

logger = logging.getLogger("flwr")

BuildModel = Callable[[], nn.Module]

# the models that nobody uses now, by the function that built them
_FREE: weakref.WeakKeyDictionary[BuildModel, list[LentModel]] = (
    weakref.WeakKeyDictionary()
)


@dataclass
class LentModel:
    """A model, and what is derived from it once.

    Attributes:
        model: the model, possibly compiled or in DDP.
        layout: the module inside such wrappers, with the places of its entries.
        parts: the split of its state.
        fingerprint: that of the parts and the shapes, which kept entries must fit.
        buffers: buffers that are not in the state dict, as they were built: module,
            name, value.
        tied: entries that are the same tensor as an earlier one, each with the name of
            the first.
        by_copy: whether a state is loaded by copies of its entries; if not, by
            ``load_state_dict``.
        tried: whether a synchronised step was tried with it.
    """

    model: nn.Module
    layout: Layout
    parts: Parts
    fingerprint: str
    buffers: list[tuple[nn.Module, str, Tensor]]
    tied: Mapping[str, str]
    by_copy: bool
    tried: bool = False

    @classmethod
    def of(cls, model: nn.Module) -> LentModel:
        """Return the model with what is derived from it."""
        plain = unwrap(model)
        buffers = []
        for module in plain.modules():
            for name, buffer in module._buffers.items():
                in_state = name not in module._non_persistent_buffers_set
                if buffer is not None and not in_state:
                    buffers.append((module, name, buffer.clone()))
        layout, parts = Layout(plain), split_state(plain)
        shapes = {name: tuple(entry.shape) for name, entry in layout.state.items()}
        return cls(
            model=model,
            layout=layout,
            parts=parts,
            fingerprint=parts.fingerprint(shapes),
            buffers=buffers,
            tied=tied_entries(plain),
            by_copy=loads_by_copy(plain),
        )

    @property
    def plain(self) -> nn.Module:
        """The module inside wrappers."""
        return self.layout.model

    @property
    def state(self) -> Mapping[str, Tensor]:
        """The entries by name, see ``Layout.state``."""
        return self.layout.state

    def current(self) -> LentModel:
        """Return this model; if the client's code has added or removed layers since it
        was read, read anew.
        """
        return self if self.layout.is_current else LentModel.of(self.model)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load all entries."""
        if self.by_copy:
            for name, entry in self.state.items():
                entry.copy_(state[name])
        else:
            load_state(self.plain, state)

    def try_step(self, data: Batches) -> None:
        """Try a synchronised step with two examples, once for a model.

        Raises:
            NormLayerError: BN layers of this model cannot be synchronised.
        """
        if self.tried:
            return
        positions = torch.arange(min(2, len(data)))
        try:
            inputs = inputs_for(self.plain)(data.batch(positions)[0])
            try_synchronised_step(self.plain, inputs, len(positions))
            self.tried = True
        except NormLayerError:
            raise
        # User code may raise anything; if training raises it too, the server hears of
        # it.
        except Exception as error:
            logger.warning(
                "the model could not be tried in a synchronised step: %s: %s",
                type(error).__name__,
                error,
            )


def lender(
    model: nn.Module | BuildModel, example: Callable[[], Any] | None = None
) -> Callable[[], AbstractContextManager[LentModel]]:
    """Return the function that lends a model: the given one, or one that this process
    builds with the given function.

    A built model that is not lent serves the next client. It is thrown away if its
    client raised an exception, and with the function that builds it. ``example`` is
    that of ``set_memory_format``.
    """
    if isinstance(model, nn.Module):
        return functools.partial(_given, model, example, [])
    return functools.partial(_built, model, example)


def _given(
    model: nn.Module, example: Callable[[], Any] | None, read: list[LentModel]
) -> AbstractContextManager[LentModel]:
    """Lend the given model; ``read`` has it once it was read."""
    lent = read.pop().current() if read else _lendable(model, example)
    read.append(lent)
    return nullcontext(lent)


@contextmanager
def _built(build: BuildModel, example: Callable[[], Any] | None) -> Iterator[LentModel]:
    free = _FREE.setdefault(build, [])
    if free:
        lent = free.pop().current()
    else:
        # The first weights are drawn in some processes only; what the client draws is
        # as in the others.
        with seeded(0):
            lent = _lendable(build(), example)
    # After an exception the model is not free again: its modes and hooks are as the
    # exception left them.
    yield lent
    for parameter in lent.layout.parameters():
        parameter.grad = None
    # The next client's message brings the state; other buffers are as they were built.
    for module, name, buffer in lent.buffers:
        module._buffers[name] = buffer.clone()
    free.append(lent)


def _lendable(model: nn.Module, example: Callable[[], Any] | None) -> LentModel:
    """Return the model to lend.

    Raises:
        StateError: a lazy layer does not know its shapes yet.
        ConfigError: the state has entries that are no tensors.
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
    for told in (keep_eval(plain), unlike_in_tests(plain)):
        if told:
            _warn(told)
    return LentModel.of(set_memory_format(model, example))


@functools.cache  # once in a process: a model may be built for every message
def _warn(text: str) -> None:
    logger.warning("%s", text)
