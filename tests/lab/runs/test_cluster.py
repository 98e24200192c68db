"""Runs on a Ray cluster have the bits of a run in process.

Code, data and files come from one machine.
"""

from __future__ import annotations

import socket
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from typer.testing import CliRunner

from fedbn_flwr.errors import ConfigError, EngineError
from fedbn_flwr.lab.cli import app
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.runs.cluster import check_cluster, check_room, cluster, user_modules
from fedbn_flwr.lab.runs.run import run
from tests.support.ray_nodes import can_hide, two_nodes

SMALL = {"num-server-rounds": 2, "local-steps": 2, "batch-size": 8, "num-clients": 3}


def write_rows(path: Path) -> str:
    """Write own data, rows in two classes, and return the config's ``dataset``."""
    rng = np.random.default_rng(0)
    np.savez(
        path, x=rng.standard_normal((90, 4)).astype("float32"), y=rng.integers(0, 2, 90)
    )
    return f"npz:{path}"


# Code.


def write_net(folder: Path) -> None:
    """Write a user's model, an imported module, and a module without import."""
    (folder / "cluster_layers.py").write_text(
        "from torch import nn\n\nlayer = nn.Linear\n"
    )
    (folder / "not_imported.py").write_text("")
    net = """
        import os

        from cluster_layers import layer
        from torch import nn


        def net(num_classes, features):
            print("built in", os.getcwd())
            return nn.Sequential(layer(features, 8), nn.BatchNorm1d(8), nn.ReLU(), layer(8, num_classes))
    """
    (folder / "cluster_net.py").write_text(textwrap.dedent(net))


def test_the_modules_of_a_users_model_go_to_the_machines_and_installed_ones_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_net(tmp_path)
    monkeypatch.chdir(tmp_path)
    rows = write_rows(tmp_path / "rows.npz")
    configs = [
        Config.make({**SMALL, "dataset": rows, **own})
        for own in ({"model": "cluster_net:net"}, {"loop": "cluster_net:net"}, {})
    ]
    found = [sorted(user_modules([config])) for config in configs]
    files = [tmp_path / "cluster_layers.py", tmp_path / "cluster_net.py"]
    assert found == [files, files, []]


# Refusals.


def test_the_address_is_for_the_simulation_alone(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, ["run", "--ray-address", "127.0.0.1:1", "--out", str(tmp_path / "out")]
    )
    assert result.exit_code == 2
    assert (
        result.stderr.strip()
        == "--ray-address=127.0.0.1:1 needs --engine simulation: only that engine uses"
        " Ray."
    )
    with pytest.raises(
        ConfigError, match=r"ray-address=127\.0\.0\.1:1 is for the engine simulation"
    ):
        run(Config.make(SMALL), tmp_path / "out", ray_address="127.0.0.1:1")


@pytest.mark.parametrize(
    "address", ["auto", "localhost", "ray://127.0.0.1:1", "127.0.0.1:port"]
)
def test_an_address_is_a_host_and_a_port(address: str) -> None:
    with (
        pytest.raises(ConfigError, match="must be HOST:PORT of a running cluster"),
        cluster([], address),
    ):
        pass


