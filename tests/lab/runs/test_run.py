"""Runs on digits from config to folder, for a method of each kind.

The tests check the files of the folder, the traffic, and the seeds.
"""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import pytest

from fedbn_flwr import global_state
from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.errors import EngineError
from fedbn_flwr.lab.config import CENTRALIZED, Config
from fedbn_flwr.lab.objects_of_config import make_model
from fedbn_flwr.lab.partitioned.partitioned_data import federation_size
from fedbn_flwr.lab.results import result_writer
from fedbn_flwr.lab.results.files import PREDICTIONS_FILES
from fedbn_flwr.lab.runs.check_start import checked_config
from fedbn_flwr.lab.runs.default_app import client_app
from fedbn_flwr.lab.runs.run import default_workers, preflight, run, work_of
from fedbn_flwr.lab.runs.serve import serve
from fedbn_flwr.messages.records import state_sha256, to_state
from tests.support.runs import config_of, lines_of, model_of, serve_nodes, summary_of

METHODS = ("fedavg", "fedbn", "fixbn", "fedtan", CENTRALIZED)
"""With a test of the server, with tests of clients, with a phase, with exchanges in the
steps, and with one loop over all data. The reference draws runs of all methods.
"""
FILES = {
    "config.yaml",
    "metrics.jsonl",
    *PREDICTIONS_FILES,
    "tests.csv",
    "summary.json",
    "model.safetensors",
    "checkpoint",
}
# one process, and therefore one run of each method
pytestmark = pytest.mark.xdist_group("runs")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, tuple[dict, Path]]:
    """One short run of a method of each kind."""
    settings = {
        "num-clients": 3,
        "num-server-rounds": 3,
        "local-steps": 4,
        "batch-size": 16,
        "learning-rate": 0.2,
    }
    made = {}
    for name in METHODS:
        out = tmp_path_factory.mktemp("runs") / name
        config = preflight(Config.make({**settings, "strategy": name}), out).config
        # two threads on any machine
        made[name] = served(config, out, threads=2), out
    return made


def served(config: Config, out: Path, **options) -> dict:
    """Run a config in this process, and return the summary."""
    return serve_nodes(config, out, [{}] * federation_size(config), **options)


@pytest.mark.parametrize("name", METHODS)
def test_a_run_writes_its_folder(name: str, runs) -> None:
    summary, out = runs[name]
    own = name == "fedbn"
    more = {"clients"} if own else set()
    assert {path.name for path in out.iterdir()} == FILES | more
    assert summary_of(out) == json.loads(json.dumps(summary))
    config = config_of(out)
    assert (config.strategy, config.num_clients, config.out) == (name, 3, str(out))
    lines = lines_of(out)
    examples, model = summary["ledger"]["examples"], make_model(config)
    size = sum(parameter.numel() for parameter in model.parameters())
    assert work_of(config, model) == examples * size
    assert [line["round"] for line in lines] == [1, 2, 3]
    assert all(line["rejected"] == [] for line in lines)
    assert summary["rounds"] == 3
    assert examples == sum(line["examples"] for line in lines)
    headline = "personal-own-accuracy" if own else "test-accuracy"
    assert summary["headline"] == headline
    assert summary["final"][headline] == lines[-1][headline]
    chance = 1 / 2 if own else 1 / 10  # two classes for each client
    assert summary["final"][headline] > chance + 0.2, "it learns"
    # Without local state, the hash is the model's.
    if name == "fedavg":
        saved = model_of(out, global_state(out)).state_dict()
        assert state_sha256(to_state(saved)) == summary["sha256"]
    if name == CENTRALIZED:
        assert [line["participants"] for line in lines] == [[0]] * 3


