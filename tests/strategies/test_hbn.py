"""HBN: the layer between batch and global statistics, alpha that stays with the client, and what does not hold."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.batchnorm.reestimation import MomentSums, batch_statistics, merge, moments_of
from fedbn_flwr.batchnorm.taken_forward import normalise
from fedbn_flwr.client.hooks import Hooks
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.runs.inspection import inspect_model
from fedbn_flwr.messages.records import from_record, to_record
from fedbn_flwr.server.sent_beside import sent_beside
from fedbn_flwr.strategies import FBN, HBN, FedAvg
from fedbn_flwr.strategies.hbn import HybridStatistics
from fedbn_flwr.training import LearningRate, LocalTraining, make_optimizer
from tests.strategies.test_fbn import RATE, Layers, inputs_of_layers, loaded, lower, narrow_densenet, step, union
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
    return [out.detach(), *torch.autograd.grad((out * out.detach().sin()).sum(), list(model.parameters()))]


@pytest.mark.parametrize(("alpha", "train"), [(-800.0, True), (800.0, False)])
@pytest.mark.parametrize("kind", ["1d", "2d", "3d", "torchvision", "densenet"])
def test_at_its_ends_the_layer_is_batchnorm_in_train_and_in_eval_mode(
    kind: str, alpha: float, train: bool, torchvision_net
) -> None:
    shape = (6, 2, *[5] * int(kind[0])) if kind[0].isdigit() else (6, 3, 40, 40)
    makes = {"torchvision": torchvision_net, "densenet": narrow_densenet}
    make, off = makes.get(kind, functools.partial(Layers, kind)), 1e-12 if kind[0].isdigit() else 1e-9
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2 + 1
    model = trained(make, x[:4])
    plain = copy.deepcopy(model).train(train)
    start, tested = copy.deepcopy(model.state_dict()), copy.deepcopy(model).eval()
    hook = hybrid(model.train(), alpha)
    # Not bit for bit: torch's own kernels normalise in another order of operations.
    for mine, want in zip(outcome(model, x), outcome(plain, x), strict=True):
        torch.testing.assert_close(mine, want, rtol=off, atol=off)
    assert all(torch.equal(start[name], value) for name, value in model.state_dict().items())
    assert torch.equal(model.eval()(x), tested(x)), "a test uses the global statistics"
    hook.end(model)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(("kind", "off"), [("1d", 1e-14), ("2d", 1e-14), ("torchvision", 1e-12)])
def test_where_batch_and_global_statistics_are_equal_alpha_has_no_effect(
    kind: str, off: float, torchvision_net
) -> None:
    shape = {"1d": (6, 3), "2d": (6, 3, 4, 4), "torchvision": (6, 3, 20, 20)}[kind]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = torchvision_net() if kind == "torchvision" else getattr(nn, f"BatchNorm{kind}")(3).double()

    def take_statistics(layer: Any, args: Any) -> None:
        layer.running_mean, layer.running_var = batch_statistics(args[0])

    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    handles = [layer.register_forward_pre_hook(take_statistics) for layer in layers]
    with torch.no_grad():
        model.eval()(x)  # layer after layer
    for handle in handles:
        handle.remove()
    found = []
    for alpha in (-2.0, 0.5):
        own = copy.deepcopy(model).train()
        hook = hybrid(own, alpha)
        out = own(x)
        gradients = torch.autograd.grad(out.square().sum(), list(hook._alpha.values()))
        assert len(gradients) == len(layers)
        assert max(float(gradient.abs().max()) for gradient in gradients) < off
        found.append(out.detach())
    torch.testing.assert_close(*found, rtol=0, atol=off)


def test_gradients_of_input_and_alpha_are_those_of_differences() -> None:
    layer = nn.BatchNorm2d(2).double()
    layer.running_mean += 0.3
    layer.running_var *= 1.7
    hook = hybrid(layer, 0.0)

    def out(x: Tensor, alpha: Tensor) -> Tensor:
        hook._alpha[layer] = alpha  # type: ignore[assignment]
        return layer(x)

    x, alpha = torch.randn(3, 2, 2, 1).double().requires_grad_(), torch.tensor([0.4, -0.7]).double().requires_grad_()
    assert torch.autograd.gradcheck(out, (x, alpha))


def test_gradients_of_all_alphas_of_a_torchvision_model_are_those_of_differences(torchvision_net) -> None:
    x = torch.randn(5, 3, 20, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = trained(torchvision_net, x)
    hook = hybrid(model.train(), 0.3)
    names = list(hook._alpha)

    def out(*alphas: Tensor) -> Tensor:
        hook._alpha = dict(zip(names, alphas, strict=True))  # type: ignore[arg-type]
        found: Tensor = model(x)
        return found

    assert torch.autograd.gradcheck(out, tuple(hook._alpha.values()), fast_mode=True)


@pytest.mark.parametrize("alpha", [800.0, 0.0])
def test_only_without_the_batch_a_round_is_a_centralized_step_with_frozen_bn_and_fbns(
    federate, points, torchvision_net, monkeypatch, alpha: float
) -> None:
    """And the pooled statistics of form (a) are the union's at the first layer, not at the second."""
    monkeypatch.setattr(HybridStatistics, "initial", alpha)
    datasets = [points(n, i, (3, 40, 40)) for i, n in enumerate(SIZES)]
    settings = {"rounds": 2, "rate": RATE, "batch_size": 0, "local_steps": 1}
    run = federate(HBN(statistics_momentum=1.0), torchvision_net, datasets, **settings)
    before, after = run.history[1:]
    names = dict(torchvision_net().named_parameters())
    off = []
    for batch_statistics_train in (False, True):
        want = step(loaded(torchvision_net, before).train(batch_statistics_train), datasets)
        off.append(max(abs(after[name] - want[name].numpy()).max() for name in names))
    if alpha:
        same = federate(FBN(fbn_measure="pass", statistics_momentum=1.0), torchvision_net, datasets, **settings)
        assert max(abs(after[name] - value).max() for name, value in same.state.items()) < 1e-13
        assert off[0] < 1e-13
    else:
        assert off[0] > 1e-3, "frozen BN does not hold"
    assert off[1] > 1e-3, "BN in train mode does not hold"
    model = loaded(torchvision_net, before).train()
    first, second, *_ = inputs_of_layers(model, union(datasets)[0]).items()
    wrong = [abs(after[f"{path}.running_mean"] - values.mean(0).numpy()).max() for path, values in (first, second)]
    assert wrong[0] < 1e-13
    assert wrong[1] > 1e-4
    assert abs(after[f"{first[0]}.running_var"] - first[1].var(0).numpy()).max() < 1e-13, "unbiased, of the union"


