"""The doctor on planted cases, with its first remedy tried, and on ten healthy runs,
where it should find nothing.

    python benchmarks/doctor_cases.py                  # both; 6 minutes on one core
    python benchmarks/doctor_cases.py --seeds 10       # the healthy runs alone

The runs are on scikit-learn's digits. A planted case is a run whose settings have one
known fault; the first remedy that the doctor names is then set in the same run. The
exit code is 1 where the doctor names another fault first, or finds something in a
healthy run.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from torch import nn

from fedbn_flwr.doctor import Diagnosis
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.diagnose_run import diagnose_run
from fedbn_flwr.lab.models.mlp import MLP
from fedbn_flwr.lab.runs.run import run

HEALTHY: dict[str, Any] = {
    **{
        "dataset": "digits",
        "partition": "iid",
        "num-clients": 5,
        "model": "doctor_cases:deep",
        "image-size": 28,
    },
    **{
        "learning-rate": 0.1,
        "num-server-rounds": 12,
        "eval-every": 12,
        "checkpoint-every": 0,
    },
}
"""FedAvg on five equal clients, an epoch a round."""


def deep(num_classes: int, channels: int, size: int) -> nn.Module:
    """Return the network of three hidden layers."""
    return MLP(num_classes, channels * size * size, hidden=(64, 64, 64))


class Case(NamedTuple):
    """A planted fault: the run, what the doctor should find first, its first remedy,
    and that remedy as settings.
    """

    settings: Mapping[str, Any]
    finding: str
    remedy: str
    tried: Mapping[str, Any]


ONE_STEP = {"local-steps": 1, "num-server-rounds": 100, "eval-every": 100}
DOMAINS = {
    **HEALTHY,
    "dataset": "digits-domains",
    "partition": "domain",
    "model": "lenet",
}
del DOMAINS["image-size"]
CASES = {
    "label skew, E = 1": Case(
        {**HEALTHY, "partition": "classes", **ONE_STEP},
        "label-skew",
        "strategy=fedtan",
        {"strategy": "fedtan"},
    ),
    "label skew, E = 20": Case(
        {**HEALTHY, "partition": "classes", "local-steps": 20},
        "label-skew",
        "strategy=fedtan",
        {"strategy": "fedtan"},
    ),
    "feature-shifted domains": Case(
        {**DOMAINS, "eval-on": "personal-global"},
        "feature-shift",
        "strategy=fedbn",
        {"strategy": "fedbn", "eval-on": "personal-own"},
    ),
    "batch size 2": Case(
        {**HEALTHY, "batch-size": 2}, "small-batch", "batch-size=16", {"batch-size": 16}
    ),
}


def examined(settings: Mapping[str, Any]) -> tuple[dict[str, Any], Diagnosis]:
    """Return the summary of a run, and its diagnosis."""
    with tempfile.TemporaryDirectory() as folder:
        summary = run(Config.make(settings), Path(folder) / "run", workers=0)
        return summary, diagnose_run(Path(folder) / "run")


def score(summary: Mapping[str, Any]) -> float:
    """Return the final value of the run's headline metric."""
    return float(summary["final"][summary["headline"]])


def main(
    seeds: Annotated[
        int, typer.Option(help="Number of healthy runs; above 0, only these run.")
    ] = 0,
) -> None:
    """Print the tables."""
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    wrong = 0
    if not seeds:
        print(
            "| case | found | first remedy | accuracy | with the remedy"
            " |\n|---|---|---|---|---|"
        )
        for name, case in CASES.items():
            summary, found = examined(case.settings)
            ids, first = (
                [f.id for f in found.findings],
                found.findings[0].remedies[0].setting if found.findings else "-",
            )
            wrong += ids[:1] != [case.finding] or first != case.remedy
            after = run_score({**case.settings, **case.tried})
            print(
                f"| {name} | {', '.join(ids)} | `{first}` | {score(summary):.3f} |"
                f" {after:.3f} |",
                flush=True,
            )
        print()
    print("| healthy run, seed | accuracy | findings |\n|---|---|---|")
    for seed in range(seeds or 10):
        summary, found = examined({**HEALTHY, "seed": seed})
        wrong += bool(found.findings)
        print(
            f"| {seed} | {score(summary):.3f} |"
            f" {', '.join(f.id for f in found.findings) or 'none'} |",
            flush=True,
        )
    raise typer.Exit(int(bool(wrong)))


def run_score(settings: Mapping[str, Any]) -> float:
    """Return the final score of a run."""
    with tempfile.TemporaryDirectory() as folder:
        return score(run(Config.make(settings), Path(folder) / "run", workers=0))


if __name__ == "__main__":
    typer.run(main)
