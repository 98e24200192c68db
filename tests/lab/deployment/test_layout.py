"""The compose reader, and the layout of services on loopback."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from fedbn_flwr.engines.flower_run import Process, running
from fedbn_flwr.errors import ConfigError, EngineError
from fedbn_flwr.lab.deployment import Federation, federation
from fedbn_flwr.lab.deployment import __main__ as commands
from fedbn_flwr.lab.deployment.compose import given_variables, read_services, start_order
from fedbn_flwr.lab.deployment.layout import Layout, loopback_addresses

ROOT = Path(__file__).parents[3]


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(ROOT / "docker-compose.yml", tmp_path, 5, loopback_addresses(5, 0))


def test_a_used_folder_keeps_the_addresses_in_its_certificates(tmp_path: Path) -> None:
    first = Federation(ROOT / "docker-compose.yml", 3, folder=tmp_path)
    assert first.layout.addresses != Federation(ROOT / "docker-compose.yml", 3, folder=tmp_path).layout.addresses
    for k in (1, 2, 3):
        (tmp_path / f"certs/node-{k}").mkdir(parents=True)
    first.layout.save()
    again = Federation(ROOT / "docker-compose.yml", 2, folder=tmp_path)
    assert again.layout.addresses == first.layout.addresses
    again.layout.save()
    as_keyed = Federation(ROOT / "docker-compose.yml", 3, folder=tmp_path)
    assert as_keyed.layout.addresses == first.layout.addresses, "as many as there are keys, not as were up last"
    with pytest.raises(ConfigError, match="3 nodes, but 4"):
        Federation(ROOT / "docker-compose.yml", 4, folder=tmp_path)


def compose(folder: Path, text: str) -> Path:
    path = folder / "compose.yml"
    path.write_text(text)
    return path


VARIABLES = """
services:
  one:
    command: ["$$HOME", "${A}", "${A:-b}", "${EMPTY:-c}", "${EMPTY-d}", "x-${ABSENT:-e f}", "${ABSENT}", "$5"]
