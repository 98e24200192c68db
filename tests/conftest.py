"""Fixtures of all tests: toy data, tiny models in float64, and runs of a strategy over
clients in this process.
"""

from __future__ import annotations

import atexit
import copy
import dataclasses
import functools
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Before Flower is imported anywhere: no telemetry, no look at the network, no file in
# the user's home.
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"
# Convolutions of a GPU in float32, as on the CPU, also in workers: torch lets them use
# the shorter TF32.
os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
if "FLWR_HOME" not in os.environ:
    os.environ["FLWR_HOME"] = tempfile.mkdtemp(prefix="flwr-home-")
    atexit.register(shutil.rmtree, os.environ["FLWR_HOME"], ignore_errors=True)

import numpy as np
import pytest
import torch
from flwr.app import Context
from flwr.clientapp import ClientApp
from PIL import Image
from torch import nn
from torchvision.models.shufflenetv2 import ShuffleNetV2

from fedbn_flwr.batchnorm.averaging import Array
from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.client import TorchClient, client_app
from fedbn_flwr.compat.flower import identify_process
from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.lab.output import curves
from fedbn_flwr.norms import replace_norm
from fedbn_flwr.strategies import Strategy
from fedbn_flwr.training import CLASSIFICATION, LearningRate, LocalTraining, Task
from tests.support import federation, pictures, preloaded
from tests.support.fake_gpu import fake_gpu
from tests.support.federation import LegacyOutcome, Outcome
from tests.support.points import Points


@pytest.hookimpl(tryfirst=True)  # before xdist looks for groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that need a GPU where there is none; those whose commands start at
    once share a process; slow ones may take an hour.
    """
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(3600))
        if "at_once" in getattr(
            item, "fixturenames", ()
        ) and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group("at_once"))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


GPUS = ["fake", pytest.param("cuda", marks=pytest.mark.gpu)]


@contextmanager
def device_of(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Give the device of a test; a GPU, fake or real, must have worked."""
    if name == "fake":
        with fake_gpu(monkeypatch) as costs:
            yield torch.device("cuda")
        assert costs.launches, "nothing ran on the fake GPU"
    elif name == "cuda":
        torch.cuda.reset_peak_memory_stats()
        yield torch.device("cuda")
        assert torch.cuda.max_memory_allocated(), "nothing ran on the GPU"
    else:
        yield torch.device(name)


@pytest.fixture(params=["cpu", *GPUS])
def device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[torch.device]:
    """The CPU, a fake GPU, and in a third test marked ``gpu`` a GPU."""
    with device_of(request.param, monkeypatch) as found:
        yield found


@pytest.fixture(params=GPUS)
def gpu(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[torch.device]:
    """A fake GPU, and in a second test marked ``gpu`` a GPU."""
    with device_of(request.param, monkeypatch) as found:
        yield found


@pytest.fixture(params=["cpu", GPUS[1]])
def true_device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[torch.device]:
    """The CPU, then a GPU (mark ``gpu``): for what a fake GPU does not do."""
    with device_of(request.param, monkeypatch) as found:
        yield found


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _identity() -> None:
    """Flower makes messages in processes with an identity; without this a test would
    need one with a run before it.
    """
    identify_process(1)


@pytest.fixture(autouse=True, scope="session")
def _no_wait_for_the_disk() -> Iterator[None]:
    """A run waits for the disk some thirty times, so that a power cut loses nothing;
    here none comes.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _seeds_take_no_time() -> Iterator[None]:
    """Models are built thousands of times, each with a seed of its own.

    For each kind of device that is not there ``torch.manual_seed`` writes down the
    stack of its caller, and ``fork_rng`` looks for a driver: milliseconds, which was a
    quarter of a small run.
    """
    with pytest.MonkeyPatch.context() as patch:
        no_stack = SimpleNamespace(
            **{**vars(traceback), "format_stack": lambda *args: []}
        )
        for module in (torch.cuda, torch.mtia, torch.xpu):
            # torch.mtia has it since torch 2.9
            patch.setattr(module, "traceback", no_stack, raising=False)
        if not torch.cuda.is_available():
            patch.setattr(torch.cuda, "device_count", lambda: 0)
        yield


@pytest.fixture(autouse=True, scope="session")
def _undrawn_curves() -> Iterator[None]:
    """Runs and sweeps make their figures and do not draw them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "draw_curves", pictures.undrawn)
        yield


