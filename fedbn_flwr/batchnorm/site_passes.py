"""Passes over the inputs of a new site, with the statistics of each way.

``calibration`` gives the formulas, and decides between the ways.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fedbn_flwr.batchnorm.class_moments import ClassMoments
from fedbn_flwr.batchnorm.layer_inputs import watch_inputs
from fedbn_flwr.batchnorm.reestimation import Moments, MomentSums, merge, moments_of
from fedbn_flwr.errors import DataError, NormLayerError
from fedbn_flwr.training.batches import inputs_for
from fedbn_flwr.training.borrowed import borrowed, copied
from fedbn_flwr.training.freezing import layers_of
from fedbn_flwr.training.model_state import unwrap
from fedbn_flwr.training.tasks import refuse_no_tensor

Statistics = tuple[Tensor, Tensor]
"""Mean and biased variance of a layer, (C,) each, in float64."""
Rule = Callable[[Statistics, Moments, str], Statistics]
"""``rule(stored, moments, path)`` returns the new statistics of a layer."""

# Batches are joined up to this number of elements.
ONE_BATCH = 1 << 21
# Two parts explain this share of the variance in a direction, and each has this share of
# the examples.
_PARTS = 0.78
_SMALLEST_PART = 0.05
# Smallest variance of a normalised channel: a class may have none.
_SMALL = 1e-3


def use_all(stored: Statistics, moments: Moments, path: str) -> Statistics:
    """Return (a, b), the statistics of "all"."""
    return moments.mean, moments.m2 / moments.count


def use_mix(prior: float, examples: int) -> Rule:
    """Return the rule of "mix" for N = ``prior`` and n = ``examples``."""
    # 1 - w, so that an infinite prior is exact
    share = examples / (prior + examples)

    def rule(stored: Statistics, moments: Moments, path: str) -> Statistics:
        (m, v), (a, b) = stored, use_all(stored, moments, path)
        return (1 - share) * m + share * a, (1 - share) * v + share * b

    return rule


def use_matched(known: ClassMoments, mix: Tensor) -> Rule:
    """Return the rule of "matched" for the class mix p (K,)."""

    def rule(stored: Statistics, moments: Moments, path: str) -> Statistics:
        a, b = use_all(stored, moments, path)
        mean_p, var_p = known.mean_and_variance(path, mix)
        mean_pi, var_pi = known.mean_and_variance(path, known.class_mix)
        square = b / var_p.clamp(min=_SMALL).to(b.device)
        shift = square.sqrt() * (mean_p - mean_pi).to(a.device)
        return a - shift, square * var_pi.clamp(min=_SMALL).to(b.device)

    return rule


@dataclass(frozen=True)
class Tried:
    """The outputs (N, ...) under the statistics of a way, on the CPU."""

    outputs: Tensor
    statistics: Mapping[str, Statistics]


class _Reached(BaseException):
    """Ends a pass at the layer to measure, even if the model catches errors."""


class NewSite:
    """The inputs of the new site, and the model for passes over them.

    The inputs are read once and kept, so each pass sees the same examples.

    Attributes:
        plain: the outputs under the stored statistics.
        order: paths of the layers, in the order of their calls.
        shifts: shift of each layer, see ``Calibration``.
        farthest: the layer and the channel with the largest shift, and this shift.
        copies: share of the images or signals that are equal to an earlier input.
        part: the examples (N,) of a part that is unlike the rest, if there is one.

    Raises:
        DataError: there are fewer than two examples, or an input is not finite.
        NormLayerError: there is no BatchNorm layer, or a layer has no running
            statistics, has its own forward pass, or is called twice in a pass.
    """

    def __init__(self, model: nn.Module, batches: Iterable[Any]) -> None:
        self._model = unwrap(model)
        self._layers: dict[str, Any] = {**layers_of(self._model)}
        stored: dict[str, Statistics] = {}
        for path, layer in self._layers.items():
            if layer.running_mean is None:
                raise NormLayerError(
                    f"calibrate: BatchNorm layer '{path}' has no running statistics, so"
                    " the result would depend on the batch size."
                )
            mean, var = layer.running_mean, layer.running_var
            stored[path] = mean.double().clone(), var.double().clone()
        self._inputs = [*_joined(inputs_for(self._model), batches)]
        self.copies = _share_of_copies(self._inputs)
        self._looks: list[Tensor] = []
        moments, outputs = self._first_pass()
        self.part: Tensor | None = None
        # The layer may get several rows of each example, such as the frames of a video.
        if sum(map(len, self._looks)) == len(outputs):
            self.part = _part_unlike_the_rest(torch.cat(self._looks))
        if not moments:
            raise NormLayerError(
                f"calibrate: a {type(model).__name__} uses no BatchNorm layer with"
                " running statistics. Use the model without calibration."
            )
        self.plain, self.order = Tried(outputs, stored), [*moments]
        self.shifts, self.farthest = {}, ("", 0, -1.0)
        for path, seen in moments.items():
            (m, v), (a, b) = stored[path], use_all(stored[path], seen, path)
            square = (a - m).square() + (b.sqrt() - v.sqrt()).square()
            normed = square / (v + self._layers[path].eps)
            self.shifts[path] = float(normed.mean().sqrt())
            channel = int(normed.argmax())
            far = (path, channel, float(normed[channel].sqrt()))
            self.farthest = max(self.farthest, far, key=lambda one: one[2])

    @property
    def channels(self) -> dict[str, int]:
        """The number of channels of each layer in ``order``."""
        return {path: len(self.plain.statistics[path][0]) for path in self.order}

    def _first_pass(self) -> tuple[dict[str, Moments], Tensor]:
        """Return the moments by layer and the outputs, under the stored statistics."""
        sums, called, outputs = MomentSums(), set[str](), []

        def note(path: str, x: Tensor) -> None:
            if path in called:
                raise NormLayerError(
                    f"calibrate: the model calls BatchNorm layer '{path}' twice in a"
                    " pass, and its two inputs need different statistics. Use a"
                    " separate layer for each call."
                )
            # No statistics of the model act before the first layer.
            if not called and x.ndim > 2:
                pixels = x.detach().double().flatten(2)
                looks = [pixels.mean(2), pixels.std(2, correction=0)]
                self._looks.append(torch.cat(looks, 1).cpu())
            called.add(path)
            sums.gather(path, x)

        with self._watched(note):
            for inputs in self._inputs:
                leaves = [x for x in tree_leaves(inputs) if isinstance(x, Tensor)]
                if not all(bool(x.isfinite().all()) for x in leaves):
                    raise DataError(
                        "calibrate: an input is NaN or infinite. Replace these values,"
                        " or drop the examples."
                    )
                called.clear()
                outputs.append(self._outputs(inputs))
        examples = sum(map(len, outputs))
        if examples < 2:
            raise DataError(
                f"calibrate: {examples} examples have no variance. Pass two or more."
            )
        return sums.merged(), torch.cat(outputs)

    def _outputs(self, inputs: Any) -> Tensor:
        # Pass a copy, because the model may change its inputs in place.
        outputs: Any = self._model(copy.deepcopy(inputs))
        refuse_no_tensor(outputs, "calibrate")
        return outputs.cpu()  # type: ignore[no-any-return]

    @contextmanager
    def _watched(self, note: Callable[[str, Tensor], None]) -> Iterator[None]:
        """Call ``note`` with the input of each layer in the block."""
        with borrowed(self._model), torch.no_grad():
            self._model.eval()
            watch_inputs(self._layers, note)
            yield

    def tried(self, rule: Rule, paths: Sequence[str]) -> Tried:
        """Apply a rule to the layers ``paths``, and return the result.

        A layer is measured under the statistics chosen for all layers before it.
        """
        stored = self.plain.statistics
        chosen = dict(stored)
        waiting, seen = list(paths), list[Moments]()

        def choose() -> None:
            path = waiting.pop(0)
            chosen[path] = rule(stored[path], merge(seen), path)
            seen.clear()
            _load(self._layers, {path: chosen[path]})

        def note(path: str, x: Tensor) -> None:
            if waiting and path == waiting[0]:
                seen.append(moments_of(x))
                # One batch needs one pass; several batches need one for each layer.
                if len(self._inputs) > 1:
                    raise _Reached
                choose()

        with self._watched(note):
            while True:
                outputs = []
                for inputs in self._inputs:
                    with suppress(_Reached):
                        outputs.append(self._outputs(inputs))
                if not waiting:
                    return Tried(torch.cat(outputs), chosen)
                choose()

    def calibrated(self, statistics: Mapping[str, Statistics]) -> nn.Module:
        """Return a copy of the given model with these statistics."""
        model = copied(self._model)
        _load(layers_of(model), statistics)
        return model


def _joined(prepared: Callable[[Any], Any], batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the prepared inputs in few batches."""
    waiting: list[Tensor] = []
    for batch in batches:
        inputs = prepared(batch[0] if isinstance(batch, list | tuple) else batch)
        is_tensor = isinstance(inputs, Tensor)
        if waiting:
            size = sum(map(torch.numel, waiting))
            joins = is_tensor and inputs.shape[1:] == waiting[0].shape[1:]
            if not joins or size + inputs.numel() > ONE_BATCH:
                yield torch.cat(waiting)
                waiting = []
        if is_tensor:
            waiting.append(inputs)
        else:
            yield inputs
    if waiting:
        yield torch.cat(waiting)


