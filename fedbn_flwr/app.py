"""The default Flower app: all settings are those of the run config."""

from __future__ import annotations

from fedbn_flwr.lab.runs.default_app import client_app, server_app

__all__ = ["client_app", "server_app"]
