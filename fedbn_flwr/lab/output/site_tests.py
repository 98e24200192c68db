"""The test of a run's models at each site, with single predictions.

At the end of a run, each site's model is tested on the site's own test examples. The
outputs are kept in a file of the run's folder, so that pages can compute intervals and
differences without the data and the models.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fedbn_flwr.batchnorm.adaptation import adapted
from fedbn_flwr.batchnorm.array_types import State
from fedbn_flwr.batchnorm.calibration import FEWEST, calibrate
from fedbn_flwr.batchnorm.class_moments import ClassMoments
from fedbn_flwr.batchnorm.site_passes import ONE_BATCH
from fedbn_flwr.checked_file import read_checked, write_checked
from fedbn_flwr.client.personal_model import ABSENT, client_file, read_state
from fedbn_flwr.errors import FedBNError
from fedbn_flwr.lab.config import Config, data_of, method_of
from fedbn_flwr.lab.data import Subset
from fedbn_flwr.lab.data.splits import Indices
from fedbn_flwr.lab.files import PREDICTIONS_FILE
from fedbn_flwr.lab.output.summary import contents_of_model
from fedbn_flwr.lab.output.tests_table import HELD_OUT, RUNNING, Measured
from fedbn_flwr.lab.partitioned.counts import names_of
from fedbn_flwr.lab.partitioned.partitioned_data import PartitionedData
from fedbn_flwr.lab.setup import on_device
from fedbn_flwr.messages.records import tensors
from fedbn_flwr.messages.site_names import texts_of
from fedbn_flwr.server.methods.params import RECALIBRATED, TEST_BN
from fedbn_flwr.server.methods.shared_bn import SHARED_BN
from fedbn_flwr.server.rounds.testing import completing_entries
from fedbn_flwr.server.runs.failures import shortened
from fedbn_flwr.server.runs.run_state import Run
from fedbn_flwr.strategies import Strategy
from fedbn_flwr.training.evaluation import evaluate
from fedbn_flwr.training.freezing import layers_of
from fedbn_flwr.training.metrics import confusion, dice, mean_iou
from fedbn_flwr.training.model_state import load_state
from fedbn_flwr.training.tasks import TASKS, Task

logger = logging.getLogger("flwr")

# With more clients, a table with a row for each is of little use, and the tests may
# cost more than the run.
_MOST_SITES = 50
# Larger files of predictions cost more than testing the models again.
_MOST_BYTES = 64 * 2**20
# the attributes of a test in the file of predictions, in addition to its arrays
_SAVED = ("result", "name", "client", "error", "note", "num_examples", "part")
BATCH: Literal["batch"] = "batch"
"""The part of tests with batch statistics instead of running ones."""


@dataclass(frozen=True)
class SiteTest:
    """The outputs of a model for the N test examples of one site.

    Attributes:
        task: the learning task; its score is the metric.
        outputs: (N, ...); for a segmentation, the confusion matrices of the examples.
        targets: (N, ...).
        groups: the positions of the examples of each group.
        result: the main metric of ``evaluate``; None if it was not computed.
        name: the name of the site, or "client N".
        client: the number of the client; None for a held-out site.
        error: the reason why the data cannot be read; then outputs are empty.
        note: the reason why the site lacks its own model; then outputs may be empty.
        num_examples: the number of the site's test examples, tested or not.
        about: further entries of the site's row.
        part: "test", or ``BATCH`` for a test with batch statistics.
    """

    task: Task
    outputs: Tensor
    targets: Tensor
    groups: list[Indices]
    result: float | None = None
    name: str = ""
    client: int | None = None
    error: str = ""
    note: str = ""
    num_examples: int = 0
    about: Mapping[str, Any] = field(default_factory=dict)
    part: str = "test"

    @property
    def identity(self) -> int | str:
        """The number of the client, or the name of a held-out site."""
        return self.name if self.client is None else self.client

    @functools.cached_property
    def value(self) -> float:
        """The main metric over all examples; NaN without examples."""
        if self.result is not None or not self.groups:
            return math.nan if self.result is None else self.result
        return self.metric(np.arange(len(self.groups)))

    def scored_by(self, metric: str) -> SiteTest:
        """Return the same test with this main metric."""
        if metric == self.task.score:
            return self
        return replace(self, task=self.task.scored_by(metric), result=None)

    @property
    def row(self) -> dict[str, Any]:
        """The row of the site in ``summary.json``."""
        value = self.value if math.isfinite(self.value) else None
        row = {"site": self.name, "examples": self.num_examples, "value": value}
        row |= {HELD_OUT: True} if self.client is None else {"client": self.client}
        # A reason that is absent has no key.
        words = {"error": self.error, "note": self.note}
        return row | {key: text for key, text in words.items() if text} | {**self.about}

    def metric(self, groups: Indices) -> float:
        """Return the main metric over all examples of the groups with these numbers.

        A number may be repeated.
        """
        score = self.task.score
        if score == "accuracy":
            correct, counted = self._correct[groups].sum(0)
            return float(correct / counted)
        # Take the examples of the groups. If each group has one example, use one array
        # instead of many: a thousand draws would otherwise take a minute.
        if len(self.groups) == len(self.targets):
            chosen = np.concatenate(self.groups)[groups]
        else:
            chosen = np.concatenate([self.groups[group] for group in groups])
        rows = torch.from_numpy(chosen)
        outputs, targets = self.outputs[rows], self.targets[rows]
        # Compute the metric over all chosen examples together, as ``evaluate`` does.
        if score == "loss":
            return float(self.task.loss(outputs, targets))
        if self.task.by_pixel:
            return _score_of_pixels(score, outputs.sum(0))
        return self._only_score.measure(outputs, targets)[score]

    @functools.cached_property
    def _only_score(self) -> Task:
        """The task without metrics that no interval needs: there are a thousand draws."""
        return replace(self.task, metrics=(self.task.score,))

    @functools.cached_property
    def _correct(self) -> Indices:
        """The numbers of correct and of counted predictions by group, (groups, 2)."""
        rows = []
        for group in self.groups:
            outputs, targets = self.outputs[group], self.targets[group]
            correct = self.task.correct(outputs, targets)
            rows.append((int(correct), int(self.task.counted(targets))))
        return np.array(rows)

    def fits(self, other: SiteTest) -> bool:
        """Return whether the other test has the same targets in the same groups."""
        if self.targets.shape != other.targets.shape:
            return False
        # Two NaN are equal here, because NaN marks an unknown target.
        same = torch.isclose(self.targets, other.targets, 0, 0, equal_nan=True)
        if len(self.groups) != len(other.groups) or not same.all():
            return False
        return all(map(np.array_equal, self.groups, other.groups))


def _score_of_pixels(score: str, counts: Tensor) -> float:
    if score == "miou":
        return mean_iou(counts)
    if score == "dice":
        return dice(counts)
    return float(counts.trace() / counts.sum())


def _untested(task: Task) -> SiteTest:
    return SiteTest(task, torch.empty(0), torch.empty(0), [])


def test_site(model: nn.Module, data: Subset, task: Task) -> SiteTest:
    """Return the outputs of the model for the examples of a site."""
    if task.score != "loss":
        task = replace(task, metrics=(task.score,))
    outputs, targets = [], []

    def keep(of_batch: Tensor, targets_of_batch: Tensor) -> None:
        # For classes of pixels, keep only a confusion matrix of each image, because all
        # outputs would fill the memory.
        if task.by_pixel and task.score != "loss":
            counts = []
            for row in range(len(of_batch)):
                here = slice(row, row + 1)
                counts.append(
                    confusion(of_batch[here], targets_of_batch[here], task.ignore)
                )
            of_batch = torch.stack(counts)
            # The sums of the rows are the numbers of targets of each class.
            targets_of_batch = of_batch.sum(2)
        outputs.append(of_batch.cpu())
        targets.append(targets_of_batch.cpu())

    try:
        result = evaluate(model, data, task=task, on_batch=keep).named()[task.score]
    except FedBNError as error:
        return replace(_untested(task), error=str(error))
    if not outputs:
        return _untested(task)
    # Without groups such as patients, each example is a group of its own.
    units = np.arange(len(data)) if data.units is None else data.units.cpu().numpy()
    groups = [np.flatnonzero(units == unit) for unit in np.unique(units)]
    return SiteTest(task, torch.cat(outputs), torch.cat(targets), groups, result)


test_site.__test__ = False  # type: ignore[attr-defined]  # pytest must not collect it


ModelOf = Callable[[int | None], tuple[nn.Module | None, str]]
"""Returns the model of a client, or of held-out sites for None, and a note.

