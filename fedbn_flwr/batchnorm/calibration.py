r"""Calibration of a model at a site that did not train, without labels.

BatchNorm statistics that fit the inputs of the new site replace the model's statistics.
Weights do not change.

## Algorithm

Layer $l$ has the statistics $(m_l, v_l)$. Its inputs at the new site, under the
statistics already chosen for the layers before it, have mean $a_l$ and biased variance
$b_l$ over all $n$ examples. Its new statistics are

- `none`: $(m_l, v_l)$;
- `all`: $(a_l, b_l)$ (AdaBN, Li et al. 2016, arXiv:1603.04779);
- `mix`: $w (m_l, v_l) + (1 - w) (a_l, b_l)$, $w = N / (N + n)$, $N = 16$ (Schneider et
  al. 2020, arXiv:2006.16971);
- `early`: $(a_l, b_l)$ in the first $h$ layers, $(m_l, v_l)$ in all others (Vianna et
  al. 2025, PMLR 274); $h$ is half of the layers, rounded up;
- `matched`: $(a_l - s (M_p - M_\pi), s^2 V_\pi)$, $s = \sqrt{b_l / V_p}$. $M_p$ and $V_p$
  are mean and variance of the training sites' normalised inputs under the class mix
  $p$ of the new site, and $\pi$ is the mix of the training (``class_moments``). So the
  shift that the classes explain is removed, and the shift of the inputs remains. $p$
  is estimated by EM (Saerens et al. 2002) from the predictions of `early`, and once
  more, damped by half, from the predictions of `matched`. If `early` is not sure enough
  to leave no doubt (see below), the shift is too strong for the stored statistics in the
  second half of the layers: then the first estimate is from the predictions of `mix`.

Let $q$ be the mean, over the examples, of the largest class probability. A way is sure
if $q$ minus two standard errors is at least halfway from guessing, $1/K$, to 1. A way is
confirmed if three quarters of its predictions equal the predictions of a way of another
kind (`all` and `mix` are of one kind). For `matched`, this other way must be sure.
`auto` takes the confirmed way with the largest $q$. If `none` is confirmed as well, or
if no way is, it keeps `none` unless another way lowers $1 - q$ by a quarter. If the
chosen way is not sure, it keeps `none`. But if the inputs of a layer are at least 0.75
standard deviations from the stored statistics, these statistics are wrong: then, instead
of a way that is not confirmed or not sure enough to leave no doubt, `auto` takes
`matched`, or `mix` without class moments.

The result names a reason to doubt the predictions unless all of these hold: the way is
confirmed; $q$ minus two standard errors is at least three quarters of the way from $1/K$
to 1; it has seen 16 examples; at most 10 % of the inputs are copies of an earlier input
(blank images count as copies, rows of a table never); the images do not fall into two
parts with different inputs of the first layer, unless these are two classes; no channel
of a layer is more than 5 standard deviations from the stored statistics; and neither the
predictions nor the estimated class mix have more than 95 % in one class, because a
failing model looks like a site with one class. The class mix does not count under
`matched`. Without a doubt, the model may still be wrong: mirrored images and other tables
have no doubt. Only labels decide.

## Laws

`early` with all layers is `all`. `matched` with $p = \pi$ is `all`. `mix` with $N = 0$
is `all`, and with $N = \infty$ `none`. The order of the examples, the batch size and
labels change nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from fedbn_flwr.batchnorm.adaptation import PRIOR
from fedbn_flwr.batchnorm.class_moments import ClassMoments
from fedbn_flwr.batchnorm.site_passes import (
    NewSite,
    Tried,
    use_all,
    use_matched,
    use_mix,
)
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.training.tasks import CLASSIFICATION, Task

__all__ = ["WAYS", "Calibration", "CalibrationWay", "calibrate", "estimated_mix"]

CalibrationWay = Literal["auto", "none", "all", "mix", "early", "matched"]
"""The source of the new statistics; "auto" chooses one of the others."""
WAYS = get_args(CalibrationWay)

# Rules of "auto". They were found on digits at unseen scanners (docs/results/new-site.md).
_LESS = 0.75
_AGREEMENT = 0.75
_SURE = 0.5
FEWEST = 16
# Rules of doubt: how sure the predictions are, and the largest estimated share of a class.
_VERY_SURE = 0.75
_ONE_CLASS = 0.95
# Largest distance of a channel, in standard deviations.
_FAR = 5.0
# Largest share of copies among images or signals.
_COPIES = 0.1
# Two classes explain two parts of the examples if this share of the examples agrees.
_SAME_PART = 0.9
# Smallest share of a class in an estimated mix.
_RARE = 1e-4
# From this shift on, in standard deviations, the stored statistics are wrong.
_STRONG = 0.75
# Without classes: the doctor's smallest shift that counts, in standard deviations.
_SHIFT = 0.15
# Half of the width of the interval of the accuracy that labels must give.
_PRECISION = 0.1


@dataclass(frozen=True)
class Calibration:
    """A calibrated model, and a judgement of it.

    Attributes:
        model: a copy of the model with the chosen statistics.
        way: the way of these statistics, never "auto".
        reason: a sentence with the reason for this way.
        doubt: a reason to doubt the predictions, or "". Without one, they may still be
            wrong.
        num_examples: number of examples of the new site.
        shifts: distance of the inputs of each BatchNorm layer from its running
            statistics before the calibration, by path, in standard deviations: the root
            mean square, over channels, of the Wasserstein distance of two normal
            distributions.
        farthest: the largest distance of a single channel, in the same unit.
        class_mix: estimated share of each class at the site; None without classes.
        changed: share of predictions that differ from the predictions of "none", for
            each way that was tried; empty without classes.
        examples_to_label: number of random examples whose labels give the accuracy to
            10 points in 95 % of cases.
        probabilities: class probabilities (num_examples, K) of the model, float64, in
            the order of the examples; None without classes.
    """

    model: nn.Module
    way: str
    reason: str
    doubt: str
    num_examples: int
    shifts: Mapping[str, float]
    farthest: float
    class_mix: tuple[float, ...] | None
    changed: Mapping[str, float]
    examples_to_label: int
    probabilities: Tensor | None


def calibrate(
    model: nn.Module | Callable[[], nn.Module],
    batches: Iterable[Any],
    way: CalibrationWay = "auto",
    *,
    class_moments: ClassMoments | None = None,
    task: Task = CLASSIFICATION,
) -> Calibration:
    """Return a copy of a model with statistics that fit a new site, and a judgement.

    Labels are not used. The order of the examples and the batch size do not matter.

    Args:
        model: the model, with averaged BN statistics. It does not change. Or the
            function that builds it.
        batches: the inputs of the new site: tensors (B, ...), or tuples whose first
            element is the input. They are read once and kept in memory.
        way: one of ``WAYS``.
        class_moments: pooled class moments of the training sites, for "matched".
        task: defines the class probabilities. Tasks without one class for each example
            (numbers, several labels, pixels) have no judgement and no "matched".

    Example::

        >>> import torch
        >>> from torch import nn
        >>> from fedbn_flwr import calibrate
        >>> model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3)).eval()
        >>> found = calibrate(model, [torch.randn(40, 2) + 5], "all")
        >>> found.num_examples, found.shifts["0"] > 4
        (40, True)

    Raises:
        ConfigError: an argument is not allowed, or does not fit the model.
        DataError: there are fewer than two examples, or an input is not finite.
        NormLayerError: there is no BatchNorm layer, or a layer has no running
            statistics, has its own forward pass, or is called twice in a pass.
    """
    site = NewSite(model if isinstance(model, nn.Module) else model(), batches)
    before = task.class_probabilities(site.plain.outputs)
    problems = []
    if way not in WAYS:
        problems.append(f"way={way!r} is unknown. Allowed: {', '.join(WAYS)}.")
    if way == "matched" and (class_moments is None or before is None):
        problems.append(
            "way='matched' needs class_moments of the training sites, and a task with"
            " one class for each example. Pass them, or choose another way."
        )
    known = class_moments if before is not None else None
    if known and not known.fits(site.channels, before.shape[1]):  # type: ignore[union-attr]
        problems.append(
            "class_moments have other layers, channels or classes than the model. Pass"
            " those of the run that trained it."
        )
    if problems:
        raise ConfigError("calibrate: " + " ".join(problems))

    # Try all ways, because another way must confirm the chosen one.
    layers, examples = len(site.order), len(site.plain.outputs)
    first = (layers + 1) // 2
    tried = {
        "none": site.plain,
        "all": site.tried(use_all, site.order),
        "mix": site.tried(use_mix(PRIOR, examples), site.order),
        "early": site.tried(use_all, site.order[:first]),
    }
    if known:
        tried["matched"] = _matched(site, known, tried, task)
    kinds = {"none": "none", "early": "early", "all": "all", "mix": "all"}
    if first == layers:
        kinds = dict.fromkeys(("all", "mix", "early", "matched"), "all")
    return _judged(site, tried, way, kinds, known, task)


def _judged(
    site: NewSite,
    tried: Mapping[str, Tried],
    way: str,
    kinds: Mapping[str, str],
    known: ClassMoments | None,
    task: Task,
) -> Calibration:
    """Return the result of a way.

    If the way is "auto", choose one of the tried ways. ``kinds``: ways with the same
    value do not confirm each other.
    """
    guesses = {}
    for name, one in tried.items():
        found = task.class_probabilities(one.outputs)
        if found is not None:
            guesses[name] = _Guesses(found)
    confirmed = _confirmed(guesses, kinds)
    examples, auto = len(site.plain.outputs), way == "auto"
    path = max(site.shifts, key=site.shifts.__getitem__)
    reason = (
        f"the inputs of layer '{path}' are {site.shifts[path]:.2f} standard deviations"
        " from the model's statistics"
    )
    doubt = "without labels, nothing shows whether predictions of this task are right"
    class_mix, changed, probabilities = None, dict[str, float](), None
    if guesses:
        way = _choice(guesses, confirmed, site.shifts[path]) if auto else way
        plain, judged = guesses["none"], guesses[way]
        doubt, probabilities = judged.unsure(_VERY_SURE), judged.probabilities
        if not doubt and way not in confirmed:
            doubt = (
                "the ways to calibrate disagree on more than a quarter of the examples"
            )
        if site.copies > _COPIES:
            doubt = f"{site.copies:.0%} of the examples are copies of another example"
        elif site.part is not None and not judged.explains(site.part):
            doubt = (
                f"{float(site.part.double().mean()):.0%} of the examples are unlike the"
                " rest, before the first BatchNorm layer. Look at them first"
            )
        changed = {name: 1 - one.agreement(plain) for name, one in guesses.items()}
        prior = known.class_mix if known else torch.full_like(probabilities[0], 1)
        prior = prior / prior.sum()
        mix = estimated_mix(probabilities, prior, prior)
        class_mix = tuple(mix.tolist())
        one_class = judged.largest_class
        if way != "matched":
            one_class = max(one_class, *class_mix)
        far, channel, distance = site.farthest
        if not doubt and one_class > _ONE_CLASS:
            doubt = (
                f"{one_class:.0%} of the examples seem to be one class, as with a model"
                " that fails"
            )
        elif not doubt and distance > _FAR:
            doubt = (
                f"channel {channel} of layer '{far}' is {distance:.1f} standard"
                " deviations from the training sites"
            )
        reason += (
            f", {changed[way]:.0%} of the predictions change, and their mean probability"
            f" becomes {judged.confidence:.2f} (before: {plain.confidence:.2f})"
        )
    elif auto:
        way = "early" if site.shifts[path] >= _SHIFT else "none"
    return Calibration(
        model=site.calibrated(tried[way].statistics),
        way=way,
        reason=f"{way} was {'chosen' if auto else 'given'}: {reason}.",
        doubt=doubt,
        num_examples=examples,
        shifts=site.shifts,
        farthest=site.farthest[2],
        class_mix=class_mix,
        changed=changed,
        examples_to_label=examples_to_label(examples),
        probabilities=probabilities,
    )


def examples_to_label(examples: int, precision: float = _PRECISION) -> int:
    """Return the number of random examples whose labels give a share to ``precision``.

    The interval has the level 95 %; the sample is drawn out of ``examples``.
    """
    endless = (0.98 / precision) ** 2
    return math.ceil(endless / (1 + (endless - 1) / examples))


class _Guesses:
    """The predictions under a way, and how sure they are.

    Attributes:
        probabilities: of the classes, (N, K).
        confidence: mean probability of the predicted classes.
        largest_class: share of the class that is predicted most often.
        doubt: why the predictions do not choose a way; "" if they do.
    """

    def __init__(self, probabilities: Tensor) -> None:
        self.probabilities = probabilities
        sure, self._classes = probabilities.max(1)
        self.confidence = float(sure.mean())
        examples = len(probabilities)
        self.largest_class = int(self._classes.bincount().max()) / examples
        error = float(sure.std()) / math.sqrt(examples)
        self._lower = self.confidence - 2 * error
        self.doubt = self.unsure(_SURE)

    def unsure(self, share: float) -> str:
        """Return why the predictions are not sure, or "".

        Args:
            share: 0 is the confidence of guessing; 1 means certain predictions.
        """
        examples, classes = self.probabilities.shape
        needed = share + (1 - share) / classes
        if examples < FEWEST:
            return f"{examples} examples are fewer than {FEWEST}"
        if self._lower >= needed:
            return ""
        # also if the outputs are NaN
        return (
            f"the model is not sure enough: the mean probability of its predictions may"
            f" be as low as {self._lower:.3f}, but at least {needed:.3f} is needed"
        )

    def explains(self, part: Tensor) -> bool:
        """Return whether a part of the examples is one of two classes."""
        same = float((part == (self._classes == 1)).double().mean())
        return self.probabilities.shape[1] == 2 and max(same, 1 - same) >= _SAME_PART

    def agreement(self, other: _Guesses) -> float:
        """Return the share of equal predictions."""
        return float((self._classes == other._classes).double().mean())


def _confirmed(guesses: Mapping[str, _Guesses], kinds: Mapping[str, str]) -> set[str]:
    """Return the ways with mostly the predictions of a way of another kind."""
    confirmed = set()
    for one, other in itertools.permutations(guesses, 2):
        confirms = kinds.get(one, one) != kinds.get(other, other)
        # An unsure way and "matched" may run away to the same wrong classes.
        if one == "matched" and guesses[other].doubt:
            confirms = False
        if confirms and guesses[one].agreement(guesses[other]) >= _AGREEMENT:
            confirmed.add(one)
    return confirmed


def _choice(
    guesses: Mapping[str, _Guesses], confirmed: Collection[str], shift: float
) -> str:
    """Return the way that "auto" chooses, for the largest shift of a layer."""
    others = [name for name in guesses if name != "matched"]
    among = [name for name in guesses if name in confirmed] or others
    way = max(among, key=lambda name: guesses[name].confidence)
    unsure = [1 - guesses[name].confidence for name in (way, "none")]
    keeps = "none" in among and not unsure[0] <= _LESS * unsure[1]
    way = "none" if keeps or guesses[way].doubt else way
    doubtful = way not in confirmed or guesses[way].unsure(_VERY_SURE)
    # Both fit the inputs in every layer, and "matched" also considers the classes.
    fitting = "matched" if "matched" in guesses else "mix"
    return fitting if shift >= _STRONG and doubtful else way


def _matched(
    site: NewSite, known: ClassMoments, others: Mapping[str, Tried], task: Task
) -> Tried:
    """Return the result of "matched", given the other ways."""
    prior = known.class_mix
    first: Any = task.class_probabilities(others["early"].outputs)
    if _Guesses(first).unsure(_VERY_SURE):
        first = task.class_probabilities(others["mix"].outputs)
    mix = estimated_mix(first, prior, prior)
    # Estimate once more, damped by half. More estimates of a site with one class run
    # away to another class.
    tried = site.tried(use_matched(known, mix), site.order)
    second: Any = task.class_probabilities(tried.outputs)
    mix = (mix + estimated_mix(second, prior, mix)) / 2
    return site.tried(use_matched(known, mix), site.order)


def estimated_mix(probabilities: Tensor, prior: Tensor, start: Tensor) -> Tensor:
    """Return the class mix (K,) of examples, by 20 steps of EM (Saerens et al. 2002).

    Args:
        probabilities: class probabilities of a model, (N, K).
        prior: the class mix of its training, (K,).
        start: the first estimate, (K,).
    """
    mix = start
    for _ in range(20):
        # A class may be absent in the training.
        weighted = probabilities * (mix / prior.clamp(min=_RARE))
        mix = (weighted / weighted.sum(1, keepdim=True)).mean(0).clamp(min=_RARE)
        mix = mix / mix.sum()
    return mix
