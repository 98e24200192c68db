"""The output folder contains only whole files and never loses a result."""

from __future__ import annotations

import json
import math
import re
import subprocess
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.numpy import load_file
from torch.utils.data import TensorDataset

from fedbn_flwr.errors import ConfigError, DataError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.report.page import write_report
from fedbn_flwr.lab.results.folder import RunFolder
from fedbn_flwr.lab.results.summary import commit_of
from fedbn_flwr.lab.runs.run import run
from tests.support.commands import call, output_of
from tests.support.fast import thinned
from tests.support.options import set_options
from tests.support.runs import summary_of


def test_numbers_that_json_does_not_have_become_null(tmp_path) -> None:
    folder = RunFolder(tmp_path / "run", Config.make({}))
    folder.add_round({"train-loss": math.nan, "by": [{"0": math.inf}, 1.0]})
    line = (folder.path / "metrics.jsonl").read_text()
    assert json.loads(line) == {"train-loss": None, "by": [{"0": None}, 1.0]}


HERE = "fedbn_flwr.lab.results"
# By the name in the warning: the called function, the settings of the run, and the
# repair that the command names.
EXTRAS = {
    "The table of sites": (
        f"{HERE}.tester.Tester.at_end",
        {},
        "--resume",
    ),
    "site client 0": (f"{HERE}.tester.evaluate", {}, "cut.png"),
    "tested model of client 2": (
        f"{HERE}.own_models.TorchClient",
        {"fine-tune": 2},
        "--resume",
    ),
}


@pytest.mark.parametrize("name", thinned(EXTRAS))
def test_no_extra_can_take_the_results_of_a_run(
    quick_run, tmp_path, monkeypatch, caplog, same_bits, name: str
) -> None:
    """Each extra raises in turn, but the run ends well.

    A warning names the way to make the extra again.
    """
    where, settings, again = EXTRAS[name]
    whole, there = quick_run(strategy="fedbn", **{"eval-on": "personal-own"})

    def fails(*args, **kwargs) -> None:
        raise DataError("cut.png cannot be read")

    monkeypatch.setattr(where, fails)
    here = tmp_path / "here"
    command = ["run", there / "config.yaml", *set_options(settings), "--out", here]
    shown = output_of(*command)
    warnings = [record.getMessage() for record in caplog.records if record.levelno > 20]
    assert any(name in text and again in text for text in warnings), warnings

    summary = summary_of(here)
    assert summary["sha256"] == whole["sha256"]
    states = ["model.safetensors"]
    if not settings:
        states += [f"clients/client-{client}.safetensors" for client in range(3)]
    for file in states:
        same_bits(load_file(here / file), load_file(there / file))
    rows = summary.get("sites", [])
    if name == "site client 0":
        assert [row["error"] for row in rows] == ["cut.png cannot be read"] * 3
        assert "client 1 (cut.png cannot be read)" in " ".join(shown.split())
        write_report(here)


def rows(site: object, part: str) -> TensorDataset:
    """Return inputs whose squares are infinite, and labels of two classes."""
    labels = torch.arange(12) % 2
    return TensorDataset(1e30 * torch.randn(12, 3), labels)


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"dataset": f"{__name__}:rows", "strategy": "fedavg"}, "scale the inputs"),
        ({"dataset": f"{__name__}:rows", "strategy": "fedbn"}, "scale the inputs"),
        ({"learning-rate": 1e30, "local-steps": 3}, "steps are too large"),
    ],
)
def test_a_run_that_diverges_names_the_cause(settings, cause: str, tmp_path) -> None:
    few = {"num-clients": 2, "num-server-rounds": 3, "eval-on": "personal-own"}
    done = call("run", *set_options({**few, **settings}), "--out", tmp_path / "a")
    assert done.exit_code == 1
    assert cause in " ".join(done.output.split())
    assert "ClientAppException" not in done.output


CALLED = []


def new(site: int, part: str) -> TensorDataset:
    """Return rows of which 30 % are positive."""
    CALLED.append((site, part))
    draw = torch.Generator().manual_seed(site)
    return TensorDataset(
        torch.randn(40, 3, generator=draw), (torch.arange(40) < 12).long()
    )


def known(site: int, part: str) -> TensorDataset:
    return new(site + 1, part)


def test_new_data_are_read_once_and_compared_by_the_share_that_is_called_positive(
    tmp_path,
) -> None:
    few = {"dataset": f"{__name__}:known", "task": "binary", "num-clients": 2}
    run(Config.make({**few, "num-server-rounds": 1, "seed": 5}), tmp_path / "run")
    CALLED.clear()
    given = [tmp_path / "run", "--dataset", f"{__name__}:new", "--out"]
    output_of("evaluate", *given, tmp_path / "new")
    assert CALLED == [(0, "train"), (0, "test")]
    table = pd.read_csv(tmp_path / "new/predictions.csv")
    shown = output_of("calibrate", *given, tmp_path / "as-it-is", "--way", "none")
    (called,) = re.findall(r"called positive +([0-9.]+) %", shown)
    assert float(called) == round(100 * table["prediction"].mean(), 1)
    assert "base rate 70.0 %" in " ".join(shown.split())


def test_a_used_folder_is_refused(tmp_path) -> None:
    (tmp_path / ".keep").write_text("")
    for out in (tmp_path, tmp_path / ".keep"):
        with pytest.raises(ConfigError, match="is not empty"):
            RunFolder(out, Config.make({}))
    with pytest.raises(ConfigError, match="cannot be written"):
        RunFolder(tmp_path / ".keep/run", Config.make({}))
    assert [path.name for path in tmp_path.iterdir()] == [".keep"]


def test_the_version_names_the_commit_of_a_checkout(tmp_path) -> None:
    def git(*arguments: str) -> str:
        who = ["-c", "user.name=n", "-c", "user.email=e", *arguments]
        return subprocess.check_output(
            ["git", *who], cwd=tmp_path, text=True, stderr=subprocess.DEVNULL
        ).strip()

    def written(name: str, text: str) -> Path:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "__init__.py").write_text(text)
        return tmp_path / name

    def now(package: Path) -> str:
        commit_of.cache_clear()
        return commit_of(package)

    package = written("tracked", "")
    assert now(package) == ""
    git("init")
    git("add", "tracked")
    git("commit", "-m", "first")
    head = f"+g{git('rev-parse', '--short=7', 'HEAD')}"
    assert now(package) == head
    assert now(written("site-packages", "")) == "", (
        "in the repository of something else"
    )
    assert now(written("tracked", "x = 1")) == f"{head}.changed"
    commit_of.cache_clear()
