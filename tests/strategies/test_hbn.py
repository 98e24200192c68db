"""HBN: the layer between batch and global statistics, alpha that stays with the client,
and what does not hold.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.batchnorm.reestimation import moments_of
from fedbn_flwr.batchnorm.replaced_forward import normalise
from fedbn_flwr.client.hooks import Hooks
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.runs.inspection import inspect_model
from fedbn_flwr.messages.records import from_record, to_record
from fedbn_flwr.server.methods.disclosures import disclosures
from fedbn_flwr.strategies import FBN, HBN
from fedbn_flwr.strategies.hbn import HybridStatistics
from fedbn_flwr.training import LearningRate, LocalTraining, make_optimizer
from tests.strategies.test_fbn import (
    RATE,
    Layers,
    inputs_of_layers,
    loaded,
    lower,
    narrow_densenet,
    step,
    union,
)
from tests.support.bad_replies import spoiling

SIZES = (6, 13, 9)


def hybrid(model: nn.Module, alpha: float) -> HybridStatistics:
    """The hook, begun on the model."""
    hook = HybridStatistics(warm_up=False, share=False)
    hook.initial = alpha
    hook.begin(model)
    return hook


def trained(make: Any, x: Tensor) -> nn.Module:
    """A model whose statistics are not the batch's, and gamma and beta not 1 and 0."""
    torch.manual_seed(0)
    model = make()
    for layer in model.modules():
        if isinstance(layer, _BatchNorm):
            for parameter in layer.parameters():
                nn.init.normal_(parameter)
    with torch.no_grad():
        model.train()(x)
    return model


