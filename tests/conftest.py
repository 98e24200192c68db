"""Fixtures of all tests.

They provide toy data, tiny models in float64, and runs of a strategy over clients in
this process.
"""

from __future__ import annotations

import atexit
import copy
import dataclasses
import functools
import gc
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

# Set this before any import of Flower, to prevent telemetry, network access and files
# in the user's home.
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"
# Compute convolutions on a GPU in float32, as on the CPU, even in workers. By default
# torch allows the shorter TF32.
os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
if "FLWR_HOME" not in os.environ:
    os.environ["FLWR_HOME"] = tempfile.mkdtemp(prefix="flwr-home-")
    atexit.register(shutil.rmtree, os.environ["FLWR_HOME"], ignore_errors=True)

import hypothesis
import numpy as np
import pytest
import torch
from flwr.app import Context
from flwr.clientapp import ClientApp
from torch import nn

from fedbn_flwr.batchnorm.array_types import Array
from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.client import TorchClient, client_app
from fedbn_flwr.compat.flower import identify_process
from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.norms import replace_norm
from fedbn_flwr.strategies import Strategy
from fedbn_flwr.training import CLASSIFICATION, LearningRate, LocalTraining, Task
from tests.support import federation, preloaded
from tests.support.fake_gpu import fake_gpu
from tests.support.federation import LegacyOutcome, Outcome
from tests.support.points import Points
from tests.support.seeds import with_seed

# A test does not depend on the speed of the machine, nor on an earlier run.
hypothesis.settings.register_profile(
    "any machine",
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
    database=None,
)
hypothesis.settings.load_profile("any machine")


@pytest.hookimpl(tryfirst=True)  # before xdist looks for groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests on machines without a GPU, and let slow tests take an hour.

    Tests with the fixture ``at_once`` share a process.
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


def pytest_collection_finish() -> None:
    """Let later garbage collections skip the million objects of imports and tests."""
    gc.collect()
    gc.freeze()


def pytest_xdist_auto_num_workers() -> int:
    """Return one worker more than cores, since a fifth of the time is waiting."""
    return (os.cpu_count() or 1) + 1


GPUS = ["fake", pytest.param("cuda", marks=pytest.mark.gpu)]


