"""FedTAN's Theorem 1 in a run: B_i, V_i and the gradient over the rounds, for iid data,
Dirichlet(0.1) and two classes.

    python benchmarks/theorem_1.py --data-dir DIR --out runs/theorem-1

Theorem 1 (arXiv:2301.02982, eq. (12)) bounds the mean over the rounds of ||grad F||^2
by terms that vanish with the number of steps, and by 6 sum p_i B_i^2, which does not.
FedAvg with BatchNorm trains the setting of ``studies/fedtan-figure-6.yaml``; in some
rounds ``deviations`` gives, at the model that the round starts with, sum p_i B_i^2, sum
p_i V_i^2 and ||grad F||^2, the last one as sum p_i ||g_i||^2 - sum p_i V_i^2. The paper
takes all data of a client; here ``--examples`` of them, drawn once, stand for D_i.
Written are ``OUT.csv`` and ``OUT.svg``.

B_i = || g_i(S_i, dS_i) - g_i(S, dS) ||, the norm over all trainable parameters, in one
step from the same weights. g_i is the gradient of client i's own batch loss. S_i are
the statistics of its batch, and dS_i the gradients through them, as in plain training;
S and dS are those of all batches together, as in FedTAN's synchronised step (``sync``)
with weights p_i in proportion to the batch sizes. Without BatchNorm B_i is 0; with
equal data it is the noise of a batch.

V_i = || g_i(S, dS) - G ||, G = sum p_j g_j(S, dS), the gradient of all batches
together. So sum p_i V_i^2 + ||G||^2 = sum p_i ||g_i(S, dS)||^2.
"""

from __future__ import annotations

import csv
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")

import torch
import typer
from flwr.app import ArrayRecord, Context
from torch import Tensor, nn

from fedbn_flwr import InProcessGrid, TorchClient, client_app
from fedbn_flwr.batchnorm.sync import combine, synchronised
from fedbn_flwr.doctor.by_batch import eval_layers
from fedbn_flwr.doctor.clients import outputs_of
from fedbn_flwr.doctor.mismatch import default_loss
from fedbn_flwr.errors import NormLayerError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.partitioned.partitioned_data import (
    PartitionedData,
    partitioned_data,
)
from fedbn_flwr.lab.setup import local_training, make_model, make_strategy
from fedbn_flwr.machine import threads
from fedbn_flwr.messages.records import from_record, tensors, to_record
from fedbn_flwr.training.batches import inputs_for
from fedbn_flwr.training.evaluation import evaluate
from fedbn_flwr.training.freezing import layers_of
from fedbn_flwr.training.model_state import copied
from fedbn_flwr.training.randomness import torch_generator

Scalar = bool | int | float | str
SETTING: Mapping[str, Scalar] = {
    "strategy": "fedavg",
    "num-clients": 5,
    "local-steps": 5,
    "batch-size": 128,
    "learning-rate": 0.5,
}
SPLITS: Mapping[str, Mapping[str, Scalar]] = {
    "iid": {"partition": "iid"},
    "Dirichlet(0.1)": {"partition": "dirichlet", "partition-alpha": 0.1},
    "two classes a client": {"partition": "classes", "classes-per-client": 2},
}
ROUNDS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 350, 500)


class Terms(NamedTuple):
    """The terms of the theorem at the model after a round: p-weighted means of squares."""

    split: str
    seed: int
    round: int
    b: float
    v: float
    gradient: float
    accuracy: float


Batch = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Deviation:
    """The gradient deviation of one client: B_i, the norm of its synchronised gradient,
    and V_i.
    """

    absolute: float
    norm: float
    heterogeneity: float


