"""The public code of HBN beside ours, in its default setting, and what its departures from the paper amount to.

    git clone https://github.com/Hongyao-Chen/HybridBN && git -C HybridBN checkout 1c0e151
    python benchmarks/hybridbn.py HybridBN --data-dir DIR --rounds 10 --write docs/results/which-method.md

DIR has cifar-10-batches-py. The script ``FedHBN_main.py`` runs unchanged, with fewer rounds and without a GPU: 100
clients, 10 a round, Dirichlet(0.6), batches of 4, one epoch, rate 0.01, momentum 0.9. What is read off it: the
statistics that the server makes, and the examples from which clients measure. Ours has the same clients' examples, the
same network, augmentation, rate, gradient clipping and initial weights, and draws its own clients of each round.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import runpy
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from flwr.app import ArrayRecord, Context
from measure import facts, table, write_block
from torch import nn

from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.client import TorchClient, client_app
from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.data import Subset
from fedbn_flwr.lab.partitioned.partitioned_data import partitioned_data
from fedbn_flwr.messages.records import from_record, tensors
from fedbn_flwr.strategies import STRATEGIES
from fedbn_flwr.training import LearningRate, LocalTraining
from fedbn_flwr.training.evaluation import evaluate
from fedbn_flwr.training.wrappers import load_state

DECAY = 0.998  # of its rate, in each round
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"recalibrate": True},
    {"recalibrate": True, "statistics_momentum": 0.002, "statistics_warm_up": 0},  # its statistics in training
)
"""The settings of ``hbn`` that are run beside it."""


class Seen:
    """What is read off the public code."""

    def __init__(self) -> None:
        self.clients: list[Any] = []
        self.start: dict[str, torch.Tensor] = {}
        self.kept: list[dict[str, torch.Tensor]] = []  # the saved model after each round
        self.tested: list[dict[str, torch.Tensor]] = []  # the tested one
        self.accuracies: list[float] = []


def main(
    code: Annotated[Path, typer.Argument(help="A checkout of Hongyao-Chen/HybridBN at 1c0e151.")],
    data_dir: Annotated[Path, typer.Option(help="Folder with cifar-10-batches-py.")],
    rounds: Annotated[int, typer.Option(help="Rounds of both.")] = 10,
    write: Annotated[Path | None, typer.Option(help="Page with a place for the tables.")] = None,
) -> None:
    """Run both, and print the tables."""
    logging.getLogger("flwr").setLevel(logging.WARNING)
    config = Config.make(
        {"dataset": "cifar10", "model": "lenet", "data-dir": str(data_dir.resolve()), "augment": "crop4,flip"}
    )
    data = partitioned_data(config, 10)
    with public_modules(code.resolve()):
        seen = _public(data_dir.resolve(), rounds)
        network = _network(seen.start)
        saved = [_accuracy(network, _renamed(state), data.test_view()) for state in seen.kept]
    ours, again, slow = (_ours(network, seen, data, rounds, settings) for settings in WAYS)
    shown = sorted({1, 2, 5, rounds, *range(10, rounds + 1, 10)})
    rows = [
        ["public code, as it tests", *(f"{seen.accuracies[r - 1]:.1f}" for r in shown if r <= rounds)],
        ["public code, the model it saves", *(f"{saved[r - 1]:.1f}" for r in shown if r <= rounds)],
        ["`hbn` here", *(f"{ours[r - 1]:.1f}" for r in shown if r <= rounds)],
        ["`hbn` here, `recalibrate`", *(f"{again[r - 1]:.1f}" for r in shown if r <= rounds)],
        ["the same, with its momentum of 0.002 from 0 and 1", *(f"{slow[r - 1]:.1f}" for r in shown if r <= rounds)],
    ]
    text = table(["accuracy, %, after round", *(str(r) for r in shown if r <= rounds)], rows)
    text += f"\n\n{table(['departure', 'number'], _departures(seen, data))}\n\n{facts()}"
    print(text)
    if write:
        write_block(write, "hybridbn", text)


@contextlib.contextmanager
def public_modules(code: Path) -> Iterator[None]:
    """Let its modules be imported; seaborn is only for a picture that the script does not draw."""
    sys.path.insert(0, str(code))
    sys.modules.setdefault("seaborn", types.ModuleType("seaborn"))
    try:
        yield
    finally:
        sys.path.remove(str(code))


def _public(data_dir: Path, rounds: int) -> Seen:
    """Run the script, which reads and writes below the working folder."""
    from FedBaseline.models import Nets, Test  # type: ignore[import-not-found]
    from FedBaseline.models.FedHBN import server  # type: ignore[import-not-found]
    from FedBaseline.sampling import sampling  # type: ignore[import-not-found]

    seen, divide, test, net = Seen(), sampling.DatasetDivide, Test.test_img, Nets.set_sever_net
    pooled = server.Sever.aggregate_only_buffer

    def divided(*args: Any, **kwargs: Any) -> Any:
        seen.clients = divide(*args, **kwargs)
        return seen.clients

    def made(args: Any) -> Any:
        model = net(args)
        seen.start = {name: value.clone() for name, value in model.state_dict().items()}
        return model

    def aggregated(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = pooled(self, *args, **kwargs)
        (seen.kept if "avg_momentum" in kwargs else seen.tested).append({k: v.clone() for k, v in state.items()})
        return state

    def tested(model: Any, dataset: Any, args: Any) -> Any:
        with torch.no_grad():
            accuracy, loss = test(model, dataset, args)
        seen.accuracies.append(float(accuracy))
        return accuracy, loss

    sampling.DatasetDivide, Test.test_img, Nets.set_sever_net = divided, tested, made
    server.Sever.aggregate_only_buffer = aggregated
    folder, argv, log = Path.cwd(), sys.argv, io.StringIO()
    script = Path(Nets.__file__).parents[2] / "FedHBN_main.py"
    with tempfile.TemporaryDirectory() as work:
        (Path(work) / "data" / "cifar10").mkdir(parents=True)
        (Path(work) / "Savedmodel").mkdir()
        (Path(work) / "data" / "cifar10" / "cifar-10-batches-py").symlink_to(data_dir / "cifar-10-batches-py")
        try:
            os.chdir(work)
            sys.argv = [str(script), "--communication_round", str(rounds - 1), "--gpu", "-1"]
            with contextlib.redirect_stdout(log):
                runpy.run_path(str(script), run_name="__main__")
        finally:
            os.chdir(folder)
            sys.argv = argv
            sampling.DatasetDivide, Test.test_img, Nets.set_sever_net = divide, test, net
            server.Sever.aggregate_only_buffer = pooled
    return seen


def _network(start: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return its network with torch's BatchNorm and its initial weights."""
    from FedBaseline.models.Nets import SimpleCNN  # type: ignore[import-not-found]

    network: nn.Module = SimpleCNN(types.SimpleNamespace(num_classes=10))
    known = network.state_dict()
    network.load_state_dict({name: start.get(name, value).reshape(value.shape) for name, value in known.items()})
    return network


