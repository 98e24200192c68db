"""A BatchNorm layer's forward pass, replaced by a method during training.

Together with the statistics of ``reestimation``, the module gives a method all
functions for such a forward pass. It can normalise by any statistics, with gradients
through them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.training.freezing import layers_of, stays_in_eval
from fedbn_flwr.training.model_state import not_compiled
from fedbn_flwr.training.replaced_method import replace_method


def layers_in_training(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the BatchNorm layers that track statistics in training, by path.

    Layers that the model keeps in eval mode, or that are in eval mode while the model
    is in train mode, are left out. A layer at several paths is listed under the first.
    """
    in_eval = stays_in_eval(model)
    layers = {}
    for path, layer in layers_of(model).items():
        tracks = layer.running_mean is not None and layer.track_running_stats
        if tracks and layer not in in_eval:
            layers[path] = layer
    return layers


class _Forward:
    """A replacement of a layer's forward pass.

    A copy of the layer, deep or pickled, gets the original forward pass, because the
    replacement would use the layer that was copied. Copies are made during training,
    for example for an average of the weights.
    """

    def __init__(self, layer: _BatchNorm, function: Callable[[Tensor], Tensor]) -> None:
        self._layer, self._function = layer, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _own_forward, (self._layer,)


def _own_forward(layer: _BatchNorm) -> Callable[[Tensor], Tensor]:
    """Return the forward pass of the layer's class, bound to the layer."""
    return type(layer).forward.__get__(layer)  # type: ignore[no-any-return]


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
