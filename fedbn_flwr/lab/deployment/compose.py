"""The services of a compose file: the parts that are needed to run them without containers."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fedbn_flwr.errors import ConfigError

__all__ = ["NODE", "Service", "given_variables", "node_number", "read_services", "renumbered", "start_order"]

NODE = ("supernode-", "superexec-clientapp-")
"""Prefixes of the services that each node has; their names end with the node's number."""

_USED = ("entrypoint", "command", "environment", "volumes", "healthcheck")
_READ = (*_USED, "tmpfs", "depends_on", "profiles", "restart")  # the rest is for containers
_ENV_LINE = re.compile(  # NAME="value", NAME='value' or NAME=value, also with a colon, and perhaps a comment
    r"""(?:export\s+)?([\w.-]+)\s*[=:]\s*"""
    r"""(?:"((?:[^"\\$]|\\["\\])*)"|'([^']*)'|((?![\s"'#])(?:(?!\s\#)[^$])*)|)\s*(?:\#.*)?"""
)
_OF_A_NODE = re.compile(r"NODE_?\d+\w*")
_OWNER = {"FEDBN_UID", "FEDBN_GID"}  # whose the keys are, which `make certs` writes into .env
_NEED_CONTAINERS = {"CERTS", "SUPERLINK", "CHANNEL_ADDRESS"}  # keys and addresses of other machines
_VARIABLE = re.compile(r"\$(?:(\$)|\{(\w+)(?:(:?[-?])([^}]*))?\})")


@dataclass(frozen=True)
class Service:
    """One service.

    Attributes:
        name: its name, also its host name.
        command: entrypoint and command.
        environment: its environment variables.
        mounts: host path or named volume for each path in the container; "" for a tmpfs.
        needs: services that start before it, and their condition (``service_healthy``, ...).
        health: the command that exits with 0 if the service answers; () if there is none.
        profiles: it starts if one of these profiles is on; () = always.
        restart: its restart policy.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    mounts: Mapping[str, str]
    needs: Mapping[str, str]
    health: tuple[str, ...]
    profiles: tuple[str, ...]
    restart: str

    @property
    def one_shot(self) -> bool:
        """Whether the service ends by itself."""
        return not self.restart.startswith(("always", "unless-stopped"))


def read_services(path: Path, variables: Mapping[str, str], num_nodes: int = 0) -> dict[str, Service]:
    """Return the services of a compose file by name, with values for its ``${VARIABLES}``.

    Args:
        path: the compose file.
        variables: the values.
        num_nodes: nodes up to this number that the file lacks are copies of its node 1, with their own variables
            (``NODE_4_DATA`` for ``NODE_1_DATA``).

    Raises:
        ConfigError: the file cannot be read, has a form that this reader does not know, or mounts a volume that it does
            not declare.
    """
    given, volumes = _read(path, num_nodes)
    services = {
        name: _service(name, _interpolate({key: parts[key] for key in _READ if key in parts}, variables), variables)
        for name, parts in given.items()
    }
    for service in services.values():
        for target, source in service.mounts.items():
            if source and not source.startswith((".", "/", "~")) and source not in volumes:
                raise ConfigError(
                    f"service {service.name!r}: {source!r} for {target} is no volume of {path}. Write './{source}' or "
                    "an absolute path for a folder."
                )
    return services


def given_variables(path: Path, num_nodes: int, environment: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the variables that are set and used, and the names of those that are set and not used.

    As under Compose, values come from the environment, else from the file ``.env`` beside the compose file. Not used
    is what needs containers (among it ``CERTS``, ``SUPERLINK`` and ``CHANNEL_ADDRESS``: keys and addresses are the
    federation's own), and what is called like a variable of a node, but is none of nodes 1 to ``num_nodes``.

    Raises:
        ConfigError: as ``read_services``, or a line of ``.env`` cannot be read.
    """
    services, _ = _read(path, num_nodes)
    known = _names(services.values()) - _OWNER
    values = {**_env_file(path.parent / ".env", known), **environment}
    running = [service for name, service in services.items() if node_number(name)[1] <= num_nodes]
    used = _names({key: service[key] for key in _USED if key in service} for service in running) - _NEED_CONTAINERS
    given = {name for name in known.union(filter(_OF_A_NODE.fullmatch, values)) if values.get(name)}
    return {name: values[name] for name in sorted(given & used)}, sorted(given - used)


