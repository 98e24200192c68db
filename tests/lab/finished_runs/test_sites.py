"""The table by site of runs: its figures are those of the clients' tests, alone, against a run, and on new data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Generator, Tensor
from typer.testing import CliRunner

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.cli import app
from fedbn_flwr.lab.data import Subset
from fedbn_flwr.lab.files import read_metrics
from fedbn_flwr.lab.finished_runs.evaluate import evaluate_run, evaluate_sites
from fedbn_flwr.lab.finished_runs.sites import compare, outputs_of
from fedbn_flwr.lab.report.files import RunFiles
from fedbn_flwr.lab.report.run import run_page
from fedbn_flwr.lab.runs.run import run


def own(out: Path, metric: str) -> list[float]:
    tested = read_metrics(out / "metrics.jsonl")[-1]["clients"]
    return [tested[str(client)][f"own-{metric}"] for client in range(len(tested))]


def values(table: dict[str, Any]) -> list[float]:
    return [row["value"] for row in table["sites"]]


def test_each_client_has_the_model_that_the_run_has_for_it(quick_config, tmp_path: Path) -> None:
    """FedBN: its own one, in the run as in the folder; a second run on the same split is paired with it."""
    settings = {"partition": "iid", "learning-rate": 0.3, "state-dir": "out", "main-metric": "balanced-accuracy"}
    outs = [tmp_path / name for name in ("fedbn", "alone")]
    made = [
        run(quick_config(strategy=name, **settings), out)
        for name, out in zip(("fedbn", "standalone"), outs, strict=True)
    ]
    for summary, out in zip(made, outs, strict=True):
        table = summary["sites"]
        assert values(table) == pytest.approx(own(out, "balanced-accuracy"), abs=1e-12)
        assert table == json.loads((out / "summary.json").read_text())["sites"] == evaluate_sites(out)
        assert all(row["low"] < row["value"] < row["high"] for row in table["sites"])
    table = evaluate_sites(outs[0], outs[1], tmp_path / "written")
    differences = [a - b for a, b in zip(*(own(out, "balanced-accuracy") for out in outs), strict=True)]
    assert [row["difference"] for row in table["sites"]] == pytest.approx(differences, abs=1e-12)
    assert table == json.loads((tmp_path / "written/sites.json").read_text())
    again = compare(
        [outputs_of(outs[0])] * 2, [outputs_of(outs[1])] * 2, "twice"
    )  # the mean over seeds, here of equal ones
    assert [row["p"] for row in again["sites"]] == pytest.approx([row["p"] for row in table["sites"]])
    assert again["runs"] == 2
    page = run_page(RunFiles.read(outs[0]), "").html()
    assert "Is it better at my site?" in page
    on_data = evaluate_run(outs[0], {"dataset": "digits"}, "own:1", against=outs[1]).sites
    assert [row["site"] for row in on_data["sites"]] == ["all"]
    assert on_data["sites"][0]["examples"] == 359
    assert on_data["sites"][0]["difference"] is not None
    shown = CliRunner().invoke(app, ["evaluate", str(outs[0]), "--against", str(outs[1])])
    assert shown.exit_code == 0, shown.output
    assert all(f"client {client}" in shown.output for client in range(3))


def test_a_global_model_is_tested_at_each_site_and_runs_of_another_split_are_refused(quick_run, tmp_path: Path) -> None:
    summary, out = quick_run(dataset="digits-domains", partition="domain", **{"num-clients": 5})
    by_domain = summary["final"]["domains"]["test-accuracy"]
    table = summary["sites"]
    assert [row["site"] for row in table["sites"]] == list(by_domain)
    assert values(table) == pytest.approx(list(by_domain.values()))
    _, other = quick_run(dataset="digits-domains", partition="domain", **{"num-clients": 6})
    with pytest.raises(ConfigError, match="does not test the examples of"):
        evaluate_sites(out, other)
    with pytest.raises(ConfigError, match="leave out --bn adapt"):
        evaluate_run(out, {"dataset": "digits-domains"}, "adapt", against=other)
    on_data = evaluate_run(out, {"dataset": "digits-domains"}).sites
    assert values(on_data) == pytest.approx(values(table))
    said = CliRunner().invoke(app, ["evaluate", str(out), "--bn", "adapt"])
    assert said.exit_code == 2
    assert "--bn: say which data, with --dataset" in said.output
    words = ["evaluate", str(out), "--against", str(other), "--dataset", "digits-domains", "--bn", "adapt"]
    said = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "new")])
    assert said.exit_code == 2
    assert "leave out --bn adapt" in said.output
    assert not (tmp_path / "new").exists()  # it is said before any work


def test_other_statistics_are_compared_with_those_as_saved_at_each_site(quick_run, monkeypatch, tmp_path: Path) -> None:
    """The figures are those of the rows, of which each is one pass over its examples."""
    _, out = quick_run(dataset="digits-domains", partition="domain", **{"num-clients": 5, "num-server-rounds": 1})
    read: list[int] = []
    batch = Subset.batch

    def counted(self: Subset, positions: Tensor, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
        read.append(len(positions))
        return batch(self, positions, generator)

    for bn in ("", "mix", "full", "adapt"):
        with monkeypatch.context() as counting:
            counting.setattr(Subset, "batch", counted)
            read.clear()
            _, rows, sites = evaluate_run(out, {"dataset": "digits-domains"}, bn, out=tmp_path / f"new-{bn}")
        if bn in ("", "mix"):
            assert sum(read) == sum(row.result.num_examples for row in rows), bn
        used = next((row.statistics for row in rows if row.chosen), rows[-1].statistics)
        groups = [row for row in rows if row.statistics == used and row.data != "all"]
        plain = [row for row in rows if row.statistics == "as saved" and row.data != "all"]
        assert values(sites) == pytest.approx([row.result.accuracy for row in groups])
        assert sites == json.loads((tmp_path / f"new-{bn}/sites.json").read_text())
        if used == "as saved":
            assert "against" not in sites
            continue
        assert (sites["against"], sites["statistics"]) == ("the BN as saved", used)
        differences = [one.result.accuracy - other.result.accuracy for one, other in zip(groups, plain, strict=True)]
        assert [row["difference"] for row in sites["sites"]] == pytest.approx(differences)


def test_a_run_whose_main_test_has_statistics_of_its_inputs_has_no_table(quick_run) -> None:
    """Of the run's models with their own statistics the figures would be others than those of the run."""
    summary, out = quick_run(strategy="fedavg", **{"eval-on": "global-test-bn", "test-bn": "batch"})
    assert "sites" not in summary
    with pytest.raises(ConfigError, match="its main test, global-test-bn"):
        evaluate_sites(out)


def test_a_run_that_protects_its_clients_has_no_table(quick_run) -> None:
    assert "sites" in quick_run()[0]
    assert "sites" not in quick_run(**{"masked-sums": True})[0]
