"""``check-node``: each planted fault is named, and nothing but one activation of the key is sent."""

from __future__ import annotations

import json
import shutil
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
from fedbn_flwr.lab.node_check.check import check_versions
from fedbn_flwr.lab.node_check.connection import check_connection, supernode_with
from fedbn_flwr.messages.versions import as_text, differences, own_versions
from tests.support.superlink import NODE_ID, SuperLink, superlink

TABLE = {
    "dataset": "csv:",
    "label-column": "sick",
    "feature-columns": "age,sex:F|M",
    "task": "binary",
    "batch-size": 4,
    "eval-on": "personal-own",
    "strategy": "fedbn",
}
IMAGES = {"dataset": "mnist", "eval-on": "personal-own", "local-steps": 1, "batch-size": 4}
HERE = as_text(own_versions())


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
    running.registered, running.online, running.refuses = {key_of(certs / "node-1")}, set(), 0
    running.requests.clear()
    return Federation(running, Connection(running.address, certs / "node-1/ca.crt", certs / "node-1/node.key"))


def write_table(path: Path, columns: str = "age,sex,sick", rows: int = 40) -> Path:
    lines = [f"{30 + at},{'FM'[at % 2]},{(at // 3) % 2}" for at in range(rows)]
    path.write_text("\n".join([columns, *lines]))
    return path


def node_config(path: Path, **more: Any) -> str:
    return " ".join([f"partition-id=0 data-path='{path}'", *(f"{k.replace('_', '-')}={v!r}" for k, v in more.items())])


def found(page: Page, code: str, level: str) -> list[str]:
    return [finding.text for finding in page.findings if (finding.code, finding.level) == (code, level)]


def test_a_node_that_is_ready_sends_nothing_but_its_activation(
    tmp_path: Path, federation: Federation, certs: Path
) -> None:
    state = tmp_path / "state"
    table = write_table(tmp_path / "t.csv")
    page = check_node(TABLE, node_config(table, state_dir=str(state)), federation.connection, HERE)
    assert page.faults == []
    for code in ("data", "training", "round", "memory", "disk", "versions", "address", "certificate", "key"):
        assert found(page, code, "ok"), code
    assert not [*state.iterdir()]  # nothing is left behind
    assert [path for path, _ in federation.server.requests] == ["/v1/fleet/activate-node", "/v1/fleet/deactivate-node"]
    public = key_of(certs / "node-1")
    sent = federation.server.requests[0][1]
    assert public in sent
    assert len(sent) < len(public) + 20  # the key and the interval: no data, no count, no model
    assert federation.server.requests[1][1] == NODE_ID.to_bytes(1, "big").join([b"\x08", b""])
    assert not federation.server.online


@pytest.mark.parametrize("strategy", ["fedtan", "fixbn", "scaffold", "staticbn", "fedtan2", "hbn"])
def test_each_method_plays_its_parts(tmp_path: Path, strategy: str) -> None:
    settings = {**TABLE, "strategy": strategy, "num-server-rounds": 30}
    page = check_node(settings, node_config(write_table(tmp_path / "t.csv")), Connection())
    assert page.faults == []
    assert found(page, "training", "ok")
    assert found(page, "address", "not tried")


def test_masks_and_noise_are_left_out_and_record_level_noise_is_not(tmp_path: Path) -> None:
    config = node_config(write_table(tmp_path / "t.csv"))
    masked = {**{k: v for k, v in TABLE.items() if k != "eval-on"}, "strategy": "fedavg", "eval-on": ""}
    masked |= {"masked-sums": True, "masked-threshold": 0.8, "masked-metrics": "published", "eval-on": "personal-own"}
    masked |= {"standardise": "local"}
    page = check_node(masked, config, Connection())
    assert page.faults == []
    assert "masked-sums" in found(page, "training", "ok")[0]


class Planted(NamedTuple):
    """A fault: the settings, what is planted in the folder (returns node config, connection), and what names it."""

    code: str
    says: str
    settings: dict[str, Any] = TABLE
    level: str = "fault"
    versions: str = HERE


