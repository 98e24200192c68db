"""A study's numbers: paired comparisons, rounds to a target, tuned settings."""

from __future__ import annotations

import csv
import functools
import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import ttest_rel

from fedbn_flwr.errors import ConfigError, RunFailedError
from fedbn_flwr.lab.output.folder import DIVERGED_AT
from fedbn_flwr.lab.studies import results, tuning
from fedbn_flwr.lab.studies.check_study import Selection, load_study
from fedbn_flwr.lab.studies.one_run import finished
from fedbn_flwr.lab.studies.results import (
    markdown,
    paired_tests,
    rows_of,
    table,
    write_results,
)
from fedbn_flwr.lab.studies.study import PaperNumber, Study
from fedbn_flwr.lab.studies.sweep import sweep
from fedbn_flwr.lab.studies.tuning import tuned
from fedbn_flwr.training.tasks import Task
from tests.support.runs import summary_of


def load(folder: Path, text: str, *overrides: str) -> Study:
    (folder / "study.yaml").write_text(text)
    return load_study(folder / "study.yaml", overrides)


def row(
    method: str, seed: int, final: float | None, **more: object
) -> dict[str, object]:
    about = {
        "method": method,
        "split": "all",
        "seed": seed,
        "metric": "test-accuracy",
        "main": True,
    }
    return (
        dict.fromkeys(results.FIELDS)
        | about
        | {"domain": "", "status": "finished", "final": final}
        | more
    )


def test_differences_to_the_first_method_are_paired_by_seed_as_scipy_does() -> None:
    rng = np.random.default_rng(0)
    values = {"A": rng.normal(60, 3, 5), "B": rng.normal(62, 3, 5)}
    rows = [
        row(method, seed, value)
        for method, own in values.items()
        for seed, value in enumerate(own)
    ]
    rows += [
        row("A", 5, 99.0),
        row("A", 8, 99.0),
        row("B", 6, 0.0),
        row("B", 7, None),
        row("B", 8, 1.0, status="diverged"),
    ]
    # FedBN is tested with the clients' models, as in the papers' comparison.
    own = {"metric": "personal-own-accuracy"}
    rows += [
        row("FedBN", 0, values["A"][0] + 1, **own),
        row("FedBN", 1, values["A"][1] + 1, **own),
    ]
    rows += [row("Other", seed, 0.1, metric="test-mae") for seed in range(2)] + [
        row("Late", 9, 60.0)
    ]
    # a method under another name differs from itself by 0
    rows += [row("A again", seed, value) for seed, value in enumerate(values["A"])]
    found = paired_tests(rows)
    assert found.pop(("all", "A again")) == (0, pytest.approx(math.nan, nan_ok=True))
    assert list(found) == [("all", "B"), ("all", "FedBN")]
    assert found["all", "B"] == pytest.approx(
        ((values["B"] - values["A"]).mean(), ttest_rel(values["B"], values["A"]).pvalue)
    )
    difference, p = found["all", "FedBN"]
    assert (difference, math.isnan(p)) == (
        pytest.approx(1),
        True,
    ), "equal differences: their spread is not known"


def test_a_bar_in_a_name_ends_no_cell() -> None:
    text = markdown(
        pd.DataFrame([["FedBN | p=1", "two\nlines", 3]], columns=["a", "b", "c"])
    )
    assert text.splitlines() == [
        "| a | b | c |",
        "| --- | --- | --- |",
        "| FedBN \\| p=1 | two lines | 3 |",
    ]


def finish(folder: Path, lines: list[dict[str, Any]], **more: Any) -> None:
    """Write the files of a finished run that results need."""
    folder.mkdir(parents=True)
    whole = [
        {"round": r, "exchanges": 1, "bytes-down": 1, "bytes-up": 1, **line}
        for r, line in enumerate(lines, 1)
    ]
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in whole)
    )
    summary = {
        "headline": "test-accuracy",
        "final": whole[-1],
        "rounds": len(whole),
        "sha256": "x",
        "ledger": {"bytes-down": 2**20, "bytes-up": 2**21},
    }
    (folder / "summary.json").write_text(json.dumps({**summary, **more}))


