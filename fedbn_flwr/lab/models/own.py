"""``module:function``: a user's own model, from the working directory or Python's path.

The function takes any of ``num_classes`` (the number of outputs), ``channels`` and ``size`` (the images' height), or
``num_classes`` and ``features`` for rows of numbers, or ``num_classes``, ``channels`` and ``length`` for signals, by
these names; its other parameters need defaults. A class of
``nn.Module`` is such a function, too. What it draws at random is seeded, as in every other model: with torch,
``np.random`` or ``random``.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from fedbn_flwr.errors import ConfigError, FedBNError, unknown_name
from fedbn_flwr.lab.models.info import ModelInfo

__all__ = ["OWN", "code_changed", "code_sha256", "is_own", "own_info", "own_module"]

OWN = "<module>:<function>"
PUBLISHERS = ("torchvision", "torchvision-seg", "timm", "smp")


def is_own(name: str) -> bool:
    """Return whether a model's name has the form ``module:function``; the publishers have names of their own."""
    module, separator, function = name.partition(":")
    named = bool(separator) and all(part.isidentifier() for part in (*module.split("."), function))
    return named and module not in PUBLISHERS


def own_info(name: str) -> ModelInfo:
    """Return the entry of a user's model; ``build`` and ``rows`` raise ConfigError if the function is of no use."""
    return ModelInfo(
        "your own model, e.g. my_models:small_net; a function of num_classes, channels, size (rows: features; signals: "
        "channels, length)",
        "yours",
        partial(_build, name),
        _any_shape,
        per_pixel=None,
        smallest=1,
        rows=partial(_build_of_rows, name),
        signals=partial(_build_of_signals, name),
    )


def code_sha256(name: str) -> str:
    """Return the SHA-256 of the file of a user's model; "" for other models, and for a module without a file.

    Files that it imports do not count.

    Raises:
        ConfigError: the module cannot be imported.
    """
    return _sha256(own_module(name)) if is_own(name) else ""


@lru_cache(maxsize=8)  # a file that changes during a run does not change the module that runs
def _sha256(module: ModuleType) -> str:
    file = getattr(module, "__file__", None)  # none of a console or a notebook; that of standard input is no file
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file and Path(file).is_file() else ""


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


def _call(name: str, known: dict[str, int]) -> nn.Module:
    function = _function(name)
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


def _function(name: str) -> Callable[..., Any]:
    module, attribute = own_module(name), name.partition(":")[2]
    function: Callable[..., Any] | None = getattr(module, attribute, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise unknown_name(f"function of {module.__file__}:", attribute, names)
    return function


def own_module(name: str) -> ModuleType:
    """Return the module of a user's model.

    Raises:
        ConfigError: it cannot be imported.
    """
    module = name.partition(":")[0]
    for _ in range(2):  # the working directory comes after Python's own path, so that it hides nothing
        try:
            return importlib.import_module(module)
        except Exception as error:  # the user's code
            absent = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
            if not absent:  # also where a module that this one imports is absent
                raise ConfigError(
                    f"model {name!r}: importing {module} raised {type(error).__name__}: {error}"
                ) from error
        if os.getcwd() in sys.path:
            break
        sys.path.append(os.getcwd())
        importlib.invalidate_caches()
    here = [path.stem for path in Path.cwd().iterdir() if path.suffix == ".py" or path.is_dir()]
    near = [other for other in difflib.get_close_matches(module, [*here, *PUBLISHERS], n=2) if other != module]
    hint = f" Did you mean {near[0] + ':' + name.partition(':')[2]!r}?" if near else ""
    raise ConfigError(
        f"unknown model {name!r}: there is no module {module!r} in the working directory {os.getcwd()} or on Python's "
        f"path.{hint} Under `flwr run` it belongs in the app's bundle: here in apps, as 'apps.{module}:...'."
    )
