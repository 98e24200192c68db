"""How a data set is read never changes a bit of its batches."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Subset,
    TensorDataset,
    default_collate,
)

from fedbn_flwr.errors import DataError
from fedbn_flwr.training import batches_of


def dtypes() -> list[torch.dtype]:
    """Return every dtype of numbers."""
    found = set()
    for each in vars(torch).values():
        with suppress(RuntimeError):
            if type(each) is torch.dtype:
                torch.zeros(1).to(each)
                found.add(each)
    return sorted(found, key=str)


DTYPES = dtypes()
LAYOUTS = st.tuples(
    st.sampled_from(DTYPES),
    st.sampled_from([(0, 1, 2, 3), (0, 3, 1, 2), (0, 2, 1, 3)]),
)


@st.composite
def data_sets(draw: Any, layouts: Any = None, depth: int = 2) -> Dataset[Any]:
    """Draw rows of tensors in subsets and concatenations.

    Most of them can be stacked.
    """
    if layouts is None:
        layouts = draw(st.sampled_from([LAYOUTS, st.just(draw(LAYOUTS))]))
    inside = data_sets(layouts, depth - 1)
    kind = draw(st.sampled_from(["together", "subset"])) if depth else "tensors"
    if kind == "subset":
        inner = draw(inside)
        at = st.integers(-len(inner), len(inner) - 1)
        return Subset(inner, draw(st.lists(at, min_size=1, max_size=6)))
    if kind == "together":
        return ConcatDataset(draw(st.lists(inside, min_size=1, max_size=3)))
    count, seed = draw(st.integers(1, 4)), draw(st.integers(0, 9))
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(256, (count, 3, 2, 16), generator=generator)
    dtype, turn = draw(layouts)
    values = values > 127 if dtype is torch.bool else values.byte().view(dtype)
    return TensorDataset(values.permute(turn), torch.arange(count))


def bits(tensor: Tensor) -> tuple[Any, ...]:
    as_bytes = bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())
    return tensor.dtype, tensor.shape, tensor.stride(), as_bytes


@given(data=data_sets(), draws=st.data())
def test_rows_of_tensors_have_the_bits_of_their_examples(data, draws) -> None:
    at = draws.draw(st.lists(st.integers(0, len(data) - 1), min_size=1, max_size=7))
    batches = batches_of(DataLoader(data))
    try:
        wanted = default_collate([data[number] for number in at])
    except (RuntimeError, TypeError):
        with pytest.raises((RuntimeError, TypeError)):
            batches.batch(torch.tensor(at))
        return
    for generator in (None, torch.Generator()):
        found = batches.batch(torch.tensor(at), generator)
        assert [*map(bits, found)] == [*map(bits, wanted)]


class Called(Dataset[Any]):
    """A data set whose calls give ``extra`` more or fewer examples."""

    def __init__(self, extra: int = 0) -> None:
        self.extra, self.calls = extra, 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> Any:
        raise AssertionError("one example is asked for")

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        self.calls += 1
        count = len(numbers) + self.extra
        return [(torch.rand(2), torch.tensor(number)) for number in range(count)]


def test_several_examples_are_asked_for_in_one_call() -> None:
    data = Called()
    _, targets = batches_of(DataLoader(data)).batch(torch.arange(5), torch.Generator())
    assert data.calls == 1
    assert targets.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("extra", [-1, 1])
def test_a_wrong_number_of_examples_is_refused(extra: int) -> None:
    data = Subset(Called(extra), range(5))
    with pytest.raises(DataError, match="Subset of Called: a batch has targets"):
        batches_of(DataLoader(data)).batch(torch.arange(5))
