"""A client's work on one message, and the host in the command's process.

``InProcessGrid`` gives a ``Job`` to its host. ``Job.done`` receives the outcome, either
the reply and the changed context or an error reply. The host is ``OwnProcess`` here or
``workers.WorkerProcesses``.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedbn_flwr.compat.flower import app_error, copied_context, copied_message
from fedbn_flwr.errors import EngineError, FedBNError, NamedConfigErrors, described
from fedbn_flwr.messages.protocol import message_seed
from fedbn_flwr.transport import Barrier, Reducer, use_reducer
from fedbn_flwr.transport.turns import turn

logger = logging.getLogger("flwr")

MOST_MEMBERS = 2**20  # upper limit of threads; a thread starts only when there is work
Answer = tuple[Message, Context | None]
"""Reply and changed context, or None if the client failed and keeps its context."""
Done = Callable[[Message, Context | None], None]
"""A function ``done(reply, context)`` that receives the outcome."""


def kind_of_work(message: Message) -> tuple[int, str]:
    """Return the node and the kind of work of a message."""
    about = message.metadata
    return about.dst_node_id, about.message_type


class InProcessMember(NamedTuple):
    """A client that takes part in a synchronised step."""

    barrier_id: str
    barrier: Barrier
    node_id: int


@dataclass
class Job:
    """A message to a client, the client's context, and the receiver of the outcome."""

    message: Message
    context: Context
    member: InProcessMember | None
    done: Done


def work(
    app: ClientApp, message: Message, context: Context, reducer: Reducer | None
) -> Answer:
    """Return the app's reply and the context that it changed.

    After an exception, the result is an error reply, and None for the context. The
    default generators are seeded for the message, here or by the app. Meanwhile no
    other client of this process computes.

    Args:
        app: the node's app.
        message: the message; the app may change it.
        context: the context; the app may change it.
        reducer: the client's reducer in a synchronised step.
    """
    try:
        seed = None
        if not getattr(app, "seeds_itself", False):
            seed = message_seed(message, context)
        at_barrier = use_reducer(reducer) if reducer else nullcontext()
        with turn(seed), at_barrier, NamedConfigErrors():
            reply: object = app(message, context)
        if not isinstance(reply, Message):
            raise EngineError(
                f"the ClientApp returned {type(reply).__name__}, not a Message. Return"
                " a Message"
            )
        return reply, context
    # Catch CancelledError and SystemExit as well, because the run waits for a reply.
    except BaseException as error:
        logger.debug(traceback.format_exc())
        # Errors of this package are complete. Name the type and the line of another
        # error, because its text may be only a number.
        reason = error if isinstance(error, FedBNError) else described(error)
        return app_error(message, reason), None


class OwnProcess:
    """Runs clients in threads of this process. One of them computes at a time.

    Args:
        app: the app of every node.
        torch_threads: CPU threads of torch.
        threads: number of threads for clients outside synchronised steps. They still
            work one after the other. Each synchronised step has its own threads.
    """

    def __init__(self, app: ClientApp, torch_threads: int, threads: int = 1) -> None:
        self._app = app
        self._torch_threads = torch_threads
        # This stays empty: one client works at a time, in any order, so no time is
        # measured.
        self.seconds: dict[tuple[int, str], float] = {}
        self._count = threads
        self._threads = self._pool(threads)
        # Clients that wait for each other at a barrier must all have started, so they
        # get as many threads as they need. The next step uses the threads again: a new
        # thread would get the memory of its tensors from the system page by page.
        self._of_members = self._pool(MOST_MEMBERS)
        self._jobs: deque[Job] = deque()  # jobs outside synchronised steps
        self._working = 0  # threads that work on these jobs, one after the other
        self._lock = threading.Lock()  # guards ``_jobs`` and ``_working``

    def submit(self, job: Job) -> None:
        """Start a job as soon as a thread is free."""
        if job.member:
            self._of_members.submit(self._work, job)
            return
        with self._lock:
            self._jobs.append(job)
            if self._working == self._count:
                return
            self._working += 1
        self._threads.submit(self._work_on_jobs)

    def _work_on_jobs(self) -> None:
        """Work on one job after another until none waits, in one turn."""
        job = self._next()
        if job is None:
            # Another thread has taken the job. Do not take a turn without work: it
            # would save the generators while the caller draws from them, and restore
            # them a moment later.
            return
        with turn() as pass_on:
            outcome = self._outcome(job)
            for following in iter(self._next, None):
                _hand_over(job, outcome)
                pass_on()
                job = following
                outcome = self._outcome(job)
        # Hand over the last outcome after the turn, so that the receiver of all replies
        # finds the generators in their earlier state.
        _hand_over(job, outcome)

    def _next(self) -> Job | None:
        """Return the next job, or None if the thread must end without another job."""
        with self._lock:
            if not self._jobs:
                self._working -= 1
                return None
            return self._jobs.popleft()

    def open_barrier(self, barrier_id: str, barrier: Barrier) -> None:
        """Begin a synchronised step. Its members need no preparation here."""

    def close_barrier(self, barrier_id: str) -> None:
        """End the step."""

    def close(self) -> None:
        """Wait for the clients that have started, and drop the other jobs."""
        with self._lock:
            self._jobs.clear()
        # The members of ended steps are included.
        for threads in (self._threads, self._of_members):
            threads.shutdown(cancel_futures=True)

    def _pool(self, threads: int) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(
            threads,
            thread_name_prefix="client",
            initializer=torch.set_num_threads,
            initargs=(self._torch_threads,),
        )

    def _work(self, job: Job) -> None:
        _hand_over(job, self._outcome(job))

    def _outcome(self, job: Job) -> Answer:
        try:
            reducer = None
            if job.member:
                reducer = job.member.barrier.reducer(job.member.node_id)
            # Copy the message and the context, because the app may change their
            # records. After an error, the context must have its earlier state.
            message = copied_message(job.message)
            return work(self._app, message, copied_context(job.context), reducer)
        except Exception as error:  # nobody would see it in the thread
            return app_error(job.message, error), None


def _hand_over(job: Job, outcome: Answer) -> None:
    try:
        job.done(*outcome)
    except Exception as error:  # nobody would see it in the thread
        job.done(app_error(job.message, error), None)
