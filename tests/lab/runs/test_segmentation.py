"""Segmentation: tiny images in Cityscapes' layout, a client per city."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.config import Config, data_of
from fedbn_flwr.lab.partitioned.partitioned_data import count_clients, partitioned_data
from fedbn_flwr.lab.runs.inspection import batchnorm_calls
from fedbn_flwr.lab.runs.run import run
from fedbn_flwr.lab.setup import make_model
from fedbn_flwr.training.evaluation import evaluate
from fedbn_flwr.training.tasks import SEGMENTATION
from tests.support.runs import lines_of, model_of

CITIES = {"bremen": 3, "aachen": 2}
MODELS = {
    "lraspp": "torchvision-seg:lraspp_mobilenet_v3_large",
    "deeplab": "torchvision-seg:deeplabv3_mobilenet_v3_large",
}


@pytest.fixture(scope="module")
def settings(
    write_cityscapes, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    folder = write_cityscapes(
        tmp_path_factory.mktemp("data"), CITIES, {"lindau": 2, "aachen": 1}, (32, 64)
    )
    data = {
        "dataset": "cityscapes",
        "data-dir": str(folder),
        "partition": "natural",
        "image-size": 64,
    }
    steps = {
        "num-server-rounds": 2,
        "local-steps": 2,
        "batch-size": 2,
        "learning-rate": 0.05,
    }
    return {**data, **steps, "model": MODELS["lraspp"]}


def test_images_are_twice_as_wide_as_high(settings: dict[str, Any]) -> None:
    config = Config.make(settings)
    assert data_of(config).shape == (3, 64, 128)
    assert data_of(Config.make({**settings, "image-size": 0})).shape == (3, 512, 1024)
    assert len(batchnorm_calls(make_model(config), config)) == 47


@pytest.mark.parametrize(
    ("strategy", "model"),
    [
        ("fedavg", "lraspp"),
        pytest.param("fedtan", "deeplab", marks=pytest.mark.slow),
        ("centralized", "lraspp"),
    ],
)
def test_a_segmentation_run_writes_its_results(
    strategy: str, model: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    config = Config.make({**settings, "strategy": strategy, "model": MODELS[model]})
    summary = run(config, tmp_path / "out")
    examples = [line["examples"] for line in lines_of(tmp_path / "out")]
    assert examples == [4 if strategy == "centralized" else 8] * 2, "images, not pixels"
    assert summary["headline"] == "test-miou"
    tests = partitioned_data(config, 2).test_view()
    result = evaluate(model_of(tmp_path / "out"), tests, task=SEGMENTATION)
    assert result.named("test-") == {
        key: summary["final"][key]
        for key in ("test-loss", "test-accuracy", "test-miou")
    }


def test_a_city_has_its_own_score_where_it_has_test_images(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    config = Config.make(
        {**settings, "strategy": "silobn", "eval-on": "personal-global,personal-own"}
    )
    summary = run(config, tmp_path / "out")
    assert summary["headline"] == "personal-global-miou"
    aachen, bremen = lines_of(tmp_path / "out")[-1]["clients"].values()
    assert (aachen["own-num-examples"], bremen["own-num-examples"]) == (1, 0)
    assert summary["final"]["personal-own-miou"] == aachen["own-miou"]
    both = (aachen["global-miou"] + bremen["global-miou"]) / 2
    assert summary["final"]["personal-global-miou"] == pytest.approx(both, rel=1e-12)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"model": "lenet"},
            (
                "dataset=cityscapes is for segmentation, but model=lenet gives one vector"
                " of outputs for each example. Use another data set, or one of the"
                " models torchvision-seg:<name>"
            ),
        ),
        (
            {"dataset": "digits"},
            (
                "dataset=digits is for classification, but"
                " model=torchvision-seg:lraspp_mobilenet_v3_large gives outputs for"
                " each pixel. Use another data set, or one of the models mlp, lenet"
            ),
        ),
    ],
)
def test_a_model_for_another_task_is_refused(
    changed: dict[str, Any], message: str, settings: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.make({**settings, **changed})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("partition", "clients"), [("natural", 2), ("domain", 2), ("iid", 5)]
)
def test_a_split_by_group_has_a_client_for_each_group_by_default(
    partition: str, clients: int, settings: dict[str, Any]
) -> None:
    assert count_clients(Config.make({**settings, "partition": partition})) == clients
    assert (
        count_clients(
            Config.make({**settings, "partition": partition, "num-clients": 3})
        )
        == 3
    )
