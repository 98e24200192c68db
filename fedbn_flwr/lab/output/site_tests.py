"""The table of sites at the end of a run, with a test of each client's model."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedbn_flwr.batchnorm.averaging import State
from fedbn_flwr.batchnorm.calibration import FEWEST, calibrate
from fedbn_flwr.batchnorm.class_moments import ClassMoments
from fedbn_flwr.batchnorm.site_passes import ONE_BATCH
from fedbn_flwr.client.personal_model import client_file, read_state
from fedbn_flwr.errors import FedBNError
from fedbn_flwr.lab.config import Config, data_of, method_of
from fedbn_flwr.lab.data import Subset
from fedbn_flwr.lab.partitioned.counts import names_of
from fedbn_flwr.lab.partitioned.partitioned_data import PartitionedData
from fedbn_flwr.lab.setup import on_device
from fedbn_flwr.messages.records import tensors
from fedbn_flwr.messages.site_names import texts_of
from fedbn_flwr.server.methods.params import TEST_BN
from fedbn_flwr.server.rounds.testing import completing_entries
from fedbn_flwr.server.runs.failures import shortened
from fedbn_flwr.server.runs.run_state import Run
from fedbn_flwr.strategies import Strategy
from fedbn_flwr.training.evaluation import evaluate
from fedbn_flwr.training.model_state import load_state
from fedbn_flwr.training.tasks import Task

logger = logging.getLogger("flwr")

HELD_OUT = "held-out"
"""The key of a row whose site took no part in the training."""

# With more clients, a table with a row for each is of little use, and the tests may
# cost more than the run.
_MOST_SITES = 50


def site_names(data: PartitionedData, names: Mapping[str, str]) -> list[str]:
    """Return a different text for each client: its name, or else "client N".

    ``names`` are the clients' names by number. They replace the names in the data.
    """
    texts = texts_of({**names_of(data), **names})
    clients = range(len(data.train))
    return [texts.get(str(client), f"client {client}") for client in clients]


def table_of_run(
    config: Config,
    model: nn.Module,
    data: PartitionedData | None,
    strategy: Strategy | None,
    state: State,
    run: Path,
    clients: Collection[str],
) -> list[dict[str, Any]]:
    """Return a row for each site of a finished run.

    A row has the number of the client and the site's main metric, or the reason why the
    site's data cannot be read. Held-out clients are the last rows, without a number.

    There are no rows if the data are not here, if there are more than 50 clients, if
    single clients are protected, if clients' own models are not on this disk, or if the
    main test uses statistics of its inputs.

    Args:
        config: the settings.
        model: receives the entries of each test.
        data: the data of the run.
        strategy: None for the centralized reference.
        state: the final global state.
        run: the run's folder.
        clients: the clients whose own model is in the folder.
    """
    # Stop if nothing can be measured or published, or if the work would be too much.
    test = method_of(config).tests[0]
    if data is None or config.protected or test.endswith(TEST_BN):
        return []
    if not any(map(len, data.test)):
        return []
    if len(data.test) + len(data.held_out) > _MOST_SITES:
        return []

    # A client's model has the global entries, the entries that complete them for this
    # test, and the client's own entries.
    own_models = method_of(config).tests_own_models
    if own_models and not clients:
        return []
    shared: State = completing_entries(strategy.run, test) if strategy else {}
    on_device(model, config)
    task = data_of(config).test_task
    rows = []

    def add(name: str, view: Subset, **about: Any) -> None:
        row: dict[str, Any] = {"site": name, "examples": len(view), "value": None}
        row |= about
        try:
            value = evaluate(model, view, task=task).named()[task.score]
            row["value"] = value if math.isfinite(value) else None
        except FedBNError as error:
            row["error"] = str(error)
            logger.warning("site %s was not tested: %s", name, error)
        rows.append(row)

    names = strategy.run.nodes.names if strategy else {}
    for client, name in enumerate(site_names(data, names)):
        entries, note = tensors({**state, **shared}), ""
        if own_models and str(client) in clients:
            entries |= read_state(client_file(run, client))[0]
        elif own_models and strategy:
            note = _without_own_model(strategy.run, str(client))
        load_state(model, entries)
        about = {"note": note} if note else {}
        add(name, data.test_view(client), client=client, **about)
    if data.held_out:
        # Held-out clients have no local entries, so they get the average of the BN
        # parts that clients keep.
        load_state(model, tensors(state))
    for at, name in enumerate(data.held_out_names):
        inputs, tests = data.held_out_views(at)
        moments = strategy.run.class_moments if strategy else None
        inputs = inputs if len(inputs) else tests
        found = _calibrated(model, inputs, tests, task, moments)
        add(name, tests, **{HELD_OUT: True}, **found)
    model.cpu()
    return rows


def _calibrated(
    model: nn.Module,
    inputs: Subset,
    tests: Subset,
    task: Task,
    moments: ClassMoments | None,
) -> dict[str, Any]:
    """Return the result of a new site after a calibration, or {} if there is none.

    The calibration uses one batch of its inputs, because more batches would need a pass
    for each layer.
    """
    fits = max(FEWEST, ONE_BATCH // math.prod(inputs.samples.shape))
    chosen = torch.linspace(0, len(inputs) - 1, min(fits, len(inputs))).long()
    # For example, the model has no BatchNorm.
    with suppress(FedBNError):
        batch, _ = inputs.batch(chosen)
        found = calibrate(model, [batch], class_moments=moments, task=task)
        value = evaluate(found.model, tests, task=task).named()[task.score]
        if math.isfinite(value):
            return {"calibrated": value, "way": found.way, "trusted": found.trusted}
    return {}


def _without_own_model(run: Run, client: str) -> str:
    """Return the reason why a client is tested with the server's entries only."""
    if client in run.kept.hashes:
        return (
            "its local state is not on this disk: tested with the server's entries only"
        )
    why = "no reply of it was used"
    for report in run.reports:
        for node_id, reason in report.reasons.items():
            if run.nodes.node(node_id).label == client:
                why = f"round {report.server_round}: {shortened(reason)}"
    return f"no model of its own, only the server's entries; {why}"
