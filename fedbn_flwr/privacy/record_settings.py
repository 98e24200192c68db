"""The settings of record-level differential privacy."""

from __future__ import annotations

from fedbn_flwr.privacy.settings import Settings, setting

__all__ = ["TWO_NOISES", "RecordDPSettings"]

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
