"""Draws the site's pictures from the recorded results: ``python docs/pictures.py``.

Each number is read from a table of ``results/README.md``, or from the figures of each round in a folder beside it.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).parent
COLOURS = {"light": ("#1f2328", "#8a919c"), "dark": ("#e6e8ec", "#8a919c")}
GOOD, BAD, PLAIN = "#4c6ef5", "#e8590c", "#868e96"
HOME = [  # label, file of results/fixbn-table-1, colour
    ("FedAvg with BatchNorm", "BN", BAD),
    ("FedAvg with GroupNorm", "GN", PLAIN),
    ("FedTAN", "FedTAN", GOOD),
    ("one machine with BatchNorm", "centralized-BN", PLAIN),
]
HOME_ROUND = 48_000  # where FedTAN was interrupted
# A panel: title, folder of results, and the lines: file, label, colour, style
LONG_RUNS = [
    (
        "100 local steps a round (Table 4)",
        "fixbn-table-4",
        [
            ("GN+WN", "GroupNorm, standardised weights", "#9c36b5", "--"),
            ("FedTAN-II", "FedTAN-II", "#0c8599", "-"),
            ("FixBN", "FixBN", GOOD, "-"),
            ("GN", "GroupNorm", PLAIN, "--"),
            ("BN", "FedAvg with BatchNorm", BAD, "-"),
        ],
    ),
    (
        "an average after every step (Table 1)",
        "fixbn-table-1",
        [
            ("centralized-BN", "one machine, BatchNorm", "#9c36b5", ":"),
            ("FedTAN", "FedTAN, to round 48,000", "#0c8599", "-"),
            ("GN", "FedAvg with GroupNorm", PLAIN, "--"),
            ("BN", "FedAvg with BatchNorm", BAD, "-"),
        ],
    ),
]


def number(text: str) -> tuple[float, float]:
    """Return mean and deviation of "68.82 ± 3.07 / 70.1"; the deviation is 0 where there is none."""
    found = re.match(r"([\d.]+)(?: ± ([\d.]+))?", text.strip())
    assert found is not None, text
    return float(found[1]), float(found[2] or 0)


def table(heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading of ``results/README.md``, its head included."""
    text = (DOCS / "results/README.md").read_text(encoding="utf-8")
    section = text.split(f"\n## {heading}")[1].split("\n## ")[0]
    lines = next(line for line in section.split("\n\n") if line.startswith("|")).split("\n")
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if not line.startswith("|---")]


def save(figure: Any, path: Path) -> None:
    """Write the picture without a date, so that the same numbers give the same file."""
    figure.savefig(path, transparent=True, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def axes(theme: str, width: float, height: float) -> tuple[Any, Any]:
    """Return a figure and its axes in the colours of a theme."""
    text, line = COLOURS[theme]
    plt.rcParams.update({"svg.hashsalt": "fedbn-flwr", "font.size": 11, "text.color": text, "axes.labelcolor": text})
    plt.rcParams.update({"xtick.color": text, "ytick.color": text, "axes.edgecolor": line, "grid.color": line})
    figure, ax = plt.subplots(figsize=(width, height))
    ax.spines[["top", "right"]].set_visible(False)
    return figure, ax


def bars(theme: str, rows: list[tuple[str, tuple[float, float], str]], path: Path, start: float, title: str) -> None:
    """Draw horizontal bars with their values, the first row on top."""
    figure, ax = axes(theme, 5.2, 0.9 + 0.55 * len(rows))
    for place, (label, (mean, deviation), colour) in enumerate(reversed(rows)):
        ax.barh(place, mean, xerr=deviation or None, color=colour, height=0.45, ecolor=COLOURS[theme][1], capsize=3)
        ax.text(start + 0.01 * (100 - start), place, f"{mean:.1f}", va="center", color="white", fontweight="bold")
        ax.text(start, place + 0.28, label, va="bottom")
    ax.set_yticks([])
    ax.set_ylim(-0.45, len(rows) - 0.2)
    ax.set_xlim(start, 100)
    ax.set_xlabel("test accuracy, %")
    ax.set_title(title, loc="left", fontsize=11, fontweight="bold")
    save(figure, path)


def tests(path: Path) -> tuple[list[int], list[float]]:
    """Return the rounds with a test, and the test accuracies in per cent."""
    with path.open(encoding="utf-8") as file:
        tested = [row for row in csv.DictReader(file) if row["test-accuracy"]]
    return [int(row["round"]) for row in tested], [100 * float(row["test-accuracy"]) for row in tested]


def long_runs(theme: str, path: Path) -> None:
    """Draw FixBN's Tables 4 and 1 over their rounds, a panel each."""
    figure, _ = axes(theme, 9.6, 3.8)
    figure.clear()
    for ax, (title, folder, lines) in zip(figure.subplots(1, 2, sharey=True), LONG_RUNS, strict=True):
        for name, label, colour, style in lines:
            ax.plot(*tests(DOCS / f"results/{folder}/{name}.csv"), style, color=colour, label=label, linewidth=1.6)
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_title(title, loc="left", fontsize=11, fontweight="bold")
        ax.set_xlabel("server round")
        ax.set_ylim(0, 100)
        ax.xaxis.set_major_formatter("{x:,.0f}")
        ax.grid(alpha=0.3)
        ax.legend(frameon=False, fontsize=9, loc="lower right")
    figure.axes[0].set_ylabel("test accuracy, %")
    figure.tight_layout()
    save(figure, path)


def main() -> None:
    """Draw all pictures, light and dark."""
    home = []
    for label, file, colour in HOME:
        rounds, accuracies = tests(DOCS / f"results/fixbn-table-1/{file}.csv")
        home.append((label, (accuracies[rounds.index(HOME_ROUND)], 0.0), colour))
    domains = table("Feature shift: three digits domains")[1:]
    kept = {"SiloBN", "FedBN", "FedWon at 0.08"}
    average = [(row[0], number(row[-1]), GOOD if row[0] in kept else PLAIN) for row in domains]
    skew = table("Label skew over many clients: FedBS's setting")
    for theme in COLOURS:
        bars(theme, home, DOCS / f"images/home-{theme}.svg", 0, "CIFAR-10, two classes a client, round 48,000")
        long_runs(theme, DOCS / f"images/long-runs-{theme}.svg")
        path = DOCS / f"results/digits-domains-{theme}.svg"
        bars(theme, average, path, 40, "mean over three digits domains, 3 seeds")
        figure, ax = axes(theme, 5.6, 3.6)
        for column, name in enumerate(skew[0][1:], start=1):
            style = {"color": GOOD if "FedBS" in name else PLAIN, "linestyle": "--" if "Fashion" in name else "-"}
            points = [(int(row[0]), float(row[column])) for row in skew[1:] if row[0].isdigit()]
            ax.plot(*zip(*points, strict=True), label=name, marker="o", markersize=3, **style)
        ax.set_xlabel("server round")
        ax.set_ylabel("test accuracy, %")
        ax.grid(alpha=0.3)
        ax.legend(frameon=False)
        save(figure, DOCS / f"results/fedbs-{theme}.svg")


if __name__ == "__main__":
    main()
