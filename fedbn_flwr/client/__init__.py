"""The client code, with ``TorchClient``, the mod and hooks for other training loops."""

from __future__ import annotations

from fedbn_flwr.client.message_app import client_app
from fedbn_flwr.client.torch_client import TorchClient

__all__ = ["TorchClient", "client_app"]
