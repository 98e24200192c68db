"""Models whose parts refer to each other train as in plain torch.

A law draws links between parts, state outside the state dict, a loss, the carrier of
the objects (the function, a new instance for each message, or one for all; the last
two also with ``reuse_model``), the order of the sites, and a resume. The oracle is
plain torch: it builds the objects again for each message. A run with one instance for
all ends with the sentence that asks for the function. A run that uses models again
ends with the name of the attribute that a message has changed, if there is one.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import weakref
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.parametrizations import weight_norm

from fedbn_flwr import InProcessGrid, TorchClient, client_app
from fedbn_flwr.errors import ConfigError, NothingTrainedError
from fedbn_flwr.messages.records import to_record
from fedbn_flwr.strategies import FedAvg, Strategy
from fedbn_flwr.training import CLASSIFICATION, LearningRate, LocalTraining, Task
from tests.support.at_a_barrier import average
from tests.support.points import Points
from tests.support.seeds import with_seed

SIZES, RATE, STEPS, ROUNDS = (9, 14), 0.1, 2, 2
NOTHING, DEFAULT = object(), "".join(["de", "fault"])
NEAR = weakref.WeakSet()
BY_ADDRESS = {}
KEPT = []


# --- links: each layer changes its outputs or gradients if its link breaks --------------


class Link(nn.Module):
    """A layer with a link to a part of its network. ``setup`` makes the link."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.setup(net)

    def setup(self, net: Net) -> None: ...

    def scale(self):
        """Return the factor of the outputs: 1, or 0 for a broken link."""
        return 1

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale()


class MasksGradient(Link):
    def setup(self, net: Net) -> None:
        mask = torch.ones(5)
        mask[0] = 0
        net.first.weight.register_hook(lambda gradient: gradient * mask)


