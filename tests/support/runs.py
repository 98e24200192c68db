"""Runs of nodes in this process, and the results in a run's folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.objects_of_config import make_model
from fedbn_flwr.lab.report.page import write_report
from fedbn_flwr.lab.results.files import read_metrics
from fedbn_flwr.lab.results.tests_table import read_tests
from fedbn_flwr.lab.runs.check_start import checked_config
from fedbn_flwr.lab.runs.default_app import client_app
from fedbn_flwr.lab.runs.run import run
from fedbn_flwr.lab.runs.serve import serve

QUICK = {
    "num-clients": 3,
    "num-server-rounds": 2,
    "local-steps": 2,
    "batch-size": 8,
}
"""The settings of a run on digits that takes a fraction of a second."""
THREE = ({}, {}, {})


def serve_nodes(
    config: Config,
    out: Path,
    nodes: Sequence[Mapping] = THREE,
    **options: Any,
) -> dict:
    """Run a config on nodes with their own configs, as Flower does."""
    given = [dict(node) for node in nodes]
    options |= {"run_config": config.to_mapping(), "node_configs": given}
    with InProcessGrid(client_app, len(nodes), **options) as grid:
        return serve(grid, checked_config(config), out)


class Cut(Exception):
    """A power failure."""


def run_until(settings: Mapping, out: Path, cut: int = 0) -> dict:
    """Run a config in this process, and cut the run after a round."""

    def on_round(line: Mapping) -> None:
        if line["round"] == cut:
            raise Cut

    return run(Config.make(settings), out, on_round)


def lines_of(out: Path) -> list[dict]:
    return read_metrics(out / "metrics.jsonl")


def edited(folder: Path, name: str, edit: Callable[[Any], None]) -> None:
    """Change the JSON file, or each line of the file of lines."""
    path = folder / name
    lines = path.read_text().splitlines() if name.endswith("l") else [path.read_text()]
    found = [json.loads(line) for line in lines]
    for content in found:
        edit(content)
    path.write_text("".join(json.dumps(content) + "\n" for content in found))


def values_of(out: Path, key: str) -> list:
    """Return the values of a key in the lines of a run."""
    return [line[key] for line in lines_of(out)]


def config_of(out: Path) -> Config:
    return Config.load(out / "config.yaml")


def state_of(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model.safetensors")


def clients_of(out: Path, server_round: int = 0) -> dict[str, dict]:
    """Return the tests of a round, by default the last one, by client.

    The keys are those of the clients' replies, such as ``own-accuracy``.
    """
    tests = read_tests(out)
    tests = tests[(tests["model"] == "own") & tests["client"].notna()]
    tests = tests[tests["round"] == (server_round or tests["round"].max())]
    found = {}
    for test in tests.itertuples():
        name = {"test": "own", "all": "global"}.get(test.part, test.part)
        reply = found.setdefault(str(int(test.client)), {})
        reply[f"{name}-num-examples"] = test.examples
        reply[f"{name}-{test.metric}"] = test.value
    return found


def summary_of(out: Path) -> dict:
    return json.loads((out / "summary.json").read_text())


def model_of(out: Path, state: Mapping[str, torch.Tensor] | None = None) -> nn.Module:
    """Return the model of a run's folder with its saved state, or with ``state``."""
    model = make_model(config_of(out))
    model.load_state_dict(state or state_of(out))
    return model


def page_of(folder: Path) -> str:
    """Write the page of a run or a study, and return it."""
    return write_report(folder).read_text()


def moved_entries(out: Path) -> set[str]:
    """Return the entries that a run has changed."""
    start, end = make_model(config_of(out)).state_dict(), state_of(out)
    return {name for name, value in start.items() if not torch.equal(value, end[name])}
