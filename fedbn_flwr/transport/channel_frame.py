"""A call of the gRPC channel and its reply as bytes, and what else both ends share.

A frame is the length of its header (4 bytes, big-endian), the header (JSON), and the
bytes of a tensor, if it has one. What is read here was written by somebody else:
whatever the bytes are, reading returns a frame or raises ValueError.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

__all__ = [
    "METHOD",
    "OPTIONS",
    "SERVICE",
    "Call",
    "Reply",
    "is_loopback",
    "pack",
    "unpack",
]

SERVICE, METHOD = "fedbn.Channel", "Call"
# Far above three rows of any layer's channels, and little enough to read from anybody.
MAX_BYTES = 4 * 2**20
OPTIONS = [
    ("grpc.max_receive_message_length", MAX_BYTES),
    ("grpc.max_send_message_length", MAX_BYTES),
]

_Size = Annotated[int, Field(ge=0, le=MAX_BYTES)]


class _Header(BaseModel):
    """What a header says of the tensor behind it."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    # int64: masked; None: no tensor
    dtype: Literal["float32", "float64", "int64"] | None = None
    shape: Annotated[tuple[_Size, ...], Field(min_length=1, max_length=2)] | None = None


class Call(_Header):
    """The header of a client's call.

    Attributes:
        op: what the client asks for.
        attempt: the attempt of the step that the tensor belongs to.
        tag: the exchange. It is named in logs, so it is one line.
    """

    op: Literal["begin", "reduce", "close"]
    attempt: Annotated[int, Field(ge=0, lt=2**31)] = 0
    tag: Annotated[str, Field(max_length=1000, pattern=r"^[^\x00-\x1f\x7f]*$")] = ""


class Reply(_Header):
    """The header of the server's reply.

    Attributes:
        status: whether the call was answered, the step is to be repeated, or the client
            is out of the round.
        message: why, if the call was not answered.
        attempt: to ``begin``: the attempt that has begun.
        union: to ``begin``: examples in the batches of all members.
    """

    status: Literal["ok", "retry", "dropped"]
    message: str = ""
    attempt: int = 0
    union: int = 0


def pack(header: Call | Reply, tensor: Tensor | None = None) -> bytes:
    """Return the frame of a header and a tensor."""
    body = b""
    # The header describes the tensor: the bytes alone have no shape.
    if tensor is not None:
        array = tensor.detach().cpu().contiguous().numpy()
        about: Mapping[str, Any] = {"dtype": str(array.dtype), "shape": array.shape}
        header = header.model_copy(update=about)
        body = array.tobytes()
    text = header.model_dump_json(exclude_defaults=True).encode()
    return len(text).to_bytes(4, "big") + text + body


_H = TypeVar("_H", Call, Reply)


def unpack(kind: type[_H], data: bytes) -> tuple[_H, Tensor | None]:
    """Return header and tensor of a frame.

    Raises:
        ValueError: the bytes are no such frame. The text does not repeat them.
    """
    if not data:
        raise ValueError("it is empty")
    # A length that is wrong gives a header that is no JSON.
    start = 4 + int.from_bytes(data[:4], "big")
    try:
        header = kind.model_validate_json(data[4:start])
    except ValidationError as error:
        raise ValueError(_first_problem(kind, error)) from None
    if header.dtype is None:
        if len(data) > start or header.shape is not None:
            raise ValueError(
                "a tensor follows, or its shape, and the header names no dtype"
            )
        return header, None
    if header.shape is None:
        raise ValueError("the header names a dtype and no shape")
    # numpy raises ValueError where bytes, dtype and shape do not fit each other. A
    # copy, as the bytes of a message are read-only.
    array = np.frombuffer(data, dtype=header.dtype, offset=start)
    return header, torch.from_numpy(array.reshape(header.shape).copy())


def _first_problem(kind: type[BaseModel], error: ValidationError) -> str:
    """Return pydantic's first message, without the bytes of a stranger."""
    problem = error.errors(
        include_url=False, include_input=False, include_context=False
    )[0]
    name = str(problem["loc"][0]) if problem["loc"] else ""
    # The name of a key that is not ours was written by the stranger, too.
    if name in kind.model_fields:
        return f"{name}: {problem['msg']}"
    return problem["msg"]


def is_loopback(address: str) -> bool:
    """Return whether ``host:port`` is on the loopback interface."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
