"""``Config``, the checked settings of a run, and its reading and writing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.config.check_config import check_data_and_methods, checked_keys
from fedbn_flwr.lab.config.data import data_of
from fedbn_flwr.lab.config.fields import (
    GROUPS,
    Fields,
    config_fields,
)
from fedbn_flwr.lab.config.method_of_config import learning_rate_of, method_of
from fedbn_flwr.lab.config.values import (
    CENTRALIZED,
    read_settings,
    split,
)
from fedbn_flwr.problems import raise_or_warn

Scalar = str | int | float | bool


class Config(Fields):
    """All settings of a run.

    Keys are the kebab-case names of the fields; values are scalars, and lists are comma
    strings.

    "Not set" is "" for text and 0 for numbers. ``docs/config.md`` is the table of this
    class. ``data_of`` and ``method_of`` resolve the settings.
    """

    @classmethod
    def make(cls, values: Mapping[str, Any], *, complete: bool = False) -> Config:
        """Return the config of a flat mapping of keys to scalars.

        Problems of single keys are reported before the problems of the run.

        Args:
            values: the settings; missing keys take their defaults.
            complete: whether ``values`` has all keys, as Flower's run config does. A
                key with its default value then counts as not set. The settings that
                ``docker-compose.yml`` makes in every run are left out if they have no
                effect.

        Raises:
            ConfigError: all problems, one per line: unknown keys with the nearest known
                key, wrong types, values out of range, settings that contradict each
                other or have no effect. The problems of the data and the methods are
                reported if the keys have none.
        """
        # Stages 1 and 2: each key alone, and the keys together.
        config, problems = checked_keys(cls, values, complete)
        raise_or_warn(problems, "")
        # Stage 3: the data, the methods and the protections, which need valid keys.
        raise_or_warn(check_data_and_methods(config), "")
        return config._resolved()

    def _resolved(self) -> Config:
        """Return the config in which actual values replace "not set".

        These are the split, the held-out clients and the settings of the method. With
        ``local-steps``, ``local-epochs`` is 0.
        """
        data = data_of(self)
        update: dict[str, Any] = {
            "partition": data.split_name,
            "held_out_clients": data.held_out,
        }
        params = method_of(self).params
        for name, setting in config_fields(type(params)).items():
            update[name] = getattr(params, setting)
        # One client has no reason to begin its momentum again in each round.
        if self.strategy == CENTRALIZED and self.sgd_momentum:
            update["momentum_scope"] = "local"
        if self.local_steps:
            update["local_epochs"] = 0
        return self.model_copy(update=update)

    @classmethod
    def make_of_shared(
        cls, shared: Mapping[str, Any], own: Mapping[str, Any]
    ) -> tuple[Config, dict[str, str]]:
        """Return the config of a run from settings that runs share and its own settings.

        The run's own settings override the shared settings.

        Returns:
            The config, and the shared keys that were left out because they have no
            effect in this run, with the reason.

        Raises:
            ConfigError: as ``make``, or a key of the run's own settings has no effect.
        """
        settings = {**shared, **own}
        dropped: dict[str, str] = {}
        # Repeat, because the removal of one key may leave another key without effect.
        while True:
            try:
                return cls.make(settings), dropped
            except ConfigError as error:
                unused = {one.key: one.reason for one in error.problems if one.reason}
                drop = [key for key in unused if key not in own]
                if not drop or len(unused) < len(error.problems):
                    raise
            for key in drop:
                dropped[key] = unused[key]
                del settings[key]

    @classmethod
    def load(cls, path: Path | None = None, overrides: Sequence[str] = ()) -> Config:
        """Return the config of a YAML file and ``key=value`` overrides.

        Values are read as YAML.

        Raises:
            ConfigError: the file is missing, unreadable or not a mapping, an override
                has no "=", or as ``make``.
        """
        in_file, given = read_settings(path, overrides)
        return cls.make({**in_file, **given})

    def to_mapping(self) -> dict[str, Scalar]:
        """Return every key with its value, in the form of Flower's run config.

        ``make`` of this mapping returns an equal config.
        """
        values: dict[str, Scalar] = self.model_dump(by_alias=True)
        return {key: values[key] for key in _KEYS}

    def late_decays(self) -> list[str]:
        """Return a warning for each decay that changes no rate of the run."""
        rounds, rate = self.num_server_rounds, learning_rate_of(self)
        warnings = []
        for text, after, factor in zip(
            split(self.lr_decay_at), rate.decay_after, rate.factors, strict=True
        ):
            if factor == 1 or (after != "freeze" and int(after) >= rounds):
                warnings.append(
                    f"lr-decay-at={text} changes no rate: its factor is {factor:g}, and"
                    f" the run has {rounds} rounds"
                )
        return warnings

    def warnings(self) -> list[str]:
        """Return a line for each effect of these settings that may surprise a user."""
        lines = self.late_decays()
        problems = method_of(self).problems
        lines += [str(problem) for problem in problems if problem.effect == "warn"]
        if (
            self.sgd_momentum
            and self.local_steps == 1
            and self.momentum_scope == "none"
        ):
            lines.append(
                f"sgd-momentum={self.sgd_momentum} has no effect, because a round has"
                " one step and momentum is reset in each round. momentum-scope=local or"
                " global keeps it."
            )
        return lines


# all keys, in the order of the tables in docs/config.md
_KEYS = [key for group in GROUPS for key in Config.keys(group)]


def state_in_out(config: Config) -> Path:
    """Return the folder for the clients' local state if ``state-dir`` is "out"."""
    return Path(config.out) / "checkpoint" / "clients"
