"""The settings of a method, as fields with limits, and the tests of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo

from fedbn_flwr.errors import ConfigError, unknown_name

__all__ = [
    "BATCHNORM_KINDS",
    "EVALUATIONS",
    "RECALIBRATED",
    "SET",
    "TEST_BN",
    "Params",
    "Settings",
]
__all__ += ["limits", "setting", "tests_in"]

TEST_BN = "-test-bn"
"""The ending of the names of tests in ``eval-on`` that compute BatchNorm's statistics
from the test inputs.
"""
RECALIBRATED = "recalibrated"
"""The name of the test with re-estimated statistics in ``eval-on``."""
EVALUATIONS = (
    *(
        "global",
        "global-train",
        "global-batch-statistics",
        "personal-own",
        "personal-global",
        "personal-domains",
    ),
    *("averaged-bn", RECALIBRATED),
    *(f"global{TEST_BN}", f"averaged-bn{TEST_BN}"),
)
"""The names of tests in ``eval-on``. The strategy itself handles averaged-bn and
recalibrated; the result writer handles all of them.
"""


def tests_in(eval_on: str) -> tuple[str, ...]:
    """Return the tests named in ``eval-on``, each once.

    A test whose name ends in -test-bn adds the plain test.
    """
    asked = [name.strip() for name in eval_on.split(",") if name.strip()]
    plain = [name.removesuffix(TEST_BN) for name in asked]
    return tuple(dict.fromkeys([*asked, *plain]))


SET = "any value but the default"
"""Stands for such a value of a key in ``only_if``."""
BATCHNORM_KINDS = ("batch", "batch-renorm")
"""The values of ``norm`` with running statistics."""


def setting(
    default: Any,
    meaning: str,
    group: str = "settings of methods",
    key: str = "",
    only_if: Mapping[str, Any] | None = None,
    in_config: Any = None,
    **limits: Any,
) -> Any:
    """Return a field of ``Params``, from which its config key and help text follow.

    Args:
        default: its default.
        meaning: the text in the table of keys.
        group: its group of config keys; empty if it has no key.
        key: the key, if it differs from the name.
        only_if: the values of other keys that give it an effect, see
            ``lab.config.fields``.
        in_config: the key's default, if it differs from the default of Flower's class
            of the same name.
        limits: ``ge``, ``gt``, ``le``, ``lt``.
    """
    extra: dict[str, Any] = {
        "group": group,
        "key": key,
        "only_if": dict(only_if or {}),
        "in_config": default if in_config is None else in_config,
    }
    return Field(default, description=meaning, json_schema_extra=extra, **limits)


class Settings(BaseModel):
    """Settings, validated and read-only. Each field is a ``setting``.

    Raises:
        ConfigError: all values that are out of range, by name.
    """

    # A process imports the settings of all methods, but uses those of one method: the
    # validators are built at first use.
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            # A union reports several problems for one field: keep the first of each.
            first: dict[Any, Any] = {}
            for problem in error.errors():
                first.setdefault(problem["loc"][:1], problem)
            lines = [self._problem(problem) for problem in first.values()]
            raise ConfigError("\n".join(lines)) from error

    @classmethod
    def _problem(cls, problem: Any) -> str:
        """Return pydantic's problem as text, with setting, value and limits."""
        name, value = str(problem["loc"][0]), problem["input"]
        if problem["type"] == "literal_error":
            return str(
                unknown_name(name, value, get_args(cls.model_fields[name].annotation))
            )
        if problem["type"] == "value_error":
            return f"{name}={value!r}: {problem['ctx']['error']}"
        allowed = limits(cls.model_fields[name])
        if allowed and isinstance(value, (int, float)):
            return f"{name}={value!r} must be {allowed}"
        return f"{name}={value!r}: {problem['msg'].lower()}"


