"""Settings of the methods that are out of range: the error names the setting, its value and what is allowed."""

from __future__ import annotations

from typing import Any

import pytest

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.strategies import (
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedBS,
    FedProx,
    FedTAN,
    FedTAN2,
    FedWon,
    FedYogi,
    FixBN,
    Scaffold,
)

NAN = float("nan")
A_ROUND = "is not a round (int), a fraction of the rounds (float in [0, 1]) or 'auto'"
A_FRACTION = "is not a fraction in [0, 1]; for a round write an int"
FROM_1_ON = "is not a round; the first is 1, and 0 freezes from the start"
POSITIVE, NOT_NEGATIVE, SHARE = "must be a finite number above 0", "must be a finite number at least 0", "in [0, 1)"


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        (FixBN, {"freeze_at": "later"}, f"freeze_at='later': 'later' {A_ROUND}"),
        (FixBN, {"freeze_at": 1.5}, f"freeze_at=1.5: 1.5 {A_FRACTION}"),
        (FixBN, {"freeze_at": NAN}, "freeze_at=nan: input should be a finite number"),
        (FixBN, {"freeze_at": -1}, f"freeze_at=-1: -1 {FROM_1_ON}"),
        (FixBN, {"freeze_window": 1}, "freeze_window=1 must be at least 2"),
        (FixBN, {"freeze_tau": 0.0}, f"freeze_tau=0.0 {POSITIVE}"),
        (FedTAN2, {"fedtan_rounds": "later"}, f"fedtan_rounds='later': 'later' {A_ROUND}"),
        (FedTAN2, {"fedtan_rounds": 1.5}, f"fedtan_rounds=1.5: 1.5 {A_FRACTION}"),
        (FedTAN2, {"fedtan_rounds": -1}, f"fedtan_rounds=-1: -1 {FROM_1_ON}"),
        (FedTAN2, {"freeze_window": 1}, "freeze_window=1 must be at least 2"),
        (FedTAN2, {"freeze_tau": 0.0}, f"freeze_tau=0.0 {POSITIVE}"),
        (FedTAN2, {"fedtan_timeout": -1.0}, f"fedtan_timeout=-1.0 {POSITIVE}"),
        (FedTAN, {"fedtan_timeout": 0.0}, f"fedtan_timeout=0.0 {POSITIVE}"),
        (FedTAN, {"fedtan_timeout": NAN}, f"fedtan_timeout=nan {POSITIVE}"),
        (FedTAN, {"fedtan_exchanges": "4L+1"}, "unknown fedtan_exchanges '4L+1'. Did you mean '3L+1'?"),
        (FedTAN, {"fedtan_transport": "chanel"}, "unknown fedtan_transport 'chanel'. Did you mean 'channel'?"),
        (FedBS, {"fedbs_eps": -0.1}, f"fedbs_eps=-0.1 {NOT_NEGATIVE}"),
        (FedBS, {"fedbs_rounds": 0}, "fedbs_rounds=0 must be at least 1"),
        (FedBS, {"proximal_mu": -1.0}, f"proximal_mu=-1.0 {NOT_NEGATIVE}"),
        (FedProx, {"proximal_mu": NAN}, f"proximal_mu=nan {NOT_NEGATIVE}"),
        (FedProx, {"proximal_mu": float("inf")}, f"proximal_mu=inf {NOT_NEGATIVE}"),
        (FedWon, {"agc": -0.1}, f"agc=-0.1 {NOT_NEGATIVE}"),
        (FedWon, {"agc": NAN}, f"agc=nan {NOT_NEGATIVE}"),
        (Scaffold, {"server_learning_rate": 0.0}, f"server_learning_rate=0.0 {POSITIVE}"),
        (Scaffold, {"server_learning_rate": -1.0}, f"server_learning_rate=-1.0 {POSITIVE}"),
        (Scaffold, {"server_learning_rate": NAN}, f"server_learning_rate=nan {POSITIVE}"),
        (FedAvgM, {"server_momentum": 1.0}, f"server_momentum=1.0 must be {SHARE}"),
        (FedAvgM, {"server_momentum": NAN}, f"server_momentum=nan must be {SHARE}"),
        (FedAvgM, {"server_learning_rate": 0.0}, f"server_learning_rate=0.0 {POSITIVE}"),
        (FedAdagrad, {"eta": float("inf")}, f"eta=inf {POSITIVE}"),
        (FedAdam, {"eta": -1.0}, f"eta=-1.0 {POSITIVE}"),
        (FedAdam, {"tau": 0.0}, f"tau=0.0 {POSITIVE}"),
        (FedYogi, {"beta_1": 1.0}, f"beta_1=1.0 must be {SHARE}"),
        (FedYogi, {"beta_2": -0.1}, f"beta_2=-0.1 must be {SHARE}"),
    ],
)
def test_a_setting_out_of_its_range_is_refused_with_what_is_allowed(
    method: type[FedAvg], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        method(**settings)
    assert str(error.value).startswith(message)