"""


def test_variables_as_compose_replaces_them(tmp_path: Path) -> None:
    (service,) = read_services(compose(tmp_path, VARIABLES), {"A": "a", "EMPTY": ""}).values()
    assert service.command == ("$HOME", "a", "a", "c", "", "x-e f", "", "$5")


def test_a_variable_of_the_environment_without_a_value_is_passed_on_if_it_is_set(tmp_path: Path) -> None:
    path = compose(tmp_path, "services: {one: {environment: {A: x, B: null, C: null}}}")
    assert given_variables(path, 3, {"B": "secret", "D": "1"}) == ({"B": "secret"}, [])
    (service,) = read_services(path, {"B": "secret"}).values()
    assert service.environment == {"A": "x", "B": "secret"}


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ('services: {one: {command: ["${NEEDED:?say where}"]}}', "NEEDED .*say where"),
        ('services: {one: {command: ["${NEEDED?say where}"]}}', "NEEDED .*say where"),
        ("services: {one: {command: flwr run}}", "command='flwr run'"),
        ("services: [", "compose.yml"),
        ("volumes: {}", "compose.yml"),
        ("services: {a: {depends_on: {b: {}}}, b: {depends_on: {a: {}}}}", "a -> b -> a"),
    ],
)
def test_a_file_that_cannot_be_followed_is_an_error(text: str, fact: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=fact):
        start_order(read_services(compose(tmp_path, text), {}))


def test_only_hosts_and_paths_are_replaced(layout: Layout, tmp_path: Path) -> None:
    original, placed = read_services(layout.definition, {}), layout.services()
    a, state = layout.addresses, tmp_path / "state"
    assert placed["superlink"].command == (
        "flower-superlink",
        f"--host={a['superlink']}",
        "--port=8000",
        f"--ssl-ca-certfile={tmp_path}/certs/superlink/ca.crt",
        f"--ssl-certfile={tmp_path}/certs/superlink/server.crt",
        f"--ssl-keyfile={tmp_path}/certs/superlink/server.key",
        "--enable-supernode-auth",
        "--isolation=process",
        f"--superexec-auth-secret-file={tmp_path}/certs/superlink/superexec.secret",
        f"--database={state}/superlink/state/superlink.db",
    )
    assert placed["superlink"].environment["FLWR_HOME"] == f"{state}/superlink/state/flwr"
    health = f"{ROOT}/docker/health.py", f"{tmp_path}/certs/superlink/ca.crt", f"https://{a['superlink']}:8000/health"
    assert placed["superlink"].health == ("python", *health)
    channel = placed["cli"].command[-1]
    assert channel == (
        f"fedtan-transport='channel' fedtan-bind='{a['superexec-serverapp']}:9200' "
        f"fedtan-address='{a['superexec-serverapp']}:9200' fedtan-tls-dir='{tmp_path}/certs/channel'"
    )
    for name, service in placed.items():
        if name in original:
            assert len(service.command) == len(original[name].command)
            assert service.needs == original[name].needs


def test_nodes_that_are_not_in_the_file_are_copies_of_its_first(layout: Layout, tmp_path: Path) -> None:
    services = layout.services()
    nodes = [name for name in services if name.startswith("supernode-")]
    assert nodes == [f"supernode-{n}" for n in range(1, 6)]
    for n in range(1, 6):
        node, executor = services[f"supernode-{n}"], services[f"superexec-clientapp-{n}"]
        own = layout.state(executor.name) / "state" / "parts"
        assert (
            node.command[-1]
            == f"partition-id={n - 1} num-partitions=5 state-dir='{own}' allow-paths='{ROOT}/docker/empty'"
        )
        assert f"--auth-supernode-private-key={tmp_path}/certs/node-{n}/node.key" in node.command
        assert f"--host={layout.addresses[node.name]}" in node.command
        assert f"--runtime-api-address={layout.addresses[node.name]}:9094" in executor.command
        assert f"--superexec-auth-secret-file={tmp_path}/certs/clientapp-{n}/superexec.secret" in executor.command
        assert executor.needs == {node.name: "service_healthy"}
    assert len(set(layout.addresses.values())) == len(layout.addresses)


def test_node_configs_instead_of_partitions(layout: Layout) -> None:
    own = replace(layout, num_nodes=2, node_configs=["partition-id=0 data-path='/x'", "partition-id=1"])
    assert [own.services()[f"supernode-{n}"].command[-1] for n in (1, 2)] == list(own.node_configs)
    with pytest.raises(ConfigError, match="1 node configs for 2 nodes"):
        replace(own, node_configs=["partition-id=0"]).services()


def test_variables_of_a_node_mean_the_same_as_under_compose(layout: Layout) -> None:
    """Paths of the config are those that the node's ClientApps see: a mount's, which is the host's NODE_N_DATA."""
    own = {
        "NODE_1_CONFIG": "partition-id=7 data-path='/data/x.npz' state-dir='/state/mine'",
        "NODE_1_DATA": "/srv/one",
        "NODE_4_CONFIG": 'partition-id=8 data-path="/data" data-classes="a,b"',
        "NODE_4_DATA": "./four",
        "NODE_5_CONFIG": "",
    }
    given = replace(layout, variables=own)
    services = given.services()
    configs = [services[f"supernode-{n}"].command[-1] for n in range(1, 6)]
    parts = [given.state(f"superexec-clientapp-{n}") / "state" for n in range(1, 6)]
    assert configs == [
        f"partition-id=7 data-path='/srv/one/x.npz' state-dir='{parts[0]}/mine'",
        f"partition-id=1 num-partitions=5 state-dir='{parts[1]}/parts' allow-paths='{ROOT}/docker/empty'",
        f"partition-id=2 num-partitions=5 state-dir='{parts[2]}/parts' allow-paths='{ROOT}/docker/empty'",
        f'partition-id=8 data-path="{ROOT}/four" data-classes="a,b"',
        f"partition-id=4 num-partitions=5 state-dir='{parts[4]}/parts' allow-paths='{ROOT}/docker/empty'",
    ]
    mounts = [services[f"superexec-clientapp-{n}"].mounts["/data"] for n in range(1, 6)]
    assert mounts == ["/srv/one", *(f"{ROOT}/docker/empty" for n in (2, 3)), f"{ROOT}/four", f"{ROOT}/docker/empty"]


