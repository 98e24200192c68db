"""A worker process. It works on the clients that the command sends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor

from fedbn_flwr.compat.flower import app_error, identify_process
from fedbn_flwr.engines.client_work import MOST_MEMBERS, work
from fedbn_flwr.engines.link import Packed, WorkerPipe
from fedbn_flwr.machine import begin_fork, keep_freed_memory
from fedbn_flwr.transport import Reducer
from fedbn_flwr.transport.turns import Wait

READY, WORK, DONE, CALL, ANSWER = "ready", "work", "done", "call", "answer"
# Signals that terminals, batch systems and users send to a group of processes.
_TO_THE_GROUP = "HUP", "INT", "QUIT", "TERM", "USR1", "USR2", "WINCH"
_PATIENCE = 0.1  # seconds that a member's call waits for the calls of other members


@contextmanager
def _ending_the_process() -> Iterator[None]:
    """End the process after the block."""
    code = 1
    try:
        yield
    except (EOFError, ConnectionError):  # the command closed the link or has ended
        code = 0
    except BaseException:  # the command notices the end of this process
        traceback.print_exc()
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # ends threads of members too, because they may wait for ever


@_ending_the_process()
def serve(
    pipe: Connection, inherited: list[Connection], app: ClientApp, run_id: int
) -> None:
    """Work on messages until the pipe ends, then end the process."""
    # Separate this process from the command. It must close inherited ends of pipes, or
    # it would not notice that the command has ended. It ignores signals to the process
    # group, because the command handles them and ends this process itself.
    begin_fork()
    for other in inherited:
        other.close()
    # A fork, such as a worker of a DataLoader, must not keep the pipe open if this
    # process dies.
    os.register_at_fork(after_in_child=pipe.close)
    for name in _TO_THE_GROUP:
        signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_IGN)
    threading.Thread(target=end_with_the_command, daemon=True).start()

    # Prepare the environment of a client: torch's threads, the run's id, the app.
    torch.set_num_threads(1)
    keep_freed_memory()
    identify_process(run_id)
    link = WorkerPipe(pipe)
    members = _Members(link)
    link.send((READY, 0))

    inbox = SimpleQueue[Any]()
    threading.Thread(target=_receive, args=(link, members, inbox), daemon=True).start()
    while True:
        received = inbox.get()
        if isinstance(received, BaseException):
            raise received
        (_, number, detail), (message, context) = received
        if detail is None:
            _reply(link, number, app, message, context, None)
        else:
            members.begin(number, app, message, context)


def _receive(link: WorkerPipe, members: _Members, inbox: SimpleQueue[Any]) -> None:
    """Receive messages of the command until the link ends.

    Answers go to the members. Jobs and the end of the link go to the inbox. The thread
    also reads while a client works. Otherwise a reply and the next job could each fill
    one direction of the pipe, and both processes would wait for ever.
    """
    while True:
        try:
            received = link.receive()
        except BaseException as error:  # the main thread raises it
            inbox.put(error)
            return
        (kind, _, detail), _ = received
        if kind == ANSWER:
            members.take(detail)
        else:
            inbox.put(received)
        # Without this line, the thread would keep the memory of a message until the
        # next message.
        del received


def _reply(
    link: WorkerPipe,
    number: int,
    app: ClientApp,
    message: Message,
    context: Context,
    reducer: Reducer | None,
) -> None:
    """Work on a message, and send the reply, the context and the elapsed seconds."""
    begun = time.monotonic()
    try:
        done = [Packed.of(value) for value in work(app, message, context, reducer)]
    except Exception as error:  # the app's reply contains an object without a pickle
        done = [Packed.of(app_error(message, error)), Packed.of(None)]
    # A ConnectionError means that the command was killed. Then this process ends as
    # well.
    with suppress(ConnectionError):
        # Send reply and context apart, so that keeping one of them does not keep the
        # memory of both.
        link.send((DONE, number, time.monotonic() - begun), *done)


class _Members:
    """The members of a step in this process, in one thread each, working in turns.

    Their calls travel together: a call waits until no other member can compute. Each
    message interrupts the command's process, and costs more than a small computation.
    """

    def __init__(self, link: WorkerPipe) -> None:
        self._link = link
        self._reducers: dict[int, _RemoteReducer] = {}
        self._lock = threading.Lock()  # held while calls are taken from ``calls``
        self.calls = deque[Any]()  # calls that are not sent yet
        self._threads = ThreadPoolExecutor(
            MOST_MEMBERS, "member", torch.set_num_threads, (1,)
        )

    def begin(
        self,
        number: int,
        app: ClientApp,
        message: Message,
        context: Context,
    ) -> None:
        reducer = _RemoteReducer(self, number, context.node_id)
        self._reducers[context.node_id] = reducer

        def reply() -> None:
            try:
                _reply(self._link, number, app, message, context, reducer)
            # End the process, as an error in the main thread does: the command notices
            # the end.
            except BaseException:
                traceback.print_exc()
                os._exit(1)

        self._threads.submit(reply)

    def take(self, outcomes: Mapping[int, Any]) -> None:
        """Give the members the results of their calls, by node id."""
        # The last member computes first, because its tensors are still in the CPU's
        # cache.
        for node_id in reversed(list(outcomes)):
            reducer = self._reducers[node_id]
            reducer.outcome = outcomes[node_id]
            reducer.wait.end()

    def send(self) -> None:
        """Send the calls so far."""
        with self._lock:
            calls = [self.calls.popleft() for _ in range(len(self.calls))]
        if calls:
            self._link.send((CALL, 0, calls))


class _RemoteReducer:
    """A member's reducer at a barrier in the command's process.

    Attributes:
        wait: the wait of the latest call.
        outcome: its result or its exception.
    """

    wait: Wait
    outcome: Any

    def __init__(self, members: _Members, number: int, node_id: int) -> None:
        self._members = members
        self._job = number, node_id
        self._attempt = 0

    def begin(self) -> int:
        self._attempt, union = self._call("begin")
        return int(union)

    def reduce(self, tag: str, tensor: Tensor) -> Tensor:
        # Send an array, because pickling a tensor takes nine times as long.
        array = tensor.detach().cpu().numpy()
        return torch.from_numpy(self._call("send", self._attempt, tag, array))

    def close(self) -> None:
        self._call("close")

    def _call(self, method: str, *args: Any) -> Any:
        """Make a call at the barrier in the command's process, and return the result."""
        wait = self.wait = Wait()
        self._members.calls.append((*self._job, method, args))
        # Pass on the turn, so that the other members can make their calls. If no other
        # member wants the turn, or if it computes for long, send the calls so far.
        with wait:
            if not wait.passed_on:
                self._members.send()
            while not wait.is_over(_PATIENCE):
                self._members.send()
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


def end_with_the_command() -> None:
    """End this process after the command has ended, even during a client's work."""
    command = multiprocessing.parent_process()
    if command is not None:
        wait([command.sentinel])
        os._exit(1)
