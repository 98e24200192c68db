"""The page of the papers' tables and figures, from ``docs/results/papers.yaml`` and the heads of the studies."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

__all__ = ["head_of", "papers_page"]

_HEAD = """
What of the four papers was repeated here. "Done" is the paper's setting at its length with several seeds, or a figure
that needs no training; "partly" says what is missing; a study that was not run is there and can be: its time is for two
cores, and its small twin asks the same question in a shorter run ([studies](../../studies/README.md)). Made from
[papers.yaml](papers.yaml) and the studies.
"""
_COLUMNS = "| shows | question | state | what and why | study | results |\n|---|---|---|---|---|---|\n"


def head_of(study: Path) -> str:
    """Return the comment at the top of a study, on one line."""
    lines = study.read_text(encoding="utf-8").splitlines()
    return " ".join(line.removeprefix("# ") for line in lines if line.startswith("# "))


def papers_page(root: Path) -> str:
    """Return the text of ``docs/results/papers.md``."""
    papers = yaml.safe_load((root / "docs/results/papers.yaml").read_text(encoding="utf-8"))["papers"]
    every = [entry for paper in papers for entry in paper["shows"]]
    counts = Counter(entry.get("state", "nothing to run") for entry in every)
    order = ("done", "partly", "not run", "nothing to run")
    counted = ", ".join(f"{state} {counts[state]}" for state in order)
    text = f"# Every table and figure of the papers\n\n**Of {len(every)} tables and figures: {counted}.**\n{_HEAD}"
    for paper in papers:
        text += f"\n## {paper['name']}\n\n{_COLUMNS}"
        for entry in paper["shows"]:
            text += f"| {' | '.join(_cells(entry, root / 'studies'))} |\n"
    return text


def _cells(entry: dict[str, Any], folder: Path) -> list[str]:
    named = entry.get("study", [])
    studies = [named] if isinstance(named, str) else named
    heads = [head_of(folder / f"{study}.yaml") for study in studies]
    question = _question(heads[0]) if heads else ""
    why = [entry["why"]] if "why" in entry else []
    if entry.get("state") == "not run":
        why += [found[1] for head in heads if (found := re.search(r"Time: .*?(some \d+ \w+) on two cores", head))]
    to = "../../studies"
    links = [f"[{study}]({to}/{study}.yaml), [small]({to}/{study}-small.yaml)" for study in studies]
    result = f"[results]({entry['results']})" if "results" in entry else ""
    return [entry["of"], question, entry.get("state", "-"), "; ".join(why), "; ".join(links), result]


def _question(head: str) -> str:
    """Return what a study asks: the first sentence behind its title."""
    found = re.search(r"^[^:]*(?:arXiv:[\d.]+)?[^:]*?\)?: (.+?(?:\?|(?<!Fig)\.))(?: |$)", head)
    return found[1][0].upper() + found[1][1:] if found else ""