def test_a_survey_in_eval_mode_would_be_the_unions_at_every_layer(points, torchvision_net) -> None:
    """Form (b), for any split and batch size."""
    datasets = [points(n, i, (3, 40, 40)) for i, n in enumerate(SIZES)]
    model = trained(torchvision_net, datasets[0].inputs).eval()
    each = []
    for data, size in zip(datasets, (1, 4, 9), strict=True):
        sums, mine = MomentSums(), copy.deepcopy(model)
        for layer in mine.modules():
            if isinstance(layer, _BatchNorm):
                layer.register_forward_pre_hook(lambda layer, args, sums=sums: sums.add(layer, args[0]))
        with torch.no_grad():
            for inputs in data.inputs.split(size):
                mine(inputs)
        each.append(sums.by_path(mine))
    for path, values in inputs_of_layers(model, union(datasets)[0]).items():
        found = merge([own[path] for own in each])
        torch.testing.assert_close(found.mean, values.mean(0), rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(found.variance, values.var(0), rtol=1e-12, atol=1e-13)


def test_shared_alpha_is_named_where_a_protection_would_have_to_hide_it() -> None:
    keys = [[beside.key for beside in HBN(share_alpha=share).methods.whole.beside] for share in (True, False)]
    assert keys == [["bn-moments", "bn-alpha"], ["bn-moments"]]
    assert [len(sent_beside(HBN(share_alpha=share).methods)) for share in (True, False)] == [2, 1]


def kept_alpha(run: Any, partition: int) -> np.ndarray:
    kept = from_record(run.context(partition).state.array_records["fedbn-flwr.rules"])
    return kept["HybridStatistics/1.alpha"]


@pytest.mark.parametrize("share", [True, False])
def test_alpha_stays_with_its_client_and_its_mean_starts_others_if_it_is_shared(
    federate, points, mlp, share: bool
) -> None:
    """Client 2 is away until the last round, whose rate is nearly 0: its alpha is the mean of the others', or 0."""
    datasets = [points(size, i) for i, size in enumerate(SIZES)]
    rate = LearningRate(0.1, (2,), (1e-12,))
    settings = {"hide": {1: [2], 2: [2]}, "rate": rate, "weight_decay": 0.9}
    run = federate(HBN(share_alpha=share), mlp, datasets, rounds=3, **settings)
    first = federate(HBN(share_alpha=share), mlp, datasets, rounds=2, **settings)
    own = [kept_alpha(first, i) for i in (0, 1)]
    assert all((alpha != 0).all() for alpha in own)
    assert (own[0] != own[1]).all()
    given = [message.content["bn-alpha"] for message in run.grid.sent if "bn-alpha" in message.content]
    names = {name for m in run.grid.received if m.has_content() for name in m.content.array_records}
    assert ("bn-alpha" in names) is share
    mean = (SIZES[0] * own[0] + SIZES[1] * own[1]) / (SIZES[0] + SIZES[1])
    np.testing.assert_allclose(kept_alpha(run, 2), mean if share else 0.0, rtol=1e-9, atol=1e-9)
    if not share:
        assert given == []
        return
    np.testing.assert_allclose(from_record(given[-1])["1.alpha"], mean, rtol=1e-12)
    reports = [report.train for report in federate(HBN(share_alpha=True), mlp, datasets, rounds=2).strategy.reports]
    predicted = inspect_model(mlp(), "hbn", len(datasets), Config.make({"strategy": "hbn", "share-alpha": True}))
    assert [predicted.first, predicted.later] == reports


@pytest.mark.parametrize("whole", [True, False], ids=["no record", "an entry less"])
def test_shared_alpha_is_averaged_over_the_clients_that_have_it(federate, points, whole: bool) -> None:
    """One client sends no alpha, or that of one layer of two."""

    def two_layers() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3), nn.BatchNorm1d(3)).double()

    def spoil(content: Any) -> None:
        if whole:
            content["bn-alpha"] = to_record({})
        else:
            del content["bn-alpha"]["1.alpha"]

    datasets = [points(size, i) for i, size in enumerate(SIZES)]
    app = functools.partial(spoiling, spoil, rounds=(2,))
    run = federate(HBN(share_alpha=True), two_layers, datasets, rounds=3, wrap=app)
    first = federate(HBN(share_alpha=True), two_layers, datasets, rounds=2)
    kept = [from_record(first.context(i).state.array_records["fedbn-flwr.rules"]) for i in range(3)]
    given = [message.content["bn-alpha"] for message in run.grid.sent if "bn-alpha" in message.content]
    for name in ("1.alpha", "3.alpha"):
        have = (0, 2) if whole or name == "1.alpha" else (0, 1, 2)
        total = sum(SIZES[i] * kept[i][f"HybridStatistics/{name}"] for i in have)
        mean = total / sum(SIZES[i] for i in have)
        assert abs(mean).min() > 1e-6
        np.testing.assert_allclose(from_record(given[-1])[name], mean, rtol=1e-12)


