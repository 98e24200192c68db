"""A ServerApp of the older kind; ``to_legacy`` puts one of our strategies where
Flower's own stood.
"""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, Context
from flwr.server import ServerApp, ServerAppComponents, ServerConfig

from fedbn_flwr import to_legacy
from fedbn_flwr.strategies import STRATEGIES
from numpyclient.task import Net

__all__ = ["app"]


def server_fn(context: Context) -> ServerAppComponents:
    """Make the strategy and the number of rounds."""
    rounds = int(context.run_config["num-server-rounds"])
    torch.manual_seed(0)
    kind = STRATEGIES[str(context.run_config["strategy"])]
    strategy = kind(min_available_nodes=2)
    legacy = to_legacy(strategy, ArrayRecord(Net().state_dict()), num_rounds=rounds)
    return ServerAppComponents(strategy=legacy, config=ServerConfig(num_rounds=rounds))


app = ServerApp(server_fn=server_fn)
