"""Errors of the package: each message names its subject, the value, the allowed values, and the remedy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ContextDecorator, contextmanager
from typing import Any

__all__ = [
    "ClientPartError",
    "ConfigError",
    "DataError",
    "DivergedError",
    "EngineError",
    "FedBNError",
    "MaskingError",
    "NamedConfigErrors",
    "NormLayerError",
    "NothingTrainedError",
    "ReplyError",
    "RunFailedError",
    "StateError",
    "install_extra",
    "needs_package",
    "raise_shared_config_error",
    "unknown_name",
]

_CONFIG_ERROR = "ConfigError: "
_CONFIG_ERROR_IN_REASON = re.compile(r"\bConfigError(?:: |'>:<')(?:ConfigError: )?")  # in Ray's and Flower's texts


class FedBNError(Exception):
    """Base of all errors that this package defines."""


class ConfigError(FedBNError, ValueError):
    """A setting is unknown, out of range or contradicts another one."""


class NotResumableError(ConfigError):
    """The folder of a run has no checkpoint with which the run could continue; it can only begin anew."""


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


class MaskingError(FedBNError, ValueError):
    """A client refuses a step of a masked sum, or the masks of a sum cannot be removed."""


class EngineError(FedBNError, RuntimeError):
    """A federation could not be started, reached or finished."""


class RunFailedError(EngineError):
    """A run ended without a usable model.

    Attributes:
        result: what the call would have returned: for ``start`` Flower's ``Result`` with the last global model, for
            ``sweep`` the table; None if it is not known.
    """

    def __init__(self, message: str, result: Any = None) -> None:
        super().__init__(message)
        self.result = result


class NothingTrainedError(RunFailedError):
    """No round of the run had enough usable replies."""


class DivergedError(RunFailedError):
    """A loss is not finite, and ``on_divergence`` is "stop".

    Attributes:
        diverged_at: the first round that diverged; None for several runs.
    """

    def __init__(self, message: str, diverged_at: int | None = None, result: Any = None) -> None:
        super().__init__(message, result)
        self.diverged_at = diverged_at


class NamedConfigErrors(ContextDecorator):
    """Begin the text of a ConfigError of the block with its class: Flower sends a client's error as text only.

    It is also a decorator. It is a class because Ray must pickle it with the app, and cannot pickle a generator.
    """

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raise the ConfigError with its name."""
        if isinstance(error, ConfigError) and not str(error).startswith(_CONFIG_ERROR):
            raise ConfigError(_CONFIG_ERROR + str(error)) from error


def raise_shared_config_error(reasons: Sequence[str], num_asked: int) -> None:
    """Raise the ConfigError that all clients raised, if so: it would come again in every round.

    Args:
        reasons: the reasons of the error replies.
        num_asked: number of clients that were asked.
    """
    found = [_CONFIG_ERROR_IN_REASON.split(reason) for reason in reasons]
    texts = {parts[-1].partition("\n\nThe above exception")[0] if len(parts) > 1 else "" for parts in found}
    if len(reasons) == num_asked and len(texts) == 1 and (text := texts.pop()):
        text = text.removesuffix("'>")
        who = f"All {num_asked} clients that were" if num_asked > 1 else "The client that was"
        raise ConfigError(f"{text}\n({who} asked raised this error.)")


def install_extra(extra: str) -> str:
    """Return how to install an extra of the package, which is on no index."""
    return f"in the checkout: pip install '.[{extra}]'"


@contextmanager
def needs_package(package: str, what: str) -> Iterator[None]:
    """Name the package, and what needs it, where an import in the block does not find it.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{what} need the package {package}, which is not installed; pip install {package}"
        ) from error


def unknown_name(kind: str, value: object, allowed: Iterable[str]) -> ConfigError:
    """Return the error for an unknown name, with the nearest allowed name as a suggestion."""
    names = sorted(allowed)
    near = difflib.get_close_matches(str(value), names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ConfigError(f"unknown {kind} {value!r}.{hint} Allowed: {', '.join(names)}.")
