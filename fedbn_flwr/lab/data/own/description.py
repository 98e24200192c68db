"""The facts that a model needs about own data, from the data or the config."""

from __future__ import annotations

import functools
import statistics
from pathlib import Path

import torch
from torch import Tensor

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.data.datasets import IMAGENET_MEAN, IMAGENET_STD, DatasetInfo
from fedbn_flwr.lab.data.own.function import function_info
from fedbn_flwr.lab.data.own.own_examples import load, read_own_examples, stamp_of
from fedbn_flwr.lab.data.own.request import FUNCTION, OwnData, chosen_task
from fedbn_flwr.lab.data.readers import Loaded
from fedbn_flwr.lab.data.samples import Shape, per_channel
from fedbn_flwr.training.tasks import TASKS

# height in pixels of larger images, unless image-size sets another height
_LARGEST = 224


def own_info(request: OwnData) -> DatasetInfo:
    """Return the description of own data, read from the data if they are here.

    Of image files, only names and headers are read.

    Raises:
        ConfigError: keys do not fit the data.
        DataError: the data cannot be used.
    """
    if not request.path:
        return _info_of_nodes(request)
    if request.kind == FUNCTION:
        return function_info(request)
    return _info(request, stamp_of(request))


@functools.lru_cache(maxsize=8)
def _info(request: OwnData, stamp: tuple[int, ...]) -> DatasetInfo:
    # Only images have channels and a height that a model can change. The shape of other
    # inputs stays unchanged.
    records = read_own_examples(request, stamp)
    inputs = records.inputs
    shape: tuple[int, ...] = ()
    channels, height = 3, 0
    if not isinstance(inputs, Tensor):
        # Use the median, so that a single thumbnail among the images does not determine
        # the height.
        height = statistics.median_low([height for _, height in records.sizes])
    elif inputs.dtype == torch.uint8:
        channels, height = inputs.shape[1:3]
    else:
        shape, channels = tuple(inputs.shape[1:]), 0
    # Use ImageNet's mean and std, because every node must scale pixels alike, but each
    # node has other data.
    return DatasetInfo(
        request.name,
        num_classes=records.num_classes,
        channels=channels,
        size=min(height, _LARGEST),
        summary=f"{len(records):,} examples of own data",
        source="own data",
        loader=functools.partial(load, request, stamp),
        files="",
        mean=per_channel(IMAGENET_MEAN, channels),
        std=per_channel(IMAGENET_STD, channels),
        grouped=records.clients is not None,
        task=records.task,
        input_shape=shape,
        class_names=records.class_names,
        client_names=records.client_names,
    )


@functools.lru_cache(maxsize=8)
def _info_of_nodes(request: OwnData) -> DatasetInfo:
    """Return the description of images that only the nodes have, from the config."""
    needed = ["image-size", "task"]
    if request.task not in ("binary", "regression"):
        needed.append("num-classes")
    missing = [key for key in needed if not getattr(request, key.replace("-", "_"))]
    if missing:
        raise ConfigError(
            f"dataset={request.name!r} has no path, so only the nodes have the data."
            f" Set the facts that the model needs: {', '.join(missing)}. Rows of"
            " a table come from a function, dataset=module:function."
        )
    task = chosen_task(request, "", tuple(TASKS))
    return DatasetInfo(
        request.name,
        num_classes=task.outputs(request.num_classes),
        channels=3,
        size=request.image_size,
        summary="own data of the nodes",
        source="own data",
        loader=_nothing,
        files="its own data on each node, named by data-path in its node config",
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        task=task,
    )


def _nothing(folder: Path, shape: Shape) -> Loaded:
    """Raise ValueError, because this process has no data.

    Each node loads its own data by ``load_local_dataset``.
    """
    raise ValueError("the data are on the nodes only")
