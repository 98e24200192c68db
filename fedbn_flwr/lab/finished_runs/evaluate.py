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

from fedbn_flwr.batchnorm.adaptation import TEST_BN_MODES, TestBN, evaluate_adapted
from fedbn_flwr.batchnorm.parts import Part, split_state
from fedbn_flwr.checked_file import write_atomically
from fedbn_flwr.errors import ConfigError, EngineError, unknown_name
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.finished_runs.examples import ALL, DataPart, choose_examples, overlap
from fedbn_flwr.lab.finished_runs.new_data import config_of_data, data_for_model
from fedbn_flwr.lab.finished_runs.new_site import ADAPT, AS_SAVED, OF_A_SITE, Choices, Load, choices
from fedbn_flwr.lab.finished_runs.predictions import predictions_csv
from fedbn_flwr.lab.finished_runs.saved_model import BLEND, NEAREST, Choice, load_model
from fedbn_flwr.lab.output.folder import RunFolder
from fedbn_flwr.lab.setup import on_device
from fedbn_flwr.training.evaluation import EvalResult

__all__ = ["ADAPT", "DataPart", "Evaluation", "Row", "evaluate_run"]

logger = logging.getLogger("flwr")

_CLIENT = re.compile(r"own:(\d+)")
_PARTS = {"train": "the training examples", "test": "the test examples", "all": "all examples"}


class Evaluation(NamedTuple):
    """What ``evaluate_run`` finds.

    Attributes:
        what: what model it is, and how the data become its inputs and targets.
        rows: the results: with all data first, then by group. With ``OF_A_SITE`` or a mode of ``TestBN`` those of the
            statistics as saved come first; of ``OF_A_SITE`` one is chosen, without a look at targets, and the others
            say what it gains or loses.
    """

    what: str
    rows: list[Row]


@dataclass(frozen=True)
class Row:
    """The result on some of the data, all or one group; with which BN, and whether this is the one to use."""

    data: str
    statistics: str
    result: EvalResult
    chosen: bool = False


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
        data: config keys of the data, at least ``dataset``; for own data those of the run are the defaults. Beside a
            mode of test-time BatchNorm its ``test-bn-...``, too.
        bn: "" for the global model, "averaged" or "own:CLIENT" for that BN; ``OF_A_SITE``: BN by statistics of all
            these inputs; or a mode of ``TestBN``: each group of the data then has statistics of its own inputs.
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
    views = [(ALL, everyone), *groups.items()]
    rows: list[Row] = []
    predicted: dict[str, Tensor] = {}
    own = {name: value.clone() for name, value in model.state_dict().items()}
    of_site = choices(model, everyone, task, saved, bn) if bn in OF_A_SITE else _as_saved()
    if of_site.why:
        what = f"{what}; {of_site.why}"
    for statistics, load, by in _tests(model, config, bn, of_site):
        model.load_state_dict(own)
        load(model)
        outputs: list[Tensor] = []

        def keep(values: Tensor, _: Tensor, kept: list[Tensor] = outputs) -> None:
            kept.append(values.cpu())

        for name, view in views:
            predicts = out is not None and name == ALL and not task.by_pixel
            result = evaluate_adapted(model, view, by, task, keep if predicts else None)
            rows.append(Row(name, statistics, result, statistics == of_site.chosen))
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
    if bn in ("", ADAPT, *TEST_BN_MODES):
        return Choice(state_dir=state_dir)
    if bn in (NEAREST, BLEND):
        return Choice(state_dir=state_dir, parts=True)
    if client := _CLIENT.fullmatch(bn):
        return Choice(client=int(client[1]), state_dir=state_dir)
    if bn != "averaged":
        others = ", ".join([*OF_A_SITE, *TEST_BN_MODES])
        raise ConfigError(f"bn={bn!r} is unknown. Allowed: averaged, own:CLIENT (e.g. own:2), {others}, or no bn.")
    return Choice(averaged=True, state_dir=state_dir)


def _as_saved() -> Choices:
    """Return the choice of a test that has none."""
    return Choices({AS_SAVED: lambda model: None}, "", "")


def _tests(model: nn.Module, config: Config, bn: str, of_site: Choices) -> list[tuple[str, Load, TestBN | None]]:
    """Return the tests: their names in the results, what loads the BN of each, and test-time statistics.

    Raises:
        ConfigError: the model has no statistics to replace with those of the test inputs.
    """
    by = config.test_bn_settings()
    if by and Part.STATISTICS not in split_state(model).part_of.values():
        raise ConfigError(f"bn={bn} needs BatchNorm with running statistics, and the model has none. Leave bn out.")
    tests: list[tuple[str, Load, TestBN | None]] = [(name, load, None) for name, load in of_site.models.items()]
    return tests + ([(str(by), of_site.models[AS_SAVED], by)] if by else [])


def _write(out: Path, predictions: str, about: Mapping[str, Any], rows: Sequence[Row]) -> None:
    chosen = any(row.chosen for row in rows)
    results = [
        {"data": row.data, "statistics": row.statistics, **({"chosen": row.chosen} if chosen else {})}
        | _numbers(row.result)
        for row in rows
    ]
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
