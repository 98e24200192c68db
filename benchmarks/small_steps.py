"""A training step of a small model on the CPU: plain, compiled, and of several clients at once.

    python benchmarks/small_steps.py

*Plain* is the step of the package's own loop: forward, backward, one ``_foreach_`` update. *Compiled model* is that
step with ``torch.compile(model)``, as ``compile=true`` does it (Inductor, with a C++ compiler). *Compiled step* is
all of it as one function for ``torch.compile``. *Stacked* is the step of K clients, whose models are stacked under
``torch.func.vmap``: every client has its own batch, and a step is K times the plain one's work.

*In a round* is a whole round of a client, 608 examples in the package's loop, whose steps have forward and backward
pass as one compiled function and the loop's own update; a last batch of another size is computed as it is.

Ways take turns in one process with one torch thread, many short turns each. A cell is the median, over the turns, of
the plain step's CPU seconds divided by the way's for one client; above 1 the way is faster. The first calls, which
compile, are timed apart. The difference is the largest one of a parameter after one step, divided by the largest
change.
"""

from __future__ import annotations

import copy
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from measure import facts, table, write_block
from peers.work import make_model
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap

from fedbn_flwr.lab.models import build_model
from fedbn_flwr.training import LearningRate, LocalTraining, train
from fedbn_flwr.training.client_hook import LossAndOutputs
from fedbn_flwr.training.layout import Layout
from fedbn_flwr.training.step_rule import StepRule

State = dict[str, Tensor]
RATE = 0.1
EXAMPLES = 608  # of a client in a round
PATIENCE = 600  # seconds for a first step, which compiles; on a busy machine it takes minutes


class Setting(NamedTuple):
    """A model, the shape of an example, and the batch size."""

    build: Callable[[], nn.Module]
    example: tuple[int, ...]
    batch: int


SETTINGS = {
    "MLP 784-100(BN)-10, batch 32": Setting(lambda: make_model("mlp"), (1, 28, 28), 32),
    "MLP 784-100(BN)-10, batch 128": Setting(lambda: make_model("mlp"), (1, 28, 28), 128),
    "LeNet-like CNN with 2 BN, batch 20": Setting(
        lambda: build_model("lenet", num_classes=10, channels=1, size=28), (1, 28, 28), 20
    ),
    "CNN with dropout, batch 10": Setting(lambda: make_model("cnn"), (3, 32, 32), 10),
}


class Plain:
    """The step of the package's loop."""

    def __init__(self, model: nn.Module, inputs: Tensor, targets: Tensor, compiled: bool = False) -> None:
        self.model, self._inputs, self._targets = copy.deepcopy(model), inputs, targets
        self._forward: Callable[[Tensor], Tensor] = torch.compile(self.model) if compiled else self.model
        self._parameters = list(self.model.parameters())

    def step(self) -> None:
        """Make a step."""
        for parameter in self._parameters:
            parameter.grad = None
        nn.functional.cross_entropy(self._forward(self._inputs), self._targets).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            grads = [parameter.grad for parameter in self._parameters]
            torch._foreach_add_(self._parameters, grads, alpha=-RATE)  # type: ignore[arg-type]


def functional_step(model: nn.Module) -> Callable[[State, State, Tensor, Tensor], tuple[State, State]]:
    """Return the step as a function of parameters, buffers and batch, which returns the new ones."""

    def loss(parameters: State, buffers: State, inputs: Tensor, targets: Tensor) -> tuple[Tensor, State]:
        own = {name: buffer.clone() for name, buffer in buffers.items()}
        outputs = functional_call(model, (parameters, own), (inputs,))
        return nn.functional.cross_entropy(outputs, targets), own

    def step(parameters: State, buffers: State, inputs: Tensor, targets: Tensor) -> tuple[State, State]:
        grads, (_, buffers) = grad_and_value(loss, has_aux=True)(parameters, buffers, inputs, targets)
        return {name: value - RATE * grads[name] for name, value in parameters.items()}, buffers

    return step


