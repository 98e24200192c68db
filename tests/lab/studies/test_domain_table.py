"""The table by domain: means, standard deviations, the average of domains run by run, the paper's numbers."""

from __future__ import annotations

import csv
import json
import statistics
from pathlib import Path

import pytest

from fedbn_flwr.lab.files import read_metrics
from fedbn_flwr.lab.studies.domain_table import domain_page, domain_rows, is_average
from fedbn_flwr.lab.studies.results import StudyResults
from fedbn_flwr.lab.studies.study import Study
from fedbn_flwr.lab.studies.study_checks import load_study
from fedbn_flwr.lab.studies.sweep import sweep
from fedbn_flwr.lab.studies.tables import table_rows


def run(headline: str, **accuracies: float) -> dict:
    other = {"test-batch-accuracy": {"cat": 0.0}}
    return {"headline": headline, "final": {"domains": {**other, headline: accuracies}}}


def test_the_table_has_rows_and_markdown() -> None:
    done = {
        ("A", "all"): [run("test-accuracy", dog=0.5, cat=0.25), run("test-accuracy", dog=0.7, cat=0.25)],
        ("B", "all"): [run("personal-own-accuracy", dog=0.5, cat=0.75)],
        ("C", "all"): [{"headline": "test-accuracy", "final": {"test-accuracy": 0.3}}],
        ("D", "all"): [],
    }
    paper = {"A/all": {"cat": 20.5, "average": "40.25 ± 1.5"}, "B/all": 71.4}
    rows = domain_rows(Study(name="pets", methods={name: {} for name in "ABCD"}, paper=paper), done)
    assert [(r["method"], r["domain"], r["runs"]) for r in rows] == [
        *(("A", "dog", 2), ("A", "cat", 2), ("A", "average", 2)),
        *(("B", "dog", 1), ("B", "cat", 1), ("B", "average", 1)),
    ]
    average = rows[2]
    assert average["mean"] == pytest.approx(42.5)
    assert average["std"] == pytest.approx(statistics.stdev([37.5, 47.5]))
    assert [row["paper"] for row in rows] == [None, 20.5, 40.25, None, None, None]
    assert [row["paper-std"] for row in rows] == [None, None, 1.5, None, None, None]
    assert [row["difference"] for row in rows] == [None, 4.5, pytest.approx(2.25), None, None, None]
    assert str(domain_page("pets", rows)).splitlines() == [
        "# pets, by domain",
        "",
        "| method | split | metric | dog | cat | average | runs |",
        "|---|---|---|---|---|---|---|",
        "| A | all | test-accuracy | 60.00 ± 14.14 | 25.00 ± 0.00 | 42.50 ± 7.07 | 2 |",
        "| A | all | the paper's |  | 20.50 | 40.25 ± 1.50 |  |",
        "| A | all | difference |  | +4.50 | +2.25 |  |",
        "| B | all | personal-own-accuracy | 50.00 | 75.00 | 62.50 | 1 |",
    ]


def test_a_domain_only_the_paper_has_is_shown_as_missing() -> None:
    study = Study(name="birds", methods={"A": {}}, splits={"x": {}}, paper={"A/x": {"bird": 9.0}})
    rows = domain_rows(study, {("A", "x"): [run("test-accuracy", dog=0.5)]})
    assert [(row["domain"], row["runs"], row["mean"]) for row in rows] == [
        ("dog", 1, 50.0),
        ("bird", 0, None),
        ("average", 1, 50.0),
    ]
    assert [row["difference"] for row in rows] == [None, None, None]
    assert "| - |" in str(domain_page("", rows))


def test_a_run_without_a_value_in_a_domain_has_no_average() -> None:
    runs = [run("auroc", cat=0.9, dog=0.5), run("auroc", cat=0.7, dog=None)]
    rows = domain_rows(Study(name="pets", methods={"A": {}}), {("A", "all"): runs})
    assert [(row["domain"], row["runs"], row["mean"]) for row in rows] == [
        *(("cat", 2, pytest.approx(80.0)), ("dog", 1, 50.0)),
        ("average", 1, pytest.approx(70.0)),
    ]
    assert is_average({"auroc": 0.7, **runs[0]["final"]}, "auroc")
    assert not is_average({"auroc": 0.7, **runs[1]["final"]}, "auroc")


