"""The commands of a federation without Docker.

The tests of tests/lab/deployment run them.
"""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import yaml

from apps import local_federation
from apps.flower_processes import free_port
from apps.local_federation import LocalFederation, make_certificates
from fedbn_flwr.errors import EngineError
from tests.support.checkout import ROOT
from tests.support.folders import contents


def options(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--")}


def test_tls_keys_and_secrets_are_those_of_the_compose_file(tmp_path) -> None:
    """Each process has the options of its Compose service.

    ``make certs`` makes each file that the options name.
    """
    make_certificates(tmp_path / "certs", 2)
    federation = LocalFederation(tmp_path / "net", tmp_path / "certs", 2, 8000, ())
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    assert len(federation.commands) == 6
    for name, command in federation.commands.items():
        assert options(command) == options(services[name]["command"]), name
        files = [word.partition("=")[2] for word in command if "certs/" in word]
        assert files, name
        assert all(Path(file).is_file() for file in files), name
    assert not federation.folder.exists(), "nothing is written before the start"


def test_a_node_has_its_share_or_its_own_config(tmp_path) -> None:
    given = ["partition-id=0", "partition-id=1 data-path='/a b'"]
    share = f"partition-id=1 num-partitions=2 state-dir='{tmp_path}/node-2'"
    for own, expected in (([], share), (given, given[1])):
        federation = LocalFederation(tmp_path, tmp_path / "certs", 2, 8000, own)
        command = federation.commands["supernode-2"]
        assert command[command.index("--node-config") + 1] == expected


@pytest.mark.parametrize("used", ["folder", "port of the SuperLink", "port of node 2"])
def test_a_second_start_changes_nothing(tmp_path, used: str) -> None:
    """The database of a running SuperLink stays, with the ids of its nodes."""
    folder, port = tmp_path / "net", free_port()
    folder.mkdir()
    (folder / "superlink.db").write_text("nodes")
    first, second = (LocalFederation(folder, tmp_path, 2, port, ()) for _ in range(2))
    with ExitStack() as running:
        if used == "folder":
            running.enter_context(closing(first))
            first._reserve()
        else:
            own = port + 2 if "2" in used else port
            running.enter_context(socket.create_server(("127.0.0.1", own)))
        with closing(second), pytest.raises(EngineError) as refused:
            second.start()
    assert f"--{used.split()[0]}" in str(refused.value)
    assert contents(folder) == {"superlink.db": b"nodes"}
    with closing(first):
        first._reserve()  # the folder and the ports are free again


def test_a_process_that_does_not_stay_up_is_given_up_with_the_reason(
    tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(local_federation, "PATIENCE", 0.05)
    federation = LocalFederation(tmp_path, tmp_path, 1, 8000, ())
    federation.commands = {"supernode-1": ["sh", "-c", "echo refused; exit 1"]}
    federation.launch("supernode-1")
    federation.watch()
    told = capsys.readouterr().out
    begins = "supernode-1 has ended with exit code 1 and is started again\n"
    assert told.startswith(begins)
    assert told.endswith("refused\nrefused\n\n")
