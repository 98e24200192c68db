"""Studies: the grid, skipped and old runs, and the tables."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from fedbn_flwr.errors import ConfigError, RunFailedError, StateError
from fedbn_flwr.lab.output.folder import lock_folder
from fedbn_flwr.lab.studies import one_run
from fedbn_flwr.lab.studies.check_study import Selection, load_study
from fedbn_flwr.lab.studies.one_run import do_cell, is_done
from fedbn_flwr.lab.studies.parallel import in_parallel
from fedbn_flwr.lab.studies.results import markdown, rows_of, table
from fedbn_flwr.lab.studies.study import Cell, Study, Tuning
from fedbn_flwr.lab.studies.sweep import LogFollower, sweep
from tests.support.runs import summary_of
from tests.support.tables import write_images

TEXT = """
name: small
base: {num-clients: 2, num-server-rounds: 1, local-steps: 1, batch-size: 4, learning-rate: 0.3, variance: pooled}
methods:
  FedAvg: {strategy: fedavg}
  FedBN/own: {strategy: fedbn, learning-rate: 0.1}
splits:
  iid: {partition: iid, learning-rate: 0.2}
  two classes: {partition: classes}
seeds: [0, 1]
skip: [FedBN/own/iid]
paper: {FedAvg/iid: 91.35}
"""


class Noted(LogFollower):
    """A follower that notes the runs that began, their rounds, and their ends."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.rounds: list[tuple[str, int]] = []
        self.ended: dict[str, str] = {}

    def begin(self, cell: Cell):
        self.begun.append(cell.name)
        return lambda line: self.rounds.append((cell.name, line["round"]))

    def end(self, cell: Cell, error: str) -> None:
        self.ended[cell.name] = error


def begun(study: Study, out: Path, **options: Any) -> list[str]:
    """Return the runs that a sweep begins."""
    noted = Noted()
    sweep(study, out, follower=noted, **options)
    return noted.begun


