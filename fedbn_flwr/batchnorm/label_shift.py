r"""Statistics of new inputs, guarded against another class mix (label shift). Torch only; no label is used.

## Problem

BatchNorm with the statistics of new inputs gives each layer the mean and deviation that it had in training. Where the
new inputs differ because their classes have other shares, this removes what tells the classes apart: the predictions
get the class mix of the training data again.

## Algorithm

$\ell(x)$ are the log-probabilities of the classes for an input, less their mean over the classes; $\Delta(x) =
\ell'(x) - \ell(x)$ is their change by other statistics. Another class mix adds the same vector to the log-probabilities
of all inputs (Saerens, Latinne, Decaestecker 2002, equation 2.4). The part of the change that does so is

$$\rho = \frac{\lVert \mathrm{E}_x \Delta(x) \rVert^2}{\mathrm{E}_x \lVert \Delta(x) \rVert^2} \in [0, 1].$$

With $m, \mu, s$ the mean of a channel over the new inputs under the model's own statistics, and its running mean and
variance, $D$ is the largest $\sum (m - \mu)^2 / \sum s$ over the layers, with sums over the channels. Inputs of the
same kind with shares $q$ of the classes have $D \le \sum_c (q_c - \pi_c)^2 / \pi_c$ (Cauchy and Schwarz): at most 2
where there are two classes, and each had a third of the training or more.

1. ``re-estimated``: the statistics of the new inputs (``batchnorm.reestimation``), if $D >$ ``MOVED``: so far the
   inputs of another mix alone are not, they come from another device or are in another unit.
2. ``balanced``: else the statistics weighted by predicted class, if their $\rho \le$ ``LIMIT``. An input that the model
   with its own statistics puts into class $c$ has the weight $w = \pi_c / n_c$, with $n_c$ the number of inputs in $c$
   and $\pi_c$ the share of $c$ in training. With $m_i$ the mean of a channel over the positions of input $i$, and
   $\sum_i w_i = 1$,

   $$\mu = \sum_i w_i m_i, \qquad v = \sum_i w_i\, \mathrm{E}_{\mathrm{positions}} (x_i - \mu)^2.$$

3. ``re-estimated``: else the plain statistics, if their $\rho \le$ ``LIMIT``.
4. ``declined``: else the model keeps its own statistics.

The guard is careful: a smaller shift of the inputs that moves the outputs of all of them alike looks like another
class mix, and is declined, too. The labels of a few examples tell the two apart.

Source of the weights: Su, Xu, Jia 2024, arXiv:2309.14949 (balanced BatchNorm: statistics of each class by pseudo-label,
averaged over the classes). That adaptation of BatchNorm fails under label shift: the same, and Vianna et al. 2024,
arXiv:2402.04958. The guard, its measure and its limit are ours; the limit comes from hospitals and small digits,
docs/results has the figures.

## Differs from the paper

The paper keeps moving statistics of each class over a stream of batches, and all classes count alike; here one pass
reads all inputs, and the classes have their shares of the training data where these are known.

## Laws

With classes in the training's shares, balanced statistics are the plain ones. A change that is the same for all inputs
has $\rho = 1$, one whose mean is 0 has $\rho = 0$.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.batchnorm.reestimation import (
    GatheredMoments,
    Moments,
    load_statistics,
    mixture,
    moments_of,
    reestimate_statistics,
)
from fedbn_flwr.batchnorm.taken_forward import watch_inputs
from fedbn_flwr.errors import NormLayerError
from fedbn_flwr.training.batches import Batches, with_positions
from fedbn_flwr.training.memory_format import inputs_for
from fedbn_flwr.training.modes import kept_modes
from fedbn_flwr.training.scripted import refuse_scripted
from fedbn_flwr.training.tasks import LabelTask, RegressionTask, Task

__all__ = ["BALANCED", "DECLINED", "LIMIT", "MOVED", "REESTIMATED"]
__all__ += ["Guarded", "balanced_statistics", "class_weights", "guarded_statistics", "mean_shift", "mix_share"]

LIMIT = 0.25
"""Largest part of the change that may be another class mix."""
MOVED = 2.0
"""How far the means of a layer's inputs are, squared and in variances, from which on no class mix explains it."""

REESTIMATED, BALANCED, DECLINED = "re-estimated", "balanced", "declined"


