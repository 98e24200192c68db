"""This package: ``TorchClient`` and its strategies, in process, or in Flower's Ray
simulation (variant ``ray``).

The clients have the images as bytes in one ``Samples``, as ``fedbn-flwr run`` has them;
a batch becomes floating point when it is taken. Variant ``bf16``: training under
bfloat16 autocast; ``compile``: the model is compiled in round 1; ``fedtan``: FedTAN
instead of FedAvg.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import cast

import numpy as np
import torch
from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from peers.flower_rounds import ray_backend, strategy_arguments, timed
from peers.work import Clock, Job, accuracy, contend, load_data, make_model
from torch import nn

from fedbn_flwr import InProcessGrid, TorchClient, client_app
from fedbn_flwr.lab.data import Samples, Subset
from fedbn_flwr.machine import keep_freed_memory
from fedbn_flwr.messages.records import to_record
from fedbn_flwr.strategies import FedAvg, FedBN, FedTAN
from fedbn_flwr.training import LearningRate, LocalTraining, batches_of
from fedbn_flwr.training.batches import Batches


@cache
def samples(folder: str, part: str) -> Samples:
    """Return the training or test images as bytes; each process loads them once."""
    pixels, targets = (
        np.load(Path(folder) / f"{part}-{name}.npy", mmap_mode="c")
        for name in ("pixels", "targets")
    )
    return Samples(torch.from_numpy(pixels), torch.from_numpy(targets))


def build(name: str, compiled: bool) -> nn.Module:
    """Return a model, as a user builds it."""
    model = make_model(name)
    return cast(nn.Module, torch.compile(model)) if compiled else model


@cache
def builder(name: str, compiled: bool) -> Callable[[], nn.Module]:
    """Return a function that builds a model, the same one for each message, so that a
    process builds it once.
    """
    return partial(build, name, compiled)


def make_client_app(job: Job) -> ClientApp:
    """Return the clients of a job."""
    setting, folder = job.work, str(Path(job.data) / job.work.dataset)
    norm = json.loads((Path(folder) / "norm.json").read_text())
    settings = LocalTraining(
        learning_rate=LearningRate(setting.learning_rate),
        batch_size=setting.batch,
        local_steps=setting.local_steps,
        amp=job.variant == "bf16",
    )

    def client_fn(context: Context) -> TorchClient:
        client = int(context.node_config["partition-id"])
        first = client * setting.examples
        own: Batches = Subset(
            samples(folder, "train"),
            torch.arange(first, first + setting.examples),
            **norm,
        )
        if setting.source:
            from peers.sources import client_loader

            own = batches_of(client_loader(job, client))
        tests = samples(folder, "test")
        test = Subset(tests, None if setting.evaluate else torch.arange(2000), **norm)
        return TorchClient(
            builder(setting.model, job.variant == "compile"),
            own,
            test,
            settings,
            context=context,
        )

    return client_app(client_fn, num_examples=lambda context: setting.examples)


def main(job: Job, clock: Clock) -> float:
    """Do the rounds and the last one's evaluation."""
    setting = job.work
    model = make_model(setting.model)
    kind = FedTAN if job.variant == "fedtan" else FedAvg
    strategy = timed(FedBN if setting.personal else kind, clock, setting)(
        **strategy_arguments(setting)
    )
    results = []

    def run(grid: Grid) -> None:
        results.append(
            strategy.start(
                grid, to_record(model.state_dict()), num_rounds=job.rounds + 1
            )
        )

    app = make_client_app(job)
    if job.variant == "ray":
        # Import it here, because only the Ray rows need it, and it takes 55 MB.
        from flwr.simulation import run_simulation

        server = ServerApp()

        @server.main()
        def serve(grid: Grid, context: Context) -> None:
            run(grid)

        run_simulation(
            server, app, setting.clients, backend_config=ray_backend(job.workers)
        )
    else:
        # Keep freed memory, as the command does.
        keep_freed_memory()
        with InProcessGrid(app, setting.clients, workers=job.workers) as grid:
            run(grid)
    if any(report.rejected for report in strategy.reports):
        raise RuntimeError("clients failed")
    if setting.personal:
        return float(results[0].evaluate_metrics_clientapp[job.rounds + 1]["accuracy"])
    model.load_state_dict(results[0].arrays.to_torch_state_dict())
    return accuracy(model, load_data(job.data, setting.dataset))


if __name__ == "__main__":
    from peers import ours

    logging.getLogger("flwr").setLevel(logging.ERROR)
    contend(ours.main, "fedbn-flwr")