@contextmanager
def device_of(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Yield the device of a test, and check that a GPU, fake or real, worked."""
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
def device(request, monkeypatch) -> Iterator[torch.device]:
    """The CPU, a fake GPU, and in a third test marked ``gpu`` a GPU."""
    with device_of(request.param, monkeypatch) as found:
        yield found


@pytest.fixture(params=GPUS)
def gpu(request, monkeypatch) -> Iterator[torch.device]:
    """A fake GPU, and in a second test marked ``gpu`` a GPU."""
    with device_of(request.param, monkeypatch) as found:
        yield found


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _identity() -> None:
    """Give this process an identity, because Flower's messages need it.

    Otherwise each test would need an earlier run.
    """
    identify_process(1)


@pytest.fixture(autouse=True, scope="session")
def _no_wait_for_the_disk() -> Iterator[None]:
    """Do not wait for the disk, as a run does some thirty times.

    The wait protects results from a power cut.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _seeds_take_no_time() -> Iterator[None]:
    """Save milliseconds at each seed, because tests build thousands of models.

    For each kind of missing device, ``torch.manual_seed`` records the stack of its
    caller, and ``fork_rng`` looks for a driver. Together they took a quarter of a small
    run.
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
def _undrawn() -> Iterator[None]:
    """Let runs and pages have no pictures.

    ``tests/lab/runs/test_run.py`` draws the curves, and ``tests/lab/report/test_page.py`` the
    pictures of pages.
    """
    from tests.support import pictures

    with pictures.undrawn():
        yield


def processes_of(folder: Path) -> list[str]:
    """Return the command lines of running processes that use the folder.

    They name the folder in an argument or the environment. This process is excluded.
    """
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                command = (process / "cmdline").read_bytes()
                known = command + (process / "environ").read_bytes()
                state = (process / "stat").read_text().rsplit(")", 1)[1].split()[0]
            except OSError:  # it ended meanwhile
                continue
            if str(folder).encode() in known and state != "Z":
                found.append(command.replace(b"\0", b" ").decode())
    return found


@pytest.fixture(scope="session")
def await_end() -> Callable[[Path], list[str]]:
    """Provide ``await_end(folder)`` to list the processes that use the folder.

    It lists those still running after 15 seconds.
    """

    def do(folder: Path) -> list[str]:
        # On a busy machine, a killed process needs a moment to end.
        deadline = time.monotonic() + 15
        while (left := processes_of(folder)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    return do


@pytest.fixture(scope="session")
def at_once() -> Iterator[dict[str, str]]:
    """An environment whose ``fedbn-flwr`` and ``python`` start without imports.

    The module ``preloaded`` has imported torch and Flower for them.
    """
    with (
        tempfile.TemporaryDirectory(prefix="p", dir="/tmp") as folder,
        preloaded.commands(Path(folder)) as commands,
    ):
        path = (str(commands), str(Path(sys.executable).parent), os.environ["PATH"])
        yield {**os.environ, "PATH": os.pathsep.join(path)}


@pytest.fixture
def points() -> Callable[..., Points]:
    """Provide ``points(n, seed, shape=(5,))`` to make n random points.

    They are shifted and scaled by client, so clients differ.
    """

    def make(num_examples: int, seed: int = 0, shape: tuple[int, ...] = (5,)) -> Points:
        generator = torch.Generator().manual_seed(seed)
        inputs = (
            torch.randn(num_examples, *shape, generator=generator, dtype=torch.float64)
            * (1 + 0.3 * seed)
            + seed
        )
        return Points(inputs, torch.randint(3, (num_examples,), generator=generator))

    return make


@pytest.fixture
def datasets(request, points) -> list[Points]:
    """The data of clients, of the sizes in the module's ``SIZES``."""
    return [points(size, client) for client, size in enumerate(request.module.SIZES)]


MakeModel = Callable[..., nn.Module]


@pytest.fixture
def mlp() -> MakeModel:
    """Provide ``mlp(norm=True, dropout=0.0, kind=nn.BatchNorm1d)``.

    It makes a 5-4-3 network in float64 with one norm and seeded weights.
    """

    @with_seed()
    def make(
        norm: bool = True, dropout: float = 0.0, kind: type[nn.Module] = nn.BatchNorm1d
    ) -> nn.Module:
        layers = [nn.Linear(5, 4), *([kind(4)] if norm else []), nn.ReLU()]
        return nn.Sequential(
            *layers, *([nn.Dropout(dropout)] if dropout else []), nn.Linear(4, 3)
        ).double()

    return make


@pytest.fixture
def wsconv_net() -> MakeModel:
    """Provide ``wsconv_net()`` to make a net with a standardised convolution.

    It has a classifier, 5 inputs and seeded weights in float64.
    """

    @with_seed()
    def make() -> nn.Module:
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
    """Provide ``torchvision_net(norm=True)`` to make a narrow ShuffleNetV2.

    It has 3 classes and seeded weights, and no BatchNorm if ``norm`` is false.
    """
    return lambda norm=True: copy.deepcopy(_narrow_shufflenet(norm))


@functools.cache
@with_seed()
def _narrow_shufflenet(norm: bool) -> nn.Module:
    # Import here, because the process that only counts the tests does not need it.
    from torchvision.models.shufflenetv2 import ShuffleNetV2

    model = ShuffleNetV2([2, 1, 1], [8, 16, 16, 32, 32], num_classes=3).double()
    return model if norm else replace_norm(model, "wsconv")[0]


@pytest.fixture
def open_grid() -> Iterator[Callable[..., InProcessGrid]]:
    """Provide ``open_grid(app, num_nodes=3, ...)``. The grid closes after the test."""
    with ExitStack() as grids:
        yield lambda app, num_nodes=3, **options: grids.enter_context(
            InProcessGrid(app, num_nodes, **options)
        )


RunStrategy = Callable[..., Outcome]
TRAINING_SETTINGS = {field.name for field in dataclasses.fields(LocalTraining)}


@pytest.fixture
def run_strategy() -> Iterator[RunStrategy]:
    """Provide ``federation.run_strategy`` without its argument ``grids``."""
    with ExitStack() as grids:
        yield functools.partial(federation.run_strategy, grids)


@pytest.fixture
def run_legacy_loop() -> Iterator[Callable[..., LegacyOutcome]]:
    """Provide ``federation.run_legacy_loop`` without its argument ``grids``."""
    with ExitStack() as grids:
        yield functools.partial(federation.run_legacy_loop, grids)


@pytest.fixture
def federate(run_strategy) -> RunStrategy:
    """Provide ``federate(strategy, model, datasets, ...)`` to run over TorchClients.

    One client trains at a time. Keyword arguments are settings of ``LocalTraining`` or
    options of ``federation.run_strategy``. If ``built`` is true, the clients get the
    function that builds the model.
    """

    def run(
        strategy: Strategy,
        model: Callable[[], nn.Module],
        datasets: Sequence,
        *,
        rate: LearningRate | float = 0.1,
        wrap: Callable[[Callable[[Context], Any]], ClientApp] = client_app,
        client: type[TorchClient] = TorchClient,
        seed: int = federation.SEED,
        task: Task = CLASSIFICATION,
        built: bool = False,
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
                (lambda: model) if built else model,
                datasets,
                training,
                client=client,
                seed=seed,
                task=task,
            )
        )
        if strategy.parts is None:
            strategy.parts = split_state(model())
        return run_strategy(
            strategy, app, model().state_dict(), len(datasets), **options
        )

    return run


