"""The registry of data sets, and their loading in the shape a model needs."""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from fedbn_flwr.data.readers import READ_ERRORS, Reader, read_cifar, read_digits, read_idx, read_svhn, read_usps
from fedbn_flwr.data.samples import Dataset, Samples
from fedbn_flwr.errors import ConfigError, DataError, unknown_name

__all__ = ["DATASETS", "DatasetInfo", "load_dataset"]


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    """What is known of a data set before it is loaded.

    Attributes:
        name: name in the registry.
        num_classes: number of classes.
        channels: colour channels of the images as published.
        size: height and width of the images as published, in pixels.
        summary: one line.
        source: where it was published.
        loader: reads (train, test) from the data folder.
        files: what the loader looks for in the data folder; "" for an embedded data set.
        mean: mean of the training pixels per channel, pixels scaled to [0, 1].
        std: standard deviation, likewise.
    """

    name: str
    num_classes: int
    channels: int
    size: int
    summary: str
    source: str
    loader: Reader
    files: str
    mean: tuple[float, ...]
    std: tuple[float, ...]


_IDX_FILES = "{}/raw/ with train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and \
t10k-labels-idx1-ubyte, each as it is or with .gz"

_INFOS = (
    DatasetInfo(
        "digits", 10, 1, 8, "1,797 handwritten digits, 8x8 grey, embedded in scikit-learn (80 % train, 20 % test)",
        "Alpaydin & Kaynak 1998, UCI Optical Recognition of Handwritten Digits (its test part)",
        read_digits, "", (0.3055,), (0.3760,),
    ),
    DatasetInfo(
        "mnist", 10, 1, 28, "70,000 handwritten digits, 28x28 grey", "LeCun et al. 1998",
        read_idx("MNIST"), _IDX_FILES.format("MNIST"), (0.1307,), (0.3081,),
    ),
    DatasetInfo(
        "fashion-mnist", 10, 1, 28, "70,000 pictures of clothes, 28x28 grey", "Xiao et al. 2017",
        read_idx("FashionMNIST"), _IDX_FILES.format("FashionMNIST"), (0.2860,), (0.3530,),
    ),
    DatasetInfo(
        "cifar10", 10, 3, 32, "60,000 photographs of 10 kinds of things, 32x32 RGB", "Krizhevsky 2009",
        read_cifar("CIFAR10"), "cifar-10-batches-py/ with data_batch_1 to data_batch_5, test_batch and batches.meta",
        (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616),
    ),
    DatasetInfo(
        "cifar100", 100, 3, 32, "60,000 photographs of 100 kinds of things, 32x32 RGB", "Krizhevsky 2009",
        read_cifar("CIFAR100"), "cifar-100-python/ with train, test and meta",
        (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762),
    ),
    DatasetInfo(
        "svhn", 10, 3, 32, "99,289 digits of house numbers, 32x32 RGB (without the extra part)", "Netzer et al. 2011",
        read_svhn, "train_32x32.mat and test_32x32.mat", (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970),
    ),
    DatasetInfo(
        "usps", 10, 1, 16, "9,298 digits of postal codes, 16x16 grey", "Hull 1994",
        read_usps, "usps.bz2 and usps.t.bz2", (0.2539,), (0.3842,),
    ),
)  # fmt: skip

DATASETS: dict[str, DatasetInfo] = {info.name: info for info in _INFOS}

# A functools.cache alone lets two threads that come at once both load: with the lock the second one waits.
_LOADING = threading.Lock()


