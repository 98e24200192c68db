"""The advice compared with the full grid of the same methods and rates.

    python benchmarks/advice.py --data-dir FOLDER --out runs/advice --parallel 1
    python benchmarks/advice.py --data-dir FOLDER --out runs/advice --only fmnist-classes
    python benchmarks/advice.py --out runs/advice --table

For each setting, ``advise`` looks, tries and answers. Then a study tunes each of its
candidates on the full grid by the validation examples of one seed, with whole runs, and
runs each tuned method with three seeds. Finished runs in the folder are kept.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from measure import write_block

from fedbn_flwr.lab.advice import advise_config
from fedbn_flwr.lab.advice.halving import of_length
from fedbn_flwr.lab.files import ADVICE_FILE, read_json
from fedbn_flwr.lab.studies.one_run import is_done, summary_of
from fedbn_flwr.lab.studies.parallel import runner_of
from fedbn_flwr.lab.studies.results import half_interval, markdown
from fedbn_flwr.lab.studies.study import Cell, Study, Tuning
from fedbn_flwr.lab.studies.sweep import LogFollower, sweep
from fedbn_flwr.lab.studies.tuning import tuned
from fedbn_flwr.training.tasks import higher_is_better

FMNIST = {
    "dataset": "fashion-mnist",
    "model": "lenet",
    "num-clients": 10,
    "num-server-rounds": 40,
    "local-steps": 10,
    "batch-size": 32,
    "eval-every": 10,
    "eval-on": "global",
    "validation-share": 0.1,
}
DOMAINS = {
    "partition": "domain",
    "local-epochs": 1,
    "batch-size": 32,
    "eval-every": 5,
    "eval-on": "personal-own",
    "validation-share": 0.2,
    "learning-rate": 0.03,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "fmnist-classes": {**FMNIST, "partition": "classes", "classes-per-client": 2},
    "fmnist-dirichlet": {**FMNIST, "partition": "dirichlet", "partition-alpha": 0.3},
    "digits-domains": {
        **DOMAINS,
        "dataset": "digits-five",
        "model": "digits-cnn",
        "num-clients": 3,
        "domain-share": 743,
        "num-server-rounds": 20,
    },
    "office": {
        **DOMAINS,
        "dataset": "office-caltech10",
        "model": "alexnet-bn-small",
        "num-clients": 4,
        "domain-share": 112,
        "num-server-rounds": 40,
    },
}
"""Two settings with label skew and two with feature shift, fixed before any run."""


def grid_of(advice: dict[str, Any], given: dict[str, Any]) -> Study:
    """Return the full grid of the advice's candidates and rates."""
    rounds = given["num-server-rounds"]
    tune = {"grid": {"learning-rate": advice["rates"]}, "seeds": [0]}
    return Study(
        name="full grid",
        base=of_length(given, rounds, rounds),
        methods={one["name"]: one["settings"] for one in advice["candidates"]},
        seeds=[0, 1, 2],
        tune=Tuning.model_validate(tune),
    )


def averaged_fedbn(given: dict[str, Any], rates: dict[str, Any]) -> Study:
    """Return FedBN for the test of a single model, with FedAvg's tuned rate.

    The tested model has the average of the clients' BatchNorm, so FedBN is no candidate
    of such a setting.
    """
    rounds = given["num-server-rounds"]
    return Study(
        name="FedBN",
        base={**of_length(given, rounds, rounds), "eval-on": "averaged-bn"},
        methods={"FedBN": {"strategy": "fedbn", **rates["FedAvg+BN/all"]}},
        seeds=[0, 1, 2],
    )


def bytes_of(folder: Path) -> int:
    """Return the bytes of floats of all runs below a folder."""
    files = folder.rglob("summary.json")
    ledgers = [read_json(file)["ledger"] for file in files]
    return sum(one.get("bytes-down", 0) + one.get("bytes-up", 0) for one in ledgers)


