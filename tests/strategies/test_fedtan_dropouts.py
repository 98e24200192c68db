"""A round names a client that it lost in the step and continues without it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr.client import TorchClient
from fedbn_flwr.errors import ConfigError, NothingTrainedError
from fedbn_flwr.strategies import FedTAN
from fedbn_flwr.transport import (
    Barrier,
    Dropped,
    Member,
    RetryStep,
    step_by_barrier,
    step_by_channel,
)
from fedbn_flwr.transport.polling_grid import PollingGrid
from fedbn_flwr.transport.step_transport import Limits
from fedbn_flwr.transport.turns import Wait
from tests.support.fast import fast
from tests.support.federation import Outcome
from tests.support.seeds import with_seed
from tests.support.synchronised import TRANSPORTS, client_data, synchronised
from tests.support.versioned import Versioned

SIZES = (6, 5, 9, 7)
BAD = 1
Fault = Callable[[Tensor], Tensor]


class Gremlin(Versioned):
    """A layer between two BatchNorm layers that does nothing until it has a fault.

    Its state has a version.
    """

    fault: Fault | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.fault(x) if self.fault else x


@pytest.fixture
@with_seed(3)
def model() -> nn.Module:
    first = [nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(
        *first, Gremlin(), nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
    ).double()


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


def leaves(self: TorchClient, parameters: Any, config: Any) -> Any:
    cut(parameters)


def does_not_synchronise(self: TorchClient, parameters: Any, config: Any) -> Any:
    """Answer a TRAIN message as a client without exchanges does."""
    return list(self._state().values()), 5, {}


@dataclass
class Lost:
    """The clients lost in round 1, the fault that loses them, and its message.

    The fault is in the forward pass or replaces ``fit``. ``said`` may differ by
    transport. ``ways`` are ways to miss the client of an exchange. The first is in the
    fast suite.
    """

    said: str | Mapping[str, str]
    ways: Sequence[str] = ()
    fault: Fault | None = None
    fit: Callable[..., Any] | None = None
    who: frozenset[int] = frozenset({BAD})
    timeout: float = 20.0

    def clients(self) -> type[TorchClient]:
        lost = self

        class Broken(TorchClient):
            def fit(self, parameters, config):
                broken = self.partition_id in lost.who and config["server-round"] == 1
                self.model[4].fault = lost.fault if broken else None
                if broken and lost.fit:
                    return lost.fit(self, parameters, config)
                return super().fit(parameters, config)

        return Broken


OVER = threading.Event()
NOT_BEGUN = "add --federation-config 'client-resources-num-cpus=1 init-args-num-cpus=4'"
NO_ANSWER = "did not answer an exchange within 1.5 s of the first"
NOT_SENT = "did not send exchange 'mean/1/6' within 1.5 s"
NO_NUMBER = "the value nan in exchange 'mean/1/6'"
OTHER_CALL = "of call 1, but the others called BatchNorm layer '6'"


def stall(x):
    with Wait():
        OVER.wait(20)
    return x


def begins_late(self: TorchClient, parameters: Any, config: Any) -> Any:
    stall(None)
    return TorchClient.fit(self, parameters, config)


LOST = {
    "raises in the forward pass": Lost("lights out", ("simulation", "messages"), cut),
    "raises in the backward pass": Lost(
        "lights out", ("barrier", "messages"), cut_backward
    ),
    "sends NaN": Lost(NO_NUMBER, ("channel",), not_a_number),
    "sends NaN by messages": Lost(NO_NUMBER, ("messages",), not_a_number),
    "sends a wrong shape": Lost(OTHER_CALL, ("barrier", "channel"), wrong_shape),
    "dies before the first exchange": Lost(
        "lights out", ("messages", "simulation"), fit=leaves
    ),
    "does not synchronise": Lost("", ("barrier", "channel"), fit=does_not_synchronise),
    "two of them": Lost(
        "lights out", ("channel", "messages"), cut, who=frozenset({0, 2})
    ),
    "stalls": Lost(
        {"barrier": NOT_SENT, "channel": NOT_SENT, "messages": NO_ANSWER},
        TRANSPORTS,
        stall,
        timeout=1.5,
    ),
    "does not begin": Lost(
        {
            "barrier": "did not begin the step within 1.5 s",
            "channel": NOT_BEGUN,
            "messages": NO_ANSWER,
        },
        TRANSPORTS,
        fit=begins_late,
        timeout=1.5,
    ),
}


@pytest.fixture
def data():
    return client_data((5,), SIZES)


COMMON = {"rounds": 2, "local_steps": 3, "batch_size": 4}
WITHOUT = {}


@pytest.fixture
def without(run_step, model, data) -> Callable[[frozenset[int]], Outcome]:
    """Return a function that runs round 1 without some clients, once for all tests."""

    def run(who: frozenset[int]) -> Outcome:
        if who not in WITHOUT:
            WITHOUT[who] = run_step(
                synchronised(FedTAN, "barrier"),
                model,
                data,
                hide={1: set(who)},
                **COMMON,
            )
        return WITHOUT[who]

    return run


@pytest.fixture
def run_lost(run_step, model, data) -> Callable[..., Outcome]:
    """Provide ``run_lost(lost, transport, settings, ...)`` to run FedTAN."""

    def run(
        lost: Lost, transport: str, settings: Mapping[str, Any] = {}, **options: Any
    ) -> Outcome:
        made, kind = synchronised(FedTAN, transport, **settings), lost.clients()
        return run_step(made, model, data, transport=transport, client=kind, **options)

    return run


@pytest.fixture(autouse=True)
def _nobody_stalls_for_ever():
    OVER.clear()
    yield
    OVER.set()


def test_an_interrupted_step_leaves_no_client_waiting(monkeypatch) -> None:
    """Ctrl-C once left threads at the barrier until the timeout of the exchange."""
    ended = []

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

    def interrupt(*_) -> None:
        waiting.start()
        while not barriers.barrier.bytes_up:
            time.sleep(0.01)
        raise KeyboardInterrupt

    barriers, waiting = Barriers(), threading.Thread(target=client, daemon=True)
    monkeypatch.setattr(step_by_barrier, "send_until", interrupt)
    members = {node_id: Member(1, 2, f"node {node_id}") for node_id in (1, 2)}
    with pytest.raises(KeyboardInterrupt):
        step_by_barrier.step_by_barrier(None, barriers, [], members, Limits(60, 60, 1))
    waiting.join(10)
    assert len(ended) == 1
    # In one process, no client is late while another one computes.
    assert barriers.barrier._in_turns


CASES = []
for name, each in LOST.items():
    CASES += fast([(name, way) for way in each.ways], 0)


@pytest.mark.parametrize(("case", "way"), CASES)
def test_a_round_equals_one_without_the_lost_clients(
    run_lost, without, same_bits, monkeypatch, caplog, case: str, way: str
) -> None:
    """The cases include Flower's simulation, with the channel."""
    lost, transport = LOST[case], way
    if way == "simulation":
        transport = "channel"
        monkeypatch.setattr(step_by_channel, "in_simulation", lambda grid: True)
    settings = {"fedtan_timeout": lost.timeout, "on_round_end": lambda *_: OVER.set()}
    done = run_lost(lost, transport, settings, **COMMON)
    first, second = done.reports
    nodes = done.grid.get_node_ids()
    assert first.rejected.keys() == {nodes[i] for i in lost.who}
    assert first.participants == [i for i in range(len(SIZES)) if i not in lost.who]
    said = lost.said if isinstance(lost.said, str) else lost.said[transport]
    for i in lost.who:
        assert done.reason(i).startswith(f"node {nodes[i]} (partition {i}): ")
        assert said in done.reason(i)
    redone = case not in ("does not synchronise", "does not begin")
    assert "; the step was redone without it" in caplog.text or not redone
    assert "the step was not finished" not in caplog.text
    for server_round in (1, 2):
        same_bits(done.history[server_round], without(lost.who).history[server_round])
    assert second.rejected == {}, "the next round begins with all"
    assert second.participants == [0, 1, 2, 3]


