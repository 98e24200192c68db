"""Draws the site's pictures from the recorded results: ``python docs/pictures.py``.

Each number is read from a table of a page of results, or from the figures of each round
in a folder beside it.
"""

from __future__ import annotations

import csv
import itertools
import re
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import yaml

DOCS = Path(__file__).parent
sys.path.append(str(DOCS / "generate"))
from doc_performance import between, compared  # noqa: E402
from doc_pretrained import pretrained_lines  # noqa: E402

RESULTS = DOCS / "results"
WIDTH = 5.2  # inches: on a phone of 390 pixels a label still has ten
# legible on a white page and on a dark one: one picture serves both
TEXT, LINE = (
    "#7a828e",
    "#8a919c",
)
GOOD, BAD, PLAIN, OTHER, MORE = "#4c6ef5", "#e8590c", "#868e96", "#0c8599", "#9c36b5"
HOME_ROUND = 48_000  # where FedTAN was interrupted
HOME = [  # label, file of results/fixbn-table-1, method of fixbn-table-1-small, colour
    ("FedAvg with BatchNorm", "BN", "BN", BAD),
    ("FedAvg with GroupNorm", "GN", "GN", PLAIN),
    ("FedTAN", "FedTAN", "FedTAN", GOOD),
    ("one machine with BatchNorm", "centralized-BN", "centralized BN", PLAIN),
]
# A picture of curves: name, title, and the lines: file or its column, label, colour,
# style
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
TUNED = [  # label, heading on the page which-method, tables before it, column
    ("MNIST, two classes", "MNIST, two classes a client", 0, 2),
    ("LeNet, Dirichlet(0.1)", "CIFAR-10, LeNet", 0, 2),
    ("LeNet, two classes", "CIFAR-10, LeNet", 1, 2),
    ("ResNet-20, Dirichlet(0.1)", "CIFAR-10, ResNet-20", 0, 2),
    ("ResNet-20, two classes", "CIFAR-10, ResNet-20", 0, 4),
]
BEST = {"FedBN", "SiloBN"}  # the rows of FedWon's Table 1 that the finding is about


def number(text: str) -> tuple[float, float]:
    """Return mean and deviation of "68.82 ± 3.07 / 70.1"; the deviation is 0 where
    there is none.
    """
    found = re.match(r"([\d.]+)(?: ± ([\d.]+))?", text.strip())
    assert found is not None, text
    return float(found[1]), float(found[2] or 0)


def table(page: str, heading: str, skip: int = 0) -> list[list[str]]:
    """Return the rows of a table below a heading of a page of results; the first row is
    its head. ``skip`` tables come before it.
    """
    text = (RESULTS / f"{page}.md").read_text(encoding="utf-8")
    below = text.partition(f"# {heading}\n")[2]
    tables = [part for part in below.split("\n\n") if part.startswith("|")]
    lines = tables[skip].splitlines()
    rows = []
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not re.fullmatch(r":?-+:?", cells[0]):
            rows.append(cells)
    return rows


