"""``fedbn-flwr evaluate``: the model of a finished run on any data, with its metrics and predictions."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from fedbn_flwr.batchnorm.reestimation import load_statistics, reestimate_statistics
from fedbn_flwr.checked_file import write_atomically
from fedbn_flwr.errors import ConfigError, EngineError, unknown_name
from fedbn_flwr.lab.finished_runs.examples import ALL, DataPart, choose_examples, overlap
from fedbn_flwr.lab.finished_runs.new_data import config_of_data, data_for_model
from fedbn_flwr.lab.finished_runs.predictions import predictions_csv
from fedbn_flwr.lab.finished_runs.saved_model import Choice, SavedModel, load_model
from fedbn_flwr.lab.output.folder import RunFolder
from fedbn_flwr.lab.setup import on_device
from fedbn_flwr.training.batches import Batches
from fedbn_flwr.training.evaluation import EvalResult, evaluate
from fedbn_flwr.training.tasks import Task

__all__ = ["ADAPT", "DataPart", "Evaluation", "Row", "evaluate_run"]

logger = logging.getLogger("flwr")

ADAPT = "adapt"
"""The BN whose statistics are re-estimated on the new inputs; no target is used."""
AS_SAVED, REESTIMATED = "as saved", "re-estimated"

_CLIENT = re.compile(r"own:(\d+)")
_PARTS = {"train": "the training examples", "test": "the test examples", "all": "all examples"}


class Evaluation(NamedTuple):
    """What ``evaluate_run`` finds.

    Attributes:
        what: what model it is, and how the data become its inputs and targets.
        rows: the results: with all data first, then by group. With ``ADAPT`` those of the statistics as saved come
            first, and those of the re-estimated ones follow.
    """

    what: str
    rows: list[Row]


@dataclass(frozen=True)
class Row:
    """The result on some of the data, all or one group; with which BN."""

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
) -> Evaluation:
    """Evaluate the model of a run on any data.

    The run gives the model, the normalisation of the inputs and the size of the images; ``data`` gives the rest. What
    reading the data left out or changed is logged, and what makes the results doubtful, as warnings.

    Args:
        run: the run's folder.
        data: config keys of the data, at least ``dataset``; for own data those of the run are the defaults.
        bn: "" for the global model, "averaged" or "own:CLIENT" for that BN, ``ADAPT`` for statistics that are
            re-estimated on all these inputs.
        part: the examples to use; "" = all of own data without a split of their own that are not those of the run, else
            the test examples.
        out: a new folder for ``predictions.csv`` and ``metrics.json``; None = nothing is written.
        state_dir: the state folder of a site, for its own model; "own:CLIENT" chooses where it has several.

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
    config = config_of_data(saved, data)
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
    views = [(ALL, everyone), *groups.items()]
    rows: list[Row] = []
    predicted: dict[str, Tensor] = {}
    for statistics in (AS_SAVED, REESTIMATED) if bn == ADAPT else (AS_SAVED,):
        if statistics == REESTIMATED:
            _reestimate(model, everyone, task, saved)
        outputs: list[Tensor] = []

        def keep(values: Tensor, _: Tensor, kept: list[Tensor] = outputs) -> None:
            kept.append(values.cpu())

        for name, view in views:
            predicts = out is not None and name == ALL and not task.by_pixel
            result = evaluate(model, view, task=task, on_batch=keep if predicts else None)
            rows.append(Row(name, statistics, result))
        if outputs:
            predicted[statistics] = torch.cat(outputs)
    if out is not None:
        predictions = ""
        if predicted:
            classes, place = saved.description.classes, examples.place()
            predictions = predictions_csv(predicted, everyone.targets, task, classes, place)
        about = {"model": what, "dataset": config.dataset, "part": examples.part}
        _write(out, predictions, {**about, "notes": info.notes, "warnings": warnings}, rows)
    return Evaluation(what, rows)


def _choice(bn: str, state_dir: Path | None) -> Choice:
    if bn in ("", ADAPT):
        return Choice(state_dir=state_dir)
    if client := _CLIENT.fullmatch(bn):
        return Choice(client=int(client[1]), state_dir=state_dir)
    if bn != "averaged":
        raise ConfigError(f"bn={bn!r} is unknown. Allowed: averaged, own:CLIENT (e.g. own:2), {ADAPT}, or no bn.")
    return Choice(averaged=True, state_dir=state_dir)


def _reestimate(model: nn.Module, data: Batches, task: Task, saved: SavedModel) -> None:
    """Give the model the BN statistics of these inputs.

    Raises:
        ConfigError: they cannot be re-estimated: there is no BatchNorm, or one example.
    """
    moments = reestimate_statistics(model, data, batch_size=task.test_batch)
    if not moments:
        raise ConfigError(
            f"bn={ADAPT} re-estimates BN statistics from two or more examples. The data have {len(data)}, and "
            f"model={saved.config.model} with norm={saved.config.norm} needs BatchNorm. Leave bn out."
        )
    load_statistics(model, moments)


def _write(out: Path, predictions: str, about: Mapping[str, Any], rows: Sequence[Row]) -> None:
    results = [{"data": row.data, "statistics": row.statistics, **_numbers(row.result)} for row in rows]
    files = {"predictions.csv": predictions} if predictions else {}
    _write_files(out, {**files, "metrics.json": {**about, "results": results}})


def _write_files(out: Path, files: Mapping[str, Any]) -> None:
    """Write files by name, text or what JSON holds."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content, indent=2, allow_nan=False) + "\n"
            write_atomically(out / name, text)
    except OSError as error:
        raise EngineError(f"out={str(out)!r} cannot be written: {error}.") from error


def _numbers(result: EvalResult) -> dict[str, float | None]:
    numbers = {name: None if math.isnan(value) else value for name, value in result.named().items()}  # JSON has no NaN
    return {"examples": result.num_examples, **numbers}
