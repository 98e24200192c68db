"""Errors of the package: each message names its subject, the value, the allowed values, and the remedy."""

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
    """Base of all errors that this package defines."""


class ConfigError(FedBNError, ValueError):
    """A setting is unknown, out of range or contradicts another one."""


class NormLayerError(ConfigError):
    """A model's normalisation layers do not fit the requested operation."""


class DataError(FedBNError, ValueError):
    """A data set is missing, unreadable or cannot be split in the requested way."""


class StateError(FedBNError, ValueError):
    """A model state, or a part that a client keeps, does not fit the model."""


class ReplyError(FedBNError, ValueError):
    """A client's reply cannot be used; the round continues without it."""


class ClientPartError(ReplyError):
    """A client's app lacks the method's client part; if this is so on all clients, the run ends with this error."""


class EngineError(FedBNError, RuntimeError):
    """A federation could not be started, reached or finished."""


def unknown_name(kind: str, value: object, allowed: Iterable[str]) -> ConfigError:
    """Return the error for an unknown name, with the nearest allowed name as a suggestion."""
    names = sorted(allowed)
    near = difflib.get_close_matches(str(value), names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ConfigError(f"unknown {kind} {value!r}.{hint} Allowed: {', '.join(names)}.")
