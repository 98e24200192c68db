"""The curves of runs in tests: their pixels take longer than a short run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from matplotlib.figure import Figure

from fedbn_flwr.lab.output import curves
from fedbn_flwr.lab.output.curves import draw_curves

PNG = b"\x89PNG\r\n\x1a\n"


def undrawn(*args: Any, **kwargs: Any) -> bytes:
    """``draw_curves`` up to the figure; return the signature of an empty PNG."""
    with patch.object(Figure, "savefig", lambda self, file, **_: file.write(PNG)):
        return draw_curves(*args, **kwargs)


@contextmanager
def drawn() -> Iterator[None]:
    """Runs in the block draw their curves."""
    with patch.object(curves, "draw_curves", draw_curves):
        yield
