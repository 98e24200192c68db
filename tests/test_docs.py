"""The code of the documentation runs, and its tables and links are correct."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from pathlib import Path, PurePosixPath

import pytest
import yaml
from doc_methods import page_of
from doc_tables import changed, main
from pages import FOLDER, Block, blocks, missing, pages, shown_after, written

import fedbn_flwr
from fedbn_flwr.lab.studies.check_study import load_study
from fedbn_flwr.norms import NORMS
from fedbn_flwr.strategies import STRATEGIES
from tests.reference.methods import REFERENCES
from tests.support.checkout import ROOT
from tests.support.fast import fast
from tests.support.folders import contents

PAGES = [*pages(), ROOT / "AGENTS.md"]
RECORDED = yaml.safe_load((ROOT / "docs/results/methods.yaml").read_text())
ARCHITECTURE = (ROOT / "docs/add-a-strategy.md").read_text()


BLOCKS = blocks()
NOTEBOOK = json.loads((ROOT / "docs/quickstart.ipynb").read_text())["cells"]
CELLS = [cell for cell in NOTEBOOK if cell["cell_type"] == "code"]
NOTEBOOK_CODE = "\n".join("".join(cell["source"]) for cell in CELLS)


def to_run(language: str) -> list[Block]:
    return [
        block for block in BLOCKS if block.language == language and not block.reason
    ]


CHAINED = ("docs/guides/", "docs/new-site.md")
"""The pages whose later blocks continue an earlier block."""


def shell_scripts() -> list[Block]:
    """Return the blocks to run, with the blocks of such a page as one script.

    A command that occurs in several blocks of single commands runs once.
    """
    found = {}
    seen = set()
    for block in to_run("sh"):
        lines = block.text.splitlines()
        if all(
            line.startswith("fedbn-flwr ") and not line.endswith("\\") for line in lines
        ):
            block = replace(
                block, text="".join(f"{line}\n" for line in lines if line not in seen)
            )
            seen |= set(lines)
            if not block.text:
                continue
        key = block.page if block.page.startswith(CHAINED) else block
        before = found.get(key)
        found[key] = replace(before, text=before.text + block.text) if before else block
    return list(found.values())


SAID = {"capture_output": True, "text": True, "check": False, "timeout": 120}


@pytest.fixture
def folder(tmp_path) -> Iterator[Path]:
    """Provide a folder whose documentation paths lead into the checkout.

    The programs of the documentation write nothing outside ``runs``.
    """
    for name in ("apps", "docs", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    yield tmp_path
    assert {path.name for path in tmp_path.iterdir() if not path.is_symlink()} <= {
        FOLDER
    }


def test_every_block_is_run_or_says_why_not() -> None:
    assert {block.language for block in BLOCKS} <= {
        "sh",
        "python",
        "yaml",
        "toml",
        "text",
        "diff",
        "command",
    }
    assert to_run("python")
    assert to_run("sh")


@pytest.mark.parametrize("block", to_run("python"), ids=str)
def test_python(block: Block, folder, at_once) -> None:
    done = subprocess.run(["python", "-c", block.text], cwd=folder, env=at_once, **SAID)
    assert done.returncode == 0, done.stderr
    if shown := shown_after(block, BLOCKS):
        assert missing(shown, done.stdout) == []
    elif "print(" in block.text:
        assert 0.5 < float(done.stdout.split()[-1]) <= 1, "the accuracy it prints"


SCRIPTS = shell_scripts()
# Three commands, a run with its report, and a guide with code of its own. The other
# scripts run for long; `make slow` and `make pages` run them.
QUICK = ("docs/get-started.md", "docs/guides/own-data.md")
QUICK_SCRIPTS = [script for script in SCRIPTS if script.page in QUICK]


@pytest.mark.parametrize("block", fast(SCRIPTS, *QUICK_SCRIPTS), ids=str)
def test_shell(block: Block, folder, at_once) -> None:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text], cwd=folder, env=at_once, **SAID
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    for one in BLOCKS:
        if one.page == block.page and one.text in block.text:
            assert missing(shown_after(one, BLOCKS), said) == []


def test_what_pages_write_lies_in_one_folder_and_no_two_pages_share_a_part() -> None:
    """Exceptions are files within containers, of Flower, and Docker's ``.env``."""
    owners = set()
    for page in PAGES:
        for path in written(page.read_text()):
            if path.startswith(("/state/", "~/.flwr")) or path == "env":
                continue
            assert path.startswith(f"{FOLDER}/"), (page, path)
            owners.add((PurePosixPath(path), page))
    assert len(owners) > 40
    for (one, of_one), (other, of_other) in permutations(owners, 2):
        if of_one != of_other:
            assert not one.is_relative_to(other), (one, of_one, of_other)


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", text)]


