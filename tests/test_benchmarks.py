"""The benchmarks' own arithmetic, their places on the page, and that they still run with this package."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]
KINDS = ("constraint", "override")


def test_a_block_of_a_page_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    from measure import write_block

    page = tmp_path / "page.md"
    page.write_text("# Page\n<!-- a -->\nold\n<!-- /a -->\n<!-- b -->\n<!-- /b -->\n")
    write_block(page, "a", "new\n")
    write_block(page, "a", "newer")
    assert page.read_text() == "# Page\n<!-- a -->\n\nnewer\n\n<!-- /a -->\n<!-- b -->\n<!-- /b -->\n"
    with pytest.raises(ValueError, match="<!-- c -->"):
        write_block(page, "c", "")


def test_make_bench_runs_programs_that_have_a_place_on_the_page() -> None:
    target = (ROOT / "Makefile").read_text().partition("\nbench:")[2].partition("\nbench-peers:")[0]
    programs = re.findall(r"benchmarks/(\w+)\.py --write docs/performance\.(?:md|yaml)", target)
    page = (ROOT / "docs/performance.md").read_text()
    assert {"simulation", "fedtan", "aggregation"} <= set(programs)
    for program in programs:
        assert page.count(f"<!-- {program} -->\n") == page.count(f"<!-- /{program} -->\n") == 1, program


def test_the_nightly_flower_is_installed_in_place_of_flwr(tmp_path: Path, monkeypatch) -> None:
    import compat

    asked: dict[str, tuple[list[str], list[str], list[str]]] = {}
    monkeypatch.setattr(compat.subprocess, "run", lambda command, **_: note(command))

    def note(command: list[str]) -> SimpleNamespace:
        lists = (Path(command[command.index(f"--{kind}") + 1]).read_text().split("\n") for kind in KINDS)
        asked[flower] = (command, *lists)
        return SimpleNamespace(returncode=0)

    for flower in ("1.41", "1.42", "nightly"):
        assert compat.install(Path("python"), flower, tmp_path) == ()
    for flower in ("1.41", "1.42"):
        command, constraints, overrides = asked[flower]
        assert any(pin.startswith(f"flwr=={flower}.") for pin in constraints)
        assert (command[-2:], overrides) == (["--editable", f"{ROOT}[lab,dev]"], [""])
    command, constraints, overrides = asked["nightly"]
    assert command[-1] == "flwr-nightly[simulation]>=1.43.0.dev0"
    assert not any(pin.startswith(("flwr==", "uv==")) for pin in constraints)
    assert overrides == ["flwr ; python_version < '0'"]
    rows = [
        "| 3.13.0 | 1.43.0.dev20261026 | 2.15.0 |",
        "| 3.13 | nightly | not installed |",
        "| 3.12.1 | 1.42.0 | 2.15.0 |",
    ]
    assert [compat.pair_of(row) for row in rows] == [("3.13", "nightly"), ("3.13", "nightly"), ("3.12", "1.42")]
    assert ("3.13", "nightly") not in compat.PAIRS, "it runs by name only"


def test_the_ratios_of_the_page_are_those_of_the_figures(tmp_path: Path) -> None:
    import yaml
    from doc_performance import simulation_tables
    from simulation import BARE, IN_PROCESS, IN_RAY, TWO_WORKERS, Figures

    seconds = {BARE: 1.0, IN_PROCESS: 1.5, "fluke": 2.0, TWO_WORKERS: 0.7, f"{BARE}, 2 processes": 0.8, IN_RAY: 9.0}
    of_each = {"version": "1", "cpu_seconds": 3.0, "memory": 1000.0, "accuracy": 0.5}
    figures = Figures("fedbn", {name: [{"seconds": [value], **of_each}] for name, value in seconds.items()})
    (tmp_path / "docs").mkdir()
    data = {"settings": {"fedbn": figures.data("Here.", real_data=True)}}
    (tmp_path / "docs/performance.yaml").write_text(yaml.safe_dump(data))
    tables = simulation_tables(tmp_path)
    assert f"| fedbn: {IN_PROCESS} / {BARE} | 1.50 | 1.00 | <= 1.08 |" in tables
    assert "| fluke | 1 | 2.00 | 2.00 | 3.00 | 1,000 | 0.500 |" in tables
    assert tables.endswith("\n\nHere.")


@pytest.mark.parametrize("module", ["bare", "ours"])
def test_a_contender_does_its_rounds(tmp_path: Path, module: str) -> None:
    import importlib

    from peers.work import SETTINGS, Clock, Job
    from simulation import prepare

    prepare(tmp_path, "", [SETTINGS["mlp-128"]])
    clock = Clock(1)
    reached = importlib.import_module(f"peers.{module}").main(Job("mlp-128", str(tmp_path), "", 1), clock)
    assert len(clock.seconds) == 1
    assert 0 < reached < 0.5  # random images


_REDRAWN = {
    "server/method.py": """
