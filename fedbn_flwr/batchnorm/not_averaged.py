"""Entries of torch's layers whose average is no valid value.

The vectors of spectral norm have length 1, but their average is shorter. Therefore the
server repeats the power iteration with the new weight, and the largest singular value
of the layer is 1 again, up to 1e-4. The diagonal of an orthogonal layer has the values
1 and -1. Torch converts them to integers, so an average that is rounded to 0.9999999
would become 0. The values of a pruning mask are 0 and 1; if masks differ, their average
is only logged.

The names are those of ``torch.nn.utils``: ``weight_u`` with ``weight_orig``, or
``parametrizations.weight.0._u`` with ``parametrizations.weight.original``, and
``parametrizations.weight.0.base`` of an orthogonal layer.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from fedbn_flwr.training.run_memory import first_time

logger = logging.getLogger("flwr")

_ITERATIONS = 20
# Vectors that all clients have in common keep their bits.
_ROUNDING = 1e-5


def repair(model: dict[str, Any]) -> None:
    """Repair the vectors and signs of such layers in an averaged model, in place.

    A pruning mask with values other than 0 and 1 is logged.
    """
    for name in [*model]:
        start = name.removesuffix("_u")
        weight = model.get(f"{start}_orig", model.get(f"{start[:-2]}original"))
        is_vector = name.endswith("_u") and f"{start}_v" in model
        if is_vector and weight is not None and not _is_unit(model[name]):
            pair = _iterated(weight, model[name], model[f"{start}_v"])
            model[name], model[f"{start}_v"] = pair
        if name.endswith(".original") and f"{name[:-8]}0.base" in model:
            weight = model[name] = model[name].copy()
            at = np.arange(min(weight.shape[-2:]))
            weight[..., at, at] = _rounded(weight[..., at, at])
        is_mask = name.endswith("_mask") and f"{name[:-5]}_orig" in model
        if is_mask:
            model[name] = _rounded(model[name])
        if is_mask and not np.isin(model[name], (0, 1)).all() and first_time(name):
            logger.warning(
                "entry '%s' is a mask of pruning, and the clients have different masks:"
                " their average is neither 0 nor 1. Prune at the server, or keep the"
                " masks at the clients with personal='*_mask'.",
                name,
            )


def _is_unit(vector: Any) -> bool:
    return bool(abs(np.linalg.norm(vector) - 1) < _ROUNDING)


def _rounded(values: Any) -> Any:
    """Return values of which an average of equal integers is the integer again."""
    whole = np.rint(values)
    near = np.where(abs(values - whole) < _ROUNDING, whole, values)
    return near.astype(values.dtype)


def _iterated(weight: Any, u: Any, v: Any) -> tuple[Any, Any]:
    """Return the singular vectors of a weight, starting with an average."""
    first, second = u.astype(np.float64), v.astype(np.float64)
    # The rows of the matrix are one axis of the weight, not always the first.
    matrices = [
        matrix
        for axis in range(weight.ndim)
        if (matrix := _rows(weight, axis)).shape == (u.size, v.size)
    ]
    if not matrices:
        return u, v
    matrix = max(matrices, key=lambda one: abs(first @ one @ second))
    for _ in range(_ITERATIONS):
        second = _unit(matrix.T @ first)
        first = _unit(matrix @ second)
    return first.astype(u.dtype), second.astype(v.dtype)


def _rows(weight: Any, axis: int) -> Any:
    moved = np.moveaxis(weight.astype(np.float64), axis, 0)
    return moved.reshape(len(moved), -1)


def _unit(vector: Any) -> Any:
    return vector / max(np.linalg.norm(vector), 1e-12)
