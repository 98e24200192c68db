"""The settings of local training. Torch only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from fractions import Fraction
from numbers import Real
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fedbn_flwr.errors import ConfigError, unknown_name


@dataclass(frozen=True)
class LearningRate:
    """The learning rate over server rounds, eta(r) for round r = 1, 2, ...

    eta(r) is the initial rate times the factor of every decay that has passed. A config
    gives the decays as fractions of the rounds (``lr-decay-at``); the lab converts them
    to rounds.

    Args:
        initial: the rate of round 1.
        decay_after: round r means "from round r + 1"; the word "freeze" means "after
            the method froze BN".
        factors: one factor for each entry of ``decay_after``.

    Raises:
        ConfigError: ``initial`` is not a finite number above 0, or a decay is neither a
            round nor "freeze".
        ValueError: there are more or fewer factors than decays.
    """

    initial: float
    decay_after: tuple[int | str, ...] = ()
    factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Check the arguments."""
        # Infinity is not below itself, and NaN is not above 0.
        if not (isinstance(self.initial, Real) and 0 < self.initial < math.inf):
            raise ConfigError(
                f"the learning rate is {self.initial!r}; it must be a finite number"
                " above 0"
            )
        for after, factor in zip(self.decay_after, self.factors, strict=True):
            is_round = type(after) is int and after >= 0
            if not (is_round or after == "freeze"):
                raise ConfigError(
                    f"the learning rate decays after {after!r}; give the number of a"
                    ' round, or "freeze". A share of the rounds is a number only for'
                    " the command"
                )
            if not (math.isfinite(factor) and factor > 0):
                raise ConfigError(
                    f"the learning rate has the factor {factor}; it must be finite and"
                    " above 0"
                )

    def at(self, server_round: int, frozen: bool = False) -> float:
        """Return the learning rate of a round (counted from 1).

        ``frozen`` means that the method has frozen BN before this round.
        """
        rate = self.initial
        for after, factor in zip(self.decay_after, self.factors, strict=True):
            if isinstance(after, str):
                passed = frozen
            else:
                passed = server_round > after
            if passed:
                rate *= factor
        return rate


OptimizerName = Literal["sgd", "adam", "adamw"]
Sampling = Literal["with-replacement", "without-replacement"]
# the settings that a training loop of the user replaces
_OF_THE_LOOP = ("optimizer", "sgd_momentum", "weight_decay", "amp")


def share_of(fraction: float | str, count: int) -> int:
    """Return floor(fraction * count), computed with decimal numbers.

    For example, 0.29 of 100 is 29.
    """
    # With floats, 0.29 * 100 is 28.999999999999996.
    return math.floor(Fraction(str(fraction)) * count)


def round_of(at: float | str, num_rounds: int) -> int | None:
    """Return the round that a setting selects, or None if the setting is a word.

    An integer is the round itself. A float f is a fraction of all R rounds and selects
    round floor(f R).
    """
    if isinstance(at, str):
        return None
    return share_of(at, num_rounds) if isinstance(at, float) else at


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """Settings of one client's training in one round.

    Args:
        learning_rate: the learning rate of each round; a number is the rate of all.
        local_steps: steps per round; 0 selects ``local_epochs``.
        sampling: how the batch of a step is drawn: with replacement (arXiv:2301.02982,
            6.1) or without. Without replacement, the steps make passes over the data,
            each in a new order; the last batch of a pass may be smaller. If the batch
            size is at least the size of the data, each batch has all examples once, in
            order, in both cases (our choice).
        local_epochs: passes over the data per round, each in a new order; the last
            batch may be smaller.
        batch_size: examples per step; 0 means the whole local data set.
        optimizer: torch's SGD, Adam or AdamW. Each round has a new optimizer, except in
            the centralized reference.
        sgd_momentum: momentum of SGD (not of BatchNorm).
        weight_decay: L2 coefficient on every trainable parameter.
        amp: bfloat16 autocast in forward passes; parameters and statistics keep their
            dtype.
        loop: a training loop of your own, which takes the steps of a round instead of
            the loop of this package; see ``client.own_loop``. It makes its optimizer
            and its loss itself, so ``optimizer``, ``sgd_momentum``, ``weight_decay``
            and ``amp`` are refused. A ``TorchClient`` calls it.
    """

    learning_rate: LearningRate
    local_steps: int = 0
    sampling: Sampling = "with-replacement"
    local_epochs: int = 1
    batch_size: int = 32
    optimizer: OptimizerName = "sgd"
    sgd_momentum: float = 0.0
    weight_decay: float = 0.0
    amp: bool = False
    loop: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        """Check the numbers."""
        if not isinstance(self.learning_rate, LearningRate):
            rate = LearningRate(self.learning_rate)
            object.__setattr__(self, "learning_rate", rate)
        for field in fields(LocalTraining):
            kind, value = type(field.default), getattr(self, field.name)
            if kind not in (int, float):
                continue
            # Infinity is not below itself, and NaN is not at least 0.
            fits = isinstance(value, Real) and 0 <= float(value) < math.inf
            # As in the settings of methods, 2.0 is the whole number 2.
            if not fits or kind(value) != value:
                number = "a whole number" if kind is int else "a number"
                text = f"{field.name}={value!r} must be {number} of at least 0"
                raise ConfigError(text, code="bad-value")
            object.__setattr__(self, field.name, kind(value))
        if not self.local_steps and not self.local_epochs:
            raise ConfigError(
                "local_steps and local_epochs are both 0, so there is nothing to train",
                code="no-local-step",
            )
        if self.optimizer not in get_args(OptimizerName):
            raise unknown_name("optimizer", self.optimizer, get_args(OptimizerName))
        if self.sgd_momentum and self.optimizer != "sgd":
            raise ConfigError(
                f"sgd_momentum={self.sgd_momentum} requires optimizer='sgd', but the"
                f" optimizer is {self.optimizer!r}",
                code="no-effect",
            )
        for key in _OF_THE_LOOP:
            value = getattr(self, key)
            if self.loop and value != getattr(LocalTraining, key):
                raise ConfigError(
                    f"{key}={value!r} has no effect, because your loop"
                    " makes the optimizer. Leave it out, and set it in the loop.",
                    code="no-effect",
                )

    def first_batch(self, num_examples: int) -> int:
        """Return the number of examples in the first step's batch."""
        return min(self.batch_size or num_examples, num_examples)

    def num_steps(self, num_examples: int) -> int:
        """Return the number of steps in a round."""
        in_pass = math.ceil(num_examples / max(self.first_batch(num_examples), 1))
        return self.local_steps or self.local_epochs * in_pass

    def batches(
        self, num_examples: int, generator: torch.Generator
    ) -> Iterator[Tensor]:
        """Yield the positions of each step's batch."""
        # Batches of all examples need no draw, so they are equal in every round.
        size = self.batch_size or num_examples
        if size >= num_examples:
            for _ in range(self.local_steps or self.local_epochs):
                yield torch.arange(num_examples)
            return
        if self.local_steps and self.sampling == "with-replacement":
            for _ in range(self.local_steps):
                yield torch.randint(num_examples, (size,), generator=generator)
            return
        # Make passes over the data, each in a new order, until all steps are taken.
        left = self.num_steps(num_examples)
        while left > 0:
            order = torch.randperm(num_examples, generator=generator)
            for batch in torch.split(order, size)[:left]:
                yield batch
                left -= 1
