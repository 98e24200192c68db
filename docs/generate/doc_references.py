"""The page of the papers that the project cites, from ``docs/references.yaml``."""

from __future__ import annotations

from pathlib import Path

import yaml

__all__ = ["references_page"]

_HEAD = """# Papers cited

Every paper that this project cites by its arXiv number, from [references.yaml](references.yaml), which says how each
entry was checked. A number, authors, year and title are the same everywhere in the project: a test compares them.

| authors | year | title | number |
|---|---|---|---|
"""


def references_page(root: Path) -> str:
    """Return the text of ``docs/references.md``."""
    papers = yaml.safe_load(
        (root / "docs/references.yaml").read_text(encoding="utf-8")
    )["papers"]
    rows = []
    for number, paper in sorted(
        papers.items(), key=lambda item: (item[1]["authors"], item[1]["year"])
    ):
        link = f"[{number}](https://arxiv.org/abs/{number})"
        cells = [paper["authors"], str(paper["year"]), paper["title"], link]
        rows.append(f"| {' | '.join(cells)} |\n")
    return _HEAD + "".join(rows)
