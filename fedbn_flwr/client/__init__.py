"""The client half: ``TorchClient``, and the mod and hooks for users' own training loops."""

from __future__ import annotations

from fedbn_flwr.client.torch_client import TorchClient, client_app

__all__ = ["TorchClient", "client_app"]
