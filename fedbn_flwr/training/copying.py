"""A deep copy of a model, also of one that keeps tensors with a graph, which
``copy.deepcopy`` refuses. Torch only.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import TypeVar

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fedbn_flwr.errors import StateError

__all__ = ["copied"]

M = TypeVar("M", bound=nn.Module)


def copied(model: M, shared: Iterable[Tensor] = ()) -> M:
    """Return a deep copy of a model.

    The old ``weight_norm`` and models that keep an activation hold tensors with a
    graph, which the next forward pass makes anew. The copy has their values.

    Args:
        model: it does not change.
        shared: tensors that the copy has in common with the model.

    Raises:
        StateError: a layer holds something else that cannot be copied; the message
            names the layer.
    """
    # ``deepcopy`` takes what its memo has in place of a copy.
    memo = {id(tensor): tensor for tensor in shared}
    for module in model.modules():
        for value in tree_leaves(list(vars(module).values())):
            if isinstance(value, Tensor) and not value.is_leaf:
                memo.setdefault(id(value), value.detach().clone())
    try:
        return copy.deepcopy(model, dict(memo))
    # a lock, a file, an object of the user's: anything may be raised
    except Exception as error:
        path, kind = _innermost_that_fails(model, memo)
        raise StateError(
            f"the model cannot be copied: layer '{path or 'the model itself'}' ({kind})"
            f" raised {type(error).__name__}: {error}. Keep what cannot be copied out"
            " of the layer; in place of an old weight_norm or spectral_norm use that"
            " of torch.nn.utils.parametrizations."
        ) from error


def _innermost_that_fails(
    model: nn.Module, memo: Mapping[int, Tensor]
) -> tuple[str, str]:
    """Return path and class of a layer that cannot be copied though all layers inside
    it can.
    """
    # Children before their parents: the first that fails has no layer inside that does.
    for path, module in reversed(list(model.named_modules())):
        try:
            copy.deepcopy(module, dict(memo))
        except Exception:
            return path, type(module).__name__
    return "", type(model).__name__
