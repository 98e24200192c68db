"""BatchNorm layers with dropout and activation inside, as in most timm networks.

Every method and norm gives the bits that it gives if dropout and activation are written
out after torch's BatchNorm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fedbn_flwr.batchnorm.averaging import Array
from fedbn_flwr.norms import NORMS, replace_norm
from fedbn_flwr.strategies import STRATEGIES
from tests.support.federation import Outcome
from tests.support.strange_layers import acts_inside, written_out

OPTIONS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "fixbn": ("fixbn", {"freeze_at": 1}),
}
# These methods compute BatchNorm or its gradient themselves.
METHODS = ("fedtan", "staticbn")
Federate = Callable[..., Outcome]


def images(*sizes: int) -> list[TensorDataset]:
    """Return images whose mean and scale differ from client to client."""
    draw = torch.Generator().manual_seed(1)
    datasets = []
    for client, size in enumerate(sizes):
        shape = (size, 1, 5, 5)
        x = torch.randn(shape, generator=draw, dtype=torch.float64) * (client + 1)
        datasets.append(
            TensorDataset(x + client, torch.randint(3, (size,), generator=draw))
        )
    return datasets


def named_as_inside(state: Mapping[str, Array | Tensor]) -> dict[str, Tensor]:
    return {k.replace(".bare.", "."): torch.as_tensor(v) for k, v in state.items()}


def assert_same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    one, two = named_as_inside(found), named_as_inside(expected)
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert torch.equal(value, two[name]), name


def compare(
    federate: Federate,
    case: str,
    model: Callable[[], nn.Module],
    datasets: list[TensorDataset],
    **options: Any,
) -> None:
    """Compare the runs of a model and of its written-out form."""
    method, settings = OPTIONS.get(case, (case, {}))
    runs = []
    for build in (model, lambda: written_out(model())):
        strategy = STRATEGIES[method](**settings)
        runs.append(federate(strategy, build, datasets, **options))
    found, expected = runs
    assert_same(found.state, expected.state)
    tests = [dict(run.result.evaluate_metrics_clientapp) for run in runs]
    assert tests[0] == tests[1]
    for client in range(len(datasets)):
        assert_same(found.local_state(client), expected.local_state(client))


@pytest.mark.parametrize("kind", [kind for kind in NORMS if kind != "fixup"])
def test_another_norm_keeps_what_is_inside(kind: str) -> None:
    """The entries keep their names because published weights are loaded by name."""
    model = acts_inside()
    x, y = images(4)[0].tensors
    found, report = replace_norm(model, kind)
    expected, rows = replace_norm(written_out(model), kind)
    assert [row.path for row in report] == [
        row.path.removesuffix(".bare") for row in rows
    ]
    for net in (found, expected):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        for _ in range(2):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
        net.eval()
    assert torch.equal(found(x), expected(x))
    assert_same(found.state_dict(), expected.state_dict())
