r"""Record-level differential privacy: a client trains with DP-SGD.

Abadi et al. 2016, "Deep Learning with Differential Privacy", arXiv:1607.00133, Algorithm 1.

## Problem

A client's model tells of its single examples. DP-SGD limits what each one adds to a step, which needs a gradient of
each example. BatchNorm in train mode has none: it normalises an example with the others of its batch.

## Algorithm

A step draws every example of a client with the probability $q = B / |D_i|$ (Poisson sampling: the size of a batch
varies, and it may be empty), clips the gradient of each and adds noise:

$$g = \frac{1}{B} \left( \sum_{x} \nabla \ell(x) \min\left(1, \frac{C}{\lVert \nabla \ell(x) \rVert}\right) +
\mathcal{N}\left(0, (z C)^2 I\right) \right)$$

Penalties (FedProx), weight decay, momentum, gradient clipping of the whole step and Adam act on $g$: they use nothing
else of the data, so they cost nothing.

## BatchNorm

In eval mode BatchNorm is a function of one example, so it is allowed: frozen from round 1 (``fixbn`` with
``freeze-at=0``), or in the part that ``train-only`` freezes. Its statistics must not come from the clients' data: they
are those of public weights (``init``), or the initial 0 and 1.

## What it protects

Whether an example is among a client's training data, against everybody who sees what leaves the client, the server
included. Noise and the drawn examples come from the operating system's entropy, and so do the masks of dropout and the
augmentation: which of them an example gets depends on the other examples of its batch, so that with draws that somebody
knows the sum would change by more than $C$. Everything else that depends on the data stays with the client; $|D_i|$ is
public. The noise has the precision of floating point numbers: attacks on its last bits (Mironov 2012) are not covered.

## Differs from the paper

The gradient of an example is computed by ``torch.func``, with the example alone. Another model than in a batch would
be trained so if a layer mixes examples: such layers are refused by their class, and others by a trial in the first step
with two examples. An example whose gradient is not finite adds nothing; the client logs how many there were in a round,
and sends the number only with its metrics.

## Law

Without noise and with a large $C$ a step is the ordinary one of the same batch, with $B$ as the divisor and equal
weights of the examples (a loss over the pixels that count weighs those of a batch together). One example changes the
sum by at most $C$, given the masks and the augmentation of each.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from fedbn_flwr.errors import ConfigError, NormLayerError
from fedbn_flwr.messages.protocol import RECORD_DP, Key
from fedbn_flwr.privacy.accounting import Steps, epsilon_of_steps, noise_for_steps
from fedbn_flwr.privacy.noise import Noise, SystemNoise
from fedbn_flwr.training.client_hook import ClientHook, LossAndOutputs
from fedbn_flwr.training.losses import LossFn
from fedbn_flwr.training.randomness import seeded
from fedbn_flwr.training.scripted import is_scripted_batchnorm
from fedbn_flwr.training.settings import LocalTraining
from fedbn_flwr.training.step_rule import StepRule, Stream
from fedbn_flwr.training.tasks import Task
from fedbn_flwr.training.wrappers import unwrap

__all__ = [
    "DPSGD",
    "HOOKS_WITH_STATE",
    "NOISE",
    "PROTECTED_HOOKS",
    "WAY_OUT",
    "RecordLevel",
    "clipped_sum",
    "mixes_examples",
    "sampling_rate",
]

logger = logging.getLogger("flwr")

NOISE = Key("fedbn-flwr.record-dp-noise-multiplier", "float: z that the server chose", "server", "client")

WAY_OUT = (
    "Use another norm (norm=group, layer or wsconv); or keep BatchNorm frozen from the first round, at statistics that "
    "no client's data have touched (strategy=fixbn with freeze-at=0, and init= for public weights), or in the part "
    "that train-only freezes"
)
PROTECTED_HOOKS = ("freeze-bn", "proximal", "momentum", "agc")
"""Client hooks that use nothing of the data but the gradients with noise."""
HOOKS_WITH_STATE = ("momentum",)
"""The ``PROTECTED_HOOKS`` that keep a state for the client's next round."""

_STATE = slice(24, 24 + 624 * 8)  # of torch's generator on the CPU: the words of the Mersenne Twister
_AT_ONCE = 2**26  # numbers in the gradients of the examples that are in memory at the same time