TARGETS = """
name: targets
base: {num-server-rounds: 4, num-clients: 2}
methods: {A: {strategy: fedavg}, B: {strategy: fedavg, norm: group}}
seeds: [0, 1]
target: 60
paper: {A/all: 70 ± 2.5}
"""


def test_what_it_took_to_reach_the_target(tmp_path: Path, monkeypatch) -> None:
    # These folders have no config.
    monkeypatch.setattr(
        results, "is_done", lambda cell, out: finished(cell.folder(out))
    )
    study, out = load(tmp_path, TARGETS), tmp_path / "out"
    accuracies = {
        "A/all/seed-0": [0.2, None, 0.61, 0.5],
        "A/all/seed-1": [0.2, 0.6, 0.7, 0.9],
        "B/all/seed-0": [0.2, 0.3, 0.4, 0.5],
    }
    lost = {"A/all/seed-1": {"rejected": 2}, "B/all/seed-0": {"rejected": 0}}
    for name, values in accuracies.items():
        lines = []
        for r, value in enumerate(values, 1):
            traffic = {"exchanges": r, "bytes-down": 10, "bytes-up": 20}
            tested = {} if value is None else {"test-accuracy": value}
            lines.append({**traffic, **tested, "test-loss": 1.1})
        # The first run is from an older version.
        finish(out / name, lines, **lost.get(name, {}))
    rows = rows_of(study, out)
    assert [(r["method"], r["seed"], r["rejected"]) for r in rows] == [
        ("A", 0, 0),
        ("B", 0, 0),
        ("A", 1, 2),
    ]
    to_target = [
        tuple(r.get(f"{what}-to-target") for what in ("rounds", "exchanges", "bytes"))
        for r in rows
    ]
    assert to_target == [(3, 6, 90), (None, None, None), (2, 3, 60)]
    first, second = table(rows).to_dict("records")
    expected = {
        "reached": "2 of 2",
        "rounds to it": "2.5",
        "final": "70.00 ± 28.28",
        "paper": "70.00 ± 2.50",
        "minus paper": "+0.00",
        "MB of floats": "3.00",
        "runs": "2, 1 with lost replies",
    }
    assert expected.items() <= first.items()
    empty = dict.fromkeys(("rounds to it", "paper"), "")
    assert {"reached": "0 of 1", "runs": "1", **empty}.items() <= second.items()
    lacking = [
        row | {"final": None if row["seed"] else row["final"]} for row in rows[::2]
    ]
    (undefined,) = table(lacking).to_dict("records")
    assert (undefined["runs"], undefined["final"]) == (
        "1, 1 without a value, 1 with lost replies",
        "50.00",
    )
    write_results(study, out)
    assert "| 70.00 ± 2.50 | +0.00 |" in (out / "table.md").read_text()
    losses = study.model_copy(update={"metrics": ["test-accuracy-x", "test-loss"]})
    rows = rows_of(losses, out)
    found = [(r["metric"], r["main"], r["final"]) for r in rows if r["method"] == "A"]
    assert found == 2 * [("test-loss", True, 1.1)]
    assert study.paper_numbers("A/all") == {"": PaperNumber(70, 2.5)}
    for wrong in ("high", "70 ± 1 ± 2", "70 ±", "70 ± -1", ".nan", "{cat: 70 +- 1}"):
        with pytest.raises(
            ConfigError,
            match=r"paper: A/all.*: '.*' is not a number of a paper. Write 53.97 or 53.97",
        ):
            load(tmp_path, TARGETS.replace("70 ± 2.5", wrong))
    with pytest.raises(
        ConfigError,
        match=r"paper: A/all, cat: 'x' is not .*; A/all, dog: '\[1\]' is not a number",
    ):
        load(tmp_path, TARGETS.replace("70 ± 2.5", "{cat: x, dog: [1]}"))


