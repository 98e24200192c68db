"""A client's own mean and std of inputs (standardise=local) go where its model goes: a row has one output."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedbn_flwr import personal_state
from fedbn_flwr.client import client_app
from fedbn_flwr.client.saved_state import client_file
from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.errors import ConfigError, StateError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.export import run_torch_export
from fedbn_flwr.lab.finished_runs.evaluate import evaluate_run
from fedbn_flwr.lab.finished_runs.export import export, load_exported
from fedbn_flwr.lab.finished_runs.saved_model import Choice
from fedbn_flwr.lab.runs.node import client_fn
from fedbn_flwr.lab.runs.run import run
from fedbn_flwr.lab.runs.serve import serve
from fedbn_flwr.lab.runs.start_checks import check
from fedbn_flwr.lab.setup import make_model

HEAD = "age,chol,part,sick"
SETTINGS = {
    "label-column": "sick",
    "split-column": "part",
    "feature-columns": "age,chol",
    "task": "binary",
    "missing": "mean",
    "standardise": "local",
    "model": "mlp",
    "mlp-hidden": "6",
    "num-server-rounds": 2,
    "local-steps": 2,
    "batch-size": 8,
    "eval-on": "personal-own",
}
CLIENTS = {"east": (50, 1.0), "west": (65, 38.7)}  # mean age, unit of cholesterol


def table_of(name: str) -> list[str]:
    draw = np.random.default_rng(len(name) + ord(name[0]))
    age, unit = CLIENTS[name]
    rows = []
    for at in range(40):
        years, level = draw.normal(age, 9), draw.normal(5.5, 1) * unit
        known = "?" if at % 9 == 4 else f"{level:.2f}"
        rows.append(f"{years:.1f},{known},{'test' if at % 5 == 0 else 'train'},{int(years > age)}")
    return rows


@pytest.fixture
def hospitals(tmp_path: Path) -> Path:
    """A folder with a table for each client; ``some.csv`` beside it has 10 rows of east."""
    folder = tmp_path / "hospitals"
    folder.mkdir()
    for name in CLIENTS:
        (folder / f"{name}.csv").write_text("\n".join([HEAD, *table_of(name)]) + "\n")
    (tmp_path / "some.csv").write_text("\n".join([HEAD, *table_of("east")[:10]]) + "\n")
    return folder


def columns(name: str, part: str = "") -> torch.Tensor:
    """The features of a client's rows, float32 as they are read."""
    rows = [row.split(",") for row in table_of(name) if part in row]
    numbers = [[float(value.replace("?", "nan")) for value in row[:2]] for row in rows]
    return torch.tensor(numbers, dtype=torch.float32)


def by_hand(out: Path, state: Any) -> list[float]:
    """East's probabilities: standardised in float64 by its training rows, a missing value as their mean."""
    train = columns("east", "train").double()
    mean = train.nanmean(0)
    std = (train - mean).square().nanmean(0).sqrt()
    model = make_model(Config.load(out / "config.yaml")).double().eval()
    model.load_state_dict(state)
    inputs = ((columns("east").double() - mean) / std).nan_to_num(0.0)
    found: list[float] = model(inputs).flatten().sigmoid().tolist()
    return found


def probabilities(out: Path, table: Path, bn: str = "own:0", **more: Any) -> list[float]:
    to = out.parent / f"predicted-{len(list(out.parent.iterdir()))}"
    evaluate_run(out, {"dataset": f"csv:{table}"}, bn, "all", to, **more)
    with (to / "predictions.csv").open() as file:
        return [float(line["probability"]) for line in csv.DictReader(file)]


@pytest.mark.parametrize(("strategy", "workers"), [("fedbn", 0), ("fedavg", 1), ("scaffold", 0)])
def test_a_row_has_one_probability_whoever_else_is_in_the_file(
    strategy: str, workers: int, hospitals: Path, tmp_path: Path
) -> None:
    """Whether or not the method keeps something else with its clients."""
    out = tmp_path / "out"
    settings = {**SETTINGS, "dataset": f"csv:{hospitals}", "strategy": strategy, "checkpoint-every": 0}
    run(Config.make(settings), out, workers=workers)
    expected = by_hand(out, personal_state(out, 0))
    whole = probabilities(out, hospitals / "east.csv")
    assert whole == pytest.approx(expected, rel=1e-4)
    assert probabilities(out, tmp_path / "some.csv") == pytest.approx(whole[:10], rel=1e-6)

    done = export(out, tmp_path / "a/model.safetensors", "torch", Choice(client=0))
    graph = export(out, tmp_path / "b/model.pt2", "torch-export", Choice(client=0))
    raw = columns("east")
    for outputs in (load_exported(done.file)(raw), run_torch_export(graph.file)(raw)):
        assert outputs.flatten().sigmoid().tolist() == pytest.approx(whole, rel=1e-5)
    assert "its own mean and std of inputs" in done.what
    assert "normalisation, in the file: (x - mean) / std" in done.card.read_text()


