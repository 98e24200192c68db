"""What differential privacy costs in accuracy: with BatchNorm as Flower's wrapper
treats it, as ours does, and without.

    python benchmarks/privacy.py --out runs/privacy                                  # digits, 25 minutes on one core
    python benchmarks/privacy.py --data-dir DIR --out runs/privacy --write benchmarks/results.md   # and MNIST

Ten clients, all in every round; client-level noise (``dp=server``). The clipping norm
of each cell is the best of four on a seed of its own (9), on the test set; the cells
are then run with three other seeds. The noise is new in every run. A run that is in
OUT/runs.jsonl is not repeated.
"""

from __future__ import annotations

import json
import logging
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from flwr.app import ConfigRecord
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping
from measure import facts, table, write_block

from fedbn_flwr.client import client_app
from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.partitioned.partitioned_data import partitioned_data
from fedbn_flwr.lab.runs.node import client_fn
from fedbn_flwr.lab.runs.run import preflight, run
from fedbn_flwr.lab.setup import initialise, make_model, make_strategy
from fedbn_flwr.messages.protocol import OWN, TEST_SETS
from fedbn_flwr.messages.records import from_record, tensors, to_record
from fedbn_flwr.privacy import DPWrapper
from fedbn_flwr.training.evaluation import evaluate
from fedbn_flwr.training.model_state import load_state

CLIENTS, ROUNDS = 10, 20
NOISES = (0.0, 0.03, 0.1, 0.3, 1.0)
NORMS = (0.1, 0.3, 1.0, 3.0)
SEEDS, TUNING_SEED = (0, 1, 2), 9
STOCK = "BN, Flower's wrapper"
METHODS: dict[str, dict[str, Any]] = {
    STOCK: {},  # weights |D_i|, so one client can move the average by more than C / m
    "BN, DPWrapper": {},
    "FixBN": {"strategy": "fixbn", "freeze-at": 5},
    "FedBN": {"strategy": "fedbn"},
    "GN": {"norm": "group"},
}
DATA: dict[str, dict[str, Any]] = {
    "digits": {"dataset": "digits", "partition": "iid", "local-epochs": 2},
    "MNIST": {
        "dataset": "mnist",
        "partition": "dirichlet",
        "partition-alpha": 1.0,
        "local-steps": 60,
    },
}


def main(
    out: Annotated[Path, typer.Option(help="Folder for the results so far.")],
    data_dir: Annotated[
        str, typer.Option(help="Folder with MNIST. Without it, only digits run.")
    ] = "",
    write: Annotated[
        Path | None, typer.Option(help="Page with places for the tables.")
    ] = None,
) -> None:
    """Run what is missing, and print the tables."""
    logging.disable(logging.CRITICAL)
    out.mkdir(parents=True, exist_ok=True)
    done = _Done(out / "runs.jsonl")
    for name in [name for name in DATA if name == "digits" or data_dir]:
        rows, epsilons = [], dict[float, str]()
        for method in METHODS:
            cells = [method]
            for noise in NOISES:
                case = (name, data_dir, method, noise)
                norm = max(
                    NORMS, key=lambda norm: done.accuracy(*case, norm, TUNING_SEED)[0]
                )
                found = [done.accuracy(*case, norm, seed) for seed in SEEDS]
                scores = [100 * accuracy for accuracy, _ in found]
                cells.append(
                    f"{statistics.mean(scores):.1f} ± {statistics.stdev(scores):.1f}"
                    f" ({norm:g})"
                )
                if method != STOCK:
                    epsilons[noise] = f"{found[0][1]:.3g}" if found[0][1] else "none"
            rows.append(cells)
        rows.append(
            [
                f"epsilon at delta 1e-5, not of {STOCK}",
                *(epsilons[noise] for noise in NOISES),
            ]
        )
        text = (
            table(["accuracy, % (C)", *(f"z = {noise:g}" for noise in NOISES)], rows)
            + f"\n\n{facts()}"
        )
        print(f"{name}\n\n{text}\n")
        if write:
            write_block(write, name, text)


