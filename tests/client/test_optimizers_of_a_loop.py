"""Several optimizers, wrapped optimizers and reloaded weights in a user's loop.

The oracles write the method's term into the loss or the gradients in plain torch.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr.client.bn_rules import Hooks
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.server.methods.momentum import MomentumBuffers
from fedbn_flwr.server.methods.options import ClipGradients
from fedbn_flwr.strategies.fedprox import ProximalTerm
from fedbn_flwr.strategies.fedrep import HeadThenBody
from fedbn_flwr.strategies.scaffold import ControlVariates
from fedbn_flwr.training import ClientHook
from fedbn_flwr.training.optimizer_hooks import facts_of
from tests.support.fast import fast

MU, RATE = 2.0, 0.1


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation around a base optimizer.

    It has the two usual forms, two steps or a closure.
    """

    def __init__(
        self, params: Any, base: type[torch.optim.Optimizer], **settings: Any
    ) -> None:
        super().__init__(params, {"rho": 0.05, **settings})
        self.base_optimizer = base(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups
        self.subtracts = False

    def _with_gradients(self) -> list[nn.Parameter]:
        found = []
        for group in self.param_groups:
            found += [p for p in group["params"] if p.grad is not None]
        return found

    @torch.no_grad()
    def first_step(self) -> None:
        parameters = self._with_gradients()
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            self.state[p]["old"] = p.detach().clone()
            self.state[p]["change"] = p.grad * (0.05 / norm)
            p.add_(self.state[p]["change"])
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self._with_gradients():
            if self.subtracts:
                p.sub_(self.state[p]["change"])
            else:
                p.copy_(self.state[p]["old"])
        self.base_optimizer.step()
        self.zero_grad()

    def step(self, closure: Any = None) -> None:
        compute = torch.enable_grad()(closure)
        compute()
        self.first_step()
        compute()
        self.second_step()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def small_batches(data: Any) -> list[tuple[Tensor, Tensor]]:
    return list(zip(data.inputs.split(4), data.targets.split(4), strict=True))


HEAD = frozenset({"3.weight", "3.bias"})


@pytest.mark.parametrize("head_steps", [1, 4, 5])
@pytest.mark.parametrize("freezes", [False, True])
def test_phases_in_two_optimizers_one_after_the_other_are_those_of_the_steps(
    head_steps: int, freezes: bool, mlp, points
) -> None:
    """Five head steps precede five body steps, and the loop may freeze the rest."""
    model, data = mlp(), points(12, 1)
    head, body = [*model[3].parameters()], [*model[:2].parameters()]
    parts = {torch.optim.SGD(part, RATE): part for part in (head, body)}
    moved = []
    rules = Hooks(model, {"hook": HeadThenBody(HEAD, head_steps)})
    with rules.block():
        for optimizer in parts:
            rules.wrap(optimizer)
        for optimizer, part in parts.items():
            for _ in range(5):
                for p in model.parameters():
                    p.requires_grad_(not freezes or any(p is own for own in part))
                before = weights(model)
                model.zero_grad()
                data.loss(model).backward()
                optimizer.step()
                moved.append(not torch.equal(weights(model), before))
    assert moved == [step < head_steps or step >= 5 for step in range(10)]


def test_a_loop_that_steps_the_body_first_is_refused(mlp, points) -> None:
    model, data = mlp(), points(12, 1)

    def train() -> None:
        rules = Hooks(model, {"hook": HeadThenBody(HEAD, 2)})
        with rules.block():
            for part in (model[:2], model[3]):
                optimizer = rules.wrap(torch.optim.SGD(part.parameters(), RATE))
                for _ in range(2):
                    data.loss(model).backward()
                    optimizer.step()

    with pytest.raises(ConfigError, match="none of the first steps trained"):
        train()


@pytest.mark.parametrize("freezes", [True, False])
def test_momentum_of_parameters_that_train_one_after_the_other_is_kept(
    mlp, points, freezes: bool
) -> None:
    """The loop may freeze one part while the other part trains.

    Two rounds with new optimizers are one round with optimizers that a loop keeps.
    """
    (model, plain), data = (mlp(), mlp()), points(12, 1)

    def freeze(net: nn.Module, part: slice | int) -> None:
        net.requires_grad_(not freezes)
        net[part].requires_grad_(True)

    def step(net: nn.Module, part: slice | int, sgd: torch.optim.Optimizer) -> None:
        freeze(net, part)
        data.loss(net).backward()
        sgd.step()
        net.zero_grad()

    def optimizer(net: nn.Module, part: slice | int) -> torch.optim.Optimizer:
        return torch.optim.SGD(net[part].parameters(), RATE, momentum=0.9)

    parts, kept = (3, slice(2)), {}
    whole = [optimizer(plain, part) for part in parts]
    for _ in range(2):
        hook = MomentumBuffers("local", frozenset())
        hook.receive({}, kept)
        rules = Hooks(model, {"hook": hook})
        with rules.block():
            for part, own in zip(parts, whole, strict=True):
                freeze(model, part)
                sgd = optimizer(model, part)
                rules.wrap(sgd)
                step(model, part, sgd)
                step(plain, part, own)
        kept = hook.keep()
    of_plain = {p: s["momentum_buffer"] for one in whole for p, s in one.state.items()}
    assert kept.keys() == dict(plain.named_parameters()).keys()
    for name, parameter in plain.named_parameters():
        assert torch.equal(kept[name], of_plain[parameter]), name


class AtItsStart(ClientHook):
    """A hook with steps that stores the model when the first optimizer begins."""

    def start(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        pass


def test_a_state_that_is_loaded_between_two_optimizers_is_refused(mlp, points) -> None:
    model, data = mlp(), points(8)
    rules = Hooks(model, {"hook": AtItsStart()})
    head = torch.optim.SGD(model[3].parameters(), RATE)
    body = torch.optim.SGD([*model[0].parameters(), *model[1].parameters()], RATE)

    def train() -> None:
        with rules.block():
            rules.wrap(head)
            with torch.no_grad():
                model[0].weight.add_(1.0)
            rules.wrap(body)
            data.loss(model).backward()
            head.step()

    with pytest.raises(ConfigError):
        train()


@pytest.mark.parametrize(
    "hook",
    [
        ProximalTerm(MU),
        ControlVariates(),
        ClipGradients(0.1),
        MomentumBuffers("local", frozenset()),
        None,
    ],
)
def test_an_optimizer_of_the_model_that_is_not_wrapped_is_refused(
    hook: ClientHook | None, mlp, points
) -> None:
    """A method's term would miss its parameters, but FedAvg has no such term."""
    model, data = mlp(), points(12, 1)
    settings = {"momentum": 0.9} if isinstance(hook, MomentumBuffers) else {}
    both = [
        torch.optim.SGD(p.parameters(), RATE, **settings) for p in (model[:2], model[3])
    ]
    if hook:
        hook.receive({}, {})
    rules = Hooks(model, {"hook": hook} if hook else {})

    def train() -> None:
        with rules.block():
            rules.wrap(both[0])
            data.loss(model).backward()
            for optimizer in both:
                optimizer.step()

    said = r"SGD steps 2 of the model's parameters \('3\.weight', \.\.\.\) and was not wrapped"
    with pytest.raises(ConfigError, match=said) if hook else nullcontext():
        train()


# Optimizers around another optimizer.
def add_term(model: nn.Module, start: list[Tensor], *_: Any) -> None:
    for p, received in zip(model.parameters(), start, strict=True):
        p.grad += MU * (p.detach() - received)


def pass_both_ways(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    F.cross_entropy(model(inputs), targets).backward()


def sam_round(
    model: nn.Module,
    data: Any,
    hook: ClientHook | None,
    form: str,
    subtracts: bool = False,
) -> nn.Module:
    """Train with SAM and a hook, or with the proximal term written out.

    The written term uses the weights that the step changes.
    """
    start = [p.detach().clone() for p in model.parameters()]
    rules = Hooks(model, {"hook": hook} if hook else {})
    with rules.block():
        sam = SAM(model.parameters(), torch.optim.SGD, lr=RATE)
        sam.subtracts = subtracts
        if form == "base":
            sam.base_optimizer = rules.wrap(sam.base_optimizer)
        else:
            sam = rules.wrap(sam)
        if hook is None:
            sam.base_optimizer.register_step_pre_hook(
                functools.partial(add_term, model, start)
            )
        for batch in small_batches(data):
            compute = functools.partial(pass_both_ways, model, *batch)
            if form == "closure":
                sam.step(compute)
                continue
            compute()
            sam.first_step()
            compute()
            sam.second_step()
    return model


@pytest.mark.parametrize("subtracts", [False, True])
@pytest.mark.parametrize("form", ["two steps", "base", "closure"])
def test_the_proximal_term_acts_once_in_a_step_of_sam(
    form: str, subtracts: bool, mlp, points
) -> None:
    data = points(12, 1)
    ours = sam_round(mlp(), data, ProximalTerm(MU), form, subtracts)
    torch.testing.assert_close(
        weights(ours),
        weights(sam_round(mlp(), data, None, form)),
        rtol=1e-10,
        atol=1e-12,
    )


# Weights that are loaded after a step.
def load(model: nn.Module, state: Any) -> None:
    model.load_state_dict(state)


def copy_data(model: nn.Module, state: Any) -> None:
    for name, parameter in model.named_parameters():
        parameter.data.copy_(state[name])


def epochs(
    model: nn.Module,
    data: Any,
    hook: ClientHook,
    put: Callable[..., None] | None,
    *,
    wrap: bool,
    when: int,
    after_step: Callable[..., object] = lambda: None,
) -> None:
    """Train three epochs and put the first weights back after epoch ``when``.

    This happens inside the block. ``after_step`` is called after each step.
    """
    hook.receive({}, {})
    rules = Hooks(model, {"hook": hook})
    with rules.block():
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        if wrap:
            rules.wrap(optimizer)
        best: dict[str, Tensor] = {}
        for epoch in range(3):
            for inputs, targets in small_batches(data):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
                after_step()
            present = copy.deepcopy(model.state_dict())
            best = best or present
            if put is not None and epoch == when:
                put(model, best)
            elif put is not None:
                put(model, best)  # a test with these weights
                put(model, present)


OF_ALL_STEPS = ((ControlVariates, True),)


@pytest.mark.parametrize(("put", "when"), [(load, 2), (load, 1), (copy_data, 2)])
@pytest.mark.parametrize(("make", "wrap"), OF_ALL_STEPS)
def test_weights_of_an_earlier_step_are_refused_where_a_method_sums_over_all_steps(
    make, wrap: bool, put, when: int, mlp, points
) -> None:
    """Variates would be too small because of the epochs after the best epoch."""
    data = points(12, 1)
    with pytest.raises(
        ConfigError,
        match=r"parameters \('0.weight', ...\) changed .* after a step",
    ):
        epochs(mlp(), data, make(), put, wrap=wrap, when=when)
    epochs(mlp(), data, make(), put, wrap=wrap, when=-1)  # put back after each test
    epochs(mlp(), data, make(), None, wrap=wrap, when=-1)


def test_weights_of_an_earlier_step_are_refused_where_a_part_has_trained_before(
    mlp, points
) -> None:
    """The head has its last value in all later states, so it reveals nothing."""
    model, hook = mlp(), ControlVariates()
    hook.receive({}, {})
    rules, states = Hooks(model, {"hook": hook}), []
    head, body = (
        rules.wrap(torch.optim.SGD(part.parameters(), RATE))
        for part in (model[3], model[:3])
    )

    def train() -> None:
        with rules.block():
            for optimizer in (head, head, body, body):
                model.zero_grad()
                points(12, 1).loss(model).backward()
                optimizer.step()
                states.append(copy.deepcopy(model.state_dict()))
            model.load_state_dict(states[2])

    with pytest.raises(ConfigError, match=r"parameters \('0.weight', ...\) changed"):
        train()


def limit_by_copy(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.copy_(torch.renorm(weight, 2, 0, 0.2))


def limit_by_data(weight: nn.Parameter) -> None:
    weight.data = torch.renorm(weight.data, 2, 0, 0.2)


def limit_in_place(weight: nn.Parameter) -> None:
    weight.data.renorm_(2, 0, 0.2)


@pytest.mark.parametrize(
    "limit", fast([limit_by_copy, limit_by_data, limit_in_place], 0, 1)
)
@pytest.mark.parametrize("layer", fast([0, 3], 0))
@pytest.mark.parametrize("place", ["forward", "step"])
@pytest.mark.parametrize(
    ("make", "wrap"), [*OF_ALL_STEPS, (lambda: ProximalTerm(MU), True)]
)
def test_a_limit_of_weights_is_no_other_state(
    make, wrap: bool, place: str, layer: int, limit, mlp, points
) -> None:
    """The oracle is plain torch. SCAFFOLD corrects by zero in the first round."""
    data, states = points(12, 1), []

    def tested(model: nn.Module, state: Any) -> None:
        model(data.inputs)

    for hook in (make(), ClientHook()):
        model = mlp()
        limited = functools.partial(limit, model[layer].weight)
        if place == "forward":
            model[layer].register_forward_pre_hook(lambda *_, act=limited: act())
        after = limited if place == "step" else lambda: None
        epochs(model, data, hook, tested, wrap=wrap, when=-1, after_step=after)
        states.append(weights(model))
        assert model[layer].weight.norm(dim=1).max() <= 0.2
    assert make is not ControlVariates or torch.equal(*states)


@pytest.mark.parametrize("make", [lambda: ProximalTerm(MU), ClientHook])
def test_weights_of_an_earlier_step_are_taken_where_a_method_does_not_depend_on_the_steps(
    make, mlp, points
) -> None:
    epochs(mlp(), points(12, 1), make(), load, wrap=True, when=2)


class Signs(torch.optim.SGD):
    """A subclass with a step of its own."""

    def step(self, closure: Any = None) -> None:
        """Step by the signs of the gradients."""


class Named(torch.optim.SGD):
    """A subclass with the step of torch."""


@pytest.mark.parametrize(
    ("kind", "name"), [(torch.optim.SGD, "sgd"), (Named, "sgd"), (Signs, "Signs")]
)
def test_a_subclass_with_a_step_of_its_own_is_another_optimizer(
    kind: type[torch.optim.SGD], name: str
) -> None:
    """Otherwise SCAFFOLD would take its steps for gradients."""
    for _ in range(2):  # torch changes the class with its first object
        assert facts_of(kind(nn.Linear(1, 1).parameters(), 0.1)).optimizer == name
