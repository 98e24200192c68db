"""Engines: where the ServerApp's strategy meets the ClientApps."""

from __future__ import annotations

from fedbn_flwr.engines.in_process import InProcessGrid

__all__ = ["InProcessGrid"]
