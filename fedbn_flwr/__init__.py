"""Batch Normalization in federated learning, done right, on Flower.

A name is imported at its first use. ``problems`` lists the modules that refuse
something.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fedbn_flwr.lazy import imported_when_used

if TYPE_CHECKING:
    from fedbn_flwr.batchnorm.calibration import calibrate
    from fedbn_flwr.batchnorm.parts import split_state
    from fedbn_flwr.batchnorm.train_only import train_only
    from fedbn_flwr.client import TorchClient, client_app
    from fedbn_flwr.client.personal_model import global_state, personal_state
    from fedbn_flwr.doctor import diagnose
    from fedbn_flwr.engines import InProcessGrid
    from fedbn_flwr.legacy.legacy_client import to_client_fn
    from fedbn_flwr.legacy.legacy_strategy import LegacyStrategy, to_legacy
    from fedbn_flwr.norms import replace_norm
    from fedbn_flwr.privacy import DPWrapper
    from fedbn_flwr.training.model_state import unwrap

__all__ = [
    "DPWrapper",
    "InProcessGrid",
    "LegacyStrategy",
    "TorchClient",
    "calibrate",
    "client_app",
    "diagnose",
    "global_state",
    "personal_state",
    "replace_norm",
    "split_state",
    "to_client_fn",
    "to_legacy",
    "train_only",
    "unwrap",
]

_WHERE = {
    "DPWrapper": "privacy",
    "InProcessGrid": "engines",
    "LegacyStrategy": "legacy.legacy_strategy",
    "TorchClient": "client",
    "calibrate": "batchnorm.calibration",
    "client_app": "client",
    "diagnose": "doctor",
    "global_state": "client.personal_model",
    "personal_state": "client.personal_model",
    "replace_norm": "norms",
    "split_state": "batchnorm.parts",
    "to_client_fn": "legacy.legacy_client",
    "to_legacy": "legacy.legacy_strategy",
    "train_only": "batchnorm.train_only",
    "unwrap": "training.model_state",
}
_ROOMS = (
    "batchnorm",
    "doctor",
    "errors",
    "mods",
    "norms",
    "privacy",
    "strategies",
    "training",
)


if not TYPE_CHECKING:  # hidden: with __getattr__, a type checker would accept any name
    _named, _ = imported_when_used(__name__, _WHERE)

    def __getattr__(name: str) -> Any:
        if name in _ROOMS:
            return importlib.import_module(f"{__name__}.{name}")
        return _named(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
