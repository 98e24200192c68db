"""A failed run of Flower's own simulation gives advice and leaves nothing behind.

tests/lab/runs/test_matrix.py has the bits of runs, and tests/lab/runs/test_cluster.py a
run that continues.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedbn_flwr.engines.flower_run import flower_run
from fedbn_flwr.errors import EngineError

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