@pytest.mark.parametrize("beside", ["", "paper: {A/all: 70}", "target: 60"])
def test_a_number_beside_a_result_does_not_change_what_is_compared(
    beside: str, tmp_path: Path, monkeypatch
) -> None:
    """A paper's number must not decide the metrics of a comparison.

    Otherwise one method's test-accuracy would be compared with the other's
    personal-own-accuracy.
    """
    monkeypatch.setattr(
        results, "is_done", lambda cell, out: finished(cell.folder(out))
    )
    own = TARGETS.replace(
        "target: 60\npaper: {A/all: 70 ± 2.5}",
        f"metrics: [personal-own-accuracy]\n{beside}",
    )
    study = load(tmp_path, own)
    for cell in study.cells():
        personal = 0.8 + 0.05 * (cell.method == "B") + 0.01 * cell.seed**2
        finish(
            cell.folder(tmp_path),
            [{"test-accuracy": 0.7, "personal-own-accuracy": personal}],
        )
    rows = rows_of(study, tmp_path)
    assert {row["metric"] for row in rows if row["main"]} == {"personal-own-accuracy"}
    assert paired_tests(rows)["all", "B"][0] == pytest.approx(5)


def test_runs_that_all_failed_have_no_cost() -> None:
    failed = [
        row("A", seed, None, status="failed", metric=None, main=None) for seed in (0, 1)
    ]
    (found,) = table(failed).to_dict("records")
    assert found == {
        "split": "all",
        "method": "A",
        "metric": "-",
        "runs": "0, 2 failed",
    }
    both = table([*failed, row("A", 2, 50.0)]).to_dict("records")
    assert [line["runs"] for line in both] == ["1, 2 failed"]


def test_a_target_that_is_reached_exactly_is_reached(tmp_path: Path) -> None:
    """5013 of 10,000 are 50.13 %, but 100 times the share is less in float64."""
    finish(tmp_path / "run", [{"accuracy": 0.1}, {"accuracy": 5013 / 10_000}])
    until = functools.partial(
        results._until_target,
        metric="accuracy",
        run=tmp_path / "run",
        summary={"rounds": 2},
    )
    assert until(50.13)["rounds-to-target"] == 2
    assert "rounds-to-target" not in until(50.14)
    lost = until(50.13, summary={"rounds": 3})
    assert lost == {"target": 50.13}, "a round whose line is lost may have reached it"
    finish(tmp_path / "losses", [{"loss": 0.9}, {"loss": 0.4}])
    assert until(0.5, metric="loss", run=tmp_path / "losses")["rounds-to-target"] == 2


TUNE = """
name: tuned
base: {num-server-rounds: 3, num-clients: 2, local-steps: 2, batch-size: 8}
methods: {BN: {strategy: fedavg}, FedBN: {strategy: fedbn, sgd-momentum: 0.5}}
seeds: [0, 1]
tune: {grid: {learning-rate: [1.0e-5, 0.1, 1.0e-6]}, base: {validation-share: 0.3, num-server-rounds: 2}}
overrides: {BN/all: {sgd-momentum: 0.1, learning-rate: 0.2}}
"""


