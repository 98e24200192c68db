"""Pages without pictures, because drawing takes long."""

from __future__ import annotations

from contextlib import AbstractContextManager
from unittest.mock import patch

from fedbn_flwr.lab.report import pictures

_DRAWN = pictures._picture


def undrawn() -> AbstractContextManager[object]:
    """Let pictures of pages be their captions."""
    return patch.object(pictures, "_picture", lambda draw, caption, *args: caption)


def drawn() -> AbstractContextManager[object]:
    """Let pages draw their pictures in the block."""
    return patch.object(pictures, "_picture", _DRAWN)
