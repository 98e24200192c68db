"""The page of all config keys and options, made from the schema and the modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args, get_origin

from doc_methods import options
from pydantic.fields import FieldInfo

from fedbn_flwr.lab.config import GROUPS, Config
from fedbn_flwr.lab.config.fields import (
    OWN_DEFAULTS,
    PARAMS,
    config_fields,
    methods_with,
    only_if_of,
)
from fedbn_flwr.lab.data import PARTITIONS
from fedbn_flwr.norms import NORMS
from fedbn_flwr.server.methods.method import ROLES
from fedbn_flwr.server.methods.params import EVALUATIONS, Params, in_words
from fedbn_flwr.strategies import METHODS
from fedbn_flwr.training.tasks import TASKS

__all__ = ["config_page"]

_NAMES: Mapping[str, Iterable[str]] = {
    "norm": NORMS,
    "partition": PARTITIONS,
    "eval-on": EVALUATIONS,
    "task": TASKS,
    **{
        role: [name for name, method in METHODS.items() if method.role == role]
        for role in ROLES
    },
}
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_HEAD = """<!-- Made by `make generate` from the schema. Do not edit. -->

# Config keys and options

Which settings does a run have? Write them into a file (`fedbn-flwr run FILE`), into
`--set key=value`, or into `flwr run --run-config`. In brackets: default, allowed values. A list is
a comma string (`lr-decay-at = "0.5,0.75"`); "not set" is `""` for text and `0` for numbers. If you set
`local-steps` or `local-epochs`, the default of the other is not used.
"""


def config_page() -> str:
    """Return ``docs/config.md``: the keys of each group with default, allowed values,
    meaning and users; then the options and combinations of methods.
    """
    fields = {
        field.alias or name: (name, field)
        for name, field in Config.model_fields.items()
    }
    lines = [_HEAD]
    for group in GROUPS:
        lines += [f"## {group[0].upper()}{group[1:]}", ""]
        methods = group == "settings of methods"
        for key in Config.keys(group):
            name, field = fields[key]
            default, allowed, meaning = _cells(key, name, field)
            if conditions := only_if_of(Config, key):
                # Conditions of a method's setting are alternatives, because each is
                # about another method, and a run has one of them.
                joint = " or " if methods else ", with "
                words = [in_words({key: one}) for key, one in conditions.items()]
                meaning += f". Only with {joint.join(words)}"
            values = f"{default}; {allowed}" if allowed else default
            of = ", ".join(methods_with(name)) if methods else ""
            users = f" Used by {of}." if of else ""
            lines.append(f"- **`{key}`** ({values}): {meaning}.{users}")
        lines.append("")
    return "\n".join([*lines, options()])


def _cells(key: str, name: str, field: FieldInfo) -> list[str]:
    """Return the cells of a config key; with a default of each method's own, those and
    their limits.
    """
    default, allowed = _default(field.default), _allowed(key, field)
    meaning = field.description or ""
    if name not in OWN_DEFAULTS:
        return [default, allowed, meaning]
    common = Params.model_fields.get(name)
    declared = {}
    for method, params in PARAMS.items():
        if setting := config_fields(params).get(name):
            declared[method] = params.model_fields[setting]
    differ = {
        method: field
        for method, field in declared.items()
        if not common or field.default != common.default
    }
    own = ", ".join(
        f"{method} {_default(field.default)}" for method, field in differ.items()
    )
    own += f", the others {_default(common.default)}" if common else ""
    return [
        f"{default}: {own}",
        _allowed(key, next(iter(declared.values()))),
        meaning,
    ]


def _default(value: Any) -> str:
    shown = (
        str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')
    )
    return f"`{shown}`"


def _allowed(key: str, field: FieldInfo) -> str:
    """Return the names, or both bounds; "" if the meaning is enough."""
    names = (
        get_args(field.annotation)
        if get_origin(field.annotation) is Literal
        else _NAMES.get(key, ())
    )
    if names:
        return ", ".join(f"`{name}`" for name in names)
    found = (
        (sign, getattr(limit, name, None))
        for limit in field.metadata
        for name, sign in _BOUNDS.items()
    )
    bounds = [f"{sign} {bound}" for sign, bound in found if bound is not None]
    return ", ".join(bounds if len(bounds) > 1 else ())
