"""A run that diverged or trained nothing raises an error with the result.

The error gives the cause and an action.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Message
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Result
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr import client_app
from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.client import TorchClient
from fedbn_flwr.errors import (
    FIRST_PASS_NOT_FINITE,
    INPUTS_NOT_FINITE,
    STATISTICS_NOT_FINITE,
    ConfigError,
    DataError,
    DivergedError,
    NothingTrainedError,
    RunFailedError,
)
from fedbn_flwr.mods import bn_mod
from fedbn_flwr.server.methods.method import Facts
from fedbn_flwr.server.runs.failures import losses_not_finite
from fedbn_flwr.strategies import (
    FedAdam,
    FedAvg,
    FedAvgM,
    FedBN,
    FedBS,
    FedProx,
    FedTAN,
    FedWon,
    FixBN,
    combined,
)
from fedbn_flwr.training import CLASSIFICATION, LearningRate, LocalTraining, evaluate
from fedbn_flwr.training.not_finite import refuse_first_pass
from tests.support.federation import torch_clients
from tests.support.synchronised import TRANSPORTS, client_data, synchronised

SIZES = (6, 13, 9)
NAN = float("nan")


def client(
    fit: Callable[..., Any] | None = None, evaluate: Callable[..., Any] | None = None
) -> type[TorchClient]:
    """Return a client whose results pass through the given functions.

    Each is called as ``fit(client, server_round, result)``.
    """

    class Changed(TorchClient):
        def fit(self, parameters, config):
            result = super().fit(parameters, config)
            if fit is None:
                return result
            return fit(self, config["server-round"], result)

        def evaluate(self, parameters, config):
            result = super().evaluate(parameters, config)
            if evaluate is None:
                return result
            return evaluate(self, config["server-round"], result)

    return Changed


def spoilt(self: TorchClient, result: Any) -> Any:
    return [array * NAN for array in result[0]], *result[1:]


def untestable(result: Any) -> Any:
    return NAN, result[1], {**result[2], "loss": NAN}


# Losses.


def test_losses_that_are_not_finite_are_named() -> None:
    assert losses_not_finite(
        {"": {"test-loss": NAN, "loss": 1.0, "test-accuracy": 0.1}}
    ) == ["test-loss is nan"]
    assert losses_not_finite({"": {"loss": -math.inf}}) == ["loss is -inf"]
    clients = {str(i): {"own-loss": math.inf, "loss": math.inf} for i in range(7)}
    clients["7"] = {"own-loss": 1.0}
    assert losses_not_finite(clients) == [
        "own-loss of client 0, 1, 2, 3, 4 and 2 others is not finite"
    ]
    assert losses_not_finite({"": {"loss": "no number", "delta": NAN}, "0": {}}) == []


def test_a_test_in_which_nothing_counts_is_no_divergence() -> None:
    empty = {
        "own-loss": NAN,
        "own-accuracy": NAN,
        "loss": NAN,
        "global-loss": 1.0,
        "global-accuracy": 0.5,
    }
    assert losses_not_finite({"0": empty}) == []
    assert losses_not_finite({"0": {"val_loss": NAN, "val_acc": NAN}}) == []
    unknown = {"own-loss": NAN, "own-mae": NAN, "own-num-examples": 0}
    assert losses_not_finite({"0": unknown}) == []
    assert losses_not_finite({"0": {**unknown, "own-num-examples": 3}}) == [
        "own-loss of client 0 is not finite"
    ]


def first_only(server_round: int) -> dict[str, float]:
    return {"loss": 1.0 if server_round < 2 else NAN}


def test_a_loss_of_the_servers_test_ends_the_run(
    federate, datasets, mlp, same_bits, caplog
) -> None:
    with caplog.at_level(logging.ERROR, logger="flwr"):
        run = federate(
            FedAvg(),
            mlp,
            datasets,
            rounds=4,
            evaluate_fn=first_only,
            fails=DivergedError,
        )
    assert len(run.strategy.reports) == 2, "the run ends immediately"
    same_bits(run.state, run.history[2])
    assert list(run.result.evaluate_metrics_serverapp) == [0, 1, 2]
    assert run.error.diverged_at == 2
    assert "in round 2: loss is nan" in str(run.error)
    assert "on_divergence='continue'" in str(run.error)
    assert len(caplog.messages) == 1


def test_with_continue_the_run_goes_on_and_logs_it(
    federate, datasets, mlp, caplog
) -> None:
    with caplog.at_level(logging.ERROR, logger="flwr"):
        run = federate(
            FedAvg(on_divergence="continue"),
            mlp,
            datasets,
            rounds=4,
            evaluate_fn=first_only,
        )
    assert [report.diverged_at for report in run.strategy.reports] == [None, 2, 3, 4]
    assert ["Likely cause" in text for text in caplog.messages] == [True, False, False]
    # A run from its checkpoint continues and tests its own rounds, even if its model
    # contains NaN.
    again = FedAvg(on_divergence="continue")
    again.load_state_dict(run.strategy.state_dict(), 4)
    broken = mlp()
    broken[1].running_mean[0] = NAN
    resumed = federate(
        again, lambda: broken, datasets, rounds=6, evaluate_fn=first_only
    )
    assert [report.server_round for report in again.reports] == [5, 6]
    assert list(resumed.result.evaluate_metrics_serverapp) == [5, 6]


def test_a_clients_own_loss_counts(federate, datasets, mlp) -> None:
    def evaluate(self, server_round, result):
        if (self.partition_id, server_round) == (1, 2):
            return untestable(result)
        return result

    run = federate(
        FedBN(), mlp, datasets, client=client(evaluate=evaluate), fails=DivergedError
    )
    assert run.error.diverged_at == 2
    assert "loss of client 1 is not finite" in str(run.error)
    every_other = FedBN(eval_every=2)
    assert federate(
        every_other,
        mlp,
        datasets,
        client=client(evaluate=evaluate),
        fails=DivergedError,
    ).error


def test_a_training_loss_counts_although_the_model_is_finite(
    federate, datasets, mlp
) -> None:
    def fit(self, server_round, result):
        arrays, num_examples, metrics = result
        loss = NAN if self.partition_id == 2 else 1.0
        return arrays, num_examples, {**metrics, "train-loss": loss}

    run = federate(FedAvg(), mlp, datasets, client=client(fit), fails=DivergedError)
    assert run.error.diverged_at == 1
    assert "train-loss of client 2 is not finite" in str(run.error)


@pytest.mark.parametrize("share", [1.0, 0.0])
@pytest.mark.parametrize("of_clients", [True, False])
def test_a_foreign_loop_is_ended_too(
    run_legacy_loop, datasets, mlp, share: float, of_clients: bool
) -> None:
    """The clients' losses or the losses of its own ``evaluate_fn`` end it."""
    if of_clients and not share:
        pytest.skip("no client is tested")
    training = LocalTraining(learning_rate=LearningRate(0.1), batch_size=4)
    diverging = client(evaluate=lambda self, server_round, result: untestable(result))
    kind = diverging if of_clients else TorchClient
    app = ClientApp(torch_clients(mlp, datasets, training, client=kind), mods=[bn_mod])

    def tested(server_round: int, arrays: Any, config: Any) -> Any:
        return (1.0 if of_clients or server_round == 1 else NAN), {}

    strategy = FedAvg(fraction_evaluate=share, min_evaluate_nodes=int(3 * share))
    with pytest.raises(DivergedError) as caught:
        run_legacy_loop(strategy, app, mlp().state_dict(), 3, 3, evaluate_fn=tested)
    assert caught.value.diverged_at == (1 if of_clients else 2)


