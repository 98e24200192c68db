"""Trackers: places outside the run folder that show a run's numbers while it runs, behind one interface.

The server alone writes to them. ``metrics.jsonl`` and ``summary.json`` stay the record of a run; a tracker is a copy.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedbn_flwr.errors import install_extra
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.trackers.adapters import MLflow, TensorBoard, WandB
from fedbn_flwr.lab.trackers.delivery import Delivery
from fedbn_flwr.lab.trackers.interface import Tracker, numbers_of

__all__ = ["TRACKERS", "Delivery", "Tracker", "deliveries", "numbers_of", "tracker_problems"]

TRACKERS: dict[str, type[Tracker]] = {kind.key: kind for kind in (TensorBoard, WandB, MLflow)}
"""Config key of each tracker, and its class."""


def tracker_problems(config: Config) -> list[str]:
    """Return why the trackers of a config cannot start, one line each."""
    problems = []
    for kind in _asked(config):
        given = f"{kind.key}={str(getattr(config, kind.key)).lower()}"
        if importlib.util.find_spec(kind.module) is None:
            problems.append(
                f"{given} needs the package {kind.module}, which is not installed; "
                f"{install_extra(kind.key)}, or leave the key out"
            )
        elif problem := kind.problem(config):
            problems.append(f"{given}: {problem}")
    return problems


def deliveries(config: Config, folder: Path, after: int, lines: Sequence[Mapping[str, Any]]) -> list[Delivery]:
    """Start the trackers of a run.

    Args:
        config: the run's config.
        folder: its folder.
        after: the last finished round of a resumed run, else 0.
        lines: its lines of ``metrics.jsonl`` so far.
    """
    return [Delivery(kind(config, folder, after), lines) for kind in _asked(config)]


def _asked(config: Config) -> list[type[Tracker]]:
    return [kind for key, kind in TRACKERS.items() if getattr(config, key)]
