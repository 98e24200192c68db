"""Flower's Grid without Flower's runtime: the ClientApp runs here or in workers.

The ClientApp, the messages, contexts and error replies are the same as in simulation or
over a network. There is no Ray, no SuperLink and no serialisation in one process. As in
Flower's engines, a node keeps the changes to its context if its app returns, and loses
them if the app raises an exception. A node is a number; it has a context as soon as
there is something to keep in it.

The way of a message: ``push_messages`` puts it into its node's queue; ``begin`` gives
it to the host, which works on it in some thread or process; ``done`` takes the reply
and the context, and begins the node's next message.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedbn_flwr.compat.flower import (
    NUM_PARTITIONS_KEY,
    PARTITION_ID_KEY,
    QUERY_FUNCTION,
    Run,
    app_error,
    empty_run,
    has_function,
    identify_process,
    set_message_id,
    set_reply_address,
    stamped,
)
from fedbn_flwr.engines.client_work import InProcessMember, Job, OwnProcess, work_of
from fedbn_flwr.engines.workers import WorkerProcesses
from fedbn_flwr.errors import EngineError
from fedbn_flwr.messages.protocol import NodeProperties
from fedbn_flwr.training.randomness import numpy_generator
from fedbn_flwr.transport import Barrier
from fedbn_flwr.transport.polling_grid import ImmediateGrid, TellsProperties

__all__ = ["InProcessGrid"]

logger = logging.getLogger("flwr")

_SHORTEST = 1e-4  # seconds: no client takes less


class InProcessGrid(ImmediateGrid):
    """A ``flwr.serverapp.Grid`` whose nodes run in this process or in workers.

    In one process one client computes at a time, and the default generators of torch,
    NumPy and Python are seeded for each message (``messages.protocol.message_seed``).
    Results have the same bits for any number of workers.

    Args:
        client_app: the app of every node.
        num_nodes: nodes 0 .. num_nodes - 1 by partition id.
        run_config: ``Context.run_config`` of every node.
        node_configs: more entries for ``Context.node_config`` of each node.
        workers: processes that work on clients at the same time; 0 = in this process.
            An app that cannot be sent to a process runs here, with a warning.
        threads: clients that are begun at the same time in this process. More than 1 is
            for clients that wait for each other by themselves, as in FedTAN's channel;
            those of a barrier need nothing.
        torch_threads: CPU threads of torch per client (one and two threads give
            different bits).
        seed: seed of the node ids.

    Use it as a context manager, or call ``close()``.
    """

    def __init__(
        self,
        client_app: ClientApp,
        num_nodes: int,
        *,
        run_config: Mapping[str, Any] | None = None,
        node_configs: Sequence[Mapping[str, Any]] | None = None,
        workers: int = 0,
        threads: int = 1,
        torch_threads: int = 1,
        seed: int = 0,
    ) -> None:
        if num_nodes < 1:
            raise EngineError(f"num_nodes={num_nodes} must be at least 1")
        if workers < 0:
            raise EngineError(
                f"workers={workers} must be at least 0: 0 = no processes beside"
                " this one"
            )
        self._draw = numpy_generator(seed, "node-ids")
        self._run = empty_run(int(self._draw.integers(1, 2**62)))
        identify_process(self._run.run_id)
        self._client_app = client_app
        self._run_config = dict(run_config or {})
        self._node_configs = node_configs
        self._node_ids: list[int] = self._draw.integers(1, 2**62, num_nodes).tolist()
        self._partition_of = {
            node_id: partition_id for partition_id, node_id in enumerate(self._node_ids)
        }
        self._contexts: dict[int, Context] = {}
        self._barriers: dict[str, Barrier] = {}
        # Of the three below: the server asks for replies while the host's threads bring
        # them, and a node must become busy or idle in one step.
        self._lock = threading.Lock()
        # for each busy node, its next messages
        self._queues: dict[int, deque[Callable[[], None]]] = {}
        # for each message without a reply, who is told of it
        self._waiting: dict[str, SimpleQueue[str]] = {}
        self._ready: dict[str, Message] = {}
        self._host: OwnProcess | WorkerProcesses = OwnProcess(
            client_app, torch_threads, threads
        )
        if workers:
            try:
                self._host = WorkerProcesses(
                    client_app, torch_threads, workers, self._run.run_id
                )
            except EngineError as error:
                logger.warning(
                    "workers=%d, and %s; clients run in the command's own process.",
                    workers,
                    error,
                )

    def __enter__(self) -> InProcessGrid:
        """Return the grid."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the grid."""
        self.close()

    def close(self) -> None:
        """Wait for the clients at work here; end worker processes; drop the rest."""
        with self._lock:
            for queue in self._queues.values():
                queue.clear()
        self._host.close()

    def set_run(self, run: Run) -> None:
        """See ``Grid.set_run``; existing contexts keep their run."""
        self._run = run

    @property
    def run(self) -> Run:
        """See ``Grid.run``."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """See ``Grid.create_message``."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        """Return the node ids, by partition id."""
        return list(self._node_ids)

    def node_properties(
        self, config: Mapping[str, Any], node_ids: Sequence[int]
    ) -> dict[int, NodeProperties]:
        """See ``ImmediateGrid.node_properties``.

        Only an app of ``client_app(num_examples=...)`` tells them.
        """
        properties = {}
        app = self._client_app
        if isinstance(app, TellsProperties):
            for node_id in node_ids:
                with suppress(Exception):  # the reply to a message says what is wrong
                    context = self._new_context(node_id)
                    properties[node_id] = app.node_properties(config, context)
        return properties

    def answers_queries(self) -> bool:
        """See ``ImmediateGrid.answers_queries``."""
        return has_function(self._client_app, QUERY_FUNCTION)

    def open_barrier(self, barrier_id: str, barrier: Barrier) -> None:
        """See ``transport.BarrierGrid``.

        A client finds it by ``transport.in_process_reducer(barrier_id)``.
        """
        self._barriers[barrier_id] = barrier
        self._host.open_barrier(barrier_id, barrier)

    def close_barrier(self, barrier_id: str) -> None:
        """See ``transport.BarrierGrid``."""
        del self._barriers[barrier_id]
        self._host.close_barrier(barrier_id)

    def context(self, partition_id: int) -> Context:
        """Return a node's context, to inspect its state."""
        return self._context(self._node_ids[partition_id])

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Start work on the messages and return their ids; see ``Grid.push_messages``.

        Raises:
            EngineError: a message is for an unknown node.
        """
        return self._push(messages, SimpleQueue())

    def _push(
        self, messages: Iterable[Message], arrived: SimpleQueue[str]
    ) -> list[str]:
        """Start work on the messages and return their ids.

        The id of a message comes into the queue ``arrived`` when its reply is ready.
        """
        # All or none: no message is sent where one has no node.
        messages = list(messages)
        for message in messages:
            node_id = message.metadata.dst_node_id
            if node_id not in self._partition_of:
                raise EngineError(
                    f"no node {node_id} among the {len(self._node_ids)} of this grid"
                )

        # Prepare everything first, the ids in the order of the messages: clients work
        # beside the loop that begins, so it does little.
        message_ids = [self._new_id() for _ in messages]
        works = []
        costs = []
        for message, message_id in zip(messages, message_ids, strict=True):
            self._waiting[message_id] = arrived
            seconds = self._host.seconds.get(work_of(message), 0.0)
            costs.append(_order_of_magnitude(seconds))
            stamped_message = stamped(message, message_id, self._run.run_id)
            works.append(self._work(stamped_message, self._new_id()))

        # Those that take much longer first, so that no process works on alone at the
        # end; else in the given order, in which the server reads the replies.
        for i in sorted(range(len(works)), key=lambda i: -costs[i]):
            node_id = messages[i].metadata.dst_node_id
            # A node works on one message at a time, in order: it changes its context.
            with self._lock:
                busy = node_id in self._queues
                if busy:
                    self._queues[node_id].append(works[i])
                else:
                    self._queues[node_id] = deque()
            if not busy:
                works[i]()
        return message_ids

    def pull_messages(
        self,
        message_ids: Iterable[str] | None = None,
        *,
        reply_to_message_ids: Iterable[str] | None = None,
    ) -> list[Message]:
        """Return the ready replies, each only once; see ``Grid.pull_messages``.

        Args:
            message_ids: the messages whose replies are asked for; None = all.
            reply_to_message_ids: the name of this argument from Flower 1.43 on.
        """
        wanted = message_ids if reply_to_message_ids is None else reply_to_message_ids
        if wanted is None:
            wanted = list(self._ready)
        return [self._ready.pop(i) for i in wanted if i in self._ready]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Return the replies after at most ``timeout`` seconds.

        See ``Grid.send_and_receive``.
        """
        arrived = SimpleQueue[str]()
        message_ids = self._push(messages, arrived)
        for _ in self._arrivals(message_ids, arrived, timeout):
            pass
        return self.pull_messages(message_ids)

    def receive(
        self, messages: Iterable[Message], *, timeout: float | None
    ) -> Sequence[Message]:
        """See ``ImmediateGrid.receive``.

        With worker processes the server reads the first replies while they go on.
        """
        # here reading would only take the clients' time
        if isinstance(self._host, OwnProcess):
            return self.send_and_receive(messages, timeout=timeout)
        arrived = SimpleQueue[str]()
        arrivals = self._arrivals(self._push(messages, arrived), arrived, timeout)
        return _Arriving(
            reply
            for message_id in arrivals
            for reply in self.pull_messages([message_id])
        )

    def _arrivals(
        self,
        message_ids: Sequence[str],
        arrived: SimpleQueue[str],
        timeout: float | None,
    ) -> Iterator[str]:
        """Yield ids as their replies arrive, until the timeout."""
        # whose seconds begin with the first call
        end = None if timeout is None else time.monotonic() + timeout
        with suppress(Empty):
            for _ in message_ids:
                left = None if end is None else max(0.0, end - time.monotonic())
                yield arrived.get(timeout=left)
        # Nobody asks for a late reply: it is dropped when it comes.
        with self._lock:
            for message_id in message_ids:
                self._waiting.pop(message_id, None)

    def _new_id(self) -> str:
        return str(self._draw.bytes(16).hex())

    def _work(self, message: Message, reply_id: str) -> Callable[[], None]:
        """Return the call that begins a node's work on a message."""
        node_id = message.metadata.dst_node_id
        message_id = message.metadata.message_id
        # Now, as the barrier of a step may be closed when the message begins.
        member = None
        for barrier_id, barrier in self._barriers.items():
            if node_id in barrier.members:
                member = InProcessMember(barrier_id, barrier, node_id)
                break

        def begin() -> None:
            try:
                self._host.submit(Job(message, self._context(node_id), member, done))
            except Exception as error:  # its barrier is closed, or the grid
                done(app_error(message, error), None)

        def done(reply: Message, context: Context | None) -> None:
            # The node keeps what its app has changed. A context that is as new is made
            # again when it is needed: thousands of nodes may have nothing to keep.
            if context is not None:
                if self._is_new(node_id, context):
                    self._contexts.pop(node_id, None)
                else:
                    self._contexts[node_id] = context

            # The reply answers this message, whatever the app has written on it.
            set_message_id(reply, reply_id)
            if set_reply_address(reply, message):
                logger.warning(
                    "A mod on node %d answered another message than the one it"
                    " received. Flower's own engines lose such a reply, and the server"
                    " waits for it until its timeout.",
                    node_id,
                )

            # Tell who waits, and take the node's next message, or the node is idle.
            with self._lock:
                arrived = self._waiting.pop(message_id, None)
                if arrived:
                    self._ready[message_id] = reply
                    arrived.put(message_id)
                queue = self._queues[node_id]
                following = queue.popleft() if queue else None
                if following is None:
                    del self._queues[node_id]
            # without the lock, which its ``done`` needs
            if following is not None:
                following()

        return begin

    def _is_new(self, node_id: int, context: Context) -> bool:
        try:
            return not context.state and bool(context == self._new_context(node_id))
        # a config has an array, whose comparison is not one truth value
        except ValueError:
            return False

    def _context(self, node_id: int) -> Context:
        return self._contexts.get(node_id) or self._new_context(node_id)

    def _new_context(self, node_id: int) -> Context:
        partition_id = self._partition_of[node_id]
        node_config: dict[str, Any] = {
            PARTITION_ID_KEY: partition_id,
            NUM_PARTITIONS_KEY: len(self._node_ids),
        }
        if self._node_configs:
            node_config |= self._node_configs[partition_id]
        return Context(
            self._run.run_id, node_id, node_config, RecordDict(), self._run_config
        )


def _order_of_magnitude(seconds: float) -> int:
    """Return the cost of a client in steps of a factor of 1.4; 0 = not known."""
    # Smaller differences are mostly noise, and would change the order in each round.
    if not seconds:
        return 0
    return max(0, round(2 * math.log2(seconds / _SHORTEST)))


class _Arriving(Sequence[Message]):
    """Replies that may still be on their way: whoever asks for one waits for it."""

    def __init__(self, replies: Iterator[Message]) -> None:
        self._replies = replies
        self._here: list[Message] = []

    def __iter__(self) -> Iterator[Message]:
        """Iterate over the replies as they arrive; again over those that are there."""
        for i in itertools.count():
            while len(self._here) <= i:
                try:
                    self._here.append(next(self._replies))
                except StopIteration:
                    return
            yield self._here[i]

    def __len__(self) -> int:
        """Return the number of replies, all awaited."""
        # an iterator has no length: the list of self would ask for this one
        return len([*iter(self)])

    def __getitem__(self, index: Any) -> Any:
        """Return a reply, or those of a slice, all awaited."""
        return [*iter(self)][index]
