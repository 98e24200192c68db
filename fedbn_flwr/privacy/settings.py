"""The settings of the protections: differential privacy of clients and of records, and masked sums."""

from __future__ import annotations

import functools
from typing import Literal

from fedbn_flwr.privacy.accounting import Neighbours
from fedbn_flwr.server.params import Settings
from fedbn_flwr.server.params import setting as _setting

__all__ = [
    "TWO_NOISES",
    "DPSettings",
    "MaskSettings",
    "RecordDPSettings",
    "dp_conflicts",
    "mask_conflicts",
    "unused_dp",
    "unused_masks",
]

setting = functools.partial(_setting, group="privacy")


class DPSettings(Settings):
    """The settings of client-level differential privacy."""

    dp: Literal["off", "server", "client"] = setting(
        "off",
        "client-level differential privacy of the global models: who clips the updates (the server adds the noise); "
        "`record` is short for record-dp=true",
    )
    dp_noise_multiplier: float = setting(
        0.0, "z: the noise in the sum of updates has deviation z C; 0 = clipping alone, which guarantees nothing", ge=0
    )
    dp_clipping: Literal["fixed", "adaptive"] = setting(
        "fixed", "adaptive = with dp=server C follows a quantile of the updates' norms"
    )
    dp_clipping_norm: float = setting(
        1.0, "C: largest norm of a client's update; if C adapts, its value in round 1", gt=0
    )
    dp_clipping_quantile: float = setting(
        0.5, "gamma: C adapts until this share of the updates is not clipped", gt=0, lt=1
    )
    dp_clipping_rate: float = setting(0.2, "eta: how fast C adapts", gt=0)
    dp_statistics_scale: float = setting(
        0.1,
        "weight s of BN's running statistics in the norm; a larger one has less noise in them, more elsewhere",
        gt=0,
    )
    dp_delta: float = setting(
        1e-5,
        "delta for which epsilon is stated; well below 1 / number of clients, with record-dp well below 1 / number of "
        "examples of the largest client",
        gt=0,
        lt=1,
    )
    dp_neighbours: Neighbours = setting(
        "zero-out",
        "what epsilon hides: whether a client sends its update or nothing, or (replace-one) which data it has",
    )
    dp_sampling: Literal["known", "secret"] = setting(
        "known",
        "known = clients are drawn with the seed, and epsilon counts each as if it took part in every round; secret = "
        "they are drawn anew in every run and withheld, and epsilon is smaller for those who see the models alone",
    )
    dp_target_epsilon: float = setting(
        0.0, "choose the noise multiplier so that R rounds cost this epsilon; 0 = dp-noise-multiplier", ge=0
    )
    dp_max_epsilon: float = setting(0.0, "the run ends before a round that would cost more in total; 0 = none", ge=0)
    dp_metrics: Literal["withheld", "published"] = setting(
        "withheld", "the clients' metrics, which epsilon does not cover: left out of all outputs, or not"
    )


def dp_conflicts(settings: DPSettings) -> list[str]:
    """Return why these settings cannot be used together, one line each."""
    lines = []
    if settings.dp_target_epsilon and settings.dp_noise_multiplier:
        lines.append(
            f"dp-target-epsilon={settings.dp_target_epsilon} chooses the noise; leave "
            f"dp-noise-multiplier={settings.dp_noise_multiplier} out"
        )
    if settings.dp_max_epsilon and not (settings.dp_noise_multiplier or settings.dp_target_epsilon):
        lines.append(
            f"dp-max-epsilon={settings.dp_max_epsilon} needs noise: without it the first round already costs more"
        )
    if settings.dp_max_epsilon and settings.dp_max_epsilon < settings.dp_target_epsilon:
        lines.append(
            f"dp-max-epsilon={settings.dp_max_epsilon} is below dp-target-epsilon={settings.dp_target_epsilon}"
        )
    if settings.dp == "client" and settings.dp_clipping == "adaptive":
        lines.append(
            "dp-clipping=adaptive needs dp=server: a client that clips sends an "
            "update of norm C, up to rounding, and the server cannot count those that were longer"
        )
    if settings.dp_sampling == "secret" and settings.dp_neighbours != "replace-one":
        lines.append("dp-sampling=secret needs dp-neighbours=replace-one, for which its benefit is known")
    if settings.dp_sampling == "secret" and settings.dp_metrics == "published":
        lines.append("dp-sampling=secret with dp-metrics=published: the metrics would tell who was drawn")
    return lines


def unused_dp(settings: DPSettings) -> dict[str, str]:
    """Return the settings that have no effect under the others, by name, each with what it needs."""
    if settings.dp == "off":
        return dict.fromkeys(set(DPSettings.model_fields) - {"dp"}, "it is for dp=server and dp=client")
    without_effect: dict[str, str] = {}
    if settings.dp_clipping == "fixed":
        without_effect |= dict.fromkeys(("dp_clipping_quantile", "dp_clipping_rate"), "it is for dp-clipping=adaptive")
    if not (settings.dp_noise_multiplier or settings.dp_target_epsilon):
        without_effect |= dict.fromkeys(("dp_delta", "dp_neighbours"), "without noise there is no epsilon")
    return without_effect


TWO_NOISES = "chooses one noise, and there are two, before BN is frozen and after it: set both noise multipliers"


class RecordDPSettings(Settings):
    """The settings of record-level differential privacy."""

    record_dp: bool = setting(
        False,
        "record-level differential privacy: clients train with DP-SGD, so that what they send hides each training "
        "example. Needs local-steps, and no BatchNorm in train mode",
    )
    record_dp_target_epsilon: float = setting(
        0.0,
        "choose the noise multiplier so that R rounds cost an example of the smallest client this epsilon; "
        "0 = record-dp-noise-multiplier",
        ge=0,
    )
    record_dp_noise_multiplier: float = setting(
        0.0, "z: the noise in a step's sum of gradients has deviation z C; 0 = clipping alone, no guarantee", ge=0
    )
    record_dp_clipping_norm: float = setting(1.0, "C: largest norm of the gradient of one example", gt=0)


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


def mask_conflicts(dp: DPSettings) -> list[str]:
    """Return why differential privacy with these settings needs single updates, one line each."""
    if dp.dp != "server":
        return []
    return ["masked-sums=true hides the updates that dp=server clips; with dp=client the clients clip"]


def unused_masks(settings: MaskSettings) -> dict[str, str]:
    """Return the settings that have no effect under the others, by name, each with what it needs."""
    others = set(MaskSettings.model_fields) - {"masked_sums"}
    return {} if settings.masked_sums else dict.fromkeys(others, "it is for masked-sums=true")
