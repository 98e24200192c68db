"""A run ends when its validation score stops improving.

Its result is the best round's.
"""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from fedbn_flwr import personal_state
from fedbn_flwr.client.personal_model import metadata
from fedbn_flwr.errors import DivergedError, EngineError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.early_stopping import EarlyStopping
from fedbn_flwr.lab.results.checkpoint import Checkpoint, Checkpoints
from fedbn_flwr.lab.results.saved_model import load_model
from fedbn_flwr.lab.results.tests_table import read_tests
from fedbn_flwr.training import tasks
from tests.support.runs import (
    QUICK,
    Cut,
    lines_of,
    page_of,
    run_until,
    serve_nodes,
    summary_of,
)

BASE = {
    **QUICK,
    "num-server-rounds": 30,
    "learning-rate": 0.5,
    "validation-share": 0.05,
    "early-stopping": 3,
    "checkpoint-every": 100,
}
METHODS = {
    "fedavg": "validation-accuracy",
    "fedbn": "personal-validation-accuracy",
}
# The best round has its own checkpoint. It stays while later checkpoints replace the
# others.
EVERY = {"fedavg": {}, "fedbn": {"checkpoint-every": 1}}


def start(out: Path, cut: int = 0, **settings) -> dict:
    return run_until({**BASE, **settings}, out, cut)


def files(out: Path) -> dict:
    """Return the entries of the model and of the clients' files, as lists."""
    found = {}
    for path in [out / "model.safetensors", *(out / "clients").glob("*")]:
        entries = load_file(path)
        found[path.name] = {name: array.tolist() for name, array in entries.items()}
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, tuple[Path, dict]]:
    made = {}
    for strategy, more in EVERY.items():
        out = tmp_path_factory.mktemp(strategy) / "out"
        made[strategy] = out, start(out, strategy=strategy, **more)
    return made


@pytest.mark.parametrize("strategy", METHODS)
def test_the_result_is_that_of_a_run_that_ends_with_the_best_round(
    strategy: str, whole, tmp_path
) -> None:
    """The result is the model, under FedBN the clients' local state, and the tests."""
    out, summary = whole[strategy]
    metric, lines = METHODS[strategy], lines_of(out)
    scores = [line[metric] for line in lines]
    best = scores.index(max(scores)) + 1
    assert summary["stopped-early"] is True
    assert summary["best-validation"] == {"round": best, metric: max(scores)}
    assert summary["rounds"] == len(lines) == best + 3 < 30
    assert summary["final"]["round"] == best
    assert summary["final"].items() <= lines[best - 1].items()
    less = {"early-stopping": 0, "num-server-rounds": best, **EVERY[strategy]}
    short = start(tmp_path, strategy=strategy, **less)
    assert summary["sha256"] == short["sha256"]
    assert files(out) == files(tmp_path)
    assert len(files(out)) == (4 if strategy == "fedbn" else 1)
    assert personal_state(out, 0).keys() == personal_state(tmp_path, 0).keys()
    tests, short_tests = read_tests(out), read_tests(tmp_path)
    of_best = [frame[frame["round"] == best] for frame in (tests, short_tests)]
    assert of_best[0].to_csv(index=False) == of_best[1].to_csv(index=False)


def test_the_result_has_the_statistics_that_were_reestimated_in_the_best_round(
    tmp_path,
) -> None:
    """Training does not use these statistics.

    They are in the checkpoint next to the model, with other values than the model's
    own.
    """
    long = {"num-server-rounds": 9, "early-stopping": 2}
    summary = start(tmp_path / "long", recalibrate=True, **long)
    best = summary["best-validation"]["round"]
    assert best < summary["rounds"]
    short = {"early-stopping": 0, "num-server-rounds": best}
    start(tmp_path / "short", recalibrate=True, **short)
    start(tmp_path / "trained", **short)
    found, wanted, trained = (
        files(tmp_path / name)["model.safetensors"]
        for name in ("long", "short", "trained")
    )
    assert found == wanted
    changed = {name for name in trained if trained[name] != wanted[name]}
    assert changed
    assert all("running_" in name for name in changed)


