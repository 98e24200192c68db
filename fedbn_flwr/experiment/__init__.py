"""Experiments: typed configs, runs, sweeps and their output folders."""

from __future__ import annotations

from fedbn_flwr.experiment.config import Config

__all__ = ["Config"]
