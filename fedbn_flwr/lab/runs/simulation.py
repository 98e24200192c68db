"""The simulation engine runs the default app through ``flwr run``.

It needs only the installed package: the app's files are written for each run.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from fedbn_flwr.engines.flower_run import Scalar, flower_run, toml_pairs
from fedbn_flwr.engines.own_folder import own_folder
from fedbn_flwr.errors import DivergedError, EngineError
from fedbn_flwr.lab.config import Config, method_of
from fedbn_flwr.lab.files import NewLines, read_json
from fedbn_flwr.lab.output.folder import DIVERGED_AT, FLOWER_LOG
from fedbn_flwr.lab.output.result_writer import OnRound
from fedbn_flwr.lab.runs.cluster import check_cluster
from fedbn_flwr.lab.setup import gpu_share, pick_device, refuse_named_gpu
from fedbn_flwr.machine import num_cores

logger = logging.getLogger("flwr")

# the level of a record in Flower's log, and its text after the time
_RECORD = re.compile(
    r"(?P<level>WARNING|ERROR|CRITICAL)(?: ?\d[\d-]* [\d:,.]+)? ?:\s*(?P<text>.*)"
)
_OF_EVERY_RUN = (
    "Since flwr 1.32, default simulated SuperNodes",
    "Manually terminating ClientAppActor",
)
"""Warnings of Flower in each simulation, without information on the run."""


def echo(line: str) -> None:
    """Log a line again if it begins a warning or an error in the log of ``flwr run``.

    The whole log is in the file ``flower.log``.
    """
    source, found = "", _RECORD.match(line)
    # Ray puts the name of the process before a client's line, such as "(ClientAppActor
    # pid=7) ".
    if found is None and line.startswith("("):
        process, _, text = line.partition(") ")
        source, found = f"{process}) ", _RECORD.match(text)
    if found and not found["text"].startswith(_OF_EVERY_RUN):
        level = logging.getLevelNamesMapping()[found["level"]]
        logger.log(level, "%s%s", source, found["text"])


_APP = '''"""A ServerApp and a ClientApp from the installed package."""

from fedbn_flwr.lab.runs.default_app import client_app, server_app

__all__ = ["client_app", "server_app"]
'''

_CLUSTER_APP = '''"""The same ClientApp on a Ray cluster. Only the process of Flower's simulation imports this file."""

from pathlib import Path

from fedbn_flwr.lab.runs.default_app import client_app
from fedbn_flwr.lab.runs.cluster import join_cluster

__all__ = ["client_app"]

