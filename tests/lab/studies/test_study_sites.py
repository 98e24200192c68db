"""A study compares its methods with those of ``against`` at each site, over the seeds with the same examples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.finished_runs.sites import compare, outputs_of
from fedbn_flwr.lab.report.files import StudyFiles
from fedbn_flwr.lab.report.study import study_page
from fedbn_flwr.lab.studies.study_checks import load_study
from fedbn_flwr.lab.studies.sweep import sweep

CONTENT = {
    "name": "sites",
    "base": {
        **{"num-clients": 3, "num-server-rounds": 1, "local-steps": 3, "learning-rate": 0.3, "eval-on": "personal-own"},
    },
    "methods": {"Standalone": {"strategy": "standalone"}, "FedAvg": {"strategy": "fedavg"}},
    "splits": {
        "natural": {"dataset": "digits-domains", "partition": "domain", "num-clients": 5},
        "by seed": {"partition": "dirichlet"},
    },
    "seeds": [0, 1],
    "against": ["Standalone"],
}


def test_methods_are_compared_at_each_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump({**CONTENT, "against": ["Alone"]}, sort_keys=False))
    with pytest.raises(ConfigError, match="against: 'Alone' is not one of methods \\(Standalone, FedAvg\\)"):
        load_study(path)
    path.write_text(yaml.safe_dump(CONTENT, sort_keys=False))
    out = tmp_path / "out"
    printed = str(sweep(load_study(path), out))
    assert "FedAvg against Standalone, natural" in printed
    tables = json.loads((out / "sites.json").read_text())["tables"]
    assert [(table["method"], table["split"], table.get("runs")) for table in tables] == [
        ("FedAvg", "natural", 2),
        ("FedAvg", "by seed", None),  # each seed has another split, so other test examples
    ]
    runs = [[outputs_of(out / method / "natural" / f"seed-{k}") for k in (0, 1)] for method in CONTENT["methods"]]
    table = compare(runs[1], runs[0], "Standalone")
    assert tables[0] == {"split": "natural", "method": "FedAvg", **table, "made-of": tables[0]["made-of"]}
    page = study_page(StudyFiles.read(out), "").html()
    assert "FedAvg against Standalone, natural" in page
    tested: list[Path] = []
    monkeypatch.setattr(
        "fedbn_flwr.lab.studies.sites.outputs_of", lambda run, metric: tested.append(run) or outputs_of(run, metric)
    )
    written = (out / "sites.json").read_bytes()
    assert str(sweep(load_study(path), out)) == printed
    assert (tested, (out / "sites.json").read_bytes()) == ([], written)  # nothing is new, and nothing is tested again
    changed = out / "FedAvg/natural/seed-1/summary.json"
    changed.write_text(json.dumps({**json.loads(changed.read_text()), "sha256": "another model"}))
    assert str(sweep(load_study(path), out)) == printed
    assert sorted(tested) == sorted(
        out / method / "natural" / f"seed-{k}" for method in CONTENT["methods"] for k in (0, 1)
    )
    path.write_text(yaml.safe_dump({**CONTENT, "against": []}))
    sweep(load_study(path), out)
    assert not (out / "sites.json").exists()


def test_models_with_statistics_of_the_test_inputs_are_not_compared(tmp_path: Path) -> None:
    """It is said before the first run, and not by the tables after the last one."""
    path = tmp_path / "study.yaml"
    base = {**CONTENT["base"], "eval-on": "global-test-bn", "test-bn": "batch"}
    methods = {"FedAvg": {"strategy": "fedavg"}, "FixBN": {"strategy": "fixbn"}}
    path.write_text(yaml.safe_dump({**CONTENT, "base": base, "methods": methods, "against": ["FedAvg"]}))
    with pytest.raises(ConfigError) as error:
        load_study(path)
    assert str(error.value).count("against compares models with the BN statistics that they have") == 8
