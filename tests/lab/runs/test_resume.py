"""An interrupted run continues to the bits of an uninterrupted run.

The law covers each kind of interruption and of saved file.
tests/strategies/test_laws_of_all_methods.py has it for every strategy. test_kill.py has
SIGKILL, and test_early_stopping.py a run that returns to its best round.
"""

from __future__ import annotations

import itertools
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch.utils.data import TensorDataset

from fedbn_flwr.client import torch_client
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.config import CENTRALIZED, Config
from fedbn_flwr.lab.results.folder import lock_folder
from fedbn_flwr.transport import polling_grid
from tests.support.fast import fast
from tests.support.folders import contents
from tests.support.runs import (
    QUICK,
    Cut,
    clients_of,
    lines_of,
    run_until,
    serve_nodes,
    summary_of,
    values_of,
)

ROUNDS = 6
BASE = {
    **QUICK,
    "num-server-rounds": ROUNDS,
    "learning-rate": 0.2,
    "checkpoint-every": 2,
    "eval-every": 3,
}
CASES = {
    "fedbn": {},
    # The server has alpha for new clients.
    # frozen after round 4
    "fixbn, auto": {
        "strategy": "fixbn",
        "freeze-at": "auto",
        "freeze-window": 4,
        "freeze-tau": 1e9,
    },
    "global momentum": {
        "strategy": "silobn",
        "sgd-momentum": 0.9,
        "momentum-scope": "global",
    },
    # one client a round
    "tests with averaged BN": {
        "strategy": "fedbn",
        "eval-on": "personal-own,averaged-bn",
        "fraction-train": 0.34,
    },
    "a held-out client": {
        "strategy": "fedbn",
        "eval-on": "personal-own,averaged-bn",
        "held-out-clients": 1,
    },
    "recalibrated, then frozen": {
        "strategy": "fixbn",
        "recalibrate": True,
        "eval-every": 2,
    },
    "centralized": {"sgd-momentum": 0.9},
}


def start(out: Path, cut: int = 0, **settings) -> dict:
    return run_until({**BASE, **settings}, out, cut)


def same(cut: Path, whole: Path) -> None:
    """Check that everything is equal except times and places."""

    def read(out: Path):
        summary, lines = summary_of(out), lines_of(out)
        summary.pop("resumed-after", None)
        for one in (summary, *lines):
            del one["seconds"]
        return summary, lines

    assert read(cut) == read(whole)
    found, wanted = (load_file(out / "model.safetensors") for out in (cut, whole))
    for name, expected in wanted.items():
        np.testing.assert_array_equal(found[name], expected, name)


def power_fails(out: Path, settings: Mapping, patch: pytest.MonkeyPatch) -> list[int]:
    """Cut the run in round 3, and again after round 5.

    The second cut is after the checkpoint of round 4 and the client files of round 5.
    """
    for last in (3, 5):
        with pytest.raises(Cut):
            start(out, cut=last, resume=True, **settings)
        assert values_of(out, "round") == list(range(1, last + 1))
    return [2, 4]


def ctrl_c(out: Path, settings: Mapping, patch: pytest.MonkeyPatch) -> list[int]:
    """Interrupt the second client's training of round 3.

    The first client has written its local state of that round.
    """
    at = 3 if settings["strategy"] == CENTRALIZED else 2 * 3 + 2
    plain, calls = torch_client.train, itertools.count(1)

    def train(*args, **options):
        if next(calls) == at:
            # for the main thread, because clients have threads of their own
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.3)
        return plain(*args, **options)

    with patch.context() as patched:
        patched.setattr(torch_client, "train", train)
        with pytest.raises(KeyboardInterrupt):
            start(out, **settings)
    assert values_of(out, "round") == [1, 2]
    saved = {path.stem for path in (out / "checkpoint").glob("round-*.safetensors")}
    expected = {"round-000000", "round-000002"}
    assert saved == (expected if settings["checkpoint-every"] else set())
    return [2]