def test_an_address_that_does_not_answer_is_refused_before_any_work(
    tmp_path: Path,
) -> None:
    """``ray.init`` itself would wait for minutes."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(EngineError, match=f"no Ray cluster answers at {address}"):
            run(Config.make(SMALL), tmp_path / "out", "simulation", ray_address=address)
    assert not (tmp_path / "out").exists()


def machines(*cpus: float, addresses: str = "ab") -> list[tuple[str, float]]:
    return list(zip(addresses, cpus, strict=False))


@pytest.mark.parametrize(
    ("settings", "found", "message"),
    [
        ({"strategy": "fedtan", "fedtan-transport": "channel"}, machines(1, 1), "the 3 clients of a round wait for"),
        ({"strategy": "fedtan", "fedtan-transport": "channel"}, machines(2, 1), "fedtan-bind='127.0.0.1:0' is"),
        ({"strategy": "fedtan", "fedtan-transport": "channel"}, machines(2, 1, addresses="aa"), ""),
        ({"strategy": "fedtan"}, machines(1, 1), ""),
    ],
)  # fmt: skip
def test_the_clients_have_room_on_the_cluster(
    settings: dict[str, Any], found: Any, message: str
) -> None:
    config = Config.make({**SMALL, **settings})
    if not message:
        check_room(config, found)
        return
    with pytest.raises(ConfigError, match=message):
        check_room(config, found)


def test_a_second_connection_is_refused_and_the_first_one_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(
        ray, "shutdown", lambda: pytest.fail("the user's connection was ended")
    )
    with (
        pytest.raises(EngineError, match="connected to Ray already"),
        cluster([], "127.0.0.1:1"),
    ):
        pass


# A cluster.


HIDDEN = ("code", "runs")
"""Folders that the second node does not have."""


@pytest.fixture(scope="module")
def nodes(await_end: Callable[[Path], list[str]]) -> Iterator[tuple[str, Path]]:
    """Start two nodes with a CPU each; yield the address and the folder of files."""
    # Ray's sockets: <= 107 bytes
    with tempfile.TemporaryDirectory(prefix="s", dir="/tmp") as folder:
        scratch = Path(folder)
        for name in (*HIDDEN, "seen"):
            (scratch / name).mkdir()
        with two_nodes(scratch, [scratch / name for name in HIDDEN]) as address:
            yield address, scratch
        assert await_end(scratch) == [], "nothing is left running"


@pytest.mark.slow
@pytest.mark.simulation
def test_a_run_of_this_machine_continues_on_a_cluster(
    nodes: tuple[str, Path], monkeypatch, same_run
) -> None:
    """The second node has only the code that this machine sends.

    Data and results are on a shared disk.
    """
    address, scratch = nodes
    write_net(scratch / "code")
    monkeypatch.chdir(scratch / "code")
    own = {
        "dataset": write_rows(scratch / "seen" / "rows.npz"),
        "model": "cluster_net:net",
        "strategy": "fedbn",
    }
    settings, out = {**SMALL, **own}, scratch / "seen" / "cluster"
    expected = run(Config.make(settings), scratch / "runs" / "here", workers=0)
    run(Config.make({**settings, "num-server-rounds": 1}), out, workers=0)
    resumed = Config.make({**settings, "resume": True})
    summary = run(resumed, out, "simulation", ray_address=address)
    same_run(summary, expected)
    assert summary["resumed-after"] == [1]
    said = (out / "flower.log").read_text()
    assert all(
        f"built in {scratch / home}" in said for home in ("head-home", "second-home")
    )


@pytest.mark.slow
@pytest.mark.simulation
def test_the_machines_are_asked_for_files(nodes: tuple[str, Path]) -> None:
    address, scratch = nodes
    if not can_hide():
        pytest.skip("both nodes see all files here")
    for folder in ("out", str(scratch / "runs" / "state")):
        config = Config.make({**SMALL, "state-dir": folder})
        with pytest.raises(ConfigError, match="is not one folder for all machines"):
            check_cluster(config, scratch / "runs" / "out", address)
    check_cluster(
        Config.make({**SMALL, "state-dir": "out"}), scratch / "seen" / "out", address
    )


@pytest.mark.slow
@pytest.mark.simulation
@pytest.mark.parametrize("strategy", ["fedavg", "fixbn", "fedtan", "scaffold"])
def test_a_run_on_a_cluster_has_the_bits_of_the_run_in_process(
    strategy: str, nodes: tuple[str, Path], tmp_path: Path, same_run
) -> None:
    extra = {"freeze-at": 1} if strategy == "fixbn" else {}
    config = Config.make({**SMALL, "num-clients": 5, "strategy": strategy, **extra})
    expected = run(config, tmp_path / "here", workers=0)
    same_run(
        run(config, nodes[1] / "seen" / strategy, "simulation", ray_address=nodes[0]),
        expected,
    )