def load_dataset(
    name: str,
    data_dir: str | Path = "",
    channels: int | None = None,
    size: int | None = None,
    device: str | torch.device = "cpu",
) -> Dataset:
    """Return a data set in the shape a model needs, on a device.

    Memoised per process: all clients that run in one process share one copy of the images, whatever their number. That
    is safe because the result is a function of the arguments alone (no seed enters it) and nobody writes into it.

    Args:
        name: a name of ``DATASETS``.
        data_dir: the folder that holds the files, or where they are downloaded; not used by embedded data sets.
        channels: 1 or 3; None as published. Grey is repeated over 3 channels (without a copy); RGB becomes grey by
            ITU-R 601 luma, with mean and std averaged over the channels.
        size: height and width in pixels; None as published. Images are resized once, bilinear with antialiasing,
            and rounded to bytes; mean and std stay those of the published size.
        device: where the samples lie.

    Raises:
        ConfigError: the name is unknown, or channels or size cannot be had.
        DataError: data_dir is not set or not a folder, or the files are absent and cannot be downloaded.
    """
    if name not in DATASETS:
        raise unknown_name("dataset", name, DATASETS)
    info = DATASETS[name]
    channels = info.channels if channels is None else channels
    size = info.size if size is None else size
    if channels not in (1, 3) or size < 1:
        raise ConfigError(f"data set {name!r} with {channels} channels and size {size}: allowed are 1 or 3, size >= 1.")
    # Arguments are brought to one form first: the cache must not hold a second copy under another spelling.
    with _LOADING:
        return _load(name, _folder(info, data_dir), channels, size, str(torch.device(device)))


@functools.cache
def _load(name: str, folder: Path, channels: int, size: int, device: str) -> Dataset:
    info = DATASETS[name]
    try:
        train, test = info.loader(folder)
    except READ_ERRORS as error:
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise DataError(
            f"data set {name!r} could not be read from {folder} or downloaded to it: {reason}. Expected in the folder: "
            f"{info.files}. Put these files there, or set data-dir to the folder that holds them, or use "
            f"dataset='digits', which is embedded."
        ) from error
    mean, std = info.mean, info.std
    if channels != info.channels:
        mean, std = (values * 3 if channels == 3 else (sum(values) / 3,) for values in (mean, std))
    train, test = (_reshaped(part, channels, size).to(device) for part in (train, test))
    return Dataset(name, train, test, info.num_classes, mean, std)


def _folder(info: DatasetInfo, data_dir: str | Path) -> Path:
    """Return the absolute data folder, or an unused one for an embedded data set."""
    if not info.files:
        return Path()
    if not str(data_dir):
        raise DataError(
            f"data set {info.name!r} is not embedded and data-dir is not set. Set data-dir to the folder that holds "
            f"{info.files}, or to one where they may be downloaded; or use dataset='digits', which is embedded."
        )
    folder = Path(data_dir).expanduser().resolve()
    if not folder.is_dir():
        raise DataError(
            f"data set {info.name!r}: data-dir {str(folder)!r} is not an existing folder. Create it, or set data-dir "
            f"to the folder that holds {info.files}."
        )
    return folder


def _reshaped(samples: Samples, channels: int, size: int, chunk: int = 4096) -> Samples:
    """Return the samples with ``channels`` and ``size`` x ``size`` pixels, computed ``chunk`` images at a time."""
    inputs = samples.inputs
    if channels < inputs.shape[1]:
        inputs = torch.cat([_luma(part) for part in torch.split(inputs, chunk)])
    if inputs.shape[2:] != (size, size):
        inputs = torch.cat([_resized(part, size) for part in torch.split(inputs, chunk)])
    return Samples(inputs.expand(-1, channels, -1, -1), samples.targets)


def _luma(images: torch.Tensor) -> torch.Tensor:
    """Return RGB bytes as grey, (299 R + 587 G + 114 B) / 1000 rounded, in integers: exact on every machine."""
    red, green, blue = torch.split(images.to(torch.int32), 1, dim=1)
    return ((299 * red + 587 * green + 114 * blue + 500) // 1000).to(torch.uint8)


def _resized(images: torch.Tensor, size: int) -> torch.Tensor:
    """Return uint8 images at the new size: in float32, as torch's uint8 kernels round differently between CPUs."""
    resized = F.interpolate(images.float(), (size, size), mode="bilinear", align_corners=False, antialias=True)
    return resized.round_().clamp_(0, 255).to(torch.uint8)
