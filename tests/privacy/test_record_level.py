"""Record-level differential privacy: the laws of DP-SGD, what it draws, what it costs, and which layers it refuses."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import ANY, Mock

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.client import NumPyClient
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.client import TorchClient, client_app
from fedbn_flwr.errors import ClientPartError, ConfigError, FedBNError, NormLayerError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.output.recorder import Recorder
from fedbn_flwr.lab.partitioned.partitioned_data import partitioned_data
from fedbn_flwr.lab.partitioned.report import data_report
from fedbn_flwr.lab.runs.run import run
from fedbn_flwr.lab.runs.start_checks import check
from fedbn_flwr.messages.protocol import RECORD_DP, ReplyInfo
from fedbn_flwr.norms import replace_norm
from fedbn_flwr.privacy import example_gradients
from fedbn_flwr.privacy.accounting import PrivacyAccountant, Release, Steps, epsilon_of_steps
from fedbn_flwr.privacy.coordinates import CLIP
from fedbn_flwr.privacy.differential import ClientLevelDP, DPSettings
from fedbn_flwr.privacy.example_gradients import clipped_sum, mixes_examples
from fedbn_flwr.privacy.masked_sums import MaskedSums, MaskSettings
from fedbn_flwr.privacy.record_level import DPSGD, NOISE, RecordLevel
from fedbn_flwr.privacy.record_server import RecordLevelDP
from fedbn_flwr.server.method import Reply
from fedbn_flwr.server.nodes import Node
from fedbn_flwr.server.report import RoundReport
from fedbn_flwr.server.run import Run
from fedbn_flwr.strategies import MTFL, STRATEGIES, FedAvg, FixBN, Method, Scaffold, Strategy, combined
from fedbn_flwr.strategies.fedprox import ProximalTerm
from fedbn_flwr.strategies.fixbn import FixBNMethod, FreezeBN
from fedbn_flwr.training import LearningRate, LocalTraining, train
from fedbn_flwr.training.client_hook import ClientHook, LossAndOutputs
from fedbn_flwr.training.step_rule import StepRule
from tests.support.noise import SeededNoise
from tests.support.points import Points

IMAGES = (3, 32, 32)


class SameBatches(StepRule):
    """Ordinary training on given batches; the gradient is the sum over a batch, divided by its expected size."""

    def __init__(self, batches: Sequence[Tensor], expected: int) -> None:
        self._batches, self._expected = batches, expected

    def batches(self, *_: Any) -> Iterator[Tensor]:
        yield from self._batches

    def compute(self, model: nn.Module, inputs: Tensor, targets: Tensor, *others: Any) -> LossAndOutputs:
        task, amp = others[-2:]

        def total(outputs: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(outputs, targets, reduction="sum") / self._expected

        return super().compute(model, inputs, targets, *others[:2], dataclasses.replace(task, loss=total), amp)


def trained(model: nn.Module, data: Points, rule: StepRule, hooks: Sequence[ClientHook], **keys: Any) -> dict[str, Any]:
    settings = LocalTraining(learning_rate=LearningRate(0.05), **{"local_steps": 4, "batch_size": 4, **keys})
    train(model, data, settings, learning_rate=0.05, stream=lambda _: torch.Generator(), hooks=hooks, rule=rule)
    return dict(model.state_dict())


@pytest.mark.parametrize("kind", ["group", "frozen BN"])
def test_without_noise_and_clipping_it_is_ordinary_training_on_the_same_batches(
    torchvision_net: Callable[[], nn.Module], points: Any, kind: str
) -> None:
    model = torchvision_net()
    if kind == "group":
        model, _ = replace_norm(model, "group", groups=2)
    data = points(9, 1, IMAGES)
    dp = DPSGD(RecordLevel(0.0, 1e9, noise=SeededNoise(0)), 9, 4)
    hooks = [ProximalTerm(0.3), *([FreezeBN(affine=False)] if kind == "frozen BN" else [])]
    keys = {"sgd_momentum": 0.5, "weight_decay": 0.01}
    found = trained(copy.deepcopy(model), data, dp, hooks, **keys)
    batches = [torch.tensor(asked, dtype=torch.int64) for asked in data.asked]
    assert len({len(batch) for batch in batches}) > 1
    plain = trained(model, data, SameBatches(batches, 4), hooks, **keys)
    for name, value in plain.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: name + text)
    assert not torch.equal(found["fc.weight"], torchvision_net().state_dict()["fc.weight"])


def net(norm: str = "group", seed: int = 0) -> nn.Module:
    """Two convolutions, group norm, BatchNorm with statistics of its own in eval mode, and a classifier; float64."""
    torch.manual_seed(seed)
    layers = [nn.Conv2d(2, 4, 3, groups=2), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 2, stride=2)]
    norms = {"group": nn.GroupNorm(2, 4), "batch": nn.BatchNorm2d(4)}
    model = nn.Sequential(*layers, norms[norm], nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(16, 3)).double()
    if norm == "batch":
        model[4].eval()
        for value in (*model[4].parameters(), *model[4].buffers()):
            value.data = value.data + torch.rand(value.shape).to(value.dtype)
    return model


def batch(size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 2, 6, 6, generator=generator, dtype=torch.float64)
    return inputs * (torch.arange(size) + 0.2)[:, None, None, None], torch.randint(3, (size,), generator=generator)


def each_gradient(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[list[Tensor]]:
    parameters = list(model.parameters())
    return [
        list(torch.autograd.grad(F.cross_entropy(model(inputs[i : i + 1]), targets[i : i + 1]), parameters))
        for i in range(len(inputs))
    ]


def flat(values: Any) -> Tensor:
    return torch.cat([value.reshape(-1) for value in values])


@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize("size", [1, 2, 7])
def test_the_clipped_sum_is_that_of_a_loop_over_the_examples(
    monkeypatch: pytest.MonkeyPatch, norm: str, size: int
) -> None:
    model, (inputs, targets) = net(norm), batch(size)
    each = [flat(gradients) for gradients in each_gradient(model, inputs, targets)]
    lengths = torch.stack([one.norm() for one in each])
    c = float(lengths.median()) * 1.01
    slow = torch.stack([one * min(1.0, c / float(one.norm())) for one in each]).sum(0)
    total, losses, outputs, _ = clipped_sum(model, F.cross_entropy, inputs, targets, c)
    torch.testing.assert_close(flat(total.values()), slow, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(outputs, model(inputs), rtol=1e-12, atol=1e-12)
    assert float(losses.mean()) == pytest.approx(float(F.cross_entropy(outputs, targets)), rel=1e-6)
    monkeypatch.setattr(example_gradients, "_AT_ONCE", 3 * len(slow))  # three examples in memory at a time
    parts, *_ = clipped_sum(model, F.cross_entropy, inputs, targets, c)
    torch.testing.assert_close(flat(parts.values()), slow, rtol=1e-12, atol=1e-12)


def test_class_weights_are_refused() -> None:
    """The mean over one example divides by the weight of that example, so they would have no effect."""
    inputs, targets = batch(3)
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(3)).double()
    model(inputs)
    weighted = nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    for loss in (weighted, functools.partial(F.cross_entropy, weight=weighted.weight)):
        with pytest.raises(ConfigError, match="class weights of the loss have no effect"):
            clipped_sum(model, loss, inputs, targets, 1.0)
    clipped_sum(model, nn.CrossEntropyLoss(), inputs, targets, 1.0)
    labels = F.one_hot(targets, 3).double()
    plain, heavy = (
        clipped_sum(model, nn.BCEWithLogitsLoss(w), inputs, labels, 1e9)[1] for w in (None, weighted.weight)
    )
    assert not torch.equal(plain, heavy)


def test_opacus_finds_the_same_gradients() -> None:
    from opacus.grad_sample import GradSampleModule

    inputs, targets = batch(5)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)).double()
    total, *_ = clipped_sum(model, F.cross_entropy, inputs, targets, 0.5)
    F.cross_entropy(GradSampleModule(model)(inputs), targets).backward()
    rows = [p.grad_sample.reshape(5, -1) for p in model.parameters()]  # type: ignore[attr-defined]
    rows = torch.cat(rows, dim=1)
    slow = (rows * (0.5 / rows.norm(dim=1)).clamp(max=1.0)[:, None]).sum(0)
    torch.testing.assert_close(flat(total.values()), slow, rtol=1e-12, atol=1e-12)


def test_no_example_changes_the_sum_by_more_than_c() -> None:
    """Brute force over what is left out, with one example that is far larger and one that is not finite."""
    model, c, most = net("batch"), 0.3, 0.0
    for seed in range(3):
        inputs, targets = batch(5, seed)
        inputs[0] *= 1e6
        inputs[1] = math.nan
        whole = flat(clipped_sum(model, F.cross_entropy, inputs, targets, c)[0].values())
        changes = []
        for left_out in range(5):
            kept = [i for i in range(5) if i != left_out]
            others = flat(clipped_sum(model, F.cross_entropy, inputs[kept], targets[kept], c)[0].values())
            changes.append(float((whole - others).norm()))
        assert changes[1] < 1e-12
        most = max(most, *changes)
    assert 0.99 * c < most <= c * (1 + 1e-9)


@pytest.mark.parametrize("published", [False, True])
def test_examples_that_add_nothing_are_counted_and_told_on_the_client(
    points: Any, caplog: pytest.LogCaptureFixture, published: bool
) -> None:
    """Their losses are left out of the mean, so that a model that diverges looked healthy."""
    data = points(8, 0)
    data.inputs[3], data.inputs[5] = math.nan, math.inf
    model = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)).double()
    settings = LocalTraining(learning_rate=LearningRate(0.05), batch_size=0, local_steps=3)
    level = RecordLevel(1.0, publishes_metrics=published)
    for count, part in ((6, data), (0, points(8, 0))):
        client = TorchClient(copy.deepcopy(model), part, points(3), settings, partition_id=0, record_level=level)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "flwr"):
            metrics = client.fit([v.numpy() for v in model.state_dict().values()], {"server-round": 1})[2]
        told = [text for text in caplog.messages if "gradients that are not finite" in text]
        assert [text.split(": ")[1].split(" ")[0] for text in told] == ["6"] * bool(count)
        assert metrics.get("examples-not-finite") == (6 if count and published else None)


def test_an_example_without_a_known_target_is_not_counted(points: Any) -> None:
    dp, model = DPSGD(RecordLevel(0.0), 4, 0), nn.Linear(5, 3)
    dp.backward(model, F.cross_entropy, torch.randn(4, 5), torch.tensor([-100, 1, 2, -100]))
    assert dp.not_finite == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_clipping_holds_for_parameters_of_low_precision(dtype: torch.dtype) -> None:
    most, c = 0.0, 0.3
    for seed in range(5):
        torch.manual_seed(seed)
        model, inputs = nn.Linear(5, 3).to(dtype), (4 * torch.randn(1, 5)).to(dtype)
        total, *_ = clipped_sum(model, F.cross_entropy, inputs, torch.tensor([seed % 3]), c)
        most = max(most, float(flat(total.values()).double().norm()))
        DPSGD(RecordLevel(1.0), 1, 1).backward(model, F.cross_entropy, inputs, torch.tensor([0]))
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == dtype
    assert 0.99 * c < most <= c * (1 + 1e-6)


def test_a_giant_example_moves_a_step_by_at_most_its_share(points: Any) -> None:
    data, other = points(8, 0), points(8, 0)
    data.inputs[3] *= 1e9
    other.inputs[3] = math.nan  # adds nothing: as if it were not there
    model = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 3)).double()

    def after(points: Points, z: float) -> Tensor:
        dp = DPSGD(RecordLevel(z, 0.7, noise=SeededNoise(4)), 8, 6)
        return flat(trained(copy.deepcopy(model), points, dp, [], batch_size=6, local_steps=1).values())

    for z in (0.0, 2.0):
        moved = float((after(data, z) - after(other, z)).norm())
        assert 0.5 * (bound := 0.05 * 0.7 / 6) < moved <= bound * (1 + 1e-6)


def test_examples_are_drawn_at_the_rate_and_anew(points: Any) -> None:
    dp = DPSGD(RecordLevel(1.0), 50, 5)
    assert dp.rate == 0.1
    torch.manual_seed(0)
    one = [batch.tolist() for batch in dp.draw(400)]
    torch.manual_seed(0)
    two = [batch.tolist() for batch in dp.draw(400)]
    assert one != two
    assert all(batch == sorted(set(batch)) for batch in one)
    counts = np.bincount([i for batch in one + two for i in batch], minlength=50)
    assert counts.sum() / 800 == pytest.approx(5, abs=0.5)
    assert 35 < counts.min() <= counts.max() < 130  # 80 each, deviation 8.5
    assert np.std([len(batch) for batch in one + two]) == pytest.approx(math.sqrt(4.5), rel=0.15)
    everything = DPSGD(RecordLevel(1.0), 50, 0)
    assert [batch.tolist() for batch in everything.draw(2)] == [list(range(50))] * 2


def test_an_empty_batch_is_a_step_of_noise(points: Any) -> None:
    z, c, model = 3.0, 0.5, nn.Linear(5, 3).double()
    noise = SeededNoise(0)
    noise.uniform = lambda size: np.ones(size)  # type: ignore[method-assign]
    found = trained(model, points(8), DPSGD(RecordLevel(z, c, noise=noise), 8, 2), [], local_steps=1, batch_size=2)
    start = nn.Linear(5, 3).double()
    gradients = []
    dp = DPSGD(RecordLevel(z, c), 8, 2)
    for _ in range(200):
        dp.backward(start, F.cross_entropy, torch.empty(0, 5).double(), torch.empty(0, dtype=torch.int64))
        gradients.append(flat(p.grad for p in start.parameters()))
    values = torch.stack(gradients)
    assert float(values.std()) == pytest.approx(z * c / 2, rel=0.08)
    assert len(values.unique()) == values.numel()
    assert all(torch.isfinite(value).all() for value in found.values())


class Draws:
    """One example; notes what a batch's generator and the default generators draw."""

    def __init__(self) -> None:
        self.drawn: list[float] = []

    def __len__(self) -> int:
        return 8

    def batch(self, positions: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        self.drawn += [float(torch.rand((), generator=generator)), float(torch.rand(())), float(np.random.rand())]
        return torch.ones(len(positions), 5), torch.zeros(len(positions), dtype=torch.int64)


@pytest.mark.parametrize("secret", [True, False])
def test_masks_and_augmentation_do_not_follow_the_seed_of_the_run(secret: bool) -> None:
    """With draws that are known, the removal of one example changes the masks of the others."""

    def draws() -> tuple[list[float], Tensor]:
        data, dp = Draws(), DPSGD(RecordLevel(1.0) if secret else RecordLevel(1.0, noise=SeededNoise(0)), 8, 0)
        trained(nn.Linear(5, 3), data, dp, [], local_steps=2, batch_size=0)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 64), nn.Dropout(0.5))
        _, outputs = dp.backward(model, F.cross_entropy, torch.ones(4, 5), torch.zeros(4, dtype=torch.int64))
        return data.drawn, outputs == 0

    (one, masks), (two, others) = draws(), draws()
    assert len({*one, *two}) == (12 if secret else 6)
    assert torch.equal(masks, others) == (not secret)
    assert len(masks.unique(dim=0)) == 4  # each example has a mask of its own


