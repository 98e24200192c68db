"""The services of a compose file without containers: each service has its own loopback address.

Only hosts and paths of the file are replaced: ``superlink:8000`` becomes ``127.x.y.1:8000``, a mounted path becomes the
folder that is mounted. Ports, options, environment, order and health checks stay.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedbn_flwr.atomic_file import write_atomically
from fedbn_flwr.engines.flower_run import flower_environment
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.deployment.compose import NODE, Service, node_number, read_services

__all__ = ["Layout", "loopback_addresses"]


@dataclass(frozen=True)
class Layout:
    """The services of a federation on this machine.

    Attributes:
        definition: the compose file; its folder has the app.
        folder: state, logs and certificates of this federation.
        num_nodes: nodes 1 .. num_nodes. Nodes that are not in the file are copies of its node 1.
        addresses: by service name; other services keep their name and bind address, and are found by their name.
        node_configs: ``--node-config`` of each node; default: its variable ``NODE_N_CONFIG``, else one of
            ``num_nodes`` partitions. Mounts of its ClientApps (``/data``, ``/state``) become the folders mounted there.
        variables: variables of the compose file.
        profiles: the profiles that are on.
        prefixes: words before a service's commands, by name; they decide where and how it runs.
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
        """Return the services that run, and ``cli``, with hosts and paths replaced, by name.

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
        """Return the folder for a service's volumes."""
        return self.folder / "state" / name

    def save(self) -> None:
        """Write the layout to its folder; only the owner can read it, since variables may be passwords."""
        values = {**self.__dict__, "definition": str(self.definition), "folder": str(self.folder)}
        write_atomically(self.folder / "layout.json", json.dumps(values, indent=2) + "\n", 0o600)

    @classmethod
    def load(cls, folder: Path) -> Layout:
        """Return the layout saved in a folder.

        Raises:
            ConfigError: the folder has no layout.
        """
        try:
            values: dict[str, Any] = json.loads((folder / "layout.json").read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"no federation in {str(folder)!r}: {error}. Start one with `make federation-up`."
            ) from error
        return cls(**{**values, "definition": Path(values["definition"]), "folder": Path(values["folder"])})

    def _node_config(self, number: int, default: str) -> str:
        """Return a node's config: as given, that of its variable, or its share of the data as in the file."""
        if self.node_configs:
            return self.node_configs[number - 1]
        share = re.sub(r"(?<=partition-id=)\d+", str(number - 1), default)
        share = re.sub(r"(?<=num-partitions=)\d+", str(self.num_nodes), share)
        return self.variables.get(f"NODE_{number}_CONFIG") or share

    def prepare(self) -> None:
        """Make the folders for volumes, and copy the files mounted into them, with hosts and paths replaced."""
        every = self._chosen()
        for service in every.values():
            state, placed = self.state(service.name), self._placer(service, every)
            state.mkdir(parents=True, exist_ok=True)
            for target, source in service.mounts.items():
                path, original = self._host_path(service, target, source), self.definition.parent / source
                if not path.is_relative_to(state):
                    continue
                if source and original.is_file():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(placed(original.read_text()))
                else:
                    path.mkdir(parents=True, exist_ok=True)

    def _chosen(self) -> dict[str, Service]:
        variables = {"CERTS": str(self.folder / "certs"), **self.variables}
        on, chosen = {*self.profiles, "cli"}, {}
        for name, service in read_services(self.definition, variables, self.num_nodes).items():
            prefix, number, _ = node_number(name)
            if number > self.num_nodes or (service.profiles and not on.intersection(service.profiles)):
                continue
            if number and prefix == "supernode-":
                *command, config = service.command
                service = replace(service, command=(*command, self._node_config(number, config)))
            chosen[name] = service
        return chosen

    def _placer(self, service: Service, every: Mapping[str, Service]) -> Callable[[str], str]:
        """Return the function that replaces hosts and paths in a text of this service, all in one pass."""
        paths = {"/app": str(self.definition.parent)}  # the checkout, in the image
        for each in (*every.values(), service):  # the service's mounts win
            for target, source in each.mounts.items():
                paths[target] = str(self._host_path(each, target, source))
        values = {**paths, **self.addresses, "0.0.0.0": self.addresses.get(service.name, "0.0.0.0")}
        patterns = [_paths_pattern(paths), r"0\.0\.0\.0"]
        if self.addresses:
            patterns.append(rf"(?<![\w.-])(?:{_longest_first(self.addresses)})(?=:\d)")
        pattern = re.compile("|".join(patterns))
        return lambda text: pattern.sub(lambda match: values[match[0]], text)

    def _place(self, service: Service, every: Mapping[str, Service]) -> Service:
        placed = self._placer(service, every)
        prefix = self.prefixes.get(service.name, ())
        command = [placed(word) for word in service.command]
        kind, number, _ = node_number(service.name)
        if number and kind == "supernode-":
            command[-1] = self._as_clients_see(service.command[-1], number, every)
        return replace(
            service,
            command=(*prefix, *command),
            environment={key: placed(value) for key, value in service.environment.items()},
            mounts={target: placed(target) for target in service.mounts},
            health=(*prefix, *(placed(word) for word in service.health)) if service.health else (),
        )

    def _as_clients_see(self, node_config: str, number: int, every: Mapping[str, Service]) -> str:
        """Return a node's config with the paths of this machine: its ClientApps read it, and see their own mounts."""
        paths: dict[str, str] = {}
        for name, service in every.items():
            if node_number(name)[:2] == ("superexec-clientapp-", number):
                mounts = {target: source for target, source in service.mounts.items() if source}
                paths |= {target: str(self._host_path(service, target, mounts[target])) for target in mounts}
        return re.sub(_paths_pattern(paths), lambda match: paths[match[0]], node_config) if paths else node_config

    def _host_path(self, service: Service, target: str, source: str) -> Path:
        """Return the path that replaces a mount: as given, or below the service's state."""
        inside = any(target.startswith(f"{other}/") for other in service.mounts)
        if source.startswith(("/", ".", "~")) and not inside:
            return self.definition.parent / Path(source).expanduser()
        return self.state(service.name) / target.lstrip("/")


def _paths_pattern(paths: Iterable[str]) -> str:
    return rf"(?<![\w./-])(?:{_longest_first(paths)})(?![\w.-])"


def _longest_first(names: Iterable[str]) -> str:
    return "|".join(sorted(map(re.escape, names), key=len, reverse=True))


def loopback_addresses(num_nodes: int, seed: int) -> dict[str, str]:
    """Return an address in 127.0.0.0/8 for each service, from a random block of 256 to keep federations apart."""
    draw = random.Random(seed)
    block = draw.randrange(1, 255), draw.randrange(1, 255)
    names = ["superlink", "superexec-serverapp", "register", "cli"]
    names += [f"{prefix}{k}" for k in range(1, num_nodes + 1) for prefix in NODE]
    return {name: f"127.{block[0]}.{block[1]}.{i}" for i, name in enumerate(names, start=1)}