class Functional:
    """A step of one client by a function, or of several by one that is mapped over them."""

    def __init__(self, step: Callable[..., tuple[State, State]], state: tuple[State, State], batch: tuple[Tensor, ...]):
        self._function, self.state, self._batch = step, state, batch

    @torch.no_grad()
    def step(self) -> None:
        """Make a step."""
        self.state = self._function(*self.state, *self._batch)


class Captured(StepRule):
    """The passes of a step as one compiled function; batches of another size are computed as they are."""

    def __init__(self, model: nn.Module, batch_size: int) -> None:
        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        self._size, self._parameters, self._buffers = (
            batch_size,
            list[Tensor](parameters.values()),
            list(buffers.values()),
        )

        def loss(values: list[Tensor], old: list[Tensor], inputs: Tensor, targets: Tensor) -> tuple[Tensor, Any]:
            new = [buffer.clone() for buffer in old]
            state = dict(zip([*parameters, *buffers], [*values, *new], strict=True))
            outputs = functional_call(model, state, (inputs,))
            return nn.functional.cross_entropy(outputs, targets), (outputs, new)

        self._passes = torch.compile(grad_and_value(loss, has_aux=True), fullgraph=True, dynamic=False)

    def compute(self, model: nn.Module, inputs: Any, targets: Tensor, *others: Any) -> LossAndOutputs:
        if len(targets) != self._size:
            return super().compute(model, inputs, targets, *others)
        with torch.no_grad():
            grads, (loss, (outputs, new)) = self._passes(self._parameters, self._buffers, inputs, targets)
            for parameter, grad in zip(self._parameters, grads, strict=True):
                parameter.grad = grad
            for buffer, value in zip(self._buffers, new, strict=True):
                buffer.copy_(value)
        return loss, outputs


class Round:
    """A client's round in the package's loop; ``step`` makes all its steps."""

    def __init__(self, model: nn.Module, setting: Setting, captured: bool) -> None:
        self._model = copy.deepcopy(model)
        self._layout, generator = Layout(self._model), torch.Generator().manual_seed(1)
        self._inputs = torch.randn(EXAMPLES, *setting.example, generator=generator)
        self._targets = torch.randint(10, (EXAMPLES,), generator=generator)
        self._settings = LocalTraining(learning_rate=LearningRate(RATE), batch_size=setting.batch)
        self._rule = Captured(self._model, setting.batch) if captured else StepRule()

    def __len__(self) -> int:
        return EXAMPLES

    def batch(self, positions: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """See ``training.batches.Batches``."""
        return self._inputs[positions], self._targets[positions]

    def step(self) -> None:
        """Make the steps of a round."""
        about: dict[str, Any] = {"rule": self._rule, "layout": self._layout, "learning_rate": RATE}
        train(self._model, self, self._settings, stream=lambda purpose: torch.Generator().manual_seed(3), **about)


def clients(model: nn.Module, setting: Setting, count: int, compiled: bool = False) -> Functional:
    """Return the stacked step of so many clients, which begin with the same model."""
    models = [copy.deepcopy(model) for _ in range(count)]
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, setting.batch, *setting.example, generator=generator)
    targets = torch.randint(10, (count, setting.batch), generator=generator)
    mapped = vmap(functional_step(model), randomness="different")
    parameters, buffers = stack_module_state(models)
    state = {name: value.detach() for name, value in parameters.items()}, buffers
    return Functional(torch.compile(mapped) if compiled else mapped, state, (inputs, targets))