@pytest.mark.parametrize("transport", fast(TRANSPORTS, "barrier", "channel"))
@pytest.mark.parametrize(
    ("who", "min_replies"),
    [({BAD}, 4), ({0, 1, 2, 3}, 1)],
    ids=["below the minimum", "all"],
)
def test_if_too_few_are_left_the_previous_model_is_kept(
    run_lost, same_bits, caplog, transport: str, who: set[int], min_replies: int
) -> None:
    lost = Lost("", fault=cut, who=frozenset(who))
    done = run_lost(lost, transport, {"min_replies": min_replies}, rounds=2)
    first, second = done.reports
    assert (first.kept_previous, first.participants) == (True, [])
    # The round ends when the others have given up. The failed client's own message may
    # arrive a moment later.
    assert any(words in done.reason(BAD) for words in ("lights out", "ended its work"))
    assert "redone" not in caplog.text
    same_bits(done.history[1], done.history[0])
    assert (second.kept_previous, second.participants) == (False, [0, 1, 2, 3])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_fewer_clients_than_the_step_needs_are_not_asked(
    run_step, model, data, transport: str
) -> None:
    made = synchronised(FedTAN, transport, min_replies=4)
    common = {"transport": transport, "hide": {1: {BAD}}, "fails": NothingTrainedError}
    done = run_step(made, model, data, **common)
    (report,) = made.reports
    assert {m.metadata.message_type for m in done.grid.sent} == {"query"}
    assert (report.asked, report.replied, len(report.rejected)) == (0, 0, 3)
    why = "needs 4 clients (min_replies), but only 3 can take part"
    assert all(why in done.reason(i) for i in range(4) if i != BAD)
    assert "3 refused or lost: 3 x " in str(done.error)