# Replies.


def all_spoilt(*rounds: int) -> type[TorchClient]:
    return client(
        lambda self, server_round, result: (
            spoilt(self, result) if server_round in rounds else result
        )
    )


def test_a_single_round_without_a_used_reply_is_a_warning(
    federate, datasets, mlp, caplog
) -> None:
    run = federate(FedAvg(), mlp, datasets, rounds=4, client=all_spoilt(2, 4))
    assert [report.kept_previous for report in run.strategy.reports] == [
        False,
        True,
        False,
        True,
    ]
    said, _ = (text for text in caplog.messages if "min_replies" in text)
    assert "3 clients asked, 3 replied, 3 refused or lost: 3 x entry '0.weight'" in said


@pytest.mark.parametrize("strategy", [FedAvg, FedBN])
def test_two_rounds_with_values_that_are_not_finite_diverged_in_the_first(
    federate, datasets, mlp, strategy
) -> None:
    """No reply is used, so the model and the evaluated loss stay finite.

    FedBN's clients refuse to keep NaN.
    """
    run = federate(
        strategy(),
        mlp,
        datasets,
        rounds=5,
        client=all_spoilt(2, 3),
        fails=DivergedError,
    )
    assert len(run.strategy.reports) == 3
    assert run.error.diverged_at == 2
    assert "in round 2: every reply since round 2 contains non-finite values" in str(
        run.error
    )
    assert "'0.weight'" in str(run.error) or strategy is FedBN, (
        "the first reason is named"
    )