class ClipsAfterwards(Link):
    def setup(self, net: Net) -> None:
        def clip(parameter: Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad.clamp_(-1e-3, 1e-3)

        net.last.weight.register_post_accumulate_grad_hook(clip)


class KeepsAttribute(Link):
    def setup(self, net: Net) -> None:
        net.first.bias.scale = 3.0
        self.bias = net.first.bias

    def scale(self):
        return hasattr(self.bias, "scale")


class ReadsParent(Link):
    def setup(self, net: Net) -> None:
        self.parent = weakref.ref(net)

    def scale(self):
        return self.parent().first.weight.sum().tanh()


class CachesMethod(Link):
    def setup(self, net: Net) -> None:
        self.scales = nn.Parameter(torch.ones(3))
        self.get = functools.lru_cache(maxsize=None)(self.one_of)

    def one_of(self, at: int) -> Tensor:
        return self.scales[at]

    def scale(self):
        self.get.cache_clear()
        return self.get(1)


class ComparesObject(Link):
    def setup(self, net: Net) -> None:
        self.extra = NOTHING

    def scale(self):
        return self.extra is NOTHING


class ComparesText(Link):
    def setup(self, net: Net) -> None:
        self.extra = {"mode": (DEFAULT,)}

    def scale(self):
        return self.extra["mode"][0] is DEFAULT


class KeepsView(Link):
    def setup(self, net: Net) -> None:
        self.kept = net.first.weight.detach()[0]

    def scale(self):
        return self.kept.mean()


class SharesStorage(Link):
    def setup(self, net: Net) -> None:
        flat = torch.linspace(-1, 1, 6)
        self.one, self.other = nn.Parameter(flat[:4]), nn.Parameter(flat[2:])

    def forward(self, x: Tensor) -> Tensor:
        return x * self.one + self.other


class SharesParameter(Link):
    def setup(self, net: Net) -> None:
        self.bias = net.first.bias

    def scale(self):
        return self.bias


class SharesLayer(Link):
    def setup(self, net: Net) -> None:
        self.norm, self.again = net.norm, (net.norm,)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.again[0](x)


class SharesNumpy(Link):
    def setup(self, net: Net) -> None:
        self.array = np.ones(4)
        self.scales = nn.Parameter(torch.from_numpy(self.array))

    def scale(self):
        return self.scales * self.array.mean()


class IsInWeakSet(Link):
    def setup(self, net: Net) -> None:
        NEAR.add(net.norm)
        self.norm = net.norm

    def scale(self):
        return self.norm in NEAR


def note_address(layer: nn.Module) -> str:
    BY_ADDRESS[id(layer)] = 1.0
    return str(id(layer))


class IsKnownByAddress(Link):
    def setup(self, net: Net) -> None:
        self.key = note_address(self)

    def scale(self):
        return self.key == str(id(self)) and id(self) in BY_ADDRESS


class IsOfClass(Link):
    latest = None

    def setup(self, net: Net) -> None:
        type(self).latest = weakref.ref(net.norm)
        self.norm = net.norm

    def scale(self):
        return type(self).latest() is self.norm


class IsInList(Link):
    def setup(self, net: Net) -> None:
        KEPT[:] = [net]

    def scale(self):
        return KEPT[0].first.weight.sum().tanh()


class ClassKeepsModel(Link):
    latest = None

    def setup(self, net: Net) -> None:
        type(self).latest = net

    def scale(self):
        return self.latest.first.weight.sum().tanh()


class IteratesSet(Link):
    def setup(self, net: Net) -> None:
        self.order = {8}
        self.order.add(0)  # in the place after 8

    def scale(self):
        return [*self.order] == [8, 0]


class PatchesForward(Link):
    def setup(self, net: Net) -> None:
        def forward(norm: nn.BatchNorm1d, x: Tensor) -> Tensor:
            return type(norm).forward(norm, x) * net.first.weight.sum().tanh()

        net.norm.forward = MethodType(forward, net.norm)


class TracesGraph(Link):
    def setup(self, net: Net) -> None:
        self.body = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
        counts = []

        def hook(module: nn.Module, _: Any, output: Tensor) -> Tensor:
            counts.append(1)
            return output * (1 + 0.1 * len(counts))

        self.body.get_submodule("0").register_forward_hook(hook)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Parametrizes(Link):
    def setup(self, net: Net) -> None:
        self.inner = weight_norm(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class CountsTogether(Link):
    def setup(self, net: Net) -> None:
        net.norm.seen = self.seen = []
        self.norm = net.norm

    def scale(self):
        self.seen.append(1)
        return 1 + 0.1 * len(self.norm.seen)


LINKS = tuple(Link.__subclasses__())


# --- state outside the state dict ---------------------------------------------------------


Advance = Callable[[], float]


def in_closure(_: nn.Module) -> Advance:
    box = {"passes": 0}

    def advance() -> float:
        box["passes"] += 1
        return box["passes"]

    return advance


def _advance_box(box: dict[str, int]) -> float:
    box["passes"] = box.get("passes", 0) + 1
    return box["passes"]


def in_partial(_: nn.Module) -> Advance:
    return functools.partial(_advance_box, {})


def in_default(_: nn.Module) -> Advance:
    def advance(calls: list[int] = []) -> float:  # noqa: B006
        calls.append(1)
        return len(calls)

    return advance


def in_function(_: nn.Module) -> Advance:
    def advance() -> float:
        advance.passes += 1
        return advance.passes

    advance.passes = 0
    return advance


def in_function_later(_: nn.Module) -> Advance:
    def advance() -> float:
        advance.passes = getattr(advance, "passes", 0) + 1
        return advance.passes

    return advance


def in_counter(_: nn.Module) -> Advance:
    return itertools.count(1).__next__


def of_torch(_: nn.Module) -> Advance:
    generator = torch.Generator().manual_seed(3)
    return lambda: torch.rand((), generator=generator).item()


def of_numpy(_: nn.Module) -> Advance:
    return np.random.RandomState(3).random_sample


def on_parameter(layer: nn.Module) -> Advance:
    def advance() -> float:
        layer.scale.passes.append(1)
        return len(layer.scale.passes)

    layer.scale.passes = []
    return advance


STATES = (in_closure, in_partial, in_default, in_function, in_function_later)
STATES += (in_counter, of_torch, of_numpy, on_parameter)


class Drifts(nn.Module):
    """A layer whose training passes depend on the number of passes before."""

    def __init__(self, kind: Callable[[nn.Module], Advance]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.advance = kind(self)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * (1 + 0.01 * self.advance() * self.training)


class Net(nn.Module):
    def __init__(self, kinds: Iterable) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(5, 4), nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 3)
        of = [kind(self) if kind in LINKS else Drifts(kind) for kind in kinds]
        self.between = nn.Sequential(*of)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(torch.relu(self.norm(self.first(x)))))


@with_seed(3)
def built(kinds: tuple) -> nn.Module:
    """Build in float64, because a cast would break the links of views."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return Net(kinds)
    finally:
        torch.set_default_dtype(before)


# --- losses and loops that belong to a model ----------------------------------------------


def of_parameters(net) -> Callable[..., Tensor]:
    return lambda outputs, targets: (
        cross_entropy(outputs, targets)
        + 0.05 * sum(parameter.abs().sum() for parameter in net.parameters())
    )


def of_activation(net) -> Callable[..., Tensor]:
    seen = {}
    net.norm.register_forward_hook(lambda *given: seen.update(last=given[2]))
    return lambda outputs, targets: (
        cross_entropy(outputs, targets) + 0.5 * seen["last"].square().mean()
    )


class CountsClasses(nn.Module):
    def __init__(self, net) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(3, dtype=torch.float64))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.seen.add_(torch.bincount(targets, minlength=3))
        return cross_entropy(outputs + (self.seen / self.seen.sum()).log(), targets)


def task_of(loss: Callable, net: nn.Module) -> Task:
    return dataclasses.replace(CLASSIFICATION, training_loss=loss(net))


def take_steps(
    loss: Callable[..., Tensor], model: nn.Module, batches: Any, rules: Any, rate: float
) -> float:
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.SGD(trained, rate)
    for inputs, targets in batches:
        optimizer.zero_grad()
        value = loss(model(inputs), targets)
        value.backward()
        optimizer.step()
    return value.item()


steps = functools.partial(take_steps, cross_entropy)


def masks(model, *given) -> float:
    model.last.bias.register_hook(lambda gradient: gradient * 0.5)
    return steps(model, *given)


def replaces(model, *given) -> float:
    own = model.last.forward
    model.last.forward = lambda x: 0.9 * own(x)
    return steps(model, *given)


def freezes(model, *given) -> float:
    loss = steps(model, *given)
    model.first.requires_grad_(False)
    return loss


LOSSES = (of_parameters, of_activation, CountsClasses)
LOOPS = (steps, masks, replaces, freezes)


# --- the law --------------------------------------------------------------------------------


def site(number: int) -> Points:
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(SIZES[number], 5, generator=generator, dtype=torch.float64)
    return Points(inputs, torch.arange(SIZES[number]) % 3)


def in_plain_torch(kinds: tuple, loss: Any, loop: Any) -> dict[str, Tensor]:
    state = built(kinds).state_dict()
    for _ in range(ROUNDS):
        trained = []
        for number in range(len(SIZES)):
            net = built(kinds)
            net.load_state_dict(state)
            act = functools.partial(take_steps, loss(net)) if loss else loop or steps
            data = site(number)
            act(net, [(data.inputs, data.targets)] * STEPS, None, RATE)
            trained.append(net.state_dict())
        state = average(trained, SIZES)
    return state


def trained(
    method: type[Strategy],
    client_fn: Callable[[Any], TorchClient],
    arrays: ArrayRecord,
    seed: int,
    resumed: bool,
    workers: int,
) -> ArrayRecord:
    """Return the arrays after the rounds. A resumed run has another grid."""
    saved = None
    for last in range(1 if resumed else ROUNDS, ROUNDS + 1):
        strategy = method(fraction_evaluate=0.0, min_replies=len(SIZES))
        if saved is not None:
            strategy.load_state_dict(saved, last - 1)
        app = client_app(client_fn)
        with InProcessGrid(app, len(SIZES), workers=workers, seed=seed) as grid:
            arrays = strategy.start(grid, arrays, num_rounds=last).arrays
        saved = strategy.state_dict()
    return arrays


def law(
    kinds: tuple,
    belongs: Any,
    carrier: str,
    seed: int,
    resumed: bool,
    workers: int = 0,
) -> str:
    """Return the error of a model of several messages, or "" for torch's result."""
    reuse = "again" in carrier
    loss = belongs if belongs in LOSSES else None
    loop = belongs if belongs in LOOPS else None
    build = functools.partial(built, kinds)
    training = LocalTraining(
        learning_rate=LearningRate(RATE), batch_size=0, local_epochs=STEPS, loop=loop
    )

    def brought() -> tuple:
        is_function = carrier.startswith("function")
        model = build if is_function else build()
        task = functools.partial(task_of, loss) if loss else CLASSIFICATION
        return model, task if is_function or reuse or not loss else task(model)

    def client_fn(context) -> TorchClient:
        own = site(context.node_config["partition-id"])
        model, task = once if carrier.startswith("global") else brought()
        return TorchClient(
            *(model, own, own, training),
            context=context,
            task=task,
            reuse_model=reuse,
        )

    start, once = to_record(build().state_dict()), brought()
    try:
        arrays = trained(FedAvg, client_fn, start, seed, resumed, workers)
    except (ConfigError, NothingTrainedError) as error:
        names = CHANGED if reuse else USED
        if (reuse or carrier == "global") and names.search(str(error)):
            return str(error)
        raise
    found = arrays.to_torch_state_dict()
    wanted = in_plain_torch(kinds, loss, loop)
    torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)
    return ""


