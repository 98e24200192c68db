"""Inputs of every BatchNorm layer, example by example, in eval mode.

BatchNorm with running statistics treats each example alone. So the examples of all clients can be regrouped in any way
without another pass over the network, and a regrouping at random shows what chance does. A layer without running
statistics sees the examples of a pass together. So a pass mixes the clients at random, and no client has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fedbn_flwr.doctor.by_batch import layers_of
from fedbn_flwr.doctor.clients import ClientData, classes_of, examples_a_pass, inputs_at, parts
from fedbn_flwr.doctor.thresholds import MAX_CHANNELS
from fedbn_flwr.training.channels import other_axes
from fedbn_flwr.training.copying import copied
from fedbn_flwr.training.memory_format import inputs_for

__all__ = ["Features", "LayerFeatures", "Range", "features"]

_BATCH = 128
_RELU = (functional.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_, functional.relu6)
# By name, each with the settings behind its input: it is a ReLU if they are 0, as in nn.ReLU6 or clamp(min=0).
_CLIPS = {
    **dict.fromkeys(("hardtanh", "hardtanh_"), ("min_val",)),
    **dict.fromkeys(("clamp", "clamp_", "clip", "clip_", "clamp_min", "clamp_min_"), ("min",)),
    **dict.fromkeys(("threshold", "_threshold", "threshold_"), ("threshold", "value")),
}
# Functions of torch by name, as modules and methods have them, too: none makes a positive value of negative ones.
_KEEP_SIGNS = {
    f"{kind}{d}d" for kind in ("max_pool", "adaptive_max_pool", "avg_pool", "adaptive_avg_pool") for d in (1, 2, 3)
}
_KEEP_SIGNS |= {"dropout", "dropout1d", "dropout2d", "dropout3d", "mean", "amax", "contiguous"}
_KEEP_SIGNS |= {"flatten", "reshape", "view", "permute", "transpose", "squeeze", "unsqueeze"}


class Range(NamedTuple):
    """The smallest and the largest value of each channel, (C,) each."""

    low: Tensor
    high: Tensor

    @classmethod
    def of(cls, value: Tensor) -> Range:
        """Return the range of an input or output (N, C, *), on the CPU."""
        axes, value = other_axes(value), value.detach().float()
        return cls(value.amin(axes).cpu(), value.amax(axes).cpu())

    def joined(self, other: Range | None) -> Range:
        """Return the range of both."""
        return self if other is None else Range(self.low.minimum(other.low), self.high.maximum(other.high))

    def constant(self) -> Tensor:
        """Return the channels, bool (C,), with one value, up to rounding; infinity and NaN are none."""
        size = self.high - self.low
        return size.isfinite() & (size <= 1e-6 * self.high.abs().clamp(min=1e-6))


@dataclass
class _Same:
    """Whether all examples of some batches have the same value: the first one's, up to rounding."""

    all: bool = True
    _first: Tensor | None = None

    def add(self, values: object) -> None:
        """Add a batch (N, *); what is no tensor of finite numbers counts as different."""
        if not isinstance(values, Tensor) or not values.dim():
            self.all = False
        elif self.all:
            rows = values.detach().float().reshape(len(values), -1)
            first = rows[0] if self._first is None else self._first
            self._first = first
            self.all = bool(torch.isclose(rows, first, rtol=1e-6, atol=1e-12).all())


@dataclass
class LayerFeatures:
    """One layer over N examples. x is its input, (N, C) or (N, C, *); averages are over the positions *.

    D of the C channels are kept, at most 64, evenly spread: they say enough.

    Attributes:
        centre: a mean (D,) of some examples, subtracted first, so that squares do not cancel.
        first: the average of x - centre, (N, D).
        second: the average of (x - centre)^2, (N, D).
        inputs: smallest and largest input of the layer, (C,) each.
        outputs: the same of its output.
        before_relu: whether a ReLU takes the layer's output, as it is or pooled.
    """

    centre: Tensor
    first: Tensor
    second: Tensor
    inputs: Range
    outputs: Range
    before_relu: bool = False

    def constant(self) -> Tensor:
        """Return the channels, bool (C,), whose output is the same for all examples, or 0 after the ReLU.

        A channel whose input is the same already is left out: a layer before it is the cause, or the data.
        """
        dead = self.outputs.constant()
        if self.before_relu:
            dead = dead | (self.outputs.high <= 0)
        return dead & ~self.inputs.constant()


