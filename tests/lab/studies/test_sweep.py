"""Studies: the grid, skipped and old runs, and the tables."""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Generator, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pandas as pd
import pytest
import torch
import yaml

from fedbn_flwr.errors import ConfigError, RunFailedError, StateError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.results.folder import RunFolder, lock_folder
from fedbn_flwr.lab.studies import one_run
from fedbn_flwr.lab.studies import sweep as sweeps
from fedbn_flwr.lab.studies.check_study import Selection, load_study
from fedbn_flwr.lab.studies.one_run import do_cell
from fedbn_flwr.lab.studies.parallel import in_parallel
from fedbn_flwr.lab.studies.study import Cell, Study, Tuning, point_name
from fedbn_flwr.lab.studies.sweep import LogFollower, sweep
from fedbn_flwr.lab.studies.tables import markdown
from tests.support.fast import fast
from tests.support.runs import summary_of
from tests.support.studies import load
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


@pytest.fixture
def study(tmp_path) -> Study:
    return load(tmp_path, TEXT)


def test_a_study_is_a_grid_of_runs(study, tmp_path) -> None:
    """The rate is the method's, or the split's, or that of base.

    The key variance of base has no effect under FedBN, and is left out.
    """
    found = []
    for cell in study.cells():
        folder = tmp_path / cell.name.replace(" ", "_")
        assert cell.folder(tmp_path) == folder
        config = cell.config
        found.append((cell.name, config.learning_rate, config.variance, config.seed))
    expected = []
    for seed in (0, 1):
        expected += [
            (f"FedAvg/iid/seed-{seed}", 0.2, "pooled", seed),
            (f"FedAvg/two classes/seed-{seed}", 0.3, "pooled", seed),
            (f"FedBN/own/two classes/seed-{seed}", 0.1, "mean", seed),
        ]
    assert found == expected


LAYERS = ("base", "--set", "splits", "methods", "overrides", "tune.base", "tune.grid")
VALUES = ("channel", "messages")


