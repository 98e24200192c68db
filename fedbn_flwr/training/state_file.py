"""Reading a file of a saved state: ``.safetensors``, ``.npz`` of NumPy, or torch's own; no code in the file is run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["load_file", "tensors_by_name"]

_INSIDE = ("state_dict", "model_state_dict", "model")  # of what training programs save beside the epoch


def load_file(path: Path) -> Any:
    """Return what the file holds, on the CPU.

    Raises:
        pickle.UnpicklingError: it holds more than tensors.
        Exception: a damaged file may raise anything in these readers.
    """
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            return {name: torch.from_numpy(np.array(arrays[name])) for name in arrays.files}
    return torch.load(path, map_location="cpu", weights_only=True)


def tensors_by_name(content: Any) -> dict[str, Tensor]:
    """Return the tensors of a state, also of one beside other things in a mapping; none if it has no names."""
    while isinstance(content, Mapping) and (key := next((k for k in _INSIDE if _is_state(content.get(k))), None)):
        content = content[key]
    return {str(k): v for k, v in content.items() if isinstance(v, Tensor)} if isinstance(content, Mapping) else {}


def _is_state(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(entry, (Tensor, Mapping)) for entry in value.values())
