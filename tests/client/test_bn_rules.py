"""The block ``with bn_rules(...)`` and its optimizers.

One table has the mistakes of a loop, each with the advice of its refusal. The oracles
of the other tests write the method's term in plain torch.
"""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flwr.app import Context, Message, RecordDict
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from fedbn_flwr.batchnorm.sync import synchronised
from fedbn_flwr.client.bn_rules import Hooks
from fedbn_flwr.client.mailbox import open_outbox
from fedbn_flwr.errors import ClientPartError, ConfigError, NothingTrainedError
from fedbn_flwr.mods import bn_rules
from fedbn_flwr.server.methods.momentum import MomentumBuffers
from fedbn_flwr.server.methods.options import ClipGradients
from fedbn_flwr.strategies import FedAvg, FedProx, FedTAN, FixBN, Scaffold, StaticBN
from fedbn_flwr.strategies.fedprox import ProximalTerm
from fedbn_flwr.strategies.fedrep import HeadThenBody
from fedbn_flwr.strategies.fixbn import FreezeBN, MeasureDrift
from fedbn_flwr.strategies.scaffold import VARIATES, ControlVariates
from fedbn_flwr.strategies.staticbn import Untracked
from fedbn_flwr.training import ClientHook, LocalTraining, train
from fedbn_flwr.training.optimizer_hooks import facts_of
from fedbn_flwr.training.randomness import torch_generator
from tests.support.fast import fast
from tests.support.strange_layers import settings_of
from tests.support.user_loops import SIZES, plain_loop

MU, RATE = 2.0, 0.1
HEAD = frozenset({"3.weight", "3.bias"})


def sgd(model: nn.Module, **settings: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), RATE, **settings)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def in_block(
    model: nn.Module,
    hook: ClientHook | None,
    data: Any,
    loop: Callable[[nn.Module, Any, Hooks], object],
) -> nn.Module:
    """Train with ``loop(model, data, rules)``, and return the model."""
    hooks = {"hook": hook} if hook else {}
    for one in hooks.values():
        one.receive({}, {})
    rules = Hooks(model, hooks)
    with rules.block():
        loop(model, data, rules)
    return model


class Plain:
    """The rules of a loop in plain torch, with FedProx's term written out."""

    def __init__(self, model: nn.Module, mu: float = 0.0) -> None:
        self.model, self.mu = model, mu
        self.start = [p.detach().clone() for p in model.parameters()]

    def wrap(self, optimizer):
        """Add the term in the steps of the inner optimizer, if there is one."""
        getattr(optimizer, "base", optimizer).register_step_pre_hook(self.add_term)
        return optimizer

    def add_term(self, *_) -> None:
        for p, received in zip(self.model.parameters(), self.start, strict=True):
            p.grad += self.mu * (p.detach() - received)

    def begin_step(self, *size: int) -> None:
        pass

    end_step = begin_step


def in_plain_torch(
    model: nn.Module, data: Any, loop: Callable[..., object], mu: float = 0.0
) -> Tensor:
    loop(model, data, Plain(model, mu))
    return weights(model)


def steps(
    model: nn.Module,
    data: Any,
    *optimizers: torch.optim.Optimizer,
    by_hand: bool = False,
) -> None:
    """Take one step of each optimizer, each with gradients of its own."""
    for optimizer in optimizers:
        model.zero_grad()
        loss = data.loss(model)
        if by_hand:  # without the hooks of a backward pass
            own = [p for p in model.parameters() if p.requires_grad]
            for p, gradient in zip(own, torch.autograd.grad(loss, own), strict=True):
                p.grad = gradient
        else:
            loss.backward()
        optimizer.step()


# The mistakes of a loop.
class Around(ClientHook):
    """A hook that acts around steps, and records how each ends."""

    def __init__(self, synchronised: bool = False) -> None:
        self.ends: list[str] = []
        self.synchronised = synchronised

    def synchronises(self, step: int) -> bool:
        return self.synchronised

    def around(self, step: int, model: nn.Module, batch_size: int) -> Any:
        return self

    def __enter__(self) -> None:
        self.ends.append("open")

    def __exit__(self, kind, *_) -> None:
        self.ends[-1] = kind.__name__ if kind else "closed"