class _Done:
    """The runs so far, in a file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        lines = file.read_text().splitlines() if file.exists() else []
        self._found = {
            tuple(line["case"]): (line["accuracy"], line["epsilon"])
            for line in map(json.loads, lines)
        }

    def accuracy(
        self,
        name: str,
        data_dir: str,
        method: str,
        noise: float,
        norm: float,
        seed: int,
    ) -> tuple[float, float | None]:
        """Return accuracy and epsilon of a run; do it if it is missing."""
        case = (name, method, noise, norm, seed)
        if case not in self._found:
            self._found[case] = _run(name, data_dir, method, noise, norm, seed)
            line = {
                "case": case,
                "accuracy": self._found[case][0],
                "epsilon": self._found[case][1],
            }
            with self._file.open("a") as lines:
                lines.write(json.dumps(line) + "\n")
        return self._found[case]


def _run(
    name: str, data_dir: str, method: str, noise: float, norm: float, seed: int
) -> tuple[float, float | None]:
    settings = {
        **DATA[name],
        "num-clients": CLIENTS,
        "num-server-rounds": ROUNDS,
        "seed": seed,
        "checkpoint-every": 0,
    }
    settings |= {"data-dir": data_dir} if name != "digits" else {}
    if method == STOCK:
        return _stock(settings, noise, norm), None
    if method == "FedBN":
        return _fedbn({**settings, **METHODS[method]}, noise, norm)
    private = {
        "dp": "server",
        "dp-noise-multiplier": noise,
        "dp-clipping-norm": norm,
        "eval-every": ROUNDS,
    }
    with tempfile.TemporaryDirectory() as folder:
        summary = run(
            Config.make({**settings, **private, **METHODS[method]}),
            Path(folder) / "out",
            workers=0,
        )
    return summary["final"][summary["headline"]], summary["privacy"].get("epsilon")


def _fedbn(
    settings: Mapping[str, Any], noise: float, norm: float
) -> tuple[float, float | None]:
    """Return accuracy and epsilon of FedBN, whose clients test their own models: a
    protected run withholds that.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = preflight(Config.make(settings), Path(folder) / "out").config
        model = make_model(config)
        initialise(model, config)
        strategy = make_strategy(config, model, CLIENTS)
        wrapper = DPWrapper(strategy, noise, norm)
        wrapper.privacy.publishes_metrics = True
        asked = ConfigRecord({TEST_SETS: OWN})
        app = client_app(client_fn)
        with InProcessGrid(
            app, CLIENTS, run_config=config.to_mapping(), seed=config.seed
        ) as grid:
            arrays = to_record(model.state_dict())
            result = wrapper.start(
                grid, arrays, ROUNDS, timeout=600, evaluate_config=asked
            )
    accuracy = result.evaluate_metrics_clientapp[ROUNDS][f"{OWN}-accuracy"]
    return float(accuracy), wrapper.privacy.outcome()["privacy"].get("epsilon")  # type: ignore[arg-type]


def _stock(settings: Mapping[str, Any], noise: float, norm: float) -> float:
    """Return the accuracy of FedAvg with BatchNorm in Flower's own wrapper."""
    with tempfile.TemporaryDirectory() as folder:
        config = preflight(Config.make(settings), Path(folder) / "out").config
        model = make_model(config)
        initialise(model, config)
        strategy = make_strategy(config, model, CLIENTS)
        strategy.fraction_evaluate = 0.0
        wrapper = DifferentialPrivacyServerSideFixedClipping(
            strategy, noise, norm, CLIENTS
        )
        app = client_app(client_fn)
        with InProcessGrid(
            app, CLIENTS, run_config=config.to_mapping(), seed=config.seed
        ) as grid:
            result = wrapper.start(
                grid, to_record(model.state_dict()), ROUNDS, timeout=600
            )
        load_state(model, tensors(from_record(result.arrays)))
        return float(
            evaluate(model, partitioned_data(config, CLIENTS).test_view()).accuracy
            or 0.0
        )


if __name__ == "__main__":
    typer.run(main)