def processes_of(folder: Path) -> list[str]:
    """Command lines of the running processes that know the folder by argument or
    environment, this one left out.
    """
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                known = (process / "cmdline").read_bytes() + (
                    process / "environ"
                ).read_bytes()
                state = (process / "stat").read_text().rsplit(")", 1)[1].split()[0]
            except OSError:  # it ended meanwhile
                continue
            if str(folder).encode() in known and state != "Z":
                found.append(
                    (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                )
    return found


@pytest.fixture(scope="session")
def await_end() -> Callable[[Path], list[str]]:
    """``await_end(folder)``: the processes that know the folder and are still there
    after 15 seconds.
    """

    def do(folder: Path) -> list[str]:
        # on a busy machine a killed process takes a moment to be gone
        deadline = time.monotonic() + 15
        while (left := processes_of(folder)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    return do


@pytest.fixture(scope="session")
def at_once() -> Iterator[dict[str, str]]:
    """An environment in which ``fedbn-flwr`` and ``python`` need not import torch and
    Flower: see ``preloaded``.
    """
    with (
        tempfile.TemporaryDirectory(prefix="p", dir="/tmp") as folder,
        preloaded.commands(Path(folder)) as commands,
    ):
        path = (str(commands), str(Path(sys.executable).parent), os.environ["PATH"])
        yield {**os.environ, "PATH": os.pathsep.join(path)}


MakePoints = Callable[..., Points]


@pytest.fixture
def points() -> MakePoints:
    """``points(n, seed, shape=(5,), classes=3)``: n random points, shifted and scaled
    by client so clients differ.
    """

    def make(
        num_examples: int,
        seed: int = 0,
        shape: tuple[int, ...] = (5,),
        classes: int = 3,
    ) -> Points:
        generator = torch.Generator().manual_seed(seed)
        inputs = (
            torch.randn(num_examples, *shape, generator=generator, dtype=torch.float64)
            * (1 + 0.3 * seed)
            + seed
        )
        return Points(
            inputs, torch.randint(classes, (num_examples,), generator=generator)
        )

    return make


@pytest.fixture
def datasets(request: pytest.FixtureRequest, points: MakePoints) -> list[Points]:
    """The data of clients, of the sizes in the module's ``SIZES``."""
    return [points(size, client) for client, size in enumerate(request.module.SIZES)]


WriteCityscapes = Callable[
    [Path, Mapping[str, int], Mapping[str, int], tuple[int, int]], Path
]


@pytest.fixture(scope="session")
def write_cityscapes() -> WriteCityscapes:
    """``write_cityscapes(folder, train, val, size)``: images of (height, width) in
    Cityscapes' layout, per city.

    The red value of a pixel is its label id, drawn at random in 4 by 4 blocks of the
    image.
    """

    def write(
        folder: Path,
        train: Mapping[str, int],
        val: Mapping[str, int],
        size: tuple[int, int],
    ) -> Path:
        images = []
        for part, cities in (("train", train), ("val", val)):
            for city, count in cities.items():
                images += [(part, city, number) for number in range(count)]
        for part, city, number in images:
            ids = np.random.default_rng(number).integers(0, 34, (4, 4)).astype(np.uint8)
            ids = np.kron(ids, np.ones((size[0] // 4, size[1] // 4), np.uint8))
            ids[0, 0] = 255  # the licence plate's -1, as a byte
            name, root = f"{city}_{number:06}_000019", folder / "cityscapes"
            image = np.stack([ids, 0 * ids, 0 * ids], axis=2)
            files = (
                ("leftImg8bit", "", image),
                ("gtFine", "_labelIds", ids),
                ("gtFine", "_instanceIds", ids + 1),
            )
            for kind, suffix, array in files:
                path = root / kind / part / city / f"{name}_{kind}{suffix}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(array).save(path)
        return folder

    return write


MakeModel = Callable[..., nn.Module]


@pytest.fixture
def mlp() -> MakeModel:
    """``mlp(norm=True, dropout=0.0)``: 5-4-3 with one BatchNorm1d, float64, the same
    weights every time.
    """

    def make(norm: bool = True, dropout: float = 0.0, seed: int = 0) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            layers = [
                nn.Linear(5, 4),
                *([nn.BatchNorm1d(4)] if norm else []),
                nn.ReLU(),
            ]
            return nn.Sequential(
                *layers, *([nn.Dropout(dropout)] if dropout else []), nn.Linear(4, 3)
            ).double()

    return make


@pytest.fixture
def wsconv_net() -> MakeModel:
    """``wsconv_net()``: one standardised convolution and a classifier, on 5 numbers;
    float64, always the same.
    """

    def make() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layers = [
                nn.Unflatten(1, (1, 5)),
                nn.Conv1d(1, 4, 3),
                nn.ReLU(),
                nn.Flatten(),
                nn.Linear(12, 3),
            ]
            return replace_norm(nn.Sequential(*layers).double(), "wsconv")[0]

    return make


@pytest.fixture
def torchvision_net() -> MakeModel:
    """``torchvision_net(norm=True)``: a narrow ShuffleNetV2, or one without BatchNorm;
    3 classes, always the same.
    """
    return lambda norm=True: copy.deepcopy(_narrow_shufflenet(norm))


@functools.cache
def _narrow_shufflenet(norm: bool) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = ShuffleNetV2([2, 1, 1], [8, 16, 16, 32, 32], num_classes=3).double()
        return model if norm else replace_norm(model, "wsconv")[0]


@pytest.fixture
def open_grid() -> Iterator[Callable[..., InProcessGrid]]:
    """``open_grid(app, num_nodes=3, ...)``: a grid here, closed after the test."""
    with ExitStack() as grids:
        yield lambda app, num_nodes=3, **options: grids.enter_context(
            InProcessGrid(app, num_nodes, **options)
        )


RunStrategy = Callable[..., Outcome]
TRAINING_SETTINGS = {field.name for field in dataclasses.fields(LocalTraining)}


@pytest.fixture
def run_strategy() -> Iterator[RunStrategy]:
    """``run_strategy(strategy, app, start, num_nodes, ...)``: see
    ``federation.run_strategy``.
    """
    with ExitStack() as grids:
        yield functools.partial(federation.run_strategy, grids)


@pytest.fixture
def run_legacy_loop() -> Iterator[Callable[..., LegacyOutcome]]:
    """``run_legacy_loop(strategy, app, start, num_nodes, rounds)``: see
    ``federation.run_legacy_loop``.
    """
    with ExitStack() as grids:
        yield functools.partial(federation.run_legacy_loop, grids)


@pytest.fixture
def federate(run_strategy: RunStrategy) -> RunStrategy:
    """``federate(strategy, model, datasets, ...)``: run a strategy over TorchClients,
    one client at a time.

    Settings of ``LocalTraining`` go by name; the options of ``federation.run_strategy``
    too.
    """

    def run(
        strategy: Strategy,
        model: Callable[[], nn.Module],
        datasets: Sequence[Any],
        *,
        rate: LearningRate | float = 0.1,
        wrap: Callable[[Callable[[Context], Any]], ClientApp] = client_app,
        client: type[TorchClient] = TorchClient,
        seed: int = federation.SEED,
        task: Task = CLASSIFICATION,
        **options: Any,
    ) -> Outcome:
        settings = {
            name: options.pop(name)
            for name in list(options)
            if name in TRAINING_SETTINGS
        }
        rate = rate if isinstance(rate, LearningRate) else LearningRate(rate)
        training = LocalTraining(learning_rate=rate, **{"batch_size": 4, **settings})
        app = wrap(
            federation.torch_clients(
                model, datasets, training, client=client, seed=seed, task=task
            )
        )
        if strategy.parts is None:
            strategy.parts = split_state(model())
        return run_strategy(
            strategy, app, model().state_dict(), len(datasets), **options
        )

    return run


@pytest.fixture
def run_step(federate: RunStrategy) -> RunStrategy:
    """``run_step(strategy, model, datasets, transport="barrier", ...)``: one round of
    one step on all data.

    All clients run at once, as a synchronised step needs it. Options are those of
    ``federate``, as more rounds.
    """

    def run(
        strategy: Strategy,
        model: nn.Module,
        datasets: Sequence[Any],
        *,
        transport: str = "barrier",
        **options: Any,
    ) -> Outcome:
        one_step = {"rounds": 1, "local_steps": 1, "batch_size": 0, "timeout": 30}
        together = {
            "barrier": transport == "barrier",
            "grid_options": {"threads": len(datasets)},
        }
        return federate(
            strategy,
            lambda: copy.deepcopy(model),
            datasets,
            **{**one_step, **together, **options},
        )

    return run


SameRun = Callable[[Mapping[str, Any], Mapping[str, Any]], None]


@pytest.fixture(scope="session")
def same_run() -> SameRun:
    """``same_run(a, b)``: two summaries tell of the same final state, to the bit, and
    of the same traffic.

    The server's test of that state may differ in a float32's last digit: another
    process, other numbers of threads.
    """

    def check(a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
        for key in ("sha256", "ledger", "rejected"):
            assert a[key] == b[key], key
        for key in ("final", "best"):
            assert a[key] == pytest.approx(b[key], rel=1e-6), key

    return check


SameBits = Callable[[Mapping[str, Array], Mapping[str, Array]], None]


@pytest.fixture
def same_bits() -> SameBits:
    """``same_bits(a, b)``: two states have the same names in the same order, dtypes,
    shapes and bits.
    """

    def check(a: Mapping[str, Array], b: Mapping[str, Array]) -> None:
        assert list(a) == list(b)
        for name in a:
            assert (a[name].dtype, a[name].shape) == (
                b[name].dtype,
                b[name].shape,
            ), name
            assert np.asarray(a[name]).tobytes() == np.asarray(b[name]).tobytes(), name

    return check
