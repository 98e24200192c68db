"""Settings in YAML, from files and from texts ``--set key=value``."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from fedbn_flwr.errors import ConfigError

_INT = "tag:yaml.org,2002:int"
_LARGEST, _DEEPEST = 100_000, 100  # values and levels of a text
_LONGEST = 10_000  # characters of a value


# PyYAML's parser in C is ten times as fast as the parser in Python, but some builds of
# PyYAML lack it.
class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML loader that reads ``01`` and ``1:30`` as texts, such as a client's name.

    In YAML 1.1, ``01`` is the octal number 1, and ``1:30`` is 90. A key that is twice in
    a mapping is an error, because YAML would take its last value.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        """Return the mapping, or raise ConstructorError if a key is there twice."""
        lines: dict[Any, int] = {}
        for key, _ in node.value:
            name, line = (key.tag, str(key.value)), key.start_mark.line + 1
            if name in lines:
                raise yaml.constructor.ConstructorError(
                    problem=f"line {line}: {key.value!r} is also in line {lines[name]}."
                    " Remove one of them"
                )
            lines[name] = line
        return super().construct_mapping(node, deep)


# Copy SafeLoader's resolvers, except the resolver of whole numbers. The copy is
# necessary because other code uses yaml's own loader.
_Loader.yaml_implicit_resolvers = {}
for _first, _resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items():
    _Loader.yaml_implicit_resolvers[_first] = [
        resolver for resolver in _resolvers if resolver[0] != _INT
    ]
_WHOLE = re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$")
_Loader.add_implicit_resolver(_INT, _WHOLE, list("-+0123456789"))


def _keep_text(kind: type[int] | type[float]) -> None:
    """Let a number keep its text. A key for a text then gets 1.10 instead of 1.1."""
    tag, construct = (
        f"tag:yaml.org,2002:{kind.__name__}",
        f"construct_yaml_{kind.__name__}",
    )

    class Number(kind):  # type: ignore[misc, valid-type]
        text = ""

        def __str__(self) -> str:
            return self.text

    def constructed(loader: Any, node: yaml.ScalarNode) -> Any:
        value = getattr(loader, construct)(node)
        if str(value) == node.value:
            return value
        number = Number(value)
        number.text = node.value
        return number

    _Loader.add_constructor(tag, constructed)
    yaml.SafeDumper.add_representer(
        Number, lambda dumper, number: dumper.represent_scalar(tag, number.text)
    )


_keep_text(int)
_keep_text(float)

UNREADABLE = (yaml.YAMLError, ValueError)
"""The errors of ``yaml.safe_load``; ValueError for a text that only looks like a date.
"""


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
    except (OSError, *UNREADABLE) as error:
        raise ConfigError(f"{what} {path}: {error}") from error
    if not isinstance(content, dict):
        got = "is empty" if content is None else f"is a {type(content).__name__}"
        raise ConfigError(
            f"{what} {path} {got}, but it must have keys and values, such as seed: 1"
        )
    return content


def read_value(text: str) -> Any:
    """Return the value of a YAML text, or raise an exception of ``UNREADABLE``."""
    depth, loader = 0, _Loader(text)  # safe, because _Loader extends a safe loader
    try:
        # The parser needs seconds for thousands of levels, so stop it early.
        for event in yaml.parse(text, _Loader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST:
                raise RecursionError
            long = len(getattr(event, "value", ""))
            if long > _LONGEST:
                raise yaml.YAMLError(
                    f"a value has {long:,} characters. Write at most {_LONGEST:,}"
                )
        node = loader.get_single_node()
        if node is None:
            return None
        if _size(node, {}) > _LARGEST:
            raise yaml.YAMLError(
                f"the text has more than {_LARGEST:,} values, if each alias (*name) is"
                " replaced by its values. Write fewer values"
            )
        return loader.construct_document(node)
    except RecursionError:
        why = "the lists and mappings are too deeply nested. Use fewer levels"
        raise yaml.YAMLError(why) from None
    finally:
        loader.dispose()


def _size(node: yaml.Node, known: dict[yaml.Node, int]) -> int:
    """Return the number of values in a node, in which each alias counts again."""
    if node not in known:
        below = node.value if isinstance(node, yaml.CollectionNode) else []
        if isinstance(node, yaml.MappingNode):
            below = itertools.chain(*below)
        known[node] = 1 + sum(_size(one, known) for one in below)
    return known[node]


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
            # YAML would read an empty text as None and "folder:" as a mapping. Here both
            # are texts.
            if not text or text.endswith(":"):
                values[key.strip()] = text
            else:
                values[key.strip()] = read_value(value)
        except UNREADABLE as error:
            raise ConfigError(f"--set {override!r}: {error}") from error
    return values