@pytest.fixture
def study(tmp_path: Path) -> Study:
    return load_study(written(tmp_path, TEXT))


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the finished study."""
    folder = tmp_path_factory.mktemp("swept")
    sweep(load_study(written(folder, TEXT)), folder / "out")
    return folder / "out"


@pytest.fixture
def out(swept: Path, tmp_path: Path) -> Path:
    """A copy of the finished study."""
    return Path(shutil.copytree(swept, tmp_path / "out"))


def written(folder: Path, text: str) -> Path:
    path = folder / "study.yaml"
    path.write_text(text)
    return path


def test_a_study_is_a_grid_of_runs(study: Study, tmp_path: Path) -> None:
    cells = list(study.cells())
    assert [cell.name for cell in cells] == [
        "FedAvg/iid/seed-0",
        "FedAvg/two classes/seed-0",
        "FedBN/own/two classes/seed-0",
        "FedAvg/iid/seed-1",
        "FedAvg/two classes/seed-1",
        "FedBN/own/two classes/seed-1",
    ]
    assert [cell.config.learning_rate for cell in cells[:3]] == [
        0.2,
        0.3,
        0.1,
    ], "method over split over base"
    assert [cell.config.seed for cell in cells] == [0, 0, 0, 1, 1, 1]
    # This key of base has no effect under FedBN, and is left out.
    variances = [cell.config.variance for cell in cells[:3]]
    assert variances == ["pooled", "pooled", "mean"]
    assert cells[2].folder(tmp_path).relative_to(tmp_path).parts == (
        "FedBN",
        "own",
        "two_classes",
        "seed-0",
    )
    assert len({cell.folder(tmp_path) for cell in cells}) == len(cells)


LAYERS = ("base", "--set", "splits", "methods", "overrides", "tune.base", "tune.grid")
VALUES = ("channel", "messages")


@pytest.mark.parametrize("pair", list(itertools.combinations(LAYERS, 2)))
def test_of_two_layers_of_a_study_the_later_one_wins(
    tmp_path: Path, pair: tuple[str, str]
) -> None:
    """This also applies after ``tune`` has chosen."""
    of_layer = {layer: dict[str, str]() for layer in LAYERS}
    for layer, value in zip(pair, VALUES, strict=True):
        of_layer[layer]["fedtan-transport"] = value
    grid = {key: [value] for key, value in of_layer["tune.grid"].items()}
    text = {
        "name": "layers",
        "base": {"strategy": "fedtan", "validation-share": 0.2, **of_layer["base"]},
        "splits": {"s": of_layer["splits"]},
        "methods": {"m": of_layer["methods"]},
        "overrides": {"m/s": of_layer["overrides"]},
        "seeds": [7],
        "tune": {
            "grid": {"learning-rate": [0.1], **grid},
            "base": of_layer["tune.base"],
            "seeds": [9],
        },
    }
    given = [f"{key}={value}" for key, value in of_layer["--set"].items()]
    study = Study.read(written(tmp_path, yaml.safe_dump(text)), [*given, "seed=5"])
    trials = [*study.trials()]
    found = [cell.config for cell in trials]
    assert [one.fedtan_transport for one in found] == [VALUES[1]]
    assert [one.seed for one in found] == [9]
    assert study.tune
    chosen = study.with_chosen({"m/s": study.tune.points()[0]})
    for later in (study, chosen):
        (cell,) = later.cells()
        assert cell.config.seed == 7
        if later is chosen or not any(layer.startswith("tune") for layer in pair):
            in_runs = [layer for layer in pair if layer != "tune.base"]
            wanted = VALUES[pair.index(in_runs[-1])]
            assert cell.config.fedtan_transport == wanted


SEEDS = "tune: {grid: {seed: [1, 2]}, base: {validation-share: 0.2}}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("FedAvg/iid: 91", "FedAvg: 91"), "'FedAvg' names no METHOD/SPLIT"),
        *(
            (("91.35", wrong), "paper: FedAvg/iid.*: '.*' is not a number of a paper")
            for wrong in (
                "high",
                "70 ± 1 ± 2",
                "70 ±",
                "70 ± -1",
                ".nan",
                "{b: 1 +- 1}",
            )
        ),
        (
            ("91.35", "{cat: x, dog: [1]}"),
            r"FedAvg/iid, cat: 'x' is not .*; FedAvg/iid, dog: '\[1\]' is not a number",
        ),
        (
            ("strategy: fedbn", "strategy: fedbn, variance: pooled"),
            "variance='pooled' has no effect: fedbn averages",
        ),
        (
            ("strategy: fedbn", "strategy: silobm"),
            "FedBN/own/two classes/seed-0: unknown strategy 'silobm'",
        ),
        (("seeds: [0, 1]", "seeds: []"), "seeds: list should have at least 1 item"),
        (("name: small", "nome: small"), "nome: extra inputs are not permitted"),
        (("name: small", ""), "the study needs the key name"),
        (("num-clients: 2", "num-clients: [2]"), "base.num-clients"),
        ((TEXT, "- a"), "study .*study.yaml"),
        ((TEXT, "a: ["), "study .*study.yaml"),
        (
            ("name: small", "name: small\nname: large"),
            "study .*study.yaml: line 3: 'name' is also in line 2",
        ),
        (
            ("strategy: fedavg}", "strategy: fedavg}\n  FedAvg: {}"),
            "line 6: 'FedAvg' is also in line 5",
        ),
        (
            (TEXT, "{name: a, methods: {A: {}}, splits: {}}"),
            "splits: dictionary should have at least 1 item",
        ),
        (
            (TEXT, "{name: s, methods: {A: {}, A/b: {}}, splits: {b/c: {}, c: {}}}"),
            "'A/b' on split 'c' would share the folder A/b/c/seed-0",
        ),
        ((TEXT, "{name: s, base: {seed: 7}, methods: {A: {}}}"), "base: seed has no"),
        (
            (TEXT, f"{{name: s, methods: {{A: {{}}}}, {SEEDS}}}"),
            r"tune\.grid: seed has no effect .*tune\.seeds",
        ),
    ],
)
def test_a_wrong_study_is_refused(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_study(written(tmp_path, TEXT.replace(*change)))


def test_a_sweep_continues_where_it_was_interrupted(
    study: Study, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    cells = list(study.cells())
    half = cells[1].folder(out)
    half.mkdir(parents=True)
    (half / "config.yaml").write_text("half")
    noted = Noted()
    first = sweep(study, out, follower=noted)
    assert [text for text in caplog.messages if "left out" in text] == [
        "FedBN/own/two classes: variance of base is left out: fedbn averages no running"
        " variances"
    ]
    assert noted.begun == [cell.name for cell in cells]
    assert noted.rounds == [(cell.name, 1) for cell in cells]
    assert noted.ended == dict.fromkeys(noted.begun, "")
    aside = half.with_name("seed-0.unfinished-1")
    assert (aside / "config.yaml").read_text() == "half"
    assert (out / "table.md").read_text() == f"# small\n\n{markdown(first)}\n"
    made = {
        path: path.read_bytes()
        for path in out.rglob("*")
        if path.is_file() and path.parent != out
    }
    assert sweep(study, out, follower=(again := Noted())).equals(first)
    assert again.begun == []
    assert {path: path.read_bytes() for path in made} == made
    again = load_study(out / "study.yaml")
    assert [cell.config for cell in again.cells()] == [cell.config for cell in cells]


def test_a_part_of_a_study_is_done_and_the_rest_later(
    study: Study, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    one = Selection(methods=["FedAvg"], splits=["iid"], seeds=[1])
    assert begun(study, out, selection=one) == ["FedAvg/iid/seed-1"]
    assert begun(study, out, selection=Selection(seeds=[1])) == [
        "FedAvg/two classes/seed-1",
        "FedBN/own/two classes/seed-1",
    ]
    assert begun(study, out) == [cell.name for cell in study.cells() if cell.seed == 0]
    with pytest.raises(ConfigError) as caught:
        sweep(study, out, selection=Selection(["FedAvg", "FedProx"], ["all"], [7]))
    assert [(one.code, one.key) for one in caught.value.problems] == [
        ("unknown-name", key) for key in ("--method", "--split", "--seed")
    ]


def test_a_run_with_checkpoints_continues_unless_the_study_has_changed(
    tmp_path: Path, caplog
) -> None:
    class Cut(KeyboardInterrupt):
        pass

    class Cutting(LogFollower):
        def begin(self, cell: Cell):
            def on_round(line):
                if line["round"] == 2:
                    raise Cut

            return on_round

    text = (
        "{name: s, base: {num-clients: 2, local-steps: 1, batch-size: 4,"
        " checkpoint-every: 1, num-server-rounds: 3}"
    )
    study = load_study(
        written(tmp_path, text + ", methods: {FedBN: {strategy: fedbn}}}")
    )
    for changed in (False, True):
        out = tmp_path / f"out-{changed}"
        with pytest.raises(Cut):
            sweep(study, out, follower=Cutting())
        then = load_study(tmp_path / "study.yaml", ["learning-rate=0.3"] * changed)
        sweep(then, out)
        (folder,) = (cell.folder(out) for cell in then.cells())
        summary = summary_of(folder)
        assert summary.get("resumed-after") == (None if changed else [1])
        assert folder.with_name("seed-0.unfinished-1").exists() == changed
    assert (
        "starts from the beginning: it belongs to a run with other settings: "
        in caplog.text
    )
    assert "learning-rate=0.1, now 0.3" in caplog.text


def numbers(made: pd.DataFrame) -> pd.DataFrame:
    """Return a table without its remarks."""
    return made.drop(columns="remarks", errors="ignore")


def test_a_changed_study_repeats_what_changed_and_keeps_the_former_runs(
    study: Study, out: Path, tmp_path: Path, caplog
) -> None:
    first = table(rows_of(study, out))
    changed = TEXT.replace("learning-rate: 0.2", "learning-rate: 0.25")
    # the default, written out
    changed = changed.replace("two classes: {", "two classes: {eval-every: 1, ")
    former = (out / "FedAvg/iid/seed-0/summary.json").read_bytes()
    assert begun(load_study(written(tmp_path, changed)), out) == [
        "FedAvg/iid/seed-0",
        "FedAvg/iid/seed-1",
    ]
    assert (out / "FedAvg/iid/seed-0.earlier-1/summary.json").read_bytes() == former
    assert (
        "FedAvg/iid/seed-0 is repeated. Its settings are not the study's:"
        " learning-rate=0.2, now 0.25" in caplog.messages
    )
    # Other paths and timeouts do not make another run, and the reference's own tests
    # are not a change.
    noted = Noted()
    assert numbers(sweep(study, out, follower=noted)).equals(first)
    assert noted.begun == ["FedAvg/iid/seed-0", "FedAvg/iid/seed-1"]
    again = load_study(
        written(tmp_path, TEXT),
        ["round-timeout=9", "checkpoint-every=3"],
    )
    noted = Noted()
    assert numbers(sweep(again, out, follower=noted)).equals(first)
    reference = (
        "{name: r, base: {num-server-rounds: 1, eval-on: personal-own}, methods: {C:"
        " {strategy: centralized}}}"
    )
    for _ in range(2):
        sweep(
            load_study(written(tmp_path, reference)),
            tmp_path / "reference",
            follower=noted,
        )
    assert noted.begun == ["C/all/seed-0"]


def test_a_failed_run_is_recorded(study: Study, tmp_path: Path, monkeypatch) -> None:
    def fails(config, folder, **options):
        raise ZeroDivisionError("out of luck")

    monkeypatch.setattr(one_run, "run", fails)
    with pytest.raises(RunFailedError, match="6 of 6 runs failed or diverged"):
        sweep(study, tmp_path)
    failure = json.loads((tmp_path / "FedAvg/iid/seed-1/failed.json").read_text())
    assert (failure["error"], failure["type"]) == ("out of luck", "ZeroDivisionError")
    assert "fails" in failure["traceback"]


def test_a_run_that_another_process_writes_or_that_cannot_go_on_now_stays(
    study, tmp_path: Path, monkeypatch
) -> None:
    """A full disk or a lock must not restart the run, because checkpoints are good."""
    out, cell = tmp_path / "out", next(study.cells())
    folder = cell.folder(out)
    (folder / "checkpoint").mkdir(parents=True)
    with lock_folder(folder):
        assert "another process is still writing this run" in do_cell(cell, out)
    assert [path.name for path in folder.parent.iterdir()] == ["seed-0"], (
        "nothing was renamed"
    )

    def full(*arguments, **options):
        raise ConfigError("no space left on device")

    monkeypatch.setattr(one_run, "changed", lambda config, folder: "")
    monkeypatch.setattr(one_run, "run", full)
    assert do_cell(cell, out) == "no space left on device"
    assert [path.name for path in folder.parent.iterdir()] == ["seed-0"]


def test_results_of_data_that_have_changed_do_not_stand_beside_those_of_the_new_ones(
    tmp_path: Path,
) -> None:
    base = {
        "dataset": write_images(tmp_path / "t", {"cat": 10, "dog": 10}),
        "num-clients": 2,
        "num-server-rounds": 1,
        "local-steps": 1,
    }
    small = {
        "name": "own",
        "base": {**base, "batch-size": 4},
        "methods": {"FedAvg": {"strategy": "fedavg"}},
    }

    def loaded(seeds: list[int]) -> Study:
        return load_study(written(tmp_path, json.dumps({**small, "seeds": seeds})))

    sweep(loaded([0]), tmp_path / "out")
    (tmp_path / "t/dog/9.png").unlink()
    sweep(loaded([0]), tmp_path / "out")  # nothing remains to do
    with pytest.raises(
        ConfigError,
        match=(
            r"1 finished runs of the study in .*FedAvg/all/seed-0\) have other data"
        ),
    ):
        sweep(loaded([0, 1]), tmp_path / "out")


KILLER = """
import os, signal
from pathlib import Path
from torch import nn

