"""``Config``: settings that were checked, and how they are read and written."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError, model_validator

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.config.checks import problems_of
from fedbn_flwr.lab.config.fields import CENTRALIZED, GROUPS
from fedbn_flwr.lab.config.texts import explain, read_overrides
from fedbn_flwr.lab.config.unused import without_effect
from fedbn_flwr.lab.config.values import Values
from fedbn_flwr.lab.config.yaml_file import read_yaml

__all__ = ["RENAMED", "Config", "Scalar", "from_older", "state_in_out"]

Scalar = str | int | float | bool
RENAMED = {"fedtan-exchange": "fedtan-transport", "masked": "masked-sums", "statistics-trim": "trim"}
"""Old name to new name of keys; YAML, ``--set`` and checkpoints may still have the old name."""

_OF_RECORDS = ("dp-noise-multiplier", "dp-target-epsilon", "dp-clipping-norm")
# The service `cli` of docker-compose.yml sets these in every run config; a run that cannot use them goes without.
_OF_THE_COMPOSE_FILE = ("fedtan-transport", "fedtan-bind", "fedtan-address", "fedtan-tls-dir")

logger = logging.getLogger("flwr")


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
        fields = {field.alias or name: field for name, field in cls.model_fields.items()}
        _warn_of_old_names(values)
        lines = _named_twice(values)
        values, twice = _of_records(_renamed(values))
        lines += twice
        steps, epochs = (values.get(key) for key in ("local-steps", "local-epochs"))
        if steps and epochs and not (complete and epochs == fields["local-epochs"].default):
            lines.append(f"local-steps={steps} and local-epochs={epochs} are both set; set one of them")
        remaining = dict(values)
        while True:
            try:
                config = cls.model_validate(remaining)
                break
            except ValidationError as error:
                # Keys are checked together only if each one is valid: repeat without the bad ones.
                lines += [line for problem in error.errors() for line in explain(problem, list(fields))]
                bad = {str(problem["loc"][0]) for problem in error.errors() if problem["loc"]}
                if not bad & remaining.keys():
                    break
                remaining = {key: value for key, value in remaining.items() if str(key) not in bad}
        if not lines:
            config = _with_nobody_held_out(config)
            unused = without_effect(config)
            preset = [key for key in _OF_THE_COMPOSE_FILE if complete and key in unused]
            names = {field.alias or name: name for name, field in cls.model_fields.items()}
            config = config.model_copy(update={names[key]: fields[key].default for key in preset})
            lines = [f"{k}={value!r} has no effect: {use}" for k, (value, use) in unused.items() if k not in preset]
        if lines:
            raise ConfigError("\n".join(lines))
        if config.strategy != CENTRALIZED:  # in place of "the method's own default"
            config = config.model_copy(update=config.params().model_dump())
        config = config.model_copy(update={"partition": config.split_name()})
        return config.model_copy(update={"local_epochs": 0}) if config.local_steps else config

    @classmethod
    def make_of_shared(cls, shared: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[Config, dict[str, str]]:
        """Return the config of settings that several runs share and of a run's own, which take precedence.

        Returns:
            The config, and the shared keys that were left out because they have no effect in this run, with the reason.

        Raises:
            ConfigError: as ``make``; also if a key of the run's own has no effect.
        """
        values, twice = _of_records(_renamed(shared) | _renamed(own))
        if twice := [*_named_twice(shared), *_named_twice(own), *twice]:
            raise ConfigError("\n".join(twice))
        mine = {RENAMED.get(key, key) for key in own} | {f"record-{key}" for key in own if key in _OF_RECORDS}
        dropped: dict[str, str] = {}
        while True:  # without one key another may have no effect
            try:
                found = without_effect(_with_nobody_held_out(cls.model_validate(values)))
            except ValidationError:
                found = {}  # ``make`` reports all problems
            more = {key: use for key, (_, use) in found.items() if key not in mine}
            if not more:
                return cls.make(values), dropped
            dropped |= more
            values = {key: value for key, value in values.items() if key not in more}

    @classmethod
    def load(cls, path: Path | None = None, overrides: Sequence[str] = ()) -> Config:
        """Return the config of a YAML file and ``key=value`` overrides (values are read as YAML).

        Raises:
            ConfigError: the file is missing, unreadable or no mapping, an override has no "=", or as ``make``.
        """
        values: dict[str, Any] = {}
        if path is not None:
            read = read_yaml(path, "config")
            if not isinstance(read, dict):
                raise ConfigError(f"config {path} must be a mapping of keys to values, not {type(read).__name__}")
            values.update(read)
        changed = read_overrides(overrides)
        for source in (values, changed):
            _warn_of_old_names(source)
            if twice := _named_twice(source):
                raise ConfigError("\n".join(twice))
        return cls.make(from_older(values) | _renamed(changed))

    def to_mapping(self) -> dict[str, Scalar]:
        """Return every key with its value, as Flower's run config holds it; ``make`` gives the same config back."""
        values: dict[str, Scalar] = self.model_dump(by_alias=True)
        return {key: values[key] for group in GROUPS for key in self.keys(group)}

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


