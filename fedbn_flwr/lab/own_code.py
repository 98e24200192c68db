"""A user's own code, ``module:function``.

The module is in the working directory or on Python's path.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import os
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from fedbn_flwr.errors import ConfigError, unknown_name

_MODULES: ContextVar[frozenset[str] | None] = ContextVar("modules", default=None)


@contextmanager
def only_code_of(*names: str | None, unless: bool = False) -> Iterator[None]:
    """Refuse to import modules in the block, except those of ``names``.

    Somebody else may have written the settings of a run, which name modules.

    Args:
        names: names ``module:function`` that the user wrote; others are ignored.
        unless: whether the user trusts the settings, so every import is allowed.
    """
    known = {name.partition(":")[0] for name in names if name and is_function(name)}
    token = _MODULES.set(None if unless else frozenset(known))
    try:
        yield
    finally:
        _MODULES.reset(token)


def is_function(name: str, prefixes: Collection[str] = ()) -> bool:
    """Return whether a name has the form ``module:function``.

    A name that begins with one of the prefixes has another meaning.
    """
    module, separator, function = name.partition(":")
    if not separator or module in prefixes:
        return False
    return all(part.isidentifier() for part in (*module.split("."), function))


def own_function(
    kind: str, name: str, prefixes: Collection[str] = ()
) -> Callable[..., Any]:
    """Return the user's function that a name ``module:function`` means.

    Args:
        kind: the purpose of the function: the config key.
        name: ``module:function``.
        prefixes: known words before the colon, for the suggestion in the error.

    Raises:
        ConfigError: the name has another form, the module cannot be imported, or it has
            no such function.
    """
    if not is_function(name, prefixes):
        raise ConfigError(f"{kind}={name!r} must have the form module:function.")
    module = own_module(kind, name, prefixes)
    attribute = name.partition(":")[2]
    function: Callable[..., Any] | None = getattr(module, attribute, None)
    if callable(function):
        return function
    names = []
    for key, value in vars(module).items():
        if callable(value) and not key.startswith("_"):
            names.append(key)
    where = getattr(module, "__file__", None) or module.__name__
    raise unknown_name(f"function of {where}:", attribute, names)


def own_module(kind: str, name: str, prefixes: Collection[str] = ()) -> ModuleType:
    """Return the user's module in a name ``module:function``.

    The arguments are the same as for ``own_function``.

    Raises:
        ConfigError: the module cannot be imported, or ``only_code_of`` refuses it.
    """
    module, allowed = name.partition(":")[0], _MODULES.get()
    if allowed is not None and module not in allowed:
        raise ConfigError(
            f"{kind} {name!r} is code that the settings of the run name. Reading a run"
            " imports no such module. If you trust it, add --trust.",
            code="not-trusted",
        )
    # Try Python's own path first and then add the working directory, so that a file in
    # the working directory hides no installed module.
    for _ in range(2):
        try:
            return importlib.import_module(module)
        except Exception as error:  # the user's code may raise any exception
            # A ModuleNotFoundError may also be about another module that the user's
            # module imports.
            absent = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(
                f"{error.name}."
            )
            if not absent:
                raise ConfigError(
                    f"{kind} {name!r}: importing {module} raised"
                    f" {type(error).__name__}: {error}"
                ) from error
        if os.getcwd() in sys.path:
            break
        sys.path.append(os.getcwd())
        importlib.invalidate_caches()

    # Suggest similar names of modules.
    known = list(prefixes)
    for path in Path.cwd().iterdir():
        if path.suffix == ".py" or path.is_dir():
            known.append(path.stem)
    near = difflib.get_close_matches(module, known, n=2)
    # A folder of exactly this name without Python files is also similar. Do not suggest
    # it.
    if module in near:
        near.remove(module)
    hint = ""
    if near:
        hint = f" Did you mean {near[0] + ':' + name.partition(':')[2]!r}?"
    raise ConfigError(
        f"unknown {kind} {name!r}: module {module!r} is neither in the working"
        f" directory {os.getcwd()} nor on Python's path.{hint} Start the command in the"
        " module's folder, or set PYTHONPATH to it. For `flwr run`, put the"
        f" module into the folder apps and write 'apps.{module}:...'."
    )


# The hash is cached, because a change of the file does not change the module that is
# already imported.
@lru_cache(maxsize=8)
def sha256_of_code(module: ModuleType) -> str:
    """Return the SHA-256 of a module's file, without the files that it imports.

    The result is "" if the module has no file: code in a console, in a notebook, or
    from standard input.
    """
    file = getattr(module, "__file__", None)
    if not file or not Path(file).is_file():
        return ""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()
