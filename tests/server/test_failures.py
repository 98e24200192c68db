"""A run that diverged or trained nothing raises an error with the result.

The error gives the cause and an action.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import logging
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, RecordDict
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr import errors
from fedbn_flwr.client import TorchClient
from fedbn_flwr.errors import (
    FIRST_PASS_NOT_FINITE,
    INPUTS_NOT_FINITE,
    STATISTICS_NOT_FINITE,
    ConfigError,
    DataError,
    DivergedError,
    NothingTrainedError,
)
from fedbn_flwr.messages.protocol import EXCHANGE_QUERY, STATISTICS_QUERY
from fedbn_flwr.server.runs.failures import losses_not_finite
from fedbn_flwr.strategies import (
    FedAdam,
    FedAvg,
    FedBN,
    FedTAN,
    FixBN,
    SiloBN,
)
from fedbn_flwr.training import CLASSIFICATION, LocalTraining, evaluate
from fedbn_flwr.training.not_finite import refuse_first_pass
from tests.support.bad_replies import fail, spoiling
from tests.support.federation import ALONE
from tests.support.user_loops import loop_of_steps

SIZES = (6, 13, 9)
NAN = math.nan


def unchanged(self: TorchClient, server_round: int, result: Any) -> Any:
    return result


def client(
    fit: Callable[..., Any] = unchanged, evaluate: Callable[..., Any] = unchanged
) -> type[TorchClient]:
    """Return a client whose results pass through the given functions.

    Each is called as ``fit(client, server_round, result)``.
    """

    class Changed(TorchClient):
        def fit(self, parameters, config):
            result = super().fit(parameters, config)
            return fit(self, config["server-round"], result)

        def evaluate(self, parameters, config):
            result = super().evaluate(parameters, config)
            return evaluate(self, config["server-round"], result)

    return Changed


def spoilt(result):
    return [array * NAN for array in result[0]], *result[1:]


# Losses.


NAN_TEST = {"own-loss": NAN, "own-mae": NAN}


@pytest.mark.parametrize(
    ("metrics", "named"),
    [
        (
            {"": {"test-loss": NAN, "loss": 1.0, "test-accuracy": 0.1}},
            "test-loss is nan",
        ),
        ({"": {"loss": -math.inf}}, "loss is -inf"),
        ({"": {"loss": "no number", "delta": NAN}, "0": {}}, ""),
        (
            {
                str(i): {"own-loss": 1.0 if i == 7 else NAN, "loss": NAN}
                for i in range(8)
            },
            "own-loss of client 0, 1, 2, 3, 4 and 2 others is not finite",
        ),
        # A test without counted targets does not diverge.
        ({"0": {"own-loss": NAN, "own-accuracy": NAN, "global-loss": 1.0}}, ""),
        ({"0": {"val_loss": NAN, "val_acc": NAN}}, ""),
        ({"0": {**NAN_TEST, "own-num-examples": 0}}, ""),
        (
            {"0": {**NAN_TEST, "own-num-examples": 3}},
            "own-loss of client 0 is not finite",
        ),
    ],
)
def test_losses_that_are_not_finite_are_named(metrics, named: str) -> None:
    assert losses_not_finite(metrics) == [named] * bool(named)


def first_only(server_round: int) -> dict[str, float]:
    return {"loss": 1.0 if server_round < 2 else NAN}


def untestable(self: TorchClient, server_round: int, result: Any) -> Any:
    """Two of three clients cannot test in round 2."""
    if self.partition_id == 2 or server_round != 2:
        return result
    return NAN, result[1], {**result[2], "loss": NAN}


def lossy(self: TorchClient, server_round: int, result: Any) -> Any:
    loss = NAN if self.partition_id else 1.0
    return *result[:2], {**result[2], "train-loss": loss}


def far(self: TorchClient, server_round: int, result: Any) -> Any:
    """The weights of one client are too large for the training of the others."""
    (first, *rest), *more = result
    if self.partition_id == 1:
        return [first * 1e3, *rest], *more
    return result if server_round < 2 else spoilt(result)


ENDS = {
    "the server's test": ({"evaluate_fn": first_only}, 2, "in round 2: loss is nan"),
    "most tests": (
        {"client": client(evaluate=untestable)},
        2,
        "loss of client 0, 1 is not finite",
    ),
    "most trainings": (
        {"client": client(lossy)},
        1,
        "train-loss of client 1, 2 is not finite",
    ),
    "a model far from the others": (
        {"client": client(far)},
        2,
        "the values of 2 of 3 replies are not finite",
    ),
}


@pytest.mark.parametrize("where", ENDS)
def test_a_loss_that_is_not_finite_ends_the_run(
    federate_mlp, same_bits, caplog, where: str
) -> None:
    options, number, words = ENDS[where]
    with caplog.at_level(logging.ERROR, logger="flwr"):
        run = federate_mlp(FedAvg(), rounds=4, **options, fails=DivergedError)
    assert len(run.reports) == run.error.diverged_at == number
    same_bits(run.state, run.history[number])
    assert words in str(run.error)
    assert "on_divergence='continue'" in str(run.error)
    assert len(caplog.messages) == 1


def test_with_continue_the_run_goes_on_and_logs_it(federate_mlp, mlp, caplog) -> None:
    """A run from its checkpoint tests its own rounds, even with NaN in its model."""
    options = {"evaluate_fn": first_only}
    strategy, again = (FedAvg(on_divergence="continue") for _ in range(2))
    with caplog.at_level(logging.ERROR, logger="flwr"):
        federate_mlp(strategy, rounds=4, **options)
    assert [report.diverged_at for report in strategy.reports] == [None, 2, 3, 4]
    assert ["Likely cause" in text for text in caplog.messages] == [True, False, False]
    again.load_state_dict(strategy.state_dict(), 4)
    broken = mlp()
    broken[1].running_mean[0] = NAN
    resumed = federate_mlp(
        again, model=lambda: copy.deepcopy(broken), rounds=6, **options
    )
    assert [report.server_round for report in again.reports] == [5, 6]
    assert list(resumed.result.evaluate_metrics_serverapp) == [5, 6]


# Replies.


@pytest.mark.parametrize("seed", range(8))
def test_a_run_diverges_at_the_first_of_two_rounds_without_a_finite_reply(
    federate_mlp, seed: int
) -> None:
    """The model and the tested loss stay finite, because no reply is used.

    In a run of one round, this round is enough. FedBN's clients refuse to keep NaN.
    """
    draw = random.Random(seed)
    some = ["used", "NaN", "NaN", "one raises", "raises"]
    kinds = draw.choices(some, k=draw.choice([1, 6, 6]))
    kinds[0] = "used" if len(kinds) > 1 else "NaN"

    def fit(self: Any, server_round: int, result: Any) -> Any:
        kind = kinds[server_round - 1]
        if kind == "raises" or (kind == "one raises" and self.partition_id == 1):
            raise RuntimeError("disk full")
        # A client without validation data has no such loss.
        result = *result[:2], {**result[2], "val-loss": NAN}
        return result if kind == "used" else spoilt(result)

    pairs = [i for i in range(1, len(kinds)) if kinds[i - 1 : i + 1] == ["NaN"] * 2]
    ends = pairs[0] if pairs else (1 if len(kinds) == 1 else None)
    run = federate_mlp(
        draw.choice([FedAvg, FedBN])(),
        rounds=len(kinds),
        client=client(fit),
        fails=DivergedError if ends else None,
    )
    done = kinds[: pairs[0] + 1 if pairs else None]
    kept = [report.kept_previous for report in run.reports]
    assert kept == [kind != "used" for kind in done]
    if ends:
        assert run.error.diverged_at == ends
        first = f"every reply since round {ends} has values that are not finite"
        assert first in str(run.error)
        assert "entry '0.weight' contains nan" in str(run.error)


@pytest.mark.parametrize("strategy", [FedAvg, FedBN, FixBN])
@pytest.mark.parametrize(
    ("value", "loop"),
    [(NAN, None), (1e39, None), (NAN, loop_of_steps)],
    ids=["NaN", "not of float32", "a loop of one's own"],
)
def test_an_input_of_one_client_that_no_model_takes_is_named_and_the_others_go_on(
    federate_mlp, datasets, mlp, strategy, value: float, loop
) -> None:
    """The client's error has the code of the cause.

    The value 1e39 is finite in the data, such as a sentinel in float64 or bytes in half
    precision.
    """
    datasets[1].inputs[2, 3] = value
    run = federate_mlp(strategy(), model=lambda: mlp().float(), rounds=2, loop=loop)
    for report in run.reports:
        assert report.diverged_at is None
        assert [*report.codes.values()] == [{INPUTS_NOT_FINITE}]
        assert "(partition 1)" in "".join(report.rejected.values())


def root_of_zero(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a finite loss with a non-finite gradient."""
    same = (outputs - outputs.detach()).square().sum().sqrt()
    return F.cross_entropy(outputs, targets) + same


