"""Load a data set in the shape that a model needs."""

from __future__ import annotations

import functools
import threading
from pathlib import Path

import torch

from fedbn_flwr.errors import ConfigError, DataError, FedBNError, unknown_name
from fedbn_flwr.lab.data.datasets import DATASETS, DatasetInfo
from fedbn_flwr.lab.data.forms.request import registered
from fedbn_flwr.lab.data.readers import READ_ERRORS
from fedbn_flwr.lab.data.samples import Dataset, Shape, fitted, per_channel

# A cache without a lock lets two threads load the same data set twice. With this lock,
# the second thread waits for the first.
_LOADING = threading.Lock()


def load_dataset(
    name: str | DatasetInfo,
    data_dir: str | Path = "",
    channels: int | None = None,
    size: int | None = None,
    device: str | torch.device = "cpu",
) -> Dataset:
    """Return a data set in the shape that a model needs, on a device.

    The result is cached: all clients in one process share one copy of the images. This
    is safe because the result depends only on the arguments (there is no seed) and no
    code writes into it.

    Args:
        name: a name of ``DATASETS`` or ``module:NAME``, or the description of own data.
        data_dir: the folder that has the files or gets the downloads; embedded data
            sets do not use it. Folders of image files are decoded once per process and
            never downloaded.
        channels: 1 or 3; None keeps the published channels. Grey is repeated over 3
            channels (without a copy); RGB becomes grey by ITU-R 601 luma, and its mean
            and std are averaged over the channels.
        size: height and width in pixels; None keeps the published size. Images are
            resized once, bilinear with antialiasing, and rounded to bytes; mean and std
            belong to the published size.
        device: device of the samples.

    Raises:
        ConfigError: the name is unknown, or channels or size are not possible.
        DataError: data_dir is not set or not a folder, or the files are too large, or
            absent and not downloadable.
    """
    info = registered(name) if isinstance(name, str) else name
    if info is None:
        raise unknown_name("dataset", str(name), DATASETS)
    channels = info.channels if channels is None else channels
    size = info.size if size is None else size
    if not info.input_shape and channels not in (1, 3):
        raise ConfigError(
            f"data set {info.name!r} with {channels} channels: use 1 or 3 channels."
        )
    # Bring the arguments into one form first, because the cache would otherwise load
    # the data again for another spelling of the same arguments.
    folder, device = _folder(info, data_dir), str(torch.device(device))
    shape = Shape(channels, size, size)
    with _LOADING:
        return _load(info, folder, shape, device)


@functools.lru_cache(maxsize=8)
def _load(info: DatasetInfo, folder: Path, shape: Shape, device: str) -> Dataset:
    # The reader's errors name the fault but not the files that the folder must have, so
    # add these files to the message.
    try:
        loaded = info.loader(folder, shape)
    except READ_ERRORS as error:
        # Errors about own data need no addition: these data are not in the data folder,
        # so there are no expected files to name.
        if isinstance(error, FedBNError) and not info.files:
            raise
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise DataError(
            f"data set {info.name!r} could not be read from {folder}: {reason}."
            f" Expected in the folder: {info.files}. Put these files there, or set"
            " data-dir to the folder with these files, or use the embedded"
            " dataset='digits'."
        ) from error
    # A reader may return images in their published size and channels. Convert them
    # here, once in a process.
    return Dataset(
        info.name,
        fitted(loaded.train, shape).to(device),
        fitted(loaded.test, shape).to(device),
        info.num_classes,
        mean=per_channel(info.mean, shape.channels),
        std=per_channel(info.std, shape.channels),
        group_names=loaded.group_names,
        class_names=info.class_names,
    )


def _folder(info: DatasetInfo, data_dir: str | Path) -> Path:
    """Return the absolute data folder, or an empty path for data without files."""
    if not info.files:
        return Path()
    folder = Path(data_dir).expanduser().resolve()
    if not str(data_dir) or not folder.is_dir():
        raise DataError(
            f"data set {info.name!r} is not embedded, and data-dir={str(data_dir)!r} is"
            " not an existing folder. Set data-dir to the folder with"
            f" {info.files}, or to an empty folder into which torchvision downloads them;"
            " or use the embedded dataset='digits'."
        )
    return folder
