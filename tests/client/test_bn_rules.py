"""The block ``with bn_rules(...)`` and its optimizer.

Wrong uses are refused with advice.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from flwr.app import Context, Message
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import update_bn

from fedbn_flwr.client.bn_rules import Hooks
from fedbn_flwr.errors import (
    ClientPartError,
    ConfigError,
    NothingTrainedError,
)
from fedbn_flwr.mods import bn_rules
from fedbn_flwr.strategies import (
    FedAvg,
    FedProx,
    FedTAN,
    FixBN,
    Scaffold,
    StaticBN,
)
from fedbn_flwr.strategies.fedprox import ProximalTerm
from fedbn_flwr.strategies.scaffold import ControlVariates
from fedbn_flwr.training import ClientHook
from tests.support.strange_layers import Checkpointed, settings_of
from tests.support.user_loops import (
    SIZES,
    hooked_loop,
    loop_without_step,
    plain_loop,
)

PROXIMAL = {"fedbn-flwr.hooks": '["proximal"]', "fedbn-flwr.proximal-mu": 5.0}


def test_an_optimizer_of_a_copy_is_refused() -> None:
    """Without the refusal, FedProx would equal FedAvg bit for bit."""
    model = nn.Linear(2, 1)
    with pytest.raises(ConfigError, match="pass the same model to both, not a copy"):
        Hooks(model, {"proximal": ProximalTerm(1.0)}).wrap(
            torch.optim.SGD(copy.deepcopy(model).parameters(), 0.1)
        )


LOADED = r"2 of the model's parameters \('weight', ...\) changed"


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_that_is_loaded_inside_the_block_is_refused(assign: bool) -> None:
    """FedProx would pull the client to the weights before the load."""
    model, received = nn.Linear(2, 1), nn.Linear(2, 1).state_dict()

    def train(config: Any) -> None:
        with bn_rules(model, config) as rules:
            model.load_state_dict(received, assign=assign)
            rules.wrap(torch.optim.SGD(model.parameters(), 0.1))

    with pytest.raises(ConfigError, match=LOADED):
        train(PROXIMAL)
    train({})  # FedAvg has no reference weights


@pytest.mark.parametrize("hook", [ProximalTerm(5.0), ControlVariates()])
def test_a_state_that_is_loaded_before_the_first_step_is_refused(
    hook: ClientHook,
) -> None:
    """SCAFFOLD's variates once contained the difference of the two states."""
    model, received = nn.Linear(2, 1), nn.Linear(2, 1).state_dict()
    hook.receive({}, {})
    rules = Hooks(model, {"hook": hook})

    def train() -> None:
        with rules.block():
            optimizer = rules.wrap(torch.optim.SGD(model.parameters(), 0.1))
            model.load_state_dict(received)
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

    with pytest.raises(ConfigError, match=LOADED):
        train()


@pytest.mark.parametrize("make", [lambda: ProximalTerm(5.0), ControlVariates])
@pytest.mark.parametrize(
    ("table", "inputs"),
    [(nn.Embedding, ([[0, 1]],)), (nn.EmbeddingBag, ([0, 1], [0]))],
    ids=["embedding", "bag"],
)
def test_a_table_whose_forward_pass_changes_its_weights_is_no_other_state(
    table: Any, inputs: Any, make: Any
) -> None:
    model, hook = table(3, 2, max_norm=0.1), make()
    hook.receive({}, {})
    rules = Hooks(model, {"hook": hook})
    with rules.block():
        optimizer = rules.wrap(torch.optim.SGD(model.parameters(), 0.1))
        for _ in range(2):
            optimizer.zero_grad()
            model(*map(torch.tensor, inputs)).sum().backward()
            optimizer.step()


@pytest.mark.parametrize("inside", [False, True])
def test_the_automatic_round_of_fixbn_refuses_a_state_that_is_loaded_inside_the_block(
    inside: bool,
) -> None:
    """The difference of the states would look like a change by training."""
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).train()
    received = {name: entry + 1 for name, entry in model.state_dict().items()}

    def train() -> dict[str, Any]:
        with bn_rules(model, {"fedbn-flwr.hooks": '["report-drift"]'}) as rules:
            if inside:
                model.load_state_dict(received)
            for _ in range(2):
                model(torch.randn(4, 2)).sum().backward()
        model.load_state_dict(received)  # the block has ended
        return rules.metrics

    if inside:
        with pytest.raises(
            ConfigError,
            match=r"4 of the model's parameters \('0.weight', ...\) changed",
        ):
            train()
    else:
        assert train()["statistics-delta"] > 0


