"""The settings of a method, as fields with limits, and the tests of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo

from fedbn_flwr.errors import unknown_name
from fedbn_flwr.problems import Problem, raise_or_warn

__all__ = [
    "EVALUATIONS",
    "RECALIBRATED",
    "SET",
    "TEST_BN",
    "Params",
    "Settings",
    "setting",
]

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
        "personal-own",
        "personal-global",
        "personal-domains",
    ),
    *("averaged-bn", RECALIBRATED),
    *(f"global{TEST_BN}", f"averaged-bn{TEST_BN}"),
)
"""The names of tests in ``eval-on``."""
RECORDED = frozenset(EVALUATIONS) - {
    *("global", "personal-own", "personal-global", "averaged-bn", RECALIBRATED)
}
"""The tests that only the laboratory's recorder does."""


def tests_in(eval_on: str) -> tuple[str, ...]:
    """Return the tests named in ``eval-on``, each once.

    A test whose name ends in -test-bn adds the plain test.
    """
    asked = [name.strip() for name in eval_on.split(",") if name.strip()]
    plain = [name.removesuffix(TEST_BN) for name in asked]
    return tuple(dict.fromkeys([*asked, *plain]))


SET = "any value but the default"
"""The value in ``only_if`` for any value of a key but the default."""

UNSET = "the default"
"""The value in ``only_if`` for the default of a key."""


def setting(
    default: Any,
    meaning: str,
    group: str = "settings of methods",
    key: str = "",
    only_if: Mapping[str, Any] | None = None,
    in_config: Any = None,
    is_list: bool = False,
    **limits: Any,
) -> Any:
    """Return a field of ``Params``.

    The config key and the help text are made from the field.

    Args:
        default: the default of the setting.
        meaning: the text in the table of keys.
        group: its group of config keys; empty if it has no key.
        key: the key, if it differs from the name.
        only_if: the condition for having an effect. It maps other keys to their
            values, to ``SET`` for any value but the default, or to ``UNSET`` for the
            default. A value that ends with ":" is a prefix. Keys that the run does not
            have are ignored.
        in_config: the key's default, if it differs from the default of Flower's class
            of the same name.
        is_list: whether the value is a comma list, which a constructor also takes as
            a sequence of texts.
        limits: ``ge``, ``gt``, ``le``, ``lt``.
    """
    extra: dict[str, Any] = {
        "group": group,
        "key": key,
        "only_if": dict(only_if or {}),
        "in_config": default if in_config is None else in_config,
        "is_list": is_list,
    }
    return Field(default, description=meaning, json_schema_extra=extra, **limits)


def extras_of(field: FieldInfo) -> dict[str, Any]:
    """Return the arguments of ``setting`` that pydantic does not have."""
    extra = field.json_schema_extra
    return extra if isinstance(extra, dict) else {}


def unmet(
    conditions: Mapping[str, Any],
    values: Mapping[str, Any],
    defaults: Mapping[str, Any],
) -> str:
    """Return the requirement of a key whose conditions are not met.

    If they are met, the result is "".

    Args:
        conditions: see ``only_if`` of ``setting``.
        values: the values of the run's keys.
        defaults: their defaults.
    """
    of_run = {key: allowed for key, allowed in conditions.items() if key in values}
    for key, allowed in of_run.items():
        value = values[key]
        if allowed in (SET, UNSET):
            met = (value != defaults[key]) == (allowed == SET)
        else:
            # An allowed value that ends in ":" is a prefix: "folder:" allows
            # "folder:/data".
            prefixes = tuple(one for one in allowed if str(one).endswith(":"))
            met = value in allowed or str(value).startswith(prefixes)
        if not met:
            return f"it is for {in_words(of_run)}"
    return ""


def in_words(conditions: Mapping[str, Any]) -> str:
    """Return conditions as text, such as "train-only, with norm=group and layer"."""
    words = []
    for key, values in conditions.items():
        if values in (SET, UNSET):
            words.append(key if values == SET else f"an empty {key}")
            continue
        shown = []
        for value in values:
            if isinstance(value, bool):
                shown.append(str(value).lower())  # as in YAML
            elif value != "":
                shown.append(value)
        words.append(f"{key}={' and '.join(shown)}")
    return ", with ".join(words)


_NUMBERS = {"int": "a whole number", "float": "a number"}
"""The words for a number, by the beginning of pydantic's type of an error."""


def of_pydantic(
    error: ValidationError, fields: Mapping[str, FieldInfo]
) -> list[Problem]:
    """Return a problem for each value that pydantic refuses."""
    # A union reports several problems for one field: keep the first of each.
    first: dict[str, Any] = {}
    for one in error.errors(include_url=False):
        first.setdefault(str(one["loc"][0]), one)
    problems = []
    for name, one in first.items():
        value = one["input"]
        text = f"{name}={value!r}: {text_of(one)}"
        kind = _NUMBERS.get(one["type"].partition("_")[0])
        if kind:
            text = f"{name}={value!r} is not {kind}."
        if one["type"] == "literal_error":
            text = str(unknown_name(name, value, get_args(fields[name].annotation)))
        problems.append(Problem("bad-value", text, name))
    return problems


