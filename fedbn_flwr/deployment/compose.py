"""The services of a compose file: the parts that are needed to run them without containers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fedbn_flwr.errors import ConfigError

__all__ = ["NODE", "Service", "read_services", "start_order"]

NODE = ("supernode-", "superexec-clientapp-")
"""Prefixes of the services that each node has; their names end with the node's number."""

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


def read_services(path: Path, variables: Mapping[str, str]) -> dict[str, Service]:
    """Return the services of a compose file by name, with values for its ``${VARIABLES}``.

    Raises:
        ConfigError: the file cannot be read, or has a form that this reader does not know.
    """
    try:
        content = yaml.safe_load(path.read_text())
        services = content["services"]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read as a compose file: {error}") from error
    return {name: _service(name, _interpolate(given, variables)) for name, given in services.items()}


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


def _service(name: str, given: Mapping[str, Any]) -> Service:
    mounts = {}
    for text in given.get("volumes", []):
        source, target, *_ = str(text).split(":")
        mounts[target] = source
    tmpfs = {str(text).split(":")[0]: "" for text in given.get("tmpfs", [])}
    needs = given.get("depends_on", {})
    health = _words(name, "healthcheck.test", given.get("healthcheck", {}).get("test", []))
    return Service(
        name=name,
        command=(
            *_words(name, "entrypoint", given.get("entrypoint", [])),
            *_words(name, "command", given.get("command", [])),
        ),
        environment={key: str(value) for key, value in given.get("environment", {}).items()},
        mounts={**tmpfs, **mounts},
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
    return _VARIABLE.sub(lambda found: _variable(found, variables), value) if isinstance(value, str) else value


def _variable(found: re.Match[str], variables: Mapping[str, str]) -> str:
    dollar, name, operator, text = found.groups()
    if dollar:
        return "$"
    value = variables.get(name)
    absent = value is None or (not value and (operator or "").startswith(":"))
    if absent and (operator or "").endswith("?"):
        raise ConfigError(f"{name} is not set: {text}")
    return text or "" if absent else value or ""