def plant(name: str, folder: Path, federation: Federation, certs: Path, monkeypatch: Any) -> tuple[str, Connection]:
    table, connection = write_table(folder / "t.csv"), federation.connection
    config = node_config(table)
    if name == "a key that is not registered":
        connection = Connection(connection.address, connection.root_certificates, certs / "node-2/node.key")
    elif name == "a key that is no key":
        connection = Connection(connection.address, connection.root_certificates, table)
    elif name == "an address where nobody listens":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            connection = Connection(f"127.0.0.1:{free.getsockname()[1]}", connection.root_certificates, connection.key)
    elif name == "a name that does not exist":
        connection = Connection("no-such-host.invalid:8000", connection.root_certificates, connection.key)
    elif name == "another federation's certificate":
        others = certs.parent / "others/node-1/ca.crt"
        connection = Connection(connection.address, others, connection.key)
    elif name == "another minor version of Flower at the server":
        federation.server.refuses = 1  # any other code
    elif name == "other columns":
        write_table(table, "age,gender,sick")
    elif name == "classes that the run does not have":
        table.write_text("age,sex,sick\n" + "\n".join(f"{at},F,{at % 3}" for at in range(30)))
    elif name == "a data-path that cannot be read":
        config = node_config(folder / "absent.csv")
    elif name == "an empty test part":
        some = np.zeros((8, 28, 28), np.uint8) + np.arange(8, dtype=np.uint8)[:, None, None] * 20
        y = np.arange(8) % 2
        np.savez(folder / "x.npz", x_train=some, y_train=y, x_test=some[:0], y_test=y[:0])
        config = node_config(folder / "x.npz")
    elif name == "images in colour for a grey model":
        some = np.random.default_rng(0).integers(0, 255, (8, 28, 28, 3)).astype(np.uint8)
        y = np.arange(8) % 2
        np.savez(folder / "x.npz", x_train=some, y_train=y, x_test=some, y_test=y)
        config = node_config(folder / "x.npz")
    elif name == "3-channel images where the run's model takes one":
        config = f"partition-id=0 num-partitions=2 allow-modules='{MODULE}'"
    elif name == "a module that the node does not allow":
        config = "partition-id=0 num-partitions=2"
    elif name == "no room on the disk":
        config = node_config(table, state_dir=str(folder / "state"))
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10))  # type: ignore[attr-defined]
    elif name == "a state-dir that cannot be written":
        config = node_config(table, state_dir=str(table / "below-a-file"))
    elif name == "a misspelt key":
        config = config.replace("data-path", "data_path")
    elif name == "a config that is none":
        config = "partition-id 0"
    return config, connection


