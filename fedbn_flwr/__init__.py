"""Batch Normalization in federated learning, done right, on Flower."""

from __future__ import annotations

from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.client import TorchClient, client_app
from fedbn_flwr.client.saved_state import global_state, personal_state
from fedbn_flwr.compat.legacy_strategy import to_legacy
from fedbn_flwr.doctor import diagnose
from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.norms import replace_norm
from fedbn_flwr.privacy import DPWrapper
from fedbn_flwr.training.wrappers import unwrap

__all__ = [
    "DPWrapper",
    "InProcessGrid",
    "TorchClient",
    "client_app",
    "diagnose",
    "global_state",
    "personal_state",
    "replace_norm",
    "split_state",
    "to_legacy",
    "unwrap",
]
