"""The config keys of the methods, derived from the strategies' ``Params``.

Several methods may have the same key. If their defaults differ, the config's default stands for "the method's own
default": 0, or -1 for a setting that may be 0. If their types or limits differ, this is an error.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from pydantic.fields import FieldInfo

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.server.params import Params, Settings
from fedbn_flwr.strategies import StrategyClass

__all__ = ["config_fields", "fields_of", "method_fields", "methods_with", "own_default"]

Methods = Iterable[StrategyClass]


def methods_with(methods: Methods, field: str) -> list[StrategyClass]:
    """Return the methods that have the config's ``field``; none for a setting of every method."""
    if field in Params.model_fields:
        return []
    return [method for method in methods if field in config_fields(method.Params)]


def config_fields(kind: type[Params]) -> dict[str, str]:
    """Return the settings that are config keys, those of a group: the config's field to the name of the setting."""
    fields = {}
    for name, field in kind.model_fields.items():
        extra = field.json_schema_extra
        if isinstance(extra, dict) and extra["group"]:
            fields[str(extra["key"]).replace("-", "_") or name] = name
    return fields


def method_fields(methods: Methods) -> dict[str, Any]:
    """Return (type, field) of each setting by name, for pydantic's ``create_model``.

    Raises:
        ConfigError: two methods declare a setting with different types or limits.
    """
    methods = list(methods)
    differing = own_default(methods)
    fields: dict[str, Any] = {}
    for name, declared in _by_name(methods).items():
        first = declared[0]
        if any((other.annotation, other.metadata) != (first.annotation, first.metadata) for other in declared):
            raise ConfigError(f"methods declare the setting {name!r} with different types or limits")
        field = copy.copy(first)
        field.description = "; ".join(dict.fromkeys(str(other.description) for other in declared))
        if name in differing:
            field.default, field.metadata = differing[name], []
            field.description += f"; {differing[name]:g} = the method's own default"
        fields[name] = (field.annotation, field)
    return fields


def fields_of(settings: type[Settings]) -> dict[str, Any]:
    """Return (type, field) of each setting by name, for pydantic's ``create_model``."""
    return {name: (field.annotation, field) for name, field in settings.model_fields.items()}


def own_default(methods: Methods) -> dict[str, Any]:
    """Return the config's default, 0 or -1, of each setting whose default differs between methods."""
    defaults: dict[str, Any] = {}
    for name, declared in _by_name(methods).items():
        if len({field.default for field in declared}) > 1:
            may_be_0 = any(getattr(limit, "ge", None) == 0 for limit in declared[0].metadata)
            defaults[name] = type(declared[0].default)(-1 if may_be_0 else 0)
    return defaults


def _by_name(methods: Methods) -> dict[str, list[FieldInfo]]:
    """Return the fields that the methods declare for each setting."""
    declared: dict[str, list[FieldInfo]] = {}
    for method in methods:
        for name, setting in config_fields(method.Params).items():
            declared.setdefault(name, []).append(method.Params.model_fields[setting])
    return declared
