"""``train-only`` selects the moving entries of a run.

The tests also cover refusals and ``inspect``.
"""

from __future__ import annotations

import pytest

from fedbn_flwr.errors import ConfigError, NormLayerError
from fedbn_flwr.lab.runs.check_start import checked_config
from fedbn_flwr.lab.runs.run import run
from tests.support.runs import moved_entries

HEAD = {"model": "lenet", "train-only": "fc"}


@pytest.mark.parametrize("strategy", ["fedavg", "centralized"])
def test_what_moves(strategy: str, quick_run) -> None:
    _, out = quick_run(**HEAD, strategy=strategy, **{"weight-decay": 0.1})
    assert moved_entries(out) == {"fc.weight", "fc.bias"}


def test_reestimation_leaves_frozen_layers_out(quick_run) -> None:
    only = {"train-only": "conv2,norm2,fc"}
    moved = moved_entries(quick_run(model="lenet", recalibrate=True, **only)[1])
    assert moved & {"norm1.running_var", "norm2.running_var"} == {"norm2.running_var"}


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "fedbn"},
        {"strategy": "fedtan"},
        {"strategy": "fixbn"},
        {"recalibrate": True},
    ],
)
def test_a_method_for_batchnorm_is_refused_if_none_learns(
    settings, quick_config
) -> None:
    with pytest.raises(
        NormLayerError,
        match=r"2 BatchNorm layers \(norm1, norm2\), and train-only=fc freezes",
    ):
        checked_config(quick_config(**HEAD, **settings))


def test_a_bad_path_is_an_error_before_anything_is_written(
    quick_config, tmp_path
) -> None:
    with pytest.raises(
        ConfigError, match=r"'fc4' names no parameter of the model\. Near: 'fc"
    ):
        run(quick_config(model="lenet", **{"train-only": "fc4"}), tmp_path / "out")
    assert not (tmp_path / "out").exists()
