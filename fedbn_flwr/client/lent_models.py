"""The models of this process: each is built once, and lent to one client at a time.

To build a model and draw its first weights for every message takes longer than many clients' training. A client's
message brings every entry of the model, so one model serves all clients.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from torch import Tensor, nn

from fedbn_flwr.batchnorm.parts import Parts, split_state
from fedbn_flwr.training.memory_format import MemoryFormat, set_memory_format
from fedbn_flwr.training.wrappers import load_state, loads_by_copy, unwrap

__all__ = ["BuildModel", "LentModel", "lender"]

BuildModel = Callable[[], nn.Module]

_FREE: weakref.WeakKeyDictionary[BuildModel, list[LentModel]] = weakref.WeakKeyDictionary()


@dataclass
class LentModel:
    """A model, and what is derived from it once.

    Attributes:
        model: the model, possibly compiled or in DDP.
        plain: the module inside such wrappers.
        parts: the split of its state.
        state: its entries by name, which share memory with the model.
        by_copy: whether a state is loaded by copies of its entries; if not, by ``load_state_dict``.
        tried: whether a synchronised step was tried with it.
    """

    model: nn.Module
    plain: nn.Module
    parts: Parts
    state: Mapping[str, Tensor]
    by_copy: bool
    tried: bool = False

    @classmethod
    def of(cls, model: nn.Module) -> LentModel:
        """Return the model with what is derived from it."""
        plain = unwrap(model)
        return cls(model, plain, split_state(plain), plain.state_dict(), loads_by_copy(plain))

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load all entries."""
        if self.by_copy:
            for name, entry in self.state.items():
                entry.copy_(state[name])
        else:
            load_state(self.plain, state)


def lender(
    model: nn.Module | BuildModel, memory_format: MemoryFormat = "auto"
) -> Callable[[], AbstractContextManager[LentModel]]:
    """Return the function that lends a model in this format: the given one, or one that this process has built with it.

    A built model that is not lent serves the next client. It is thrown away if its client raised an exception, and with
    the function that builds it.
    """
    if isinstance(model, nn.Module):
        own = LentModel.of(set_memory_format(model, memory_format))
        return lambda: nullcontext(own)
    return lambda: _built(model, memory_format)


@contextmanager
def _built(build: BuildModel, memory_format: MemoryFormat) -> Iterator[LentModel]:
    free = _FREE.setdefault(build, [])
    lent = free.pop() if free else LentModel.of(set_memory_format(build(), memory_format))
    yield lent  # after an exception the model is not free again: its modes and hooks are as the exception left them
    lent.plain.zero_grad(set_to_none=True)
    free.append(lent)
