"""Replacements for the curves of runs, because their pixels take long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from fedbn_flwr.lab.output import curves
from fedbn_flwr.lab.output.curves import draw_curves

PNG = b"\x89PNG\r\n\x1a\n"


def undrawn(*args: Any) -> bytes:
    """Return the signature of a PNG instead of the curves."""
    return PNG


@contextmanager
def drawn() -> Iterator[None]:
    """Let the runs in the block draw their curves."""
    with patch.object(curves, "draw_curves", draw_curves):
        yield
