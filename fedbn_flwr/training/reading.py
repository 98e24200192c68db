"""Reading the examples of a torch ``Dataset`` as batches.

The examples of a batch are taken by one index from tensors, read by one call of
``__getitems__``, or read one by one.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset, default_collate

from fedbn_flwr.errors import DataError

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
    inner = data.dataset if isinstance(data, Subset) else None
    name = type(data).__name__
    return name if inner is None else f"{name} of {name_of(inner)}"


# --- rows of tensors ------------------------------------------------------------------
def _has_rows(data: Any) -> bool:
    """Return whether all examples are rows of tensors.

    Only classes of torch are considered, because a subclass may read differently.
    """
    if type(data) is Subset:
        return _has_rows(data.dataset)
    if type(data) is ConcatDataset:
        return all(map(_has_rows, data.datasets))
    return type(data) is TensorDataset and all(map(_is_plain, data.tensors))


def _is_plain(tensor: Tensor) -> bool:
    strided = tensor.layout is torch.strided and not tensor.is_quantized
    return type(tensor) is Tensor and strided


def _rows(data: Any, chosen: Sequence[int]) -> list[Tensor]:
    """Return the rows of each tensor, as ``default_collate`` would stack them."""
    if type(data) is Subset:
        return _rows(data.dataset, [data.indices[number] for number in chosen])
    if type(data) is TensorDataset:
        at = torch.tensor(chosen, device="cpu")
        at += (at < 0) * len(data)  # a subset may have negative indices
        return [each.index_select(0, at.to(each.device)) for each in data.tensors]
    # Make one index for each data set with chosen examples, and then put the rows into
    # the order of the batch.
    places: dict[int, list[int]] = {}
    within = []
    for place, number in enumerate(chosen):
        number += len(data) if number < 0 else 0
        part = bisect_right(data.cumulative_sizes, number)
        within.append(number - data.cumulative_sizes[part - 1] if part else number)
        places.setdefault(part, []).append(place)
    parts = [
        _rows(data.datasets[part], [within[place] for place in of_part])
        for part, of_part in places.items()
    ]
    order = torch.tensor([*chain(*places.values())], device="cpu").argsort()
    return [
        torch.cat(rows).index_select(0, order.to(rows[0].device))
        for rows in zip(*parts, strict=True)
    ]


# --- examples -------------------------------------------------------------------------
def _examples(data: Any, chosen: Sequence[int]) -> Any:
    if not callable(getattr(data, "__getitems__", None)):
        return [data[number] for number in chosen]
    examples = data.__getitems__(chosen)
    # Do not check another type, because it is for a user's collate_fn.
    if isinstance(examples, list) and len(examples) != len(chosen):
        raise DataError(
            f"__getitems__ of {name_of(data)} returned {len(examples)} examples for"
            f" {len(chosen)} numbers. It must return one example for each number, in"
            " their order. Correct it, or remove it so that the examples are read one"
            " at a time."
        )
    return examples


def _collated(data: Any, collate: Callable[[Any], Any], chosen: Sequence[int]) -> Any:
    """Return the examples as a batch, assembled like in the loader."""
    return collate(_examples(data, chosen))
