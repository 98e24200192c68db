"""Flower's Grid without Flower's runtime, with clients here or in workers.

The ClientApp, the messages, contexts and error replies are the same as in simulation or
over a network. One process needs no Ray, SuperLink or serialisation. As in Flower's
engines, a node keeps the changes to its context if its app returns, and loses
them if the app raises an exception. A node is only a number, and it gets a context as
soon as there is state to keep.

A message takes three steps. ``push_messages`` puts it into its node's queue. ``begin``
gives it to the host, which works on it in a thread or process. ``done`` receives the
reply and the context, and begins the node's next message.
"""

from __future__ import annotations

import itertools
import logging
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedbn_flwr.compat.flower import (
    NUM_PARTITIONS_KEY,
    PARTITION_ID_KEY,
    QUERY_FUNCTION,
    Run,
    address_reply,
    app_error,
    changed,
    empty_run,
    has_function,
    identify_process,
)
from fedbn_flwr.engines.client_work import (
    InProcessMember,
    Job,
    OwnProcess,
    kind_of_work,
)
from fedbn_flwr.engines.workers import WorkerProcesses
from fedbn_flwr.errors import EngineError
from fedbn_flwr.messages.protocol import NodeProperties
from fedbn_flwr.training.randomness import numpy_generator
from fedbn_flwr.transport import Barrier
from fedbn_flwr.transport.polling_grid import ImmediateGrid

logger = logging.getLogger("flwr")

_PAUSE = 0.1  # seconds between two polls without a reply


