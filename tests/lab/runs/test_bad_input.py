"""Bad input on the command line gives the exact message and exit code 2.

It makes no folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.errors import ConfigError, EngineError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.runs.check_start import checked_config
from fedbn_flwr.lab.runs.default_app import client_app, main
from fedbn_flwr.lab.runs.serve import serve
from fedbn_flwr.transport import polling_grid
from tests.support.commands import call
from tests.support.runs import config_of, serve_nodes, values_of

BAD = {
    # the settings, and the words that the message must contain
    "no BatchNorm under silobn": (
        ["strategy=silobn", "model=resnet20", "norm=group"],
        ["silobn", "resnet20", "GroupNorm", "layer1.0.norm1", "FedAvg", "norm=batch"],
    ),
    "an empty partition": (
        ["num-clients=1430", "classes-per-client=1"],
        ["'classes'", "6 of 1430 clients"],
    ),
    "no data folder": (
        ["dataset=mnist"],
        ["mnist", "data-dir", "MNIST/raw/", "train-images-idx3-ubyte", "digits"],
    ),
    "two problems at once": (
        ["device=cuda", "dataset=mnist", "data-dir=/no/such"],
        ["device=cuda", "\n", "data-dir='/no/such'"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_ends_with_a_message_and_writes_nothing(
    name: str, out, monkeypatch
) -> None:
    monkeypatch.chdir(out.parent)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    settings, named = BAD[name]
    words = [word for setting in settings for word in ("--set", setting)]
    done = call("run", *words, "--out", "out")
    assert done.exit_code == 2, done.output
    for part in named:
        assert part in done.stderr


@pytest.fixture
def out(tmp_path) -> Iterator[Path]:
    """Return the folder of a run that is refused, and check that nothing is written."""
    yield tmp_path / "out"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("network", [False, True])
@pytest.mark.parametrize("found", [2, 4])
def test_a_federation_of_another_size_is_refused(
    found: int, network: bool, quick_config, out, monkeypatch
) -> None:
    monkeypatch.setattr("fedbn_flwr.lab.runs.serve.NODE_GRACE", 0.3)
    monkeypatch.setattr(polling_grid, "is_network_grid", lambda grid: network)
    with pytest.raises(ConfigError) as caught:
        serve_nodes(quick_config(), out, [{}] * found)
    way = "Start 3 SuperNodes"
    if not network:
        way = "In simulation add --federation-config 'num-supernodes=3' to `flwr run`"
    said = f"num-clients=3, but the federation has {found} node(s). {way}"
    assert str(caught.value) == f"{said}; or set num-clients=0 to take all nodes."


def test_a_federation_without_nodes_is_refused(quick_config, out, monkeypatch) -> None:
    monkeypatch.setattr("fedbn_flwr.lab.runs.serve.NODE_GRACE", 0.1)
    monkeypatch.setattr(InProcessGrid, "get_node_ids", lambda grid: [])
    with pytest.raises(
        EngineError,
        match=r"no nodes connected within 0\.1 s. Start the SuperNodes first",
    ):
        serve_nodes(quick_config(), out)


class Late(InProcessGrid):
    """A network federation whose later nodes connect only after some looks."""

    looks = 0
    connect_at = 2

    def get_node_ids(self) -> list[int]:
        self.looks += 1
        return super().get_node_ids()[: None if self.looks > self.connect_at else 1]


def serve_late(config: Config, out: Path) -> None:
    """Run a config on three such nodes."""
    with Late(client_app, 3, run_config=config.to_mapping()) as grid:
        serve(grid, checked_config(config), out)


@pytest.mark.parametrize("held_out", ["", "1"])
def test_over_a_network_all_nodes_are_as_many_as_the_data_have_parts(
    held_out: str, quick_config, tmp_path, monkeypatch, caplog
) -> None:
    """The server splits as the nodes do, even while they connect in turn."""
    monkeypatch.setattr(polling_grid, "is_network_grid", lambda grid: True)
    settings = {"num-clients": 0, "held-out-clients": held_out, "eval-every": 2}
    config, out = quick_config(**settings), tmp_path / "out"
    serve_late(config, out)
    assert config_of(out).num_clients == 3
    assert values_of(out, "participants") == [[0, 1, 2]] * 2
    assert "others may join" not in caplog.text
    monkeypatch.setattr("fedbn_flwr.lab.runs.serve.NODE_GRACE", 0.0)
    monkeypatch.setattr(Late, "connect_at", 99)
    serve_late(config, tmp_path / "alone")
    assert config_of(tmp_path / "alone").num_clients == 3
    assert "num-partitions=3, but the run begins with 1 node(s)" in caplog.text


def test_held_out_clients_need_nodes_that_split_as_the_server_does(
    quick_config, tmp_path, monkeypatch
) -> None:
    """Otherwise a node trains on their examples."""
    monkeypatch.setattr(Late, "connect_at", 99)
    config = quick_config(**{"num-clients": 1, "held-out-clients": "1"})
    words = (
        "the split of the server has num-partitions=1, but node .* num-partitions=3:"
    )
    with pytest.raises(ConfigError, match=words):
        serve_late(config, tmp_path)


def test_pooled_data_have_one_node(quick_config, out) -> None:
    config = quick_config(strategy="centralized")
    with pytest.raises(ConfigError, match="the federation has 2 node"):
        serve_nodes(config, out, [{}, {}])


def test_results_of_flwr_run_go_to_the_flower_home_by_default(
    quick_config, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    config = quick_config(**{"num-clients": 0})
    with InProcessGrid(client_app, 2, run_config=config.to_mapping()) as grid:
        context = grid.context(0)
        main(grid, context)
        out = tmp_path / "home/fedbn-runs" / str(context.run_id)
        assert (out / "summary.json").is_file()
        assert config_of(out).num_clients == 2, "all nodes"


@pytest.mark.parametrize("saved", [False, True])
def test_a_missing_node_leaves_a_run_that_can_be_resumed(
    saved: bool, quick_config, tmp_path, monkeypatch, caplog
) -> None:
    """The log's last words on ``resume=true`` are the command, which ``cli`` repeats."""
    monkeypatch.setattr("fedbn_flwr.lab.runs.serve.NODE_GRACE", 0.1)
    out = tmp_path / "out"
    settings = {"out": str(out), "checkpoint-every": 1}
    config = quick_config(**settings)
    if saved:
        serve_nodes(config, out)
        settings["resume"] = True
    given = {**config.to_mapping(), **settings}
    with (
        InProcessGrid(client_app, 2, run_config=given) as grid,
        pytest.raises(ConfigError, match="the federation has 2 node"),
    ):
        main(grid, grid.context(0))
    *_, last = [line for line in caplog.messages if "resume=true" in line]
    assert (f"out='{out}' resume=true" in last) == saved
