"""A config becomes the parts of a run.

These are shared data, the client of a context, and the strategy with its parameters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict
from torch import nn

from fedbn_flwr.errors import ConfigError, DataError
from fedbn_flwr.lab.config import Config, data_of
from fedbn_flwr.lab.config.fields import config_fields
from fedbn_flwr.lab.partitioned.partitioned_data import partitioned_data
from fedbn_flwr.lab.runs.check_start import checked_config
from fedbn_flwr.lab.runs.node import client_fn
from fedbn_flwr.lab.runs.run import run
from fedbn_flwr.lab.runs.serve import _server_data
from fedbn_flwr.lab.setup import (
    local_training,
    make_model,
    make_strategy,
    model_and_warnings,
    pick_device,
)
from fedbn_flwr.strategies import STRATEGIES, FedAvg
from tests.support.every_key import KEYS
from tests.support.fast import thinned
from tests.support.runs import serve_nodes


def context(config: Config, partition_id: int = 1, **node_config: Any) -> Context:
    own = (
        node_config
        if node_config
        else {"partition-id": partition_id, "num-partitions": 3}
    )
    return Context(1, 7, own, RecordDict(), config.to_mapping())


def test_clients_of_a_process_share_one_copy_of_the_images(quick_config) -> None:
    config = quick_config()
    clients = [client_fn(context(config, i)) for i in range(3)]
    trains = [partitioned_data(config, 3).train_view()]
    trains += [client.data.train for client in clients]
    tests = [
        client.data.tests[name] for client in clients for name in ("own", "global")
    ]
    for views in (trains, tests):
        inputs = [view.samples.inputs for view in views]
        assert len({one.untyped_storage().data_ptr() for one in inputs}) == 1
        assert {one.dtype for one in inputs} == {torch.uint8}


def test_a_client_depends_only_on_its_context(quick_config) -> None:
    config = quick_config(
        **{"bn-momentum": 0.25, "sgd-momentum": 0.5, "weight-decay": 0.01, "seed": 4}
    )
    client = client_fn(context(config))
    assert (client.partition_id, client.streams.seed) == (1, 4)
    assert client.settings == local_training(config)
    assert (
        client.settings.local_steps,
        client.settings.batch_size,
        client.settings.sgd_momentum,
    ) == (2, 8, 0.5)
    again = client_fn(context(config))
    assert client.model is again.model, "a process builds one model"
    model = client.model()
    for name, value in model.state_dict().items():
        assert torch.equal(value.cpu(), make_model(config).state_dict()[name])
    momenta = [m.momentum for m in model.modules() if isinstance(m, nn.BatchNorm1d)]
    assert momenta == [0.25]
    assert torch.equal(
        client.data.train.targets, partitioned_data(config, 3).train_view(1).targets
    )


def test_augmentation_applies_to_training_only(quick_config) -> None:
    data = partitioned_data(quick_config(augment="crop2,flip"), 3)
    positions = torch.arange(16)
    plain = data.train_view(0).batch(positions)[0]
    assert not torch.equal(
        data.train_view(0).batch(positions, torch.Generator().manual_seed(0))[0], plain
    )
    test = data.test_view(0)
    assert torch.equal(
        test.batch(positions, torch.Generator().manual_seed(0))[0],
        test.batch(positions)[0],
    )


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
    with pytest.raises(ConfigError, match=named):
        client_fn(context(quick_config(), **node_config))


def test_a_fault_of_all_node_configs_ends_the_run(quick_config, tmp_path: Path) -> None:
    config = quick_config()
    own = [{"state-dir": "parts"}] * 3
    with pytest.raises(
        ConfigError, match=r"state-dir='parts' is relative.*\n\(All 3 clients"
    ):
        serve_nodes(config, tmp_path / "out", own)


CHANGED: dict[str, tuple[Any, dict[str, Any]]] = {
    **KEYS,
    "class-moments": (True, {}),
    "on-divergence": ("continue", {}),
    "fedtan-transport": ("channel", {}),
    "fedtan-bind": ("127.0.0.2:7", {"fedtan-transport": "channel"}),
    "fedtan-address": ("server:7", {"fedtan-transport": "channel"}),
    "fedtan-tls-dir": ("/certs", {"fedtan-transport": "channel"}),
}
"""Each key of a method: another value than below, and what it needs."""


@pytest.mark.parametrize("name", thinned(STRATEGIES))
def test_every_parameter_reaches_the_strategy(name: str, quick_config) -> None:
    """A key that is not passed on would be a setting without effect."""
    changed = {
        "variance": "pooled",
        "eval-every": 3,
        "seed": 5,
        "proximal-mu": 0.5,
        "freeze-at": 7,
    }
    own = {
        "strategy": name,
        "norm": "wsconv" if name == "fedwon" else "batch",
        "eval-on": "personal-own",
    }
    shared = {**changed, **quick_config(strategy=name, norm=own["norm"]).to_mapping()}
    shared |= {
        **changed,
        "fraction-train": 0.5,
        "local-epochs": 0,
    }
    config, _ = Config.make_of_shared(shared, own)
    strategy = make_strategy(config, make_model(config), 3)
    assert type(strategy) is STRATEGIES[name]
    assert (
        strategy.fraction_train,
        strategy.min_available_nodes,
    ) == (0.5, 1)
    assert strategy.parts is not None
    assert list(strategy.parts.names) == list(make_model(config).state_dict())
    refused = set()
    for field, setting in config_fields(strategy.Params).items():
        value, needs = CHANGED[key := field.replace("_", "-")]
        given = {
            other.replace("-", "_"): own
            for other, own in {**needs, field: value}.items()
        }
        try:
            params = make_strategy(
                config.model_copy(update=given), make_model(config), 3
            ).params
        except ConfigError:
            refused.add(key)
        else:
            assert (
                getattr(params, setting)
                == value
                != strategy.Params.model_fields[setting].default
            ), field
    ours = {"variance", "recalibrate", "momentum-scope", "agc", "layers", "personal"}
    assert refused <= ours


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "cuda:99",
            (
                r"device=cuda:99: \d+ CUDA device\(s\) found here. Use device=cpu, or"
                r" device=auto."
            ),
        ),
        ("gpu", "device='gpu' must be auto, cpu, cuda or cuda:N"),
        ("cuda:x", "device='cuda:x' must be auto, cpu, cuda or cuda:N"),
    ],
)
def test_a_device_is_chosen_or_refused(name: str, message: str) -> None:
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(ConfigError, match=message):
        pick_device(name)


@pytest.mark.parametrize("amp", [True, False])
def test_bfloat16_that_this_machine_emulates_is_told(
    amp: bool, quick_config, monkeypatch
) -> None:
    config = quick_config(amp=amp, device="cpu")
    for supported in (True, False):
        monkeypatch.setattr(
            torch.ops.mkldnn,
            "_is_mkldnn_bf16_supported",
            lambda supported=supported: supported,
        )
        lines = checked_config(config).warnings
        assert len(lines) == (amp and not supported)
        assert all(
            "no instructions for bfloat16" in line and "Leave amp out" in line
            for line in lines
        )


def test_a_round_waits_as_long_as_told_and_in_process_for_ever(
    quick_config, tmp_path: Path, monkeypatch: Any
) -> None:
    waited = []

    class Begun(Exception):
        """The strategy has begun."""

    def start(self: Any, **arguments: Any) -> None:
        waited.append(arguments["timeout"])
        raise Begun

    monkeypatch.setattr(FedAvg, "start", start)
    for seconds in (77.0, 0.0):
        with pytest.raises(Begun):
            run(quick_config(**{"round-timeout": seconds}), tmp_path / f"{seconds}")
    assert waited[0] == 77.0
    assert waited[1] > 1e9


def test_fedwons_mobilenet_on_cifar_at_32_pixels() -> None:
    settings = {
        "strategy": "fedwon",
        "norm": "wsconv",
        "model": "torchvision:mobilenet_v2",
        "dataset": "cifar10",
    }
    assert data_of(Config.make(settings)).shape == (3, 64, 64)
    config = Config.make({**settings, "image-size": 32})
    assert data_of(config).shape == (3, 32, 32)
    checked_config(config)
    with pytest.raises(
        ConfigError,
        match=(
            r"image-size=48 has no effect: model=torchvision:alexnet takes images of 63"
        ),
    ):
        Config.make({**settings, "model": "torchvision:alexnet", "image-size": 48})


def test_a_momentum_of_the_model_that_is_replaced_is_told() -> None:
    model, warnings = model_and_warnings(
        Config.make({"model": "torchvision:mobilenet_v3_small", "dataset": "cifar10"})
    )
    assert len(warnings) == 1
    assert "bn-momentum=0.1 replaces the momentum of 34 BatchNorm layers" in warnings[0]
    assert "'features.0.1': 0.01" in warnings[0]
    assert {m.momentum for m in model.modules() if isinstance(m, nn.BatchNorm2d)} == {
        0.1
    }
    assert model_and_warnings(Config.make({"bn-momentum": 0.2}))[1] == []


def test_held_out_clients_need_the_data_of_the_server(monkeypatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise DataError("no data here")

    monkeypatch.setattr("fedbn_flwr.lab.runs.serve.partitioned_data", missing)
    settings = {"strategy": "fedbn", "eval-on": "personal-own"}
    assert _server_data(Config.make(settings), True) is None
    with pytest.raises(DataError, match="no data here"):
        _server_data(Config.make({**settings, "held-out-clients": "1"}), True)
