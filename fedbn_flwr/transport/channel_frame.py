"""A call of the gRPC channel and its reply as bytes, and constants of both ends.

A frame has the length of its header (4 bytes, big-endian), the header (JSON), and
optionally the bytes of a tensor. The bytes read here come from other people. For any
bytes, reading returns a frame or raises ValueError.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

SERVICE, METHOD = "fedbn.Channel", "Call"
# Largest size of a message: far above three rows of any layer's channels, but small
# enough for messages from unknown senders.
MAX_BYTES = 4 * 2**20
OPTIONS = [
    ("grpc.max_receive_message_length", MAX_BYTES),
    ("grpc.max_send_message_length", MAX_BYTES),
]

_Size = Annotated[int, Field(ge=0, le=MAX_BYTES)]


class _Header(BaseModel):
    """The header's description of the tensor that follows."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    # None means that no tensor follows.
    dtype: Literal["float32", "float64"] | None = None
    shape: Annotated[tuple[_Size, ...], Field(min_length=1, max_length=2)] | None = None


class Call(_Header):
    """The header of a client's call.

    Attributes:
        op: the requested operation.
        attempt: the attempt of the tensor's step.
        tag: name of the exchange. It is one line, because logs contain it.
    """

    op: Literal["begin", "reduce", "close"]
    attempt: Annotated[int, Field(ge=0, lt=2**31)] = 0
    tag: Annotated[str, Field(max_length=1000, pattern=r"^[^\x00-\x1f\x7f]*$")] = ""


class ReplyHeader(_Header):
    """The header of the server's reply.

    Attributes:
        status: whether the call was answered ("ok"), the step must be repeated
            ("retry"), or the client is out of the round ("dropped").
        message: the reason, if the call was not answered.
        attempt: in a reply to ``begin``, the attempt that has begun.
        union: in a reply to ``begin``, the number of examples in all members' batches.
    """

    status: Literal["ok", "retry", "dropped"]
    message: str = ""
    attempt: int = 0
    union: int = 0


def pack(header: Call | ReplyHeader, tensor: Tensor | None = None) -> bytes:
    """Return the frame of a header and a tensor."""
    body = b""
    # The header describes the tensor, because its bytes do not include the shape.
    if tensor is not None:
        array = tensor.detach().cpu().contiguous().numpy()
        about: Mapping[str, Any] = {"dtype": str(array.dtype), "shape": array.shape}
        header = header.model_copy(update=about)
        body = array.tobytes()
    text = header.model_dump_json(exclude_defaults=True).encode()
    return len(text).to_bytes(4, "big") + text + body


_H = TypeVar("_H", Call, ReplyHeader)


def unpack(kind: type[_H], data: bytes) -> tuple[_H, Tensor | None]:
    """Return the header and the tensor of a frame.

    Raises:
        ValueError: the bytes are not such a frame. The text does not repeat the bytes.
    """
    if not data:
        raise ValueError("the frame is empty")
    # A wrong length leads to a header that is not JSON.
    start = 4 + int.from_bytes(data[:4], "big")
    try:
        header = kind.model_validate_json(data[4:start])
    except ValidationError:
        raise ValueError("the header is not as expected") from None
    if header.dtype is None:
        if len(data) > start or header.shape is not None:
            raise ValueError(
                "a tensor or its shape follows, but the header does not name a dtype"
            )
        return header, None
    if header.shape is None:
        raise ValueError("the header names a dtype but no shape")
    # numpy raises ValueError if bytes, dtype and shape do not match. Copy the array,
    # because the bytes of a message are read-only.
    array = np.frombuffer(data, dtype=header.dtype, offset=start)
    return header, torch.from_numpy(array.reshape(header.shape).copy())


def is_loopback(address: str) -> bool:
    """Return whether ``host:port`` is on the loopback interface."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
