"""The table by site at the end of a run: each client's test examples with the model
that the run has for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from fedbn_flwr.batchnorm.averaging import State
from fedbn_flwr.lab.config import Config, data_of, method_of
from fedbn_flwr.lab.data import Subset
from fedbn_flwr.lab.output.summary import kept_by_clients
from fedbn_flwr.lab.partitioned.counts import client_names
from fedbn_flwr.lab.partitioned.partitioned_data import PartitionedData
from fedbn_flwr.lab.setup import on_device
from fedbn_flwr.messages.records import tensors
from fedbn_flwr.server.methods.params import TEST_BN
from fedbn_flwr.server.rounds.testing import completing_entries
from fedbn_flwr.strategies import Strategy
from fedbn_flwr.training.evaluation import evaluate
from fedbn_flwr.training.wrappers import load_state

__all__ = ["HELD_OUT", "site_names", "table_of_run"]

HELD_OUT = "held-out"
"""The key of a row whose site took no part in the training."""

_MOST_SITES = 50
"""With more clients a row for each says little, and to test them all may cost more than
the run.
"""


def site_names(data: PartitionedData) -> list[str]:
    """Return the name of each client: its group, if it has one of its own, else
    "client" and its number.
    """
    return [
        f"client {name}" if name == str(at) else name
        for at, name in enumerate(client_names(data))
    ]


def table_of_run(
    config: Config,
    model: nn.Module,
    data: PartitionedData | None,
    strategy: Strategy | None,
    state: State,
) -> list[dict[str, Any]]:
    """Return a row for each site of a finished run, with its main metric; none where
    that cannot be measured.

    That is where the data are not here, there are more than 50 clients, single clients
    are protected, clients' own models are not on this disk, or the main test has
    statistics of its inputs. The clients that were held out are the last rows.

    Args:
        config: the settings.
        model: gets the entries that are tested.
        data: the data of the run.
        strategy: None for the centralized reference.
        state: the final global state.
    """
    test = method_of(config).tests[0]
    if (
        data is None
        or config.protected
        or test.endswith(TEST_BN)
        or not sum(map(len, data.test))
    ):
        return []
    if len(data.test) + len(data.held_out) > _MOST_SITES:
        return []
    own: Mapping[str, State] = {}
    shared: State = completing_entries(strategy.run, test) if strategy else {}
    if strategy and strategy.local and test.startswith("personal"):
        own = dict(kept_by_clients(config, strategy, state))
        if not own:
            return []
    on_device(model, config)
    task = data_of(config).test_task
    rows: list[dict[str, Any]] = []

    def add(name: str, view: Subset, held_out: bool) -> None:
        value = evaluate(model, view, task=task).named()[task.score]
        row = {
            "site": name,
            "examples": len(view),
            "value": value if math.isfinite(value) else None,
        }
        rows.append({**row, HELD_OUT: True} if held_out else row)

    for client, name in enumerate(site_names(data)):
        load_state(model, tensors({**state, **shared, **own.get(str(client), {})}))
        add(name, data.test_view(client), held_out=False)
    if data.held_out:
        # with the average of the BN parts that clients keep
        load_state(model, tensors(state))
    for at, name in enumerate(data.held_out_names):
        add(name, data.held_out_views(at)[1], held_out=True)
    model.cpu()
    return rows
