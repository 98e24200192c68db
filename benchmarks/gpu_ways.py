"""The ways of training that ``gpu.py`` compares: loops, CUDA graphs, streams, stacked models, a synchronised step."""

from __future__ import annotations

import copy
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise

import torch
from flwr.app import Context
from torch import Tensor, nn
from torch.nn import functional

from fedbn_flwr import InProcessGrid, TorchClient, client_app
from fedbn_flwr.batchnorm.sync import synchronised
from fedbn_flwr.lab.models import build_model
from fedbn_flwr.messages.records import to_record
from fedbn_flwr.strategies import FedAvg
from fedbn_flwr.training import LearningRate, LocalTraining
from fedbn_flwr.transport import Barrier, Member

RATE = 0.01

Batch = tuple[Tensor, Tensor]
Step = Callable[[Sequence[Batch]], None]
"""One step of every client, each on its batch."""


@dataclass(frozen=True)
class Setting:
    """What a way of training is made for: the device, the images per batch, the number of clients, the precision."""

    device: torch.device
    batch_size: int
    clients: int = 1
    dtype: torch.dtype = torch.float32

    def batches(self, step: int) -> list[Batch]:
        """Return the batches of all clients in a step; they repeat after eight steps."""
        return [_batch(self.device, self.batch_size, client, step % 8, self.dtype) for client in range(self.clients)]


@cache
def _batch(device: torch.device, batch_size: int, client: int, step: int, dtype: torch.dtype) -> Batch:
    generator = torch.Generator().manual_seed(1000 * client + step)
    inputs = torch.randn(batch_size, 3, 32, 32, generator=generator).to(device, dtype)
    targets = torch.randint(10, (batch_size,), generator=generator).to(device)
    synchronise(device)  # other streams use them
    return inputs, targets


@cache
def start() -> nn.Module:
    """Return the model that every client starts from, on the CPU."""
    return build_model("resnet20", num_classes=10, channels=3, size=32)


def synchronise(device: torch.device) -> None:
    """Wait until the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Limits:
    """How long each way is measured: ``steps`` of them, or at least ``seconds``; ``repeats`` times, in turns."""

    steps: int
    seconds: float
    repeats: int


@dataclass
class Way:
    """A way of training, ready to run.

    Attributes:
        step: does one step of every client.
        states: returns the state dict of every client.
    """

    step: Step
    states: Callable[[], list[Mapping[str, Tensor]]]


Make = Callable[[Setting], Way]


def _models(setting: Setting, memory_format: torch.memory_format) -> list[nn.Module]:
    models = [copy.deepcopy(start()).to(setting.device, setting.dtype) for _ in range(setting.clients)]
    models = [model.to(memory_format=memory_format).train() for model in models]
    synchronise(setting.device)  # other streams train them
    return models


def _autocast(device: torch.device, amp: bool) -> AbstractContextManager[object]:
    # Under CUDA graphs the cache of casted weights would hold tensors of another capture.
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False) if amp else nullcontext()


def _train(
    model: Callable[[Tensor], Tensor], parameters: Sequence[Tensor], batch: Batch, amp: bool, device: torch.device
) -> None:
    """Do one step of plain SGD."""
    inputs, targets = batch
    with _autocast(device, amp):
        loss = functional.cross_entropy(model(inputs), targets)
    gradients = torch.autograd.grad(loss, parameters)
    with torch.no_grad():
        torch._foreach_add_(list(parameters), gradients, alpha=-RATE)


def _as(batch: Batch, memory_format: torch.memory_format) -> Batch:
    return batch[0].contiguous(memory_format=memory_format), batch[1]


def eager(setting: Setting, memory_format: torch.memory_format = torch.contiguous_format, amp: bool = False) -> Way:
    """Return the plain loop: each client in turn, ``backward`` and ``SGD.step``."""
    models = _models(setting, memory_format)
    optimizers = [torch.optim.SGD(model.parameters(), RATE) for model in models]

    def one(model: nn.Module, optimizer: torch.optim.SGD, batch: Batch) -> None:
        inputs, targets = _as(batch, memory_format)
        optimizer.zero_grad(set_to_none=True)
        with _autocast(setting.device, amp):
            loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def step(batches: Sequence[Batch]) -> None:
        for model, optimizer, batch in zip(models, optimizers, batches, strict=True):
            one(model, optimizer, batch)

    return Way(step, lambda: [model.state_dict() for model in models])


def compiled(setting: Setting, memory_format: torch.memory_format = torch.contiguous_format, amp: bool = False) -> Way:
    """Return a loop over ``torch.compile(mode="reduce-overhead")``, which uses CUDA graphs of its own."""
    models = _models(setting, memory_format)
    fast = [torch.compile(model, mode="reduce-overhead", dynamic=False) for model in models]
    parameters = [list(model.parameters()) for model in models]

    def step(batches: Sequence[Batch]) -> None:
        for model, own, batch in zip(fast, parameters, batches, strict=True):
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            _train(model, own, _as(batch, memory_format), amp, setting.device)

    return Way(step, lambda: [model.state_dict() for model in models])


class Graph:
    """A step captured as one CUDA graph: forward, backward, update and the statistics of BatchNorm, on the device.

    Args:
        work: one step on its static batch; nothing in it may read a value on the host.
        batch: an example; later batches are copied into its place.
        state: the tensors that a step changes in place. Three steps before the capture warm the libraries up; what they
            change is put back.
    """

    def __init__(self, work: Callable[[Batch], None], batch: Batch, state: Sequence[Tensor]) -> None:
        self._inputs, self._targets = batch[0].clone(), batch[1].clone()
        before = [tensor.detach().clone() for tensor in state]
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                work((self._inputs, self._targets))
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):  # records the work and does not do it
            work((self._inputs, self._targets))
        with torch.no_grad():
            for tensor, old in zip(state, before, strict=True):
                tensor.copy_(old)
        torch.cuda.synchronize()

    def replay(self, batch: Batch) -> None:
        """Do the step on a batch, in the current stream."""
        self._inputs.copy_(batch[0], non_blocking=True)
        self._targets.copy_(batch[1], non_blocking=True)
        self._graph.replay()


def _graphs(
    setting: Setting, models: Sequence[nn.Module], memory_format: torch.memory_format, amp: bool
) -> list[Graph]:
    graphs = []
    for model, batch in zip(models, setting.batches(0), strict=True):
        work = partial(_work, model, list(model.parameters()), amp, setting.device)
        graphs.append(Graph(work, _as(batch, memory_format), list(model.state_dict().values())))
    return graphs


def _work(model: nn.Module, parameters: Sequence[Tensor], amp: bool, device: torch.device, batch: Batch) -> None:
    _train(model, parameters, batch, amp, device)


def graphed(setting: Setting, memory_format: torch.memory_format = torch.contiguous_format, amp: bool = False) -> Way:
    """Return a loop that replays each client's step as a CUDA graph."""
    models = _models(setting, memory_format)
    graphs = _graphs(setting, models, memory_format, amp)

    def step(batches: Sequence[Batch]) -> None:
        for graph, batch in zip(graphs, batches, strict=True):
            graph.replay(batch)

    return Way(step, lambda: [model.state_dict() for model in models])


