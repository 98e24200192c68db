"""Pictures of a diagnosis, drawn from the figures in its JSON."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from fedbn_flwr.errors import needs_package

__all__ = ["pictures"]

_SHOWN = 40  # rows and columns with a label each


def pictures(measures: Mapping[str, Any]) -> dict[str, bytes]:
    """Return PNG files by name: ``distances.png`` where there are clients, ``history.png`` where there is a history."""
    files = {}
    layers = {path: row for path, row in measures.get("layers", {}).items() if "batch-deviation" in row}
    if layers:
        files["distances.png"] = _heat_map(layers, measures["clients"])
    if measures.get("history"):
        files["history.png"] = _history(measures["history"])
    return files


def _heat_map(layers: Mapping[str, Any], clients: list[str]) -> bytes:
    """Draw layers by clients: how far the statistics of a client's batches are from the global ones."""
    table = [_gaps(row["batch-deviation"]["mean"]) for row in layers.values()]
    figure = _figure(3.5 + 0.35 * min(len(clients), _SHOWN), 1.6 + 0.22 * min(len(layers), _SHOWN))
    axes = figure.subplots()
    image = axes.imshow(table, aspect="auto", cmap="viridis", vmin=0, interpolation="nearest")
    figure.colorbar(image, ax=axes, label="standard deviations")
    axes.set_title("local batch means, distance from the global ones", fontsize=10)
    axes.set_xlabel("client")
    for axis, names in ((axes.xaxis, clients), (axes.yaxis, [*layers])):
        _name(axis, names)
    return _png(figure)


def _name(axis: Any, names: Sequence[str], most: int = _SHOWN) -> None:
    """Label rows or columns, every second or third where there are more than ``most``."""
    step = -(-len(names) // most)
    axis.set_ticks(range(0, len(names), step), [name or "(model)" for name in names[::step]], fontsize=7)


def _history(history: Mapping[str, Any]) -> bytes:
    """Draw FixBN's Fig. 3 (a) and (b), L1 norms and variances over a window, and the change by layer."""
    layers = history["layers"]
    panels = 3 if layers else 2
    figure = _figure(4.5 * panels, max(3.4, 1.6 + 0.15 * min(len(layers), _SHOWN)))
    left, middle, *last = figure.subplots(1, panels)
    for by_layer in last:
        table = [_gaps(row["change-l1"]) for row in layers.values()]
        image = by_layer.imshow(table, aspect="auto", cmap="viridis", vmin=0, interpolation="nearest")
        figure.colorbar(image, ax=by_layer, label="L1 norm")
        by_layer.set_title("change of the global statistics, by layer", fontsize=9)
        _name(by_layer.yaxis, [*layers])
        _name(by_layer.xaxis, [str(number) for number in history["rounds"]], most=10)
        by_layer.set_xlabel("round")
    rounds = history["rounds"]
    marker = "o" if len(rounds) < 30 else None
    for values in history["local-l1"].values():
        left.plot(rounds, _gaps(values), color="tab:orange", alpha=0.6, linewidth=1, marker=marker, markersize=3)
    left.plot(rounds, _gaps(history["change-l1"]), color="tab:blue", linewidth=2, marker=marker, markersize=3)
    left.set_title("(a) orange: local - global, blue: change of global", fontsize=9)
    left.set_ylabel("L1 norm over all layers")
    for client, values in history["window-variance"].items():
        middle.plot(rounds, _gaps(values), linewidth=1, label=client, marker=marker, markersize=3)
    middle.set_title(f"(b) variance of local statistics over {history['window']} records", fontsize=9)
    if 0 < len(history["window-variance"]) <= 10:
        middle.legend(fontsize=7, title="client", title_fontsize=7, ncols=2)
    for axes in (left, middle):
        axes.set_xlabel("round")
        axes.set_yscale("symlog", linthresh=1e-6)
    return _png(figure)


def _figure(width: float, height: float) -> Any:
    with needs_package("matplotlib", "the doctor's pictures"):
        from matplotlib.figure import Figure
    return Figure(figsize=(width, height), layout="tight")


def _gaps(values: list[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


def _png(figure: Any) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=130, metadata={"Software": None})
    return content.getvalue()
