"""Each file of a paper's study can run, names its command, and has a twin."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedbn_flwr.lab.studies.check_study import load_study
from tests.support.fast import thinned

FOLDER = Path(__file__).parents[3] / "studies"
FULL = sorted(
    path for path in FOLDER.glob("*.yaml") if not path.stem.endswith("-small")
)
# training examples of the smallest domain
OF_A_DOMAIN = {"digits-five": 7438, "office-caltech10": 112}
# as many rounds, tuned
LONGER = {
    "fedwon-table-1-office-small",
    "fedwon-office-agc-small",
    "fedwon-table-2-small",
}
SIZES = {
    "imagenet": 1281167,
    "tiny-imagenet": 100000,
    "studies.cityscapes:city": 2975,
    "studies.cityscapes:small": 2975,
    "office-caltech10": 2021,
}


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(path.read_text())
    return {"splits": {"all": {}}, "skip": [], "seeds": [0], **content}


def checked(path: Path, tmp_path: Path) -> None:
    """Load each method and each split once, with the first seed.

    Other cells have the same keys. This checks that every key is known and has an
    effect, and that `paper` and `skip` name runs.
    """
    content = read(path)
    names = [
        name
        for name in itertools.product(content["methods"], content["splits"])
        if "/".join(name) not in content["skip"]
    ]
    methods, splits, chosen = set(content["methods"]), set(content["splits"]), []
    for method, split in names:
        if method in methods or split in splits:
            chosen.append((method, split))
        methods.discard(method)
        splits.discard(split)
    assert not methods | splits, "a method or split that is never run"
    for method, split in names:
        settings = {
            **content["base"],
            **content["splits"][split],
            **content["methods"][method],
        }
        assert settings.get("domain-share", 1) <= OF_A_DOMAIN.get(
            settings["dataset"], 1
        ), f"{method}/{split}"
    left_out = ["/".join(name) for name in names if name not in chosen]
    thin = {
        **content,
        "seeds": content["seeds"][:1],
        "skip": content["skip"] + left_out,
    }
    (tmp_path / path.name).write_text(yaml.safe_dump(thin, sort_keys=False))
    load_study(tmp_path / path.name)


def examples(path: Path) -> float:
    """Return the approximate training examples of all runs."""
    content, total = read(path), 0.0
    for split, of_split in content["splits"].items():
        for method, of_method in content["methods"].items():
            c = {**content["base"], **of_split, **of_method}
            clients = c["num-clients"] * c.get("fraction-train", 1)
            whole = (
                5 * c["domain-share"]
                if "domain-share" in c
                else SIZES.get(c["dataset"], 50000)
            )
            epochs = c.get("local-epochs", 0) * whole * c.get("fraction-train", 1)
            once = c["num-server-rounds"] * (
                c.get("local-steps", 0) * c["batch-size"] * clients or epochs
            )
            total += once * (f"{method}/{split}" not in content["skip"])
    return total * len(content["seeds"])


def head_of(path: Path) -> str:
    return " ".join(
        line.removeprefix("# ")
        for line in path.read_text().splitlines()
        if line.startswith("# ")
    )


@pytest.mark.parametrize("full", thinned(FULL), ids=lambda path: path.stem)
def test_a_study_can_run_says_how_and_has_a_small_twin(
    full: Path, tmp_path: Path
) -> None:
    small = full.with_name(f"{full.stem}-small.yaml")
    for path in (full, small):
        checked(path, tmp_path)
        command = (
            rf"^#   fedbn-flwr sweep studies/{path.name}( --set data-dir=FOLDER)? --out"
            rf" runs/{path.stem}$"
        )
        assert re.search(command, path.read_text(), re.MULTILINE)
        assert f"]({path.name})" in (FOLDER / "README.md").read_text()
    for word in ("Expected: ", "Open in the paper, chosen here: ", "Time: "):
        assert word in head_of(full)
    for word in (
        f"What differs from {full.name}: ",
        "Expected: ",
        "The paper's numbers",
    ):
        assert word in head_of(small)
    assert examples(small) < examples(full)


@pytest.mark.parametrize("full", FULL, ids=lambda path: path.stem)
def test_the_time_of_a_study(full: Path) -> None:
    """The head of a study counts its runs and gives the same time as the page.

    A small study takes an hour at most.
    """
    page = (FOLDER / "README.md").read_text()
    for path, about in (
        (full, "some"),
        (full.with_name(f"{full.stem}-small.yaml"), "about"),
    ):
        found = re.search(
            rf"Time: (\d+) runs.*?, {about} ((\d+) (minutes|hours|days)) on two cores",
            head_of(path),
        )
        assert found, "no time"
        runs, time, number, unit = found.groups()
        content = read(path)
        pairs = len(content["methods"]) * len(content["splits"]) - len(content["skip"])
        assert int(runs) == pairs * len(content["seeds"])
        assert (
            path == full
            or path.stem in LONGER
            or (unit == "minutes" and int(number) <= 60)
        )
        row = next(
            line
            for line in page.splitlines()
            if f"[{full.stem}]({full.name}) | [small]" in line
        )
        assert row.split(" | ")[5 if path == full else 6] == time


def test_each_study_has_a_name_of_its_own() -> None:
    names = [read(path)["name"] for path in FOLDER.glob("*.yaml")]
    assert sorted(names) == sorted(set(names))


def test_a_head_that_names_t_star_has_a_method_that_freezes() -> None:
    for path in FULL:
        methods = {settings["strategy"] for settings in read(path)["methods"].values()}
        assert "T* = R/2" not in head_of(path) or methods & {
            "fixbn",
            "fedtan2",
        }, path.name


PAPERS = yaml.safe_load((FOLDER.parent / "docs/results/papers.yaml").read_text())[
    "papers"
]
CAPTIONS = {
    "FedTAN": {"Fig.": range(1, 15), "Table": range(1, 6)},
    "FixBN": {"Fig.": [*range(1, 7), *"GHIJKLMN"], "Table": [*range(1, 6), *"FGHI"]},
    "FedWon": {"Fig.": range(1, 7), "Table": range(1, 7)},
    "FedBS": {"Fig.": range(1, 7), "Table": []},
}


SHOWN = [*itertools.chain.from_iterable(paper["shows"] for paper in PAPERS)]


def studies_of(entry: dict[str, Any]) -> list[str]:
    named = entry.get("study", [])
    return [named] if isinstance(named, str) else named


def test_every_table_and_figure_of_the_papers_is_listed_once() -> None:
    listed = {}
    for paper in PAPERS:
        listed[paper["name"]] = [entry["of"] for entry in paper["shows"]]
    for paper, kinds in CAPTIONS.items():
        expected: list[str] = []
        for kind, numbers in kinds.items():
            expected += [f"{kind} {number}" for number in numbers]
        assert sorted(listed.pop(paper)) == sorted(expected)
    assert not listed


def results_of() -> dict[str, str]:
    """Return the last cell of each study's row on the page, by study."""
    page, cells = (FOLDER / "README.md").read_text(), {}
    for path in FULL:
        row = next(
            line
            for line in page.splitlines()
            if f"[{path.stem}]({path.name}) | [small]" in line
        )
        cells[path.stem] = row.removesuffix(" |").split(" | ")[7]
    return cells


def test_the_state_of_a_table_or_figure_is_that_of_its_studies() -> None:
    """A study without results in its row of the page is not run."""
    cells = results_of()
    for entry in SHOWN:
        state, results = entry.get("state"), [cells[name] for name in studies_of(entry)]
        if results:
            expected = "not run"
            if any(cell != "not run" for cell in results):
                expected = "partly"
            if all(cell.startswith("full, [seeds") for cell in results):
                expected = "done"
            assert state == expected, entry["of"]
        assert ("results" in entry) == (state in ("done", "partly")), entry["of"]
        assert "why" in entry or state == "not run", entry["of"]


def test_every_study_is_of_a_table_or_figure_or_asks_what_our_results_raise() -> None:
    listed: set[str] = set()
    for entry in SHOWN:
        listed.update(studies_of(entry))
    ours = (
        (FOLDER / "README.md")
        .read_text()
        .partition("Questions that our results raise")[2]
    )
    for path in FULL:
        assert (path.stem in listed) != (f"]({path.name}) | [small]" in ours), path.name


def test_every_small_twin_has_its_study() -> None:
    assert {path.stem for path in FOLDER.glob("*-small.yaml")} == {
        f"{path.stem}-small" for path in FULL
    }


# longer than two rounds
