r"""Test-time BatchNorm: statistics of the test inputs, for untrained clients.

An untrained client did not take part in training. The option applies only to tests.
Labels are not used, weights do not change, and nothing additional is sent. A copy of the
model is tested. `eval-on=global-test-bn` tests the global model, and
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

- `batch`: $(\mu_b, v_b)$ (Nado et al. 2020, arXiv:2006.10963);
- `mix`: $w S + (1 - w) (\mu_b, v_b)$ with $w = N / (N + n)$, $N = 16$ (Schneider et al.
  2020, arXiv:2006.16971): the running statistics have the weight of 16 examples.

All other layers are in eval mode, so dropout is off. Every layer with running
statistics is adapted, even if training keeps it in eval mode. A last batch
with one value per channel has no variance, so `batch` joins it to the batch before it.

## Differs from the papers

$v_b$ is biased, so that N = 0 is equal to `batch`; Schneider's code mixes the unbiased
variance. Every kind of BatchNorm is adapted; Schneider's code adapts only BatchNorm2d.
As in that code, $n$ counts examples, even in convolutions: it is the number of rows of
the model's outputs, so each batch has one more pass.

## Laws

`mix` with N = 0 is `batch`; with N = infinity it is the plain test.
"""

from __future__ import annotations

import copy
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fedbn_flwr.batchnorm.layer_inputs import watch_inputs
from fedbn_flwr.batchnorm.reestimation import batch_statistics
from fedbn_flwr.training.batches import Batches, map_inputs
from fedbn_flwr.training.borrowed import borrowed, copied
from fedbn_flwr.training.evaluation import EvalResult, evaluate
from fedbn_flwr.training.freezing import layers_of
from fedbn_flwr.training.tasks import CLASSIFICATION, Task

__all__ = ["PRIOR", "TEST_BN_MODES", "TestBNMode", "adapted", "evaluate_adapted"]

TestBNMode = Literal["", "batch", "mix"]
"""The statistics that a test uses; "" means the running statistics."""
TEST_BN_MODES = tuple(filter(None, get_args(TestBNMode)))

PRIOR = 16
"""N of ``mix``: the running statistics have the weight of this number of examples."""


def adapted(model: nn.Module, mode: TestBNMode) -> nn.Module:
    """Return a copy in eval mode whose BatchNorm layers use each batch's statistics.

    In mode ``mix``, these statistics are mixed with the running statistics. Layers
    without running statistics always use the statistics of the batch.

    Args:
        model: the model; it does not change. If it is compiled, the module inside it is
            copied.
        mode: selects the statistics; "" keeps the running statistics.

    Raises:
        NormLayerError: in mode ``mix``, a layer has its own forward pass.
    """
    return _adapt(copied(_inner(model)), mode)


def _inner(model: nn.Module) -> nn.Module:
    # Remove only the wrapper of torch.compile. ``unwrap`` would also remove a user's
    # wrapper with a child "module", which may do more than call this child.
    inner: nn.Module = getattr(model, "_orig_mod", model)
    return inner


def _adapt(model: nn.Module, mode: TestBNMode) -> nn.Module:
    """Adapt the model itself."""
    model.eval()
    layers: dict[str, Any] = {}
    for path, layer in layers_of(model).items():
        if layer.running_mean is not None:
            layers[path] = layer
    if mode == "batch":
        # Without running statistics, torch uses the batch's statistics in both modes.
        for layer in layers.values():
            layer.running_mean = layer.running_var = None
    if mode == "mix":
        running = {
            path: (layer.running_mean.clone(), layer.running_var.clone())
            for path, layer in layers.items()
        }

        examples: int | None = None

        def count(model: nn.Module, args: Any, kwargs: Any) -> None:
            nonlocal examples
            # The rows of a layer may be pixels, times or nodes. Only outputs have a row
            # for each example. Pass copies, because the model may change its inputs.
            examples = 0
            given = map_inputs(copy.deepcopy, (args, kwargs))
            with torch.no_grad():
                first, *_ = tree_leaves(model.forward(*given[0], **given[1]))
            examples = len(first)

        def mix(path: str, x: Tensor) -> None:
            n = len(x) if examples is None else examples
            # A batch without rows has no statistics.
            if not x.numel() or not n:
                return
            (mean, var), (batch_mean, batch_var) = running[path], batch_statistics(x)
            w = PRIOR / (PRIOR + n)
            # The layer is in eval mode, so it normalises the batch with this mixture.
            layers[path].running_mean.copy_(w * mean + (1 - w) * batch_mean)
            layers[path].running_var.copy_(w * var + (1 - w) * batch_var)

        watch_inputs(layers, mix)
        model.register_forward_pre_hook(count, with_kwargs=True)
    return model


def evaluate_adapted(
    model: nn.Module,
    data: Batches,
    mode: TestBNMode,
    task: Task = CLASSIFICATION,
) -> EvalResult:
    """Return the result of ``evaluate`` with statistics of the data's own inputs.

    Args:
        model: as in ``adapted``.
        data: the test data; batches follow their order. The last two batches are joined
            if a layer cannot compute a variance from a last batch of one example.
        mode: selects the statistics.
        task: defines the loss, the counted targets, the score, and ``test_batch``, the
            number of examples per batch.

    Raises:
        NormLayerError: all batches have one value per channel, or see ``adapted``.
        DataError: outputs or targets do not fit the task.
    """
    if not mode:
        return evaluate(model, data, task=task)
    with borrowed(_inner(model)) as tested:
        _adapt(tested, mode)
        return evaluate(tested, data, task=task, batch_size=task.test_batch)
