"""Runs and pages without pictures, because drawing takes long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from fedbn_flwr.lab import report_pictures
from fedbn_flwr.lab.output import curves

PNG = b"\x89PNG\r\n\x1a\n"
_DRAWN = curves.draw_curves, report_pictures._picture


@contextmanager
def _with(
    draw_curves: Callable[..., bytes], picture: Callable[..., str]
) -> Iterator[None]:
    with (
        patch.object(curves, "draw_curves", draw_curves),
        patch.object(report_pictures, "_picture", picture),
    ):
        yield


@contextmanager
def undrawn() -> Iterator[None]:
    """Let curves be the signature of a PNG, and pictures of pages their captions."""
    with _with(lambda *args: PNG, lambda draw, caption, *args: caption):
        yield


@contextmanager
def drawn() -> Iterator[None]:
    """Let runs draw their curves, and pages their pictures, in the block."""
    with _with(*_DRAWN):
        yield
