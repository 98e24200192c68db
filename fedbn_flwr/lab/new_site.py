"""The command ``fedbn-flwr calibrate``, for a site that did not train."""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbn_flwr.batchnorm.calibration import (
    WAYS,
    Calibration,
    CalibrationWay,
    calibrate,
    examples_to_label,
)
from fedbn_flwr.batchnorm.class_moments import read_class_moments
from fedbn_flwr.checked_file import encode_safetensors
from fedbn_flwr.client.personal_model import metadata
from fedbn_flwr.errors import ConfigError, unknown_name
from fedbn_flwr.lab.data import Subset
from fedbn_flwr.lab.report.words import ends, template
from fedbn_flwr.lab.results.columns import COLUMNS, column_names, evidence
from fedbn_flwr.lab.results.files import (
    CLASS_MOMENTS_FILE,
    CONFIG_FILE,
    command,
    read_json,
)
from fedbn_flwr.lab.results.folder import RunFolder, trusting
from fedbn_flwr.lab.results.intervals import interval
from fedbn_flwr.lab.results.label_verdict import (
    LabelVerdict,
    figures,
    table_of,
    threshold_of_sites,
    verdict,
)
from fedbn_flwr.lab.results.new_data import (
    as_csv,
    outputs_of,
    overlap,
    predictions,
    read_new_data,
    task_of,
    write_files,
)
from fedbn_flwr.lab.results.numbers import shown, with_unit
from fedbn_flwr.lab.results.predictions import BATCH, SiteTest, read_predictions
from fedbn_flwr.lab.results.saved_model import Choice, saved_model
from fedbn_flwr.lab.results.summary import MODEL_DESCRIPTION
from fedbn_flwr.lab.results.tester import test_site
from fedbn_flwr.messages.records import to_state
from fedbn_flwr.training.own_task import OwnTask
from fedbn_flwr.training.tasks import Task, in_percent

logger = logging.getLogger("flwr")

_NO_DOUBT = (
    "the predictions are sure, but so are those of mirrored or inverted images and of"
    " other tables"
)
LABEL_FILE = "label.csv"
_SITES = "training-sites"
"""The metadata of a calibrated model with the sites' result and threshold, as JSON."""


class CalibratedSite(NamedTuple):
    """The result of ``calibrate_run``.

    Attributes:
        what: a description of the model before the calibration.
        calibration: the calibrated model and the judgement.
        metric: the main metric of the run.
        tests: the tests of the model "before" and "after" the calibration, if the
            data have labels.
        labels: the verdict from these labels, for the model after the calibration.
        columns: name, distance and remark of the columns of a table.
    """

    what: str
    calibration: Calibration
    metric: str
    tests: Mapping[str, SiteTest]
    labels: LabelVerdict | None = None
    columns: Sequence[tuple[str, float, str]] = ()

    @property
    def state(self) -> str:
        """The verdict: "good", "bad" or "undecided"."""
        return self.labels.state if self.labels else "undecided"

    @property
    def answer(self) -> str:
        """The verdict in words."""
        if self.labels:
            return self.labels.answer
        if self.tests:
            figures = ", ".join(f"{k} {text}" for k, text in self.tested.items())
            return (
                f"No verdict for this task. {self.metric} from the labels: {figures}."
            )
        found = self.calibration
        if self.unlike:
            names = ", ".join(name for name, _, remark in self.columns if remark)
            return (
                f"Undecided, and unlike the training sites in {len(self.unlike)} of"
                f" {len(self.columns)} columns: {names}. Repair or explain these columns"
                f" first. Then label {found.examples_to_label} of the"
                f" {found.num_examples} examples, drawn at random."
            )
        return (
            f"Undecided without labels: {found.doubt or _NO_DOUBT}. Look at some examples"
            f" and their predictions, then label {found.examples_to_label} of the"
            f" {found.num_examples} examples, drawn at random."
        )

    @property
    def tested(self) -> dict[str, str]:
        """The main metric "before" and "after" the calibration, with its interval."""
        found = {name: interval(test) for name, test in self.tests.items()}
        of = self.metric
        return {
            k: f"{with_unit(one.value, of)} ({ends(one, of)})"
            for k, one in found.items()
        }

    @property
    def unlike(self) -> list[str]:
        """A sentence for each column that is unlike the training sites."""
        return [f"{name}: {remark}" for name, _, remark in self.columns if remark]


