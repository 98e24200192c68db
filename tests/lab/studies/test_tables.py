"""A study has paired comparisons, the paper's numbers and tuned settings."""

from __future__ import annotations

import itertools
import json
import logging
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedbn_flwr.errors import RunFailedError
from fedbn_flwr.lab.results.folder import DIVERGED_AT
from fedbn_flwr.lab.studies import tables, tuning
from fedbn_flwr.lab.studies.check_study import Selection, load_study
from fedbn_flwr.lab.studies.one_run import finished
from fedbn_flwr.lab.studies.study import Study
from fedbn_flwr.lab.studies.sweep import sweep
from fedbn_flwr.lab.studies.tables import (
    markdown,
    outcomes,
    rows_of,
    table,
    write_results,
)
from fedbn_flwr.lab.studies.tuning import tuned
from fedbn_flwr.training.tasks import Task
from tests.support.fast import thinned
from tests.support.runs import page_of, summary_of
from tests.support.studies import load


def row(
    method: str, seed: int, final: float | None, **more: object
) -> dict[str, object]:
    about = {
        "method": method,
        "split": "all",
        "seed": seed,
        "metric": "test-accuracy",
        "domain": "",
        "status": "finished",
        "final": final,
    }
    return dict.fromkeys(tables.FIELDS) | about | more


MAIN = {
    "A": "test-accuracy",
    "A plus 1": "test-accuracy",
    "FedBN": "personal-own-accuracy",
    "Other": "test-mae",
}
"""Each method's main metric. FedBN is tested with the clients' models, as in papers."""


def mean(values: Sequence[float], form: str) -> str:
    return f"{np.mean(values):{form}}" if values else ""


@pytest.mark.parametrize("seed", thinned(range(8)))
def test_the_table_of_a_study_has_the_numbers_of_scipy(seed: int) -> None:
    """Scores are of finished runs, costs of all that ended, and pairs have one seed."""
    draw = np.random.default_rng(seed)
    rows = []
    for split, method, number in itertools.product(["iid", "two"], MAIN, range(4)):
        status = draw.choice(["finished", "diverged", "failed"], p=[0.6, 0.2, 0.2])
        final = None if draw.random() < 0.1 else draw.normal(60, 3)
        if method == "A plus 1" and final and rows[-4]["final"]:
            final = rows[-4]["final"] + 1
        more = {"metric": MAIN[method]}
        more |= {"bytes": draw.integers(2**24), "rejected": draw.integers(2)}
        # In one study, all runs of a method fail.
        if status == "failed" or (seed, split, method) == (0, "two", "Other"):
            status, final, more = "failed", None, {"metric": None}
        rows.append(row(method, number, final, split=split, status=status, **more))

    # A second metric is not compared.
    losses = [one | {"metric": "loss", "main": False} for one in rows if one["metric"]]
    finals = {}
    for line in table([*rows, *losses]).to_dict("records"):
        name = line["split"], line["method"]
        of = [one for one in rows if (one["split"], one["method"]) == name]
        ended = [one for one in of if one["status"] != "failed"]
        done = [one for one in of if one["status"] == "finished"]
        values = {one["seed"]: one["final"] for one in done if one["final"]}
        counts = {
            "without a value": len(done) - len(values),
            "with lost replies": sum(one["rejected"] for one in done),
            "diverged": len(ended) - len(done),
            "failed": len(of) - len(ended),
        }
        others = [f", {count} {what}" for what, count in counts.items() if count]
        finals[name], form = values, ".4f"
        if "accuracy" in line["metric"]:
            form = ".1f"
        scores = [*values.values()]
        spread = f" ± {np.std(scores, ddof=1):{form}}" if len(scores) > 1 else ""
        expected = {
            "runs": "".join([str(len(values)), *others]),
            "final": mean(scores, form) + spread,
            "MB of floats": mean([one["bytes"] / 2**20 for one in ended], ".1f"),
        }
        assert {key: line.get(key, "") for key in expected} == expected
    assert {*finals} == {*itertools.product(["iid", "two"], MAIN)}


def test_a_bar_in_a_name_ends_no_cell() -> None:
    frame = pd.DataFrame({"a": ["FedBN | p=1"], "b": ["two\nlines"], "c": [3]})
    head = "| a | b | c |\n| --- | --- | --- |\n"
    assert markdown(frame).strip() == f"{head}| FedBN \\| p=1 | two lines | 3 |"


