"""``module:function``: a user's own code, from the working directory or Python's path."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import os
import sys
from collections.abc import Callable, Collection
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from fedbn_flwr.errors import ConfigError, unknown_name

__all__ = ["is_function", "own_function", "own_module", "sha256_of_code"]


def is_function(name: str, prefixes: Collection[str] = ()) -> bool:
    """Return whether a name has the form ``module:function``; what begins with a prefix
    has another meaning.
    """
    module, separator, function = name.partition(":")
    named = bool(separator) and all(
        part.isidentifier() for part in (*module.split("."), function)
    )
    return named and module not in prefixes


def own_function(
    kind: str, name: str, prefixes: Collection[str] = ()
) -> Callable[..., Any]:
    """Return the function of a name.

    Args:
        kind: what the function is for: the config key.
        name: ``module:function``.
        prefixes: what else may stand before the colon, for the suggestion.

    Raises:
        ConfigError: the module cannot be imported, or has no such function.
    """
    module, attribute = own_module(kind, name, prefixes), name.partition(":")[2]
    function: Callable[..., Any] | None = getattr(module, attribute, None)
    if not callable(function):
        names = [
            key
            for key, value in vars(module).items()
            if callable(value) and not key.startswith("_")
        ]
        raise unknown_name(
            f"function of {getattr(module, '__file__', None) or module.__name__}:",
            attribute,
            names,
        )
    return function


def own_module(kind: str, name: str, prefixes: Collection[str] = ()) -> ModuleType:
    """Return the module of a name; the arguments are those of ``own_function``.

    Raises:
        ConfigError: it cannot be imported.
    """
    module = name.partition(":")[0]
    # the working directory comes after Python's own path, so that it hides nothing
    for _ in range(2):
        try:
            return importlib.import_module(module)
        except Exception as error:  # the user's code
            absent = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(
                f"{error.name}."
            )
            if not absent:  # also where a module that this one imports is absent
                raise ConfigError(
                    f"{kind} {name!r}: importing {module} raised"
                    f" {type(error).__name__}: {error}"
                ) from error
        if os.getcwd() in sys.path:
            break
        sys.path.append(os.getcwd())
        importlib.invalidate_caches()
    here = [
        path.stem
        for path in Path.cwd().iterdir()
        if path.suffix == ".py" or path.is_dir()
    ]
    near = [
        other
        for other in difflib.get_close_matches(module, [*here, *prefixes], n=2)
        if other != module
    ]
    hint = f" Did you mean {near[0] + ':' + name.partition(':')[2]!r}?" if near else ""
    raise ConfigError(
        f"unknown {kind} {name!r}: there is no module {module!r} in the working"
        f" directory {os.getcwd()} or on Python's path.{hint} Under `flwr run` it"
        f" belongs in the app's bundle: here in apps, as 'apps.{module}:...'."
    )


# a file that changes during a run does not change the module that runs
@lru_cache(maxsize=8)
def sha256_of_code(module: ModuleType) -> str:
    """Return the SHA-256 of a module's file; "" without one. Files that it imports do
    not count.
    """
    # none of a console or a notebook; that of standard input is no file
    file = getattr(module, "__file__", None)
    return (
        hashlib.sha256(Path(file).read_bytes()).hexdigest()
        if file and Path(file).is_file()
        else ""
    )
