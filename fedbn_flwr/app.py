"""The default Flower app, configured only by the run config."""

from __future__ import annotations

from fedbn_flwr.lab.runs.default_app import client_app, server_app

__all__ = ["client_app", "server_app"]
