"""The report of a norm replacement, with one row per layer path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import nn


class Replacement(NamedTuple):
    """One row of a report, with a layer's path, the old layer and the new layer.

    The path is "" if the model itself is the layer.
    """

    path: str
    old: str
    new: str


@dataclass(frozen=True)
class NormReport:
    """The rows of one replacement, in the model's order.

    A layer object at several paths has one row per path.
    """

    kind: str
    replaced: tuple[Replacement, ...] = ()

    def __str__(self) -> str:
        """Return a plain table of path, old layer and new layer."""
        if not self.replaced:
            return f"norm {self.kind!r}: no layer replaced"
        rows = [(shown_path(row.path), row.old, row.new) for row in self.replaced]
        width_of_path = max(len(path) for path, _, _ in rows)
        width_of_old = max(len(old) for _, old, _ in rows)
        lines = [
            f"{path:<{width_of_path}}  {old:<{width_of_old}}  ->  {new}"
            for path, old, new in rows
        ]
        return "\n".join([f"norm {self.kind!r}: {len(rows)} replaced", *lines])


def replaced_layers(old: dict[str, str], after: nn.Module) -> tuple[Replacement, ...]:
    """Return a row for each path whose layer has another class or other settings.

    ``old`` is the result of ``described`` before the replacement.
    """
    return tuple(
        Replacement(path, old[path], new)
        for path, new in described(after).items()
        if new != old[path]
    )


def described(model: nn.Module) -> dict[str, str]:
    """Return the text that torch prints for each layer, without the layers in it."""
    return {
        path: f"{type(layer).__name__}({layer.extra_repr()})"
        for path, layer in model.named_modules(remove_duplicate=False)
    }


def shown_path(path: str) -> str:
    """Return the path for messages, "(the model itself)" for the empty path."""
    return path or "(the model itself)"


def named(path: str, layer: nn.Module) -> str:
    """Return "layer1.bn (BatchNorm2d)" for messages."""
    return f"{shown_path(path)} ({type(layer).__name__})"
