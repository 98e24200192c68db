"""The method of a run, as its config sets it.

This includes the strategy, its settings, tests, protections and learning rate.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from fedbn_flwr.batchnorm.fixed_entries import learning_parts
from fedbn_flwr.batchnorm.parts import Part, Parts, split_state
from fedbn_flwr.lab.config.fields import OWN_DEFAULTS, Fields, config_fields
from fedbn_flwr.lab.config.values import number, read_decays, split
from fedbn_flwr.privacy.protection_settings import DPSettings
from fedbn_flwr.problems import Known, Problem
from fedbn_flwr.server.methods.params import Params, tests_in
from fedbn_flwr.server.methods.together import Methods
from fedbn_flwr.strategies import STRATEGIES, FedAvg, StrategyClass
from fedbn_flwr.training.settings import LearningRate, round_of


# Equal configs give the same object, so its cached properties are computed once in a
# run.
@functools.lru_cache(maxsize=8)
def method_of(config: Fields) -> MethodOfConfig:
    """Return the method of a run by its config."""
    return MethodOfConfig(config)


# Configs that differ only in other keys have the same settings, which are built and
# validated once. The types count: 1 is a round, and 1.0 is all rounds.
@functools.lru_cache(maxsize=8, typed=True)
def _methods_with(strategy: StrategyClass, **settings: Any) -> Methods:
    """Return the methods of a strategy with these settings."""
    return Methods(strategy.combination.kinds, strategy.Params(**settings))


@dataclass(frozen=True)
class MethodOfConfig:
    """The method of a run.

    ``strategy=centralized`` is FedAvg with one client, which has all data.
    """

    config: Fields

    @cached_property
    def strategy(self) -> StrategyClass:
        """The class of the strategy."""
        return STRATEGIES.get(self.config.strategy, FedAvg)

    @property
    def params(self) -> Params:
        """The settings of the method."""
        return self.methods.params

    @cached_property
    def methods(self) -> Methods:
        """The methods and the options that the run combines, with their settings."""
        given: dict[str, Any] = {}
        # A class is hashable, which mypy sees only in some orders of the modules.
        kind = self.strategy.Params
        fields = config_fields(kind)  # type: ignore[arg-type, unused-ignore]
        for name, setting in fields.items():
            given[setting] = getattr(self.config, name)
            # This value selects the method's own default.
            if given[setting] == OWN_DEFAULTS.get(name):
                given[setting] = kind.model_fields[setting].default
        # ``tests_in`` names each test once, and adds the plain test to a test with
        # adapted BN.
        given["eval_on"] = ",".join(tests_in(self.config.eval_on))
        return _methods_with(self.strategy, **given)  # type: ignore[arg-type, unused-ignore]

    def parts(self, model: nn.Module, learning: bool = False) -> Parts:
        """Return the split of the model's entries into parts, by the settings.

        Args:
            model: the model.
            learning: use ``learning_parts`` instead of ``split_state``.
        """
        split = learning_parts if learning else split_state
        return split(model, self.params.layers, self.params.personal)

    @property
    def known(self) -> Known:
        """The facts of the run for the checks of the method, except the model."""
        config = self.config
        return Known(
            num_rounds=config.num_server_rounds,
            norm=config.norm,
            # A model from elsewhere may have trained statistics. The run looks at them.
            moved=None if config.init or ":" in config.model else False,
            sgd_momentum=None if config.loop else config.sgd_momentum,
            tests=self.tests,
            optimizer=config.optimizer,
            # With batch-size=0, an epoch is one step. Otherwise the number of steps
            # depends on the client, so it is None.
            local_steps=config.local_steps
            or (None if config.batch_size else config.local_epochs),
        )

    @cached_property
    def problems(self) -> list[Problem]:
        """The problems of the method, before the model is known."""
        return self.methods.problems(self.known)

    @cached_property
    def tests(self) -> tuple[str, ...]:
        """The tests of ``eval-on`` or their default.

        The first test determines the run's main metric.
        """
        asked = tests_in(self.config.eval_on)
        if asked:
            return asked
        # If clients keep parts of the model, no client uses the plain global model, so
        # test the clients' own models.
        if self.methods.own_models:
            return ("personal-own",)
        return ("global",)

    @property
    def tests_own_models(self) -> bool:
        """Whether the main test tests each client's own model."""
        own = self.methods.own_models or self.params.fine_tune > 0
        return own and self.tests[0].startswith("personal")

    @property
    def reestimates(self) -> bool:
        """Whether BN statistics are re-estimated before tests."""
        return self.methods.reestimates or "recalibrated" in self.tests

    @property
    def freezes_bn(self) -> bool:
        """Whether the method freezes BN in some round."""
        return self.methods.freezes_bn

    @property
    def shares_nothing(self) -> bool:
        """Whether the clients share no part of the model."""
        return Part.REST in self.methods.local

    @property
    def dp(self) -> DPSettings:
        """The settings of client-level differential privacy."""
        return DPSettings(**self.config.model_dump(include={*DPSettings.model_fields}))


def learning_rate_of(config: Fields) -> LearningRate:
    """Return the learning rate over the rounds, the same in every engine."""
    # A decay comes after a round, or at "freeze".
    after: list[int | str] = []
    factors = []
    for text, factor in read_decays(config.lr_decay_at, config.lr_decay_factor):
        value = number(text)
        at = None if value is None else round_of(value, config.num_server_rounds)
        after.append(text if at is None else at)
        factors.append(factor)
    return LearningRate(config.learning_rate, tuple(after), tuple(factors))


def schedule_changes(config: Fields, begun_with: int) -> list[str]:
    """Return a warning for each decay that moves because a run is longer or shorter.

    These are the decays at a share of the number of rounds.

    Args:
        config: the settings of the resumed run.
        begun_with: the number of rounds at the run's beginning; 0 if it is unknown.
    """
    rounds = config.num_server_rounds
    if begun_with in (0, rounds):
        return []
    shares = [
        text for text in split(config.lr_decay_at) if isinstance(number(text), float)
    ]
    return [
        f"the run began with {begun_with} rounds and now has {rounds}:"
        f" lr-decay-at={text} refers to the new number, although earlier rounds"
        " followed the old number"
        for text in shares
    ]
