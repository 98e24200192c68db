"""A run folder with a key that this version lacks is refused.

The error names the key.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from fedbn_flwr.checked_file import read_checked, write_checked
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.finished_runs.evaluate import evaluate_run
from fedbn_flwr.lab.runs.run import run


@pytest.fixture
def folder(quick_run: Any, tmp_path: Path) -> Path:
    _, made = quick_run()
    copy = tmp_path / "old"
    shutil.copytree(made, copy)
    return copy


def test_a_config_with_a_key_that_went_is_neither_resumed_nor_evaluated(
    folder: Path,
) -> None:
    with (folder / "config.yaml").open("a") as file:
        file.write("key-that-went: 3\n")
    with pytest.raises(ConfigError, match="unknown key 'key-that-went'"):
        Config.load(folder / "config.yaml", ["resume=true"])
    with pytest.raises(ConfigError, match="unknown key 'key-that-went'"):
        evaluate_run(folder, {"dataset": "digits"})


def test_a_checkpoint_with_a_key_that_went_is_not_resumed(folder: Path) -> None:
    for path in (folder / "checkpoint").glob("round-*.safetensors"):
        content = read_checked(path)
        write_checked(
            path, {**content, "config": {**content["config"], "key-that-went": 3}}
        )
    config = Config.load(folder / "config.yaml", ["resume=true"])
    with pytest.raises(ConfigError, match="unknown key 'key-that-went'"):
        run(config, folder, workers=0)