@pytest.mark.parametrize(("on_divergence", "rounds"), [("stop", 6), ("continue", 7)])
def test_a_run_that_diverges_after_its_best_round_leaves_a_good_model(
    on_divergence: str, rounds: int, tmp_path
) -> None:
    """Patience ends with the last round, so the run did not end early."""
    decay = {
        "lr-decay-at": "4",
        "lr-decay-factor": 1e30,
        "num-server-rounds": 7,
        "on-divergence": on_divergence,
        "checkpoint-every": 1,
    }
    with suppress(DivergedError):
        start(tmp_path, **decay)
    summary = summary_of(tmp_path)
    assert summary["best-validation"]["round"] == 4 < summary["diverged-at"]
    assert (summary["rounds"], summary["stopped-early"]) == (rounds, False)
    assert "Test accuracy after round 4: " in page_of(tmp_path)
    assert "diverged-at" not in metadata(tmp_path)
    for entry in load_model(tmp_path).state_dict().values():
        assert entry.isfinite().all()


@pytest.mark.parametrize("sign", [1, -1], ids=["higher is better", "lower is better"])
def test_the_best_round_is_the_first_with_the_best_score(
    sign: int, monkeypatch
) -> None:
    lower = ("accuracy",) if sign < 0 else ()
    monkeypatch.setattr(tasks, "_LOWER_IS_BETTER", lower)
    config = Config.make({**BASE, "early-stopping": 2})
    scores = [0.5, None, 0.7, 0.7, float("nan"), 0.6]
    lines = [
        {"round": 2 * i, "validation-accuracy": score and sign * score}
        for i, score in enumerate(scores, start=1)
    ]
    stopping = EarlyStopping(config, [*lines[:4], {"round": 9}])
    assert (stopping.best(), stopping.stops) == (6, False)
    stopping.add(lines[4])
    assert (stopping.best(), stopping.stops) == (6, True)
    assert [stopping.best(upto) for upto in (1, 2, 5, 100)] == [None, 2, 2, 6]
    assert EarlyStopping(config, []).best() is None


@pytest.mark.parametrize("seed", range(6))
def test_each_checkpoint_to_resume_from_has_its_best_state(seed: int, tmp_path) -> None:
    """If the newest checkpoint is damaged, the run continues from the one before.

    The repeated rounds have other scores.
    """
    draws = random.Random(seed)
    every = {"early-stopping": 100, "checkpoint-every": draws.choice([1, 2, 3])}
    config = Config.make({**BASE, **every})
    checkpoints = Checkpoints(tmp_path, config, "fingerprint")
    lines = []
    for _ in range(24):
        number = len(lines) + 1
        score = draws.choice([0.1, 0.3, 0.5, 0.7, 0.9])
        lines.append({"round": number, "validation-accuracy": score})
        stopping = EarlyStopping(config, lines)
        if checkpoints.due(number, False, stopping):
            state = {"w": np.full(2, float(number))}
            checkpoints.save(Checkpoint(number, state, {}, "run"), stopping)
        for after in checkpoints.rounds[-2:]:
            best = EarlyStopping(config, lines[:after]).best()
            assert best in checkpoints.rounds
        if draws.random() < 0.2:
            newest = tmp_path / f"checkpoint/round-{checkpoints.rounds[-1]:06d}"
            newest.with_suffix(".safetensors").write_bytes(b"")
            if len(checkpoints.rounds) == 1:
                return
            latest = checkpoints.latest().server_round
            checkpoints.set_aside_after(latest)
            del lines[latest:]
        stopping = EarlyStopping(config, lines[: checkpoints.rounds[-1]])
        found = checkpoints.best(stopping)
        assert found.state["w"][0] == found.server_round == stopping.best()


def test_parts_of_the_best_round_that_were_in_memory_only_are_missed_by_name(
    tmp_path, caplog
) -> None:
    """This run has no state-dir, as under ``flwr run``."""
    config = Config.make({**BASE, "strategy": "fedbn", "out": str(tmp_path)})
    serve_nodes(config, tmp_path)
    assert (
        "client(s) 0, 1, 2 kept their local state in memory only. They continue with"
        " the state of the last round" in caplog.text
    )


def test_a_missing_checkpoint_of_the_best_round_ends_the_run_with_an_error(
    tmp_path, whole
) -> None:
    _, summary = whole["fedavg"]
    best = summary["best-validation"]["round"]
    with pytest.raises(Cut):
        start(tmp_path, cut=best + 2, **{"checkpoint-every": 1})
    (tmp_path / f"checkpoint/round-{best:06d}.safetensors").write_bytes(b"")
    with pytest.raises(
        EngineError,
        match=f"round {best} has the best validation-accuracy, but its checkpoint cannot",
    ):
        start(tmp_path, resume=True, **{"checkpoint-every": 1})
