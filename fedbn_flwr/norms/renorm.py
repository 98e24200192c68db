"""``norm=batch-renorm``: BatchNorm with corrected batch statistics.

The running statistics correct the statistics of the batch. In training, with the
batch's mean mu_B and sigma_B = sqrt(var_B + eps) (biased), and the running mean mu and
sigma = sqrt(var + eps) before this batch:

    y = gamma * ((x - mu_B) / sigma_B * r + d) + beta,
    r = clip(sigma_B / sigma, 1 / r_max, r_max),    d = clip((mu_B - mu) / sigma, -d_max, d_max),

r and d have no gradient. Evaluation is BatchNorm's. With r_max = 1 and d_max = 0 the
layer is BatchNorm, bit for bit.

Source: Ioffe 2017, arXiv:1702.03275, Algorithm 1 (FedBS, section III, misprints r).

Differs from the paper: running statistics are torch's (the unbiased variance; Ioffe
averages sigma), so they have the same meaning for every method as in BatchNorm. The
warm-up is ours: both limits grow linearly from 1 and 0 over ``warmup_steps`` batches,
counted by ``num_batches_tracked`` over all rounds. Ioffe keeps 1 and 0 for 5,000 steps,
then reaches 5 at 25,000 and 3 at 40,000 of 130,000 or more steps, beyond most federated
runs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.errors import ConfigError, NormLayerError
from fedbn_flwr.norms.replaced_layers import Replacement, named
from fedbn_flwr.norms.swap import batchnorm_places, swap_batchnorm
from fedbn_flwr.training.channels import batch_mean_and_variance


class BatchRenorm(_BatchNorm):
    """Batch renormalisation of an input (N, C, *).

    It replaces a BatchNorm layer and keeps its parameters and buffers.
    """

    def __init__(
        self, layer: _BatchNorm, rmax: float, dmax: float, warmup_steps: int
    ) -> None:
        """Use ``layer``'s settings and state, with limits that are already checked."""
        super().__init__(
            layer.num_features, eps=layer.eps, momentum=layer.momentum, affine=False
        )
        self.affine, self.track_running_stats = layer.affine, layer.track_running_stats
        self.weight, self.bias = layer.weight, layer.bias
        self.running_mean, self.running_var = layer.running_mean, layer.running_var
        self.num_batches_tracked = layer.num_batches_tracked
        self.rmax, self.dmax, self.warmup_steps = rmax, dmax, warmup_steps

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(
                f"expected an input (N, C, *), got shape {tuple(input.shape)}"
            )

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised input (N, C, *), and update statistics in training."""
        if not (
            self.training
            and self.track_running_stats
            and self.running_mean is not None
            and input.numel()
        ):
            return super().forward(input)
        self._check_input_dim(input)
        # Before batch_norm below updates the running statistics.
        r, d = self.corrections(input)
        # As in torch's forward: without a momentum, the average over all batches so
        # far.
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        # gamma * (x_hat * r + d) + beta is BatchNorm with other gamma and beta; r = 1
        # and d = 0 do not change them.
        weight = r if self.weight is None else self.weight * r
        shift = d if self.weight is None else self.weight * d
        bias = shift if self.bias is None else self.bias + shift
        return F.batch_norm(
            input,
            self.running_mean,
            self.running_var,
            weight,
            bias,
            True,
            momentum,
            self.eps,
        )

    @torch.no_grad()
    def corrections(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """Return r and d (C,) for a batch, in the running statistics' dtype."""
        mean, var = self.running_mean, self.running_var
        if mean is None or var is None:
            raise NormLayerError(
                "batch renormalisation needs running statistics, but this layer has"
                " none."
            )
        dtype = torch.promote_types(
            torch.promote_types(input.dtype, mean.dtype), torch.float32
        )
        batch_mean, batch_var = batch_mean_and_variance(input.to(dtype))
        sigma = (var + self.eps).sqrt()
        rmax, dmax = (limit.to(dtype) for limit in self.limits())
        r = torch.clamp((batch_var + self.eps).sqrt() / sigma, 1 / rmax, rmax)
        d = torch.clamp((batch_mean - mean) / sigma, -dmax, dmax)
        return r.to(mean.dtype), d.to(mean.dtype)

    def limits(self) -> tuple[Tensor, Tensor]:
        """Return r_max and d_max for the next batch (0-dim).

        A layer without a counter has no warm-up.
        """
        # Use tensors throughout: reading the counter would make the host wait for an
        # accelerator.
        seen = self.num_batches_tracked
        if seen is None or not self.warmup_steps:
            device = None if self.running_mean is None else self.running_mean.device
            share = torch.ones((), dtype=torch.float64, device=device)
        else:
            share = (seen.double() / self.warmup_steps).clamp(max=1.0)
        return 1 + (self.rmax - 1) * share, self.dmax * share

    def extra_repr(self) -> str:
        """Return the description of BatchNorm and the limits."""
        described = str(super().extra_repr())  # type: ignore[no-untyped-call]
        return (
            f"{described}, rmax={self.rmax:g}, dmax={self.dmax:g},"
            f" warmup_steps={self.warmup_steps}"
        )


def use_batch_renorm(
    model: nn.Module, *, rmax: float = 3.0, dmax: float = 5.0, warmup_steps: int = 1000
) -> tuple[nn.Module, tuple[Replacement, ...]]:
    """Replace every BatchNorm layer by batch renormalisation, in place.

    Args:
        model: any model.
        rmax: limit of r, at least 1.
        dmax: limit of d, at least 0.
        warmup_steps: batches over which the limits grow from 1 and 0 to these values; 0
            means no warm-up.

    Raises:
        ConfigError: a limit is out of range.
        NormLayerError: a layer has no running statistics; the message names all such
            layers.
    """
    _check(rmax, dmax, warmup_steps)
    bare = []
    for path, layer, _, _ in batchnorm_places(model):
        if layer.running_mean is None:
            bare.append(named(path, layer))
    if bare:
        raise NormLayerError(
            "norm 'batch-renorm' corrects by running statistics, but these layers have"
            f" none: {', '.join(bare)}. Use track_running_stats=True or another norm."
        )
    return swap_batchnorm(
        model, lambda layer, path: BatchRenorm(layer, rmax, dmax, warmup_steps)
    )


def _check(rmax: float, dmax: float, warmup_steps: int) -> None:
    """Raise ConfigError for a limit out of range."""
    for name, value, least in (
        ("rmax", rmax, 1),
        ("dmax", dmax, 0),
        ("warmup_steps", warmup_steps, 0),
    ):
        allowed: tuple[type, ...] = (int, float)
        kind = "a finite"
        if name == "warmup_steps":
            allowed, kind = (int,), "a whole"
        # bool is a subclass of int.
        is_number = isinstance(value, allowed) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < least:
            raise ConfigError(
                f"norm 'batch-renorm': {name} is {value!r}; it must be {kind} number of"
                f" at least {least}."
            )
