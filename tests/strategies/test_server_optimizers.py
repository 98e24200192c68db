"""FedAvgM, FedAdam, FedYogi, FedAdagrad: a slow reference, Flower's own without BN, and what they leave alone."""

from __future__ import annotations

import logging
import math
import runpy
from pathlib import Path
from typing import Any

import flwr.serverapp.strategy as flower
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedbn_flwr import strategies
from fedbn_flwr.batchnorm.parts import Part, split_state
from fedbn_flwr.errors import ConfigError, NothingTrainedError
from fedbn_flwr.messages.records import from_record, tensors, to_record
from fedbn_flwr.strategies import FedAdam, FedAvg, FedAvgM, FedBN, FedProx, combined

SIZES = (6, 14, 10, 8)
ROUNDS, RATE, ETA, MOMENTUM = 5, 0.1, 0.07, 0.8
BETA_1, BETA_2, TAU = 0.85, 0.95, 2e-3
ARGUMENTS: dict[str, dict[str, float]] = {
    "FedAvgM": {"server_learning_rate": ETA, "server_momentum": MOMENTUM},
    "FedAdam": {"eta": ETA, "beta_1": BETA_1, "beta_2": BETA_2, "tau": TAU},
    "FedYogi": {"eta": ETA, "beta_1": BETA_1, "beta_2": BETA_2, "tau": TAU},
    "FedAdagrad": {"eta": ETA, "tau": TAU},
}
NAMES = list(ARGUMENTS)


def slow_step(name: str, t: int, x: float, mean: float, m: float, v: float) -> tuple[float, float, float]:
    """One number, by the papers' formulas with Flower's bias correction: (x, m, v) of the next round."""
    delta = mean - x
    if name == "FedAvgM":
        m = MOMENTUM * m - delta
        return x - ETA * m, m, v
    beta_1 = 0.0 if name == "FedAdagrad" else BETA_1
    m = beta_1 * m + (1 - beta_1) * delta
    eta = ETA
    if name == "FedAdagrad":
        v = v + delta * delta
    elif name == "FedAdam":
        v = BETA_2 * v + (1 - BETA_2) * delta * delta
        eta = ETA * math.sqrt(1 - BETA_2 ** (t + 1)) / (1 - BETA_1 ** (t + 1))
    else:
        v = v - (1 - BETA_2) * delta * delta * (1 if v > delta * delta else -1 if v < delta * delta else 0)
    return x + eta * m / (math.sqrt(v) + TAU), m, v


@pytest.mark.parametrize("name", NAMES)
def test_server_optimizers_equal_a_slow_reference(name: str, federate, datasets, mlp) -> None:
    """Five rounds, half of the clients a round: parameters number by number, statistics and counters averaged."""
    strategy = getattr(strategies, name)(fraction_train=0.5, min_train_nodes=2, seed=3, **ARGUMENTS[name])
    run = federate(strategy, mlp, datasets, rounds=ROUNDS, batch_size=0, local_steps=2)
    chosen = [report.participants for report in strategy.reports]
    assert len({tuple(c) for c in chosen}) > 1
    assert all(len(c) == 2 for c in chosen)

    state = {key: value.clone() for key, value in mlp().state_dict().items()}
    memory = {key: [[0.0, 0.0] for _ in range(p.numel())] for key, p in mlp().named_parameters()}
    for t, round_ in enumerate(chosen, start=1):
        total = sum(len(datasets[i]) for i in round_)
        mean = {key: torch.zeros_like(value) for key, value in state.items()}
        for i in round_:
            client = mlp().train()
            client.load_state_dict(state)
            for _ in range(2):
                parameters = list(client.parameters())
                loss = F.cross_entropy(client(datasets[i].inputs), datasets[i].targets)
                for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                    p.data -= RATE * g
            for key, value in client.state_dict().items():
                whole = key.endswith("num_batches_tracked")
                mean[key] = torch.maximum(mean[key], value) if whole else mean[key] + len(datasets[i]) / total * value
        for key, numbers in memory.items():
            old, new = state[key].flatten().tolist(), mean[key].flatten().tolist()
            for j, (m, v) in enumerate(numbers):
                new[j], numbers[j][0], numbers[j][1] = slow_step(name, t, old[j], new[j], m, v)
            mean[key] = torch.tensor(new, dtype=torch.float64).reshape(state[key].shape)
        state = mean
    got = tensors(run.state)
    assert got.keys() == state.keys()
    for key, want in state.items():
        torch.testing.assert_close(got[key], want, rtol=1e-9, atol=1e-11, msg=key)
    assert int(got["1.num_batches_tracked"]) == 2 * ROUNDS


@pytest.mark.parametrize("arguments", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_without_batchnorm_they_equal_flowers(name: str, arguments: bool, federate, datasets, mlp) -> None:
    """Also with the defaults of both, but for FedAvgM, which has no momentum in Flower; the arguments are the same."""
    given = ARGUMENTS[name] if arguments or name == "FedAvgM" else {}
    if arguments and name != "FedAvgM":
        given = {**given, "eta_l": 0.2}
    ours = federate(getattr(strategies, name)(**given), lambda: mlp(norm=False), datasets, rounds=ROUNDS)
    theirs = getattr(flower, name)(**given).start(
        grid=ours.grid.inner, initial_arrays=to_record(mlp(norm=False).state_dict()), num_rounds=ROUNDS
    )
    for key, want in from_record(theirs.arrays).items():
        np.testing.assert_allclose(ours.state[key], want, rtol=1e-9, atol=1e-12, err_msg=key)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "FedAvgM"])
