"""Models with layers beside BatchNorm that a forward pass changes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm


class Codebook(nn.Module):
    """A vector quantiser whose codes are averages: of a parameter, by ``.data``."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.arange(4.0)[:, None].expand(4, 4).clone())
        self.codes.requires_grad_(False)
        self.register_buffer("uses", torch.zeros(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x, self.codes).argmin(1)
        if self.training:
            self.uses = self.uses + torch.bincount(nearest, minlength=4)
            for code in nearest.unique():
                mean = x[nearest == code].mean(0).detach()
                self.codes.data[code] = self.codes.data[code].lerp(mean, 0.1)
        return x + (self.codes[nearest] - x).detach()


class OthersMove(nn.Module):
    """Beside BatchNorm: InstanceNorm with statistics, spectral norm, a codebook, a
    buffer and a number that count, an average that is no buffer. Also in eval mode one
    counts. 5 numbers, 3 classes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.instance = nn.InstanceNorm1d(5, track_running_stats=True)
        self.hidden = spectral_norm(nn.Linear(5, 4))
        self.batch = nn.BatchNorm1d(4)
        self.codebook, self.out = Codebook(), nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.average = torch.zeros(4)
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        self.calls += self.training
        seen = self.instance(x[..., None].expand(-1, -1, 2) * torch.tensor([1.0, 2.0]))
        hidden = self.batch(self.hidden(seen.mean(2)))
        if self.training:
            self.average = self.average.lerp(hidden.detach().mean(0), 0.1)
        return self.out(self.codebook(torch.relu(hidden)))


def others_move() -> nn.Module:
    """An ``OthersMove`` in float64, always the same."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = OthersMove().double()
    model.average = model.average.double()
    return model
