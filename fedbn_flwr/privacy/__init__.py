"""Differential privacy that works with BatchNorm.

In reading order:

- ``protection_settings``: the config keys.
- ``wrapper``: ``DPWrapper``, the entry point for a strategy in a program.
- ``differential``: the noisy average of clipped updates, with its paper and its law.
- ``coordinates``: the units of clipping and of noise.
- ``noise``: Gaussian noise from the operating system, and ChaCha20's stream.
- ``accounting``: the privacy loss epsilon of the releases of a run.
- ``counters``: the refusal of BatchNorm with ``momentum=None``.

The mod of a client that clips is in ``client``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedbn_flwr.lazy import imported_when_used

if TYPE_CHECKING:
    from fedbn_flwr.privacy.wrapper import DPWrapper
else:
    _WHERE = {
        "DPWrapper": "wrapper",
    }
    __getattr__, __dir__ = imported_when_used(__name__, _WHERE)

__all__ = ["DPWrapper"]