@dataclass(frozen=True)
class RecordLevel:
    """The settings of DP-SGD in a client.

    Args:
        noise_multiplier: z; 0 = clipping alone, which guarantees nothing; None = the server chooses it for a target
            epsilon, and the client trusts it.
        clipping_norm: C, the largest norm of an example's gradient.
        publishes_metrics: whether the client sends its training metrics, which no noise protects.
        frozen_only: train without DP-SGD while BN is not frozen; the server must protect these rounds
            (``RecordLevelDP(until_frozen=...)``), and the client trusts it.
        noise: the source of the noise and of the drawn examples; another one than ``SystemNoise`` is for tests.

    Raises:
        ConfigError: a number is out of range.
    """

    noise_multiplier: float | None
    clipping_norm: float = 1.0
    publishes_metrics: bool = False
    frozen_only: bool = False
    noise: Noise = field(default_factory=SystemNoise)

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.noise_multiplier is not None and not 0 <= self.noise_multiplier < math.inf:
            raise ConfigError(f"noise_multiplier={self.noise_multiplier} must be a finite number of at least 0")
        if not 0 < self.clipping_norm < math.inf:
            raise ConfigError(f"clipping_norm={self.clipping_norm} must be a finite number above 0")


class DPSGD(StepRule):
    """The steps of one client.

    Masks of dropout are drawn from the settings' noise, too. Augmentation must be, in a loop of your own: use
    ``generator()``. ::

        dp = DPSGD(RecordLevel(noise_multiplier=1.0, clipping_norm=1.0), num_examples=len(inputs), batch_size=32)
        for positions in dp.draw(steps=100):
            dp.backward(model, torch.nn.functional.cross_entropy, inputs[positions], targets[positions])
            optimizer.step()
        print(dp.epsilon(steps=100, delta=1e-5))

    Args:
        settings: noise and clipping.
        num_examples: |D_i|.
        batch_size: B, the expected size of a batch; 0 = all examples in every step.

    Attributes:
        rate: q.
        not_finite: so far, how often an example's gradient was not finite and added nothing. It is not private.
    """

    may_drop = False  # every step has noise, and no example runs through the model with its own buffers

    def __init__(self, settings: RecordLevel, num_examples: int, batch_size: int) -> None:
        if num_examples < 1 or batch_size < 0:
            raise ConfigError(f"num_examples={num_examples} must be at least 1, batch_size={batch_size} at least 0")
        if settings.noise_multiplier is None:
            raise ConfigError("noise_multiplier=None is for the server to choose; DPSGD needs a number")
        self.settings, self._num_examples, self._noise_multiplier = settings, num_examples, settings.noise_multiplier
        self._expected = min(batch_size or num_examples, num_examples)
        self.rate = sampling_rate(num_examples, batch_size)
        self.not_finite = 0
        self._tried = False

    def draw(self, steps: int) -> Iterator[Tensor]:
        """Yield the positions of each step's batch, int64, in order; a batch may be empty."""
        for _ in range(steps):
            drawn = self.settings.noise.uniform(self._num_examples) < self.rate
            yield torch.from_numpy(drawn).nonzero()[:, 0]

    def backward(
        self, model: nn.Module, loss: LossFn, inputs: Tensor, targets: Tensor, *, amp: bool = False
    ) -> LossAndOutputs:
        """Set the gradients of a step's parameters, in place of ``loss(model(inputs), targets).backward()``.

        Args:
            model: the model; without a wrapper like DDP or ``torch.compile``.
            loss: mean loss of a batch of (outputs, targets).
            inputs: of the examples of ``draw``, (B, ...).
            targets: (B, ...).
            amp: bfloat16 autocast in the forward pass.

        Returns:
            The mean loss over the examples and the outputs (B, ...). They are not private.

        Raises:
            NormLayerError: a layer mixes the examples of a batch.
            ConfigError: the model has a wrapper, or the gradient of one example cannot be computed.
        """
        _check(model)
        if not self._tried and len(inputs) > 1:
            _try(model, inputs[:2])
            self._tried = True
        with self._own_randomness():
            norm = self.settings.clipping_norm
            total, losses, outputs, not_finite = _clipped_sum(model, loss, inputs, targets, norm, amp)
        self.not_finite += not_finite
        deviation = self._noise_multiplier * self.settings.clipping_norm
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                noise = torch.from_numpy(self.settings.noise.normal(parameter.shape)).to(total[name])
                parameter.grad = ((total[name] + deviation * noise) / self._expected).to(parameter.dtype)
        return losses.nanmean() if len(losses) else losses.new_zeros(()), outputs

    def generator(self) -> torch.Generator:
        """Return a generator on the CPU that nobody can repeat, for the augmentation: from the settings' noise.

        All of its state is drawn, because torch keeps 32 bits of a seed there, and these can be searched.
        """
        noise, generator = self.settings.noise, torch.Generator()
        state = generator.manual_seed(int(noise.uniform(1)[0] * 2**53)).get_state()
        words = state[_STATE].view(torch.int64)
        words.copy_(torch.from_numpy((noise.uniform(len(words)) * 2**32).astype(np.int64)))
        generator.set_state(state)
        return generator

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """Draw from such a generator in the block: the default one on the CPU; on CUDA the seed has 53 bits."""
        generator = self.generator()
        with seeded(generator.initial_seed()):
            torch.default_generator.set_state(generator.get_state())
            yield

    def stream(self, stream: Stream) -> Stream:
        """Return what makes generators that do not follow the seed of the run."""
        return lambda purpose: self.generator()

    def batches(
        self, model: nn.Module, settings: LocalTraining, num_examples: int, generator: torch.Generator
    ) -> Iterator[Tensor]:
        """Return the positions of each step's batch, see ``draw``.

        Raises:
            NormLayerError: a layer mixes the examples of a batch.
            ConfigError: the model has a wrapper, or the settings have no number of steps.
        """
        _check(model)
        if not settings.local_steps:
            raise ConfigError("record-level privacy counts steps: set local-steps instead of local-epochs")
        return self.draw(settings.local_steps)

    def compute(
        self,
        model: nn.Module,
        inputs: Tensor,
        targets: Tensor,
        optimizer: torch.optim.Optimizer,
        hooks: Sequence[ClientHook],
        task: Task,
        amp: bool,
    ) -> LossAndOutputs:
        """Set the gradients of a step: with noise, and with the penalties, which need none."""

        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            task.check(outputs, targets)
            return task.loss(outputs, targets)

        found = self.backward(model, loss, inputs, targets, amp=amp)
        penalties = [penalty for hook in hooks if (penalty := hook.penalty(model)) is not None]
        if penalties:
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            added = torch.autograd.grad(torch.stack(penalties).sum(), trained, materialize_grads=True)
            for parameter, gradient in zip(trained, added, strict=True):
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return found

    def reply(self, steps: int) -> dict[str, str]:
        """Return the entry with which a reply says that so many steps were done: the server asks for it.

        Put it in ``metrics`` of ``NumPyClient.fit``, or in the ConfigRecord ``properties`` of a reply of the Message
        API. Noise that can be repeated counts as none.
        The client's log gets a warning of gradients that were not finite.
        """
        if self.not_finite:
            logger.warning(
                "record-level privacy: %d gradients that are not finite in %d steps. These examples add nothing, and "
                "the mean loss leaves out losses that are NaN. The model may diverge: use a lower learning-rate. If "
                "inputs are not finite, remove those examples.",
                *(self.not_finite, steps),
            )
        noise = self._noise_multiplier if self.settings.noise.secret else 0.0
        return {str(RECORD_DP): json.dumps(Steps(noise, self.rate, steps)._asdict())}

    def epsilon(self, steps: int, delta: float) -> float:
        """Return what so many steps cost in total; infinity without noise, or with noise that can be repeated."""
        if not self.settings.noise.secret:
            return math.inf
        return epsilon_of_steps([Steps(self._noise_multiplier, self.rate, steps)], delta)

    def noise_for(self, epsilon: float, steps: int, delta: float) -> float:
        """Return the smallest noise multiplier with which so many steps cost at most ``epsilon``, to 1e-3."""
        return noise_for_steps(epsilon, self.rate, steps, delta)