def _share_of_copies(inputs: Iterable[Any]) -> float:
    """Return the share of examples that are equal to an earlier example.

    Rows of a table may be equal by chance, so only tensors (B, C, L, ...) count.
    """
    found, examples = set[bytes](), 0
    for batch in inputs:
        if isinstance(batch, Tensor) and batch.ndim > 2:
            examples += len(batch)
            # NumPy has no bfloat16.
            values = batch.cpu().contiguous().view(torch.uint8)
            found.update(one.numpy().tobytes() for one in values)
    return 1 - len(found) / examples if examples else 0.0


def _part_unlike_the_rest(looks: Tensor) -> Tensor | None:
    """Return the smaller part of examples (N,) if they fall into two parts, or None.

    ``looks`` (N, F) has the mean and the deviation of each channel. Two groups of equal
    spread explain more of the variance in a direction than one group does, which has
    2 / pi for a normal and 3 / 4 for a uniform distribution.
    """
    deviation, examples = looks.std(0), len(looks)
    varying = deviation > 1e-9 * looks.abs().amax(0)
    fewest = math.ceil(_SMALLEST_PART * examples)
    if not varying.any():
        return None
    normed = ((looks - looks.mean(0)) / deviation)[:, varying]
    axes, sizes, _ = torch.linalg.svd(normed, full_matrices=False)
    axes = axes[:, :2][:, sizes[:2] > 1e-6 * sizes[0]]
    best, part = _PARTS + 3 / examples, None
    for angle in torch.arange(36).double() * math.pi / 36:
        way = torch.stack([angle.cos(), angle.sin()])[: axes.shape[1]]
        ordered, order = (axes @ way).sort()
        # Otsu's share of the variance between the groups, for each size of the first
        first = torch.arange(1, examples).double()
        gap = ordered.cumsum(0)[:-1] * (1 / first + 1 / (examples - first))
        between = first * (examples - first) * (gap / examples).square()
        share = between[fewest - 1 : examples - fewest] / ordered.var(correction=0)
        if len(share) and float(share.max()) > best:
            best, size = float(share.max()), int(share.argmax()) + fewest
            part = torch.zeros(examples, dtype=torch.bool)
            part[order[:size] if 2 * size <= examples else order[size:]] = True
    return part


@torch.no_grad()
def _load(layers: Mapping[str, Any], statistics: Mapping[str, Statistics]) -> None:
    """Load statistics into layers.

    Raises:
        NormLayerError: the dtype of a layer cannot hold its new variance.
    """
    for path, (mean, var) in statistics.items():
        layer = layers[path]
        layer.running_mean.copy_(mean)
        layer.running_var.copy_(var)
        if var.isfinite().all() and not layer.running_var.isfinite().all():
            raise NormLayerError(
                f"calibrate: the variance of layer '{path}' is {float(var.max()):.3g},"
                f" too large for {layer.running_var.dtype}. Pass model.float()."
            )