def net(num_classes, channels, size):
    if Path("fatal").exists() and os.getpid() != int(Path("fatal").read_text()):
        os.kill(os.getpid(), signal.SIGKILL)
    inputs = channels * size * size
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 8), nn.BatchNorm1d(8), nn.Linear(8, num_classes))
"""


PARALLEL = """
name: small
base: {num-clients: 2, num-server-rounds: 1, local-steps: 1, batch-size: 4}
methods: {dies: {model: 'sweep_killer:net'}, lives: {fraction-train: 0.5}}
"""


def test_runs_in_parallel_have_the_bits_of_runs_in_series_and_outlive_one_that_is_killed(
    tmp_path: Path, monkeypatch
) -> None:
    """A killed process is recorded, and the other processes continue.

    The next sweep repeats it.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "sweep_killer.py").write_text(KILLER)
    study = load_study(written(tmp_path, PARALLEL))
    dies, lives = [cell.name for cell in study.cells()]
    first = sweep(study, tmp_path / "series")
    (tmp_path / "fatal").write_text(str(os.getpid()))
    with pytest.raises(RunFailedError, match=f"1 of 2 runs failed or diverged: {dies}"):
        sweep(study, Path("parallel"), in_parallel(2), noted := Noted())
    assert noted.ended.pop(dies).startswith("its process ended with status -9")
    assert noted.ended == {lives: ""}
    (failed,) = Path("parallel").rglob("failed.json")
    assert json.loads(failed.read_text())["type"] == "ProcessEnded"
    (tmp_path / "fatal").unlink()
    assert sweep(study, Path("parallel"), follower=(noted := Noted())).equals(first)
    assert noted.ended == {dies: ""}
    assert (
        Path("parallel/results.csv").read_bytes()
        == Path("series/results.csv").read_bytes()
    )