def sampling_rate(num_examples: int, batch_size: int) -> float:
    """Return q of a client with so many examples; a batch size of 0 stands for all of them."""
    return min(batch_size or num_examples, num_examples) / num_examples


def _check(model: nn.Module) -> None:
    """Raise ConfigError for a wrapper, NormLayerError for a layer that mixes examples."""
    if unwrap(model) is not model:
        raise ConfigError(
            f"record-level privacy computes the gradients of the module itself: {type(model).__name__} around it "
            "would have no effect. Pass the module inside."
        )
    if found := mixes_examples(model):
        raise NormLayerError("\n".join(found) + f"\n{WAY_OUT}.")


def _try(model: nn.Module, two: Tensor) -> None:
    """Raise NormLayerError if the output for the first of two examples depends on the second, given the same masks."""
    outputs = []
    for pair in (two, two[[0, 0]]):
        buffers = {name: value.clone() for name, value in model.named_buffers()}
        with torch.no_grad(), seeded(0):
            outputs.append(functional_call(model, buffers, (pair,))[0].double())
    if (outputs[1] - outputs[0]).abs().max() > 1e-3 * outputs[0].abs().max():
        raise NormLayerError(
            "record-level privacy: the model's output for an example depends on the others of its batch, and DP-SGD "
            f"would train it with one example at a time.\n{WAY_OUT}."
        )


def mixes_examples(model: nn.Module) -> list[str]:
    """Return the layers whose output for an example depends on others, in their present mode, one line each."""
    found = []
    for path, layer in model.named_modules():
        kind, statistics = type(layer).__name__, getattr(layer, "running_mean", None)
        if (isinstance(layer, _BatchNorm) or is_scripted_batchnorm(layer)) and (layer.training or statistics is None):
            found.append(f"{path} ({kind}) normalises an example with the others of its batch")
        if isinstance(layer, _InstanceNorm) and layer.training and statistics is not None:
            found.append(f"{path} ({kind}) has running statistics, which keep what no noise protects")
    return [f"record-level privacy: {what}" for what in found]


