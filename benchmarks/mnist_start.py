"""What brings FedTAN closer to centralized training on MNIST: the start, the rate, the local steps, the tests.

    python benchmarks/mnist_start.py --data-dir DIR                               # every variant, seed 0
    python benchmarks/mnist_start.py --data-dir DIR --variant "lr 0.1" --seeds 0,1,2

The setting of ``studies/fedtan-figure-6.yaml`` (FedTAN's paper, arXiv:2301.02982, 6.3), two classes a client, one
thing changed at a time. "centralized" is FedAvg with one client that holds everything: without momentum that is the
same plain loop. Both are tested with the running statistics and with those of the test batches (500 images). Variants
of fewer local steps have as many more rounds, so that all train for the same number of steps.
"""

from __future__ import annotations

import logging
import os
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")

import torch
import typer
from flwr.app import Context
from torch import nn

from fedbn_flwr import InProcessGrid, TorchClient, client_app
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.data.subset import Subset
from fedbn_flwr.lab.partitioned.partitioned_data import partitioned_data
from fedbn_flwr.lab.setup import local_training, make_model, make_strategy
from fedbn_flwr.messages.records import from_record, tensors, to_record
from fedbn_flwr.seeds import numpy_generator, torch_generator
from fedbn_flwr.training.evaluation import evaluate, without_running_statistics

Scalar = bool | int | float | str
SETTING: Mapping[str, Scalar] = {
    "dataset": "mnist",
    "model": "mlp",
    "local-steps": 5,
    "batch-size": 128,
    "learning-rate": 0.5,
}
METHODS: Mapping[str, Mapping[str, Scalar]] = {
    "centralized": {"strategy": "fedavg", "partition": "iid", "num-clients": 1},
    "FedTAN": {"strategy": "fedtan", "partition": "classes", "classes-per-client": 2, "num-clients": 5},
}


def kaiming_normal(model: nn.Module, generator: torch.Generator) -> None:
    """Start as the paper's ResNet-20 does: Kaiming-normal weights (fan-in, gain sqrt 2), biases zero."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight, generator=generator)
            nn.init.zeros_(module.bias)


def larger_eps(model: nn.Module, generator: torch.Generator) -> None:
    """Set BatchNorm's eps to 1e-3."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eps = 1e-3


@dataclass(frozen=True)
class Variant:
    """What differs from the setting: config keys, those of centralized alone, pixels, the model, the clients' sizes.

    ``pixels`` are mean and deviation; ``each`` is the number of images of every client, so that all p_i are equal.
    With ``reestimated`` the running statistics of the test are those of all training images under the final weights.
    """

    keys: Mapping[str, Scalar] = field(default_factory=dict)
    centralized: Mapping[str, Scalar] = field(default_factory=dict)
    each: int = 0
    reestimated: bool = False
    pixels: tuple[float, float] | None = None
    change: Callable[[nn.Module, torch.Generator], None] | None = None


VARIANTS: Mapping[str, Variant] = {
    "as it is": Variant(),
    "pixels in [0, 1]": Variant(pixels=(0.0, 1.0)),
    "pixels in [-1, 1]": Variant(pixels=(0.5, 0.5)),
    "Kaiming-normal weights": Variant(change=kaiming_normal),
    "eps 1e-3": Variant(change=larger_eps),
    "lr 0.1": Variant({"learning-rate": 0.1}),
    "lr 0.05 from round 251": Variant({"lr-decay-at": "0.5"}),
    "E = 1": Variant({"local-steps": 1}),
    "E = 1, centralized on 640": Variant({"local-steps": 1}, {"batch-size": 640}),
    "E = 2": Variant({"local-steps": 2}),
    "E = 10": Variant({"local-steps": 10}),
    "centralized on 640": Variant(centralized={"batch-size": 640}),
    "momentum 0.9, lr 0.05": Variant({"sgd-momentum": 0.9, "learning-rate": 0.05}),
    "without replacement": Variant({"sampling": "without-replacement"}),
    "10,000 images each": Variant(each=10_000),
    "statistics of all training images": Variant(reestimated=True),
    "GroupNorm, FedAvg": Variant({"norm": "group", "strategy": "fedavg"}),
    "no norm, FedAvg": Variant({"norm": "none", "strategy": "fedavg"}),
}


def reestimate(model: nn.Module, images: Subset) -> None:
    """Set the running statistics to the mean over batches of 500 of the images."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.reset_running_stats()
            module.momentum = None  # the plain mean
    model.train()
    with torch.no_grad():
        for positions in torch.split(torch.arange(len(images)), 500):
            model(images.batch(positions)[0])


def accuracies(config: Config, variant: Variant) -> tuple[float, float]:
    """Train, and return the test accuracy in per cent with running statistics, and with the test batches' own."""
    data = partitioned_data(config, config.num_clients)
    if variant.each and config.num_clients > 1:
        rng = numpy_generator(config.seed, "mnist-start", "each")
        data = replace(data, train=tuple(rng.permutation(indices)[: variant.each] for indices in data.train))
    if variant.pixels:
        mean, std = variant.pixels
        data = replace(data, dataset=replace(data.dataset, mean=(mean,), std=(std,)))

    def model() -> nn.Module:
        made = make_model(config)
        if variant.change:
            variant.change(made, torch_generator(config.seed, "mnist-start"))
        return made

    def client_fn(context: Context) -> TorchClient:
        own = data.train_view(int(context.node_config["partition-id"]))
        return TorchClient(model(), own, {}, local_training(config), context=context, seed=config.seed)

    final = model()
    strategy = make_strategy(config, final, config.num_clients)
    strategy.fraction_evaluate = 0.0
    with InProcessGrid(client_app(client_fn), config.num_clients, torch_threads=1) as grid:
        result = strategy.start(
            grid=grid, initial_arrays=to_record(final.state_dict()), num_rounds=config.num_server_rounds
        )
    if refused := [reason for report in strategy.reports for reason in report.rejected.values()]:
        raise RuntimeError(f"a client was refused: {refused[0]}")
    final.load_state_dict(tensors(from_record(result.arrays)))
    test = data.test_view()
    if variant.reestimated:
        reestimate(final, data.train_view())
    running = evaluate(final, test)
    with without_running_statistics(final):
        own = evaluate(final, test)
    return 100 * running.accuracy, 100 * own.accuracy


def main(
    data_dir: Annotated[str, typer.Option(help="folder with MNIST/raw")],
    variant: Annotated[list[str] | None, typer.Option(help="one or more; all without it")] = None,
    seeds: Annotated[str, typer.Option(help="comma list")] = "0",
    rounds: Annotated[int, typer.Option(min=1)] = 500,
) -> None:
    """Print a table of the variants, a row as soon as it is there."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    columns = [f"{method}, {way}" for method in METHODS for way in ("running", "test batches' own")]
    print(f"| variant | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}", flush=True)
    for name in variant or VARIANTS:
        found: list[list[float]] = [[] for _ in columns]
        for seed in map(int, seeds.split(",")):
            both: list[float] = []
            for method, own in METHODS.items():
                keys = {**SETTING, **own, **VARIANTS[name].keys, "data-dir": data_dir, "seed": seed}
                if method == "centralized":
                    keys |= VARIANTS[name].centralized
                keys["num-server-rounds"] = rounds * int(SETTING["local-steps"]) // int(keys["local-steps"])
                both += accuracies(Config.make(keys), VARIANTS[name])
            for values, value in zip(found, both, strict=True):
                values.append(value)
        print(f"| {name} | {' | '.join(map(_cell, found))} |", flush=True)


def _cell(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{spread}"


if __name__ == "__main__":
    typer.run(main)
