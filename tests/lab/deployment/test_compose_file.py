"""``docker-compose.yml``, its overrides and the image, without a docker engine."""

from __future__ import annotations

import json
import re
import runpy
from collections import defaultdict
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from apps.local_federation import make_certificates
from fedbn_flwr.errors import ConfigError
from tests.support.checkout import PYPROJECT, ROOT

_MADE = runpy.run_path(str(ROOT / "docker/compose_nodes.py"), run_name="compose_nodes")
files_for_nodes, write_for_nodes = _MADE["files_for_nodes"], _MADE["write_for_nodes"]
COMPOSE = ROOT / "docker-compose.yml"
OVERRIDES = sorted((ROOT / "docker").glob("machine-*.yml"))
NODES = (1, 2, 3)


class _Loader(yaml.SafeLoader):
    """A loader with Compose's own tags.

    ``!reset`` removes a value, and ``!override`` replaces it.
    """


def _tagged(loader: yaml.SafeLoader, node: yaml.Node):
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    return []


_Loader.add_constructor("!override", _tagged)
_Loader.add_constructor("!reset", _tagged)


def content(path: Path = COMPOSE) -> dict:
    return yaml.load(path.read_text(), _Loader)


def services_with_words() -> dict[str, dict]:
    """Return the services by name.

    They have entrypoint and command as ``words``, and the health check as ``health``.
    """
    services = content()["services"]
    for service in services.values():
        service["words"] = [*service["entrypoint"], *service.get("command", [])]
        service["health"] = service.get("healthcheck", {}).get("test", [])
    return services


def node_number(name: str) -> tuple[str, int]:
    """Return the prefix and number of a node's service, or 0 for other services."""
    match = re.fullmatch(r"(supernode-|superexec-clientapp-)(\d+)(-gpu)?", name)
    return (match[1], int(match[2])) if match else (name, 0)


@pytest.mark.parametrize("path", [COMPOSE, *OVERRIDES], ids=lambda path: path.name)
def test_valid_by_the_compose_specification(path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    # It has the schema of the compose specification.
    package = pytest.importorskip("check_jsonschema")
    vendor = Path(package.__file__).parent / "builtin_schemas/vendor"
    schema = json.loads((vendor / "compose-spec.json").read_text())
    validator = jsonschema.Draft202012Validator(schema)
    assert [*validator.iter_errors({"services": {"a": {"imag": "x"}}})], (
        "the schema is in force"
    )
    assert [*validator.iter_errors(content(path))] == []


def test_the_files_are_those_that_make_compose_writes() -> None:
    """The files are made from node 1's services, so nodes differ only in the number."""
    for path, text in files_for_nodes(ROOT, len(NODES)).items():
        assert path.read_text() == text, path


@pytest.fixture
def project(tmp_path) -> Path:
    """Return a folder with a copy of the files."""
    (tmp_path / "docker").mkdir()
    for path in (COMPOSE, *OVERRIDES):
        (tmp_path / path.relative_to(ROOT)).write_text(path.read_text())
    return tmp_path


def test_the_files_for_five_nodes_and_back(project) -> None:
    """Each node has its own share, and its machine runs only its services.

    A volume of the user stays.
    """
    (project / "docker/machine-node-lab.yml").touch()
    compose = project / "docker-compose.yml"
    before = COMPOSE.read_text().replace("\nvolumes:\n", "\nvolumes:\n  ours:\n")
    compose.write_text(before)
    write_for_nodes(project, 5)
    services = content(compose)["services"]
    own = {name: node_number(name)[1] for name in services if node_number(name)[1]}
    shares = [f"partition-id={n - 1} num-partitions=5" for n in own.values()]
    for name, share in zip(own, shares, strict=True):
        assert name.startswith("superexec") or share in repr(services[name])
    everybody = {"superlink", "superexec-serverapp", "register", *own}
    for path in project.glob("docker/machine-*[r0-9].yml"):
        changes = content(path)["services"].items()
        off = {name for name, own in changes if own.get("profiles") == ["elsewhere"]}
        here = {name for name, n in own.items() if path.stem.endswith(f"-{n}")}
        assert off == (everybody - here if here else {*own}), path
    write_for_nodes(project, 3)
    assert write_for_nodes(project, 3) == []
    assert len([*project.glob("docker/*")]) == len(OVERRIDES) + 1
    assert compose.read_text() == before
    for path in OVERRIDES:
        assert (project / path.relative_to(ROOT)).read_text() == path.read_text()


def test_files_that_cannot_be_repeated_are_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="num_nodes=1"):
        files_for_nodes(ROOT, 1)
    with pytest.raises(ConfigError, match=r"docker-compose\.yml cannot be read"):
        files_for_nodes(tmp_path, 3)
    (tmp_path / "docker-compose.yml").write_text("services: {}\n")
    with pytest.raises(ConfigError, match="'volumes:'"):
        files_for_nodes(tmp_path, 3)


def test_every_service_is_confined() -> None:
    for name, service in content()["services"].items():
        assert service["read_only"] is True, name
        assert re.fullmatch(
            r"\$\{FEDBN_UID:\?[^}]+\}:\$\{FEDBN_GID:\?[^}]+\}", service["user"]
        ), "no default"
        assert service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"], name
        for volume in service["volumes"]:
            if isinstance(volume, dict):  # a folder of the host
                assert volume["read_only"], f"{name}: {volume} can be written"
                assert volume["bind"] == {"create_host_path": False}, (
                    "Docker does not make an absent folder as root"
                )
            else:
                assert volume.endswith("-state:/state"), f"{name}: {volume}"


