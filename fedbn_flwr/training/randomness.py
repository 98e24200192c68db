"""A private random stream for layers that draw random numbers in a forward pass (dropout, stochastic depth).

Torch's layers draw from the process's default generators. Clients in threads of one process share these generators, so
a client's result would depend on which client draws first. Inside ``private_randomness(seed, device)`` every random
function of this thread draws from a private generator, and the default generators do not change.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["default_generators", "private_randomness", "set_default_generators"]

_NAMES: Mapping[Any, tuple[str, ...]] = {
    F: (
        "alpha_dropout",
        "dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "feature_alpha_dropout",
        "gumbel_softmax",
        "fractional_max_pool2d",
        "multi_head_attention_forward",
        "rrelu",
        "scaled_dot_product_attention",
    ),
    torch: (
        "_sample_dirichlet",
        "_standard_gamma",
        "alpha_dropout",
        "alpha_dropout_",
        "bernoulli",
        "binomial",
        "dropout",
        "dropout_",
        "feature_alpha_dropout",
        "feature_alpha_dropout_",
        "feature_dropout",
        "feature_dropout_",
        "gru",
        "lstm",
        "multinomial",
        "native_dropout",
        "normal",
        "poisson",
        "rand",
        "rand_like",
        "randint",
        "randint_like",
        "randn",
        "randn_like",
        "randperm",
        "rnn_relu",
        "rnn_tanh",
        "rrelu",
        "rrelu_",
    ),
    Tensor: (
        "bernoulli",
        "bernoulli_",
        "cauchy_",
        "exponential_",
        "geometric_",
        "log_normal_",
        "multinomial",
        "normal_",
        "random_",
        "uniform_",
    ),
}
_RANDOM = frozenset(getattr(owner, name) for owner, names in _NAMES.items() for name in names)


class _DrawFrom(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base is untyped
    """Pass ``generator`` to every operator that draws random numbers."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = generator

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **given)
        if func is torch.ops.aten.native_dropout.default:
            return self._dropout(*args, **given)
        if any(argument.name == "generator" for argument in func._schema.arguments):
            return func(*args, **{**given, "generator": given.get("generator") or self._generator})
        packet, name = func.overloadpacket, func._overloadname
        for overload in (f"{name}_generator", "generator"):
            if overload in packet.overloads():
                return getattr(packet, overload)(*args, **given, generator=self._generator)
        return func(*args, **given)

    def _dropout(self, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
        """Return the result of CUDA's fused dropout operator, which takes no generator, and the mask."""
        if train is False or p == 0:
            return x.clone(), torch.ones_like(x, dtype=torch.bool)
        mask = torch.empty_like(x).bernoulli_(1 - p, generator=self._generator).bool()
        return x * mask * (1 / (1 - p) if p < 1 else 0.0), mask


class _PrivateStream(TorchFunctionMode):
    """Run the random functions under ``_DrawFrom``, and all others unchanged, at almost no cost."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._draw_from = _DrawFrom(generator)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func not in _RANDOM:
            return func(*args, **(kwargs or {}))
        with self._draw_from:
            return func(*args, **(kwargs or {}))


@contextmanager
def private_randomness(seed: int, device: torch.device) -> Iterator[torch.Generator]:
    """Draw every random number of this thread's forward passes on ``device`` from a stream with this ``seed``.

    The same seed gives the same numbers if clients run one by one, in threads or in processes. Functions that torch
    does not tag as random still use the default generators.

    Yields:
        The stream's generator; the caller may read its state and set it back.
    """
    generator = torch.Generator(device).manual_seed(seed)
    with _PrivateStream(generator):
        yield generator


def default_generators() -> dict[str, bytes | str]:
    """Return the state of the process's default generators: torch's (CPU; CUDA if in use), NumPy's and Python's."""
    state: dict[str, bytes | str] = {"torch": torch.get_rng_state().numpy().tobytes()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    kind, keys, *rest = np.random.get_state(legacy=True)
    state["numpy"] = json.dumps([kind, np.asarray(keys).tolist(), *rest])
    state["python"] = json.dumps(random.getstate())
    return state


def set_default_generators(state: Mapping[str, Any]) -> None:
    """Restore the state of the default generators that ``default_generators`` returned."""
    torch.set_rng_state(torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8))
    if "cuda" in state:
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(state["cuda"]), dtype=torch.uint8))
    kind, keys, *rest = json.loads(state["numpy"])
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), *rest))
    version, values, gauss = json.loads(state["python"])
    random.setstate((version, tuple(values), gauss))
