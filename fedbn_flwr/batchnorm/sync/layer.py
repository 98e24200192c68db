"""One BatchNorm call that gets its statistics, and their gradients, from outside.

Symbols: y is the layer's input, n_i its elements per channel on this client, s =
sqrt(var + eps), g = dF_i/dx_hat. Moments and gradients are computed in float32 for
float16, bfloat16 and float32 inputs, and in float64 for float64.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedbn_flwr.errors import NormLayerError
from fedbn_flwr.training.channels import in_torchs_format, other_axes, per_channel

logger = logging.getLogger("flwr")


def elements_per_channel(y: Tensor) -> int:
    """Return n_i, the number of elements of one channel (dimension 1) of ``y``."""
    return y.numel() // y.shape[1] if y.numel() else 0


def local_mean(y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return y - centre, the centre (C,), and the mean of y - centre (C,).

    ``centre`` is a mean with the rounding error of a long sum; the mean of y - centre
    corrects it. On a CPU, this and the mean square are several times faster than
    torch's Welford pass, and equally exact if the mean is far above the deviation.
    """
    centre = y.mean(other_axes(y))
    centred = y - per_channel(centre, y)
    return centred, centre, centred.mean(other_axes(y))


def local_moments(centred: Tensor, centre: Tensor, error: Tensor) -> Tensor:
    """Return (mean, rest, var) of this client, (3, C), from ``local_mean``'s values.

    ``mean`` is centre + error after rounding, and ``rest`` is the part lost by
    rounding. ``var`` is biased, about mean + rest.
    """
    mean = centre + error
    rest = error - (mean - centre)
    return torch.stack(
        [mean, rest, (mean_square(centred) - error.square()).clamp_min_(0)]
    )


def mean_square(centred: Tensor) -> Tensor:
    """Return the mean of the squares of each channel, (C,)."""
    return centred.square().mean(other_axes(centred))


def _with_share(rows: Tensor, share: float) -> Tensor:
    """Return ``rows``, (C,) or (3, C), with a further column of ``share`` and zeros."""
    column = rows.new_zeros(*rows.shape[:-1], 1)
    column.view(-1)[0] = share
    return torch.cat([rows, column], -1)


