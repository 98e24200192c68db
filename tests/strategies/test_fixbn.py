"""FixBN's bits before and after the freeze, and its automatic T*."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.client import TorchClient
from fedbn_flwr.errors import NothingTrainedError
from fedbn_flwr.messages.records import from_record, to_record
from fedbn_flwr.server.methods.method import Facts, Node, Replies, Reply
from fedbn_flwr.strategies import MTFL, FixBN, combined
from fedbn_flwr.strategies.fixbn import (
    DELTA,
    FixBNMethod,
    FixBNParams,
    FreezeBN,
)

SIZES = (6, 13, 9)
STATISTICS = ("1.running_mean", "1.running_var", "1.num_batches_tracked")


@pytest.mark.parametrize(
    ("at", "rounds", "t_star"),
    [
        (7, 10, 7),
        (0, 10, 0),
        (0.5, 9, 4),
        (0.7, 10, 7),
        (0.29, 100, 29),
        (0.57, 100, 57),
        (1.0, 3, 3),
        ("auto", 9, None),
    ],
)
def test_freeze_at_gives_t_star(at, rounds: int, t_star: int | None) -> None:
    method = FixBNMethod(FixBNParams(freeze_at=at))
    assert method.freezes_after(rounds) == t_star


@pytest.mark.parametrize(
    ("window", "tau", "t_star"),
    [(3, 0.012, 4), (3, 0.0116, 5), (2, 0.02, 3), (4, 0.012, 5)],
)
def test_the_automatic_t_star_is_the_round_of_the_rule(
    window: int, tau: float, t_star: int
) -> None:
    """Tau = 0.012 is between the population and the sample variance of round 4.

    The unweighted means of the deltas would be different.
    """
    params = FixBNParams(freeze_at="auto", freeze_window=window, freeze_tau=tau)
    method, parts = FixBNMethod(params), split_state({})
    means = [1.0, 0.5, 0.3, 0.25, 0.24, 0.235, 0.5, 0.9, 1.5]
    tilts = [0.0, 0.03, 0.0, 0.015, 0.03, 0.0, 0.01, 0.0, 0.0]
    state = method.begin(Facts(0, 9, parts, {}))
    for number, (mean, tilt) in enumerate(zip(means, tilts, strict=True), start=1):
        phase = method.phase_name(state, number)
        assert phase == ("train" if number <= t_star else "frozen")
        deltas = (mean + 13 * tilt, mean - 6 * tilt, mean)
        sent = [
            Reply(Node(i, i), n, {}, {DELTA: delta})
            for i, (n, delta) in enumerate(zip(SIZES, deltas, strict=True))
        ]
        facts = Facts(number, 9, parts, {})
        _, state = method.aggregate(state, facts, Replies(sent), {})
    assert state.frozen_after == t_star, "the freeze is final even if later deltas grow"
    assert state.deltas == pytest.approx(means[:t_star], rel=1e-12)


@pytest.mark.parametrize("layers", ["", "2"])
def test_delta_m_is_the_mean_distance_of_the_statistics_of_the_chosen_layers(
    layers: str, federate, datasets
) -> None:
    def model() -> nn.Module:
        norms = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        return nn.Sequential(nn.Linear(5, 4), *norms, nn.Linear(4, 3)).double()

    strategy = FixBN(freeze_at="auto", freeze_window=2, layers=layers)
    run = federate(strategy, model, datasets, rounds=3)
    # BatchNorm is not frozen in the first two rounds.
    for down, up in [*run.grid.pairs()][: 2 * len(SIZES)]:
        start, end = (
            from_record(*one.content.array_records.values()) for one in (down, up)
        )
        moved = [
            abs(end[name] - start[name]).mean()
            for path in layers or "12"
            for name in (f"{path}.running_mean", f"{path}.running_var")
        ]
        (metrics,) = up.content.metric_records.values()
        assert metrics[DELTA] == pytest.approx(np.mean(moved), rel=1e-12)


def test_the_summary_says_a_round_only_once_bn_was_frozen(mlp) -> None:
    strategy = FixBN(freeze_at=5)
    strategy.prepare(to_record(mlp().state_dict()), 9, 1.0)
    told = [strategy.outcome(done)["frozen-after"] for done in (4, 5, 6)]
    assert told == [None, None, 5]


def test_what_is_frozen_is_what_the_split_calls_affine() -> None:
    """The cases are a parametrized gamma, a tied gamma and a subclass's parameter."""

    class Gated(nn.BatchNorm1d):
        def __init__(self) -> None:
            super().__init__(2)
            self.gate = nn.Parameter(torch.zeros(2))

    model = nn.Sequential(
        weight_norm(nn.BatchNorm1d(2), dim=None), nn.BatchNorm1d(2), Gated()
    )
    model.register_parameter("gain", model[1].weight)
    hook = FreezeBN(affine=True)
    hook.begin(model)
    named = [*model.named_parameters(remove_duplicate=False)]
    frozen = {name for name, p in named if not p.requires_grad}
    assert frozen == {*split_state(model).affine, "gain"}
    assert {"0.parametrizations.weight.original1", "2.weight"} < frozen
    hook.end(model)
    assert all(p.requires_grad for _, p in named)


