"""The types of the arrays of a model's state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

__all__ = ["Array", "State"]

Array = NDArray[Any]
State = Mapping[str, Array]
