"""Own data in any form: their description, their examples and their digest."""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import statistics
from pathlib import Path

import numpy as np
import torch

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.data.datasets import IMAGENET_MEAN, IMAGENET_STD, DatasetInfo
from fedbn_flwr.lab.data.forms.class_folders import read_folder
from fedbn_flwr.lab.data.forms.function import OwnSites
from fedbn_flwr.lab.data.forms.image_files import open_images
from fedbn_flwr.lab.data.forms.request import FUNCTION, OwnData, chosen_task
from fedbn_flwr.lab.data.readers import Loaded
from fedbn_flwr.lab.data.samples import Shape
from fedbn_flwr.lab.data.splits import Indices
from fedbn_flwr.lab.data.validation import split_off
from fedbn_flwr.messages.site_names import fault_of_list
from fedbn_flwr.training.tasks import TASKS

logger = logging.getLogger("flwr")

# a fixed seed, so that all runs have the same test examples
_TEST_SEED = 0
# height in pixels of larger images, unless image-size sets another height
_LARGEST = 224


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


class OwnFiles:
    """Own image files, divided into training and test examples."""

    def __init__(self, request: OwnData) -> None:
        """Read the records.

        Raises:
            ConfigError: keys do not fit the data.
            DataError: the data cannot be used.
        """
        self._request, self._records = request, read_folder(request)
        fault = fault_of_list(self._records.client_names)
        if fault:
            raise request.problem(f"a client has no usable name: {fault}")

    @property
    def divided(self) -> bool:
        """Whether the data themselves determine the test examples."""
        return self._records.tests is not None

    @functools.cached_property
    def info(self) -> DatasetInfo:
        """The description of the data."""
        # Use the median height, so that a single thumbnail among the images does not
        # determine the height.
        records = self._records
        height = statistics.median_low([height for _, height in records.sizes])
        # Use ImageNet's mean and std, because every node must scale pixels alike, but
        # each node has other data.
        return DatasetInfo(
            self._request.name,
            num_classes=records.num_classes,
            channels=3,
            size=min(height, _LARGEST),
            loader=self.load,
            mean=IMAGENET_MEAN,
            std=IMAGENET_STD,
            grouped=records.clients is not None,
            task=records.task,
            class_names=records.class_names,
            client_names=records.client_names,
        )

    @functools.cached_property
    def _parts(self) -> tuple[Indices, Indices]:
        """The numbers of the training and of the test examples."""
        request, records = self._request, self._records
        everything, tests = np.arange(len(records), dtype=np.int64), records.tests
        # Use the data's own split into training and test, if there is one.
        if tests is not None:
            return everything[~tests], everything[tests]
        if request.test_share == 1:
            return everything[:0], everything
        # Otherwise draw a share of the examples of each cell. A cell is a class of a
        # client.
        cells = records.targets.numpy()
        if records.clients is not None:
            cells = cells * len(records.client_names) + records.clients
        return split_off(everything, cells, request.test_share, _TEST_SEED)

    def load(self, folder: Path, shape: Shape) -> Loaded:
        """Return the training and the test examples, see ``DatasetInfo.loader``."""
        # ``folder`` is the folder of registered data sets. Own data have their own path.
        del folder
        records = self._records
        if not self._request.image_size and len(set(records.sizes)) > 1:
            self._warn_of_sizes(shape)
        files = [*zip(records.paths, records.targets.tolist(), strict=True)]
        train, test = ([files[at] for at in part] for part in self._parts)
        loaded = open_images(train, test, shape)
        if records.clients is None:
            return loaded
        of_train, of_test = (
            torch.from_numpy(records.clients[part]) for part in self._parts
        )
        return Loaded(
            loaded.train.regrouped(of_train),
            loaded.test.regrouped(of_test),
            records.client_names,
        )

    def _warn_of_sizes(self, shape: Shape) -> None:
        """Warn that images have several sizes, because all are resized to one size."""
        by_area = sorted(self._records.sizes, key=math.prod)
        logger.warning(
            "dataset=%r: its images have several sizes, from %dx%d to %dx%d (width x"
            " height). Each becomes %dx%d, by their median height and the limits of"
            " the model. Set image-size for another height.",
            self._request.name,
            *by_area[0],
            *by_area[-1],
            shape.width,
            shape.height,
        )

    @property
    def tests(self) -> dict[str, list[int | str]]:
        """The file of each test image, and its client, if any."""
        records, (_, tests) = self._records, self._parts
        columns: dict[str, list[int | str]] = {
            "file": [self._name_of(records.paths[at]) for at in tests]
        }
        if records.clients is not None:
            names = records.client_names
            columns["client"] = [names[at] for at in records.clients[tests]]
        return columns

    def _name_of(self, path: Path) -> str:
        return path.relative_to(self._request.path).as_posix()

    @functools.cached_property
    def sha256(self) -> str:
        """The SHA-256 of the data, to notice changes.

        It depends on the paths and sizes of the files, their order, their division
        into training and test examples, and the clients.
        """
        # Do not change the order of the entries, because runs save this digest in
        # data.json: unchanged data would look changed.
        records, digest = self._records, hashlib.sha256()
        lines = []
        for path in records.paths:
            lines.append(f"{self._name_of(path)} {path.stat().st_size}")
        digest.update("\n".join(lines).encode())
        digest.update(records.targets.numpy().tobytes())
        for rows in self._parts:
            digest.update(rows.tobytes())
        if records.clients is not None:
            digest.update(records.clients.tobytes())
        digest.update("\n".join(records.client_names).encode())
        return digest.hexdigest()


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
