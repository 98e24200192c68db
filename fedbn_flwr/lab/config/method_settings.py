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
from fedbn_flwr.server.params import Params, Settings, limits
from fedbn_flwr.strategies import StrategyClass

__all__ = ["config_fields", "fields_of", "method_fields", "methods_with", "own_default"]

Methods = Iterable[StrategyClass]


def methods_with(methods: Methods, field: str) -> list[StrategyClass]:
    """Return the methods that have the setting ``field``; none for a setting of every method."""
    return [m for m in methods if field in m.Params.model_fields and field not in Params.model_fields]


def config_fields(kind: type[Params]) -> list[str]:
    """Return the settings that are config keys: those of a group."""
    groups = {name: field.json_schema_extra for name, field in kind.model_fields.items()}
    return [name for name, extra in groups.items() if isinstance(extra, dict) and extra["group"]]


def method_fields(methods: Methods) -> dict[str, Any]:
    """Return (type, field) of each setting by name, for pydantic's ``create_model``.

    Raises:
        ConfigError: two methods declare a setting with different types or limits.
    """
    methods = list(methods)
    own = own_default(methods)
    names = dict.fromkeys(name for method in methods for name in config_fields(method.Params))
    fields: dict[str, Any] = {}
    for name in names:
        first, *others = _declared(methods, name)
        for other in others:
            if (other.annotation, other.metadata) != (first.annotation, first.metadata):
                raise ConfigError(f"methods declare the setting {name!r} with different types or limits")
        field = copy.copy(first)
        field.description = "; ".join(dict.fromkeys(str(f.description) for f in (first, *others)))
        if name in own:
            field.default, field.metadata = own[name], []
            field.description += f"; {own[name]:g} = the method's own default"
        fields[name] = (field.annotation, field)
    return fields


def fields_of(settings: type[Settings]) -> dict[str, Any]:
    """Return (type, field) of each setting by name, for pydantic's ``create_model``."""
    return {name: (field.annotation, field) for name, field in settings.model_fields.items()}


def own_default(methods: Methods) -> dict[str, Any]:
    """Return the config's default, 0 or -1, of each setting whose default differs between methods."""
    methods = list(methods)
    names = {name for method in methods for name in config_fields(method.Params)}
    defaults = {name: [field.default for field in _declared(methods, name)] for name in names}
    return {
        name: type(found[0])(-1 if limits(_declared(methods, name)[0]).endswith("at least 0") else 0)
        for name, found in defaults.items()
        if len(set(found)) > 1
    }


def _declared(methods: Methods, name: str) -> list[FieldInfo]:
    return [method.Params.model_fields[name] for method in methods if name in method.Params.model_fields]
