"""The example in the docstring of each public class and function runs."""

from __future__ import annotations

import doctest
import importlib
import logging
from collections.abc import Iterator

import pytest

import fedbn_flwr
from fedbn_flwr import mods
from fedbn_flwr.strategies import STRATEGIES

PUBLIC = {
    **{name: getattr(fedbn_flwr, name) for name in fedbn_flwr.__all__},
    **{name: getattr(mods, name) for name in ("bn_mod", "bn_rules")},
    **{kind.__name__: kind for kind in STRATEGIES.values()},
}
WITHOUT = {
    "LegacyStrategy": "the class is to_legacy",
    "global_state": "the folder of a run",
    "personal_state": "the folder of a run",
    "to_client_fn": "docs/flower-projects.md",
    "unwrap": "a compiled model",
}


@pytest.fixture(scope="module")
def names() -> Iterator[dict]:
    """Yield the names that the example of InProcessGrid defines.

    The other examples use them.
    """
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    known = {}
    run("InProcessGrid", known)
    yield known
    logging.disable(before)


def run(name: str, known: dict) -> None:
    text = PUBLIC[name].__doc__
    found = doctest.DocTestParser().get_doctest(text, known, name, None, None)
    shown = any(example.want for example in found.examples)
    assert shown or name == "bn_rules", f"{name} has no example with a result"
    runner = doctest.DebugRunner(optionflags=doctest.ELLIPSIS)
    runner.run(found, clear_globs=False)
    known |= found.globs


@pytest.mark.parametrize("name", sorted(PUBLIC.keys() - WITHOUT.keys()))
def test_the_example_runs(name: str, names) -> None:
    module = importlib.import_module(PUBLIC[name].__module__)
    run(name, {**names, name: getattr(module, name, PUBLIC[name])})
