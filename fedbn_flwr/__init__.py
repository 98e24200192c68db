"""Batch Normalization in federated learning, done right, on Flower."""

from __future__ import annotations

from fedbn_flwr.client import TorchClient, client_app
from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.legacy import to_legacy
from fedbn_flwr.norms import replace_norm
from fedbn_flwr.state import split_state
from fedbn_flwr.wrappers import unwrap

__all__ = ["InProcessGrid", "TorchClient", "client_app", "replace_norm", "split_state", "to_legacy", "unwrap"]
