"""The calls of ``functional.batch_norm``, where a layer normalises. Torch only.

A subclass of torch's layer may scale its input before this call, or apply an activation
after it. So methods measure and replace the call instead of the layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fedbn_flwr.errors import NormLayerError


class Arguments(NamedTuple):
    """The arguments of ``functional.batch_norm``, with its order and its defaults."""

    input: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None = None
    bias: Tensor | None = None
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5


class BatchNormCalls(TorchFunctionMode):
    """Calls ``act`` for each BatchNorm call in the block, and for no other calls.

    The result of ``act`` is the result of the call. If it is None, torch normalises.

    Attributes:
        num_calls: the number of BatchNorm calls so far.
    """

    def __init__(self, act: Callable[[Arguments], Tensor | None]) -> None:
        super().__init__()
        self._act = act
        self.num_calls = 0

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Let ``act`` see a BatchNorm call."""
        bind, given, result = _BINDERS.get(func), kwargs or {}, None
        if bind is not None:
            self.num_calls += 1
            result = self._act(bind(*args, **given))
        return func(*args, **given) if result is None else result


def forward_with(
    act: Callable[[Arguments], Tensor | None],
    forward: Callable[..., Any],
    layer: nn.Module,
    path: str,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Return the output of ``forward`` of a layer, with ``act`` in its BatchNorm calls.

    Raises:
        NormLayerError: the layer makes no such call, so it has its own arithmetic.
    """
    with BatchNormCalls(act) as calls:
        output = forward(*args, **kwargs)
    if not calls.num_calls:
        raise NormLayerError(
            f"BatchNorm layer '{path}' ({type(layer).__name__}) does not call"
            " functional.batch_norm, so its statistics cannot be measured or replaced."
            " Use torch's layer, or leave this one out of layers."
        )
    return output


def _from_builtin(
    y: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Arguments:
    """Return the arguments of ``torch.batch_norm``, used directly by some models."""
    return Arguments(
        y, running_mean, running_var, weight, bias, training, momentum, eps
    )


_BINDERS: dict[Any, Callable[..., Arguments]] = {
    functional.batch_norm: Arguments,
    torch.batch_norm: _from_builtin,
}
