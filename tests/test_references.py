"""Citations have the numbers, authors, years and titles of references.yaml."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.checkout import ROOT

PAPERS = yaml.safe_load((ROOT / "docs/references.yaml").read_text())["papers"]
KINDS = ("*.md", "*.py", "*.yaml", "*.cff", "*.toml")
FOLDERS = ("apps", "benchmarks", "docs", "fedbn_flwr", "studies", "tests")
NUMBER = r"arXiv:(?P<number>\d{4}\.\d{5})"
NAMED = re.compile(
    r"(?P<first>[A-Z][a-z][\w-]*)(?P<others>(?: et al\.|(?:(?:,| &) [A-Z][\w'-]+)+)?)"
    r",? (?P<year>20\d\d|19\d\d)[ab]?,?"
    r'(?: "(?P<title>[^"]+)",)?(?: [A-Z][A-Za-z]+,(?: PMLR [\d:-]+,)?)? ' + NUMBER
)


def texts() -> Iterator[tuple[str, str]]:
    """Yield the name of each text file of the project, and its text on one line."""
    files = [*ROOT.glob("*.md"), *ROOT.glob("*.cff"), *ROOT.glob("*.toml")]
    for folder in FOLDERS:
        files += [path for kind in KINDS for path in (ROOT / folder).rglob(kind)]
    for path in files:
        if path != Path(__file__):
            yield (
                str(path.relative_to(ROOT)),
                re.sub(r"\n# |\s+", " ", path.read_text()),
            )


def wrong_numbers(text: str) -> list[str]:
    """Return the arXiv numbers of a text that no known paper has.

    Numbers that are written differently are included.
    """
    found = re.findall(r"(?i)(arxiv[^\d\w]{0,3}(?:abs/)?)(\d{4}\.\d{4,5})", text)
    wrong = []
    for before, number in found:
        if before not in ("arXiv:", "arxiv.org/abs/") or number not in PAPERS:
            wrong.append(before + number)
    return wrong


def wrong_names(text: str) -> list[str]:
    """Return the citations of a text that disagree with the paper of their number.

    They disagree in the authors, year or title.
    """
    wrong = []
    for cited in NAMED.finditer(text):
        paper = PAPERS[cited["number"]]
        authors = paper["authors"].split(", ")
        named = [cited["first"], *re.findall(r"[A-Z][\w'-]+", cited["others"])]
        short = cited["others"] in ("", " et al.")
        same = named == (authors[:1] if short else authors)
        year = int(cited["year"]) == paper["year"]
        if not same or not year or cited["title"] not in (None, paper["title"]):
            wrong.append(cited[0])
    return wrong


@pytest.mark.parametrize("wrong", [wrong_numbers, wrong_names])
def test_a_citation_is_of_a_known_paper_with_its_authors_year_and_title(wrong) -> None:
    for name, text in texts():
        assert wrong(text) == [], name
