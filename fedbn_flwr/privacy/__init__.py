"""Privacy that BatchNorm survives: differential privacy, masked sums, and what they are
worth.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedbn_flwr.lazy import imported_when_used

if TYPE_CHECKING:
    from fedbn_flwr.privacy.masked_sums import MaskedSums
    from fedbn_flwr.privacy.settings import MaskSettings
    from fedbn_flwr.privacy.wrapper import DPWrapper
else:
    _WHERE = {
        "DPWrapper": "wrapper",
        "MaskSettings": "settings",
        "MaskedSums": "masked_sums",
    }
    __getattr__, __dir__ = imported_when_used(__name__, _WHERE)

__all__ = ["DPWrapper", "MaskSettings", "MaskedSums"]
