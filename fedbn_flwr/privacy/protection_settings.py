"""The settings of the protections, differential privacy and masked sums."""

from __future__ import annotations

import functools
from typing import Literal

from fedbn_flwr.server.methods.params import Settings
from fedbn_flwr.server.methods.params import setting as _setting

__all__ = [
    "DPSettings",
    "MaskSettings",
    "dp_conflicts",
    "mask_conflicts",
    "unused_dp",
]

setting = functools.partial(_setting, group="privacy")
_WITH_DP = {"dp": ("server", "client")}


class DPSettings(Settings):
    """The settings of client-level differential privacy."""

    dp: Literal["off", "server", "client"] = setting(
        "off",
        "client-level differential privacy of the global models: the side that clips"
        " the updates. The server always adds the noise",
    )
    dp_noise_multiplier: float = setting(
        0.0,
        "z: the noise in the sum of updates has deviation z C. With 0 updates are only"
        " clipped, which guarantees nothing",
        only_if=_WITH_DP,
        ge=0,
    )
    dp_clipping: Literal["fixed", "adaptive"] = setting(
        "fixed",
        "choice of C: fixed, or adaptive to follow a quantile of the updates' norms"
        " (needs dp=server)",
        only_if=_WITH_DP,
    )
    dp_clipping_norm: float = setting(
        1.0,
        "C: largest norm of a client's update; if C adapts, its value in round 1",
        only_if=_WITH_DP,
        gt=0,
    )
    dp_delta: float = setting(
        1e-5,
        "delta for which epsilon is stated; well below 1 / number of clients",
        only_if=_WITH_DP,
        gt=0,
        lt=1,
    )
    dp_target_epsilon: float = setting(
        0.0,
        "choose the noise multiplier so that all R rounds together cost this epsilon."
        " With 0, dp-noise-multiplier is used",
        only_if=_WITH_DP,
        ge=0,
    )


def dp_conflicts(settings: DPSettings) -> list[str]:
    """Return the conflicts between these settings, in one line each."""
    lines = []
    if settings.dp_target_epsilon and settings.dp_noise_multiplier:
        lines.append(
            f"dp-target-epsilon={settings.dp_target_epsilon} chooses the noise. Leave "
            f"dp-noise-multiplier={settings.dp_noise_multiplier} out"
        )
    if settings.dp == "client" and settings.dp_clipping == "adaptive":
        lines.append(
            "dp-clipping=adaptive needs dp=server. With dp=client, all updates arrive"
            " with norm C, up to rounding, and the server cannot count the updates that"
            " were longer before"
        )
    return lines


def unused_dp(settings: DPSettings) -> dict[str, str]:
    """Return the settings without effect, each with the missing condition."""
    if settings.dp == "off":
        return dict.fromkeys(
            set(DPSettings.model_fields) - {"dp"}, "it is for dp=server and dp=client"
        )
    if settings.dp_noise_multiplier or settings.dp_target_epsilon:
        return {}
    return {"dp_delta": "without noise there is no epsilon"}


class MaskSettings(Settings):
    """The settings of masked sums."""

    masked_sums: bool = setting(
        False,
        "secure aggregation: clients mask what they send, and the server sees only sums"
        " over the clients",
    )
    masked_threshold: float = setting(
        0.66,
        "share of a round's clients that must stay to the end, so that the server can"
        " remove the masks",
        only_if={"masked-sums": (True,)},
        gt=0.5,
        le=1,
    )


def mask_conflicts(dp: DPSettings) -> list[str]:
    """Return the reason why differential privacy needs single updates, if it does."""
    if dp.dp != "server":
        return []
    return [
        "masked-sums=true hides the updates that dp=server clips. Use dp=client, so"
        " that the clients clip"
    ]
