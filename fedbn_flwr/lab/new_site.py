"""The command ``fedbn-flwr calibrate``, for a site that did not train."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from markupsafe import Markup
from torch import Tensor

from fedbn_flwr.batchnorm.calibration import (
    WAYS,
    Calibration,
    CalibrationWay,
    calibrate,
)
from fedbn_flwr.batchnorm.class_moments import read_class_moments
from fedbn_flwr.checked_file import encode_safetensors
from fedbn_flwr.errors import ConfigError, unknown_name
from fedbn_flwr.lab.answer import template
from fedbn_flwr.lab.config.data import in_test_batches, measuring
from fedbn_flwr.lab.data import (
    DATASETS,
    FUNCTION,
    OwnData,
    Subset,
    is_own,
    load_dataset,
    own_info,
)
from fedbn_flwr.lab.files import CLASS_MOMENTS_FILE
from fedbn_flwr.lab.finished_runs import evaluate
from fedbn_flwr.lab.finished_runs.saved_model import Choice, saved_model
from fedbn_flwr.lab.output.folder import RunFolder
from fedbn_flwr.lab.output.intervals import Interval, interval
from fedbn_flwr.lab.output.site_tests import test_site
from fedbn_flwr.lab.output.summary import MODEL_DESCRIPTION, ModelDescription
from fedbn_flwr.lab.setup import pick_device
from fedbn_flwr.messages.records import to_state
from fedbn_flwr.training.batches import inputs_for
from fedbn_flwr.training.freezing import in_eval_mode
from fedbn_flwr.training.tasks import TASKS, Task

logger = logging.getLogger("flwr")

# the keys of the new data; all other settings come from the run
_OF_DATA = ("data-dir", "device")


CAUTION = (
    "The predictions are sure enough to try the model here. Look at some of them first:"
    " this judgement does not see every fault, such as inputs that are turned, or a"
    " class that has another meaning here."
)
"""What a site does with a model that is trusted."""


class CalibratedSite(NamedTuple):
    """The result of ``calibrate_run``.

    Attributes:
        what: a description of the model before the calibration.
        calibration: the calibrated model and the judgement.
        metric: the main metric of the run.
        tests: this metric of the model "before" and "after" the calibration, if the
            data have labels.
    """

    what: str
    calibration: Calibration
    metric: str
    tests: Mapping[str, Interval]


def calibrate_run(
    run: Path,
    dataset: str,
    out: Path,
    way: CalibrationWay = "auto",
    *,
    settings: Mapping[str, Any] | None = None,
    client: int | None = None,
    with_predictions: bool = False,
) -> CalibratedSite:
    """Calibrate a run's model at a new site, and write it with a page about it.

    The run determines the model, the normalisation of the inputs and the shape of the
    images. All examples of own data are used, or the test examples if the data have a
    split. Labels change no file.

    Args:
        run: the run's folder. Its ``class_moments.npz`` is used if it is there.
        dataset: the new data, maybe without labels. A function is called for site 0.
        out: a new folder for ``model.safetensors``, ``calibration.json``, ``calibration.html``
            and, with ``with_predictions``, ``predictions.csv``.
        way: a way of ``fedbn_flwr.calibrate``.
        settings: the config keys ``data-dir`` and ``device``.
        client: start from the own model of this client. By default, start from the
            global model, with averaged BN if clients keep theirs.
        with_predictions: whether to write the prediction for each example.

    Raises:
        ConfigError: an argument is not allowed, or the data do not fit the model.
        DataError: the data are missing, or have fewer than two examples.
        StateError: the run lacks the model, or a part of it.
        NormLayerError: the model has no BatchNorm.
        EngineError: the folder cannot be written.
    """
    # Check all arguments before any work.
    moments_file, settings = run / CLASS_MOMENTS_FILE, settings or {}
    RunFolder.refuse_used(out)
    if way not in WAYS:
        raise unknown_name("way", way, WAYS)
    others = ", ".join(key for key in settings if key not in _OF_DATA)
    if others:
        raise ConfigError(
            f"{others}: calibrate takes only {' and '.join(_OF_DATA)}. All other"
            " settings come from the run. Remove these keys."
        )
    if way == "matched" and not moments_file.is_file():
        raise ConfigError(
            f"way=matched needs {moments_file}, which a run with class-moments=true"
            " writes. Use another way, or train again."
        )
    saved = saved_model(run, Choice(client=client))
    description, ran = saved.description, saved.config.dataset
    task = measuring(TASKS[description.task], saved.config.metrics)
    task = in_test_batches(task, description.shape, saved.config.batch_size)
    _check_run(description, ran, dataset, with_predictions and task.by_pixel)
    site = _Site.read(description, dataset, settings)
    if evaluate.overlap(ran, dataset):
        logger.warning("%s", evaluate.overlap(ran, dataset))

    # Calibrate without targets, and test with them if they are there.
    samples, inputs = site.examples.samples, _Inputs(site.examples, task)
    plain = saved.model.to(samples.device)
    moments = read_class_moments(moments_file) if moments_file.is_file() else None
    found = calibrate(plain, inputs, way, class_moments=moments, task=task)
    tests: dict[str, Interval] = {}
    files: dict[str, str | bytes] = {}
    if samples.labelled:
        for name, model in (("before", plain), ("after", found.model)):
            tests[name] = interval(test_site(model, site.examples, task))
    if with_predictions:
        columns = {**site.where, **_predicted(found.model, inputs, task, site.classes)}
        files["predictions.csv"] = evaluate.as_csv(columns)

    what = f"{saved.what}; calibrated by {found.way}"
    described = {"format": "pt", "what": what, MODEL_DESCRIPTION: description.to_json()}
    state = to_state(found.model.cpu().state_dict())
    files["model.safetensors"] = encode_safetensors(state, described)
    done = CalibratedSite(saved.what, found, task.score, tests)
    # Report only the last part of a path, because others read these files.
    kind, colon, path = dataset.partition(":")
    about: dict[str, Any] = {"run": run.resolve().name, "model": saved.what}
    about |= {"dataset": f"{kind}{colon}{Path(path).name}", "classes": site.classes}
    for key, value in vars(found).items():
        if key not in ("model", "probabilities"):
            about[key.replace("_", "-")] = value
    here = Path(__file__).parent
    page = template(here / "calibration.html").render(
        site=done,
        found=found,
        about=about,
        caution=CAUTION,
        style=Markup((here / "report.css").read_text(encoding="utf-8")),
        version=version("fedbn-flwr"),
    )
    text = json.dumps(about, indent=2) + "\n"
    files |= {"calibration.html": page, "calibration.json": text}
    evaluate.write_files(out, files)
    return done


def _check_run(
    description: ModelDescription, ran: str, dataset: str, pixels: bool
) -> None:
    """Raise ConfigError if the model or the data of a run cannot be used."""
    problems = [description.code_changed()]
    if is_own(dataset) and evaluate.place(dataset) == evaluate.place(ran):
        problems.append(
            f"dataset={dataset!r} are the data of the run. calibrate is for a site that"
            " did not train: give its data. For the run's own sites, use `fedbn-flwr"
            " evaluate`."
        )
    if pixels:
        problems.append(
            "predictions: the model has a prediction for each pixel, too many for a"
            " table. Leave predictions out."
        )
    if any(problems):
        raise ConfigError("\n".join(filter(None, problems)))


@dataclass(frozen=True)
class _Site:
    """The examples of the new site.

    Attributes:
        examples: the examples, normalised as in the run.
        where: the columns of ``predictions.csv`` that name the examples.
        classes: the names of the run's classes.
    """

    examples: Subset
    where: Mapping[str, Sequence[Any]]
    classes: tuple[str, ...]

    @classmethod
    def read(
        cls, description: ModelDescription, dataset: str, settings: Mapping[str, Any]
    ) -> _Site:
        # A binary task has one output and two classes.
        count = description.num_classes
        numbers = range(2 if description.task == "binary" else count)
        classes, own = description.classes or tuple(map(str, numbers)), None
        if is_own(dataset):
            kind, path = OwnData.parse(dataset)
            own = OwnData(kind, path, description.task, count, test_share=1.0)
            sites = (0,) if kind == FUNCTION else ()
            own = replace(own, sites=sites, known_classes=classes)
        elif dataset not in DATASETS:
            raise unknown_name("dataset", dataset, DATASETS)
        info = DATASETS[dataset] if own is None else own_info(own)
        evaluate.refuse_other_task(description, info.task, info.num_classes, dataset)
        images = len(description.shape) == 3
        channels, size = description.shape[:2] if images else (None, None)
        device = pick_device(str(settings.get("device", "auto")))
        folder = str(settings.get("data-dir", ""))
        data = load_dataset(info, folder, channels, size, device)
        evaluate.refuse_unfit(description, data, dataset)
        mean, std = description.mean, description.std
        examples = Subset(data.test, None, mean=mean, std=std)
        return cls(examples, evaluate.where_in(data, own), classes)


class _Inputs:
    """The inputs of examples in batches, without targets. It can be read again."""

    def __init__(self, examples: Subset, task: Task) -> None:
        self._examples, positions = examples, torch.arange(len(examples))
        self._order = torch.split(positions, task.plain_test_batch)

    def __iter__(self) -> Iterator[Tensor]:
        for inputs, _ in self._examples.batches(self._order):
            yield inputs


def _predicted(
    model: torch.nn.Module, batches: _Inputs, task: Task, classes: Sequence[str]
) -> dict[str, list[Any]]:
    """Return the columns of ``predictions``, and the name of the class."""
    prepared = inputs_for(model)
    with in_eval_mode(model), torch.no_grad():
        outputs = [model(prepared(inputs)).cpu() for inputs in batches]
    columns = evaluate.predictions(torch.cat(outputs), None, task, classes)
    if task.in_columns and not getattr(task, "single", False):
        return {**columns}
    named = [classes[int(number)] for number in columns["prediction"]]
    return {"class": named, **columns}
