"""Clients in worker processes, as a host of ``InProcessGrid`` for several cores.

Each process works on one client at a time. In a synchronised step all its members have
started. One of them computes while the others wait for the answer of the barrier in the
command's process. No process outlives the command.

The death of a process ends its pipe. The receiving thread (``_receive``) notices this.
``_replace`` then gives error replies for its clients and starts another process.
"""

from __future__ import annotations

import itertools
import logging
import math
import multiprocessing
import signal
import sys
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any

import torch
from flwr.clientapp import ClientApp
from torch import Tensor

from fedbn_flwr.compat.flower import PARTITION_ID_KEY, app_error
from fedbn_flwr.engines.client_work import Job, kind_of_work
from fedbn_flwr.engines.link import Broadcasts, Packed, WorkerPipe
from fedbn_flwr.engines.worker_process import ANSWER, CALL, READY, WORK, serve
from fedbn_flwr.errors import EngineError
from fedbn_flwr.machine import forking, not_for_forks
from fedbn_flwr.transport import Barrier, Dropped

logger = logging.getLogger("flwr")

_SECONDS_TO_END = 5.0


class WorkerProcesses:
    """Runs clients in ``count`` processes.

    The processes are forks of this process. Forks start quickly, share its data, and do
    not pickle a script's closures.

    Args:
        app: the app of every node.
        torch_threads: CPU threads of torch; only 1 is possible.
        count: number of processes.
        run_id: id of the run, for Flower's messages.

    Attributes:
        seconds: shortest time that a node's message took, by node id and message type.
            The shortest is used, because load on the machine only lengthens a time.

    Raises:
        EngineError: the system is not Linux, a fork cannot use CUDA, several torch
            threads or a connection of the app, or no process can be started.
    """

    def __init__(
        self, app: ClientApp, torch_threads: int, count: int, run_id: int
    ) -> None:
        if sys.platform != "linux":
            raise EngineError(
                f"worker processes need a kind of shared memory that {sys.platform}"
                " does not have"
            )
        # In a fork, torch's thread pools hang and CUDA refuses to work.
        if torch_threads > 1 or torch.cuda.is_available():
            raise EngineError(
                "worker processes are forks and can use neither CUDA nor several"
                " torch threads. `flwr run` can. CUDA_VISIBLE_DEVICES='' hides a GPU"
            )
        why_not = not_for_forks(app)
        if why_not:
            raise EngineError(why_not)
        self._run_id = run_id
        self._app = app
        # The lock guards ``_jobs``, ``_workers`` and each worker's jobs. Do not send
        # under the lock. A full pipe waits for its process, and the process may wait
        # until we receive its reply.
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._broadcasts = Broadcasts()
        self.seconds: dict[tuple[int, str], float] = {}
        self._jobs: deque[Job] = deque()
        self._barriers: dict[str, Barrier] = {}
        self._workers: list[_Worker] = []
        self._threads: list[threading.Thread] = []
        # Run this at the end of the command, before multiprocessing waits for its
        # processes. Pass the lists and not ``self``, because a reference to ``self``
        # would keep it alive.
        self._end = Finalize(
            self,
            _end_all,
            args=(self._workers, self._threads, self._closed, self._lock),
            exitpriority=10,
        )
        try:
            for _ in range(count):
                self._workers.append(self._start())
        except Exception as error:
            self._end()
            raise EngineError(
                f"a process cannot be started: {type(error).__name__}: {error}"
            ) from error

    def submit(self, job: Job) -> None:
        """Begin a job when a process is free, or immediately for a member of a step."""
        with self._lock:
            if job.member:
                # Send the job immediately, because the other members of the step wait
                # for this member at the barrier.
                worker = self._for_member(job.member.barrier_id)
            else:
                idle = (w for w in self._workers if not w.jobs and not w.gone)
                worker = next(idle, None)
            if worker:
                number = worker.reserve(job)
            elif self._workers and not self._closed.is_set():
                self._jobs.append(job)
                return
        if worker:
            self._send(worker, number, job)
        else:
            _fail(job, "no worker process is left")

    def open_barrier(self, barrier_id: str, barrier: Barrier) -> None:
        """Start to answer the members of a synchronised step."""
        self._barriers[barrier_id] = barrier

    def close_barrier(self, barrier_id: str) -> None:
        """End the step, and later the processes of members that hang."""
        # From now on, a member that calls the barrier gets the answer that the step is
        # over.
        barrier = self._barriers.pop(barrier_id)
        if self._with_member_of(barrier_id):
            timer = threading.Timer(barrier.timeout, self._end_hanging, (barrier_id,))
            timer.daemon = True
            timer.start()

    def _with_member_of(self, barrier_id: str) -> list[_Worker]:
        with self._lock:
            return [
                worker for worker in self._workers if any(worker.works_for(barrier_id))
            ]

    def _end_hanging(self, barrier_id: str) -> None:
        """End the processes that still have a member of a step that is over."""
        # The hanging member has the turn of its process, so all later clients wait.
        for worker in self._with_member_of(barrier_id):
            logger.error(
                "worker process %d hangs in a synchronised step that is over",
                worker.process.pid,
            )
            worker.process.kill()

    def close(self) -> None:
        """End the processes and fail their unfinished jobs."""
        self._end()
        # Do this after the processes have ended, because a late reply would finish a
        # job twice.
        with self._lock:
            left = list(self._jobs)
            self._jobs.clear()
            for worker in self._workers:
                left += worker.jobs.values()
                worker.jobs.clear()
        for job in left:
            _fail(job, "the grid was closed")
        self._broadcasts.close()

    def _for_member(self, barrier_id: str) -> _Worker | None:
        """Return the process for a new member, with the fewest jobs."""
        # Prefer a process that works only for this step, because a member that hangs
        # would delay other jobs.
        alive = [w for w in self._workers if not w.gone] or self._workers
        free = [worker for worker in alive if all(worker.works_for(barrier_id))]
        return min(free or alive, key=lambda worker: len(worker.jobs), default=None)

    def _send(self, worker: _Worker, number: int, job: Job) -> None:
        """Send a job that ``worker`` has reserved."""
        barrier_id = job.member.barrier_id if job.member else None
        try:
            # Pack the context first: if it has no pickle, no broadcast's descriptor is
            # left open.
            context = Packed.of(job.context)
            message = self._broadcasts.pack(job.message)
            worker.link.send((WORK, number, barrier_id), message, context)
        except ConnectionError:
            # The process has died, so ``_replace`` fails the job.
            return
        except Exception as error:  # the job cannot be pickled, or memory is full
            with self._lock:
                known = worker.jobs.pop(number, None)
            # If the job is unknown, ``_replace`` or ``close`` has already failed it.
            if known:
                _fail(
                    job,
                    "the message could not be sent to a worker process:"
                    f" {type(error).__name__}: {error}",
                )
                self._feed(worker)

    def _feed(self, worker: _Worker) -> None:
        """Give a process its next job, and a second job if many jobs wait."""
        sent = []
        with self._lock:
            while self._jobs and not worker.gone:
                # A second job avoids a pause until the next job is sent. But if only
                # few jobs are left, it would wait here although another process is
                # idle.
                most = 2 if len(self._jobs) > len(self._workers) else 1
                if len(worker.jobs) >= most:
                    break
                job = self._jobs.popleft()
                sent.append((worker.reserve(job), job))
        for number, job in sent:
            self._send(worker, number, job)

    def _start(self) -> _Worker:
        """Start a process and the thread that receives its messages."""
        ours, others = multiprocessing.Pipe()
        # A fork inherits our ends of all pipes and must close them. A pipe ends only
        # with its last copy, and a process must notice the end of the command.
        inherited = [ours] + [worker.link.pipe for worker in self._workers]
        process = multiprocessing.get_context("fork").Process(
            target=serve,
            args=(others, inherited, self._app, self._run_id),
            name="fedbn-flwr worker",
        )
        with forking():
            process.start()
        # Close the other end in this process. Otherwise, the pipe would not end here
        # when the process dies.
        others.close()
        worker = _Worker(process, WorkerPipe(ours, process.pid or 0))
        # The thread is a daemon, because at the end of a command, Python waits for all
        # other threads before it calls ``_end_all``.
        thread = threading.Thread(
            target=self._receive, args=(worker,), name="worker", daemon=True
        )
        self._threads.append(thread)
        thread.start()
        return worker

    def _receive(self, worker: _Worker) -> None:
        """Receive the messages of a process until it ends, then replace it."""
        while True:
            try:
                (kind, number, *call), values = worker.link.receive()
            except Exception:  # the process has ended, or its message is unreadable
                self._replace(worker)
                return
            if kind == READY:
                worker.ready = True
            elif kind == CALL:
                for of_member in call[0]:
                    self._call(worker, *of_member)
            else:
                with self._lock:
                    job = worker.jobs.pop(number, None)
                # Send the next job before the reply is delivered, so that the process
                # works while the server reads the reply.
                self._feed(worker)
                # Without a job, the grid was closed and has failed the job.
                if job:
                    work, seconds = kind_of_work(job.message), call[0]
                    # A failure may end early, and has no context.
                    if values[-1] is not None:
                        shortest = self.seconds.get(work, math.inf)
                        self.seconds[work] = min(seconds, shortest)
                    _end(job, values)
                # Without this line, the thread would keep the memory of the reply until
                # the next message.
                del job, values

    def _call(
        self,
        worker: _Worker,
        number: int,
        node_id: int,
        method: str,
        args: tuple[Any, ...],
    ) -> None:
        """Make a member's call at its barrier, and answer it."""
        barrier = None
        job = worker.jobs.get(number)
        # Without a job, the grid was closed.
        if job and job.member:
            barrier = self._barriers.get(job.member.barrier_id)
        try:
            if barrier is None:
                raise Dropped("the synchronised step is over")
            if method == "send":
                # The answer follows after the exchange, because this thread has to
                # receive the calls of other members in the process.
                attempt, tag, array = args
                tensor = torch.from_numpy(array)
                barrier.send(node_id, attempt, tag, tensor, worker.answer)
            else:
                worker.answer({node_id: getattr(barrier, method)(node_id)})
        except Dropped as error:
            worker.answer({node_id: error})
        # send the text, because the error may have no pickle
        except Exception as error:
            worker.answer({node_id: EngineError(f"{type(error).__name__}: {error}")})

    def _replace(self, worker: _Worker) -> None:
        """Replace a process that died, after error replies for its clients."""
        # Give the process no further jobs.
        with self._lock:
            worker.gone = True
        worker.link.pipe.close()

        # Wait for its exit code, and kill it if it has only lost its pipe.
        worker.process.join(_SECONDS_TO_END)
        worker.process.kill()
        worker.process.join()
        why = f"worker process {worker.process.pid} {_how(worker.process.exitcode)}"

        fresh = None
        with self._lock:
            # If the grid is closed, ``close`` has ended the process and fails the jobs
            # itself.
            if self._closed.is_set():
                return

            # Start another process. If this process died before it was ready, the other
            # would also die at its start.
            self._workers.remove(worker)
            if worker.ready:
                try:
                    fresh = self._start()
                    self._workers.append(fresh)
                except Exception as error:
                    why += (
                        f", and another one cannot be started: {type(error).__name__}:"
                        f" {error}"
                    )
            else:
                why += ", before it could work"

            # If the jobs belong to a synchronised step, all have started, so all are
            # lost. Otherwise only the first job has started, and the others wait for
            # another process.
            lost = list(worker.jobs.values())
            worker.jobs.clear()
            if not any(job.member for job in lost):
                self._jobs.extendleft(reversed(lost[1:]))
                lost = lost[:1]
            # Without any process, nobody would take the waiting jobs.
            stranded = []
            if not self._workers:
                stranded = list(self._jobs)
                self._jobs.clear()

        # Log the reason once for all clients, and report it in each client's reply.
        if not fresh:
            logger.error("%s; %d worker processes are left", why, len(self._workers))
        if lost:
            partitions = ", ".join(
                str(job.context.node_config.get(PARTITION_ID_KEY)) for job in lost
            )
            logger.error(
                "%s; its clients count as failed (partition %s). The run continues.",
                why,
                partitions,
            )
        for job in [*lost, *stranded]:
            _fail(job, why)
        # A job that was returned goes to the new process, or to an idle one.
        for other in [fresh] if fresh else list(self._workers):
            self._feed(other)