def test_the_home_folder_in_a_mount_is_that_of_the_user(layout: Layout, monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/home/lab")
    given = replace(layout, variables={"NODE_4_DATA": "~/site", "NODE_4_CONFIG": "data-path='/data/x.npz'"}).services()
    assert given["superexec-clientapp-4"].mounts["/data"] == "/home/lab/site"
    assert given["supernode-4"].command[-1] == "data-path='/home/lab/site/x.npz'"


@pytest.mark.parametrize("source", ["data/site", "site", "C"])
def test_a_relative_path_is_not_taken_for_a_volume(layout: Layout, source: str) -> None:
    with pytest.raises(ConfigError, match=f"'{source}' for /data .*'./{source}'"):
        replace(layout, variables={"NODE_4_DATA": source}).services()


def test_paths_of_this_machine_in_a_node_config_stay(layout: Layout) -> None:
    paths = "partition-id=0 a='/tmp/x.npz' b='/srv/data/x' c='/database' d='/app/x' e='/channel/x' f='x/data'"
    given = replace(layout, variables={"NODE_2_CONFIG": paths})
    assert given.services()["supernode-2"].command[-1] == paths
    assert replace(layout, num_nodes=1, node_configs=[paths]).services()["supernode-1"].command[-1] == paths


def test_make_reads_the_variables_of_the_environment_and_of_the_env_file(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "compose.yml").write_text((ROOT / "docker-compose.yml").read_text())
    lines = [
        "# nodes",
        "",
        "NODE_1_DATA=/from/file # a comment",
        "NODE_1_CONFIG=",
        "NODE_5_DATA=/a#b c # another",
        "export NODE_2_DATA='/a b'",
        'NODE_4_CONFIG="partition-id=9" # the fourth # node',
        "NODE_3_CONFIG=partition-id=5 data-path='/data/x'",
        "X=1",
    ]
    (tmp_path / ".env").write_text("\n".join(lines))
    env = {"NODE_1_DATA": "/from/env", "NODE_CPUS": "4", "CERTS": "/keys", "PATH": "/bin"}
    assert given_variables(tmp_path / "compose.yml", 5, env) == (
        {
            "NODE_5_DATA": "/a#b c",
            "NODE_1_DATA": "/from/env",
            "NODE_2_DATA": "/a b",
            "NODE_4_CONFIG": "partition-id=9",
            "NODE_3_CONFIG": "partition-id=5 data-path='/data/x'",
        },
        ["CERTS", "NODE_CPUS"],
    )
    assert given_variables(ROOT / "docker-compose.yml", 3, {}) == ({}, [])
    seen: list[dict[str, str]] = []

    class Recorded:
        def __init__(self, definition: Path, num_nodes: int, *, folder: Path, variables: dict[str, str]) -> None:
            seen.append(variables)

        def __enter__(self) -> None:
            raise SystemExit(0)

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(commands, "Federation", Recorded)
    monkeypatch.setenv("NODE_2_CONFIG", "partition-id=3")
    with pytest.raises(SystemExit):
        commands.supervise(ROOT / "docker-compose.yml", 3, tmp_path)
    assert seen == [{"NODE_2_CONFIG": "partition-id=3"}]


@pytest.mark.parametrize(
    ("line", "value"),
    [
        (r'SERVER_DATA="/a \"b\" \\c"', r'/a "b" \c'),
        ("SERVER_DATA: /srv/s", "/srv/s"),
        ("SERVER_DATA='/a $b'", "/a $b"),
        ("  export SERVER_DATA = /srv/s", "/srv/s"),
        ("A.b-c=1\nSERVER_DATA=/srv/s", "/srv/s"),
        ("PLAIN\nTHEIR_PASSWORD=a$b\nSERVER_DATA=/srv/s", "/srv/s"),
    ],
)
def test_lines_of_the_env_file_mean_what_they_mean_under_compose(line: str, value: str, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text(line)
    path = compose(tmp_path, 'services: {one: {command: ["${SERVER_DATA}"]}}')
    assert given_variables(path, 3, {}) == ({"SERVER_DATA": value}, [])


@pytest.mark.parametrize(
    "line",
    [
        "NODE_1_DATA=${BASE}/secret",
        'NODE_1_DATA="$BASE/secret"',
        r'NODE_1_DATA="secret\t"',
        "NODE_1_DATA='secret' x",
        "NODE_1_DATA='secret",
        "NODE_1_DATA secret",
    ],
)
def test_a_line_of_the_env_file_that_is_not_read_is_named(line: str, tmp_path: Path) -> None:
    """Without its value, which may be a password."""
    (tmp_path / ".env").write_text(f"# nodes\n{line}\n")
    with pytest.raises(ConfigError, match=r"\.env, line 2: 'NODE_1_DATA' cannot be read") as error:
        given_variables(compose(tmp_path, "services: {}"), 3, {})
    assert "secret" not in str(error.value)


def test_set_variables_that_no_service_uses_are_named() -> None:
    given = {
        "NODE_2_DATA": "/b",
        "NODE_3_DATA": "/c",
        "NODE_4_CONFIG": "partition-id=3",
        "NODE_5_DATA": "",
        "NODE1_CONFIG": "partition-id=0",
        "NODE_1_DATAS": "/a",
        "NODE_CPUS": "4",
        "NODE_PATH": "/js",
        "SUPERLINK": "fl.example.org:8000",
        "CHANNEL_ADDRESS": "fl.example.org:9200",
    }
    unused = sorted(given.keys() - {"NODE_2_DATA", "NODE_5_DATA", "NODE_PATH"})
    assert given_variables(ROOT / "docker-compose.yml", 2, given) == ({"NODE_2_DATA": "/b"}, unused)


def test_without_addresses_hosts_stay(layout: Layout) -> None:
    """As in a container or a network namespace with a hosts file."""
    services = replace(layout, addresses={}, prefixes={"superlink": ["ip", "netns", "exec", "x"]}).services()
    assert services["superlink"].command[:6] == ("ip", "netns", "exec", "x", "flower-superlink", "--host=0.0.0.0")
    assert services["superlink"].health[:4] == ("ip", "netns", "exec", "x")
    assert "--superlink=superlink:8000" in services["supernode-1"].command


def test_files_mounted_into_a_folder_are_copied_with_replaced_hosts_and_paths(layout: Layout) -> None:
    layout.prepare()
    text = (layout.state("cli") / "flwr/config.toml").read_text()
    assert f'address = "{layout.addresses["superlink"]}:8000"' in text
    assert f'root-certificates = "{layout.folder}/certs/cli/ca.crt"' in text
    assert (layout.state("superlink") / "state").is_dir()


def test_a_saved_layout_is_loaded(layout: Layout, tmp_path: Path) -> None:
    layout.save()
    assert (tmp_path / "layout.json").stat().st_mode & 0o077 == 0, "variables may be passwords"
    assert Layout.load(tmp_path) == replace(layout, node_configs=[], profiles=["cpu"])
    with pytest.raises(ConfigError, match=r"no federation in .* Start one with `make federation-up`"):
        Layout.load(tmp_path / "elsewhere")


# --- processes -------------------------------------------------------------------------------------------------------

STUBBORN = "trap '' INT TERM; while true; do sleep 0.05; done"
PARENT = f"""
import signal, subprocess, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # xdist's processes and those of a shell's job ignore it
child = subprocess.Popen(["sh", "-c", {STUBBORN!r}])
print(child.pid, flush=True)
time.sleep(60)
"""


def test_a_service_that_keeps_ending_is_restarted_ever_more_rarely(tmp_path: Path, monkeypatch) -> None:
    """As Docker does: 0.1 s, doubled up to a minute; at once after a life of ten seconds."""
    clock, launched = [1000.0], []
    restarting = Federation(ROOT / "docker-compose.yml", 1, folder=tmp_path)
    service = SimpleNamespace(name="one", one_shot=False, command=(), environment={})
    monkeypatch.setattr(restarting, "_services", {"one": service, "two": SimpleNamespace(one_shot=True)})
    monkeypatch.setattr(federation.time, "monotonic", lambda: clock[0])

    def process(*_: object) -> SimpleNamespace:
        launched.append(clock[0])
        return SimpleNamespace(code=None if clock[0] > 5000 else 1)

    monkeypatch.setattr(federation, "Process", process)
    restarting.launch("one")
    monkeypatch.setitem(restarting._processes, "two", SimpleNamespace(code=1))
    while clock[0] < 5000:
        clock[0] += 1
        assert restarting.restart_dead() == (["one"] if launched[-1] == clock[0] else [])
        assert restarting.ended() == ["one"]
    pauses = [after - before for before, after in pairwise(launched)]
    assert pauses[:11] == [2, 2, 2, 2, 3, 5, 8, 14, 27, 53, 61]
    assert set(pauses[10:]) == {61}
    clock[0] += 100
    restarting.restart_dead()
    assert restarting.ended() == []
    restarting.process("one").code = 1
    clock[0] += 10
    assert restarting.restart_dead() == ["one"]


def test_a_service_that_ends_while_the_nodes_come_online_is_an_error_with_its_log(tmp_path: Path, monkeypatch) -> None:
    """A SuperExec that refuses its secret, say: nothing asks it whether it is well."""
    compose = tmp_path / "docker-compose.yml"
    waits = "import pathlib, time\nwhile not pathlib.Path('go').exists(): time.sleep(0.01)\nexit('no secret')"
    service = {"entrypoint": ["python", "-c", waits], "restart": "unless-stopped"}
    compose.write_text(yaml.safe_dump({"services": {"superexec-serverapp": service}}))
    broken = Federation(compose, 1, folder=tmp_path / "net")

    def online(*_: object) -> int:
        (broken.layout.state("superexec-serverapp") / "go").touch()
        while broken.process("superexec-serverapp").code is None:
            time.sleep(0.01)
        return 1

    monkeypatch.setattr(federation, "nodes_online", online)
    with pytest.raises(EngineError, match="superexec-serverapp ended with code 1:\nno secret"):
        broken.start()


@pytest.mark.parametrize("how", ["end", "kill"])
def test_a_process_ends_with_what_it_started(how: str, tmp_path: Path) -> None:
    process = Process([sys.executable, "-c", PARENT], {}, tmp_path / "log")
    while not process.said():
        assert process.code is None
    child = int(process.said())
    assert running(process.pid)
    assert running(child)
    getattr(process, how)()
    assert not running(process.pid)
    deadline = time.monotonic() + 5
    while running(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not running(child)


def test_a_process_that_ends_before_it_answers_is_an_error_with_its_log(tmp_path: Path) -> None:
    process = Process([sys.executable, "-c", "import sys; sys.exit('no such port')"], {}, tmp_path / "log")
    with pytest.raises(EngineError, match=r"ended with code 1 at http://127.0.0.1:1/health:\nno such port"):
        process.wait_healthy("http://127.0.0.1:1/health")


def test_whether_a_process_is_running() -> None:
    assert running(1)
    assert not running(0)
    assert not running(2**22 + 1)