def _renamed(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return its state under the names of torch's BatchNorm, whose statistics it calls global."""
    left_out = ("distribution_factor", "running_num", "running_mean", "running_var")
    found = {name: value for name, value in state.items() if not name.endswith(left_out)}
    return {name.replace("global_", "running_"): value for name, value in found.items()}


def _accuracy(network: nn.Module, state: Mapping[str, torch.Tensor], test: Any) -> float:
    network.load_state_dict({**network.state_dict(), **state})
    return 100 * evaluate(network, test).accuracy


def _ours(network: nn.Module, seen: Seen, data: Any, rounds: int, own: Mapping[str, Any]) -> list[float]:
    """Return the accuracies of ``hbn`` with these settings after each round."""
    network.load_state_dict({**_network(seen.start).state_dict()})
    start = {name: value.clone() for name, value in network.state_dict().items()}
    settings = LocalTraining(
        learning_rate=LearningRate(0.01, tuple(range(1, rounds)), (DECAY,) * (rounds - 1)),
        batch_size=4,
        local_epochs=1,
        sgd_momentum=0.9,
        gradient_clip_norm=10.0,
        memory_format="contiguous",  # its forward pass has a view
    )
    examples = data.dataset.train

    def client_fn(context: Context) -> TorchClient:
        own = np.asarray(seen.clients[int(context.node_config["partition-id"])].idxs)
        scale: dict[str, Any] = {"mean": data.dataset.mean, "std": data.dataset.std}
        view = Subset(examples, own, augment=data.augment, **scale)
        return TorchClient(build, view, Subset(examples, own[:0], **scale), settings, context=context)

    def build() -> nn.Module:
        return _network(seen.start)

    found: list[float] = []

    def after_round(server_round: int, arrays: ArrayRecord) -> None:
        if server_round:
            load_state(network, tensors(from_record(arrays)))
            found.append(100 * evaluate(network, data.test_view()).accuracy)

    strategy = STRATEGIES["hbn"](fraction_train=0.1, fraction_evaluate=0.0, **own)
    strategy.parts = split_state(network)
    with InProcessGrid(client_app(client_fn), len(seen.clients), seed=42) as grid:
        strategy.start(grid, ArrayRecord(start), rounds, evaluate_fn=after_round)
    return found


def _departures(seen: Seen, data: Any) -> list[list[str]]:
    labels = data.dataset.train.labels.numpy()
    first = [labels[np.asarray(client.idxs)[:64]] for client in seen.clients if client.datasize]
    shares = np.mean([np.bincount(own, minlength=10) / len(own) for own in first], axis=0) * 100
    sizes = np.array([client.datasize for client in seen.clients])
    name = "conv1.1.global_var"
    kept, tested = (state[name].numpy() for state in (seen.kept[-1], seen.tested[-1]))
    return [
        [
            "a client's statistics come from its first 64 examples: mean share of classes 0 to 9 in them, %",
            ", ".join(f"{share:.0f}" for share in shares),
        ],
        ["share of clients' examples in them, %", f"{100 * np.minimum(sizes, 64).sum() / sizes.sum():.0f}"],
        [
            "mean running variance of the first layer, saved / tested",
            f"{float(kept.mean()):.3f} / {float(tested.mean()):.3f}",
        ],
        [
            f"accuracy at its best test, which it reports, mean of its last {len(seen.accuracies[-10:])}, and the last",
            f"{max(seen.accuracies):.1f}, {np.mean(seen.accuracies[-10:]):.1f}, {seen.accuracies[-1]:.1f}",
        ],
        ["examples that a round leaves out (a last smaller batch), % of the clients' examples", _dropped(sizes)],
    ]


def _dropped(sizes: Any) -> str:
    left = np.where(sizes < 4, sizes, sizes % 4)
    return f"{100 * left.sum() / sizes.sum():.2f}"


if __name__ == "__main__":
    typer.run(main)