STUDY = """
name: small
base: {dataset: digits-domains, partition: domain, num-clients: 5, num-server-rounds: 1, local-steps: 1, batch-size: 8}
methods: {FedAvg: {strategy: fedavg}, FedBN: {strategy: fedbn}}
"""


def test_a_sweep_writes_the_domain_table_beside_the_other(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    average = "{noisy: 50, average: 66.3 ± 0.7}"
    path.write_text(STUDY + f"paper: {{FedAvg/all: {average}, FedBN/all: {average}}}\n")
    study, out = load_study(path), tmp_path / "out"
    table = str(sweep(study, out))
    assert table == "\n".join((out / f"{name}.md").read_text() for name in ("table", "domains", "comparisons"))
    with (out / "domains.csv").open() as file:
        rows = {(row["method"], row["domain"]): row for row in csv.DictReader(file)}
    for method, metric in (("FedAvg", "test-accuracy"), ("FedBN", "personal-own-accuracy")):
        found = read_metrics(out / method / "all/seed-0/metrics.jsonl")[-1]["domains"][metric]
        assert len(found) == 5
        for domain, accuracy in found.items():
            assert float(rows[method, domain]["mean"]) == 100 * accuracy
        assert float(rows[method, "average"]["mean"]) == 100 * statistics.fmean(found.values())
    assert (rows["FedAvg", "noisy"]["paper"], rows["FedAvg", "average"]["paper"]) == ("50.0", "66.3")
    with (out / "table.csv").open() as file:
        for row in csv.DictReader(file):  # domains of one size: the test of all images together is the average, too
            assert (row["paper"], float(row["difference"])) == ("66.3", pytest.approx(float(row["mean"]) - 66.3))
            assert row["paper-std"] == "0.7"
    summary = out / "FedAvg/all/seed-0/summary.json"
    final = json.loads(summary.read_text())["final"]
    final["domains"]["test-accuracy"]["noisy"] += 0.01
    summary.write_text(json.dumps({**json.loads(summary.read_text()), "final": final}))
    rows = table_rows(study, StudyResults(study, out).rows())
    assert [row["paper"] for row in rows] == [None, 66.3], "with other sizes the test of all images is no average"


def test_a_study_names_the_metrics_of_its_tables(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, out = tmp_path / "study.yaml", tmp_path / "out"
    wanted = ["personal-own-balanced-accuracy", "test-accuracy", "personal-own-accuracy", "test-auprc"]
    path.write_text(STUDY.replace("base: {", "base: {metrics: balanced-accuracy, ") + f"metrics: {wanted}\n")
    table = str(sweep(load_study(path), out))
    final = json.loads((out / "FedBN/all/seed-0/summary.json").read_text())["final"]
    with (out / "table.csv").open() as file:
        rows = {(row["method"], row["metric"]): row for row in csv.DictReader(file)}
    assert list(rows) == [("FedAvg", "test-accuracy"), ("FedBN", wanted[0]), ("FedBN", "personal-own-accuracy")]
    assert float(rows["FedBN", wanted[0]]["mean"]) == 100 * final[wanted[0]]
    assert float(rows["FedBN", wanted[0]]["best-mean"]) >= 100 * final[wanted[0]], "its own best round"
    with (out / "domains.csv").open() as file:
        by_domain = {(r["method"], r["metric"], r["domain"]): r["mean"] for r in csv.DictReader(file)}
    for metric in (wanted[0], "personal-own-accuracy"):
        for domain, value in final["domains"][metric].items():
            assert float(by_domain["FedBN", metric, domain]) == 100 * value
        assert f"| FedBN | all | {metric} |" in table
    assert "metrics: no run of this study has test-auprc" in caplog.text
