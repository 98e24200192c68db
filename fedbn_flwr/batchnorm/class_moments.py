"""Moments of the inputs of BatchNorm layers, for each class.

The training sites compute them once, with labels. With the pooled sums, ``calibrate``
separates a new site's class mix from the shift of its inputs (way "matched").

Each site uses its own model. A layer with running statistics (m, v) normalises its
input to z = (x - m) / sqrt(v + eps), so sums of sites with different statistics can be
added.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from fedbn_flwr.batchnorm.layer_inputs import watch_inputs
from fedbn_flwr.errors import DataError, NormLayerError, StateError
from fedbn_flwr.training.batches import inputs_for, map_inputs
from fedbn_flwr.training.borrowed import borrowed
from fedbn_flwr.training.channels import per_channel
from fedbn_flwr.training.freezing import layers_of
from fedbn_flwr.training.model_state import unwrap
from fedbn_flwr.training.own_task import OwnTask
from fedbn_flwr.training.tasks import CLASSIFICATION, Task, refuse_no_tensor

__all__ = [
    "ClassMoments",
    "class_moments",
    "encode_class_moments",
    "pool_class_moments",
    "read_class_moments",
]


@dataclass(frozen=True)
class ClassMoments:
    """Sums over the examples of K classes, float64 on the CPU.

    An image contributes its mean over the pixels.

    Attributes:
        counts: number of examples of each class, (K,).
        first: sums of z by path of the layer, (K, C) each.
        second: sums of z^2 by path of the layer, (K, C) each.
    """

    counts: Tensor
    first: Mapping[str, Tensor]
    second: Mapping[str, Tensor]

    @property
    def class_mix(self) -> Tensor:
        """The share of each class, (K,)."""
        return self.counts / self.counts.sum()

    def mean_and_variance(self, path: str, mix: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and biased variance (C,) of z under the class mix (K,)."""
        share_of_example = mix / self.counts.clamp(min=1)
        mean = share_of_example @ self.first[path]
        return mean, share_of_example @ self.second[path] - mean.square()

    def fits(self, channels: Mapping[str, int], num_classes: int) -> bool:
        """Return whether they belong to a model with these layers and classes."""
        own = {path: sums.shape[1] for path, sums in self.first.items()}
        return own == dict(channels) and len(self.counts) == num_classes


def class_moments(
    model: nn.Module, batches: Iterable[tuple[Any, Tensor]], task: Task = CLASSIFICATION
) -> ClassMoments:
    """Return the class moments of a site's training examples.

    The order of the examples and the batch size do not matter.

    Args:
        model: the site's own model, with its running statistics. It does not change.
        batches: inputs, and the number of the class of each example (B,) or (B, 1).
        task: a task with one class for each example.

    Raises:
        DataError: the task or a target is not a class of the model.
        NormLayerError: a layer does not get each example once in a pass, in the order
            of the batch, or does not call ``functional.batch_norm``.
    """
    if isinstance(task, OwnTask):
        raise DataError(
            f"class moments need one class for each example, but task {task.name} is a"
            " task of your own, without classes: leave class_moments out"
        )
    model = unwrap(model)
    seen: list[tuple[str, Tensor, Tensor]] = []
    sums: list[dict[str, Tensor]] = [{}, {}]
    counts = torch.zeros(0)

    layers: dict[str, Any] = {}
    for path, layer in layers_of(model).items():
        if layer.running_mean is not None:
            layers[path] = layer

    def note(path: str, x: Tensor) -> None:
        layer = layers[path]
        z = x.double() - per_channel(layer.running_mean.double(), x)
        z /= per_channel((layer.running_var.double() + layer.eps).sqrt(), x)
        z = z.reshape(*z.shape[:2], -1)
        seen.append((path, z.mean(2).cpu(), z.square().mean(2).cpu()))

    prepared = inputs_for(model)
    with borrowed(model), torch.no_grad():
        model.eval()
        watch_inputs(layers, note)
        for inputs, targets in batches:
            inputs, labels = prepared(inputs), targets.reshape(-1).cpu()
            shapes = [getattr(x, "shape", ()) for x in tree_leaves(inputs)]
            seen.clear()
            # A model may sort its batch. Then the rows of a layer are not the examples.
            if all(shape[:1] == labels.shape for shape in shapes):
                model(map_inputs(lambda x: x.flip(0), inputs))
            backwards = {path: of_example.flip(0) for path, of_example, _ in seen}
            seen.clear()
            outputs = model(inputs)
            refuse_no_tensor(outputs, "class moments")
            guesses = task.class_probabilities(outputs)
            classes = 0 if guesses is None else guesses.shape[1]
            if not bool(((labels >= 0) & (labels < classes)).all()):
                raise DataError(
                    f"class moments: task {task.name} with {classes} classes has the"
                    f" targets {labels.min()} to {labels.max()}. Each example needs one"
                    " class, from 0 to the number of classes - 1."
                )
            of_class = functional.one_hot(labels.long(), classes).T.double()
            counts = of_class.sum(1) + (counts if len(counts) else 0)
            paths = [path for path, *_ in seen]
            for path, *of_example in seen:
                is_odd = len(of_example[0]) != len(labels) or paths.count(path) > 1
                again = backwards.get(path, of_example[0])
                if is_odd or not torch.allclose(again, of_example[0], 1e-3, 1e-3):
                    raise NormLayerError(
                        f"class moments: BatchNorm layer '{path}' does not get each"
                        " example once in a pass and in the order of the batch, so its"
                        " inputs have no classes. Leave class_moments out, or use a"
                        " separate layer for each call."
                    )
                for total, values in zip(sums, of_example, strict=True):
                    total[path] = of_class @ values + total.get(path, 0)
    return ClassMoments(counts, *sums)


def pool_class_moments(moments: Sequence[ClassMoments]) -> ClassMoments:
    """Return the class moments of all sites together, by adding the sums.

    Args:
        moments: one entry per site, in an order that does not depend on arrival.
    """

    def added(sums: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        return {path: torch.stack([s[path] for s in sums]).sum(0) for path in sums[0]}

    return ClassMoments(
        torch.stack([one.counts for one in moments]).sum(0),
        added([one.first for one in moments]),
        added([one.second for one in moments]),
    )


def encode_class_moments(moments: ClassMoments) -> bytes:
    """Return the content of ``class_moments.npz``.

    Its arrays are ``counts``, ``first/PATH`` and ``second/PATH``.
    """
    arrays = {"counts": moments.counts.numpy()}
    for name, sums in (("first", moments.first), ("second", moments.second)):
        arrays |= {f"{name}/{path}": one.numpy() for path, one in sums.items()}
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


def read_class_moments(path: str | Path) -> ClassMoments:
    """Return the class moments in ``class_moments.npz`` of a run's folder.

    Raises:
        StateError: the file is missing, or a run did not write it.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: torch.from_numpy(file[name]) for name in file}
        counts = arrays.pop("counts")
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise StateError(
            f"{path} has no class moments ({error}). Take class_moments.npz from the"
            " folder of a run with class-moments=true."
        ) from error
    first, second = dict[str, Tensor](), dict[str, Tensor]()
    for name, sums in arrays.items():
        kind, _, layer = name.partition("/")
        (first if kind == "first" else second)[layer] = sums
    return ClassMoments(counts, first, second)