def test_a_generator_has_more_entropy_than_a_seed() -> None:
    """Torch's generator on the CPU keeps 32 bits of a seed, which can be searched."""

    def values(generator: torch.Generator) -> list[float]:
        return torch.rand(1300, generator=generator).tolist()

    def drawn(last: float) -> list[float]:
        noise = SeededNoise(0)
        words = [float(noise.uniform(1)[0]), *noise.uniform(623), last]
        noise.uniform = lambda size: np.array([words.pop(0) for _ in range(size)])  # type: ignore[method-assign]
        return values(DPSGD(RecordLevel(1.0, noise=noise), 8, 2).generator())

    assert values(torch.Generator().manual_seed(5)) == values(torch.Generator().manual_seed(5 + 2**32))
    assert drawn(0.25) == drawn(0.25) != drawn(0.5)
    assert np.mean(values(DPSGD(RecordLevel(1.0), 8, 2).generator())) == pytest.approx(0.5, abs=0.05)


class OwnNorm(nn.Module):
    """Normalises with the batch, in train mode alone; by the name of its class nobody can tell."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs - inputs.mean(0) if self.training else inputs


class Item(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 3)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.fc(inputs)
        if self.training:
            self.seen.add_(found.detach().mean(0))
        return found


def test_layers_that_mix_the_examples_are_refused_by_name() -> None:
    renorm, _ = replace_norm(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)), "batch-renorm")
    cases = {
        "BatchNorm1d": nn.BatchNorm1d(4),
        "SyncBatchNorm": nn.SyncBatchNorm(4),
        "BatchRenorm": renorm,
        "InstanceNorm1d": nn.InstanceNorm1d(4, track_running_stats=True),
    }
    for name, layer in cases.items():
        model = nn.Sequential(nn.Linear(5, 4), layer)
        with pytest.raises(NormLayerError, match=rf"1.* \({name}\) (normalises|has running)") as error:
            DPSGD(RecordLevel(1.0), 4, 2).backward(model, F.cross_entropy, torch.ones(2, 5), torch.ones(2).long())
        assert "strategy=fixbn with freeze-at=0" in str(error.value)
        assert mixes_examples(model.eval()) == []
    assert mixes_examples(nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False)).eval())
    with pytest.raises(ConfigError, match="change no buffer by their values"):
        clipped_sum(Item(), F.cross_entropy, torch.ones(2, 5), torch.ones(2).long(), 1.0)
    own = nn.Sequential(nn.Linear(5, 4), OwnNorm(), nn.Dropout(0.5), nn.Linear(4, 3))
    data = torch.randn(3, 5), torch.ones(3).long()
    with pytest.raises(NormLayerError, match="output for an example depends on the others"):
        DPSGD(RecordLevel(1.0), 4, 2).backward(own, F.cross_entropy, *data)
    dp = DPSGD(RecordLevel(1.0), 4, 2)
    dp.backward(own, F.cross_entropy, data[0][:1], data[1][:1])  # one example does not tell
    with pytest.raises(NormLayerError, match="output for an example depends on the others"):
        dp.backward(own, F.cross_entropy, *data)
    dp.backward(own.eval(), F.cross_entropy, *data)
    DPSGD(RecordLevel(1.0), 4, 2).backward(nn.Sequential(nn.Dropout(0.5), nn.Linear(5, 3)), F.cross_entropy, *data)
    waves = nn.Sequential(nn.Linear(5, 3))
    waves.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(ConfigError, match="'phase' is complex"):
        DPSGD(RecordLevel(1.0), 4, 2).backward(waves, F.cross_entropy, *data)
    wrapped = nn.DataParallel(nn.Linear(5, 3))
    with pytest.raises(ConfigError, match="DataParallel around it would have no effect"):
        DPSGD(RecordLevel(1.0), 4, 2).backward(wrapped, F.cross_entropy, torch.ones(2, 5), torch.ones(2).long())


class Twice(nn.Module):
    """One BatchNorm layer that is called twice, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
        self.again = self.norm

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.last(self.again(self.norm(self.first(inputs)).relu()))
        return found


