"""Studies: the grid, what is skipped and set aside, and the tables."""

from __future__ import annotations

import csv
import json
import statistics
from pathlib import Path

import pytest

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.experiment import sweep as module
from fedbn_flwr.experiment.output import lock_folder
from fedbn_flwr.experiment.study import Study
from fedbn_flwr.experiment.sweep import sweep

TEXT = """
name: small
base: {num-clients: 2, num-server-rounds: 1, local-steps: 1, batch-size: 4, learning-rate: 0.3}
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
def study(tmp_path: Path) -> Study:
    return Study.load(written(tmp_path, TEXT))


def written(folder: Path, text: str) -> Path:
    path = folder / "study.yaml"
    path.write_text(text)
    return path


def test_a_key_of_base_without_effect_is_left_out_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = TEXT.replace("learning-rate: 0.3}", "learning-rate: 0.3, variance: pooled}").replace(
        "seeds: [0, 1]", "seeds: [0]"
    )
    study = Study.load(written(tmp_path, text))
    assert {cell.method: cell.config.variance for cell in study.cells()} == {"FedAvg": "pooled", "FedBN/own": "mean"}
    sweep(study, tmp_path / "out")
    assert [m for m in caplog.messages if "left out" in m] == [
        "FedBN/own/two classes: variance of base is left out: fedbn averages no running variances"
    ]
    wrong = text.replace("{strategy: fedbn, ", "{strategy: fedbn, variance: pooled, ")
    with pytest.raises(ConfigError, match="variance='pooled' has no effect: fedbn averages"):
        Study.load(written(tmp_path, wrong))


def test_an_override_that_every_run_overrides_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, TEXT)
    with pytest.raises(ConfigError) as caught:
        Study.load(path, ["seed=7", "strategy=fedbn", "num-clients=3"])
    assert str(caught.value).split("\n") == [
        f"study {path}: --set seed has no effect: every run has its own, in seeds",
        f"study {path}: --set strategy has no effect: every run has its own, in methods or splits",
    ]


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
    assert [cell.config.learning_rate for cell in cells[:3]] == [0.2, 0.3, 0.1], "method over split over base"
    assert [cell.config.seed for cell in cells] == [0, 0, 0, 1, 1, 1]
    assert cells[2].folder(tmp_path).relative_to(tmp_path).parts == ("FedBN", "own", "two_classes", "seed-0")
    assert len({cell.folder(tmp_path) for cell in cells}) == len(cells)


def test_overrides_replace_the_base(tmp_path: Path) -> None:
    study = Study.load(written(tmp_path, TEXT), ["num-server-rounds=3", "learning-rate=0.9"])
    assert {cell.config.num_server_rounds for cell in study.cells()} == {3}
    assert next(study.cells()).config.learning_rate == 0.2, "under the split"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("skip: [FedBN/own/iid]", "skip: [FedBN/idd]"), "'FedBN/idd' names no METHOD/SPLIT"),
        (("FedAvg/iid: 91", "FedAvg: 91"), "'FedAvg' names no METHOD/SPLIT"),
        (("strategy: fedbn", "strategy: silobm"), "FedBN/own/two classes/seed-0: unknown strategy 'silobm'"),
        (("name: small", "nome: small"), "nome: extra inputs are not permitted"),
        (("num-clients: 2", "num-clients: [2]"), "base.num-clients"),
        ((TEXT, "- a"), "study .*study.yaml"),
        ((TEXT, "a: ["), "study .*study.yaml"),
        (("name: small", "name: small\nname: large"), "study .*study.yaml: line 3: 'name' is also in line 2"),
        (("strategy: fedavg}", "strategy: fedavg}\n  FedAvg: {}"), "line 6: 'FedAvg' is also in line 5"),
    ],
)
def test_a_wrong_study_is_refused(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Study.load(written(tmp_path, TEXT.replace(*change)))


def test_a_sweep_continues_where_it_was_interrupted(study: Study, tmp_path: Path) -> None:
    out = tmp_path / "out"
    cells = list(study.cells())
    half = cells[1].folder(out)
    half.mkdir(parents=True)
    (half / "config.yaml").write_text("half")
    begun: list[str] = []
    rounds: list[int] = []
    table = sweep(study, out, on_cell=lambda cell, i, n: begun.append(cell.name) or (lambda line: rounds.append(i)))
    assert begun == [cell.name for cell in cells]
    assert rounds == list(range(len(cells)))
    aside = half.with_name("seed-0.unfinished-1")
    assert (aside / "config.yaml").read_text() == "half"
    assert table == (out / "table.md").read_text()
    made = {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.parent != out}
    begun.clear()
    assert sweep(study, out, on_cell=lambda cell, i, n: begun.append(cell.name)) == table
    assert begun == []
    assert {path: path.read_bytes() for path in made} == made
    check_tables(study, out)


def test_a_run_with_checkpoints_continues_unless_the_study_has_changed(tmp_path: Path, caplog) -> None:
    class Cut(Exception):
        pass

    def cut(cell, index: int, total: int):
        def on_round(line):
            if index == 0 and line["round"] == 2:
                raise Cut

        return on_round

    text = "{name: s, base: {num-clients: 2, local-steps: 1, batch-size: 4, checkpoint-every: 1, num-server-rounds: 3}"
    study = Study.load(written(tmp_path, text + ", methods: {FedBN: {strategy: fedbn}}}"))
    for changed in (False, True):
        out = tmp_path / f"out-{changed}"
        with pytest.raises(Cut):
            sweep(study, out, on_cell=cut)
        then = Study.load(tmp_path / "study.yaml", ["learning-rate=0.3"] * changed)
        sweep(then, out)
        (folder,) = (cell.folder(out) for cell in then.cells())
        summary = json.loads((folder / "summary.json").read_text())
        assert summary.get("resumed-after") == (None if changed else [1])
        assert folder.with_name("seed-0.unfinished-1").exists() == changed
    assert "starts from the beginning: it belongs to a run with other settings: " in caplog.text
    assert "learning-rate=0.1, now 0.3" in caplog.text


def test_finished_runs_with_other_settings_are_named_and_stay(study: Study, tmp_path: Path) -> None:
    """The old results were shown as if they were those of the changed study."""
    out = tmp_path / "out"
    table = sweep(study, out)
    changed = TEXT.replace("learning-rate: 0.2", "learning-rate: 0.25").replace("rounds: 1", "rounds: 2")
    changed = changed.replace("iid: {", "iid: {eval-every: 1, ")  # the default, written out
    begun: list[str] = []
    with pytest.raises(ConfigError) as caught:
        sweep(Study.load(written(tmp_path, changed)), out, on_cell=lambda cell, i, n: begun.append(cell.name))
    first, *lines, last = str(caught.value).splitlines()
    assert first == f"out={str(out)!r} has finished runs with other settings than this study:"
    assert lines[0] == "FedAvg/iid/seed-0: learning-rate=0.2, now 0.25; num-server-rounds=1, now 2"
    assert lines[1] == "FedAvg/two classes/seed-0: num-server-rounds=1, now 2"
    assert len(lines) == 6
    assert last == "Choose another --out, give the study its old settings, or rename the folders of these runs."
    assert begun == []
    assert (out / "table.md").read_text() == table
    # Places and timeouts make no other run, and the reference's own tests are no change.
    again = Study.load(written(tmp_path, TEXT), ["round-timeout=9", "tensorboard=false", "checkpoint-every=3"])
    assert sweep(again, out, on_cell=lambda cell, i, n: begun.append(cell.name)) == table
    reference = "{name: r, base: {num-server-rounds: 1, eval-on: personal-own}, methods: {C: {strategy: centralized}}}"
    for _ in range(2):
        sweep(Study.load(written(tmp_path, reference)), tmp_path / "reference")


def test_two_sweeps_cannot_write_one_folder(study: Study, tmp_path: Path) -> None:
    with lock_folder(tmp_path / "out"), pytest.raises(ConfigError, match="another process is still writing this study"):
        sweep(study, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def check_tables(study: Study, out: Path) -> None:
    """Mean, sample standard deviation and the paper's number, from the summaries."""
    with (out / "table.csv").open() as file:
        rows = {(row["method"], row["split"]): row for row in csv.DictReader(file)}
    assert list(rows) == [("FedAvg", "iid"), ("FedAvg", "two classes"), ("FedBN/own", "two classes")]
    for (method, split), row in rows.items():
        folders = [cell.folder(out) for cell in study.cells() if (cell.method, cell.split) == (method, split)]
        summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
        final = [100 * summary["final"][summary["headline"]] for summary in summaries]
        assert float(row["mean"]) == statistics.fmean(final)
        assert float(row["std"]) == pytest.approx(abs(final[0] - final[1]) / 2**0.5)
        assert (row["runs"], row["rounds"]) == ("2", "1")
        traffic = summaries[0]["ledger"]
        assert float(row["megabytes"]) == (traffic["bytes-down"] + traffic["bytes-up"]) / 2**20
        assert row["metric"] == ("personal-own-accuracy" if method == "FedBN/own" else "test-accuracy")
        assert row["paper"] == ("91.35" if (method, split) == ("FedAvg", "iid") else "")
    lines = (out / "table.md").read_text().splitlines()
    assert lines[0] == "# small"
    mean, std = float(rows["FedAvg", "iid"]["mean"]), float(rows["FedAvg", "iid"]["std"])
    assert f"{mean:.2f} ± {std:.2f}" in lines[4]
    assert lines[4].endswith("| 2 | 91.35 |")
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_failed_run_leaves_the_finished_ones(study: Study, tmp_path: Path, monkeypatch) -> None:
    real, done = module.run, []

    def second_fails(*arguments):
        if done:
            raise ConfigError("out of luck")
        done.append(1)
        return real(*arguments)

    monkeypatch.setattr(module, "run", second_fails)
    with pytest.raises(ConfigError, match="out of luck"):
        sweep(study, tmp_path / "out")
    monkeypatch.setattr(module, "run", real)
    begun: list[int] = []
    sweep(study, tmp_path / "out", on_cell=lambda cell, i, n: begun.append(i))
    assert begun == [1, 2, 3, 4, 5]


def test_names_that_share_a_folder_are_refused(tmp_path: Path) -> None:
    study = tmp_path / "study.yaml"
    study.write_text('name: twins\nmethods: {"M=1 a": {}, "M=1_a": {}}\n')
    with pytest.raises(ConfigError, match="M=1 a/all/seed-0 and M=1_a/all/seed-0 would share a folder; rename one"):
        Study.load(study)
