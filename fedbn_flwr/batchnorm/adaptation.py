r"""Test-time BatchNorm: statistics of the test inputs, for clients that did not train.

For tests only. Labels are not used, weights do not change, nothing more is sent, and
the model is restored afterwards. The key `test-bn` says how. `eval-on=global-test-bn`
tests the global model so, `averaged-bn-test-bn` the one with the average of the
clients' BN parts; held-out clients have one more test, each by its own test inputs
alone. The plain test is reported beside each.

**The tests of `eval-on` are not those of a new client.** Their batches are of the whole
test set in its order, the inputs of all clients and domains mixed (beside it, each
domain's alone); use `held-out-clients` for a new client. In a test set sorted by class
each batch has few classes.

**Under label skew of the test client the statistics of its inputs remove the class
signal**: compare with the plain test. Both modes depend on the size of the test
batches, which belongs to a result: the summary of a run writes it.

## Algorithm

$S = (\mu_s, v_s)$ are a layer's running statistics, $(\mu_b, v_b)$ those of test batch
$b$ with $n$ examples, its variance biased. A layer normalises with

- `batch`: $(\mu_b, v_b)$ (Nado et al. 2020, arXiv:2006.10963);
  `eval-on=global-batch-statistics` is the same;
- `mix`: $w S + (1 - w) (\mu_b, v_b)$ with $w = N / (N + n)$, $N = 16$ (Schneider et al.
  2020, arXiv:2006.16971): the running statistics weigh as much as 16 examples.

All else is in eval mode: dropout does not act. Every layer with running statistics is
adapted, also one that training keeps in eval mode (`frozen-bn=eval`). Where one value
per channel gives no variance, `batch` refuses the test and names the layer.

## Differs from the papers

$v_b$ is biased, so that N = 0 is `batch`; Schneider's code mixes the unbiased one.
Every kind of BatchNorm is adapted, there BatchNorm2d alone. $n$ counts examples, also
in convolutions, as there.

## Laws

`mix` with N = 0 is `batch`; with N = infinity it is the plain test.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.batchnorm.reestimation import batch_statistics
from fedbn_flwr.batchnorm.replaced_forward import watch_inputs
from fedbn_flwr.errors import NormLayerError
from fedbn_flwr.training.batches import Batches, inputs_for
from fedbn_flwr.training.evaluation import (
    EvalResult,
    evaluate,
    without_running_statistics,
)
from fedbn_flwr.training.freezing import layers_of, refuse_scripted, unchanged
from fedbn_flwr.training.tasks import CLASSIFICATION, Task

__all__ = [
    "PRIOR",
    "TEST_BN_MODES",
    "TestBNMode",
    "adapted",
    "evaluate_adapted",
    "try_batches",
]

TestBNMode = Literal["", "batch", "mix"]
"""The statistics of a test; "" = the running ones."""
TEST_BN_MODES = tuple(filter(None, get_args(TestBNMode)))

PRIOR = 16
"""N of ``mix``: the running statistics weigh as much as so many examples."""


@contextmanager
def adapted(model: nn.Module, mode: TestBNMode) -> Iterator[None]:
    """Let the BatchNorm layers use each batch's statistics in the block, in eval mode.

    Layers without running statistics use each batch's own anyway.

    Args:
        model: it has its running statistics again after the block, bit for bit. A
            compiled model is compiled anew in the block; use the module inside.
        mode: which statistics.

    Raises:
        NormLayerError: a layer gets one value per channel from a batch of ``batch``, in
            the block; or TorchScript holds a layer.
    """
    if not mode:
        yield
        return
    refuse_scripted(model, "test-time BatchNorm")
    # Before their running statistics are taken away.
    layers = {}
    for path, layer in layers_of(model).items():
        if layer.running_mean is not None:
            layers[path] = layer
    with ExitStack() as closing:
        if mode == "batch":
            closing.enter_context(without_running_statistics(model))
        for path, layer in layers.items():
            if mode == "batch":
                refuse = functools.partial(_refuse_one_value, path)
                closing.callback(watch_inputs(layer, refuse))
            else:
                mix = _Mixture(layer, closing)
                closing.callback(watch_inputs(layer, mix))
        yield


class _Mixture:
    """Gives a layer w S + (1 - w) (mu_b, v_b) for each batch; ``closing`` restores S.

    The mixture is loaded before the batch, which the layer then normalises by it in
    eval mode.
    """

    def __init__(self, layer: _BatchNorm, closing: ExitStack) -> None:
        self._mean, self._var = layer.running_mean.clone(), layer.running_var.clone()  # type: ignore[union-attr]
        closing.callback(self._load, layer, self._mean, self._var)

    def __call__(self, layer: _BatchNorm, x: Tensor) -> None:
        # A batch of no rows has no statistics.
        if not x.numel():
            return
        with torch.no_grad():
            mean, var = batch_statistics(x)
            w = PRIOR / (PRIOR + len(x))
            mixed_mean = w * self._mean + (1 - w) * mean
            mixed_var = w * self._var + (1 - w) * var
        self._load(layer, mixed_mean, mixed_var)

    @staticmethod
    def _load(layer: _BatchNorm, mean: Tensor, var: Tensor) -> None:
        with torch.no_grad():
            layer.running_mean.copy_(mean)  # type: ignore[union-attr]
            layer.running_var.copy_(var)  # type: ignore[union-attr]


def evaluate_adapted(
    model: nn.Module,
    data: Batches,
    mode: TestBNMode,
    task: Task = CLASSIFICATION,
) -> EvalResult:
    """Return what ``evaluate`` does, with statistics of the data's own inputs.

    Args:
        model: as in ``adapted``; of a compiled one the module inside is tested.
        data: the test data; batches follow their order.
        mode: which statistics.
        task: the loss, which targets count, the score, and ``test_batch``, the examples
            per batch.

    Raises:
        NormLayerError: a batch has one value per channel, see ``adapted``.
        DataError: outputs or targets do not fit the task.
    """
    if not mode:
        return evaluate(model, data, task=task)
    # Not ``unwrap``: a user's wrapper named "module" may do more.
    model = getattr(model, "_orig_mod", model)
    size = task.test_batch
    with adapted(model, mode):
        return evaluate(model, data, task=task, batch_size=size, tries_last=False)


def try_batches(
    model: nn.Module, data: Batches, mode: TestBNMode, task: Task = CLASSIFICATION
) -> None:
    """Check, before training, that a last batch of one example can be tested.

    A test may have one, and would fail after hours.

    Raises:
        NormLayerError: a layer gets one value per channel.
    """
    last = torch.split(torch.arange(len(data)), task.test_batch)[-1]
    if mode != "batch" or len(last) != 1:
        return
    with unchanged(model), torch.no_grad(), adapted(model, mode):
        model.eval()(inputs_for(model)(data.batch(last)[0]))


def _refuse_one_value(path: str, _: _BatchNorm, x: Tensor) -> None:
    """Raise NormLayerError for an input with one value per channel."""
    if x.numel() == x.shape[1]:
        raise NormLayerError(
            f"test-time BatchNorm: layer '{path}' gets one value per channel, from"
            " which no variance can be computed. Use test-bn=mix, or test data whose"
            " last batch has two or more examples"
        )
