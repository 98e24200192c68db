"""Moments of the inputs of BatchNorm layers for each class.

The training sites compute them once, with labels. With their pooled sums, ``calibrate``
separates the shift of a new site's classes from the shift of its inputs (way
``matched``).

Each site uses its own model. A layer with running statistics (m, v) normalises its
input to z = (x - m) / sqrt(v + eps), so the moments of sites with different statistics
can be added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedbn_flwr.batchnorm.replaced_forward import watch_inputs
from fedbn_flwr.errors import DataError
from fedbn_flwr.training.batches import inputs_for
from fedbn_flwr.training.channels import other_axes, per_channel
from fedbn_flwr.training.freezing import layers_of
from fedbn_flwr.training.model_state import copied, unwrap

__all__ = ["ClassMoments", "class_moments", "pool_class_moments"]


@dataclass(frozen=True)
class ClassMoments:
    """Sums over the examples of K classes, in float64.

    An example of an image layer contributes its mean over the pixels.

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
        """Return mean and biased variance (C,) of z for the class mix (K,)."""
        of_class = mix / self.counts.clamp(min=1)
        mean = of_class @ self.first[path]
        return mean, of_class @ self.second[path] - mean.square()

    def problems(
        self, statistics: Mapping[str, tuple[Tensor, Tensor]], num_classes: int
    ) -> list[str]:
        """Return a sentence if the moments belong to another model, else nothing.

        Args:
            statistics: mean and variance of the model's layers, by path.
            num_classes: number of outputs of the model.
        """
        shapes = {path: len(mean) for path, (mean, _) in statistics.items()}
        own = {path: sums.shape[1] for path, sums in self.first.items()}
        if own.items() <= shapes.items() and len(self.counts) == num_classes:
            return []
        return [
            "class_moments belong to another model: their layers, channels or classes"
            " differ. Pass the moments of the run that trained this model."
        ]


def class_moments(
    model: nn.Module, batches: Iterable[tuple[Any, Tensor]], num_classes: int
) -> ClassMoments:
    """Return the class moments of a site's training examples.

    Args:
        model: the site's own model, with its running statistics. It does not change.
        batches: inputs with classes (B,) in 0..num_classes-1. The order of examples and
            the batch size do not matter.
        num_classes: the number K of classes.

    Raises:
        DataError: a class is outside this range.
        StateError: the model cannot be copied.
    """
    model = copied(unwrap(model)).eval()
    counts: Any = torch.zeros(num_classes, dtype=torch.float64)
    first: dict[str, Any] = {}
    second: dict[str, Any] = {}
    one_hot = torch.empty(0)

    def watch(path: str, layer: Any) -> None:
        def note(_: nn.Module, x: Tensor) -> None:
            mean, var = layer.running_mean.double(), layer.running_var.double()
            z = x.double() - per_channel(mean, x)
            z = z / per_channel((var + layer.eps).sqrt(), x)
            axes = other_axes(z)[1:]
            of_example = z.mean(axes) if axes else z
            squares = z.square().mean(axes) if axes else z.square()
            first[path] = first.get(path, 0) + one_hot @ of_example
            second[path] = second.get(path, 0) + one_hot @ squares

        watch_inputs(layer, note)

    for path, layer in layers_of(model).items():
        if layer.running_mean is not None:
            watch(path, layer)
    prepared = inputs_for(model)
    with torch.no_grad():
        for inputs, targets in batches:
            if targets.min() < 0 or targets.max() >= num_classes:
                raise DataError(
                    f"class moments: the classes are {int(targets.min())} to"
                    f" {int(targets.max())}. Allowed: 0 to {num_classes - 1}. Correct"
                    " the labels or num_classes."
                )
            inputs = prepared(inputs)
            at = functional.one_hot(targets.long(), num_classes).T.double()
            counts += at.sum(1)
            one_hot = at.to(next(model.parameters()).device)
            model(inputs)
    cpu = torch.device("cpu")
    return ClassMoments(
        counts,
        {path: sums.to(cpu) for path, sums in first.items()},
        {path: sums.to(cpu) for path, sums in second.items()},
    )


def pool_class_moments(moments: Sequence[ClassMoments]) -> ClassMoments:
    """Return the class moments of all sites together: the sums are added.

    Args:
        moments: one entry per site, in an order that does not depend on arrival.
    """
    counts = torch.stack([one.counts for one in moments]).sum(0)
    first, second = {}, {}
    for path in moments[0].first:
        first[path] = torch.stack([one.first[path] for one in moments]).sum(0)
        second[path] = torch.stack([one.second[path] for one in moments]).sum(0)
    return ClassMoments(counts, first, second)
