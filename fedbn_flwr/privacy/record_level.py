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

The gradient of an example is computed by ``torch.func``, with the example alone (``privacy.example_gradients``).
Another model than in a batch would be trained so if a layer mixes examples: such layers are refused by their class, and
others by a trial in the first step with two examples. An example whose gradient is not
finite adds nothing; the client logs how many there were in a round, and sends the number only with its metrics.

## Law

Without noise and with a large $C$ a step is the ordinary one of the same batch, with $B$ as the divisor and equal
weights of the examples (a loss over the pixels that count weighs those of a batch together). One example changes the
sum by at most $C$, given the masks and the augmentation of each.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedbn_flwr.errors import ConfigError, DataError
from fedbn_flwr.messages.protocol import RECORD_DP, Key
from fedbn_flwr.privacy.accounting import Steps, epsilon_of_steps, noise_for_steps
from fedbn_flwr.privacy.example_gradients import check_layers, clipped_sum, try_two_examples
from fedbn_flwr.privacy.noise import Noise, SystemNoise, drawing_from, generator_from
from fedbn_flwr.training.client_hook import ClientHook, LossAndOutputs
from fedbn_flwr.training.losses import LossFn
from fedbn_flwr.training.settings import LocalTraining
from fedbn_flwr.training.step_rule import StepRule, Stream
from fedbn_flwr.training.tasks import Task

__all__ = [
    "DPSGD",
    "HOOKS_WITH_STATE",
    "NOISE",
    "PROTECTED_HOOKS",
    "RecordLevel",
    "sampling_rate",
]

logger = logging.getLogger("flwr")

NOISE = Key("fedbn-flwr.record-dp-noise-multiplier", "float: z that the server chose", "server", "client")

PROTECTED_HOOKS = ("freeze-bn", "proximal", "momentum", "agc")
"""Client hooks that use nothing of the data but the gradients with noise."""
HOOKS_WITH_STATE = ("momentum",)
"""The ``PROTECTED_HOOKS`` that keep a state for the client's next round."""


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
        input_noise_multiplier: z of the sums of the inputs that a client sends once, before round 1, for one mean and
            std of all clients (``privacy.input_sums``); 0 = it sends none.
        noise: the source of the noise and of the drawn examples; another one than ``SystemNoise`` is for tests.

    Raises:
        ConfigError: a number is out of range.
    """

    noise_multiplier: float | None
    clipping_norm: float = 1.0
    publishes_metrics: bool = False
    frozen_only: bool = False
    input_noise_multiplier: float = 0.0
    noise: Noise = field(default_factory=SystemNoise)

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.noise_multiplier is not None and not 0 <= self.noise_multiplier < math.inf:
            raise ConfigError(f"noise_multiplier={self.noise_multiplier} must be a finite number of at least 0")
        if not 0 <= self.input_noise_multiplier < math.inf:
            raise ConfigError(
                f"input_noise_multiplier={self.input_noise_multiplier} must be a finite number, 0 or more"
            )
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
            DataError: the inputs are no tensor.
            ConfigError: the model has a wrapper, or the gradient of one example cannot be computed.
        """
        check_layers(model)
        if not isinstance(inputs, Tensor):
            raise DataError(
                f"a batch's inputs are a {type(inputs).__name__}; record-level privacy computes the gradient of each "
                "example, and needs them in one tensor (B, ...). Put the parts into one, and let the model divide it."
            )
        if not self._tried and len(inputs) > 1:
            try_two_examples(model, inputs[:2])
            self._tried = True
        with drawing_from(self.settings.noise):
            clipped = clipped_sum(model, loss, inputs, targets, self.settings.clipping_norm, amp)
        self.not_finite += clipped.not_finite
        self._set_noisy_gradients(model, clipped.total)
        losses = clipped.losses
        return losses.nanmean() if len(losses) else losses.new_zeros(()), clipped.outputs

    def _set_noisy_gradients(self, model: nn.Module, total: Mapping[str, Tensor]) -> None:
        """Set g of the trained parameters: the sum with noise, divided by B."""
        deviation = self._noise_multiplier * self.settings.clipping_norm
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                noise = torch.from_numpy(self.settings.noise.normal(parameter.shape)).to(total[name])
                parameter.grad = ((total[name] + deviation * noise) / self._expected).to(parameter.dtype)

    def generator(self) -> torch.Generator:
        """Return a generator on the CPU that nobody can repeat, for the augmentation: from the settings' noise."""
        return generator_from(self.settings.noise)

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
        check_layers(model)
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

        loss_and_outputs = self.backward(model, loss, inputs, targets, amp=amp)
        _add_penalties(model, hooks)
        return loss_and_outputs

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


def _add_penalties(model: nn.Module, hooks: Sequence[ClientHook]) -> None:
    """Add the gradients of the hooks' penalties to those of the trained parameters."""
    penalties = [penalty for hook in hooks if (penalty := hook.penalty(model)) is not None]
    if penalties:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        added = torch.autograd.grad(torch.stack(penalties).sum(), trained, materialize_grads=True)
        for parameter, gradient in zip(trained, added, strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
