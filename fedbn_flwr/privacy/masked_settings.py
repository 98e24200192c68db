"""The settings of masked sums, and which others do not fit them."""

from __future__ import annotations

from typing import Literal

from fedbn_flwr.privacy.differential_settings import DPSettings
from fedbn_flwr.privacy.settings import Settings, setting

__all__ = ["MaskSettings", "conflicts", "unused"]


class MaskSettings(Settings):
    """The settings of masked sums."""

    masked_sums: bool = setting(
        False, "secure aggregation: clients mask what they send, and the server sees sums over the clients alone"
    )
    masked_threshold: float = setting(
        0.66,
        "share of a client's neighbourhood that must stay to the end; with it the server removes masks",
        gt=0.5,
        le=1,
    )
    masked_neighbours: int = setting(
        0, "clients with which each client has masks in common (an even number); 0 = all others of the round", ge=0
    )
    masked_range: float = setting(65536.0, "largest size of a masked value; a larger one is an error", gt=0)
    masked_metrics: Literal["withheld", "published"] = setting(
        "withheld", "the clients' metrics, which have no masks: not sent, or sent"
    )


def conflicts(dp: DPSettings) -> list[str]:
    """Return why differential privacy with these settings needs single updates, one line each."""
    if dp.dp != "server":
        return []
    return ["masked-sums=true hides the updates that dp=server clips; with dp=client the clients clip"]


def unused(settings: MaskSettings) -> dict[str, str]:
    """Return the settings that have no effect under the others, by name, each with what it needs."""
    others = set(MaskSettings.model_fields) - {"masked_sums"}
    return {} if settings.masked_sums else dict.fromkeys(others, "it is for masked-sums=true")
