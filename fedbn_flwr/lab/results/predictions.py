"""The table of single predictions, ``predictions.csv``.

A run writes the table once, at its end. If the models have BatchNorm, it also writes
``predictions-batch.csv``, a test of the same examples with batch statistics. Every mean,
difference and interval is computed from these rows, see ``intervals``. A row has the
outputs of one site's model for one test example:

- ``site``, ``client``: the name of the site, and its number; a site that never trains
  has no number.
- ``bn``: the BatchNorm statistics.
- ``unit``: the number of the example, or of its group, such as a patient.
- ``target`` and ``output``, or ``target-0``, ``output-0``, ... if there are several. The
  outputs are logits or numbers. For a segmentation, ``output-N`` has the pixels of the
  image by target class and predicted class.

A task of the user's has one row for each site: the number of its examples as target, and
its score as output.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedbn_flwr.checked_file import write_atomically
from fedbn_flwr.lab.data.splits import Indices
from fedbn_flwr.lab.results.files import (
    PREDICTIONS_FILE,
    PREDICTIONS_FILES,
    own_text,
    read_json,
    safe_table,
)
from fedbn_flwr.lab.results.tests_table import metric_in
from fedbn_flwr.training.metrics import accuracy, of_counts
from fedbn_flwr.training.own_task import OwnTask
from fedbn_flwr.training.tasks import TASKS, Score, Task

BATCH: Literal["batch"] = "batch"
"""The name of batch statistics in the column ``bn``."""
_FEWEST = 5
"""The fewest units with the rarer class for an interval of a metric of classes."""
_MOST_NUMBERS = 4_000_000
"""The most outputs in a table; a larger table would cost more than the run."""


@dataclass(frozen=True, eq=False)
class SiteTest:
    """The outputs of a model for the N test examples of one site.

    Attributes:
        task: the learning task; its score is the main metric.
        outputs: (N, ...); for a segmentation, the confusion matrices of the images; for
            a user's task the score (1,).
        targets: (N, ...); not used for a segmentation; for a user's task the number of
            examples (1,).
        units: (N,), the number of each example, or of its group.
        site: the name of the site.
        client: the number of the client; None for a site that never trains.
        bn: the BatchNorm statistics.
    """

    task: Task
    outputs: Tensor
    targets: Tensor
    units: Indices
    site: str = ""
    client: int | None = None
    bn: str = "running"

    @functools.cached_property
    def groups(self) -> list[Indices]:
        """The positions of the examples of each unit."""
        order = np.argsort(self.units, kind="stable")
        starts = np.flatnonzero(np.diff(self.units[order])) + 1
        return np.split(order, starts) if len(order) else []

    @property
    def examples(self) -> int:
        """The number of test examples."""
        own = isinstance(self.task, OwnTask)
        return int(self.targets) if own else len(self.units)

    @functools.cached_property
    def _counts(self) -> Indices:
        """The correct and the counted targets of each unit, (2, units)."""
        masks = (
            self.task.right(self.outputs, self.targets),
            self.task.counting(self.targets),
        )
        of_rows = [mask.reshape(len(self.units), -1).sum(1).numpy() for mask in masks]
        return np.array(
            [[rows[unit].sum() for unit in self.groups] for rows in of_rows]
        )

    @property
    def deciding(self) -> int:
        """The number of units, or of those with the rarer of two classes.

        The rarer class decides how certain a metric of classes, such as AUROC, is.
        """
        classes = torch.unique(self.targets[~self.targets.isnan()])
        # One of the two classes may be absent.
        if self.task.name == "binary":
            classes = torch.tensor([0, 1])
        by_example = self.task.name == "regression" or self.task.by_pixel
        if self.task.score in ("accuracy", "loss") or by_example or len(classes) != 2:
            return len(self.groups)
        rows = self.targets.reshape(len(self.targets), -1)
        has = [self.units[(rows == one).any(1).numpy()] for one in classes]
        return min(len(np.unique(units)) for units in has)

    @property
    def too_few(self) -> str:
        """The reason why the site has too few examples for a mean, or ""."""
        if len(self.groups) < 2:
            return "only one test example or patient"
        if self.deciding < min(_FEWEST, len(self.groups)):
            return (
                f"test examples or patients of the rarer class: {self.deciding},"
                f" but {_FEWEST} are needed"
            )
        return ""

    @functools.cached_property
    def value(self) -> float:
        """The main metric over all examples; NaN if they do not define it."""
        if isinstance(self.task, OwnTask):
            return float(self.outputs)
        return self.metric(np.arange(len(self.groups))) if self.groups else math.nan

    def scored_by(self, metric: str) -> SiteTest:
        """Return the same test with this main metric."""
        return replace(self, task=self.task.scored_by(metric))

    def metric(self, groups: Indices) -> float:
        """Return the main metric over all examples of the groups with these numbers.

        A number may be repeated.
        """
        score = self.task.score
        if score == "accuracy" and not self.task.by_pixel:
            correct, counted = self._counts[:, groups].sum(1).tolist()
            return accuracy(correct, counted)
        # Take the examples of the groups. If each group has one example, use one array
        # instead of many: a thousand draws would otherwise take a minute.
        if len(self.groups) == len(self.units):
            chosen = np.concatenate(self.groups)[groups]
        else:
            chosen = np.concatenate([self.groups[group] for group in groups])
        rows = torch.from_numpy(chosen)
        # Compute the metric over all chosen examples together, as ``evaluate`` does.
        if self.task.by_pixel:
            return of_counts(self.outputs[rows].sum(0))[score]
        outputs, targets = self.outputs[rows], self.targets[rows]
        if score == "loss":
            return float(self.task.loss(outputs, targets))
        # Leave out other metrics, because there are a thousand draws.
        return replace(self.task, metrics=(score,)).measure(outputs, targets)[score]

    def fits(self, other: SiteTest) -> bool:
        """Return whether the other test has the same targets in the same units."""
        mine, theirs = _targets(self), _targets(other)
        if mine.shape != theirs.shape:
            return False
        # Two NaN are equal here, because NaN marks an unknown target.
        same = torch.isclose(mine, theirs, 0, 0, equal_nan=True).all()
        return bool(same) and np.array_equal(self.units, other.units)


def _targets(site: SiteTest) -> Tensor:
    """Return the targets; for a segmentation, the pixels of each class."""
    return site.outputs.sum(2) if site.task.by_pixel else site.targets


def save_predictions(run: Path, sites: Sequence[SiteTest]) -> None:
    """Write the tables of all tests, unless they would be too large."""
    size = sum(site.outputs.numel() + site.targets.numel() for site in sites)
    if size > _MOST_NUMBERS:
        return
    for name in PREDICTIONS_FILES:
        batch = name != PREDICTIONS_FILE
        _save(run / name, [site for site in sites if (site.bn == BATCH) == batch])


def _save(path: Path, sites: Sequence[SiteTest]) -> None:
    # Import here, because a refused run needs no pandas.
    import pandas as pd

    tables = []
    for site in sites:
        columns: dict[str, Any] = {"site": site.site, "client": site.client}
        columns |= {"bn": site.bn, "unit": site.units}
        columns |= {} if site.task.by_pixel else _columns("target", site.targets)
        tables.append(pd.DataFrame(columns | _columns("output", site.outputs)))
    if not tables:
        return
    whole = safe_table(pd.concat(tables))
    whole["client"] = pd.array(whole["client"], dtype="Int64")
    # Nine digits give the same float32 when the file is read again. Only the owner may
    # read the file, because it reveals targets of single examples.
    text = whole.to_csv(index=False, float_format="%.9g")
    write_atomically(path, text, mode=0o600)


def _columns(name: str, values: Tensor) -> dict[str, Any]:
    """Return values (N, ...) as columns; a single column has the plain name."""
    # NumPy has no bfloat16. float32 has all values of bfloat16.
    if values.dtype == torch.bfloat16:
        values = values.float()
    flat = values.reshape(len(values), -1).T.numpy()
    names = [name] if len(flat) == 1 else [f"{name}-{at}" for at in range(len(flat))]
    return dict(zip(names, flat, strict=True))


def read_predictions(run: Path) -> list[SiteTest]:
    """Return the tests in the table of a finished run, or [] without the table."""
    import pandas as pd

    summary = read_json(run / "summary.json")
    if not (run / PREDICTIONS_FILE).is_file() or not summary:
        return []
    paths = [path for name in PREDICTIONS_FILES if (path := run / name).is_file()]
    metric = metric_in(summary)
    if isinstance(metric, Score):  # the module of the task may not be here
        task: Task = OwnTask(
            summary["task"],
            loss=_absent,
            test=_absent,
            score=metric,
            higher_is_better=metric.higher_is_better,
            share=metric.share,
        )
    else:
        task = TASKS[summary["task"]].scored_by(metric)
    # The name of a site is a text, even if it is "NA" or "007".
    plain: dict[str, Any] = {"na_values": [""], "keep_default_na": False}
    plain["dtype"] = {"site": str}
    table = pd.concat([pd.read_csv(path, **plain) for path in paths])
    table["site"] = table["site"].map(own_text)
    found = []
    for (site, client, bn), rows in table.groupby(
        ["site", "client", "bn"], sort=False, dropna=False
    ):
        outputs, targets = _tensor(rows, "output").float(), torch.empty(0)
        if isinstance(task, OwnTask):
            outputs, targets = _tensor(rows, "output"), _tensor(rows, "target")
        elif task.by_pixel:
            classes = math.isqrt(outputs.shape[1])
            outputs = _tensor(rows, "output").reshape(-1, classes, classes)
        else:
            targets = _tensor(rows, "target")
            targets = targets.float() if task.in_columns else targets
            targets = targets.squeeze(1) if targets.shape[1] == 1 else targets
        number = None if pd.isna(client) else int(client)
        about = (rows["unit"].to_numpy(), site, number, bn)
        found.append(SiteTest(task, outputs, targets, *about))
    return found


def _absent(*_: Any) -> Any:
    raise NotImplementedError


def _tensor(rows: Any, name: str) -> Tensor:
    """Return the columns of a name as (N, columns)."""
    return torch.tensor(rows.filter(regex=rf"^{name}(-\d+)?$").to_numpy())
