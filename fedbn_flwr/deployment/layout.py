"""Where the services of a compose file run without containers: each at a loopback address of its own.

Only hosts and paths are put in place of the file's: ``superlink:8000`` becomes ``127.x.y.1:8000``, a mounted path the
folder behind it. Ports, options, environment, order and health checks stay.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedbn_flwr.deployment.compose import NODE, Service, read_services
from fedbn_flwr.engines.processes import flower_environment
from fedbn_flwr.errors import ConfigError

__all__ = ["Layout", "loopback_addresses"]


@dataclass(frozen=True)
class Layout:
    """A federation's services in place.

    Attributes:
        definition: the compose file; its folder holds the app.
        folder: state, logs and certificates of this federation.
        num_nodes: nodes 1 .. num_nodes. Those the file does not have are made after its node 1.
        addresses: of services, by name; those without one keep name and bind address, and others find them by name.
        node_configs: ``--node-config`` of each node; default: its partition of as many as there are nodes.
        variables: of the compose file.
        profiles: which profiles are on.
        prefixes: words in front of a service's commands, by name: where and how it runs.
    """

    definition: Path
    folder: Path
    num_nodes: int
    addresses: Mapping[str, str]
    node_configs: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    profiles: Sequence[str] = ("cpu",)
    prefixes: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def services(self) -> dict[str, Service]:
        """Return the services that run and ``cli``, in place, by name.

        Raises:
            ConfigError: the file cannot be read, or node configs do not fit the nodes.
        """
        if self.node_configs and len(self.node_configs) != self.num_nodes:
            raise ConfigError(f"{len(self.node_configs)} node configs for {self.num_nodes} nodes")
        every = self._chosen()
        return {name: self._place(service, every) for name, service in every.items()}

    def environment(self, service: Service) -> dict[str, str]:
        """Return the environment of a service's process."""
        return {**flower_environment(self.folder), **service.environment}

    def state(self, name: str) -> Path:
        """Return the folder behind a service's volumes."""
        return self.folder / "state" / name

    def save(self) -> None:
        """Write the layout to its folder."""
        values = {**self.__dict__, "definition": str(self.definition), "folder": str(self.folder)}
        (self.folder / "layout.json").write_text(json.dumps(values, indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Layout:
        """Read the layout of a folder.

        Raises:
            ConfigError: there is none.
        """
        try:
            values: dict[str, Any] = json.loads((folder / "layout.json").read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"no federation in {str(folder)!r}: {error}. Start one with `make federation-up`."
            ) from error
        return cls(**{**values, "definition": Path(values["definition"]), "folder": Path(values["folder"])})

    def _nodes(self, found: Mapping[str, Service]) -> dict[str, Service]:
        """Return the services with as many nodes as there shall be."""
        result = {name: service for name, service in found.items() if not name.startswith(NODE)}
        for name, first in found.items():
            prefix, number, variant = _node_name(name)
            if number != 1:
                continue
            for k in range(1, self.num_nodes + 1):
                service = found.get(f"{prefix}{k}{variant}") or _renumbered(first, k)
                if prefix == "supernode-":
                    *command, told = service.command
                    told = self.node_configs[k - 1] if self.node_configs else self._share(told, k - 1)
                    service = replace(service, command=(*command, told))
                result[service.name] = service
        return result

    def _share(self, node_config: str, partition_id: int) -> str:
        """Return a node's config with its partition of as many as there are nodes."""
        own = re.sub(r"(?<=partition-id=)\d+", str(partition_id), node_config)
        return re.sub(r"(?<=num-partitions=)\d+", str(self.num_nodes), own)

    def prepare(self) -> None:
        """Make the folders behind volumes, and copies, with their text in place, of files mounted into them."""
        every = self._chosen()
        for service in every.values():
            placed = self._placer(service, every)
            self.state(service.name).mkdir(parents=True, exist_ok=True)
            for target, source in service.mounts.items():
                path = self._host_path(service, target, source)
                if path.is_relative_to(self.state(service.name)):
                    original = self.definition.parent / source
                    if source and original.is_file():
                        path.parent.mkdir(parents=True, exist_ok=True)
                        path.write_text(placed(original.read_text()))
                    else:
                        path.mkdir(parents=True, exist_ok=True)

    def _chosen(self) -> dict[str, Service]:
        variables = {"CERTS": str(self.folder / "certs"), **self.variables}
        found = self._nodes(read_services(self.definition, variables))
        on = {*self.profiles, "cli"}
        return {name: s for name, s in found.items() if not s.profiles or on.intersection(s.profiles)}

    def _placer(self, service: Service, every: Mapping[str, Service]) -> Callable[[str], str]:
        """Return the function that puts a text of this service in place, all of it in one pass."""
        mounts = [(s, *mount) for s in (*every.values(), service) for mount in s.mounts.items()]  # its own count last
        paths = {target: str(self._host_path(s, target, source)) for s, target, source in mounts}
        paths.setdefault("/app", str(self.definition.parent))  # the checkout, in the image
        values = {**paths, **self.addresses, "0.0.0.0": self.addresses.get(service.name, "0.0.0.0")}
        inside, hosts = (sorted(map(re.escape, names), key=len, reverse=True) for names in (paths, self.addresses))
        patterns = [rf"(?<![\w./-])(?:{'|'.join(inside)})(?![\w.-])", r"0\.0\.0\.0"]
        if hosts:
            patterns.append(rf"(?<![\w.-])(?:{'|'.join(hosts)})(?=:\d)")
        pattern = re.compile("|".join(patterns))
        return lambda text: pattern.sub(lambda found: values[found[0]], text)

    def _place(self, service: Service, every: Mapping[str, Service]) -> Service:
        placed = self._placer(service, every)
        prefix = self.prefixes.get(service.name, ())
        return replace(
            service,
            command=(*prefix, *(placed(word) for word in service.command)),
            environment={key: placed(value) for key, value in service.environment.items()},
            mounts={target: placed(target) for target in service.mounts},
            health=(*prefix, *(placed(word) for word in service.health)) if service.health else (),
        )

    def _host_path(self, service: Service, target: str, source: str) -> Path:
        """Return the path that stands for a mount: as given, or below the service's state."""
        inside = any(target.startswith(f"{other}/") for other in service.mounts)
        if source.startswith(("/", ".")) and not inside:
            return self.definition.parent / source
        return self.state(service.name) / target.lstrip("/")


def loopback_addresses(num_nodes: int, seed: int) -> dict[str, str]:
    """Return an address of 127.0.0.0/8 for each service, in a random block of 256 so that federations do not meet."""
    block = np.random.default_rng(seed).integers(1, 255, 2)
    names = ["superlink", "superexec-serverapp", "register", "cli"]
    names += [f"{prefix}{k}" for k in range(1, num_nodes + 1) for prefix in NODE]
    return {name: f"127.{block[0]}.{block[1]}.{i}" for i, name in enumerate(names, start=1)}


def _node_name(name: str) -> tuple[str, int, str]:
    """Return prefix, number and variant of a node's service; number 0 where it is none."""
    found = re.fullmatch(rf"({'|'.join(NODE)})(\d+)(-\w+)?", name)
    return (found[1], int(found[2]), found[3] or "") if found else (name, 0, "")


def _renumbered(first: Service, number: int) -> Service:
    """Return node 1's service as that of another node."""

    def own(text: str) -> str:
        return re.sub(r"(supernode|clientapp|node)-1\b", rf"\1-{number}", text)

    return replace(
        first,
        name=own(first.name),
        command=tuple(own(word) for word in first.command),
        mounts={target: own(source) for target, source in first.mounts.items()},
        needs={own(name): how for name, how in first.needs.items()},
        health=tuple(own(word) for word in first.health),
    )