class Travels: ...

class Method:
    name: str
    role: str

    def travels(self): ...
    def advice(self): ...
    def aggregate(self, state, facts, replies, model): ...

class Strategy:
    method: type[Method]
""",
    "strategies/fedavg.py": """
from fedbn_flwr.server.method import Method, Strategy

class FedAvgMethod(Method):
    name = "fedavg"

    def shares(self): ...
""",
    "strategies/mine.py": """
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.server.method import Strategy, Travels
from fedbn_flwr.strategies.fedavg import FedAvgMethod

class Hook:  # at the client: none of its names count
    def advice(self, reply):
        return reply.metrics

class Common(FedAvgMethod):
    def travels(self):
        return Travels(held="statistics")

    def window(self): ...

class MineMethod(Common):
    name = "mine"
    role = "client-hooks"

    def window(self): ...

    def aggregate(self, state, facts, replies, model):
        return facts.parts.select(self.shares(), self.travels(), super().advice(), self.window())

class Mine(Strategy):
    method = MineMethod
""",
}


def test_names_for_a_method_are_those_of_the_interface_that_its_file_mentions(tmp_path: Path) -> None:
    from reading import names_for

    for name, text in _REDRAWN.items():
        file = tmp_path / "fedbn_flwr" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert names_for(tmp_path, tmp_path / "fedbn_flwr/strategies/mine.py") == {
        "defined": {"role", "travels", "aggregate", "method"},
        "imported": {"Strategy", "Travels"},
        "given": {"held"},
        "reached": {"facts.parts", "shares", "advice"},
    }


_TWO_FUNCTIONS = '''def one(a): ...  # why
def two():
    """A docstring."""
    print(*("a", "b"))
'''


def test_lines_of_code_are_told_from_docstrings_and_comments(tmp_path: Path) -> None:
    from reading import Source, style

    file, long = tmp_path / "module.py", "x" * 100
    file.write_text(f'"""{long}\n\nText."""\n\n# {long}\n{_TWO_FUNCTIONS}    return "{long}"\n')
    found = style([Source(file)])
    lines = [found[name] for name in ("code lines", "lines above 100 characters", "comment lines, % of code")]
    assert lines == [4, 1, 25]
    assert [found[name] for name in ("star groups", "function length, median", "function length, longest")] == [1, 2, 3]


def test_the_files_that_a_round_enters_are_found() -> None:
    from reading import files_of_a_round

    found = files_of_a_round(ROOT)
    assert 20 < found["files of a FedAvg round: core"] < found["files of a FedAvg round"]


def test_each_slip_of_the_list_can_be_made() -> None:
    """Its old text is in one place: code that moved takes its slip along."""
    import slips

    wrong = []
    for slip in slips.read_slips():
        try:
            slip.place(ROOT)
        except slips.NotUniqueError as error:
            wrong.append(f"{slip.name}: {error}")
    assert wrong == []


def test_the_terms_of_theorem_1_are_those_of_the_gradients() -> None:
    """Of a network without BatchNorm: B is 0, and the other terms are those of plain gradients of uneven clients."""
    import torch
    from theorem_1 import terms
    from torch import nn
    from torch.nn import functional

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3)).double()
    batches = [(torch.randn(size, 4, dtype=torch.float64), torch.randint(3, (size,))) for size in (6, 2)]
    b, v, gradient = terms(model, batches)
    own = [torch.autograd.grad(functional.cross_entropy(model(x), y), [*model.parameters()]) for x, y in batches]
    flat = [torch.cat([part.flatten() for part in parts]) for parts in own]
    union = 0.75 * flat[0] + 0.25 * flat[1]
    assert b == pytest.approx(0, abs=1e-20)
    assert v == pytest.approx(float(0.75 * (flat[0] - union).square().sum() + 0.25 * (flat[1] - union).square().sum()))
    assert gradient == pytest.approx(float(union.square().sum()))


def test_the_window_rule_is_calibrated_where_the_start_has_left_the_window() -> None:
    """Deltas that fall for ten rounds and then swing by 0.1 around 1: a variance of 0.01."""
    from window_rule import calibrated, picked, variances

    deltas = [3 - 0.2 * k for k in range(10)] + [1.1, 0.9] * 15
    assert variances(deltas, 4)[4] == pytest.approx(0.05)  # 3.0, 2.8, 2.6, 2.4
    assert calibrated(deltas, 4) == pytest.approx(0.01)
    assert picked(deltas, 4, 0.011) == 14, "the first window without a falling delta ends in round 14"
    assert picked(deltas, 4, 0.001) is None
    with pytest.raises(ValueError, match="window of 30"):
        calibrated(deltas, 30)
