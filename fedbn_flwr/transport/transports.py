"""The transports of a synchronised step, by their names in ``fedtan-transport``.

A new transport is a new file here with a subclass of ``Transport``, a line in
``TRANSPORTS``, and its name in the setting. A test compares the names. In one process,
clients always meet at a barrier (``step_by_barrier``).
"""

from __future__ import annotations

from collections.abc import Mapping

from fedbn_flwr.transport.step_by_channel import ByChannel
from fedbn_flwr.transport.step_by_messages import ByMessages
from fedbn_flwr.transport.step_transport import Transport

TRANSPORTS: Mapping[str, type[Transport]] = {
    "messages": ByMessages,
    "channel": ByChannel,
}