def difference(setting: Setting, model: nn.Module, count: int) -> float:
    """Return how far a stacked client is from a plain one after a step without dropout."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, nn.Dropout | nn.Dropout2d):
            module.p = 0.0
    stacked = clients(model, setting, count)
    inputs, targets = stacked._batch
    stacked.step()
    apart, change = 0.0, 0.0
    for k in range(count):
        plain = Plain(model, inputs[k], targets[k])
        plain.step()
        for (name, before), after in zip(model.named_parameters(), plain.model.parameters(), strict=True):
            apart = max(apart, float((stacked.state[0][name][k] - after).abs().max().detach()))
            change = max(change, float((after - before).abs().max().detach()))
    return apart / change


@contextmanager
def at_most(limit: int) -> Iterator[None]:
    """Raise TimeoutError in the block after so many seconds."""

    def stop(number: int, frame: object) -> None:
        raise TimeoutError(f"no end after {limit} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(limit)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def seconds(step: Callable[[], None], repeats: int) -> float:
    """Return the CPU seconds of a step."""
    start = time.process_time()
    for _ in range(repeats):
        step()
    return (time.process_time() - start) / repeats


def row(name: str, setting: Setting, counts: list[int], turns: int) -> list[str]:
    """Return the row of a setting."""
    torch.manual_seed(0)
    model = setting.build().train()
    stacked = {count: clients(model, setting, count) for count in counts}
    one = stacked[counts[0]]
    parameters = {name: value.detach().clone() for name, value in model.named_parameters()}
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    single = Plain(model, one._batch[0][0], one._batch[1][0])
    batch = one._batch[0][0], one._batch[1][0]
    ways: dict[str, tuple[Callable[[], None], int]] = {"plain": (single.step, 1)}
    ways |= {f"stacked {count}": (way.step, count) for count, way in stacked.items()}
    compiling = 0.0
    steps = -(-EXAMPLES // setting.batch)
    ways["plain round"] = Round(model, setting, captured=False).step, steps
    others: dict[str, tuple[Plain | Functional | Round, int]] = {
        "model": (Plain(model, *batch, compiled=True), 1),
        "compiled": (Functional(torch.compile(functional_step(model)), (parameters, buffers), batch), 1),
        "both": (clients(model, setting, counts[-1], compiled=True), counts[-1]),
        "round": (Round(model, setting, captured=True), steps),
    }
    for way, (other, count) in others.items():
        start = time.process_time()
        try:
            with at_most(PATIENCE):
                other.step()
            ways[way] = other.step, count
        except Exception as error:  # a compiler that is not there, or that cannot take the model
            print(f"{name}: {way}: {type(error).__name__}: {str(error)[:400]}", file=sys.stderr)
        print(f"{name}: {way}: {time.process_time() - start:.1f} CPU s to begin", file=sys.stderr, flush=True)
        if way == "compiled":
            compiling = time.process_time() - start
    found: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(turns + 1):
        for way, (step, count) in ways.items():
            found[way].append(seconds(step, max(2, 20 // count)) / count)
        print(f"{name}: turn {turn}", file=sys.stderr, flush=True)
    ratios = {}
    for way, values in found.items():
        plain_way = found["plain round" if way == "round" else "plain"]
        ratios[way] = statistics.median(p / w for p, w in zip(plain_way[1:], values[1:], strict=True))
    shown = ("model", "compiled", "round", *(f"stacked {count}" for count in counts), "both")
    cells = [f"{ratios[way]:.2f}" if way in ratios else "-" for way in shown]
    plain_ms = f"{1000 * statistics.median(found['plain'][1:]):.2f}"
    return [name, plain_ms, *cells, f"{compiling:.0f}", f"{difference(setting, model, counts[0]):.0e}"]


def main(
    turns: Annotated[int, typer.Option(min=1, help="turns of all ways")] = 30,
    stacked: Annotated[str, typer.Option(help="numbers of clients whose models are stacked")] = "4,20",
    only: Annotated[str, typer.Option(help="settings whose name contains this")] = "",
    write: Annotated[Path | None, typer.Option(help="a page with the block 'small_steps'")] = None,
) -> None:
    """Measure a step in each way."""
    torch.set_num_threads(1)
    counts = [int(count) for count in stacked.split(",")]
    rows = []
    with tempfile.TemporaryDirectory() as empty:  # nothing is compiled before
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = empty
        for name, setting in SETTINGS.items():
            if only in name:
                rows.append(row(name, setting, counts, turns))
                print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    head = ["step", "plain, CPU ms", "compiled model", "compiled step", "it in a round"]
    head += [*(f"{count} clients stacked" for count in counts), f"{counts[-1]} stacked and compiled"]
    head += ["compiling a step, CPU s", "difference of a stacked step"]
    text = f"{table(head, rows)}\n\nMedians of {turns} turns. {facts()}"
    print(text)
    if write is not None:
        write_block(write, "small_steps", text)


if __name__ == "__main__":
    typer.run(main)