BEFORE_A_STEP = {
    "logarithm of 0": lambda z, t: -z.relu().gather(1, t[:, None]).log().mean(),
    "class weights": nn.CrossEntropyLoss(weight=torch.zeros(3, dtype=torch.float64)),
    "root of 0": root_of_zero,
}


def overflow(self: TorchClient, server_round: int, result: Any) -> Any:
    """A scaler has skipped a step after an overflow in half precision."""
    result[0][4][:] = NAN
    return result


def sum_of_outputs(model: nn.Module, batches: Any, *_: Any) -> Tensor:
    return torch.stack([model(inputs).sum() for inputs, _ in batches]).sum()


CAUSES = {
    "statistics": ({"client": client(overflow)}, STATISTICS_NOT_FINITE),
    "inputs": ({}, INPUTS_NOT_FINITE),
    "inputs of an own loop": ({"loop": sum_of_outputs}, INPUTS_NOT_FINITE),
    **{
        name: (
            {"task": dataclasses.replace(CLASSIFICATION, training_loss=loss)},
            FIRST_PASS_NOT_FINITE,
        )
        for name, loss in BEFORE_A_STEP.items()
    },
}


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("strategy", [FedAvg, FedAdam])
def test_a_cause_other_than_the_rate_is_named_if_all_clients_have_it(
    federate_mlp, datasets, strategy, cause: str
) -> None:
    options, code = CAUSES[cause]
    if code == INPUTS_NOT_FINITE:
        for points in datasets:
            points.inputs[0, 0] = math.inf
    run = federate_mlp(strategy(), **options, fails=DivergedError)
    assert run.error.diverged_at == 1
    assert [*run.reports[0].codes.values()] == [{code}] * len(datasets)
    assert "learning-rate" not in str(run.error)
    # A model in bfloat16 is refused, so only autocast is a remedy.
    assert ("amp=true" in str(run.error)) == (code == STATISTICS_NOT_FINITE)


