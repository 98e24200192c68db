"""Float32 and bfloat16 are as exact as torch's BatchNorm, even at a large mean."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fedbn_flwr.batchnorm.sync import combine, synchronised
from tests.support.small_vision import VISION

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
    lab, layer: nn.Module, parts: list[Tensor], upstream: list[Tensor], exchanges: str
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
    state = lab.federated(layer, batches, sizes, loss=loss, exchanges=exchanges)
    gradients = [x.grad * len(x) / sum(sizes) for x in inputs]
    return {
        "y": torch.cat(outputs),
        "dy": torch.cat(gradients),
        **{name: state[name] for name in KEPT},
    }


def one_layer_torch(
    lab, layer: nn.Module, parts: list[Tensor], upstream: list[Tensor]
) -> dict[str, Tensor]:
    layer = copy.deepcopy(layer).to(parts[0].dtype)
    x = torch.cat(parts).requires_grad_()
    y = layer(x)
    ((y * torch.cat(upstream).to(y.dtype)).sum() / len(x)).backward()
    state = lab.sgd_step(layer)
    return {"y": y.detach(), "dy": x.grad, **{name: state[name] for name in KEPT}}


@pytest.mark.parametrize("exchanges", MODES)
@pytest.mark.parametrize(
    ("offset", "spread"), [(1e4, 1e-2), (1e4, 1.0), (-3e2, 1e-2), (0.0, 1.0)]
)
def test_a_mean_far_above_the_deviation_loses_no_more_digits_than_torch(
    lab, offset, spread, exchanges
):
    parts = far_clients(offset, spread)
    upstream = [part.double().sub(offset).mul(3 / spread).cos() + 0.5 for part in parts]
    layer = nn.BatchNorm2d(4, momentum=1.0)
    exact = one_layer_torch(lab, layer, [part.double() for part in parts], upstream)
    by_torch = one_layer_torch(lab, layer, parts, upstream)
    ours = one_layer(lab, layer, parts, upstream, exchanges)
    for name, value in exact.items():
        # Fused moments carry the rest of the rounded means. At any mean, their error is
        # a few roundings of float32, far below torch's error.
        factor = 0
        if exchanges == "3L+1":
            # A separate mean is rounded twice, by the client and by the server. Torch
            # rounds it once.
            factor = 2
            if name == "running_var":  # its error is the square
                factor = 4
        torch_error = relative_error(by_torch[name], value)
        bound = factor * torch_error + 2**-21
        assert relative_error(ours[name], value) <= bound, name


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).abs().max() / exact.abs().max())


@pytest.mark.slow
def test_bfloat16_autocast_keeps_the_statistics_in_float32(lab):
    torch.manual_seed(1)
    model = VISION["resnet"](num_classes=3)
    batches = [
        (x.float(), target) for x, target in lab.client_batches((3, 32, 32), (5, 3))
    ]
    barrier = lab.Barrier((5, 3))
    found = lab.federated(model, batches, (5, 3), autocast=True, barrier=barrier)
    assert {dtype for _, _, dtype in barrier.log} == {torch.float32}
    oracle = lab.centralised(model, batches)
    by_torch = lab.centralised(model, batches, autocast=True)
    assert lab.distance(found, oracle, model.state_dict()) < 2 * lab.distance(
        by_torch, oracle, model.state_dict()
    )


@pytest.mark.parametrize("exchanges", MODES)
@pytest.mark.parametrize("positions", [1, 3, 49, 784, 50_176])
def test_equal_positions_give_the_unions_n_in_float32_too(positions, exchanges):
    """The examples per element travel in float32, such as 1/784.

    The factor n/(n-1) has the same bits as from whole numbers.
    """
    sizes, union, answers = (3, 5), 8, {}

    def reduce(tag: str, tensor: Tensor) -> Tensor:
        answers[tag] = combine(tag, [tensor, tensor], sizes)
        return answers[tag]

    for size in sizes:
        layer = nn.BatchNorm1d(1, momentum=1.0)
        x = torch.randn(
            size, 1, positions, generator=torch.Generator().manual_seed(size)
        )
        with synchronised(
            layer, reduce, batch_size=size, union_batch_size=union, exchanges=exchanges
        ):
            layer(x)
        if exchanges == "3L+1":
            var = answers["variance/0"][:1]
        else:
            var = answers["moments/0"][2, :1]
        n = union * positions
        assert torch.equal(layer.running_var, var * (n / (n - 1)))
