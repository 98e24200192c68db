"""Two short rounds in a federation of only this node, to try each part of a round."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedbn_flwr.client import client_app
from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.lab.config import CENTRALIZED, Config, Scalar, data_of, method_of
from fedbn_flwr.lab.runs.check_start import checked_config
from fedbn_flwr.lab.runs.node import client_fn
from fedbn_flwr.lab.runs.serve import serve
from fedbn_flwr.messages.protocol import STATE_DIR

# settings that are about the server, about other clients or about later rounds, with
# their values for the trial
_ALONE: dict[str, Scalar] = {
    "num-server-rounds": 2,  # one round for each phase of a method with two phases
    "num-clients": 0,
    "local-steps": 1,
    "local-epochs": 0,
    "fraction-train": 1.0,
    "fraction-evaluate": 1.0,
    "min-replies": 1,
    "eval-every": 1,
    "eval-on": "personal-own",
    "held-out-clients": "",
    "early-stopping": 0,
    "checkpoint-every": 0,
    "init": "",
    "resume": False,
    "series": "",
    STATE_DIR: "",
    "out": "",
    "tensorboard": False,
    "dp": "off",
    "round-timeout": 0.0,
}


def try_rounds(config: Config, node: Mapping[str, Any]) -> None:
    """Do two rounds of one local step with only this node.

    The node's local state goes to a temporary folder in its ``state-dir``. Masks and
    the server's noise are left out, because they need other clients.

    Raises:
        FedBNError: a round failed.
        OSError: nothing can be written to the ``state-dir``.
    """
    alone = _alone(config)
    state = node.get(STATE_DIR)
    if state:
        Path(state).mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="check-node-", dir=state) as kept,
        tempfile.TemporaryDirectory(prefix="check-node-") as out,
        InProcessGrid(
            client_app(client_fn),
            1,
            run_config=alone.to_mapping(),
            node_configs=[{**node, STATE_DIR: kept}],
            seed=config.seed,
        ) as grid,
    ):
        serve(grid, checked_config(alone), Path(out) / "run")


def _alone(config: Config) -> Config:
    """Return the run's settings, changed for short rounds without other clients."""
    # Give each phase of a method with two phases one round.
    changes = dict(_ALONE)
    if config.strategy != CENTRALIZED:
        own = method_of(config).strategy.Params.model_fields
        for key in ("freeze_at", "fedtan_rounds"):
            if key in own:
                changes[key.replace("_", "-")] = 1

    # Set the task and the number of classes if the user's function gives the data,
    # because the run may have taken them from its data.
    if data_of(config).by_function:
        info = data_of(config).info
        changes["task"] = info.task.name
        if info.task.outputs(2) == 2:
            changes["num-classes"] = info.num_classes

    # Leave out keys with their default value, because this value may follow from
    # another key.
    defaults = {
        field.alias or name: field.default
        for name, field in Config.model_fields.items()
    }
    of_run = {}
    for key, value in config.to_mapping().items():
        if key not in changes and value != defaults[key]:
            of_run[key] = value
    return Config.make_of_shared(of_run, changes)[0]
