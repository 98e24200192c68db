"""The check of a node activates its key in Flower.

Flower refuses the activation of an unknown or online key.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import flwr
import pytest
from flwr.common.constant import HEARTBEAT_MIN_INTERVAL

if tuple(int(number) for number in flwr.__version__.split(".")[:2]) < (1, 40):
    pytest.skip("node_key serves Flower from 1.40 on", allow_module_level=True)

from fedbn_flwr.compat.node_key import (
    REFUSED,
    RefusedKey,
    private_key,
    public_bytes,
    try_key,
)
from fedbn_flwr.engines.flower_run import BIN, Process, flower_environment, free_port
from fedbn_flwr.lab.deployment import make_certificates
from fedbn_flwr.lab.node_check import Connection
from fedbn_flwr.lab.node_check.connection import check_connection
from tests.support.superlink import superlink


def test_flower_still_has_what_is_used(tmp_path: Path) -> None:
    """An activation uses calls, headers and an error that are Flower internals."""
    make_certificates(tmp_path / "certs", 1)
    key = private_key((tmp_path / "certs/node-1/node.key").read_bytes())
    with superlink() as server:
        with pytest.raises(RefusedKey) as refused:
            try_key(server.address, None, key)
        assert refused.value.code == REFUSED
        server.registered.add(public_bytes(key))
        try_key(server.address, None, key)
        try_key(server.address, None, key)  # the first activation has ended
        server.online.add(public_bytes(key))
        with pytest.raises(RefusedKey):
            try_key(server.address, None, key)
    # An unended activation lasts two of these intervals.
    assert HEARTBEAT_MIN_INTERVAL <= 10


@pytest.fixture
def real(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Start a SuperLink with the key of node 1; yield address and certificates."""
    certs, address = tmp_path / "certs", f"127.0.0.1:{free_port()}"
    make_certificates(certs, 2, ["127.0.0.1"])
    environment = flower_environment(tmp_path / "home")
    (tmp_path / "home").mkdir()
    (tmp_path / "home/config.toml").write_text(
        f'[superlink.here]\naddress = "{address}"\nroot-certificates ='
        f' "{certs}/cli/ca.crt"\n'
    )
    command = [
        "flower-superlink",
        "--host",
        "127.0.0.1",
        "--port",
        address.partition(":")[2],
    ]
    command += [
        "--ssl-ca-certfile",
        f"{certs}/superlink/ca.crt",
        "--ssl-certfile",
        f"{certs}/superlink/server.crt",
    ]
    command += [
        "--ssl-keyfile",
        f"{certs}/superlink/server.key",
        "--enable-supernode-auth",
        "--isolation",
        "process",
    ]
    command += ["--superexec-auth-secret-file", f"{certs}/superlink/superexec.secret"]
    command += ["--database", str(tmp_path / "superlink.db")]
    process = Process(command, environment, tmp_path / "superlink.log")
    try:
        register = [
            str(BIN / "flwr"),
            "supernode",
            "register",
            str(certs / "cli/node-1.pub"),
            "here",
        ]
        for _ in range(100):
            done = subprocess.run(
                register, env=environment, capture_output=True, text=True, check=False
            )
            if not done.returncode:
                break
        assert not done.returncode, done.stdout + done.stderr + process.said()
        yield address, certs
    finally:
        process.end()


@pytest.mark.slow
@pytest.mark.network
def test_a_real_superlink_answers_so(real: tuple[str, Path]) -> None:
    """The key is free again after each check.

    Unknown and online keys get the same answer.
    """
    address, certs = real

    def levels(node: int) -> dict[str, str]:
        folder = certs / f"node-{node}"
        findings = check_connection(
            Connection(address, folder / "ca.crt", folder / "node.key")
        )
        return {finding.code: finding.level for finding in findings}

    assert levels(1) == {"address": "ok", "certificate": "ok", "key": "ok"}
    assert levels(1)["key"] == "ok"
    assert levels(2)["key"] == "fault"
