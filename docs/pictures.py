"""Draws the site's pictures from the recorded results: ``python docs/pictures.py``.

Each number is read from a table of a page of results, or from the figures of each round in a folder beside it.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import yaml

DOCS = Path(__file__).parent
sys.path.append(str(DOCS / "generate"))
from doc_performance import ratios  # noqa: E402

RESULTS = DOCS / "results"
WIDTH = 5.2  # inches: on a phone of 390 pixels a label still has ten
COLOURS = {"light": ("#1f2328", "#8a919c"), "dark": ("#e6e8ec", "#8a919c")}
GOOD, BAD, PLAIN, OTHER, MORE = "#4c6ef5", "#e8590c", "#868e96", "#0c8599", "#9c36b5"
HOME_ROUND = 48_000  # where FedTAN was interrupted
HOME = [  # label, file of results/fixbn-table-1, colour
    ("FedAvg with BatchNorm", "BN", BAD),
    ("FedAvg with GroupNorm", "GN", PLAIN),
    ("FedTAN", "FedTAN", GOOD),
    ("one machine with BatchNorm", "centralized-BN", PLAIN),
]
# A picture of curves: name, title, and the lines: file or its column, label, colour, style
CURVES = [
    (
        "fixbn-table-4",
        "100 local steps a round",
        [
            ("GN+WN", "GroupNorm, standardised weights", MORE, "--"),
            ("FedTAN-II", "FedTAN-II", OTHER, "-"),
            ("FixBN", "FixBN", GOOD, "-"),
            ("GN", "GroupNorm", PLAIN, "--"),
            ("BN", "FedAvg with BatchNorm", BAD, "-"),
        ],
    ),
    (
        "fixbn-table-4-small",
        "100 local steps a round, a fifth of the length",
        [("FixBN", "FixBN", GOOD, "-"), ("BN", "FedAvg with BatchNorm", BAD, "-"), ("GN", "GroupNorm", PLAIN, "--")],
    ),
    (
        "fixbn-table-4-decay-small",
        "dashed: without the decay of the rate",
        [
            ("GN+WN, decay", "GroupNorm, standardised weights", MORE, "-"),
            ("BN, decay", "FedAvg with BatchNorm", BAD, "-"),
            ("FixBN, decay", "FixBN", GOOD, "-"),
            ("GN, decay", "GroupNorm", PLAIN, "-"),
            ("GN+WN, no decay", "", MORE, "--"),
            ("BN, no decay", "", BAD, "--"),
            ("FixBN, no decay", "", GOOD, "--"),
            ("GN, no decay", "", PLAIN, "--"),
        ],
    ),
    (
        "fixbn-table-1",
        "an average after every step",
        [
            ("centralized-BN", "one machine, BatchNorm", MORE, ":"),
            ("FedTAN", "FedTAN, to round 48,000", OTHER, "-"),
            ("GN", "FedAvg with GroupNorm", PLAIN, "--"),
            ("BN", "FedAvg with BatchNorm", BAD, "-"),
        ],
    ),
    (
        "fedtan-figure-6",
        "two classes a client, seed 0",
        [
            ("centralized", "one machine", MORE, ":"),
            ("FedTAN", "FedTAN", GOOD, "-"),
            ("FedAvg+Algorithm 2", "FedDNA", OTHER, "--"),
            ("FedAvg+BN", "FedAvg with BatchNorm", BAD, "-"),
        ],
    ),
    (
        "fedtan-figure-8-small",
        "each client's model on all domains' images",
        [
            ("FedTAN", "FedTAN", GOOD, "-"),
            ("FedAvg+BN", "FedAvg with BatchNorm", BAD, "-"),
            ("FedBN", "FedBN", OTHER, "--"),
            ("SingleNet", "each client alone, to round 70", PLAIN, ":"),
        ],
    ),
]
TABLES = [  # a page whose first table has a round a row: its columns as lines
    (
        "cifar10",
        [
            ("FedTAN", "FedTAN", GOOD, "-"),
            ("centralized, one batch", "one machine, one batch a round", MORE, ":"),
            ("FedDNA", "FedDNA", OTHER, "--"),
            ("FedAvg+GN", "FedAvg with GroupNorm", PLAIN, "--"),
            ("FedAvg+BN", "FedAvg with BatchNorm", BAD, "-"),
        ],
    ),
    (
        "fedbs",
        [
            ("MNIST, FedBS", "MNIST, FedBS", GOOD, "-"),
            ("MNIST, FedAvg", "MNIST, FedAvg", PLAIN, "-"),
            ("Fashion-MNIST, FedBS", "Fashion-MNIST, FedBS", GOOD, "--"),
            ("Fashion-MNIST, FedAvg", "Fashion-MNIST, FedAvg", PLAIN, "--"),
        ],
    ),
]
# A picture of bars: page, title, table of the page, its column, and the rows that the finding is about
BARS: list[tuple[str, str, int, int, set[str]]] = [
    ("fixbn-table-1-small", "test accuracy at round 1,200, %", 0, 3, {"FedTAN"}),
    ("office-caltech10", "mean over four domains, 25 rounds, %", 0, -1, {"FedWon"}),
    ("fedwon-table-1-office-small", "mean over four domains, 300 rounds, %", 0, -1, {"FedBN", "SiloBN"}),
    ("fedwon-office-all-images-small", "mean over four domains, round 40, %", 0, -1, {"FedWon"}),
    ("digits-domains", "mean over three digits domains, %", 0, -1, {"FedBN", "SiloBN"}),
    ("heart", "AUROC, mean of four hospitals, %", 0, 5, {"FedBN", "SiloBN"}),
    ("office-folders", "mean over four domains, %", 0, -1, {"FedBN", "SiloBN"}),
    ("collages", "AUROC, mean of five clients, %", 0, -1, {"FedBN", "SiloBN"}),
]


def number(text: str) -> tuple[float, float]:
    """Return mean and deviation of "68.82 ± 3.07 / 70.1"; the deviation is 0 where there is none."""
    found = re.match(r"([\d.]+)(?: ± ([\d.]+))?", text.strip())
    assert found is not None, text
    return float(found[1]), float(found[2] or 0)


def table(page: str, at: int = 0) -> list[list[str]]:
    """Return the cells of a table of a page, by its path from the results, its head included."""
    text = (RESULTS / f"{page}.md").read_text(encoding="utf-8")
    tables = [part for part in text.split("\n\n") if part.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in tables[at].split("\n")]
    return [row for row in rows if not re.fullmatch(r":?-+:?", row[0])]


def save(figure: Any, path: Path) -> None:
    """Write the picture without a date, so that the same numbers give the same file."""
    figure.savefig(path, transparent=True, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def axes(theme: str, height: float) -> tuple[Any, Any]:
    """Return a figure and its axes in the colours of a theme."""
    text, line = COLOURS[theme]
    plt.rcParams.update({"svg.hashsalt": "fedbn-flwr", "font.size": 11, "text.color": text, "axes.labelcolor": text})
    plt.rcParams.update({"xtick.color": text, "ytick.color": text, "axes.edgecolor": line, "grid.color": line})
    figure, ax = plt.subplots(figsize=(WIDTH, height))
    ax.spines[["top", "right"]].set_visible(False)
    return figure, ax


def bars(theme: str, rows: list[tuple[str, tuple[float, float], str]], path: Path, title: str) -> None:
    """Draw horizontal bars from 0 with their values, the first row on top."""
    figure, ax = axes(theme, 0.9 + 0.5 * len(rows))
    for place, (label, (mean, deviation), colour) in enumerate(reversed(rows)):
        ax.barh(place, mean, xerr=deviation or None, color=colour, height=0.42, ecolor=COLOURS[theme][1], capsize=3)
        ax.text(1, place, f"{mean:.1f}", va="center", color="white", fontweight="bold")
        ax.text(0, place + 0.26, label, va="bottom")
    ax.set_yticks([])
    ax.set_ylim(-0.45, len(rows) - 0.2)
    ax.set_xlim(0, 100)
    ax.set_title(title, loc="left", fontsize=11, fontweight="bold")
    save(figure, path)


def tests(name: str, line: str) -> tuple[list[int], list[float]]:
    """Return the rounds with a test, and the test accuracies in per cent, of a line of a study."""
    folder = RESULTS / name
    if (folder / "curves.csv").exists():
        with (folder / "curves.csv").open(encoding="utf-8") as file:
            tested = [(row["round"], row["accuracy"]) for row in csv.DictReader(file) if row["method"] == line]
    elif (folder / f"{line}.csv").exists():
        with (folder / f"{line}.csv").open(encoding="utf-8") as file:
            tested = [(row["round"], row["test-accuracy"]) for row in csv.DictReader(file) if row["test-accuracy"]]
    else:
        rounds = map(json.loads, (folder / line / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        tested = [(row["round"], row["test-accuracy"]) for row in rounds if "test-accuracy" in row]
    return [int(at) for at, _ in tested], [100 * float(accuracy) for _, accuracy in tested]


def curves(theme: str, name: str, title: str, lines: list[tuple[str, str, str, str]]) -> None:
    """Draw the test accuracy of a study over its rounds, the legend inside."""
    figure, ax = axes(theme, 3.8)
    for line, label, colour, style in lines:
        ax.plot(*tests(name, line), style, color=colour, label=label, linewidth=1.6)
    ax.set_title(title, loc="left", fontsize=11, fontweight="bold")
    _over_rounds(ax)
    ax.set_ylim(0, 100)
    ax.set_xlim(left=0)
    save(figure, RESULTS / f"{name}-{theme}.svg")


def table_curves(theme: str, page: str, lines: list[tuple[str, str, str, str]]) -> None:
    """Draw the columns of a page's first table, whose rows are rounds."""
    head, *rows = table(page)
    rows = [row for row in rows if row[0].isdigit()]
    figure, ax = axes(theme, 3.8)
    for column, label, colour, style in lines:
        values = [number(row[head.index(column)])[0] for row in rows]
        ax.plot([int(row[0]) for row in rows], values, style, color=colour, label=label, marker="o", markersize=3)
    _over_rounds(ax)
    ax.set_ylim(bottom=0)
    save(figure, RESULTS / f"{page}-{theme}.svg")


