"""Ten methods at equal rounds and at equal bytes, from the studies docs/results/which-method-*.yaml.

    fedbn-flwr sweep docs/results/which-method-mnist.yaml --set data-dir=FOLDER --out runs/which-method-mnist
    python benchmarks/which_method.py runs/which-method-* --write docs/results/which-method.md

Bytes are those of floats, down once and up from each client. At equal bytes each method stops at its last test before
it has moved 1 % more than the cheapest method does in the whole run. Only finished runs are in the tables.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from measure import facts, machine, table, write_block

from fedbn_flwr.lab.output.folder import DIVERGED_AT
from fedbn_flwr.lab.studies.comparisons import difference
from fedbn_flwr.lab.studies.results import StudyResults
from fedbn_flwr.lab.studies.study import Cell, Study
from fedbn_flwr.lab.studies.study_checks import load_study

Curve = list[tuple[int, float, float]]  # round, MB so far, accuracy in per cent
BASELINE = "FedAvg+BN"
VERSUS = f"minus {BASELINE} (95 %)"
STYLES = ["-", "--", "-.", ":"]
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"]


def main(
    studies: Annotated[list[Path], typer.Argument(help="Folders of the sweeps.")],
    write: Annotated[Path | None, typer.Option(help="Page with places for the tables; pictures go beside it.")] = None,
) -> None:
    """Print the tables, and draw accuracy against bytes."""
    for folder in studies:
        study = load_study(folder / "study.yaml")
        results = StudyResults(study, folder)
        for split in dict.fromkeys(cell.split for cell in study.cells()):
            curves = _curves(study, results, split)
            cells = [cell for cell in study.cells() if cell.split == split and results.summary(cell)]
            rates = {cell.method: _rate(cell.folder(folder)) for cell in cells}
            if not rates:
                continue
            counts = _counts(study, results, split)
            by_rounds = table(["equal rounds", "rate", "n", "%", VERSUS], _at_equal_rounds(curves, rates, counts))
            by_bytes = table(["equal bytes", "10^6 bytes a round", "rounds there", "%"], _at_equal_bytes(curves))
            name = folder.name if split == "all" else f"{folder.name}-{split.split('(')[0].replace(' ', '-').lower()}"
            grid = _grid(folder, split)
            picture = f"![accuracy against bytes]({name}.svg)"
            text = "\n\n".join([by_rounds, by_bytes, picture, grid, _facts(results, cells)])
            print(f"{name}\n\n{text}\n")
            if write:
                write_block(write, name, text)
                _draw(curves, write.parent / f"{name}.svg")


def _curves(study: Study, results: StudyResults, split: str) -> dict[str, dict[int, Curve]]:
    """Return the curve of each finished run that did not diverge, by method and seed."""
    found: dict[str, dict[int, Curve]] = {}
    for cell in study.cells():
        summary = results.summary(cell)
        if cell.split == split and summary is not None and DIVERGED_AT not in summary:
            found.setdefault(cell.method, {})[cell.seed] = _curve(results, cell)
    return found


def _counts(study: Study, results: StudyResults, split: str) -> dict[str, str]:
    """Return the number of runs by method, with those that lost replies of clients and those that diverged."""
    done = [(c.method, s) for c in study.cells() if c.split == split and (s := results.summary(c)) is not None]
    diverged = Counter(method for method, summary in done if DIVERGED_AT in summary)
    lost = Counter(method for method, summary in done if DIVERGED_AT not in summary and summary["rejected"])
    number = Counter(method for method, summary in done)
    return {
        method: f"{number[method] - diverged[method]}"
        + f" ({lost[method]} with lost replies)" * bool(lost[method])
        + f", {diverged[method]} diverged" * bool(diverged[method])
        for method in number
    }


def _facts(results: StudyResults, cells: Sequence[Cell]) -> str:
    """Return the commits that the runs were done with, and this machine; older runs do not name their commit."""
    versions = {(results.summary(cell) or {})["versions"]["fedbn-flwr"] for cell in cells}
    commits = sorted(version.partition("+g")[2] for version in versions)
    if not all(commits):
        return facts()
    return f"Runs at commit{'s' * (len(commits) > 1)} {' and '.join(commits)}; {machine()}."


def _rate(run: Path) -> str:
    return f"{yaml.safe_load((run / 'config.yaml').read_text())['learning-rate']:g}"


def _grid(folder: Path, split: str) -> str:
    """Return what the rates gave on the validation examples."""
    lines = (folder / "tuning.md").read_text().splitlines()
    header, *cells = [_cells(line) for line in lines if line.startswith("| ")]
    head = ["validation, %", *(cell.removeprefix("learning-rate=") for cell in header[2:])]
    rows = []
    for name, _, *scores in cells:
        if name.endswith(f"/{split}"):
            rows.append([name.removesuffix(f"/{split}"), *(score.replace(" %", "") for score in scores)])
    return table(head, rows)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def _curve(results: StudyResults, cell: Cell) -> Curve:
    curve, moved = Curve(), 0
    headline = (results.summary(cell) or {})["headline"]
    for line in results.history(cell):
        moved += line["bytes-down"] + line["bytes-up"]
        if line.get(headline) is not None:
            curve.append((line["round"], moved / 1e6, 100 * line[headline]))
    return curve


def _at_equal_rounds(
    curves: dict[str, dict[int, Curve]], rates: dict[str, str], counts: dict[str, str]
) -> list[list[str]]:
    rows = []
    for method in rates:
        runs = curves.get(method, {})
        last = _mean([curve[-1][2] for curve in runs.values()])
        rows.append([method, rates[method], counts[method], last, _against(curves.get(BASELINE, {}), runs)])
    return rows


def _at_equal_bytes(curves: dict[str, dict[int, Curve]]) -> list[list[str]]:
    budget = 1.01 * min(min(curve[-1][1] for curve in runs.values()) for runs in curves.values())
    rows = []
    for method, runs in curves.items():
        stops = []
        for curve in runs.values():
            within = [point for point in curve if point[1] <= budget]
            stops += within[-1:]
        number, moved, _ = next(iter(runs.values()))[-1]
        there = "/".join(map(str, sorted({point[0] for point in stops})))
        rows.append([method, f"{moved / number:.3g}", there, _mean([point[2] for point in stops])])
    return rows


def _against(baseline: dict[int, Curve], runs: dict[int, Curve]) -> str:
    """Return the mean difference over the seeds that both have, with its interval (Student's t)."""
    seeds = [seed for seed in runs if seed in baseline]
    if len(seeds) < 2 or runs is baseline:
        return "-"
    found = difference([runs[seed][-1][2] - baseline[seed][-1][2] for seed in seeds])
    return f"{found['difference']:+.1f} ({found['low']:+.1f} to {found['high']:+.1f})"


def _mean(values: Sequence[float]) -> str:
    if not values:
        return "none"
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"


def _draw(curves: dict[str, dict[int, Curve]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "fedbn-flwr", "font.size": 11})
    figure, ax = plt.subplots(figsize=(8, 5))
    for number, (method, runs) in enumerate(curves.items()):
        points: list[Any] = list(zip(*runs.values(), strict=True))
        moved = [statistics.mean(point[1] for point in at) for at in points]
        scores = [statistics.mean(point[2] for point in at) for at in points]
        colour, dash = COLOURS[number % len(COLOURS)], STYLES[number % len(STYLES)]
        ax.plot(moved, scores, label=method, linewidth=1.8, color=colour, linestyle=dash)
    ax.set_xlabel("MB of floats, down and up")
    ax.set_ylabel("accuracy, %")
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.3)
    ax.legend(fontsize=9, ncols=2, frameon=False)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    typer.run(main)
