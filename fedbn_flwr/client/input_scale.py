"""One mean and std for the inputs of all clients: the server finds them from the sums of each client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedbn_flwr.errors import DataError
from fedbn_flwr.training.batches import Batches
from fedbn_flwr.training.input_scale import FeatureMoments, FeatureRanges, ScalableBatches

__all__ = ["scaled", "training_moments"]


def training_moments(data: Batches, ranges: FeatureRanges | None = None) -> FeatureMoments:
    """Return the sums of the training inputs; with ranges each value is first put into its range.

    Raises:
        DataError: the inputs are not in memory.
    """
    if not isinstance(data, ScalableBatches):
        raise DataError(f"the training data are a {type(data).__name__}; fedbn_flwr.lab.data.Subset needed")
    return data.input_moments(ranges) if ranges else data.input_moments()


def scaled(sets: Mapping[str, Batches], mean: Sequence[float], std: Sequence[float]) -> dict[str, Batches]:
    """Return the data sets by name with the mean and std of inputs that the server sends.

    Raises:
        DataError: data are not in memory, so that they cannot be scaled.
    """
    scaled_sets: dict[str, Batches] = {}
    for name, data in sets.items():
        if not isinstance(data, ScalableBatches):
            raise DataError(
                f"the server sends one mean and std for the inputs of all clients, and the {name} data are a "
                f"{type(data).__name__}; fedbn_flwr.lab.data.Subset needed"
            )
        scaled_sets[name] = data.scaled(mean, std)
    return scaled_sets
