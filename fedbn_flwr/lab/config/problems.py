"""What is wrong with a config: a value for each problem, and the error with all."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from fedbn_flwr.errors import ConfigError, FedBNError, unknown_name

__all__ = [
    "ConfigProblemsError",
    "Problem",
    "of_error",
    "of_name",
    "of_pydantic",
    "text_of",
]


@dataclass(frozen=True)
class Problem:
    """What is wrong with a key.

    Attributes:
        code: what kind of problem it is: "unknown-key", "bad-value", "unknown-name",
            "no-effect", "conflict", or the code of another error.
        key: the key; "" where it is about the whole config.
        text: what is wrong, and what to do.
    """

    code: str
    key: str
    text: str


class ConfigProblemsError(ConfigError):
    """A config has problems; the text has a line for each.

    Attributes:
        problems: all of them.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(
            "\n".join(problem.text for problem in problems), code=problems[0].code
        )
        self.problems = tuple(problems)


def of_error(error: FedBNError, key: str = "") -> Problem:
    """Return an error of something that was read from the config."""
    return Problem(error.code, key, str(error))


def of_name(key: str, name: str, allowed: Collection[str]) -> list[Problem]:
    """Return the problem of a name that is not allowed; none for another name."""
    if name in allowed:
        return []
    return [of_error(unknown_name(key, name, allowed), key)]


def of_pydantic(error: Any, keys: Sequence[str]) -> Problem:
    """Return what pydantic says of a key: its value, and what is allowed."""
    key = str(error["loc"][0])
    if error["type"] in ("extra_forbidden", "invalid_key"):
        hint = " See docs/config.md for all keys."
        near = difflib.get_close_matches(key, keys, n=1)
        if near:
            hint = f" Did you mean {near[0]!r}?"
        return Problem("unknown-key", key, f"unknown key {key!r}.{hint}")
    if error["type"] == "value_error":
        return Problem("bad-value", key, f"{key}: {text_of(error)}")
    return Problem("bad-value", key, f"{key}={error['input']!r}: {text_of(error)}")


def text_of(error: Any) -> str:
    """Return what pydantic says of a value, or the text of a validator's own error."""
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    return str(error["msg"]).lower()
