r"""Test-time BatchNorm: a test with statistics of the test inputs, for clients that did not train. Torch only.

$S = (\mu_s, v_s)$ are a layer's running statistics, $(\mu_b, v_b)$ those of test batch $b$ with $n$ examples, its
variance biased. Labels are not used, weights do not change, and the model is restored afterwards. A layer normalises
with

- ``batch``: $(\mu_b, v_b)$ (Nado et al. 2020, arXiv:2006.10963);
- ``mix``: $w S + (1 - w) (\mu_b, v_b)$ with $w = N / (N + n)$ (``prior`` N; Schneider et al. 2020, arXiv:2006.16971),
  or with a constant w (``share``; alpha-BN, You et al. 2021, arXiv:2110.04065);
- ``momentum``: $\bar\mu_b = \tau \bar\mu_{b-1} + (1 - \tau) \mu_b$, the variance likewise, from $\bar\mu_1 = \mu_1$ on
  (TsmoBN, Jiang et al. 2021, arXiv:2110.09974, called UniFed later; the start and tau = 0.9 are ours);
- ``full``: mean and biased variance of all test inputs together, from a pass before the test.

Differs from the sources: $v_b$ is biased, so that N = 0 is ``batch``; Schneider's code mixes the unbiased one. Every
kind of BatchNorm is adapted, there BatchNorm2d alone. n counts examples, also in convolutions, as there.

Under label skew of the *test* client the statistics of its inputs remove the class signal: report the plain test beside
this one. The result of ``batch`` and ``mix`` depends on the size of the test batches, that of ``momentum`` on their
order, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.batchnorm.reestimation import load_statistics, reestimate_statistics
from fedbn_flwr.errors import ConfigError, NormLayerError
from fedbn_flwr.training.loop import Batches

__all__ = ["TestBN", "adapted"]

Pair = tuple[Tensor, Tensor]  # mean and variance, (C,)


@dataclass(frozen=True)
class TestBN:
    """The statistics of a test.

    Attributes:
        mode: see the module.
        prior: N of ``mix``: the running statistics weigh as much as so many examples.
        share: w of ``mix``, in place of ``prior``; None = by ``prior``.
        tau: of ``momentum``.
        batch_size: examples per test batch; 0 = the task's number.

    Raises:
        ConfigError: a number is out of range.
    """

    __test__ = False  # no test for pytest

    mode: Literal["batch", "mix", "momentum", "full"]
    prior: float = 16.0
    share: float | None = None
    tau: float = 0.9
    batch_size: int = 0

    def __post_init__(self) -> None:
        """Check the numbers."""
        if not 0 <= self.prior < float("inf"):
            raise ConfigError(f"prior={self.prior} must be a finite number of at least 0")
        if self.share is not None and not 0 <= self.share <= 1:
            raise ConfigError(f"share={self.share} must be in [0, 1]")
        if not 0 <= self.tau < 1:
            raise ConfigError(f"tau={self.tau} must be in [0, 1)")


@contextmanager
def adapted(model: nn.Module, data: Batches, by: TestBN) -> Iterator[None]:
    """Let the BatchNorm layers use the statistics of test inputs in the block, in eval mode.

    Layers without running statistics use each batch's own anyway.

    Args:
        model: it has its running statistics again after the block, bit for bit.
        data: the test data; ``full`` reads all inputs first.
        by: which statistics.

    Raises:
        NormLayerError: in the block: ``batch`` or the first batch of ``momentum`` has one value per channel.
    """
    layers = {
        module: (module.running_mean, module.running_var, path)
        for path, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None and module.running_var is not None
    }
    kept = {layer: (mean.clone(), var.clone()) for layer, (mean, var, _) in layers.items()}
    handles = []
    try:
        if by.mode == "full":
            load_statistics(model, reestimate_statistics(model, data, batch_size=by.batch_size))
        else:
            for layer, (mean, var, path) in layers.items():
                rule = _rule(by, kept[layer])
                handles.append(layer.register_forward_pre_hook(_hook(mean, var, rule, path), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
        with torch.no_grad():
            for layer, (mean, var, _) in layers.items():
                mean.copy_(kept[layer][0])
                var.copy_(kept[layer][1])


def _rule(by: TestBN, stored: Pair) -> Callable[[Pair, int], Pair]:
    """Return the function from a batch's statistics and its number of examples to those to use."""
    running: list[Pair] = []

    def mixed(own: Pair, w: float, other: Pair) -> Pair:
        return w * other[0] + (1 - w) * own[0], w * other[1] + (1 - w) * own[1]

    def use(own: Pair, n: int) -> Pair:
        if by.mode == "mix":
            return mixed(own, by.prior / (by.prior + n) if by.share is None else by.share, stored)
        if by.mode == "momentum":
            running[:] = [mixed(own, by.tau, running[0]) if running else own]
            return running[0]
        return own

    return use


def _hook(mean: Tensor, var: Tensor, rule: Callable[[Pair, int], Pair], path: str) -> Callable[..., None]:
    def put(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x: Tensor = (args[0] if args else kwargs["input"]).to(torch.promote_types(mean.dtype, torch.float32))
        axes = [axis for axis in range(x.dim()) if axis != 1]
        own_var, own_mean = torch.var_mean(x, axes, correction=0)
        found_mean, found_var = rule((own_mean, own_var), len(x))
        if x.numel() == x.shape[1] and found_var is own_var:
            raise NormLayerError(
                f"BatchNorm layer '{path}' gets one value per channel, from which no variance can be computed. Use "
                "larger test batches, or mix with the running statistics."
            )
        with torch.no_grad():
            mean.copy_(found_mean)
            var.copy_(found_var)

    return put