def save(figure: Any, path: Path) -> None:
    """Write the picture without a date, so that the same numbers give the same file."""
    figure.savefig(path, transparent=True, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def axes(height: float) -> tuple[Any, Any]:
    """Return a figure and its axes in the colours of the pages."""
    plt.rcParams.update(
        {"svg.hashsalt": "fedbn-flwr", "svg.fonttype": "none", "font.size": 11}
    )
    plt.rcParams.update({"text.color": TEXT, "axes.labelcolor": TEXT})
    plt.rcParams.update(
        {
            "xtick.color": TEXT,
            "ytick.color": TEXT,
            "axes.edgecolor": LINE,
            "grid.color": LINE,
        }
    )
    figure, ax = plt.subplots(figsize=(WIDTH, height))
    ax.spines[["top", "right"]].set_visible(False)
    return figure, ax


def bars(
    rows: list[tuple[str, tuple[float, float], str]], path: Path, title: str
) -> None:
    """Draw horizontal bars from 0 with their values, the first row on top."""
    figure, ax = axes(0.9 + 0.5 * len(rows))
    for place, (label, (mean, deviation), colour) in enumerate(reversed(rows)):
        ax.barh(
            place,
            mean,
            xerr=deviation or None,
            color=colour,
            height=0.42,
            ecolor=LINE,
            capsize=3,
        )
        ax.text(1, place, f"{mean:.1f}", va="center", color="white", fontweight="bold")
        ax.text(0, place + 0.26, label, va="bottom")
    ax.set_yticks([])
    ax.set_ylim(-0.45, len(rows) - 0.2)
    ax.set_xlim(0, 100)
    ax.set_title(title, loc="left", fontsize=11, fontweight="bold")
    save(figure, path)


def tests(name: str, line: str) -> tuple[list[int], list[float]]:
    """Return the rounds with a test, and the test accuracies in per cent, of a line of
    a study.
    """
    folder = RESULTS / name
    shared = folder / "curves.csv"  # a file for all lines, or one for each
    with (shared if shared.exists() else folder / f"{line}.csv").open(
        encoding="utf-8"
    ) as file:
        rows = list(csv.DictReader(file))
    rounds, accuracies = [], []
    for row in rows:
        accuracy = row.get("accuracy") or row.get("test-accuracy")
        if accuracy and row.get("method", line) == line:
            rounds.append(int(row["round"]))
            accuracies.append(100 * float(accuracy))
    return rounds, accuracies


def curves(name: str, title: str, lines: list[tuple[str, str, str, str]]) -> None:
    """Draw the test accuracy of a study over its rounds, the legend inside."""
    figure, ax = axes(3.8)
    for line, label, colour, style in lines:
        ax.plot(*tests(name, line), style, color=colour, label=label, linewidth=1.6)
    ax.set_title(title, loc="left", fontsize=11, fontweight="bold")
    _over_rounds(ax)
    ax.set_ylim(0, 100)
    ax.set_xlim(left=0)
    save(figure, RESULTS / f"{name}.svg")


def small_study(path: Path) -> None:
    """Draw the tests of a small study, a panel for each split; seeds are averaged."""
    shown: dict[str, dict[str, dict[int, list[float]]]] = {}
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            rounds = shown.setdefault(row["split"], {}).setdefault(row["method"], {})
            accuracies = rounds.setdefault(int(row["round"]), [])
            accuracies.append(100 * float(row["accuracy"]))
    figure, first = axes(0.6 + 3.0 * len(shown))
    first.remove()
    panels = figure.subplots(len(shown), squeeze=False)[:, 0]
    for ax, (split, methods) in zip(panels, shown.items(), strict=True):
        ax.spines[["top", "right"]].set_visible(False)
        styles = itertools.product(("o-", "o--"), (BAD, GOOD, OTHER, MORE, PLAIN))
        for (method, rounds), (line, colour) in zip(
            methods.items(), styles, strict=False
        ):
            means = [fmean(accuracies) for accuracies in rounds.values()]
            ax.plot([*rounds], means, line, color=colour, label=method, markersize=3)
        ax.set_title(split, loc="left", fontsize=11, fontweight="bold")
        _over_rounds(ax)
        ax.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1, 1))
        ax.set_ylim(bottom=0)
        ax.set_xlim(left=0)
    figure.tight_layout()
    save(figure, RESULTS / f"{path.parent.name}.svg")


def _over_rounds(ax: Any) -> None:
    ax.set_xlabel("server round")
    ax.set_ylabel("test accuracy, %")
    ax.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.grid(alpha=0.3)
    ax.legend(frameon=False, fontsize=9)


