"""The clients of one run on a Ray cluster: Flower's actors on all machines, with the data and the files of this one.

Flower's simulation uses a Ray that its process is connected to already; ``cluster_client_app`` connects it.
"""

from __future__ import annotations

import atexit
import functools
import tomllib
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.clientapp import ClientApp

from fedbn_flwr.client import TorchClient, client_app
from fedbn_flwr.client.state_folder import OpenFolder, StateFolder, partition_folder
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.config import STATE_IN_OUT, Config, state_in_out
from fedbn_flwr.lab.runs.cluster import SharedData, cluster
from fedbn_flwr.lab.runs.node import client_fn
from fedbn_flwr.lab.runs.ray_cluster import Machine, machines, on_this_machine
from fedbn_flwr.messages.protocol import Continuity
from fedbn_flwr.training.settings import share_of
from fedbn_flwr.transport.channel_frame import is_loopback

__all__ = ["check_cluster", "check_room", "cluster_client_app"]

_CALLS = 32  # of clients at the same time, to the process that has their files


def check_cluster(config: Config, address: str) -> None:
    """Check, before a run, that it can be done on a cluster; connect to it for the time of the check.

    Args:
        config: the settings, with ``num_clients``.
        address: ``host:port`` of the cluster.

    Raises:
        ConfigError: the machines lack CPUs, or files that the run needs there; or the clients could not reach the
            server.
        EngineError: the cluster does not answer, or its machines have other versions.
    """
    with cluster([config], address) as session:
        check_room(config, machines())
        session.check_files(config)


def check_room(config: Config, machines: list[Machine]) -> None:
    """Raise ConfigError unless the clients have room: CPUs, and for some methods all clients of a round at once."""
    if config.device not in ("auto", "cpu"):
        raise ConfigError(
            f"device={config.device}: clients on a Ray cluster get CPUs and no GPU. Set device=cpu; or run on the "
            "machine with the GPU, without ray-address."
        )
    places = sum(int(machine.cpus // config.torch_threads) for machine in machines)
    has = ", ".join(f"{machine.address} {machine.cpus:g}" for machine in machines)
    if not places:
        raise ConfigError(
            f"torch-threads={config.torch_threads}, and no machine of the cluster has so many CPUs ({has}). Set "
            "torch-threads lower."
        )
    params = config.params()
    if not config.methods().whole.needs_all_at_once:
        return
    clients, bind = share_of(config.fraction_train, config.num_clients), str(getattr(params, "fedtan_bind", ""))
    if places < clients:
        raise ConfigError(
            f"the {clients} clients of a round wait for one another in the channel, and the cluster has room for "
            f"{places} (CPUs: {has}; torch-threads={config.torch_threads}). Set fedtan-transport=messages."
        )
    if len({machine.address for machine in machines}) > 1 and is_loopback(bind):
        raise ConfigError(
            f"fedtan-bind={bind!r} is this machine only, and the cluster has {len(machines)}. Set "
            "fedtan-transport=messages; or fedtan-bind to an address that all reach, with fedtan-tls-dir."
        )


def cluster_client_app(address: str, pyproject: Path) -> ClientApp:
    """Connect this process to a cluster until it ends, and return the ClientApp of a run there.

    The data of the run are shared with all machines. What a client keeps in files (``state-dir=out``) lies on this
    machine, in the run's folder, wherever the client runs.

    Args:
        address: ``host:port`` of the cluster.
        pyproject: the file with the app's settings.

    Raises:
        FedBNError: see ``check_cluster``; or the data are missing.
    """
    import ray

    values = tomllib.loads(pyproject.read_text())["tool"]["flwr"]["app"]["config"]
    config = Config.make(values, complete=True)
    stack = ExitStack()
    atexit.register(stack.close)
    session = stack.enter_context(cluster([config], address, log_to_driver=True, checked=True))
    open_folder: OpenFolder | None = None
    if config.state_dir == STATE_IN_OUT:
        actor: Any = ray.remote(_StateFolderActor)
        options = {"num_cpus": 0, "max_concurrency": _CALLS, "scheduling_strategy": on_this_machine()}
        open_folder = functools.partial(_RemoteFolder, actor.options(**options).remote(), state_in_out(config))
    return client_app(functools.partial(_client, session.share([config]), open_folder))


def _client(shared: SharedData, open_folder: OpenFolder | None, context: Context) -> TorchClient:
    """Return a node's client, on any machine."""
    shared.adopt()
    return client_fn(context, open_folder)


class _StateFolderActor:
    """A Ray actor on the server's machine that reads and writes the files of all clients."""

    def call(self, folder_args: tuple[Path, Continuity, int, str], method: str, args: tuple[Any, ...]) -> Any:
        """Call a method of the state folder that was made with ``folder_args``."""
        return getattr(StateFolder(*folder_args), method)(*args)


class _RemoteFolder:
    """A client's state folder on the server's machine; see ``StateFolder``, whose errors it raises."""

    def __init__(self, actor: Any, root: Path, continuity: Continuity, partition_id: int, fingerprint: str) -> None:
        self.path = partition_folder(root, continuity, partition_id)
        self._actor, self._folder_args = actor, (root, continuity, partition_id, fingerprint)

    def newest(self) -> dict[str, Any] | None:
        """Return the newest content of any run."""
        return self._call("newest")

    def find(self, sha256: str) -> dict[str, Any] | None:
        """Return the content with this hash, and remove what this run wrote after it."""
        return self._call("find", sha256)

    def write(self, content: Mapping[str, Any], server_round: int) -> None:
        """Write the kept state after a round."""
        self._call("write", content, server_round)

    def _call(self, method: str, *args: Any) -> dict[str, Any] | None:
        import ray

        try:
            result: dict[str, Any] | None = ray.get(self._actor.call.remote(self._folder_args, method, args))
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        return result
