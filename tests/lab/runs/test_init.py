"""In a run with ``init``, only the server reads the file, and only at the start."""

from __future__ import annotations

import logging

import pytest
import safetensors.torch
import torch

from fedbn_flwr.errors import StateError
from fedbn_flwr.lab.runs.run import run
from tests.support.runs import state_of
from tests.support.trained import other_lenet


def test_only_the_server_needs_the_file_and_a_resumed_run_does_not(
    quick_config,
    tmp_path,
    same_run,
    caplog,
) -> None:
    path, trained = tmp_path / "start.safetensors", other_lenet()
    safetensors.torch.save_file(trained, path)
    settings = {
        "model": "lenet",
        "strategy": "fedbn",
        "init": str(path),
        "checkpoint-every": 1,
        "learning-rate": 1e-4,
    }

    def start(name: str, **more) -> dict:
        return run(quick_config(**settings, **more), tmp_path / name)

    with caplog.at_level(logging.INFO, "flwr"):
        whole = start("whole")
    assert f"init={path}: {len(trained)} entries loaded" in caplog.text
    start("cut", **{"num-server-rounds": 1})
    path.unlink()
    same_run(whole, start("cut", resume=True))
    # It began there.
    saved = state_of(tmp_path / "whole")["fc1.weight"]
    assert torch.allclose(saved, trained["fc1.weight"], atol=0.005)
    with pytest.raises(StateError, match="is not a file"):
        start("new")
    assert not (tmp_path / "new").exists()