def test_a_client_of_the_warm_up_alone_starts_with_the_mean_and_one_of_before_keeps_its_own(
    federate, points, mlp
) -> None:
    """Client 2 is away in rounds 2 and 3; in round 4 the rate is nearly 0."""
    datasets = [points(size, i) for i, size in enumerate(SIZES)]
    settings = {"hide": {2: [2], 3: [2]}, "rate": LearningRate(0.1, (3,), (1e-12,))}
    run = federate(HBN(share_alpha=True), mlp, datasets, rounds=4, **settings)
    others = federate(HBN(share_alpha=True), mlp, datasets, rounds=3, **settings)
    own = [kept_alpha(others, i) for i in (0, 1)]
    mean = (SIZES[0] * own[0] + SIZES[1] * own[1]) / (SIZES[0] + SIZES[1])
    assert abs(mean).min() > 1e-6
    np.testing.assert_allclose(kept_alpha(run, 2), mean, rtol=1e-9, atol=1e-11)
    hook = HybridStatistics(warm_up=True, share=True)
    hook.receive({"bn-alpha": {"1.alpha": torch.ones(4)}}, {"1.alpha": torch.full((4,), 2.0)})
    hook.begin(mlp())
    assert hook.keep()["1.alpha"].tolist() == [2.0] * 4


@pytest.mark.parametrize(("kept", "starts_at"), [({}, 1.0), ({"1.alpha": torch.full((4,), 2.0)}, 2.0)])
def test_alpha_starts_at_the_shared_one_unless_the_client_keeps_its_own(mlp, kept, starts_at: float) -> None:
    hook = HybridStatistics(warm_up=False, share=True)
    hook.receive({"bn-alpha": {"1.alpha": torch.ones(4)}}, kept)
    hook.begin(mlp())
    assert hook.keep()["1.alpha"].tolist() == [starts_at] * 4