A site without a model is not tested, and its note says why.
"""


def test_sites(
    data: PartitionedData, names: Mapping[str, str], task: Task, model_of: ModelOf
) -> list[SiteTest]:
    """Return the test of each client in their order, and then of each held-out site.

    The tests of the clients with batch statistics follow, if the model has BatchNorm
    with running statistics.

    Args:
        data: the data of the run.
        names: the clients' names by number, see ``site_names``.
        task: the learning task; its score is the metric.
        model_of: returns the model of a site.
    """
    views: list[tuple[str, int | None, Subset]] = []
    for number, name in enumerate(site_names(data, names)):
        views.append((name, number, data.test_view(number)))
    for at, name in enumerate(data.held_out_names):
        views.append((name, None, data.held_out_views(at)[1]))
    found, by_batch = [], []
    for name, client, view in views:
        model, note = model_of(client)
        about: dict[str, Any] = {"name": name, "client": client}
        about["num_examples"] = len(view)
        site = _untested(task) if model is None else test_site(model, view, task)
        found.append(replace(site, note=note, **about))
        if model is None or client is None or not site.groups:
            continue
        # a model that is right only with batch statistics has a fault
        tracked = (
            layer.running_mean is not None for layer in layers_of(model).values()
        )
        if any(tracked):
            with suppress(FedBNError):
                by_batch.append(
                    replace(
                        test_site(adapted(model, BATCH), view, task),
                        part=BATCH,
                        **about,
                    )
                )
    return [*found, *(one for one in by_batch if one.groups)]


test_sites.__test__ = False  # type: ignore[attr-defined]  # pytest must not collect it


def sites_at_end(
    config: Config,
    model: nn.Module,
    data: PartitionedData | None,
    strategy: Strategy | None,
    state: State,
    run: Path,
    clients: Collection[str],
) -> list[SiteTest]:
    """Return the test of each site at the end of a run, held-out sites last.

    There are no tests if the data are not here, if there are more than 50 sites, if
    single clients are protected, if clients' own models are not on this disk, or if the
    main test uses statistics of its inputs.

    Args:
        config: the settings.
        model: receives the entries of each test.
        data: the data of the run.
        strategy: None for the centralized reference.
        state: the final global state.
        run: the run's folder.
        clients: the clients whose own model is in the folder.
    """
    # Stop if nothing can be measured or published, or if the work would be too much.
    test = method_of(config).tests[0]
    if data is None or config.protected or test.endswith(TEST_BN):
        return []
    if not any(map(len, data.test)):
        return []
    if len(data.test) + len(data.held_out) > _MOST_SITES:
        return []

    # A client's model has the global entries, the entries that complete them for this
    # test, and the client's own entries. A held-out site has the global entries.
    own_models = method_of(config).tests_own_models
    if own_models and not clients:
        return []
    shared: State = completing_entries(strategy.run, test) if strategy else {}
    whole = ABSENT not in contents_of_model(strategy).values()
    on_device(model, config)

    def model_of(client: int | None) -> tuple[nn.Module | None, str]:
        if client is None:
            load_state(model, tensors(state))
            return model, ""
        entries, note = tensors({**state, **shared}), ""
        if own_models and str(client) in clients:
            entries |= read_state(client_file(run, client))[0]
        elif own_models and strategy:
            note = _without_own_model(strategy.run, str(client))
            # The server's values of entries that stay with the clients are initial.
            if not whole:
                return None, note
        load_state(model, entries)
        return model, note

    task = data_of(config).test_task
    names = strategy.run.nodes.names if strategy else {}
    sites = test_sites(data, names, task, model_of)
    moments = strategy.run.class_moments if strategy else None
    for at in range(len(data.held_out_names)):
        inputs, tests = data.held_out_views(at)
        inputs = inputs if len(inputs) else tests
        about = _calibrated(model, inputs, tests, task, moments)
        place = len(data.train) + at
        sites[place] = replace(sites[place], about=about)
    for site in sites:
        if site.error:
            logger.warning("site %s was not tested: %s", site.name, site.error)
    model.cpu()
    return sites


def as_tests(
    sites: Iterable[SiteTest], server_round: int, config: Config
) -> Iterator[Measured]:
    """Yield the rows of ``tests.csv`` for the tests of ``sites_at_end``.

    Args:
        sites: the tests.
        server_round: the round of the models.
        config: the settings of the run.
    """
    method = method_of(config)
    own = "own" if method.tests_own_models else "global"
    bn = method.tests[0] if method.tests[0] in (SHARED_BN, RECALIBRATED) else RUNNING
    for site in sites:
        if site.part != "test":
            continue
        name, where = str(site.client), ("test", own, bn)
        if site.client is None:
            name, where = site.name, (HELD_OUT, "global", RUNNING)
        part, model, statistics = where
        about = (server_round, name, part, len(site.targets), model)
        metric = site.task.score
        if len(site.targets):
            yield Measured(*about, statistics, metric, site.value)
        if "calibrated" in site.about:
            yield Measured(*about, "calibrated", metric, site.about["calibrated"])


def save_predictions(run: Path, sites: Iterable[SiteTest], sha256: str) -> None:
    """Write the outputs of all sites to ``predictions.safetensors``.

    Nothing is written if the outputs are larger than 64 MiB.

    Args:
        run: the run's folder.
        sites: the tests.
        sha256: the SHA-256 of the run's final state.
    """
    content = []
    size = 0
    for site in sites:
        units = np.empty(len(site.targets), np.int64)
        for number, group in enumerate(site.groups):
            units[group] = number
        size += site.outputs.nbytes + site.targets.nbytes
        about = {key: getattr(site, key) for key in _SAVED}
        outputs = site.outputs
        # NumPy has no bfloat16. float32 has all values of bfloat16.
        if outputs.dtype == torch.bfloat16:
            outputs = outputs.float()
        arrays = {"outputs": outputs.numpy(), "targets": site.targets.numpy()}
        task = [site.task.name, site.task.score, site.task.ignore]
        content.append({**about, **arrays, "units": units, "task": task})
    if content and size <= _MOST_BYTES:
        saved = {"sha256": sha256, "sites": content}
        write_checked(run / PREDICTIONS_FILE, saved)


def read_predictions(run: Path, sha256: str) -> list[SiteTest]:
    """Return the tests that ``save_predictions`` wrote for this state, or [].

    Raises:
        StateError: the file is damaged.
    """
    path = run / PREDICTIONS_FILE
    saved = read_checked(path) if path.is_file() else {}
    if saved.get("sha256") != sha256:
        return []
    found = []
    for site in saved["sites"]:
        name, score, ignore = site["task"]
        task = replace(TASKS[name], ignore=ignore).scored_by(score)
        units = site["units"]
        groups = [np.flatnonzero(units == unit) for unit in np.unique(units)]
        arrays = torch.from_numpy(site["outputs"]), torch.from_numpy(site["targets"])
        about = {key: site[key] for key in _SAVED if key in site}
        found.append(SiteTest(task, *arrays, groups, **about))
    return found


def site_names(data: PartitionedData, names: Mapping[str, str]) -> list[str]:
    """Return a different text for each client: its name, or else "client N".

    ``names`` are the clients' names by number. They replace the names in the data.
    """
    texts = texts_of({**names_of(data), **names})
    clients = range(len(data.train))
    return [texts.get(str(client), f"client {client}") for client in clients]


def _calibrated(
    model: nn.Module,
    inputs: Subset,
    tests: Subset,
    task: Task,
    moments: ClassMoments | None,
) -> dict[str, Any]:
    """Return the result of a new site after a calibration, or {} if there is none.

    The calibration uses one batch of its inputs, because more batches would need a pass
    for each layer.
    """
    fits = max(FEWEST, ONE_BATCH // math.prod(inputs.samples.shape))
    chosen = torch.linspace(0, len(inputs) - 1, min(fits, len(inputs))).long()
    # For example, the model has no BatchNorm.
    with suppress(FedBNError):
        batch, _ = inputs.batch(chosen)
        found = calibrate(model, [batch], class_moments=moments, task=task)
        value = evaluate(found.model, tests, task=task).named()[task.score]
        if math.isfinite(value):
            return {"calibrated": value, "way": found.way, "trusted": found.trusted}
    return {}


def _without_own_model(run: Run, client: str) -> str:
    """Return the reason why a client has no model of its own here."""
    if client in run.kept.hashes:
        return "its local state is not on this disk, only the server's entries"
    why = "no reply of it was used"
    for report in run.reports:
        for node_id, reason in report.reasons.items():
            if run.nodes.node(node_id).label == client:
                why = f"round {report.server_round}: {shortened(reason)}"
    return f"no model of its own, only the server's entries; {why}"
