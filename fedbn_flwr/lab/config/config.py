"""``Config``: settings that were checked, and how they are read and written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError, model_validator

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.config.checks import problems_of
from fedbn_flwr.lab.config.fields import GROUPS
from fedbn_flwr.lab.config.method_settings import config_fields
from fedbn_flwr.lab.config.reading import RENAMED, merged, new_names, read_settings, two_lengths
from fedbn_flwr.lab.config.table import CENTRALIZED
from fedbn_flwr.lab.config.texts import explain
from fedbn_flwr.lab.config.unused import without_effect
from fedbn_flwr.lab.config.values import Values

__all__ = ["Config", "Scalar", "state_in_out"]

Scalar = str | int | float | bool
# The service `cli` of docker-compose.yml sets these in every run config; a run that cannot use them goes without.
_OF_THE_COMPOSE_FILE = ("fedtan-transport", "fedtan-bind", "fedtan-address", "fedtan-tls-dir")


class Config(Values):
    """All settings of a run. Keys are the kebab-case names of the fields; values are scalars, lists are comma strings.

    "Not set" is "" for text and 0 for numbers. ``docs/config.md`` is the table of this class.
    """

    @model_validator(mode="after")
    def _together(self) -> Self:
        """Check the keys together, and report all problems at once."""
        if problems := problems_of(self):
            raise ValueError("\n".join(problems))
        return self

    @classmethod
    def make(cls, values: Mapping[str, Any], *, complete: bool = False) -> Config:
        """Return the config of a flat mapping of keys to scalars.

        Args:
            values: the settings; missing keys take their defaults.
            complete: whether ``values`` holds all keys, as Flower's run config does; a key with its default value then
                counts as not set, and what ``docker-compose.yml`` sets in every run is left out where it has no effect.

        Raises:
            ConfigError: all problems, one per line: unknown keys with the nearest known key, wrong types, values out of
                range, settings that contradict each other.
        """
        defaults = _defaults()
        settings, problems = new_names(values)
        problems += two_lengths(settings, defaults["local-epochs"] if complete else 0)
        config, invalid = cls._validated(settings)
        problems += invalid
        if config is None or problems:
            raise ConfigError("\n".join(problems))
        config = _with_nobody_held_out(config)
        unused = without_effect(config)
        preset = {key for key in _OF_THE_COMPOSE_FILE if complete and key in unused}
        for key, (value, use) in unused.items():
            if key not in preset:
                problems.append(f"{key}={value!r} has no effect: {use}")
        if problems:
            raise ConfigError("\n".join(problems))
        return config._resolved({key.replace("-", "_"): defaults[key] for key in preset})

    @classmethod
    def _validated(cls, settings: Mapping[str, Any]) -> tuple[Config | None, list[str]]:
        """Return the config, None if there is none, and all problems.

        pydantic checks the keys together only if each one is valid, so it tries again without the invalid ones.
        """
        problems: list[str] = []
        valid = dict(settings)
        while True:
            try:
                return cls.model_validate(valid), problems
            except ValidationError as error:
                for problem in error.errors():
                    problems += explain(problem, list(_defaults()))
                invalid = {str(problem["loc"][0]) for problem in error.errors() if problem["loc"]}
            if invalid.isdisjoint(map(str, valid)):
                return None, problems
            valid = {key: value for key, value in valid.items() if str(key) not in invalid}

    def _resolved(self, changes: Mapping[str, Any]) -> Config:
        """Return the config with these changes, and what "not set" stands for."""
        config = self.model_copy(update=changes)
        update: dict[str, Any] = {"partition": config.split_name()}
        if config.strategy != CENTRALIZED:
            params = config.params()
            update |= {name: getattr(params, setting) for name, setting in config_fields(type(params)).items()}
        if config.local_steps:
            update["local_epochs"] = 0
        return config.model_copy(update=update)

    @classmethod
    def make_of_shared(cls, shared: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[Config, dict[str, str]]:
        """Return the config of settings that several runs share and of a run's own, which take precedence.

        Returns:
            The config, and the shared keys that were left out because they have no effect in this run, with the reason.

        Raises:
            ConfigError: as ``make``; also if a key of the run's own has no effect.
        """
        settings = merged([shared, own])
        stay = {RENAMED.get(key, key) for key in own}
        dropped: dict[str, str] = {}
        while True:  # without one key another may have no effect
            try:
                unused = without_effect(_with_nobody_held_out(cls.model_validate(settings)))
            except ValidationError:
                unused = {}  # ``make`` reports all problems
            drop = {key: use for key, (_, use) in unused.items() if key not in stay}
            if not drop:
                return cls.make(settings), dropped
            dropped |= drop
            settings = {key: value for key, value in settings.items() if key not in drop}

    @classmethod
    def load(cls, path: Path | None = None, overrides: Sequence[str] = ()) -> Config:
        """Return the config of a YAML file and ``key=value`` overrides (values are read as YAML).

        Raises:
            ConfigError: the file is missing, unreadable or no mapping, an override has no "=", or as ``make``.
        """
        return cls.make(merged(read_settings(path, overrides)))

    def to_mapping(self) -> dict[str, Scalar]:
        """Return every key with its value, as Flower's run config holds it; ``make`` gives the same config back."""
        values: dict[str, Scalar] = self.model_dump(by_alias=True)
        return {key: values[key] for key in chain.from_iterable(map(self.keys, GROUPS))}

    @classmethod
    def keys(cls, group: str) -> list[str]:
        """Return the keys of a group, in order."""
        extras = {field.alias or name: field.json_schema_extra for name, field in cls.model_fields.items()}
        return [key for key, extra in extras.items() if isinstance(extra, dict) and extra["group"] == group]

    def late_decays(self) -> list[str]:
        """Return a warning for each decay of the learning rate that the run is too short for."""
        rounds, (after, _) = self.num_server_rounds, self.decays()
        late = [one for one in after if isinstance(one, int) and one >= rounds]
        return [f"lr-decay-at={one}: the run has {rounds} rounds; only a resumed run may reach it" for one in late]

    def warnings(self) -> list[str]:
        """Return what these settings do that a user may not expect, one line each."""
        if self.strategy == CENTRALIZED:
            return self.late_decays()
        lines = [*self.late_decays(), *(problem.text for problem in self.problems("warn"))]
        if self.sgd_momentum and self.local_steps == 1 and self.momentum_scope == "none":
            lines.append(
                f"sgd-momentum={self.sgd_momentum} has no effect: a round has one step, and momentum begins anew in "
                "each. momentum-scope=local or global keeps it."
            )
        return lines


def _defaults() -> dict[str, Any]:
    """Return the default of each key."""
    return {field.alias or name: field.default for name, field in Config.model_fields.items()}


def _with_nobody_held_out(config: Config) -> Config:
    """Read ``held-out-clients=0`` as none, unless a client is called 0."""
    if config.held_out_clients.strip() != "0":
        return config
    named = config.split_name() == "natural" and "0" in config.data_info().client_names
    return config if named else config.model_copy(update={"held_out_clients": ""})


def state_in_out(config: Config) -> Path:
    """Return the state folder of ``state-dir=out``."""
    return Path(config.out) / "checkpoint" / "clients"
