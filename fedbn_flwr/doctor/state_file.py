"""The saved state of a model to diagnose: ``.safetensors``, ``.pt`` and ``.pth`` of torch, ``.npz`` of NumPy.

Flower's own projects save a state dict (``arrays.to_torch_state_dict()``), or a list of arrays without names
(``np.savez(path, *parameters_to_ndarrays(parameters))``). A list gets the names of a model, if one is given.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from fedbn_flwr.errors import StateError
from fedbn_flwr.training.state_file import load_file, tensors_by_name
from fedbn_flwr.training.wrappers import wrapper_prefix

__all__ = ["STATE_FILES", "named", "read_state_file"]

STATE_FILES = (".safetensors", ".pt", ".pth", ".npz")
_NAMELESS = re.compile(r"(arr_)?\d+")


def read_state_file(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name; a list of arrays has the names "0", "1", ...

    Raises:
        StateError: the file is absent, of another format, or holds more than tensors.
    """
    if path.suffix not in STATE_FILES or not path.is_file():
        raise StateError(f"{path} is no file of a saved state. Give one that ends in {', '.join(STATE_FILES)}.")
    try:
        content = load_file(path)
    except Exception as error:  # a damaged file may raise anything in these readers
        raise StateError(
            f"{path} cannot be read: {type(error).__name__}: {error}. Save the weights alone: "
            "torch.save(model.state_dict(), path)."
        ) from error
    if isinstance(content, (list, tuple)):
        content = {str(index): torch.as_tensor(value) for index, value in enumerate(content)}
    entries = tensors_by_name(content)
    if not entries:
        raise StateError(f"{path} holds no tensors, as torch.save(model.state_dict(), path) does.")
    if all(_NAMELESS.fullmatch(name) for name in entries):
        return {str(index): value for index, value in enumerate(entries.values())}
    return entries


def named(state: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state with the names of a model's, where it is a list of arrays in the model's order.

    Raises:
        StateError: entries are missing, unknown, or of another shape than the model's.
    """
    nameless = all(name.isdecimal() for name in state)
    if nameless and len(state) == len(like):
        state = dict(zip(like, state.values(), strict=True))
    prefix = wrapper_prefix([*state], [*like])
    state = {name.removeprefix(prefix): value for name, value in state.items()}
    missing, unknown = sorted({*like} - {*state}), sorted({*state} - {*like})
    shapes = [name for name in like if name in state and state[name].shape != like[name].shape]
    if nameless and len(state) != len(like):
        raise StateError(
            f"the saved state is a list of {len(state)} arrays without names, and the model has {len(like)} entries: "
            "nothing tells which are which. Save it with names: torch.save(model.state_dict(), path)."
        )
    if missing or unknown or shapes:
        raise StateError(
            f"the saved state does not fit the model: {len(missing)} entries are missing, {len(unknown)} unknown, "
            f"{len(shapes)} of another shape (first: {(missing + unknown + shapes)[0]!r}). Name the model that it was "
            "saved from."
        )
    return dict(state)
