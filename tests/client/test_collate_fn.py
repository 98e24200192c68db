"""The output of a ``collate_fn`` is a batch.

Inputs in parts are in the table of test_user_loops.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler

from fedbn_flwr.errors import DataError
from fedbn_flwr.training import batches_of


class Sequences(Dataset):
    """Sequences of different lengths."""

    def __init__(self, number: int) -> None:
        draw = torch.Generator().manual_seed(number)
        lengths = torch.randint(2, 7, (number,), generator=draw)
        self.x = [
            torch.randn(int(length), 3, generator=draw).double() for length in lengths
        ]
        self.y = torch.randint(2, (number,), generator=draw)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return self.x[number], self.y[number]


def padded(
    examples: list[tuple[Tensor, Tensor]],
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return ((tokens, lengths), labels)."""
    lengths = torch.tensor([len(x) for x, _ in examples])
    longest = int(lengths.max())
    return (
        torch.stack([F.pad(x, (0, 0, 0, longest - len(x))) for x, _ in examples]),
        lengths,
    ), torch.stack([y for _, y in examples])


def test_a_batch_is_that_of_the_collate_fn_at_the_positions() -> None:
    data = Sequences(6)
    chosen = batches_of(
        DataLoader(data, 2, sampler=SubsetRandomSampler([5, 1, 3]), collate_fn=padded)
    )
    (tokens, lengths), labels = chosen.batch(torch.tensor([2, 0]))
    (wanted, of_each), classes = padded([data[5], data[1]])
    assert torch.equal(tokens, wanted)
    assert torch.equal(lengths, of_each)
    assert torch.equal(labels, classes)


def test_a_collate_fn_that_leaves_examples_out_is_refused() -> None:
    """Otherwise, the weight and the test size would count the omitted examples."""

    def without_short(examples):
        return padded([pair for pair in examples if len(pair[0]) > 3])

    with pytest.raises(DataError, match=r"has targets of shape \(\d,\) for 6 examples"):
        batches_of(DataLoader(Sequences(6), collate_fn=without_short)).batch(
            torch.arange(6)
        )