def _over_rounds(ax: Any) -> None:
    ax.set_xlabel("server round")
    ax.set_ylabel("test accuracy, %")
    ax.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.grid(alpha=0.3)
    ax.legend(frameon=False, fontsize=9)


def which_method(theme: str) -> None:
    """Draw each method's accuracy in the five label-skewed settings, a setting a row."""
    head, *rows = next(cells for at in range(3) if (cells := table("../choose", at))[0][0] == "method")
    styles = {"FedTAN": (GOOD, "o"), "FixBN": (OTHER, "D"), "GroupNorm": (MORE, "s"), "FedAvg+BN": (BAD, "X")}
    figure, ax = axes(theme, 3.2)
    ordered = sorted(rows, key=lambda row: row[0] in styles)  # those with a name of their own on top
    for row in ordered:
        colour, marker = styles.get(row[0], (COLOURS[theme][1], "|"))
        points = [(number(cell)[0], -at) for at, cell in enumerate(row[1:]) if cell[0].isdigit()]
        label = row[0] if row[0] in styles else ("the others" if row is ordered[0] else None)
        ax.plot(*zip(*points, strict=True), marker, color=colour, label=label, markersize=7)
    for at, setting in enumerate(head[1:]):
        ax.text(0, -at + 0.22, setting, va="bottom", fontsize=10)
        ax.axhline(-at, color=COLOURS[theme][1], linewidth=0.5, alpha=0.5, zorder=0)
    ax.set_yticks([])
    ax.set_xlim(0, 100)
    ax.set_ylim(1 - len(head[1:]) - 0.4, 0.8)
    ax.set_xlabel("test accuracy, %")
    ax.legend(frameon=False, fontsize=9, loc="lower right")
    save(figure, RESULTS / f"which-method-{theme}.svg")