CHANGED = re.compile(
    r"has changed attribute '\w+' of (layer|the model)|in spite of reuse_model"
)
USED = re.compile("was used by an earlier message")
AGAIN = ("function again", "global again")
drawn = {
    "kinds": st.lists(st.sampled_from([*LINKS, *STATES]), max_size=2).map(tuple),
    "belongs": st.sampled_from([None, *LOSSES, *LOOPS]),
    "carrier": st.sampled_from(["function", "instance", "global", *AGAIN]),
    "seed": st.integers(1, 9),
    "resumed": st.booleans(),
}


@pytest.mark.parametrize("link", [*LINKS, *STATES])
def test_each_link_and_state(link) -> None:
    law((link,), None, carrier="function", seed=1, resumed=False)


@pytest.mark.parametrize("carrier", AGAIN)
@pytest.mark.parametrize("state", STATES)
def test_the_promise_of_a_model_with_state_is_refused_by_name(state, carrier) -> None:
    assert law((state,), None, carrier, seed=1, resumed=False)


@pytest.mark.parametrize("carrier", AGAIN)
@pytest.mark.parametrize("kinds", [(), (SharesLayer,), (Parametrizes,), (IsInList,)])
def test_the_promise_of_a_model_without_state_holds(kinds, carrier) -> None:
    assert not law(kinds, None, carrier, seed=1, resumed=False)


def test_a_global_model_is_refused() -> None:
    assert law((), None, carrier="global", seed=1, resumed=False)


@settings(max_examples=30)
@given(**drawn)
def test_a_model_trains_as_in_plain_torch(**case) -> None:
    law(**case)


@settings(max_examples=300)
@given(**drawn)
@pytest.mark.slow
def test_more_draws(**case) -> None:
    law(**case)


@settings(max_examples=1)
@given(**drawn)
def test_two_workers(**case) -> None:
    law(**case, workers=2)
