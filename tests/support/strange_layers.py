"""Models with other layers that a forward pass changes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint


class Codebook(nn.Module):
    """A vector quantiser that averages its codes, a parameter, through ``.data``."""

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


@dataclass
class Steps:
    """A number that counts."""

    taken: int = 0


class OthersMove(nn.Module):
    """A model with much state in addition to BatchNorm, from 5 numbers to 3 classes.

    It has InstanceNorm with statistics, spectral norm, a codebook, a counting buffer, a
    counting number, and an average outside of the buffers. A number counts even in eval
    mode. Some attributes change in place: a list, the state of a recurrence, an array,
    a dataclass, a teacher outside of the modules, and generators. The first pass
    resizes the buffers of a range.
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
        self.register_buffer("lowest", torch.zeros(0))
        self.sizes: list[int] = []
        self.recurrent = (torch.zeros(4), torch.zeros(4))
        self.counts, self.steps = np.zeros(2), Steps()
        self.teacher = {"out": [nn.Linear(4, 3)]}
        self.generators = [torch.Generator(), np.random.default_rng(0), random.Random()]

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        self._change_in_place(x)
        self.calls += self.training
        seen = self.instance(x[..., None].expand(-1, -1, 2) * torch.tensor([1.0, 2.0]))
        hidden = self.batch(self.hidden(seen.mean(2)))
        if self.training:
            self.average = self.average.lerp(hidden.detach().mean(0), 0.1)
        return self.out(self.codebook(torch.relu(hidden)))

    def marks(self) -> list[object]:
        """Return the values of the attributes that change in place."""
        torch_generator, of_numpy, of_python = self.generators
        return [
            self.sizes.copy(),
            [state.tolist() for state in self.recurrent],
            self.counts.tolist(),
            self.steps.taken,
            [p.tolist() for p in self.teacher["out"][0].parameters()],
            torch_generator.get_state().tolist(),
            str(of_numpy.bit_generator.state),
            of_python.getstate(),
        ]

    def _change_in_place(self, x: Tensor) -> None:
        self.sizes.append(len(x))
        self.recurrent = tuple(state + 1 for state in self.recurrent)
        self.counts[0] += 1
        self.steps.taken += 1
        for parameter in self.teacher["out"][0].parameters():
            parameter.data += 1
        torch_generator, of_numpy, of_python = self.generators
        torch.rand(1, generator=torch_generator)
        of_numpy.random()
        of_python.random()
        if self.training:
            least = x.detach().amin(0)
            self.lowest.resize_(least.shape).copy_(least)


def others_move() -> nn.Module:
    """Return an ``OthersMove`` in float64 with seeded weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = OthersMove().double()
    model.average = model.average.double()
    return model


class InPlace(nn.Module):
    """A network whose graph ends at a layer before an in-place activation."""

    def __init__(self, inputs: int = 5) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(inputs, 4), nn.BatchNorm1d(4)
        self.act, self.last = nn.SiLU(inplace=True), nn.Linear(4, 3)
        self.double()

    def forward(self, x: Tensor) -> Any:
        return self.last(self.act(self.norm(self.first(x))))


class Checkpointed(nn.Sequential):
    """Layers that run again in the backward pass."""

    def forward(self, x: Tensor) -> Any:
        inputs = x.requires_grad_()
        return self[1](checkpoint(self[0], inputs, use_reentrant=False))


def settings_of(model: nn.Module) -> list[Any]:
    """Return the attributes of a model, except values, that hooks change."""
    found: list[Any] = []
    for path, module in model.named_modules():
        found.append((path, module.training, sorted(vars(module))))
        found.append(getattr(module, "track_running_stats", None))
        found.append((len(module._forward_pre_hooks), len(module._forward_hooks)))
    for name, parameter in model.named_parameters():
        found.append((name, parameter.requires_grad))
    return found