class InProcessGrid(ImmediateGrid):
    """A ``flwr.serverapp.Grid`` whose nodes run in this process or in workers.

    In one process, one client computes at a time, and the default generators of torch,
    NumPy and Python are seeded for each message (``messages.protocol.message_seed``).
    Results have the same bits for any number of workers.

    Args:
        client_app: the app of every node.
        num_nodes: number of nodes; their partition ids are 0 to num_nodes - 1.
        run_config: ``Context.run_config`` of every node.
        node_configs: additional entries for ``Context.node_config`` of each node.
        workers: number of processes that work on clients at the same time. With 0,
            clients run in this process. If processes are not possible, they also run
            here, with a warning.
        threads: number of clients that may start at the same time in this process. More
            than 1 is necessary only for clients that wait for each other on their own
            (FedTAN's channel). Barriers have their own threads.
        torch_threads: CPU threads of torch per client. One and two threads give
            different bits.
        seed: seed of the node ids.

    Use the grid as a context manager, or call ``close()``.

    Example::

        >>> import torch
        >>> from flwr.app import ArrayRecord
        >>> from torch import nn
        >>> from torch.utils.data import TensorDataset
        >>> from fedbn_flwr import InProcessGrid, TorchClient, client_app
        >>> from fedbn_flwr.strategies import FedBN
        >>> from fedbn_flwr.training import LearningRate, LocalTraining
        >>> def build_model():
        ...     layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        ...     return nn.Sequential(*layers)
        >>> def client_fn(context):
        ...     site = int(context.node_config["partition-id"])
        ...     inputs = torch.randn(16, 4) + site
        ...     data = TensorDataset(inputs, torch.arange(16) % 2)
        ...     rate = LearningRate(0.1)
        ...     training = LocalTraining(learning_rate=rate, batch_size=8)
        ...     return TorchClient(build_model, data, data, training, context=context)
        >>> app = client_app(client_fn)
        >>> arrays = ArrayRecord(build_model().state_dict())
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = FedBN().start(grid, initial_arrays=arrays, num_rounds=2)
        >>> result.train_metrics_clientapp[2]["examples-processed"]
        48
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
            raise EngineError(f"num_nodes={num_nodes} is not allowed: use 1 or more")
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
        # The lock guards the next three attributes. The server asks for replies while
        # threads of the host deliver them, and a node must become busy or idle in one
        # step.
        self._lock = threading.Lock()
        # The next messages of each busy node.
        self._queues: dict[int, deque[Callable[[], None]]] = {}
        # For each message without a reply, the queue that receives its id on arrival.
        self._waiting: dict[str, SimpleQueue[str]] = {}
        self._ready: dict[str, Message] = {}
        self._arrival = threading.Event()  # set when a reply arrives
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
                    "workers=%d is ignored, because %s; clients run in the command's"
                    " own process.",
                    workers,
                    error,
                )

    nodes_may_join = False

    def __enter__(self) -> InProcessGrid:
        """Return the grid."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the grid."""
        self.close()

    def close(self) -> None:
        """Drop waiting messages, wait for clients in this process, and end workers."""
        with self._lock:
            for queue in self._queues.values():
                queue.clear()
        self._host.close()

    def set_run(self, run: Run) -> None:
        """See ``Grid.set_run``. Existing contexts keep their run."""
        self._run = run

    @property
    def run(self) -> Run:
        """See ``Grid.run``."""
        return self._run

    def get_node_ids(self) -> list[int]:
        """Return the node ids, by partition id."""
        return list(self._node_ids)

    def node_properties(
        self, config: Mapping[str, Any], node_ids: Sequence[int]
    ) -> dict[int, NodeProperties]:
        """See ``ImmediateGrid.node_properties``.

        Only an app made by ``client_app(num_examples=...)`` has them.
        """
        properties: dict[int, NodeProperties] = {}
        tell: Any = getattr(self._client_app, "node_properties", None)
        for node_id in node_ids if tell else ():
            # the node's reply to a message will report the error
            with suppress(Exception):
                properties[node_id] = tell(config, self._new_context(node_id))
        return properties

    def answers_queries(self) -> bool:
        """See ``ImmediateGrid.answers_queries``."""
        return has_function(self._client_app, QUERY_FUNCTION)

    def open_barrier(self, barrier_id: str, barrier: Barrier) -> None:
        """See ``transport.BarrierGrid``.

        A client gets its reducer by ``transport.in_process_reducer()``.
        """
        self._barriers[barrier_id] = barrier
        self._host.open_barrier(barrier_id, barrier)

    def close_barrier(self, barrier_id: str) -> None:
        """See ``transport.BarrierGrid``."""
        del self._barriers[barrier_id]
        self._host.close_barrier(barrier_id)

    def context(self, partition_id: int) -> Context:
        """Return a node's context, to inspect its state."""
        node_id = self._node_ids[partition_id]
        return self._contexts.get(node_id) or self._new_context(node_id)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Start work on the messages and return their ids.

        See ``Grid.push_messages``.

        Raises:
            EngineError: a message is for an unknown node.
        """
        return self._push(messages, SimpleQueue())

    def _push(
        self, messages: Iterable[Message], arrived: SimpleQueue[str]
    ) -> list[str]:
        """Start work on the messages and return their ids.

        When a reply is ready, the id of its message is put into the queue ``arrived``.

        Raises:
            EngineError: a message is for an unknown node.
        """
        # Check all nodes first, so that either all messages are sent or none.
        messages = list(messages)
        for message in messages:
            node_id = message.metadata.dst_node_id
            if node_id not in self._partition_of:
                raise EngineError(
                    f"node {node_id} is not one of the {len(self._node_ids)} nodes of"
                    " this grid. Use an id from get_node_ids()"
                )

        # Prepare everything first, with ids in the order of the messages. Clients work
        # at the same time as the loop that starts them, so that loop must be short.
        ids = self._draw.bytes(32 * len(messages)).hex(" ", 16).split()
        message_ids, reply_ids = ids[::2], ids[1::2]
        works = []
        for message, message_id, reply_id in zip(
            messages, message_ids, reply_ids, strict=True
        ):
            self._waiting[message_id] = arrived
            own = changed(message, message_id=message_id, run_id=self._run.run_id)
            works.append(self._work(own, reply_id))

        # Start clients that take much longer first, so that no process is busy at the
        # end when the others are idle. Otherwise keep the server's order of reading
        # the replies, because a reply that is read later stays in memory.
        first = [*range(len(works))]
        if self._host.seconds:  # only workers measure times
            known = [self._host.seconds.get(kind_of_work(m)) for m in messages]
            longer = _much_longer(known)
            first.sort(key=lambda i: -longer[i])
        for i in first:
            node_id = messages[i].metadata.dst_node_id
            # A node works on its messages in order, because each message may change its
            # context.
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
        """Return the ready replies, each only once.

        See ``Grid.pull_messages``.

        Args:
            message_ids: the messages whose replies are wanted. None means all.
            reply_to_message_ids: the name of ``message_ids`` since Flower 1.43.
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
        replies = {
            reply.metadata.reply_to_message_id: reply
            for reply in self._arrivals(message_ids, arrived, timeout)
        }
        return [replies[i] for i in message_ids if i in replies]

    def receive(
        self, messages: Iterable[Message], *, timeout: float | None
    ) -> Sequence[Message]:
        """See ``ImmediateGrid.receive``.

        The server reads the first replies while clients work.
        """
        arrived = SimpleQueue[str]()
        message_ids = self._push(messages, arrived)
        return _Arriving(self._arrivals(message_ids, arrived, timeout))

    def pause(self, seconds: float) -> None:
        """See ``ImmediateGrid.pause``.

        Each poll takes time from the clients, so the pause is long without a reply.
        """
        self._arrival.wait(max(seconds, _PAUSE))
        self._arrival.clear()

    def _arrivals(
        self,
        message_ids: Sequence[str],
        arrived: SimpleQueue[str],
        timeout: float | None,
    ) -> Iterator[Message]:
        """Yield the replies as they arrive, until the timeout."""
        # The timeout starts with the first reply that the caller asks for.
        end = None if timeout is None else time.monotonic() + timeout
        with suppress(Empty):
            for _ in message_ids:
                left = None if end is None else max(0.0, end - time.monotonic())
                yield self._ready.pop(arrived.get(timeout=left))
        # Nobody asks for a late reply, so it is dropped on arrival.
        with self._lock:
            for message_id in message_ids:
                self._waiting.pop(message_id, None)

    def _work(self, message: Message, reply_id: str) -> Callable[[], None]:
        """Return the call that begins a node's work on a message."""
        about = message.metadata
        node_id, message_id = about.dst_node_id, about.message_id
        # Find the member now, because the step may have closed its barrier when the
        # work begins.
        members = (
            InProcessMember(barrier_id, barrier, node_id)
            for barrier_id, barrier in self._barriers.items()
            if node_id in barrier.members
        )
        member = next(members, None)

        def begin() -> None:
            try:
                context = self._contexts.get(node_id) or self._new_context(node_id)
                self._host.submit(Job(message, context, member, done))
            except Exception as error:  # the grid is closed
                done(app_error(message, error), None)

        def done(reply: Message, context: Context | None) -> None:
            # Store the context that the app has changed. Do not store an unchanged
            # context, because thousands of nodes may have nothing to keep.
            if context is not None:
                self._contexts[node_id] = context
                # If a config contains an array, the comparison has no truth value.
                with suppress(ValueError):
                    # ``vars`` also has attributes that the app has added.
                    new = vars(self._new_context(node_id))
                    if not context.state and vars(context) == new:
                        del self._contexts[node_id]

            # Address the reply to this message, even if the app answered a different
            # message.
            address_reply(reply, message, reply_id)

            # Notify the waiting caller. Take the node's next message, or make it idle.
            with self._lock:
                arrived = self._waiting.pop(message_id, None)
                if arrived:
                    self._ready[message_id] = reply
                    arrived.put(message_id)
                    self._arrival.set()
                queue = self._queues[node_id]
                following = queue.popleft() if queue else None
                if following is None:
                    del self._queues[node_id]
            # Call ``following`` without the lock, because its ``done`` needs the lock.
            if following is not None:
                following()

        return begin

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