ALL_ROUNDS = 30


@pytest.mark.parametrize("rounds", fast([1, ALL_ROUNDS], 0))
def test_the_notebook_prints_what_it_shows_and_draws_two_pictures(
    rounds: int, folder, at_once
) -> None:
    """After one round, it prints as many numbers."""
    shown = [out for cell in CELLS for out in cell["outputs"]]
    printed = "".join("".join(out.get("text", "")) for out in shown)
    assert sum("image/png" in out.get("data", {}) for out in shown) == 2
    assert len(NOTEBOOK) <= 17

    code = f"{NOTEBOOK_CODE}\nprint(len(plt.get_fignums()))"
    before, after = code.split(f"ROUNDS = 5, {ALL_ROUNDS}\n")
    code = f"{before}ROUNDS = 5, {rounds}\n{after}"
    env = {**at_once, "MPLBACKEND": "Agg"}
    done = subprocess.run(["python", "-c", code], cwd=folder, env=env, **SAID)
    assert done.returncode == 0, done.stderr
    *said, pictures = numbers(done.stdout)
    shown_numbers = numbers(printed)
    assert len(said) == len(shown_numbers)
    if rounds == ALL_ROUNDS:
        # Another processor rounds differently.
        assert said == pytest.approx(shown_numbers, rel=0.05, abs=0.02)
    assert pictures == 2


def test_the_page_of_projects_has_each_method_and_each_diff() -> None:
    """``tests/apps/test_projects.py`` applies and runs each diff.

    A page shows a diff or links to its file. A method without a reference needs no row
    in the table, since CONTRIBUTING does not name the page.
    """
    shown = {block.text for block in BLOCKS if block.language == "diff"}
    files = {path.read_text(): path for path in (ROOT / "apps").rglob("*.diff")}
    assert len(shown) > 2
    assert shown <= files.keys()
    page = (ROOT / "docs/flower-projects.md").read_text()
    for text in files.keys() - shown:
        assert f"](../{files[text].relative_to(ROOT)})" in page
    table = page.partition("\n## All methods\n")[2].partition("\n## ")[0]
    for name in REFERENCES:
        assert f"`{STRATEGIES[name].__name__}" in table


def test_nothing_derived_is_stale() -> None:
    assert list(changed(ROOT)) == [], "run: make generate"
    page = (ROOT / "docs/methods/index.md").read_text()
    for name in STRATEGIES:
        assert f"[`{name}`]({page_of(name)})" in page
    for name in NORMS:
        assert f"| `{name}` |" in page


def test_what_a_method_reached_stands_in_the_results() -> None:
    assert set(RECORDED["methods"]) <= set(STRATEGIES)
    for rows in RECORDED["methods"].values():
        for row in rows:
            assert row["study"] in RECORDED["studies"]
            study = RECORDED["studies"][row["study"]]
            assert ("here" in row) == ("how" in study) == ("page" in study), row
            if "here" in row:
                page = ROOT / "docs/results" / study["page"].partition("#")[0]
                assert str(row["here"]) in page.read_text(), row


STUDIES = [
    path
    for path in sorted((ROOT / "docs/results").glob("*.yaml"))
    if "\nmethods:" in path.read_text() and path.name != "methods.yaml"
]


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_a_study_beside_the_results_has_only_keys_and_methods_that_exist(
    path: Path,
) -> None:
    assert load_study(path).methods


def test_the_numbers_of_the_advice_are_recorded() -> None:
    """A row of the table has a first choice, and gains as ``78.5 -> 94.4 (setting)``."""
    recorded = defaultdict[tuple[str, str], set[str]](set)
    for method, rows in RECORDED["methods"].items():
        for row in rows:
            value = str(row.get("here")).split(" ")[0]
            recorded[method, value].add(row["study"])
    table = (ROOT / "docs/choose.md").read_text().split("\n## ")[0]
    gains = 0
    for line in re.findall(r"^\| \[.*?\| `strategy=.*", table, re.MULTILINE):
        method = line.partition("strategy=")[2].split("`")[0].split()[0]
        for before, after in re.findall(r"([\d.]+) -> ([\d.]+) \(", line):
            ours = recorded[method, after]
            assert ours & recorded["fedavg", before], f"no study: {before} -> {after}"
            gains += 1
    assert gains > 4


