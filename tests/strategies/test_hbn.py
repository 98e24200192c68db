"""HBN's mixed layer, and the training of alpha in a user's optimizers."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedbn_flwr.batchnorm.reestimation import moments_of
from fedbn_flwr.client.bn_rules import Hooks
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.messages.records import to_record
from fedbn_flwr.server.methods.check_protections import disclosures
from fedbn_flwr.strategies import HBN
from fedbn_flwr.strategies.hbn import HybridStatistics
from tests.support.bad_replies import spoiling

SIZES = (6, 13, 9)


def lower(data: Any) -> Any:
    return type(data)(data.inputs.float(), data.targets)


def hybrid(model: nn.Module, alpha: float) -> HybridStatistics:
    """Return a hook that has begun on the model."""
    hook = HybridStatistics(warm_up=False, share=False)
    hook.initial = alpha
    hook.begin(model)
    return hook


def test_shared_alpha_is_named_where_a_protection_would_have_to_hide_it() -> None:
    keys = [
        [told.key for told in disclosures(HBN(share_alpha=share).methods)]
        for share in (True, False)
    ]
    assert keys == [["bn-moments", "bn-alpha"], ["bn-moments"]]


def test_no_rows_give_alpha_no_gradient_and_half_precision_a_wide_alpha() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3)).double().train()
    hook = hybrid(model, 0.2)
    model(torch.empty(0, 3, dtype=torch.float64)).sum().backward()
    gradient = hook._alpha[model[0]].grad
    assert gradient is None or not gradient.any()
    narrow = nn.Sequential(nn.BatchNorm1d(3)).to(torch.bfloat16).train()
    assert hybrid(narrow, 0.2)._alpha[narrow[0]].dtype == torch.float32


@pytest.mark.parametrize("rates", [(0.0, 0.05), (0.05, 0.0), (0.01, 0.05, 0.02)])
def test_alpha_learns_at_the_largest_rate_of_the_groups(mlp, rates) -> None:
    """A rate of 0 may freeze any group, even the first."""
    model = mlp().train()
    parameters = list(model.parameters())
    groups = [
        {"params": parameters[k :: len(rates)], "lr": r} for k, r in enumerate(rates)
    ]
    optimizer = torch.optim.SGD(groups)
    hybrid(model, 0.3).start(model, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [*rates, 0.05]
    other = mlp().train()
    with pytest.raises(ConfigError, match="one group of parameters"):
        hybrid(other, 0.3).start(other, torch.optim.LBFGS(other.parameters()))


def test_an_optimizer_that_a_client_keeps_has_alpha_in_a_round_alone(
    mlp, points
) -> None:
    model, data = mlp(), points(8, 1)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    for _ in range(2):
        hook = hybrid(model, 0.0)
        hook.start(model, optimizer)
        model(data.inputs).square().sum().backward()
        optimizer.step()
        assert len(optimizer.param_groups) == 2
        hook._found = {"1": moments_of(data.inputs[:, :4])}
        hook.end(model)
        assert len(optimizer.param_groups) == 1
        assert set(optimizer.state) == set(model.parameters())
        assert not optimizer._optimizer_step_post_hooks


def test_a_loop_that_zeroes_the_models_gradients_alone_takes_the_same_steps(
    mlp, points
) -> None:
    ends = []
    for zeroes_all in (True, False):
        model, data = mlp(), points(8, 1)
        rules = Hooks(model, {"hybrid-statistics": (hook := hybrid(model, 0.0))})
        optimizer = rules.wrap(torch.optim.SGD(model.parameters(), 0.1))
        for _ in range(3):
            (optimizer if zeroes_all else model).zero_grad()
            model(data.inputs).square().sum().backward()
            optimizer.step()
        ends.append(hook.keep()["1.alpha"])
    assert torch.equal(*ends)


def test_in_mixed_precision_alpha_and_the_statistics_are_float32(
    federate, datasets, mlp
) -> None:
    data = [lower(one) for one in datasets]
    net = functools.partial(copy.deepcopy, mlp().float())
    run = federate(HBN(share_alpha=True), net, data, amp=True)
    assert run.strategy.reports[-1].rejected == {}
    (alpha,) = run.strategy.state.alpha.values()
    assert alpha.dtype == np.float32
    assert (alpha != 0).any()
    for name, value in run.state.items():
        assert value.dtype == (np.int64 if "tracked" in name else np.float32)
        assert np.isfinite(value).all()


def test_alpha_that_does_not_fit_is_refused(federate, datasets, mlp) -> None:
    def alpha(content: Any) -> None:
        content["bn-alpha"] = to_record({"1.alpha": np.zeros(5)})

    run = federate(
        HBN(share_alpha=True),
        mlp,
        datasets,
        rounds=1,
        wrap=functools.partial(spoiling, alpha),
    )
    assert (
        "record 'bn-alpha': entry '1.alpha' of shape (5,) does not fit the model: build"
        in run.reason(1)
    )


def test_the_mixed_layer_is_the_formula() -> None:
    """With bfloat16 inputs far from zero, only the output is rounded to bfloat16."""
    layer, shift, off = nn.BatchNorm1d(2, eps=1e-3), 50, 0.02
    x = (torch.randn(64, 2) + shift).bfloat16()
    layer.running_mean += shift
    layer.running_var *= 3
    hybrid(layer, 0.8)
    a, wide = 1 / (1 + np.exp(0.8)), x.double()
    mean, var = (
        a * wide.mean(0) + (1 - a) * shift,
        a * wide.var(0, correction=0) + (1 - a) * 3,
    )
    found = layer(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(
        found.double(), (wide - mean) / (var + 1e-3).sqrt(), rtol=off, atol=off
    )