def twice() -> nn.Module:
    """Such a model, with gamma, beta and statistics as after some training; float64."""
    torch.manual_seed(0)
    model = Twice().double()
    for value in (*model.norm.parameters(), *model.norm.buffers()):
        value.data = value.data + torch.rand(value.shape).to(value.dtype)
    return model


def test_a_batchnorm_that_is_called_twice_trains_frozen_as_in_ordinary_training(points: Any) -> None:
    """Both calls add to its gradient, which is clipped once for each example; in train mode it is refused by name."""
    data = points(9, 1)
    dp = DPSGD(RecordLevel(0.0, 1e9, noise=SeededNoise(0)), 9, 4)
    found = trained(twice(), data, dp, [FreezeBN(affine=False)])
    batches = [torch.tensor(asked, dtype=torch.int64) for asked in data.asked]
    plain = trained(twice(), data, SameBatches(batches, 4), [FreezeBN(affine=False)])
    for name, value in plain.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: name + text)
    start = twice().state_dict()
    assert not torch.equal(found["norm.weight"], start["norm.weight"])
    assert all(torch.equal(found[f"norm.{leaf}"], start[f"norm.{leaf}"]) for leaf in ("running_mean", "running_var"))
    model, (inputs, targets) = twice().eval(), data.batch(torch.arange(9))
    each = [flat(gradients) for gradients in each_gradient(model, inputs, targets)]
    c = float(torch.stack([one.norm() for one in each]).median())
    slow = torch.stack([one * min(1.0, c / float(one.norm())) for one in each]).sum(0)
    total, *_ = clipped_sum(model, F.cross_entropy, inputs, targets, c)
    torch.testing.assert_close(flat(total.values()), slow, rtol=1e-12, atol=1e-12)
    with pytest.raises(NormLayerError, match=r"norm \(BatchNorm1d\) normalises an example with the others"):
        trained(twice(), data, dp, [])


