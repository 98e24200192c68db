"""Reading the examples of a torch ``Dataset`` as batches.

The examples of a batch are taken by one index from tensors, read by one call of
``__getitems__``, or read one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset, default_collate

Read = Callable[[Sequence[int]], Any]
"""Returns the batch of the examples with the given numbers."""


def reader(data: Any, collate: Callable[[list[Any]], Any]) -> Read:
    """Return the function that reads batches of a data set like its ``DataLoader``.

    Rows of tensors are taken by one index, because stacking them gives the same bits.
    Other data sets are read by their ``__getitems__`` like in torch, or one example at
    a time if they lack it.

    Args:
        data: a data set with a length.
        collate: makes a batch of a list of examples.
    """
    if collate is default_collate and _has_rows(data):
        return functools.partial(_rows, data)
    return functools.partial(_collated, data, collate)


def draws_nothing(read: Read) -> bool:
    """Return whether a reader runs no user code, so that it draws no numbers."""
    return getattr(read, "func", None) is _rows


def name_of(data: Any) -> str:
    """Return the class of a data set and the classes of the data sets inside it."""
    inner = data.dataset if type(data) is Subset else None
    name = type(data).__name__
    return name if inner is None else f"{name} of {name_of(inner)}"


# --- rows of tensors ------------------------------------------------------------------
def _has_rows(data: Any) -> bool:
    """Return whether all examples are rows of tensors.

    Only classes of torch are considered, because a subclass may read differently.
    """
    if type(data) is Subset:
        return _has_rows(data.dataset)
    return type(data) is TensorDataset and all(map(_is_plain, data.tensors))


def _is_plain(tensor: Tensor) -> bool:
    strided = tensor.layout is torch.strided and not tensor.is_quantized
    return type(tensor) is Tensor and strided


def _rows(data: Any, chosen: Sequence[int]) -> list[Tensor]:
    """Return the rows of each tensor, as ``default_collate`` would stack them."""
    if type(data) is Subset:
        return _rows(data.dataset, [data.indices[number] for number in chosen])
    at = torch.tensor(chosen, device="cpu")
    at += (at < 0) * len(data)  # a subset may have negative indices
    return [each.index_select(0, at.to(each.device)) for each in data.tensors]


# --- examples -------------------------------------------------------------------------
def _collated(data: Any, collate: Callable[[Any], Any], chosen: Sequence[int]) -> Any:
    """Return the examples as a batch, read and assembled like in the loader."""
    if callable(getattr(data, "__getitems__", None)):
        return collate(data.__getitems__(chosen))
    return collate([data[number] for number in chosen])