def which_method() -> None:
    """Draw each method's accuracy in the five label-skewed settings, a setting a row."""
    cells: dict[str, list[str]] = {}
    for _, heading, skip, column in TUNED:
        for row in table("which-method", heading, skip)[1:]:
            cells.setdefault(row[0], []).append(row[column])
    styles = {
        "FedTAN": (GOOD, "o"),
        "FixBN": (OTHER, "D"),
        "GN": (MORE, "s"),
        "FedAvg+BN": (BAD, "X"),
    }
    figure, ax = axes(3.2)
    # those with a name of their own on top
    ordered = sorted(cells, key=lambda method: method in styles)
    for method in ordered:
        colour, marker = styles.get(method, (LINE, "|"))
        points = [
            (number(cell)[0], -at)
            for at, cell in enumerate(cells[method])
            if cell[0].isdigit()
        ]
        label = method if method in styles else None
        if method == ordered[0]:
            label = "the others"
        ax.plot(
            *zip(*points, strict=True), marker, color=colour, label=label, markersize=7
        )
    for at, (setting, *_) in enumerate(TUNED):
        ax.text(0, -at + 0.22, setting, va="bottom", fontsize=10)
        ax.axhline(-at, color=LINE, linewidth=0.5, alpha=0.5, zorder=0)
    ax.set_yticks([])
    ax.set_xlim(0, 100)
    ax.set_ylim(1 - len(TUNED) - 0.4, 0.8)
    ax.set_xlabel("test accuracy, %")
    ax.legend(frameon=False, fontsize=9, loc="lower right")
    save(figure, RESULTS / "which-method.svg")


def performance() -> None:
    """Draw the ranges of the ratios of ``performance.yaml``: what is faster to the left
    of 1, what is slower to the right.
    """
    data = yaml.safe_load((DOCS / "performance.yaml").read_text(encoding="utf-8"))
    named = {
        "fedbn": "MLP, FedBN",
        "cifar10": "CNN, 1000 clients",
        "mlp-128": "MLP, batch 128",
    }
    named |= {"evaluation-mlp": "MLP, tests", "evaluation-lenet": "LeNet, tests"}
    named |= {
        "resnet20-20": "ResNet-20, batch 20",
        "resnet20-128": "ResNet-20, batch 128",
        "tensors": "MLP, TensorDataset",
        "hugging-face": "MLP, Hugging Face data set",
        "folder-0": "CNN, image folder",
        "folder-2": "CNN, image folder, 2 loader workers",
        "fedtan": "ResNet-20, E = 1",
        "fedtan-5": "ResNet-20, E = 5",
    }
    found = []
    for setting, mine, theirs, ranges, _ in compared(data):
        mine = mine.removeprefix("fedbn-flwr, ")
        theirs = theirs.replace(" strategy and client", "").removeprefix("fedbn-flwr, ")
        found.append((f"{named[setting]}: {mine} / {theirs}", ranges["seconds"]))
    found.sort(key=lambda one: one[1])
    figure, ax = axes(0.9 + 0.46 * len(found))
    for place, (label, (low, high)) in enumerate(found):
        colour = BAD if low > 1.05 else GOOD if high < 0.95 else PLAIN
        ax.plot(
            # one run is a point
            [low / 1.004, high * 1.004],
            [-place, -place],
            color=colour,
            linewidth=6,
            solid_capstyle="butt",
        )
        # not through the labels
        ax.plot([1, 1], [-place - 0.2, -place + 0.2], color=LINE, linewidth=1)
        outside = high if low >= 1 else low
        ax.annotate(
            between((low, high)),
            (outside, -place),
            xytext=(5 if low >= 1 else -5, 0),
            textcoords="offset points",
            ha="left" if low >= 1 else "right",
            va="center",
            fontsize=9,
            fontweight="bold",
        )
        ax.text(
            0,
            -place + 0.24,
            label,
            va="bottom",
            fontsize=9.5,
            transform=ax.get_yaxis_transform(),
        )
    ax.spines["left"].set_visible(False)
    ax.set_xscale("log")
    ax.set_xticks([0.5, 0.7, 1, 1.5, 2], ["0.5", "0.7", "1", "1.5", "2"])
    ax.minorticks_off()
    ax.set_xlim(0.45, 2.2)
    ax.set_ylim(0.5 - len(found), 0.9)
    ax.set_yticks([])
    ax.set_title(
        "a round: faster than the other | slower", fontsize=11, fontweight="bold"
    )
    save(figure, DOCS / "images/performance.svg")


