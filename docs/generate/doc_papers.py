"""What was repeated of the papers' tables and figures, from
``docs/results/papers.yaml``.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import yaml

__all__ = ["head_of", "papers_block"]

_COLUMNS = "| paper | shows | state | what and why | results |\n|---|---|---|---|---|\n"
_STATES = ("done", "partly", "not run", "nothing to run")


def head_of(study: Path) -> str:
    """Return the comment at the top of a study, on one line."""
    lines = study.read_text(encoding="utf-8").splitlines()
    return " ".join(line.removeprefix("# ") for line in lines if line.startswith("# "))


def papers_block(root: Path) -> str:
    """Return the count of the tables and figures, a table of those that were run."""
    papers = yaml.safe_load(
        (root / "docs/results/papers.yaml").read_text(encoding="utf-8")
    )["papers"]
    counts: Counter[str] = Counter()
    rows = ""
    for paper in papers:
        for entry in paper["shows"]:
            state = entry.get("state", "nothing to run")
            counts[state] += 1
            if state in ("done", "partly"):
                rows += _row(paper["name"], entry)
    counted = ", ".join(f"{state} {counts[state]}" for state in _STATES)
    head = f"**Of {counts.total()} tables and figures: {counted}.**"
    meaning = (
        '"Done" is the paper\'s setting at its length with several seeds, or a figure'
        " that needs no training."
    )
    rest = (
        "The others have a study, full and small, in"
        " [studies](../../studies/README.md)."
    )
    return f"\n{head} {meaning}\n\n{_COLUMNS}{rows}\n{rest}\n"


def _row(paper: str, entry: dict[str, Any]) -> str:
    return (
        f"| {paper} | {entry['of']} | {entry['state']} | {entry['why']} |"
        f" [results]({entry['results']}) |\n"
    )
