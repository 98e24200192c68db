"""Engines that run a ServerApp's strategy together with ClientApps.

In reading order:

- ``in_process``: ``InProcessGrid``, a Grid of Flower; it gives each message to a host.
- ``client_work``: a client's work on a message, and the host in the command's process.
- ``workers``: the host in worker processes, with error replies for dead processes.
- ``worker_process``: the loop that runs in each worker process.
- ``link``: the pipe between the two, with large arrays in shared memory.
"""

from __future__ import annotations

from fedbn_flwr.engines.in_process import InProcessGrid

__all__ = ["InProcessGrid"]
