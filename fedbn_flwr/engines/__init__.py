"""Engines that run a ServerApp's strategy together with ClientApps.

In reading order:

- ``in_process``: ``InProcessGrid``, a Grid of Flower; it gives each message to a host.
- ``client_work``: a client's work on a message, and the host in the command's process.
- ``workers``: the host in worker processes, with error replies for dead processes.
- ``worker_process``: the loop that runs in each worker process.
- ``link``: the pipe between the two, with large arrays in shared memory.
- ``flower_run``: ``flwr run`` as a function, with its own SuperLink.
- ``own_folder``: temporary folders that are removed even after a kill.

The modules that start Flower's commands do not need torch, so ``InProcessGrid`` is
imported only when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedbn_flwr.lazy import imported_when_used

if TYPE_CHECKING:
    from fedbn_flwr.engines.in_process import InProcessGrid
else:
    __getattr__, __dir__ = imported_when_used(__name__, {"InProcessGrid": "in_process"})

__all__ = ["InProcessGrid"]
