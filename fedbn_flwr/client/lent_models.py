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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedbn_flwr.batchnorm.parts import Parts, split_state, tied_entries
from fedbn_flwr.errors import ConfigError, StateError
from fedbn_flwr.training.batches import Batches
from fedbn_flwr.training.freezing import keep_eval, unlike_in_tests
from fedbn_flwr.training.layout import Layout
from fedbn_flwr.training.memory_format import set_memory_format
from fedbn_flwr.training.randomness import seeded
from fedbn_flwr.training.wrappers import load_state, loads_by_copy, no_tensors, unwrap

__all__ = ["BuildModel", "LentModel", "lender", "two_inputs"]

logger = logging.getLogger("flwr")

BuildModel = Callable[[], nn.Module]

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
        buffers = [
            (module, name, buffer.clone())
            for module in plain.modules()
            for name, buffer in module._buffers.items()
            if name in module._non_persistent_buffers_set and buffer is not None
        ]
        layout, parts = Layout(plain), split_state(plain)
        fingerprint = parts.fingerprint(
            {name: tuple(entry.shape) for name, entry in layout.state.items()}
        )
        return cls(
            model,
            layout,
            parts,
            fingerprint,
            buffers,
            tied_entries(plain),
            loads_by_copy(plain),
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
        given: list[LentModel] = []

        def lend() -> AbstractContextManager[LentModel]:
            given[:] = [given[0].current() if given else _lendable(model, example)]
            return nullcontext(given[0])

        return lend
    return lambda: _built(model, example)


def two_inputs(sets: Iterable[Batches]) -> Any:
    """Return the inputs of two examples of the first set that has any, for
    ``lender(example=...)``.
    """
    data = next(data for data in sets if len(data))
    # With a generator: without one a data set with random transforms is warned of.
    return data.batch(torch.tensor([0, min(1, len(data) - 1)]), torch.Generator())[0]


def _lendable(model: nn.Module, example: Callable[[], Any] | None) -> LentModel:
    """Return the model to lend.

    Raises:
        StateError: a lazy layer does not know its shapes yet.
        ConfigError: the state has entries that are no tensors.
    """
    if why := no_tensors(unwrap(model)):
        raise ConfigError(why)
    if lazy := [
        name
        for name, entry in unwrap(model).state_dict(keep_vars=True).items()
        if is_lazy(entry)
    ]:
        raise StateError(
            f"entry '{lazy[0]}' of the model is lazy, and has no shape yet ({len(lazy)}"
            " entries). Run one batch through the model first, in the function that"
            " builds it."
        )
    for told in (keep_eval(unwrap(model)), unlike_in_tests(unwrap(model))):
        if told:
            _warn(told)
    return LentModel.of(set_memory_format(model, example))


@functools.cache  # once in a process: a model may be built for every message
def _warn(text: str) -> None:
    logger.warning("%s", text)


@contextmanager
def _built(build: BuildModel, example: Callable[[], Any] | None) -> Iterator[LentModel]:
    free = _FREE.setdefault(build, [])
    if free:
        lent = free.pop().current()
    else:
        # the first weights are drawn in some processes only; what the client draws is
        # as in the others
        with seeded(0):
            lent = _lendable(build(), example)
    # after an exception the model is not free again: its modes and hooks are as the
    # exception left them
    yield lent
    for parameter in lent.layout.parameters():
        parameter.grad = None
    for module, name, buffer in lent.buffers:
        module._buffers[name] = buffer.clone()
    free.append(lent)