def test_generate_mends_what_is_stale(tmp_path, capsys) -> None:
    for name in ("README.md", "pyproject.toml", "mkdocs.yml"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("docs", "apps/main/recipes", "studies", "benchmarks"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("strategies/constructors.pyi", "lab/config/generated_keys.md"):
        made = tmp_path / "fedbn_flwr" / name
        made.parent.mkdir(parents=True)
        shutil.copy(ROOT / "fedbn_flwr" / name, made)
    (tmp_path / "pyproject.toml").write_text(
        (ROOT / "pyproject.toml").read_text().replace("\nseed = 0", "\nseed = 1")
    )
    (tmp_path / "docs/methods/fedtan.md").unlink()
    (tmp_path / "docs/methods/gone.md").write_text("a method that is no more")
    assert main([str(tmp_path), "--check"]) == 1
    stale = capsys.readouterr().out
    assert main([str(tmp_path)]) == 0
    assert sorted(stale.splitlines()) == [
        "3 derived files are stale. Run `make generate`.",
        "stale: docs/methods/fedtan.md",
        "stale: docs/methods/gone.md",
        "stale: pyproject.toml",
    ]
    assert capsys.readouterr().out.endswith(
        "3 derived files have changed; all are up to date.\n"
    )
    for name in ("pyproject.toml", "docs/methods/fedtan.md"):
        assert (tmp_path / name).read_text() == (ROOT / name).read_text()
    assert not (tmp_path / "docs/methods/gone.md").exists()
    # Nothing is changed if a file cannot be made, here a page without marks.
    (tmp_path / "docs/config.md").write_text("stale")
    (tmp_path / "README.md").write_text("no marks")
    found = contents(tmp_path)
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith("Nothing is changed: ValueError in ")
    assert found == contents(tmp_path)


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
            found = target.startswith("https://") or (page.parent / target).exists()
            assert found, (page, target)


MODULES = sorted((ROOT / "fedbn_flwr").rglob("*.py"))


def test_what_is_named_exists() -> None:
    """The test checks paths in code quotes, from the root of the repository."""
    named = r"`((?:fedbn_flwr|tests|apps|docs|benchmarks|studies)/[\w./-]+)`(?!\s+of\s+commit)"
    makefile = (ROOT / "Makefile").read_text()
    targets = {line.partition(":")[0] for line in makefile.splitlines()}
    for page in [*PAGES, *MODULES]:
        text = page.read_text()
        for name in re.findall(named, text):
            assert "NAME" in name or (ROOT / name).exists(), (page, name)
        for target in re.findall(r"^make ([\w-]+)", text, re.MULTILINE):
            assert target in targets, (page, target)


def test_the_site_has_every_page_and_the_reference_every_public_name() -> None:
    site = (ROOT / "mkdocs.yml").read_text()
    for page in PAGES:
        if page.is_relative_to(ROOT / "docs"):
            assert f"{page.relative_to(ROOT / 'docs')}\n" in site, (
                "a page that is not in the site's nav"
            )
    pages = "\n".join(
        page.read_text() for page in (ROOT / "docs/reference").glob("*.md")
    )
    shown = set(re.findall(r"^::: ([\w.]+)$", pages, re.MULTILINE))
    for strategy in STRATEGIES.values():
        assert f"fedbn_flwr.strategies.{strategy.__name__}" in shown
    for name in fedbn_flwr.__all__:
        assert {
            f"fedbn_flwr.{name}",
            getattr(fedbn_flwr, name).__module__,
        } & shown, name
    for name in shown:
        module, _, attribute = name.rpartition(".")
        there = attribute in dir(importlib.import_module(module))
        assert there or importlib.util.find_spec(name), name


def test_no_path_of_one_machine() -> None:
    for page in PAGES:
        assert not re.search(r"/(home|Users|root|work|tmp)/", page.read_text()), page


def test_the_architecture_names_files_and_functions_that_are_there() -> None:
    """Each name of code in a step's line is in the file of the step."""
    steps = re.findall(
        r"^\d+\. `([a-z_/]+\.py)`[^:]*: (.*(?:\n   .*)*)", ARCHITECTURE, re.MULTILINE
    )
    assert len(steps) == 6, "the round is printed from the source"
    for file, text in steps:
        source = (ROOT / "fedbn_flwr" / file).read_text()
        for name in re.findall(r"`([\w.]+)`", text):
            if not name.endswith("py"):
                assert name.rpartition(".")[2] in source, (file, name)