def outcome(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The output, and the gradients of a sum of it by the parameters."""
    out = model(x)
    return [
        out.detach(),
        *torch.autograd.grad(
            (out * out.detach().sin()).sum(), list(model.parameters())
        ),
    ]


@pytest.mark.parametrize(("alpha", "train"), [(-800.0, True), (800.0, False)])
@pytest.mark.parametrize("kind", ["1d", "2d", "3d", "torchvision", "densenet"])
def test_at_its_ends_the_layer_is_batchnorm_in_train_and_in_eval_mode(
    kind: str, alpha: float, train: bool, torchvision_net
) -> None:
    shape = (6, 2, *[5] * int(kind[0])) if kind[0].isdigit() else (6, 3, 40, 40)
    makes = {"torchvision": torchvision_net, "densenet": narrow_densenet}
    make, off = (
        makes.get(kind, functools.partial(Layers, kind)),
        1e-12 if kind[0].isdigit() else 1e-9,
    )
    x = (
        torch.randn(
            shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
        )
        * 2
        + 1
    )
    model = trained(make, x[:4])
    plain = copy.deepcopy(model).train(train)
    start, tested = copy.deepcopy(model.state_dict()), copy.deepcopy(model).eval()
    hook = hybrid(model.train(), alpha)
    # Not bit for bit: torch's own kernels normalise in another order of operations.
    for mine, want in zip(outcome(model, x), outcome(plain, x), strict=True):
        torch.testing.assert_close(mine, want, rtol=off, atol=off)
    assert all(
        torch.equal(start[name], value) for name, value in model.state_dict().items()
    )
    assert torch.equal(model.eval()(x), tested(x)), "a test uses the global statistics"
    hook.end(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_gradients_of_input_and_alpha_are_those_of_differences() -> None:
    layer = nn.BatchNorm2d(2).double()
    layer.running_mean += 0.3
    layer.running_var *= 1.7
    hook = hybrid(layer, 0.0)

    def out(x: Tensor, alpha: Tensor) -> Tensor:
        hook._alpha[layer] = alpha  # type: ignore[assignment]
        return layer(x)

    x, alpha = (
        torch.randn(3, 2, 2, 1).double().requires_grad_(),
        torch.tensor([0.4, -0.7]).double().requires_grad_(),
    )
    assert torch.autograd.gradcheck(out, (x, alpha))


@pytest.mark.parametrize("alpha", [800.0, 0.0])
def test_only_without_the_batch_a_round_is_a_centralized_step_with_frozen_bn_and_fbns(
    federate, points, torchvision_net, monkeypatch, alpha: float
) -> None:
    """Form (a)'s pooled statistics are the union's at the first layer alone."""
    monkeypatch.setattr(HybridStatistics, "initial", alpha)
    datasets = [points(n, i, (3, 40, 40)) for i, n in enumerate(SIZES)]
    settings = {"rounds": 2, "rate": RATE, "batch_size": 0, "local_steps": 1}
    run = federate(HBN(statistics_momentum=1.0), torchvision_net, datasets, **settings)
    before, after = run.history[1:]
    names = dict(torchvision_net().named_parameters())
    off = []
    for batch_statistics_train in (False, True):
        want = step(
            loaded(torchvision_net, before).train(batch_statistics_train), datasets
        )
        off.append(max(abs(after[name] - want[name].numpy()).max() for name in names))
    if alpha:
        same = federate(
            FBN(fbn_measure="pass", statistics_momentum=1.0),
            torchvision_net,
            datasets,
            **settings,
        )
        assert (
            max(abs(after[name] - value).max() for name, value in same.state.items())
            < 1e-13
        )
        assert off[0] < 1e-13
    else:
        assert off[0] > 1e-3, "frozen BN does not hold"
    assert off[1] > 1e-3, "BN in train mode does not hold"
    model = loaded(torchvision_net, before).train()
    first, second, *_ = inputs_of_layers(model, union(datasets)[0]).items()
    wrong = [
        abs(after[f"{path}.running_mean"] - values.mean(0).numpy()).max()
        for path, values in (first, second)
    ]
    assert wrong[0] < 1e-13
    assert wrong[1] > 1e-4
    assert (
        abs(after[f"{first[0]}.running_var"] - first[1].var(0).numpy()).max() < 1e-13
    ), "unbiased, of the union"


def test_shared_alpha_is_named_where_a_protection_would_have_to_hide_it() -> None:
    keys = [
        [beside.key for beside in HBN(share_alpha=share).methods.whole.extras]
        for share in (True, False)
    ]
    assert keys == [["bn-moments", "bn-alpha"], ["bn-moments"]]
    assert [
        len(disclosures(HBN(share_alpha=share).methods)) for share in (True, False)
    ] == [2, 1]


def kept_alpha(run: Any, partition: int) -> np.ndarray:
    kept = from_record(run.context(partition).state.array_records["fedbn-flwr.rules"])
    return kept["HybridStatistics/1.alpha"]


@pytest.mark.parametrize("share", [True, False])
def test_alpha_stays_with_its_client_and_its_mean_starts_others_if_it_is_shared(
    federate, points, mlp, share: bool
) -> None:
    """Client 2 is away until the last round, whose rate is nearly 0: its alpha is the
    mean of the others', or 0.
    """
    datasets = [points(size, i) for i, size in enumerate(SIZES)]
    rate = LearningRate(0.1, (2,), (1e-12,))
    settings = {"hide": {1: [2], 2: [2]}, "rate": rate, "weight_decay": 0.9}
    run = federate(HBN(share_alpha=share), mlp, datasets, rounds=3, **settings)
    first = federate(HBN(share_alpha=share), mlp, datasets, rounds=2, **settings)
    own = [kept_alpha(first, i) for i in (0, 1)]
    assert all((alpha != 0).all() for alpha in own)
    assert (own[0] != own[1]).all()
    given = [
        message.content["bn-alpha"]
        for message in run.grid.sent
        if "bn-alpha" in message.content
    ]
    names = {
        name
        for m in run.grid.received
        if m.has_content()
        for name in m.content.array_records
    }
    assert ("bn-alpha" in names) is share
    mean = (SIZES[0] * own[0] + SIZES[1] * own[1]) / (SIZES[0] + SIZES[1])
    np.testing.assert_allclose(
        kept_alpha(run, 2), mean if share else 0.0, rtol=1e-9, atol=1e-9
    )
    if not share:
        assert given == []
        return
    np.testing.assert_allclose(from_record(given[-1])["1.alpha"], mean, rtol=1e-12)
    reports = [
        report.train
        for report in federate(
            HBN(share_alpha=True), mlp, datasets, rounds=2
        ).strategy.reports
    ]
    predicted = inspect_model(
        mlp(),
        "hbn",
        len(datasets),
        Config.make({"strategy": "hbn", "share-alpha": True}),
    )
    assert [predicted.first, predicted.later] == reports


def test_a_client_of_the_warm_up_alone_starts_with_the_mean_of_the_others(
    federate, points, mlp
) -> None:
    """Client 2 is away in rounds 2 and 3; in round 4 the rate is nearly 0."""
    datasets = [points(size, i) for i, size in enumerate(SIZES)]
    settings = {"hide": {2: [2], 3: [2]}, "rate": LearningRate(0.1, (3,), (1e-12,))}
    run = federate(HBN(share_alpha=True), mlp, datasets, rounds=4, **settings)
    others = federate(HBN(share_alpha=True), mlp, datasets, rounds=3, **settings)
    first = kept_alpha(others, 0)
    second = kept_alpha(others, 1)
    mean = (SIZES[0] * first + SIZES[1] * second) / (SIZES[0] + SIZES[1])
    assert abs(mean).min() > 1e-6
    np.testing.assert_allclose(kept_alpha(run, 2), mean, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("kept", "starts_at"), [({}, 1.0), ({"1.alpha": torch.full((4,), 2.0)}, 2.0)]
)
@pytest.mark.parametrize("warm_up", [True, False])
def test_alpha_starts_at_the_shared_one_unless_the_client_keeps_its_own(
    mlp, kept, starts_at, warm_up
) -> None:
    hook = HybridStatistics(warm_up=warm_up, share=True)
    hook.receive({"bn-alpha": {"1.alpha": torch.ones(4)}}, kept)
    hook.begin(mlp())
    found = hook.keep()
    assert (
        found["1.alpha"].tolist() == [starts_at] * 4
        if kept or not warm_up
        else "1.alpha" not in found
    )


def test_no_rows_give_alpha_no_gradient_and_half_precision_a_wide_alpha() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3)).double().train()
    hook = hybrid(model, 0.2)
    model(torch.empty(0, 3, dtype=torch.float64)).sum().backward()
    gradient = hook._alpha[model[0]].grad
    assert gradient is None or not gradient.any()
    narrow = nn.Sequential(nn.BatchNorm1d(3)).to(torch.bfloat16).train()
    assert hybrid(narrow, 0.2)._alpha[narrow[0]].dtype == torch.float32


def test_alpha_learns_without_weight_decay_at_the_rate_of_the_round(
    mlp, points
) -> None:
    model, data = mlp().train(), points(8, 1)
    hook = hybrid(model, 0.3)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, weight_decay=0.7)
    hook.start(model, optimizer)
    model(data.inputs).square().sum().backward()
    gradient = hook._alpha[model[1]].grad
    assert gradient is not None
    optimizer.step()
    torch.testing.assert_close(hook.keep()["1.alpha"], 0.3 - 0.05 * gradient)
    for name in ("sgd", "adam", "adamw"):
        model = mlp().train()
        made = make_optimizer(
            model,
            LocalTraining(
                learning_rate=LearningRate(0.1), optimizer=name, weight_decay=0.7
            ),
        )
        hybrid(model, 0.3).start(model, made)
        assert [group["weight_decay"] for group in made.param_groups] == [0.7, 0.0]


@pytest.mark.parametrize("rates", [(0.0, 0.05), (0.05, 0.0), (0.01, 0.05, 0.02)])
def test_alpha_learns_at_the_largest_rate_of_the_groups(mlp, rates) -> None:
    """Any group may be frozen by a rate of 0, also the first."""
    model = mlp().train()
    parameters = list(model.parameters())
    groups = [
        {"params": parameters[k :: len(rates)], "lr": r} for k, r in enumerate(rates)
    ]
    optimizer = torch.optim.SGD(groups)
    hybrid(model, 0.3).start(model, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [*rates, 0.05]


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


@pytest.mark.parametrize("kind", ["1d", "2d", "3d"])
def test_kinds_of_batchnorm_without_affine_in_amp(federate, points, kind: str) -> None:
    """One layer twice, and two paths of it: one alpha."""
    torch.manual_seed(0)
    net = Layers(kind).float()
    datasets = [
        lower(points(n, i, (2, *[5] * int(kind[0])))) for i, n in enumerate(SIZES)
    ]
    run = federate(
        HBN(share_alpha=True), lambda: copy.deepcopy(net), datasets, amp=True
    )
    assert run.strategy.reports[-1].rejected == {}
    assert list(run.strategy.state.alpha) == ["1.alpha", "4.alpha", "6.alpha"]
    assert run.strategy.state.alpha["4.alpha"].dtype == np.float32
    assert np.array_equal(
        run.strategy.state.alpha["4.alpha"], run.strategy.state.alpha["6.alpha"]
    )
    assert all(np.isfinite(value).all() for value in run.state.values())
    assert (
        run.state["4.num_batches_tracked"],
        (run.state["4.running_mean"] != 0).all(),
    ) == (0, True)


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


@pytest.mark.parametrize(
    ("dtype", "shift", "off"), [(torch.float64, 2, 1e-13), (torch.bfloat16, 50, 0.02)]
)
def test_the_mixed_layer_is_the_formula(
    dtype: torch.dtype, shift: float, off: float
) -> None:
    """Of inputs in bfloat16, too, far from zero: only the output is rounded to it."""
    layer, x = (
        nn.BatchNorm1d(2, eps=1e-3).to(torch.promote_types(dtype, torch.float32)),
        torch.randn(64, 2).double(),
    )
    x = (x + shift).to(dtype)
    layer.running_mean += shift
    layer.running_var *= 3
    hybrid(layer, 0.8)
    a, wide = 1 / (1 + np.exp(0.8)), x.double()
    mean, var = (
        a * wide.mean(0) + (1 - a) * shift,
        a * wide.var(0, correction=0) + (1 - a) * 3,
    )
    found = layer(x)
    assert found.dtype == dtype
    torch.testing.assert_close(
        found.double(), (wide - mean) / (var + 1e-3).sqrt(), rtol=off, atol=off
    )
    want = normalise(layer.double(), wide, mean, var)
    torch.testing.assert_close(found.double(), want, rtol=off, atol=off)
