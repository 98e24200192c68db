"""Strategies with masked sums."""

from __future__ import annotations

from typing import Any

from fedbn_flwr.privacy.masked_sums import MaskedSums, MaskSettings


def masked(strategy: Any, **settings: Any) -> Any:
    """Return the strategy under masked sums with settings such as the threshold."""
    strategy.protect(MaskedSums(MaskSettings(masked_sums=True, **settings)))
    return strategy
