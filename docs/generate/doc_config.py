"""The page of all config keys, made from the schema."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from fedbn_flwr.lab.config import CENTRALIZED, GROUPS, Config
from fedbn_flwr.lab.config.fields import (
    OWN_DEFAULTS,
    PARAMS,
    config_fields,
    methods_with,
    only_if_of,
)
from fedbn_flwr.lab.data import DATASETS, FUNCTION_FORM, KINDS, PARTITIONS
from fedbn_flwr.lab.models import MODELS
from fedbn_flwr.norms import NORMS
from fedbn_flwr.server.methods.method import ROLES
from fedbn_flwr.server.methods.params import EVALUATIONS, Params, in_words
from fedbn_flwr.strategies import METHODS, STRATEGIES
from fedbn_flwr.training.tasks import TASKS

__all__ = ["config_page", "field_cells"]

_NAMES: Mapping[str, Iterable[str]] = {
    "strategy": [*STRATEGIES, CENTRALIZED],
    "norm": NORMS,
    "model": MODELS,
    "dataset": [
        *DATASETS,
        *(form.split(",")[0] for form in (*KINDS.values(), FUNCTION_FORM)),
    ],
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

# Config keys

Use these keys in a YAML file (`fedbn-flwr run FILE`), in `--set key=value` and in `flwr run --run-config`. A value has
the type of the default. A list is a comma string (`lr-decay-at = "0.5,0.75"`). "Not set" is `""` for text and `0` for
numbers. If you set one of `local-steps` and `local-epochs`, the default of the other is not used; if you set both, the
run is refused.
"""


def config_page() -> str:
    """Return ``docs/config.md``: the keys of each group with default, allowed values,
    meaning and users.
    """
    fields = {
        field.alias or name: (name, field)
        for name, field in Config.model_fields.items()
    }
    lines = [_HEAD]
    for group in GROUPS:
        lines += [f"## {group[0].upper()}{group[1:]}", ""]
        methods = group == "settings of methods"
        lines += [
            "| key | default | allowed | meaning |" + " used by |" * methods,
            "|---" * (4 + methods) + "|",
        ]
        for key in Config.keys(group):
            name, field = fields[key]
            cells = [f"`{key}`", *_cells(key, name, field)]
            if conditions := only_if_of(Config, key):
                # Conditions of a method's setting are alternatives, because each is
                # about another method, and a run has one of them.
                joint = " or " if methods else ", with "
                words = [in_words({key: one}) for key, one in conditions.items()]
                cells[-1] += f". Only with {joint.join(words)}"
            lines.append(
                "| " + " | ".join([*cells, _users(name)] if methods else cells) + " |"
            )
        lines.append("")
    return "\n".join(lines)


def field_cells(key: str, field: FieldInfo) -> list[str]:
    """Return default, allowed values and meaning of a setting, as cells of a Markdown
    table.
    """
    meaning = (field.description or "").replace("|", "\\|")
    return [
        _default(field.default),
        _allowed(key, field),
        meaning,
    ]


def _cells(key: str, name: str, field: FieldInfo) -> list[str]:
    """Return the cells of a config key; with a default of each method's own, those and
    their limits.
    """
    default, allowed, meaning = field_cells(key, field)
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
        _allowed(key, next(iter(declared.values()))) + f", or {default}",
        meaning,
    ]


def _users(name: str) -> str:
    return ", ".join(methods_with(name)) or "every method"


def _default(value: Any) -> str:
    shown = (
        str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')
    )
    return f"`{shown}`"


def _allowed(key: str, field: FieldInfo) -> str:
    """Return the names, or the bounds; where there are none the meaning says it all."""
    names = (
        get_args(field.annotation)
        if get_origin(field.annotation) is Literal
        else _NAMES.get(key, ())
    )
    if names:
        return ", ".join(f"`{name}`" for name in names)
    if field.annotation is bool:
        return "`true`, `false`"
    found = (
        (sign, getattr(limit, name, None))
        for limit in field.metadata
        for name, sign in _BOUNDS.items()
    )
    return (
        ", ".join(f"{sign} {bound}" for sign, bound in found if bound is not None)
        or "-"
    )
