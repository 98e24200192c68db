"""``module:function``: a user's own model, from the working directory or Python's path.

The function takes any of ``num_classes`` (the number of outputs), ``channels`` and ``size`` (the images' height), or
``num_classes`` and ``features`` for rows of numbers, ``num_classes``, ``channels`` and ``length`` for signals, or
``num_classes``, ``channels``, ``depth``, ``height`` and ``width`` for volumes, by these names; its other parameters
need defaults. A class of
``nn.Module`` is such a function, too. What it draws at random is seeded, as in every other model: with torch,
``np.random`` or ``random``.
"""

from __future__ import annotations

import inspect
from functools import partial
from types import ModuleType

from torch import nn
from torch.nn.parameter import is_lazy

from fedbn_flwr.errors import ConfigError, FedBNError
from fedbn_flwr.lab import own_code
from fedbn_flwr.lab.models.info import ModelInfo

__all__ = ["OWN", "code_changed", "code_sha256", "is_own", "own_info", "own_module"]

OWN = "<module>:<function>"
PUBLISHERS = ("torchvision", "torchvision-seg", "timm", "smp")


def is_own(name: str) -> bool:
    """Return whether a model's name has the form ``module:function``; the publishers have names of their own."""
    return own_code.is_function(name, PUBLISHERS)


def own_info(name: str) -> ModelInfo:
    """Return the entry of a user's model; ``build`` and ``rows`` raise ConfigError if the function is of no use."""
    return ModelInfo(
        "your own model, e.g. my_models:small_net; a function of num_classes, channels, size (rows: features; signals: "
        "channels, length; volumes: channels, depth, height, width)",
        "yours",
        partial(_build, name),
        _any_shape,
        per_pixel=None,
        smallest=1,
        rows=partial(_build_of_rows, name),
        signals=partial(_build_of_signals, name),
        volumes=partial(_build_of_volumes, name),
    )


def code_sha256(name: str) -> str:
    """Return the SHA-256 of the file of a user's model; "" for other models, and for a module without a file.

    Files that it imports do not count.

    Raises:
        ConfigError: the module cannot be imported.
    """
    return own_code.sha256_of_code(own_module(name)) if is_own(name) else ""


def code_changed(name: str, sha256: str) -> str:
    """Return a sentence if the file of a user's model is not that of a run, whose ``code_sha256`` is given; else ""."""
    if code_sha256(name) == sha256:
        return ""
    return (
        f"the file of model {name!r} ({own_module(name).__file__}) has changed since the run, so it may be another "
        "model with the same names and shapes. Restore the file of the run."
    )


def _any_shape(channels: int, size: int) -> tuple[int, int]:
    return channels, size


def _build(name: str, num_classes: int, channels: int, size: int) -> nn.Module:
    return _call(name, {"num_classes": num_classes, "channels": channels, "size": size})


def _build_of_rows(name: str, num_classes: int, features: int) -> nn.Module:
    return _call(name, {"num_classes": num_classes, "features": features})


def _build_of_signals(name: str, num_classes: int, channels: int, length: int) -> nn.Module:
    return _call(name, {"num_classes": num_classes, "channels": channels, "length": length})


def _build_of_volumes(name: str, num_classes: int, channels: int, depth: int, height: int, width: int) -> nn.Module:
    sizes = {"channels": channels, "depth": depth, "height": height, "width": width}
    return _call(name, {"num_classes": num_classes, **sizes})


def _call(name: str, known: dict[str, int]) -> nn.Module:
    function = own_code.own_function("model", name, PUBLISHERS)
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if unknown := [parameter for parameter in needed if parameter not in known]:
        raise ConfigError(
            f"model {name!r} needs {', '.join(unknown)}. For these data its function may take {', '.join(known)}, by "
            "these names; give other parameters a default."
        )
    try:
        model = function(**{p.name: known[p.name] for p in named if p.name in known})
    except FedBNError:
        raise
    except Exception as error:  # the user's code
        raise ConfigError(f"model {name!r}: its function raised {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model {name!r}: its function returned a {type(model).__name__}; a torch.nn.Module needed.")
    if lazy := [path for path, entry in (*model.named_parameters(), *model.named_buffers()) if is_lazy(entry)]:
        raise ConfigError(
            f"model {name!r}: {', '.join(lazy)} have no shape yet. Give the layers their sizes (nn.Linear in place of "
            "nn.LazyLinear), or pass a batch through the model in its function."
        )
    return model


def own_module(name: str) -> ModuleType:
    """Return the module of a user's model.

    Raises:
        ConfigError: it cannot be imported.
    """
    return own_code.own_module("model", name, PUBLISHERS)
