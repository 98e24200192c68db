"""The output folder contains only whole files and never loses a result."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors import safe_open
from safetensors.numpy import load_file
from torch import nn
from typer.testing import CliRunner

from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.checked_file import write_atomically
from fedbn_flwr.errors import ConfigError, DataError
from fedbn_flwr.lab.cli import app
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.files import read_metrics
from fedbn_flwr.lab.output import result_writer as result_writer_module
from fedbn_flwr.lab.output.folder import DIVERGED_AT, RunFolder
from fedbn_flwr.lab.output.result_writer import ResultWriter
from fedbn_flwr.lab.output.summary import commit_of
from fedbn_flwr.lab.report import write_report
from fedbn_flwr.server.runs.round_outcome import RoundOutcome
from fedbn_flwr.strategies import FedAvg
from tests.support.fast import thinned
from tests.support.runs import summary_of

STATE = {"a": np.arange(6, dtype=np.float32).reshape(2, 3).T, "count": np.array(3)}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_run_folder_holds_the_documented_files(tmp_path: Path) -> None:
    config = Config.make({"seed": 3})
    folder = RunFolder(tmp_path / "deep" / "run", config)
    assert names(folder.path) == ["config.yaml"]
    assert (
        Config.make(yaml.safe_load((folder.path / "config.yaml").read_text())) == config
    )
    folder.add_round({"round": 1, "test-accuracy": 0.5, "test-loss": 1.0})
    folder.add_round({"round": 2, "test-accuracy": 0.7, "test-loss": 0.5})
    folder.save_model(STATE, {"format": "pt", "affine": "global"})
    folder.save("summary.json", {"final": {"round": 2}})
    assert names(folder.path) == [
        *(
            "config.yaml",
            "metrics.jsonl",
            "model.safetensors",
            "summary.json",
        )
    ]
    assert summary_of(folder.path) == {"final": {"round": 2}}
    with safe_open(folder.path / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt", "affine": "global"}
        for name, array in STATE.items():
            found = file.get_tensor(name)
            assert (found.dtype, found.shape, found.tolist()) == (
                array.dtype,
                array.shape,
                array.tolist(),
            )


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "summary.json"
    write_atomically(path, "old")
    write_atomically(path, "new")
    assert path.read_text() == "new"

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "half")
    assert path.read_text() == "new"
    assert names(tmp_path) == ["summary.json"], "no temporary file is left"


def test_numbers_that_json_does_not_have_become_null(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", Config.make({}))
    folder.add_round(
        {
            "round": 1,
            "train-loss": math.nan,
            "clients": {"0": {"loss": math.inf}},
            "list": [1.0, -math.inf],
        }
    )
    line = (folder.path / "metrics.jsonl").read_text()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    read = json.loads(line, parse_constant=refuse)
    assert read == {
        "round": 1,
        "train-loss": None,
        "clients": {"0": {"loss": None}},
        "list": [1.0, None],
    }


def test_an_incomplete_last_line_is_left_out(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", Config.make({}))
    folder.add_round({"round": 1})
    folder.add_round({"round": 2})
    path = folder.path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    assert read_metrics(path) == [{"round": 1}]
    assert read_metrics(tmp_path / "absent.jsonl") == []


HERE = "fedbn_flwr.lab.output"
# By the name in the warning: the called function, the settings of the run, and the
# repair that the command names.
EXTRAS: Mapping[str, tuple[str, list[str], str]] = {
    "The table of sites": (
        f"{HERE}.result_writer.sites_at_end",
        [],
        "--resume",
    ),
    "site client 0": (f"{HERE}.site_tests.evaluate", [], "cut.png"),
    "fine-tuning of client 2": (
        f"{HERE}.own_models.TorchClient",
        ["fine-tune=2"],
        "--resume",
    ),
}


@pytest.mark.parametrize("name", thinned(EXTRAS))
def test_no_extra_can_take_the_results_of_a_run(
    quick_run, tmp_path: Path, monkeypatch, caplog, name: str
) -> None:
    """Each extra raises in turn, but the run ends well.

    A warning names the way to make the extra again.
    """
    where, settings, again = EXTRAS[name]
    whole, there = quick_run(strategy="fedbn", **{"eval-on": "personal-own"})

    def fails(*args: Any, **kwargs: Any) -> None:
        raise DataError("cut.png cannot be read")

    monkeypatch.setattr(where, fails)
    words = [word for one in settings for word in ("--set", one)]
    here = tmp_path / "here"
    command = ["run", str(there / "config.yaml"), *words, "--out", str(here)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    warnings = [record.getMessage() for record in caplog.records if record.levelno > 20]
    assert any(name in text and again in text for text in warnings), warnings

    summary = summary_of(here)
    assert summary["sha256"] == whole["sha256"]
    states = ["model.safetensors"]
    if "fine-tune=2" not in settings:
        states += [f"clients/client-{client}.safetensors" for client in range(3)]
    for file in states:
        same_state(load_file(here / file), load_file(there / file))
    rows = summary.get("sites", [])
    if name == "site client 0":
        assert [row["error"] for row in rows] == ["cut.png cannot be read"] * 3
        assert "client 1 (cut.png cannot be read)" in " ".join(done.output.split())
        write_report(here)
    elif "fine-tune=2" not in settings and name != "The table of sites":
        assert rows == whole["sites"]


def same_state(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name])


def writer_of(folder: RunFolder, config: Config) -> ResultWriter:
    """Return the writer of a run without data."""
    model = nn.Linear(64, 10)
    strategy = FedAvg(parts=split_state(model))
    strategy.begin()
    return ResultWriter(folder, config, model, None, strategy, None)


@pytest.mark.parametrize("chosen", [1, 2, 3])
def test_a_model_says_that_it_diverged_if_its_round_has(
    chosen: int, tmp_path: Path
) -> None:
    """The best round may precede the round of divergence, here 2."""
    keys = {"validation-share": 0.1, "early-stopping": 3, "num-server-rounds": 3}
    config = Config.make({"strategy": "centralized", **keys})
    folder = RunFolder(tmp_path / "run", config)
    for number in (1, 2, 3):
        line = {"round": number, "seconds": 1.0, "rejected": []}
        line["validation-accuracy"] = 0.9 if number == chosen else 0.1
        if number >= 2:
            line[DIVERGED_AT] = 2
        folder.add_round(line)
    writer = writer_of(folder, config)
    summary = writer.finish(STATE)
    assert summary[DIVERGED_AT] == 2
    with safe_open(folder.path / "model.safetensors", "np") as file:
        said = file.metadata().get(DIVERGED_AT)
    assert said == (None if chosen < 2 else "2")


def test_the_seconds_of_a_line_are_those_of_its_round(
    tmp_path: Path, monkeypatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(result_writer_module.time, "monotonic", lambda: now[0])
    config = Config.make({"strategy": "centralized", "num-server-rounds": 3})
    folder = RunFolder(tmp_path / "run", config)
    writer = writer_of(folder, config)
    now[0] += 50
    writer.start_clock()
    for number, seconds in enumerate((5, 3, 4), 1):
        now[0] += seconds
        writer.write(RoundOutcome(number, "train"))
    assert [line["seconds"] for line in writer.lines()] == [5, 3, 4]


@pytest.mark.parametrize("used", ["file inside", "a file", "hidden file inside"])
def test_a_used_folder_is_refused(tmp_path: Path, used: str) -> None:
    out = tmp_path / "run"
    if used == "a file":
        out.write_text("")
    else:
        out.mkdir()
        (out / (".keep" if used == "hidden file inside" else "notes.txt")).write_text(
            ""
        )
    with pytest.raises(ConfigError) as caught:
        RunFolder(out, Config.make({}))
    assert (
        str(caught.value)
        == f"out={str(out)!r} is in use. Results are never overwritten. Choose another"
        " folder."
    )
    assert not (out / "config.yaml").exists()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"out='.*run' cannot be written: .*Not a directory"
    ):
        RunFolder(tmp_path / "file" / "run", Config.make({}))


def test_the_version_names_the_commit_of_a_checkout(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        command = [
            "git",
            "-C",
            str(tmp_path),
            "-c",
            "user.name=n",
            "-c",
            "user.email=e",
            *arguments,
        ]
        return subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout.strip()

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