@pytest.mark.parametrize("strategy", [FedAvg, FedBN, FixBN])
@pytest.mark.parametrize("value", [NAN, 1e39], ids=["NaN", "not of float32"])
def test_an_input_of_one_client_that_no_model_takes_is_named_and_the_others_go_on(
    federate, datasets, mlp, strategy, value: float
) -> None:
    """The client's error has the code of the cause.

    The value 1e39 is finite in the data, such as a sentinel in float64 or bytes in half
    precision.
    """
    datasets[1].inputs[2, 3] = value
    run = federate(strategy(), lambda: mlp().float(), datasets, rounds=2)
    for report in run.strategy.reports:
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


@pytest.mark.parametrize("loss", BEFORE_A_STEP.values(), ids=BEFORE_A_STEP)
def test_a_loss_that_is_not_finite_before_a_step_is_no_fault_of_the_rate(
    federate, datasets, mlp, loss
) -> None:
    """The model is still as sent, and a client without the cause continues."""
    task = dataclasses.replace(CLASSIFICATION, training_loss=loss)
    run = federate(FedAvg(), mlp, datasets, rounds=3, task=task, fails=DivergedError)
    codes = [code for found in run.strategy.reports[0].codes.values() for code in found]
    assert codes == [FIRST_PASS_NOT_FINITE] * len(datasets)
    assert "learning-rate" not in str(run.error)


def test_large_weights_may_be_why(mlp, points) -> None:
    model, data = mlp(), points(9)
    task = dataclasses.replace(CLASSIFICATION, loss=BEFORE_A_STEP["class weights"])
    with pytest.raises(DataError):
        refuse_first_pass(model, data, task, 4)
    with torch.no_grad():
        model[0].weight.mul_(1e6)
    refuse_first_pass(model, data, task, 4)


@pytest.mark.parametrize("strategy", [FedAvg, FedBN, FedAdam])
def test_nan_in_the_inputs_of_all_clients_has_another_cause_than_the_rate(
    federate, datasets, mlp, strategy
) -> None:
    for points in datasets:
        points.inputs[0, 0] = math.inf
    run = federate(strategy(), mlp, datasets, rounds=3, fails=DivergedError)
    assert run.error.diverged_at == 1
    assert "learning-rate" not in str(run.error)


def test_nan_in_the_inputs_of_a_test_is_named(mlp, points) -> None:
    data, test = points(9), points(9)
    settings = LocalTraining(learning_rate=LearningRate(0.1), batch_size=4)
    one = TorchClient(mlp(), data, test, settings, partition_id=0)
    one.evaluate(one.get_parameters({}), {})
    test.inputs[4, 1] = NAN
    with pytest.raises(DataError) as raised:
        one.evaluate(one.get_parameters({}), {})
    assert raised.value.code == INPUTS_NOT_FINITE
    test.targets[:] = CLASSIFICATION.ignore
    loss, count, _ = one.evaluate(one.get_parameters({}), {})
    assert math.isnan(loss)
    assert count == 0, "no target counts, so nothing is wrong"


def test_targets_that_do_not_count_weigh_nothing_in_a_test(mlp, points) -> None:
    data = points(9)
    data.targets[2:] = CLASSIFICATION.ignore
    settings = LocalTraining(learning_rate=LearningRate(0.1), batch_size=4)
    one = TorchClient(mlp(), data, data, settings, partition_id=0)
    _, count, metrics = one.evaluate(one.get_parameters({}), {})
    assert count == 2
    assert metrics["examples-tested"] == 2