MODULE = "volumes_of_a_site"
OF_FUNCTION = {
    "dataset": f"{MODULE}:images",
    "input-shape": "1,8,8",
    "task": "classification",
    "num-classes": 2,
    "model": f"{MODULE}:net",
    "eval-on": "personal-own",
}
OF_THE_WAY = ("address", "certificate", "key", "versions")
FAULTS = {
    "a key that is not registered": Planted("key", "not registered"),
    "a key that is no key": Planted("key", "t.csv"),
    "an address where nobody listens": Planted("address", "127.0.0.1"),
    "a name that does not exist": Planted("address", "no-such-host.invalid"),
    "another federation's certificate": Planted("certificate", "refused"),
    "another minor version of Flower at the server": Planted("key", "Failed to activate"),
    "other columns": Planted("data", "sex"),
    "classes that the run does not have": Planted("data", "classification"),
    "a data-path that cannot be read": Planted("data", "absent.csv"),
    "an empty test part": Planted("test-part", "empty", IMAGES),
    "images in colour for a grey model": Planted("data", "3 channels", IMAGES, "warning"),
    "3-channel images where the run's model takes one": Planted("data", "(3, 8, 8)", OF_FUNCTION),
    "a module that the node does not allow": Planted("node-config", "allow-modules", OF_FUNCTION),
    "no room on the disk": Planted("disk", "10 bytes free"),
    "a state-dir that cannot be written": Planted("disk", "below-a-file"),
    "a misspelt key": Planted("node-config", "data-path"),
    "a config that is none": Planted("node-config", "partition-id 0"),
    "a setting that is none": Planted("config", "strategy", {**TABLE, "strategy": "fedbm"}),
    "another version of this package": Planted("versions", "fedbn-flwr", versions="fedbn-flwr 0.1.9, torch 2.14.1"),
    "another minor version of Flower": Planted("versions", "flwr", versions="flwr 1.39.0"),
    "another torch": Planted("versions", "torch", level="warning", versions="torch 2.9.0"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(
    name: str, tmp_path: Path, federation: Federation, certs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType(MODULE)
    module.images = lambda site, part: TensorDataset(torch.rand(4, 3, 8, 8), torch.arange(4) % 2)  # type: ignore[attr-defined]
    module.net = lambda num_classes, size: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, num_classes))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, MODULE, module)
    planted = FAULTS[name]
    config, connection = plant(name, tmp_path, federation, certs, monkeypatch)
    if planted.code in OF_THE_WAY:  # the rest of the page takes seconds
        page = Page((*check_connection(connection), *check_versions(planted.versions)))
    else:
        page = check_node(planted.settings, config, connection, planted.versions)
    texts = found(page, planted.code, planted.level)
    assert any(planted.says in text for text in texts), str(page)
    assert {finding.code for finding in page.faults} == ({planted.code} if planted.level == "fault" else set())
    assert f"{planted.level:<9}  {planted.code}" in str(page)
    assert [path for path, _ in federation.server.requests].count("/v1/fleet/activate-node") <= 1


def test_a_key_that_is_online_here_is_not_tried(tmp_path: Path, federation: Federation, certs: Path) -> None:
    """A SuperNode's process with the key is found by its command, whose path may be relative to its folder."""
    processes = tmp_path / "proc"
    (processes / "42").mkdir(parents=True)
    (processes / "42/cwd").symlink_to(certs / "node-1")
    for words in (
        ["flower-supernode", "--auth-supernode-private-key", "node.key"],
        ["/bin/python", "/bin/flower-supernode", "--auth-supernode-private-key=node.key"],
    ):
        (processes / "42/cmdline").write_bytes("\0".join(words).encode())
        assert supernode_with(key_of(certs / "node-1"), processes) == 42
        assert supernode_with(key_of(certs / "node-2"), processes) == 0
    (processes / "42/cmdline").write_bytes(b"vim\0--auth-supernode-private-key\0node.key")
    assert supernode_with(key_of(certs / "node-1"), processes) == 0


def test_the_process_of_a_supernode_keeps_the_key_from_being_tried(
    federation: Federation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("fedbn_flwr.lab.node_check.connection.supernode_with", lambda public: 42)
    page = check_node(TABLE, node_config(write_table(tmp_path / "t.csv")), federation.connection)
    assert found(page, "key", "not tried")
    assert not federation.server.requests


def test_the_command_prints_one_page_and_its_status_is_true(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(TABLE))
    table = write_table(tmp_path / "t.csv")
    command = ["check-node", str(tmp_path / "run.yaml"), "--node-config", node_config(table)]
    done = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "page.txt")])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "page.txt").read_text()
    assert page.splitlines()[-1].startswith("No fault")
    assert len(page.splitlines()) < 60
    failed = CliRunner().invoke(app, [*command, "--set", "feature-columns=weight", "--json"])
    assert failed.exit_code == 1
    assert json.loads(failed.stdout)["ready"] is False


def test_what_a_server_hears_of_versions_is_compared() -> None:
    here = {"fedbn-flwr": "0.2.0", "torch": "2.14.1+cu130", "flwr": "1.41.0"}
    assert differences(here, as_text(here)) == []
    assert differences(here, "torch 2.14.1") == []  # a build of the same version
    told = differences(here, "fedbn-flwr=0.1.0 torch 2.9.0, flwr 1.41.2")
    assert [serious for _, serious in told] == [True, False, False]
    assert differences(here, "flwr 1.40.0")[0][1] is True
    assert differences(here, "no version " * 1000) == []