def tests_of(out: Path, method: str) -> pd.Series:
    """Return the final main metric of a method's runs, by seed."""
    found = {}
    for seed in range(3):
        summary = summary_of(Cell(method, "all", seed, {}, {}).folder(out))
        if summary:
            found[seed] = summary["final"].get(summary["headline"])
    return pd.Series(found, dtype=float)


def row(name: str, out: Path, data_dir: str) -> dict[str, str]:
    """Return the line of a setting: the tests of the advice and of the other choices."""
    advised, grid = out / name / "advised", out / name / "grid"
    advice = read_json(advised / ADVICE_FILE)
    study = (
        grid_of(advice, {**SETTINGS[name], "data-dir": data_dir}) if advice else None
    )
    results, rates = tuned(study, grid) if study else ([], {})
    cells = [*study.with_chosen(rates).cells()] if study else []
    if not results or not all(is_done(cell, grid) for cell in cells):
        done = len([*(out / name).rglob("summary.json")])
        return {"setting": name, "state": f"{done} runs are finished"}

    # The winner of the grid is the method with the best validation score.
    metric = advice["metric"]
    sign = 1 if higher_is_better(metric) else -1
    best = {
        one.name.removesuffix("/all"): sign * (one.scores[one.best] or 0)
        for one in results
        if one.metric == metric and one.best
    }
    winner = max(best, key=best.__getitem__)
    tests = {method: tests_of(grid, method) for method in best}
    chosen = tests_of(advised, advice["best"])
    gap = 100 * (chosen - tests[winner])
    share = bytes_of(advised / "tune") / bytes_of(grid / "tune")
    line = {
        "setting": name,
        "winner of the grid": f"{winner} {100 * tests[winner].mean():.2f}",
        "advice": f"{advice['best']} {100 * chosen.mean():.2f}",
        "advice minus winner, 95 %": f"{gap.mean():+.2f} ± {half_interval(gap):.2f}",
        "bytes of the trials, of the grid's": f"{share:.2f}",
    }
    mean = statistics.fmean(values.mean() for values in tests.values())
    single = tests_of(out / name / "fedbn", "FedBN")
    if not single.empty:
        tests["FedBN"] = single
    for method in ("Training alone", "FedAvg+BN", "FedAvg+GN", "FedBN"):
        known = method in tests
        line[method] = f"{100 * tests[method].mean():.2f}" if known else "-"
    return {**line, "random choice": f"{100 * mean:.2f}"}


def main(
    out: Annotated[Path, typer.Option(help="Folder of all runs.")],
    data_dir: Annotated[str, typer.Option(help="Folder of the data sets.")] = "",
    only: Annotated[list[str] | None, typer.Option(help="A setting.")] = None,
    parallel: Annotated[int, typer.Option(help="Runs at a time.")] = 1,
    write: Annotated[Path | None, typer.Option(help="Page of the table.")] = None,
    table: Annotated[bool, typer.Option("--table", help="Run nothing.")] = False,
) -> None:
    """Run the settings, and print their table."""
    names = only or [*SETTINGS]
    for name in names if not table else ():
        given = {**SETTINGS[name], "data-dir": data_dir}
        folder = out / name / "advised"
        advice = advise_config(given, folder, parallel=parallel, say=print)
        print(*advice["answer"], sep="\n", flush=True)
        study = grid_of(advice, given)
        runner = runner_of([*study.cells()], parallel)
        sweep(study, out / name / "grid", runner, LogFollower())
        if given["eval-on"] == "global":
            fedbn = averaged_fedbn(given, tuned(study, out / name / "grid")[1])
            sweep(fedbn, out / name / "fedbn", runner, LogFollower())
        print(row(name, out, data_dir), flush=True)
    shown = markdown(
        pd.DataFrame([row(name, out, data_dir) for name in names]).fillna("-")
    )
    print(shown)
    if write:
        write_block(write, "advice", shown)


if __name__ == "__main__":
    typer.run(main)