join_cluster({address!r}, Path(__file__).with_name("pyproject.toml"))
'''

_PYPROJECT = """[project]
name = "fedbn-simulation"
version = "1.0.0"
description = "fedbn-flwr's default app"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedbn"

[tool.flwr.app.components]
serverapp = "fedbn_simulation:server_app"
clientapp = "{module}:client_app"

[tool.flwr.app.config]
"""


def simulate(
    config: Config,
    out: Path,
    on_round: OnRound | None = None,
    ray_address: str | None = None,
) -> dict[str, Any]:
    """Run a config in Flower's Ray simulation and return its summary.

    Warnings and errors in Flower's log are also logged here.

    Args:
        config: the settings, with ``num_clients`` and an absolute ``out``.
        out: the output folder; it also gets the run's log, ``flower.log``.
        on_round: called with each line of ``metrics.jsonl`` as it appears.
        ray_address: ``host:port`` of a Ray cluster for the clients; by default, a
            private Ray on this machine.

    Raises:
        ConfigError: the cluster cannot do the run.
        EngineError: the run did not complete.
        DivergedError: the run diverged; the folder is complete up to this round.
    """
    # Refuse before Flower starts, if possible.
    refuse_named_gpu(config)
    if ray_address is not None:
        check_cluster(config, out, ray_address)
    federation = _resources(config, private=ray_address is None)
    before = read_json(out / "summary.json")

    lines: list[str] = []

    def on_line(line: str) -> None:
        lines.append(line)
        echo(line)

    # Flower's processes write the folder of the run. A thread follows the lines of its
    # metrics.
    ended = threading.Event()
    follower = ThreadPoolExecutor(1, thread_name_prefix="follower")
    with own_folder() as folder:
        app = Path(folder)
        _write_app(app, config, ray_address)
        following = follower.submit(_follow, out / "metrics.jsonl", on_round, ended)
        try:
            flower_run(
                app, run_config={}, federation_config=federation, on_line=on_line
            )
        except EngineError as error:
            raise _failure(error, out, before) from error
        finally:
            ended.set()
            follower.shutdown()
            if out.is_dir():
                with (out / FLOWER_LOG).open("a") as log:
                    log.write("\n".join(lines) + "\n")
    following.result()  # raises the error of on_round
    summary = read_json(out / "summary.json")
    if summary:
        return summary
    raise EngineError(
        f"the run wrote no {out / 'summary.json'}. Its log:\n" + "\n".join(lines[-40:])
    )


def _failure(
    error: EngineError, out: Path, before: Mapping[str, Any]
) -> EngineError | DivergedError:
    """Return the error of a run that did not complete, DivergedError if it diverged.

    Args:
        error: the error of ``flwr run``.
        out: the run's folder.
        before: the summary in the folder before the run started.
    """
    summary = read_json(out / "summary.json")
    whole = str(error)
    if out.is_dir():
        whole = f"{error}\nThe whole log: {out / FLOWER_LOG}"
    # The server writes the summary of a diverged run before it raises DivergedError.
    # The error is lost with the server's process, so read the summary.
    if summary == before or DIVERGED_AT not in summary:
        return EngineError(whole)
    return DivergedError(whole, summary[DIVERGED_AT])


def _write_app(folder: Path, config: Config, ray_address: str | None) -> None:
    """Write the app of a run."""
    (folder / "fedbn_simulation.py").write_text(_APP)
    module = "fedbn_simulation"
    # On a cluster, the ClientApp is in a separate module that connects to the cluster.
    # The server must not import this module.
    if ray_address is not None:
        module = "fedbn_cluster"
        (folder / f"{module}.py").write_text(_CLUSTER_APP.format(address=ray_address))
    settings = [toml_pairs({key: value}) for key, value in config.to_mapping().items()]
    text = _PYPROJECT.format(module=module) + "\n".join(settings) + "\n"
    (folder / "pyproject.toml").write_text(text)


def _resources(config: Config, private: bool) -> dict[str, Scalar]:
    """Return Flower's federation config: the number of nodes and their Ray resources.

    Args:
        config: the settings.
        private: whether Ray runs only for this run, and not in a cluster.
    """
    clients, threads = config.num_clients, config.torch_threads
    resources: dict[str, Scalar] = {
        "num-supernodes": clients,
        "client-resources-num-cpus": threads,
    }
    # A cluster has set its own CPUs and GPUs, so set nothing more.
    if not private:
        return resources
    at_once = min(clients, num_cores() // threads)
    # If clients wait for each other in FedTAN's channel, each needs its own actor at
    # the same time.
    if method_of(config).methods.whole.needs_all_at_once:
        at_once = clients
        resources["init-args-num-cpus"] = clients * threads
    # Give each actor a part of a GPU, because it would otherwise compute on the CPU.
    if pick_device(config.device).type == "cuda":
        resources["client-resources-num-gpus"] = gpu_share(
            at_once, torch.cuda.device_count()
        )
    return resources


def _follow(path: Path, on_round: OnRound | None, ended: threading.Event) -> None:
    """Call ``on_round`` with the new lines of ``metrics.jsonl`` until the run ends."""
    lines = NewLines(path)
    while on_round:
        # Read once more after the end, because lines may have been added since the last
        # reading.
        last = ended.wait(0.3)
        for line in lines.read():
            on_round(line)
        if last:
            return
