"""A new method changes the files that CONTRIBUTING.md lists, and passes its tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkout import ROOT
from tests.support.folders import contents

SECTION = (ROOT / "CONTRIBUTING.md").read_text().split("\n## ")[1]
METHOD = r'''r"""Damped: FedAvg whose server goes a part of the way to the average.

Nobody 2026, "A Toy".

## When

Use when: an example is needed.

Not when: a result is needed.

## Problem

None.

## Algorithm

$x + \delta (\bar x - x)$

## Differs from the paper

There is no paper.

## Law

$\delta = 1$ is FedAvg.
"""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import TypeVar

from fedbn_flwr.batchnorm.array_types import Array
from fedbn_flwr.server.methods.method import Facts, Method, Replies
from fedbn_flwr.server.methods.params import Params, setting
from fedbn_flwr.server.methods.phases import Phase
from fedbn_flwr.server.strategy import Strategy


class DampedParams(Params):
    """Parameters of Damped."""

    damping: float = setting(0.5, "share of the way to the average", gt=0, le=1)


P = TypeVar("P", bound=DampedParams, default=DampedParams)


class DampedMethod(Method[P, None]):
    """FedAvg whose server goes a part of the way to the average."""

    name = "damped"
    summary_line = "the server goes a part of the way to the average"
    source = "a toy"
    Params = DampedParams

    def phases(self) -> Sequence[Phase]:
        """Declare the server step."""
        return (Phase(decides=frozenset({"server step"})),)

    def aggregate(
        self, state: None, facts: Facts, replies: Replies, model: dict[str, Array]
    ) -> tuple[dict[str, Array], None]:
        """Return a point between the model before and the average."""
        for name in facts.stepped:
            before = facts.before[name]
            if before.dtype.kind == "f":
                model[name] = before + self.params.damping * (model[name] - before)
        return model, state


class Damped(Strategy):
    """FedAvg whose server goes a part of the way to the average.

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import Damped
        >>> strategy = Damped(damping=0.25)
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
    """

    method = DampedMethod
'''
TEST = '''"""The law of Damped: a share of 1 is FedAvg."""

from __future__ import annotations

import numpy as np

from fedbn_flwr.strategies import Damped, FedAvg

SIZES = (6, 9)


def test_a_share_of_one_is_fedavg(federate, datasets, mlp) -> None:
    whole, plain = (
        federate(strategy, mlp, datasets, rounds=2).state
        for strategy in (Damped(damping=1.0), FedAvg())
    )
    for name, value in plain.items():
        np.testing.assert_allclose(whole[name], value, atol=1e-12)
'''
RECIPE = """# Damped, 0.5: the server goes half of the way.
#   fedbn-flwr run apps/main/recipes/damped.yaml --out runs/damped
# Digits, 5 clients with two classes each. Reaches 70.00 % on the whole test set (seed 0, CPU, a few seconds).
{strategy: damped, dataset: digits, num-clients: 5, partition: classes, num-server-rounds: 60, local-steps: 5}
"""
REGISTRY = {
    "    from fedbn_flwr.strategies.ditto": (
        "    from fedbn_flwr.strategies.damped import Damped\n"
    ),
    '    "Ditto",\n': '    "Damped",\n',
    "        FedBN,\n": "        Damped,\n",
}
# Generate without the picture, which a browser draws in half a minute.
GENERATE = """
import sys
sys.path.insert(0, "docs/generate")
import doc_tables
doc_tables.draw_report = lambda root: False
sys.exit(doc_tables.main(["."]))
"""
IGNORED = {"__pycache__", "runs", "site", "dist", "build"}


def ignored(folder: str, names: list[str]) -> set[str]:
    """Return the names that are no part of the checkout."""
    hidden = {name for name in names if name.startswith(".") or name in IGNORED}
    return hidden if Path(folder) == ROOT else {"__pycache__"}


def python(folder: Path, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> tuple[Path, set[str]]:
    """Return a copy of the checkout with a new method, and the files that differ."""
    folder = tmp_path_factory.mktemp("new") / "checkout"
    shutil.copytree(ROOT, folder, ignore=ignored)
    before = contents(folder)
    registry = folder / "fedbn_flwr/strategies/__init__.py"
    text = registry.read_text()
    for place, line in REGISTRY.items():
        assert text.count(place) == 1
        text = text.replace(place, line + place)
    registry.write_text(text)
    (folder / "fedbn_flwr/strategies/damped.py").write_text(METHOD)
    (folder / "tests/strategies/test_damped.py").write_text(TEST)
    (folder / "apps/main/recipes/damped.yaml").write_text(RECIPE)
    with (folder / "CHANGELOG.md").open("a") as changelog:
        changelog.write("- Damped\n")
    python(folder, "-c", GENERATE)
    after = contents(folder)
    return folder, {name for name in after if after[name] != before.get(name)}


def test_a_new_method_changes_the_listed_files(checkout) -> None:
    _, differ = checkout
    listed = re.findall(r"^\d\. (.*(?:\n   [^-].*)*)", SECTION, re.MULTILINE)
    by_hand = [re.match(r"`([^`]+)`: ", item)[1] for item in listed[:-1]]
    made = re.findall(r"`([^` ]+)`", listed[-1].partition(": ")[2])
    assert {name.replace("damped", "NAME") for name in differ} == {*by_hand, *made}
    assert len(by_hand) == 5


@pytest.mark.slow
def test_a_new_method_passes_the_named_tests(checkout) -> None:
    folder, _ = checkout
    (named,) = re.findall(r"`pytest ([^`]+)`", SECTION)
    tests = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *named.split()]
    python(folder, *tests)
