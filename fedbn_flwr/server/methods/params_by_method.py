"""The settings of the methods, in a class for each file of ``strategies/``.

They are separate from the algorithms because a config is checked without torch, whose
import takes seconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, field_validator

from fedbn_flwr.server.methods.params import Params, setting


class FedProxParams(Params):
    """Parameters of FedProx."""

    proximal_mu: float = setting(
        0.0, "mu >= 0 of the proximal term", in_config=0.01, ge=0
    )


class DittoParams(FedProxParams):
    """Parameters of Ditto. Flower has no Ditto."""

    proximal_mu: float = setting(0.01, "mu >= 0 of the proximal term", ge=0)


class FedBSParams(FedProxParams):
    """Parameters of FedBS."""

    proximal_mu: float = setting(0.01, "mu >= 0 of the proximal term", ge=0)
    fedbs_eps: float = setting(
        0.1, "eps: losses agree if their standard deviation is at most this", ge=0
    )
    fedbs_rounds: int = setting(
        5, "r: consecutive rounds in which the losses agree before phase 2", ge=1
    )
    loss_key: str = setting(
        "train-loss", "the metric in the clients' replies that is F_k", group=""
    )


class FedWonParams(Params):
    """Parameters of FedWon."""

    agc: float = setting(
        0.1,
        "lambda of adaptive gradient clipping in every step; 0 disables it",
        "local training",
        ge=0,
    )


# --- a personal head ------------------------------------------------------------------
class FedRepParams(Params):
    """Parameters of FedRep. Without ``personal`` the head is the last layer."""

    head_steps: int = setting(
        1, "tau_h: the first local steps of a round, which train only the head", ge=0
    )

    @field_validator("personal")
    @classmethod
    def _head(cls, personal: str) -> str:
        return personal or "last-layer"


# --- the server's step ----------------------------------------------------------------
_RATE = "the server's learning rate (eta_g)"


class FedAvgMParams(Params):
    """Parameters of FedAvgM."""

    server_learning_rate: float = setting(1.0, _RATE, gt=0)
    server_momentum: float = setting(
        0.0, "beta, the server's momentum", in_config=0.9, ge=0, lt=1
    )


class FedAdagradParams(Params):
    """Parameters of FedAdagrad. ``eta`` is Flower's name for the learning rate."""

    eta: float = setting(0.1, _RATE, key="server-learning-rate", gt=0)
    tau: float = setting(1e-3, "tau, the degree of adaptivity", gt=0)


class AdaptiveParams(FedAdagradParams):
    """Parameters of FedAdam."""

    beta_1: float = setting(0.9, "beta_1, decay of the first moment", ge=0, lt=1)
    beta_2: float = setting(0.99, "beta_2, decay of the second moment", ge=0, lt=1)


class FedYogiParams(AdaptiveParams):
    """Parameters of FedYogi, as for FedAdam but with Flower's own default of eta."""

    eta: float = setting(0.01, _RATE, key="server-learning-rate", gt=0)


class ScaffoldParams(Params):
    """Parameters of SCAFFOLD."""

    server_learning_rate: float = setting(1.0, _RATE, gt=0)


class BNScaffoldParams(ScaffoldParams):
    """Parameters of BN-SCAFFOLD."""

    variance_floor: float = setting(
        0.1,
        "rho: a corrected variance is at least this share of the clients' common"
        " variance; the metric variance-floor-share reports how often it applies",
        group="",
        gt=0,
        le=1,
    )


# --- frozen statistics ----------------------------------------------------------------
At = int | float | str  # a round, a fraction of all rounds, or "auto"


def _check_at(at: At) -> At:
    """Return ``at`` as a round >= 0 (int), a fraction in [0, 1] (float) or "auto".

    Raises:
        ValueError: the value is none of these.
    """
    # The type decides: 1 (int) is a round, and 1.0 (float) means all rounds.
    if isinstance(at, str) and at != "auto":
        raise ValueError(
            f"{at!r} is not a round (int), a fraction of the rounds (float in [0, 1])"
            " or 'auto'"
        )
    if isinstance(at, float) and not 0 <= at <= 1:
        raise ValueError(f"{at} is not a fraction in [0, 1]; for a round write an int")
    if isinstance(at, int) and at < 0:
        raise ValueError(
            f"{at} is not a round; the first is 1, and 0 freezes from the start"
        )
    return at


_AUTO = {"freeze-at": ("auto",), "fedtan-rounds": ("auto",)}


class WindowParams(Params):
    """Parameters of the window rule for an automatic round."""

    freeze_window: int = setting(
        100,
        "window W of an automatic round, in rounds; must be below R",
        only_if=_AUTO,
        ge=2,
    )
    freeze_tau: float = setting(
        2e-3,
        "threshold tau of an automatic round: the variance of delta",
        only_if=_AUTO,
        gt=0,
    )


