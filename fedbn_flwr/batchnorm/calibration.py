r"""Calibration of a model at a site that did not train, without labels.

The BatchNorm statistics of the model are replaced by statistics that fit the inputs of
the new site. Weights do not change.

## Algorithm

Layer $l$ has the statistics $(m_l, v_l)$. The inputs of this layer at the new site,
under the statistics already chosen for the layers before it, have mean $a_l$ and biased
variance $b_l$ over all $n$ examples. The statistics of the layer become

- `none`: $(m_l, v_l)$;
- `all`: $(a_l, b_l)$ (AdaBN, Li et al. 2016, arXiv:1603.04779);
- `mix`: $w (m_l, v_l) + (1 - w) (a_l, b_l)$, $w = N / (N + n)$, $N = 16$ (Schneider et
  al. 2020, arXiv:2006.16971);
- `early`: $(a_l, b_l)$ in the first $h$ layers, $(m_l, v_l)$ in all others (Vianna et
  al. 2025, PMLR 274);
- `matched`: $(a_l - s (M_p - M_\pi), s^2 V_\pi)$ with $s = \sqrt{b_l / V_p}$. $M_p$ and
  $V_p$ are mean and variance of the training sites' normalised inputs under the class
  mix $p$ of the new site, $\pi$ is the mix of the training (see ``class_moments``). The
  shift that the classes explain is removed, and the shift of the inputs remains. $p$
  is estimated from the model's predictions (EM, Saerens et al. 2002), 15 times, damped
  by half.

## Laws

`early` with all layers is `all`. `matched` with $p = \pi$ is `all`. `mix` with $N = 0$
is `all`, and with $N = \infty$ it is `none`. The order of the examples, the batch size
and labels change nothing.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fedbn_flwr.batchnorm.adaptation import PRIOR
from fedbn_flwr.batchnorm.class_moments import ClassMoments
from fedbn_flwr.batchnorm.reestimation import Moments, merge, moments_of
from fedbn_flwr.batchnorm.replaced_forward import watch_inputs
from fedbn_flwr.errors import ConfigError, DataError, NormLayerError
from fedbn_flwr.training.attributes import in_eval_mode
from fedbn_flwr.training.batches import inputs_for
from fedbn_flwr.training.freezing import layers_of, refuse_scripted
from fedbn_flwr.training.model_state import copied, unwrap

__all__ = ["WAYS", "Calibration", "CalibrationWay", "calibrate"]

CalibrationWay = Literal["auto", "none", "all", "mix", "early", "matched"]
"""How the statistics of the new site are computed; "auto" chooses one of the others."""
WAYS = get_args(CalibrationWay)

Statistics = tuple[Tensor, Tensor]
"""Mean and biased variance of a layer, (C,) each, in float64."""
Rule = Callable[[Statistics, Moments, str], Statistics]
"""``rule(stored, moments, path)`` returns the new statistics of a layer."""

# Batches are joined up to this number of elements: one batch needs one pass, and more
# need a pass for each layer.
_JOINED = 1 << 21
# Number of estimates of the class mix in "matched".
_ROUNDS = 15
# Smallest variance of a normalised channel in "matched".
_SMALL = 1e-3


@dataclass(frozen=True)
class Calibration:
    """A calibrated model, and a judgement of it.

    Attributes:
        model: a copy of the model with the chosen statistics.
        way: the way that was used, never "auto".
        reason: a sentence with the reason for this way.
        trusted: whether the model can be recommended at this site.
        warning: why it cannot be recommended, and what to do; "" if it can.
        num_examples: number of examples of the new site.
        shifts: distance of the inputs of each BatchNorm layer from its running
            statistics, by path, in standard deviations: the root mean square over
            channels of the Wasserstein distance of two normal distributions.
        class_mix: estimated share of each class at the site, or None without classes.
        changed: share of the predictions that differ from the predictions of the model
            before calibration, by way; empty without classes.
        examples_to_label: number of examples to label before the model is used; 0 if
            it is trusted.
        probabilities: class probabilities (num_examples, K) under the chosen
            statistics, float64, in the order of the examples; None without classes.
    """

    model: nn.Module
    way: str
    reason: str
    trusted: bool
    warning: str
    num_examples: int
    shifts: Mapping[str, float]
    class_mix: tuple[float, ...] | None
    changed: Mapping[str, float]
    examples_to_label: int
    probabilities: Tensor | None


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    way: CalibrationWay = "auto",
    *,
    class_moments: ClassMoments | None = None,
    prior_examples: float = PRIOR,
    early: int | None = None,
    scores: bool = True,
) -> Calibration:
    """Return a copy of the model whose BatchNorm statistics fit a new site.

    Labels are not used. The order of the examples and the batch size do not matter.

    Args:
        model: the model with averaged BN statistics. It does not change.
        batches: the inputs of the new site, as an iterable that can be read again, such
            as a list or a DataLoader without shuffling: tensors (B, ...), or tuples
            whose first element is the input.
        way: a way of ``WAYS``; "auto" chooses one and judges it.
        class_moments: pooled class moments of the training sites, for "matched".
        prior_examples: N of "mix": the weight of the running statistics, in examples.
        early: number of layers that "early" changes. None means the first half,
            rounded up.
        scores: whether outputs (B, K) are scores (logits) of K > 1 classes. Other
            outputs have neither probabilities nor a class mix.

    Raises:
        ConfigError: an argument is not allowed, or does not fit the model.
        DataError: there are fewer than two examples, or an input is not finite.
        NormLayerError: the model has no BatchNorm layer with running statistics, or
            calls a layer twice.
    """
    site = _Site(model, batches)
    problems = []
    if way not in WAYS:
        problems.append(f"way={way!r} is unknown. Allowed: {', '.join(WAYS)}.")
    if not prior_examples >= 0:
        problems.append(f"prior_examples={prior_examples} must be at least 0.")
    if early is not None and not 0 <= early <= len(site.order):
        problems.append(
            f"early={early} must be 0 to {len(site.order)}, the number of layers."
        )
    plain = _Tried(site.plain, site.stored)
    scores = scores and plain.outputs.dim() == 2 and plain.outputs.shape[1] > 1
    if way == "matched" and not (class_moments and scores):
        problems.append(
            "way='matched' needs class scores and class_moments, which the training"
            " sites compute. Pass them, or use another way."
        )
    if class_moments and scores:
        problems += class_moments.problems(site.stored, plain.outputs.shape[1])
    if problems:
        raise ConfigError("calibrate: " + " ".join(problems))
    early = (len(site.order) + 1) // 2 if early is None else early
    rules = {"all": _all, "mix": _mix(prior_examples, site.examples)}
    tried = {"none": plain}
    for name, rule in rules.items():
        tried[name] = site.tried(rule, site.order)
    tried["early"] = site.tried(_all, site.order[:early])
    mix = None
    if class_moments and scores:
        tried["matched"], mix = _tried_matched(site, class_moments)
    reason = f"The way {way} was given."
    if way == "auto":
        way = "early"
        reason = "early"
    chosen = tried[way]
    site.load(chosen.statistics)
    return Calibration(
        site.model,
        way,
        reason,
        True,
        "",
        site.examples,
        site.shifts(),
        None if mix is None else tuple(mix.tolist()),
        {},
        0,
        chosen.probabilities if scores else None,
    )


# The ways: each function is the rule, or returns the rule.


def _all(stored: Statistics, moments: Moments, path: str) -> Statistics:
    return moments.mean, moments.m2 / moments.count


def _mix(prior: float, examples: int) -> Rule:
    # 1 - w, so that an infinite N is exact.
    share = examples / (prior + examples)

    def rule(stored: Statistics, moments: Moments, path: str) -> Statistics:
        (m, v), (a, b) = stored, _all(stored, moments, path)
        return (1 - share) * m + share * a, (1 - share) * v + share * b

    return rule


def _matched(known: ClassMoments, mix: Tensor) -> Rule:
    def rule(stored: Statistics, moments: Moments, path: str) -> Statistics:
        a, b = _all(stored, moments, path)
        mean_p, var_p = known.mean_and_variance(path, mix)
        mean_0, var_0 = known.mean_and_variance(path, known.class_mix)
        # A class may have almost no variance in a channel.
        square = b / var_p.clamp(min=_SMALL).to(b)
        shift = square.sqrt() * (mean_p - mean_0).to(a)
        return a - shift, square * var_0.clamp(min=_SMALL).to(b)

    return rule


def _tried_matched(site: _Site, known: ClassMoments) -> tuple[_Tried, Tensor]:
    """Return the result of "matched", and the class mix (K,) that it estimated."""
    mix = known.class_mix
    for _ in range(_ROUNDS):
        tried = site.tried(_matched(known, mix), site.order)
        found = estimated_mix(tried.probabilities, known.class_mix, mix)
        mix = (mix + found) / 2
    return site.tried(_matched(known, mix), site.order), mix


def estimated_mix(probabilities: Tensor, prior: Tensor, start: Tensor) -> Tensor:
    """Return the class mix (K,) of examples, by EM (Saerens et al. 2002).

    Args:
        probabilities: class probabilities of the model, (N, K).
        prior: the class mix of the training, (K,).
        start: the first estimate, (K,).
    """
    mix = start
    for _ in range(20):
        weighted = probabilities * (mix / prior)
        mix = (weighted / weighted.sum(1, keepdim=True)).mean(0).clamp(min=1e-4)
        mix = mix / mix.sum()
    return mix


class _Reached(BaseException):
    """Ends a forward pass at the layer to measure, even if the model catches errors."""


@dataclass(frozen=True)
class _Tried:
    """The outputs under the statistics of a way."""

    outputs: Tensor
    statistics: Mapping[str, Statistics]

    @property
    def probabilities(self) -> Tensor:
        """The softmax (N, K) of the outputs, in float64."""
        return self.outputs.double().softmax(1)


class _Site:
    """A copy of the model, and the inputs of the new site.

    Attributes:
        model: the copy.
        examples: number of examples.
        order: paths of the layers, in the order of their calls.
        stored: the statistics of the model.
        moments: moments of the layers' inputs under these statistics.
        plain: outputs under these statistics, on the CPU.
    """

    def __init__(self, model: nn.Module, batches: Iterable[Any]) -> None:
        refuse_scripted(model, "calibration")
        if iter(batches) is batches:
            raise DataError(
                "calibrate: batches can be read only once. Pass a list, or another"
                " iterable that can be read again."
            )
        self.model = copied(unwrap(model))
        self._layers: dict[str, Any] = {}
        self.stored: dict[str, Statistics] = {}
        for path, layer in layers_of(self.model).items():
            if layer.running_mean is not None:
                self._layers[path] = layer
                mean, var = layer.running_mean, layer.running_var
                self.stored[path] = mean.double().clone(), var.double().clone()
        if not self._layers:
            raise NormLayerError(
                f"calibrate: a {type(model).__name__} has no BatchNorm layer with"
                " running statistics, so there is nothing to calibrate. Use the model"
                " as it is."
            )
        self._batches = batches
        # Keep the inputs if they fit into one batch.
        first = [*itertools.islice(self._read(), 2)]
        self._whole = first if len(first) == 1 else None
        self.moments: dict[str, Moments] = {}
        self.plain = self._first_pass()
        self.order = [*self.moments]
        self.examples = len(self.plain)

    def _read(self) -> Iterator[Any]:
        """Yield the prepared inputs; small batches are joined."""
        prepared = inputs_for(self.model)
        waiting: list[Tensor] = []
        for batch in self._batches:
            inputs = prepared(batch[0] if isinstance(batch, list | tuple) else batch)
            alike = isinstance(inputs, Tensor) and (
                not waiting or inputs.shape[1:] == waiting[0].shape[1:]
            )
            size = sum(map(torch.numel, waiting))
            if waiting and not (alike and size + inputs.numel() <= _JOINED):
                yield torch.cat(waiting)
                waiting = []
            if isinstance(inputs, Tensor):
                waiting.append(inputs)
            else:
                yield inputs
        if waiting:
            yield torch.cat(waiting)

    def _first_pass(self) -> Tensor:
        """Return the outputs under the stored statistics, and note all moments."""
        seen: dict[str, list[Moments]] = {}
        calls: list[str] = []

        def note(path: str, _: nn.Module, x: Tensor) -> None:
            calls.append(path)
            seen.setdefault(path, []).append(moments_of(x))

        outputs = []
        with self._watched(note):
            for inputs in self._whole or self._read():
                if any(not x.isfinite().all() for x in tree_leaves(inputs)):
                    raise DataError(
                        "calibrate: inputs contain NaN or infinity. Replace these"
                        " values, or drop the examples."
                    )
                calls.clear()
                outputs.append(self.model(inputs).cpu())
                twice = [path for path in calls if calls.count(path) > 1]
                if twice:
                    raise NormLayerError(
                        f"calibrate: the model calls BatchNorm layer '{twice[0]}' twice"
                        " in a pass, but its two inputs need different statistics. Give"
                        " each call a separate layer."
                    )
        if sum(map(len, outputs)) < 2:
            raise DataError(
                f"calibrate: got {sum(map(len, outputs))} examples. Pass two or more,"
                " because one example has no variance."
            )
        self.moments = {path: merge(moments) for path, moments in seen.items()}
        return torch.cat(outputs)

    @contextmanager
    def _watched(
        self, note: Callable[[str, nn.Module, Tensor], None]
    ) -> Iterator[None]:
        """Call ``note`` with the input of each layer, in passes in eval mode."""
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(in_eval_mode(self.model))
            for path, layer in self._layers.items():
                watched = watch_inputs(layer, functools.partial(note, path))
                stack.callback(watched)
            yield

    def tried(self, rule: Rule, paths: Sequence[str]) -> _Tried:
        """Apply a rule to the layers ``paths``, and return the outputs.

        The statistics of a layer are measured under those chosen for all layers before
        it. This needs one pass per layer; if there is only one batch, it needs one.
        """
        chosen = dict(self.stored)
        self.load(chosen)
        waiting = list(paths)
        seen: list[Moments] = []

        def choose() -> None:
            path = waiting.pop(0)
            chosen[path] = rule(self.stored[path], merge(seen), path)
            seen.clear()
            self.load({path: chosen[path]})

        def note(path: str, _: nn.Module, x: Tensor) -> None:
            if waiting and path == waiting[0]:
                seen.append(moments_of(x))
                if self._whole is None:
                    raise _Reached
                choose()

        with self._watched(note):
            while True:
                outputs = []
                for inputs in self._whole or self._read():
                    with suppress(_Reached):
                        outputs.append(self.model(inputs).cpu())
                if not waiting:
                    return _Tried(torch.cat(outputs), chosen)
                choose()

    def load(self, statistics: Mapping[str, Statistics]) -> None:
        """Load statistics into the copy."""
        for path, (mean, var) in statistics.items():
            layer = self._layers[path]
            layer.running_mean.copy_(mean)
            layer.running_var.copy_(var)

    def shifts(self) -> dict[str, float]:
        """Return the shift of each layer, see ``Calibration``."""
        shifts = {}
        for path, moments in self.moments.items():
            (m, v), (a, b) = self.stored[path], _all(self.stored[path], moments, path)
            unit = v + self._layers[path].eps
            square = ((a - m).square() + (b.sqrt() - v.sqrt()).square()) / unit
            shifts[path] = float(square.mean().sqrt())
        return shifts
