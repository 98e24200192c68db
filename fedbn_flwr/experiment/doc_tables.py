"""The documentation's tables, made from the schema and the registries.

``python -m fedbn_flwr.experiment.doc_tables > docs/config.md`` writes the page of config keys anew,
``python -m fedbn_flwr.experiment.doc_tables README.md`` the marked tables of a page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from fedbn_flwr.batchnorm.parts import Part
from fedbn_flwr.data import DATASETS, PARTITIONS
from fedbn_flwr.experiment.config import CENTRALIZED, EVALUATIONS, GROUPS, Config
from fedbn_flwr.models import MODELS
from fedbn_flwr.norms import NORMS
from fedbn_flwr.strategies import STRATEGIES

__all__ = ["config_table", "fill_tables", "norm_table", "strategy_table"]

_NAMES: Mapping[str, Iterable[str]] = {
    "strategy": [*STRATEGIES, CENTRALIZED],
    "norm": NORMS,
    "model": MODELS,
    "dataset": DATASETS,
    "partition": PARTITIONS,
    "eval-on": EVALUATIONS,
}
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_TYPES = {str: "text", int: "int", float: "float", bool: "bool"}
_HEAD = """# Config keys

The same keys stand in a YAML file (`fedbn-flwr run FILE`), in `--set key=value`, in `flwr run --run-config` and, each
with its default, in `[tool.flwr.app.config]` of `pyproject.toml`. Values are scalars: a list is a comma string
(`lr-decay-at = "0.5,0.75"`), "not set" is `""` for text and `0` for numbers. Setting one of `local-steps` and
`local-epochs` above 0 takes the place of the other's default; setting both is an error.

This page is made from the schema: `python -m fedbn_flwr.experiment.doc_tables > docs/config.md`. A test compares them.
"""


def config_table() -> str:
    """Return ``docs/config.md``: a table of key, type, default, allowed values and meaning for each group of keys."""
    lines = [_HEAD]
    for group in GROUPS:
        lines += [f"## {group}", "", "| key | type | default | allowed | meaning |", "|---|---|---|---|---|"]
        for name, field in Config.model_fields.items():
            extra = field.json_schema_extra
            if isinstance(extra, dict) and extra["group"] == group:
                key = field.alias or name
                cells = (f"`{key}`", _type(field.annotation), _default(field.default), _allowed(key, field))
                lines.append("| " + " | ".join((*cells, (field.description or "").replace("|", "\\|"))) + " |")
        lines.append("")
    return "\n".join(lines)


def strategy_table() -> str:
    """Return a table of the strategies: name with its file, what it does, what stays with the client, source."""
    lines = ["| name | what it does | stays with the client | source |", "|---|---|---|---|"]
    for name, strategy in STRATEGIES.items():
        file = strategy.__module__.replace(".", "/") + ".py"
        kept = ", ".join(part.value for part in Part if part in strategy.local) or "nothing"
        lines.append(f"| [`{name}`]({file}) | {strategy.summary_line} | {kept} | {strategy.source} |")
    return "\n".join(line.replace("||", "\\|\\|") for line in lines)


def norm_table() -> str:
    """Return a table of the norms: name, what it is, source."""
    rows = [f"| `{name}` | {info.summary} | {info.source} |" for name, info in NORMS.items()]
    return "\n".join(["| norm | what it is | source |", "|---|---|---|", *rows])


def fill_tables(page: str) -> str:
    """Return the page with the tables between ``<!-- strategies -->``, ``<!-- norms -->`` and their ends made anew."""
    for name, table in (("strategies", strategy_table()), ("norms", norm_table())):
        start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        if start in page:
            before, rest = page.split(start)
            page = f"{before}{start}\n{table}\n{end}{rest.split(end)[1]}"
    return page


def _type(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "text"
    return ", ".join(_TYPES[kind] for kind in get_args(annotation) or (annotation,))


def _default(value: Any) -> str:
    shown = str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')
    return f"`{shown}`"


def _allowed(key: str, field: FieldInfo) -> str:
    """Return the names, or the bounds; where there are none the meaning says it all."""
    names = get_args(field.annotation) if get_origin(field.annotation) is Literal else _NAMES.get(key, ())
    if names:
        return ", ".join(f"`{name}`" for name in names)
    if field.annotation is bool:
        return "`true`, `false`"
    found = ((sign, getattr(limit, name, None)) for limit in field.metadata for name, sign in _BOUNDS.items())
    return ", ".join(f"{sign} {bound}" for sign, bound in found if bound is not None) or "see meaning"


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(fill_tables(path.read_text()))
    if not sys.argv[1:]:
        sys.stdout.write(config_table())
