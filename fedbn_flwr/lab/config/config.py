"""``Config``, the checked settings of a run, and its reading and writing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedbn_flwr.lab.config.check_keys import (
    checked,
    defaults_of,
    has_no_effect,
    problems_together,
    values_of,
)
from fedbn_flwr.lab.config.check_run import has_no_effect_in_run, problems_of_run
from fedbn_flwr.lab.config.data import data_of
from fedbn_flwr.lab.config.fields import GROUPS, Fields, config_fields
from fedbn_flwr.lab.config.method_of_config import learning_rate_of, method_of
from fedbn_flwr.lab.config.values import (
    CENTRALIZED,
    RENAMED,
    merged,
    new_names,
    read_settings,
    split,
)
from fedbn_flwr.problems import Problem, tell

Scalar = str | int | float | bool
# The service `cli` of docker-compose.yml sets these keys in every run config, and a
# user cannot leave them out there. A run that cannot use them therefore ignores them.
_OF_THE_COMPOSE_FILE = (
    "fedtan-transport",
    "fedtan-bind",
    "fedtan-address",
    "fedtan-tls-dir",
)


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
                other or have no effect. If ``check_keys`` finds some, only these.
        """
        # First the checks of the keys, because the others need valid keys.
        config, problems = cls._first_half(values, complete)
        unused = has_no_effect(config)
        problems += _no_effect(config, unused, complete)
        tell(problems, "")
        # Keys of the compose file without effect count as not set.
        preset = _OF_THE_COMPOSE_FILE if complete else ()
        dropped = _defaults_for(cls, [key for key in preset if key in unused])
        config = config.model_copy(update=dropped)

        # Then the checks that read the registries, the data and the methods.
        tell(problems_of_run(config), "")
        config = _with_nobody_held_out(config)
        unused |= has_no_effect_in_run(config)
        tell(_no_effect(config, unused, complete), "")
        return config._resolved()

    @classmethod
    def check_keys(cls, values: Mapping[str, Any]) -> None:
        """Raise the problems that ``make`` finds first.

        Raises:
            ConfigError: as ``make``.
        """
        config, problems = cls._first_half(values)
        tell(
            [*problems, *_no_effect(config, has_no_effect(config), complete=False)], ""
        )

    @classmethod
    def _first_half(
        cls, values: Mapping[str, Any], complete: bool = False
    ) -> tuple[Config, list[Problem]]:
        """Return the config of the valid settings, and the problems of all settings."""
        settings, problems = new_names(values)
        steps, epochs = settings.get("local-steps"), settings.get("local-epochs")
        # Flower's run config always has local-epochs: if the user has not set the key,
        # it has the default 1.
        not_set = 1 if complete else 0
        if steps and epochs and epochs != not_set:
            problems.append(
                Problem(
                    "two-lengths",
                    f"local-steps={steps} and local-epochs={epochs} are both set. Set one"
                    " of them",
                    "local-steps",
                )
            )
        config, invalid = checked(cls, settings)
        return config, [*problems, *invalid, *problems_together(config)]

    def _resolved(self) -> Config:
        """Return the config in which actual values replace "not set".

        These are the split and the settings of the method. With ``local-steps``,
        ``local-epochs`` is 0.
        """
        update: dict[str, Any] = {"partition": data_of(self).split_name}
        if self.strategy != CENTRALIZED:
            params = method_of(self).params
            for name, setting in config_fields(type(params)).items():
                update[name] = getattr(params, setting)
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
        settings = merged([shared, own])
        stay = {RENAMED.get(key, key) for key in own}
        dropped: dict[str, str] = {}
        # Repeat, because the removal of one key may leave another key without effect.
        while True:
            unused = cls._unused(settings)
            drop = {key: why for key, why in unused.items() if key not in stay}
            if not drop:
                return cls.make(settings), dropped
            dropped |= drop
            for key in drop:
                del settings[key]

    @classmethod
    def _unused(cls, settings: Mapping[str, Any]) -> dict[str, str]:
        """Return the keys that are set but have no effect, with the reason.

        The result is empty if the settings have other problems, because ``make``
        reports these problems.
        """
        config, problems = cls._first_half(settings)
        if problems:
            return {}
        unused = has_no_effect(config)
        # Check with the default of each key without effect, because its value may be
        # one that a run refuses.
        used = config.model_copy(update=_defaults_for(cls, unused))
        if not problems_of_run(used):
            unused |= has_no_effect_in_run(_with_nobody_held_out(config))
        found = _no_effect(config, unused, complete=False)
        return {problem.key: unused[problem.key] for problem in found}

    @classmethod
    def load(cls, path: Path | None = None, overrides: Sequence[str] = ()) -> Config:
        """Return the config of a YAML file and ``key=value`` overrides.

        Values are read as YAML.

        Raises:
            ConfigError: the file is missing, unreadable or not a mapping, an override
                has no "=", or as ``make``.
        """
        return cls.make(merged(read_settings(path, overrides)))

    def to_mapping(self) -> dict[str, Scalar]:
        """Return every key with its value, in the form of Flower's run config.

        ``make`` of this mapping returns an equal config.
        """
        values: dict[str, Scalar] = values_of(self)
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
        if self.strategy == CENTRALIZED:
            return self.late_decays()
        lines = self.late_decays()
        lines += [str(problem) for problem in method_of(self).problems("warn")]
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


def _no_effect(
    config: Config, unused: Mapping[str, str], complete: bool
) -> list[Problem]:
    """Return the problems of keys that are set but have no effect."""
    values, defaults = values_of(config), defaults_of(type(config))
    preset = _OF_THE_COMPOSE_FILE if complete else ()
    problems = []
    for key, needs in unused.items():
        if values[key] != defaults[key] and key not in preset:
            problems.append(
                Problem(
                    "no-effect", f"{key}={values[key]!r} has no effect: {needs}", key
                )
            )
    return problems


def _defaults_for(kind: type[Config], keys: Iterable[str]) -> dict[str, Any]:
    """Return the default of each key, by the name of its field."""
    defaults = defaults_of(kind)
    return {key.replace("-", "_"): defaults[key] for key in keys}


def _with_nobody_held_out(config: Config) -> Config:
    """Return the config with no held-out client if ``held-out-clients`` is 0.

    If a client has the name 0, the config does not change.
    """
    if config.held_out_clients.strip() != "0":
        return config
    from fedbn_flwr.lab.config.data import data_of

    data = data_of(config)
    if data.split_name == "natural" and "0" in data.info.client_names:
        return config
    return config.model_copy(update={"held_out_clients": ""})


def state_in_out(config: Config) -> Path:
    """Return the folder for the clients' local state if ``state-dir`` is "out"."""
    return Path(config.out) / "checkpoint" / "clients"
