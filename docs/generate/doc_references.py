"""The page of the papers that the project cites, from ``docs/references.yaml``."""

from __future__ import annotations

from pathlib import Path

import yaml

__all__ = ["references_page"]

_HEAD = """# Papers cited

Every paper that this project cites by its arXiv number, from [references.yaml](references.yaml). A number, and the
authors, year and title beside it, are the same everywhere in the project: a test compares them. "Compared with" says
how the entry itself was checked, in November 2026: in the reference lists of the papers of FedTAN, FixBN, FedWon and
FedBS, or on public pages that name number and title.

| authors | year | title | number | at | compared with |
|---|---|---|---|---|---|
"""


def references_page(root: Path) -> str:
    """Return the text of ``docs/references.md``."""
    papers = yaml.safe_load((root / "docs/references.yaml").read_text(encoding="utf-8"))["papers"]
    rows = []
    for number, paper in sorted(papers.items(), key=lambda item: (item[1]["authors"], item[1]["year"])):
        link = f"[{number}](https://arxiv.org/abs/{number})"
        cells = [paper["authors"], str(paper["year"]), paper["title"], link, paper.get("at", ""), paper["checked"]]
        rows.append(f"| {' | '.join(cells)} |\n")
    return _HEAD + "".join(rows)
