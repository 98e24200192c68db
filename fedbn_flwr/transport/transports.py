"""The transports of a synchronised step, by their names in ``fedtan-transport``.

A new transport is a new file here with a subclass of ``Transport``, a line in
``TRANSPORTS``, and its name in the setting. A test compares the names. In one process,
clients always meet at a barrier (``step_by_barrier``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedbn_flwr.messages.protocol import BARRIER
from fedbn_flwr.transport.step_by_channel import ByChannel
from fedbn_flwr.transport.step_by_messages import ByMessages
from fedbn_flwr.transport.step_transport import Transport
from fedbn_flwr.transport.through_user_code import Reducer, in_process_reducer

TRANSPORTS: Mapping[str, type[Transport]] = {
    "messages": ByMessages,
    "channel": ByChannel,
}


def connect(config: Mapping[str, Any]) -> Reducer:
    """Return this client's reducer for a training message.

    The reducer belongs to a barrier in this process, or else to the transport of the
    message's config.

    Raises:
        EngineError: there is no such barrier.
    """
    if BARRIER in config:
        return in_process_reducer(str(config[BARRIER]))
    found = (transport.reducer(config) for transport in TRANSPORTS.values())
    return next(reducer for reducer in found if reducer is not None)
