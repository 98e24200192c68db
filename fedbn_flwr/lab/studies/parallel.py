"""The runs of a study in parallel: each is a task of Ray, which places it where cores and memory are free.

On this machine Ray is started for the sweep, with the stated cores and memory, and ends with it. A run is one process;
it uses ``torch-threads`` cores, and reserves an estimate of its memory (``memory_need``).
"""

from __future__ import annotations

import logging
import os
import queue
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from logging.handlers import QueueHandler
from pathlib import Path
from typing import Any

import torch

from fedbn_flwr.errors import ConfigError, StateError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.files import NewLines
from fedbn_flwr.lab.output.recorder import OnRound
from fedbn_flwr.lab.partitioned.partitioned_data import count_clients, partitioned_data
from fedbn_flwr.lab.runs.cluster import check_shared, cluster
from fedbn_flwr.lab.runs.run import work_of
from fedbn_flwr.lab.setup import gpu_share, make_model, pick_device, refuse_named_gpu
from fedbn_flwr.lab.studies.one_run import do_cell, finished, note_failure
from fedbn_flwr.lab.studies.study import Cell
from fedbn_flwr.lab.studies.sweep import Follower, Outcome, Runner
from fedbn_flwr.machine import keep_freed_memory, memory_bytes, num_cores
from fedbn_flwr.training.settings import share_of

__all__ = ["default_parallel", "in_parallel", "memory_need"]

logger = logging.getLogger("flwr")

_POLL = 0.5  # seconds between looks at the runs' files
_PROCESS = 0.8 * 2**30  # bytes of a process that has imported torch and Flower, measured
_WORTH_RAY = 1e10  # examples times parameters; below, the runs are done before Ray's processes have started


def default_parallel(cells: Sequence[Cell]) -> int:
    """Return how many runs at a time pay on this machine: one for each core, or GPU, as far as memory allows.

    A small study is done one run after another.
    """
    if not cells or sum(work_of(cell.config, make_model(cell.config)) for cell in cells) < _WORTH_RAY:
        return 1
    threads = max(cell.config.torch_threads for cell in cells)
    places = num_cores() // threads
    if any(pick_device(cell.config.device).type == "cuda" for cell in cells):
        places = torch.cuda.device_count()
    memory = 0.6 * memory_bytes()
    return max(1, min(len(cells), places, int(memory / max(memory_need(cell.config) for cell in cells))))


def memory_need(config: Config) -> float:
    """Return an estimate of a run's memory in bytes: the process, the data twice, and the models of a round.

    Activations are left out: with large images or batches state a larger ``--memory-gib`` for fewer runs at a time.
    """
    clients = count_clients(config)
    data = partitioned_data(config, clients).dataset
    held = sum(part.inputs.nbytes for part in (data.train, data.test) if part.in_memory)
    model: int = sum(value.nbytes for value in make_model(config).state_dict().values())
    models = 2 * share_of(config.fraction_train, clients) + 8
    return float(_PROCESS + 2 * held + models * model)


def in_parallel(parallel: int = 1, memory_gib: float = 0.0, ray_address: str | None = None) -> Runner:
    """Return a runner that does several runs at a time.

    Args:
        parallel: runs at a time on this machine.
        memory_gib: memory for all runs together on this machine, GiB; 0 = what Ray finds free for tasks.
        ray_address: a running Ray cluster instead: it does as many runs at a time as its cores and memory allow. The
            folder of the study is one that all its machines share.

    Raises:
        ConfigError: (by the runner) a run needs more memory than stated, or a machine does not see the folder.
        EngineError: (by the runner) the cluster does not answer.
    """

    def runner(cells: Sequence[Cell], out: Path, follower: Follower) -> Generator[Outcome]:
        threads = max(cell.config.torch_threads for cell in cells)
        here: dict[str, Any] = {"num_cpus": parallel * threads, "memory_gib": memory_gib or None}
        for cell in cells:
            refuse_named_gpu(cell.config)
        configs = [cell.config for cell in cells]
        with cluster(configs, ray_address, **({} if ray_address else here)):
            if ray_address:
                check_shared("out", out)
            yield from _on_ray(cells, _needs(cells, ray_address), out, follower)

    return runner


