"""The client code: ``TorchClient``, and mod and hooks for users' own training loops."""

from __future__ import annotations

from fedbn_flwr.client.message_app import client_app
from fedbn_flwr.client.torch_client import TorchClient

__all__ = ["TorchClient", "client_app"]