def test_settings_are_chosen_by_validation_before_the_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "flwr")
    study, out = load(tmp_path, TUNE), tmp_path / "out"
    trials = list(study.trials())
    assert [cell.name for cell in trials[:2]] == [
        f"tune/{m}/all/learning-rate=1e-05/seed-0" for m in ("BN", "FedBN")
    ]
    sweep(study, out, selection=Selection(methods=["FedBN"], seeds=[1]))
    own = [
        *(trial for trial in trials if trial.method == "FedBN"),
        [*study.cells()][-1],
    ]
    assert sorted(out.rglob("summary.json")) == sorted(
        cell.folder(out) / "summary.json" for cell in own
    )
    assert Study.read(out / "study.yaml").overrides == {
        **study.overrides,
        "FedBN/all": {"learning-rate": 0.1},
    }
    caplog.clear()
    made_before = sweep(study, out)
    rates = {
        cell.config.learning_rate for cell in load_study(out / "study.yaml").cells()
    }
    assert rates == {0.1}
    for cell in trials:
        assert (cell.config.validation_share, cell.config.num_server_rounds) == (0.3, 2)
        assert cell.config.sgd_momentum == {"BN": 0.1, "FedBN": 0.5}[cell.method]
        score = summary_of(cell.folder(out))["final"]
        metric = {"BN": "validation-accuracy", "FedBN": "personal-validation-accuracy"}[
            cell.method
        ]
        shown = (
            f"{100 * score[metric]:.2f} %{' (chosen)' if '0.1/' in cell.name else ''}"
        )
        assert shown in (out / "tuning.md").read_text()
    ends = "learning-rate=0.1 is best, but at the end of its grid. Try a larger grid"
    assert [m for m in caplog.messages if "grid" in m] == [
        f"BN/all: {ends}",
        f"FedBN/all: {ends}",
    ]
    made = {path: path.read_bytes() for path in out.rglob("summary.json")}
    assert len(made) == 10
    assert sweep(study, out).equals(made_before), "nothing is left to do"
    assert {path: path.read_bytes() for path in made} == made
    # The best trial of BN, if it had not diverged.
    best = next(t for t in trials if t.name == "tune/BN/all/learning-rate=0.1/seed-0")
    summary = best.folder(out) / "summary.json"
    kept = summary.read_text()
    summary.write_text(json.dumps({**json.loads(kept), DIVERGED_AT: 2}))
    assert tuned(study, out)[1]["BN/all"] != {"learning-rate": 0.1}
    summary.write_text(kept)
    (trials[3].folder(out) / "summary.json").unlink()
    found, chosen = tuned(study, out)
    assert ([row.name for row in found], chosen) == (
        ["BN/all"],
        {"BN/all": {"learning-rate": 0.1}},
    )
    with pytest.raises(
        RunFailedError,
        match=r"1 of 6 trials of tune failed: tune/FedBN/all/learning-rate=0.1/seed-0",
    ):
        sweep(study, out, runner=lambda cells, out, follower: (_ for _ in ()))


TWO_SEEDS = """
name: tuned
base: {num-server-rounds: 1, num-clients: 2}
methods: {BN: {}}
tune: {grid: {learning-rate: [0.1, 0.2]}, seeds: [0, 1], base: {validation-share: 0.3}}
"""


def scored(
    folder: Path, monkeypatch: pytest.MonkeyPatch, scores: Mapping[Any, float | None]
) -> Study:
    """Return a study whose trials have these scores, by rate and seed."""
    study = load(folder, TWO_SEEDS)
    monkeypatch.setattr(tuning, "is_done", lambda cell, out: True)
    for cell in study.trials():
        score = scores[cell.config.learning_rate, cell.seed]
        cell.folder(folder).mkdir(parents=True)
        summary = json.dumps({"final": {"validation-accuracy": score}})
        (cell.folder(folder) / "summary.json").write_text(summary)
    return study


@pytest.mark.parametrize("lost", [None, math.nan])
def test_a_point_that_lacks_a_score_at_one_seed_is_not_chosen(
    tmp_path: Path, monkeypatch, caplog: pytest.LogCaptureFixture, lost: float | None
) -> None:
    """The mean of the other seeds would favour it.

    Each of two points is an end of the grid, so no warning appears.
    """
    scores = {(0.1, 0): 0.9, (0.1, 1): lost, (0.2, 0): 0.5, (0.2, 1): 0.7}
    study = scored(tmp_path, monkeypatch, scores)
    (found,), chosen = tuned(study, tmp_path)
    points = {"learning-rate=0.1": None, "learning-rate=0.2": pytest.approx(0.6)}
    assert found.scores == points
    assert chosen == {"BN/all": {"learning-rate": 0.2}}
    assert not caplog.records