def _end(job: Job, values: list[Any]) -> None:
    """Give a job its reply and context, or an error reply if they are unusable."""
    try:
        job.done(*values)
    except Exception as error:
        _fail(job, f"the reply could not be used: {type(error).__name__}: {error}")


def _fail(job: Job, why: str) -> None:
    """Give a job an error reply, without a change to the client's context."""
    job.done(app_error(job.message, EngineError(why)), None)


@dataclass
class _Worker:
    """A process, the link to it, and its current jobs by number.

    Attributes:
        ready: whether it has started to receive.
        gone: whether it has ended, so that it gets no further jobs.
    """

    process: BaseProcess
    link: WorkerPipe
    jobs: dict[int, Job] = field(default_factory=dict)
    ready: bool = False
    gone: bool = False

    def reserve(self, job: Job) -> int:
        """Register a new job and return its number."""
        number = next(_numbers)
        self.jobs[number] = job
        return number

    def works_for(self, barrier_id: str) -> list[bool]:
        """Return for each job whether it is a member of this barrier."""
        return [
            job.member is not None and job.member.barrier_id == barrier_id
            for job in self.jobs.values()
        ]

    def answer(self, outcomes: Mapping[int, Any]) -> None:
        """Send the results or exceptions of members' calls, by node id."""
        # Share one array per tensor, because pickle then sends it only once.
        arrays: dict[int, Any] = {}
        answers = {}
        for node_id, outcome in outcomes.items():
            if isinstance(outcome, Tensor):
                outcome = arrays.setdefault(id(outcome), outcome.numpy())
            answers[node_id] = outcome
        with suppress(OSError):  # the process has died
            self.link.send((ANSWER, 0, answers))


_numbers = itertools.count()


def _end_all(
    current: list[_Worker],
    threads: list[threading.Thread],
    closed: threading.Event,
    lock: threading.Lock,
) -> None:
    """End the processes, then wait for the threads that received from them.

    Idle processes end with their link, busy processes by a signal.
    """
    with lock:
        closed.set()  # from now on, ended processes are not replaced
        workers = list(current)
    for worker in workers:
        if worker.jobs:
            worker.process.kill()
        worker.link.close()
    for worker in workers:
        worker.process.join(_SECONDS_TO_END)
        if worker.process.exitcode is None:
            worker.process.kill()
            worker.process.join()
    # Wait for the threads. If a thread frees a tensor while the interpreter ends, it
    # aborts the process: torch takes the GIL again, and Python then ends the thread
    # inside a C++ function that no exception may leave.
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()


def _how(code: int | None) -> str:
    """Return how a process ended."""
    if code is None or code >= 0:
        return f"ended with code {code}"
    name = signal.Signals(-code).name
    return f"was ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
