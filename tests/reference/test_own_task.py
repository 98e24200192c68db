"""Cross-entropy as a user's task has the bits of the package's task."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr.errors import FedBNError
from fedbn_flwr.training import CLASSIFICATION, OwnTask, Task
from tests.reference.draws import Case, crossing
from tests.reference.package import Result, run
from tests.support.fast import fast

PLAIN = ("torch-client", "legacy", "named")
CASES = [case for case in crossing(8_000, 60) if case.way in PLAIN]


def loss(model: nn.Module, inputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs), targets)


def share(model: nn.Module, batches: Any) -> dict[str, Tensor]:
    right = [(model(x).argmax(1) == y).double() for x, y in batches]
    return {"accuracy": torch.cat(right).mean()}


OWN = OwnTask("own", loss=loss, test=share, score="accuracy", higher_is_better=True)


def outcome(case: Case, task: Task) -> Result | str:
    """Return the result of a case, or the code of its refusal."""
    try:
        return run(case, task=task)
    except FedBNError as error:
        return error.code


@pytest.mark.parametrize("case", fast(CASES, *range(0, len(CASES), 4)), ids=repr)
def test_a_users_task_has_the_bits_of_the_packages(case: Case) -> None:
    own, package = outcome(case, OWN), outcome(case, CLASSIFICATION)
    if isinstance(own, str) or isinstance(package, str):
        assert own == package
        return
    assert own.used == package.used
    for kept in ("history", "own", "kept"):
        found, wanted = getattr(own, kept), getattr(package, kept)
        assert found.keys() == wanted.keys()
        for key, entries in wanted.items():
            assert found[key].keys() == entries.keys()
            for name, entry in entries.items():
                same = torch.equal(found[key][name], entry)
                nan = entry.isnan() if entry.is_floating_point() else torch.tensor(0)
                assert same or nan.any(), (key, name)
    for found, wanted in zip(own.tests, package.tests, strict=True):
        assert found.keys() == wanted.keys()
        for client, metrics in wanted.items():
            for name, value in metrics.items():
                assert found[client][name] == pytest.approx(
                    value, rel=1e-6, nan_ok=True
                )
