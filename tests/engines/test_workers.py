"""Worker processes give the same bits and leave no orphans.

A process that dies costs only its clients' replies.
"""

from __future__ import annotations

import asyncio
import errno
import faulthandler
import functools
import gc
import multiprocessing.context
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import (
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from torch import nn

from fedbn_flwr import TorchClient, client_app
from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.engines.link import Packed
from fedbn_flwr.engines.workers import WorkerProcesses, _end
from fedbn_flwr.messages.records import to_record, view
from fedbn_flwr.norms import use_feature_norm
from fedbn_flwr.server.rounds import replies
from fedbn_flwr.server.rounds import round as rounds
from fedbn_flwr.strategies import FedAvg, FedBN, FedTAN, Scaffold
from fedbn_flwr.training import LearningRate, LocalTraining
from fedbn_flwr.transport import Member, RetryStep, in_process_reducer
from fedbn_flwr.transport.step_by_barrier import step_by_barrier
from fedbn_flwr.transport.step_transport import Limits
from fedbn_flwr.transport.turns import turn
from tests.support.descriptors import open_files
from tests.support.fast import fast
from tests.support.federation import Outcome, torch_clients
from tests.support.in_process import answer, app_of, echo, to
from tests.support.many_layers import EveryType
from tests.support.written_out import close

SIZES = (6, 13, 9, 21, 8)


def errors(replies: list[Message]) -> list[bool]:
    return [reply.has_error() for reply in replies]


def replies_of(
    handler: Callable, nodes: int, workers: int, content: Any = None, **options: Any
) -> list[Message]:
    """Return the reply of each node to one message."""
    app = app_of(handler)
    with InProcessGrid(app, nodes, workers=workers, **options) as grid:
        messages = to(grid, *range(nodes), content=content)
        return grid.send_and_receive(messages, timeout=30)


def alive(pid: int) -> bool:
    """Return whether the process runs. A zombie does not run."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        )
    except FileNotFoundError:
        return False


def all_end(processes: list[int]) -> None:
    """Assert that the processes end within 30 seconds."""
    deadline = time.monotonic() + 30
    while any(map(alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(alive, processes))


def pids(grid: InProcessGrid) -> list[int]:
    return [worker.process.pid for worker in grid._host._workers]


WORKED = {
    "fedtan": (FedTAN, 0.0),
    "feature-norm": (FedAvg, 0.0),
    "entries of every type": (lambda: FedBN(momentum_scope="local"), 0.9),
}


@pytest.mark.parametrize("method", fast(WORKED, "fedtan", "entries of every type"))
def test_workers_give_the_bits_of_one_process(
    federate, datasets, mlp, same_bits, method: str
) -> None:
    """The clients are uneven and use dropout.

    Local state, synchronised steps and variates pass through shared memory.
    """
    make, momentum = WORKED[method]

    def net() -> nn.Module:
        if method == "entries of every type":
            return EveryType()
        model = mlp(dropout=0.4)
        if method == "feature-norm":
            use_feature_norm(model)
        return model

    def run(workers: int) -> Outcome:
        return federate(
            make(),
            net,
            datasets,
            rounds=2,
            barrier=True,
            grid_options={"workers": workers, "seed": workers},
            sgd_momentum=momentum,
        )

    alone, worked = run(0), run(3)
    assert set(alone.grid.get_node_ids()).isdisjoint(worked.grid.get_node_ids())
    same_bits(worked.state, alone.state)
    ours, theirs = worked.strategy.reports[-1], alone.strategy.reports[-1]
    assert (ours.clients, ours.evaluations) == (theirs.clients, theirs.evaluations)
    for partition in range(len(SIZES)):
        assert worked.context(partition).state == alone.context(partition).state


def test_garbage_that_refers_to_shared_memory_is_collected() -> None:
    """The error's frame refers to the message and to the reply with its arrays.

    Python up to 3.12.6 ends with SIGSEGV if a cycle has a memoryview with an exported
    buffer (python/cpython#77894).
    """

    def repeat(message: Message, context: Context) -> Message:
        gc.collect()
        try:
            raise ValueError("a cycle: the error, its traceback, this frame")
        except ValueError as error:
            cycle = error  # noqa: F841
        return echo(message)

    with InProcessGrid(app_of(repeat), 1, workers=1) as grid:
        content = RecordDict({"arrays": to_record({"w": np.ones(1000)})})
        for _ in range(3):
            (reply,) = grid.send_and_receive(to(grid, 0, content=content))
            content = reply.content
            assert np.array_equal(view(content["arrays"]["w"]), np.ones(1000))


def test_messages_that_fill_the_pipe_pass_each_other() -> None:
    """A process gets its next job while it sends a reply.

    Both are larger than the pipe.
    """
    content = RecordDict({"config": ConfigRecord({"text": "x" * 2**20})})
    assert errors(replies_of(echo, 6, 1, content)) == [False] * 6


def test_no_thread_outlives_the_grid(monkeypatch) -> None:
    """A thread that frees shared memory while Python exits would abort the command."""

    def end_slowly(*args) -> None:
        _end(*args)
        time.sleep(0.3)

    monkeypatch.setattr("fedbn_flwr.engines.workers._end", end_slowly)
    before = threading.enumerate()
    assert errors(replies_of(answer, 2, 2)) == [False, False]
    assert threading.enumerate() == before


class Odd(RecordDict):
    """A record that cannot be pickled."""

    def __reduce__(self):
        raise TypeError("this record stays here")


def cancelled(message: Message) -> Message:
    raise asyncio.CancelledError("stopped")  # like KeyboardInterrupt not an Exception


FAULTS = {
    "returns nothing": (lambda message: None, "returned NoneType, not a Message"),
    "raises": (lambda message: {}[7], "KeyError in line"),
    "exits": (lambda message: sys.exit(3), "SystemExit in line"),
    "is cancelled": (cancelled, "of test_workers.py: stopped"),
    "cannot be pickled": (
        lambda message: Message(Odd(), reply_to=message),
        "this record stays here",
    ),
    "is killed": (
        lambda message: os.kill(os.getpid(), signal.SIGKILL),
        "was ended by SIGKILL (out of memory?)",
    ),
}


@pytest.mark.parametrize(
    ("fault", "workers", "at"),
    [
        *((fault, 2, 1) for fault in FAULTS),
        ("is killed", 2, 2),
        ("returns nothing", 0, 1),
        ("exits", 0, 1),
        ("is cancelled", 0, 1),
    ],
)
def test_a_fault_of_a_client_costs_its_own_reply_only(
    fault: str, workers: int, at: int, caplog
) -> None:
    """Other clients of the process continue, and a dead process is replaced.

    The fourth client waits for the process of the third.
    """
    act, said = FAULTS[fault]

    def work(message: Message, context: Context):
        return (act if context.node_config["partition-id"] == at else answer)(message)

    with InProcessGrid(app_of(work), 6, workers=workers) as grid:
        before = pids(grid) if workers else []
        for _ in range(2):
            replies = grid.send_and_receive(to(grid, *range(6)), timeout=30)
            assert errors(replies) == [number == at for number in range(6)]
            assert said in replies[at].error.reason
        after = pids(grid) if workers else []
    assert (before == after) == (fault != "is killed")
    assert (f"its clients count as failed (partition {at})" in caplog.text) == (
        fault == "is killed"
    )
    assert not any(alive(pid) for pid in [*before, *after])


@pytest.mark.parametrize("slow", [3, 4, 5])
def test_the_last_messages_do_not_wait_for_each_other(slow: int) -> None:
    """One of the last three clients waits for all others."""
    others = multiprocessing.get_context("fork").Semaphore(0)

    def work(message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] == slow:
            for _ in range(5):
                assert others.acquire(timeout=20)
        others.release()
        return answer(message)

    assert errors(replies_of(work, 6, 3)) == [False] * 6


def test_a_time_is_the_shortest_of_a_nodes_messages_that_did_not_fail(
    monkeypatch,
) -> None:
    """The messages take 1, 3, 2 and 3 seconds, and the first one fails."""
    ticks, fails = iter([0, 1, 1, 4, 4, 6, 6, 9]), iter([True, False, False, False])
    clock = SimpleNamespace(monotonic=ticks.__next__)
    monkeypatch.setattr("fedbn_flwr.engines.worker_process.time", clock)

    def work(message: Message, context: Context) -> Message:
        assert not next(fails)
        return answer(message)

    with InProcessGrid(app_of(work), 1, workers=1) as grid:
        for _ in range(4):
            grid.send_and_receive(to(grid, 0))
        assert [*grid._host.seconds.values()] == [2]


@pytest.mark.parametrize("workers", [1, 2])
def test_every_message_has_a_reply_if_all_processes_die_at_their_start(
    workers: int, monkeypatch
) -> None:
    monkeypatch.setattr("fedbn_flwr.engines.workers.serve", lambda *_: os._exit(1))
    assert errors(replies_of(answer, 4, workers)) == [True] * 4


def test_the_end_of_a_process_is_noticed_although_its_fork_lives(monkeypatch) -> None:
    """The fork, such as a worker of a loader, has copies of the process' pipes.

    If no other process can be started, later messages get an error.
    """
    monkeypatch.setattr("fedbn_flwr.engines.workers._SECONDS_TO_END", 0.2)
    no_more_processes(monkeypatch, after=1)

    def dies(message: Message, _: Context):
        if os.fork():
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(4)
        os._exit(0)

    with InProcessGrid(app_of(dies), 1, workers=1) as grid:
        replies = [grid.send_and_receive(to(grid, 0), timeout=3) for _ in range(2)]
    [[first], [second]] = replies
    assert "was ended by SIGKILL" in first.error.reason
    assert "no worker process is left" in second.error.reason


class Dies(TorchClient):
    """Client 1 dies before its training."""

    def fit(self, parameters, config):
        if self.partition_id == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().fit(parameters, config)


def test_a_worker_that_dies_in_a_synchronised_step_costs_its_members_only(
    federate, datasets, mlp
) -> None:
    """The other members repeat the step as if the dead members had not been asked."""
    run, alone = (
        federate(FedTAN(), mlp, datasets, rounds=1, barrier=True, timeout=30, **own)
        for own in (
            {"client": Dies, "grid_options": {"workers": 5}},
            {"hide": {1: [1]}},
        )
    )
    assert run.strategy.reports[0].participants == [0, 2, 3, 4]
    close(run.state, alone.state)


SCRIPT = """
import os, sys, time
from flwr.app import Message, RecordDict, MessageType
from flwr.clientapp import ClientApp
from fedbn_flwr import InProcessGrid
app = ClientApp()
@app.train()
def work(message, context):
    time.sleep(600)
    return Message(RecordDict(), reply_to=message)
grid = InProcessGrid(app, 4, workers=2)
ids = grid.push_messages([Message(RecordDict(), node, MessageType.TRAIN) for node in grid.get_node_ids()])
print(*[worker.process.pid for worker in grid._host._workers], flush=True)
END
"""


@pytest.mark.parametrize(
    "end",
    ["os.kill(os.getpid(), 9)", "sys.exit(3)"],
    ids=["killed", "exit"],
)
def test_no_process_outlives_the_command(tmp_path, at_once, end: str) -> None:
    """This includes busy processes and grids that were never closed."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT).replace("END", end))
    with subprocess.Popen(
        ["python", str(script)], env=at_once, stdout=subprocess.PIPE, text=True
    ) as command:
        workers = [int(pid) for pid in command.stdout.readline().split()]
        assert len(workers) == 2
        command.wait(30)
    all_end(workers)


ENDING = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2")
HANDLED = ("all", "none", *ENDING)


def test_a_signal_to_the_whole_group_acts_as_on_the_command_alone(at_once) -> None:
    """A command that handles or ignores it continues with its clients."""
    # Fork from a new process in a session of its own: the process of the tests has the
    # threads of other tests, and a signal must never reach it.
    call = (
        "from tests.engines.test_workers import *\nfor one in HANDLED: signalled(one)"
    )
    done = subprocess.run(
        ["python", "-c", call],
        env=at_once | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        start_new_session=True,
    )
    assert done.returncode == 0, done.stderr


def signalled(handled: str) -> None:
    """Send signals to the group of a command, and check the command's reaction.

    ``handled`` is the one signal that has its usual effect, or which signals reach
    the handler of the command. A terminal sends SIGWINCH.
    """
    context = multiprocessing.get_context("fork")
    begun, over = context.Semaphore(0), context.Semaphore(0)
    ours, theirs = context.Pipe()
    calls, noted = os.pipe()
    kinds = [getattr(signal, name) for name in (*ENDING, "SIGWINCH")]
    if handled in ENDING:
        kinds = [getattr(signal, handled)]

    def work(message: Message, context: Context) -> Message:
        begun.release()
        over.acquire(timeout=20)
        return answer(message)

    def command() -> None:
        faulthandler.dump_traceback_later(60, exit=True, file=sys.__stderr__)
        os.setpgid(0, 0)
        for kind in kinds:
            usual = signal.default_int_handler if kind == signal.SIGINT else 0
            note = {"all": lambda kind, _: os.write(noted, bytes([kind])), "none": 1}
            signal.signal(kind, note.get(handled, usual))
        with InProcessGrid(app_of(work), 2, workers=2) as grid:
            theirs.send(pids(grid))
            theirs.send(errors(grid.send_and_receive(to(grid, 0, 1), timeout=20)))

    process = context.Process(target=command)
    process.start()
    theirs.close()  # so that the pipe ends if the command fails
    workers = ours.recv()
    assert begun.acquire(timeout=20)
    assert begun.acquire(timeout=20)
    for kind in kinds:
        os.killpg(process.pid, kind)
    if handled in ENDING:
        process.join(20)
        assert process.exitcode == (1 if handled == "SIGINT" else -kinds[0])
    else:
        time.sleep(0.1)
        # An Event would wait here for a client whose process was ended.
        over.release()
        over.release()
        assert ours.recv() == [False, False]
        process.join(20)
        assert process.exitcode == 0
    os.close(noted)
    assert sorted(os.read(calls, 99)) == (sorted(kinds) if handled == "all" else [])
    all_end(workers)


def test_a_fork_of_a_process_in_which_a_client_computes_can_compute() -> None:
    with turn(0):
        assert errors(replies_of(answer, 1, 1)) == [False]


def test_a_message_that_cannot_be_sent_fails_its_client_only(monkeypatch) -> None:
    """The next messages arrive, and no descriptor stays open."""
    tries = []
    whole = Packed.write
    monkeypatch.setattr(Packed, "write", lambda own: tries.append(1) or whole(own))

    def work(message: Message, context: Context) -> Message:
        time.sleep(0.2)
        return answer(message)

    content = RecordDict({"arrays": to_record({"w": np.ones(5000)})})
    # After the first message, both messages that the process gets next fail.
    configs = [{}, {"a": threading.Lock()}, {"a": threading.Lock()}, {}]
    with InProcessGrid(app_of(work), 4, workers=1, node_configs=configs) as grid:
        messages = to(grid, *range(4), content=content)
        replies = grid.send_and_receive(messages, timeout=5)
        written = len(tries)
        before = open_files()
        for _ in range(2):
            grid.send_and_receive(messages, timeout=30)
        after = open_files()
    assert errors(replies) == [False, True, True, False]
    assert (
        "could not be sent to a worker process: TypeError: cannot pickle"
        in replies[1].error.reason
    )
    assert after <= before
    assert written == 1, "one write for all clients"


def no_more_processes(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Let the start of each process after the first ``after`` starts fail."""
    start, count = multiprocessing.context.ForkProcess.start, iter(range(100))

    def fails(self) -> None:
        if next(count) >= after:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        start(self)

    monkeypatch.setattr(multiprocessing.context.ForkProcess, "start", fails)


@pytest.mark.parametrize(
    "why", ["another system", "no more processes", "several torch threads"]
)
def test_without_worker_processes_clients_run_in_the_commands_process(
    why: str, monkeypatch, caplog
) -> None:
    if why == "another system":
        monkeypatch.setattr("fedbn_flwr.engines.workers.sys.platform", "darwin")
    if why == "no more processes":
        no_more_processes(monkeypatch, after=2)
    threads = 2 if why == "several torch threads" else 1
    processes = []

    def work(message: Message, context: Context) -> Message:
        processes.append(os.getpid())
        return answer(message)

    assert errors(replies_of(work, 2, 3, torch_threads=threads)) == [False] * 2
    assert processes == [os.getpid()] * 2
    assert "clients run in the command's own process" in caplog.text


def test_a_member_that_hangs_is_ended_with_its_process(caplog) -> None:
    """The member occupies its process while other clients wait there."""

    def work(message: Message, context: Context) -> Message:
        """Do two exchanges as a member, and repeat them after RetryStep."""
        if context.node_config["partition-id"] == 0:
            time.sleep(600)
        reducer = in_process_reducer()
        while True:
            try:
                reducer.begin()
                for k in range(2):
                    reducer.reduce(f"mean/{k}", torch.ones(2))
            except RetryStep:
                continue
            reducer.close()
            return answer(message)

    def finished(partitions: range, timeout: float) -> int:
        """Return the number of members that end the step."""
        content = RecordDict({"config": ConfigRecord()})
        messages = to(grid, *partitions, content=content)
        nodes = [message.metadata.dst_node_id for message in messages]
        members = dict.fromkeys(nodes, Member(1, 1, "a node"))
        limits = Limits(timeout, 15, 1)
        return len(step_by_barrier(grid, grid, messages, members, limits).members)

    with InProcessGrid(app_of(work), 5, workers=2) as grid:
        before = pids(grid)
        assert finished(range(5), 0.5) == 2
        while len(set(before) & set(pids(grid))) > 1:
            time.sleep(0.05)
        grid._host._end_hanging("another step")
        assert finished(range(1, 5), 5) == 4
    assert "hangs in a synchronised step that is over" in caplog.text


def test_the_memory_of_a_reply_is_freed_after_its_last_array() -> None:
    """Local state does not keep it alive, and a kept array keeps its values."""

    def work(message: Message, context: Context) -> Message:
        calls = int(context.state["n"]["n"]) + 1 if "n" in context.state else 1
        context.state["n"] = MetricRecord({"n": calls})
        context.state["kept"] = to_record({"kept": np.full(300, calls)})
        # another size in each round and in each client
        size = 400_000 + 3_000 * calls + 100 * context.node_config["partition-id"]
        return Message(
            RecordDict({"arrays": to_record({"large": np.full(size, calls)})}),
            reply_to=message,
        )

    def mapped() -> int:
        maps = Path("/proc/self/maps").read_text().splitlines()
        ranges = [
            line.split()[0].split("-") for line in maps if "memfd:fedbn-flwr" in line
        ]
        return sum(int(end, 16) - int(start, 16) for start, end in ranges)

    with InProcessGrid(app_of(work), 10, workers=1) as grid:

        def round_of(number: int) -> list[np.ndarray]:
            replies = grid.send_and_receive(to(grid, *range(10)))
            arrays = [view(reply.content["arrays"]["large"]) for reply in replies]
            kept = [view(grid.context(i).state["kept"]["kept"]) for i in range(10)]
            assert all((array == number).all() for array in [*arrays, *kept])
            return arrays

        before = mapped()
        first, *others = round_of(1)
        assert mapped() - before >= 10 * 3_200_000
        del others
        for number in range(2, 6):
            round_of(number)
            assert (first == 1).all()
            # the first reply, and the last reply of the receiving thread
            assert mapped() - before < 3 * 4_200_000
    del first
    gc.collect()
    assert mapped() - before < 200_000


class ReadsReplies(FedAvg):
    def aggregate_train(self, server_round: int, replies: Any):
        return super().aggregate_train(server_round, replies)


@pytest.mark.parametrize(
    ("kind", "frees"),
    [
        (FedAvg, True),
        (FedBN, True),
        (functools.partial(FedAvg, variance="pooled"), True),
        (Scaffold, False),
        (ReadsReplies, False),
        pytest.param(
            functools.partial(FedAvg, on_replies=lambda *_: None), False, id="Listens"
        ),
    ],
)
def test_an_added_reply_is_freed_if_nobody_reads_it_and_bits_are_those_of_all_engines(
    monkeypatch, points, mlp, kind, frees: bool
) -> None:
    datasets = [points(n, n) for n in (6, 9, 8, 7, 12, 5, 11)]
    settings = LocalTraining(
        learning_rate=LearningRate(0.1), local_steps=1, batch_size=4
    )
    app = client_app(
        torch_clients(lambda: mlp, datasets, settings),
        num_examples=lambda context: len(datasets[context.node_config["partition-id"]]),
    )
    read, mean = replies.Terms.read, rounds.average
    arrays, alive = [], []

    def noted_read(terms, node, message):
        if message.has_content():
            arrays.extend(map(weakref.ref, message.content["arrays"].values()))
        return read(terms, node, message)

    def noted_mean(states, *args):
        for state in states if kind is not FedBN else ():
            assert not state["1.num_batches_tracked"].flags.writeable
        alive.append(sum(array() is not None for array in arrays))
        return mean(states, *args)

    monkeypatch.setattr(replies.Terms, "read", noted_read)
    monkeypatch.setattr(rounds, "average", noted_mean)

    def trained(workers: int) -> dict:
        arrays.clear()
        with InProcessGrid(app, 7, workers=workers) as grid:
            result = kind(fraction_evaluate=0.0).start(
                grid, to_record(mlp().state_dict()), num_rounds=1
            )
        return {name: array.numpy().tobytes() for name, array in result.arrays.items()}

    ways = [trained(0), trained(2)]
    assert ways[0] == ways[1]
    every = len(arrays)
    assert alive == [every // 7 if frees else every] * 2


def test_a_job_does_not_go_to_a_process_that_has_ended() -> None:
    """The process is replaced a moment later."""
    pool = WorkerProcesses.__new__(WorkerProcesses)
    pool._lock, pool._closed, sent = threading.Lock(), threading.Event(), []
    ended, other = (
        SimpleNamespace(jobs={}, gone=gone, reserve=lambda job: 1)
        for gone in (True, False)
    )
    pool._workers, pool._jobs = [ended, other], []
    pool._send = lambda worker, number, job: sent.append(worker)
    pool.submit(SimpleNamespace(member=None))
    assert sent == [other]
    other.jobs = {1: None}
    pool.submit(SimpleNamespace(member=None))
    assert (len(sent), len(pool._jobs)) == (1, 1)
