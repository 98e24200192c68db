"""The table by which a command answers without torch: keys, names, and what the checks of each method read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from fedbn_flwr.batchnorm.adaptation import TEST_BN_MODES
from fedbn_flwr.lab.config import CENTRALIZED, Config
from fedbn_flwr.lab.config.method_settings import config_fields
from fedbn_flwr.lab.data import DATASETS, FUNCTION_FORM, KINDS, PARTITIONS
from fedbn_flwr.lab.models import MODELS
from fedbn_flwr.norms import NORMS
from fedbn_flwr.server.method import RunSettings
from fedbn_flwr.server.params import Params
from fedbn_flwr.strategies import METHODS, STRATEGIES, Strategy

__all__ = ["config_table"]

# The validators of the config itself: `at_once` does the work of the first, and the second refuses nothing.
_OF_CONFIG = ("_no_bool", "_home")
# The fields of ``RunSettings`` by those of the config.
_OF_A_RUN = {"num_rounds": "num_server_rounds", "tests": "eval_on"}


def config_table() -> str:
    """Return the text of ``table.json``."""
    content = {
        "keys": _keys(),
        "allowed": {
            "strategy": [*STRATEGIES, CENTRALIZED],
            "norm": [*NORMS],
            "dataset": [*DATASETS],
            "partition": [*PARTITIONS],
            "test-bn": [*TEST_BN_MODES],
        },
        "methods": {name: _read_by_checks(strategy) for name, strategy in STRATEGIES.items()},
        "datasets": {name: [info.num_classes, info.task.name, info.task.by_pixel] for name, info in DATASETS.items()},
        "models": {name: info.per_pixel for name, info in MODELS.items()},
        "registries": _registries(),
    }
    parts = [f"{json.dumps(name)}: {_lines(part)}" for name, part in content.items()]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _lines(part: Mapping[str, Any]) -> str:
    """Return a mapping as JSON with a line for each entry."""
    lines = [f"  {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in part.items()]
    return "{\n" + ",\n".join(lines) + "\n}"


def _keys() -> dict[str, Any]:
    """Return the schema and the default of each key, as pydantic itself checks it."""
    keys = {}
    Config.model_rebuild()  # it is built when it is first used
    schema: Any = Config.__pydantic_core_schema__
    while schema["type"] != "model-fields":
        schema = schema["schema"]
    for name, field in Config.model_fields.items():
        inner = schema["fields"][name]["schema"]
        while inner["type"] == "default" or getattr(_function(inner), "__name__", "") in _OF_CONFIG:
            inner = inner["schema"]
        keys[field.alias or name] = {"schema": None if _function(inner) else inner, "default": field.default}
    return keys


def _function(schema: Mapping[str, Any]) -> Any:
    return schema.get("function", {}).get("function")


def _registries() -> dict[str, list[tuple[str, str, str]]]:
    """Return (name, summary, source) of the entries of each registry."""
    methods = [(name, method.summary_line, method.source) for name, method in METHODS.items()]
    methods.append((CENTRALIZED, "the reference: one loop over all data (`fedbn-flwr run` only)", "-"))
    others: dict[str, Mapping[str, Any]] = {
        "norms": NORMS,
        "models": MODELS,
        "datasets": DATASETS,
        "partitions": PARTITIONS,
    }
    found = {"strategies": methods}
    for kind, registry in others.items():
        found[kind] = [(name, info.summary, info.source) for name, info in registry.items()]
    for form in (*KINDS.values(), FUNCTION_FORM):
        name, _, what = form.partition(", ")
        found["datasets"].append((name, what, "own data"))
    return found


def _read_by_checks(strategy: type[Strategy]) -> list[str] | None:
    """Return the config's fields on which it depends whether the settings of a method are refused.

    They are those that the checks read under default settings, and those whose values the method itself checks further.
    None where default settings are refused.
    """
    read: set[str] = set()
    config = Config.model_construct(strategy=strategy.name)
    params = _recorder(strategy.Params, read.add)(**config.params().model_dump())
    noted = _recorder(RunSettings, lambda name: read.add(_OF_A_RUN.get(name, name)))
    run = noted(**vars(config.run_settings()))
    problems = strategy.combination.methods(params).problems(run)
    if any(problem.kind == "refuse" for problem in problems):
        return None
    return sorted((read | _checked_further(strategy.Params)) & Config.model_fields.keys())


def _checked_further(kind: type[Params]) -> set[str]:
    """Return the fields that a method's settings limit in another way than the config does."""
    further = {name for each in kind.__pydantic_decorators__.field_validators.values() for name in each.info.fields}
    for name, setting in config_fields(kind).items():
        field, known = kind.model_fields[setting], Config.model_fields.get(name)
        if known is None or (known.annotation, known.metadata) != (field.annotation, field.metadata):
            further.add(name)
    return further


def _recorder(kind: type[Any], note: Callable[[str], object]) -> type[Any]:
    """Return a class like ``kind`` that notes each attribute that is read."""

    def read(self: Any, name: str) -> Any:
        note(name)
        return object.__getattribute__(self, name)

    return type(kind.__name__, (kind,), {"__getattribute__": read})