def test_a_client_without_a_target_that_counts_is_refused(
    federate, datasets, mlp
) -> None:
    """The client would halve the steps of the others.

    Its test reports only its size, because its NaN would become the loss of all
    clients.
    """
    datasets[1].targets[:] = CLASSIFICATION.ignore

    class Named(TorchClient):
        def __init__(self, model, train, test, *more, **options) -> None:
            super().__init__(
                model, train, {"own": test, "again": test}, *more, **options
            )

    run = federate(FedAvg(), mlp, datasets, rounds=2, client=Named)
    for report in run.strategy.reports:
        assert report.participants == [0, 2]
        assert report.diverged_at is None
        assert (
            report.evaluations.get("1", {"own-num-examples": 0})["own-num-examples"]
            == 0
        )
    for metrics in run.result.evaluate_metrics_clientapp.values():
        assert math.isfinite(metrics["own-loss"])


def test_a_loss_of_the_weights_is_not_the_inputs_fault(mlp, points) -> None:
    model = mlp()
    model[0].weight.data[0] = NAN
    assert math.isnan(evaluate(model, points(9)).loss)


def test_statistics_alone_that_are_not_finite_are_no_fault_of_the_rate(
    federate, datasets, mlp
) -> None:
    """This happens if a scaler skips a step after a half-precision overflow."""

    class Overflows(TorchClient):
        def fit(self, parameters, config):
            arrays, count, metrics = super().fit(parameters, config)
            arrays[4][:] = NAN
            return arrays, count, metrics

    run = federate(
        FedAvg(), mlp, datasets, rounds=3, client=Overflows, fails=DivergedError
    )
    codes = [code for found in run.strategy.reports[0].codes.values() for code in found]
    assert codes == [STATISTICS_NOT_FINITE] * len(datasets)
    assert "learning-rate" not in str(run.error)


def test_a_run_of_one_round_has_no_second(federate, datasets, mlp) -> None:
    assert (
        federate(
            FedAvg(), mlp, datasets, rounds=1, client=all_spoilt(1), fails=DivergedError
        ).error.diverged_at
        == 1
    )


@pytest.mark.parametrize("min_replies", [1, 4])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_step_of_values_that_are_not_finite_diverges_too(
    run_step, mlp, transport: str, min_replies: int
) -> None:
    data = client_data((5,), (6, 5, 9, 7))
    for points in data:
        points.inputs *= NAN
    made = synchronised(FedTAN, transport, min_replies=min_replies)
    run = run_step(
        made, mlp(), data, transport=transport, rounds=3, fails=DivergedError
    )
    assert run.error.diverged_at == 1
    assert "learning-rate" not in str(run.error)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("min_replies", [1, 4])
def test_nan_in_the_inputs_of_one_client_of_a_step_is_named(
    run_step, mlp, transport: str, min_replies: int
) -> None:
    """If no round can succeed without this client, its inputs are the cause."""
    data = client_data((5,), (6, 5, 9, 7))
    data[1].inputs[:] = NAN
    made = synchronised(FedTAN, transport, min_replies=min_replies)
    fails = RunFailedError if min_replies == 4 else None
    run = run_step(made, mlp(), data, transport=transport, rounds=2, fails=fails)
    for report in run.strategy.reports:
        named = [why for why in report.rejected.values() if "(partition 1)" in why]
        (node_id,) = (node for node, why in report.rejected.items() if why in named)
        assert report.codes[node_id] == {INPUTS_NOT_FINITE}
    if fails:
        assert "learning-rate" not in str(run.error)


def test_rounds_with_values_that_are_not_finite_count_if_they_follow_each_other(
    federate, datasets, mlp
) -> None:
    """Between two such rounds, the replies fail for another reason."""

    def fit(self, server_round, result):
        if server_round == 3:
            raise RuntimeError("disk full")
        return result if server_round in (1, 5) else spoilt(self, result)

    run = federate(FedAvg(), mlp, datasets, rounds=5, client=client(fit))
    kept = [report.kept_previous for report in run.strategy.reports]
    assert kept == [False, True, True, True, False]
    assert [report.diverged for report in run.strategy.reports] == [[]] * 5


