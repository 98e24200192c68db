"""Runs on a Ray cluster that is already running.

The machines of a cluster have the same versions of Python, Ray, Flower and torch, and
share the disk with the data and the output folder. The job brings this package and the
user's modules to them, by Ray's ``runtime_env``.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import socket
import sys
import sysconfig
import threading
import time
import tomllib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from fedbn_flwr.errors import ConfigError, EngineError, needs_package
from fedbn_flwr.lab import own_code
from fedbn_flwr.lab.config import STATE_IN_OUT, Config, data_of, method_of
from fedbn_flwr.lab.data import KINDS
from fedbn_flwr.lab.models.own import is_own, own_module
from fedbn_flwr.training.settings import share_of
from fedbn_flwr.transport.channel_frame import is_loopback

_ANSWER_SECONDS = 5.0  # to connect to the address; ``ray.init`` would wait for minutes
_WORK_SECONDS = 120.0  # for a machine to get the code and start Python
_PACKAGE = Path(__file__).parents[2]


@contextmanager
def cluster(
    configs: Sequence[Config], address: str, *, log_to_driver: bool = False
) -> Iterator[None]:
    """Connect this process to a Ray cluster in the block, for runs of these configs.

    Args:
        configs: the settings. The user's modules in them go to the machines of the
            cluster.
        address: ``host:port`` of a running cluster that includes this machine.
        log_to_driver: print the output of the tasks.
    """
    with needs_package("ray", "runs on a cluster"):
        import ray
    if ray.is_initialized():
        raise EngineError(
            "this process is connected to Ray already. Call ray.shutdown() first."
        )
    _check_address(address)
    modules = [str(path) for path in (_PACKAGE, *user_modules(configs))]
    runtime = {"env_vars": {"FLWR_TELEMETRY_ENABLED": "0"}, "py_modules": modules}
    _init(
        address=address,
        runtime_env=runtime,
        log_to_driver=log_to_driver,
        logging_level=logging.ERROR,
    )
    try:
        yield
    finally:
        ray.shutdown()


def user_modules(configs: Sequence[Config]) -> list[Path]:
    """Return the paths of the user's modules that the configs need.

    These are the modules in ``model``, ``dataset`` and ``loop``, and imported modules in
    the same folders.
    """
    # Find the modules that the configs name.
    named = []
    for config in configs:
        if is_own(config.model):
            named.append(own_module(config.model))
        if data_of(config).by_function:
            named.append(own_code.own_module("dataset", config.dataset, KINDS))
        if config.loop:
            named.append(own_code.own_module("loop", config.loop))

    # Find the folders of these modules. Leave out installed packages, because each
    # machine of a cluster has them.
    paths = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    installed = [Path(path).resolve() for path in paths]
    own = set()
    for module in named:
        location = _location(module.__name__.partition(".")[0])
        if location is None:
            continue
        home = location.parent
        if not any(home.is_relative_to(folder) for folder in installed):
            own.add(home)

    # Find the modules that were imported from these folders.
    found = set()
    for name in list(sys.modules):
        if "." in name or name == "__main__":
            continue
        location = _location(name)
        if location and location.parent in own:
            found.add(location)
    return sorted(found)


def _location(module: str) -> Path | None:
    """Return the file of an imported module or the folder of an imported package.

    It is None if the module is not imported, or has no file.
    """
    imported = sys.modules.get(module)
    paths = [*getattr(imported, "__path__", []), getattr(imported, "__file__", None)]
    if not paths[0]:
        return None
    return Path(paths[0]).resolve()


def check_cluster(config: Config, out: Path, address: str) -> None:
    """Check that a run's clients have room on a cluster, and share their files."""
    with cluster([config], address):
        machines = []
        for node in _nodes():
            cpus = node["Resources"].get("CPU", 0.0)
            machines.append((node["NodeManagerAddress"], cpus))
        check_room(config, machines)
        if config.state_dir == STATE_IN_OUT:
            check_shared("state-dir", out)
        elif config.state_dir:
            check_shared("state-dir", Path(config.state_dir))


