"""A federation in this process: Flower's Grid, with the nodes' ClientApp in threads.

The ClientApp, the messages, contexts and error replies are the same as in simulation or over a network. There is no
Ray, no SuperLink and no serialisation. As in Flower's engines, a node keeps the changes to its context if its app
returns, and loses them if the app raises an exception. A node is a number and, after its first message, a context.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any
from uuid import UUID

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedbn_flwr.compat.flower import (
    NUM_PARTITIONS_KEY,
    PARTITION_ID_KEY,
    Run,
    app_error,
    copied_message,
    empty_run,
    identify_process,
    set_message_id,
    set_reply_address,
)
from fedbn_flwr.errors import EngineError, NamedConfigErrors
from fedbn_flwr.seeds import numpy_generator
from fedbn_flwr.transport import Barrier, use_reducers
from fedbn_flwr.transport.polling_grid import ImmediateGrid

__all__ = ["InProcessGrid"]

logger = logging.getLogger("flwr")


class InProcessGrid(ImmediateGrid):
    """A ``flwr.serverapp.Grid`` whose nodes run in threads of this process.

    Args:
        client_app: the app of every node.
        num_nodes: nodes 0 .. num_nodes - 1 by partition id.
        run_config: ``Context.run_config`` of every node.
        node_configs: more entries for ``Context.node_config`` of each node.
        max_workers: clients that compute at the same time; default: the number of CPUs. Use 1 if clients call
            ``torch.compile``, which is not safe in several threads.
        torch_threads: CPU threads of torch per client (one and two threads give different bits).
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
        max_workers: int | None = None,
        torch_threads: int = 1,
        seed: int = 0,
    ) -> None:
        if num_nodes < 1:
            raise EngineError(f"num_nodes={num_nodes} must be at least 1")
        self._draw = numpy_generator(seed, "node-ids")
        self._client_app = client_app
        self._run = empty_run(int(self._draw.integers(1, 2**62)))
        identify_process(self._run.run_id)
        self._run_config = dict(run_config or {})
        self._node_configs = node_configs
        self._node_ids = [int(self._draw.integers(1, 2**62)) for _ in range(num_nodes)]
        self._partition_of = {node_id: partition_id for partition_id, node_id in enumerate(self._node_ids)}
        self._contexts: dict[int, Context] = {}
        self._set_threads = _set_threads(torch_threads)
        self._workers = self._pool(max_workers or os.cpu_count() or 1)
        # Clients that wait for each other at a barrier must all run at the same time, so each barrier has its workers.
        self._barriers: dict[str, tuple[Barrier, ThreadPoolExecutor]] = {}
        self._lock = threading.Lock()
        self._queues: dict[int, deque[Callable[[], None]]] = {}  # for each busy node, its next messages
        self._waiting: dict[str, Future[Message]] = {}

    def __enter__(self) -> InProcessGrid:
        """Return the grid."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the grid."""
        self.close()

    def close(self) -> None:
        """Wait for the busy clients and end their threads; messages that have not started are dropped."""
        with self._lock:
            for queue in self._queues.values():
                queue.clear()
        self._workers.shutdown(cancel_futures=True)
        for _, workers in self._barriers.values():
            workers.shutdown(cancel_futures=True)

    def set_run(self, run: Run) -> None:
        """See ``Grid.set_run``; existing contexts keep their run."""
        self._run = run

    @property
    def run(self) -> Run:
        """See ``Grid.run``."""
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """See ``Grid.create_message``."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        """Return the node ids, by partition id."""
        return list(self._node_ids)

    def open_barrier(self, barrier_id: str, barrier: Barrier) -> None:
        """See ``transport.BarrierGrid``; a client gets it from ``transport.local_reducer(barrier_id)``."""
        self._barriers[barrier_id] = barrier, self._pool(len(barrier.members))

    def close_barrier(self, barrier_id: str) -> None:
        """See ``transport.BarrierGrid``."""
        _, workers = self._barriers.pop(barrier_id)
        workers.shutdown(wait=False)

    def context(self, partition_id: int) -> Context:
        """Return a node's context, to inspect its state."""
        return self._context(self._node_ids[partition_id])

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Start work on the messages and return their ids; see ``Grid.push_messages``.

        Raises:
            EngineError: a message is for an unknown node.
        """
        message_ids = []
        for message in messages:
            node_id = message.metadata.dst_node_id
            if node_id not in self._partition_of:
                raise EngineError(f"no node {node_id} among the {len(self._node_ids)} of this grid")
            copied = copied_message(message)  # an app may change its records
            message_id = self._new_id()
            set_message_id(copied, message_id, self._run.run_id)
            self._waiting[message_id] = self._enqueue(node_id, copied)
            message_ids.append(message_id)
        return message_ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies that are ready, each only once; see ``Grid.pull_messages``."""
        ready = [i for i in message_ids if i in self._waiting and self._waiting[i].done()]
        return [self._waiting.pop(i).result() for i in ready]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Return the replies to the messages after at most ``timeout`` seconds; see ``Grid.send_and_receive``."""
        message_ids = self.push_messages(messages)
        deadline = None if timeout is None else time.monotonic() + timeout
        for message_id in message_ids:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                self._waiting[message_id].exception(left)
            except TimeoutError:
                break
        return self.pull_messages(message_ids)

    def _new_id(self) -> str:
        return str(UUID(bytes=self._draw.bytes(16), version=4))

    def _enqueue(self, node_id: int, message: Message) -> Future[Message]:
        """Return the future reply; the node works on its messages one by one, in order."""
        result: Future[Message] = Future()

        def work() -> None:
            result.set_result(self._work(message))
            with self._lock:
                following = self._queues[node_id].popleft() if self._queues[node_id] else None
                if following is None:
                    del self._queues[node_id]
            if following is not None:
                self._submit(node_id, following)

        with self._lock:
            if node_id in self._queues:
                self._queues[node_id].append(work)
                return result
            self._queues[node_id] = deque()
        self._submit(node_id, work)
        return result

    def _submit(self, node_id: int, work: Callable[[], None]) -> None:
        pools = (pool for barrier, pool in list(self._barriers.values()) if node_id in barrier.members)
        pool = next(pools, self._workers)
        pool.submit(work)

    def _pool(self, workers: int) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(workers, thread_name_prefix="client", initializer=self._set_threads)

    def _context(self, node_id: int) -> Context:
        if node_id not in self._contexts:
            partition_id = self._partition_of[node_id]
            node_config: dict[str, Any] = {PARTITION_ID_KEY: partition_id, NUM_PARTITIONS_KEY: len(self._node_ids)}
            node_config |= self._node_configs[partition_id] if self._node_configs else {}
            context = Context(self._run.run_id, node_id, node_config, RecordDict(), self._run_config)
            self._contexts[node_id] = context
        return self._contexts[node_id]

    def _work(self, message: Message) -> Message:
        node_id = message.metadata.dst_node_id
        context = copy.deepcopy(self._context(node_id))
        try:
            reducers = use_reducers(lambda barrier_id: self._barriers[barrier_id][0].reducer(node_id))
            with reducers, NamedConfigErrors():
                reply = self._client_app(message, context)
            self._contexts[node_id] = context
        except Exception as error:
            logger.debug(traceback.format_exc())
            reply = app_error(message, error)
        set_message_id(reply, self._new_id())
        if set_reply_address(reply, message):
            logger.warning(
                "A mod on node %d answered another message than the one it received. Flower's own engines lose such a "
                "reply, and the server waits for it until its timeout.",
                node_id,
            )
        return reply


def _set_threads(torch_threads: int) -> Callable[[], None]:
    return lambda: torch.set_num_threads(torch_threads)