@pytest.mark.parametrize(("higher", "best"), [(True, 0.1), (False, 0.2)])
def test_the_best_point_is_the_highest_score_or_the_lowest_error(
    tmp_path: Path, monkeypatch, higher: bool, best: float
) -> None:
    scores = {(0.1, 0): 0.9, (0.1, 1): 0.7, (0.2, 0): 0.5, (0.2, 1): 0.7}
    study = scored(tmp_path, monkeypatch, scores)
    monkeypatch.setattr(Task, "higher_is_better", property(lambda self: higher))
    assert tuned(study, tmp_path)[1] == {"BN/all": {"learning-rate": best}}


def test_fedbs_is_tuned_by_the_loss_of_its_runs(tmp_path: Path) -> None:
    study = TUNE.replace("strategy: fedavg", "strategy: fedbs", 1)
    with pytest.raises(
        ConfigError, match=r"fedbs weighs by .* Set validation-share for the runs"
    ):
        load(tmp_path, study)
    load(
        tmp_path,
        study.replace("strategy: fedbs", "strategy: fedbs, validation-share: 0.1"),
    )


def run_of(**domains: float | None) -> dict[str, Any]:
    final = {"test-accuracy": 0.5, "domains": {"test-accuracy": domains}}
    return {
        "headline": "test-accuracy",
        "sha256": "x",
        "rounds": 1,
        "ledger": {},
        "final": final,
    }


def test_each_domain_and_their_average_stand_beside_the_papers_number(
    tmp_path: Path, monkeypatch
) -> None:
    """If a run lacks a domain, its average is unknown."""
    paper = {"A/all": {"cat": 20.5, "average": "40.25 ± 1.5"}}
    study = Study(name="pets", methods={"A": {}}, seeds=[0, 1], paper=paper)
    runs = [
        run_of(dog=0.5, cat=0.25),
        run_of(dog=0.7, cat=None),
    ]
    monkeypatch.setattr(results, "is_done", lambda cell, out: True)
    monkeypatch.setattr(
        results, "summary_of", lambda folder: runs[int(folder.name[-1])]
    )
    rows = rows_of(study, tmp_path)
    assert [(row["domain"], row["final"]) for row in rows[:4]] == [
        *(("", 50.0), ("dog", 50.0), ("cat", 25.0), ("average", 37.5))
    ]
    lines = {line["domain"]: line for line in table(rows).to_dict("records")}
    assert [(domain, line["final"]) for domain, line in lines.items()] == [
        *(("", "50.00 ± 0.00"), ("cat", "25.00"), ("average", "37.50"))
    ]
    assert [line["paper"] for line in lines.values()] == ["", "20.50", "40.25 ± 1.50"]
    assert (lines["cat"]["minus paper"], lines["average"]["minus paper"]) == (
        "+4.50",
        "-2.75",
    )


METRICS = """
name: small
base: {dataset: digits-domains, partition: domain, num-clients: 5, num-server-rounds: 1, local-steps: 1, batch-size: 8,
  metrics: balanced-accuracy}
methods: {FedAvg: {strategy: fedavg}, FedBN: {strategy: fedbn}}
metrics: [personal-own-balanced-accuracy, test-accuracy, personal-own-accuracy, test-auprc]
"""


def test_a_study_names_the_metrics_of_its_table(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    sweep(load(tmp_path, METRICS), out)
    final = summary_of(out / "FedBN/all/seed-0")["final"]
    with (out / "results.csv").open() as file:
        rows = {
            (row["method"], row["metric"], row["domain"]): row
            for row in csv.DictReader(file)
        }
    own = [f"personal-own-{name}" for name in ("balanced-accuracy", "accuracy")]
    expected = [("FedAvg", "test-accuracy"), *(("FedBN", name) for name in own)]
    assert list(dict.fromkeys(key[:2] for key in rows)) == expected
    for metric in own:
        assert float(rows["FedBN", metric, ""]["final"]) == 100 * final[metric]
        for domain, value in final["domains"][metric].items():
            assert float(rows["FedBN", metric, domain]["final"]) == 100 * value
    assert "metrics: no run of this study has test-auprc" in caplog.text