def finish(folder: Path, lines: list[dict], **more) -> None:
    """Write the files of a finished run that results need."""
    folder.mkdir(parents=True)
    whole = [
        {"round": r, "exchanges": 1, "bytes-down": 1, "bytes-up": 1, **line}
        for r, line in enumerate(lines, 1)
    ]
    text = "".join(json.dumps(line) + "\n" for line in whole)
    (folder / "metrics.jsonl").write_text(text)
    summary = {
        "headline": "test-accuracy",
        "final": whole[-1],
        "rounds": len(whole),
        "sha256": "x",
        "ledger": {"bytes-down": 2**20, "bytes-up": 2**21},
    }
    (folder / "summary.json").write_text(json.dumps({**summary, **more}))


STATED = """
name: stated
base: {num-server-rounds: 4, num-clients: 2}
methods: {A: {strategy: fedavg}, B: {strategy: fedavg, norm: group}, C: {strategy: fedprox}}
seeds: [0, 1]
"""


def test_a_row_has_its_lost_replies(tmp_path, monkeypatch) -> None:
    # These folders have no config.
    monkeypatch.setattr(tables, "is_done", lambda cell, out: finished(cell.folder(out)))
    study, out = load(tmp_path, STATED), tmp_path / "out"
    more = {"A/all/seed-1": {"rejected": 2}, "C/all/seed-0": {"headline": "test-loss"}}
    for name in ("A/all/seed-0", "A/all/seed-1", "B/all/seed-0", "C/all/seed-0"):
        line = {"test-accuracy": 0.5, "test-loss": 50.0}
        finish(out / name, [line], **more.get(name, {}))
    rows = rows_of(study, out, outcomes(study, out))
    assert [(r["method"], r["seed"], r["rejected"]) for r in rows] == [
        ("A", 0, 0),
        ("B", 0, 0),
        ("C", 0, 0),
        ("A", 1, 2),
    ]
    write_results(study, out)
    # B lacks seed 1, so A is compared, and shown, with seed 0 only.
    text = (out / "table.md").read_text()
    assert "| 1, 1 of further seeds |" in text


TUNE = """
name: tuned
base: {num-server-rounds: 3, num-clients: 2, local-steps: 2, batch-size: 8}
methods: {BN: {strategy: fedavg}, FedBN: {strategy: fedbn, sgd-momentum: 0.5}}
seeds: [0, 1]
tune: {grid: {learning-rate: [1.0e-5, 0.1, 1.0e-6]}, base: {validation-share: 0.3, num-server-rounds: 2}}
overrides: {BN/all: {sgd-momentum: 0.1, learning-rate: 0.2}}
"""


def test_settings_are_chosen_by_validation_before_the_runs(tmp_path, caplog) -> None:
    caplog.set_level(logging.WARNING, "flwr")
    study, out = load(tmp_path, TUNE), tmp_path / "out"
    trials, tries = list(study.tuning().cells()), out / "tune"
    assert [cell.name for cell in trials[:2]] == [
        f"{m}/all/learning-rate=1.0e-5/seed-0" for m in ("BN", "FedBN")
    ]
    # Trials have seeds of their own, so a selected seed leaves no trial out.
    one = Selection(methods=["FedBN"], seeds=[1])
    of_trials = one.of_tuning(study)
    assert [cell for cell in trials if cell in of_trials] == trials[1::2]
    assert [cell.name for cell in study.cells() if cell in one] == ["FedBN/all/seed-1"]
    made_before = sweep(study, out)
    saved = load_study(out / "study.yaml")
    assert {cell.config.learning_rate for cell in saved.cells()} == {0.1}
    of_method = {
        "BN": (0.1, "validation-accuracy"),
        "FedBN": (0.5, "personal-validation-accuracy"),
    }
    for cell in trials:
        momentum, metric = of_method[cell.method]
        assert (cell.config.validation_share, cell.config.num_server_rounds) == (0.3, 2)
        assert cell.config.sgd_momentum == momentum
        score = summary_of(cell.folder(tries))["final"][metric]
        chosen = " (chosen)" if "0.1/" in cell.name else ""
        assert f"{100 * score:.1f} %{chosen}" in (out / "tuning.md").read_text()
    ends = "learning-rate=0.1 is best, but at the end of its grid. Try a larger grid"
    assert [m for m in caplog.messages if "grid" in m] == [
        f"BN/all: {ends}",
        f"FedBN/all: {ends}",
    ]
    # The page needs no data. It names the trials that it cannot read without data.
    page, moved = page_of(out), shutil.copytree(out, tmp_path / "moved")
    saved_study = (moved / "study.yaml").read_text()
    text = saved_study.replace("base:\n", "base:\n  dataset: folder:/absent\n", 1)
    (moved / "study.yaml").write_text(text)
    without = page_of(moved)
    rows = re.compile(r"<tr.*?</tr>", re.DOTALL)
    assert rows.findall(without) == rows.findall(page) != []
    assert (ends in page, ends in without) == (True, False)
    assert "The trials of tune were not read: " in without
    made = {path: path.read_bytes() for path in out.rglob("summary.json")}
    assert len(made) == 10
    # The study in the folder is the whole study with its tuning.
    for name in ("study.yaml", "tuning.md"):
        made[out / name] = (out / name).read_bytes()
    for again in (study, saved):
        assert sweep(again, out).equals(made_before), "nothing is left to do"
        assert {path: path.read_bytes() for path in made} == made
    # The best trial of BN, if it had not diverged.
    best = next(t for t in trials if t.name == "BN/all/learning-rate=0.1/seed-0")
    summary = best.folder(tries) / "summary.json"
    whole = summary.read_text()
    summary.write_text(json.dumps({**json.loads(whole), DIVERGED_AT: 2}))
    assert tuned(study, out)[1]["BN/all"] != {"learning-rate": "0.1"}
    summary.write_text(whole)
    (trials[3].folder(tries) / "summary.json").unlink()
    found, chosen = tuned(study, out)
    assert [row.name for row in found] == ["BN/all"]
    assert chosen == {"BN/all": {"learning-rate": "0.1"}}
    with pytest.raises(
        RunFailedError,
        match=r"1 of 6 trials of tune failed: FedBN/all/learning-rate=0.1/seed-0",
    ):
        sweep(study, out, runner=lambda *_: (_ for _ in ()))


