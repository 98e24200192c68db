"""Errors of the package, with subject, value, allowed values and remedy.

Each class has a ``code``, and an instance may have a finer one. Code and tests decide
by class and code, never by the words of a message. Flower sends a client's error only
as text, so the text contains each code that the server uses.
"""

from __future__ import annotations

import difflib
import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ContextDecorator, contextmanager
from pathlib import Path
from typing import Any

__all__ = [
    "ABOUT_THE_RUN",
    "COMES_AGAIN",
    "FIRST_PASS_NOT_FINITE",
    "FIXED_LOST",
    "INPUTS_NOT_FINITE",
    "MOD_ON_QUERIES",
    "MOD_ORDER",
    "NOT_ALLOWED",
    "NOT_FINITE",
    "STATISTICS_NOT_FINITE",
    "TOO_FEW_LEFT",
    "ClientPartError",
    "ConfigError",
    "DataError",
    "DivergedError",
    "EngineError",
    "FedBNError",
    "MissingExtraError",
    "NamedConfigErrors",
    "NormLayerError",
    "NothingTrainedError",
    "OneExampleError",
    "PackingError",
    "ReplyError",
    "RunFailedError",
    "StateError",
    "code_of",
    "coded",
    "described",
    "install_extra",
    "needs_package",
    "one_line",
    "raise_shared_config_error",
    "split_code",
    "unknown_name",
]

NOT_FINITE = "not-finite"
"""The code of a value that is NaN or infinite."""
INPUTS_NOT_FINITE = "inputs-not-finite"
"""The code of a non-finite loss caused by a client's non-finite inputs."""
FIRST_PASS_NOT_FINITE = "first-pass-not-finite"
"""The code of a loss or gradient that is not finite before a step is taken."""
STATISTICS_NOT_FINITE = "statistics-not-finite"
"""The code of running statistics that are not finite, with finite weights."""
COMES_AGAIN = "comes-again"
"""The code of a user's object that a second message cannot use."""
NOT_ALLOWED = "not-allowed"
"""The code of a path or a module of a run's config that a node does not allow."""
ABOUT_THE_RUN = "about-the-run"
"""The code of an error about a node's data whose text does not reveal the data."""
FIXED_LOST = "fixed-lost"
"""The code of a client that no longer has the fixed entries of the run."""
TOO_FEW_LEFT = "too-few-left"
"""The code of a synchronised step that has lost too many clients."""
MOD_ON_QUERIES = (
    "A mod of the whole app also receives the strategies' queries, whose config lacks"
    " entries of training messages: use it only for the training function, with"
    " @app.train(mods=[...]) or client_app(..., train_mods=[...]), or let it return"
    " call_next(message, context) if message.metadata.message_type begins with"
    " 'query'."
)
"""The remedy for a mod that raises an exception on a query."""
MOD_ORDER = (
    "A mod of the app refuses messages that it was not made for. Put bn_mod first,"
    " ClientApp(mods=[bn_mod]), and use mods that act on training only for the"
    " training function, @app.train(mods=[...]) or client_app(..., train_mods=[...])"
)
"""The remedy for a mod that refuses a message of this package."""
# Characters at each end of a long text of another machine.
_HALF_LINE = 1000
_CLIENTS_CONFIG = "clients-config"  # the code of a ConfigError sent by a client
_IN_TEXT = (
    NOT_FINITE,
    FIRST_PASS_NOT_FINITE,
    INPUTS_NOT_FINITE,
    STATISTICS_NOT_FINITE,
    TOO_FEW_LEFT,
    COMES_AGAIN,
    FIXED_LOST,
    _CLIENTS_CONFIG,
)
# In a client's ConfigError, the error's own code follows as a second word.
_CODE = re.compile(rf"\[({'|'.join(_IN_TEXT)})(?: [\w-]+)?\] ")
# A user's app may raise a ConfigError outside ``NamedConfigErrors``. Then the text from
# Flower or Ray names the class.
_CONFIG_ERROR = re.compile(
    rf"\[(?:{_CLIENTS_CONFIG}(?: ([\w-]+))?|{COMES_AGAIN})\] |\bConfigError(?:: |'>:<')"
)


class FedBNError(Exception):
    """Base of all errors that this package defines.

    Args:
        text: the message; it may contain a code, see ``coded``.
        code: a code that is finer than the code of the class.

    Attributes:
        code: the kind of the error, for code and tests.
        problems: the problems of declared values (``fedbn_flwr.problems``) in the text.
    """

    code = "error"
    problems: Sequence[Any] = ()

    def __init__(self, text: object = "", *, code: str | None = None) -> None:
        super().__init__(text)
        # The error of a client arrives as text, and the text contains its code.
        finer = code or code_of(str(text))
        if finer:
            self.code = finer

    @property
    def reason(self) -> str:
        """The text, with the code if the server acts on it."""
        text = str(self)
        if self.code in _IN_TEXT and code_of(text) is None:
            return coded(self.code, text)
        return text


class ConfigError(FedBNError, ValueError):
    """A setting is unknown, out of range or contradicts another setting."""

    code = "config"


class NotResumableError(ConfigError):
    """A run has no checkpoint, so it must start again."""

    code = "not-resumable"


class MissingExtraError(FedBNError, ImportError):
    """Packages of an extra are not installed."""

    code = "missing-extra"


class NormLayerError(ConfigError):
    """A model's normalisation layers do not fit the requested operation."""

    code = "norm-layer"


class DataError(FedBNError, ValueError):
    """A data set is missing, unreadable or cannot be split in the requested way."""

    code = "data"


class OneExampleError(DataError):
    """A client's only example leaves a BatchNorm layer one value per channel."""

    code = "one-example"


class StateError(FedBNError, ValueError):
    """A model's state, or a client's local state, does not fit the model."""

    code = "state"


