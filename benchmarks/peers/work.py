"""What every contender of ``simulation.py`` does: settings, data, models, the clock.
Torch and NumPy only.

A contender is a module of this folder with a function ``main(job, clock) -> accuracy``.
It runs as ``python -m peers.NAME JOB`` in a process and, where it is another package,
with an interpreter of its own. It calls ``clock.lap()`` at the end of each round; the
first round is not counted.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

MARK = "FEDBN_BENCHMARK_JOB"
"""Environment variable of a contender's processes; children have it, too, and are found
by it.
"""


@dataclass(frozen=True)
class Setting:
    """One piece of work. Plain SGD without momentum; float32; one torch thread in each
    process.

    Attributes:
        title: the work in words.
        dataset: ``cifar10`` or ``mnist``.
        model: a name of ``make_model``.
        clients: number of clients; client k has the images k * examples to (k + 1) *
            examples.
        examples: training images of a client.
        batch: images in a step.
        a_round: clients in a round.
        learning_rate: of SGD.
        local_steps: steps of a client in a round, each on a random batch; 0: one pass
            over its images in a new order.
        personal: FedBN: the BN entries of each client stay with it; else FedAvg.
        evaluate: what is timed is one evaluation of each client's model on all test
            images, not the training.
        times: how many times as many rounds are timed; more where a round takes some
            milliseconds, as the first rounds of a process are slower.
        source: "tensors", "hugging-face" or "folder": the clients have a ``DataLoader``
            of such a data set; "": arrays in memory.
        loader_workers: worker processes of this loader.
    """

    title: str
    dataset: str
    model: str
    clients: int
    examples: int
    batch: int
    a_round: int
    learning_rate: float = 0.1
    local_steps: int = 0
    personal: bool = False
    evaluate: bool = False
    times: int = 1
    source: str = ""
    loader_workers: int = 0


_FOLDERS = Setting(
    "256 x 256 JPEG files in folders, crops and flips, CNN with dropout, 2 clients x 96"
    " images, batch 16, one epoch",
    dataset="cifar10",
    model="cnn",
    clients=2,
    examples=96,
    batch=16,
    a_round=2,
    source="folder",
)

_FEDTAN = Setting(
    "ResNet-20, batch 64, 5 clients x 1 step",
    dataset="cifar10",
    model="resnet20",
    clients=5,
    examples=640,
    batch=64,
    a_round=5,
    local_steps=1,
    times=2,
)

SETTINGS = {
    "cifar10": Setting(
        "CIFAR-10, 1000 clients x 50 images, batch 10, one epoch, 50 clients a round,"
        " CNN with dropout",
        dataset="cifar10",
        model="cnn",
        clients=1000,
        examples=50,
        batch=10,
        a_round=50,
    ),
    "fedbn": Setting(
        "FedBN, MNIST, MLP 784-100(BN)-10, 20 clients x 608 images, batch 32, one"
        " epoch",
        dataset="mnist",
        model="mlp",
        clients=20,
        examples=608,
        batch=32,
        a_round=20,
        personal=True,
        times=5,
    ),
    "mlp-128": Setting(
        "MLP 784-100(BN)-10, batch 128, 5 clients x 5 steps",
        dataset="mnist",
        model="mlp",
        clients=5,
        examples=2432,
        batch=128,
        a_round=5,
        local_steps=5,
        times=20,
    ),
    "resnet20-20": Setting(
        "ResNet-20, batch 20, 5 clients x 5 steps",
        dataset="cifar10",
        model="resnet20",
        clients=5,
        examples=2000,
        batch=20,
        a_round=5,
        local_steps=5,
    ),
    "resnet20-128": Setting(
        "ResNet-20, batch 128, 5 clients x 5 steps",
        dataset="cifar10",
        model="resnet20",
        clients=5,
        examples=2000,
        batch=128,
        a_round=5,
        local_steps=5,
    ),
    "evaluation-mlp": Setting(
        "Evaluation of 5 clients' models on 10,000 images, MLP 784-100(BN)-10",
        dataset="mnist",
        model="mlp",
        clients=5,
        examples=640,
        batch=32,
        a_round=5,
        local_steps=1,
        personal=True,
        evaluate=True,
        times=5,
    ),
    "evaluation-lenet": Setting(
        "Evaluation of 5 clients' models on 10,000 images, LeNet with BN",
        dataset="mnist",
        model="lenet",
        clients=5,
        examples=640,
        batch=32,
        a_round=5,
        local_steps=1,
        personal=True,
        evaluate=True,
        times=5,
    ),
    "tensors": Setting(
        "TensorDataset, FedBN, MLP 784-100(BN)-10, 20 clients x 608 images, batch 32,"
        " one epoch",
        dataset="mnist",
        model="mlp",
        clients=20,
        examples=608,
        batch=32,
        a_round=20,
        personal=True,
        times=5,
        source="tensors",
    ),
    "hugging-face": Setting(
        "Hugging Face data set with a transform, MLP 784-100(BN)-10, 5 clients x 200"
        " images, batch 32, one epoch",
        dataset="mnist",
        model="mlp",
        clients=5,
        examples=200,
        batch=32,
        a_round=5,
        times=2,
        source="hugging-face",
    ),
    "folder-0": _FOLDERS,
    "folder-2": replace(
        _FOLDERS, title=f"{_FOLDERS.title}, 2 loader workers", loader_workers=2
    ),
    "fedtan": _FEDTAN,
    "fedtan-5": replace(
        _FEDTAN, title="ResNet-20, batch 64, 5 clients x 5 steps", local_steps=5
    ),
}

TEST_BATCH = 256
"""Images in a batch of an evaluation."""


@dataclass(frozen=True)
class Job:
    """What a contender gets, as JSON.

    Attributes:
        setting: a name of ``SETTINGS``.
        data: folder written by ``simulation.prepare``.
        out: file for the result, JSON.
        rounds: rounds to time, after one that is not counted.
        workers: processes that train; 0 = the contender's own process, for ours alone
            other than 1.
        variant: a name that the contender knows, such as ``channels-last``.
        checkout: folder of a peer that is not a package.
    """

    setting: str
    data: str
    out: str
    rounds: int
    workers: int = 1
    variant: str = ""
    checkout: str = ""

    @property
    def work(self) -> Setting:
        """The setting."""
        return SETTINGS[self.setting]


@dataclass(frozen=True, eq=False)
class Data:
    """Training and test images of a setting as float32, normalised, and their classes;
    files mapped into memory.
    """

    inputs: Tensor
    targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor

    def client(self, index: int, examples: int) -> tuple[Tensor, Tensor]:
        """Return a client's images and classes."""
        own = slice(index * examples, (index + 1) * examples)
        return self.inputs[own], self.targets[own]