def fedtan_speed(theme: str) -> None:
    """Draw the time of a round of FedTAN as a multiple of FedAvg's, on a logarithmic axis."""
    ratios = {row[0]: number(row[1])[0] for row in table("fedtan-speed")[1:]}

    def ratio(start: str) -> float:
        return next(value for name, value in ratios.items() if name.startswith(start))

    channel = ratio("five SuperNodes: FedTAN by channel / FedAvg")
    rows = [
        ("in process", ratio("in process: FedTAN / FedAvg")),
        ("Ray, by channel", ratio("Ray, five actors: FedTAN by channel / FedAvg")),
        ("Ray, by messages", ratio("Ray, five actors: FedTAN by messages / FedAvg")),
        ("five SuperNodes, by channel", channel),
        ("five SuperNodes, by messages", channel * ratio("five SuperNodes: FedTAN by messages")),
    ]
    figure, ax = axes(theme, 2.8)
    for place, (label, times) in enumerate(reversed(rows)):
        ax.plot([1, times], [place, place], color=BAD if times > 2 else GOOD, linewidth=5, solid_capstyle="butt")
        ax.text(times * 1.06, place, f"{times:.3g}", va="center", fontweight="bold")
        ax.text(1, place + 0.22, label, va="bottom", fontsize=10)
    ax.set_xscale("log")
    ax.set_xticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    ax.minorticks_off()
    ax.set_xlim(0.98, 30)
    ax.set_ylim(-0.4, len(rows) - 0.2)
    ax.set_yticks([])
    ax.set_title("time of a round of FedTAN / of FedAvg", loc="left", fontsize=11, fontweight="bold")
    save(figure, RESULTS / f"fedtan-speed-{theme}.svg")