def _env_file(path: Path, known: Collection[str]) -> dict[str, str]:
    """Return the variables of an ``.env`` file as Compose reads it; nothing if there is no file.

    Raises:
        ConfigError: the line of a ``known`` variable, or of one called like a node's, has a form that this reader does
            not know; the message leaves out its value, as it may be a password.
    """
    values = {}
    for number, line in enumerate(path.read_text().splitlines() if path.is_file() else [], start=1):
        text = line.strip()
        name = re.split(r"[=:\s]", text.removeprefix("export").strip(), maxsplit=1)[0]
        if match := _ENV_LINE.fullmatch(text):
            key, double, single, plain = match.groups()
            values[key] = re.sub(r"\\(.)", r"\1", double) if double else single or (plain or "").strip()
        # A name alone is that of the environment; other names are other programs'.
        elif name != text and (name in known or _OF_A_NODE.fullmatch(name)):
            raise ConfigError(
                f"{path}, line {number}: {name!r} cannot be read. Write NAME=value, NAME='value' or NAME=\"value\" on "
                "one line. A $ is read between single quotes only: values of other variables are not filled in."
            )
    return values


def node_number(name: str) -> tuple[str, int, str]:
    """Return prefix, number and variant of a node's service; number 0 for other services."""
    match = re.fullmatch(rf"({'|'.join(NODE)})(\d+)(-\w+)?", name)
    return (match[1], int(match[2]), match[3] or "") if match else (name, 0, "")


def _read(path: Path, num_nodes: int) -> tuple[dict[str, Any], set[str]]:
    """Return services and names of volumes as they are in the file, and the copies of node 1."""
    try:
        content = yaml.safe_load(path.read_text())
        services, volumes = dict(content["services"]), set(content.get("volumes") or ())
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read as a compose file: {error}") from error
    numbers = range(2, num_nodes + 1)
    for name, service in list(services.items()):
        if node_number(name)[1] == 1:
            for k in numbers:
                services.setdefault(renumbered(name, k), json.loads(renumbered(json.dumps(service, default=str), k)))
    return services, volumes.union(renumbered(name, k) for name in volumes for k in numbers)


def renumbered(text: str, number: int) -> str:
    """Return text of node 1's part of the file with the names of another node."""
    return re.sub(r"(supernode|clientapp|node)-1\b", rf"\1-{number}", text).replace("NODE_1_", f"NODE_{number}_")


def _names(services: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the names of all variables in services, and of those that they pass on from the environment."""
    names = set[str]()
    for service in services:
        names |= {match[2] for match in _VARIABLE.finditer(json.dumps(service, default=str)) if match[2]}
        names |= {name for name, value in service.get("environment", {}).items() if value is None}
    return names


def start_order(services: Mapping[str, Service]) -> list[Service]:
    """Return the services, each after those that it needs; needed services that are not given are left out."""
    ordered: dict[str, Service] = {}

    def add(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            raise ConfigError(f"services need each other: {' -> '.join([*path, name])}")
        if name in services and name not in ordered:
            for needed in services[name].needs:
                add(needed, (*path, name))
            ordered[name] = services[name]

    for name in services:
        add(name, ())
    return list(ordered.values())


def _service(name: str, given: Mapping[str, Any], variables: Mapping[str, str]) -> Service:
    mounts = {str(text).split(":")[0]: "" for text in given.get("tmpfs", [])}
    for volume in given.get("volumes", []):
        source, target, *_ = (volume["source"], volume["target"]) if isinstance(volume, dict) else volume.split(":")
        mounts[target] = source
    environment = dict(given.get("environment", {}))
    for key in [key for key, value in environment.items() if value is None]:
        environment[key] = variables.get(key)
    needs = given.get("depends_on", {})
    health = _words(name, "healthcheck.test", given.get("healthcheck", {}).get("test", []))
    return Service(
        name=name,
        command=_words(name, "entrypoint", given.get("entrypoint", []))
        + _words(name, "command", given.get("command", [])),
        environment={key: str(value) for key, value in environment.items() if value is not None},
        mounts=mounts,
        needs={other: str(how.get("condition", "service_started")) for other, how in needs.items()},
        health=health[1:],  # after CMD
        profiles=tuple(given.get("profiles", ())),
        restart=str(given.get("restart", "no")),
    )


def _words(name: str, key: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ConfigError(f"service {name!r}: {key}={value!r} must be a list of words")
    return tuple(str(word) for word in value)


def _interpolate(value: Any, variables: Mapping[str, str]) -> Any:
    """Replace ``$$``, ``${NAME}``, ``${NAME:-default}``, ``${NAME-default}`` and ``${NAME:?message}`` in all text."""
    if isinstance(value, dict):
        return {key: _interpolate(item, variables) for key, item in value.items()}
    if isinstance(value, list):
        return [_interpolate(item, variables) for item in value]
    return _VARIABLE.sub(lambda match: _variable(match, variables), value) if isinstance(value, str) else value


def _variable(match: re.Match[str], variables: Mapping[str, str]) -> str:
    dollar, name, operator, text = match.groups()
    if dollar:
        return "$"
    value = variables.get(name)
    absent = value is None or (not value and (operator or "").startswith(":"))
    if absent and (operator or "").endswith("?"):
        raise ConfigError(f"{name} is not set: {text}")
    return text or "" if absent else value or ""
