"""The tensors of one exchange of a synchronised step, and the server's answer.

An exchange has a tag ``kind/k/path``; k numbers the BatchNorm calls of the forward pass
from 0, and path is the path of the layer. A functional call has no path. Clients in
different layers thus send different tags. C is the number of channels of the layer.

| kind | sent by client i | shape | answer |
|---|---|---|---|
| ``mean`` | mean_i, eq. (39) | (C + 1,) | mean = sum w_i mean_i |
| ``variance`` | w_i / p_i E_i[(y - mean)^2], eq. (40) | (C,) | var = sum w_i E_i[(y - mean)^2] |
| ``moments`` | mean_i; rest_i; var_i = E_i[(y - m_i)^2] | (3, C + 1) | mean; rest; sum w_i (var_i + (m_i - m)^2) |
| ``gradients`` | dF_i/dvar; dF_i/dmean, eq. (41) | (2, C) | sum p_i dF_i/dvar; sum p_i dF_i/dmean |

The last column of ``mean`` and ``moments`` has c_i = b_i / n_i, the client's examples
per element of a channel, in the first row. An example of client i has the weight
p_i / b_i, and so has each of its elements, hence w_i = (p_i / c_i) / sum (p_j / c_j). If
all examples have the same number of elements, w_i is p_i, and the answer in this column
is c = sum p_i c_i. Otherwise it is -c, with c = sum w_i c_i = 1 / sum (p_i / c_i). Its
sign lets the clients use w_i / p_i = c / c_i instead of 1. All clients use the same
n = B / c for the running variance, the number of elements of all batches. For images of
h x w positions c is 1 / (h w). The ledger lists this column separately, like the
counters.

The tensors are float64 for a float64 layer input, and float32 otherwise. A rest is the
part of a mean that rounding to that type removed: m_i = mean_i + rest_i and m = mean +
rest = sum p_i m_i.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from fedbn_flwr.errors import NOT_FINITE, ReplyError

ExchangeScheme = Literal["3L+1", "2L+1"]
"""The order of mean and variance in the forward pass.

``3L+1``: first the mean, then the variance, as in the paper. ``2L+1``: both together,
with the same mathematics.

In the forward pass, ``2L+1`` sends 3 C floats per BatchNorm call and direction, and
``3L+1`` sends 2 C. The additional C are the rests of the means, because in ``2L+1`` the
server computes the spread of the clients' means. With means rounded to float32 and
without rests, a variance with mean 1e4 and deviation 1e-2 would be wrong by about 2%.
With the rests, the error is a few roundings at any mean. In ``3L+1`` the clients
compute the spread about one rounded mean, and lose about as many digits as torch's own
layer.
"""

Backward = Literal["global", "own"]
"""Whether gradients with respect to the statistics are exchanged.

``global`` (FedTAN): they are exchanged. ``own`` (FedDNA): each client uses its own
gradients.
"""


Reduce = Callable[[str, Tensor], Tensor]
"""``reduce(tag, tensor)`` sends ``tensor``, waits, and returns the server's answer.

The answer has the same shape, on any device.
"""


_KINDS = ("mean", "variance", "moments", "gradients")
_WITH_SHARE = ("mean", "moments")
# No client sends larger values, unless it has diverged.
_LARGEST = 1e30
_LARGEST_MEAN = 1e15


def combine(tag: str, tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the server's answer to one exchange.

    Args:
        tag: The exchange, ``kind/k/path``; see the table above.
        tensors: One tensor per client, all of one shape and dtype, in an order that
            does not depend on arrival. ``refuse_unusable`` accepts each of them.
        weights: p_i or the sizes |D_i|, positive, in the same order; this function
            divides them by their sum.

    Returns:
        A tensor of the shape, dtype and device of the first tensor, accumulated in
        float64 in the given order.
    """
    kind = tag.partition("/")[0]
    wide = [t.detach().to(tensors[0].device, torch.float64) for t in tensors]
    differ = False
    if kind in _WITH_SHARE:
        per_element = torch.stack([t[..., -1].max() for t in wide]).cpu()
        # With equal c_i, keep the bits of p_i.
        differ = bool((per_element != per_element[0]).any())
        if differ:
            weights = (per_element.new_tensor(weights) / per_element).tolist()
    # Add in float64 and in the given order, so that every run gives the same bits.
    total = math.fsum(weights)
    shares = [weight / total for weight in weights]
    result = _weighted_sum(wide, shares)
    if kind == "moments":
        result = _pooled(wide, shares, tensors[0].dtype)
    if differ:
        result[..., -1] *= -1
    return result.to(tensors[0].dtype)


