"""A value that is sent over a link is received without a change."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
from typing import Any

import numpy as np
import pytest

from fedbn_flwr.engines.link import Broadcasts, Packed, WorkerPipe
from fedbn_flwr.messages.records import from_record, to_record
from tests.support.descriptors import open_files
from tests.support.fast import fast


def numbers(value) -> list[list[float]]:
    """Return a list of arrays and a record."""
    *arrays, record = value
    return [list(array) for array in [*arrays, *from_record(record).values()]]


@pytest.mark.parametrize("seed", fast(range(4), 0))
def test_what_is_received_is_what_was_sent_in_any_order(seed: int, monkeypatch) -> None:
    """Broadcasts are repeated at any time, share arrays, and sometimes find no room.

    A receiver keeps some values, so their memory must not be written again.
    """
    draw, broadcasts, write = random.Random(seed), Broadcasts(), os.writev

    def full(file: int, buffers: Any) -> int:
        if draw.random() < 0.05:
            raise OSError(28, "No space left on device")
        return write(file, [buffers[0][: draw.choice([1, 100, None])]])

    def value():
        """Return arrays below and above the smallest size of shared memory."""
        sizes = [draw.choice([1, 150, 700]) for _ in range(draw.randint(1, 2))]
        arrays = [np.full(size, draw.random()) for size in sizes]
        return [*arrays, to_record({"w": arrays[0][:1]})]

    monkeypatch.setattr(os, "writev", full)
    before = open_files()
    pipes = [multiprocessing.Pipe() for _ in range(3)]
    ends = [[WorkerPipe(end, os.getpid()) for end in pipe] for pipe in pipes]
    messages = [value() for _ in range(4)]
    kept = []
    for number in range(150):
        link, worker = draw.choice(ends)
        whole = draw.choice(messages)
        sent = [whole, *(value() for _ in range(draw.randint(0, 2)))]
        others = [Packed.of(own) for own in sent[1:]]
        if draw.random() < 0.1:  # another message shares only some of its arrays
            messages[2] = [whole[0], np.full(150, draw.random()), whole[-1]]
        try:
            link.send(number, broadcasts.pack(whole), *others)
        except OSError:
            continue
        head, received = worker.receive()
        assert head == number
        kept += zip(map(numbers, sent), received, strict=True)
        try:
            worker.send(head, *map(Packed.of, received))
            kept += zip(map(numbers, sent), link.receive()[1], strict=True)
        except OSError:
            pass
        del received, whole, sent, others
        if draw.random() < 0.3:  # and the ids of its arrays are used again
            del messages[0]
            messages.append(value())
        assert all(numbers(got) == right for right, got in kept)
        draw.shuffle(kept)
        del kept[draw.randint(0, 6) :]
        gc.collect(0)
    broadcasts.close()
    for end in [*ends[0], *ends[1], *ends[2]]:
        end.close()
        end.pipe.close()
    assert open_files() <= before
