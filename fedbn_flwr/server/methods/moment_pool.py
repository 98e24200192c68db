"""Clients' moments of BN inputs, for methods that pool statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from fedbn_flwr.batchnorm.array_types import Array, State
from fedbn_flwr.batchnorm.averaging import fits
from fedbn_flwr.batchnorm.parts import BatchNormLayer, Parts
from fedbn_flwr.batchnorm.reestimation import Moments

Pool = Callable[[Sequence[Moments], Sequence[float]], Moments]
"""Returns the common moments of a layer from the clients' moments and weights."""

_UNTOUCHED = "which keep their present statistics, mean 0 and variance 1 in a new model"


def by_layer(
    parts: Parts, sent: Sequence[Mapping[str, Moments]], weights: Sequence[float]
) -> Iterator[tuple[BatchNormLayer, list[Moments], list[float]]]:
    """Yield each layer with its clients' moments and the weights of those clients."""
    # A client that did not call a layer has no moments of the layer.
    for layer in parts.layers:
        moments, own_weights = [], []
        for own, weight in zip(sent, weights, strict=True):
            if layer.path in own:
                moments.append(own[layer.path])
                own_weights.append(weight)
        if moments:
            yield layer, moments, own_weights


def pooled_statistics(
    parts: Parts,
    sent: Sequence[Mapping[str, Moments]],
    weights: Sequence[float],
    pool: Pool,
    like: State,
) -> dict[str, Array]:
    """Return the running statistics of all clients' data, by entry, in float64.

    A layer is left out if it has fewer than two values, or if its statistics are not
    finite in the type of ``like``. Counters are left out because they count training
    batches.
    """
    entries: dict[str, Array] = {}
    for layer, moments, own_weights in by_layer(parts, sent, weights):
        total = pool(moments, own_weights)
        mean, variance = layer.entries["running_mean"], layer.entries["running_var"]
        own = {mean: total.mean.numpy(), variance: total.variance.numpy()}
        # Skip values that do not fit. torch's variance has the factor n / (n - 1), so
        # the variance of a single value is not finite. In float16, the square of 256 is
        # infinite.
        if all(fits(values, like[name].dtype) for name, values in own.items()):
            entries |= own
    return entries


def unmeasured(parts: Parts, sent: Sequence[Mapping[str, Moments]]) -> str:
    """Return a text that names the layers without moments from any client.

    The text is empty if there are no such layers, or if no client sent moments.
    """
    measured = {path for moments in sent for path in moments}
    tracking = [layer.path for layer in parts.layers if "running_mean" in layer.entries]
    paths = [path for path in tracking if path not in measured]
    if not measured or not paths:
        return ""
    return (
        f"no reply has moments of the inputs of {', '.join(paths)}, {_UNTOUCHED}: these"
        " layers ran under no_grad or not at all. If the training reaches them but the"
        " model's forward does not, pass forward=f to answer_statistics(...), with a"
        " function f(model, inputs) that calls all of them."
    )