def performance(theme: str) -> None:
    """Draw the ratios of ``performance.yaml``: what is faster to the left of 1, what is slower to the right."""
    data = yaml.safe_load((DOCS / "performance.yaml").read_text(encoding="utf-8"))
    named = {"fedbn": "MLP, FedBN", "cifar10": "CNN, 1000 clients", "mlp-128": "MLP, batch 128"}
    named |= {"evaluation-mlp": "MLP, tests", "evaluation-lenet": "LeNet, tests"}
    named |= {"resnet20-20": "ResNet-20, batch 20", "resnet20-128": "ResNet-20, batch 128"}
    found = [
        (f"{named[setting]}: {mine.removeprefix('fedbn-flwr, ')} / {theirs.replace(' strategy and client', '')}", ratio)
        for setting, mine, theirs, ratio, _, _ in ratios(data)
        if ratio is not None
    ]
    found.sort(key=lambda one: one[1])
    figure, ax = axes(theme, 0.9 + 0.46 * len(found))
    for place, (label, ratio) in enumerate(found):
        colour = BAD if ratio > 1.05 else GOOD if ratio < 0.95 else PLAIN
        ax.plot([1, ratio], [-place, -place], color=colour, linewidth=6, solid_capstyle="butt")
        ax.plot([1, 1], [-place - 0.2, -place + 0.2], color=COLOURS[theme][1], linewidth=1)  # not through the labels
        side = "left" if ratio >= 1 else "right"
        ax.annotate(
            f"{ratio:.2f}",
            (ratio, -place),
            xytext=(5 if ratio >= 1 else -5, 0),
            textcoords="offset points",
            ha=side,
            va="center",
            fontsize=9,
            fontweight="bold",
        )
        ax.text(0, -place + 0.24, label, va="bottom", fontsize=9.5, transform=ax.get_yaxis_transform())
    ax.spines["left"].set_visible(False)
    ax.set_xscale("log")
    ax.set_xticks([0.5, 0.7, 1, 1.5, 2], ["0.5", "0.7", "1", "1.5", "2"])
    ax.minorticks_off()
    ax.set_xlim(0.45, 2.2)
    ax.set_ylim(0.5 - len(found), 0.9)
    ax.set_yticks([])
    ax.set_title("a round: faster than the other | slower", fontsize=11, fontweight="bold")
    save(figure, DOCS / f"images/performance-{theme}.svg")


def main() -> None:
    """Draw all pictures, light and dark."""
    home = []
    for label, file, colour in HOME:
        rounds, accuracies = tests("fixbn-table-1", file)
        home.append((label, (accuracies[rounds.index(HOME_ROUND)], 0.0), colour))
    for theme in COLOURS:
        bars(
            theme,
            home,
            DOCS / f"images/home-{theme}.svg",
            "CIFAR-10, two classes a client, round 48,000:\ntest accuracy, %",
        )
        for name, title, lines in CURVES:
            curves(theme, name, title, lines)
        for page, title, at, column, good in BARS:
            rows = [row for row in table(page, at)[1:] if row[column] != "-"]
            shown = [(row[0], number(row[column]), GOOD if row[0] in good else PLAIN) for row in rows]
            bars(theme, shown, RESULTS / f"{page}-{theme}.svg", title)
        for page, lines in TABLES:
            table_curves(theme, page, lines)
        which_method(theme)
        fedtan_speed(theme)
        performance(theme)


if __name__ == "__main__":
    main()
