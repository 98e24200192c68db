"""The refusal of BatchNorm with ``momentum=None``.

Such a layer needs the number of batches, but a protection hides this number.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from fedbn_flwr.errors import NormLayerError

CUMULATIVE = "cumulative-average"
"""Code of the error for a layer with ``momentum=None``."""


def refuse_cumulative(model: nn.Module, protection: str) -> None:
    """Refuse layers whose running statistics are averages over all batches so far.

    Such a layer divides by its counter. Under a protection, counters count rounds,
    because a number of batches would reveal the number of a client's examples.

    Args:
        model: the model.
        protection: the config key of the protection.

    Raises:
        NormLayerError: the model has such layers.
    """
    for path, module in model.named_modules():
        if (
            isinstance(module, _NormBase)
            and module.track_running_stats
            and module.momentum is None
        ):
            raise NormLayerError(
                f"{protection}: layer '{path}' has momentum=None, so its running"
                " statistics are averages over all batches. But under"
                f" {protection} no number of batches leaves a client. Give the layer a"
                " momentum, such as 0.1 (bn-momentum).",
                code=CUMULATIVE,
            )
