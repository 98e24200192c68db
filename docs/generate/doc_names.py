"""The names of the registries, by which a command answers without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fedbn_flwr.lab.config import CENTRALIZED
from fedbn_flwr.lab.data import DATASETS, FUNCTION_FORM, KINDS, PARTITIONS
from fedbn_flwr.lab.models import MODELS
from fedbn_flwr.norms import NORMS
from fedbn_flwr.strategies import METHODS
from fedbn_flwr.training.tasks import TASKS

__all__ = ["names_of_registries"]


def names_of_registries() -> str:
    """Return the text of ``names.json``: (name, summary, source) by registry."""
    methods = [
        (name, method.summary_line, method.source) for name, method in METHODS.items()
    ]
    methods.append(
        (
            CENTRALIZED,
            "the reference: FedAvg with one client, which has all data",
            "-",
        )
    )
    content: dict[str, Any] = {"strategies": methods}
    others: dict[str, Mapping[str, Any]] = {
        "norms": NORMS,
        "models": MODELS,
        "datasets": DATASETS,
        "partitions": PARTITIONS,
    }
    for kind, registry in others.items():
        content[kind] = [
            (name, info.summary, info.source) for name, info in registry.items()
        ]
    for form in (*KINDS.values(), FUNCTION_FORM):
        name, _, what = form.partition(", ")
        content["datasets"].append((name, what, "own data"))
    content["tasks"] = [
        (name, f"main metric: {task.score}", "-") for name, task in TASKS.items()
    ]
    text = json.dumps(content, ensure_ascii=False)
    # Write a line for each entry.
    return text.replace("]], ", "]],\n").replace("], [", "],\n [") + "\n"
