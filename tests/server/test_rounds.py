"""The loop over rounds equals Flower's loop.

Other tests are about a strategy's checkpoint and the hash of the expected local state.
"""

from __future__ import annotations

import functools
import re
import shutil
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from torch import Tensor, nn

from fedbn_flwr import client_app, strategies
from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.client.kept import Folder, Memory
from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.messages.protocol import USED_SHA256, Continuity
from fedbn_flwr.messages.records import from_record, to_record
from fedbn_flwr.server.methods.method import Ask, Method, Node
from fedbn_flwr.server.rounds.dispatch import address, in_order
from fedbn_flwr.server.runs.kept import Kept
from fedbn_flwr.server.runs.round_report import RoundReport
from fedbn_flwr.server.runs.run_state import Run
from fedbn_flwr.strategies import (
    FedAvg,
    FedAvgM,
    FedBN,
    FixBN,
    Scaffold,
    StaticBN,
    Strategy,
)
from fedbn_flwr.training import LocalTraining
from fedbn_flwr.training.client_hook import ClientHook
from tests.support.bad_replies import lose_replies
from tests.support.checkpoints import bits, through_a_file
from tests.support.federation import torch_clients
from tests.support.written_out import close

SIZES = (8, 12)


def run_of(strategy: Any, timeout: float = 1.0) -> Run:
    """Return the strategy's run with another timeout."""
    strategy.run.start.timeout = timeout
    return strategy.run


RECALIBRATED = functools.partial(FedAvg, recalibrate=True)
TUNED = functools.partial(FixBN, freeze_at=1, fine_tune=1)


@pytest.mark.parametrize("make", [RECALIBRATED, Scaffold, TUNED])
def test_going_back_to_a_round_is_as_if_the_run_had_ended_there(
    federate_mlp, same_bits, make
) -> None:
    """The strategy has the model, the state and the reports of that round.

    Clients tune their models as in that round.
    """
    ends = {}

    def end_round(server_round: int, arrays: ArrayRecord, metrics: Any) -> None:
        state = through_a_file(strategy.state_dict())
        ends[server_round] = from_record(arrays), metrics, state

    strategy = make(on_round_end=end_round)
    run = federate_mlp(strategy, rounds=4)
    model, told, state = ends[2]
    third = run.grid.of("train")[2 * len(SIZES)].content
    found = strategy.go_back(third["arrays"], state, 2)
    same_bits(from_record(found), model)
    for kind in ("train_metrics_clientapp", "evaluate_metrics_clientapp"):
        assert told[kind] == getattr(run.result, kind)[2]
    assert bits(strategy.state_dict()) == bits(state)
    assert [report.server_round for report in strategy.reports] == [1, 2]
    asked = dict(run.grid.config("evaluate")[2 * len(SIZES) - 1])
    asked.pop(USED_SHA256, None)  # names a local state
    assert strategy.run.test_config(2) == asked


@pytest.mark.parametrize(
    ("saved_by", "more", "named"),
    [
        (FedAvg, {}, "scaffold.variates"),
        (FedAvgM, {}, "fedavgm"),
        (Scaffold, {"volatile": []}, "volatile"),
        (
            functools.partial(Scaffold, personal="3"),
            {},
            r"'3\.bias' is kept in only one",
        ),
    ],
)
def test_the_checkpoint_of_another_method_is_refused_before_anything_is_sent(
    saved_by, more: dict[str, Any], named: str, federate_mlp, mlp
) -> None:
    saved = federate_mlp(saved_by(), rounds=1).strategy.state_dict()
    strategy, grid = Scaffold(), Mock()
    strategy.load_state_dict({**saved, **more}, 1)
    for _ in range(2):  # a second start must not begin at round 1 without a word
        with pytest.raises(ConfigError, match=named):
            strategy.start(
                grid=grid, initial_arrays=to_record(mlp().state_dict()), num_rounds=2
            )
        assert grid.mock_calls == []


@pytest.mark.parametrize(
    ("code", "asked_again"),
    [
        (ErrorCode.NODE_UNAVAILABLE, True),
        (ErrorCode.CLIENT_APP_RAISED_EXCEPTION, False),
    ],
)
def test_a_node_lost_in_the_first_round_after_a_resume_has_not_answered(
    federate_mlp, monkeypatch, code: int, asked_again: bool
) -> None:
    """If the SuperLink answers, the node has not restored its part.

    The server must send the expected hash again.
    """
    saved = federate_mlp(FedBN(), rounds=2).strategy.state_dict()
    again = FedBN(fraction_evaluate=0.0)
    again.load_state_dict(
        {**saved, "kept": {**saved["kept"], "hashes": {}}, "initialised": []}, 2
    )
    lose_replies(monkeypatch, {3: 1}, code)
    run = federate_mlp(again, rounds=4)
    told = []
    for message in run.grid.of("train"):
        config = message.content["config"]
        if "fedbn-flwr.local-sha256" in config:
            partition = run.grid.partition(message.metadata.dst_node_id)
            told.append((config["server-round"], partition))
    assert sorted(told) == [(3, 0), (3, 1)] + [(4, 1)] * asked_again