def streamed(setting: Setting, memory_format: torch.memory_format = torch.contiguous_format, amp: bool = False) -> Way:
    """Return a loop of one thread that replays the clients' graphs, each in a stream of its own."""
    models = _models(setting, memory_format)
    graphs = _graphs(setting, models, memory_format, amp)
    streams = [torch.cuda.Stream() for _ in models]  # type: ignore[no-untyped-call]

    def step(batches: Sequence[Batch]) -> None:
        for graph, stream, batch in zip(graphs, streams, batches, strict=True):
            with torch.cuda.stream(stream):
                graph.replay(batch)

    return Way(step, lambda: [model.state_dict() for model in models])


def threaded(setting: Setting) -> Way:
    """Return a loop in which each client has a thread and a stream of its own, eager."""
    models = _models(setting, torch.contiguous_format)
    parameters = [list(model.parameters()) for model in models]
    streams = [torch.cuda.Stream() for _ in models]  # type: ignore[no-untyped-call]
    pool = ThreadPoolExecutor(setting.clients)

    def one(client: int, batch: Batch) -> None:
        with torch.cuda.stream(streams[client]):
            _train(models[client], parameters[client], batch, False, setting.device)

    def step(batches: Sequence[Batch]) -> None:
        list(pool.map(one, range(setting.clients), batches))

    return Way(step, lambda: [model.state_dict() for model in models])


class Stacked:
    """The clients' models as one, with a dimension more: a step of all of them is one call under ``torch.func.vmap``.

    BatchNorm updates its running statistics in place; they are stacked, too, so each client has its own.
    """

    def __init__(self, setting: Setting) -> None:
        models = _models(setting, torch.contiguous_format)
        parameters, buffers = torch.func.stack_module_state(models)
        self.parameters = {name: value.detach() for name, value in parameters.items()}
        self.buffers = dict(buffers)
        self._model = copy.deepcopy(models[0]).to("meta")
        gradient = torch.func.grad(self._loss)
        self._gradients = torch.func.vmap(gradient, randomness="different")

    def _loss(
        self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], inputs: Tensor, targets: Tensor
    ) -> Tensor:
        outputs: Tensor = torch.func.functional_call(self._model, (parameters, buffers), (inputs,))
        return functional.cross_entropy(outputs, targets)

    def train(self, batch: Batch) -> None:
        """Do a step of all clients; the batch has a first dimension for them."""
        gradients = self._gradients(self.parameters, self.buffers, *batch)
        names = list(self.parameters)
        torch._foreach_add_([self.parameters[n] for n in names], [gradients[n] for n in names], alpha=-RATE)

    def states(self) -> list[Mapping[str, Tensor]]:
        """Return the state dict of every client."""
        every = {**self.parameters, **self.buffers}
        order = list(self._model.state_dict())
        clients = len(next(iter(every.values())))
        return [{name: every[name][client] for name in order} for client in range(clients)]


