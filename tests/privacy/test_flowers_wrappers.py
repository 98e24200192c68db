"""Flower's wrappers for differential privacy around our strategies: they work, or are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from flwr.client import NumPyClient
from flwr.client.mod import fixedclipping_mod
from flwr.clientapp import ClientApp
from flwr.server.strategy import DifferentialPrivacyClientSideFixedClipping as LegacyClientSide
from flwr.server.strategy import DifferentialPrivacyServerSideFixedClipping as LegacyServerSide
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
)

from fedbn_flwr import to_legacy
from fedbn_flwr.client import TorchClient, client_app
from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.errors import ConfigError, NothingTrainedError
from fedbn_flwr.messages.records import to_record
from fedbn_flwr.mods import local_bn
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


def start(wrapper: Any, strategy: Any, mlp: Any, datasets: Any) -> Any:
    adaptive = wrapper in ADAPTIVE.values()
    wrapped = wrapper(strategy, 0.0, len(SIZES)) if adaptive else wrapper(strategy, 0.0, 100.0, len(SIZES))
    app = client_app(torch_clients(mlp, datasets, LocalTraining(learning_rate=LearningRate(0.1), batch_size=4)))
    with InProcessGrid(app, len(SIZES)) as grid:
        return wrapped.start(grid, to_record(mlp().state_dict()), num_rounds=2, timeout=30)


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
def test_what_goes_round_a_wrapper_is_refused(mlp: Any, datasets: Any, wrapper: Any, strategy: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"{wrapper.__name__} around strategy .*{words}.*DPWrapper"):
        start(wrapper, strategy, mlp, datasets)


@pytest.mark.parametrize("wrapper", [FIXED["server"], ADAPTIVE["server"]])
def test_local_parts_are_refused_where_the_server_clips(mlp: Any, datasets: Any, wrapper: Any) -> None:
    with pytest.raises(ConfigError, match=f"{wrapper.__name__} around strategy 'fedbn': it needs the whole model"):
        start(wrapper, FedBN(), mlp, datasets)


@pytest.mark.parametrize("wrapper", [FIXED["server"], ADAPTIVE["server"]])
def test_others_work_with_a_warning_of_counters_and_weights(mlp: Any, datasets: Any, wrapper: Any, caplog: Any) -> None:
    result = start(wrapper, FedAvgM(), mlp, datasets)
    assert len(result.arrays) == len(mlp().state_dict())
    assert caplog.text.count("int64 counters") == 1
    assert caplog.text.count("weighs the clients by |D_i|, so that one of them can move the average by more than") == 1
    caplog.clear()
    start(wrapper, FedAvg(), lambda: mlp(norm=False), datasets)
    assert "int64 counters" not in caplog.text
    assert caplog.text.count("weighs the clients by |D_i|") == 1


def test_flowers_accountant_is_refused_by_flower_and_the_legacy_wrapper_by_us(
    mlp: Any, datasets: Any, run_legacy_loop: Any
) -> None:
    from flwr.supercore.privacy_accounting import NeighboringRelation, PrivacyConfig, SamplingMethod
    from flwr.supercore.privacy_accounting.rdp_accountant import RdpAccountant

    relation, sampling = NeighboringRelation.ADD_OR_REMOVE_ONE, SamplingMethod.NO_AMPLIFICATION
    accountant = RdpAccountant(PrivacyConfig(1e-5, 3, relation, sampling))
    with pytest.raises(ValueError, match=r"requires a strategy using FedAvg\.aggregate_train"):
        FIXED["server"](FedAvg(), 1.0, 1.0, 3, accountant=accountant)
    legacy = LegacyServerSide(to_legacy(FedBN(), to_record(mlp().state_dict())), 0.0, 100.0, len(SIZES))
    app = client_app(torch_clients(mlp, datasets, LocalTraining(learning_rate=LearningRate(0.1), batch_size=4)))
    with pytest.raises(ConfigError, match="DifferentialPrivacyServerSideFixedClipping around strategy 'fedbn'"):
        run_legacy_loop(legacy, app, mlp().state_dict(), len(SIZES), 1)


def legacy_app(mlp: Any, datasets: Any, mods: Any, client: Any = TorchClient) -> ClientApp:
    training = LocalTraining(learning_rate=LearningRate(0.1), batch_size=4)
    client_fn = (lambda _: Plain()) if client is Plain else torch_clients(mlp, datasets, training, client=client)
    return ClientApp(client_fn=lambda context: client_fn(context).to_client(), mods=mods)


class Plain(NumPyClient):
    """A client that returns what it gets, the whole state."""

    def fit(self, parameters: Any, config: Any) -> Any:
        return parameters, 5, {}

    def evaluate(self, parameters: Any, config: Any) -> Any:
        return 1.0, 5, {}


class Failing(TorchClient):
    """A client that cannot train."""

    def fit(self, parameters: Any, config: Any) -> Any:
        raise RuntimeError("out of cheese")


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    ("mods", "client", "words"),
    [([fixedclipping_mod, local_bn], Plain, "could not be broadcast"), ([], Failing, "out of cheese")],
)
def test_a_legacy_wrapper_around_failures_ends_with_the_clients_words(
    mlp: Any, datasets: Any, run_legacy_loop: Any, mods: Any, client: Any, words: str, known: bool
) -> None:
    """Flower's wrapper returns before it calls ``aggregate_fit``, and the loop goes on with the initial model."""
    rounds = 2
    inner = to_legacy(FedBN(), to_record(mlp().state_dict()), num_rounds=rounds if known else None, timeout=60)
    with pytest.raises(NothingTrainedError, match=f"(?s)6 clients asked, 6 replied.*({words})"):
        run_legacy_loop(
            LegacyClientSide(inner, 0.0, 100.0, len(SIZES)),
            legacy_app(mlp, datasets, mods, client),
            mlp().state_dict(),
            len(SIZES),
            rounds,
        )


def test_a_wrapper_around_failures_ends_with_an_error_too(mlp: Any, datasets: Any) -> None:
    """On the Message API Flower's wrapper logs the clients' errors, and hands nothing on."""
    wrapped = FIXED["server"](FedAvg(), 0.0, 100.0, len(SIZES))
    training = LocalTraining(learning_rate=LearningRate(0.1), batch_size=4)
    app = client_app(torch_clients(mlp, datasets, training, client=Failing))
    with InProcessGrid(app, len(SIZES)) as grid, pytest.raises(NothingTrainedError, match="a wrapper"):
        wrapped.start(grid, to_record(mlp().state_dict()), num_rounds=3, timeout=30)


@pytest.mark.parametrize("wrapper", [LegacyServerSide, LegacyClientSide])
def test_the_legacy_wrappers_warn_of_counters_and_weights_too(
    mlp: Any, datasets: Any, run_legacy_loop: Any, wrapper: Any, caplog: Any
) -> None:
    inner = to_legacy(FedAvg(), to_record(mlp().state_dict()), num_rounds=2, timeout=60)
    mods = [fixedclipping_mod] if wrapper is LegacyClientSide else []
    wrapped = wrapper(inner, 0.0, 100.0, len(SIZES))
    run_legacy_loop(wrapped, legacy_app(mlp, datasets, mods), mlp().state_dict(), len(SIZES), 2)
    assert caplog.text.count("int64 counters") == 1
    assert caplog.text.count("weighs the clients by |D_i|") == 1