def refuse_unusable(tag: str, tensor: Tensor) -> None:
    """Raise ReplyError for a tensor that would spoil the answer to all clients.

    The text begins with a verb; its subject is the client.
    """
    # Check each tensor alone, so that one client cannot end the step for all.
    kind, where = tag.partition("/")[0], f"in exchange {tag!r}"
    if kind not in _KINDS:
        raise ReplyError(f"sent an exchange of an unknown kind: {tag!r}")
    first = tensor
    if kind == "moments":
        fits = tensor.dim() == 2 and len(tensor) == 3
        first = tensor[0] if fits else tensor.new_empty(0)
    if not (tensor.is_floating_point() and first.numel()):
        raise ReplyError(f"sent {tensor.dtype} of shape {tuple(tensor.shape)} {where}")
    # Squares of means must fit into float32.
    largest = float(tensor.abs().max())
    if not largest < (_LARGEST_MEAN if kind == "mean" else _LARGEST):
        raise ReplyError(f"sent the value {largest:g} {where}", code=NOT_FINITE)
    if kind == "moments" and not float(tensor[:2].abs().max()) < _LARGEST_MEAN:
        raise ReplyError(f"sent the mean {largest:g} {where}", code=NOT_FINITE)
    variances = {"variance": tensor, "moments": tensor[-1]}.get(kind)
    if variances is not None and float(variances.min()) < 0:
        raise ReplyError(f"sent the variance {float(variances.min()):g} {where}")
    if kind in _WITH_SHARE:
        # It is above 1 in a layer that gets only some rows, such as an expert.
        share = float(first.flatten()[-1])
        if not share > 0:
            raise ReplyError(
                f"sent {share:g} examples per element {where}, so its weight would be"
                " negative or infinite"
            )


def is_finite(tensor: Tensor) -> bool:
    """Return whether all values of a tensor are finite."""
    # A sum is four times faster than a look at each value. It may overflow.
    return math.isfinite(tensor.sum()) or bool(tensor.isfinite().all())


def exchange_bytes(tag: str, tensor: Tensor) -> tuple[int, int]:
    """Return the bytes of a tensor's channels, and of its column of shares."""
    apart = 0
    if tag.partition("/")[0] in _WITH_SHARE:
        apart = tensor[..., -1:].numel()
    rows, size = tensor.numel() - apart, tensor.element_size()
    return rows * size, apart * size


def _pooled(
    moments: Sequence[Tensor], shares: Sequence[float], dtype: torch.dtype
) -> Tensor:
    """Return mean (rounded to ``dtype``), rest and var, (3, C) in float64."""
    exact = [mean_i + rest_i for mean_i, rest_i, _ in moments]
    mean = _weighted_sum(exact, shares).to(dtype).to(torch.float64)
    # Below, means are offsets from the rounded mean, so that a rest smaller than
    # float64's last digit of the mean is not lost.
    offsets = [(mean_i - mean) + rest_i for mean_i, rest_i, _ in moments]
    rest = _weighted_sum(offsets, shares)
    # The equation of `reestimation.mixture` with rests: without them the variance would
    # be wrong here. The spread of the client means is a sum of squared differences, not
    # E[y^2] - E[y]^2, to avoid cancellation.
    about_mean = []
    for (_, _, var_i), offset in zip(moments, offsets, strict=True):
        about_mean.append(var_i + (offset - rest).square())
    return torch.stack([mean, rest, _weighted_sum(about_mean, shares)])


def _weighted_sum(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """Return sum p_i x_i, added in the given order, so a run repeats bit for bit."""
    result = torch.zeros_like(tensors[0])
    for tensor, share in zip(tensors, shares, strict=True):
        result += share * tensor
    return result