@dataclass
class Features:
    """All layers over the examples of all clients.

    Attributes:
        layers: by path; a layer that is not called once with one row an example is left out.
        owner: index of each example's client, (N,).
        classes: class of each example, (N,); None if targets are not classes.
        left_out: paths of the layers that are left out, and why.
        blocked: the first layer, in the order of the calls, with the same input for all examples, in every channel,
            although the model's inputs differ; "" = none.
        same_output: whether the model's output is the same for all examples, although its inputs differ.
    """

    layers: dict[str, LayerFeatures]
    owner: Tensor
    classes: Tensor | None
    left_out: dict[str, str] = field(default_factory=dict)
    blocked: str = ""
    same_output: bool = False


def features(model: nn.Module, clients: Sequence[ClientData], generator: torch.Generator) -> Features:
    """Return the features of all clients' examples, in random order; the model does not change."""
    working = copied(model).eval()
    prepared, watch = inputs_for(working), _Watch()
    handles = [
        handle
        for path, layer in layers_of(working).items()
        for handle in (
            layer.register_forward_pre_hook(lambda _, *call, path=path: watch.enter(path, *call), with_kwargs=True),
            layer.register_forward_hook(lambda _, args, output, path=path: watch.leave(path, output)),
        )
    ]
    order = torch.randperm(sum(map(len, clients)), generator=generator)
    inputs, outputs = _Same(), _Same()
    with torch.no_grad(), watch:
        for positions in parts(order, examples_a_pass(clients, _BATCH)):
            watch.begin(len(positions))
            batch = prepared(inputs_at(clients, positions))
            inputs.add(batch)
            outputs.add(working(batch))
    for handle in handles:
        handle.remove()
    owner = torch.cat([torch.full((len(client),), index) for index, client in enumerate(clients)])
    known = classes_of(clients)
    layers, differ = watch.layers(len(order)), not inputs.all
    blocked = next((path for path, layer in layers.items() if differ and bool(layer.inputs.constant().all())), "")
    classes = None if known is None else known[order]
    return Features(layers, owner[order], classes, watch.refused, blocked, differ and outputs.all)


def chosen_channels(count: int) -> Tensor:
    """Return the channels that are kept of so many, at most 64, evenly spread."""
    return torch.linspace(0, count - 1, min(MAX_CHANNELS, count)).round().long()


def _all_zero(settings: tuple[str, ...], args: tuple[Any, ...], kwargs: Any) -> bool:
    """Return whether a call has 0 for each of these settings, by position or by name."""
    values = [args[place] if len(args) > place else kwargs.get(name) for place, name in enumerate(settings, 1)]
    return all(isinstance(value, (int, float)) and value == 0 for value in values)


class _Watch(TorchFunctionMode):
    """Collects inputs and the ranges of outputs, and sees which outputs go into a ReLU, as they are or pooled."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: dict[str, str] = {}
        self._size = 0
        self._seen: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self._centre: dict[str, Tensor] = {}
        self._inputs: dict[str, Range] = {}
        self._outputs: dict[str, Range] = {}
        self._relu: set[str] = set()
        self._called: set[str] = set()
        self._latest = ""
        self._same_signs: list[Tensor] = []  # the latest layer's output, and what pooling and views made of it

    def begin(self, size: int) -> None:
        self._size, self._called = size, set()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        cuts = func in _RELU or (name in _CLIPS and _all_zero(_CLIPS[name], args, kwargs))
        follows = bool(args) and any(args[0] is value for value in self._same_signs)
        if cuts and follows:
            self._relu.add(self._latest)
        result = func(*args, **kwargs)
        if follows and name in _KEEP_SIGNS and isinstance(result, Tensor):
            self._same_signs.append(result)
        return result

    def enter(self, path: str, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        value = args[0] if args else kwargs["input"]
        if len(value) != self._size or path in self._called:
            reason = "called more than once in a pass" if path in self._called else "no row an example"
            self.refused.setdefault(path, reason)
            return
        self._called.add(path)
        self._inputs[path] = Range.of(value).joined(self._inputs.get(path))
        value = value.detach()[:, chosen_channels(value.shape[1]).to(value.device)].float()
        x = value.flatten(2) if value.dim() > 2 else value[..., None]
        centre = self._centre.setdefault(path, x.mean((0, 2)))
        x = x - centre[:, None]
        self._seen.setdefault(path, []).append((x.mean(2).cpu(), x.square().mean(2).cpu()))

    def leave(self, path: str, output: Tensor) -> None:
        self._latest, self._same_signs = path, [output]
        self._outputs[path] = Range.of(output).joined(self._outputs.get(path))

    def layers(self, count: int) -> dict[str, LayerFeatures]:
        by_path = {}
        for path, pieces in self._seen.items():
            first, second = (torch.cat(column) for column in zip(*pieces, strict=True))
            if path in self.refused or len(first) != count:
                self.refused.setdefault(path, "not called in every pass")
                continue
            ranges = self._inputs[path], self._outputs[path]
            by_path[path] = LayerFeatures(self._centre[path].cpu(), first, second, *ranges, path in self._relu)
        return by_path