class Average(nn.Module):
    """Assigns a buffer in every forward pass, in eval mode as well."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 3).double()
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(5, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen = 0.9 * self.seen + 0.1 * inputs.detach().mean(0)
        found: Tensor = self.fc(inputs)
        return found


def test_no_buffer_gets_values_of_an_example(points: Any) -> None:
    for size in (1, 8):
        found = trained(Average(), points(size), DPSGD(RecordLevel(5.0), size, 1), [], local_steps=8, batch_size=1)
        assert not found["seen"].any()


class Changing(FreezeBN):
    def gradients(self, model: nn.Module) -> None:
        model[1].running_mean += 1  # type: ignore[index]


def test_a_client_refuses_to_send_a_buffer_that_has_changed(
    federate: Any, mlp: Any, datasets: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FixBNMethod.client_hooks, "freeze-bn", lambda context: Changing(affine=False))
    with pytest.raises(ConfigError, match=r"buffer '1\.running_mean' has changed in training"):
        federate(FixBN(freeze_at=0), mlp, datasets, rounds=1, local_steps=1, client=clients_with(RecordLevel(1.0)))


def test_opacus_still_lets_batch_renorm_pass() -> None:
    """If this fails, Opacus refuses it, too: our own check stays, and the documentation changes."""
    from opacus.validators import ModuleValidator

    model, _ = replace_norm(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)), "batch-renorm")
    assert ModuleValidator.validate(model, strict=False) == []


@pytest.mark.parametrize(("z", "q", "steps"), [(1.0, 0.05, 100), (4.0, 0.3, 200)])
def test_epsilon_is_that_of_opacus_own_accountants(z: float, q: float, steps: int) -> None:
    from opacus.accountants import PRVAccountant, RDPAccountant

    dp = DPSGD(RecordLevel(z), 1000, round(1000 * q))
    found = dp.epsilon(steps, 1e-5)
    prv, rdp = PRVAccountant(), RDPAccountant()
    prv.history = rdp.history = [(z, q, steps)]
    assert found == pytest.approx(prv.get_epsilon(1e-5), rel=0.03)
    assert found < rdp.get_epsilon(1e-5)
    assert epsilon_of_steps([Steps(dp.noise_for(found, steps, 1e-5), q, steps)], 1e-5) == pytest.approx(found, rel=0.01)
    two = epsilon_of_steps([Steps(z, q, steps - 1), Steps(z, q, 1)], 1e-5)
    assert two == pytest.approx(found, rel=1e-9)


def test_without_secret_noise_no_epsilon_is_stated() -> None:
    assert DPSGD(RecordLevel(0.0), 10, 2).epsilon(1, 1e-5) == math.inf
    assert DPSGD(RecordLevel(1.0, noise=SeededNoise(0)), 10, 2).epsilon(1, 1e-5) == math.inf
    for settings in ({"noise_multiplier": -1.0}, {"noise_multiplier": 1.0, "clipping_norm": 0.0}):
        with pytest.raises(ConfigError, match="must be a finite number"):
            RecordLevel(**settings)
    with pytest.raises(ConfigError, match="num_examples=0"):
        DPSGD(RecordLevel(1.0), 0, 2)


SIZES = (9, 4, 12)


def gn_mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 3)).double()


def clients_with(settings: RecordLevel) -> type[TorchClient]:
    class Client(TorchClient):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs, record_level=settings, data_report=lambda: "its classes")

    return Client


def test_a_client_sends_its_model_and_nothing_else_of_its_data(federate: Any, datasets: Any) -> None:
    strategy, settings = FedAvg(eval_on="personal-own"), RecordLevel(1.0)
    strategy.protect(RecordLevelDP(settings, steps=3, batch_size=4))
    got = federate(strategy, gn_mlp, datasets, rounds=2, local_steps=3, client=clients_with(settings))
    replies = [m for m in got.grid.received if m.metadata.message_type == "train"]
    assert len(replies) == 6
    for message in replies:
        (metrics,) = message.content.metric_records.values()
        assert metrics.keys() == {"num-examples", "steps"}
        assert list(message.content.array_records) == ["arrays"]
    assert "its classes" not in str([m.content for m in got.grid.received if m.metadata.message_type == "query"])
    assert not [m for m in got.grid.sent if m.metadata.message_type == "evaluate"]
    cost = DPSGD(settings, min(SIZES), 4).epsilon(6, 1e-5)
    assert strategy.reports[-1].privacy["epsilon"] == cost == strategy.outcome(2)["privacy"]["epsilon"]
    assert strategy.reports[0].privacy["epsilon"] < cost
    published = FedAvg()
    settings = RecordLevel(1.0, publishes_metrics=True)
    federate(published, gn_mlp, datasets, rounds=1, local_steps=3, client=clients_with(settings))
    assert "train-loss" in published.reports[0].metrics


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (Scaffold(), "client hook '[a-z-]+' uses or sends more of the client's data than DP-SGD protects"),
        (FixBN(freeze_at=0, recalibrate=True), "does not send statistics of its training data"),
        (FedAvg(), r"1 \(BatchNorm1d\) normalises an example with the others"),
        (FixBN(freeze_at=1), r"1 \(BatchNorm1d\) normalises an example with the others"),
    ],
)
def test_a_client_refuses_what_a_server_must_not_ask(
    federate: Any, mlp: Any, datasets: Any, strategy: Strategy, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        federate(strategy, mlp, datasets, rounds=2, local_steps=1, client=clients_with(RecordLevel(1.0)))


def test_a_client_counts_in_steps(federate: Any, datasets: Any) -> None:
    with pytest.raises(ConfigError, match="set local-steps instead of local-epochs"):
        federate(FedAvg(), gn_mlp, datasets, rounds=1, client=clients_with(RecordLevel(1.0)))


class OwnLoop(NumPyClient):
    """A client of another project, with three lines of DP-SGD."""

    def __init__(self, model: nn.Module, data: Points, counts: bool = True) -> None:
        self._model, self._data, self._counts = model, data, counts

    def get_properties(self, config: Any) -> Any:
        return {"num-examples": len(self._data)} if self._counts else {}

    def fit(self, parameters: Any, config: Any) -> Any:
        self._model.load_state_dict(
            {name: torch.tensor(array) for name, array in zip(self._model.state_dict(), parameters, strict=True)}
        )
        optimizer = torch.optim.SGD(self._model.parameters(), lr=0.1)
        dp = DPSGD(RecordLevel(1.0), len(self._data), 4)
        for positions in dp.draw(3):
            dp.backward(self._model, F.cross_entropy, *self._data.batch(positions))
            optimizer.step()
        arrays = [value.numpy() for value in self._model.state_dict().values()]
        return arrays, len(self._data), dp.reply(steps=3)


def own_loops(run_strategy: Any, datasets: Any, countless: Sequence[int] = ()) -> Strategy:
    """Run a round over clients of another project, some of which do not say how many examples they have."""
    strategy = FedAvg()
    strategy.protect(RecordLevelDP(RecordLevel(1.0), steps=3, batch_size=4))

    def client(context: Any) -> OwnLoop:
        own = int(context.node_config["partition-id"])
        return OwnLoop(gn_mlp(), datasets[own], counts=own not in countless)

    run_strategy(strategy, client_app(client), gn_mlp().state_dict(), 3, rounds=1)
    return strategy


def test_a_client_of_another_project_says_that_it_trains_with_dp_sgd(run_strategy: Any, datasets: Any) -> None:
    strategy = own_loops(run_strategy, datasets)
    assert strategy.reports[0].rejected == {}
    assert "as the clients report it" in strategy.protection.guarantee()


def test_a_client_without_a_count_is_left_out(run_strategy: Any, datasets: Any) -> None:
    strategy = own_loops(run_strategy, datasets, countless=[1])
    ((_, why),) = strategy.reports[0].rejected.items()
    assert "(partition 1): record-dp: its number of training examples is not known" in why
    assert strategy.reports[0].participants == [0, 2]
    assert strategy.protection.epsilon() == DPSGD(RecordLevel(1.0), 9, 4).epsilon(3, 1e-5)  # 9 is the smallest left
    with pytest.raises(ConfigError, match="no client says how many training examples it has"):
        own_loops(run_strategy, datasets, countless=[0, 1, 2])


def test_a_client_does_not_send_tests_of_its_data(federate: Any, datasets: Any) -> None:
    """A server may ask for them that does not know of the client's settings."""
    with pytest.raises(ConfigError, match=r"does not send results of tests on its data.*publishes_metrics=True"):
        federate(FedAvg(), gn_mlp, datasets, rounds=1, local_steps=1, client=clients_with(RecordLevel(1.0)))


