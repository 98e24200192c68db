"""A run folder with a key or a value that this version lacks is refused.

The error names it.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedbn_flwr.checked_file import read_checked, write_checked
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.finished_runs.evaluate import evaluate_run
from fedbn_flwr.lab.runs.run import run

GONE = [
    ({"key-that-went": 3}, "unknown key 'key-that-went'"),
    ({"norm": "batch-renorm"}, "unknown norm 'batch-renorm'"),
]


@pytest.fixture
def folder(quick_run: Any, tmp_path: Path) -> Path:
    _, made = quick_run()
    copy = tmp_path / "old"
    shutil.copytree(made, copy)
    return copy


@pytest.mark.parametrize(("gone", "named"), GONE)
def test_a_config_with_a_key_that_went_is_neither_resumed_nor_evaluated(
    folder: Path, gone: dict[str, Any], named: str
) -> None:
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | gone))
    with pytest.raises(ConfigError, match=named):
        Config.load(file, ["resume=true"])
    with pytest.raises(ConfigError, match=named):
        evaluate_run(folder, "digits")


@pytest.mark.parametrize(("gone", "named"), GONE)
def test_a_checkpoint_with_a_key_that_went_is_not_resumed(
    folder: Path, gone: dict[str, Any], named: str
) -> None:
    for path in (folder / "checkpoint").glob("round-*.safetensors"):
        content = read_checked(path)
        write_checked(path, {**content, "config": content["config"] | gone})
    config = Config.load(folder / "config.yaml", ["resume=true"])
    with pytest.raises(ConfigError, match=named):
        run(config, folder, workers=0)
