"""A client lost during the step is dropped and named, and the round equals one without it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr.client import TorchClient
from fedbn_flwr.errors import ConfigError, NothingTrainedError
from fedbn_flwr.server import synchronised_step
from fedbn_flwr.strategies import FedTAN
from fedbn_flwr.training.turns import interrupted
from fedbn_flwr.transport import Barrier, Dropped, Member, RetryStep
from fedbn_flwr.transport.polling_grid import PollingGrid
from tests.support.federation import Outcome
from tests.support.synchronised import TRANSPORTS, client_data, synchronised
from tests.support.versioned import Versioned

SIZES = (6, 5, 9, 7)
BAD = 1
Fault = Callable[[Tensor], Tensor]


class Gremlin(Versioned):
    """Sits between two BatchNorm layers; does nothing until it is given a fault. Its state has a version."""

    fault: Fault | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.fault(x) if self.fault else x


@pytest.fixture
def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        first = [nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.2)]
        return nn.Sequential(*first, Gremlin(), nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()


class PowerCut(Exception):
    pass


def cut(x: Tensor) -> Tensor:
    raise PowerCut("lights out")


def cut_backward(x: Tensor) -> Tensor:
    x.register_hook(cut)
    return x


def not_a_number(x: Tensor) -> Tensor:
    return x * float("nan")


def wrong_shape(x: Tensor) -> Tensor:
    F.batch_norm(torch.ones(4, 7, dtype=x.dtype) * x.sum(), None, None, training=True)
    return x


def broken(fault: Fault | None, *, fit: Callable[..., Any] | None = None) -> type[TorchClient]:
    """A client with a fault in round 1 in partition BAD; ``fit`` takes the place of its training."""

    class Broken(TorchClient):
        def fit(self, parameters, config):
            if self.partition_id == BAD and config["server-round"] == 1:
                self.model[4].fault = fault
                if fit:
                    return fit(self, parameters, config)
            return super().fit(parameters, config)

    return Broken


@pytest.fixture
def data():
    return client_data((5,), SIZES)


WITHOUT: list[Outcome] = []


@pytest.fixture
def without(run_step, model, data):
    """The run in which the broken client is not there in round 1, once for all tests."""
    if not WITHOUT:
        made = synchronised(FedTAN, "barrier")
        WITHOUT.append(run_step(made, model, data, rounds=2, hide={1: {BAD}}, local_steps=3, batch_size=4))
    return WITHOUT[0]


FAULTS = {
    "raises in the forward pass": (cut, None, "lights out"),
    "raises in the backward pass": (cut_backward, None, "lights out"),
    "sends NaN": (not_a_number, None, "not finite in exchange 'mean/1/6'"),
    "sends a wrong shape": (
        wrong_shape,
        None,
        "of call 1 where the others called BatchNorm layer '6'",
    ),
    "dies before the first exchange": (None, lambda *_: cut(torch.ones(1)), "lights out"),
    "does not synchronise": (None, lambda self, p, c: (list(p), 5, {}), ""),
}


def test_in_one_process_no_client_is_late_while_another_computes(run_step, model, data) -> None:
    """Together the clients take longer than the timeout of an exchange."""
    seconds = 0.4
    model[4].fault = lambda x: (time.sleep(seconds * (len(x) > 2)), x)[1]  # not of the two examples of the first try
    done = run_step(synchronised(FedTAN, "barrier", fedtan_timeout=2.5 * seconds), model, data, batch_size=4)
    assert [report.rejected for report in done.strategy.reports] == [{}]


def test_an_interrupted_step_leaves_no_client_waiting(monkeypatch) -> None:
    """After Ctrl-C the command ended only with the timeout of the exchange, in the threads that wait at the barrier."""
    ended: list[BaseException] = []

    class Barriers:
        def open_barrier(self, barrier_id: str, barrier: Barrier) -> None:
            self.barrier = barrier

        def close_barrier(self, barrier_id: str) -> None:
            pass

    def client() -> None:
        reducer = barriers.barrier.reducer(1)
        reducer.begin()
        try:
            reducer.reduce("mean/0", torch.ones(2))
        except (Dropped, RetryStep) as error:
            ended.append(error)

    def interrupt(*_: Any) -> None:
        waiting.start()
        while not barriers.barrier.bytes_up:
            time.sleep(0.01)
        raise KeyboardInterrupt

    barriers, waiting = Barriers(), threading.Thread(target=client, daemon=True)
    monkeypatch.setattr(synchronised_step, "send_until", interrupt)
    members = {node_id: Member(1, 2, f"node {node_id}") for node_id in (1, 2)}
    with pytest.raises(KeyboardInterrupt):
        synchronised_step.step_by_barrier(None, barriers, [], members, synchronised_step.Limits(60, 60, 1))
    waiting.join(10)
    assert len(ended) == 1


@pytest.mark.parametrize(("transport", "simulated"), [*((c, False) for c in TRANSPORTS), ("channel", True)])
@pytest.mark.parametrize("kind", FAULTS)
def test_a_round_equals_one_without_the_lost_client(
    run_step, model, data, without, same_bits, monkeypatch, transport: str, kind: str, simulated: bool
) -> None:
    """In Flower's simulation, too, where by channel a client that is only late ends the run."""
    if simulated:
        monkeypatch.setattr(synchronised_step, "in_simulation", lambda grid: True)
    fault, fit, said = FAULTS[kind]
    if kind == "does not synchronise" and transport == "messages":
        fit = answers_with_a_model
    made = synchronised(FedTAN, transport)
    done = run_step(
        made, model, data, transport=transport, rounds=2, client=broken(fault, fit=fit), local_steps=3, batch_size=4
    )
    assert done.seconds < 19, "nobody waited for the timeout of 20 s"
    first, second = made.reports
    node_id = done.grid.get_node_ids()[BAD]
    assert list(first.rejected) == [node_id]
    assert first.rejected[node_id].startswith(f"node {node_id} (partition {BAD}): ")
    assert said in first.rejected[node_id]
    assert first.participants == [0, 2, 3]
    for server_round in (1, 2):
        same_bits(done.history[server_round], without.history[server_round])
    assert second.rejected == {}, "the next round begins with all"
    assert second.participants == [0, 1, 2, 3]


