"""Models, data and centralised steps to compare with FedTAN's step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.points import Points

State = Mapping[str, Tensor]
Batch = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
TRANSPORTS = ("barrier", "messages", "channel")
LEARNING_RATE, WEIGHT_DECAY = 0.1, 1e-2


def synchronised(strategy: Any, transport: str = "barrier", **settings: Any):
    """Return a strategy of FedTAN's family with this transport, without tests.

    ``run_step`` may give clients of one process a barrier. The strategy needs no
    setting.
    """
    sent = "messages" if transport == "barrier" else transport
    return strategy(
        **{
            "fraction_evaluate": 0.0,
            "fedtan_timeout": 20.0,
            "fedtan_transport": sent,
            **settings,
        }
    )


def client_data(
    shape: Sequence[int],
    sizes: Sequence[int],
    *,
    classes: int = 3,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> list[Points]:
    """Return data of clients that differ in offset and scale.

    float32 and float64 use the same numbers.
    """
    g = torch.Generator().manual_seed(seed)
    made = []
    for i, size in enumerate(sizes):
        inputs = torch.randn(size, *shape, generator=g) * (1 + 0.3 * i) + 0.5 * i
        made.append(
            Points(inputs.to(dtype), torch.randint(classes, (size,), generator=g))
        )
    return made


def sgd_step(model: nn.Module) -> State:
    torch.optim.SGD(model.parameters(), LEARNING_RATE, weight_decay=WEIGHT_DECAY).step()
    return model.state_dict()


def centralised(
    model: nn.Module,
    batches: Sequence[Batch],
    *,
    loss: Loss = F.cross_entropy,
    autocast: bool = False,
) -> State:
    """Return the model after one plain torch step on the union of the batches."""
    model = copy.deepcopy(model)
    x, target = (torch.cat(parts) for parts in zip(*batches, strict=True))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        value = loss(model(x), target)
    value.backward()
    return sgd_step(model)


def distances(found: State, oracle: State, start: State) -> list[float]:
    """Return ||found - oracle|| / ||oracle - start|| of parameters and statistics.

    Counters must be equal.
    """
    for name, value in oracle.items():
        if not value.is_floating_point():
            assert torch.equal(found[name], value), name
    ratios = []
    for statistics in (False, True):
        names = [
            n
            for n, v in oracle.items()
            if v.is_floating_point() and ("running_" in n) == statistics
        ]
        if names:
            off = _distance(found, oracle, names)
            ratios.append(float(off / _distance(oracle, start, names)))
    return ratios


def _distance(one: State, other: State, names: Sequence[str]) -> Tensor:
    differences = [(one[n].double() - other[n].double()).flatten() for n in names]
    return torch.cat(differences).norm()


class OwnForward(nn.BatchNorm2d):
    """A subclass that calls batch_norm itself, as timm's BatchNormAct2d does."""

    def forward(self, x: Tensor) -> Tensor:
        self.num_batches_tracked.add_(1)
        return F.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            True,
            self.momentum,
            self.eps,
        ).relu()


class Branches(nn.Module):
    """Parallel branches with every option of a BatchNorm layer.

    One layer is used twice, one is frozen, one is functional, and one is builtin.
    """

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (
            nn.Conv2d(2, 4, 3),
            nn.Conv2d(2, 4, 3, stride=1, bias=False),
        )
        self.a, self.b = nn.BatchNorm2d(4, momentum=None), OwnForward(4, momentum=0.3)
        self.twice = nn.BatchNorm2d(4, eps=1e-2)
        self.plain = nn.BatchNorm2d(4, affine=False, track_running_stats=False)
        self.untracked = nn.BatchNorm2d(4, track_running_stats=False)
        self.no_affine = nn.BatchNorm2d(4, affine=False)
        self.frozen = nn.BatchNorm2d(4).eval()
        self.unused = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)
        self.a.num_batches_tracked.fill_(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.a(self.left(x))) + self.twice(self.b(self.right(x)))
        x = torch.tanh(
            self.untracked(x) + self.frozen(self.plain(x * x)) + self.no_affine(x.abs())
        )
        x = F.batch_norm(x**3, None, None, training=True)
        x = torch.batch_norm(x * x, None, None, None, None, True, 0.1, 1e-5, False)
        return self.head(x.square().mean((2, 3)))


def trained(model: nn.Module) -> nn.Module:
    """Set gamma, beta and statistics to values as after training, in float64."""
    g = torch.Generator().manual_seed(4)
    for layer in model.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            for name, value in [*layer.named_parameters(), *layer.named_buffers()]:
                if value.is_floating_point():
                    low = -1.0 if name in {"bias", "running_mean"} else 0.5
                    drawn = torch.empty_like(value).uniform_(low, 1.5, generator=g)
                    value.data.copy_(drawn)
    return model.double()
