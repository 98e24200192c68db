"""Names of a package whose modules are imported when they are used (PEP 562).

A process then imports only the modules that it needs::

    if TYPE_CHECKING:
        from package.module import name
    else:
        __getattr__, __dir__ = imported_when_used(__name__, {"name": "module"})
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def imported_when_used(
    package: str, where: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the functions ``__getattr__`` and ``__dir__`` for a package.

    Args:
        package: name of the package.
        where: the module of each name, relative to the package.
    """

    def get(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{where[name]}"), name)

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *where})

    return get, names