def _needs(cells: Sequence[Cell], ray_address: str | None) -> dict[str, float]:
    """Return the memory that each run reserves.

    Raises:
        ConfigError: no machine has so much.
    """
    import ray

    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    machines = [node["Resources"] for node in nodes if node["Alive"]]
    largest, cores = (max(machine.get(key, 0.0) for machine in machines) for key in ("memory", "CPU"))
    if wide := [cell.name for cell in cells if cell.config.torch_threads > cores]:
        raise ConfigError(
            f"{wide[0]}: torch-threads is above {cores:g}, the CPUs of the largest machine. Set it lower."
        )
    needs = {cell.name: memory_need(cell.config) for cell in cells}
    if large := [name for name, need in needs.items() if need > largest]:
        remedy = "State more (--memory-gib), or do one run at a time: --parallel 1."
        if ray_address:
            remedy = "Start Ray there with more (`ray start --memory=BYTES`)."
        raise ConfigError(
            f"the memory for runs is {largest / 2**30:.1f} GiB, and {len(large)} run(s) need more, {large[0]} first: "
            f"{max(needs.values()) / 2**30:.1f} GiB. {remedy}"
        )
    return needs


def _on_ray(cells: Sequence[Cell], needs: Mapping[str, float], out: Path, follower: Follower) -> Generator[Outcome]:
    """Give all runs to Ray; yield those that ended, and tell the follower the new lines of the others."""
    import ray

    out = out.absolute()
    share = _gpu_share(cells)
    work = ray.remote(max_retries=0)(_work)
    running: dict[Any, _Watched] = {}
    warned: set[str] = set()
    for cell in cells:
        gpus = 0.0 if cell.config.device == "cpu" else share
        options = {"num_cpus": cell.config.torch_threads, "memory": needs[cell.name], "num_gpus": gpus}
        plain = replace(cell)  # without the config that it has computed
        running[work.options(**options).remote(plain, out, Path.cwd())] = _Watched(cell, cell.folder(out), follower)
    while running:
        ended, _ = ray.wait([*running], timeout=_POLL)
        for watched in running.values():
            watched.look()
        for task in ended:
            watched = running.pop(task)
            try:
                error, warnings = ray.get(task)
            except ray.exceptions.RayError as lost:  # the process died, for example for lack of memory
                error, warnings = f"its process ended: {str(lost).strip().splitlines()[-1]}", []
                if not finished(watched.folder):
                    note_failure(watched.folder, str(lost), type(lost).__name__)
            for warning in dict.fromkeys(warnings):
                if warning not in warned:  # several runs of a study often have the same
                    logger.warning("%s: %s", watched.cell.name, warning)
            warned.update(warnings)
            yield watched.cell, error


def _work(cell: Cell, out: Path, folder: Path) -> tuple[str, list[str]]:
    """Do a run in a process of Ray; return its error and what it logged as warnings."""
    if folder.is_dir():
        os.chdir(folder)  # relative paths of the config are those of the command
    keep_freed_memory()
    logger.setLevel(logging.WARNING)
    records: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    handler = QueueHandler(records)
    logger.addHandler(handler)
    try:
        error = do_cell(cell, out, "in-process", workers=0)
    finally:
        logger.removeHandler(handler)
    return error, [records.get().getMessage() for _ in range(records.qsize())]


@dataclass
class _Watched:
    """A run of another process, as seen in its folder: it has begun when its ``config.yaml`` is new."""

    cell: Cell
    folder: Path
    follower: Follower
    begun: bool = False
    on_round: OnRound | None = None

    def __post_init__(self) -> None:
        self._before, self._place = self._stamp(), self._inode()
        self._lines = NewLines(self.folder / "metrics.jsonl")
        with suppress(StateError):  # damaged: its own process says so
            self._lines.read()  # those of an earlier try

    def look(self) -> None:
        """Tell the follower what is new."""
        if not self.begun:
            if self._stamp() in (None, self._before):
                return
            self.begun, self.on_round = True, self.follower.begin(self.cell)
            if self._inode() != self._place:  # the former folder was renamed: this run begins with round 1
                self._lines = NewLines(self.folder / "metrics.jsonl")
        if self.on_round:
            for line in self._lines.read():
                self.on_round(line)

    def _inode(self) -> int:
        try:
            return self.folder.stat().st_ino
        except OSError:
            return 0

    def _stamp(self) -> tuple[int, int] | None:
        try:
            file = (self.folder / "config.yaml").stat()
        except OSError:  # absent, or renamed at this moment
            return None
        return file.st_mtime_ns, file.st_size


def _gpu_share(cells: Sequence[Cell]) -> float:
    """Return the part of a GPU that a run asks for: runs share the GPUs evenly, as many as there are cores for them."""
    import ray

    has: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    if not has.get("GPU") or all(cell.config.device == "cpu" for cell in cells):
        return 0.0
    at_once = int(has.get("CPU", 1)) // max(cell.config.torch_threads for cell in cells)
    return gpu_share(at_once, int(has["GPU"]))
