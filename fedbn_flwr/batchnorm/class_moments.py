"""Moments of the inputs of BatchNorm layers, for each class.

The training sites compute them once, with labels. With the pooled sums, ``calibrate``
separates a new site's class mix from the shift of its inputs (way "matched").

Each site uses its own model. A layer with running statistics (m, v) normalises its
input to z = (x - m) / sqrt(v + eps), so sums of sites with different statistics can be
added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.batchnorm.replaced_forward import watch_inputs
from fedbn_flwr.errors import DataError
from fedbn_flwr.training.batches import inputs_for
from fedbn_flwr.training.channels import per_channel
from fedbn_flwr.training.freezing import layers_of, refuse_scripted
from fedbn_flwr.training.model_state import copied, unwrap

__all__ = ["ClassMoments", "class_moments", "pool_class_moments"]


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
    model: nn.Module, batches: Iterable[tuple[Any, Tensor]], num_classes: int
) -> ClassMoments:
    """Return the class moments of a site's training examples.

    The order of the examples and the batch size do not matter.

    Args:
        model: the site's own model, with its running statistics. It does not change.
        batches: inputs, and their classes (B,) in 0..num_classes-1.
        num_classes: the number K of classes.

    Raises:
        DataError: a class is not allowed.
        NormLayerError: a layer is in TorchScript.
        StateError: the model cannot be copied.
    """
    refuse_scripted(model, "class moments")
    model = copied(unwrap(model)).eval()
    counts = torch.zeros(num_classes, dtype=torch.float64)
    first: dict[str, Tensor] = {}
    second: dict[str, Tensor] = {}
    paths: dict[_BatchNorm, str] = {}
    one_hot = counts

    def add(layer: _BatchNorm, x: Tensor) -> None:
        wide, mean, var = x.double(), layer.running_mean, layer.running_var
        z = wide - per_channel(mean.double(), x)  # type: ignore[union-attr]
        z /= per_channel((var.double() + layer.eps).sqrt(), x)  # type: ignore[union-attr]
        z = z.reshape(*z.shape[:2], -1)
        of_classes, path = one_hot.to(z.device), paths[layer]
        for sums, values in ((first, z), (second, z.square())):
            added = (of_classes @ values.mean(2)).cpu()
            sums[path] = sums[path] + added if path in sums else added

    for path, layer in layers_of(model).items():
        if layer.running_mean is not None:
            paths[layer] = path
            watch_inputs(layer, add)
    prepared = inputs_for(model)
    with torch.no_grad():
        for inputs, targets in batches:
            if targets.min() < 0 or targets.max() >= num_classes:
                raise DataError(
                    f"class moments: the classes are {int(targets.min())} to"
                    f" {int(targets.max())}. Allowed: 0 to {num_classes - 1}. Correct"
                    " the labels, or num_classes."
                )
            one_hot = functional.one_hot(targets.long().cpu(), num_classes).T.double()
            counts += one_hot.sum(1)
            model(prepared(inputs))
    return ClassMoments(counts, first, second)


def pool_class_moments(moments: Sequence[ClassMoments]) -> ClassMoments:
    """Return the class moments of all sites together; the sums are added.

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