@cache
def load_data(folder: str, dataset: str) -> Data:
    """Return the data of a setting; each process loads it once."""
    names = ("train-inputs", "train-targets", "test-inputs", "test-targets")
    return Data(
        *(
            torch.from_numpy(
                np.load(Path(folder) / dataset / f"{name}.npy", mmap_mode="c")
            )
            for name in names
        )
    )


class CNN(nn.Sequential):
    """The CNN of pfl-research's CIFAR-10 benchmark: two convolutions without padding,
    pooling, dropout, two layers.
    """

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
            nn.Flatten(),
            nn.Linear(64 * 14 * 14, 128),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(128, 10),
        )
        for layer in self:
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(layer.weight)


class MLP(nn.Module):
    """784-100-10 with one BatchNorm layer.

    It has ``bn`` in its name and two halves, as some peers find their parts by them.
    """

    def __init__(self) -> None:
        super().__init__()
        first = (
            ("flat", nn.Flatten()),
            ("fc1", nn.Linear(784, 100)),
            ("bn1", nn.BatchNorm1d(100)),
            ("act", nn.ReLU()),
        )
        self.base = nn.Sequential(OrderedDict(first))
        self.classifier = nn.Linear(100, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        return self.classifier(self.base(images))  # type: ignore[no-any-return]


def make_model(name: str) -> nn.Module:
    """Return a model with the same random weights each time; the registry's models need
    this package.
    """
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        if name == "cnn":
            return CNN()
        if name == "mlp":
            return MLP()
    from fedbn_flwr.lab.models import build_model

    channels, size = (3, 32) if name == "resnet20" else (1, 28)
    return build_model(name, num_classes=10, channels=channels, size=size)


def local_names(model: nn.Module) -> set[str]:
    """Return the names of the entries of BatchNorm layers."""
    layers = [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]
    return {name for name in model.state_dict() if name.rpartition(".")[0] in layers}


@torch.no_grad()
def count_correct(model: nn.Module, inputs: Tensor, targets: Tensor) -> int:
    """Return how many images the model classifies correctly; a plain loop in eval mode."""
    model.eval()
    correct = 0
    for images, classes in zip(
        torch.split(inputs, TEST_BATCH), torch.split(targets, TEST_BATCH), strict=True
    ):
        correct += int((model(images).argmax(1) == classes).sum())
    return correct


def accuracy(model: nn.Module, data: Data, images: int = 2000) -> float:
    """Return the accuracy on the first test images."""
    return (
        count_correct(model, data.test_inputs[:images], data.test_targets[:images])
        / images
    )


class Clock:
    """Notes the end of each round; at the end of the last one, CPU seconds and memory
    of all processes of the job.
    """

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.seconds: list[float] = []
        self.cpu_seconds: float | None = None
        self.memory: float | None = None
        self._after = -1
        self._began = 0.0
        self._cpu_before = 0.0

    def begin(self) -> None:
        """Begin a round here, where something stands between two rounds that is not to
        be timed.
        """
        self._began = time.perf_counter()

    def lap(self) -> None:
        """End a round; the next one begins."""
        now = time.perf_counter()
        self._after += 1
        if self._after == 0:
            self._cpu_before = cpu_seconds()
        else:
            self.seconds.append(now - self._began)
        if self._after == self.rounds:
            self.cpu_seconds = (cpu_seconds() - self._cpu_before) / self.rounds
            self.memory = memory()
        self._began = time.perf_counter()


def job_processes() -> list[Path]:
    """Return the folders in /proc of this process, its children and theirs; none where
    there is no /proc.
    """
    mark = f"{MARK}={os.environ.get(MARK, '')}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(folder)
        except OSError:  # another user's process, or it has ended
            continue
    return found


def cpu_seconds() -> float:
    """Return the CPU seconds of all processes of the job so far."""
    ticks = 0
    for folder in job_processes():
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        # the process's time in user and system mode, and the same of its ended children
        ticks += sum(int(field) for field in fields[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def memory() -> float:
    """Return the MB (10^6 bytes) of all processes of the job; pages they share count
    once.

    Each counts with its proportional set size and what its largest resident set was
    above the one of now.
    """
    kilobytes = 0
    for folder in job_processes():
        try:
            status = _kilobytes(folder / "status")
            kilobytes += (
                _kilobytes(folder / "smaps_rollup")["Pss"]
                + status["VmHWM"]
                - status["VmRSS"]
            )
        except (OSError, KeyError):
            continue
    return kilobytes * 1024 / 1e6


def _kilobytes(path: Path) -> dict[str, int]:
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in lines if words[-1] == "kB"}


def contend(main: Callable[[Job, Clock], float], package: str = "torch") -> None:
    """Do the job of the command line and write its result.

    Args:
        main: does it and returns the accuracy.
        package: the distribution whose version is reported.
    """
    job = Job(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    clock = Clock(job.rounds)
    reached = main(job, clock)
    found: dict[str, Any] = {
        "seconds": clock.seconds,
        "cpu_seconds": None if job.work.evaluate else clock.cpu_seconds,
        "memory": clock.memory,
        "accuracy": reached,
        "version": f"{package} {version(package)}" if package else "",
        "job": asdict(job),
    }
    if os.environ.get("RANK", "0") == "0":
        Path(job.out).write_text(json.dumps(found))
