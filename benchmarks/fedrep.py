"""FedRep beside its authors' code, in the setting of their script for CIFAR-10: 100
clients with two classes each, their CNN, eleven local epochs, the last one of the body.

    git clone https://github.com/lgcollins/FedRep
    python benchmarks/fedrep.py FedRep --data-dir DIR --rounds 20 --out runs/fedrep

Both sides have one split, one initial model, and the same clients in each round. Their
program runs as it is, but for a line of ``models/test.py`` whose indentation Python 3
refuses. What it does after the last round, ten further epochs of every client's head,
has one example a client here: the paper's number is that of the rounds before.
"""

from __future__ import annotations

import copy
import importlib
import os
import runpy
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")

import numpy as np
import torch
import typer
from flwr.app import ArrayRecord, Context
from torch import nn
from torch.utils.data import Subset

from fedbn_flwr import InProcessGrid, TorchClient, client_app
from fedbn_flwr.strategies import FedRep
from fedbn_flwr.training import LearningRate, LocalTraining

SCRIPT = (
    "--dataset cifar10 --model cnn --num_classes 10 --alg fedrep --lr 0.01"
    " --num_users 100 --shard_per_user 2 --test_freq 50 --local_ep 11 --frac 0.1"
    " --local_rep_ep 1 --local_bs 10"
)
"""The options of the authors' ``scripts/FedRep_cifar10_2shards.sh``."""


class Theirs:
    """The authors' code, and what its program does with one split and model."""

    def __init__(
        self, code: Path, data: Path, out: Path, rounds: int, examples: int, seed: int
    ) -> None:
        out.joinpath("data").mkdir(parents=True, exist_ok=True)
        out.joinpath("save").mkdir(exist_ok=True)
        link = out / "data/cifar10"
        if not link.is_symlink():
            link.symlink_to(data.resolve())
        sys.path.insert(0, str(code.resolve()))
        self.main = code.resolve() / "main_fedrep.py"
        self.tests: Any = types.ModuleType("models.test")
        source = (code / "models/test.py").read_text().replace("\t", " " * 8)
        exec(compile(source, "models/test.py", "exec"), self.tests.__dict__)
        sys.modules["models.test"] = self.tests
        self.utils: Any = importlib.import_module("utils.train_utils")
        # The authors' paths are relative, and their program draws from the global
        # generators.
        os.chdir(out)
        sys.argv = ["main_fedrep.py", *SCRIPT.split(), "--epochs", str(rounds)]
        sys.argv += ["--gpu", "-1", "--m_tr", str(examples), "--m_ft", "1"]
        self.args = importlib.import_module("utils.options").args_parser()
        self.args.device = torch.device("cpu")
        self.sow(seed)
        self.data = self.utils.get_data(self.args)
        self.model: nn.Module = self.utils.get_model(self.args)

    def sow(self, seed: int) -> None:
        """Seed all generators."""
        torch.manual_seed(seed)
        np.random.seed(seed)
        importlib.import_module("random").seed(seed)

    def run(
        self, drawn: list[list[int]], told: Callable[[np.ndarray], None], seed: int
    ) -> None:
        """Tell each client's accuracy, in per cent, after each round with a test."""
        test = self.tests.test_img_local_all
        random: Any = np.random
        choice = random.choice
        sizes = np.array([len(examples) for examples in self.data[3].values()])
        rounds = iter(drawn)

        def note(*given: Any, **named: Any) -> tuple[float, float]:
            right, loss = test(*given, **{**named, "return_all": True})
            told(right / sizes)
            return right.sum() / sizes.sum(), loss.sum() / sizes.sum()

        def choose(clients: Any, size: Any = None, replace: bool = True) -> Any:
            return next(rounds, range(self.args.num_users))

        self.tests.test_img_local_all = note
        self.utils.get_data = lambda args: copy.copy(self.data)
        self.utils.get_model = lambda args: copy.deepcopy(self.model)
        self.sow(seed)
        random.choice = choose
        try:
            runpy.run_path(str(self.main), run_name="__main__")
        finally:
            random.choice = choice


def ours(
    theirs: Theirs, rounds: int, seed: int
) -> tuple[list[list[int]], list[np.ndarray]]:
    """Return the clients of each round, and each client's accuracy after it."""
    train, test, of_train, of_test = theirs.data
    args = theirs.args
    training = LocalTraining(
        learning_rate=LearningRate(args.lr),
        local_epochs=args.local_ep,
        batch_size=args.local_bs,
        sgd_momentum=args.momentum,
        weight_decay=1e-4,
    )

    def client_fn(context: Context) -> TorchClient:
        client = int(context.node_config["partition-id"])
        own = Subset(train, of_train[client][: args.m_tr])
        tested = Subset(test, of_test[client])
        return TorchClient(build, own, tested, training, context=context, seed=seed)

    def build() -> nn.Module:
        return copy.deepcopy(theirs.model)

    steps = min(args.m_tr, len(of_train[0])) // args.local_bs
    strategy = FedRep(
        fraction_train=args.frac,
        head_steps=steps * (args.local_ep - args.local_rep_ep),
        seed=seed,
    )
    start = ArrayRecord(theirs.model.state_dict())
    with InProcessGrid(client_app(client_fn), args.num_users) as grid:
        strategy.start(grid, start, num_rounds=rounds, timeout=1e6)
    tests = []
    for report in strategy.reports:
        of_clients = [report.evaluations[str(i)] for i in range(args.num_users)]
        tests.append(100 * np.array([one["accuracy"] for one in of_clients]))
    drawn: list[list[Any]] = [report.participants for report in strategy.reports]
    return drawn, tests


def main(
    code: Path,
    data_dir: Annotated[Path, typer.Option()],
    out: Annotated[Path, typer.Option()],
    rounds: int = 20,
    examples: int = 500,
    seed: int = 1,
) -> None:
    """Run both sides; print the accuracy of all clients, and of those that have trained
    before, in the tests that both have.
    """
    torch.set_num_threads(1)
    theirs = Theirs(code, data_dir, out, rounds, examples, seed)
    drawn, here = ours(theirs, rounds, seed)
    # The authors test in the last ten rounds, and after the further epochs.
    tested = iter(range(max(0, rounds - 10), rounds))

    def told(there: np.ndarray) -> None:
        number = next(tested, None)
        if number is None:
            return
        trained = sorted({client for group in drawn[: number + 1] for client in group})
        print(f"round {number + 1}, {len(trained)} clients have trained")
        for side, tests in (("here", here[number]), ("authors", there)):
            means = f"all {tests.mean():.2f}, trained {tests[trained].mean():.2f}"
            print(f"  {side}: {means}", flush=True)

    theirs.run(drawn, told, seed)


if __name__ == "__main__":
    typer.run(main)
