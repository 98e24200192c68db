"""A SuperLink and three SuperNodes as processes give the bits in process.

They use TLS, node keys and secrets.
"""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from apps.flower_processes import Process, running
from apps.local_federation import LocalFederation
from fedbn_flwr.lab.deployment import make_certificates
from tests.support.network import channel_port

pytestmark = [pytest.mark.network, pytest.mark.slow, pytest.mark.xdist_group("network")]


@pytest.mark.parametrize(
    ("strategy", "own"),
    [
        ("fedbn", {}),
        ("fixbn", {}),
        ("fedtan", {"fedtan_transport": "messages"}),
        (
            "fedavg",
            {
                "feature_norm": "sqrt-d",
                "eval_on": "global,global-test-bn",
                "test_bn": "mix",
            },
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_bits_are_those_of_the_run_in_process(
    strategy, own, networked, in_process, same_run
) -> None:
    ours, theirs = (
        networked(strategy=strategy, **own),
        in_process(strategy=strategy, **own),
    )
    same_run(ours, theirs)
    assert ours["rejected"] == 0


def test_fedtan_by_channel_among_intruders(
    federation: LocalFederation, networked, in_process, same_run, tmp_path: Path
) -> None:
    """Each intruder is refused by its message, and the run has in-process bits."""
    with intruders(federation, tmp_path) as logs:
        ours = networked(strategy="fedtan", fedtan_transport="channel")
    theirs = in_process(strategy="fedtan")
    same_run(ours, theirs)
    assert ours["rejected"] == 0
    for name, path in logs.items():
        assert REFUSED[name] in path.read_text(), name
        assert "Start `flwr-" not in path.read_text(), f"{name}: it was given work"
    log = (federation.folder / "superlink.log").read_text()
    assert '"POST /v1/runtime/acquire-task HTTP/1.1" 401' in log


REFUSED = {
    "a key that is not registered": "[code: 2004] Failed to activate SuperNode.",
    "the key of a node that is online": "[code: 2004] Failed to activate SuperNode.",
    "no key": "[code: 2001]",
    "a CA of its own": "CERTIFICATE_VERIFY_FAILED",
    # A refused SuperExec (401) only reports that it ends.
    "a SuperExec without the secret": "SuperExec terminated",
    "a SuperExec with another node's secret": "SuperExec terminated",
}


@contextmanager
def intruders(federation: LocalFederation, folder: Path) -> Iterator[dict[str, Path]]:
    """Let the intruders try during the block, and yield the log of each."""
    certs = federation.certs
    make_certificates(folder / "foreign", 1)
    superlink, node = federation.port, federation.port + 1
    key = "--auth-supernode-private-key="

    def supernode(number: int, **changed: str) -> list[str]:
        """Return node 1's command with another port and changed options.

        An empty value removes an option.
        """
        options = {
            f"--{option.replace('_', '-')}=": value for option, value in changed.items()
        }
        kept = [
            word
            for word in federation.commands["supernode-1"]
            if not word.startswith(tuple(options))
        ]
        kept += [f"{option}{value}" for option, value in options.items() if value]
        port = f"--port={superlink + number}"
        return [port if word.startswith("--port=") else word for word in kept]

    def superexec(port: int, *more: str) -> list[str]:
        address = f"--runtime-api-address=127.0.0.1:{port}"
        return [
            "flower-superexec",
            address,
            f"--root-certificates={certs}/ca/ca.crt",
            *more,
        ]

    commands = {
        "a key that is not registered": supernode(
            21, auth_supernode_private_key=f"{folder}/foreign/node-1/node.key"
        ),
        "the key of a node that is online": supernode(
            22, auth_supernode_private_key=f"{certs}/node-1/node.key"
        ),
        "no key": supernode(23, auth_supernode_private_key=""),
        "a CA of its own": supernode(
            24, root_certificates=f"{folder}/foreign/ca/ca.crt"
        ),
        "a SuperExec without the secret": superexec(superlink),
        "a SuperExec with another node's secret": superexec(
            node, f"--superexec-auth-secret-file={certs}/clientapp-2/superexec.secret"
        ),
    }
    assert commands.keys() == REFUSED.keys()
    assert not any(word.startswith(key) for word in commands["no key"])
    environment = {**federation.environment, "FLWR_HOME": str(folder / "intruders")}
    logs = {name: folder / f"intruder-{i}.log" for i, name in enumerate(commands)}
    started = [
        Process(command, environment, logs[name], folder)
        for name, command in commands.items()
    ]
    over = threading.Event()
    ports = (superlink, node, channel_port(federation))
    noise = [
        threading.Thread(target=send_garbage, args=("127.0.0.1", port, over))
        for port in ports
    ]
    for thread in noise:
        thread.start()
    try:
        yield logs
        assert not any(running(process.pid) for process in started), "all gave up"
    finally:
        over.set()
        for thread in noise:
            thread.join()
        for process in started:
            process.end()


def send_garbage(host: str, port: int, over: threading.Event) -> None:
    """Send random bytes to a port, bare and inside TLS, until the event is set."""
    trust = ssl.create_default_context()
    trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
    wrap = False
    while not over.wait(0.5):
        wrap = not wrap
        try:
            raw = socket.create_connection((host, port), timeout=2)
            with trust.wrap_socket(raw) if wrap else raw as door:
                door.sendall(os.urandom(1 << 16))
        except OSError:  # nobody there yet, or it hung up
            continue
