"""The inputs of a client's data sets: examples of them, their scale and their sums."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from fedbn_flwr.data import FeatureMoments, Subset, moments_of_inputs
from fedbn_flwr.errors import DataError
from fedbn_flwr.training.batches import Batches

__all__ = ["input_moments", "scaled", "two_inputs"]


def two_inputs(sets: Iterable[Batches]) -> torch.Tensor:
    """Return the inputs of two examples of the first set that has any."""
    data = next(data for data in sets if len(data))
    # With a generator: without one a data set with random transforms is warned of.
    return data.batch(torch.tensor([0, min(1, len(data) - 1)]), torch.Generator())[0]


def scaled(sets: Mapping[str, Batches], mean: Sequence[float], std: Sequence[float]) -> dict[str, Batches]:
    """Return the data sets by name with the mean and std of inputs that the server sends.

    Raises:
        DataError: data are not in memory, so that they cannot be scaled.
    """
    found: dict[str, Batches] = {}
    for name, data in sets.items():
        if not isinstance(data, Subset):
            raise DataError(
                f"the server sends one mean and std for the inputs of all clients, and the {name} data are a "
                f"{type(data).__name__}; fedbn_flwr.data.Subset needed"
            )
        found[name] = data.scaled(mean, std)
    return found


def input_moments(data: Batches) -> FeatureMoments:
    """Return the sums of the training inputs.

    Raises:
        DataError: the inputs are not in memory.
    """
    if not isinstance(data, Subset):
        raise DataError(f"the training data are a {type(data).__name__}; fedbn_flwr.data.Subset needed")
    return moments_of_inputs(data.samples, data.indices)