def check_room(config: Config, machines: Sequence[tuple[str, float]]) -> None:
    """Check that a cluster can run clients that wait for one another at the same time.

    All these clients must have room at once, and must reach the server's channel.

    Args:
        config: the settings.
        machines: address and number of CPUs of each machine.
    """
    if not method_of(config).methods.whole.needs_all_at_once:
        return
    clients = share_of(config.fraction_train, config.num_clients)
    places = sum(int(cpus // config.torch_threads) for _, cpus in machines)
    if places < clients:
        raise ConfigError(
            f"the {clients} clients of a round wait for one another in the channel, but"
            f" the cluster has room for {places}"
            f" (torch-threads={config.torch_threads}). Set fedtan-transport=messages."
        )
    bind = str(getattr(method_of(config).params, "fedtan_bind", ""))
    if len({address for address, _ in machines}) > 1 and is_loopback(bind):
        raise ConfigError(
            f"fedtan-bind={bind!r} is reachable only on this machine. Set"
            " fedtan-transport=messages, or set fedtan-bind to an address that all"
            " machines reach, with fedtan-tls-dir."
        )


def check_shared(setting: str, folder: Path) -> None:
    """Check that all machines of the cluster share a folder with this machine.

    The folder is made if it is absent.
    """
    # Import here, because the package also works without Ray.
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # Write a file with a new name, and let each machine look for it.
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder.absolute() / f".{os.getpid()}.{time.time_ns()}"
    mark.touch()
    task, nodes = ray.remote(num_cpus=0)(Path.exists), _nodes()
    on = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
    try:
        there = ray.get(
            [task.options(scheduling_strategy=place).remote(mark) for place in on],
            timeout=_WORK_SECONDS,
        )
    except ray.exceptions.RayError as error:  # also a timeout
        raise EngineError(
            f"a machine of the cluster failed at its first task: {error}"
        ) from error
    finally:
        mark.unlink()

    without = []
    for node, seen in zip(nodes, there, strict=True):
        if not seen:
            without.append(node["NodeManagerAddress"])
    if without:
        raise ConfigError(
            f"{setting}={str(folder)!r} is not one folder for all machines:"
            f" {', '.join(without)} cannot read the files that this machine writes"
            " there. Choose a folder that all machines share."
        )


def join_cluster(address: str, pyproject: Path) -> None:
    """Connect this process to a cluster until the process ends.

    Flower's simulation uses this connection instead of its own Ray.
    """
    values = tomllib.loads(pyproject.read_text())["tool"]["flwr"]["app"]["config"]
    config = Config.make(values, complete=True)
    stack = ExitStack()
    atexit.register(stack.close)
    stack.enter_context(cluster([config], address, log_to_driver=True))


def _nodes() -> list[dict[str, Any]]:
    """Return Ray's descriptions of the cluster's machines."""
    import ray

    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node for node in nodes if node["Alive"]]


def _check_address(address: str) -> None:
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():
        raise ConfigError(
            f"ray-address={address!r} must be HOST:PORT of a running cluster, as `ray"
            " start --head` shows it. Run the command on one of its machines, without"
            " Ray's client (ray://)."
        )
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise EngineError(
            f"no Ray cluster answers at {address} ({error}). Start one with `ray start"
            " --head`, and `ray start --address=HOST:PORT` on each other machine."
        ) from error


def _init(**options: Any) -> None:
    """Call ``ray.init`` without its warnings."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Without this setting, Ray inspects the command that started this process.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    # Ray replaces the handler of SIGTERM, but this handler saves the run. Remember it
    # and restore it below.
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if main else None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            ray.init(**options)
    except (ConnectionError, RuntimeError, ValueError, OSError, TimeoutError) as error:
        ray.shutdown()
        raise EngineError(
            f"Ray at {options['address']}: {error}. This machine must belong to the"
            " cluster, with the same versions of Ray and Python."
        ) from error
    finally:
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)
