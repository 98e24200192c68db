"""Own data in any form: their description, their examples and their digest."""

from __future__ import annotations

import functools
import logging
from pathlib import Path

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.data.datasets import IMAGENET_MEAN, IMAGENET_STD, DatasetInfo
from fedbn_flwr.lab.data.forms.folder import OwnFiles
from fedbn_flwr.lab.data.forms.function import OwnSites
from fedbn_flwr.lab.data.forms.request import FUNCTION, OwnData, chosen_task
from fedbn_flwr.lab.data.readers import Loaded
from fedbn_flwr.lab.data.samples import Shape
from fedbn_flwr.training.tasks import TASKS

logger = logging.getLogger("flwr")


def own_info(request: OwnData) -> DatasetInfo:
    """Return the description of own data, read from the data if they are here.

    Of image files, only names and headers are read.

    Raises:
        ConfigError: keys do not fit the data.
        DataError: the data cannot be used.
    """
    return own_data(request).info if request.path else _info_of_nodes(request)


def own_data(request: OwnData) -> OwnFiles | OwnSites:
    """Return own data that this process has, read again only if the files have changed.

    Raises:
        ConfigError: keys do not fit the data.
        DataError: the data cannot be used.
    """
    # The stamp has times and sizes of a file, or of a folder and its direct entries. It
    # is empty if a file is absent, because the reader then gives a better message.
    stamp, path = list[int](), Path(request.path)
    try:
        for each in [path, *(sorted(path.iterdir()) if path.is_dir() else ())]:
            stamp += [each.stat().st_mtime_ns, each.stat().st_size]
    except OSError:
        stamp.clear()
    return _opened(request, tuple(stamp))


@functools.lru_cache(maxsize=8)
def _opened(request: OwnData, stamp: tuple[int, ...]) -> OwnFiles | OwnSites:
    del stamp
    return OwnSites(request) if request.kind == FUNCTION else OwnFiles(request)


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
    task = chosen_task(request, tuple(TASKS))
    return DatasetInfo(
        request.name,
        num_classes=task.outputs(request.num_classes),
        channels=3,
        size=request.image_size,
        loader=_nothing,
        files="its own data on each node, named by data-path in its node config",
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        task=task,
    )


def _nothing(folder: Path, shape: Shape) -> Loaded:
    """Raise ValueError, because this process has no data.

    Each node loads its own data.
    """
    raise ValueError("the data are on the nodes only")