@dataclass(frozen=True)
class Guarded:
    """Statistics of new inputs, and what the guard says of them.

    Attributes:
        kept: which statistics to use; "declined" = the model's own.
        statistics: the moments by layer path, "re-estimated" and, where the guard could make them, "balanced".
        shares: rho of each of these; empty where the task has no class for each input, so that there is no guard.
        moved: D.
    """

    kept: str
    statistics: Mapping[str, Mapping[str, Moments]]
    shares: Mapping[str, float] = field(default_factory=dict)
    moved: float = 0.0

    def __str__(self) -> str:
        """What is kept, and why."""
        if not self.shares:
            return "re-estimated (not guarded: the task has no class for each example)"
        parts = ", ".join(f"{share:.0%} with {name} statistics" for name, share in self.shares.items())
        return (
            f"{self.kept} (another class mix makes of the change of the outputs {parts}, limit {LIMIT:.0%}; the inputs "
            f"of a layer have moved by {self.moved:.2g} variances, limit {MOVED:g})"
        )


def guarded_statistics(
    model: nn.Module, data: Batches, task: Task, shares: Tensor | None = None, *, batch_size: int
) -> Guarded:
    """Return statistics of the inputs, and which of them to use; the model does not change.

    Args:
        model: on the device to use.
        data: the new inputs; targets are not used.
        task: the learning task.
        shares: of the classes in training, (K,); None = all alike.
        batch_size: examples per batch; 0 = all in one.

    Returns:
        Without statistics where the model or the data have none (``reestimate_statistics``).
    """
    reestimated = reestimate_statistics(model, data, batch_size=batch_size)
    if not reestimated or not has_classes(task):
        return Guarded(REESTIMATED, {REESTIMATED: reestimated})
    before = log_probabilities(model, data, task, batch_size)
    if shares is None:
        shares = torch.full((before.shape[1],), 1 / before.shape[1], dtype=torch.float64)
    statistics: dict[str, Mapping[str, Moments]] = {REESTIMATED: reestimated}
    try:
        weights = class_weights(before.argmax(1), shares)
        statistics[BALANCED] = balanced_statistics(model, data, weights, batch_size=batch_size)
    except NormLayerError:  # a layer whose inputs are not one for each example: nothing to weigh
        pass
    changed: dict[str, float] = {}
    for name, moments in statistics.items():
        with _own_statistics_after(model):
            load_statistics(model, moments)
            changed[name] = mix_share(before, log_probabilities(model, data, task, batch_size))
    moved = mean_shift(model, data, batch_size)
    kept = next((name for name in (BALANCED, REESTIMATED) if changed.get(name, 1.0) <= LIMIT), DECLINED)
    kept = REESTIMATED if moved > MOVED else kept
    return Guarded(kept, statistics, changed, moved)


def has_classes(task: Task) -> bool:
    """Return whether the task has one class for each example: two of one label, or several."""
    if isinstance(task, LabelTask):
        return task.single
    return not isinstance(task, RegressionTask) and not task.by_pixel


def log_probabilities(model: nn.Module, data: Batches, task: Task, batch_size: int) -> Tensor:
    """Return the log-probabilities of the classes, (N, K), float64 on the CPU; a label has the classes no and yes."""
    found = []
    with kept_modes(model), torch.no_grad():
        model.eval()
        prepared = inputs_for(model)
        batches = torch.split(torch.arange(len(data)), batch_size or len(data))
        for _, (inputs, _) in with_positions(data, batches):
            outputs = model(prepared(inputs)).cpu().double()
            if isinstance(task, LabelTask):
                logit = outputs.reshape(-1, 1)
                found.append(F.logsigmoid(torch.cat([-logit, logit], 1)))
            else:
                found.append(outputs.log_softmax(1))
    return torch.cat(found)


def mix_share(before: Tensor, after: Tensor) -> float:
    """Return rho, the part of a change of log-probabilities (N, K) that is the same for all inputs; 0 for no change."""
    change = (after - after.mean(1, keepdim=True)) - (before - before.mean(1, keepdim=True))
    whole = float(change.square().sum(1).mean())
    return float(change.mean(0).square().sum()) / whole if whole else 0.0


