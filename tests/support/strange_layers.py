"""Models with other layers that a forward pass changes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from tests.support.seeds import with_seed


class OthersMove(nn.Module):
    """A model with much state in addition to BatchNorm, from 5 numbers to 3 classes.

    It has InstanceNorm with statistics, spectral norm, a counting buffer, a counting
    number, an average outside of the buffers, and a list that changes in place. A
    number counts even in eval mode.
    """

    def __init__(self) -> None:
        super().__init__()
        self.instance = nn.InstanceNorm1d(5, track_running_stats=True)
        self.hidden = spectral_norm(nn.Linear(5, 4))
        self.batch, self.out = nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.average = torch.zeros(4, dtype=torch.float64)
        self.passes, self.sizes = 0, []

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        self.sizes.append(len(x))
        self.calls += self.training
        seen = self.instance(x[..., None].expand(-1, -1, 2) * torch.tensor([1.0, 2.0]))
        hidden = self.batch(self.hidden(seen.mean(2)))
        if self.training:
            self.average = self.average.lerp(hidden.detach().mean(0), 0.1)
        return self.out(torch.relu(hidden))


@with_seed()
def others_move() -> nn.Module:
    """Return an ``OthersMove`` in float64 with seeded weights."""
    return OthersMove().double()


class Ghost(nn.BatchNorm1d):
    """A BatchNorm with its own forward pass, in virtual batches of four."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.cat([super(Ghost, self).forward(part) for part in input.split(4)])


class WithReLU(nn.BatchNorm1d):
    """A BatchNorm with an activation inside, like timm's.

    Before a ReLU, it is BatchNorm1d.
    """

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class OwnSums(nn.BatchNorm1d):
    """A BatchNorm with its own arithmetic."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.var(0) + self.eps).sqrt()


class InPlace(nn.Module):
    """A network whose graph ends at a layer before an in-place activation."""

    def __init__(self, inputs: int = 5) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(inputs, 4), nn.BatchNorm1d(4)
        self.act, self.last = nn.SiLU(inplace=True), nn.Linear(4, 3)
        self.double()

    def forward(self, x: Tensor):
        return self.last(self.act(self.norm(self.first(x))))


class Checkpointed(nn.Sequential):
    """Layers that run again in the backward pass."""

    def forward(self, x: Tensor):
        inputs = x.requires_grad_()
        return self[1](checkpoint(self[0], inputs, use_reentrant=False))


def settings_of(model: nn.Module) -> list:
    """Return the attributes of a model, except values, that hooks change."""
    found = []
    for path, module in model.named_modules():
        found.append((path, module.training, sorted(vars(module))))
        found.append(getattr(module, "track_running_stats", None))
        found.append((len(module._forward_pre_hooks), len(module._forward_hooks)))
    for name, parameter in model.named_parameters():
        found.append((name, parameter.requires_grad))
    return found
