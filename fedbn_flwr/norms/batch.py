"""``norm=batch``: the model is unchanged.

Source: Ioffe & Szegedy 2015, Batch Normalization, arXiv:1502.03167.
"""

from __future__ import annotations

from torch import nn

from fedbn_flwr.norms.report import Replacement

__all__ = ["keep_batch"]


def keep_batch(model: nn.Module) -> tuple[nn.Module, tuple[Replacement, ...]]:
    """Return the unchanged model and no rows."""
    return model, ()