def _much_longer(seconds: Sequence[float | None]) -> list[int]:
    """Return a class for each client by its time, relative to the median time.

    Class 0 takes up to 1.2 times the median, or an unknown time. From class to class,
    the time grows by a factor of 1.4. Smaller differences are mostly noise, and times
    below the median are in class 0 as well.
    """
    typical = statistics.median([each for each in seconds if each] or [1.0])
    times = [max(each or typical, typical) for each in seconds]
    return [round(2 * math.log2(each / typical)) for each in times]


@dataclass(eq=False)
class _Arriving(Sequence[Message]):
    """Replies that may not have arrived. Reading a reply waits until it arrives."""

    replies: Iterator[Message]
    here: list[Message] = field(default_factory=list)

    def __iter__(self) -> Iterator[Message]:
        """Iterate over the replies as they arrive, and repeat those already here."""
        for i in itertools.count():
            while len(self.here) <= i:
                try:
                    self.here.append(next(self.replies))
                except StopIteration:
                    return
            yield self.here[i]

    def __len__(self) -> int:
        """Wait for all replies and return their number."""
        # Use an iterator, because list(self) would call this function for the length.
        return len([*iter(self)])

    def __getitem__(self, index: Any) -> Any:
        """Wait for all replies and return one of them, or a slice."""
        return [*iter(self)][index]
