"""Own data that only the nodes have: ``dataset=csv:`` without a path, and ``data-path`` in each node's config."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict
from PIL import Image
from typer.testing import CliRunner

from fedbn_flwr.client import client_app
from fedbn_flwr.client.saved_state import metadata
from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.errors import ConfigError, DataError, FedBNError
from fedbn_flwr.lab.cli import app
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.files import read_metrics
from fedbn_flwr.lab.output.model_description import ModelDescription
from fedbn_flwr.lab.runs.node import client_fn
from fedbn_flwr.lab.runs.run import run
from fedbn_flwr.lab.runs.serve import serve
from fedbn_flwr.lab.runs.start_checks import check

NAMES = ("east", "north", "west")
SETTINGS = {
    "num-server-rounds": 2,
    "local-steps": 2,
    "batch-size": 8,
    "eval-on": "personal-own",
}
TABLE = {
    **SETTINGS,
    "label-column": "target",
    "positive-values": ">0",
    "feature-columns": "age,bmi,sex:F|M",
    "split-column": "part",
    "task": "binary",
}
HEAD = "age,bmi,sex,part,target,patient"


def rows_of(client: int) -> list[str]:
    rng = np.random.default_rng(client)
    rows = []
    for at in range(30):
        age, bmi = rng.normal(50 + 5 * client, 10), rng.normal(25 - client, 4)
        known = f"{bmi:.2f}"
        part, patient = ("test" if at % 5 == 4 else "train"), 100 * client + at // 2
        patient += 50 * (part == "test")
        rows.append(f"{age:.1f},{known},{'FM'[at % 2]},{part},{int(age > 55) * (1 + at % 3)},{patient}")
    return rows


@pytest.fixture
def tables(tmp_path: Path) -> list[Path]:
    """A table for each client, and ``all.csv`` with the rows of all."""
    paths = [tmp_path / f"{name}.csv" for name in NAMES]
    whole = []
    for client, path in enumerate(paths):
        path.write_text("\n".join([HEAD, *rows_of(client)]))
        whole += [f"{row},{NAMES[client]}" for row in rows_of(client)]
    (tmp_path / "all.csv").write_text("\n".join([f"{HEAD},hospital", *whole]))
    return paths


def at(paths: Sequence[Path], **more: Any) -> list[dict[str, Any]]:
    return [{"data-path": str(path), **more} for path in paths]


def test_the_bits_of_one_data_set_with_natural_clients(served, tables, tmp_path) -> None:
    """The split into training and test part is in the data: each node would draw its own, other than that of all."""
    keys = {"validation-share": 0.25, "group-column": "patient"}
    settings = {**TABLE, **keys, "strategy": "fedbn"}
    alone, lines = served({**settings, "dataset": "csv:"}, at(tables))
    whole = together(settings, tmp_path)
    assert alone["sha256"] == whole["sha256"]
    same = {key: value for key, value in whole["final"].items() if key != "domains"}
    assert alone["final"] == same
    assert [line["participants"] for line in lines] == [[0, 1, 2]] * 2


def test_image_folders_of_nodes_have_the_runs_classes(served, tmp_path) -> None:
    """The second node has no cats: its dogs are class 1 all the same."""
    counts = {"a": {"cat": 6, "dog": 5}, "b": {"dog": 8}}
    for client, (name, classes) in enumerate(counts.items()):
        for label, count in classes.items():
            for number in range(count):
                folder = tmp_path / "all" / name / ("test" if number < 2 else "train") / label
                folder.mkdir(parents=True, exist_ok=True)
                pixels = np.random.default_rng(100 * client + number).integers(0, 256, (9, 9)).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    settings = {**SETTINGS, "num-server-rounds": 1, "image-size": 28, "num-classes": 2, "task": "classification"}
    nodes = at([tmp_path / "all" / name for name in counts])
    with pytest.raises(ConfigError, match=r"(?s)no node can train.*have names \(cat, dog\).*class-names"):
        served({**settings, "dataset": "folder:"}, nodes, "unnamed")
    alone, _ = served({**settings, "dataset": "folder:", "class-names": "cat,dog"}, nodes)
    whole = run(Config.make({**settings, "dataset": f"folder:{tmp_path / 'all'}"}), tmp_path / "whole", workers=0)
    assert alone["sha256"] == whole["sha256"]
    assert ModelDescription.read(metadata(tmp_path / "out")).classes == ("cat", "dog")


def test_arrays_of_nodes_take_the_runs_shape(served, tmp_path) -> None:
    rng = np.random.default_rng(0)
    for name, shape in (("0", (9, 9)), ("1", (12, 12, 3))):
        np.savez(tmp_path / f"{name}.npz", x=rng.integers(0, 256, (20, *shape)).astype(np.uint8), y=np.arange(20) % 2)
    settings = {**SETTINGS}
    settings |= {"num-server-rounds": 1, "dataset": "npz:", "model": "lenet", "image-size": 32, "num-classes": 3}
    settings["task"] = "classification"
    _, lines = served(settings, at([tmp_path / "0.npz", tmp_path / "1.npz"]))
    assert [line["participants"] for line in lines] == [[0, 1]]


def test_a_common_test_set_on_nodes_with_their_own_data_is_refused_before_round_1(served, tables, tmp_path) -> None:
    settings = {**TABLE, "dataset": "csv:", "eval-on": "personal-own,personal-global"}
    with pytest.raises(ConfigError, match=r"eval-on=personal-global.*data-path has the test set own.*personal-own"):
        served(settings, at(tables))
    assert not read_metrics(tmp_path / "out/metrics.jsonl")


def test_a_node_with_other_data_is_named_and_the_others_go_on(served, tables, tmp_path) -> None:
    tables[1].write_text("age,bmi,part,target\n" + "\n".join(f"{a},20,train,{a % 2}" for a in range(9)))
    settings = {**TABLE, "dataset": "csv:"}
    _, lines = served(settings, at(tables))
    (said,) = lines[0]["rejected"]
    assert "(partition 1): data-path=" in said
    assert "feature-columns='sex' is not a column" in said
    assert lines[0]["participants"] == [0, 2]
    text = {**settings, "feature-columns": "age,sex"}
    with pytest.raises(ConfigError, match=r"it has 3 features \(age, sex=F, sex=M\); the .* takes 2\. .*sex:F\|M"):
        served(text, at([tables[0], tables[2]]), "text")


def test_a_node_whose_data_check_finds_something_is_named_if_the_run_refuses_it(served, tables, tmp_path) -> None:
    values = [-99 if at % 9 == 0 else 20 + at % 7 for at in range(60)]
    rows = [f"{bmi},F,{'test' if at % 5 == 4 else 'train'},{at % 2}" for at, bmi in enumerate(values)]
    tables[1].write_text("bmi,sex,part,target\n" + "\n".join(rows))
    settings = {**TABLE, "dataset": "csv:", "feature-columns": "bmi,sex:F|M"}
    _, lines = served({**settings, "data-check": "refuse"}, at(tables))
    (said,) = lines[0]["rejected"]
    assert "(partition 1): data-path=" in said
    assert "column 'bmi': -99 in 7 of 60 rows" in said
    assert lines[0]["participants"] == [0, 2]
    _, lines = served(settings, at(tables), "warned")
    assert lines[0]["participants"] == [0, 1, 2]


def test_what_the_server_must_know_of_the_data_is_in_the_config(served, tables, tmp_path) -> None:
    settings = {**TABLE, "dataset": "csv:"}
    with pytest.raises(DataError, match=r"only the nodes have the data.*eval-on=personal-own"):
        served({**settings, "eval-on": "global"}, at(tables), "global")
    with pytest.raises(FedBNError, match=r"only the nodes have the data.*data-path"):
        run(Config.make({**settings, "num-clients": 2}), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"held-out-clients='a' has no effect: only the nodes have the data"):
        Config.make({**settings, "held-out-clients": "a"})
    keys = [option for key, value in {**settings, "model": "mlp"}.items() for option in ("--set", f"{key}={value}")]
    shown = CliRunner().invoke(app, ["inspect", *keys])
    assert shown.exit_code == 0, shown.output
    assert "mlp (norm=batch)" in shown.output


def test_a_node_says_once_what_it_has_read_and_the_server_hears_of_it_if_the_owner_allows(
    tables, tmp_path, caplog
) -> None:
    caplog.set_level(logging.INFO, "flwr")
    tables[1].write_text(tables[1].read_text().replace(",F,", ",M,"))
    tables[2].write_text(tables[2].read_text().replace(",F,", ",female,", 2))
    sent: list[tuple[int, str]] = []

    def spy(message: Message, context: Context, call_next: Any) -> Message:
        reply: Message = call_next(message, context)
        sent.append((int(context.node_config["partition-id"]), str(reply.content)))
        return reply

    config = Config.make({**TABLE, "dataset": "csv:"})
    nodes = [at(tables)[0], {**at(tables)[1], "report-data": True}, {**at(tables)[2], "report-data": "false"}]
    with InProcessGrid(
        client_app(client_fn, mods=[spy]), 3, run_config=config.to_mapping(), node_configs=nodes
    ) as grid:
        serve(grid, check(config), tmp_path / "out")
    texts = [record.message for record in caplog.records]
    for path in tables:
        (own,) = [text for text in texts if text.startswith(f"data-path={path}\n")]
        assert "24 training, 6 test examples of shape (4,)" in own
        assert "  bmi: " in own
    warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert [text for text in warned if "female" in text] == [
        f"data-path={tables[2]}: column 'sex': female is none of the categories that feature-columns states (F, M); "
        "all its features are 0 in 2 of 30 rows. Correct the spelling, or state it, too"
    ]
    assert [text for text in warned if "the same value" in text] == [
        f"data-path={tables[1]}: the same value in all training examples: sex=F, sex=M; leave it out"
    ]
    (heard,) = [text for text in texts if "(partition 1) reports its data" in text]
    assert "24 training" in heard
    assert "the same value in all training examples: sex=F" in heard
    assert {client for client, text in sent if "training" in text or "bmi" in text} == {1}


@pytest.mark.parametrize("masked", [True, False])
def test_a_node_with_masks_sends_no_report_of_its_data(masked: bool, tables, caplog) -> None:
    keys = {**TABLE, "dataset": "csv:", "feature-columns": "age,sex:F|M"}
    config = Config.make({**keys, "eval-on": "global", "test-share": 0.3, "masked-sums": masked})
    node = {**at(tables)[0], "report-data": True}
    client = client_fn(Context(1, 1, node, RecordDict(), config.to_mapping()))
    assert ("data-report" in client.get_properties({})) == (not masked)
    warned = "report-data=true has no effect with masked-sums=true: the counts would not be masked" in caplog.text
    assert warned == masked


def together(settings: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Return the summary of the run in process that has all data."""
    keys = {**settings, "dataset": f"csv:{tmp_path / 'all.csv'}", "client-column": "hospital"}
    return run(Config.make(keys), tmp_path / "together", workers=0)
