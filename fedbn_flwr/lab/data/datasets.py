"""The registry of data sets."""

from __future__ import annotations

from dataclasses import dataclass

from fedbn_flwr.lab.data.digits_domains import read_digits_domains
from fedbn_flwr.lab.data.readers import (
    Reader,
    read_digits,
    read_idx,
    read_torchvision,
)
from fedbn_flwr.training.tasks import CLASSIFICATION, Task


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    """The description of a data set, known before it is loaded.

    Attributes:
        name: name in the registry.
        num_classes: number of classes.
        loader: function that reads (train, test) from the data folder.
        summary: one line; "" for own data.
        source: the publication; "" for own data.
        channels: colour channels of the images as published; 0 if the examples are not
            images.
        size: height of the published images in pixels; if their heights differ, the
            usual height.
        files: the files that the loader needs in the data folder; "" for an embedded
            data set.
        mean: mean of the training pixels per channel, pixels scaled to [0, 1]. If this
            mean depends on the files or the size, the field has the value that the
            papers' authors use (ImageNet's mean for DomainNet and ImageNet).
        std: standard deviation, in the same way.
        grouped: the samples have groups (domains), for the splits that need
            them.
        task: the learning task.
        input_shape: shape of an example that is not an image, such as (features,); ()
            for images.
        class_names: names of the classes; with (), the classes are numbers.
        client_names: names of the clients that own data name, or ().
    """

    name: str
    num_classes: int
    loader: Reader
    summary: str = ""
    source: str = ""
    channels: int = 0
    size: int = 0
    files: str = ""
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    grouped: bool = False
    task: Task = CLASSIFICATION

    input_shape: tuple[int, ...] = ()
    class_names: tuple[str, ...] = ()
    client_names: tuple[str, ...] = ()


# The statistics of ImageNet's pixels; many papers use them for other photographs.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_IDX_FILES = (
    "/raw/ with train-images-idx3-ubyte, train-labels-idx1-ubyte,"
    " t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte, each unpacked or with .gz"
)

# The docs list the data sets in this order, from small to large.
_INFOS = (
    DatasetInfo(
        "digits",
        num_classes=10,
        channels=1,
        size=8,
        summary=(
            "1,797 handwritten digits, 8x8 grey, embedded in scikit-learn (80 % train,"
            " 20 % test)"
        ),
        source=(
            "Alpaydin & Kaynak 1998, UCI Optical Recognition of Handwritten Digits (its"
            " test part)"
        ),
        loader=read_digits,
        files="",
        mean=(0.3055,),
        std=(0.3760,),
    ),
    DatasetInfo(
        "mnist",
        num_classes=10,
        channels=1,
        size=28,
        summary="70,000 handwritten digits, 28x28 grey",
        source="LeCun et al. 1998",
        loader=read_idx("MNIST"),
        files="MNIST" + _IDX_FILES,
        mean=(0.1307,),
        std=(0.3081,),
    ),
    DatasetInfo(
        "fashion-mnist",
        num_classes=10,
        channels=1,
        size=28,
        summary="70,000 pictures of clothes, 28x28 grey",
        source="Xiao et al. 2017",
        loader=read_idx("FashionMNIST"),
        files="FashionMNIST" + _IDX_FILES,
        mean=(0.2860,),
        std=(0.3530,),
    ),
    DatasetInfo(
        "cifar10",
        num_classes=10,
        channels=3,
        size=32,
        summary="60,000 photographs of 10 kinds of things, 32x32 RGB",
        source="Krizhevsky 2009",
        loader=read_torchvision("CIFAR10"),
        files=(
            "cifar-10-batches-py/ with data_batch_1 to data_batch_5, test_batch and"
            " batches.meta"
        ),
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
    ),
    DatasetInfo(
        "cifar100",
        num_classes=100,
        channels=3,
        size=32,
        summary="60,000 photographs of 100 kinds of things, 32x32 RGB",
        source="Krizhevsky 2009",
        loader=read_torchvision("CIFAR100"),
        files="cifar-100-python/ with train, test and meta",
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
    ),
    DatasetInfo(
        "svhn",
        num_classes=10,
        channels=3,
        size=32,
        summary="99,289 digits of house numbers, 32x32 RGB (without the extra part)",
        source="Netzer et al. 2011",
        loader=read_torchvision("SVHN"),
        files="train_32x32.mat and test_32x32.mat",
        mean=(0.4377, 0.4438, 0.4728),
        std=(0.1980, 0.2010, 0.1970),
    ),
    DatasetInfo(
        "usps",
        num_classes=10,
        channels=1,
        size=16,
        summary="9,298 digits of postal codes, 16x16 grey",
        source="Hull 1994",
        loader=read_torchvision("USPS"),
        files="usps.bz2 and usps.t.bz2",
        mean=(0.2539,),
        std=(0.3842,),
    ),
    DatasetInfo(
        "digits-domains",
        num_classes=10,
        channels=3,
        size=8,
        summary=(
            "digits in 5 domains: inverted, blurred, noisy, coloured, rotated; embedded"
        ),
        source="made from scikit-learn's digits by this project",
        loader=read_digits_domains,
        files="",
        mean=(0.4064, 0.4076, 0.4057),
        std=(0.3549, 0.3545, 0.3552),
        grouped=True,
    ),
)

DATASETS: dict[str, DatasetInfo] = {info.name: info for info in _INFOS}
