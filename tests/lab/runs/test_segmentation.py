"""Segmentation: small images with a class for each pixel."""

from __future__ import annotations

import pytest

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.partitioned.partitioned_data import partitioned_data
from fedbn_flwr.lab.runs.run import run
from fedbn_flwr.training.evaluation import evaluate
from fedbn_flwr.training.tasks import SEGMENTATION
from tests.support.pixels import SETTINGS
from tests.support.runs import QUICK, model_of, values_of


def test_a_segmentation_run_writes_its_results(tmp_path) -> None:
    own = {"batch-size": 2, "model": "tests.support.pixels:lraspp"}
    config = Config.make({**QUICK, **SETTINGS, **own})
    summary = run(config, tmp_path)
    assert values_of(tmp_path, "examples") == [8] * 2, "images, not pixels"
    assert summary["headline"] == "test-miou"
    tests = partitioned_data(config, 2).test_view()
    result = evaluate(model_of(tmp_path), tests, task=SEGMENTATION).named("test-")
    assert result.keys() == {"test-loss", "test-accuracy", "test-miou"}
    assert result.items() <= summary["final"].items()


def test_a_model_for_another_task_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        Config.make({**SETTINGS, "model": "lenet"})
    assert str(caught.value).startswith(
        "dataset=tests.support.pixels:images is for segmentation, but model=lenet gives"
        " one vector of outputs for each example. Use another data set, or your own"
        " model"
    )
