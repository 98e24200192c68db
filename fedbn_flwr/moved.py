"""Old names of documented modules that have moved. They work with a warning."""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "lab.models.registry": "lab.models.models_by_name",
    "server.runs.run": "server.runs.run_state",
}
"""The new name of each module, by the name that was documented before 0.3."""

_PACKAGE = __name__.rpartition(".")[0]


class OldNames(Loader):
    """Finder of moved modules. Python asks it for modules without a file."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """Return the spec of a moved module, or None."""
        if name.removeprefix(f"{_PACKAGE}.") not in MOVED:
            return None
        return ModuleSpec(name, self)

    def exec_module(self, module: ModuleType) -> None:
        """Replace the old module by the new module, with a warning."""
        old = module.__name__
        new = f"{_PACKAGE}.{MOVED[old.removeprefix(f'{_PACKAGE}.')]}"
        warnings.warn(
            f"{old} has moved. Import from {new}", FutureWarning, stacklevel=2
        )
        sys.modules[old] = importlib.import_module(new)
