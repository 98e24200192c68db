r"""Test-time BatchNorm: a test with statistics of the test inputs, for clients that did not train.

For tests only. Labels are not used, weights do not change, nothing more is sent, and the model is restored afterwards.
The key `test-bn` says how. `eval-on=global-test-bn` tests the global model so, `averaged-bn-test-bn` the one with the
average of the clients' BN parts (UniFed's case, the average is ours); held-out clients have one more test, each by its
own test inputs alone. The plain test is reported beside each.

**The tests of `eval-on` are not those of a new client.** Their batches are of the whole test set in its order, the
inputs of all clients and domains mixed (beside it, each domain's alone); use `held-out-clients` for a new client. In a
test set sorted by class each batch has few classes.

**Under label skew of the test client the statistics of its inputs remove the class signal**: compare with the plain
test. `batch` and `mix` depend on the size of the test batches, `momentum` on their order, too: the size and the numbers
belong to a result, and the summary of a run writes them beside it.

## Algorithm

$S = (\mu_s, v_s)$ are a layer's running statistics, $(\mu_b, v_b)$ those of test batch $b$ with $n$ examples, its
variance biased. A layer normalises with

- `batch`: $(\mu_b, v_b)$ (Nado et al. 2020, arXiv:2006.10963); `eval-on=global-batch-statistics` is the same;
- `mix`: $w S + (1 - w) (\mu_b, v_b)$ with $w = N / (N + n)$ (`test-bn-prior` N; Schneider et al. 2020,
  arXiv:2006.16971), or with a constant $w$ (`test-bn-alpha`; alpha-BN, You et al. 2021, arXiv:2110.04065);
- `momentum`: $\bar\mu_b = \tau \bar\mu_{b-1} + (1 - \tau) \mu_b$, the variance likewise, from $\bar\mu_1 = \mu_1$ on
  (`test-bn-tau`; TsmoBN, Jiang et al. 2021, arXiv:2110.09974, called UniFed later; the start and 0.9 are ours);
- `full`: mean and biased variance of all test inputs together, from a pass before the test, in which each batch is
  normalised with its own.

All else is in eval mode, also in that pass: dropout does not act. Every layer with running statistics is adapted in
every mode, also one that training keeps in eval mode (`frozen-bn=eval`). A layer called twice in a forward pass counts
as two batches in `momentum`. Where one value per channel gives no variance, `batch`, `momentum` and `full` refuse the
test and name the layer.

## Differs from the papers

$v_b$ is biased, so that N = 0 is `batch`; Schneider's code mixes the unbiased one. Every kind of BatchNorm is adapted,
there BatchNorm2d alone. $n$ counts examples, also in convolutions, as there. Of TsmoBN and alpha-BN the abstracts were
read, and notes of readers.

## Laws

`mix` with N = 0 or w = 0, and `momentum` with $\tau$ = 0, are `batch`; `mix` with w = 1 is the plain test, bit for bit.
With one batch of everything `batch`, `momentum` and `full` are the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.batchnorm.reestimation import load_statistics, reestimate_statistics
from fedbn_flwr.batchnorm.taken_forward import batch_statistics, watch_inputs
from fedbn_flwr.errors import ConfigError, NormLayerError
from fedbn_flwr.training.batches import Batches
from fedbn_flwr.training.evaluation import EvalResult, evaluate, without_running_statistics
from fedbn_flwr.training.memory_format import inputs_for
from fedbn_flwr.training.modes import kept_modes
from fedbn_flwr.training.scripted import refuse_scripted
from fedbn_flwr.training.tasks import CLASSIFICATION, Task

__all__ = ["TEST_BN_MODES", "TestBN", "TestBNMode", "adapted", "evaluate_adapted", "try_batches"]

TestBNMode = Literal["batch", "mix", "momentum", "full"]
TEST_BN_MODES: tuple[TestBNMode, ...] = get_args(TestBNMode)

Pair = tuple[Tensor, Tensor]  # mean and variance, (C,)


@dataclass(frozen=True)
class TestBN:
    """The statistics of a test.

    Attributes:
        mode: see the module.
        prior: N of ``mix``: the running statistics weigh as much as so many examples.
        alpha: w of ``mix``, in place of ``prior``; None = by ``prior``.
        tau: of ``momentum``.
        batch_size: examples per test batch, and of the pass of ``full``; 0 = the task's number, all for that pass.

    Raises:
        ConfigError: a number is out of range.
    """

    __test__ = False  # no test for pytest

    mode: TestBNMode
    prior: float = 16.0
    alpha: float | None = None
    tau: float = 0.9
    batch_size: int = 0

    def __post_init__(self) -> None:
        """Check the numbers."""
        if not 0 <= self.prior < float("inf"):
            raise ConfigError(f"prior={self.prior} must be a finite number of at least 0")
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            raise ConfigError(f"alpha={self.alpha} must be in [0, 1]")
        if not 0 <= self.tau < 1:
            raise ConfigError(f"tau={self.tau} must be in [0, 1)")

    def __str__(self) -> str:
        """The mode and the numbers that it uses."""
        by = f"prior {self.prior:g}" if self.alpha is None else f"alpha {self.alpha:g}"
        number = {"mix": f" ({by})", "momentum": f" (tau {self.tau:g})"}.get(self.mode, "")
        return f"test-bn={self.mode}{number}, batches of {self.batch_size or 'the default size'}"


@contextmanager
def adapted(model: nn.Module, data: Batches, by: TestBN | None) -> Iterator[None]:
    """Let the BatchNorm layers use the statistics of test inputs in the block, in eval mode.

    Layers without running statistics use each batch's own anyway.

    Args:
        model: it has its running statistics again after the block, bit for bit. A compiled model is compiled anew in
            the block; use the module inside.
        data: the test data; ``full`` reads all inputs first.
        by: which statistics; None = the running ones.

    Raises:
        NormLayerError: a layer gets one value per channel from a batch of ``batch``, from the first one of
            ``momentum`` (with tau = 0 from any), both in the block, or from the first one of the pass of ``full``; or
            TorchScript holds a layer.
    """
    if by is None:
        yield
        return
    refuse_scripted(model, "test-time BatchNorm")
    layers = {
        module: (module.running_mean, module.running_var, path)
        for path, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None and module.running_var is not None
    }
    kept = {layer: (mean.clone(), var.clone()) for layer, (mean, var, _) in layers.items()}
    with ExitStack() as closing:

        @closing.callback
        def restore() -> None:
            with torch.no_grad():
                for layer, (mean, var, _) in layers.items():
                    mean.copy_(kept[layer][0])
                    var.copy_(kept[layer][1])

        if by.mode == "full":
            _try_batch(model, data, torch.arange(len(data))[: by.batch_size or None])
            load_statistics(model, reestimate_statistics(model, data, batch_size=by.batch_size, layers=layers))
        elif by.mode == "batch":
            closing.enter_context(without_running_statistics(model))
            for layer, (_, _, path) in layers.items():
                closing.callback(_watch(layer, functools.partial(_refuse_one_value, path)))
        else:
            for layer, (mean, var, path) in layers.items():
                rule = _mixture(by, kept[layer]) if by.mode == "mix" else _moving(by.tau, path)
                closing.callback(_watch(layer, functools.partial(_put, mean, var, rule)))
        yield


def evaluate_adapted(
    model: nn.Module,
    data: Batches,
    by: TestBN | None,
    task: Task = CLASSIFICATION,
    on_batch: Callable[[Tensor, Tensor], None] | None = None,
) -> EvalResult:
    """Return the metrics of the model on the data, as ``evaluate``, with the statistics of their inputs.

    Args:
        model: as in ``adapted``; of a compiled one the module inside is tested.
        data: the test data; batches follow their order.
        by: which statistics, in which batches; None = the running ones.
        task: the loss, which targets count, and the score.
        on_batch: as for ``evaluate``.

    Raises:
        NormLayerError: a batch has one value per channel, see ``adapted``.
        DataError: outputs or targets do not fit the task.
    """
    if by is None:
        return evaluate(model, data, task=task, on_batch=on_batch)
    by = replace(by, batch_size=by.batch_size or task.test_batch)
    model = getattr(model, "_orig_mod", model)  # not ``unwrap``: a user's wrapper named "module" may do more
    with adapted(model, data, by):
        return evaluate(model, data, task=task, batch_size=by.batch_size, tries_last=False, on_batch=on_batch)


def try_batches(model: nn.Module, data: Batches, by: TestBN | None, task: Task = CLASSIFICATION) -> None:
    """Check, before training, that the model can be adapted on a batch of one example, if the test has one.

    Raises:
        NormLayerError: a layer gets one value per channel.
    """
    if by is None or by.mode == "mix":
        return
    batches = torch.split(torch.arange(len(data)), by.batch_size or task.test_batch)
    _try_batch(model, data, batches[-1 if by.mode == "batch" or (by.mode == "momentum" and not by.tau) else 0])


def _try_batch(model: nn.Module, data: Batches, which: Tensor) -> None:
    """Raise what a batch of one example raises if a layer gets one value per channel."""
    if len(which) == 1:
        with kept_modes(model), torch.no_grad(), adapted(model, data, TestBN("batch")):
            model.eval()(inputs_for(model)(data.batch(which)[0]))


Rule = Callable[[Pair, Tensor], Pair]  # from a batch's statistics and the batch to those that normalise it


def _mixed(w: float, first: Pair, second: Pair) -> Pair:
    return w * first[0] + (1 - w) * second[0], w * first[1] + (1 - w) * second[1]


def _mixture(by: TestBN, stored: Pair) -> Rule:
    def rule(of_batch: Pair, x: Tensor) -> Pair:
        return _mixed(by.prior / (by.prior + len(x)) if by.alpha is None else by.alpha, stored, of_batch)

    return rule


def _moving(tau: float, path: str) -> Rule:
    last: list[Pair] = []

    def rule(of_batch: Pair, x: Tensor) -> Pair:
        if not last or not tau:
            _refuse_one_value(path, x)
        last[:] = [_mixed(tau, last[0], of_batch) if last else of_batch]
        return last[0]

    return rule


def _watch(layer: _BatchNorm, note: Callable[[Tensor], None]) -> Callable[[], None]:
    """Call ``note`` with each input of the layer; return what ends that."""
    return watch_inputs(layer, lambda _, x: note(x))


def _put(mean: Tensor, var: Tensor, rule: Rule, x: Tensor) -> None:
    """Let the layer normalise a batch with the statistics of the rule; a batch of no rows has none."""
    if not x.numel():
        return
    with torch.no_grad():
        new_mean, new_var = rule(batch_statistics(x), x)
        mean.copy_(new_mean)
        var.copy_(new_var)


def _refuse_one_value(path: str, x: Tensor) -> None:
    if x.numel() == x.shape[1]:
        raise NormLayerError(
            f"test-time BatchNorm: layer '{path}' gets one value per channel, from which no variance can be computed. "
            "Use larger test batches (test-bn-batch-size) of two or more examples, or test-bn=mix"
        )