def test_a_node_with_unknown_partition_is_not_sent_an_expected_hash() -> None:
    """The value "none" would discard a state that another message may expect."""
    kept = Kept({"0": "a" * 64}, is_resumed=True)
    keys = "fedbn-flwr.local-sha256", "fedbn-flwr.used-sha256"
    for partition, told in ((0, "a" * 64), (1, "none")):
        assert kept.config(Node(7, partition)) == dict.fromkeys(keys, told)
    assert kept.config(Node(7, None)) == {}


def asked_of(run: Run, report: RoundReport, nodes: list[Node]) -> Any:
    """Return a round's messages to these nodes, made without a federation."""
    run.reports = [report]
    return address(run, nodes, "train", ArrayRecord(), {}, report.train)


@pytest.mark.parametrize(
    ("partitions", "read_before"),
    [((0, 1, 2), [[], [0, 1], [0, 1], [0, 1, 2]]), ((0, 1, None), [[], [], [], []])],
)
def test_a_reply_is_read_once_as_soon_as_all_before_it_are_there(
    partitions: tuple, read_before: list[list[int]]
) -> None:
    """All replies are awaited if a reply may still name its partition.

    ``read_before`` lists the replies that are read before the next reply arrives. A
    node that replies twice to its message counts once. The reason of a node that is
    silent names the replies of nodes that were not asked.
    """
    report, strategy = RoundReport(1, "train"), FedAvg(parts=split_state({}))
    run = run_of(strategy, 60.0)
    nodes = [Node(7 + i, partition) for i, partition in enumerate(partitions)]
    run.nodes._nodes = {node.node_id: node for node in nodes}
    silent, other = Node(20, 20), asked_of(run, report, [Node(30)]).messages[0]
    # not in the order of the result
    sent = asked_of(run, report, [*nodes[::-1], silent])
    read = []
    found = []

    def arriving():
        yield Message(Error(ErrorCode.NODE_UNAVAILABLE, "gone"), reply_to=other)
        for i in (1, 0, 0, 2):
            yield Message(RecordDict(), reply_to=sent.messages[2 - i])
            found.append(list(read))

    for node, _ in in_order(run, sent, arriving()):
        read.append(node.node_id - 7)
    assert (read, found) == ([0, 1, 2], read_before)
    assert re.search(r"never asked \(1\): .*gone", report.rejected[20])


@pytest.mark.parametrize("make", [Scaffold, FedBN])
@pytest.mark.parametrize("loses", [True, False])
@pytest.mark.parametrize("cause", ["give it a state folder", "copy the files"])
def test_a_client_that_lost_what_it_kept_is_named(
    make: type[FedAvg],
    loses: bool,
    cause: str,
    federate_mlp,
    caplog,
    tmp_path,
):
    """SCAFFOLD's variate is zero again, so no missing entry reveals the loss.

    FedBN's rounds are not undone. The client is refused once and then begins again.
    """

    def forgetful(client_fn):
        def client(context):
            if "copy" in cause:
                context.node_config["state-dir"] = str(tmp_path)
            places = (Memory(context), Folder(tmp_path, "r", 1))
            names = [name for place in places for name in place.names()]
            is_lost = loses and context.node_config["partition-id"] == 1
            if is_lost and names and names[-1].startswith("000002."):
                context.state = RecordDict()
                shutil.rmtree(tmp_path / "r/partition-1", ignore_errors=True)
            return client_fn(context)

        return client_app(client)

    strategy = make()
    strategy.continuity = Continuity("r")
    federate_mlp(strategy, rounds=4, wrap=forgetful)
    lost = [text for text in caplog.messages if "had lost its local state" in text]
    assert len(lost) == loses
    assert all("(partition 1)" in text and cause in text.lower() for text in lost)


class Counts(ClientHook):
    """A penalty that grows with the number of the client's rounds."""

    def receive(self, sent, kept) -> None:
        self.rounds = kept.get("rounds", torch.zeros(1)) + 1

    def penalty(self, model: nn.Module) -> Tensor:
        return self.rounds * model[1].weight.sum()

    def keep(self):
        return {"rounds": self.rounds}


class CountedMethod(Method):
    name = "counted"
    client_hooks = {"counts": lambda context: Counts()}

    def on_clients(self, state: Any, facts: Any) -> list[Ask]:
        return [Ask("counts", {})]


class Counted(Strategy):
    method = CountedMethod