def test_limits_are_variables_that_a_host_with_one_processor_accepts() -> None:
    """Docker refuses more processors than the host has."""
    limited = set()
    for name, service in content()["services"].items():
        if "deploy" in service:
            limited.add(name)
            limits = service["deploy"]["resources"]["limits"]
            own = {"superlink": "SUPERLINK", "superexec-serverapp": "SERVERAPP"}
            prefix = "SUPERNODE" if name.startswith("supernode-") else "NODE"
            prefix = own.get(name, prefix)
            assert limits["cpus"] == f"${{{prefix}_CPUS:-1}}", name
            assert re.fullmatch(rf"\${{{prefix}_MEMORY:-\d+G}}", limits["memory"]), name
    assert {*content()["services"]} - limited == {"register", "cli"}


def test_a_client_app_reaches_its_supernode_and_the_channel_alone() -> None:
    services, networks = content()["services"], content()["networks"]
    for name, service in services.items():
        prefix, n = node_number(name)
        if prefix == "superexec-clientapp-":
            assert service["networks"] == [f"node-{n}", "channel"], name
            others = set()
            for other, its in services.items():
                reached = {*its["networks"]} & {*service["networks"]}
                if reached and node_number(other)[0] != prefix:
                    others.add(other)
            assert others == {f"supernode-{n}", "superexec-serverapp"}, name
        elif name != "superexec-serverapp":
            assert "channel" not in service["networks"], name
    del networks["federation"]
    assert all(network["internal"] for network in networks.values())
    # The channel listens at the server's name. If the server is in several networks,
    # Docker resolves the name to one of several addresses.
    server = services["superexec-serverapp"]
    assert len(server["networks"]) > 1
    assert server["extra_hosts"] == ["superexec-serverapp:0.0.0.0"]
    assert "fedtan-bind='superexec-serverapp:9200'" in services["cli"]["entrypoint"][-1]


def test_tls_keys_and_secrets_are_on_everywhere() -> None:
    services, secret = services_with_words(), "/certs/superexec.secret"
    for name, service in services.items():
        assert "--insecure" not in service["words"], name
        if name not in ("register", "cli"):
            assert f"--superexec-auth-secret-file={secret}" in service["words"], name
    isolated = "--isolation=process"
    own = {"--enable-supernode-auth", "--database=/state/superlink.db", isolated}
    assert own <= {*services["superlink"]["words"]}
    own = {"--auth-supernode-private-key=/certs/node.key", isolated}
    for n in NODES:
        assert own <= {*services[f"supernode-{n}"]["words"]}
    # Ports are published only on loopback without an override.
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert ports == ["127.0.0.1:8000:8000", "127.0.0.1:9200:9200"]


def test_every_file_a_service_names_is_made_by_make_certs(tmp_path) -> None:
    """Only the commands of a user share a folder, so a key has one reader."""
    make_certificates(tmp_path / "certs", len(NODES))
    readers = defaultdict(set)
    for name, service in services_with_words().items():
        said = " ".join([*service["words"], *service["health"]])
        for volume in service["volumes"]:
            if not isinstance(volume, dict):
                continue
            source, target = volume["source"], volume["target"]
            if target in ("/certs", "/channel"):
                readers[source].add(name.removesuffix("-gpu"))
                folder = Path(source.replace("${CERTS:-./certs}", f"{tmp_path}/certs"))
                for file in re.findall(rf"(?<![\w/]){target}/([\w.]+)", said):
                    assert (folder / file).is_file(), f"{name}: {target}/{file}"
    shared = [names for names in readers.values() if len(names) > 1]
    assert shared == [{"register", "cli"}]


def test_a_service_is_healthy_if_it_and_those_that_it_calls_answer() -> None:
    for name, service in services_with_words().items():
        said = " ".join(service["words"])
        calls = re.findall(r"--(?:superlink|runtime-api-address)=(\S+)", said)
        calls += [f"{name}:{port}" for port in re.findall(r"--port=(\d+)", said)]
        asked = " ".join(service["health"])
        assert {*re.findall("https://(.+?)/health", asked)} == {*calls}, name


def test_every_variable_that_a_page_sets_is_read() -> None:
    files = "".join(path.read_text() for path in (COMPOSE, *OVERRIDES))
    pages = [ROOT / "docs/deployment.md", ROOT / "docker/fleet-proxy.conf"]
    told = files + "".join(path.read_text() for path in pages)
    ours = r"\b((?:FEDBN|NODE_|SUPERLINK|SUPERNODE|SERVER|CHANNEL|CLIENTAPPS)\w*)="
    assert {*re.findall(ours, told)} <= {*re.findall(r"\$\{(\w+)", files)}


def test_the_locks_are_what_make_lock_writes_now() -> None:
    """The locks have hashes and no name of a registry.

    They contain all requirements of pyproject.toml but torch, within their bounds.
    """
    pinned = {}
    for name in ("services", "apps"):
        text = (ROOT / f"docker/{name}.lock").read_text()
        assert "://" not in text
        entries = re.findall(
            r"^([\w.-]+)==(\S+)[^\n]*\n((?:    --hash=sha256:[0-9a-f]{64}[ \\]*\n)+)",
            text,
            re.MULTILINE,
        )
        names = re.findall(r"^[^ #]", text, re.MULTILINE)
        assert len(entries) == len(names), "each has its hashes"
        pinned[name] = {key.lower(): version for key, version, _ in entries}
    assert pinned["services"].items() <= pinned["apps"].items(), "one version of each"
    project = PYPROJECT["project"]
    for text in [*project["dependencies"], *project["optional-dependencies"]["lab"]]:
        one = Requirement(text)
        if one.name not in ("torch", "torchvision"):
            assert pinned["apps"][one.name.lower()] in one.specifier, one
    assert not {"torch", "torchvision", "triton"} & pinned["apps"].keys()
    assert not [name for name in pinned["apps"] if name.startswith("nvidia")]