@pytest.mark.parametrize(
    ("strategy", "named", "left_out"),
    [
        (
            FedWon(agc=0.1),
            "In small runs, this helped: a tenth of the learning-rate.",
            "agc=0.1, or",
        ),
        (FedWon(agc=0.01), "agc=0.01. In small runs, this helped: a tenth", "agc=0.1"),
        (
            FedAdam(eta=100.0),
            (
                "the server's steps are too large: server-learning-rate=100. In small"
                " runs, its default, 0.1, helped."
            ),
            "T*",
        ),
        (
            FedAdam(),
            "the server's steps are too large: lower server-learning-rate=0.1.",
            "default",
        ),
        (
            FedAvgM(server_learning_rate=9.0),
            "server-learning-rate=9. In small runs, its default, 1, helped.",
            "eta=",
        ),
        (FedProx(proximal_mu=0.0), "a lower learning-rate", "proximal-mu"),
        (FedBS(), "a lower learning-rate", "proximal-mu"),
        (
            combined(FixBN, FedAdam)(freeze_at=1, eta=9.0),
            "frozen after round T*=1",
            "lower learning-rate",
        ),
        (
            combined(FixBN, FedAdam)(freeze_at=1, eta=9.0),
            "its default, 0.1, helped.",
            "training steps",
        ),
        (
            combined(FixBN, FedProx)(freeze_at=1, proximal_mu=0.01),
            "With proximal-mu=0.01",
            "training steps",
        ),
        (FixBN(freeze_at=3), "the training steps are too large", "frozen after"),
    ],
)
def test_the_advice_names_the_settings_that_count(
    strategy: FedAvg[Any], named: str, left_out: str
) -> None:
    facts = Facts(0, 9, split_state({}), {})
    states = strategy.methods.begin(facts)
    advice = " ".join(strategy.methods.advice(states, 2, facts.parts))
    assert named in advice
    assert left_out not in advice


def test_a_run_in_which_no_round_used_a_reply_fails(
    federate, datasets, mlp, same_bits
) -> None:
    def fit(self, server_round, result):
        if self.partition_id < 2:
            raise RuntimeError("disk full")
        return result

    run = federate(
        FedAvg(min_replies=2),
        mlp,
        datasets,
        rounds=2,
        client=client(fit),
        fails=NothingTrainedError,
    )
    same_bits(run.state, run.history[0])
    assert "6 clients asked, 6 replied, 4 refused or lost: 4 x error 2: " in str(
        run.error
    )


# One ConfigError of all clients.


def refusing(
    where: str,
    says: Callable[[int], str] = lambda partition: "agc=-1 must be at least 0",
) -> Any:
    """Return a wrap whose clients raise a ConfigError in ``where``.

    A client does not raise it if ``says`` returns an empty text.
    """

    def wrap(client_fn: Any) -> ClientApp:
        whole, app = client_app(client_fn), ClientApp()

        def answer(message: Message, context: Any) -> Message:
            if message.metadata.message_type == where and (
                text := says(context.node_config["partition-id"])
            ):
                raise ConfigError(text)
            return whole(message, context)

        for register in (app.train(), app.evaluate(), app.query()):
            register(answer)
        return app

    return wrap


@pytest.mark.parametrize("where", ["query", "train", "evaluate"])
def test_a_config_error_of_all_clients_ends_the_run_in_the_first_round(
    federate, datasets, mlp, where: str
) -> None:
    strategy = FedAvg()
    with pytest.raises(
        ConfigError,
        match=(
            r"^agc=-1 must be at least 0\n\(All 3 clients that were asked raised this"
        ),
    ):
        federate(strategy, mlp, datasets, wrap=refusing(where))
    assert len(strategy.reports) == 1


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_it_ends_a_run_with_a_synchronised_step(run_step, mlp, transport: str) -> None:
    class Refusing(TorchClient):
        def fit(self, parameters, config):
            raise ConfigError("local_steps=-1 must be at least 0")

    made = synchronised(FedTAN, transport)
    with pytest.raises(ConfigError, match=r"^local_steps=-1 must be at least 0\n"):
        run_step(
            made,
            mlp(),
            client_data((5,), (6, 5, 9)),
            transport=transport,
            client=Refusing,
        )


