"""Settings in YAML, from files and from texts ``--set key=value``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fedbn_flwr.errors import ConfigError

_DEEPEST, _LONGEST = 100, 10_000  # levels of a text, characters of a value


# PyYAML's parser in C is ten times as fast as the parser in Python, but some builds of
# PyYAML lack it.
class _Loader(getattr(yaml, "CBaseLoader", yaml.BaseLoader)):  # type: ignore[misc]
    """YAML loader in which every value is a text, so ``1.10``, ``01`` and ``no`` stay.

    Pydantic makes the numbers. A key that is twice in a mapping is an error, because
    YAML would take its last value.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        """Return the mapping, or raise ConstructorError if a key is there twice."""
        lines: dict[Any, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                raise yaml.constructor.ConstructorError(
                    problem=f"line {line}: {name!r} is also in line {lines[name]}."
                    " Remove one of them"
                )
            lines[name] = line
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """YAML writer of texts without quotes, and of numbers as their texts."""

    yaml_implicit_resolvers = {}


def _text(dumper: yaml.SafeDumper, value: bool | float) -> yaml.ScalarNode:
    return dumper.represent_str(str(value).lower())


for _kind in (bool, int, float):
    _Dumper.add_representer(_kind, _text)


def as_yaml(content: Mapping[str, Any]) -> str:
    """Return the text that ``read_yaml`` reads as this content, with texts as values."""
    text: str = yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


def read_yaml(path: Path, what: str) -> dict[Any, Any]:
    """Return the content of a YAML file, a mapping.

    Args:
        path: the file.
        what: "config" or "study", for errors.

    Raises:
        ConfigError: the file is absent, is not YAML, is no mapping, or has a key twice
            in one mapping.
    """
    try:
        content = read_value(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        known = [each.name for each in path.parent.glob("*.y*ml")]
        near = difflib.get_close_matches(path.name, known, n=1)
        hint = f"Did you mean {near[0]}?" if near else "Give the path of a YAML file."
        raise ConfigError(
            f"{what} {path}: there is no such file in {path.parent.absolute()}. {hint}"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{what} {path} is not a text file in UTF-8: {error}"
        ) from error
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{what} {path}: {error}") from error
    if not isinstance(content, dict):
        got = "is empty" if content is None else f"is a {type(content).__name__}"
        raise ConfigError(
            f"{what} {path} {got}, but it must have keys and values, such as seed: 1"
        )
    return content


def read_value(text: str) -> Any:
    """Return the value of a YAML text, or raise YAMLError."""
    # The parser needs seconds for thousands of levels, and an alias in an alias stands
    # for thousands of values, so stop both early.
    depth = 0
    for event in yaml.parse(text, _Loader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            why = "the lists and mappings are too deeply nested. Use fewer levels"
            raise yaml.YAMLError(why)
        long = len(getattr(event, "value", ""))
        if long > _LONGEST:
            raise yaml.YAMLError(
                f"a value has {long:,} characters. Write at most {_LONGEST:,}"
            )
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError(f"alias *{event.anchor}: write the values instead")
    return yaml.load(text, _Loader)


def read_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the settings of ``key=value`` texts with values in YAML.

    Raises:
        ConfigError: a text has no "=", or its value cannot be read.
    """
    values: dict[str, Any] = {}
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator:
            raise ConfigError(f"--set {override!r} must be key=value")
        try:
            text = value.strip()
            # YAML would read "folder:" as a mapping, and nothing as no value.
            if not text or text.endswith(":"):
                values[key.strip()] = text
            else:
                values[key.strip()] = read_value(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {override!r}: {error}") from error
    return values
