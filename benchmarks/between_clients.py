"""Where a model errs when each client has classes of its own: between the clients, or between a client's classes.

    python benchmarks/between_clients.py runs/fixbn-table-4/BN/all/seed-0 --data-dir FOLDER

The run is finished and has ``partition: classes``: client k has the classes from k * classes-per-client on. The test
set has as many examples of each class. For the statistics that the run saved, for those of mixed test batches of 500,
and for those of test batches that have the classes of one client only:

- accuracy;
- right client: the predicted class is one of the client that has the true class;
- within: accuracy when only this client's classes are offered;
- equal means: accuracy after one number for each class is added to its logit, such that all classes have the same mean
  probability. It needs no labels: what it gains was lost by a preference for some classes.

Some ten seconds on one core for ResNet-20 and the 10,000 images of CIFAR-10, for each of the three.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from torch import nn

from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.lab.data import DATASETS, Subset, load_dataset
from fedbn_flwr.lab.finished_runs.saved_model import Choice, load_model
from fedbn_flwr.training.evaluation import without_running_statistics

BATCH = 500


def between_clients(targets: np.ndarray, log_p: np.ndarray, classes_per_client: int) -> dict[str, float]:
    """Return the four figures for ``targets`` (N,) and log probabilities (N, classes)."""
    classes = log_p.shape[1]
    predicted = log_p.argmax(1)
    client_of = np.arange(classes) // classes_per_client
    offered = np.where(client_of[None, :] == client_of[targets][:, None], log_p, -np.inf)
    added = np.zeros(classes)
    for _ in range(1000):
        p = np.exp(log_p + added)
        added -= 0.5 * np.log((p / p.sum(1, keepdims=True)).mean(0) * classes)
    return {
        "accuracy": float((predicted == targets).mean()),
        "right client": float((client_of[predicted] == client_of[targets]).mean()),
        "within": float((offered.argmax(1) == targets).mean()),
        "equal means": float(((log_p + added).argmax(1) == targets).mean()),
    }


@torch.inference_mode()
def log_probabilities(model: nn.Module, examples: Subset, batches: Sequence[torch.Tensor]) -> np.ndarray:
    """Return log p (N, classes) in the order of the examples, float64."""
    found = np.empty((0, 0))
    for positions in batches:
        values = model(examples.batch(positions)[0]).log_softmax(1).double().numpy()
        found = found if found.size else np.empty((len(examples), values.shape[1]))
        found[positions.numpy()] = values
    return found


def main(run: Path, data_dir: Annotated[Path, typer.Option(help="The folder of the data.")] = Path()) -> None:
    """Print a table in Markdown."""
    saved = load_model(run, Choice())
    per_client = saved.config.classes_per_client
    if saved.config.partition != "classes":
        raise typer.BadParameter(f"{run} has partition={saved.config.partition}; it must be 'classes'.")
    data = load_dataset(DATASETS[saved.config.dataset], data_dir)
    examples = Subset(data.test, None, mean=data.mean, std=data.std)
    targets = data.test.targets
    mixed = torch.split(torch.randperm(len(targets), generator=torch.Generator().manual_seed(0)), BATCH)
    of_one = list[torch.Tensor]()
    for first in range(0, data.num_classes, per_client):
        of_one += torch.split(mixed_of(targets, range(first, first + per_client)), BATCH)
    ways = [
        ("saved", mixed, False),
        ("of mixed test batches", mixed, True),
        ("of test batches with one client's classes", of_one, True),
    ]
    if not split_state(saved.model).statistics:
        ways = [("none", mixed, False)]
    print("| statistics | accuracy | right client | within | equal means |\n|---|---|---|---|---|")
    for name, batches, own in ways:
        with without_running_statistics(saved.model) if own else nullcontext():
            log_p = log_probabilities(saved.model, examples, batches)
        figures = between_clients(targets.numpy(), log_p, per_client).values()
        print(f"| {name} |" + "".join(f" {100 * value:.2f} |" for value in figures), flush=True)


def mixed_of(targets: torch.Tensor, classes: range) -> torch.Tensor:
    """Return the positions of the examples of ``classes``, shuffled."""
    positions = torch.isin(targets, torch.tensor(list(classes))).nonzero().flatten()
    return positions[torch.randperm(len(positions), generator=torch.Generator().manual_seed(0))]


if __name__ == "__main__":
    typer.run(main)
