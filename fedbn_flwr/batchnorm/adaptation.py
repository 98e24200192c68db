r"""Test-time BatchNorm: statistics of the test inputs, for untrained clients.

An untrained client did not take part in training. The option applies only to tests.
Labels are not used, weights do not change, nothing additional is sent, and the model is
restored afterwards. `eval-on=global-test-bn` tests the global model, and
`averaged-bn-test-bn` tests the model with the average of the clients' BN parts. Each
held-out client has an additional test that uses only its own test inputs. The plain
test is always reported as well.

**The tests of `eval-on` differ from the test of a new client.** Their batches come from
the whole test set in its order, so they mix the inputs of all clients and domains. For a
new client use `held-out-clients`. In a test set sorted by class, each batch has few
classes.

**If the labels of the test client are skewed, the statistics of its inputs remove the
class signal**, so compare with the plain test. Both modes depend on the size of the
test batches.

## Algorithm

$S = (\mu_s, v_s)$ are a layer's running statistics. $(\mu_b, v_b)$ are the statistics
of test batch $b$ with $n$ examples; the variance is biased. A layer normalises with

- `batch`: $(\mu_b, v_b)$ (Nado et al. 2020, arXiv:2006.10963), equal to
  `eval-on=global-batch-statistics`;
- `mix`: $w S + (1 - w) (\mu_b, v_b)$ with $w = N / (N + n)$, $N = 16$ (Schneider et al.
  2020, arXiv:2006.16971): the running statistics have the weight of 16 examples.

All other layers are in eval mode, so dropout is off. Every layer with running
statistics is adapted, even if training keeps it in eval mode. A batch
with one value per channel has no variance, so `batch` refuses it and names the layer.

## Differs from the papers

$v_b$ is biased, so that N = 0 is equal to `batch`; Schneider's code mixes the unbiased
variance. Every kind of BatchNorm is adapted; Schneider's code adapts only BatchNorm2d.
As in that code, $n$ counts examples, even in convolutions.

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
from fedbn_flwr.training.freezing import layers_of
from fedbn_flwr.training.model_state import copied
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
"""The statistics that a test uses; "" means the running statistics."""
TEST_BN_MODES = tuple(filter(None, get_args(TestBNMode)))

PRIOR = 16
"""N of ``mix``: the running statistics have the weight of this number of examples."""


@contextmanager
def adapted(model: nn.Module, mode: TestBNMode) -> Iterator[None]:
    """Let BatchNorm layers in eval mode use each batch's statistics in the block.

    In mode ``mix``, these statistics are mixed with the running statistics. Layers
    without running statistics always use the statistics of the batch.

    Args:
        model: the model. After the block it has its running statistics again, bit for
            bit. A compiled model is compiled again in the block, so pass the module
            inside it.
        mode: selects the statistics; "" changes nothing.

    Raises:
        NormLayerError: in mode ``batch``, a layer gets a batch with one value per
            channel.
    """
    if not mode:
        yield
        return
    # Collect the layers before their running statistics are removed.
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
    """Loads w S + (1 - w) (mu_b, v_b) into a layer, before the layer gets a batch.

    The layer is in eval mode, so it normalises the batch with this mixture. ``closing``
    restores the running statistics S.
    """

    def __init__(self, layer: _BatchNorm, closing: ExitStack) -> None:
        self._mean, self._var = layer.running_mean.clone(), layer.running_var.clone()  # type: ignore[union-attr]
        closing.callback(self._load, layer, self._mean, self._var)

    def __call__(self, layer: _BatchNorm, x: Tensor) -> None:
        # A batch without rows has no statistics.
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
    """Return the result of ``evaluate`` with statistics of the data's own inputs.

    Args:
        model: as in ``adapted``. If it is compiled, the module inside it is tested.
        data: the test data; batches follow their order.
        mode: selects the statistics.
        task: defines the loss, the counted targets, the score, and ``test_batch``, the
            number of examples per batch.

    Raises:
        NormLayerError: a batch has one value per channel, see ``adapted``.
        DataError: outputs or targets do not fit the task.
    """
    if not mode:
        return evaluate(model, data, task=task)
    # Remove only the wrapper of torch.compile. ``unwrap`` would also remove a user's
    # wrapper with a child "module", which may do more than call this child.
    model = getattr(model, "_orig_mod", model)
    size = task.test_batch
    with adapted(model, mode):
        return evaluate(model, data, task=task, batch_size=size, tries_last=False)


def try_batches(
    model: nn.Module, data: Batches, mode: TestBNMode, task: Task = CLASSIFICATION
) -> None:
    """Check, before training, that a last batch of one example can be tested.

    Otherwise a test with such a batch would fail after hours.

    Raises:
        NormLayerError: a layer gets one value per channel.
    """
    last = torch.split(torch.arange(len(data)), task.test_batch)[-1]
    if mode != "batch" or len(last) != 1:
        return
    model = copied(model)
    with torch.no_grad(), adapted(model, mode):
        model.eval()(inputs_for(model)(data.batch(last)[0]))


def _refuse_one_value(path: str, _: _BatchNorm, x: Tensor) -> None:
    """Raise NormLayerError for an input with one value per channel."""
    if x.numel() == x.shape[1]:
        raise NormLayerError(
            f"test-time BatchNorm: layer '{path}' gets one value per channel, so it"
            " cannot compute a variance. Use test-bn=mix, or test data whose"
            " last batch has two or more examples"
        )