def test_a_cause_that_comes_later_is_found_with_the_entries_that_the_client_keeps(
    federate_mlp, datasets
) -> None:
    """From round 2 on, all targets are of a class with the weight 0."""
    for points in datasets:
        points.targets %= 2

    def of_class_2(*_) -> None:
        for points in datasets:
            points.targets.fill_(2)

    weights = torch.tensor([1.0, 1, 0], dtype=torch.float64)
    loss = nn.CrossEntropyLoss(weight=weights)
    task = dataclasses.replace(CLASSIFICATION, training_loss=loss)
    strategy = FedBN(on_round_end=of_class_2)
    federate_mlp(strategy, rounds=2, task=task)
    codes = [[*report.codes.values()] for report in strategy.reports]
    assert codes == [[], [{FIRST_PASS_NOT_FINITE}] * len(datasets)]


def test_large_weights_may_be_why(mlp, points) -> None:
    model, data = mlp(), points(9)
    model.register_parameter("unused", nn.Parameter(torch.ones(1)))
    refuse_first_pass(model, data, CLASSIFICATION, 4)  # the last batch has one example
    task = dataclasses.replace(CLASSIFICATION, loss=BEFORE_A_STEP["class weights"])
    with pytest.raises(DataError):
        refuse_first_pass(model, data, task, 4)
    model[0].weight.data *= 1e6
    refuse_first_pass(model, data, task, 4)


