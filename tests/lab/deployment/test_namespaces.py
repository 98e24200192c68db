"""Separate machines: network namespaces with addresses and a hosts file, joined by a bridge.

Nothing of ``docker-compose.yml`` is changed but the paths behind the mounts: services bind as they would in
a container and find each other by name.
"""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.deployment import Federation
from fedbn_flwr.lab.files import read_metrics
from fedbn_flwr.lab.runs.run import run

pytestmark = [pytest.mark.network, pytest.mark.slow, pytest.mark.xdist_group("network")]

ROOT = Path(__file__).parents[3]
NODES = 3
SETTINGS = {"num-server-rounds": 3, "local-steps": 3, "batch-size": 16, "num-clients": NODES}
DELAY = ("delay", "50ms", "loss", "1%")
SERVER = ("superlink", "superexec-serverapp", "register", "cli")


def ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


@contextmanager
def machines(names: Sequence[str], slow: Sequence[str] = ()) -> Iterator[dict[str, str]]:
    """Make a namespace for each name; yield name -> address. Skips the test if this is not permitted.

    Args:
        names: of the machines.
        slow: those whose traffic is delayed and lossy; without netem in the kernel they are not, and it is said.
    """
    if shutil.which("ip") is None:
        pytest.skip("no iproute2 here")
    mark = f"fb{secrets.token_hex(2)}"
    addresses = {name: f"10.83.0.{i}" for i, name in enumerate(names, start=1)}
    hub, made = f"{mark}-hub", [f"{mark}-hub", *(f"{mark}-{name}" for name in names)]
    try:
        for space in made:
            try:
                ip("netns", "add", space)
            except OSError as error:
                pytest.skip(f"network namespaces are not permitted here: {error}")
            ip("-n", space, "link", "set", "lo", "up")
        ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        ip("-n", hub, "link", "set", "bridge", "up")
        for i, name in enumerate(names):
            space = f"{mark}-{name}"
            ip("link", "add", f"port{i}", "netns", hub, "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("-n", hub, "link", "set", f"port{i}", "master", "bridge", "up")
            ip("-n", space, "addr", "add", f"{addresses[name]}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
        for name in slow:
            tc = ["tc", "-n", f"{mark}-{name}", "qdisc", "add", "dev", "eth0", "root", "netem", *DELAY]
            if subprocess.run(tc, capture_output=True, check=False).returncode:
                print("no netem in this kernel: neither delay nor loss")
                break
        yield {f"{mark}-{name}": address for name, address in addresses.items()}
    finally:
        for space in made:
            subprocess.run(["ip", "netns", "delete", space], capture_output=True, check=False)
            shutil.rmtree(f"/etc/netns/{space}", ignore_errors=True)


@contextmanager
def federation_on(spaces: Mapping[str, str], services_of: Mapping[str, Sequence[str]]) -> Iterator[Federation]:
    """Run the services of each machine; ``services_of`` has them by the end of the machine's name."""
    where = {s: space for space in spaces for s in services_of[space.split("-", 1)[1]]}
    hosts = "".join(f"{spaces[space]} {service}\n" for service, space in where.items())
    for space in spaces:
        Path(f"/etc/netns/{space}").mkdir(parents=True, exist_ok=True)
        Path(f"/etc/netns/{space}/hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
    prefixes = {service: ["ip", "netns", "exec", space] for service, space in where.items()}
    with Federation(ROOT / "docker-compose.yml", NODES, addresses={}, prefixes=prefixes) as federation:
        yield federation


def run_over(federation: Federation, out: Path, **settings: Any) -> tuple[dict[str, Any], list[float]]:
    """Return the summary and the seconds of the rounds."""
    given = {**SETTINGS, **{key.replace("_", "-"): value for key, value in settings.items()}}
    federation.run({**given, "out": str(out)}).check()
    seconds = [line["seconds"] for line in read_metrics(out / "metrics.jsonl")]
    return json.loads((out / "summary.json").read_text()), seconds


def test_every_service_on_its_own_machine(tmp_path: Path) -> None:
    """Entry points, commands, order and health checks are those of compose; each service has a host name."""
    services = [*SERVER, *(f"{kind}-{n}" for n in range(1, NODES + 1) for kind in ("supernode", "superexec-clientapp"))]
    with machines(services) as spaces, federation_on(spaces, {name: [name] for name in services}) as federation:
        summary, _ = run_over(federation, tmp_path / "out", strategy="fedtan", fedtan_transport="channel")
    expected = run(Config.make({**SETTINGS, "strategy": "fedtan"}), tmp_path / "in-process")
    assert summary["sha256"] == expected["sha256"]


def test_three_machines_with_delay_and_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FedTAN by channel completes; the test prints the time of its rounds and of FedAvg's."""
    services_of: dict[str, Sequence[str]] = {"server": SERVER}
    services_of |= {f"node{n}": [f"supernode-{n}", f"superexec-clientapp-{n}"] for n in range(1, NODES + 1)}
    names = list(services_of)
    with capsys.disabled(), machines(names, slow=names[1:]) as spaces, federation_on(spaces, services_of) as federation:
        average, average_seconds = run_over(federation, tmp_path / "fedavg", strategy="fedavg")
        summary, seconds = run_over(federation, tmp_path / "fedtan", strategy="fedtan", fedtan_transport="channel")
        print(f"\nseconds a round: FedAvg {average_seconds}, FedTAN by channel {seconds}")
    assert (average["rejected"], summary["rejected"]) == (0, 0)
    expected = run(Config.make({**SETTINGS, "strategy": "fedtan"}), tmp_path / "in-process")
    assert summary["sha256"] == expected["sha256"]
