"""The settings of a method as the arguments of its strategy's constructor."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fedbn_flwr.server.methods.params import Params, is_list

__all__ = ["bound", "signature_of", "warn_of_ignored"]

logger = logging.getLogger("flwr")


def signature_of(
    flowers: type[Any], settings: type[Any], like: type[Any], ignored: Mapping[str, str]
) -> inspect.Signature:
    """Return the arguments of Flower and of the settings, with their defaults.

    Args:
        flowers: Flower's FedAvg.
        settings: the class of the settings.
        like: Flower's class for the method. Its arguments have the same place here;
            those that are not settings have Flower's default.
        ignored: the arguments of Flower's strategies that have no effect.
    """
    fields = settings.model_fields
    named = dict(inspect.signature(flowers).parameters)
    for name, argument in inspect.signature(like).parameters.items():
        if name in fields or name in ignored:
            named.setdefault(name, argument)
    # The settings of every method come last.
    for name in sorted(fields, key=Params.model_fields.__contains__):
        own = named.get(name) or inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
        field = fields[name]
        annotation = str | Sequence[str] if is_list(field) else field.annotation
        named[name] = own.replace(default=field.default, annotation=annotation)
    return inspect.Signature([*named.values()])


def warn_of_ignored(
    strategy: str,
    ignored: Mapping[str, str],
    shown: inspect.Signature,
    given: dict[str, Any],
) -> None:
    """Remove arguments of Flower's strategies that have no effect, with a warning."""
    for name in ignored.keys() & given.keys():
        value = given.pop(name)
        # Ignore Flower's default in the signature, because the user did not set it.
        known = shown.parameters.get(name)
        if value is None or (known is not None and value == known.default):
            continue
        logger.warning(
            "strategy %r: %s=%s has no effect, as in Flower: %s. Leave %s out.",
            strategy,
            name,
            value,
            ignored[name],
            name,
        )


def bound(
    called: str,
    shown: inspect.Signature,
    flowers: Sequence[Any],
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the value of each argument, given by place or by name.

    Raises:
        TypeError: there are too many arguments, or one is given twice. The error begins
            with ``called``.
    """
    try:
        found = shown.bind(*flowers, **given)
    except TypeError as error:
        raise TypeError(f"{called}: {error}") from None
    found.apply_defaults()
    return found.arguments