@pytest.mark.parametrize("where", ["train", "evaluate"])
def test_one_client_with_a_config_error_does_not_end_a_run_in_which_others_work(
    federate, datasets, mlp, where
) -> None:
    """If only a share is asked, it may be the only client of a round."""
    shares = {
        "fraction_train": 0.34,
        "fraction_evaluate": 0.34,
        "min_train_nodes": 1,
        "min_evaluate_nodes": 1,
    }
    strategy = FedAvg(**shares, seed=1)
    federate(
        strategy,
        mlp,
        datasets,
        rounds=6,
        wrap=refusing(where, lambda partition: "bad" if partition == 2 else ""),
    )
    refused = [report.server_round for report in strategy.reports if report.rejected]
    assert refused, "it was asked"
    assert refused[0] > 1


def test_it_does_not_end_a_run_in_which_a_client_has_trained(
    federate, datasets, mlp
) -> None:
    def fit(self, server_round, result):
        if server_round > 1:
            raise ConfigError("no disk")
        return result

    first = FedAvg()
    federate(first, mlp, datasets, client=client(fit))
    assert [report.kept_previous for report in first.reports] == [False, True, True]
    resumed = FedAvg()
    resumed.load_state_dict(first.state_dict(), 1)
    federate(resumed, mlp, datasets, client=client(fit))
    assert [report.server_round for report in resumed.reports] == [2, 3]


def test_it_does_not_end_a_run_in_which_a_client_was_tested(
    federate, datasets, mlp
) -> None:
    """Nobody trains, so only an earlier test shows that the clients work."""
    strategy = FedAvg(fraction_train=0.0)
    late = refusing(
        "evaluate", lambda partition: "no disk" if len(strategy.reports) > 1 else ""
    )
    federate(strategy, mlp, datasets, rounds=3, wrap=late)
    assert [len(report.rejected) for report in strategy.reports] == [0, 3, 3]


# Loops that do not announce their end.


def raising(partitions: set[int] = {0, 1, 2}, until: int = 99) -> type[TorchClient]:  # noqa: B006
    """Return a client that cannot train, on these partitions, before round ``until``."""

    def fit(self, server_round, result):
        if self.partition_id in partitions and server_round < until:
            raise RuntimeError("disk full")
        return result

    return client(fit)


class OwnStart(FedAvg):
    """A project's strategy with its own loop, like Flower's advanced example.

    It may skip the tests.
    """

    tests = False

    def start(self, grid, initial_arrays, num_rounds=3, **_: Any) -> Any:
        arrays = initial_arrays
        for current in range(1, num_rounds + 1):
            messages = self.configure_train(current, arrays, ConfigRecord(), grid)
            arrays = (
                self.aggregate_train(
                    current, grid.send_and_receive(messages, timeout=60)
                )[0]
                or arrays
            )
            if self.tests:
                messages = self.configure_evaluate(
                    current, arrays, ConfigRecord(), grid
                )
                self.aggregate_evaluate(
                    current, grid.send_and_receive(messages, timeout=60)
                )
        return Result(arrays=arrays)


@pytest.mark.parametrize("tests", [False, True])
def test_a_start_of_the_users_own_that_trains_nothing_fails(
    tests: bool, federate, datasets, mlp
) -> None:
    strategy = OwnStart()
    strategy.tests = tests
    with pytest.raises(
        NothingTrainedError,
        match=r"(?s)6 clients asked, 6 replied, 6 refused or lost: 6 x .*full",
    ):
        federate(strategy, mlp, datasets, client=raising(), rounds=5)
    assert len(strategy.reports) == 2
    late = OwnStart()
    assert (
        len(
            federate(
                late, mlp, datasets, client=raising(until=2), rounds=3
            ).strategy.reports
        )
        == 3
    )
    some = OwnStart(min_replies=2)
    assert federate(
        some, mlp, datasets, client=raising({1}), rounds=3
    ).strategy.reports[2].participants == [0, 2]