@pytest.mark.parametrize(
    ("settings", "workers"),
    [
        ({}, 3),
        ({"num-clients": 2}, 2),
        ({"fraction-train": 0.5}, 2),
        ({"fraction-train": 0.3}, 0),
        ({"strategy": CENTRALIZED}, 0),
        ({"torch-threads": 2}, 0),
        ({"num-server-rounds": 1}, 0),
    ],
)
def test_a_long_run_has_a_worker_for_each_core_and_client_of_a_round(
    settings, workers: int, quick_config, monkeypatch
) -> None:
    """One worker, or workers with several threads, would save no time."""
    monkeypatch.setattr("fedbn_flwr.lab.runs.run.num_cores", lambda: 3)
    long = {"num-clients": 5, "num-server-rounds": 100_000, **settings}
    assert default_workers(checked_config(quick_config(**long))) == workers


@pytest.mark.parametrize("name", ["fedbn", "fedtan", CENTRALIZED])
def test_the_config_of_a_run_repeats_it_with_one_worker_too(
    name: str, runs, tmp_path
) -> None:
    """``config.yaml`` is complete and sufficient for the same bits.

    Threads and node ids may differ. In test_matrix.py each strategy has the same bits
    in other processes, and therefore under other ids.
    """
    summary, out = runs[name]
    again = served(config_of(out), tmp_path, seed=9)
    assert again["sha256"] == summary["sha256"]
    assert again["final"] == summary["final"]
    files = [one / "model.safetensors" for one in (out, tmp_path)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_run_without_a_usable_reply_fails(quick_config, tmp_path) -> None:
    """If all clients refuse, the command must not end as if it had trained."""
    other = quick_config(**{"num-classes": 11}).to_mapping()
    words = (
        r"nothing was trained: no round had the required min-replies=1 usable replies\."
        " First refused"
    )
    with (
        InProcessGrid(client_app, 3, run_config=other) as grid,
        pytest.raises(EngineError, match=words),
    ):
        serve(grid, checked_config(quick_config()), tmp_path)
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.parametrize(
    ("settings", "lines", "final", "has_test", "said"),
    [
        (
            {},
            2,
            2,
            False,
            "the result is from round 2, but this round has no test-accuracy",
        ),
        (
            {"num-server-rounds": 1},
            1,
            1,
            False,
            "the result is from round 1, but this round has no test-accuracy",
        ),
        (
            {"num-server-rounds": 4, "eval-every": 2},
            3,
            2,
            True,
            "from round 2, the last test, but the model is from round 3",
        ),
    ],
    ids=["the tests are lost", "every test is lost", "the run ends between two tests"],
)
def test_the_result_is_that_of_the_last_test(
    settings,
    lines: int,
    final: int,
    has_test: bool,
    said: str,
    quick_config,
    tmp_path,
) -> None:
    """An earlier accuracy does not replace a last test whose replies are lost.

    The earlier round's accuracy would be shown with the last round's model.
    """
    real = result_writer.read_metrics

    def cut(path: Path) -> list[dict]:
        found = real(path)[:lines]
        if found:
            last = found.pop().items()
            found.append({k: v for k, v in last if not k.startswith("test-")})
        return found

    with (
        patch.object(result_writer, "read_metrics", cut),
        patch.object(result_writer.logger, "warning") as warning,
    ):
        summary = run(quick_config(strategy="fedavg", **settings), tmp_path)
    tested = lines_of(tmp_path)[final - 1]["test-accuracy"]
    assert summary["final"]["round"] == final
    assert summary["final"]["test-accuracy"] == (tested if has_test else None)
    assert summary["rounds"] == lines
    warned = [call.args[0] % call.args[1:] for call in warning.call_args_list]
    assert said in " ".join(warned)


def test_pooled_data_are_those_of_one_client_with_all_of_them(quick_run) -> None:
    """Momentum continues over the rounds."""
    keys = {"partition": "iid", "sgd-momentum": 0.9, "eval-on": "global,personal-own"}
    one = {"num-clients": 1, "momentum-scope": "local"}
    alone = quick_run(strategy="fedavg", **{**keys, **one})[0]
    pooled = quick_run(strategy="centralized", **keys)[0]
    assert pooled["sha256"] == alone["sha256"]
    assert pooled["final"] == alone["final"]
    reset = {**keys, "num-clients": 1, "momentum-scope": "none"}
    assert quick_run(strategy="fedavg", **reset)[0]["sha256"] != alone["sha256"]