def test_an_optimizer_for_each_epoch_is_refused(mlp) -> None:
    """A second optimizer would use the round's initial momentum, or act twice."""
    model = mlp()
    for hooks in ({}, PROXIMAL):
        with bn_rules(model, hooks) as rules:
            optimizer = rules.wrap(torch.optim.SGD(model.parameters(), 0.1))
            for again in (optimizer, torch.optim.SGD(model[3].parameters(), 0.1)):
                with pytest.raises(
                    ConfigError,
                    match=r"wrap was called twice .*create and wrap one optimizer",
                ):
                    rules.wrap(again)
            if hooks:
                optimizer.step()


def scaled_steps(
    told: dict[str, Any], *, unscale: bool = True, inputs: float = 1.0
) -> None:
    """Take two steps of a fused SGD under a gradient scaler."""
    model, scaler = nn.Linear(3, 1), torch.amp.GradScaler("cpu", init_scale=1024.0)
    with bn_rules(model, told) as rules:
        optimizer = rules.wrap(torch.optim.SGD(model.parameters(), 0.01, fused=True))
        for scale in (1.0, inputs):
            optimizer.zero_grad()
            scaler.scale(model(scale * torch.ones(4, 3)).square().mean()).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()


def test_scaled_gradients_of_a_fused_optimizer_are_refused() -> None:
    """A fused optimizer unscales gradients inside its step.

    A term added before the step would be a thousand times too small.
    """
    with pytest.raises(ConfigError, match=r"scaler.unscale_\(optimizer\)"):
        scaled_steps(PROXIMAL, unscale=False)
    scaled_steps({}, unscale=False)  # a method without a term accepts them
    scaled_steps(PROXIMAL)


def test_a_step_that_a_gradient_scaler_skips_is_not_acted_on(monkeypatch) -> None:
    """A fused optimizer with an infinite gradient does not move the parameters.

    SCAFFOLD must not count such a step.
    """
    acted: list[bool] = []
    act = Hooks._act
    monkeypatch.setattr(
        Hooks,
        "_act",
        lambda self, optimizer: acted.append(True) or act(self, optimizer),
    )
    scaled_steps(PROXIMAL, inputs=float("inf"))
    assert len(acted) == 1


@pytest.mark.parametrize("after_wrap", [False, True])
def test_a_model_that_moves_inside_the_block_is_refused(after_wrap: bool) -> None:
    """FedProx's anchor and SCAFFOLD's sums are on the device of the step."""

    def move(told: dict[str, Any]) -> None:
        model = nn.Linear(3, 1)
        with bn_rules(model, told) as rules:
            optimizer = torch.optim.SGD(model.parameters(), 0.01)
            if after_wrap:
                rules.wrap(optimizer)
            model.to("meta")
            if not after_wrap:
                optimizer = rules.wrap(torch.optim.SGD(model.parameters(), 0.01))
            rules._act(optimizer)

    with pytest.raises(ConfigError, match=r"was on cpu .* is on meta now"):
        move(PROXIMAL)
    move({"fedbn-flwr.hooks": '["agc"]', "fedbn-flwr.agc": 0.1})  # it stores nothing


def test_a_block_for_each_epoch_is_refused(run_app, user_app) -> None:
    """FedProx would use another anchor, and SCAFFOLD would lose gradients."""

    def twice(model: nn.Module, data: Any, msg: Message, context: Context) -> float:
        hooked_loop(model, data, msg, context)
        return hooked_loop(model, data, msg, context)

    with pytest.raises(ConfigError, match="Write one block around all epochs"):
        run_app(FedProx(proximal_mu=0.01), user_app(twice))
    run_app(FedAvg(), user_app(twice))


def test_statistics_that_are_reset_in_a_frozen_round_are_the_cause(
    run_app, user_app
) -> None:
    """Layers in eval mode do not measure the statistics that ``update_bn`` resets."""

    def averaged(model: nn.Module, data: Any, msg: Message, context: Context) -> float:
        with bn_rules(model, msg, context):
            loss = plain_loop(model, data, msg, context)
            update_bn([data.inputs], model)
        return loss

    run_app(FixBN(freeze_at=3), user_app(averaged))
    with pytest.raises(ClientPartError, match=r"resets it, such as .*update_bn"):
        run_app(FixBN(freeze_at=1), user_app(averaged))