def test_a_name_of_dots_stays_in_the_folder_of_the_study(tmp_path: Path) -> None:
    for name in ("..", ".", "a/../..", "a//b"):
        folder = Cell(name, "all", 0, {}, {}).folder(tmp_path)
        assert ".." not in folder.relative_to(tmp_path).parts
        assert len(folder.relative_to(tmp_path).parts) == name.count("/") + 3


def test_a_sweep_that_is_stopped_leaves_no_results_of_former_settings(
    study: Study, out: Path
) -> None:
    """The tables next to ``study.yaml`` match its settings before the first run."""

    def stopped(*_: object) -> Generator[tuple[Cell, str]]:
        raise KeyboardInterrupt
        yield

    (out / "tuning.md").write_text("of a former study with tune\n")
    other = study.model_copy(update={"base": {**study.base, "local-steps": 3}})
    with pytest.raises(KeyboardInterrupt):
        sweep(other, out, runner=stopped)
    assert pd.read_csv(out / "results.csv").empty
    assert not (out / "tuning.md").exists()
    # A sweep that stops in its trials does not replace study.yaml, which names the
    # settings of the existing results.
    with pytest.raises(KeyboardInterrupt):
        sweep(
            other.model_copy(update={"tune": Tuning(grid={"local-steps": [1]})}),
            out,
            runner=stopped,
        )
    assert "tune" not in (out / "study.yaml").read_text()