def clipped_sum(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    inputs: Tensor,
    targets: Tensor,
    clipping_norm: float,
    amp: bool = False,
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return the sum of the examples' gradients, each with a norm of at most C.

    Args:
        model: the model; its parameters with ``requires_grad`` are trained.
        loss: mean loss of a batch of (outputs, targets).
        inputs: (B, ...); B may be 0.
        targets: (B, ...).
        clipping_norm: C.
        amp: bfloat16 autocast in the forward pass.

    Returns:
        The sum by parameter, at least in float32; the losses (B,); the outputs (B, ...).

    Raises:
        ConfigError: the gradient of one example cannot be computed; the loss has class weights.
    """
    return _clipped_sum(model, loss, inputs, targets, clipping_norm, amp)[:3]


def _weighs_classes(loss: Callable[[Tensor, Tensor], Tensor]) -> bool:
    """Return whether the loss is torch's mean over classes with weights, which it divides by their sum."""
    if isinstance(loss, functools.partial):
        known, settings = loss.func in (functional.cross_entropy, functional.nll_loss), loss.keywords
        return known and settings.get("weight") is not None and settings.get("reduction", "mean") == "mean"
    return isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) and loss.weight is not None and loss.reduction == "mean"


def _clipped_sum(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    inputs: Tensor,
    targets: Tensor,
    clipping_norm: float,
    amp: bool,
) -> tuple[dict[str, Tensor], Tensor, Tensor, int]:
    """Return what ``clipped_sum`` does, and how many gradients were not finite."""
    if targets.dim() == 1 and _weighs_classes(loss):
        raise ConfigError(
            "record-level privacy: the class weights of the loss have no effect, since its mean over one example "
            "divides by the weight of that example. Leave them out"
        )
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    not_finite = 0
    buffers = dict(model.named_buffers())

    def of_one(values: Mapping[str, Tensor], example: Tensor, target: Tensor) -> Any:
        with torch.autocast(example.device.type, torch.bfloat16) if amp else nullcontext():
            outputs = functional_call(model, {**buffers, **values}, (example[None],))
            found = loss(outputs, target[None])
        return found, (found, outputs[0])

    of_each = vmap(grad(of_one, has_aux=True), in_dims=(None, 0, 0), randomness="different")
    total = {name: torch.zeros_like(value, dtype=_wide(value)) for name, value in trained.items()}
    losses, outputs = [inputs.new_zeros(0, dtype=torch.float32)], list[Tensor]()
    size = max(1, _AT_ONCE // sum(value.numel() for value in trained.values()))
    for first in range(0, len(inputs), size):
        some = slice(first, first + size)
        try:
            gradients, (values, answers) = of_each(trained, inputs[some], targets[some])
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ConfigError(
                f"record-level privacy needs the gradient of each example, and torch cannot compute it: {error}. The "
                "model must treat the examples one by one, and change no buffer by their values."
            ) from error
        clipped, left_out = _clipped(gradients, clipping_norm)
        not_finite += left_out
        for name, gradient in clipped.items():
            total[name] += gradient
        losses.append(values.detach())
        outputs.append(answers.detach())
    return total, torch.cat(losses), torch.cat(outputs) if outputs else inputs.new_zeros(0), not_finite


def _clipped(gradients: Mapping[str, Tensor], clipping_norm: float) -> tuple[dict[str, Tensor], int]:
    """Return the sum over the examples (the first dimension) and how many are not finite: these add nothing."""
    rows = {name: gradient.reshape(len(gradient), -1) for name, gradient in gradients.items()}
    lengths = [torch.linalg.vector_norm(row, dim=1, dtype=torch.float64) for row in rows.values()]
    length = torch.linalg.vector_norm(torch.stack(lengths), dim=0)
    finite = length.isfinite()
    factor = torch.where(finite, clipping_norm / length.clamp(min=clipping_norm), 0.0)[:, None]
    not_finite = int((~finite).sum())
    if not_finite:
        rows = {name: torch.where(finite[:, None], row, 0.0) for name, row in rows.items()}
    # Not a product of matrices, which may round to TF32.
    sums = {name: (factor.to(_wide(row)) * row).sum(0) for name, row in rows.items()}
    return {name: value.view(gradients[name].shape[1:]) for name, value in sums.items()}, not_finite


def _wide(value: Tensor) -> torch.dtype:
    """Return the type in which gradients are clipped and summed: rounding must not make one longer than C."""
    return torch.promote_types(value.dtype, torch.float32)
