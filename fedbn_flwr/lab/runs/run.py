"""Start a run from the command line or from Python."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedbn_flwr.client import client_app
from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.lab.config import STATE_IN_OUT, Config, method_of
from fedbn_flwr.lab.partitioned.counts import refuse_no_tests
from fedbn_flwr.lab.partitioned.partitioned_data import (
    count_clients,
    federation_size,
    partitioned_data,
)
from fedbn_flwr.lab.results.folder import RunFolder
from fedbn_flwr.lab.results.result_writer import OnRound
from fedbn_flwr.lab.runs.check_start import (
    CheckedConfig,
    checked_config,
)
from fedbn_flwr.lab.runs.node import RunClients
from fedbn_flwr.lab.runs.serve import serve
from fedbn_flwr.machine import num_cores
from fedbn_flwr.training.settings import share_of

__all__ = ["default_workers", "preflight", "run", "start", "work_of"]


# value of ``work_of`` from which worker processes save time; with the smallest models,
# this is a tenth of a second of work
_WORTH_PROCESSES = 1e8


def preflight(config: Config, out: Path) -> CheckedConfig:
    """Check a run before anything is written.

    The returned config has the absolute path of the folder and the number of clients.
    The data and their split are in memory afterwards.

    Raises:
        FedBNError: settings are bad, data is missing, the split is impossible, or the
            folder is in use.
    """
    # Check the folder first, because the data may take minutes to read.
    out = out.absolute()
    if config.resume:
        RunFolder.refuse_shorter(out, config.num_server_rounds)
    else:
        RunFolder.refuse_used(out)

    # Choose the folder of the clients' local state. Clients of both engines run on the
    # server's machine and share its files.
    changes = {"out": str(out)}
    if not config.state_dir and _keeps_files(config):
        changes["state_dir"] = STATE_IN_OUT
    config = config.model_copy(update=changes)

    # Check the model before the data are split. The split may determine the number of
    # clients, so count the clients before the checks of the data.
    checked = checked_config(config)
    config = config.model_copy(update={"num_clients": count_clients(config)})
    refuse_no_tests(partitioned_data(config, config.num_clients), config)
    return replace(checked, config=config)


def _keeps_files(config: Config) -> bool:
    """Return whether clients need a state folder.

    They need it if they keep a part of the model, or if the run saves checkpoints.
    """
    method = method_of(config)
    keeps = method.methods.own_models or method.params.fine_tune > 0
    return config.checkpoint_every > 0 or keeps


def default_workers(checked: CheckedConfig) -> int:
    """Return the number of worker processes that makes the run fastest.

    It is the number of cores, but at most one for each client of a round. It is 0 with
    several torch threads, with a GPU, for a small run, and if it would be 1.
    """
    config = checked.config
    clients = share_of(config.fraction_train, federation_size(config))
    workers = min(num_cores(), clients)
    # Worker processes are forks, which can use neither CUDA nor several threads.
    if workers < 2 or config.torch_threads > 1 or torch.cuda.is_available():
        return 0
    # Use no worker processes for a small run, because it ends before processes have
    # started.
    if work_of(config, checked.model) <= _WORTH_PROCESSES:
        return 0
    return workers


def work_of(config: Config, model: nn.Module) -> float:
    """Return an estimate of the work of a run.

    It is the number of training examples in all steps, times the number of parameters.
    """
    split = partitioned_data(config, count_clients(config))
    num_clients = len(split.train)
    # the mean number of examples of a client
    examples = sum(map(len, split.train)) / num_clients
    batch = min(config.batch_size or examples, examples)
    steps = config.local_steps or config.local_epochs * examples / batch

    clients = max(1, share_of(config.fraction_train, num_clients))
    parameters = sum(p.numel() for p in model.parameters())
    return config.num_server_rounds * clients * steps * batch * parameters


def run(
    config: Config,
    out: Path,
    on_round: OnRound | None = None,
    workers: int | None = None,
) -> dict[str, Any]:
    """Do one run and return its summary.

    Args:
        config: the settings; with ``num_clients`` 0, there are 5 clients, or one for
            each group under a split by group.
        out: the output folder, empty or missing, or with ``resume`` the folder of a run
            to resume.
        on_round: called with each line of ``metrics.jsonl``.
        workers: worker processes; with 0, only this process
            works. By default, ``default_workers``. The results have the same bits for
            any number.

    Raises:
        FedBNError: settings are bad, data is missing, the folder is in use, or the
            federation failed. After a DivergedError, the folder is complete up to the
            round that diverged.
    """
    return start(preflight(config, out), on_round, workers)


def start(
    checked: CheckedConfig,
    on_round: OnRound | None = None,
    workers: int | None = None,
) -> dict[str, Any]:
    """Do a run that ``preflight`` has checked, as ``run`` does."""
    config = checked.config
    out = Path(config.out)
    clients = RunClients.of(checked)
    # Split the data now, so that a search of the clients finds connections of the data.
    clients.split(config.num_clients)
    if workers is None:
        workers = default_workers(checked)
    with InProcessGrid(
        client_app(clients.client, num_examples=clients.num_examples),
        federation_size(config),
        run_config=config.to_mapping(),
        workers=workers,
        torch_threads=config.torch_threads,
        seed=config.seed,
    ) as grid:
        return serve(grid, checked, out, on_round)