@pytest.fixture
def federate_mlp(federate, mlp, datasets) -> RunStrategy:
    """Provide ``federate_mlp(strategy, ...)`` to run over the clients of ``SIZES``."""
    return functools.partial(federate, model=mlp, datasets=datasets)


@pytest.fixture
def run_step(federate) -> RunStrategy:
    """Provide ``run_step(strategy, model, datasets, transport="barrier", ...)``.

    It runs one round of one step on all data. All clients run in parallel, as a
    synchronised step requires. It takes the options of ``federate``, such as more
    rounds.
    """

    def run(
        strategy: Strategy,
        model: nn.Module,
        datasets: Sequence,
        *,
        transport: str = "barrier",
        **options: Any,
    ) -> Outcome:
        one_step = {
            "rounds": 1,
            "local_steps": 1,
            "batch_size": 0,
            "timeout": 30,
            "barrier": transport == "barrier",
            "grid_options": {"threads": len(datasets)},
        }
        return federate(
            strategy,
            lambda: copy.deepcopy(model),
            datasets,
            **{**one_step, **options},
        )

    return run


@pytest.fixture(scope="session")
def same_run() -> Callable[[Mapping, Mapping], None]:
    """Provide ``same_run(a, b)`` to compare the final state and traffic of runs.

    The states must have the same bits. The server's test of that state may differ in a
    float32's last digit, because another process has another number of threads.
    """

    def check(a: Mapping, b: Mapping) -> None:
        for key in ("sha256", "ledger", "rejected"):
            assert a[key] == b[key], key
        assert a["final"] == pytest.approx(b["final"], rel=1e-6)

    return check


@pytest.fixture
def same_bits() -> Callable[[Mapping, Mapping], None]:
    """Provide ``same_bits(a, b)`` to compare two states bit by bit.

    Names and their order, dtypes and shapes must be equal as well.
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