def test_the_clients_rate_of_a_strategy_of_flowers_is_told_to_have_no_effect(name: str, caplog) -> None:
    """Alone and combined."""
    alone = getattr(strategies, name)
    for kind in (alone, combined(alone, FedProx), combined(FedBN, alone)):
        with caplog.at_level(logging.WARNING, "flwr"):
            kind(), kind(eta_l=None)
            assert not caplog.messages
            kind(eta_l=0.2)
        assert caplog.messages == [
            f"strategy {kind.name!r}: eta_l=0.2 has no effect, as in Flower: the clients' learning rate is that of "
            "their own training. Leave eta_l out."
        ]
        caplog.clear()
    with pytest.raises(ConfigError, match="eta_l"):
        combined(FedBN, FedProx)(eta_l=0.2)


def test_without_momentum_fedavgm_is_fedavg(federate, datasets, mlp) -> None:
    runs = [federate(s, mlp, datasets, rounds=ROUNDS) for s in (FedAvgM(server_momentum=0), FedAvg())]
    for key, want in runs[1].state.items():
        np.testing.assert_allclose(runs[0].state[key], want, rtol=1e-12, atol=1e-14, err_msg=key)


@pytest.mark.parametrize("name", NAMES)
def test_statistics_are_the_average_of_the_replies(name: str, federate, datasets, mlp) -> None:
    """The step leaves running statistics and counters where FedAvg would put them, pooled or not."""
    for variance in ("mean", "pooled"):
        runs = [
            federate(s, mlp, datasets, rounds=1)
            for s in (getattr(strategies, name)(variance=variance, **ARGUMENTS[name]), FedAvg(variance=variance))
        ]
        for key in split_state(mlp()).select([Part.STATISTICS, Part.COUNTERS]):
            assert runs[0].state[key].tobytes() == runs[1].state[key].tobytes(), key
        assert not np.allclose(runs[0].state["1.weight"], runs[1].state["1.weight"]), "gamma is stepped"


@pytest.mark.parametrize("name", NAMES)
def test_statistics_of_an_instancenorm_are_averaged_too(name: str, federate, points) -> None:
    """They are no part of BatchNorm, and variances all the same."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
        return nn.Sequential(nn.Conv1d(2, 4, 1), norm, nn.Flatten(), nn.Linear(20, 3)).double()

    datasets = [points(6, i, shape=(2, 5)) for i in range(2)]
    assert split_state(model()).layers == ()
    runs = [federate(s, model, datasets, rounds=1) for s in (getattr(strategies, name)(**ARGUMENTS[name]), FedAvg())]
    for key in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert runs[0].state[key].tobytes() == runs[1].state[key].tobytes(), key
    assert not np.allclose(runs[0].state["1.weight"], runs[1].state["1.weight"])


def test_a_round_without_enough_replies_leaves_the_optimizer_alone(federate, datasets, mlp, same_bits) -> None:
    run = federate(FedAdam(min_replies=5), mlp, datasets, rounds=2, fails=NothingTrainedError)
    assert all(report.kept_previous for report in run.strategy.reports)
    assert run.strategy.moments == {}
    same_bits(run.state, run.history[0])


def test_server_optimizers_work_with_local_parts(federate, datasets, mlp) -> None:
    """FedBN's parts stay with the clients; what is shared is stepped as by FedAdam."""
    run = federate(combined(FedBN, FedAdam)(), mlp, datasets)
    shared = {key for key, part in split_state(mlp()).part_of.items() if part is Part.REST}
    assert run.strategy.moments.keys() == shared
    for key, value in run.state.items():
        assert (value.tobytes() == run.history[0][key].tobytes()) == (key not in shared), key
    assert set(run.local_state(0)) == set(run.state) - shared


def test_flowers_optimizers_give_nan_on_this_toy_and_ours_do_not() -> None:
    """The benchmark's toy: running_var below zero, then the loss NaN, by Flower's FedAvgM in round 2."""
    bench: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks/server_optimizers.py"))
    for name, settings in bench["SETTINGS"].items():
        ours = bench["measure"](getattr(strategies, name), settings)
        assert min(ours.variances) > 0, name
        assert (ours.first_negative, ours.first_nan) == (None, None), name
        assert ours.accuracy > 0.97, name
    theirs = bench["measure"](flower.FedAvgM, bench["SETTINGS"]["FedAvgM"], rounds=3)
    assert (theirs.first_negative, theirs.first_nan) == (2, 2)
    theirs = bench["measure"](flower.FedAdam, bench["SETTINGS"]["FedAdam"], rounds=14)
    assert theirs.first_negative == theirs.first_nan
    assert theirs.first_nan in range(10, 14)
