"""A BatchNorm layer's forward pass, replaced by a method during training.

Together with the statistics of ``reestimation``, the module gives a method all
functions for such a forward pass. It can normalise by any statistics, with gradients
through them.
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
from fedbn_flwr.training.attributes import restored_modes
from fedbn_flwr.training.freezing import refuse_scripted, stays_in_eval
from fedbn_flwr.training.model_state import not_compiled
from fedbn_flwr.training.replaced_method import replace_method

ForwardFunction = Callable[[_BatchNorm, Tensor], Tensor]
"""``compute(layer, x)`` returns a layer's output in training.

The input x is (N, C, *), and the output has its dtype.
"""


def layers_in_training(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the BatchNorm layers that track statistics in training, by path.

    Layers that the model keeps in eval mode, or that are in eval mode while the model
    is in train mode, are left out. A layer at several paths is listed under the first.

    Raises:
        NormLayerError: a layer is in TorchScript.
    """
    refuse_scripted(model, "statistics in training")
    in_eval = stays_in_eval(model)
    with restored_modes(model):
        model.train()
        layers = {*tracking_layers(model)} - in_eval
    return {path: module for path, module in model.named_modules() if module in layers}


def replaceable_layers(model: nn.Module) -> dict[_BatchNorm, list[nn.Module]]:
    """Return ``layers_in_training``, each with the modules that it applies after BN.

    A method replaces a layer's BatchNorm and keeps these modules.

    Raises:
        NormLayerError: the forward pass of a layer does more than that, so a part would
            be lost; or a layer is in TorchScript.
    """
    layers = {}
    for path, layer in layers_in_training(model).items():
        after = modules_after(layer)
        if after is None:
            raise NormLayerError(
                f"BatchNorm layer '{path}' is a {type(layer).__name__} with a custom"
                " forward pass, but the method would replace it. Use torch's"
                " BatchNorm1d, BatchNorm2d or BatchNorm3d, or a subclass whose forward"
                " pass applies BatchNorm, then its modules in their order, and nothing else."
            )
        layers[layer] = list(after.values())
    return layers


class _Forward:
    """A replacement of a layer's forward pass.

    A copy of the layer, deep or pickled, gets the original forward pass, because the
    replacement would use the layer that was copied. Copies are made during training,
    for example for an average of the weights.
    """

    def __init__(
        self, layer: _BatchNorm, function: ForwardFunction | Callable[[Tensor], Tensor]
    ) -> None:
        self._layer, self._function = layer, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # ``memo`` contains the copy of the layer, unless only this object is copied.
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
    """Let ``compute`` be the layers' forward pass, and return the undo function.

    ``layers`` come from ``replaceable_layers``. Modules that a subclass applies after
    BatchNorm, such as an activation, are applied after ``compute``. A layer that does
    not track statistics in a call uses its own forward pass (in eval mode, or during
    ``reestimate_statistics``). Running statistics and counters change only if
    ``compute`` changes them. A compiled model runs ``compute`` between its compiled
    parts.
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
    """Return the output of ``compute``, or of the layer's own forward pass in tests."""
    if not (layer.training and layer.track_running_stats):
        return original(input)
    # torch's forward runs the same check, so the user sees the usual message
    layer._check_input_dim(input)  # type: ignore[no-untyped-call]
    output = compute(layer, input)
    for module in after:
        output = module(output)
    return output


def watch_inputs(
    layer: _BatchNorm, note: Callable[[_BatchNorm, Tensor], None]
) -> Callable[[], None]:
    """Call ``note(layer, x)`` before each forward pass, and return the undo function.

    The function does not use torch's hooks, because a compiled model ignores hooks that
    were added after its compilation. Such a model runs ``note`` between its compiled
    parts.
    """
    original, noted = layer.forward, not_compiled(note)

    def forward(input: Tensor) -> Tensor:
        noted(layer, input)
        return original(input)

    return replace_method(layer, "forward", _Forward(layer, forward))


def normalise(layer: _BatchNorm, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """Return gamma (x - mean) / sqrt(var + eps) + beta, in x's dtype.

    Args:
        layer: provides eps, and gamma and beta if it has them.
        x: its input (N, C, *).
        mean: (C,), in float32, or in float64 with a float64 input.
        var: the biased variance (C,), in the dtype of ``mean``; it is at least 0.
    """
    # torch's kernel returns no gradient for the given statistics, m and v. So mean and
    # var enter a second time, as a factor of gamma that is 1 and a term of beta that is
    # 0: the output does not change, and the gradients are exact.
    m, v = mean.detach(), var.detach()
    weight = ((v + layer.eps) / (var + layer.eps)).sqrt()
    bias = (m - mean) * (var + layer.eps).rsqrt()
    if layer.weight is not None:
        weight, bias = weight * layer.weight, bias * layer.weight
    if layer.bias is not None:
        bias = bias + layer.bias
    return functional.batch_norm(x, m, v, weight, bias, training=False, eps=layer.eps)
