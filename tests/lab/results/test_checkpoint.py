"""The server keeps two checkpoint files with mode 0600.

Damaged checkpoints are refused, and a full disk loses nothing.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fedbn_flwr.checked_file import read_checked, write_checked
from fedbn_flwr.errors import ConfigError, EngineError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.results import checkpoint as module
from fedbn_flwr.lab.results.checkpoint import Checkpoints
from fedbn_flwr.lab.runs.run import run
from fedbn_flwr.strategies import FedBN
from tests.support.runs import summary_of

SETTINGS = {
    "num-clients": 2,
    "num-server-rounds": 5,
    "local-steps": 1,
    "batch-size": 4,
    "checkpoint-every": 2,
    "strategy": "fedbn",
}


def start(out: Path, **settings: object) -> dict[str, object]:
    return run(Config.make({**SETTINGS, **settings}), out)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run with checkpoints of rounds 4 and 5."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    start(folder)
    return folder


@pytest.fixture(scope="module")
def whole(finished) -> str:
    """The hash of the finished run's model."""
    return str(summary_of(finished)["sha256"])


@pytest.fixture
def out(finished, tmp_path) -> Path:
    """A copy of the finished run."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


KEPT = ["round-000004.safetensors", "round-000005.safetensors"]


def checkpoints(out: Path) -> list[str]:
    return sorted(path.name for path in out.glob("checkpoint/round-*"))


def test_the_last_two_checkpoints_stay_and_only_their_owner_reads_them(
    out,
) -> None:
    assert checkpoints(out) == KEPT
    files = [path for path in (out / "checkpoint").rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    folders = {path.name for path in out.glob("checkpoint/clients/*/partition-*")}
    assert folders == {"partition-0", "partition-1"}
    found = read_checked(out / "checkpoint/round-000004.safetensors")
    assert found["server_round"] == 4
    assert found["config"]["strategy"] == "fedbn"
    assert found["strategy"]["initialised"] == ["0", "1"]


def test_long_rounds_have_checkpoints_of_their_own(tmp_path, monkeypatch) -> None:
    """Round 0, the last round and each 20 seconds have a checkpoint.

    Therefore a kill costs no more.
    """
    saved, clock = [], iter(range(0, 10_000, 8))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    seldom, never = (
        Checkpoints(tmp_path, Config.make({"checkpoint-every": every}), "model")
        for every in (100, 0)
    )
    for server_round in range(8):
        if seldom.due(server_round, server_round == 7):
            seldom.save(module.Checkpoint(server_round, {}, {}, "run"))
            saved.append(seldom.rounds[-1])
    assert saved == [0, 3, 6, 7]
    assert not never.due(3, True)


@pytest.mark.parametrize("way", ["should_stop", "evaluate_fn"])
def test_a_stopped_run_has_the_checkpoint_of_its_last_round(
    tmp_path, monkeypatch, whole, way: str
) -> None:
    """The result is the round's, and a resume continues after it without a stop."""
    plain = FedBN.start

    def stopped(strategy: FedBN, *, evaluate_fn, **given):
        def tests(server_round: int, arrays):
            strategy.stopped = way == "evaluate_fn" and server_round == 3
            return evaluate_fn(server_round, arrays)

        if way == "should_stop":
            given["should_stop"] = lambda server_round, result: server_round == 3
        return plain(strategy, evaluate_fn=tests, **given)

    seldom = {"checkpoint-every": 100}
    with monkeypatch.context() as patch:
        patch.setattr(FedBN, "start", stopped)
        summary = start(tmp_path / "run", **seldom)
    assert summary["rounds"] == 3
    assert checkpoints(tmp_path / "run")[-1] == "round-000003.safetensors"
    short = start(tmp_path / "short", **seldom, **{"num-server-rounds": 3})
    assert summary["sha256"] == short["sha256"]
    saved, known = (
        read_checked(tmp_path / f"{name}/checkpoint/round-000003.safetensors")
        for name in ("run", "short")
    )
    assert saved["strategy"] == known["strategy"]
    again = start(tmp_path / "run", resume=True, **seldom)
    assert (again["resumed-after"], again["sha256"]) == ([3], whole)


HARMS = {
    "cut": ({}, "cannot be read"),
    "edited": ({}, "SHA-256 does not match"),
    "renamed": ({"server_round": 4}, "contains round 4"),
    "version": ({"version": 1}, "a checkpoint of another version of fedbn-flwr"),
    "model": ({"fingerprint": "f"}, "another model"),
    "settings": ({}, "other settings: seed=3, now 0"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_an_unusable_checkpoint_is_named_and_the_previous_one_is_loaded(
    out, harm: str, caplog, whole
) -> None:
    newest = out / "checkpoint/round-000005.safetensors"
    changes, reason = HARMS[harm]
    content = read_checked(newest)
    if harm == "settings":
        content["config"]["seed"] = 3
    write_checked(newest, {**content, **changes})
    data = bytearray(newest.read_bytes())
    if harm == "cut":
        del data[-100:]
    elif harm == "edited":
        data[-5] ^= 1
    newest.write_bytes(data)
    summary = start(out, resume=True)
    assert "checkpoint of round 5 refused" in caplog.text
    assert reason in caplog.text
    assert (summary["resumed-after"], summary["sha256"]) == ([4], whole)
    assert checkpoints(out) == sorted([*KEPT, "round-000005.refused"])


def test_if_no_checkpoint_is_usable_every_reason_is_named(out) -> None:
    for path in (out / "checkpoint").glob("round-*"):
        path.write_bytes(b"")
    with pytest.raises(ConfigError) as caught:
        start(out, resume=True)
    first, *reasons = str(caught.value).splitlines()
    assert first == "no checkpoint can be used:"
    named = [reason.split(" cannot be read")[0][-24:] for reason in reasons]
    assert named == KEPT[::-1]
    assert len(summary_of(out)) > 5, "the results did not change"


def test_a_full_disk_ends_the_run_and_loses_nothing(
    tmp_path, monkeypatch, whole
) -> None:
    real = module.write_checked

    def full(path: Path, content: dict[str, object]) -> None:
        if content["server_round"] == 4:
            raise OSError(28, "No space left on device")
        real(path, content)

    monkeypatch.setattr(module, "write_checked", full)
    with pytest.raises(EngineError) as caught:
        start(tmp_path / "run")
    assert (
        str(caught.value)
        == f"the checkpoint of round 4 cannot be written to {tmp_path}/run/checkpoint:"
        " [Errno 28] No space left on device. Existing checkpoints: round 0, 2."
        " Free disk space and continue with --resume (resume=true)."
    )
    monkeypatch.undo()
    assert start(tmp_path / "run", resume=True)["sha256"] == whole


def test_another_version_of_torch_is_named(out, monkeypatch, caplog) -> None:
    monkeypatch.setattr(module, "versions", lambda: {"torch": "9.9"})
    start(out, resume=True)
    assert "The last bits may differ" in caplog.text
