"""The client's end of a synchronised step: the transport that the server's config names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedbn_flwr.messages.protocol import (
    BARRIER,
    CHANNEL_ADDRESS,
    CHANNEL_CA,
    CHANNEL_TIMEOUT,
    CHANNEL_TOKEN,
    MASK_PRESENT,
)
from fedbn_flwr.transport.grpc_channel import ChannelReducer
from fedbn_flwr.transport.reducer import Reducer
from fedbn_flwr.transport.through_user_code import local_reducer, wrapped

__all__ = ["connect"]


def connect(config: Mapping[str, Any]) -> Reducer:
    """Return this client's reducer: over the channel if the config has its address, else at a barrier in this process.

    Args:
        config: the config of the training message.

    Raises:
        EngineError: there is no such barrier, or masks are required and no mod makes them.
    """
    if CHANNEL_ADDRESS in config:
        address, token = str(config[CHANNEL_ADDRESS]), str(config[CHANNEL_TOKEN])
        reducer: Reducer = ChannelReducer(address, token, bytes(config[CHANNEL_CA]), float(config[CHANNEL_TIMEOUT]))
    else:
        reducer = local_reducer(str(config[BARRIER]))
    return wrapped(reducer, required=MASK_PRESENT in config)
