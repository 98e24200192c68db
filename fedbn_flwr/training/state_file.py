"""Read a saved state from a file.

The formats are ``.safetensors``, NumPy's ``.npz`` and torch's own. Code in the file
does not run.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

# Types of values that many files contain in addition to tensors: command-line options,
# and the best metrics as NumPy numbers.
_SCALARS = [type(np.dtype(kind)) for kind in ("f2", "f4", "f8", "i4", "i8", "?")]
_SCALAR = np.float64(0).__reduce__()[0]
_HARMLESS: list[Any] = [
    Namespace,
    np.dtype,
    *_SCALARS,
    _SCALAR,
    (_SCALAR, "numpy.core.multiarray.scalar"),
]
# Keys of the state in files of training programs that also save the epoch.
_INSIDE = ("state_dict", "model_state_dict", "model")


def load_file(path: Path) -> Any:
    """Return the content of the file, on the CPU.

    Raises:
        pickle.UnpicklingError: the file contains other objects than tensors.
        Exception: the readers may raise any exception for a damaged file.
    """
    if path.suffix == ".safetensors":
        # Import it here, because a reader of torch's own files does not need it.
        from safetensors.torch import load_file

        return load_file(path)
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            return {
                name: torch.from_numpy(np.array(arrays[name])) for name in arrays.files
            }
    # ``weights_only`` runs no code of the file, and refuses all classes except these.
    with torch.serialization.safe_globals(_HARMLESS):
        return torch.load(path, map_location="cpu", weights_only=True)


class Opened(NamedTuple):
    """The tensors of a saved state by name, and their place in the file.

    Attributes:
        entries: the tensors by name; empty if there are several states.
        at: the keys of the mappings around the state, joined by dots; "" if the state
            is the whole file.
        several: the keys of the states if there are several and none has a usual name;
            otherwise ().
        left: the keys of other states that were not opened.
    """

    entries: dict[str, Tensor]
    at: str = ""
    several: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


def tensors_by_name(content: Any) -> dict[str, Tensor]:
    """Return the tensors of a state by name, without other objects."""
    return open_state(content).entries


def open_state(content: Any) -> Opened:
    """Return the tensors of the state in the content of a file.

    The state is the content itself, the value of a usual key such as "state_dict", or
    the only mapping of tensors inside. The search repeats this inside the state.
    """
    steps: list[str] = []
    left: list[str] = []
    while isinstance(content, Mapping):
        inside = [str(key) for key, value in content.items() if _is_state(value)]
        usual = [key for key in _INSIDE if key in inside]
        own = {
            str(key): value
            for key, value in content.items()
            if isinstance(value, Tensor)
        }
        # Numbers such as an epoch or the best accuracy are not part of a state.
        beside = all(value.ndim == 0 for value in own.values())
        if not usual and (len(inside) != 1 or not beside):
            at = ".".join(steps)
            if not beside:
                return Opened(own, at, left=tuple(left))
            several = tuple(inside)
            return Opened({} if inside else own, at, several, tuple(left))
        # Go one level down: by the usual key, or by the only key.
        taken = (usual or inside)[0]
        left += [".".join((*steps, key)) for key in inside if key != taken]
        steps.append(taken)
        content = content[taken]
    return Opened({})


def _is_state(value: Any) -> bool:
    """Return whether a value contains named tensors, at any depth.

    The state of an optimizer does not count; it contains numbers as keys.
    """
    if not isinstance(value, Mapping) or "param_groups" in value:
        return False
    if not all(isinstance(key, str) for key in value):
        return False
    return any(
        isinstance(entry, Tensor) or _is_state(entry) for entry in value.values()
    )
