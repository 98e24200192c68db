"""The command ``fedbn-flwr evaluate``, for a finished run's model on new data."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.results.folder import RunFolder
from fedbn_flwr.lab.results.new_data import (
    as_csv,
    outputs_of,
    overlap,
    predictions,
    read_new_data,
    task_of,
    write_files,
)
from fedbn_flwr.lab.results.saved_model import Choice, saved_model
from fedbn_flwr.training.evaluation import EvalResult, evaluate
from fedbn_flwr.training.own_task import OwnTask

logger = logging.getLogger("flwr")

ALL = "all"


@dataclass(frozen=True)
class Row:
    """The result on all examples or on the examples of one group."""

    data: str
    result: EvalResult


class Evaluation(NamedTuple):
    """The results of ``evaluate_run``.

    Attributes:
        what: a description of the model.
        rows: the results, first on all data, then by group.
    """

    what: str
    rows: list[Row]


def evaluate_run(
    run: Path,
    dataset: str,
    out: Path | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    client: int | None = None,
    state_dir: Path | None = None,
) -> Evaluation:
    """Evaluate the model of a run on new data, see ``read_new_data``.

    Without labels, there are only predictions.

    Args:
        run: the run's folder.
        dataset: the new data.
        out: a new folder for ``predictions.csv`` and ``metrics.json``; None writes
            nothing.
        settings: the config keys ``data-dir`` and ``device``.
        client: the own model of this client. Default: the global model.
        state_dir: the state folder of a site, for the site's own model. If the folder
            has several clients, ``client`` chooses one.

    Raises:
        ConfigError: the data do not fit the model, or a setting is bad.
        DataError: the data are missing, or do not fit the task.
        StateError: the run lacks the model, or a part of it.
        EngineError: the folder cannot be written.
    """
    # Refuse a used folder before any work.
    if out is not None:
        RunFolder.refuse_used(out)
    saved = saved_model(run, Choice(client=client, state_dir=state_dir))
    data, task = read_new_data(saved, dataset, settings or {}), task_of(saved)
    labelled = data.examples.samples.labelled
    if not labelled and (out is None or task.by_pixel):
        raise ConfigError(
            f"dataset={dataset!r} has no labels of the classes {', '.join(data.classes)}."
            " Without labels, --out DIR writes the predictions, unless they are pixels."
        )
    model = saved.model.to(data.examples.samples.device)
    warnings = [
        saved.description.code_changed(),
        overlap(saved.config.dataset, dataset),
    ]
    warnings = [warning for warning in warnings if warning]
    for warning in warnings:
        logger.warning("%s", warning)

    rows = []
    if labelled:
        # A group may have the name "all", too.
        for name, view in ((ALL, data.examples), *data.groups.items()):
            rows.append(Row(name, evaluate(model, view, task=task)))
    if out is not None:
        about = {"model": saved.what, "dataset": dataset, "warnings": warnings}
        files: dict[str, str | bytes] = {"metrics.json": _json(about, rows)}
        # A table of single pixels would be larger than the images.
        if not task.by_pixel and not isinstance(task, OwnTask):
            outputs = outputs_of(model, data.examples, task)
            targets = data.examples.targets if labelled else None
            columns = predictions(outputs, targets, task, data.classes)
            files["predictions.csv"] = as_csv({**data.where, **columns})
        write_files(out, files)
    return Evaluation(saved.what, rows)


def _json(about: Mapping[str, Any], rows: Sequence[Row]) -> str:
    results = []
    for row in rows:
        about_row: dict[str, Any] = {
            "data": row.data,
            "examples": row.result.num_examples,
        }
        # JSON has no NaN.
        for name, value in row.result.named().items():
            about_row[name] = None if math.isnan(value) else value
        results.append(about_row)
    return json.dumps({**about, "results": results}, indent=2, allow_nan=False) + "\n"
