"""A config becomes the parts of a run.

These are shared data, the client of a context, and the strategy with its parameters.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from flwr.app import Context, RecordDict

from fedbn_flwr.errors import ConfigError, DataError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.config.fields import config_fields
from fedbn_flwr.lab.objects_of_config import (
    make_model,
    make_strategy,
    pick_device,
    training_model,
)
from fedbn_flwr.lab.runs.check_start import checked_config
from fedbn_flwr.lab.runs.node import RunClients, client_fn
from fedbn_flwr.lab.runs.run import run
from fedbn_flwr.lab.runs.serve import _server_data
from fedbn_flwr.strategies import STRATEGIES, FedAvg
from tests.support.every_key import KEYS
from tests.support.fast import thinned
from tests.support.runs import serve_nodes


@pytest.mark.parametrize(
    ("node_config", "named"),
    [
        ({"partition-id": 0}, "num-partitions"),
        ({"partition-id": 2, "num-partitions": 2}, "partition-id=2"),
        ({"partition-id": 0, "num-partitions": 2.5}, "num-partitions=2.5"),
        ({"partition-id": "a", "num-partitions": 2}, "partition-id='a'"),
        (
            {
                "partition-id": 0,
                "num-partitions": 2,
                "dataset-path": "of another app",
                "data_path": "/x",
            },
            "'data-path'",
        ),
        (
            {"partition-id": 0, "num-partitions": 2, "state-dir": "parts"},
            "state-dir='parts'",
        ),
    ],
)
def test_a_node_whose_config_cannot_be_is_refused_with_advice(
    node_config, named: str, quick_config
) -> None:
    """All nodes with the fault raise the same text, because it names no node.

    The same error of all nodes ends the run.
    """
    settings = quick_config().to_mapping()
    with pytest.raises(ConfigError, match=named):
        client_fn(Context(1, 7, node_config, RecordDict(), settings))


def test_a_fault_of_all_node_configs_ends_the_run(quick_config, tmp_path) -> None:
    own = [{"state-dir": "parts"}] * 3
    with pytest.raises(
        ConfigError, match=r"state-dir='parts' is relative.*\n\(All 3 clients"
    ):
        serve_nodes(quick_config(), tmp_path / "out", own)


@pytest.mark.parametrize("name", thinned(STRATEGIES))
def test_every_parameter_reaches_the_strategy(name: str) -> None:
    """A key that is not passed on would be a setting without effect."""
    channel = {"fedtan-transport": "channel"}
    changed = {
        **KEYS,
        "class-moments": (True, {}),
        "on-divergence": ("continue", {}),
        "fedtan-transport": ("channel", {}),
        "fedtan-bind": ("127.0.0.2:7", channel),
        "fedtan-address": ("server:7", channel),
        "fedtan-tls-dir": ("/certs", channel),
    }
    norm = "wsconv" if name == "fedwon" else "batch"
    config = Config.make({"strategy": name, "norm": norm})
    model, refused = make_model(config), set()
    for field, setting in config_fields(STRATEGIES[name].Params).items():
        value, needs = changed[key := field.replace("_", "-")]
        given = {other.replace("-", "_"): own for other, own in needs.items()}
        other = config.model_copy(update={**given, field: value})
        try:
            params = make_strategy(other, model, 3).params
        except ConfigError:
            refused.add(key)
        else:
            assert getattr(params, setting) == value, field
    ours = {"variance", "recalibrate", "momentum-scope", "agc", "layers", "personal"}
    assert refused <= ours


def test_clients_get_the_model_as_it_is_built(quick_config) -> None:
    """The server changes its own model."""
    config = quick_config(**{"bn-momentum": 0.3})
    checked = checked_config(config)
    clients = RunClients.of(checked)
    for entry in checked.model.eval().state_dict().values():
        entry.zero_()
    built, own = training_model(config), clients._build()
    assert (own.training, own.norm.momentum) == (True, 0.3)
    for name, value in built.state_dict().items():
        assert torch.equal(value, own.state_dict()[name]), name
    assert clients._build() is not own


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "cuda:99",
            r"device=cuda:99: \d+ CUDA device\(s\) found here. Use device=cpu, or"
            r" device=auto.",
        ),
        ("gpu", "device='gpu' must be auto, cpu, cuda or cuda:N"),
    ],
)
def test_a_device_is_chosen_or_refused(name: str, message: str) -> None:
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(ConfigError, match=message):
        pick_device(name)


def test_a_round_waits_as_long_as_told_and_in_process_for_ever(
    quick_config, tmp_path, monkeypatch
) -> None:
    start = mock.Mock(side_effect=NotImplementedError)
    monkeypatch.setattr(FedAvg, "start", start)
    for seconds in (77.0, 0.0):
        with pytest.raises(NotImplementedError):
            run(quick_config(**{"round-timeout": seconds}), tmp_path / f"{seconds}")
    told, for_ever = (call.kwargs["timeout"] for call in start.call_args_list)
    assert told == 77.0
    assert for_ever > 1e9


def test_held_out_clients_need_the_data_of_the_server(monkeypatch) -> None:
    missing = mock.Mock(side_effect=DataError("no data here"))
    monkeypatch.setattr("fedbn_flwr.lab.runs.serve.partitioned_data", missing)
    settings = {"strategy": "fedbn", "eval-on": "personal-own"}
    assert _server_data(Config.make(settings), True) is None
    with pytest.raises(DataError, match="no data here"):
        _server_data(Config.make({**settings, "held-out-clients": "1"}), True)
