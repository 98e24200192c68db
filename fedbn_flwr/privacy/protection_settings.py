"""The settings of differential privacy."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from fedbn_flwr.problems import Known, Problem, found_problems, raise_or_warn
from fedbn_flwr.server.methods.params import Settings
from fedbn_flwr.server.methods.params import setting as _setting

setting = functools.partial(_setting, group="privacy")
_WITH_DP = {"dp": ("server", "client")}


DP_ROWS = (
    Problem(
        "no-epsilon",
        "without noise there is no epsilon",
        "dp_delta",
        stage="settings",
        effect="no-effect",
        when=lambda own, known: own.dp != "off" and not own.dp_noise_multiplier,
    ),
)


class DPSettings(Settings):
    """The settings of client-level differential privacy."""

    checks: ClassVar[Sequence[Problem]] = DP_ROWS

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        problems = [*self.unused(), *found_problems(self.checks, self, Known())]
        raise_or_warn(self.without_unset(problems))

    dp: Literal["off", "server", "client"] = setting(
        "off",
        "client-level differential privacy of the global models: the side that clips"
        " the updates. The server always adds the noise",
    )
    dp_noise_multiplier: float = setting(
        0.0,
        "z: the noise in the sum of updates has deviation z C. With 0, updates are only"
        " clipped, and no privacy is guaranteed",
        only_if=_WITH_DP,
        ge=0,
    )
    dp_clipping_norm: float = setting(
        1.0,
        "C: largest norm of a client's update",
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