def pretrained() -> None:
    """Draw accuracy against bytes of the study of pretrained networks, a panel a split."""
    colours = {"FedAvg": BAD, "FedBN": OTHER, "FixBN": GOOD, "GroupNorm": MORE}
    markers = {"all": "o", "norms and head": "s", "betas and head": "^", "head": "X"}
    found = pretrained_lines(DOCS.parent)
    figure, first = axes(0.6 + 2.6 * len(found))
    first.remove()
    panels = figure.subplots(len(found), sharex=True, squeeze=False)[:, 0]
    for ax, (split, lines) in zip(panels, found.items(), strict=True):
        ax.spines[["top", "right"]].set_visible(False)
        for line in lines:
            strategy, part = line.method.split(", ", 1)
            mean, (low, high) = line.accuracy.value, line.accuracy.ends()
            ends = None if low is None else [[mean - low], [high - mean]]
            ax.errorbar(
                *(line.megabytes, mean, ends),
                fmt=markers[part],
                color=colours[strategy],
                markersize=7,
                linewidth=1.2,
                capsize=3,
            )
        ax.set_title(split, loc="left", fontsize=11, fontweight="bold")
        ax.set_xscale("log")
        ax.set_ylim(bottom=0)
        ax.set_ylabel("sites' test accuracy, %")
        ax.grid(alpha=0.3)
    ax.set_xlabel("MB of floats per client, whole run")
    ax.xaxis.set_major_formatter("{x:g}")
    shown = {line.method.split(", ")[0] for lines in found.values() for line in lines}
    for name, colour in colours.items():
        if name in shown:
            panels[0].plot([], [], "-", color=colour, label=name, linewidth=4)
    for part, marker in markers.items():
        panels[0].plot([], [], marker, color=PLAIN, label=part, markersize=7)
    # between the parts and the whole model, there are no points
    panels[0].legend(frameon=False, fontsize=9, loc="center", bbox_to_anchor=(0.6, 0.5))
    save(figure, RESULTS / "pretrained.svg")


def home() -> None:
    """Draw two bars for each method: round 48,000, and the schedule in 1,200 rounds."""
    short: dict[str, list[float]] = {}
    for path in sorted((RESULTS / "fixbn-table-1-small").glob("[rs]e*.csv")):
        with path.open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                short.setdefault(row["method"], []).append(float(row["final"]))
    figure, ax = axes(0.9 + 0.75 * len(HOME))
    for place, (label, file, method, colour) in enumerate(reversed(HOME)):
        rounds, accuracies = tests("fixbn-table-1", file)
        long = accuracies[rounds.index(HOME_ROUND)]
        mean, deviation = fmean(short[method]), stdev(short[method])
        ax.barh(place, long, color=colour, height=0.26)
        ax.text(1, place, f"{long:.1f}", va="center", color="white", fontweight="bold")
        below = place - 0.28
        ax.barh(below, mean, xerr=deviation, color=colour, height=0.26, alpha=0.7)
        ax.text(1, below, f"{mean:.1f}", va="center", color="white", fontweight="bold")
        ax.text(0, place + 0.17, label, va="bottom")
    ax.set_yticks([])
    ax.set_ylim(-0.5, len(HOME) - 0.4)
    ax.set_xlim(0, 100)
    ax.set_title(
        "CIFAR-10, two classes a client: test accuracy, %\n"
        "above: round 48,000, one seed; below: 1,200 rounds, three seeds",
        loc="left",
        fontsize=10,
        fontweight="bold",
    )
    save(figure, DOCS / "images/home.svg")


def main() -> None:
    """Draw all pictures."""
    home()
    for name, title, lines in CURVES:
        curves(name, title, lines)
    for path in sorted(RESULTS.glob("*-small/curves.csv")):
        # A folder with the settings is of a study as it is now.
        if (path.parent / "study.yaml").exists():
            small_study(path)
    office = []
    for row in table("papers", "FedWon's Table 1"):
        if row[-1][0].isdigit():
            office.append((row[0], number(row[-1]), GOOD if row[0] in BEST else PLAIN))
    bars(
        office,
        RESULTS / "fedwon-table-1-office-small.svg",
        "mean over four domains, 300 rounds, %",
    )
    which_method()
    pretrained()
    performance()


if __name__ == "__main__":
    main()