def _stack(batches: Sequence[Batch]) -> Batch:
    return torch.stack([inputs for inputs, _ in batches]), torch.stack([targets for _, targets in batches])


def vmapped(setting: Setting) -> Way:
    """Return a loop over the stacked models."""
    stacked = Stacked(setting)
    return Way(lambda batches: stacked.train(_stack(batches)), stacked.states)


def vmapped_graph(setting: Setting) -> Way:
    """Return a loop that replays the step of the stacked models as one CUDA graph."""
    stacked = Stacked(setting)
    state = [*stacked.parameters.values(), *stacked.buffers.values()]
    graph = Graph(stacked.train, _stack(setting.batches(0)), state)
    return Way(lambda batches: graph.replay(_stack(batches)), stacked.states)


def at_barrier(setting: Setting, how: str | None) -> Way:
    """Return a loop in which the clients, a thread each, wait for one another at every BatchNorm; or do not (None)."""
    models = _models(setting, torch.channels_last)
    parameters = [list(model.parameters()) for model in models]
    members = {i: Member(1.0, setting.batch_size, f"client {i}") for i in range(setting.clients)}
    union = setting.clients * setting.batch_size
    pool = ThreadPoolExecutor(setting.clients)

    def one(client: int, batch: Batch, barrier: Barrier) -> None:
        def reduce(tag: str, tensor: Tensor) -> Tensor:
            return barrier.reduce(client, 0, tag, tensor.cpu() if how == "host" else tensor)

        model, size = models[client], setting.batch_size
        step = synchronised(model, reduce, batch_size=size, union_batch_size=union) if how else nullcontext()
        with step:
            _train(model, parameters[client], _as(batch, torch.channels_last), False, setting.device)

    def step(batches: Sequence[Batch]) -> None:
        barrier = Barrier(members, timeout=60)
        list(pool.map(one, range(setting.clients), batches, [barrier] * setting.clients))

    return Way(step, lambda: [model.state_dict() for model in models])


@contextmanager
def mps() -> Iterator[None]:
    """Let processes that begin in the block share the GPU by CUDA's Multi-Process Service, with a daemon of their own.

    Raises:
        RuntimeError: the service is not installed.
        CalledProcessError: its daemon does not start.
    """
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        raise RuntimeError("nvidia-cuda-mps-control is not installed")
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        before = dict(os.environ)
        os.environ |= {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        try:
            subprocess.run([control, "-d"], check=True)
            try:
                yield
            finally:
                subprocess.run([control], input="quit\n", text=True, check=False)
        finally:
            os.environ.clear()
            os.environ |= before


class Images:
    """A client's data on the device: eight of its batches."""

    def __init__(self, setting: Setting, client: int) -> None:
        batches = [setting.batches(step)[client] for step in range(8)]
        self._inputs, self._targets = (torch.cat(parts) for parts in zip(*batches, strict=True))

    def __len__(self) -> int:
        return len(self._targets)

    def batch(self, positions: Tensor, generator: torch.Generator | None = None) -> Batch:
        positions = positions.to(self._targets.device)
        return self._inputs[positions], self._targets[positions]


@cache
def _images(setting: Setting, client: int) -> Images:
    return Images(setting, client)


def federated_rate(setting: Setting, workers: int, limits: Limits) -> float:
    """Return the steps per second of all clients in rounds of FedAvg; ``workers`` processes, 0: in this one."""
    steps = limits.steps or 30
    training = LocalTraining(learning_rate=LearningRate(RATE), local_steps=steps, batch_size=setting.batch_size)

    def client_fn(context: Context) -> TorchClient:
        data = _images(setting, int(context.node_config["partition-id"]))
        return TorchClient(
            _models(replace(setting, clients=1), torch.channels_last)[0], data, data, training, context=context
        )

    ends: list[float] = []
    strategy = FedAvg(fraction_evaluate=0.0)
    with InProcessGrid(client_app(client_fn), setting.clients, workers=workers) as grid:
        strategy.start(
            grid=grid,
            initial_arrays=to_record(start().state_dict()),
            num_rounds=1 + limits.repeats,
            evaluate_fn=lambda *_: ends.append(time.perf_counter()),
        )
    rounds = [after - before for before, after in pairwise(ends[1:])]  # without the first, in which workers start
    return setting.clients * steps / statistics.median(rounds)
