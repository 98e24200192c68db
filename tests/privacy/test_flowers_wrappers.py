"""Flower's wrappers for differential privacy work, or are refused by name."""

from __future__ import annotations

import functools

import pytest
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
)

from fedbn_flwr.client import TorchClient, client_app
from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.errors import ConfigError, NothingTrainedError
from fedbn_flwr.messages.records import to_record
from fedbn_flwr.strategies import FedAvg, FedAvgM, FedBN, FedTAN, FixBN, Scaffold
from fedbn_flwr.training import LearningRate, LocalTraining
from tests.support.federation import torch_clients

SIZES = (9, 4, 12)
FIXED = {
    "server": DifferentialPrivacyServerSideFixedClipping,
    "client": DifferentialPrivacyClientSideFixedClipping,
}
ADAPTIVE = {
    "server": DifferentialPrivacyServerSideAdaptiveClipping,
    "client": DifferentialPrivacyClientSideAdaptiveClipping,
}


def start(wrapper, strategy, mlp, datasets, client=TorchClient):
    limit = () if wrapper in ADAPTIVE.values() else (100.0,)
    wrapped = wrapper(strategy, 0.0, *limit, len(SIZES))
    training = LocalTraining(learning_rate=LearningRate(0.1), batch_size=4)
    app = client_app(torch_clients(mlp, datasets, training, client=client))
    with InProcessGrid(app, len(SIZES)) as grid:
        return wrapped.start(
            grid, to_record(mlp().state_dict()), num_rounds=2, timeout=30
        )


@pytest.mark.parametrize("wrapper", [*FIXED.values(), *ADAPTIVE.values()])
@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (FedTAN(), "exchanges of its first step"),
        (Scaffold(), "changes of the control variates"),
        (FixBN(), "noise to frozen statistics"),
        (FedAvg(recalibrate=True), "re-estimated"),
        (FedAvg(momentum_scope="global"), "momentum-scope=global"),
    ],
)
def test_what_goes_round_a_wrapper_is_refused(
    mlp, datasets, wrapper, strategy, words: str
) -> None:
    with pytest.raises(
        ConfigError, match=f"{wrapper.__name__} around strategy .*{words}.*DPWrapper"
    ):
        start(wrapper, strategy, mlp, datasets)


@pytest.mark.parametrize("wrapper", [FIXED["server"], ADAPTIVE["server"]])
def test_others_work_with_a_warning_of_counters_and_weights(
    mlp, datasets, wrapper, caplog
) -> None:
    words = f"{wrapper.__name__} around strategy 'fedbn': it needs the whole model"
    with pytest.raises(ConfigError, match=words):
        start(wrapper, FedBN(), mlp, datasets)
    for norm in (True, False):
        caplog.clear()
        model = functools.partial(mlp, norm=norm)
        result = start(wrapper, FedAvgM(), model, datasets)
        assert len(result.arrays) == len(model().state_dict())
        assert caplog.text.count("int64 counters") == norm
        assert caplog.text.count("weighs the clients by |D_i|") == 1


class Failing(TorchClient):
    """A client that cannot train."""

    def fit(self, parameters, config):
        raise RuntimeError("out of cheese")


def test_a_wrapper_around_failures_ends_with_an_error_too(mlp, datasets) -> None:
    """On the Message API, Flower's wrapper logs errors and passes nothing on."""
    with pytest.raises(NothingTrainedError, match="a wrapper"):
        start(FIXED["server"], FedAvg(), mlp, datasets, Failing)
