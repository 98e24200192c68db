"""Ray for this package: a private one on this machine, or a cluster of machines that is running already.

The machines of a cluster need the same Python, Ray and torch. This package goes to them with the job, and so do modules
of the user.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import grpc

from fedbn_flwr.engines.own_folder import own_folder
from fedbn_flwr.errors import ConfigError, EngineError, needs_package

__all__ = ["Machine", "check_versions", "connect", "machines", "on_each", "on_this_machine"]

T = TypeVar("T")

_HEALTH = "/grpc.health.v1.Health/Check"  # of every gRPC server; ``ray.init`` would wait for minutes
_ANSWER_SECONDS = 5.0  # of the address
_WORK_SECONDS = 120.0  # of a machine: it gets the code and starts a Python process
_PACKAGES = ("torch", "numpy", "flwr")  # what decides the bits of a run, and the form of its messages
_GIB = 2**30
_PACKAGE = Path(__file__).parents[2]


class Machine(NamedTuple):
    """A machine of the cluster: its address, its id in Ray, and its numbers of CPUs and GPUs."""

    address: str
    node_id: str
    cpus: float
    gpus: float


@contextmanager
def connect(
    address: str | None = None,
    *,
    num_cpus: int | None = None,
    memory_gib: float | None = None,
    modules: Sequence[Path] = (),
    env_vars: Mapping[str, str] | None = None,
    log_to_driver: bool = False,
    checked: bool = False,
) -> Iterator[None]:
    """Connect this process to Ray, and end the connection after the block; a private Ray ends with it.

    Within the block ``ray.remote`` functions import this package, of this very version, on every machine.

    Args:
        address: ``host:port`` of a running cluster, of which this machine is one; None = a private Ray on this machine.
        num_cpus: CPUs of a private Ray; None = the cores.
        memory_gib: what the tasks of a private Ray may ask for together, in GiB; None = Ray's choice.
        modules: files and folders of Python modules that go to the other machines beside this package.
        env_vars: environment variables of the tasks.
        log_to_driver: print what the tasks print.
        checked: another process has just compared the versions of the machines.

    Raises:
        ConfigError: the address has a wrong form; or ``num_cpus`` or ``memory_gib`` of a running cluster.
        EngineError: this process is connected already, the cluster does not answer, or a machine of it has other
            versions or does not work.
    """
    with needs_package("ray", "runs on a cluster"):
        import ray
    if ray.is_initialized():
        raise EngineError("this process is connected to Ray already. Call ray.shutdown() first.")
    environment = {"FLWR_TELEMETRY_ENABLED": "0", **(env_vars or {})}
    options: dict[str, Any] = {"log_to_driver": log_to_driver, "logging_level": logging.ERROR}
    with ExitStack() as stack:
        if address is None:
            folder = stack.enter_context(own_folder("ray-"))  # short: paths of sockets have 107 characters
            options |= {"address": "local", "num_cpus": num_cpus, "include_dashboard": False, "_temp_dir": folder}
            if memory_gib is not None:
                options["_memory"] = int(memory_gib * _GIB)
            # The tasks run on this machine and find the modules where this process does.
            options["runtime_env"] = {"env_vars": environment}
        else:
            if num_cpus is not None or memory_gib is not None:
                raise ConfigError(
                    f"num_cpus and memory_gib are for a private Ray; the cluster at {address} has its own, which "
                    "`ray start` set on each machine."
                )
            code = [str(path) for path in (_PACKAGE, *modules)]
            options["runtime_env"] = {"env_vars": environment, "py_modules": code}
            options["address"] = _answering(address)
        _init(address, options)
        stack.callback(ray.shutdown)
        if address is not None and not checked:
            check_versions()
        yield


def machines() -> list[Machine]:
    """Return the machines of the cluster that this process is connected to."""
    import ray

    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    alive = []
    for node in nodes:
        if node["Alive"]:
            cpus, gpus = node["Resources"].get("CPU", 0.0), node["Resources"].get("GPU", 0.0)
            alive.append(Machine(node["NodeManagerAddress"], node["NodeID"], cpus, gpus))
    return alive


def on_each(function: Callable[..., T], *args: Any) -> list[tuple[Machine, T]]:
    """Call a function once on each machine of the cluster, and return the machines with the results.

    Raises:
        EngineError: a machine does not do it, or not in time.
    """
    import ray

    on, task = machines(), ray.remote(num_cpus=0)(function)
    asked = [task.options(scheduling_strategy=_on(machine.node_id)).remote(*args) for machine in on]
    results = []
    for machine, answer in zip(on, asked, strict=True):
        try:
            results.append((machine, ray.get(answer, timeout=_WORK_SECONDS)))
        except ray.exceptions.GetTimeoutError as error:
            raise EngineError(f"machine {machine.address} of the cluster did no work in {_WORK_SECONDS:g} s") from error
        except ray.exceptions.RayError as error:
            raise EngineError(f"machine {machine.address} of the cluster failed at its first task: {error}") from error
    return results


def on_this_machine() -> Any:
    """Return Ray's scheduling strategy for tasks and actors that must run on the machine of this process."""
    import ray

    return _on(ray.get_runtime_context().get_node_id())


def _on(node_id: str) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node_id, soft=False)


def _answering(address: str) -> str:
    """Return the address after a call to it.

    Raises:
        ConfigError: it has a wrong form.
        EngineError: nothing answers there.
    """
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():
        client = " Ray's client (ray://) is not supported: run the command on a machine of the cluster."
        raise ConfigError(
            f"ray-address={address!r} must be HOST:PORT of a running cluster, as `ray start --head` shows it."
            + (client if address.startswith("ray://") else "")
        )
    if os.environ.get("RAY_USE_TLS", "0") != "0":
        return address  # it would not answer a call in plaintext
    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(_HEALTH)(b"", timeout=_ANSWER_SECONDS)
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise EngineError(
                    f"no Ray cluster answers at {address} ({error.details()}). Start one with `ray start --head`, and "
                    "`ray start --address=HOST:PORT` on each other machine."
                ) from error
    return address


def _init(address: str | None, options: Mapping[str, Any]) -> None:
    """Call ``ray.init`` without its warnings; the signal handlers stay those of this process."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # else Ray looks how this process was started
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if main else None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            ray.init(**options)
    except (ConnectionError, RuntimeError, ValueError, OSError, TimeoutError) as error:
        ray.shutdown()
        where = "on this machine" if address is None else f"at {address}"
        reason = f"{error}" + (f" ({error.__cause__})" if error.__cause__ else "")
        raise EngineError(
            f"Ray {where}: {reason}. "
            + (
                "Its sockets lie in TMPDIR, whose path must be short."
                if address is None
                else "This machine must be one of the cluster's (`ray start --address=HOST:PORT`), with the same "
                "versions of Ray and Python."
            )
        ) from error
    finally:
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)


def check_versions() -> None:
    """Raise EngineError unless all machines have the versions of this one; Ray itself compares Ray and Python."""

    # Not a function of this module, which it would import, with torch, on each machine.
    def versions(names: Sequence[str]) -> dict[str, str]:
        installed = {}
        for name in names:
            try:
                installed[name] = version(name)
            except PackageNotFoundError:
                installed[name] = "not installed"
        return installed

    here = versions(_PACKAGES)
    others = [
        f"machine {machine.address} has {name} {has[name]}, this one {wanted}"
        for machine, has in on_each(versions, _PACKAGES)
        for name, wanted in here.items()
        if has[name] != wanted
    ]
    if others:
        raise EngineError("\n".join(others) + "\nA run needs the same versions on all machines.")
