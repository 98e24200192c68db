"""Runs on Ray, on this machine or on a cluster: what they need of their configs goes to the workers, code and data.

::

    with cluster(configs, address, num_cpus=2) as session:
        shared = session.share(configs)  # loads and shares each data set once

        @ray.remote(num_cpus=1)
        def work(shared, config, out):
            shared.adopt()  # from now on this process takes the data from Ray, and reads no file
            return run(config, out, workers=0)

        ray.get(work.remote(shared, config, out))
"""

from __future__ import annotations

import functools
import sys
import sysconfig
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab import own_code
from fedbn_flwr.lab.config import STATE_IN_OUT, Config
from fedbn_flwr.lab.data import KINDS, DatasetInfo, is_own
from fedbn_flwr.lab.data.shared import DataKey, adopt, in_memory, pack
from fedbn_flwr.lab.models.initial import FILES
from fedbn_flwr.lab.models.own import is_own as is_own_model
from fedbn_flwr.lab.models.own import own_module
from fedbn_flwr.lab.partitioned.partitioned_data import load_data
from fedbn_flwr.lab.runs.ray_cluster import connect, on_each

__all__ = ["RaySession", "SharedData", "cluster", "user_modules"]


@dataclass(frozen=True)
class SharedData:
    """Data sets in Ray's object store; give it to a task as an argument.

    Attributes:
        entries: key, description, shape and Ray reference of each packed data set.
    """

    entries: tuple[tuple[DataKey, DatasetInfo, tuple[int, ...], Any], ...] = ()

    def adopt(self) -> None:
        """Take these data sets from Ray in this process, from now on; to call it again changes nothing."""
        import ray

        get: Any = ray.get
        for key, info, shape, reference in self.entries:
            adopt(key, info, shape, functools.partial(get, reference))


class RaySession:
    """The connection of this process to Ray; see ``cluster``."""

    def __init__(self, address: str | None) -> None:
        self.address = address

    def share(self, configs: Sequence[Config]) -> SharedData:
        """Load the data sets of these configs, each once, and put them into Ray's object store.

        Data sets of image files that stay on the disk are not put there: tasks read the files, see
        ``check_files``.

        Raises:
            DataError: data are missing.
        """
        import ray

        shared: dict[tuple[DataKey, tuple[int, ...]], tuple[DataKey, DatasetInfo, tuple[int, ...], Any]] = {}
        for config in configs:
            if config.data_on_nodes():
                continue
            data, key = load_data(config), config.data_key()
            shape = data.train.shape if data.train.as_bytes else ()
            if (key, shape) not in shared and (packed := pack(data)):
                shared[key, shape] = (key, config.data_info(), shape, ray.put(packed))
        return SharedData(tuple(shared.values()))

    def check_files(self, config: Config) -> None:
        """Check that every machine has the files that a run reads and writes there.

        Raises:
            ConfigError: a machine lacks the files of a data set that stays on the disk, or the state folder that the
                run names.
            DataError: data are missing.
        """
        path = Path(config.own_data().path if is_own(config.dataset) else config.data_dir)
        on_disk = not (config.data_on_nodes() or config.by_function()) and not in_memory(load_data(config))
        if on_disk and (without := self._without(path)):
            raise ConfigError(
                f"dataset={config.dataset!r} stays on the disk (its images need more than 4 GiB, or "
                f"augment={config.augment!r} needs the originals), and {path} is not on "
                f"{without}. Put it there, or on a disk that all machines share."
            )
        if config.state_dir not in ("", STATE_IN_OUT):
            self.check_shared("state-dir", Path(config.state_dir))

    def check_files_of_run(self, config: Config) -> None:
        """Check that every machine has the files of a whole run: also the server's.

        Raises:
            ConfigError: as ``check_files``; a machine lacks the initial weights.
            DataError: data are missing.
        """
        self.check_files(config)
        if config.init.endswith(FILES) and (without := self._without(Path(config.init))):
            raise ConfigError(
                f"init={config.init!r} is not on {without}: a run reads it there. Put it on a disk that all machines "
                "share."
            )

    def check_shared(self, setting: str, folder: Path) -> None:
        """Check that every machine sees what this one writes into a folder, which is made if it is absent.

        Raises:
            ConfigError: a machine does not; ``setting`` is what the message calls the folder.
        """
        folder.mkdir(parents=True, exist_ok=True)
        mark = folder / f".{uuid.uuid4().hex}"
        mark.touch()
        try:
            without = self._without(mark)
        finally:
            mark.unlink()
        if without:
            raise ConfigError(
                f"{setting}={str(folder)!r} is not one folder for all machines: {without} does not see what this "
                "machine writes there. Name a folder that all machines share."
            )

    def _without(self, path: Path) -> str:
        """Return the machines on which there is no such path, as text."""
        if self.address is None:
            return ""
        return ", ".join(machine.address for machine, there in on_each(Path.exists, path.absolute()) if not there)


@contextmanager
def cluster(
    configs: Sequence[Config],
    address: str | None = None,
    *,
    num_cpus: int | None = None,
    memory_gib: float | None = None,
    **options: Any,
) -> Iterator[RaySession]:
    """Connect to Ray for runs of these configs; within the block ``ray.remote`` tasks can do them.

    Args:
        configs: the settings; modules of the user that they name go to the other machines.
        address: ``host:port`` of a running cluster; None = a private Ray on this machine, which ends with
            the block.
        num_cpus: CPUs of a private Ray; None = the cores.
        memory_gib: memory of a private Ray, in GiB, see ``ray_cluster.connect``.
        options: further arguments of ``ray_cluster.connect``.

    Raises:
        ConfigError: the address has a wrong form, or a module cannot be imported.
        EngineError: Ray does not start, the cluster does not answer, or its machines have other versions.
    """
    modules = user_modules(configs) if address is not None else ()
    with connect(address, num_cpus=num_cpus, memory_gib=memory_gib, modules=modules, **options):
        yield RaySession(address)


def user_modules(configs: Sequence[Config]) -> list[Path]:
    """Return the files and folders of the modules with the user's models and data, and of those that they import.

    Installed packages are not among them: every machine has its own.

    Raises:
        ConfigError: a module cannot be imported.
    """
    installed = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")]
    files: dict[Path, None] = {}
    named = [own_module(config.model) for config in configs if is_own_model(config.model)]
    named += [own_code.own_module("dataset", config.dataset, KINDS) for config in configs if config.by_function()]
    for module in dict.fromkeys(named):
        home = _home(module.__name__)
        if any(home.is_relative_to(folder) for folder in installed):
            continue
        for other in list(sys.modules):
            if "." not in other and other != "__main__" and (path := _location(other)) and path.parent == home:
                files[path] = None
    return list(files)


def _home(module: str) -> Path:
    """Return the folder in which a module, or the package that it is in, was found."""
    path = _location(module.partition(".")[0])
    if path is None:
        raise ConfigError(f"module {module!r} is not a file: it cannot go to other machines")
    return path.parent


def _location(module: str) -> Path | None:
    """Return the file of an imported module, or the folder of a package; None for others."""
    imported = sys.modules.get(module)
    paths = [*getattr(imported, "__path__", []), getattr(imported, "__file__", None)]
    return Path(paths[0]).resolve() if paths[0] else None
