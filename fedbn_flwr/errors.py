"""Errors of the package: each message names its subject, the observed value, what is allowed and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "ClientPartError",
    "ConfigError",
    "DataError",
    "EngineError",
    "FedBNError",
    "NormLayerError",
    "ReplyError",
    "StateError",
    "unknown_name",
]


class FedBNError(Exception):
    """Base of all errors raised on purpose by this package."""


class ConfigError(FedBNError, ValueError):
    """A setting is unknown, out of range or contradicts another one."""


class NormLayerError(FedBNError, ValueError):
    """A model's normalisation layers do not fit what was asked of them."""


class DataError(FedBNError, ValueError):
    """A data set is missing, unreadable or cannot be split as asked."""


class StateError(FedBNError, ValueError):
    """A model state, or a part a client keeps, does not fit the model."""


class ReplyError(FedBNError, ValueError):
    """A client's reply cannot be used; the round goes on without it."""


class ClientPartError(ReplyError):
    """A reply shows that the client's app lacks the method's client part; where all do, the run ends with this."""


class EngineError(FedBNError, RuntimeError):
    """A federation could not be started, reached or finished."""


def unknown_name(kind: str, value: object, allowed: Iterable[str]) -> ConfigError:
    """Return the error for a name that no registry holds, with the nearest one as a suggestion."""
    names = sorted(allowed)
    near = difflib.get_close_matches(str(value), names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ConfigError(f"unknown {kind} {value!r}.{hint} Allowed: {', '.join(names)}.")