TWO_SEEDS = """
name: tuned
base: {num-server-rounds: 1, num-clients: 2}
methods: {BN: {}}
tune: {grid: {learning-rate: [0.1, 0.2]}, seeds: [0, 1], base: {validation-share: 0.3}}
"""


@pytest.mark.parametrize("higher", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_the_best_point_has_the_best_mean_over_all_seeds(
    tmp_path,
    monkeypatch,
    caplog,
    higher: bool,
    seed: int,
) -> None:
    """The mean of the other seeds would favour a point that lacks a score.

    Each of two points is an end of the grid, so no warning appears.
    """
    values = np.random.default_rng(seed).random(4).round(2).tolist()
    values[seed] = (None, math.nan, 0.5, 0.5)[seed]
    points = itertools.product((0.1, 0.2), (0, 1))
    scores = dict(zip(points, values, strict=True))
    study = load(tmp_path, TWO_SEEDS)
    for cell in study.tuning().cells():
        score = scores[cell.config.learning_rate, cell.seed]
        run = cell.folder(tmp_path / "tune")
        run.mkdir(parents=True)
        summary = json.dumps({"final": {"validation-accuracy": score}})
        (run / "summary.json").write_text(summary)
    monkeypatch.setattr(tuning, "is_done", lambda cell, out: True)
    monkeypatch.setattr(Task, "higher_is_better", property(lambda self: higher))
    means = np.mean(np.reshape(values, (2, 2)).astype(float), axis=1)
    best = np.nanargmax(means if higher else -means)
    (found,), chosen = tuned(study, tmp_path)
    known = [score for score in found.scores.values() if score is not None]
    assert known == pytest.approx(means[means == means])
    assert chosen == {"BN/all": {"learning-rate": ["0.1", "0.2"][best]}}
    assert not caplog.records


def run_of(**domains: float | None) -> dict:
    final = {"test-accuracy": 0.5}
    final |= {f"test-accuracy/{name}": value for name, value in domains.items()}
    return {
        "headline": "test-accuracy",
        "sha256": "x",
        "rounds": 1,
        "ledger": {},
        "final": final,
    }


def test_rows_have_each_domain_and_their_average(tmp_path, monkeypatch) -> None:
    """The average of a run that lacks a domain is unknown."""
    study = Study(name="pets", methods={"A": {}}, seeds=[0, 1])
    runs = [run_of(dog=0.5, cat=0.25), run_of(dog=0.7, cat=None)]
    monkeypatch.setattr(tables, "is_done", lambda cell, out: True)
    for seed, summary in enumerate(runs):
        finish(tmp_path / f"A/all/seed-{seed}", [{}], **summary)
    rows = rows_of(study, tmp_path, outcomes(study, tmp_path))
    finals = [(row["domain"], row["final"]) for row in rows]
    assert finals == [
        *(("", 50.0), ("dog", 50.0), ("cat", 25.0), ("average", 37.5)),
        *(("", 50.0), ("dog", 70.0), ("cat", None), ("average", None)),
    ]
