"""Names of a package whose modules are imported when they are used (PEP 562): a process pays for what it needs.

::

    if TYPE_CHECKING:
        from package.module import name
    else:
        __getattr__ = imported_when_used(__name__, {"name": "module"})
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["imported_when_used"]


def imported_when_used(package: str, where: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package.

    Args:
        package: its name.
        where: the module of each name, relative to the package.
    """

    def get(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{where[name]}"), name)

    return get
