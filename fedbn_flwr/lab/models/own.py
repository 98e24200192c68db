"""A user's own model, ``module:function``.

The module is in the working directory or on Python's path. The function takes any of
``num_classes`` (the number of outputs), ``channels`` and ``size`` (the images' height),
or ``num_classes`` and ``features`` for rows of numbers, ``num_classes``, ``channels``
and ``length`` for signals, or ``num_classes``, ``channels``, ``depth``, ``height`` and
``width`` for volumes, by these names; its other parameters need defaults. A class of
``nn.Module`` is also such a function. Its random draws with torch, ``np.random`` or
``random`` are seeded like the draws of every other model.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from types import ModuleType

from torch import nn
from torch.nn.parameter import is_lazy

from fedbn_flwr.errors import ConfigError, FedBNError
from fedbn_flwr.lab import own_code
from fedbn_flwr.lab.models.info import SIZES, ModelInfo, at_least

OWN = "<module>:<function>"
PUBLISHERS = ("torchvision",)


def is_own(name: str) -> bool:
    """Return whether a model's name has the form ``module:function``."""
    return own_code.is_function(name, PUBLISHERS)


def own_info(name: str) -> ModelInfo:
    """Return the entry of a user's model."""
    # The user's function is called only when a model is built, so its faults and its
    # inputs are unknown here. The entry therefore accepts every kind of input.
    return ModelInfo(
        "your own model, e.g. my_models:small_net; a function of num_classes, channels,"
        " size (rows: features; signals: channels, length; volumes: channels, depth,"
        " height, width)",
        "yours",
        shape=at_least(1),
        per_pixel=True,
        smallest=1,
        **{kind: partial(_call, name, sizes) for kind, sizes in SIZES.items()},
    )


def code_sha256(name: str) -> str:
    """Return the SHA-256 of the file of a user's model or loop, or "" for other names.

    Files that this file imports do not change the digest. The result is also "" if the
    module has no file.

    Raises:
        ConfigError: the module cannot be imported.
    """
    return own_code.sha256_of_code(own_module(name)) if is_own(name) else ""


def code_changed(name: str, sha256: str, kind: str = "model") -> str:
    """Return a sentence if the file of a user's model has changed since a run, or "".

    Args:
        name: the name of the model or loop.
        sha256: the ``code_sha256`` of the run.
        kind: "model" or "loop".
    """
    if code_sha256(name) == sha256:
        return ""
    return (
        f"the file of {kind} {name!r} ({own_module(name).__file__}) has changed since"
        f" the run, so it may be another {kind}, even with the same names and shapes."
        " Restore the file of the run."
    )


def _call(name: str, sizes: Sequence[str], *values: int) -> nn.Module:
    """Call the user's function and return its model.

    Args:
        name: the model's name.
        sizes: names of the sizes of an example, such as "channels".
        values: the number of classes, and a value for each of ``sizes``.

    Raises:
        ConfigError: the function fails, or returns no model with fixed shapes.
    """
    function = own_code.own_function("model", name, PUBLISHERS)
    known = dict(zip(("num_classes", *sizes), values, strict=True))
    # Pass only the arguments that the function has. For a class, these are the
    # arguments of its __init__.
    try:
        taken = inspect.signature(function).parameters
        model = function(**{key: value for key, value in known.items() if key in taken})
    except FedBNError:
        raise
    # The user's code may raise anything.
    except Exception as error:
        raise ConfigError(
            f"model {name!r}: its function raised {type(error).__name__}: {error}. With"
            f" these data, it may take {', '.join(known)}, by these names. Give other"
            " parameters a default."
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model {name!r}: its function returned a {type(model).__name__}. Return a"
            " torch.nn.Module."
        )
    # Refuse lazy layers, because weights without a shape can neither be averaged nor be
    # drawn from the run's seed.
    if any(is_lazy(entry) for entry in (*model.parameters(), *model.buffers())):
        raise ConfigError(
            f"model {name!r}: some layers have no shape yet. Give them their sizes"
            " (nn.Linear instead of nn.LazyLinear), or pass a batch through the model"
            " in its function."
        )
    return model


def own_module(name: str) -> ModuleType:
    """Return the module of a user's model.

    Raises:
        ConfigError: the module cannot be imported.
    """
    return own_code.own_module("model", name, PUBLISHERS)
