"""What a client under record-level privacy may do and send."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from fedbn_flwr.batchnorm.averaging import Array
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.messages.numpy_client import Config
from fedbn_flwr.messages.protocol import EXAMPLES_NOT_FINITE, STEPS, TrainConfig
from fedbn_flwr.privacy.input_sums import norm_bound
from fedbn_flwr.privacy.record_level import DPSGD, HOOKS_WITH_STATE, PROTECTED_HOOKS, RecordLevel
from fedbn_flwr.training.step_rule import StepRule

__all__ = ["RecordPrivacy", "unchanged_buffers"]


class RecordPrivacy:
    """The limits of a client's training and of its replies; without settings there are none."""

    def __init__(self, settings: RecordLevel | None) -> None:
        self._settings = settings

    @property
    def hides_metrics(self) -> bool:
        """Whether metrics stay with the client."""
        return self._settings is not None and not self._settings.publishes_metrics

    def refuse(self, what: str) -> None:
        """Raise ConfigError if there are limits: no noise protects ``what``."""
        if self._settings:
            raise ConfigError(f"record-level privacy: this client does not send {what}, which no noise protects")

    def input_noise(self, num_features: int) -> Array:
        """Return the noise for bounded sums of the training inputs, (3, F) float64; 0 if there are no limits.

        Raises:
            ConfigError: there are limits, and no noise multiplier for these sums.
        """
        chosen = self._settings
        if chosen is None:
            return np.zeros((3, num_features))
        if not chosen.input_noise_multiplier:
            self.refuse("sums of its training inputs")
        return chosen.input_noise_multiplier * norm_bound(num_features) * chosen.noise.normal((3, num_features))

    def refuse_tests(self) -> None:
        """Raise ConfigError if metrics stay with the client."""
        if self.hides_metrics:
            raise ConfigError(
                "record-level privacy: this client does not send results of tests on its data, which no noise "
                "protects; RecordLevel(publishes_metrics=True) sends them"
            )

    def step_rule(
        self, read: TrainConfig, local: Sequence[str], server_noise: float | None, num_examples: int, batch_size: int
    ) -> StepRule:
        """Return how the steps are computed; the noise multiplier is the server's, if the client has none.

        Raises:
            ConfigError: a client hook sends more than the model that DP-SGD protects, or DP-SGD would begin with what
                is kept from rounds without it; there is no noise multiplier.
        """
        chosen = self._settings
        if chosen is None or (chosen.frozen_only and not read.frozen):
            return StepRule()
        if unprotected := [name for name in read.hooks if name not in PROTECTED_HOOKS]:
            raise ConfigError(
                f"record-level privacy: client hook '{unprotected[0]}' uses or sends more of the client's data than "
                f"DP-SGD protects; allowed are {', '.join(PROTECTED_HOOKS)}"
            )
        if chosen.frozen_only and (kept := [*local, *set(read.hooks).intersection(HOOKS_WITH_STATE)]):
            raise ConfigError(
                f"record-level privacy: DP-SGD would begin with '{kept[0]}', which is kept from rounds without noise"
            )
        if chosen.noise_multiplier is None:
            if server_noise is None:
                raise ConfigError(
                    "record-level privacy: its noise multiplier is the server's, which has not sent one. Set it in the "
                    "client, RecordLevel(noise_multiplier=...), or in the server, RecordLevelDP(target_epsilon=...)."
                )
            chosen = replace(chosen, noise_multiplier=server_noise)
        return DPSGD(chosen, num_examples, batch_size)

    def published(self, metrics: Config, rule: StepRule, num_steps: int) -> Config:
        """Return those metrics of the training that may leave the client, and what the server counts of its steps."""
        if self.hides_metrics:
            metrics = {STEPS: num_steps}
        elif isinstance(rule, DPSGD) and rule.not_finite:
            metrics = {**metrics, EXAMPLES_NOT_FINITE: rule.not_finite}
        return {**metrics, **rule.reply(num_steps)} if isinstance(rule, DPSGD) else metrics


@contextmanager
def unchanged_buffers(model: nn.Module, rule: StepRule) -> Iterator[None]:
    """Check at the end of the block that a training with DP-SGD has changed no buffer.

    Raises:
        ConfigError: one has changed.
    """
    if not isinstance(rule, DPSGD):
        yield
        return
    before = {name: value.clone() for name, value in model.named_buffers()}
    yield
    after = dict(model.named_buffers())
    for name, value in before.items():
        if not torch.equal(value, after[name]):
            raise ConfigError(
                f"record-level privacy: buffer '{name}' has changed in training, and no noise protects buffers"
            )
