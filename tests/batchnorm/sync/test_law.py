"""The average of one synchronised step equals one centralised step.

The law is tested in float64 with public models.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.support import synchronised as support
from tests.support.at_a_barrier import Barrier, client_batches, federated
from tests.support.fast import fast
from tests.support.small_vision import VISION
from tests.support.synchronised import centralised, distances

MODES = ("3L+1", "2L+1")


def trained(model: nn.Module) -> nn.Module:
    """Give the model trained values, and each affine layer one gamma of zero."""
    for layer in support.trained(model).modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.affine:
            layer.weight.data[0] = 0
    return model


def vision_model(name: str) -> nn.Module:
    """Return a torchvision model with fewer or narrower layers."""
    torch.manual_seed(1)
    return trained(VISION[name](num_classes=3))


def check(model: nn.Module, batches, modes=MODES, union=None, **options) -> None:
    """Compare the step with a centralised step on the union of the batches."""
    union = union or batches
    sizes, oracle = [len(x) for x, _ in union], centralised(model, union)
    for exchanges in modes:
        found = federated(model, batches, sizes, exchanges=exchanges, **options)
        assert max(distances(found, oracle, model.state_dict())) < 1e-10, exchanges


@pytest.mark.parametrize("name", fast(VISION, "densenet"))
def test_federated_step_equals_centralised_step(name):
    model = vision_model(name)
    batches = client_batches((3, 32, 32), (2, 3, 1))
    check(model, batches)


def test_every_way_to_call_batch_norm():
    torch.manual_seed(2)
    model = trained(support.Branches())
    batches = client_batches((2, 6, 6), (1, 4))
    check(model, batches)


def test_a_frozen_backbone_exchanges_nothing_backward():
    torch.manual_seed(1)
    first = nn.Linear(6, 8).requires_grad_(False), nn.BatchNorm1d(8), nn.ReLU()
    second = nn.Linear(8, 7), nn.BatchNorm1d(7), nn.Tanh()
    model = trained(nn.Sequential(*first, *second, nn.Linear(7, 3)))
    batches, barrier = client_batches((6,), (2, 3)), Barrier((2, 3))
    check(model, batches, ["3L+1"], barrier=barrier)
    assert [tag for tag, _, _ in barrier.log][-1] == "gradients/1/4"


class Graphs(nn.Module):
    """Classifies sets of rows by their mean. Rows of NaN only fill the tensor."""

    def __init__(self, tracks: bool) -> None:
        super().__init__()
        a, b = (nn.BatchNorm1d(4, track_running_stats=tracks) for _ in range(2))
        self.each = nn.Sequential(nn.Linear(3, 4), a, nn.Tanh(), b, nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        there, outputs = ~x[..., 0].isnan(), torch.zeros_like(x)
        outputs[there] = self.each(x[there])
        return outputs.sum(1) / there.sum(1, keepdim=True)


@pytest.mark.parametrize("exchanges", MODES)
@pytest.mark.parametrize("most", [1, 5])
def test_examples_of_other_sizes_weigh_by_their_elements(most, exchanges):
    """The step equals the step on the union with repeated examples.

    A union with repeats has another n for running variances.
    """
    torch.manual_seed(most)
    repeats = torch.randint(1, most + 1, (3,)).tolist()
    model = trained(Graphs(tracks=most == 1))
    batches = client_batches((9, 3), (2, 3, 1))
    for (x, _), rows in zip(batches, (2, 9, 5), strict=True):
        x[torch.arange(9) >= torch.randint(1, rows, (len(x), 1))] = torch.nan
    union = [
        (x.repeat(k, 1, 1), target.repeat(k))
        for (x, target), k in zip(batches, repeats, strict=True)
    ]
    check(model, batches, [exchanges], union)


class Routed(nn.Module):
    """Two experts with BatchNorm. The sign of a column decides which one gets a row."""

    def __init__(self, convolves: bool) -> None:
        super().__init__()
        make, norm = nn.Linear, nn.BatchNorm1d
        if convolves:
            make, norm = partial(nn.Conv2d, kernel_size=2), nn.BatchNorm2d
        self.experts = nn.ModuleList(
            nn.Sequential(make(3, 4), norm(4), nn.Tanh()) for _ in range(2)
        )
        self.norm, self.head = norm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        first = x.flatten(1)[:, 0] > 0
        rows = torch.cat([first.nonzero()[:, 0], (~first).nonzero()[:, 0]])
        parts = self.experts[0](x[first]), self.experts[1](x[~first])
        both = self.norm(torch.cat(parts)[rows.argsort()])
        return self.head(both.flatten(2).mean(2) if both.dim() > 2 else both)


@settings(max_examples=20, derandomize=True)
@given(
    routes=st.lists(
        st.lists(st.booleans(), min_size=2, max_size=6).filter(
            lambda r: len({*r}) == 2
        ),
        min_size=2,
        max_size=4,
    ),
    convolves=st.booleans(),
    exchanges=st.sampled_from(MODES),
)
def test_a_layer_that_gets_some_rows_weighs_by_its_rows(routes, convolves, exchanges):
    """Each layer has the statistics of its rows in the union, for any routing."""
    torch.manual_seed(len(routes))
    model = trained(Routed(convolves))
    sizes = [len(one) for one in routes]
    batches = client_batches((3, 3, 3) if convolves else (3,), sizes)
    for (x, _), one in zip(batches, routes, strict=True):
        column = x.flatten(1)[:, 0]
        column.copy_(torch.where(torch.tensor(one), column.abs(), -column.abs()))
    check(model, batches, [exchanges])
