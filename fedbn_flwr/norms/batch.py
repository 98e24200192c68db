"""``norm=batch``: the model as it is.

Source: Ioffe & Szegedy 2015, Batch Normalization, arXiv:1502.03167.
"""

from __future__ import annotations

from torch import nn

from fedbn_flwr.norms.report import Replacement

__all__ = ["keep_batch"]


def keep_batch(model: nn.Module) -> tuple[nn.Module, tuple[Replacement, ...]]:
    """Return the model unchanged and no row."""
    return model, ()