def test_what_is_damaged_is_named_or_repeated(study: Study, out: Path) -> None:
    first = out / "FedAvg/iid/seed-0"
    second = out / "FedAvg/iid/seed-1"
    (first / "config.yaml").write_text("strategy: [fedavg")
    assert not is_done(next(study.cells()), out), "its settings are unknown"
    assert begun(study, out) == ["FedAvg/iid/seed-0"]
    (second / "summary.json").write_text("[]")
    with pytest.raises(
        StateError, match=r"seed-1/summary\.json is damaged: it contains no mapping"
    ):
        sweep(study, out)


def test_the_folder_of_another_sweep_study_or_run_is_refused(
    study: Study, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with (
        lock_folder(out),
        pytest.raises(ConfigError, match="another process is still writing this study"),
    ):
        sweep(study, out)
    assert list(out.iterdir()) == []
    (out / "study.yaml").write_text("name: other")
    with pytest.raises(
        ConfigError,
        match=(
            r"out=.* has the study 'other'. The tables of 'small' would replace its tables"
        ),
    ):
        sweep(study, out)
    (out / "study.yaml").rename(out / "config.yaml")
    with pytest.raises(
        ConfigError,
        match=r"out=.* is the folder of a run. Choose another folder for a study",
    ):
        sweep(study, out)
    assert [path.name for path in out.iterdir()] == ["config.yaml"]


def test_a_refused_study_leaves_that_of_the_folder(
    study: Study, out: Path, tmp_path: Path
) -> None:
    before = (out / "study.yaml").read_text()
    absent = {"dataset": "mnist", "data-dir": str(tmp_path / "nowhere")}
    other = study.model_copy(update={"base": {**study.base, **absent}})
    with pytest.raises(ConfigError, match="nowhere"):
        sweep(other, out)
    assert (out / "study.yaml").read_text() == before
