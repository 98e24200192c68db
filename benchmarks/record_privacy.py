"""What record-level differential privacy costs in accuracy: DP-SGD with GN, LN and BatchNorm frozen from round 1.

    python benchmarks/record_privacy.py --out runs/records --write docs/results/privacy.md   # 20 minutes on one core

Digits, ten clients, all in every round. The noise multiplier is the smallest for the epsilon. The clipping norm of each
cell is the best of three on a seed of its own (9), on the test set; the cells are then run with three other seeds. The
noise is new in every run. A run that is in OUT/runs.jsonl is not repeated.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from measure import facts, table, write_block

from fedbn_flwr.errors import DivergedError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.partitioned.partitioned_data import partitioned_data
from fedbn_flwr.lab.runs.run import run
from fedbn_flwr.privacy import DPSGD, RecordLevel

EPSILONS = (math.inf, 8.0, 3.0, 1.0)
NORMS = (0.3, 1.0, 3.0)
SEEDS, TUNING_SEED, DELTA = (0, 1, 2), 9, 1e-5
MODELS: dict[str, dict[str, Any]] = {
    "GN": {"norm": "group"},
    "LN": {"norm": "layer"},
    "BN frozen at 0 and 1": {"strategy": "fixbn", "freeze-at": 0},
}
BASE: dict[str, Any] = {"dataset": "digits", "partition": "iid", "num-clients": 10, "num-server-rounds": 20}
BASE |= {"local-steps": 5, "learning-rate": 0.5, "eval-every": 20, "checkpoint-every": 0}


def main(
    out: Annotated[Path, typer.Option(help="Folder for the results so far.")],
    write: Annotated[Path | None, typer.Option(help="Page with a place for the table.")] = None,
) -> None:
    """Run what is missing, and print the table."""
    logging.disable(logging.CRITICAL)
    out.mkdir(parents=True, exist_ok=True)
    file = out / "runs.jsonl"
    lines = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    done: dict[tuple[Any, ...], float] = {tuple(line["case"]): line["accuracy"] for line in lines}

    def accuracy(*case: Any) -> float:
        if case not in done:
            done[case] = _run(*case)
            with file.open("a") as text:
                text.write(json.dumps({"case": case, "accuracy": done[case]}) + "\n")
        return done[case]

    rows = []
    for model in ("BN", *MODELS):
        cells = [model]
        for epsilon in EPSILONS if model in MODELS else EPSILONS[:1]:
            private = epsilon < math.inf
            norm = max(NORMS, key=lambda norm: accuracy(model, epsilon, norm, TUNING_SEED)) if private else 1.0
            scores = [100 * accuracy(model, epsilon, norm, seed) for seed in SEEDS]
            if math.isnan(sum(scores)):
                cells.append("diverges")
                continue
            shown = f"{statistics.mean(scores):.1f} ± {statistics.stdev(scores):.1f}"
            cells.append(shown + f" ({norm:g})" * private)
        rows.append(cells + ["refused"] * (len(EPSILONS) + 1 - len(cells)))
    rows.append(["z", "0", *(rounded_up(_noise(epsilon, SEEDS[0])) for epsilon in EPSILONS[1:])])
    head = ["accuracy, % (C)", "no privacy", *(f"epsilon = {epsilon:g}" for epsilon in EPSILONS[1:])]
    text = table(head, rows) + f"\n\n{facts()}"
    print(text)
    if write:
        write_block(write, "records", text)


def rounded_up(noise: float) -> str:
    """Return a noise multiplier with two digits, with which epsilon is not larger."""
    return f"{math.ceil(100 * noise) / 100:.2f}"


def _noise(epsilon: float, seed: int) -> float:
    config = Config.make({**BASE, "seed": seed})
    smallest = min(len(part) for part in partitioned_data(config, config.num_clients).train)
    dp = DPSGD(RecordLevel(1.0), smallest, config.batch_size)
    return dp.noise_for(epsilon, config.local_steps * config.num_server_rounds, DELTA)


def _run(model: str, epsilon: float, norm: float, seed: int) -> float:
    settings = {**BASE, **MODELS.get(model, {}), "seed": seed}
    if epsilon < math.inf:
        settings |= {"record-dp": True, "record-dp-clipping-norm": norm, "dp-delta": DELTA}
        settings |= {"record-dp-noise-multiplier": _noise(epsilon, seed)}
    with tempfile.TemporaryDirectory() as folder:
        try:
            summary = run(Config.make(settings), Path(folder) / "out", workers=0)
        except DivergedError:
            return math.nan
    return float(summary["final"][summary["headline"]])


if __name__ == "__main__":
    typer.run(main)