class BatchNormCall:
    """One BatchNorm call of a synchronised step, with exchanges between clients.

    Args:
        exchange: ``exchange(tag, local)`` returns the server's answer to a tensor of
            this client.
        call: k/path, the number of the call in the forward pass and the path of its
            layer.
        batch_size: b_i, the number of examples in this client's batch.
        layer: a text for the layer in errors.
        fused: whether mean and variance are sent in one exchange.
        keeps_gradients: whether the client keeps its gradients instead of exchanging
            them.

    Attributes:
        layer: the text for the layer in errors.
        mean: (C,), of all clients' batches; available after ``moments``.
        var: (C,), biased, of all clients' batches; available after ``moments``.
        share: c, the examples of all clients per element of a channel; available after
            ``moments``.
        ratio: w_i / p_i; 1 if all examples have the same number of elements. Available
            after ``moments``.
    """

    mean: Tensor
    var: Tensor
    share: float
    ratio: float

    def __init__(
        self,
        exchange: Callable[[str, Tensor], Tensor],
        call: str,
        batch_size: int,
        layer: str,
        fused: bool,
        keeps_gradients: bool,
    ) -> None:
        self._exchange = exchange
        self._call = call
        self._batch_size = batch_size
        self.layer = layer
        self._fused = fused
        self._keeps_gradients = keeps_gradients
        self._answered = False

    def moments(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return y - mean - rest, and mean, rest and var over all clients, each (C,).

        The first is a new tensor. ``var`` is biased, about mean + rest. ``rest`` is the
        rounding error of mean, or 0 if ``var`` is taken about mean.
        """
        centred, centre, error = local_mean(y)
        share = self._batch_size / elements_per_channel(y)
        if self._fused:
            # With 2L + 1 exchanges, eq. (39) and (40) share one exchange.
            local = _with_share(local_moments(centred, centre, error), share)
            answer = self._exchange(f"moments/{self._call}", local)
            self.mean, rest, self.var = answer[:, :-1]
            self._weigh(share, answer[0, -1])
            # The order of the operations matters: centre - mean is small and exact, and
            # rest is far smaller than both.
            centred += per_channel(centre - self.mean - rest, y)
        else:
            # With 3L + 1 exchanges, the first returns the mean over all clients, eq.
            # (39), and the second the variance about this mean, eq. (40).
            local = _with_share(centre + error, share)
            answer = self._exchange(f"mean/{self._call}", local)
            self.mean = answer[:-1]
            self._weigh(share, answer[-1])
            rest = torch.zeros_like(self.mean)
            centred += per_channel(centre - self.mean, y)
            # The server adds with p_i, because it has no c_i in this exchange.
            self.var = self._exchange(
                f"variance/{self._call}", self.ratio * mean_square(centred)
            )
        return centred, self.mean, rest, self.var

    def _weigh(self, share: float, answer: Tensor) -> None:
        """Set ``share`` and ``ratio``, given c_i and the answer to it."""
        self.share, self.ratio = abs(float(answer)), 1.0
        if answer < 0:
            self.ratio = self.share / share

    def gradients(self, local: Tensor) -> Tensor:
        """Return dF/dvar and dF/dmean, (2, C), eq. (41), from this client's values.

        Raises:
            NormLayerError: the gradients of this call have already been exchanged.
        """
        # FedDNA does not exchange gradients: it uses this client's own values.
        if self._keeps_gradients:
            return local
        if self._answered:
            raise NormLayerError(
                f"{self.layer} was reached by a second backward pass through one"
                " forward pass, but its gradients have already been exchanged. Add the"
                " losses and call backward once."
            )
        self._answered = True
        return self._exchange(f"gradients/{self._call}", local)


class NormaliseTogether(torch.autograd.Function):
    """BatchNorm in training mode, with the statistics of a ``BatchNormCall``."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        call: BatchNormCall,
    ) -> Tensor:
        """Return weight * (y - mean) / s + bias, in y's dtype."""
        y = in_torchs_format(y)
        centred, mean, rest, var = call.moments(
            y.to(torch.promote_types(y.dtype, torch.float32))
        )
        # Save y instead of ``centred``. The code below changes ``centred``, and its
        # dtype is wider if y is float16.
        ctx.save_for_backward(y, weight, mean, rest, var)
        ctx.eps, ctx.call, ctx.has_bias = eps, call, bias is not None
        scale = (var + eps).rsqrt_()
        if weight is not None:
            scale *= weight
        x = centred.mul_(per_channel(scale, y))
        if bias is not None:
            x += per_channel(bias, y)
        return x.to(y.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of y, weight and bias.

        The gradients of weight and bias come only from this client, because the server
        averages them with the model.

        Raises:
            NormLayerError: the gradients shall have gradients.
        """
        if torch.is_grad_enabled():
            raise NormLayerError(
                f"{ctx.call.layer} is in a step of fedtan or feddna, whose gradients have"
                " no gradients, but the loss asks for them (create_graph=True), as a"
                " gradient penalty does. Use a method without a synchronised step, such"
                " as fixbn or fedbn, or leave the penalty out of this step."
            )
        y, weight, mean, rest, var = ctx.saved_tensors
        grad = grad.to(mean.dtype)
        centred = y.to(mean.dtype) - per_channel(mean, y)
        scale = (var + ctx.eps).rsqrt_()
        d_bias = grad.sum(other_axes(y))
        # Here and below, ``rest``, the rounding error of the mean, is subtracted per
        # channel instead of in a pass over all elements.
        d_weight = ((grad * centred).sum(other_axes(y)) - rest * d_bias) * scale
        sum_g, sum_g_x_hat = d_bias, d_weight
        factor = scale
        if weight is not None:
            sum_g, sum_g_x_hat, factor = (
                d_bias * weight,
                d_weight * weight,
                scale * weight,
            )
        d_y = None
        if ctx.needs_input_grad[0]:
            # This client's terms of dF/dvar, sum g (y - mean) (-1/2) s^-3, and of
            # dF/dmean, -sum g / s. The mean's path through this client's variance is
            # left out, because it is zero in the sum over clients.
            local = torch.stack([-0.5 * sum_g_x_hat * scale.square(), -sum_g * scale])
            # d_y = g / s + 2 d_var (y - mean) + d_mean. Here d_var and d_mean are the
            # answers divided by the number of values per channel, times w_i / p_i.
            n = elements_per_channel(y) / ctx.call.ratio
            d_var, d_mean = ctx.call.gradients(local) / n
            centred.mul_(per_channel(2 * d_var, y)).add_(
                per_channel(d_mean - 2 * d_var * rest, y)
            )
            d_y = centred.addcmul_(grad, per_channel(factor, y)).to(y.dtype)
        return (
            d_y,
            None if weight is None else d_weight,
            d_bias if ctx.has_bias else None,
            None,
            None,
        )