def test_a_call_left_out_inside_the_block_is_named(run_app, user_app) -> None:
    """All clients leave it out, so the run ends with the error in its first round."""
    strategy = FedProx(proximal_mu=0.01)
    with pytest.raises(
        ConfigError, match=r"Write: optimizer = rules\.wrap\(optimizer\)"
    ):
        run_app(strategy, user_app(functools.partial(loop_without_step, wrap=False)))
    fedtan = FedTAN()
    with pytest.raises(ConfigError, match=r"Write: with rules\.step\(len\(inputs\)\)"):
        run_app(fedtan, user_app(loop_without_step, query=True), barrier=False)
    for reports in (strategy.reports, fedtan.reports):
        assert [len(report.rejected) for report in reports] == [len(SIZES)]


@pytest.mark.parametrize("barrier", [True, False], ids=["barrier", "messages"])
def test_a_model_that_cannot_be_synchronised_ends_the_run_at_the_first_exchange(
    run_app, user_app, barrier: bool
) -> None:
    """A NormLayerError of all clients is a ConfigError of the run."""

    def model() -> nn.Module:
        return Checkpointed(
            nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)), nn.Linear(4, 3)
        ).double()

    strategy = FedTAN()
    with pytest.raises(
        ConfigError,
        match=r"^BatchNorm layer '0\.1' runs inside torch\.utils\.checkpoint",
    ):
        run_app(
            strategy,
            user_app(hooked_loop, query=True, model=model),
            model=model,
            barrier=barrier,
        )
    assert len(strategy.reports) == 1


def test_hooks_that_send_arrays_need_message_and_context(mlp) -> None:
    with pytest.raises(
        ConfigError,
        match=(
            r"client hook 'variates' sends or keeps arrays: write `with"
            r" bn_rules\(model, msg"
        ),
    ):
        bn_rules(mlp(), {"fedbn-flwr.hooks": '["variates"]'}).__enter__()


@pytest.mark.parametrize(
    ("size", "moves", "said"),
    [
        (4, 1, "the first batch must be the same each time"),
        (3, 0, "batch is 3, but this client's answer to the query was batch-size 4"),
    ],
)
def test_a_first_batch_that_changes_or_has_another_size_is_refused(
    run_app, user_app, size: int, moves: int, said: str
) -> None:
    """With messages, every exchange calls the training function again."""
    calls = iter(range(1000))

    def restless(model: nn.Module, data: Any, msg: Message, context: Context) -> float:
        with bn_rules(model, msg, context) as rules:
            positions = (torch.arange(size) + moves * next(calls)) % len(data)
            inputs, targets = data.batch(positions)
            with rules.step(size):
                F.cross_entropy(model(inputs), targets).backward()
        return 0.0

    strategy = FedTAN()
    app = user_app(restless, query=True)
    run_app(strategy, app, rounds=1, barrier=False, fails=NothingTrainedError)
    reasons = strategy.reports[0].rejected.values()
    assert [said in why for why in reasons] == [True] * len(SIZES)


class Stream(torch.utils.data.IterableDataset[Any]):
    """A stream without examples."""

    def __iter__(self) -> Any:
        return iter(())


def changed(model: nn.Module) -> list[str]:
    return [
        name
        for module in model.modules()
        for name in vars(module)
        if name in ("forward", "train")
    ]


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(FixBN, freeze_at=0, freeze_affine=True),
        StaticBN,
        Scaffold,
        FedTAN,
        FedProx,
    ],
)
def test_an_error_in_the_block_leaves_the_model_and_the_optimizer_as_they_were(
    run_app, user_app, make
) -> None:
    """Even Ctrl-C, a ``BaseException``, leaves a model that may be trained again."""
    found: list[tuple[Any, Any]] = []

    def loop(model: nn.Module, data: Any, msg: Message, context: Context) -> float:
        optimizer = torch.optim.SGD(model.train().parameters(), 0.1)
        groups, before = copy.deepcopy(optimizer.param_groups), settings_of(model)
        try:
            with bn_rules(model, msg, context) as rules:
                rules.wrap(optimizer)
                with rules.step(len(data)):
                    data.loss(model).backward()
                optimizer.step()
                raise KeyboardInterrupt
        finally:
            found.append((before, settings_of(model)))
            assert [len(group["params"]) for group in optimizer.param_groups] == [
                len(groups[0]["params"])
            ]
            assert not optimizer._optimizer_step_pre_hooks
            assert not optimizer._optimizer_step_post_hooks
            assert not any("forward" in vars(module) for module in model.modules())
        return 0.0

    run_app(make(), user_app(loop, query=True), rounds=1, fails=NothingTrainedError)
    assert len(found) == len(SIZES)
    for before, after in found:
        assert before == after