def test_only_targets_that_count_are_tested_and_nan_in_their_inputs_is_named(
    mlp, points
) -> None:
    data, test = points(9), points(9)
    settings = LocalTraining(learning_rate=0.1, batch_size=4)
    one = TorchClient(mlp(), data, test, settings, partition_id=0)
    model = one.get_parameters({})
    test.targets[2:] = CLASSIFICATION.ignore
    _, count, metrics = one.evaluate(model, {})
    assert (count, metrics["examples-tested"]) == (2, 2)
    test.inputs[1, 1] = NAN
    with pytest.raises(DataError) as raised:
        one.evaluate(model, {})
    assert raised.value.code == INPUTS_NOT_FINITE
    test.targets[:] = CLASSIFICATION.ignore
    loss, count, _ = one.evaluate(model, {})
    assert math.isnan(loss)
    assert count == 0, "no target counts, so nothing is wrong"


def test_a_client_without_a_target_that_counts_is_refused(
    federate_mlp, datasets
) -> None:
    """The client would halve the steps of the others.

    Its test reports only its size, because its NaN would become the loss of all
    clients.
    """
    datasets[1].targets[:] = CLASSIFICATION.ignore

    class Named(TorchClient):
        def __init__(self, model, train, test, *more, **options) -> None:
            tests = {"own": test, "again": test}
            super().__init__(model, train, tests, *more, **options)

    run = federate_mlp(FedAvg(), rounds=2, client=Named)
    for report in run.reports:
        assert report.participants == [0, 2]
        assert report.diverged_at is None
        assert report.evaluations.get("1", {}).get("own-num-examples", 0) == 0
    for metrics in run.result.evaluate_metrics_clientapp.values():
        assert math.isfinite(metrics["own-loss"])


def test_a_loss_of_the_weights_is_not_the_inputs_fault(mlp, points) -> None:
    model = mlp()
    model[0].weight.data[0] = NAN
    assert math.isnan(evaluate(model, points(9)).loss)


def test_a_run_in_which_no_round_used_a_reply_fails(federate_mlp, same_bits) -> None:
    run = federate_mlp(
        FedAvg(min_replies=2),
        rounds=2,
        wrap=spoiling(fail, who=(0, 1)),
        fails=NothingTrainedError,
    )
    same_bits(run.state, run.history[0])
    counts = "6 clients asked, 6 replied, 4 refused or lost: 4 x error 2: "
    assert counts in str(run.error)


# One ConfigError of all clients.


def refuse(content: RecordDict) -> None:
    raise ConfigError("agc=-1 must be at least 0")


@pytest.mark.parametrize("where", ["query", "train", "evaluate"])
def test_a_config_error_of_all_clients_ends_the_run_in_the_first_round(
    federate_mlp, where: str
) -> None:
    strategy = FedAvg()
    wrap = spoiling(refuse, kind=where, who=range(3))
    said = r"^agc=-1 must be at least 0\n\(All 3 clients that were asked raised this"
    with pytest.raises(ConfigError, match=said):
        federate_mlp(strategy, wrap=wrap)
    assert len(strategy.reports) == 1


@pytest.mark.parametrize("where", ["train", "evaluate"])
def test_one_client_with_a_config_error_does_not_end_a_run_in_which_others_work(
    federate_mlp, where
) -> None:
    """If only a share is asked, it may be the only client of a round."""
    strategy = FedAvg(
        fraction_train=0.34,
        fraction_evaluate=0.34,
        min_train_nodes=1,
        min_evaluate_nodes=1,
        seed=1,
    )
    wrap = spoiling(refuse, kind=where, who=[2])
    federate_mlp(strategy, rounds=6, wrap=wrap)
    refused = [report.server_round for report in strategy.reports if report.rejected]
    assert refused, "it was asked"
    assert refused[0] > 1


CODES = ["clients-config", "clients-config agc-range", "nonsense"]
CODES += [getattr(errors, name) for name in errors.__all__ if name.isupper()]
CODES = [code for code in CODES if len(code) < 30]
LIES = {
    **{code: f"[{code}] \x1b[2J\n{'y' * 5_000_000}" for code in CODES},
    "class": "fedbn_flwr.errors.ConfigError: x",
    "mod": "ModRefusal",
}
OF_ONE = {"fraction_train": 0.34, "fraction_evaluate": 0.34, **ALONE}