class ReadsMethod(Method):
    name = "reads"

    def aggregate(self, state: Any, facts: Any, replies: Any, model: Any) -> Any:
        return model, state


class Reads(Strategy):
    method = ReadsMethod


def test_a_foreign_strategy_that_reads_replies_must_say_what_it_takes(federate: Any, datasets: Any) -> None:
    strategy = Reads()
    strategy.protect(RecordLevelDP(RecordLevel(1.0), steps=3, batch_size=4))
    with pytest.raises(ConfigError, match=r"ReadsMethod\.aggregate may read anything of single replies"):
        federate(strategy, gn_mlp, datasets, rounds=1, local_steps=3, client=clients_with(RecordLevel(1.0)))


@pytest.mark.parametrize(
    ("settings", "changed", "words"),
    [
        (None, {}, "does not say that the client trained with DP-SGD. Pass record_level= to its TorchClient"),
        (RecordLevel(0.9), {}, "noise multiplier 0.9, below 1"),
        (RecordLevel(1.0, noise=SeededNoise(0)), {}, "noise multiplier 0, below 1"),
        (RecordLevel(1.0), {"local_steps": 4}, "4 steps, above 3"),
        (RecordLevel(1.0), {"batch_size": 7}, "q = 0.7778, above 0.5"),
    ],
)
def test_a_client_with_less_noise_than_is_counted_is_refused(
    federate: Any, datasets: Any, settings: RecordLevel | None, changed: dict[str, int], words: str
) -> None:
    strategy = FedAvg()
    strategy.protect(RecordLevelDP(RecordLevel(1.0), steps=3, batch_size=2))
    client, training = clients_with(settings) if settings else TorchClient, {"local_steps": 3, "batch_size": 2}
    with pytest.raises(ClientPartError) as error:
        federate(strategy, gn_mlp, datasets, rounds=1, client=client, **{**training, **changed})
    assert words in str(error.value)


def test_a_report_that_cannot_be_read_is_none() -> None:
    protection, run, node = RecordLevelDP(RecordLevel(1.0), 1, 0), FedAvg().run, Node(1, num_examples=3)
    run.reports.append(RoundReport(1, "train"))
    message: Any = Message(RecordDict({"config": ConfigRecord()}), 1, "train")
    protection.open_round(run, [(node, message)], None, 1)  # type: ignore[arg-type]

    def check(text: str) -> None:
        protection.check(run, Reply(node, 1.0, {}, {}, info=ReplyInfo(record_dp=text)), {})

    good = DPSGD(RecordLevel(1.0), 3, 0).reply(steps=1)[RECORD_DP]
    check(good)
    for text in ("", "no JSON", "[]", "{}", good.replace("1.0", "NaN"), "9" * 400, "[" * 9999):
        with pytest.raises(ClientPartError):
            check(text)


@pytest.mark.parametrize(
    "name", ["scaffold", "fedtan", "fedtan2", "feddna", "fedbs", "staticbn", "fbn", "hbn", "standalone"]
)
def test_methods_that_use_more_than_models_are_refused_by_name(
    federate: Any, mlp: Any, datasets: Any, name: str
) -> None:
    strategy = STRATEGIES[name]()
    strategy.protect(RecordLevelDP(RecordLevel(1.0), steps=1, batch_size=4))
    with pytest.raises(ConfigError, match=f"strategy '{name}' with record-dp: "):
        federate(strategy, mlp, datasets, rounds=2, local_steps=1)


