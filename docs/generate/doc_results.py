"""The list of results by group: each page of the site's menu with the finding that it opens with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import yaml

__all__ = ["finding_of", "results_list"]

_PAGE = re.compile(r"(?:<!--.*?-->\s*)?# (.+)\n\n\*\*(.+?)\*\*\n\n", re.DOTALL)


def finding_of(text: str) -> tuple[str, str]:
    """Return the title of a page of results, and the finding that stands in bold below it, on one line.

    Raises:
        LookupError: the page has no finding below its title.
    """
    found = _PAGE.match(text)
    if found is None:
        start = text[:60].partition("\n")[0]
        raise LookupError(f"the page {start!r} needs its finding, in bold, in a paragraph of its own below the title")
    return found[1], " ".join(found[2].split())


def results_list(root: Path, made: Mapping[Path, str]) -> str:
    """Return a table of each group of results in the menu of the site: the page and its finding.

    Args:
        root: the checkout.
        made: the texts of pages that are derived, too, by path.
    """
    menu = yaml.safe_load((root / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    results = next(entry["Results"] for entry in menu if "Results" in entry)
    lines = []
    for entry in (entry for entry in results if isinstance(entry, dict)):
        for group, pages in entry.items():
            if isinstance(pages, list):
                lines += ["", f"## {group}", "", "| question | finding |", "|---|---|"]
                for path in (Path("docs") / path for page in pages for path in page.values()):
                    text = made[path] if path in made else (root / path).read_text(encoding="utf-8")
                    title, finding = finding_of(text)
                    lines.append(f"| [{title}]({path.name}) | {finding} |")
    return "\n".join(lines[1:])
