"""Inputs of several parts keep their structure and container classes."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch.utils._pytree import tree_structure

from fedbn_flwr.training.batches import map_inputs

X = torch.zeros(2)


class Pair(NamedTuple):
    image: torch.Tensor
    length: torch.Tensor


@pytest.mark.parametrize(
    "inputs", [[X, X], (X, [X]), Pair(X, X), {"a": [X], "b": (X,)}, [[], "text", 3]]
)
def test_inputs_keep_their_structure(inputs) -> None:
    found = map_inputs(lambda x: x + 1, inputs)
    assert tree_structure(found) == tree_structure(inputs)
