"""SCAFFOLD's variates by the rates of the steps, its records and its refusals."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.client.bn_rules import Hooks
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.server.methods.method import Facts, Node, Replies, Reply
from fedbn_flwr.strategies import refuse_on_client
from fedbn_flwr.strategies.scaffold import (
    VARIATES,
    ControlVariates,
    ScaffoldMethod,
    Variates,
)

SIZES = (6, 14, 10, 8)


@pytest.mark.parametrize("unfreeze", [1, 2, 3])
def test_a_variate_is_the_mean_of_the_gradients_by_the_rates_of_their_steps(
    mlp, points, unfreeze: int
) -> None:
    """Layer 0 trains from a later step on or never, and 3.bias is in no group.

    The optimizer of 3.weight begins after a step of the other optimizer.
    """
    model, data, hook = mlp(), points(8, 1), ControlVariates()
    parameters = dict(model.named_parameters())
    own = {name: torch.full_like(p, -0.2) for name, p in parameters.items()}
    hook.receive({"variates": {name: c + 0.5 for name, c in own.items()}}, own)
    groups = [{"params": layer.parameters()} for layer in model[:2]]
    groups[0]["lr"] = 0.05
    optimizers = torch.optim.SGD(groups, 0.005), torch.optim.SGD([model[3].weight], 0.5)
    model[0].requires_grad_(False)
    rules = Hooks(model, {"variates": hook})
    sums = {name: torch.zeros_like(p) for name, p in parameters.items()}
    rates = dict.fromkeys(parameters, 0.0)
    for step in range(3):
        model[0].requires_grad_(step >= unfreeze)
        if step < 2:
            rules.wrap(optimizers[step])
        model.zero_grad()
        data.loss(model).backward()
        for optimizer in optimizers[: step + 1]:
            for group in optimizer.param_groups:
                group["lr"] *= 0.44
                for name, p in parameters.items():
                    if p.grad is not None and any(p is one for one in group["params"]):
                        sums[name] += group["lr"] * p.grad
                        rates[name] += group["lr"]
            optimizer.step()
    hook.end(model)
    kept, sent = hook.keep(), hook.reply()["variates"]
    trained = [name for name in parameters if unfreeze < 3 or not name.startswith("0.")]
    assert {*sent} == {*trained}
    assert {*kept} == {*parameters}
    for name in parameters:
        wanted = sums[name] / rates[name] if rates[name] else own[name]
        torch.testing.assert_close(kept[name], wanted, rtol=1e-9, atol=1e-12, msg=name)
    assert rates["3.bias"] == 0
    assert not sent["3.bias"].any(), "its gradient is unknown"


@pytest.mark.parametrize("when", ["at first", "added", "set", "by a schedule"])
@pytest.mark.parametrize("wrong", [{"momentum": 0.5}, {"maximize": True}])
def test_an_optimizer_with_one_group_that_is_not_plain_sgd_is_refused(
    mlp, points, wrong, when
) -> None:
    """A group may become so after ``wrap``, and is refused before it steps."""
    model = mlp()
    plain, other = ({"params": layer.parameters()} for layer in (model[0], model[3]))
    groups = {"at first": [plain, other | wrong], "added": [plain]}
    optimizer = torch.optim.SGD(groups.get(when, [plain, other]), 0.1)
    refuse = functools.partial(refuse_on_client, ["variates"], {})
    rules = Hooks(model, {"variates": ControlVariates()}, refuse)
    (name,) = wrong

    def loop() -> None:
        rules.wrap(optimizer)
        for _ in range(2):
            points(8, 1).loss(model).backward()
            optimizer.step()
            if when == "added":
                optimizer.add_param_group(other | wrong)
            if when == "set":
                optimizer.param_groups[-1].update(wrong)
            if when == "by a schedule" and name == "momentum":
                torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
            elif when == "by a schedule":
                optimizer.param_groups[0].update(wrong)

    said = f"scaffold corrects plain SGD: .*{name}=.* must be"
    with pytest.raises(ConfigError, match=said):
        loop()


def aggregated(facts: Facts, replies: list[Reply]) -> tuple[dict, Variates]:
    """Return the model and the state after a first round with these replies."""
    method = ScaffoldMethod(ScaffoldMethod.Params())
    return method.aggregate(Variates(), facts, Replies(replies), dict(facts.before))


@pytest.mark.parametrize("at", [0, 2])
def test_an_entry_that_a_client_does_not_train_has_a_change_of_zero(
    at: int, same_bits
) -> None:
    """The first client does not determine which entries have variates."""
    before = {"a": np.ones(2), "b": np.full(3, 2.0)}
    facts = Facts(2, None, split_state(before), before)
    ends = []
    for change in ({"b": np.ones(3)}, {"a": np.zeros(2), "b": np.ones(3)}):
        replies = []
        for i in range(3):
            own = {n: a + i for n, a in before.items()}
            sent = {n: 0.1 * a for n, a in before.items()} if i != at else change
            replies.append(Reply(Node(i, i), 5.0, own, {}, {VARIATES: sent}))
        model, state = aggregated(facts, replies)
        ends.append({**model, **{f"c {n}": c for n, c in state.variates.items()}})
    ours, theirs = ends
    same_bits({name: ours[name] for name in theirs}, theirs)


def test_the_common_variate_is_a_mean_over_all_clients_with_data() -> None:
    """Four of six nodes did not reply, and no node has reported its partition."""
    before = {"a": np.zeros(1)}
    facts = Facts(1, None, split_state(before), before, most_able=6)
    sent = {VARIATES: {"a": np.ones(1)}}
    replies = [Reply(Node(100 + i), 5.0, before, {}, sent) for i in range(2)]
    _, state = aggregated(facts, replies)
    assert (state.variates["a"], state.num_clients) == (pytest.approx(1 / 3), 6)
