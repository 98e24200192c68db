"""Pictures are read back, and the axes show the values of the picture."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from fedbn_flwr.lab.report import pictures


@pytest.fixture
def axes(monkeypatch) -> list:
    """Get the drawn axes of each picture."""
    found = []

    def read(draw, caption: str, height: float) -> str:
        figure = Figure(figsize=(3.8, height), layout="constrained")
        found.append(figure.subplots())
        draw(found[-1])
        figure.draw_without_rendering()
        return caption

    monkeypatch.setattr(pictures, "_picture", read)
    return found


def texts(axis) -> dict[float, str]:
    """Return the texts of an axis by place."""
    labels = [label.get_text() for label in axis.get_ticklabels()]
    return dict(zip(map(float, axis.get_ticklocs()), labels, strict=True))


def test_each_point_and_interval_is_beside_its_name(axes) -> None:
    given = {"b": (0.5, 0.4, 0.6), "a": (0.9, None, None), "c": (0.1, 0.0, 0.2)}
    pictures.rows(given, "accuracy", "")
    names = texts(axes[0].yaxis)
    found = {
        names[float(one.get_ydata()[0])]: one.get_xdata()[0] for one in axes[0].lines
    }
    assert found == {name: value for name, (value, _, _) in given.items()}
    spans = {}
    for collection in axes[0].collections:
        ((low, place), (high, _)) = collection.get_segments()[0]
        spans[names[float(place)]] = low, high
    assert spans == {name: one[1:] for name, one in given.items() if one[1] is not None}


@pytest.mark.parametrize(("metric", "factor"), [("accuracy", 100), ("loss", 1)])
def test_the_axis_is_in_the_unit_of_its_label(metric: str, factor: int, axes) -> None:
    pictures.curves({"x": {1: 0.2, 2: 0.8}}, metric, "")
    shown = texts(axes[0].yaxis)
    assert len(shown) > 2
    for value, text in shown.items():
        assert float(text.replace("\N{MINUS SIGN}", "-")) == pytest.approx(
            value * factor, abs=0.5 if factor > 1 else 1e-6
        )


@pytest.mark.parametrize("count", [1, 2, 3])
def test_several_curves_have_a_legend_with_all_names(count: int, axes) -> None:
    given = {f"m{k}": {1: 0.1 * k, 5: 0.2} for k in range(count)}
    pictures.curves(given, "accuracy", "")
    legend = axes[0].get_legend()
    named = [text.get_text() for text in legend.get_texts()] if legend else []
    assert named == ([*given] if count > 1 else [])