def test_a_model_of_no_client_is_not_exported_as_if_it_took_raw_rows(hospitals: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(Config.make({**SETTINGS, "dataset": f"csv:{hospitals}", "strategy": "fedavg"}), out, workers=0)
    with pytest.raises(ConfigError, match="standardise=local"):
        export(out, tmp_path / "a/model.safetensors", "torch")
    export(out, tmp_path / "b/model.safetensors", "torch", normalise=False)
    what, _, _ = evaluate_run(out, {"dataset": f"csv:{tmp_path / 'some.csv'}"}, part="all")
    assert "a row's output depends on the other rows" in what


def test_a_client_whose_mean_and_std_are_gone_is_refused(hospitals: Path, tmp_path: Path) -> None:
    """As of a run of an older version, or of clients that did not share the disk."""
    out = tmp_path / "out"
    run(Config.make({**SETTINGS, "dataset": f"csv:{hospitals}", "strategy": "fedavg"}), out, workers=0)
    client_file(out, 0).unlink()
    for use in (
        lambda: probabilities(out, hospitals / "east.csv"),
        lambda: export(out, tmp_path / "a/model.safetensors", "torch", Choice(client=0)),
    ):
        with pytest.raises(StateError, match="standardise=local"):
            use()


def test_a_client_that_did_not_train_is_named_with_those_that_did(hospitals: Path, tmp_path: Path) -> None:
    out, half = tmp_path / "out", {"fraction-train": 0.5, "num-server-rounds": 1}
    run(Config.make({**SETTINGS, **half, "dataset": f"csv:{hospitals}", "strategy": "fedavg"}), out, workers=0)
    (trained,) = [k for k in (0, 1) if client_file(out, k).is_file()]
    with pytest.raises(StateError, match=rf"client={1 - trained} .* did not train in this run.*did \({trained}\)"):
        evaluate_run(out, {"dataset": f"csv:{hospitals / 'east.csv'}"}, f"own:{1 - trained}", "all")


def served(settings: dict[str, Any], nodes: Sequence[dict[str, Any]], out: Path) -> None:
    config = Config.make(settings)
    with InProcessGrid(client_app(client_fn), len(nodes), run_config=config.to_mapping(), node_configs=nodes) as grid:
        serve(grid, check(config), out)


@pytest.mark.parametrize(
    "method",
    [
        {"strategy": "fedbn"},
        {"strategy": "fedavg"},
        {"strategy": "fedavg", "masked-sums": True, "masked-metrics": "published"},
    ],
    ids=["fedbn", "fedavg", "masked"],
)
def test_over_a_network_they_stay_with_the_node(method: dict[str, Any], hospitals: Path, tmp_path: Path) -> None:
    nodes = [
        {"data-path": str(hospitals / f"{name}.csv"), "state-dir": str(tmp_path / f"state-{name}")} for name in CLIENTS
    ]
    out, site = tmp_path / "out", tmp_path / "site"
    served({**SETTINGS, **method, "dataset": "csv:"}, nodes, out)
    mean = str(columns("east", "train").nanmean(0).tolist()[0])[:7]
    texts = [path.read_bytes() for path in out.rglob("*") if path.is_file()]
    assert not any(mean.encode() in text for text in texts)
    with pytest.raises(StateError):
        probabilities(out, hospitals / "east.csv")

    site.mkdir()
    for name in ("config.yaml", "model.safetensors"):
        shutil.copy(out / name, site)
    state_dir = tmp_path / "state-east"
    whole = probabilities(site, hospitals / "east.csv", "", state_dir=state_dir)
    assert probabilities(site, tmp_path / "some.csv", "own:0", state_dir=state_dir) == pytest.approx(
        whole[:10], rel=1e-6
    )
    done = export(site, tmp_path / "home/model.safetensors", "torch", Choice(state_dir=state_dir))
    model = load_exported(done.file)
    assert model(columns("east")).flatten().sigmoid().tolist() == pytest.approx(whole, rel=1e-5)
    assert whole == pytest.approx(by_hand(out, model[1].state_dict()), rel=1e-4)
    with pytest.raises(StateError):
        export(site, tmp_path / "other/model.safetensors", "torch", Choice(client=0, state_dir=tmp_path / "state-west"))


def test_the_mean_and_std_of_another_run_are_not_taken(hospitals: Path, tmp_path: Path) -> None:
    nodes = [{"data-path": str(hospitals / f"{name}.csv"), "state-dir": str(tmp_path / "state")} for name in CLIENTS]
    for name in ("first", "second"):
        served({**SETTINGS, "strategy": "fedavg", "dataset": "csv:"}, nodes[:1], tmp_path / name)
    shutil.rmtree(next(path for path in sorted((tmp_path / "state").iterdir(), key=lambda p: p.stat().st_mtime_ns)))
    with pytest.raises(StateError, match="is of another run"):
        export(tmp_path / "first", tmp_path / "a/model.safetensors", "torch", Choice(state_dir=tmp_path / "state"))
    export(tmp_path / "second", tmp_path / "b/model.safetensors", "torch", Choice(state_dir=tmp_path / "state"))
