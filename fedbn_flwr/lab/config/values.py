"""What the keys of a run mean together: its data, model, method, learning rate and protections."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from fedbn_flwr.batchnorm.adaptation import TEST_BN_MODES
from fedbn_flwr.batchnorm.parts import Part
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.config.fields import Fields
from fedbn_flwr.lab.config.method_settings import config_fields, own_default
from fedbn_flwr.lab.config.table import CENTRALIZED
from fedbn_flwr.lab.config.texts import check_known, number, split
from fedbn_flwr.lab.data import (
    DATASETS,
    FUNCTION,
    PARTITIONS,
    Augment,
    DatasetInfo,
    OwnData,
    is_own,
    listed,
)
from fedbn_flwr.lab.models import MODELS, input_shape, model_info
from fedbn_flwr.norms import NORMS
from fedbn_flwr.privacy.settings import DPSettings, MaskSettings
from fedbn_flwr.server.method import ROLES, Problem, RunSettings
from fedbn_flwr.server.methods import Methods
from fedbn_flwr.server.params import EVALUATIONS, TEST_BN, Params, tests_in
from fedbn_flwr.strategies import METHODS, STRATEGIES, StrategyClass, combined
from fedbn_flwr.training.settings import LearningRate, share_of
from fedbn_flwr.training.tasks import TASKS, Task

__all__ = ["Values"]

_TEST_VALUES = 500 * 3 * 64 * 64  # numbers in the inputs of a test batch: 500 images in colour of 64 pixels


class Values(Fields):
    """The settings of a run, and what follows from them. Their consistency is checked elsewhere."""

    @property
    def title(self) -> str:
        """The names of the methods, joined by "+"."""
        return self.strategy if self.strategy == CENTRALIZED else self.method().name

    @property
    def protected(self) -> bool:
        """Whether single clients are to stay hidden: then their counts are in no page to give away."""
        return self.dp != "off" or self.masked_sums

    # What ``checks.py`` asks of the registries; ``at_once.Known`` answers the same without them.

    def known(self, key: str) -> Collection[str]:
        """Return the names that a key takes."""
        names: dict[str, Collection[str]] = {
            "strategy": [*STRATEGIES, CENTRALIZED],
            "norm": NORMS,
            "dataset": DATASETS,
            "partition": PARTITIONS,
            "task": TASKS,
            "eval-on": EVALUATIONS,
            "test-bn": TEST_BN_MODES,
        }
        return names[key] if key in names else [name for name, method in METHODS.items() if method.role == key]

    def is_own(self) -> bool:
        """Return whether the data are the user's own."""
        return is_own(self.dataset)

    def per_pixel(self) -> bool | None:
        """Return whether the model has outputs for each pixel; None if it is not known.

        Raises:
            ConfigError: the model is unknown.
        """
        return model_info(self.model).per_pixel

    def models_for(self, by_pixel: bool) -> list[str]:
        """Return the models whose outputs fit a task with targets for each pixel, or for each example."""
        return [name for name, info in MODELS.items() if info.per_pixel in (by_pixel, None)]

    def augmentation(self) -> Augment | None:
        """Return the augmentation; None without one.

        Raises:
            ConfigError: an entry of ``augment`` cannot be read.
        """
        return Augment.parse(self.augment)

    def adapted_tests(self) -> list[str]:
        """Return the tests of ``eval-on`` whose BatchNorm has statistics of the test inputs."""
        return [name for name in split(self.eval_on) if name.endswith(TEST_BN)]

    def data_info(self) -> DatasetInfo:
        """Return the description of the run's data; own data are read first.

        Raises:
            ConfigError: the data set is unknown, or keys do not fit own data.
            DataError: own data cannot be used.
        """
        if not is_own(self.dataset):
            check_known("dataset", self.dataset, DATASETS)
            return DATASETS[self.dataset]
        from fedbn_flwr.lab.data import own_info  # with the readers of arrays and images

        return own_info(self.own_data())

    def example_shape(self) -> tuple[int, ...]:
        """Return the shape of the model's input: (C, H, W) of images, (features,) or another shape of other examples.

        Raises:
            ConfigError: the model is unknown.
        """
        info = self.data_info()
        if info.input_shape:
            return info.input_shape
        size, asked = self.image_size or info.size, bool(self.image_size)
        channels, height = input_shape(self.model, info.channels, size, asked=asked)
        return channels, height, info.aspect * height

    def num_outputs(self) -> int:
        """Return the number of the model's outputs."""
        in_data = self.data_info().num_classes
        return in_data if is_own(self.dataset) else self.learning_task().outputs(self.num_classes or in_data)

    def own_data(self) -> OwnData:
        """Return what the config says of own data."""
        kind, path = OwnData.parse(self.dataset)
        sites: tuple[int, ...] = ()
        if kind == FUNCTION and self.num_clients:  # a held-out client is a site more
            held_out = self.held_out_clients.strip()
            count = int(held_out) if held_out.isdecimal() else len(listed(held_out))
            sites = tuple(range(self.num_clients + count))
        return OwnData(kind, path, sites=sites, **self.model_dump(include={*OwnData.__dataclass_fields__}))

    def by_function(self) -> bool:
        """Return whether the data come from a user's function: a node asks it for its own site alone."""
        return is_own(self.dataset) and OwnData.parse(self.dataset)[0] == FUNCTION

    def data_on_nodes(self) -> bool:
        """Return whether only the nodes have the data: own data without a path."""
        return is_own(self.dataset) and self.dataset.endswith(":")

    def split_name(self) -> str:
        """Return the name of the split: ``partition``, or its default for the data."""
        if self.partition or not is_own(self.dataset):
            return self.partition or "classes"
        return "natural" if self.data_info().grouped else "iid"

    def learning_task(self) -> Task:
        """Return the learning task: the loss, the metrics, and which targets count."""
        task, names = self.plain_task(), split(self.metrics)
        if not names:
            return task
        further = names[1:] if names[0] == "loss" else names
        return task.measuring(further).scored_by(names[0])

    def test_task(self) -> Task:
        """Return the learning task with the examples per batch of its tests.

        An example is held in memory in many forms, so their number falls with its size. A batch of the training fits
        into the memory, and needs more of it.
        """
        task = self.learning_task()
        fits = _TEST_VALUES // math.prod(self.example_shape())
        size = min(task.test_batch, max(self.batch_size, fits, 1))
        return replace(task, plain_test_batch=size)

    def plain_task(self) -> Task:
        """Return the learning task with its own metrics."""
        of_data = self.data_info().task
        return of_data if self.task in ("", of_data.name) else TASKS[self.task]

    def decays(self) -> tuple[tuple[int | str, ...], tuple[float, ...]]:
        """Return the rounds after which the learning rate decays (or "freeze") and the factor of each."""
        after: list[int | str] = []
        for text in split(self.lr_decay_at):
            value = number(text)
            if text == "freeze":
                after.append(text)
            elif isinstance(value, int) and value >= 0:
                after.append(value)
            elif isinstance(value, float) and 0 <= value <= 1:
                after.append(share_of(text, self.num_server_rounds))
            else:
                raise ConfigError(f"lr-decay-at: {text!r} is not a round (int), a fraction in [0, 1] or 'freeze'")
        factors = [float(number(text) or 0) for text in split(self.lr_decay_factor)]
        if not all(factor > 0 for factor in factors) or len(factors) not in (1, len(after)):
            raise ConfigError(
                f"lr-decay-factor={self.lr_decay_factor!r} must be one number above 0, or one for each of the "
                f"{len(after)} entries of lr-decay-at"
            )
        return tuple(after), tuple(factors * len(after) if len(factors) == 1 else factors)

    def learning_rate_over_rounds(self) -> LearningRate:
        """Return the learning rate with its schedule, the same in every engine."""
        after, factors = self.decays()
        return LearningRate(self.learning_rate, after, factors)

    def schedule_changes(self, begun_with: int) -> list[str]:
        """Return a warning for each setting of the learning rate that counts in R, if the run began with another R."""
        if begun_with in (0, self.num_server_rounds):
            return []
        settings = [f"lr-decay-at={text}" for text in split(self.lr_decay_at) if isinstance(number(text), float)]
        return [
            f"the run began with {begun_with} rounds and now has {self.num_server_rounds}: {setting} is of the new "
            "number, also where earlier rounds followed the old one"
            for setting in settings
        ]

    def added(self, role: str) -> list[str]:
        """Return the methods that the config key of a role adds to the strategy."""
        return split(getattr(self, role.replace("-", "_"))) if role else []

    def method(self) -> StrategyClass:
        """Return the class of the strategy, combined with the methods that are added to it.

        Raises:
            ConfigError: two of the methods cannot be combined.
        """
        return combined(*(STRATEGIES[name] for name in self.method_names()))

    def methods(self) -> Methods:
        """Return the options and methods of the run, with their settings."""
        return self.method().combination.methods(self.params())

    def problems(self, kind: str) -> list[Problem]:
        """Return what does not fit or has no effect in the settings of the run's methods; see ``Problem.kind``."""
        return [problem for problem in self.methods().problems(self.run_settings()) if problem.kind == kind]

    def method_names(self) -> list[str]:
        """Return the strategy and the methods that are added to it, by role."""
        return [self.strategy, *(name for _, name in self.added_methods())]

    def added_methods(self) -> list[tuple[str, str]]:
        """Return (role, name) of each method that is added to the strategy."""
        return [(role, name) for role in ROLES for name in self.added(role)]

    def run_settings(self) -> RunSettings:
        """Return the settings of the run that the method checks its own against."""
        return RunSettings(
            num_rounds=self.num_server_rounds,
            norm=self.norm,
            sgd_momentum=self.sgd_momentum,
            tests=self.evaluations(),
            optimizer=self.optimizer,
        )

    def params(self) -> Params:
        """Return the settings of the run's method; "the method's own default" is replaced by that default."""
        kind: type[Params] = self.method().Params
        stands_for_own = own_default(STRATEGIES.values())
        given: dict[str, Any] = {}
        for name, setting in config_fields(kind).items():
            value = getattr(self, name)
            if name not in stands_for_own or value != stands_for_own[name]:
                given[setting] = value
        given["eval_on"] = ",".join(tests_in(self.eval_on))
        return kind(**given)

    def reestimates(self) -> bool:
        """Return whether BN statistics are re-estimated before tests."""
        if self.strategy == CENTRALIZED:
            return False
        return self.methods().reestimates or "recalibrated" in self.evaluations()

    def evaluations(self) -> tuple[str, ...]:
        """Return the tests of ``eval-on`` or their default; the first one gives the run's main metric."""
        if asked := tests_in(self.eval_on):
            return asked
        return ("personal-own",) if self.strategy != CENTRALIZED and self.methods().local else ("global",)

    def dp_settings(self) -> DPSettings:
        """Return the settings of client-level differential privacy."""
        return DPSettings(**self.model_dump(include={*DPSettings.model_fields}))

    def mask_settings(self) -> MaskSettings:
        """Return the settings of masked sums."""
        return MaskSettings(**self.model_dump(include={*MaskSettings.model_fields}))

    def freezes_bn(self) -> bool:
        """Return whether the method freezes BN in some round."""
        return self.strategy != CENTRALIZED and self.methods().freezes_bn

    def keeps_statistics(self) -> bool:
        """Return whether BN's running statistics stay with the clients."""
        return self.strategy != CENTRALIZED and Part.STATISTICS in self.methods().local

    def shares_nothing(self) -> bool:
        """Return whether the clients share no part of the model."""
        return self.strategy != CENTRALIZED and Part.REST in self.methods().local
