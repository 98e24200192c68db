"""Engines: they run a ServerApp's strategy together with ClientApps.

In reading order:

- ``in_process``: ``InProcessGrid``, Flower's Grid; it hands each message to a host.
- ``client_work``: a client's work on one message; the host in the command's process.
- ``workers``: the host in worker processes, and how a dead one becomes failed replies.
- ``worker_process``: the other end, the loop that runs in each of these processes.
- ``link``: the pipe between the two, with large arrays in shared memory.
- ``flower_run``: ``flwr run`` as a function, with a SuperLink of its own.
- ``own_folder``: temporary folders that are removed even after a kill.

The modules that start Flower's commands need no torch, so ``InProcessGrid`` is imported
when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedbn_flwr.lazy import imported_when_used

if TYPE_CHECKING:
    from fedbn_flwr.engines.in_process import InProcessGrid
else:
    __getattr__, __dir__ = imported_when_used(__name__, {"InProcessGrid": "in_process"})

__all__ = ["InProcessGrid"]
