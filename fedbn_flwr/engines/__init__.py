"""Engines: they run a ServerApp's strategy together with ClientApps."""

from __future__ import annotations

from fedbn_flwr.engines.in_process import InProcessGrid

__all__ = ["InProcessGrid"]