class ReplyError(FedBNError, ValueError):
    """A client's reply cannot be used, so the round continues without it."""

    code = "reply"


class ClientPartError(ReplyError):
    """A client's app lacks the method's client code.

    If all apps lack the client code, the run ends.
    """

    code = "client-part"


class PackingError(FedBNError, ValueError):
    """Arrays that were sent in one piece do not fit their manifest."""

    code = "packing"


class EngineError(FedBNError, RuntimeError):
    """A federation could not be started, reached or finished."""

    code = "engine"


class RunFailedError(EngineError):
    """A run ended without a usable model.

    Attributes:
        result: the value that the call would have returned: for ``start``, Flower's
            ``Result`` with the last global model; for ``sweep``, the table. None if it
            is unknown.
    """

    code = "run-failed"

    def __init__(self, message: str, result: Any = None) -> None:
        super().__init__(message)
        self.result = result


class NothingTrainedError(RunFailedError):
    """No round of the run had enough usable replies."""

    code = "nothing-trained"


class DivergedError(RunFailedError):
    """A loss is not finite, and ``on_divergence`` is "stop".

    Attributes:
        diverged_at: the first round that diverged; None for several runs.
    """

    code = "diverged"

    def __init__(
        self, message: str, diverged_at: int | None = None, result: Any = None
    ) -> None:
        super().__init__(message, result)
        self.diverged_at = diverged_at


class NamedConfigErrors(ContextDecorator):
    """Mark the text of a ConfigError from the block with its code.

    Flower sends a client's error only as text. The class is also a decorator.
    """

    # This is a class, because Ray must pickle it with the app and cannot pickle a
    # generator.

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        """Raise the ConfigError again, with the code in its text."""
        if isinstance(error, ConfigError) and error.code != _CLIENTS_CONFIG:
            code = _CLIENTS_CONFIG
            if error.code != ConfigError.code:
                code = f"{code} {error.code}"
            raise ConfigError(coded(code, str(error))) from error


def described(error: BaseException, with_text: bool = True) -> str:
    """Return the type of a raised error, a line of the user's code, and the text.

    The line is the last line of the traceback that is not in an installed package.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename]
    last = (own or frames)[-1]
    text = f": {error}" if with_text and str(error) else ""
    return (
        f"{type(error).__name__} in line {last.lineno} of"
        f" {Path(last.filename).name}{text}"
    )


def one_line(text: str) -> str:
    """Return the text of another machine as one short line, for logs and reports.

    The middle of a long text is left out, and control characters are escaped.
    """
    if len(text) > 2 * _HALF_LINE:
        text = f"{text[:_HALF_LINE]} ... {text[-_HALF_LINE:]}"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def coded(code: str, text: str) -> str:
    """Return the text of an error with its code, for errors that are sent as text."""
    return f"[{code}] {text}"


def split_code(reason: str) -> tuple[str | None, str]:
    """Return the code in the text of an error, if any, and the text without it."""
    return code_of(reason), _CODE.sub("", reason, count=1)


def code_of(reason: str) -> str | None:
    """Return the code in the text of an error, or None if there is none."""
    # Search the whole text: Flower adds words before a client's text.
    match = _CODE.search(reason)
    return match[1] if match else None


def raise_shared_config_error(reasons: Sequence[str], num_asked: int) -> None:
    """Raise the clients' ConfigError if all of them raised the same error.

    Args:
        reasons: the reasons of the error replies.
        num_asked: number of clients that were asked.
    """
    # If all clients raise the same error, it would come again in every round. If only
    # one client does, the error may be the client's own fault.
    errors = {_config_error_in(reason) for reason in reasons}
    if len(reasons) != num_asked or len(errors) != 1:
        return
    text, code = errors.pop()
    if text:
        who = "The client that was"
        if num_asked > 1:
            who = f"All {num_asked} clients that were"
        raise ConfigError(f"{text}\n({who} asked raised this error.)", code=code)


def _config_error_in(reason: str) -> tuple[str, str | None]:
    """Return the text and the code of the ConfigError in a reason from Flower.

    The text is empty if there is no such error.
    """
    text, code = "", None
    for match in _CONFIG_ERROR.finditer(reason):
        text, code = reason[match.end() :], match[1]
    # Remove the text that Flower and Python add after the error.
    text = text.partition("\n\nThe above exception")[0].removesuffix("'>")
    return one_line(text).replace("\\n", "\n"), code


def install_extra(extra: str) -> str:
    """Return the command that installs an extra of the package from a checkout."""
    return f'pip install ".[{extra}]" in the checkout of fedbn-flwr'


@contextmanager
def needs_package(package: str, what: str) -> Iterator[None]:
    """Raise an error with the package's name if the block does not find a module.

    The error has this name even if the missing module is a dependency of the package.
    ``what`` names the features that need the package.

    Raises:
        ConfigError: the package, or a dependency of it, is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{what} need the package {package}, but it is not installed: pip install"
            f" {package}"
        ) from error


# Names of another form that are allowed as well.
_ALSO_ALLOWED = {"dataset": ", and own data as folder:PATH or module:function"}


def unknown_name(kind: str, value: object, allowed: Iterable[str]) -> ConfigError:
    """Return the error for an unknown name, with the nearest allowed name."""
    names = sorted(allowed)
    # Do not suggest the rejected name. It may name something of another kind that has
    # the same spelling as an allowed name.
    near = difflib.get_close_matches(str(value), names, n=2)
    near = [repr(name) for name in near if name != value]
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    also = _ALSO_ALLOWED.get(kind, "")
    return ConfigError(
        f"unknown {kind} {value!r}.{hint} Allowed: {', '.join(names)}{also}.",
        code="unknown-name",
    )