class LayerByDomain(nn.Module):
    """A model whose inputs select one of two layers of equal width."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm1d(5), nn.BatchNorm1d(5)])
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norms[int(x.mean() > 50)](x))


class Skipping(nn.Module):
    """A model that skips its last BatchNorm layer for large inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = nn.BatchNorm1d(5), nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        return self.head(y if x.mean() > 50 else y + self.block(y))


# The model, the clients with large inputs, and the message about BAD.
CALLS = {
    "another layer": (
        LayerByDomain,
        {BAD},
        "others called BatchNorm layer 'norms.0'",
    ),
    "one layer less": (
        Skipping,
        {BAD},
        "had finished the step, but the others called BatchNorm layer 'block'",
    ),
    "one layer more": (
        Skipping,
        {0, 2, 3},
        "called BatchNorm layer 'block', but the others had finished",
    ),
}


@pytest.mark.parametrize("transport", fast(TRANSPORTS, "barrier"))
@pytest.mark.parametrize("case", CALLS)
def test_a_client_that_calls_other_layers_is_dropped_by_name(
    run_step, data, same_bits, transport: str, case: str
) -> None:
    make, large, said = CALLS[case]
    model = make().double()
    for i in large:
        data[i].inputs[:] += 100
    done = run_step(
        synchronised(FedTAN, transport), model, data, transport=transport, local_steps=2
    )
    assert said in done.reason(BAD)
    assert done.reports[0].participants == [0, 2, 3]
    # After one layer more, the batch of BAD stays in the step of the others.
    hide = {} if case == "one layer more" else {1: {BAD}}
    same_bits(
        done.state,
        run_step(synchronised(FedTAN), model, data, hide=hide, local_steps=2).state,
    )


class StochasticDepth(Skipping):
    """Calls its block in half of the passes."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        skips = self.training and torch.rand(()) < 0.5
        return self.head(y if skips else y + self.block(y))


def test_stochastic_depth_is_refused_before_the_first_round(run_step, data) -> None:
    made = synchronised(FedTAN)
    with pytest.raises(ConfigError, match="'block' is called at random"):
        run_step(made, StochasticDepth().double(), data)


@pytest.mark.parametrize("transport", fast(TRANSPORTS, "barrier", "channel"))
@pytest.mark.parametrize("when", ["in its second step", "before the end of the first"])
def test_a_client_that_fails_after_its_last_exchange_is_rejected_as_in_fedavg(
    run_lost, caplog, transport: str, when: str
) -> None:
    """The step that it took part in is kept, and the log reports this."""

    def fit(self: TorchClient, parameters: Any, config: Any) -> Any:
        passes = []

        def late(x: Tensor) -> Tensor:
            passes.append(x)
            return cut(x) if len(passes) == 2 else x

        if when == "in its second step":
            self.model[4].fault = late
        else:  # in the backward pass, below the first BatchNorm layer
            self.model[0].register_forward_hook(lambda *call: cut_backward(call[2]))
        return TorchClient.fit(self, parameters, config)

    done = run_lost(Lost("", fit=fit), transport, local_steps=2)
    assert "lights out" in done.reason(BAD)
    (report,) = done.reports
    assert report.participants == [0, 2, 3]
    assert report.train.exchanges == 3 * 2 + 1, "nothing was retried"
    said = (
        "sent all its exchanges, but no model: its batch stays in the synchronised step"
    )
    assert said in done.reason(BAD)
    assert said in caplog.text
    assert "redone" not in caplog.text + done.reason(BAD)


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"x": Array("float32", (), "numpy.ndarray", b"\x93NUMPY nothing")}, "read: "),
        ({"x": Array(np.ones(1)), "y": Array(np.ones(1))}, "2 tensors in one"),
    ],
)
def test_an_array_that_cannot_be_read_drops_its_sender(
    run_step, model, data, without, same_bits, monkeypatch, own, said: str
) -> None:
    made = synchronised(FedTAN, "messages")
    plain = PollingGrid.pull_messages

    def spoiled(self: PollingGrid, message_ids: Any) -> list[Message]:
        replies = list(plain(self, message_ids))
        for reply in replies:
            is_bad = reply.metadata.src_node_id == self.get_node_ids()[BAD]
            in_round_1 = len(made.reports) == 1 and reply.has_content()
            if is_bad and in_round_1 and "fedtan" in reply.content.array_records:
                reply.content["fedtan"] = ArrayRecord(own)
        return replies

    monkeypatch.setattr(PollingGrid, "pull_messages", spoiled)
    done = run_step(made, model, data, transport="messages", **COMMON)
    assert said in done.reason(BAD)
    same_bits(done.state, without(frozenset({BAD})).state)