@pytest.mark.parametrize(
    "make",
    [
        FedBN,
        FedAvgM,
        Scaffold,
        functools.partial(FixBN, freeze_at=1),
        Counted,
    ],
)
def test_each_further_start_of_ones_own_begins_anew(
    make, mlp, datasets, same_bits, monkeypatch
) -> None:
    """A hook may keep state that its method does not declare. Each start has its own."""
    monkeypatch.setattr(strategies, "_REGISTERED", [CountedMethod])
    strategy = make(fraction_evaluate=0.0)
    app = client_app(
        torch_clients(mlp, datasets, LocalTraining(learning_rate=0.1, batch_size=4))
    )
    ends = []
    with InProcessGrid(app, len(datasets)) as grid:
        for _ in range(3):
            arrays = to_record(mlp().state_dict())
            for number in (1, 2):
                messages = strategy.configure_train(
                    number, arrays, ConfigRecord(), grid
                )
                replies = grid.send_and_receive(messages)
                arrays, _ = strategy.aggregate_train(number, replies)
            ends.append(from_record(arrays))
            second = "frozen" if strategy.name == "fixbn" else "train"
            found = [(report.server_round, report.phase) for report in strategy.reports]
            assert found == [(1, "train"), (2, second)]
    for end in ends[1:]:
        same_bits(ends[0], end)


@pytest.mark.parametrize("own", ["start", "aggregate_train"])
@pytest.mark.parametrize(
    "make",
    [
        functools.partial(FedBN, eval_on="averaged-bn"),
        *(StaticBN, RECALIBRATED, FedAvg),
    ],
)
def test_own_code_is_told_how_to_complete_the_model(
    federate_mlp, caplog, make, own: str
) -> None:
    """``evaluate_fn`` and the result once silently had the initial statistics."""

    def said(**callback: Any) -> int:
        caplog.clear()
        strategy = make(**callback)
        if own == "start":
            strategy.start = functools.partial(FlowerFedAvg.start, strategy)
        else:
            averaging = strategy.aggregate_train
            strategy.aggregate_train = lambda *replies: averaging(*replies)
        federate_mlp(strategy, rounds=2)
        return caplog.text.count("strategy.for_evaluate_fn(server_round, arrays)")

    assert said() == (make is not FedAvg)
    assert said(on_round_end=lambda server_round, arrays, metrics: None) == 0


def test_a_strategy_object_takes_another_model_in_a_later_run() -> None:
    run = run_of(FedAvg())
    run.set_model(to_record({"a": np.zeros(1), "b": np.zeros(2)}))
    run.set_model(to_record({"c": np.zeros(1), "d": np.zeros(1)}))
    with pytest.raises(
        ConfigError, match="lacks 1 of the entries that it had at the start \\('c'"
    ):
        run.set_model(to_record({"d": np.zeros(1)}))


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_messages_that_the_strategy_did_not_make_are_refused(
    federate_mlp, kind: str
) -> None:
    """Training once ended with an IndexError, and client tests were skipped."""

    def configure(self, server_round, arrays, config, grid):
        content = RecordDict(
            {"arrays": arrays, "config": ConfigRecord({"server-round": server_round})}
        )
        return [Message(content, node_id, kind) for node_id in grid.get_node_ids()]

    mine = type("Mine", (FedAvg,), {f"configure_{kind}": configure})
    with pytest.raises(ConfigError, match=rf"super\(\)\.configure_{kind}\(\)"):
        federate_mlp(mine())


def test_arguments_that_change_in_the_run_hold_for_the_next_messages(
    federate_mlp,
) -> None:
    """Fewer clients train after round 1 and test after the training of round 2."""
    strategy = FedAvg(min_train_nodes=1, min_evaluate_nodes=1)

    def after_training(server_round: int, *_: Any) -> None:
        strategy.fraction_evaluate = 1.0 if server_round == 1 else 0.5

    def after_round(*_) -> None:
        strategy.fraction_train = 0.5

    strategy.on_replies, strategy.on_round_end = after_training, after_round
    federate_mlp(strategy, rounds=2)
    numbers = [(report.asked, len(report.evaluations)) for report in strategy.reports]
    assert numbers == [(2, 2), (1, 1)]


def test_a_class_may_average_the_replies_by_itself(federate_mlp) -> None:
    class Own(FedAvg):
        def aggregate_train(self, server_round, replies):
            return FlowerFedAvg.aggregate_train(self, server_round, replies)

    ours, own = (federate_mlp(kind()) for kind in (FedAvg, Own))
    counter = "1.num_batches_tracked"  # it has its own rule
    close(own.state, {**ours.state, counter: own.state[counter]}, atol=0)
    assert [report.rejected for report in own.reports] == [{}] * 3


def test_a_function_that_is_assigned_to_a_strategy_sees_whole_replies(
    federate_mlp,
) -> None:
    strategy, received = FedAvg(), []
    own = strategy.aggregate_train

    def aggregate(server_round: int, replies: Any) -> Any:
        def noted():
            for reply in replies:
                received.append(reply)
                yield reply

        return own(server_round, noted())

    strategy.aggregate_train = aggregate  # type: ignore[method-assign]
    federate_mlp(strategy, rounds=1)
    assert ["arrays" in reply.content for reply in received] == [True, True]


def test_a_split_with_personal_entries_comes_before_the_methods(mlp) -> None:
    parts = split_state(mlp(), personal="3")
    with pytest.raises(ConfigError, match=r"personal entry '3\.weight'"):
        FedAvg().parts = parts
    FedAvg(personal="3").parts = parts
