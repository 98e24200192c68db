"""A federation in this process: Flower's Grid, with the nodes' ClientApp running in threads.

The same ClientApp as in simulation or over a network, the same messages, contexts and error replies; no Ray, no
SuperLink, no serialisation between processes. What a node changes in its context is kept when its app returned, and
forgotten when it raised, as in Flower's engines.
"""

from __future__ import annotations

import copy
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from logging import DEBUG
from types import TracebackType
from typing import Any
from uuid import UUID

import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.client_app import ClientAppException
from flwr.common import log
from flwr.common.constant import NUM_PARTITIONS_KEY, PARTITION_ID_KEY, SUPERLINK_NODE_ID, ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedbn_flwr.transport import Barrier, reducers_of
from fedbn_flwr.errors import EngineError
from fedbn_flwr.seeds import numpy_generator

__all__ = ["InProcessGrid"]


class InProcessGrid(Grid):
    """A ``flwr.serverapp.Grid`` whose nodes are threads of this process.

    Args:
        client_app: the app every node runs.
        num_nodes: nodes 0 .. num_nodes - 1 by partition id.
        run_config: ``Context.run_config`` of every node.
        node_configs: further entries of ``Context.node_config`` per node.
        max_workers: clients that compute at the same time; default: the number of CPUs. 1 where clients call
            ``torch.compile``, which is not safe in several threads.
        torch_threads: CPU threads of torch per client (one and two threads give different bits).
        seed: of the node ids.

    Use it as a context manager, or call ``close()``.
    """

    answers_promptly = True

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
        draw = numpy_generator(seed, "node-ids")
        self._client_app = client_app
        self._draw = draw
        self._run = Run.create_empty(run_id=int(draw.integers(1, 2**62)))
        _identify(self._run.run_id)
        self._contexts: dict[int, Context] = {}
        for partition_id in range(num_nodes):
            node_id = int(draw.integers(1, 2**62))
            extra = dict(node_configs[partition_id]) if node_configs else {}
            node_config = {PARTITION_ID_KEY: partition_id, NUM_PARTITIONS_KEY: num_nodes, **extra}
            self._contexts[node_id] = Context(
                self._run.run_id, node_id, node_config, RecordDict(), dict(run_config or {})
            )
        # Clients that meet in mid-step must all be under way; otherwise few compute at a time.
        self._slots = threading.Semaphore(max_workers or os.cpu_count() or 1)
        self._meetings: dict[str, Barrier] = {}
        # One thread a node: a node works on one message at a time, and one that hangs takes no other node's thread.
        self._threads = {
            node_id: ThreadPoolExecutor(1, thread_name_prefix="client", initializer=_set_threads(torch_threads))
            for node_id in self._contexts
        }
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
        """Wait for the clients at work and end their threads; messages not begun are dropped."""
        for thread in self._threads.values():
            thread.shutdown(cancel_futures=True)

    def set_run(self, run: Run) -> None:
        """See ``Grid.set_run``; the contexts keep the run they were made for."""
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
        return list(self._contexts)

    def open_barrier(self, barrier_id: str, meeting: Barrier) -> None:
        """Let the clients of a round meet in mid-step (``carriers.reducer_here(barrier_id)`` in a client's thread)."""
        self._meetings[barrier_id] = meeting

    def close_barrier(self, barrier_id: str) -> None:
        """Forget a meeting."""
        del self._meetings[barrier_id]

    def context(self, partition_id: int) -> Context:
        """Return a node's context, to look into what it keeps."""
        return list(self._contexts.values())[partition_id]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Start work on the messages; see ``Grid.push_messages``.

        Raises:
            EngineError: a message is for a node that does not exist.
        """
        message_ids = []
        for message in messages:
            if message.metadata.dst_node_id not in self._contexts:
                raise EngineError(
                    f"no node {message.metadata.dst_node_id} among the {len(self._contexts)} of this grid"
                )
            message_id = self._new_id()
            # Every node gets records of its own: an app may change what it was sent.
            content = copy.deepcopy(message.content)
            own = Message(content, message.metadata.dst_node_id, message.metadata.message_type)
            own.metadata.__dict__.update(message.metadata.__dict__)
            own.metadata.__dict__.update(_message_id=message_id, _run_id=self._run.run_id)
            self._waiting[message_id] = self._threads[message.metadata.dst_node_id].submit(self._work, own)
            message_ids.append(message_id)
        return message_ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies that are there; each is handed out once. See ``Grid.pull_messages``."""
        ready = [i for i in message_ids if i in self._waiting and self._waiting[i].done()]
        return [self._waiting.pop(i).result() for i in ready]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send and wait for the replies, ``timeout`` seconds at most; see ``Grid.send_and_receive``."""
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

    def _work(self, message: Message) -> Message:
        node_id = message.metadata.dst_node_id
        meets = any(node_id in meeting.members for meeting in list(self._meetings.values()))
        with nullcontext() if meets else self._slots:
            context = copy.deepcopy(self._contexts[node_id])
            try:
                with reducers_of(lambda barrier_id: self._meetings[barrier_id].seat(node_id)):
                    reply = self._client_app(message, context)
                self._contexts[node_id] = context
            except Exception as error:
                log(DEBUG, traceback.format_exc())
                raised = ClientAppException(str(error))
                reason = f"{type(raised)}:<'{raised}'>"
                reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
        reply.metadata.__dict__["_message_id"] = self._new_id()
        return reply


def _identify(run_id: int) -> None:
    """Give this process the identity without which Flower makes no messages, as its own engines do; keep one it has."""
    try:
        _ = TaskIdentity.run_id
    except RuntimeError:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, run_id, SUPERLINK_NODE_ID


def _set_threads(torch_threads: int) -> Callable[[], None]:
    return lambda: torch.set_num_threads(torch_threads)