def deviations(
    model: nn.Module, batches: Sequence[Batch], loss: Loss
) -> list[Deviation]:
    """Return the deviation of each client, given a batch (inputs, targets) of each; the
    model does not change.

    BatchNorm is in train mode unless its training holds it in eval mode, all other
    layers (dropout) in eval mode.

    Raises:
        NormLayerError: a layer cannot be synchronised, a batch is too small for it, or
            the clients call other layers.
    """
    with threads(1):
        local = [_gradient(_training_copy(model), batch, loss) for batch in batches]
        together = _synchronised_gradients(model, batches, loss)
    sizes = torch.tensor([len(inputs) for inputs, _ in batches], dtype=torch.float64)
    union = sizes / sizes.sum() @ torch.stack(together)
    return [
        Deviation(
            float((alone - shared).norm()),
            float(shared.norm()),
            float((shared - union).norm()),
        )
        for alone, shared in zip(local, together, strict=True)
    ]


def _training_copy(model: nn.Module) -> nn.Module:
    working, in_eval = copied(model).eval(), eval_layers(model)
    for path, layer in layers_of(working).items():
        layer.train(path not in in_eval)
    return working


def _gradient(model: nn.Module, batch: Batch, loss: Loss) -> Tensor:
    """Return the gradient of the batch's loss with respect to all trainable parameters,
    float64 (P,).
    """
    inputs, targets = batch
    trained = [p for p in model.parameters() if p.requires_grad]
    with torch.enable_grad():  # the caller may have disabled gradients
        outputs = outputs_of(model, inputs_for(model)(inputs))
        gradients = torch.autograd.grad(
            loss(outputs, targets.to(outputs.device)), trained, allow_unused=True
        )
    flat = [
        torch.zeros_like(p) if g is None else g
        for p, g in zip(trained, gradients, strict=True)
    ]
    return torch.cat([g.flatten().double().cpu() for g in flat])