def calibrate_run(
    run: Path,
    dataset: str,
    out: Path,
    way: CalibrationWay = "auto",
    *,
    settings: Mapping[str, Any] | None = None,
    client: int | None = None,
    with_predictions: bool = False,
    width: float = 20.0,
) -> CalibratedSite:
    """Calibrate a run's model at a new site, and write it with a page about it.

    The run determines the model, the normalisation of the inputs and the shape of the
    images. All examples of own data are used, or the test examples if the data have a
    split. Labels change only the verdict on the page and in ``calibration.json``.

    Args:
        run: the run's folder. Its ``class_moments.npz`` is used if it is there.
        dataset: the new data, maybe without labels. A function is called for site 0.
        out: a new folder for ``model.safetensors`` and ``config.yaml``, which
            ``evaluate`` reads, ``calibration.json``, ``calibration.html``,
            ``label.csv`` with random examples to label and, with ``with_predictions``,
            ``predictions.csv``.
        way: a way of ``fedbn_flwr.calibrate``.
        settings: the config keys ``data-dir`` and ``device``.
        client: start from the own model of this client. By default, start from the
            global model, with averaged BN if clients keep theirs.
        with_predictions: whether to write the prediction for each example.
        width: the width of the interval of the accuracy that the labels must give, in
            points.

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
    if not width > 0:
        raise ConfigError(f"width={width:g} is not allowed. Use points above 0.")
    if isinstance(task, OwnTask):
        raise ConfigError(
            f"calibrate compares the outputs of models for classes or numbers, but task"
            f" {task.name} is a task of your own. Use `fedbn-flwr evaluate` with labels,"
            " or re-estimate the statistics in your own code (reestimate_statistics)."
        )
    if with_predictions and task.by_pixel:
        raise ConfigError(
            "predictions: the model has a prediction for each pixel, too many for a"
            " table. Leave predictions out."
        )
    site = read_new_data(saved, dataset, settings or {})
    warning = overlap(saved.config.dataset, dataset)
    if warning:
        logger.warning("%s", warning)

    # Calibrate without targets, and test with them if they are there.
    samples, inputs = site.examples.samples, _Inputs(site.examples, task)
    plain = saved.model.to(samples.device)
    moments = read_class_moments(moments_file) if moments_file.is_file() else None
    found = calibrate(plain, inputs, way, class_moments=moments, task=task)
    # The shares of classes come from predictions, so a doubtful model gives none.
    mix = None if found.doubt else found.class_mix
    count = examples_to_label(found.num_examples, width / 200)
    found = replace(found, class_mix=mix, examples_to_label=count)
    tests: dict[str, SiteTest] = {}
    labels, facts = None, metadata(run)
    if facts.get(_SITES):
        at_sites, threshold = json.loads(facts[_SITES])
    else:
        at_sites, threshold = _of_training_sites(run, client)
    # The value of a loss or an error has no verdict.
    at_sites = at_sites if in_percent(task.score) else None
    files: dict[str, str | bytes] = {}
    if samples.labelled:
        for name, model in (("before", plain), ("after", found.model)):
            tests[name] = test_site(model, site.examples, task)
        labels = verdict(tests["after"], threshold)
        _, high = interval(tests["after"]).ends()
        if labels and at_sites is not None and high is not None and high < at_sites:
            answer = (
                f"{labels.answer} It is below the training sites, beyond chance: they"
                f" have {task.score} {with_unit(at_sites, task.score)}."
            )
            verdict_there = "bad" if labels.state == "bad" else "undecided"
            labels = replace(labels, state=verdict_there, answer=answer)
    columns: Sequence[tuple[str, float, str]] = ()
    if facts.get(COLUMNS):
        of_sites, names = json.loads(facts[COLUMNS]), column_names(dataset)
        columns = evidence(of_sites, torch.cat([*inputs]).cpu(), names)
    if with_predictions:
        outputs = outputs_of(found.model, site.examples, task)
        of_examples = predictions(outputs, None, task, site.classes)
        files["predictions.csv"] = as_csv({**site.where, **of_examples})

    what = saved.what
    if found.way != "none":
        what += f"; calibrated by {found.way}"
    described = {"format": "pt", "what": what, MODEL_DESCRIPTION: description.to_json()}
    # A later calibration of the written model needs these facts for its verdict.
    described[_SITES] = json.dumps([at_sites, threshold])
    described |= {COLUMNS: facts[COLUMNS]} if facts.get(COLUMNS) else {}
    state = to_state(found.model.cpu().state_dict())
    files["model.safetensors"] = encode_safetensors(state, described)
    # With the settings of the run, the folder can be evaluated as a run.
    files[CONFIG_FILE] = (run / CONFIG_FILE).read_bytes()
    done = CalibratedSite(saved.what, found, task.score, tests, labels, columns)
    files[LABEL_FILE] = _to_label(site.where, found)
    # Report only the last part of a path, because others read these files.
    kind, colon, path = dataset.partition(":")
    about: dict[str, Any] = {"run": run.resolve().name, "model": saved.what}
    about |= {"dataset": f"{kind}{colon}{Path(path).name}", "classes": site.classes}
    for key, value in vars(found).items():
        if key not in ("model", "probabilities"):
            about[key.replace("_", "-")] = value
    about |= {"state": done.state, "answer": done.answer, "unlike": done.unlike}
    if labels:
        about["labels"] = figures(labels)
    page = template("calibration.html").render(
        _page(done, site.classes, at_sites),
        warning=warning,
        about=about,
        test=command(
            *("calibrate", out.name, "--way", "none", "--dataset", "LABELLED"),
            *("--out", f"{out.name}-labelled", *trusting(run)),
        ),
        version=version("fedbn-flwr"),
    )
    text = json.dumps(about, indent=2) + "\n"
    files |= {"calibration.html": page, "calibration.json": text}
    write_files(out, files)
    return done


def _of_training_sites(
    run: Path, client: int | None
) -> tuple[float | None, float | None]:
    """Return the result of the training sites, and their threshold, a logit.

    For a client's own model, both are the client's.
    """
    known = [
        test
        for test in read_predictions(run)
        if test.client is not None and test.bn != BATCH
    ]
    if client is None:
        summary = read_json(run / "summary.json")
        result = summary.get("final", {}).get(summary.get("headline"))
        return result, threshold_of_sites(known)
    own = [test for test in known if test.client == client]
    values = [test.value for test in own if math.isfinite(test.value)]
    return (values[0] if values else None), threshold_of_sites(own)


def _to_label(where: Mapping[str, Sequence[Any]], found: Calibration) -> str:
    """Return the table of random examples to label, with an empty column."""
    examples, count = range(found.num_examples), found.examples_to_label
    chosen = sorted(random.Random(0).sample(examples, count))
    columns = {name: [values[one] for one in chosen] for name, values in where.items()}
    return as_csv({**columns, "label": [""] * count})


def _page(
    done: CalibratedSite, classes: Sequence[str], at_sites: float | None
) -> dict[str, Any]:
    """Return the texts and tables of the page."""
    found, labels, metric = done.calibration, done.labels, done.metric
    facts = [("BatchNorm", found.reason)]
    if at_sites is not None:
        facts.append((f"{metric} at the training sites", with_unit(at_sites, metric)))
    facts += [(f"{metric} {name}", text) for name, text in done.tested.items()]
    if not done.tests:
        label = f"{found.examples_to_label} of {found.num_examples}, drawn at random"
        facts.append(("examples to label", label))
    head, rows = table_of(labels) if labels else ([], [])
    return {
        "examples": found.num_examples,
        "labelled": bool(done.tests),
        "state": done.state,
        "answer": done.answer,
        "facts": facts,
        "unlike": done.unlike,
        "columns": [(name, f"{far:.2f}") for name, far, _ in done.columns],
        "label_head": head,
        "label_rows": rows,
        "curve": [
            (shown(mean, "accuracy"), shown(true, "accuracy"))
            for mean, true in (labels.curve if labels else ())
        ],
        "classes": [
            (
                classes[number],
                shown(share, "accuracy"),
                shown(math.sqrt(share * (1 - share) / found.num_examples), "accuracy"),
            )
            for number, share in enumerate(found.class_mix or ())
        ],
        "shifts": [(layer, f"{one:.2f}") for layer, one in found.shifts.items()],
    }


class _Inputs:
    """The inputs of examples in batches, without targets. It can be read again."""

    def __init__(self, examples: Subset, task: Task) -> None:
        self._examples, positions = examples, torch.arange(len(examples))
        self._order = torch.split(positions, task.plain_test_batch)

    def __iter__(self) -> Iterator[Tensor]:
        for inputs, _ in self._examples.batches(self._order):
            yield inputs
