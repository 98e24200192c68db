"""Float32 and bfloat16 are as exact as torch's BatchNorm, even at a large mean."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fedbn_flwr.batchnorm.sync import combine, synchronised
from tests.support.at_a_barrier import Barrier, client_batches, federated
from tests.support.small_vision import VISION
from tests.support.synchronised import centralised, distances, sgd_step

MODES = ("3L+1", "2L+1")
KEPT = ("running_mean", "running_var", "weight")


def far_clients(offset: float, spread: float) -> list[Tensor]:
    """Return float32 inputs of uneven clients, half a deviation apart."""
    g = torch.Generator().manual_seed(3)
    parts = []
    for i, n in enumerate((8, 12, 4)):
        noise = torch.randn(n, 4, 16, 16, generator=g, dtype=torch.float64)
        parts.append((offset + spread * (noise + 0.5 * i)).float())
    return parts


def one_layer(
    layer: nn.Module, parts: list[Tensor], upstream: list[Tensor], exchanges: str
) -> dict[str, Tensor]:
    """Return the results of one layer over the clients ``parts``.

    These are output, input gradient, statistics and stepped weight of all clients
    together.
    """
    inputs = [part.clone().requires_grad_() for part in parts]
    outputs = [None] * len(parts)

    def loss(y: Tensor, index: Tensor) -> Tensor:
        outputs[int(index)] = y.detach()
        return (y * upstream[int(index)].to(y.dtype)).sum() / len(y)

    sizes = [len(part) for part in parts]
    batches = [(x, torch.tensor(i)) for i, x in enumerate(inputs)]
    state = federated(layer, batches, sizes, loss=loss, exchanges=exchanges)
    gradients = [x.grad * len(x) / sum(sizes) for x in inputs]
    return {
        "y": torch.cat(outputs),
        "dy": torch.cat(gradients),
        **{name: state[name] for name in KEPT},
    }


def one_layer_torch(
    layer: nn.Module, parts: list[Tensor], upstream: list[Tensor]
) -> dict[str, Tensor]:
    layer = copy.deepcopy(layer).to(parts[0].dtype)
    x = torch.cat(parts).requires_grad_()
    y = layer(x)
    ((y * torch.cat(upstream).to(y.dtype)).sum() / len(x)).backward()
    state = sgd_step(layer)
    return {"y": y.detach(), "dy": x.grad, **{name: state[name] for name in KEPT}}


@pytest.mark.parametrize("exchanges", MODES)
@pytest.mark.parametrize(
    ("offset", "spread"), [(1e4, 1e-2), (1e4, 1.0), (-3e2, 1e-2), (0.0, 1.0)]
)
def test_a_mean_far_above_the_deviation_loses_no_more_digits_than_torch(
    offset, spread, exchanges
):
    parts = far_clients(offset, spread)
    upstream = [part.double().sub(offset).mul(3 / spread).cos() + 0.5 for part in parts]
    layer = nn.BatchNorm2d(4, momentum=1.0)
    exact = one_layer_torch(layer, [part.double() for part in parts], upstream)
    by_torch = one_layer_torch(layer, parts, upstream)
    ours = one_layer(layer, parts, upstream, exchanges)
    for name, value in exact.items():
        # Fused moments carry the rest of the rounded means. At any mean, their error is
        # a few roundings of float32, far below torch's error.
        bound = 2**-21
        if exchanges == "3L+1":
            # A separate mean is rounded twice, by the client and by the server. Torch
            # rounds it once. The error of a variance is the square.
            factor = 4 if name == "running_var" else 2
            bound += factor * relative_error(by_torch[name], value)
        assert relative_error(ours[name], value) <= bound, name


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).abs().max() / exact.abs().max())


@pytest.mark.slow
def test_bfloat16_autocast_keeps_the_statistics_in_float32():
    torch.manual_seed(1)
    model = VISION["resnet"](num_classes=3)
    batches = [(x.float(), target) for x, target in client_batches((3, 32, 32), (5, 3))]
    barrier = Barrier((5, 3))
    found = federated(model, batches, (5, 3), autocast=True, barrier=barrier)
    assert {dtype for _, _, dtype in barrier.log} == {torch.float32}
    oracle = centralised(model, batches)
    by_torch = centralised(model, batches, autocast=True)
    ours, theirs = (
        max(distances(one, oracle, model.state_dict())) for one in (found, by_torch)
    )
    assert ours < 2 * theirs


@pytest.mark.parametrize("exchanges", MODES)
@pytest.mark.parametrize("positions", [1, 3, 49, 784, 50_176])
def test_equal_positions_give_the_unions_n_in_float32_too(positions, exchanges):
    """The examples per element travel in float32, such as 1/784.

    The factor n/(n-1) has the same bits as from whole numbers.
    """
    sizes, n, answers = (3, 5), 8 * positions, {}

    def reduce(tag: str, tensor: Tensor) -> Tensor:
        answers[tag] = combine(tag, [tensor, tensor], sizes)
        return answers[tag]

    for size in sizes:
        layer = nn.BatchNorm1d(1, momentum=1.0)
        torch.manual_seed(size)
        x = torch.randn(size, 1, positions)
        with synchronised(
            layer, reduce, batch_size=size, union_batch_size=8, exchanges=exchanges
        ):
            layer(x)
        if exchanges == "3L+1":
            var = answers["variance/0"][:1]
        else:
            var = answers["moments/0"][2, :1]
        assert torch.equal(layer.running_var, var * (n / (n - 1)))
