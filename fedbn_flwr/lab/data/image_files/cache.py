"""A cache of decoded images that processes share."""

from __future__ import annotations

import multiprocessing
from mmap import mmap

import numpy as np

from fedbn_flwr.errors import DataError
from fedbn_flwr.lab.data.image_files.decoding import Bytes

__all__ = ["ImageCache"]

_HEADER = 64  # bytes; images are aligned to as many


class ImageCache:
    """Decoded images in memory that this process and those forked later share; what does not fit is not kept.

    Args:
        count: number of images.
        capacity: bytes; pages are taken from the system when they are written.
    """

    def __init__(self, count: int, capacity: int) -> None:
        self._capacity = capacity if count and capacity > _HEADER else 0
        if not self._capacity:
            return
        try:
            self._bytes = np.frombuffer(mmap(-1, capacity), np.uint8)
        except (OSError, OverflowError, ValueError) as error:
            raise DataError(
                f"cache-gib={capacity / 2**30:g}: the system does not give so much memory ({error}). Use less."
            ) from error
        # The place of each image + 1; 0: not kept, -1: being written. At its place are its shape, then its bytes.
        self._places = np.frombuffer(mmap(-1, count * 8), np.int64)
        self._used = np.frombuffer(mmap(-1, 8), np.int64)
        self._lock = multiprocessing.get_context("fork").Lock()

    def get(self, number: int) -> Bytes | None:
        """Return a kept image, (C, H, W); it shares the cache's memory. None if it is not kept."""
        if not self._capacity or (place := int(self._places[number])) <= 0:
            return None
        start = place - 1
        shape = tuple(self._bytes[start : start + _HEADER].view(np.int64)[:3].tolist())
        return self._bytes[start + _HEADER :][: shape[0] * shape[1] * shape[2]].reshape(shape)

    def put(self, number: int, image: Bytes) -> None:
        """Keep an image, uint8 (C, H, W), if there is room."""
        needed = _HEADER + -(-image.size // _HEADER) * _HEADER
        if not self._capacity or self._places[number] or int(self._used[0]) + needed > self._capacity:
            return
        if not self._lock.acquire(timeout=1):
            self._capacity = 0  # its owner was killed: nothing more is kept
            return
        try:
            start = int(self._used[0])
            if self._places[number] or start + needed > self._capacity:
                return
            self._places[number] = -1
            self._used[0] = start + needed
        finally:
            self._lock.release()
        self._bytes[start : start + _HEADER].view(np.int64)[:3] = image.shape
        self._bytes[start + _HEADER :][: image.size] = image.reshape(-1)
        if self._lock.acquire(timeout=1):  # a barrier: the image is written before its place can be read
            self._places[number] = start + 1
            self._lock.release()
