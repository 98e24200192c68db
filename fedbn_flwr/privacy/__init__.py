"""Differential privacy and masked sums that work with BatchNorm.

In reading order:

- ``protection_settings``: the config keys of both, and the conflicts between them.
- ``wrapper``: ``DPWrapper``, the entry point for a strategy in a program.
- ``differential``: the noisy average of clipped updates, with its paper and its law.
- ``coordinates``: the units in which updates are clipped and get noise or masks.
- ``noise``: Gaussian noise from the operating system, and ChaCha20's stream.
- ``accounting``: the privacy loss epsilon of the releases of a run.
- ``masked_sums``: the protection by masked sums. ``server.methods.check_protections``
  refuses the methods that it does not cover.
- ``masked_round``: the server's code for one round, with three queries and the mean.
- ``masks``: the masks and secrets of a client in one round, with the paper's formula.
- ``ring``: fixed-point numbers modulo 2^64. Sums of masks cancel in them.
- ``counters``: the refusal of BatchNorm with ``momentum=None``, for both protections.

The mods of a client that clips or masks are in ``client``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedbn_flwr.lazy import imported_when_used

if TYPE_CHECKING:
    from fedbn_flwr.privacy.masked_sums import MaskedSums
    from fedbn_flwr.privacy.protection_settings import MaskSettings
    from fedbn_flwr.privacy.wrapper import DPWrapper
else:
    _WHERE = {
        "DPWrapper": "wrapper",
        "MaskSettings": "protection_settings",
        "MaskedSums": "masked_sums",
    }
    __getattr__, __dir__ = imported_when_used(__name__, _WHERE)

__all__ = ["DPWrapper", "MaskSettings", "MaskedSums"]
