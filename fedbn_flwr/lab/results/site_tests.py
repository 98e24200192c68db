"""The test of a run's models at each site, at the end of the run.

Each site's model is tested on the site's own test examples. The outputs are kept in the
table of predictions, so that pages can compute intervals and differences without the
data and the models.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedbn_flwr.batchnorm.adaptation import adapted
from fedbn_flwr.batchnorm.array_types import State
from fedbn_flwr.client.personal_model import ABSENT, client_file, read_state
from fedbn_flwr.errors import FedBNError
from fedbn_flwr.lab.config import Config, data_of, method_of
from fedbn_flwr.lab.data import Subset
from fedbn_flwr.lab.data.splits import Indices
from fedbn_flwr.lab.objects_of_config import on_device
from fedbn_flwr.lab.partitioned.partitioned_data import PartitionedData
from fedbn_flwr.lab.results.predictions import BATCH, SiteTest
from fedbn_flwr.lab.results.summary import contents_of_model
from fedbn_flwr.lab.results.tests_table import HELD_OUT, RUNNING, Measured, site_name
from fedbn_flwr.messages.protocol import VALIDATION
from fedbn_flwr.messages.records import tensors
from fedbn_flwr.server.methods.params import RECALIBRATED, TEST_BN
from fedbn_flwr.server.methods.shared_bn import SHARED_BN
from fedbn_flwr.server.runs.failures import shortened
from fedbn_flwr.server.runs.run_state import Run
from fedbn_flwr.strategies import Strategy
from fedbn_flwr.training.evaluation import evaluate
from fedbn_flwr.training.freezing import layers_of
from fedbn_flwr.training.metrics import confusion
from fedbn_flwr.training.model_state import load_state
from fedbn_flwr.training.tasks import Task

logger = logging.getLogger("flwr")

# With more clients, a table with a row for each is of little use, and the tests may
# cost more than the run.
_MOST_SITES = 50


@dataclass(frozen=True)
class TestedSite:
    """A site at the end of a run.

    Attributes:
        test: the test of the site's model; None if the site was not tested.
        row: the facts for the row of the site in ``summary.json``.
        by_batch: the same test with batch statistics, if the model has them.
    """

    test: SiteTest | None
    row: Mapping[str, Any]
    by_batch: SiteTest | None = None


def test_site(model: nn.Module, data: Subset, task: Task) -> SiteTest:
    """Return the outputs of the model for the examples of a site.

    Raises:
        FedBNError: the examples cannot be read, or do not fit the task.
    """
    if task.score != "loss":
        task = replace(task, metrics=(task.score,))
    outputs, targets = [], []

    def keep(of_batch: Tensor, targets_of_batch: Tensor) -> None:
        # For classes of pixels, keep only a confusion matrix of each image, because all
        # outputs would fill the memory.
        if task.by_pixel:
            counts = []
            for row in range(len(of_batch)):
                here = slice(row, row + 1)
                counts.append(
                    confusion(of_batch[here], targets_of_batch[here], task.ignore)
                )
            of_batch = torch.stack(counts)
        outputs.append(of_batch.cpu())
        targets.append(targets_of_batch.cpu())

    evaluate(model, data, task=task, on_batch=keep)
    return SiteTest(task, torch.cat(outputs), torch.cat(targets), _units(data))


test_site.__test__ = False  # type: ignore[attr-defined]  # pytest must not collect it


def _units(data: Subset) -> Indices:
    # Without groups such as patients, each example is a unit of its own.
    return np.arange(len(data)) if data.units is None else data.units.cpu().numpy()


def enough_examples(data: PartitionedData, task: Task) -> Callable[[Measured], bool]:
    """Return a function: whether the test of a client counts in a mean.

    It counts if the client has enough examples. If no client has enough, all count.
    """
    views = {"test": data.test_view, VALIDATION: data.validation_view}
    clients = range(len(data.train))

    @functools.cache
    def counting(part: str, metric: str) -> set[int]:
        scored, found = replace(task, score=metric), set()
        for client in clients:
            view = views[part](client)
            targets = torch.empty(0) if task.by_pixel else view.targets.cpu()
            if not SiteTest(scored, torch.empty(0), targets, _units(view)).too_few:
                found.add(client)
        return found or {*clients}

    # A client in a network may have data that the server has not.
    return lambda test: (
        test.part not in views
        or test.client not in clients
        or test.client in counting(test.part, test.metric)
    )


def sites_at_end(
    config: Config,
    model: nn.Module,
    data: PartitionedData | None,
    strategy: Strategy,
    state: State,
    run: Path,
    clients: Collection[str],
    names: Mapping[str, str],
) -> list[TestedSite]:
    """Return the test of each site at the end of a run, held-out sites last.

    There are no tests if the data are not here, if there are more than 50 sites, if
    single clients are protected, if clients' own models are not on this disk, if the
    main test uses statistics of its inputs, or if it is the loss of pixels.

    Args:
        config: the settings.
        model: receives the entries of each test.
        data: the data of the run.
        strategy: the run's strategy.
        state: the final global state.
        run: the run's folder.
        clients: the clients whose own model is in the folder.
        names: the clients' names by number.
    """
    # Stop if nothing can be measured or published, or if the work would be too much.
    method, task = method_of(config), data_of(config).test_task
    test = method.tests[0]
    if data is None or config.protected or test.endswith(TEST_BN):
        return []
    if not any(map(len, data.test)) or (task.by_pixel and task.score == "loss"):
        return []
    if len(data.test) + len(data.held_out) > _MOST_SITES:
        return []

    # A client's model has the global entries, the entries that complete them for this
    # test, and the client's own entries. A held-out site has the global entries.
    own_models = method.tests_own_models
    if own_models and not clients:
        return []
    shared = strategy.run.completing_entries(test)
    whole = ABSENT not in contents_of_model(strategy).values()
    on_device(model, config)

    def model_of(client: int | None) -> tuple[nn.Module | None, str]:
        if client is None:
            load_state(model, tensors(state))
            return model, ""
        entries, note = tensors({**state, **shared}), ""
        if own_models and str(client) in clients:
            entries |= read_state(client_file(run, client))[0]
        elif own_models:
            note = _without_own_model(strategy.run, str(client))
            # The server's values of entries that stay with the clients are initial.
            if not whole:
                return None, note
        load_state(model, entries)
        return model, note

    views: list[tuple[str, int | None, Subset]] = []
    for number in range(len(data.train)):
        views.append((site_name(number, names), number, data.test_view(number)))
    for at, name in enumerate(data.held_out_names):
        views.append((name, None, data.held_out_views(at)[1]))
    bn = test if test in (SHARED_BN, RECALIBRATED) else RUNNING
    sites = []
    for name, client, view in views:
        site, note = model_of(client)
        row: dict[str, Any] = {"site": name, "examples": len(view)}
        row |= {HELD_OUT: True} if client is None else {"client": client}
        row |= {"note": note} if note else {}
        tested = TestedSite(None, row)
        if site is not None and len(view):
            about = {"site": name, "client": client}
            about["bn"] = RUNNING if client is None else bn
            tested = _tested(site, view, task, row, about)
        sites.append(tested)
    model.cpu()
    return sites


def _tested(
    model: nn.Module,
    view: Subset,
    task: Task,
    row: Mapping[str, Any],
    about: dict[str, Any],
) -> TestedSite:
    """Return the test of a site, also with batch statistics if the model has them."""
    try:
        test = replace(test_site(model, view, task), **about)
    except FedBNError as error:
        logger.warning("site %s was not tested: %s", row["site"], error)
        return TestedSite(None, {**row, "error": str(error)})
    # A model that is right only with batch statistics has a fault.
    by_batch = None
    layers = layers_of(model).values()
    if test.client is not None and any(one.running_mean is not None for one in layers):
        with suppress(FedBNError):
            again = test_site(adapted(model, BATCH), view, task)
            by_batch = replace(again, **about | {"bn": BATCH})
    return TestedSite(test, row, by_batch)


def summary_rows(sites: Iterable[TestedSite]) -> list[dict[str, Any]]:
    """Return the rows ``sites`` of ``summary.json``."""
    rows = []
    for site in sites:
        value = site.test.value if site.test else math.nan
        rows.append({**site.row, "value": value if math.isfinite(value) else None})
    return rows


def as_tests(
    sites: Iterable[TestedSite], server_round: int, config: Config
) -> Iterator[Measured]:
    """Yield the rows of ``tests.csv`` for the tests of ``sites_at_end``.

    Args:
        sites: the sites.
        server_round: the round of the models.
        config: the settings of the run.
    """
    own = "own" if method_of(config).tests[0].startswith("personal") else "global"
    for site in sites:
        test = site.test
        if test:
            kind = ("test", own) if test.client is not None else (HELD_OUT, "global")
            part, model = kind
            place = (server_round, test.client, test.site, part, len(test.units))
            yield Measured(*place, model, test.bn, test.task.score, test.value)


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