class Late(TorchClient):
    """A client that cannot train before round 3."""

    late = (0, 1, 2)

    def fit(self, parameters, config):
        if config["server-round"] < 3 and self.partition_id in self.late:
            raise RuntimeError("the scanner is not ready")
        return super().fit(parameters, config)


@pytest.mark.parametrize(
    "strategy",
    [FixBN(freeze_at=2), FixBN(freeze_at=0.5), FixBN(freeze_at=2, freeze_affine=True)],
)
def test_statistics_that_no_round_has_changed_are_not_frozen(
    strategy: FixBN, federate_mlp
) -> None:
    with pytest.raises(NothingTrainedError, match="after round 2"):
        federate_mlp(strategy, rounds=4, client=Late)


def test_statistics_of_a_trained_initial_model_and_of_one_round_are_frozen(
    federate_mlp, mlp, same_bits
) -> None:
    def trained() -> nn.Module:
        model = mlp()
        model[1].running_mean += 0.25
        return model

    run = federate_mlp(FixBN(freeze_at=2), model=trained, rounds=4, client=Late)
    kept = [report.kept_previous for report in run.reports]
    assert kept == [True, True, False, False]
    later = federate_mlp(FixBN(freeze_at=3), rounds=4, client=Late)
    for end, frozen in ((run.state, run.history[0]), (later.state, later.history[3])):
        same_bits(*({name: one[name] for name in STATISTICS} for one in (end, frozen)))


class LateOfThree(Late):
    late = (1,)


@pytest.mark.parametrize("freeze_affine", [True, False])
def test_a_client_that_begins_after_the_freeze_with_parts_of_its_own_is_named(
    freeze_affine: bool, federate_mlp, caplog
) -> None:
    """Its gamma and beta can only be frozen at their initial values."""
    strategy = combined(MTFL, FixBN)(freeze_at=2, freeze_affine=freeze_affine)
    federate_mlp(strategy, rounds=5, client=LateOfThree)
    told = [text for text in caplog.messages if "first time after" in text]
    assert len(told) == freeze_affine
    assert all(text.startswith("round 3: client 1 trained") for text in told)


def test_clients_receive_when_bn_is_frozen(federate_mlp, caplog) -> None:
    caplog.set_level("INFO", "flwr")
    run = federate_mlp(FixBN(freeze_at=1), rounds=2)
    assert [r.args for r in caplog.records].count((2, "frozen")) == 1
    configs = run.grid.config()
    assert dict(configs[0]) == {"server-round": 1}
    assert dict(configs[-1]) == {
        "server-round": 2,
        "fedbn-flwr.hooks": '["freeze-bn"]',
        "fedbn-flwr.freeze-affine": False,
        "fedbn-flwr.frozen": True,
    }
    for config in run.grid.config("evaluate"):
        assert "fedbn-flwr.hooks" not in config
