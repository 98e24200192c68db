"""Networks whose BatchNorm calls somebody else can compute.

``calls`` is the forward pass as a generator. At each BatchNorm call, it gives the layer
and its input to the caller, and continues with the output that the caller sends. In the
package's ``forward``, each layer computes itself. The reference computes the calls and
needs no hooks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

Calls = Generator[tuple[nn.Module, Tensor], Tensor, Tensor]

CLASSES = 3


def completed(calls: Calls, output: Callable[[Any, Tensor], Tensor]) -> Tensor:
    """Return the result of a forward pass whose BatchNorm calls ``output`` computes."""
    try:
        layer, h = next(calls)
        while True:
            layer, h = calls.send(output(layer, h))
    except StopIteration as end:
        return end.value


class Network(nn.Module):
    """A network for inputs of ``shape``.

    Attributes:
        before_norm: the biases that BatchNorm takes out again. Their gradient is rounding
            noise, and Adam would follow its direction.
    """

    shape = (5,)
    before_norm = ("first.bias",)

    def calls(self, x: Tensor) -> Calls:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        calls = self.calls(x.to(next(self.parameters()).dtype))
        return completed(calls, lambda layer, h: layer(h))


class MLP(Network):
    """Linear, BatchNorm, ReLU, Linear."""

    def __init__(self, **norm: Any) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(5, 4), nn.BatchNorm1d(4, **norm)
        self.head = nn.Linear(4, CLASSES)

    def calls(self, x: Tensor) -> Calls:
        h = yield self.norm, self.first(x)
        return self.head(h.relu())


class Convolutions(Network):
    """Two convolutions with BatchNorm, the mean over the image, and a classifier."""

    shape = (1, 4, 4)
    before_norm = ("second.bias",)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.bn1 = nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3)
        self.second, self.bn2 = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, momentum=0.3)
        self.head = nn.Linear(4, CLASSES)

    def calls(self, x: Tensor) -> Calls:
        h = yield self.bn1, self.first(x)
        h = yield self.bn2, self.second(h.relu())
        return self.head(h.relu().mean((2, 3)))


class Twice(Network):
    """One BatchNorm layer, called at two depths."""

    before_norm = ("first.bias", "second.bias")

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 4), nn.Linear(4, 4)
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, CLASSES)

    def calls(self, x: Tensor) -> Calls:
        h = yield self.norm, self.first(x)
        h = yield self.norm, self.second(h.relu())
        return self.head(h.relu())


class TwoNorms(Network):
    """Two BatchNorm layers with different settings."""

    before_norm = ("first.bias", "second.bias")

    def __init__(self, one: Mapping, other: Mapping) -> None:
        super().__init__()
        self.first, self.a = nn.Linear(5, 4), nn.BatchNorm1d(4, **one)
        self.second, self.b = nn.Linear(4, 6), nn.BatchNorm1d(6, **other)
        self.head = nn.Linear(6, CLASSES)

    def calls(self, x: Tensor) -> Calls:
        h = yield self.a, self.first(x)
        h = yield self.b, self.second(h.relu())
        return self.head(h.relu())


def _in_eval() -> Network:
    """Return a network whose second layer is built in eval mode."""
    network = TwoNorms({}, {})
    network.b.eval()
    return network


def _frozen() -> Network:
    """Return a network with a frozen weight and a frozen gamma."""
    network = TwoNorms({}, {})
    network.first.weight.requires_grad_(False)
    network.a.weight.requires_grad_(False)
    return network


class Unused(MLP):
    """An MLP with a layer that its forward pass does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)


class Tied(Network):
    """An autoencoder's weight under two names, then a classifier."""

    before_norm = ("encoder.bias",)

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(5, 5)
        self.norm = nn.BatchNorm1d(5)
        self.decoder = nn.Linear(5, 5, bias=False)
        self.decoder.weight = self.encoder.weight
        self.head = nn.Linear(5, CLASSES)

    def calls(self, x: Tensor) -> Calls:
        h = yield self.norm, self.encoder(x)
        return self.head(self.decoder(h.relu()).tanh())


class Parametrized(MLP):
    """A classifier whose weight ``weight_norm`` replaces by two parameters."""

    def __init__(self) -> None:
        super().__init__()
        weight_norm(self.head)


class Buffers(MLP):
    """Buffers of several dtypes that the forward pass may move in training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.tensor([0.5, 1.0, 2.0, 1.0, 0.5]))
        self.register_buffer("scale", torch.tensor(0.25, dtype=torch.float32))
        self.register_buffer("seen", torch.tensor(0, dtype=torch.int32))
        self.register_buffer("used", torch.tensor([True, False]))
        self.register_buffer("level", torch.zeros(3, dtype=torch.float64))

    def calls(self, x: Tensor) -> Calls:
        if self.training and torch.is_grad_enabled():
            with torch.no_grad():
                self.seen += 1
                self.level.mul_(0.8).add_(0.2 * x.mean())
        h = yield self.norm, self.first(x * self.window)
        return self.head(h.relu() * (1 + self.scale))


class Cached(nn.Linear):
    """A layer that takes the weight of its first pass in eval mode for the others."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.cached = {}

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return super().forward(x)
        kept = self.cached.setdefault("weight", self.weight.detach().clone())
        return F.linear(x, kept, self.bias)


