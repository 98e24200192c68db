"""``fedbn-flwr evaluate``: the model of a finished run on any data, with its metrics and predictions."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from torch import Tensor, nn

from fedbn_flwr.batchnorm.adaptation import TEST_BN_MODES, TestBN, evaluate_adapted
from fedbn_flwr.batchnorm.parts import Part, split_state
from fedbn_flwr.batchnorm.reestimation import load_statistics, reestimate_statistics
from fedbn_flwr.checked_file import write_atomically
from fedbn_flwr.errors import ConfigError, EngineError, unknown_name
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.finished_runs.examples import DataPart, choose_examples, overlap
from fedbn_flwr.lab.finished_runs.new_data import config_of_data, data_for_model
from fedbn_flwr.lab.finished_runs.predictions import LastOutputs, predictions_csv
from fedbn_flwr.lab.finished_runs.saved_model import Choice, SavedModel, load_model
from fedbn_flwr.lab.output.folder import RunFolder
from fedbn_flwr.lab.setup import on_device
from fedbn_flwr.training.batches import Batches
from fedbn_flwr.training.evaluation import EvalResult
from fedbn_flwr.training.tasks import Task

__all__ = ["ADAPT", "DataPart", "Row", "evaluate_run"]

logger = logging.getLogger("flwr")

ADAPT = "adapt"
"""The BN whose statistics are re-estimated on the new inputs; no target is used."""

_AS_SAVED, _REESTIMATED = "as saved", "re-estimated"
_CLIENT = re.compile(r"own:(\d+)")
_PARTS = {"train": "the training examples", "test": "the test examples", "all": "all examples"}


@dataclass(frozen=True)
class Row:
    """The result on some of the data: all, or those of one group; with which BN statistics."""

    data: str
    statistics: str
    result: EvalResult


def evaluate_run(
    run: Path,
    data: Mapping[str, Any],
    bn: str = "",
    part: DataPart | Literal[""] = "",
    out: Path | None = None,
    state_dir: Path | None = None,
) -> tuple[str, list[Row]]:
    """Evaluate the model of a run on any data.

    The run gives the model, the normalisation of the inputs and the size of the images; ``data`` gives the rest. What
    reading the data left out or changed is logged, and what makes the results doubtful, as warnings.

    Args:
        run: the run's folder.
        data: config keys of the data, at least ``dataset``; for own data those of the run are the defaults. Beside a
            mode of test-time BatchNorm its ``test-bn-...``, too.
        bn: "" for the global model, "averaged" or "own:CLIENT" for that BN, ``ADAPT``, or a mode of ``TestBN``: each
            group of the data then has statistics of its own inputs.
        part: the examples to use; "" = all of own data without a split of their own that are not those of the run, else
            the test examples.
        out: a new folder for ``predictions.csv`` and ``metrics.json``; None = nothing is written.
        state_dir: the state folder of a site, for its own model; "own:CLIENT" chooses where it has several.

    Returns:
        What model it is and how the data become its inputs and targets, and the results: with all data first, then by
        group. With ``ADAPT`` or a mode of ``TestBN`` those of the statistics as saved come first.

    Raises:
        ConfigError: the data do not fit the model, or a setting is bad.
        DataError: the data are missing, or do not fit the task.
        StateError: the run lacks the model, or a part of it.
        EngineError: the folder cannot be written.
    """
    if part and part not in get_args(DataPart):
        raise unknown_name("part", part, get_args(DataPart))
    if out is not None:
        RunFolder.refuse_used(out)
    saved = load_model(run, _choice(bn, state_dir))
    config = config_of_data(saved, data, bn)
    new_data, notes = data_for_model(saved, config, {"class-names", "positive-values"} & data.keys())
    examples = choose_examples(saved, config, new_data, part)
    if names := examples.data.held_out_names:
        notes.append(f"without the held-out clients ({', '.join(names)})")
    what = "; ".join([saved.what, *notes, f"on {_PARTS[examples.part]}"])
    info = config.data_info()
    about_run = [saved.description.code_changed(), overlap(config, saved)]
    warnings = [*filter(None, about_run), *info.warnings, *examples.doubts()]
    for note in info.notes:
        logger.info("%s", note)
    for warning in warnings:
        logger.warning("%s", warning)

    model, task = on_device(saved.model, config), config.test_task()
    everyone, groups = examples.everyone(), examples.groups()
    rows: list[Row] = []
    outputs = LastOutputs(model, wanted=out is not None and not task.by_pixel)
    predicted: dict[str, Tensor] = {}
    for statistics, by in _statistics(model, config, bn).items():
        if statistics == _REESTIMATED:
            _reestimate(model, everyone, task, saved)
        with outputs:
            rows.append(Row("all", statistics, evaluate_adapted(model, everyone, by, task)))
        if outputs.wanted:
            predicted[statistics] = outputs.last(len(everyone))
        rows += [Row(name, statistics, evaluate_adapted(model, view, by, task)) for name, view in groups.items()]

    if out is not None:
        predictions = ""
        if predicted:
            classes, place = saved.description.classes, examples.place()
            predictions = predictions_csv(predicted, everyone.targets, task, classes, place)
        about = {"model": what, "dataset": config.dataset, "part": examples.part}
        _write(out, predictions, {**about, "notes": info.notes, "warnings": warnings}, rows)
    return what, rows


def _choice(bn: str, state_dir: Path | None) -> Choice:
    if bn in ("", ADAPT, *TEST_BN_MODES):
        return Choice(state_dir=state_dir)
    if client := _CLIENT.fullmatch(bn):
        return Choice(client=int(client[1]), state_dir=state_dir)
    if bn != "averaged":
        others = ", ".join([ADAPT, *TEST_BN_MODES])
        raise ConfigError(f"bn={bn!r} is unknown. Allowed: averaged, own:CLIENT (e.g. own:2), {others}, or no bn.")
    return Choice(averaged=True, state_dir=state_dir)


def _statistics(model: nn.Module, config: Config, bn: str) -> dict[str, TestBN | None]:
    """Return the BN statistics to evaluate with, by their names in the results.

    Raises:
        ConfigError: the model has no statistics to replace with those of the test inputs.
    """
    by = config.test_bn_settings()
    if by and Part.STATISTICS not in split_state(model).part_of.values():
        raise ConfigError(f"bn={bn} needs BatchNorm with running statistics, and the model has none. Leave bn out.")
    statistics: dict[str, TestBN | None] = {_AS_SAVED: None}
    if bn == ADAPT:
        statistics[_REESTIMATED] = None
    elif by:
        statistics[str(by)] = by
    return statistics


def _reestimate(model: nn.Module, data: Batches, task: Task, saved: SavedModel) -> None:
    """Give BatchNorm the mean and the (biased) variance of the new inputs under these weights."""
    moments = reestimate_statistics(model, data, batch_size=task.test_batch)
    if not moments:
        raise ConfigError(
            f"bn={ADAPT} re-estimates BN statistics from two or more examples. The data have {len(data)}, and "
            f"model={saved.config.model} with norm={saved.config.norm} needs BatchNorm. Leave bn out."
        )
    load_statistics(model, moments)


def _write(out: Path, predictions: str, about: Mapping[str, Any], rows: Sequence[Row]) -> None:
    results = [{"data": row.data, "statistics": row.statistics, **_numbers(row.result)} for row in rows]
    try:
        out.mkdir(parents=True, exist_ok=True)
        if predictions:
            write_atomically(out / "predictions.csv", predictions)
        write_atomically(out / "metrics.json", json.dumps({**about, "results": results}, indent=2) + "\n")
    except OSError as error:
        raise EngineError(f"out={str(out)!r} cannot be written: {error}.") from error


def _numbers(result: EvalResult) -> dict[str, float | None]:
    numbers = {name: None if math.isnan(value) else value for name, value in result.named().items()}  # JSON has no NaN
    return {"examples": result.num_examples, **numbers}
