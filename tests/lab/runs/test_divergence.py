"""A diverged run on digits has files, errors, a place in tables and remedies."""

from __future__ import annotations

import re

import numpy as np
import pytest

from fedbn_flwr.client.personal_model import metadata
from fedbn_flwr.errors import DivergedError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.results.files import PREDICTIONS_FILES
from fedbn_flwr.lab.runs.run import run
from fedbn_flwr.lab.studies.check_study import load_study
from fedbn_flwr.lab.studies.sweep import sweep
from tests.support.commands import call
from tests.support.runs import QUICK, lines_of, summary_of

HUGE = {"learning-rate": 1e6, "num-server-rounds": 6, "local-steps": 3}
SMALL = {
    **QUICK,
    "partition": "iid",
    "local-steps": 5,
    "num-server-rounds": 4,
    "learning-rate": 1.0,
}


@pytest.fixture
def diverge(tmp_path):
    """Provide ``diverge(**settings)`` to run until a divergence.

    It returns the error, the summary and the lines of metrics.
    """

    def do(**settings) -> tuple:
        out = tmp_path / "out"
        with pytest.raises(DivergedError) as caught:
            run(Config.make(settings), out)
        return caught.value, summary_of(out), lines_of(out)

    return do


def test_a_huge_learning_rate_fails_with_everything_written(diverge, tmp_path) -> None:
    """The run can be continued on purpose."""
    error, summary, lines = diverge(**HUGE)
    said = r"diverged in round 1: every reply since round 1 has values .* the norm"
    assert re.search(rf"{said} .* Likely cause: the training steps", str(error))
    assert error.diverged_at == summary["diverged-at"] == lines[1]["diverged-at"] == 1
    assert summary["rounds"] == 2
    out = tmp_path / "out"
    tables = {"metrics.jsonl", *PREDICTIONS_FILES, "tests.csv", "summary.json"}
    names = {"config.yaml", "model.safetensors", "checkpoint", *tables}
    assert {path.name for path in out.iterdir()} == names
    assert metadata(out)["diverged-at"] == "1"
    again = Config.make({**HUGE, "on-divergence": "continue", "resume": True})
    summary = run(again, out)
    facts = summary["diverged-at"], summary["rounds"], summary["resumed-after"]
    assert facts == (1, 6, [2])


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "fedbn"},
        {"eval-every": 4},  # a rare test notices it
        # The training itself notices it.
        {"strategy": "centralized", "learning-rate": 1e30, "eval-every": 5},
        {
            "strategy": "fedadam",
            "learning-rate": 1.0,
            "server-learning-rate": 1e37,
            "num-server-rounds": 1,
        },
        {"learning-rate": 1e30, "num-server-rounds": 1},  # no reply is usable
    ],
)
def test_a_run_that_diverged_ends_and_fails_again_when_its_last_round_is_resumed(
    diverge, tmp_path, settings
) -> None:
    settings = {**HUGE, **settings}
    error, summary, lines = diverge(**settings)
    assert error.diverged_at == summary["diverged-at"] == lines[-1]["diverged-at"]
    if settings["num-server-rounds"] == 1:
        again, resumed, _ = diverge(**settings, resume=True)
        assert again.diverged_at == resumed["diverged-at"] == 1
        assert resumed["sha256"] == summary["sha256"]
        assert metadata(tmp_path / "out")["diverged-at"] == "1"


@pytest.mark.parametrize(
    ("settings", "remedy", "named"),
    [
        # The statistics stay near 0 and 1.
        (
            {"bn-momentum": 0.01, "strategy": "fixbn", "freeze-at": 1},
            {"lr-decay-at": "freeze"},
            "frozen after round T*=1",
        ),
        (
            {"strategy": "fedprox", "proximal-mu": 1e4},
            {"proximal-mu": 1.0},
            "proximal-mu",
        ),
        (
            {"strategy": "fedadam", "learning-rate": 0.1, "server-learning-rate": 1e20},
            {"server-learning-rate": 0.1},
            "server-learning-rate=1e+20",
        ),
        (
            {
                "strategy": "fedwon",
                "norm": "wsconv",
                "model": "lenet",
                "learning-rate": 10.0,
                "agc": 0.0,
            },
            {"agc": 0.1},
            "helped: agc=0.1",
        ),
    ],
)
def test_each_method_names_its_cause_and_a_remedy_that_helps(
    diverge,
    tmp_path,
    settings,
    remedy,
    named: str,
) -> None:
    settings = {**SMALL, **settings}
    error, summary, lines = diverge(**settings)
    assert named in str(error)
    if settings["strategy"] == "fixbn":
        assert (summary["diverged-at"], lines[-1]["phase"]) == (2, "frozen")
    summary = run(Config.make({**settings, **remedy}), tmp_path / "again")
    assert "diverged-at" not in summary
    assert np.isfinite(summary["final"]["test-loss"])


# Commands.


STUDY = """
name: rates
base: {num-clients: 2, num-server-rounds: 2, local-steps: 2, batch-size: 4}
methods: {good: {}, bad: {learning-rate: 1.0e+9}}
"""


def test_a_sweep_does_the_other_runs_and_shows_the_diverged(
    tmp_path, monkeypatch
) -> None:
    (tmp_path / "study.yaml").write_text(STUDY)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    out = tmp_path / "out"
    for _ in range(2):  # the second time nothing runs again
        result = call("sweep", tmp_path / "study.yaml", "--out", out)
        assert result.exit_code == 1
        assert "1 of 2 runs failed or diverged: bad/all/seed-0" in result.stderr
        lines = re.findall("^(?:good|bad)  .*", result.stdout, re.MULTILINE)
        good, bad = (re.split(" {2,}", line.strip()) for line in lines)
        assert good[-1] == "1"
        assert bad[-2:] == ["0, 1 diverged", "diverged and left out (seed 0)"]
    assert not list(out.rglob("*unfinished*"))
    study = load_study(tmp_path / "study.yaml", ["on-divergence=continue"])
    assert "0, 1 diverged" in list(sweep(study, tmp_path / "again")["runs"])
