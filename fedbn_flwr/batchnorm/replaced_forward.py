"""A BatchNorm layer's forward pass, taken over by a method for a round's training.

What a method needs to write such a forward pass, besides the statistics of
``reestimation``: normalisation by any statistics, through which gradients flow.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.batchnorm.reestimation import tracking_layers
from fedbn_flwr.errors import NormLayerError
from fedbn_flwr.norms.own_forward import modules_after
from fedbn_flwr.training.freezing import refuse_scripted, restored_modes, stays_in_eval
from fedbn_flwr.training.model_state import not_compiled
from fedbn_flwr.training.replaced_method import replace_method

__all__ = [
    "ForwardFunction",
    "layers_in_training",
    "normalise",
    "replace_forward",
    "replaceable_layers",
    "watch_inputs",
]

ForwardFunction = Callable[[_BatchNorm, Tensor], Tensor]
"""``compute(layer, x)`` returns a layer's output in training.

The input x is (N, C, *), and the output has its dtype.
"""


def layers_in_training(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the BatchNorm layers that track statistics in training, by path.

    Layers that the model keeps in eval mode, or has in it while it trains itself, are
    left out. A layer registered at several paths has its first one.

    Raises:
        NormLayerError: TorchScript holds a layer.
    """
    refuse_scripted(model, "statistics in training")
    in_eval = stays_in_eval(model)
    with restored_modes(model):
        model.train()
        layers = {*tracking_layers(model)} - in_eval
    return {path: module for path, module in model.named_modules() if module in layers}


def replaceable_layers(model: nn.Module) -> dict[_BatchNorm, list[nn.Module]]:
    """Return ``layers_in_training``, each with the modules that it applies after BN.

    A method can replace the rest of their forward pass.

    Raises:
        NormLayerError: a layer does more in its forward pass, which would be left out,
            or TorchScript holds it.
    """
    layers = {}
    for path, layer in layers_in_training(model).items():
        after = modules_after(layer)
        if after is None:
            raise NormLayerError(
                f"BatchNorm layer '{path}' is a {type(layer).__name__}, which has a"
                " forward pass of its own: the method would replace it. Use torch's"
                " BatchNorm1d, BatchNorm2d or BatchNorm3d, or a subclass that applies"
                " its modules in their order, and nothing else, after BatchNorm."
            )
        layers[layer] = list(after.values())
    return layers


class _Forward:
    """A forward pass in the place of a layer's own.

    A copy of the layer, deep or pickled, has its own again. It may be an average of the
    weights, made in mid-training: with the replacement it would use the original.
    """

    def __init__(
        self, layer: _BatchNorm, function: ForwardFunction | Callable[[Tensor], Tensor]
    ) -> None:
        self._layer, self._function = layer, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # ``memo`` has the layer's copy, unless this object alone is copied.
        copied = memo.get(id(self._layer))
        return self if copied is None else _own_forward(copied)

    def __reduce__(self) -> tuple[Any, ...]:
        return _own_forward, (self._layer,)


def _own_forward(layer: _BatchNorm) -> Callable[[Tensor], Tensor]:
    """Return the forward pass of the layer's class, bound to the layer."""
    return type(layer).forward.__get__(layer)  # type: ignore[no-any-return]


def replace_forward(
    layers: Mapping[_BatchNorm, Iterable[nn.Module]], compute: ForwardFunction
) -> Callable[[], None]:
    """Let ``compute`` be the layers' forward pass; return the function that undoes it.

    The layers are those of ``replaceable_layers``. What a subclass applies after
    BatchNorm, an activation say, it applies after ``compute``. A layer that does not
    track when it is called (in eval mode, or while ``reestimate_statistics`` passes the
    data through the model) uses its own forward pass. Running statistics and counters
    change only if ``compute`` does it. A compiled model runs ``compute`` between its
    compiled parts.
    """
    undo = ExitStack()
    for layer, after in layers.items():
        taken = functools.partial(_forward, layer, layer.forward, compute, after)
        forward = _Forward(layer, not_compiled(taken))
        undo.callback(replace_method(layer, "forward", forward))
    return undo.close


def _forward(
    layer: _BatchNorm,
    original: Callable[[Tensor], Tensor],
    compute: ForwardFunction,
    after: Iterable[nn.Module],
    input: Tensor,
) -> Tensor:
    """Return ``compute``'s output, or that of the layer's own forward in a test."""
    if not (layer.training and layer.track_running_stats):
        return original(input)
    # As torch's forward does, whose message a user knows.
    layer._check_input_dim(input)  # type: ignore[no-untyped-call]
    output = compute(layer, input)
    for module in after:
        output = module(output)
    return output


def watch_inputs(
    layer: _BatchNorm, note: Callable[[_BatchNorm, Tensor], None]
) -> Callable[[], None]:
    """Call ``note(layer, x)`` before each forward pass; return what undoes it.

    Not a hook of torch's: a compiled model does not look for hooks that come after its
    compilation. It runs ``note`` between its compiled parts.
    """
    original, noted = layer.forward, not_compiled(note)

    def forward(input: Tensor) -> Tensor:
        noted(layer, input)
        return original(input)

    return replace_method(layer, "forward", _Forward(layer, forward))


def normalise(layer: _BatchNorm, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """Return gamma (x - mean) / sqrt(var + eps) + beta, in x's dtype.

    Args:
        layer: has gamma and beta, if any, and eps.
        x: its input (N, C, *).
        mean: (C,), in float32, or in float64 with a float64 input.
        var: biased (C,), likewise; it is at least 0.
    """
    # torch's kernel sends no gradient to the statistics that it is given, m and v. So
    # mean and var enter a second time, as a factor of gamma that is 1 and a term of
    # beta that is 0: the output stays, and the gradients are exact.
    m, v = mean.detach(), var.detach()
    weight = ((v + layer.eps) / (var + layer.eps)).sqrt()
    bias = (m - mean) * (var + layer.eps).rsqrt()
    if layer.weight is not None:
        weight, bias = weight * layer.weight, bias * layer.weight
    if layer.bias is not None:
        bias = bias + layer.bias
    return functional.batch_norm(x, m, v, weight, bias, training=False, eps=layer.eps)
