"""What was repeated of the papers' tables and figures, from
``docs/results/papers.yaml`` and the results of small studies beside it.
"""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import yaml

__all__ = ["papers_block", "small_block"]

_COLUMNS = (
    "| paper | question | answer | ours, % | paper, % | settings |\n"
    "|---|---|---|---|---|---|\n"
)
_STATES = ("done", "partly", "not run", "nothing to run")
_SIGNS = {
    "same": "have the paper's sign",
    "other": "have another sign",
    "open": "leave it open",
}


def _papers(root: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return the tables and figures, each with the name of its paper."""
    path = root / "docs/results/papers.yaml"
    papers = yaml.safe_load(path.read_text(encoding="utf-8"))["papers"]
    return [(paper["name"], entry) for paper in papers for entry in paper["shows"]]


def papers_block(root: Path) -> str:
    """Return the count of the tables and figures, and a table of the answers."""
    states: Counter[str] = Counter()
    signs: Counter[str] = Counter()
    rows = ""
    for paper, entry in _papers(root):
        state = entry.get("state", "nothing to run")
        states[state] += 1
        if state in ("done", "partly"):
            signs[entry["sign"]] += 1
            rows += _row(paper, entry)
    counted = ", ".join(f"{state} {states[state]}" for state in _STATES)
    head = f"**Of {states.total()} tables and figures: {counted}.**"
    signed = ", ".join(f"{signs[one]} {words}" for one, words in _SIGNS.items())
    meaning = (
        '"Done" is the paper\'s setting at its length with several seeds, or a figure'
        f" that needs no training. Of the answers, {signed}."
    )
    rest = (
        "The others have a study, full and small, in"
        " [studies](../../studies/README.md)."
    )
    return f"\n{head} {meaning}\n\n{_COLUMNS}{rows}\n{rest}\n"


def _row(paper: str, entry: dict[str, Any]) -> str:
    target = entry.get("results") or f"#{entry['runs']}"
    ours, theirs = entry.get("ours", "-"), entry.get("paper", "-")
    answer = entry["answer"].replace("*", "\\*")
    return (
        f"| [{paper} {entry['of']}]({target}) | {entry['asks']} | {answer} |"
        f" {ours} | {theirs} | {entry['state']}: {entry['why']} |\n"
    )


def small_block(root: Path) -> str:
    """Return a section for each folder of a small study with its own settings."""
    shown: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for paper, entry in _papers(root):
        if "runs" in entry:
            shown.setdefault(entry["runs"], []).append((paper, entry))
    return "".join(_section(root, name, of) for name, of in shown.items())


def _section(root: Path, name: str, of: list[tuple[str, dict[str, Any]]]) -> str:
    folder, study = root / "docs/results" / name, name.removesuffix("-small")
    full = yaml.safe_load((root / f"studies/{study}.yaml").read_text(encoding="utf-8"))
    lines = ["", f"### {name}", ""]
    for paper, entry in of:
        lines += [f"{paper}'s {entry['of']}: **{entry['answer']}** {entry['why']}.", ""]
    lines += [
        f"[studies/{study}.yaml](../../studies/{study}.yaml), `--small`, commit"
        f" {of[0][1]['commit']}; [all settings]({name}/study.yaml),"
        f" [each run]({name}/results.csv).",
        "",
    ]
    if (folder.parent / f"{name}.svg").exists():
        lines += [f"![Test accuracy over the rounds, by method]({name}.svg)", ""]
    lines += _table(folder / "results.csv", full.get("paper", {}))
    return "\n".join(lines) + "\n"


def _table(path: Path, paper: dict[str, Any]) -> list[str]:
    """Return the mean of each method and split over its seeds, beside the paper's."""
    finals: dict[tuple[str, str], dict[str, float]] = {}
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["domain"] == "" and row["final"]:
                of = finals.setdefault((row["split"], row["method"]), {})
                of[row["seed"]] = float(row["final"])
    lines = ["| split | method | % | seeds | paper |", "|---|---|---|---|---|"]
    for (split, method), by_seed in finals.items():
        values = [*by_seed.values()]
        mean = f"{fmean(values):.2f}"
        if len(values) > 1:
            mean += f" ± {stdev(values):.2f}"
        theirs = paper.get(f"{method}/{split}", "-")
        if isinstance(theirs, dict):
            theirs = theirs["average"]
        lines.append(
            f"| {split} | {method} | {mean} | {', '.join(by_seed)} | {theirs} |"
        )
    return lines