def text_of(error: Any) -> str:
    """Return the message of pydantic, or the text of a validator's own error."""
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    return str(error["msg"]).lower()


class Settings(BaseModel):
    """Settings, validated and read-only. Each field is a ``setting``.

    Attributes:
        checks: the problems that several settings have together.

    Raises:
        ConfigError: values are out of range, and the error names each.
    """

    checks: ClassVar[Sequence[Problem]] = ()

    # A process imports the settings of all methods but uses only one method's settings,
    # so validators are built at first use.
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True
    )

    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            if isinstance(value, np.generic):  # pydantic takes an int64 for a float
                values[name] = value.item()
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise_or_warn(of_pydantic(error, type(self).model_fields))

    def unused(self) -> Iterator[Problem]:
        """Yield a problem for each setting without effect, whether it is set or not."""
        values: dict[str, Any] = {}
        defaults: dict[str, Any] = {}
        fields = type(self).model_fields
        for name, field in fields.items():
            key = name.replace("_", "-")
            values[key], defaults[key] = getattr(self, name), field.default
        for name, field in fields.items():
            conditions = extras_of(field).get("only_if", {})
            reason = unmet(conditions, values, defaults) if conditions else ""
            if reason:
                keys = " ".join((name, *conditions))
                yield Problem("no-effect", reason, keys, "settings", "no-effect")

    def without_unset(self, problems: Iterable[Problem]) -> Iterator[Problem]:
        """Yield the problems, without unused settings that have their default value."""
        for problem in problems:
            if problem.effect == "no-effect":
                field = type(self).model_fields.get(problem.key)
                value = getattr(self, problem.key, None)
                if field is None or value == field.default:
                    continue
                problem = problem.with_value(value)
            yield problem


NOT_DONE = Problem(
    "test-not-done",
    "only the laboratory does the test {found}. Do it in your own evaluate_fn, and leave"
    " it out of eval-on",
    "eval_on",
    effect="no-effect",
    needs="recorded",
    when=lambda params, known: (
        "" if known.recorded else ", ".join({*tests_in(params.eval_on)} & RECORDED)
    ),
)


class Params(Settings):
    """The settings that all methods share. A method adds its own settings."""

    checks: ClassVar[Sequence[Problem]] = (NOT_DONE,)

    layers: str = setting(
        "",
        "comma list of paths and globs of BatchNorm layers (`layer1,*.bn2`), each with"
        " the layers below it: the method acts only on these, and FedAvg handles the"
        " others; empty selects all",
        only_if={"norm": ("batch",)},
        is_list=True,
    )
    personal: str = setting(
        "",
        "comma list of entries that stay with the client, in addition to the method's"
        " own part: paths and globs (`classifier.*`), each with all entries below it;"
        " classes (`type:LayerNorm`); or `last-layer`, the module that the model"
        " calls `fc`, `classifier` or `head`. Empty means none, but `last-layer` with"
        " fedrep",
        is_list=True,
    )
    train_only: str = setting(
        "",
        "comma list of what trains, usually of a pretrained network: paths and globs"
        " (`layer4`), each with all entries below it; `norms`, gamma and beta of every"
        " normalisation layer; `head`, the module that the model calls `fc`,"
        " `classifier` or `head`; `biases`, without beta; classes (`type:BatchNorm2d`)."
        " All other entries are frozen, and are sent only once. Empty trains all",
        "model",
        is_list=True,
    )
    variance: Literal["mean", "pooled"] = setting(
        "mean",
        "average of running variances; pooled also adds the spread of the client means",
        only_if={"norm": ("batch",)},
    )
    recalibrate: bool = setting(
        False,
        "every test and the saved models use BN statistics re-estimated from the"
        " clients' data; training does not. A client with a model of its own measures"
        " its own data. eval-on=recalibrated tests the global"
        " model with them,"
        " but saves it as trained",
        "tests",
    )
    class_moments: bool = setting(
        False,
        "after the last round, each client sends the moments of the BN inputs for each"
        " class, once. The run's folder keeps their sums in class_moments.npz, for the"
        " calibration at new sites (way matched)",
        "tests",
        only_if={"norm": ("batch",)},
    )
    min_replies: int = setting(
        1, "a round with fewer usable replies keeps the previous model", "rounds", ge=1
    )
    eval_every: int = setting(
        1, "rounds between tests; the last round is always tested", "tests", ge=1
    )
    eval_on: str = setting(
        "",
        "comma list of tests; empty selects global, or personal-own for a method with"
        " local parts. global-train: the global model on the training examples of all"
        " clients. personal-domains: each client's model on each domain, by client in"
        " tests.csv. averaged-bn: clients share their local state (BN parts,"
        " `personal` entries), and the tested and saved global model contains the"
        " average (without it, the saved model lacks these entries). recalibrated: the"
        " global model with re-estimated statistics (see recalibrate). global-test-bn,"
        " averaged-bn-test-bn: with statistics of the test inputs (see test-bn)",
        "tests",
    )
    fine_tune: int = setting(
        0,
        "local steps of each client before its test. Training does not keep them."
        " They train the whole model with BatchNorm, agc and learning rate as in the"
        " round (with fixbn frozen after T*),"
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
