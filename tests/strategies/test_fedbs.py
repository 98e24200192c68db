"""FedBS with validation losses and zero losses, and the round of its switch."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from fedbn_flwr.batchnorm.averaging import average
from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.client import TorchClient
from fedbn_flwr.client.client_data import ClientData
from fedbn_flwr.errors import DataError, NothingTrainedError, ReplyError
from fedbn_flwr.messages.protocol import VALIDATION_LOSS
from fedbn_flwr.messages.records import from_record, tensors
from fedbn_flwr.server.methods.method import Ask, Facts, Node, Replies, Reply
from fedbn_flwr.server.rounds.replies import Terms
from fedbn_flwr.strategies.fedbs import FedBS, FedBSMethod, FedBSParams, FedBSState
from fedbn_flwr.strategies.fixbn import FixBNMethod, FixBNParams
from fedbn_flwr.training import CLASSIFICATION
from fedbn_flwr.training.evaluation import evaluate

SIZES = (6, 13, 9)


def replies(*losses: float) -> list[Reply]:
    sent = []
    for i, loss in enumerate(losses):
        state = {"w": np.full(2, float(i))}
        sent.append(Reply(Node(i, i), 10.0 * (i + 1), state, {"train-loss": loss}))
    return sent


PARTS = split_state({"w": None})


def facts(number: int) -> Facts:
    return Facts(number, None, PARTS, {})


def averaged(
    method: FedBSMethod, state: FedBSState, number: int, sent: list[Reply]
) -> Any:
    """Return the model and the state that a round computes."""
    weights = {phase.name: phase.weights for phase in method.phases()}
    weighed = Replies(sent, weights[method.phase_name(state, number)])
    mean = average([r.state for r in sent], weighed.weights, PARTS)
    return method.aggregate(state, facts(number), weighed, mean)


def test_with_validation_data_the_weights_are_the_losses_of_the_trained_models_there(
    federate_mlp, points, mlp
):
    """The test evaluates each sent model by hand on the client's validation data."""
    aside = [points(5, seed) for seed in (7, 8, 9)]

    class Client(TorchClient):
        def __init__(self, model, train, test, settings, context, **options):
            validation = aside[context.node_config["partition-id"]]
            tests = {"": test, "validation": validation}
            super().__init__(model, train, tests, settings, context=context, **options)

    strategy = FedBS(fedbs_eps=0.0, loss_key=VALIDATION_LOSS)
    run = federate_mlp(strategy, rounds=1, client=Client)
    losses, weights, model = [], [], mlp()
    replies = run.grid.of("train", replies=True)
    for i, (data, reply) in enumerate(zip(aside, replies, strict=True)):
        state = from_record(reply.content["arrays"])
        model.load_state_dict(tensors(state))
        losses.append(evaluate(model, data).loss)
        weights.append(state["0.weight"])
        said = run.reports[0].clients[str(i)]["validation-loss"]
        assert said == pytest.approx(losses[i])
    wanted = np.average(weights, axis=0, weights=losses)
    np.testing.assert_allclose(run.state["0.weight"], wanted, rtol=1e-12)


def test_a_client_without_a_validation_example_is_left_out_with_the_reason(
    federate_mlp, points, mlp
) -> None:
    text = "the loss on its validation data, but it has none"
    with pytest.raises(NothingTrainedError, match=text):
        federate_mlp(FedBS(loss_key=VALIDATION_LOSS), rounds=1)
    empty = ClientData(points(6), {"validation": points(0)})
    with pytest.raises(DataError, match=text):
        empty.validation_loss(mlp(), CLASSIFICATION)


@pytest.mark.parametrize(
    ("losses", "mean"), [((0.0, 0.0, 0.0), 1.0), ((3.0, 0.0, 1.0), 0.5)]
)
def test_zero_losses_have_equal_weights_where_all_are_zero(
    losses: tuple[float, ...], mean: float
) -> None:
    """A zero loss among other losses gets no weight."""
    model, _ = averaged(FedBSMethod(FedBSParams()), FedBSState(), 1, replies(*losses))
    np.testing.assert_allclose(model["w"], mean, rtol=1e-14)


def test_the_switch_happens_once_in_the_round_of_the_rule() -> None:
    """The rule needs two consecutive rounds with a spread of at most eps.

    A round with a single reply does not count, and a wide round restarts the count.
    """
    method = FedBSMethod(FedBSParams(fedbs_eps=0.1, fedbs_rounds=2))
    state = FedBSState()
    near, wide = (1.0, 1.1, 0.9), (1.0, 2.0, 0.5)
    for server_round, losses in enumerate([near, wide, near, (1.0,), near], start=1):
        assert method.phase_name(state, server_round) == "loss-weighted"
        assert method.on_clients(state, facts(server_round)) == []
        _, state = averaged(method, state, server_round, replies(*losses))
    assert state.switched_after == 5
    assert method.phase_name(state, 5) == "loss-weighted"
    assert method.phase_name(state, 6) == "proximal"
    assert method.on_clients(state, facts(6)) == [
        Ask("proximal", {"fedbn-flwr.proximal-mu": 0.01})
    ]
    model, state = averaged(method, state, 6, replies(*wide))
    assert state.switched_after == 5
    assert model["w"].tolist() == [1.0, 1.0]


def test_a_spread_equal_to_eps_counts() -> None:
    method = FedBSMethod(FedBSParams(fedbs_eps=0.5, fedbs_rounds=1))
    # The population deviation is exactly 0.5.
    _, state = averaged(method, FedBSState(), 1, replies(1.0, 2.0))
    assert state.switched_after == 1


# Values of a loss or a delta.
REFUSED = (None, float("nan"), float("inf"), float("-inf"), -0.1, -5e-324)
ACCEPTED = (-0.0, 0.0, 0, 5e-324, 1.0, sys.float_info.max)


@pytest.mark.parametrize("value", REFUSED + ACCEPTED)
@pytest.mark.parametrize(
    "method",
    [FedBSMethod(FedBSParams()), FixBNMethod(FixBNParams(freeze_at="auto"))],
    ids=["loss", "delta"],
)
def test_any_finite_number_from_0_on_is_accepted_and_nothing_else(
    method, value: float | None
) -> None:
    phase = method.phases()[0]
    (asked,) = phase.extras
    terms = Terms(
        strategy=method.name,
        facts=Facts(1, None, PARTS, {}, phase),
        hooks=frozenset(),
        arrays_key="arrays",
        count_key="num-examples",
    )
    metrics = {} if value is None else {asked.key: value}
    refused = pytest.raises(ReplyError, match=f"metric '{asked.key}' is")
    with nullcontext() if value in ACCEPTED else refused:
        terms.check(Reply(Node(0, 0), 1.0, {}, metrics))
