"""The command ``fedbn-flwr calibrate``, for a site that did not train."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import torch
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
from fedbn_flwr.lab.data import Subset
from fedbn_flwr.lab.report.words import template
from fedbn_flwr.lab.results.files import CLASS_MOMENTS_FILE, CONFIG_FILE
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
from fedbn_flwr.lab.results.predictions import SiteTest
from fedbn_flwr.lab.results.saved_model import Choice, saved_model
from fedbn_flwr.lab.results.summary import MODEL_DESCRIPTION
from fedbn_flwr.lab.results.tester import test_site
from fedbn_flwr.messages.records import to_state
from fedbn_flwr.training.tasks import Task

logger = logging.getLogger("flwr")

CAUTION = (
    "The predictions are sure enough to try the model here. Look at some of them first:"
    " this judgement does not see every fault, such as inputs that are turned, or a"
    " class that has another meaning here."
)
"""What a site does with a model that is trusted."""

_STATISTICS = {
    "none": "the statistics of the training sites",
    "all": "the statistics of this site, in every layer",
    "mix": "a mixture of the statistics of the training sites and of this site",
    "early": "the statistics of this site, only in the first layers",
    "matched": "the statistics of this site, corrected for its classes",
}


class CalibratedSite(NamedTuple):
    """The result of ``calibrate_run``.

    Attributes:
        what: a description of the model before the calibration.
        calibration: the calibrated model and the judgement.
        metric: the main metric of the run.
        tests: the tests of the model "before" and "after" the calibration, if the
            data have labels.
    """

    what: str
    calibration: Calibration
    metric: str
    tests: Mapping[str, SiteTest]


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
        out: a new folder for ``model.safetensors`` and ``config.yaml``, which
            ``evaluate`` reads, ``calibration.json``, ``calibration.html`` and, with
            ``with_predictions``, ``predictions.csv``.
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
    moments_file = run / CLASS_MOMENTS_FILE
    RunFolder.refuse_used(out)
    if way not in WAYS:
        raise unknown_name("way", way, WAYS)
    if way == "matched" and not moments_file.is_file():
        raise ConfigError(
            f"way=matched needs {moments_file}, which a run with class-moments=true"
            " writes. Use another way, or train again."
        )
    saved = saved_model(run, Choice(client=client))
    description, task = saved.description, task_of(saved)
    changed = description.code_changed()
    if changed:
        raise ConfigError(changed)
    if with_predictions and task.by_pixel:
        raise ConfigError(
            "predictions: the model has a prediction for each pixel, too many for a"
            " table. Leave predictions out."
        )
    site = read_new_data(saved, dataset, settings or {})
    if overlap(saved.config.dataset, dataset):
        logger.warning("%s", overlap(saved.config.dataset, dataset))

    # Calibrate without targets, and test with them if they are there.
    samples, inputs = site.examples.samples, _Inputs(site.examples, task)
    plain = saved.model.to(samples.device)
    moments = read_class_moments(moments_file) if moments_file.is_file() else None
    found = calibrate(plain, inputs, way, class_moments=moments, task=task)
    # The shares of classes come from predictions, so an untrusted model gives none.
    if not found.trusted:
        found = replace(found, class_mix=None)
    tests: dict[str, SiteTest] = {}
    files: dict[str, str | bytes] = {}
    if samples.labelled:
        for name, model in (("before", plain), ("after", found.model)):
            tests[name] = test_site(model, site.examples, task)
    if with_predictions:
        outputs = outputs_of(found.model, site.examples, task)
        columns = predictions(outputs, None, task, site.classes)
        files["predictions.csv"] = as_csv({**site.where, **columns})

    what = f"{saved.what}; calibrated by {found.way}"
    described = {"format": "pt", "what": what, MODEL_DESCRIPTION: description.to_json()}
    state = to_state(found.model.cpu().state_dict())
    files["model.safetensors"] = encode_safetensors(state, described)
    # With the settings of the run, the folder can be evaluated as a run.
    files[CONFIG_FILE] = (run / CONFIG_FILE).read_bytes()
    done = CalibratedSite(saved.what, found, task.score, tests)
    # Report only the last part of a path, because others read these files.
    kind, colon, path = dataset.partition(":")
    about: dict[str, Any] = {"run": run.resolve().name, "model": saved.what}
    about |= {"dataset": f"{kind}{colon}{Path(path).name}", "classes": site.classes}
    for key, value in vars(found).items():
        if key not in ("model", "probabilities"):
            about[key.replace("_", "-")] = value
    page = template("calibration.html").render(
        _page(found, site.classes),
        about=about,
        test=f"fedbn-flwr evaluate {quote(out.name)} --dataset LABELLED",
        version=version("fedbn-flwr"),
    )
    text = json.dumps(about, indent=2) + "\n"
    files |= {"calibration.html": page, "calibration.json": text}
    write_files(out, files)
    return done


def _page(found: Calibration, classes: Sequence[str]) -> dict[str, Any]:
    """Return the texts and tables of the page."""
    shift = max(found.shifts.values())
    facts = [
        ("statistics of BatchNorm", f"{found.way}: {_STATISTICS[found.way]}"),
        ("largest shift", f"{shift:.2f} standard deviations from the training sites"),
    ]
    if found.examples_to_label:
        label = f"{found.examples_to_label} of {found.num_examples}, before use"
        facts.append(("examples to label", label))
    return {
        "examples": found.num_examples,
        "trusted": found.trusted,
        "answer": found.warning or CAUTION,
        "reason": found.reason,
        "facts": facts,
        "classes": [
            (classes[number], f"{100 * share:.1f}")
            for number, share in enumerate(found.class_mix or ())
        ],
        "shifts": [(layer, f"{one:.2f}") for layer, one in found.shifts.items()],
    }


def decisions(test: SiteTest) -> str:
    """Return the accuracy, and the shares that the model and the labels call positive.

    A model whose AUROC is high may still call too many examples positive.
    """
    known = test.task.counting(test.targets)
    called, positive = (test.outputs[known] > 0).double(), test.targets[known].double()
    right = (called.flatten() == positive.flatten()).double().mean()
    return (
        f"accuracy {100 * float(right):.1f} %, {100 * float(called.mean()):.1f} % called"
        f" positive ({100 * float(positive.mean()):.1f} % of the labels)"
    )


class _Inputs:
    """The inputs of examples in batches, without targets. It can be read again."""

    def __init__(self, examples: Subset, task: Task) -> None:
        self._examples, positions = examples, torch.arange(len(examples))
        self._order = torch.split(positions, task.plain_test_batch)

    def __iter__(self) -> Iterator[Tensor]:
        for inputs, _ in self._examples.batches(self._order):
            yield inputs