class Params(Settings):
    """The settings that all methods share. A method adds its own settings."""

    layers: str = setting(
        "",
        "comma list of paths and globs of BatchNorm layers (`layer1,*.bn2`), each with"
        " the layers below it: the method acts only on these, and FedAvg handles the"
        " others; empty selects all",
        only_if={"norm": BATCHNORM_KINDS},
    )
    personal: str = setting(
        "",
        "comma list of entries that stay with the client, in addition to the method's"
        " own part: paths and globs (`classifier.*`), each with all entries below it;"
        " classes (`type:LayerNorm`); or `last-layer`, which computes the outputs."
        " Empty means none, but `last-layer` with fedrep",
    )
    variance: Literal["mean", "pooled"] = setting(
        "mean",
        "average of running variances; pooled also adds the spread of the client means",
        only_if={"norm": BATCHNORM_KINDS},
    )
    recalibrate: bool = setting(
        False,
        "every test and the saved model use BN statistics re-estimated from the"
        " clients' data (as staticbn does); training does not use them."
        " eval-on=recalibrated tests with them, but saves the model as trained",
        "tests",
    )
    min_replies: int = setting(
        1, "a round with fewer usable replies keeps the previous model", "rounds", ge=1
    )
    cohort_rounds: int = setting(
        1,
        "number of consecutive rounds that train with the same clients, if"
        " fraction-train is below 1. With masked-sums, sums over changing clients would"
        " reveal single clients. A lost client is replaced, the others stay",
        "rounds",
        only_if={"fraction-train": SET},
        ge=1,
    )
    eval_every: int = setting(
        1, "rounds between tests; the last round is always tested", "tests", ge=1
    )
    eval_on: str = setting(
        "",
        "comma list of tests; empty selects global, or personal-own for a method with"
        " local parts. global-train: the global model on the training examples of all"
        " clients. personal-domains: each client's model on each domain, by client in"
        " metrics.jsonl. averaged-bn: clients share their local state (BN parts,"
        " `personal` entries), and the tested and saved global model contains the"
        " average (without it, the saved model lacks these entries). recalibrated: the"
        " global model with re-estimated statistics (see recalibrate). global-test-bn,"
        " averaged-bn-test-bn: with statistics of the test inputs (see test-bn), in"
        " addition to the plain test",
        "tests",
    )
    fine_tune: int = setting(
        0,
        "local steps of each client before its test; the run continues without them."
        " They train the whole model with BatchNorm, agc and learning rate as in the"
        " round (with fixbn frozen after T*, with hbn mixed by the client's alpha),"
        " with a new momentum, and without terms of other clients (fedprox, scaffold,"
        " fedtan) or phases (fedrep). The own model of ditto has plain BatchNorm",
        "tests",
        ge=0,
    )
    seed: int = setting(0, "seed of every random draw of the run", "rounds", ge=0)
    on_divergence: Literal["stop", "continue"] = setting(
        "stop",
        "reaction to a non-finite loss (NaN or infinity), or to two consecutive rounds"
        " in which all replies have such values: stop ends the run after this round as"
        " failed, continue continues it. Both are recorded in summary.json",
        "rounds",
    )
    momentum_scope: Literal["none", "local", "global"] = setting(
        "none",
        "SGD's momentum between rounds: none resets it, local keeps it on the client,"
        " global averages it",
        "local training",
    )
    agc: float = setting(
        0.0,
        "lambda of adaptive gradient clipping in every step; 0 disables it",
        "local training",
        ge=0,
    )

    @field_validator("eval_on")
    @classmethod
    def _known_tests(cls, eval_on: str) -> str:
        for name in tests_in(eval_on):
            if name not in EVALUATIONS:
                raise ValueError(str(unknown_name("test", name, EVALUATIONS)))
        return eval_on


def limits(field: FieldInfo) -> str:
    """Return the limits of a field in words, or nothing without limits."""
    # pydantic has an object for each limit.
    bounds = {}
    for limit in field.metadata:
        for sign in ("ge", "gt", "le", "lt"):
            if hasattr(limit, sign):
                bounds[sign] = getattr(limit, sign)
    if bounds.keys() >= {"ge", "lt"}:
        return f"in [{bounds['ge']}, {bounds['lt']})"
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    text = " and ".join(f"{words[sign]} {value}" for sign, value in bounds.items())
    return f"a finite number {text}" if text and field.annotation is float else text