class LayerByDomain(nn.Module):
    """One of two layers of the same width, by the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm1d(5), nn.BatchNorm1d(5)])

    def forward(self, x: Tensor) -> Tensor:
        return self.norms[int(x.mean() > 50)](x)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_client_that_calls_another_layer_of_the_same_width_is_dropped_by_name(run_step, data, transport: str) -> None:
    model = nn.Sequential(LayerByDomain(), nn.Linear(5, 3)).double()
    data[BAD].inputs[:] += 100
    done = run_step(synchronised(FedTAN, transport), model, data, transport=transport)
    said = "called BatchNorm layer '0.norms.1' where the others called BatchNorm layer '0.norms.0': "
    assert said in done.reason(BAD)
    assert np.array_equal(done.state["0.norms.1.running_mean"], np.zeros(5)), "no reply has a batch of this layer"
    assert done.strategy.reports[0].participants == [0, 2, 3]


class Skipping(nn.Module):
    """Its last BatchNorm layer is skipped for large inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.BatchNorm1d(5), nn.BatchNorm1d(5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        return self.head(y if x.mean() > 50 else y + self.block(y))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_client_that_skips_a_layer_is_dropped_by_name(run_step, data, same_bits, transport: str) -> None:
    """It has finished the step before the others; the others repeat it, as if it were not there."""
    model = Skipping().double()
    data[BAD].inputs[:] += 100
    done = run_step(synchronised(FedTAN, transport), model, data, transport=transport, local_steps=2)
    assert "had finished the step where the others called BatchNorm layer 'block': " in done.reason(BAD)
    assert "; the step was redone without it" in done.reason(BAD)
    assert done.strategy.reports[0].participants == [0, 2, 3]
    same_bits(done.state, run_step(synchronised(FedTAN), model, data, hide={1: {BAD}}, local_steps=2).state)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_client_that_calls_a_layer_more_is_dropped_by_name(run_step, data, same_bits, caplog, transport: str) -> None:
    """The others have finished the step, with its batch in it."""
    model = Skipping().double()
    for i in {*range(len(SIZES))} - {BAD}:
        data[i].inputs[:] += 100
    with caplog.at_level(logging.WARNING, logger="flwr"):
        done = run_step(synchronised(FedTAN, transport), model, data, transport=transport, local_steps=2)
    for said in ("called BatchNorm layer 'block' where the others had finished", "the synchronised step keeps its"):
        assert said in done.reason(BAD)
        assert said in caplog.text
    assert done.strategy.reports[0].participants == [0, 2, 3]
    same_bits(done.state, run_step(synchronised(FedTAN), model, data, local_steps=2).state)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_run_in_which_too_few_call_the_same_layers_fails_with_the_cause(run_step, data, transport: str) -> None:
    data[1].inputs[:] += 100
    made = synchronised(FedTAN, transport, min_replies=2)
    done = run_step(made, Skipping().double(), data[:2], transport=transport, fails=NothingTrainedError)
    assert "BatchNorm layer 'block'" in done.reason(1)


def test_stochastic_depth_is_refused_before_the_first_round(run_step, data) -> None:
    class StochasticDepth(Skipping):
        def forward(self, x: Tensor) -> Tensor:
            y = self.stem(x)
            return self.head(y if self.training and torch.rand(()) < 0.5 else y + self.block(y))

    made = synchronised(FedTAN)
    with pytest.raises(ConfigError, match="'block' is called at random"):
        run_step(made, StochasticDepth().double(), data)


def answers_with_a_model(self: TorchClient, parameters: Any, config: Any) -> Any:
    """What a client that knows nothing of exchanges does with a TRAIN message."""
    return list(self._state().values()), 5, {}


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stalled_client_is_dropped_and_its_late_reply_ignored(
    run_step, model, data, without, same_bits, transport: str, begins: bool
) -> None:
    release = threading.Event()

    def stall(x: Any, *_: Any) -> Any:
        with interrupted():
            release.wait(20)
        return x

    class Stalling(broken(stall if begins else None, fit=None if begins else lambda *a: held(*a))):
        def fit(self, parameters, config):
            if config["server-round"] == 2:
                release.set()
            return super().fit(parameters, config)

    def held(self: TorchClient, parameters: Any, config: Any) -> Any:
        stall(None)
        return TorchClient.fit(self, parameters, config)

    made = synchronised(FedTAN, transport, fedtan_timeout=0.6)
    try:
        done = run_step(made, model, data, transport=transport, rounds=2, client=Stalling, local_steps=3, batch_size=4)
    finally:
        release.set()
    assert 0.6 <= done.seconds < 8
    late = {
        ("barrier", True): "did not send exchange 'mean/1/6' within 0.6 s",
        ("barrier", False): "did not begin the step within 0.6 s of the client before it",
        ("channel", True): "did not send exchange 'mean/1/6' within 0.6 s",
        ("messages", True): "did not answer an exchange within 0.6 s of the first",
        ("messages", False): "did not answer an exchange within 0.6 s of the first",
    }.get((transport, begins), "add --federation-config 'client-resources-num-cpus=1 init-args-num-cpus=4'")
    assert late in done.reason(BAD)
    assert made.reports[0].participants == [0, 2, 3]
    for server_round in (1, 2):
        same_bits(done.history[server_round], without.history[server_round])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_step_is_retried_without_two_lost_clients(run_step, model, data, same_bits, transport: str) -> None:
    class Broken(TorchClient):
        def fit(self, parameters, config):
            self.model[4].fault = {0: cut, 2: cut_backward}.get(self.partition_id)
            return super().fit(parameters, config)

    made = synchronised(FedTAN, transport)
    done = run_step(made, model, data, transport=transport, client=Broken, local_steps=2)
    without = run_step(synchronised(FedTAN, "barrier"), model, data, hide={1: {0, 2}}, local_steps=2)
    assert made.reports[0].participants == [1, 3]
    assert len(made.reports[0].rejected) == 2
    same_bits(done.state, without.state)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_below_the_minimum_the_previous_model_is_kept(run_step, model, data, same_bits, transport: str) -> None:
    made = synchronised(FedTAN, transport, min_replies=4)
    done = run_step(made, model, data, transport=transport, rounds=2, client=broken(cut))
    assert done.seconds < 19
    first, second = made.reports
    assert first.kept_previous
    assert first.participants == []
    # The round is over once the others have given up; the failed client's own words may come a moment later.
    assert any(words in done.reason(BAD) for words in ("lights out", "ended its work"))
    same_bits(done.history[1], done.history[0])
    assert second.participants == [0, 1, 2, 3]
    assert not second.kept_previous


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_if_all_clients_are_lost_the_round_ends(run_step, model, data, same_bits, transport: str) -> None:
    class Broken(TorchClient):
        def fit(self, parameters, config):
            self.model[4].fault = cut
            return super().fit(parameters, config)

    made = synchronised(FedTAN, transport)
    done = run_step(made, model, data, transport=transport, client=Broken, fails=NothingTrainedError)
    assert made.reports[0].kept_previous
    assert len(made.reports[0].rejected) == 4
    assert done.seconds < 19


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("when", ["in its second step", "before the end of the first"])
def test_a_client_that_fails_after_its_last_exchange_is_rejected_as_in_fedavg(
    run_step, model, data, same_bits, caplog, transport: str, when: str
) -> None:
    """The step it took part in stands; only its model is missing from the average, and the log says this."""

    def fit(self: TorchClient, parameters: Any, config: Any) -> Any:
        passes: list[Tensor] = []

        def late(x: Tensor) -> Tensor:
            passes.append(x)
            return cut(x) if len(passes) == 2 else x

        if when == "in its second step":
            self.model[4].fault = late
        else:  # in the backward pass, below the first BatchNorm layer
            self.model[0].register_forward_hook(lambda *call: cut_backward(call[2]))
        return TorchClient.fit(self, parameters, config)

    made, lost = synchronised(FedTAN, transport), broken(None, fit=fit)
    with caplog.at_level(logging.WARNING, logger="flwr"):
        done = run_step(made, model, data, transport=transport, client=lost, local_steps=2)
    assert "lights out" in done.reason(BAD)
    assert made.reports[0].participants == [0, 2, 3]
    assert made.reports[0].train.exchanges == 3 * 2 + 1, "nothing was retried"
    said = "sent all its exchanges, but no model: the synchronised step keeps its batch"
    assert said in done.reason(BAD)
    assert said in caplog.text
    assert "redone" not in caplog.text + done.reason(BAD)

    class Absent(TorchClient):
        """Takes part in the step as if nothing were wrong; its reply is not used."""

        def fit(self, parameters, config):
            state, size, metrics = super().fit(parameters, config)
            trained = "steps" in metrics and self.partition_id == BAD
            return [array * np.nan for array in state] if trained else state, size, metrics

    same_bits(done.state, run_step(synchronised(FedTAN), model, data, client=Absent, local_steps=2).state)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_log_says_what_became_of_the_step(run_step, model, data, caplog, transport: str) -> None:
    with caplog.at_level(logging.WARNING, logger="flwr"):
        run_step(synchronised(FedTAN, transport), model, data, transport=transport, client=broken(cut))
        assert "; the step was redone without it" in caplog.text
        assert "the step was not finished" not in caplog.text
        caplog.clear()
        made = synchronised(FedTAN, transport, min_replies=4)
        run_step(made, model, data, transport=transport, client=broken(cut), fails=NothingTrainedError)
        assert "; the step was not finished" in caplog.text
        assert "redone" not in caplog.text


def test_an_array_that_cannot_be_read_drops_its_sender(run_step, model, data, without, same_bits, monkeypatch) -> None:
    made = synchronised(FedTAN, "messages")
    plain = PollingGrid.pull_messages

    def spoiled(self: PollingGrid, message_ids: Any) -> list[Message]:
        replies = list(plain(self, message_ids))
        for reply in replies:
            of_bad = reply.has_content() and reply.metadata.src_node_id == self.get_node_ids()[BAD]
            if of_bad and len(made.reports) == 1 and "fedtan" in reply.content.array_records:
                for array in reply.content["fedtan"].values():
                    array.data = b"\x93NUMPY nothing"
        return replies

    monkeypatch.setattr(PollingGrid, "pull_messages", spoiled)
    done = run_step(made, model, data, transport="messages", rounds=2, local_steps=3, batch_size=4)
    assert "sent a tensor that cannot be read: " in done.reason(BAD)
    same_bits(done.state, without.state)


def test_an_exchange_waits_for_the_others_from_its_first_tensor_on_however_late_that_is(
    run_step, model, data, monkeypatch
) -> None:
    """The first tensor comes after the timeout of an exchange, and those of the others right after it."""
    timeout = 0.4
    made = synchronised(FedTAN, "messages", fedtan_timeout=timeout)
    plain, began, pulls = PollingGrid.pull_messages, list[float](), list[int]()

    def late(self: PollingGrid, message_ids: Any) -> list[Message]:
        waiting = list(message_ids)
        began.append(time.monotonic())
        if began[-1] - began[0] < 1.5 * timeout:
            return []
        replies = list(plain(self, waiting if pulls else waiting[:1]))
        pulls.extend([1] * bool(replies))
        return replies

    monkeypatch.setattr(PollingGrid, "pull_messages", late)
    run_step(made, model, data, transport="messages", local_steps=1, batch_size=4)
    (report,) = made.reports
    assert report.rejected == {}
    assert report.participants == [0, 1, 2, 3]


@pytest.mark.parametrize("steps", [1, 4])
def test_replayed_steps_give_the_bits_of_uninterrupted_steps(run_step, model, data, same_bits, steps: int) -> None:
    """With dropout on: batch, random state and running statistics are those of the first pass in every replay."""
    settings = {"rounds": 2, "local_steps": steps, "batch_size": 4, "sgd_momentum": 0.9}
    barrier, messages, channel = (
        run_step(synchronised(FedTAN, c), model, data, transport=c, **settings) for c in TRANSPORTS
    )
    same_bits(barrier.state, messages.state)
    same_bits(barrier.state, channel.state)
    other = run_step(synchronised(FedTAN, "barrier"), model, data, **settings, seed=8)
    assert not np.array_equal(barrier.state["0.weight"], other.state["0.weight"]), "dropout and batches do draw"


def test_a_client_that_hangs_for_rounds_does_not_block_the_others(run_step, model, data, release) -> None:
    """In process: it is dropped in each round, and its waiting messages do not keep a healthy client from starting."""

    class Hanging(TorchClient):
        def fit(self, parameters, config):
            if self.partition_id == BAD and config["server-round"] == 1:
                with interrupted():
                    release.wait(15)
            return super().fit(parameters, config)

    done = run_step(synchronised(FedTAN, fedtan_timeout=0.6), model, data, rounds=2, client=Hanging)
    assert [report.participants for report in done.strategy.reports] == [[0, 2, 3]] * 2


@pytest.fixture
def release():
    event = threading.Event()
    yield event
    event.set()