def mean_shift(model: nn.Module, data: Batches, batch_size: int) -> float:
    """Return D, how far the means of a layer's inputs have moved from its running means, in running variances."""
    gathered = GatheredMoments()
    with _own_statistics_after(model) as layers, kept_modes(model), torch.no_grad(), ExitStack() as closing:
        for layer in layers:
            closing.callback(watch_inputs(layer, lambda layer, x: gathered.gather(layer, moments_of(x))))  # type: ignore[arg-type]
        model.eval()
        prepared = inputs_for(model)
        for _, (inputs, _) in with_positions(data, torch.split(torch.arange(len(data)), batch_size or len(data))):
            model(prepared(inputs))
    apart = [0.0]
    for path, moments in gathered.by_path(model).items():
        layer = model.get_submodule(path)
        mean, variance = (getattr(layer, name).double() for name in ("running_mean", "running_var"))
        apart.append(float((moments.mean - mean).square().sum() / variance.sum().clamp(min=1e-300)))
    return max(apart)


def class_weights(predicted: Tensor, shares: Tensor) -> Tensor:
    """Return the weight of each input (N,), float64, of sum 1; classes that are not predicted have no share.

    Args:
        predicted: the class of each input, int64 (N,).
        shares: of the classes in training, (K,); of a predicted class above 0, or it counts as one input in N.
    """
    counts = torch.bincount(predicted, minlength=len(shares)).double()
    wanted = shares.double().clamp(min=1 / len(predicted))
    weights = (wanted / counts.clamp(min=1))[predicted]
    return weights / weights.sum()


def balanced_statistics(model: nn.Module, data: Batches, weights: Tensor, *, batch_size: int) -> dict[str, Moments]:
    """Return the weighted statistics of every BatchNorm layer from one pass in eval mode; the model does not change.

    BatchNorm normalises with each batch's own weighted statistics. A batch holds every k-th example, so that data that
    are sorted by class have all classes in each batch.

    Args:
        model: the model.
        data: every example is used once.
        weights: of the examples, (N,), at least 0, of sum 1.
        batch_size: examples per batch; 0 = all in one.

    Returns:
        The moments by layer path: the mean, and as ``m2 / count`` the biased variance. Layers without running
        statistics, and those that were not called, are left out.

    Raises:
        NormLayerError: the input of a layer has not one row for each example; or TorchScript holds a layer.
    """
    refuse_scripted(model, "statistics weighted by class")
    gathered: dict[nn.Module, list[tuple[float, Moments]]] = {}
    of_batch = weights

    def note(layer: _BatchNorm, x: Tensor) -> None:
        if len(x) != len(of_batch):
            raise NormLayerError(
                f"layer '{layers[layer]}' gets {len(x)} rows for {len(of_batch)} examples: its statistics cannot be "
                "weighted by the class of an example"
            )
        moments = Moments(1, *_weighted(x, of_batch))
        gathered.setdefault(layer, []).append((float(of_batch.sum()), moments))
        load_statistics(layer, {"": moments})

    step = -(-len(data) // batch_size) if batch_size else 1
    with _own_statistics_after(model) as layers, kept_modes(model), torch.no_grad(), ExitStack() as closing:
        for layer in layers:
            closing.callback(watch_inputs(layer, note))  # type: ignore[arg-type]
        model.eval()
        prepared = inputs_for(model)
        for start in range(step):
            positions = torch.arange(start, len(data), step)
            of_batch = weights[positions]
            model(prepared(data.batch(positions)[0]))
    found = {}
    for layer, parts in gathered.items():
        of_batches, moments = zip(*parts, strict=True)
        found[layers[layer]] = Moments(1, *mixture(moments, of_batches))
    return found


def _weighted(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the biased variance (C,), float64, of inputs (N, C, *) with weights (N,) of any sum."""
    values = x.detach().double().reshape(*x.shape[:2], -1)
    w = (weights / weights.sum()).to(x.device)
    mean = w @ values.mean(2)
    return mean, w @ (values - mean[:, None]).square().mean(2)


@contextmanager
def _own_statistics_after(model: nn.Module) -> Iterator[dict[nn.Module, str]]:
    """Give the BatchNorm layers with running statistics, and their paths; after the block these are as before."""
    layers: dict[nn.Module, str] = {}
    own: list[tuple[Tensor, Tensor]] = []
    for path, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is not None and module.running_var is not None:
            layers[module] = path
            own += [(buffer, buffer.clone()) for buffer in (module.running_mean, module.running_var)]
    try:
        yield layers
    finally:
        with torch.no_grad():
            for buffer, value in own:
                buffer.copy_(value)
