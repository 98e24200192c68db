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
    assert {"simulation", "fedtan", "aggregation"} <= {name for name, _ in programs}
    for program, place in programs:
        page = (ROOT / f"{place}.md").read_text()
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


def test_each_slip_of_the_list_can_be_made() -> None:
    """The old text of a slip occurs in one place; code that moved needs an update."""
    import slips

    wrong = []
    for slip in slips.read_slips():
        try:
            slip.place(ROOT)
        except slips.NotUniqueError as error:
            wrong.append(f"{slip.name}: {error}")
    assert wrong == []


def test_the_terms_of_theorem_1_are_those_of_the_gradients() -> None:
    """Without BatchNorm, B is 0, and the other terms are plain gradients.

    The clients are uneven.
    """
    import torch
    from theorem_1 import terms
    from torch import nn
    from torch.nn import functional

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3)).double()
    batches = [
        (torch.randn(size, 4, dtype=torch.float64), torch.randint(3, (size,)))
        for size in (6, 2)
    ]
    b, v, gradient = terms(model, batches)
    own = [
        torch.autograd.grad(
            functional.cross_entropy(model(x), y), [*model.parameters()]
        )
        for x, y in batches
    ]
    flat = [torch.cat([part.flatten() for part in parts]) for parts in own]
    union = 0.75 * flat[0] + 0.25 * flat[1]
    assert b == pytest.approx(0, abs=1e-20)
    assert v == pytest.approx(
        float(
            0.75 * (flat[0] - union).square().sum()
            + 0.25 * (flat[1] - union).square().sum()
        )
    )
    assert gradient == pytest.approx(float(union.square().sum()))


def test_the_window_rule_is_calibrated_where_the_start_has_left_the_window() -> None:
    """Deltas fall for ten rounds, and swing by 0.1 around 1 with variance 0.01."""
    from window_rule import calibrated, picked, variances

    deltas = [3 - 0.2 * k for k in range(10)] + [1.1, 0.9] * 15
    assert variances(deltas, 4)[4] == pytest.approx(0.05)  # 3.0, 2.8, 2.6, 2.4
    assert calibrated(deltas, 4) == pytest.approx(0.01)
    assert picked(deltas, 4, 0.011) == 14, (
        "the first window without a falling delta ends in round 14"
    )
    assert picked(deltas, 4, 0.001) is None
    with pytest.raises(ValueError, match="window of 30"):
        calibrated(deltas, 30)


def test_the_names_of_a_methods_file_are_what_it_imports_and_overrides() -> None:
    """The names in FedBN's file were counted by hand."""
    from reading import imported, overrides

    file = ROOT / "fedbn_flwr/strategies/fedbn.py"
    assert imported(file) == {"BATCHNORM", "Method", "Strategy", "Travels"}
    assert overrides(ROOT, file) == {"role", "travels"}


@pytest.mark.slow
def test_a_round_of_fixbn_enters_its_freeze_and_not_what_comes_before() -> None:
    """Round 2 of 3 is the first frozen round, and Flower's ``start`` precedes it."""
    from reading import entered

    # FILE:LINE NAME, without the line
    calls: dict[str, set[tuple[str, str]]] = {}
    for part, places in entered(ROOT, "fixbn").items():
        calls[part] = set()
        for place in places:
            calls[part].add((place.partition(":")[0], place.rpartition(" ")[2]))
    freeze = ("training/freezing.py", "force_eval")
    aggregate = ("server/strategy.py", "aggregate_train")
    assert {freeze, aggregate} <= calls["a round"] - calls["before round 1"]
    start = ("server/strategy.py", "start")
    assert start in calls["before round 1"] - calls["a round"]