@pytest.fixture
def _unignored() -> Iterator[None]:
    """Let Ctrl-C raise, although xdist's and a shell's job processes ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


ALL = [
    *((case, power_fails) for case in CASES),
    *((case, ctrl_c) for case in ("fedbn", "centralized")),
]
# Each interruption, and the files of clients and of the phase.
QUICK = [("fixbn, auto", power_fails), ("fedbn", ctrl_c)]


@pytest.mark.usefixtures("_unignored")
@pytest.mark.parametrize(("case", "end"), fast(ALL, *QUICK))
def test_an_interrupted_run_ends_in_the_bits_of_an_uninterrupted_one(
    case: str, end: Callable, tmp_path, monkeypatch
) -> None:
    settings = {"strategy": case, **CASES[case]}
    if end is ctrl_c:
        settings["checkpoint-every"] = 100
    start(tmp_path / "whole", **settings)
    known = end(tmp_path / "cut", settings, monkeypatch)
    summary = start(tmp_path / "cut", resume=True, **settings)
    assert summary["resumed-after"] == known
    same(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.usefixtures("_unignored")
def test_without_checkpoints_nothing_is_saved(tmp_path, monkeypatch) -> None:
    ctrl_c(tmp_path / "out", {"strategy": "fedavg", "checkpoint-every": 0}, monkeypatch)


def test_a_finished_run_can_be_moved_and_extended(tmp_path) -> None:
    short, moved = tmp_path / "short", tmp_path / "moved"
    start(tmp_path / "whole", strategy="fedbn")
    start(short, strategy="fedbn", **{"num-server-rounds": 3})
    (short / "doctor.json").write_text("{}")
    short.rename(moved)
    with pytest.raises(Cut):
        start(moved, strategy="fedbn", cut=5, resume=True)
    # A kill must not leave a run that looks finished, or findings of its earlier end.
    for name in ("summary.json", "doctor.json"):
        assert not (moved / name).exists()
    for _ in range(2):  # the second time, nothing remains to do
        start(moved, strategy="fedbn", resume=True)
        same(moved, tmp_path / "whole")
    assert not short.exists()


def test_resume_without_a_checkpoint_starts_a_new_run(tmp_path) -> None:
    """This includes runs killed before their first checkpoint or first file."""
    start(tmp_path / "whole")
    for at, files in enumerate(
        ({}, {".config.yaml.9.tmp": ""}, {"config.yaml": "seed: 0", "flower.log": ""})
    ):
        out = tmp_path / str(at)
        for file, text in files.items():
            out.mkdir(exist_ok=True)
            (out / file).write_text(text)
        assert "resumed-after" not in start(out, resume=True)
        same(out, tmp_path / "whole")


def test_a_folder_that_cannot_be_resumed_is_named(tmp_path) -> None:
    start(tmp_path / "bare", **{"checkpoint-every": 0, "num-server-rounds": 1})
    start(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "short")
    path = tmp_path / "short/metrics.jsonl"
    path.write_text(path.read_text().partition("\n")[2])
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.txt").write_text("mine")
    other_method = {"strategy": "fedprox", "proximal-mu": 0.5}
    of_method = "proximal-mu=0.01, now 0.5; strategy='fedavg', now 'fedprox'"
    for name, settings, words in (
        ("bare", {}, "contains a run, but no checkpoint"),  # of a run that saved none
        ("short", {}, "lacks some of the rounds 1 to 6"),  # somebody removed a line
        ("other", {}, r"is not empty\. Choose another folder\."),
        ("whole", {"seed": 1}, "seed=0, now 1"),
        ("whole", other_method, of_method),
        ("whole", {"num-server-rounds": 3}, "num-server-rounds=3 is below the 6"),
    ):
        before = contents(tmp_path / name)
        with pytest.raises(ConfigError, match=words):
            start(tmp_path / name, resume=True, **settings)
        assert contents(tmp_path / name) == before
    with (
        lock_folder(tmp_path / "short"),
        pytest.raises(ConfigError, match="another process is still writing this run"),
    ):
        start(tmp_path / "short", resume=True)


def served(out: Path, nodes: list[dict], **keys) -> None:
    """Run on nodes with these configs, as Flower does. Any number may take part."""
    own = {"num-clients": 0, "checkpoint-every": 1, "eval-every": 1}
    own["eval-on"] = "personal-own"
    serve_nodes(Config.make({**BASE, **own, **keys}), out, nodes)


def go_on(out: Path, nodes: list[dict], **keys) -> None:
    served(out, nodes, **{"num-server-rounds": 4, "resume": True, **keys})


def test_a_run_continues_while_a_node_is_gone(tmp_path, monkeypatch, caplog) -> None:
    """A node of a network has its own data. Otherwise, two nodes share all data."""
    monkeypatch.setattr("fedbn_flwr.lab.runs.serve.RETURN_GRACE", 0.3)
    monkeypatch.setattr("fedbn_flwr.lab.runs.serve.NODE_GRACE", 0.3)
    nodes = [{"num-partitions": 3}] * 3
    served(tmp_path, nodes, **{"num-server-rounds": 2})
    with pytest.raises(
        ConfigError, match="num-clients=3, but the federation has 2 node"
    ):
        go_on(tmp_path, nodes[:2])
    monkeypatch.setattr(polling_grid, "is_network_grid", lambda grid: True)
    go_on(tmp_path, nodes[:2])
    began = "the run began with 3 node(s) and continues with 2. The others may come"
    assert f"{began} back" in caplog.text
    assert values_of(tmp_path, "participants") == [[0, 1, 2]] * 2 + [[0, 1]] * 2
    sizes = []
    for at in range(1, 5):
        clients = clients_of(tmp_path, at)
        sizes.append([clients[name]["own-num-examples"] for name in ("0", "1")])
    assert sizes == sizes[:1] * 4


def rows_of(site, part: str) -> TensorDataset:
    with np.load(site) as file:
        return TensorDataset(torch.from_numpy(file["x"]), torch.from_numpy(file["y"]))


rows_of.input_shape = (2,)  # type: ignore[attr-defined]


def test_a_run_continues_with_nodes_that_came_later(
    tmp_path, monkeypatch, caplog
) -> None:
    """Nodes may join over a network, unless the number of clients is set."""
    monkeypatch.setattr(polling_grid, "is_network_grid", lambda grid: True)
    rows = np.arange(20)
    x = np.stack([rows, rows**2 % 7], 1).astype(np.float32)
    np.savez(tmp_path / "own.npz", x=x, y=rows % 2)
    nodes, out = [{"data-path": str(tmp_path / "own.npz")}] * 3, tmp_path / "out"
    by_function = {
        "dataset": f"{__name__}:rows_of",
        "num-classes": 2,
        "task": "classification",
    }
    served(out, nodes[:1], **{"num-server-rounds": 1, **by_function})
    with pytest.raises(
        ConfigError, match="num-clients=1, but the federation has 3 node"
    ):
        go_on(out, nodes, **{"num-clients": 1, **by_function})
    go_on(out, nodes, **{"num-server-rounds": 2, **by_function})
    assert "the run began with 1 node(s) and continues with 3" in caplog.text
    assert values_of(out, "participants") == [[0], [0, 1, 2]]


def test_parts_kept_only_in_memory_cannot_be_resumed(tmp_path, caplog) -> None:
    """``flwr run`` without a state-dir warns at the first checkpoint.

    A resumed run is refused before it starts.
    """
    config = Config.make({**BASE, "strategy": "scaffold", "out": str(tmp_path)})
    serve_nodes(config, tmp_path)
    warning = "client(s) 0, 1, 2 keep their local state in memory only: this run cannot"
    assert caplog.text.count(warning) == 1
    with pytest.raises(
        ConfigError,
        match=r"cannot resume: client\(s\) 0, 1, 2 kept their local state in memory only",
    ):
        start(tmp_path, strategy="scaffold", resume=True)


def test_a_client_that_cannot_write_is_rejected_by_name_and_the_run_continues(
    tmp_path,
) -> None:
    out, file = tmp_path / "run", tmp_path / "file"
    file.write_text("in the way")
    settings = {"strategy": "fedbn", "out": str(out), "num-server-rounds": 2}
    node = [{}, {"state-dir": str(file)}, {}]
    serve_nodes(Config.make({**BASE, **settings}), out, node)
    fault = "cannot be written: [Errno 20] Not a directory"
    for line in lines_of(out):
        assert line["participants"] == [0, 2]
        (reason,) = [why for why in line["rejected"] if "evaluation" not in why]
        for part in ("(partition 1): error 2", f"state folder {file}/", fault):
            assert part in reason


@pytest.mark.parametrize("damage", ["cut off", "edited"])
def test_a_damaged_file_of_a_client_ends_the_resume_by_name(
    tmp_path, damage: str
) -> None:
    """Without the file, the client begins again, and the run has its results."""
    with pytest.raises(Cut):
        start(tmp_path, cut=3, strategy="fedbn")
    (folder,) = tmp_path.glob("checkpoint/clients/*/partition-1")
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        path.write_bytes(data[:-7] if damage == "cut off" else data[:-1] + b"\x7f")
    with pytest.raises(
        ConfigError, match=r"the local state of client 1: .*partition-1"
    ):
        start(tmp_path, resume=True, strategy="fedbn")
    assert len(lines_of(tmp_path)) == 3, "no round was run"
    shutil.rmtree(folder)
    assert start(tmp_path, resume=True, strategy="fedbn")["rounds"] == ROUNDS