def test_alpha_learns_without_weight_decay_at_the_rate_of_the_round(mlp, points) -> None:
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
        made = make_optimizer(model, LocalTraining(learning_rate=LearningRate(0.1), optimizer=name, weight_decay=0.7))
        hybrid(model, 0.3).start(model, made)
        assert [group["weight_decay"] for group in made.param_groups] == [0.7, 0.0]


def test_an_optimizer_that_a_client_keeps_has_alpha_in_a_round_alone(mlp, points) -> None:
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


def test_a_loop_that_zeroes_the_models_gradients_alone_takes_the_same_steps(mlp, points) -> None:
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


def test_batches_of_one_example_are_used_and_a_warm_up_is_fedavg(federate, datasets, mlp, same_bits) -> None:
    strategy = HBN(statistics_warm_up=0)
    federate(strategy, mlp, datasets, rounds=1, batch_size=1, local_steps=3)
    found = [(c["steps"], c["dropped-batches"]) for c in strategy.reports[0].clients.values()]
    assert found == [(3, 0)] * len(SIZES)
    run = federate(HBN(), mlp, datasets, rounds=1)
    plain = federate(FedAvg(), mlp, datasets, rounds=1)
    weights = [name for name in run.state if "running" not in name and "tracked" not in name]
    same_bits({n: run.state[n] for n in weights}, {n: plain.state[n] for n in weights})
    assert "fedbn-flwr.rules" not in run.context(0).state.array_records, "alpha does not learn in the warm-up"


@pytest.mark.parametrize("kind", ["1d", "2d", "3d"])
def test_kinds_of_batchnorm_without_affine_in_amp(federate, points, kind: str) -> None:
    """One layer twice, and two paths of it: one alpha."""
    torch.manual_seed(0)
    net = Layers(kind).float()
    datasets = [lower(points(n, i, (2, *[5] * int(kind[0])))) for i, n in enumerate(SIZES)]
    run = federate(HBN(share_alpha=True), lambda: copy.deepcopy(net), datasets, amp=True)
    assert run.strategy.reports[-1].rejected == {}
    assert list(run.strategy.alpha) == ["1.alpha", "4.alpha", "6.alpha"]
    assert run.strategy.alpha["4.alpha"].dtype == np.float32
    assert np.array_equal(run.strategy.alpha["4.alpha"], run.strategy.alpha["6.alpha"])
    assert all(np.isfinite(value).all() for value in run.state.values())
    assert (run.state["4.num_batches_tracked"], (run.state["4.running_mean"] != 0).all()) == (0, True)


def test_alpha_that_does_not_fit_is_refused(federate, datasets, mlp) -> None:
    def alpha(content: Any) -> None:
        content["bn-alpha"] = to_record({"1.alpha": np.zeros(5)})

    run = federate(HBN(share_alpha=True), mlp, datasets, rounds=1, wrap=functools.partial(spoiling, alpha))
    assert "record 'bn-alpha': entry '1.alpha' of shape (5,) does not fit the model: build" in run.reason(1)


def test_a_model_without_batchnorm_is_refused(federate, datasets, mlp) -> None:
    with pytest.raises(ConfigError, match="strategy 'hbn' needs BatchNorm"):
        federate(HBN(), functools.partial(mlp, norm=False), datasets)


@pytest.mark.parametrize(("dtype", "shift", "off"), [(torch.float64, 2, 1e-13), (torch.bfloat16, 50, 0.02)])
def test_the_mixed_layer_is_the_formula(dtype: torch.dtype, shift: float, off: float) -> None:
    """Of inputs in bfloat16, too, far from zero: only the output is rounded to it."""
    layer, x = nn.BatchNorm1d(2, eps=1e-3).to(torch.promote_types(dtype, torch.float32)), torch.randn(64, 2).double()
    x = (x + shift).to(dtype)
    layer.running_mean += shift
    layer.running_var *= 3
    hybrid(layer, 0.8)
    a, wide = 1 / (1 + np.exp(0.8)), x.double()
    mean, var = a * wide.mean(0) + (1 - a) * shift, a * wide.var(0, correction=0) + (1 - a) * 3
    found = layer(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), (wide - mean) / (var + 1e-3).sqrt(), rtol=off, atol=off)
    want = normalise(layer.double(), wide, mean, var)
    torch.testing.assert_close(found.double(), want, rtol=off, atol=off)
