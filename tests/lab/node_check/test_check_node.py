"""``check-node`` names each planted fault and sends one activation of the key."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import yaml
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

from fedbn_flwr.compat.node_key import private_key, public_bytes
from fedbn_flwr.lab.cli import app
from fedbn_flwr.lab.deployment import make_certificates
from fedbn_flwr.lab.node_check import Connection, Page, check_node
from fedbn_flwr.lab.node_check.connection import check_connection
from fedbn_flwr.messages.versions import as_text, differences
from tests.support.superlink import NODE_ID, SuperLink, superlink

SETTINGS = {
    "dataset": "mnist",
    "strategy": "fedbn",
    "eval-on": "personal-own",
    "local-steps": 1,
    "batch-size": 4,
}


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("check") / "certs"
    make_certificates(folder, 2, ["127.0.0.1"])
    make_certificates(folder.parent / "others", 1, ["127.0.0.1"])
    return folder


class Federation(NamedTuple):
    server: SuperLink
    connection: Connection


def key_of(folder: Path) -> bytes:
    return public_bytes(private_key((folder / "node.key").read_bytes()))


@pytest.fixture(scope="module")
def running(certs: Path) -> Iterator[SuperLink]:
    with superlink(certs / "superlink") as server:
        yield server


@pytest.fixture
def federation(running: SuperLink, certs: Path) -> Federation:
    running.registered, running.online, running.refuses = (
        {key_of(certs / "node-1")},
        set(),
        0,
    )
    running.requests.clear()
    return Federation(
        running,
        Connection(running.address, certs / "node-1/ca.crt", certs / "node-1/node.key"),
    )


def write_images(path: Path, tests: int = 8, **changed: Any) -> Path:
    """Write 8 grey images for training, and some for tests."""
    x = (
        np.zeros((8, 28, 28), np.uint8)
        + np.arange(8, dtype=np.uint8)[:, None, None] * 20
    )
    y = np.arange(8) % 2
    np.savez(
        path,
        **{
            "x_train": x,
            "y_train": y,
            "x_test": x[:tests],
            "y_test": y[:tests],
            **changed,
        },
    )
    return path


def node_config(path: Path, **more: Any) -> str:
    return " ".join(
        [
            f"partition-id=0 data-path='{path}'",
            *(f"{k.replace('_', '-')}={v!r}" for k, v in more.items()),
        ]
    )


def found(page: Page, code: str, level: str) -> list[str]:
    return [
        finding.text
        for finding in page.findings
        if (finding.code, finding.level) == (code, level)
    ]


def test_a_node_that_is_ready_sends_nothing_but_its_activation(
    tmp_path: Path, federation: Federation, certs: Path
) -> None:
    state = tmp_path / "state"
    data = write_images(tmp_path / "x.npz")
    page = check_node(
        SETTINGS, node_config(data, state_dir=str(state)), federation.connection
    )
    assert page.faults == []
    for code in ("data", "training", "address", "certificate", "key"):
        assert found(page, code, "ok"), code
    assert not [*state.iterdir()]  # nothing is left behind
    assert [path for path, _ in federation.server.requests] == [
        "/v1/fleet/activate-node",
        "/v1/fleet/deactivate-node",
    ]
    public = key_of(certs / "node-1")
    sent = federation.server.requests[0][1]
    assert public in sent
    # Only the key and the interval are sent, and no data, count or model.
    assert len(sent) < len(public) + 20
    assert federation.server.requests[1][1] == NODE_ID.to_bytes(1, "big").join(
        [b"\x08", b""]
    )
    assert not federation.server.online


@pytest.mark.parametrize(
    "strategy", ["fedtan", "fixbn", "scaffold", "staticbn", "fedtan2"]
)
def test_each_method_plays_its_parts(tmp_path: Path, strategy: str) -> None:
    settings = {**SETTINGS, "strategy": strategy, "num-server-rounds": 30}
    page = check_node(
        settings, node_config(write_images(tmp_path / "x.npz")), Connection()
    )
    assert page.faults == []
    assert found(page, "training", "ok")
    assert found(page, "address", "not tried")


OF_OTHERS: dict[str, dict[str, Any]] = {
    "initial weights": {"init": "/of/the/server/weights.pt"},
    "the run's folder": {"out": "/of/the/server/run", "tensorboard": True},
    "other clients": {"min-replies": 3, "fraction-train": 0.4, "num-clients": 5},
    "clients held out": {"held-out-clients": "1", "num-clients": 3},
    "noise": {
        "strategy": "fedavg",
        "eval-on": "global",
        "dp": "server",
        "dp-noise-multiplier": 1.0,
        "dp-clipping-norm": 1.0,
    },
    "later rounds": {"early-stopping": 2, "validation-share": 0.3, "eval-every": 5},
    "runs before": {"series": "a", "resume": True, "out": "/of/the/server/run"},
}


@pytest.mark.parametrize("name", OF_OTHERS)
def test_what_the_server_and_other_clients_have_is_not_needed(
    name: str, tmp_path: Path
) -> None:
    data = node_config(write_images(tmp_path / "x.npz"))
    page = check_node({**SETTINGS, **OF_OTHERS[name]}, data, Connection())
    assert page.faults == []
    assert found(page, "training", "ok")


class Planted(NamedTuple):
    """A fault: the code and words of its finding, its settings and its level."""

    code: str
    says: str
    settings: dict[str, Any] = SETTINGS
    level: str = "fault"


def plant(
    name: str, folder: Path, federation: Federation, certs: Path
) -> tuple[str, Connection]:
    data, connection = write_images(folder / "x.npz"), federation.connection
    config = node_config(data)
    if name == "a key that is not registered":
        connection = Connection(
            connection.address, connection.root_certificates, certs / "node-2/node.key"
        )
    elif name == "a key that is no key":
        connection = Connection(connection.address, connection.root_certificates, data)
    elif name == "an address where nobody listens":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            connection = Connection(
                f"127.0.0.1:{free.getsockname()[1]}",
                connection.root_certificates,
                connection.key,
            )
    elif name == "a name that does not exist":
        connection = Connection(
            "no-such-host.invalid:8000", connection.root_certificates, connection.key
        )
    elif name == "another federation's certificate":
        others = certs.parent / "others/node-1/ca.crt"
        connection = Connection(connection.address, others, connection.key)
    elif name == "another minor version of Flower at the server":
        federation.server.refuses = 1  # any other code
    elif name == "classes that the run does not have":
        write_images(data, y_train=np.arange(8) + 9)
    elif name == "a data-path that cannot be read":
        config = node_config(folder / "absent.npz")
    elif name == "an empty test part":
        write_images(data, tests=0)
    elif name == "images in colour for a grey model":
        colour = (
            np.random.default_rng(0).integers(0, 255, (8, 28, 28, 3)).astype(np.uint8)
        )
        write_images(data, x_train=colour, x_test=colour)
    elif name == "3-channel images where the run's model takes one":
        config = f"partition-id=0 num-partitions=2 allow-modules='{MODULE}'"
    elif name == "a module that the node does not allow":
        config = "partition-id=0 num-partitions=2"
    elif name == "a state-dir that cannot be written":
        config = node_config(data, state_dir=str(data / "below-a-file"))
    elif name == "a misspelt key":
        config = config.replace("data-path", "data_path")
    elif name == "a config that is none":
        config = "partition-id 0"
    return config, connection


MODULE = "volumes_of_a_site"
OF_FUNCTION = {
    "dataset": f"{MODULE}:images",
    "task": "classification",
    "num-classes": 2,
    "model": f"{MODULE}:net",
    "eval-on": "personal-own",
}
OF_THE_WAY = ("address", "certificate", "key")
FAULTS = {
    "a key that is not registered": Planted("key", "not registered"),
    "a key that is no key": Planted("key", "x.npz"),
    "an address where nobody listens": Planted("address", "127.0.0.1"),
    "a name that does not exist": Planted("address", "no-such-host.invalid"),
    "another federation's certificate": Planted("certificate", "refused"),
    "another minor version of Flower at the server": Planted(
        "key", "Failed to activate"
    ),
    "classes that the run does not have": Planted("data", "labels"),
    "a data-path that cannot be read": Planted("data", "absent.npz"),
    "an empty test part": Planted("test-part", "empty"),
    "images in colour for a grey model": Planted("data", "3 channels", level="warning"),
    "3-channel images where the run's model takes one": Planted(
        "data", "(3, 8, 8)", OF_FUNCTION
    ),
    "a module that the node does not allow": Planted(
        "node-config", "allow-modules", OF_FUNCTION
    ),
    "a state-dir that cannot be written": Planted("training", "below-a-file"),
    "a misspelt key": Planted("node-config", "data-path"),
    "a config that is none": Planted("node-config", "partition-id 0"),
    "a setting that is none": Planted(
        "config", "strategy", {**SETTINGS, "strategy": "fedbm"}
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(
    name: str,
    tmp_path: Path,
    federation: Federation,
    certs: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType(MODULE)
    module.images = lambda site, part: TensorDataset(
        torch.rand(4, 3, 8, 8), torch.arange(4) % 2
    )  # type: ignore[attr-defined]
    module.net = lambda num_classes, size: torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, num_classes)
    )  # type: ignore[attr-defined]
    module.images.input_shape = (1, 8, 8)
    monkeypatch.setitem(sys.modules, MODULE, module)
    planted = FAULTS[name]
    config, connection = plant(name, tmp_path, federation, certs)
    if planted.code in OF_THE_WAY:  # the rest of the page takes seconds
        page = Page((*check_connection(connection),))
    else:
        page = check_node(planted.settings, config, connection)
    texts = found(page, planted.code, planted.level)
    assert any(planted.says in text for text in texts), str(page)
    assert {finding.code for finding in page.faults} == (
        {planted.code} if planted.level == "fault" else set()
    )
    assert f"{planted.level:<9}  {planted.code}" in str(page)
    assert [path for path, _ in federation.server.requests].count(
        "/v1/fleet/activate-node"
    ) <= 1


def test_the_command_prints_one_page_and_its_status_is_true(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(SETTINGS))
    data = write_images(tmp_path / "x.npz")
    command = [
        "check-node",
        str(tmp_path / "run.yaml"),
        "--node-config",
        node_config(data),
    ]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[-1] == "No fault was found."
    assert len(lines) < 60
    failed = CliRunner().invoke(app, [*command, "--set", "dataset=npz:"])
    assert failed.exit_code == 1
    assert failed.stdout.splitlines()[-1] == "This node cannot take part: 1 fault(s)."


def test_what_a_server_hears_of_versions_is_compared() -> None:
    here = {"fedbn-flwr": "0.2.0", "torch": "2.14.1+cu130", "flwr": "1.41.0"}
    assert differences(here, as_text(here)) == []
    assert differences(here, "torch 2.14.1") == []  # a build of the same version
    told = differences(here, "fedbn-flwr=0.1.0 torch 2.9.0, flwr 1.41.2")
    assert [serious for _, serious in told] == [True, False, False]
    assert differences(here, "flwr 1.40.0")[0][1] is True
    assert differences(here, "no version " * 1000) == []
