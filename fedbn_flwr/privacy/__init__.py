"""Privacy that BatchNorm survives: differential privacy, masked sums, and what they are worth."""

from __future__ import annotations

from fedbn_flwr.privacy.masked_sums import MaskedSums, MaskSettings
from fedbn_flwr.privacy.record_level import DPSGD, RecordLevel
from fedbn_flwr.privacy.record_server import RecordLevelDP
from fedbn_flwr.privacy.wrapper import DPWrapper

__all__ = ["DPSGD", "DPWrapper", "MaskSettings", "MaskedSums", "RecordLevel", "RecordLevelDP"]
