"""Engines: they run a ServerApp's strategy together with ClientApps.

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