@pytest.mark.parametrize("pair", list(itertools.combinations(LAYERS, 2)))
def test_of_two_layers_of_a_study_the_later_one_wins(
    tmp_path, pair: tuple[str, str]
) -> None:
    """This also applies after ``tune`` has chosen.

    A setting of the command that no run uses is refused.
    """
    of_layer = {layer: {} for layer in LAYERS}
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
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(text))
    unused = pair[0] == "--set" and pair[1] != "tune.base"
    refused = pytest.raises(ConfigError, match=r"--set \S+ has no effect")
    with refused if unused else nullcontext():
        load_study(path, given)
    study = Study.read(path, [*given, "seed=5"])
    trials = [*study.tuning().cells()]
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
        (
            ("strategy: fedbn", "strategy: fedbn, variance: pooled"),
            "variance='pooled' has no effect: fedbn averages",
        ),
        (
            ("strategy: fedbn", "strategy: silobm"),
            "FedBN/own/two classes/seed-0 and 1 more: unknown strategy 'silobm'",
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
    tmp_path, change: tuple[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, TEXT.replace(*change))


class Noted(LogFollower):
    """A follower that notes the runs that began and their ends."""

    def __init__(self) -> None:
        self.begun = []
        self.ended = {}

    def begin(self, cell: Cell):
        self.begun.append(cell.name)
        return [].append

    def end(self, cell: Cell, error: str) -> None:
        self.ended[cell.name] = error


class Runs:
    """Runs with a given end. Their results follow from the settings."""

    def __init__(self, draw: random.Random | None) -> None:
        self.draw, self.told = draw, []
        self.resumed = []

    def run(self, config: Config, folder: Path, on_round, workers) -> None:
        end = self.draw.choices(ENDS, [6, 1, 1, 1])[0] if self.draw else "done"
        self.told.append(end)
        self.resumed.append(config.resume)
        folder.mkdir(parents=True, exist_ok=True)
        mapping = {**config.to_mapping(), "resume": False}
        (folder / "config.yaml").write_text(yaml.safe_dump(mapping))
        if end == "fails":
            raise ZeroDivisionError(FAILURE[0])
        if end == "stopped":
            (folder / "checkpoint").mkdir(exist_ok=True)
            raise KeyboardInterrupt
        value = config.learning_rate + config.seed / 100
        summary = {"headline": "global-accuracy", "final": {"global-accuracy": value}}
        summary |= {"task": "classification", "ledger": {}, "rounds": 1, "sha256": "0"}
        summary |= {"diverged-at": 1} if end == "diverged" else {}
        (folder / "summary.json").write_text(json.dumps(summary))


ENDS = ("done", "fails", "stopped", "diverged")
FAILURE = ("out of luck", "ZeroDivisionError")
SELECTIONS = [{}, {}, {"methods": ["FedAvg"]}, {"seeds": [1]}, {"splits": ["iid"]}]


@pytest.mark.parametrize("seed", fast(range(30), 0, 1, 2))
def test_any_sweeps_end_with_the_table_of_one_and_remove_nothing(
    tmp_path, monkeypatch, seed: int
) -> None:
    """Each sweep does the selected runs that are not done with its settings, in order.

    Runs fail, diverge and are stopped. A stopped run is resumed under its settings, and
    another folder is renamed before its run starts again. The tables and ``study.yaml``
    are those of the sweep's settings, even if the sweep is stopped.
    """
    draw, out = random.Random(seed), tmp_path / "out"
    runs, folders = Runs(draw), {}  # the end, the settings
    monkeypatch.setattr(one_run, "run", runs.run)

    def swept(study: Study, **options) -> tuple:
        try:
            return sweep(study, out, **options), ""
        except (KeyboardInterrupt, RunFailedError) as error:
            return getattr(error, "table", None), f"{type(error).__name__} {error}"

    for _ in range(6):
        rate, clients = draw.choice([("0.2", 2), ("0.25", 2), ("0.2", 3)])
        on = draw.choice(["stop", "continue"])
        text = TEXT.replace("rate: 0.2", f"rate: {rate}")
        given = [f"on-divergence={on}", f"round-timeout={draw.choice([8, 9])}"]
        given += [f"num-clients={clients}", "torch-threads=2"]
        study = load(tmp_path, text, *given)
        select = draw.choice(SELECTIONS)
        cells = [cell for cell in study.cells() if cell in Selection(**select)]
        now = {
            c.name: f"{c.config.learning_rate} {on} {clients}" for c in study.cells()
        }
        out.mkdir(exist_ok=True)
        (out / "tuning.md").write_text("of a former study with tune")
        folders_before = len([*out.rglob("config.yaml")])
        known = current(folders, now)
        # A run that was stopped, and later failed, can continue as well.
        to_resume = {
            c.name
            for c in cells
            if (c.folder(out) / "checkpoint").is_dir() and c.name in known
        }
        runs.told, runs.resumed, noted = [], [], Noted()
        table, error = swept(study, follower=noted, selection=Selection(**select))
        done = ("done", "diverged")
        left = [c.name for c in cells if known.get(c.name) not in done]
        cut = runs.told.index("stopped") + 1 if "stopped" in runs.told else len(left)
        assert noted.begun == left[:cut]
        same = [name in to_resume for name in noted.begun]
        assert runs.resumed == same
        added = len([*out.rglob("config.yaml")]) - folders_before
        assert added == len(noted.begun) - sum(same), "renamed, not removed"
        folders |= {n: (e, now[n]) for n, e in zip(noted.begun, runs.told, strict=True)}
        known = current(folders, now)
        failed = {n for n, e in noted.ended.items() if e}
        assert failed == {n for n in noted.begun if known[n] == "fails"}
        for cell in cells:
            if cell.name in failed:
                note = json.loads((cell.folder(out) / "failed.json").read_text())
                assert (note["error"], note["type"]) == FAILURE
                assert "in run\n" in note["traceback"]
        good = ("done",) if on == "stop" else done
        bad = [c.name for c in cells if known.get(c.name) not in good]
        if "stopped" in runs.told:
            assert error.startswith("KeyboardInterrupt")
        elif bad:
            assert f"{len(bad)} of {len(cells)} runs failed or diverged" in error
            assert error.endswith(", ".join(bad))
        else:
            assert error == ""
        assert Study.read(out / "study.yaml").to_mapping() == study.to_mapping()
        assert not (out / "tuning.md").exists()
        # If the sweep is stopped, they are those from before its first run.
        ended = {n for n, e in known.items() if e in done}
        ended -= {*noted.begun} if "stopped" in runs.told else set()
        rows = pd.read_csv(out / "results.csv")
        found = rows[rows["status"] != "failed"]
        names = found["method"] + "/" + found["split"] + "/seed-"
        assert {*(names + found["seed"].astype(str))} == ended
        if table is not None:
            assert (out / "table.md").read_text() == f"# small\n\n{markdown(table)}\n"
    assert torch.get_num_threads() == 1, "those of this process"
    runs.draw = None  # from now on, all runs are done
    for cell in study.cells():
        if folders.get(cell.name, ("",))[0] == "diverged":
            (cell.folder(out) / "summary.json").unlink()
    table, error = swept(study)
    again, _ = swept(study, follower=(noted := Noted()))
    assert (error, noted.begun) == ("", [])
    out = tmp_path / "fresh"
    assert table.equals(swept(study)[0])
    assert again.equals(table)


def test_a_selection_has_the_trials_of_its_methods_and_splits(
    study, tmp_path, monkeypatch
) -> None:
    """The seeds of the trials are their own. All data are checked before any work."""
    update = {"tune": Tuning(grid={"local-steps": [1, 2]}, seeds=[9])}
    tuned = study.model_copy(update=update)
    checked = []
    monkeypatch.setattr(sweeps, "check_data", checked.extend)

    def names(cells: Iterable[Cell]) -> set[str]:
        return {f"{cell.method}/{cell.split}" for cell in cells}

    for select in SELECTIONS:
        of_runs = Selection(**select)
        of_trials = of_runs.of_tuning(tuned)
        runs = names(c for c in study.cells() if c in of_runs)
        trials = names(c for c in tuned.tuning().cells() if c in of_trials)
        points = tuned.tune.points()
        assert trials == {f"{run}/{point_name(one)}" for run in runs for one in points}
        checked.clear()
        with pytest.raises(KeyboardInterrupt):
            sweep(tuned, tmp_path, stopped, selection=of_runs)
        assert names(checked) == runs | trials


def stopped(*_: object) -> Generator[tuple[Cell, str]]:
    raise KeyboardInterrupt
    yield


def test_an_error_of_many_trials_is_one_line(tmp_path) -> None:
    text = "{name: a, methods: {A: {}, B: {}}, tune: {grid: {learning-rate: [1, 2]}}}"
    (tmp_path / "study.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        load_study(tmp_path / "study.yaml")
    (line,) = str(error.value).splitlines()
    assert "learning-rate=1/seed-0 and 3 more: tune chooses by" in line


def test_methods_with_different_tests_are_named_before_the_runs(
    tmp_path, caplog
) -> None:
    text = "{name: a, methods: {A: {}, B: {strategy: fedbn}, C: {strategy: fedprox}}}"
    (tmp_path / "study.yaml").write_text(text)
    with caplog.at_level("WARNING"):
        load_study(tmp_path / "study.yaml", ["eval-on=personal-own"])
        assert not caplog.messages
        load_study(tmp_path / "study.yaml")
    (warning,) = caplog.messages
    assert "B is tested at each site, but A on all test examples" in warning


def test_a_number_of_clients_that_follows_from_the_data_is_no_change(quick_run) -> None:
    """The folder has the number from the data. Another given number is a change."""
    keys = {"dataset": "digits-domains", "partition": "domain", "domain-share": 20}
    _, out = quick_run(**keys, **{"num-clients": 0, "num-server-rounds": 1})
    saved = RunFolder.settings(out)
    assert saved["num-clients"] == "5"
    for count, differs in ((0, ""), (5, ""), (4, "num-clients")):
        config = Config.make({**saved, "num-clients": count})
        found = one_run.changed(config, out)
        assert (differs in found) if differs else not found


def current(folders, now: Mapping[str, str]) -> dict[str, str]:
    """Return the end of each run that has the settings of now."""
    return {
        name: end for name, (end, settings) in folders.items() if settings == now[name]
    }


WITH_CHECKPOINTS = """
name: s
base: {num-clients: 2, local-steps: 1, batch-size: 4, checkpoint-every: 1, num-server-rounds: 3}
methods: {FedBN: {strategy: fedbn}}
"""


def test_a_run_with_checkpoints_continues_unless_the_study_has_changed(
    tmp_path, caplog
) -> None:
    class Cutting(LogFollower):
        def begin(self, cell: Cell):
            def on_round(line):
                if line["round"] == 2:
                    raise KeyboardInterrupt

            return on_round

    study = load(tmp_path, WITH_CHECKPOINTS)
    for changed in (False, True):
        out = tmp_path / f"out-{changed}"
        with pytest.raises(KeyboardInterrupt):
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


def test_a_name_of_dots_stays_in_the_folder_of_the_study(tmp_path) -> None:
    for name in ("..", ".", "a/../..", "a//b"):
        folder = Cell(name, "all", 0, {}, {}).folder(tmp_path)
        parts = folder.relative_to(tmp_path).parts
        assert ".." not in parts
        assert len(parts) == name.count("/") + 3


def test_what_is_damaged_is_named_or_repeated_and_a_refused_study_changes_nothing(
    study, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(one_run, "run", Runs(None).run)
    out = tmp_path / "out"
    sweep(study, out)
    (out / "FedAvg/iid/seed-0/config.yaml").write_text("strategy: [fedavg")
    sweep(study, out, follower=(noted := Noted()))
    assert noted.begun == ["FedAvg/iid/seed-0"], "its settings are unknown"
    before = (out / "study.yaml").read_text()

    absent = {"dataset": "mnist", "data-dir": str(tmp_path / "nowhere")}
    other = study.model_copy(update={"overrides": {"FedAvg/two classes": absent}})
    with pytest.raises(ConfigError, match="nowhere"):
        sweep(other, out)
    # A sweep that stops in its trials does not replace the settings of the results.
    tuned = study.model_copy(update={"tune": Tuning(grid={"local-steps": [1]})})
    with pytest.raises(KeyboardInterrupt):
        sweep(tuned, out, runner=stopped)
    assert (out / "study.yaml").read_text() == before
    (out / "FedAvg/iid/seed-1/summary.json").write_text("[]")
    with pytest.raises(
        StateError, match=r"seed-1/summary\.json is damaged: it contains no mapping"
    ):
        sweep(study, out)


def test_a_run_that_another_process_writes_or_that_cannot_go_on_now_stays(
    study, tmp_path, monkeypatch
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

    full = ConfigError("no space left on device")
    monkeypatch.setattr(one_run, "changed", lambda config, folder: "")
    monkeypatch.setattr(one_run, "run", mock.Mock(side_effect=full))
    assert do_cell(cell, out) == "no space left on device"
    assert [path.name for path in folder.parent.iterdir()] == ["seed-0"]


OWN_DATA = """
name: own
base: {num-clients: 2, num-server-rounds: 1, local-steps: 1, batch-size: 4}
methods: {FedAvg: {strategy: fedavg}}
seeds: [0, 1]
"""


def test_results_of_data_that_have_changed_do_not_stand_beside_those_of_the_new_ones(
    tmp_path,
) -> None:
    out, data = tmp_path / "out", write_images(tmp_path / "t", {"cat": 10, "dog": 10})
    study = load(tmp_path, OWN_DATA, f"dataset={data}")
    one_seed = study.model_copy(update={"seeds": [0]})
    sweep(one_seed, out)
    (tmp_path / "t/dog/9.png").unlink()
    sweep(one_seed, out)  # nothing remains to do
    with pytest.raises(
        ConfigError,
        match=r"1 finished runs of the study in .*FedAvg/all/seed-0\) have other data",
    ):
        sweep(study, out)


KILLER = """
import os, signal
from contextlib import nullcontext
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
    tmp_path, monkeypatch
) -> None:
    """A killed process is recorded, and the other processes continue.

    The next sweep repeats it.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "sweep_killer.py").write_text(KILLER)
    study = load(tmp_path, PARALLEL)
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
    tables = [Path(name, "results.csv").read_bytes() for name in ("parallel", "series")]
    assert tables[0] == tables[1]


def test_the_folder_of_another_sweep_study_or_run_is_refused(study, tmp_path) -> None:
    """Each refusal leaves the folder as it is."""
    out = tmp_path / "out"
    with lock_folder(out):
        refused(study, out, "another process is still writing this study", [])
    (out / "study.yaml").write_text("name: other")
    words = "out=.* has the study 'other'. The tables of 'small' would replace its"
    refused(study, out, words, ["study.yaml"])
    (out / "study.yaml").rename(out / "config.yaml")
    words = "out=.* is the folder of a run. Choose another folder for a study"
    refused(study, out, words, ["config.yaml"])


def refused(study: Study, out: Path, words: str, left: list[str]) -> None:
    with pytest.raises(ConfigError, match=words):
        sweep(study, out)
    assert [path.name for path in out.iterdir()] == left