def _warn_of_old_names(values: Mapping[str, Any]) -> None:
    for old, new in RENAMED.items():
        if old in values:
            logger.warning("config key %r is now %r; the old name is read in this release only", old, new)


def _renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    return {RENAMED.get(key, key): value for key, value in values.items()}


def _with_nobody_held_out(config: Config) -> Config:
    """Read ``held-out-clients=0`` as none, unless a client is called 0."""
    if config.held_out_clients.strip() != "0":
        return config
    named = config.split_name() == "natural" and "0" in config.data_info().client_names
    return config if named else config.model_copy(update={"held_out_clients": ""})


def _named_twice(values: Mapping[str, Any]) -> list[str]:
    """Return a line for each setting that stands under its old and its new name."""
    both = [(old, new) for old, new in RENAMED.items() if old in values and new in values]
    return [
        f"{old}={values[old]} and {new}={values[new]} are both set; {old} is the old name: remove it"
        for old, new in both
    ]


def _of_records(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Read ``dp=record`` as ``record-dp=true``, and the noise and the norm beside it as those of records.

    Returns:
        The settings, and a line for each that was set to two values, as its own and as that of records.
    """
    if values.get("dp") != "record":
        return dict(values), []
    defaults = {field.alias: field.default for field in Config.model_fields.values()}
    found: dict[str, Any] = {**values, "dp": "off", "record-dp": True}
    twice = []
    for key in _OF_RECORDS:
        new, given = f"record-{key}", found.pop(key, defaults[key])
        if given == defaults[key]:
            continue
        if found.get(new, defaults[new]) not in (given, defaults[new]):
            twice.append(f"{key}={given} with dp=record and {new}={found[new]} are both set; set one of them")
        found[new] = given
    return found, twice


def from_older(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of an older version as those of this one: keys renamed, keys that had no effect left out.

    Older versions ignored such keys and wrote them to the resolved config. There ``agc`` acted under fedwon only.
    """
    found = _renamed(values)
    if found.keys() >= {"dp-clipping-quantile", "dp-clipping-rate", "resume"} and "dp-clipping" not in found:
        adapts = bool(found["dp-clipping-quantile"])  # 0 was the word for a fixed norm
        found |= {"dp-clipping": "adaptive" if adapts else "fixed"}
        found |= {} if adapts else {"dp-clipping-quantile": Config.model_fields["dp_clipping_quantile"].default}
    if "local-part" in found or not found.keys() >= {"strategy", "agc", "server-momentum", "resume"}:
        return found
    if found["strategy"] != "fedwon":
        del found["agc"]
    _, dropped = Config.make_of_shared(found, {})
    return {key: value for key, value in found.items() if key not in dropped}


def state_in_out(config: Config) -> Path:
    """Return the state folder of ``state-dir=out``."""
    return Path(config.out) / "checkpoint" / "clients"
