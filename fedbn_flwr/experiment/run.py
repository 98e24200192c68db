"""Starting a run from the command line or Python, in either engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from fedbn_flwr.client.torch_client import client_app
from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.experiment.config import CENTRALIZED, STATE_IN_OUT, Config
from fedbn_flwr.experiment.node import client_fn
from fedbn_flwr.experiment.output import RunFolder
from fedbn_flwr.experiment.partitioned_data import count_clients, partitioned_data
from fedbn_flwr.experiment.recorder import OnRound
from fedbn_flwr.experiment.serve import centralized, serve
from fedbn_flwr.experiment.setup import check
from fedbn_flwr.experiment.simulation import simulate

__all__ = ["ENGINES", "Engine", "preflight", "run"]

Engine = Literal["in-process", "simulation"]
ENGINES: tuple[Engine, ...] = ("in-process", "simulation")


def preflight(config: Config, out: Path) -> tuple[Config, Path]:
    """Check a run before anything is written; return the resolved config and the absolute folder.

    Raises:
        FedBNError: settings are bad, data is missing, the split is impossible, or the folder is in use.
    """
    out = out.absolute()
    if not config.resume:
        RunFolder.refuse_used(out)
    elif config.strategy == CENTRALIZED:
        raise ConfigError("strategy=centralized writes no checkpoints: it cannot be resumed. Start a new run.")
    else:
        RunFolder.refuse_shorter(out, config.num_server_rounds)
    here = {"out": str(out)}
    if not config.state_dir and config.strategy != CENTRALIZED and (config.checkpoint_every or config.method().local):
        here["state_dir"] = STATE_IN_OUT  # the clients of both engines share the server's files
    config = config.model_copy(update=here)
    check(config)
    config = config.model_copy(update={"num_clients": count_clients(config)})
    partitioned_data(config, config.num_clients)
    return config, out


def run(config: Config, out: Path, engine: Engine = "in-process", on_round: OnRound | None = None) -> dict[str, Any]:
    """Do one run and return its summary.

    Args:
        config: the settings; ``num_clients`` = 0 means 5 clients, or one for each group under a split by group.
        out: the output folder, empty or missing; with ``resume`` also that of a run to resume.
        engine: "in-process" runs the clients in threads of this process, "simulation" in Flower's Ray simulation.
        on_round: called with each line of ``metrics.jsonl``.

    Raises:
        FedBNError: settings are bad, data is missing, the folder is in use, or the federation failed. After a
            DivergedError the folder is complete, up to the round that diverged.
    """
    config, out = preflight(config, out)
    if config.strategy == CENTRALIZED:
        return centralized(config, out, on_round)
    if engine == "simulation":
        return simulate(config, out, on_round)
    workers = max(1, (os.cpu_count() or 1) // config.torch_threads)
    with InProcessGrid(
        client_app(client_fn),
        config.num_clients,
        run_config=config.to_mapping(),
        max_workers=workers,
        torch_threads=config.torch_threads,
        seed=config.seed,
    ) as grid:
        return serve(grid, config, out, on_round)