DIGITS = {"dataset": "digits", "num-clients": 4, "num-server-rounds": 3, "local-steps": 2}
RECORDS = {**DIGITS, "record-dp": True, "record-dp-noise-multiplier": 1.0}


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_dp_record_is_a_short_form(tmp_path: Path) -> None:
    """With its noise and norm, also where all keys are given, as by Flower; and ``off`` of YAML is no."""
    base = {**DIGITS, "norm": "group"}
    short = {**base, "dp": "record", "dp-noise-multiplier": 2.0, "dp-clipping-norm": 0.3}
    long = {**base, "record-dp": True, "record-dp-noise-multiplier": 2.0, "record-dp-clipping-norm": 0.3}
    assert Config.make(short) == Config.make(long)
    assert Config.make({**Config.make(base).to_mapping(), **short}, complete=True) == Config.make(long)
    assert Config.make({**Config.make(long).to_mapping(), "dp": "record"}, complete=True) == Config.make(long)
    own = {"dp-noise-multiplier": 2.0}
    shared, dropped = Config.make_of_shared({**base, "dp": "record", "dp-clipping-norm": 0.3}, own)
    assert (shared, dropped) == (Config.make(long), {})
    for bad, words in (
        ({"dp-target-epsilon": 3.0}, "record-dp-target-epsilon=3.0 chooses the noise"),
        ({"dp-clipping-norm": 0}, "record-dp-clipping-norm=0: input should be greater than 0"),
        (
            {"record-dp-clipping-norm": 3.0},
            "dp-clipping-norm=0.3 with dp=record and record-dp-clipping-norm=3.0 are both",
        ),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            Config.make({**short, **bad})
        with pytest.raises(ConfigError, match=re.escape(words)):
            Config.make_of_shared(short, bad)
    file = tmp_path / "config.yaml"
    for value in ("off", "'off'"):
        file.write_text(f"dp: {value}")
        assert Config.load(file).dp == "off"
        assert Config.load(None, [f"dp={value}"]).dp == "off"


def test_a_run_states_epsilon_and_withholds_metrics(tmp_path: Path) -> None:
    config = Config.make({**RECORDS, "strategy": "fixbn", "freeze-at": 0, "num-server-rounds": 2, "dp-delta": 1e-4})
    summary = run(config, tmp_path / "run", workers=0)
    lines = lines_of(tmp_path / "run")
    smallest = min(len(part) for part in partitioned_data(config, 4).train)
    cost = [DPSGD(RecordLevel(1.0), smallest, 32).epsilon(steps, 1e-4) for steps in (2, 4)]
    assert [line["epsilon"] for line in lines] == cost
    assert summary["privacy"]["epsilon"] == cost[1]
    assert not any(key.startswith("train-") for line in lines for key in line)
    assert Config.make({**RECORDS, "norm": "group", "record-dp-clipping-norm": 0.3}).record_level() == RecordLevel(
        1.0, 0.3, noise=ANY
    )
    assert "after 2 rounds: what a client sends hides each training example" in summary["privacy"]["guarantee"]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, "norm (BatchNorm1d) normalises an example with the others of its batch"),
        ({"norm": "batch-renorm"}, "(BatchRenorm) normalises an example with the others of its batch"),
        ({"strategy": "fixbn"}, "with freeze-at=0.5 BN normalises with whole batches before it is frozen"),
        ({"norm": "group", "local-steps": 0}, "record-dp=true counts steps: set local-steps"),
        ({"norm": "group", "strategy": "scaffold"}, "strategy 'scaffold' with record-dp=true: the changes of"),
        ({"norm": "group", "sampling": "without-replacement"}, "record-dp draws each example with a fixed probability"),
        ({"norm": "group", "record-dp-target-epsilon": 3.0}, "chooses the noise; leave record-dp-noise-multiplier=1.0"),
        (
            {"norm": "group", "record-dp-noise-multiplier": 0.0, "dp-max-epsilon": 3.0},
            "dp-max-epsilon=3.0 needs record-dp-noise-multiplier or record-dp-target-epsilon",
        ),
        (
            {
                **{"norm": "group", "record-dp-noise-multiplier": 0.0},
                **{"dp-max-epsilon": 3.0, "record-dp-target-epsilon": 4.0},
            },
            "dp-max-epsilon=3.0 is below record-dp-target-epsilon=4.0",
        ),
        ({"norm": "group", "dp": "server"}, "record-dp=true with dp=server: choose one of them"),
        ({"norm": "group", "validation-share": 0.2}, "leave it out, or set dp-metrics=published"),
        ({"strategy": "centralized"}, "record-dp=true: strategy=centralized has no clients"),
        ({"norm": "group", "record-dp": False}, "record-dp-noise-multiplier=1.0 has no effect: it is for record-dp"),
        ({"norm": "group", "record-dp": False, "dp-delta": 1e-6}, "dp-delta=1e-06 has no effect"),
        ({"norm": "group", "standardise": "local"}, "standardise=local brings the mean and std"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_any_work(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(FedBNError) as error:
        check(Config.make({**RECORDS, **keys}))
    assert words in str(error.value)


def test_a_target_chooses_the_noise_for_the_smallest_client_and_all_rounds(tmp_path: Path) -> None:
    keys = {"record-dp-target-epsilon": 2.0, "record-dp-noise-multiplier": 0.0, "norm": "group", "batch-size": 400}
    config = Config.make({**RECORDS, **keys, "num-server-rounds": 2})
    summary = run(config, tmp_path / "run", workers=0)
    smallest = min(len(part) for part in partitioned_data(config, 4).train)
    z = DPSGD(RecordLevel(1.0), smallest, 400).noise_for(2.0, 2 * 2, 1e-5)
    assert summary["privacy"]["noise-multiplier"] == z
    assert 1.98 < summary["privacy"]["epsilon"] == lines_of(tmp_path / "run")[-1]["epsilon"] <= 2
    assert len(lines_of(tmp_path / "run")) == 2


def test_rounds_with_noise_that_can_be_repeated_stay_without_a_guarantee(tmp_path: Path) -> None:
    file, grid = tmp_path / "privacy.jsonl", Mock()
    for settings in (RecordLevel(2.0, noise=SeededNoise(0)), RecordLevel(2.0)):
        counts = RecordLevelDP(settings, 2, 4, file=file)
        counts.begin(FedAvg().methods, "num-examples")
        counts.open_round(state_in(1), [(Node(1, num_examples=9), Message(RecordDict(), 1, "train"))], grid, 1.0)
        assert counts.epsilon() == math.inf
    assert counts.guarantee().startswith("No privacy is guaranteed: there were rounds without noise, or with noise")


def test_a_delta_that_protects_no_example_is_told_once_before_a_client_trains(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counts, grid = RecordLevelDP(RecordLevel(2.0), 2, 4, delta=0.1), Mock()
    counts.begin(FedAvg().methods, "num-examples")
    assert counts.guarantee() == "No round has been released."
    for examples, warns in ((9, False), (10, True), (12, True)):
        node = Node(1, num_examples=examples)
        counts.open_round(state_in(1), [(node, Message(RecordDict(), 1, "train"))], grid, 1.0)
        assert caplog.text.count("dp-delta=0.1 is not below 1 / 10, the number of examples of the largest") == warns


def test_that_a_person_has_several_examples_is_told_with_how_many(tmp_path: Path) -> None:
    rows = [(patient, site) for site in (0, 1) for patient in range(12) for _ in range(1 + (patient == 5))]
    text = "".join(f"{number % 3},{number % 2},{patient},{site}\n" for number, (patient, site) in enumerate(rows))
    (tmp_path / "t.csv").write_text("a,label,patient,site\n" + text)
    keys = {"dataset": f"csv:{tmp_path / 't.csv'}", "label-column": "label", "client-column": "site", "test-share": 0.2}
    keys |= {"group-column": "patient", "standardise": "none", "norm": "layer", "class-names": "0,1"}
    for record_dp in (True, False):
        config = Config.make(keys | ({"record-dp": True, "local-steps": 2} if record_dp else {}))
        split = partitioned_data(config, 2)
        most = np.unique(split.dataset.train.units.numpy(), return_counts=True)[1].max()
        told = f"record-dp: epsilon is that of one example, and up to {most} belong together (group-column)"
        assert any(told in warning for warning in data_report(split, config).warnings) == record_dp
        assert most > 1


def state_in(server_round: int, after: int = 0, phase: str = "train") -> Run:
    made = dataclasses.replace(FedAvg(parts=split_state({})).run, num_rounds=4, after=after, num_able=3, smallest=9)
    made.reports = [RoundReport(number, phase) for number in range(after + 1, server_round + 1)]
    return made


def test_a_resumed_run_with_a_target_chooses_the_noise_for_the_rounds_that_are_left() -> None:
    first, resumed = (RecordLevelDP(RecordLevel(None), 2, 0, target_epsilon=1.0) for _ in range(2))
    assert first.config() == {}
    assert first.admits(state_in(1), 3)
    z = first.noise_multiplier
    assert z is not None
    assert first.config() == {NOISE: z}
    first.releases = [Steps(z, 1.0, 2)] * 3  # one round was repeated, and two are left
    resumed.load_state_dict(first.state_dict())
    assert resumed.admits(state_in(3, 2), 3)
    assert resumed.noise_multiplier is not None
    assert resumed.noise_multiplier > z
    more = [Steps(resumed.noise_multiplier, 1.0, 2)] * 2
    assert 0.98 < epsilon_of_steps([*first.releases, *more], 1e-5) <= 1
    resumed.releases += more
    assert not resumed.admits(state_in(5, 2), 3)
    assert resumed.stops_after(5)


def test_a_budget_for_clients_is_that_of_the_rounds_with_noise_for_them() -> None:
    one, two = (PrivacyAccountant(1e-5, "zero-out", releases=[Release(5.0, 3, 3)] * n).epsilon() for n in (1, 2))
    settings = DPSettings(dp="server", dp_noise_multiplier=5.0, dp_max_epsilon=(one + two) / 2)
    until = ClientLevelDP(settings)
    protection = RecordLevelDP(RecordLevel(1.0, frozen_only=True), 2, 0, until_frozen=until)
    assert protection.admits(state_in(1), 3)
    until.accountant.releases = [Release(5.0, 3, 3)]
    assert protection.admits(state_in(2, phase="frozen"), 3)
    assert not protection.stops_after(2)
    assert not protection.admits(state_in(2), 3)
    assert protection.stops_after(2)


def test_a_client_trains_with_the_noise_that_its_server_chooses_if_it_has_none(federate: Any, datasets: Any) -> None:
    strategy, settings = FedAvg(), RecordLevel(None)
    strategy.protect(RecordLevelDP(settings, 3, 4, target_epsilon=8.0))
    federate(strategy, gn_mlp, datasets, rounds=1, local_steps=3, client=clients_with(settings))
    assert strategy.reports[0].rejected == {}
    assert 7.9 < strategy.protection.epsilon() <= 8
    with pytest.raises(ConfigError, match="its noise multiplier is the server's, which has not sent one"):
        federate(FedAvg(), gn_mlp, datasets, rounds=1, local_steps=3, client=clients_with(settings))
    with pytest.raises(ConfigError, match="noise_multiplier=None"):
        DPSGD(settings, 9, 4)
    for settings, target in ((RecordLevel(1.0), 8.0), (RecordLevel(None), 0.0)):
        with pytest.raises(ConfigError, match="target_epsilon and noise_multiplier=None belong together"):
            RecordLevelDP(settings, 3, 4, target_epsilon=target)


@pytest.mark.parametrize("keys", [{"norm": "group"}, {"strategy": "fixbn", "freeze-at": 1, "dp": "server"}])
def test_a_budget_ends_the_run_before_a_round_that_would_cost_more(tmp_path: Path, keys: dict[str, Any]) -> None:
    dp = {"dp-noise-multiplier": 20.0} if "dp" in keys else {}
    settings = {**RECORDS, **keys, **dp, "num-server-rounds": 9}
    smallest = min(len(part) for part in partitioned_data(Config.make(settings), 4).train)
    models = [Steps(10.0, 1.0, 1)] if dp else []
    steps = Steps(1.0, DPSGD(RecordLevel(1.0), smallest, 32).rate, 2)
    costs = [epsilon_of_steps([*models, *[steps] * n], 1e-5) for n in (2, 3)]
    summary = run(Config.make({**settings, "dp-max-epsilon": sum(costs) / 2}), tmp_path / "run", workers=0)
    assert summary["privacy"]["epsilon"] == costs[0] == lines_of(tmp_path / "run")[-1]["epsilon"]
    assert summary["rounds"] == 2 + len(models)
    with pytest.raises(ConfigError, match=r"dp-max-epsilon=0\.1: round 1 would bring epsilon to"):
        run(Config.make({**settings, "dp-max-epsilon": 0.1}), tmp_path / "none", workers=0)


def both(z: float, records: RecordLevel) -> tuple[FixBN, RecordLevelDP]:
    strategy = FixBN(freeze_at=2)
    until = ClientLevelDP(DPSettings(dp="client", dp_noise_multiplier=z, dp_clipping_norm=0.3))
    protection = RecordLevelDP(records, steps=3, batch_size=4, until_frozen=until)
    strategy.protect(protection)
    return strategy, protection


def test_noise_of_clients_protects_the_rounds_before_the_freeze(federate: Any, mlp: Any, datasets: Any) -> None:
    records = RecordLevel(1.5, frozen_only=True)
    strategy, protection = both(8.0, records)
    got = federate(strategy, mlp, datasets, rounds=4, local_steps=3, client=clients_with(records))
    assert [report.rejected for report in strategy.reports] == [{}] * 4
    of_models, of_steps = [Steps(4.0, 1.0, 2)], [Steps(1.5, 1.0, 6)]
    whole = epsilon_of_steps([*of_models, *of_steps], 1e-5)
    assert strategy.reports[3].privacy["epsilon"] == protection.epsilon() == pytest.approx(whole, rel=1e-12)
    assert strategy.reports[1].privacy["epsilon"] == epsilon_of_steps(of_models, 1e-5)
    assert max(epsilon_of_steps(own, 1e-5) for own in (of_models, of_steps)) < whole
    assert whole < sum(epsilon_of_steps(own, 5e-6) for own in (of_models, of_steps))
    assert "after 4 rounds: the models hide each training example" in protection.guarantee()
    assert "the server is trusted while BN is not frozen" in protection.guarantee()
    one, two, three, four = (state["1.running_var"] for state in got.history[1:])
    assert not np.array_equal(one, two)  # noise of clients
    assert np.array_equal(two, three)
    assert np.array_equal(three, four)
    asked = [message for message in got.grid.sent if message.metadata.message_type == "train"]
    clipped = [CLIP in next(iter(message.content.config_records.values())) for message in asked]
    assert clipped == [True] * 6 + [False] * 6
    assert all(m.keys() == {"num-examples", "steps"} for m in metrics_of(got))


def metrics_of(got: Any) -> list[Any]:
    replies = [message for message in got.grid.received if message.metadata.message_type == "train"]
    return [next(iter(message.content.metric_records.values())) for message in replies]


def test_after_the_freeze_a_step_is_that_of_dp_sgd(federate: Any, mlp: Any, datasets: Any) -> None:
    """Of all steps after T*, none moves the model of a client by more than lr C |batch| / B without noise."""
    records = RecordLevel(0.0, 1e-9, frozen_only=True, noise=SeededNoise(0))
    strategy, protection = both(0.0, records)
    got = federate(strategy, mlp, datasets, rounds=3, local_steps=3, client=clients_with(records))
    moved = [
        max(float(np.abs(after[name] - before[name]).max()) for name in ("0.weight", "1.weight", "3.bias"))
        for before, after in itertools.pairwise(got.history)
    ]
    assert moved[0] > 1e-3 < moved[1]
    assert 0 < moved[2] < 3 * 0.1 * 1e-9 * 12
    assert protection.guarantee() == "No privacy is guaranteed: the noise can be repeated."
    with pytest.raises(ConfigError, match="frozen_only of the clients and until_frozen belong together"):
        RecordLevelDP(RecordLevel(1.0, frozen_only=True), 1, 1)


@pytest.mark.parametrize(
    ("kind", "params", "words"),
    [
        (FixBN, {"momentum_scope": "local"}, "momentum-scope=local carries gradients without noise"),
        (combined(FixBN, MTFL), {}, "affine stay with the clients, which train them without noise"),
    ],
)
def test_nothing_without_noise_is_carried_into_dp_sgd(
    federate: Any, mlp: Any, datasets: Any, kind: type[Strategy], params: dict[str, Any], words: str
) -> None:
    """The server refuses it, and so does a client, whose server may not."""
    settings = RecordLevel(1.0, publishes_metrics=True, frozen_only=True)
    training = {"local_steps": 1, "sgd_momentum": 0.9}
    until = ClientLevelDP(DPSettings(dp="server", dp_noise_multiplier=1.0))
    strategy = kind(freeze_at=1, **params)
    strategy.protect(RecordLevelDP(settings, 1, 4, until_frozen=until))
    with pytest.raises(ConfigError, match=f"with record-dp until BN is frozen: {words}"):
        federate(strategy, mlp, datasets, rounds=2, **training)
    strategy = kind(freeze_at=1, **params)
    federate(strategy, mlp, datasets, rounds=2, client=clients_with(settings), **training)
    refused = [list(report.rejected.values()) for report in strategy.reports]
    assert [len(texts) for texts in refused] == [0, 3]
    assert all("is kept from rounds without noise" in text for text in refused[1])


def test_an_experiment_brings_no_state_that_clients_kept_without_noise() -> None:
    keys = {**RECORDS, "strategy": "fixbn", "freeze-at": 0, "local-part": "mtfl", "eval-on": "global"}
    check(Config.make(keys))
    with pytest.raises(ConfigError, match="series=one: what clients kept in earlier runs"):
        Config.make({**keys, "series": "one"})


def test_hashes_of_kept_state_are_withheld_in_all_rounds() -> None:
    until = ClientLevelDP(DPSettings(dp="server", dp_noise_multiplier=1.0))
    both = RecordLevelDP(RecordLevel(1.0, frozen_only=True), 1, 4, until_frozen=until)
    for both.always_releases in (True, False):
        assert both.hides_clients
    assert until.hides_clients
    assert not RecordLevelDP(RecordLevel(1.0), 1, 4).hides_clients
    of_clients = ClientLevelDP(DPSettings(dp="client", dp_noise_multiplier=1.0))
    assert MaskedSums(MaskSettings(masked_sums=True), of_clients).hides_clients


BOTH = {"strategy": "fixbn", "freeze-at": 1, "dp": "server", "dp-noise-multiplier": 20.0}


def test_a_resumed_run_counts_both_kinds_of_rounds_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Recorder.test

    class Killed(BaseException):
        """No signal: nothing is saved."""

    def killed(self: Any, server_round: int, arrays: Any) -> Any:
        if server_round == 2:
            raise Killed
        return original(self, server_round, arrays)

    config = {**RECORDS, **BOTH, "num-server-rounds": 2, "checkpoint-every": 5}  # the checkpoint is that of round 0
    monkeypatch.setattr(Recorder, "test", killed)
    with pytest.raises(Killed):
        run(Config.make(config), tmp_path / "run", workers=0)
    monkeypatch.setattr(Recorder, "test", original)
    summary = run(Config.make({**config, "resume": True}), tmp_path / "run", workers=0)
    smallest = min(len(part) for part in partitioned_data(Config.make(config), 4).train)
    steps = Steps(1.0, DPSGD(RecordLevel(1.0), smallest, 32).rate, 4)
    assert summary["privacy"]["epsilon"] == epsilon_of_steps([Steps(10.0, 1.0, 2), steps], 1e-5)
    assert "after 4 rounds: the models hide" in summary["privacy"]["guarantee"]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"freeze-at": 0}, "choose one of them. Both are for FixBN with T* above 0"),
        ({"freeze-at": 3}, "with freeze-at=3 BN is never frozen, so there is no DP-SGD"),
        ({"momentum-scope": "local", "sgd-momentum": 0.9}, "momentum-scope=local carries gradients without noise"),
        ({"local-part": "mtfl", "eval-on": "global"}, "affine stay with the clients, which train them"),
        ({"dp-target-epsilon": 3.0}, "dp-target-epsilon=3.0 is for clients"),
        ({"record-dp-target-epsilon": 3.0}, "record-dp-target-epsilon=3.0 chooses one noise, and there are two"),
        ({"dp-neighbours": "replace-one"}, "have no meaning for an example"),
    ],
)
def test_what_does_not_go_together_with_noise_of_clients(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(FedBNError) as error:
        check(Config.make({**RECORDS, **BOTH, **keys}))
    assert words in str(error.value)
