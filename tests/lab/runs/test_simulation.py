"""Flower's own simulation gives the app the bits of the in-process run.

Outcomes are true, and nothing is left behind.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedbn_flwr.engines.flower_run import flower_run
from fedbn_flwr.errors import EngineError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.runs.run import run

pytestmark = pytest.mark.simulation

ROOT = Path(__file__).parents[3]
NODES = 5
SETTINGS = {
    "strategy": "fedbn",
    "num-server-rounds": 2,
    "local-steps": 3,
    "batch-size": 16,
    "num-clients": NODES,
}
SETTINGS["device"] = "cpu"  # every engine gives the same bits there


@pytest.fixture(scope="module")
def matplotlib_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return one cache of fonts for all runs, because it takes seconds to make.

    Otherwise it would be in the home.
    """
    return str(tmp_path_factory.mktemp("matplotlib"))


@pytest.fixture(autouse=True)
def users_home(
    tmp_path: Path,
    matplotlib_cache: str,
    await_end: Callable[[Path], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Path]:
    """Provide a home that must stay empty.

    A temporary folder identifies the processes of the test.
    """
    # Ray's sockets: <= 107 bytes
    home, scratch = tmp_path / "home", Path(tempfile.mkdtemp(prefix="s", dir="/tmp"))
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("FLWR_HOME", str(home / ".flwr"))
    monkeypatch.setenv("TMPDIR", str(scratch))
    # a cluster that these runs must not join
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("MPLCONFIGDIR", matplotlib_cache)
    monkeypatch.setattr("tempfile.tempdir", None)  # forget the earlier look-up
    yield home
    assert list(home.rglob("*")) == [], "the user's Flower home is untouched"
    assert await_end(scratch) == [], "nothing is left running"
    assert [
        path.name for path in scratch.iterdir() if path.name.startswith("fedbn-flwr")
    ] == []
    shutil.rmtree(scratch)


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(Config.make(SETTINGS), tmp_path_factory.mktemp("in-process") / "out")


@pytest.mark.slow
def test_masked_sums_give_the_bits_of_the_run_in_process(
    tmp_path: Path, same_run
) -> None:
    """The sums are exact; FedTAN's sums use messages here, a barrier in process."""
    settings = {
        **SETTINGS,
        "strategy": "fedtan",
        "masked-sums": True,
        "eval-on": "global",
        "num-clients": 3,
    }
    settings |= {"num-server-rounds": 1, "local-steps": 2}
    federation = {
        "num-supernodes": 3,
        "client-resources-num-cpus": 2,
        "init-args-num-cpus": 2,
    }
    out = tmp_path / "out"
    flower_run(
        ROOT, run_config={**settings, "out": str(out)}, federation_config=federation
    )
    summary = json.loads((out / "summary.json").read_text())
    same_run(summary, run(Config.make(settings), tmp_path / "in-process"))
    assert summary["rejected"] == 0


@pytest.mark.slow  # tests/lab/runs/test_cluster.py continues a run on a cluster
def test_a_run_started_in_process_continues_in_simulation(
    in_process: dict[str, Any], tmp_path: Path, same_run
) -> None:
    """Checkpoints and the clients' files do not depend on the engine."""
    out = tmp_path / "out"
    run(Config.make({**SETTINGS, "num-server-rounds": 1}), out)
    seen: list[Any] = []
    summary = run(
        Config.make({**SETTINGS, "resume": True}), out, "simulation", seen.append
    )
    same_run(summary, in_process)
    assert summary["resumed-after"] == [1]
    assert [line["round"] for line in seen] == [1, 2]
    assert "Continuing after round 1" in (out / "flower.log").read_text()


@pytest.mark.slow
def test_fedtan_by_channel_with_fewer_actors_than_clients_is_refused_with_advice(
    tmp_path: Path,
) -> None:
    settings = {**SETTINGS, "strategy": "fedtan", "fedtan-transport": "channel"}
    with pytest.raises(EngineError) as caught:
        flower_run(
            ROOT,
            run_config={**settings, "out": str(tmp_path / "out")},
            federation_config={
                "num-supernodes": NODES,
                "client-resources-num-cpus": 1,
                "init-args-num-cpus": 1,
            },
        )
    assert (
        "4 of 5 clients did not begin the step within 2 s of the first. All clients of"
        " a round must run at the" in str(caught.value)
    )
    assert "'client-resources-num-cpus=1 init-args-num-cpus=5'" in str(caught.value)


# tests/engines/test_flower_run.py has the outcomes, and test_bad_input.py the error.
@pytest.mark.slow
def test_a_server_app_that_raised_is_an_error_and_nothing_is_written(
    tmp_path: Path,
) -> None:
    """The federation has another size; ``flwr run --stream`` itself ends with 0."""
    settings = {"num-clients": 3, "out": str(tmp_path / "out")}
    with pytest.raises(EngineError) as caught:
        flower_run(ROOT, run_config=settings, federation_config={"num-supernodes": 4})
    said = str(caught.value)
    assert said.startswith("flwr run: finished:failed. The last lines of its log:\n")
    assert (
        "num-clients=3, but the federation has 4 node(s). In simulation add"
        " --federation-config 'num-supernodes=3' to `flwr run`; or set num-clients=0 to"
        " take all nodes." in said
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_run_that_flower_refuses_is_an_error() -> None:
    with pytest.raises(EngineError) as caught:
        flower_run(
            ROOT,
            run_config={"learning-rat": 1.0},
            federation_config={"num-supernodes": 2},
        )
    said = str(caught.value)
    assert said.startswith("flwr run: refused by Flower. The last lines of its log:\n")
    assert "[code: 15]" in said