class FixBNParams(WindowParams):
    """Parameters of FixBN."""

    freeze_at: Annotated[At, AfterValidator(_check_at)] = setting(
        0.5, "T*: a round (int), a fraction of R (float, T* = floor(f R)) or `auto`"
    )
    freeze_affine: bool = setting(False, "freeze gamma and beta as well (Table H)")


# --- synchronised steps ---------------------------------------------------------------
_CHANNEL = {"fedtan-transport": ("channel",)}


class FedTANParams(Params):
    """Parameters of FedTAN."""

    fedtan_exchanges: Literal["3L+1", "2L+1"] = setting(
        "3L+1", "exchanges of a round; 2L+1 sends mean and variance together"
    )
    fedtan_transport: Literal["messages", "channel"] = setting(
        "messages",
        "how exchanges travel between processes; in one process, clients wait at a"
        " barrier instead",
    )
    fedtan_timeout: float = setting(
        120.0,
        "seconds that an exchange waits for its last client; in one process, for its"
        " next client",
        group="",
        gt=0,
    )
    fedtan_bind: str = setting(
        "127.0.0.1:0",
        "address of the channel on the server, host:port; port 0 selects a free port",
        only_if=_CHANNEL,
    )
    fedtan_address: str = setting(
        "",
        "host:port for the clients; empty uses fedtan-bind with the port in use",
        only_if=_CHANNEL,
    )
    fedtan_tls_dir: str = setting(
        "",
        "folder with ca.crt, server.crt, server.key; empty allows loopback only",
        only_if=_CHANNEL,
    )


class FedTAN2Params(WindowParams, FedTANParams):
    """Parameters of FedTAN-II."""

    fedtan_rounds: Annotated[At, AfterValidator(_check_at)] = setting(
        0.1, "M: a round (int), a fraction of R (float) or `auto`"
    )

    # FedTAN-II freezes as FixBN does, and FixBN reads its settings under these names.
    freeze_affine: ClassVar[bool] = False

    @property
    def freeze_at(self) -> At:
        """M, the round after which BN is frozen."""
        return self.fedtan_rounds


# --- pooled statistics ----------------------------------------------------------------
class PooledParams(Params):
    """Parameters of methods that train with pooled statistics."""

    statistics_momentum: float = setting(
        0.1,
        "mu: the share of a round's pooled statistics in the global statistics; 0 keeps"
        " the global ones unchanged",
        ge=0,
        le=1,
    )
    statistics_warm_up: int = setting(
        1,
        "rounds of plain FedAvg at the start; after each, the pooled statistics replace"
        " the global statistics; 0 for a pretrained model",
        ge=0,
    )


def trimmed_share(value: str) -> float | None:
    """Return the share that a trimmed mean removes at each end, or None for the mean.

    Raises:
        ValueError: the value is not a mean or a trimmed mean.
    """
    if value == "mean":
        return None
    name, _, share = value.partition(":")
    with contextlib.suppress(ValueError):
        if name == "trimmed-mean" and 0 <= float(share) < 0.5:
            return float(share)
    raise ValueError(
        f"{value!r} is neither mean nor trimmed-mean:SHARE with a share of at least 0"
        " and below 0.5"
    )


def _check_aggregation(value: str) -> str:
    trimmed_share(value)
    return value


class FBNParams(PooledParams):
    """Parameters of FBN."""

    fbn_measure: Literal["steps", "pass"] = setting(
        "steps",
        "the inputs of BN that give its statistics: steps uses all local steps, pass"
        " uses one pass before the first step",
    )
    statistics_aggregation: Annotated[str, AfterValidator(_check_aggregation)] = (
        setting(
            "mean",
            "pooling of the clients' statistics: mean; or trimmed-mean:SHARE (ours),"
            " such as trimmed-mean:0.2, which leaves out floor(SHARE x clients of the"
            " round) of the smallest and of the largest values",
        )
    )


class HBNParams(PooledParams):
    """Parameters of HBN."""

    share_alpha: bool = setting(
        False,
        "clients share alpha; a client without its own alpha starts from the mean",
    )


PARAMS: Mapping[str, type[Params]] = {
    "fedavg": Params,
    "fedprox": FedProxParams,
    "scaffold": ScaffoldParams,
    "bn-scaffold": BNScaffoldParams,
    "fedavgm": FedAvgMParams,
    "fedadam": AdaptiveParams,
    "fedyogi": FedYogiParams,
    "fedadagrad": FedAdagradParams,
    "fedbn": Params,
    "silobn": Params,
    "mtfl": Params,
    "staticbn": Params,
    "fixbn": FixBNParams,
    "fbn": FBNParams,
    "hbn": HBNParams,
    "fedtan": FedTANParams,
    "fedtan2": FedTAN2Params,
    "feddna": FedTANParams,
    "fedbs": FedBSParams,
    "fedwon": FedWonParams,
    "standalone": Params,
    "fedrep": FedRepParams,
    "ditto": DittoParams,
}
"""The settings of each method of the package, in the order of ``STRATEGIES``."""
