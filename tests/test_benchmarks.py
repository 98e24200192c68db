"""The benchmarks' arithmetic is correct, and their numbers fit into the page.

They still run with this package.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from tests.support.fast import fast

ROOT = Path(__file__).parents[1]


def test_a_block_of_a_page_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    from measure import write_block

    page = tmp_path / "page.md"
    page.write_text("# Page\n<!-- a -->\nold\n<!-- /a -->\n<!-- b -->\n<!-- /b -->\n")
    write_block(page, "a", "new\n")
    write_block(page, "a", "newer")
    assert (
        page.read_text()
        == "# Page\n<!-- a -->\n\nnewer\n\n<!-- /a -->\n<!-- b -->\n<!-- /b -->\n"
    )
    with pytest.raises(ValueError, match="<!-- c -->"):
        write_block(page, "c", "")


def test_make_bench_runs_programs_that_have_a_place_on_the_page() -> None:
    target = (
        (ROOT / "Makefile")
        .read_text()
        .partition("\nbench:")[2]
        .partition("\nbench-peers:")[0]
    )
    programs = re.findall(r"benchmarks/(\w+)\.py --write ([\w/]+)\.(?:md|yaml)", target)
    assert {"simulation", "fedtan", "startup"} <= {name for name, _ in programs}
    for program, place in programs:
        # The file of the simulation's numbers has its tables among the results.
        at = "benchmarks/results" if program == "simulation" else place
        page = (ROOT / f"{at}.md").read_text()
        assert (
            page.count(f"<!-- {program} -->\n")
            == page.count(f"<!-- /{program} -->\n")
            == 1
        ), program


# The other settings are slower, and two of them read the same images from files.
@pytest.mark.parametrize(
    "setting",
    fast(["mlp-128", "tensors", "hugging-face", "folder-2"], "mlp-128"),
)
@pytest.mark.parametrize("module", ["bare", "ours"])
def test_a_contender_does_its_rounds(tmp_path: Path, module: str, setting: str) -> None:
    import importlib

    from peers.work import SETTINGS, Clock, Job
    from simulation import prepare

    prepare(tmp_path, "", [SETTINGS[setting]])
    clock = Clock(1)
    reached = importlib.import_module(f"peers.{module}").main(
        Job(setting, str(tmp_path), "", 1), clock
    )
    assert len(clock.seconds) == 1
    assert 0 < reached < 0.5  # random images


def test_the_interpreter_of_the_peers_may_be_named_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Makefile uses a relative path, but the contenders run in another folder.

    The link to an interpreter identifies its environment.
    """
    import simulation

    def course_of(peer_python: str) -> simulation.Course:
        given = []

        def measure(setting: str, course: simulation.Course, turns: int):
            given.append(course)
            return simulation.Figures(setting)

        monkeypatch.setattr(simulation, "measure", measure)
        simulation.main(
            turns=1,
            only=["mlp-128"],
            peer_python=peer_python,
            out=tmp_path / "figures.json",
        )
        return given[0]

    (tmp_path / "here").mkdir()
    (tmp_path / "peers").symlink_to(sys.prefix)
    monkeypatch.chdir(tmp_path / "here")
    python = course_of("../peers/bin/python").peer_python
    answer = subprocess.run(
        [python, "-c", "import sys; print(sys.prefix)"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.strip() == str(tmp_path / "peers")
    with pytest.raises(typer.BadParameter, match="no-such-python"):
        course_of("no-such-python")
