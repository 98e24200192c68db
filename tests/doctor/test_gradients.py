"""FedTAN's B_i against a hand-made synchronised pass: both clients' networks in one autograd graph, layer by layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torchvision.models.resnet import BasicBlock, ResNet

from fedbn_flwr.doctor.diagnose import default_loss
from fedbn_flwr.doctor.gradients import deviations, regrouped
from fedbn_flwr.errors import NormLayerError

SIZES = (6, 4)
Pair = list[Tensor]


@pytest.fixture(scope="module")
def resnet() -> nn.Module:
    torch.manual_seed(0)
    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=3).double().eval()


@pytest.fixture(scope="module")
def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, 3, 16, 16, generator=generator, dtype=torch.float64) * (1 + k) + k,
            torch.randint(3, (size,), generator=generator),
        )
        for k, size in enumerate(SIZES)
    ]


def _copies(model: nn.Module) -> list[dict[str, Tensor]]:
    return [{n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()} for _ in SIZES]


def _forward(weights: list[dict[str, Tensor]], xs: Pair, union: bool) -> Pair:
    """ResNet with one block a stage, written out: BatchNorm uses the statistics of the union, or each client's own."""

    def conv(name: str, ys: Pair, stride: int, padding: int) -> Pair:
        pairs = zip(weights, ys, strict=True)
        return [functional.conv2d(y, w[f"{name}.weight"], stride=stride, padding=padding) for w, y in pairs]

    def bn(name: str, ys: Pair) -> Pair:
        found = []
        for w, y in zip(weights, ys, strict=True):
            seen = torch.cat(ys) if union else y
            var, mean = torch.var_mean(seen, (0, 2, 3), correction=0, keepdim=True)
            gamma, beta = w[f"{name}.weight"].view(1, -1, 1, 1), w[f"{name}.bias"].view(1, -1, 1, 1)
            found.append((y - mean) / (var + 1e-5).sqrt() * gamma + beta)
        return found

    def each(do: Callable[[Tensor], Tensor], ys: Pair) -> Pair:
        return [do(y) for y in ys]

    ys = each(torch.relu, bn("bn1", conv("conv1", xs, 2, 3)))
    ys = each(lambda y: functional.max_pool2d(y, 3, 2, 1), ys)
    for stage in range(1, 5):
        name, stride = f"layer{stage}.0", 1 if stage == 1 else 2
        inner = each(torch.relu, bn(f"{name}.bn1", conv(f"{name}.conv1", ys, stride, 1)))
        inner = bn(f"{name}.bn2", conv(f"{name}.conv2", inner, 1, 1))
        if stage > 1:
            ys = bn(f"{name}.downsample.1", conv(f"{name}.downsample.0", ys, stride, 0))
        ys = [torch.relu(a + b) for a, b in zip(inner, ys, strict=True)]
    pairs = zip(weights, ys, strict=True)
    return [functional.linear(y.mean((2, 3)), w["fc.weight"], w["fc.bias"]) for w, y in pairs]


def _gradients(model: nn.Module, batches: list[tuple[Tensor, Tensor]], union: bool) -> list[Tensor]:
    """With ``union``, client i's gradient is that of F = sum p_j F_j by its own copy of the weights, over p_i."""
    weights = _copies(model)
    outputs = _forward(weights, [inputs for inputs, _ in batches], union)
    losses = [functional.cross_entropy(o, t) for o, (_, t) in zip(outputs, batches, strict=True)]
    shares = [size / sum(SIZES) for size in SIZES]
    total = torch.stack([p * loss for p, loss in zip(shares, losses, strict=True)]).sum()
    found = []
    for own, p in zip(weights, shares, strict=True):
        gradient = torch.autograd.grad(total, list(own.values()), retain_graph=True)
        found.append(torch.cat([g.flatten() for g in gradient]) / p)
    return found


def test_gradient_deviation_against_the_oracle(resnet: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
    before = {name: value.clone() for name, value in resnet.state_dict().items()}
    found = deviations(resnet, batches, default_loss)
    own, shared = _gradients(resnet, batches, union=False), _gradients(resnet, batches, union=True)
    union = (SIZES[0] * shared[0] + SIZES[1] * shared[1]) / sum(SIZES)
    for one, alone, together in zip(found, own, shared, strict=True):
        assert one.absolute == pytest.approx(float((alone - together).norm()), rel=1e-9)
        assert one.norm == pytest.approx(float(together.norm()), rel=1e-9)
        assert one.heterogeneity == pytest.approx(float((together - union).norm()), rel=1e-9)
        assert one.relative > 0.05
    assert all(torch.equal(value, before[name]) for name, value in resnet.state_dict().items())


def test_no_deviation_without_batchnorm_or_with_equal_batches(batches: list[tuple[Tensor, Tensor]]) -> None:
    plain = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 3)).double()
    assert [one.absolute for one in deviations(plain, batches, default_loss)] == pytest.approx([0, 0], abs=1e-10)
    with_bn = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(3 * 16 * 16), nn.Linear(3 * 16 * 16, 3)).double()
    same = deviations(with_bn, [batches[0]] * 2, default_loss)
    assert [one.relative for one in same] == pytest.approx([0, 0], abs=1e-9)


def test_an_error_of_one_client_reaches_the_caller(batches: list[tuple[Tensor, Tensor]]) -> None:
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(3 * 16 * 16), nn.Linear(3 * 16 * 16, 3)).double()
    bad = [batches[0], (batches[1][0], torch.full((4,), 99))]
    with pytest.raises(IndexError):
        deviations(model, bad, default_loss)


def test_clients_that_do_not_call_the_same_layers_end_with_an_error(batches: list[tuple[Tensor, Tensor]]) -> None:
    """One that has no more to exchange leaves nobody waiting."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head = nn.BatchNorm2d(3), nn.BatchNorm2d(3), nn.LazyLinear(3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.head((self.second(x) if len(x) == SIZES[0] else x).flatten(1))

    model = Branches().double()
    model(batches[0][0])
    with pytest.raises(NormLayerError, match="the clients' exchanges differ: end, mean/1/second"):
        deviations(model, batches, default_loss)


def test_regrouped_batches_hold_the_same_examples(batches: list[tuple[Tensor, Tensor]]) -> None:
    found = regrouped(batches, torch.Generator().manual_seed(0))
    assert [len(targets) for _, targets in found] == [*SIZES]
    before, after = (torch.cat([inputs for inputs, _ in some]).sum() for some in (batches, found))
    assert float(before) == pytest.approx(float(after))