@pytest.mark.parametrize("code", LIES)
def test_no_error_of_one_client_ends_the_run_of_the_others(
    federate_mlp, code: str
) -> None:
    """In the first two rounds, it is the only client that is asked."""

    def lie(content: RecordDict) -> None:
        raise RuntimeError(LIES[code])

    strategy = FedAvg(**OF_ONE, seed=28)
    wrap = spoiling(lie, kind=("train", "evaluate"))
    run = federate_mlp(strategy, rounds=4, wrap=wrap)
    assert [report.participants for report in run.reports] == [[], [], [0], [2]]


def test_no_app_of_one_client_without_its_part_ends_the_run_of_the_others(
    federate_mlp,
) -> None:
    def change(content: RecordDict) -> None:
        content["arrays"]["0.weight"] = Array(np.zeros((4, 5)))

    strategy = FedAvg(**OF_ONE, seed=28, train_only="3.bias")
    run = federate_mlp(strategy, rounds=4, wrap=spoiling(change))
    assert "train_only leaves it fixed" in "".join(run.reports[0].rejected.values())
    assert [report.participants for report in run.reports] == [[], [], [0], [2]]


@pytest.mark.parametrize("options", [{}, OF_ONE], ids=["all", "one"])
@pytest.mark.parametrize("make", [FedTAN, functools.partial(SiloBN, recalibrate=True)])
def test_no_error_in_any_message_ends_the_run_of_the_others(
    federate_mlp, caplog, make, options
) -> None:
    """Each message gets an error with another code."""
    lies = itertools.cycle(LIES.values())

    def lie(content: RecordDict) -> None:
        raise RuntimeError(next(lies))

    caplog.set_level("INFO", logger="flwr")
    kinds = ("train", "evaluate", STATISTICS_QUERY, EXCHANGE_QUERY)
    strategy = make(**options, seed=28)
    run = federate_mlp(strategy, rounds=9, wrap=spoiling(lie, kind=kinds))
    used = {number for report in run.reports for number in report.participants}
    assert used == {0, 2}
    for record in caplog.records:
        if "fedbn_flwr" in record.pathname:
            assert len(record.getMessage()) < 5000
            assert record.getMessage().isprintable()


@pytest.mark.parametrize(
    ("kind", "metric", "ends"), [("train", "train-loss", 3), ("evaluate", "loss", 2)]
)
def test_no_loss_of_one_client_ends_the_run_of_the_others(
    federate_mlp, kind: str, metric: str, ends: int
) -> None:
    def lie(content: RecordDict) -> None:
        content["metrics"][metric] = NAN

    wrap = spoiling(lie, kind=kind)
    run = federate_mlp(FedAvg(**OF_ONE, seed=28), rounds=4, wrap=wrap)
    assert [report.diverged for report in run.reports] == [[]] * 4
    wrap = spoiling(lie, kind=kind, who=range(3))
    both = FedAvg(**OF_ONE, seed=28)
    ended = federate_mlp(both, rounds=4, wrap=wrap, fails=DivergedError)
    assert ended.error.diverged_at == ends, "two clients have this loss"


@pytest.mark.parametrize("refused", [(), (2,), (2, 3)])
def test_a_run_whose_last_rounds_were_not_used_says_so_at_its_end(
    refused: tuple[int, ...], federate_mlp, caplog
) -> None:
    wrap = spoiling(refuse, rounds=refused, who=range(3))
    federate_mlp(FedAvg(), wrap=wrap)
    told = "no round after round 1 was used" in caplog.text
    assert told == (3 in refused)


def test_it_does_not_end_a_run_in_which_a_client_has_trained(federate_mlp) -> None:
    wrap = spoiling(refuse, rounds=(2, 3), who=range(3))
    first, resumed = FedAvg(), FedAvg()
    federate_mlp(first, wrap=wrap)
    assert [report.kept_previous for report in first.reports] == [False, True, True]
    resumed.load_state_dict(first.state_dict(), 1)
    federate_mlp(resumed, wrap=wrap)
    assert [report.server_round for report in resumed.reports] == [2, 3]