class AtItsStart(ClientHook):
    """A hook that stores the model when the first optimizer begins, and its steps."""

    steps = 0

    def start(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        pass

    def gradients(self, model: nn.Module) -> None:
        self.steps += 1


def of_a_copy(model: nn.Module, data: Any, rules: Hooks) -> None:
    rules.wrap(sgd(copy.deepcopy(model)))


def trains_a_copy(model: nn.Module, data: Any, rules: Hooks) -> None:
    other = copy.deepcopy(model)
    steps(other, data, sgd(other))
    model.load_state_dict(other.state_dict())


def twice(model: nn.Module, data: Any, rules: Hooks) -> None:
    steps(model, data, rules.wrap(sgd(model)), rules.wrap(sgd(model[3])))


def loads(
    model: nn.Module,
    data: Any,
    rules: Hooks,
    before: tuple[slice, ...] = (),
    after: tuple[slice, ...] = (),
    assign: bool = False,
) -> None:
    """Load weights between the optimizers of these layers, and train."""
    optimizers = [rules.wrap(sgd(model[place])) for place in before]
    changed = {name: value + 1 for name, value in model.state_dict().items()}
    model.load_state_dict(changed, assign=assign)
    optimizers += [rules.wrap(sgd(model[place])) for place in after]
    data.loss(model).backward()
    steps(model, data, *optimizers)


def moves(model: nn.Module, data: Any, rules: Hooks, after: bool = False) -> None:
    optimizer = sgd(model)
    if after:
        rules.wrap(optimizer)
    model.to("meta")
    rules._act(optimizer if after else rules.wrap(sgd(model)))


def body_first(model: nn.Module, data: Any, rules: Hooks) -> None:
    for part in (model[:2], model[3]):
        optimizer = rules.wrap(sgd(part))
        steps(model, data, optimizer, optimizer)


def wraps_one_of_two(
    model: nn.Module, data: Any, rules: Hooks, **settings: Any
) -> None:
    steps(
        model, data, rules.wrap(sgd(model[:2], **settings)), sgd(model[3], **settings)
    )


def takes_no_step(model: nn.Module, data: Any, rules: Hooks) -> None:
    rules.wrap(sgd(model))


def in_eval_mode(model: nn.Module, data: Any, rules: Hooks) -> None:
    steps(model.eval(), data, rules.wrap(sgd(model)))


def ends_in_eval_mode(
    model: nn.Module, data: Any, rules: Hooks, trains: bool = True
) -> None:
    """Validate without ``torch.no_grad``."""
    if trains:
        steps(model, data, rules.wrap(sgd(model)))
    data.loss(model.eval())


def part_by_part(model: nn.Module, data: Any, rules: Hooks) -> None:
    """Load weights that have the last values of the part that trained before."""
    head, body = rules.wrap(sgd(model[3])), rules.wrap(sgd(model[:3]))
    steps(model, data, head, head, body)
    best = copy.deepcopy(model.state_dict())
    steps(model, data, body)
    model.load_state_dict(best)


def scaled(
    model: nn.Module,
    data: Any,
    rules: Hooks,
    unscale: bool = False,
    last: float = 1.0,
) -> None:
    """Take two steps of a fused SGD under a gradient scaler."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = rules.wrap(sgd(model, fused=True))
    for factor in (1.0, last):
        optimizer.zero_grad()
        scaler.scale(factor * data.loss(model)).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()


def copy_data(model: nn.Module, state: Any) -> None:
    for name, parameter in model.named_parameters():
        parameter.data.copy_(state[name])


def epochs(
    model: nn.Module,
    data: Any,
    rules: Hooks,
    put: Callable[..., object] = nn.Module.load_state_dict,
    when: int = -1,
    after_step: Callable[..., object] = lambda: None,
) -> None:
    """Train three epochs and put the first weights back after epoch ``when``.

    The other epochs only test with these weights. ``after_step`` is called after each
    step.
    """
    optimizer = rules.wrap(sgd(model))
    best: dict[str, Tensor] = {}
    for epoch in range(3):
        for _ in range(3):
            steps(model, data, optimizer)
            after_step()
        present = copy.deepcopy(model.state_dict())
        best = best or present
        put(model, best)
        if epoch != when:
            put(model, present)


def functional(model: nn.Module, data: Any, rules: Hooks, load: bool = False) -> None:
    """Take three steps with gradients of functional calls, and a usual step."""
    optimizer = rules.wrap(sgd(model))
    if load:
        model.load_state_dict({name: v + 1 for name, v in model.state_dict().items()})

    def loss(*state: dict[str, Tensor]) -> Tensor:
        return data.loss(lambda x: torch.func.functional_call(model, state, (x,)))

    for _ in range(3):
        own = dict(model.named_parameters())
        values = {name: p.detach() for name, p in own.items()}
        found = torch.func.grad(loss)(values, dict(model.named_buffers()))
        for name, p in own.items():
            p.grad = found[name]
        optimizer.step()
    steps(model, data, optimizer)


def calls(*names: str, backward: bool = True) -> Callable[..., None]:
    """Return a loop that makes these calls of the rules."""

    def loop(model: nn.Module, data: Any, rules: Hooks) -> None:
        for name in names:
            if name == "block":
                rules.step(4).__enter__()
            elif name == "end":
                rules.end_step()
            else:
                rules.begin_step(4)
                if backward and name == "begin":
                    data.loss(model).backward()

    return loop


def part(function, **given):
    """Return a partial function that the ids of tests name with its arguments."""
    made = functools.partial(function, **given)
    made.__name__ = " ".join([function.__name__, *given])
    return made


def proximal() -> ClientHook:
    return ProximalTerm(MU)


def clipping() -> ClientHook:
    return ClipGradients(0.1)


def frozen() -> ClientHook:
    return FreezeBN(affine=False)


def buffers() -> ClientHook:
    return MomentumBuffers("local", frozenset())


LOADED = r"of the model's parameters \('0.weight', ...\) changed"
MOVED = rf"{LOADED} or moved to another device .* and move the model"
AFTER = rf"{LOADED} .* after a step"
WITHOUT_WRAP = (
    r"steps 2 of the model's parameters \('3\.weight', \.\.\.\) and was not wrapped"
)
WRAP = r"Write: optimizer = rules\.wrap\(optimizer\)\.$"
INSIDE = "a step began inside another step"
ENDED = r"the block ended inside a step: call rules.end_step\(\)"
NOT_OPEN = r"rules.end_step\(\) was called, but no step is open"
TRAINING = (proximal, ControlVariates, Around, Untracked)
# A loop, the hook that cannot accept it, and the advice.
ALL, HERE, THERE = (slice(None),), (slice(3, None),), (slice(2),)
MISTAKES = [
    (of_a_copy, proximal, "pass the same model to both, not a copy"),
    *((trains_a_copy, make, "Another object was trained") for make in TRAINING[:3]),
    (twice, proximal, r"wrap was called twice .*create and wrap one optimizer"),
    (part(loads, after=ALL), proximal, LOADED),
    (part(loads, after=ALL, assign=True), proximal, LOADED),
    (part(loads, before=ALL), proximal, LOADED),
    (part(loads, before=ALL), ControlVariates, LOADED),
    (part(loads, before=HERE, after=THERE), AtItsStart, LOADED),
    (loads, MeasureDrift, LOADED),
    (part(functional, load=True), MeasureDrift, LOADED),
    (moves, proximal, MOVED),
    (part(moves, after=True), proximal, MOVED),
    (part(moves, after=True), ControlVariates, MOVED),
    (body_first, part(HeadThenBody, head=HEAD, head_steps=2), "none of the first"),
    (wraps_one_of_two, proximal, WITHOUT_WRAP),
    (wraps_one_of_two, ControlVariates, WITHOUT_WRAP),
    (wraps_one_of_two, clipping, WITHOUT_WRAP),
    (part(wraps_one_of_two, momentum=0.9), buffers, WITHOUT_WRAP),
    (
        part(ends_in_eval_mode, trains=False),
        proximal,
        rf"was not wrapped inside .*{WRAP}",
    ),
    (takes_no_step, proximal, rf"took no step inside .*{WRAP}"),
    (takes_no_step, Around, r"Write: with rules\.step\(len\(inputs\)\)"),
    (in_eval_mode, Untracked, r"Call model\.train\(\)"),
    (scaled, proximal, r"scaler.unscale_\(optimizer\)"),
    (part(epochs, when=2), ControlVariates, AFTER),
    (part(epochs, when=1), ControlVariates, AFTER),
    (part(epochs, put=copy_data, when=2), ControlVariates, AFTER),
    (part_by_part, ControlVariates, AFTER),
    (calls("begin", "begin"), Around, INSIDE),
    (calls("begin", "block"), Around, INSIDE),
    (calls("begin", "end", "end"), Around, NOT_OPEN),
    (calls("begin"), Around, ENDED),
    (calls("begin", "begin", backward=False), part(Around, synchronised=True), INSIDE),
    (calls("begin", backward=False), part(Around, synchronised=True), ENDED),
]


@pytest.mark.parametrize(("loop", "make", "said"), MISTAKES)
def test_a_mistake_of_a_loop_is_refused_with_advice(
    loop, make: Callable[[], ClientHook], said: str, mlp, points
) -> None:
    """FedAvg has no hook, and accepts other weights and missing calls."""
    hook = make()
    with pytest.raises(ConfigError, match=said):
        in_block(mlp(), hook, points(12, 1), loop)
    assert "open" not in getattr(hook, "ends", [])
    always = isinstance(hook, Around) or loop is twice or said is MOVED
    if not always:
        found = in_block(mlp(), None, points(12, 1), loop)
        assert torch.equal(weights(found), in_plain_torch(mlp(), points(12, 1), loop))


@pytest.mark.parametrize(
    ("loop", "make", "mu"),
    [
        (part(scaled, unscale=True), proximal, MU),
        (part(epochs, when=2), proximal, MU),
        # The weights are put back after each test. SCAFFOLD corrects by zero.
        (epochs, ControlVariates, 0.0),
        # Lightning's averaging of weights ends with an epoch of forward passes.
        (calls("begin", "end", "pass", "pass", "end"), Around, 0.0),
        (calls("begin", "end", "pass"), Around, 0.0),
        (part(epochs, put=copy_data), ControlVariates, 0.0),
        (ends_in_eval_mode, Untracked, 0.0),
        (functional, proximal, MU),
        (functional, ControlVariates, 0.0),
        (functional, MeasureDrift, 0.0),
    ],
)
def test_the_loop_beside_a_mistake_trains_as_in_plain_torch(
    loop, make: Callable[[], ClientHook], mu: float, mlp, points
) -> None:
    hook = make()
    ours = weights(in_block(mlp(), hook, points(12, 1), loop))
    wanted = in_plain_torch(mlp(), points(12, 1), loop, mu)
    torch.testing.assert_close(ours, wanted, rtol=1e-10, atol=1e-12)
    assert {*getattr(hook, "ends", ["closed"])} == {"closed"}


def in_a_file(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def looks_of(model: nn.Module) -> list[Any]:
    """Return the attributes of the modules, or the code of a script."""
    if isinstance(model, torch.jit.ScriptModule):
        return [model.code]
    return [
        (type(one), {k: str(v) for k, v in vars(one).items()})
        for one in model.modules()
    ]


@pytest.mark.parametrize("way", [copy.deepcopy, in_a_file, torch.jit.script])
@pytest.mark.parametrize("make", [*TRAINING, frozen, MeasureDrift, None])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")
def test_a_copy_that_is_made_in_the_block_is_a_plain_model(
    make, way: Callable[[nn.Module], nn.Module], mlp, points
) -> None:
    """It has the modes of the model, and no hooks, also inside a larger module."""

    def looks(model: nn.Module) -> list[Any]:
        found = []
        for mode in (True, False, True):
            model.train(mode)
            larger = nn.Sequential(model)
            made = [way(model), way(larger)]
            found += [looks_of(one.train(mode)) for one in made if mode]
            found += [looks_of(one) for one in made]
        return found

    def loop(model: nn.Module, data: Any, rules: Hooks) -> None:
        optimizer = rules.wrap(sgd(model))
        with rules.step(12):
            found.append(looks(model))
            with synchronised(
                model, lambda _, t: t, batch_size=12, union_batch_size=24
            ):
                found.append(looks(model))
                data.loss(model).backward()
        optimizer.step()

    found: list[list[Any]] = []
    model = mlp()
    in_block(model, make() if make else None, points(12, 1), loop)
    assert looks_of(model)[0][1].keys() == vars(mlp()).keys()
    wanted = looks(mlp())
    assert found == [wanted, wanted]


def test_a_hook_that_stores_nothing_lets_the_model_move(mlp, points) -> None:
    moved = in_block(mlp(), clipping(), points(12, 1), part(moves, after=True))
    assert weights(moved).is_meta


def test_a_second_block_in_a_message_is_refused(mlp) -> None:
    """FedProx would use another anchor, and SCAFFOLD would lose gradients.

    A frozen BatchNorm could begin again, but not with them.
    """
    context = Context(1, 1, {}, RecordDict(), {})
    open_outbox(context)
    config = {
        "fedbn-flwr.hooks": '["freeze-bn", "proximal"]',
        "fedbn-flwr.proximal-mu": 5.0,
        "fedbn-flwr.freeze-affine": False,
    }

    def block() -> None:
        model = mlp()
        with bn_rules(model, config, context) as rules:
            rules.wrap(sgd(model)).step()

    block()
    with pytest.raises(ConfigError, match="Write one block around all epochs"):
        block()


def test_hooks_that_send_arrays_need_message_and_context(mlp) -> None:
    with pytest.raises(
        ConfigError,
        match=r"hook 'variates' sends or keeps arrays: write `with bn_rules\(model, msg",
    ):
        bn_rules(mlp(), {"fedbn-flwr.hooks": '["variates"]'}).__enter__()


# Steps.
class Left(BaseException):
    """An exception that leaves a loop in mid-step, like FedTAN's exception."""


def leaves(model: nn.Module, data: Any, rules: Hooks, by_hand: bool = False) -> None:
    """Take a step, leave out a batch that raises, and leave the loop in a step."""
    rules.begin_step(4)
    rules.end_step()
    with pytest.raises(RuntimeError), rules.step(4):
        raise RuntimeError
    if by_hand:  # callbacks keep entered contexts like this
        data.entered = rules.step(4)
        data.entered.__enter__()
    else:
        rules.begin_step(4)
    raise Left


@pytest.mark.parametrize("by_hand", [False, True])
def test_an_exception_ends_the_step(by_hand: bool, mlp, points) -> None:
    """Otherwise, BatchNorm would stay synchronised until the step is collected."""
    hook = Around()
    with pytest.raises(Left):
        in_block(mlp(), hook, points(8), part(leaves, by_hand=by_hand))
    assert hook.ends == ["closed", "RuntimeError", "Left"]


def test_an_error_of_the_loop_itself_is_not_replaced(mlp, points) -> None:
    def fails(model: nn.Module, data: Any, rules: Hooks) -> None:
        steps(model, data, rules.wrap(sgd(model[:2])))  # the body first
        raise ValueError

    with pytest.raises(ValueError):
        in_block(mlp(), HeadThenBody(HEAD, 1), points(8), fails)


def test_a_step_that_a_gradient_scaler_skips_is_not_acted_on(mlp, points) -> None:
    """A fused optimizer with an infinite gradient does not move the parameters.

    SCAFFOLD must not count such a step.
    """
    hook = AtItsStart()
    infinite = part(scaled, unscale=True, last=float("inf"))
    in_block(mlp(), hook, points(8), infinite)
    assert hook.steps == 1


@pytest.mark.parametrize("head_steps", [1, 4, 5])
@pytest.mark.parametrize(
    ("freezes", "by_hand"), [(False, False), (True, False), (True, True)]
)
def test_phases_in_two_optimizers_one_after_the_other_are_those_of_the_steps(
    head_steps: int, freezes: bool, by_hand: bool, mlp, points
) -> None:
    """Five head steps precede five body steps, and the loop may freeze the rest."""
    moved = []

    def loop(model: nn.Module, data: Any, rules: Hooks) -> None:
        for optimizer in [rules.wrap(sgd(one)) for one in (model[3], model[:2])]:
            own = optimizer.param_groups[0]["params"]
            for _ in range(5):
                for p in model.parameters():
                    p.requires_grad_(not freezes or any(p is one for one in own))
                before = weights(model)
                steps(model, data, optimizer, by_hand=by_hand)
                moved.append(not torch.equal(weights(model), before))

    in_block(mlp(), HeadThenBody(HEAD, head_steps), points(12, 1), loop)
    assert moved == [step < head_steps or step >= 5 for step in range(10)]


@pytest.mark.parametrize("freezes", [True, False])
def test_momentum_of_parameters_that_train_one_after_the_other_is_kept(
    mlp, points, freezes: bool
) -> None:
    """The loop may freeze one part while the other part trains, also for a round.

    Rounds with new optimizers are one round with optimizers that a loop keeps.
    """
    (model, plain), data, kept = (mlp(), mlp()), points(12, 1), {}
    places = (3, slice(2))

    def step(net: nn.Module, place: Any, optimizer: torch.optim.Optimizer) -> None:
        net.requires_grad_(not freezes)
        net[place].requires_grad_(True)
        steps(net, data, optimizer)

    whole = [sgd(plain[place], momentum=0.9) for place in places]
    for number in (2, 1, 2):
        hook = buffers()
        hook.receive({}, kept)
        rules = Hooks(model.requires_grad_(not freezes), {"hook": hook})
        with rules.block():
            for place, own in [*zip(places, whole, strict=True)][:number]:
                model[place].requires_grad_(True)
                step(model, place, rules.wrap(sgd(model[place], momentum=0.9)))
                step(plain, place, own)
        kept = hook.keep()
    states = {p: s["momentum_buffer"] for one in whole for p, s in one.state.items()}
    assert kept.keys() == dict(plain.named_parameters()).keys()
    for name, parameter in plain.named_parameters():
        assert torch.equal(kept[name], states[parameter]), name


class Nested(torch.optim.Optimizer):
    """SGD at weights that are moved meanwhile, as in sharpness-aware minimisation."""

    def __init__(self, params) -> None:
        super().__init__(params, {})
        self.base = torch.optim.SGD(self.param_groups, RATE)

    def step(self, closure: Callable[[], object]) -> None:
        own = [p.data for p in self.param_groups[0]["params"]]
        before = [p.clone() for p in own]
        torch._foreach_add_(own, 0.1)
        closure()
        torch._foreach_copy_(own, before)
        self.base.step()


def test_the_proximal_term_acts_once_in_a_step_of_an_optimizer_around_another(
    mlp, points
) -> None:
    """The oracle adds the term to the gradients, at the weights of the inner step."""

    def loop(model: nn.Module, data: Any, rules: Hooks) -> None:
        outer = rules.wrap(Nested(model.parameters()))
        for _ in range(3):
            model.zero_grad()
            outer.step(lambda: data.loss(model).backward())

    ours = weights(in_block(mlp(), proximal(), points(12, 1), loop))
    wanted = in_plain_torch(mlp(), points(12, 1), loop, MU)
    torch.testing.assert_close(ours, wanted, rtol=1e-10, atol=1e-12)


# Gradients that share memory.
class Summands(nn.Module):
    """A model whose parameters have the same gradient, parts of it, or equal values."""

    def __init__(self) -> None:
        super().__init__()
        for name, size in {"a": 5, "b": 5, "c": 2, "d": 3, "scale": 4}.items():
            values = torch.full((size,), ord(name[0]) / 500, dtype=torch.float64)
            self.register_parameter(name, nn.Parameter(values))
        self.fc = nn.Linear(5, 3, dtype=torch.float64)
        nn.init.constant_(self.fc.weight[0], 2.0)

    def forward(self, x: Tensor) -> Tensor:
        shift = (self.a + self.b) + torch.cat([self.c, self.d])
        return self.fc(x + shift) * self.scale.sum()


class Corrected(ControlVariates):
    """SCAFFOLD with other variates than zero."""

    def receive(self, sent: Any, kept: Any) -> None:
        names = [name for name, _ in Summands().named_parameters()]
        super().receive({VARIATES: dict.fromkeys(names, torch.tensor(0.5))}, {})


def shared(model: nn.Module, data: Any, rules: Hooks, way: str) -> None:
    """Take three steps. ``way`` names the place of the gradients."""
    own = [*model.parameters()]
    parts = [own[::2], own[1::2]] if way == "two optimizers" else [own]
    optimizers = [rules.wrap(torch.optim.SGD(part, RATE)) for part in parts]
    buffer = torch.zeros(sum(map(torch.numel, own)), dtype=torch.float64)
    if way == "views of a buffer":
        for p, view in zip(own, buffer.split([*map(torch.numel, own)]), strict=True):
            p.grad = view.view_as(p)
    for _ in range(3):
        buffer.zero_()
        if way == "views of a buffer":
            data.loss(model).backward()
        else:
            found = torch.autograd.grad(data.loss(model), own)
            for p, gradient in zip(own, found, strict=True):
                p.grad = gradient.clone() if way == "each its own" else gradient
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize(
    "way", ["by hand", "two optimizers", "views of a buffer", "loop of the package"]
)
@pytest.mark.parametrize("make", [proximal, Corrected, part(ClipGradients, clipping=2)])
def test_a_hook_changes_each_gradient_once_wherever_autograd_leaves_it(
    make: Callable[[], ClientHook], way: str, points
) -> None:
    """``backward`` also lets ``a`` share the memory of ``c`` and ``d``."""
    data, ends = points(12, 1), []
    for each in ("each its own", way):
        torch.manual_seed(0)
        model, hook = Summands(), make()
        if each == "loop of the package":
            hook.receive({}, {})
            settings = LocalTraining(learning_rate=RATE, local_steps=3, batch_size=12)
            stream = functools.partial(torch_generator, 0)
            given = {"learning_rate": RATE, "stream": stream, "hooks": {"hook": hook}}
            train(model, data, settings, **given)
        else:
            in_block(model, hook, data, part(shared, way=each))
        ends.append(weights(model))
    torch.testing.assert_close(*ends, rtol=1e-10, atol=1e-12)


# Limits of weights.
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
@pytest.mark.parametrize("make", [ControlVariates, proximal])
def test_a_limit_of_weights_is_no_other_state(
    make, place: str, layer: int, limit, mlp, points
) -> None:
    """The oracle is plain torch. SCAFFOLD corrects by zero in the first round."""
    data, ends = points(12, 1), []

    def tested(model: nn.Module, state: Any) -> None:
        model(data.inputs)

    for hook in (make(), ClientHook()):
        model = mlp()
        limited = functools.partial(limit, model[layer].weight)
        if place == "forward":
            model[layer].register_forward_pre_hook(lambda *_, act=limited: act())
        after = limited if place == "step" else lambda: None
        in_block(model, hook, data, part(epochs, put=tested, after_step=after))
        ends.append(weights(model))
        assert model[layer].weight.norm(dim=1).max() <= 0.2
    assert make is not ControlVariates or torch.equal(*ends)


@pytest.mark.parametrize("limited", [0, 3])
@pytest.mark.parametrize("make", [ControlVariates, proximal])
def test_a_limit_between_two_optimizers_is_no_other_state(
    make, limited: int, mlp, points
) -> None:
    """The limited weight belongs to the first or to the second optimizer."""

    def loop(model: nn.Module, data: Any, rules: Hooks) -> None:
        optimizers = [rules.wrap(sgd(part)) for part in (model[:2], model[3])]
        for _ in range(3):
            steps(model, data, *optimizers)
            limit_by_copy(model[limited].weight)

    model = in_block(mlp(), make(), points(12, 1), loop)
    assert model[limited].weight.norm(dim=1).max() <= 0.2


@pytest.mark.parametrize(("make", "mu"), [(proximal, MU), (ControlVariates, 0.0)])
@pytest.mark.parametrize(
    ("table", "inputs"),
    [(nn.Embedding, ([[0, 1]],)), (nn.EmbeddingBag, ([0, 1], [0]))],
    ids=["embedding", "bag"],
)
def test_a_table_whose_forward_pass_changes_its_weights_is_no_other_state(
    table, inputs, make, mu: float
) -> None:
    def loop(model: nn.Module, data: Any, rules: Hooks) -> None:
        optimizer = rules.wrap(sgd(model))
        for _ in range(2):
            optimizer.zero_grad()
            model(*map(torch.tensor, data)).sum().backward()
            optimizer.step()

    model = table(3, 2, max_norm=0.1)
    wanted = in_plain_torch(copy.deepcopy(model), inputs, loop, mu)
    ours = weights(in_block(model, make(), inputs, loop))
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(FixBN, freeze_at=0, freeze_affine=True),
        StaticBN,
        Scaffold,
        FedTAN,
        FedProx,
        functools.partial(FedAvg, train_only="norms"),
    ],
)
def test_an_error_in_the_block_leaves_the_model_and_the_optimizer_as_they_were(
    run_app, user_app, make
) -> None:
    """Even Ctrl-C, a ``BaseException``, leaves a model that may be trained again."""
    ended: list[bool] = []

    def loop(model: nn.Module, data: Any, msg: Message, context: Context) -> float:
        optimizer = sgd(model.train())
        before = settings_of(model)
        try:
            with bn_rules(model, msg, context) as rules:
                rules.wrap(optimizer)
                with rules.step(len(data)):
                    data.loss(model).backward()
                optimizer.step()
                raise KeyboardInterrupt
        finally:
            assert settings_of(model) == before
            assert optimizer.param_groups[0]["params"] == [*model.parameters()]
            assert not optimizer._optimizer_step_pre_hooks
            assert not optimizer._optimizer_step_post_hooks
            ended.append(True)
        return 0.0

    run_app(make(), user_app(loop, query=True), rounds=1, fails=NothingTrainedError)
    assert len(ended) == len(SIZES)


class Signs(torch.optim.SGD):
    """A subclass with a step of its own."""

    def step(self, closure=None) -> None:
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


def test_statistics_that_are_reset_in_a_frozen_round_are_the_cause(
    run_app, user_app
) -> None:
    """Layers in eval mode do not measure the statistics that ``update_bn`` resets."""

    def averaged(model: nn.Module, data: Any, msg: Message, context: Context) -> float:
        with bn_rules(model, msg, context):
            loss = plain_loop(model, data, msg, context)
            update_bn([data.inputs], model)
        return loss

    with pytest.raises(
        ClientPartError, match=r"changes the statistics, such as .*update_bn"
    ):
        run_app(FixBN(freeze_at=1), user_app(averaged))
