"""Flower's server optimizers on a model with BatchNorm, beside this package's: the
lowest running variance, and NaN.

    python benchmarks/server_optimizers.py

Two clients, whose inputs are small (deviation 0.05 and 0.15), so that running variances
fall from their initial 1; an MLP with one BN layer, 5 full-batch steps a round, 20
rounds, seed 0. Both sides drive the same client app.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")

import flwr.serverapp.strategy as flower
import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from fedbn_flwr import InProcessGrid, TorchClient, client_app, strategies
from fedbn_flwr.messages.records import from_record, tensors, to_record
from fedbn_flwr.training import LearningRate, LocalTraining
from fedbn_flwr.training.evaluation import evaluate

SETTINGS: dict[str, dict[str, float]] = {
    "FedAvgM": {"server_momentum": 0.9},
    "FedAdam": {"eta": 0.1},
    "FedYogi": {"eta": 0.1},
    "FedAdagrad": {"eta": 0.1},
}
DEVIATIONS = (0.05, 0.15)


class Points:
    """A client's data: 200 points in 8 dimensions; the class is the sign of their sum."""

    def __init__(self, client: int) -> None:
        generator = torch.Generator().manual_seed(client)
        self.inputs = torch.randn(200, 8, generator=generator) * DEVIATIONS[client]
        self.targets = (self.inputs.sum(1) > 0).long()

    def __len__(self) -> int:
        return len(self.targets)

    def batch(
        self, positions: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        return self.inputs[positions], self.targets[positions]


@dataclass
class Outcome:
    """What became of a run: per round, the lowest running variance and the test loss of
    the global model.
    """

    variances: list[float]
    losses: list[float]
    accuracy: float

    @property
    def first_negative(self) -> int | None:
        """The round after which a running variance was negative."""
        return next((i for i, v in enumerate(self.variances) if v < 0), None)

    @property
    def first_nan(self) -> int | None:
        """The round after which the test loss was NaN."""
        return next((i for i, loss in enumerate(self.losses) if math.isnan(loss)), None)


def model() -> nn.Module:
    """Return the MLP, the same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2)
        )


def measure(
    make: Callable[..., Any], settings: Mapping[str, float], rounds: int = 20
) -> Outcome:
    """Run a strategy of either side on the toy."""
    data = [Points(client) for client in range(len(DEVIATIONS))]
    training = LocalTraining(
        learning_rate=LearningRate(0.5), batch_size=0, local_steps=5
    )
    outcome = Outcome([], [], math.nan)

    def client_fn(context: Context) -> TorchClient:
        own = data[int(context.node_config["partition-id"])]
        return TorchClient(model(), own, own, training, context=context)

    def look(_: int, arrays: ArrayRecord) -> MetricRecord:
        net = model()
        state = {
            name: value.to(net.state_dict()[name].dtype)
            for name, value in tensors(from_record(arrays)).items()
        }
        net.load_state_dict(state)
        results = [evaluate(net, own) for own in data]
        outcome.variances.append(float(state["1.running_var"].min()))
        outcome.losses.append(sum(result.loss for result in results) / len(results))
        outcome.accuracy = sum(result.metrics["accuracy"] for result in results) / len(
            results
        )
        return MetricRecord()

    with InProcessGrid(client_app(client_fn), len(data)) as grid:
        make(fraction_evaluate=0.0, **settings).start(
            grid=grid,
            initial_arrays=to_record(model().state_dict()),
            num_rounds=rounds,
            evaluate_fn=look,
        )
    return outcome


def main() -> None:
    """Print the table."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    table = Table(
        "strategy",
        "settings",
        "lowest running_var",
        "negative in",
        "NaN in",
        "accuracy after, %",
    )
    for name, settings in SETTINGS.items():
        for owner, module in (("Flower", flower), ("ours", strategies)):
            outcome = measure(getattr(module, name), settings)
            negative, nan = (
                f"round {r}" if r else "never"
                for r in (outcome.first_negative, outcome.first_nan)
            )
            accuracy = (
                "-"
                if math.isnan(outcome.losses[-1])
                else f"{100 * outcome.accuracy:.1f}"
            )
            shown = ", ".join(f"{key} {value}" for key, value in settings.items())
            table.add_row(
                f"{name} ({owner})",
                shown,
                f"{min(outcome.variances):.4f}",
                negative,
                nan,
                accuracy,
            )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
