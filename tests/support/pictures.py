"""Replacements for the pictures of runs and pages, because drawing takes long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from fedbn_flwr.lab import report_pictures
from fedbn_flwr.lab.output import curves
from fedbn_flwr.lab.output.curves import draw_curves

_DRAW = report_pictures._picture

PNG = b"\x89PNG\r\n\x1a\n"


def undrawn(*args: Any) -> bytes:
    """Return the signature of a PNG instead of the curves."""
    return PNG


@contextmanager
def drawn() -> Iterator[None]:
    """Let runs draw their curves, and pages their pictures, in the block."""
    with (
        patch.object(curves, "draw_curves", draw_curves),
        patch.object(report_pictures, "_picture", _DRAW),
    ):
        yield


def caption_of(draw: Any, caption: str, *args: Any) -> str:
    """Return the caption of a picture of a page instead of the picture."""
    return caption