def _synchronised_gradients(
    model: nn.Module, batches: Sequence[Batch], loss: Loss
) -> list[Tensor]:
    """Return each client's gradient with the statistics of all batches; the clients run
    in threads, in step.
    """
    sizes = [len(inputs) for inputs, _ in batches]
    sent: dict[int, tuple[str, Tensor]] = {}
    barrier = threading.Barrier(len(batches))

    def gather(client: int, tag: str, tensor: Tensor) -> list[Tensor]:
        sent[client] = tag, tensor
        barrier.wait()  # wait until all have sent
        tags, tensors = zip(
            *(sent[index] for index in range(len(batches))), strict=True
        )
        if len({*tags}) > 1:
            raise NormLayerError(
                f"the clients' exchanges differ: {', '.join(sorted({*tags}))}. The"
                " model must call the same BatchNorm layers for every batch."
            )
        barrier.wait()  # wait until all have read
        return list(tensors)

    def reducer(client: int) -> Callable[[str, Tensor], Tensor]:
        return lambda tag, tensor: combine(tag, gather(client, tag, tensor), sizes)

    def run(client: int) -> Tensor:
        try:
            working, size = _training_copy(model), sizes[client]
            with synchronised(
                working, reducer(client), batch_size=size, union_batch_size=sum(sizes)
            ):
                gradient = _gradient(working, batches[client], loss)
            # Exchange once more at the end, so that no client waits for a client that
            # calls fewer layers: the tags then differ.
            gather(client, "end", gradient)
            return gradient
        except BaseException:
            barrier.abort()  # so that the others do not wait forever
            raise

    with ThreadPoolExecutor(len(batches)) as pool:
        waiting = [pool.submit(run, client) for client in range(len(batches))]
    errors = [error for job in waiting if (error := job.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [job.result() for job in waiting]


def terms(model: nn.Module, batches: list[Batch]) -> tuple[float, float, float]:
    """Return sum p_i B_i^2, sum p_i V_i^2 and ||grad F||^2 of the batches, F the loss
    of all of them together.
    """
    total = sum(len(inputs) for inputs, _ in batches)
    b = v = norms = 0.0
    for batch, found in zip(
        batches, deviations(model, batches, default_loss), strict=True
    ):
        p = len(batch[0]) / total
        b += p * found.absolute**2
        v += p * found.heterogeneity**2
        norms += p * found.norm**2
    return b, v, norms - v


def run(
    config: Config,
    data: PartitionedData,
    split: str,
    examples: int,
    rounds: frozenset[int],
) -> Iterator[Terms]:
    """Train, and yield the terms after the named rounds; 0 is the start."""
    found: list[Terms] = []
    model = make_model(config)
    views = [data.train_view(client) for client in range(config.num_clients)]
    random = torch_generator(config.seed, "theorem-1")
    batches = [
        view.batch(torch.randperm(len(view), generator=random)[:examples])
        for view in views
    ]
    test = data.test_view()

    def client_fn(context: Context) -> TorchClient:
        own = views[int(context.node_config["partition-id"])]
        return TorchClient(
            make_model(config),
            own,
            {},
            local_training(config),
            context=context,
            seed=config.seed,
        )

    def measure(server_round: int, arrays: ArrayRecord) -> None:
        if server_round in rounds:
            model.load_state_dict(tensors(from_record(arrays)))
            accuracy = 100 * evaluate(model, test).accuracy
            found.append(
                Terms(
                    split, config.seed, server_round, *terms(model, batches), accuracy
                )
            )

    strategy = make_strategy(config, model, config.num_clients)
    strategy.fraction_evaluate = 0.0
    start = to_record(model.state_dict())
    with InProcessGrid(
        client_app(client_fn), config.num_clients, torch_threads=1
    ) as grid:
        strategy.start(
            grid=grid,
            initial_arrays=start,
            num_rounds=config.num_server_rounds,
            evaluate_fn=measure,
        )
    yield from found


def picture(rows: list[Terms], path: Path) -> None:
    """Draw the three terms over the rounds, a panel for each split; the mean over the
    seeds.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "theorem-1"
    from matplotlib import pyplot

    names = {"b": "6 sum p B²", "v": "sum p V²", "gradient": "||grad F||²"}
    splits = list(dict.fromkeys(row.split for row in rows))
    figure, panels = pyplot.subplots(
        1, len(splits), figsize=(3.6 * len(splits), 3.2), sharey=True, squeeze=False
    )
    for panel, split in zip(panels[0], splits, strict=True):
        rounds = sorted({row.round for row in rows if row.split == split})
        for field, label in names.items():
            means = []
            for number in rounds:
                values = [
                    getattr(row, field)
                    for row in rows
                    if row.split == split and row.round == number
                ]
                means.append((6 if field == "b" else 1) * sum(values) / len(values))
            panel.plot(rounds, means, marker="o", markersize=3, label=label)
        panel.set(title=split, xlabel="round", xscale="symlog", yscale="log")
    panels[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main(
    out: Annotated[Path, typer.Option(help="files to write, without their ending")],
    data_dir: Annotated[
        str, typer.Option(help="folder with the data; not for dataset=digits")
    ] = "",
    dataset: Annotated[str, typer.Option()] = "mnist",
    seeds: Annotated[str, typer.Option(help="comma list")] = "0,1,2",
    examples: Annotated[
        int, typer.Option(min=2, help="examples of each client for the measures")
    ] = 2000,
    num_rounds: Annotated[int, typer.Option(min=1)] = 500,
) -> None:
    """Train all splits and seeds, and write the table and the picture after each."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rows: list[Terms] = []
    for seed in map(int, seeds.split(",")):
        for split, keys in SPLITS.items():
            own: dict[str, Scalar] = {
                "dataset": dataset,
                "model": "mlp",
                "seed": seed,
                "num-server-rounds": num_rounds,
            }
            config = Config.make({**SETTING, **own, **keys, "data-dir": data_dir})
            data = partitioned_data(config, config.num_clients)
            for row in run(
                config, data, split, examples, frozenset(ROUNDS) | {num_rounds}
            ):
                print(*row, flush=True)
                rows.append(row)
            with out.with_suffix(".csv").open("w", newline="") as file:
                csv.writer(file).writerows([Terms._fields, *rows])
    picture(rows, out.with_suffix(".svg"))


if __name__ == "__main__":
    typer.run(main)
