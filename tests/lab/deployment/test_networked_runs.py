"""A SuperLink and three SuperNodes as processes, with TLS, node keys and secrets: same bits as in process."""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedbn_flwr.engines.flower_run import Process, running
from fedbn_flwr.lab.deployment import Federation, make_certificates

pytestmark = [pytest.mark.network, pytest.mark.slow, pytest.mark.xdist_group("network")]


@pytest.mark.parametrize(
    ("strategy", "own"),
    [
        ("fedbn", {}),
        ("fixbn", {}),
        ("fedtan", {"fedtan_transport": "messages"}),
        ("fbn", {}),
        ("hbn", {"share_alpha": True}),
        ("bn-scaffold", {}),
        ("fedavg", {"feature_norm": True, "eval_on": "global,global-test-bn", "test_bn": "mix"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_bits_are_those_of_the_run_in_process(strategy, own, networked, in_process, same_run) -> None:
    ours, theirs = networked(strategy=strategy, **own), in_process(strategy=strategy, **own)
    same_run(ours, theirs)
    assert ours["rejected"] == 0


def test_fedtan_by_channel_among_intruders(
    federation: Federation, networked, in_process, same_run, tmp_path: Path
) -> None:
    """Each intruder is refused with the right message; the run has the same bits as in process."""
    with intruders(federation, tmp_path) as logs:
        ours = networked(strategy="fedtan", fedtan_transport="channel")
    theirs = in_process(strategy="fedtan")
    same_run(ours, theirs)
    assert ours["rejected"] == 0
    for name, path in logs.items():
        assert REFUSED[name] in path.read_text(), name
        assert "Start `flwr-" not in path.read_text(), f"{name}: it was given work"
    assert (
        '"POST /v1/runtime/acquire-task HTTP/1.1" 401' in (federation.layout.folder / "logs/superlink.log").read_text()
    )


REFUSED = {
    "a key that is not registered": "[code: 2004] Failed to activate SuperNode.",
    "the key of a node that is online": "[code: 2004] Failed to activate SuperNode.",
    "no key": "[code: 2001]",
    "a CA of its own": "CERTIFICATE_VERIFY_FAILED",
    # A SuperExec that is refused (401) says no more than that it ends.
    "a SuperExec without the secret": "SuperExec terminated",
    "a SuperExec with another node's secret": "SuperExec terminated",
}


@contextmanager
def intruders(federation: Federation, folder: Path) -> Iterator[dict[str, Path]]:
    """Let the intruders try during the block; yield the log of each."""
    layout = federation.layout
    certs, services = layout.folder / "certs", layout.services()
    make_certificates(folder / "foreign", 1)
    block = layout.addresses["superlink"].rpartition(".")[0]
    superlink, node = layout.addresses["superlink"], layout.addresses["supernode-1"]
    key = "--auth-supernode-private-key="

    def supernode(number: int, **changed: str) -> list[str]:
        """Node 1's command at another address with changed options; an empty value leaves an option out."""
        options = {f"--{option.replace('_', '-')}=": value for option, value in changed.items()}
        kept = [word for word in services["supernode-1"].command if not word.startswith(tuple(options))]
        kept += [f"{option}{value}" for option, value in options.items() if value]
        return [f"--host={block}.{number}" if word.startswith("--host=") else word for word in kept]

    def superexec(address: str, *more: str) -> list[str]:
        return ["flower-superexec", f"--runtime-api-address={address}", f"--root-certificates={certs}/ca/ca.crt", *more]

    commands = {
        "a key that is not registered": supernode(201, auth_supernode_private_key=f"{folder}/foreign/node-1/node.key"),
        "the key of a node that is online": supernode(202, auth_supernode_private_key=f"{certs}/node-1/node.key"),
        "no key": supernode(203, auth_supernode_private_key=""),
        "a CA of its own": supernode(204, root_certificates=f"{folder}/foreign/ca/ca.crt"),
        "a SuperExec without the secret": superexec(f"{superlink}:8000"),
        "a SuperExec with another node's secret": superexec(
            f"{node}:9094", f"--superexec-auth-secret-file={certs}/clientapp-2/superexec.secret"
        ),
    }
    assert commands.keys() == REFUSED.keys()
    assert not any(word.startswith(key) for word in commands["no key"])
    environment = {**layout.environment(services["cli"]), "FLWR_HOME": str(folder / "intruders")}
    logs = {name: folder / f"intruder-{i}.log" for i, name in enumerate(commands)}
    started = [Process(command, environment, logs[name], folder) for name, command in commands.items()]
    over = threading.Event()
    doors = [(superlink, 8000), (node, 9094), (layout.addresses["superexec-serverapp"], 9200)]
    noise = [threading.Thread(target=send_garbage, args=(*door, over)) for door in doors]
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