class Remembers(MLP):
    """An MLP with a counter, an average and a cache outside its state.

    Each is legal in plain torch. They exist as long as the model.
    """

    def __init__(self) -> None:
        super().__init__()
        self.passes, self.average = 0, [torch.zeros(4)]
        self.head = Cached(4, CLASSES)

    def calls(self, x: Tensor) -> Calls:
        h = yield self.norm, self.first(x)
        if self.training and torch.is_grad_enabled():
            self.passes += 1
            self.average[0] = 0.8 * self.average[0] + 0.2 * h.detach().mean(0)
        return self.head(h.relu() / (1 + 0.1 * self.passes) + self.average[0])


class Merged(nn.Linear):
    """A frozen layer with a low-rank addition that eval mode adds to its weight."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.down = nn.Parameter(torch.randn(2, inputs) * 0.3)
        self.up = nn.Parameter(torch.randn(outputs, 2) * 0.3)
        self.weight.requires_grad_(False)
        self.merged = False

    def train(self, mode: bool = True) -> Merged:
        if self.merged == mode:
            self.weight.data += (-1 if mode else 1) * self.up @ self.down
            self.merged = not mode
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.merged else y + x @ self.down.T @ self.up.T


class Merges(MLP):
    """An MLP whose first layer changes its weight with the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Merged(5, 4)


class Filter(nn.Module):
    """A complex factor for each frequency of four numbers."""

    def __init__(self) -> None:
        super().__init__()
        dtype = torch.get_default_dtype().to_complex()
        self.spectrum = nn.Parameter(1 + 0.5 * torch.randn(3, dtype=dtype))
        self.register_buffer("window", torch.full((), 0.9 + 0.2j, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        factors = self.spectrum * self.window
        return torch.fft.irfft(torch.fft.rfft(x) * factors, n=4)


class Complex(MLP):
    """An MLP with a filter whose parameter and buffer are complex."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = Filter()

    def calls(self, x: Tensor) -> Calls:
        h = yield self.norm, self.filter(self.first(x))
        return self.head(h.relu())


class NormLast(MLP):
    """BatchNorm of the body is registered after the classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = self._modules.pop("norm")


class EqualChannels(Network):
    """A convolution with as many channels as classes feeds the classifier."""

    shape = (1, 3, 3)
    before_norm = ("conv.bias",)

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, CLASSES, 2), nn.BatchNorm2d(CLASSES)
        self.head = nn.Linear(4 * CLASSES, CLASSES)

    def calls(self, x: Tensor) -> Calls:
        h = yield self.norm, self.conv(x)
        return self.head(h.relu().flatten(1))


class Standardised(nn.Conv2d):
    """gamma (W - mean) / sqrt((var + 1e-6) N) for each filter, with ReLU's gamma."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight.flatten(1)
        centred = w - w.mean(1, keepdim=True)
        var = (centred**2).mean(1, keepdim=True)
        gamma = math.sqrt(2 / (1 - 1 / math.pi))
        scaled = gamma * centred / ((var + 1e-6) * w.shape[1]).sqrt()
        return F.conv2d(x, scaled.view_as(self.weight), self.bias)


class Convolved(Network):
    """Two convolutions without BatchNorm, and a classifier."""

    shape = (1, 4, 4)
    before_norm = ()

    def __init__(self, convolution: type[nn.Conv2d]) -> None:
        super().__init__()
        self.first, self.second = convolution(1, 3, 3), convolution(3, 4, 2)
        self.head = nn.Linear(4, CLASSES)

    def calls(self, x: Tensor) -> Calls:
        yield from ()
        return self.head(self.second(self.first(x).relu()).relu().mean((2, 3)))


class NoNorm(Network):
    """A network without BatchNorm."""

    before_norm = ()

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, CLASSES)

    def calls(self, x: Tensor) -> Calls:
        yield from ()
        return self.head(self.second(self.first(x).relu()).relu())


NETWORKS = {
    "mlp": MLP,
    "convolutions": Convolutions,
    "twice": Twice,
    "no-affine": lambda: TwoNorms({"affine": False}, {"eps": 1e-2}),
    "no-statistics": lambda: TwoNorms({"track_running_stats": False}, {}),
    "cumulative": lambda: TwoNorms({"momentum": None}, {"momentum": 0.4}),
    "in-eval": _in_eval,
    "frozen": _frozen,
    "unused": Unused,
    "tied": Tied,
    "parametrized": Parametrized,
    "buffers": Buffers,
    "remembers": Remembers,
    "merges": Merges,
    "complex": Complex,
    "norm-last": NormLast,
    "equal-channels": EqualChannels,
    "no-norm": NoNorm,
    "wsconv": lambda: Convolved(Standardised),
    # the model that the package turns into "wsconv"
    "convolved": lambda: Convolved(nn.Conv2d),
}


def network(
    name: str, dtype: torch.dtype = torch.float64, without_noise: bool = False
) -> Network:
    """Return a network, equal in every call, with BatchNorm as after training.

    If ``without_noise`` is true, the biases ``before_norm`` do not train.
    """
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        # ``torch.manual_seed`` also seeds GPUs. This takes milliseconds.
        torch.default_generator.manual_seed(0)
        torch.set_default_dtype(dtype)
        try:
            made = NETWORKS[name]()
        finally:
            torch.set_default_dtype(before)
        for layer in made.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                for leaf, value in [*layer.named_parameters(), *layer.named_buffers()]:
                    if value.is_floating_point():
                        low = -0.5 if leaf in ("bias", "running_mean") else 0.6
                        value.data.uniform_(low, 1.4)
        for name in made.before_norm if without_noise else ():
            made.get_parameter(name).requires_grad_(False)
        return made
