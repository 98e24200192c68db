"""The transports of a synchronised step by their names in ``fedtan-transport``.

A new one is a file here with a class of ``Transport``, a line in ``TRANSPORTS``, and
its name in the setting, which a test compares. In one process clients meet at a barrier
whatever the setting is (``step_by_barrier``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedbn_flwr.messages.protocol import BARRIER, MASK_PRESENT
from fedbn_flwr.transport.step_by_channel import ByChannel
from fedbn_flwr.transport.step_by_messages import ByMessages
from fedbn_flwr.transport.step_transport import Transport
from fedbn_flwr.transport.through_user_code import Reducer, in_process_reducer, wrapped

__all__ = ["TRANSPORTS", "connect"]

TRANSPORTS: Mapping[str, type[Transport]] = {
    "messages": ByMessages,
    "channel": ByChannel,
}


def connect(config: Mapping[str, Any]) -> Reducer:
    """Return this client's reducer: of the transport that the config of the training
    message is of, else at a barrier in this process.

    Raises:
        EngineError: there is no such barrier, or masks are required and no mod makes
            them.
    """
    for transport in TRANSPORTS.values():
        reducer = transport.reducer(config)
        if reducer is not None:
            break
    else:
        reducer = in_process_reducer(str(config[BARRIER]))
    return wrapped(reducer, required=MASK_PRESENT in config)
