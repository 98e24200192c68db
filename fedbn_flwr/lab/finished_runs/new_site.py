"""BatchNorm for the data of a site that did not train: statistics of its inputs, guarded, or the clients' BN parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedbn_flwr.batchnorm.client_parts import blend_weights, blended, distance
from fedbn_flwr.batchnorm.label_shift import DECLINED, guarded_statistics
from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.batchnorm.reestimation import load_statistics, reestimate_statistics
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.files import read_json
from fedbn_flwr.lab.finished_runs.saved_model import BLEND, NEAREST, SavedModel
from fedbn_flwr.lab.partitioned.report import TRAINING_BY_CLASS
from fedbn_flwr.training.batches import Batches
from fedbn_flwr.training.tasks import Task

__all__ = ["ADAPT", "AS_SAVED", "OF_A_SITE", "Choices", "Load", "choices"]

ADAPT = "adapt"
"""The BN whose statistics are re-estimated on the new inputs; no target is used."""
OF_A_SITE = (ADAPT, NEAREST, BLEND)
AS_SAVED = "as saved"

Load = Callable[[nn.Module], None]


@dataclass(frozen=True)
class Choices:
    """Models that differ in their BN, and the one to use.

    Attributes:
        models: by name what changes the saved model into each, in place.
        chosen: the name of the one to use.
        why: what was chosen and by which numbers, in a line.
    """

    models: Mapping[str, Load]
    chosen: str
    why: str


def choices(model: nn.Module, data: Batches, task: Task, saved: SavedModel, bn: str) -> Choices:
    """Return the models that ``bn`` can mean for these inputs, that as saved first; ``model`` does not change.

    Args:
        model: the model of ``saved``, on the device to use.
        data: the inputs of the site; targets are not used.
        task: the learning task of the test.
        saved: the model's run.
        bn: one of ``OF_A_SITE``.

    Raises:
        ConfigError: statistics cannot be re-estimated: there is no BatchNorm, or one example.
    """
    return _guarded(model, data, task, saved) if bn == ADAPT else _of_clients(model, data, task, saved, bn)


def _guarded(model: nn.Module, data: Batches, task: Task, saved: SavedModel) -> Choices:
    found = guarded_statistics(model, data, task, _training_shares(saved), batch_size=task.test_batch)
    if not all(found.statistics.values()):
        raise _no_statistics(saved, data, ADAPT)
    models: dict[str, Load] = {AS_SAVED: lambda model: None}
    for name, moments in found.statistics.items():
        models[name] = lambda model, moments=moments: load_statistics(model, moments)  # type: ignore[misc]
    return Choices(models, AS_SAVED if found.kept == DECLINED else found.kept, f"bn={ADAPT}: {found}")


def _of_clients(model: nn.Module, data: Batches, task: Task, saved: SavedModel, bn: str) -> Choices:
    moments = reestimate_statistics(model, data, batch_size=task.test_batch)
    if not moments:
        raise _no_statistics(saved, data, bn)
    apart = {client: distance(part, moments) for client, part in saved.client_parts.items()}
    nearest = min(apart, key=lambda client: apart[client])
    weights = {client: float(client == nearest) for client in apart} if bn == NEAREST else blend_weights(apart)
    entries = blended(saved.client_parts, weights, split_state(model))
    told = ", ".join(f"client {client}: {apart[client]:.3g} ({weights[client]:.0%})" for client in apart)

    def load(model: nn.Module) -> None:
        own = model.state_dict()
        model.load_state_dict({name: torch.from_numpy(value).to(own[name]) for name, value in entries.items()}, False)

    name = f"{NEAREST}: client {nearest}" if bn == NEAREST else BLEND
    return Choices({AS_SAVED: lambda model: None, name: load}, name, f"bn={bn}: distance (weight) of {told}")


def _training_shares(saved: SavedModel) -> Tensor | None:
    """Return the share of each class in the run's training data; None where the run does not say."""
    by_client = read_json(saved.run / "data.json").get(TRAINING_BY_CLASS, {})
    counts = torch.tensor([*by_client.values()], dtype=torch.float64)
    return counts.sum(0) / counts.sum() if counts.numel() and counts.sum() > 0 else None


def _no_statistics(saved: SavedModel, data: Batches, bn: str) -> ConfigError:
    return ConfigError(
        f"bn={bn} re-estimates BN statistics from two or more examples. The data have {len(data)}, and "
        f"model={saved.config.model} with norm={saved.config.norm} needs BatchNorm. Leave bn out."
    )
