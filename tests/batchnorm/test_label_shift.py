"""Statistics of new inputs under another class mix: weights, weighted statistics, the guard and its choice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedbn_flwr.batchnorm.label_shift import (
    BALANCED,
    DECLINED,
    MOVED,
    REESTIMATED,
    Guarded,
    balanced_statistics,
    class_weights,
    guarded_statistics,
    mean_shift,
    mix_share,
)
from fedbn_flwr.batchnorm.reestimation import load_statistics, reestimate_statistics
from fedbn_flwr.errors import NormLayerError
from fedbn_flwr.training.tasks import BINARY, CLASSIFICATION, MULTI_LABEL, REGRESSION


def test_weights_give_each_predicted_class_its_share_of_the_training() -> None:
    predicted, shares = torch.tensor([0, 0, 0, 2, 2, 0]), torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    weights = class_weights(predicted, shares)
    assert weights.dtype == torch.float64
    of_class = [float(weights[predicted == c].sum()) for c in range(3)]
    assert of_class == pytest.approx([0.5 / 0.7, 0.0, 0.2 / 0.7], rel=1e-15), "class 1 is not there"
    assert len(set(weights[predicted == 0].tolist())) == 1
    unseen = class_weights(predicted, torch.tensor([1.0, 0.0, 0.0]))
    assert float(unseen[predicted == 2].sum()) == pytest.approx((1 / 6) / (7 / 6)), "a class without a share: one in N"


def test_part_of_a_change_that_is_the_same_for_all_inputs() -> None:
    draw = torch.Generator().manual_seed(0)
    before = torch.randn(40, 3, generator=draw, dtype=torch.float64)
    shift = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    assert mix_share(before, before + shift) == pytest.approx(1, rel=1e-14)
    assert mix_share(before, before) == 0.0
    noise = torch.randn(40, 3, generator=draw, dtype=torch.float64)
    noise -= noise.mean(0)
    assert mix_share(before, before + noise) == pytest.approx(0, abs=1e-30)
    change = (shift + noise).numpy()
    change = change - change.mean(1, keepdims=True)
    expected = (change.mean(0) ** 2).sum() / (change**2).sum(1).mean()
    for of_all_classes in (0.0, 7.0):
        after = before + shift + noise + of_all_classes
        assert mix_share(before, after) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.BatchNorm1d(3), (7, 3)), (nn.BatchNorm1d(3), (7, 3, 4)), (nn.BatchNorm2d(3), (7, 3, 2, 2))],
)
def test_weighted_statistics_of_a_layer_against_loops(
    layer: nn.Module, shape: tuple[int, ...], everything: Any
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 + 1
    weights = torch.rand(7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weights /= weights.sum()
    found = balanced_statistics(nn.Sequential(layer).double(), everything(x), weights, batch_size=0)["0"]
    for c in range(3):
        values = [(float(w), float(v)) for w, row in zip(weights, x[:, c].reshape(7, -1), strict=True) for v in row]
        per = len(values) // 7
        mean = sum(w * v / per for w, v in values)
        assert float(found.mean[c]) == pytest.approx(mean, rel=1e-13)
        assert float(found.m2[c]) == pytest.approx(sum(w * (v - mean) ** 2 / per for w, v in values), rel=1e-13)
    in_batches = balanced_statistics(nn.Sequential(layer).double(), everything(x), weights, batch_size=3)["0"]
    torch.testing.assert_close(in_batches.mean, found.mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(in_batches.m2, found.m2, rtol=1e-12, atol=1e-12)


def test_with_equal_weights_they_are_the_plain_statistics(torchvision_net: Any, points: Any) -> None:
    """In one batch of everything; the model is restored bit for bit, its modes too."""
    model, data = torchvision_net(), points(10, 1, (3, 32, 32))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()
    even = torch.full((10,), 0.1, dtype=torch.float64)
    found = balanced_statistics(model, data, even, batch_size=0)
    plain = reestimate_statistics(model, data, batch_size=0)
    assert found.keys() == plain.keys()
    for path, moments in plain.items():
        torch.testing.assert_close(found[path].mean, moments.mean, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(found[path].m2, moments.m2 / moments.count, rtol=1e-9, atol=1e-10)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert not any("forward" in vars(module) for module in model.modules())


class TwoClasses:
    """Points of two classes, apart by 8 in one direction of five; ``moved`` is added to all, as another device does."""

    def __init__(self, counts: tuple[int, int], moved: float = 0.0, scale: float = 1.0) -> None:
        draw = torch.Generator().manual_seed(sum(counts))
        self.targets = torch.cat([torch.full((n,), c) for c, n in enumerate(counts)])
        x = torch.randn(len(self.targets), 5, generator=draw, dtype=torch.float64)
        x[:, 0] += 8.0 * (self.targets - 0.5)
        self.inputs = x * scale + moved

    def __len__(self) -> int:
        return len(self.targets)

    def batch(self, positions: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        return self.inputs[positions], self.targets[positions]


def classifier(outputs: int = 2) -> nn.Module:
    """BatchNorm on the inputs, then the first of them decides; its statistics are those of equal classes."""
    model = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, outputs)).double()
    with torch.no_grad():
        model[1].weight.zero_()
        model[1].bias.zero_()
        model[1].weight[-1, 0] = 2.0
        if outputs == 2:
            model[1].weight[0, 0] = -2.0
    load_statistics(model, reestimate_statistics(model, TwoClasses((500, 500)), batch_size=0))
    return model.eval()


def correct(model: nn.Module, data: TwoClasses, statistics: Any = None) -> float:
    own = {name: value.clone() for name, value in model.state_dict().items()}
    if statistics:
        load_statistics(model, statistics)
    with torch.no_grad():
        found = model(data.inputs)
    model.load_state_dict(own)
    found = found.argmax(1) if found.shape[1] > 1 else (found[:, 0] > 0).long()
    return float((found == data.targets).double().mean())


@pytest.mark.parametrize(("task", "outputs"), [(CLASSIFICATION, 2), (BINARY, 1)])
def test_another_class_mix_alone_is_not_adapted_to(task: Any, outputs: int) -> None:
    """Statistics of 9 : 1 put a fifth of the inputs into the wrong class; those weighted by predicted class do not."""
    model, data = classifier(outputs), TwoClasses((450, 50))
    found = guarded_statistics(model, data, task, batch_size=100)
    assert found.kept != REESTIMATED
    assert found.shares[REESTIMATED] > 0.7
    plain = correct(model, data)
    kept = found.statistics.get(found.kept)
    assert plain > 0.99
    assert correct(model, data, kept) > 0.99
    assert correct(model, data, found.statistics[BALANCED]) > 0.99
    assert correct(model, data, found.statistics[REESTIMATED]) < 0.85


def test_other_inputs_with_the_same_mix_are_adapted_to() -> None:
    """Another scale keeps the mix; a shift further than any mix goes is adapted to by all inputs alike."""
    model, data = classifier(), TwoClasses((400, 400), scale=0.1)
    before = model.state_dict()["0.running_mean"].clone()
    found = guarded_statistics(model, data, CLASSIFICATION, batch_size=0)
    assert found.kept == BALANCED
    assert max(found.shares.values()) < 0.05
    assert torch.equal(model.state_dict()["0.running_mean"], before)
    far = TwoClasses((400, 400), moved=-12.0)
    found = guarded_statistics(model, far, CLASSIFICATION, batch_size=0)
    assert found.shares[REESTIMATED] > 0.9
    assert found.kept == REESTIMATED
    assert correct(model, far) < 0.55
    assert correct(model, far, found.statistics[REESTIMATED]) > 0.99


@pytest.mark.parametrize("counts", [(1000, 0), (0, 900), (450, 50), (333, 667)])
def test_no_class_mix_moves_the_inputs_further_than_the_limit(counts: tuple[int, int]) -> None:
    """The bound of Cauchy and Schwarz for shares of a third or more, and D itself by hand."""
    model = classifier()
    load_statistics(model, reestimate_statistics(model, TwoClasses((400, 800)), batch_size=0))
    data = TwoClasses(counts)
    mean, variance = (model.state_dict()[f"0.running_{name}"] for name in ("mean", "var"))
    by_hand = sum((data.inputs[:, c].mean() - mean[c]) ** 2 for c in range(5)) / sum(variance)
    found = mean_shift(model, data, 100)
    assert found == pytest.approx(float(by_hand), rel=1e-12)
    assert found <= MOVED


def test_the_training_shares_are_those_that_balance() -> None:
    """A model of 3 : 1 data on data of 1 : 1: weights by its shares give the statistics that it has."""
    model, trained = classifier(), TwoClasses((750, 250))
    load_statistics(model, reestimate_statistics(model, trained, batch_size=0))
    own = model.state_dict()["0.running_mean"][0]
    data = TwoClasses((300, 300))
    by_share, even = (
        guarded_statistics(model, data, CLASSIFICATION, shares, batch_size=0).statistics[BALANCED]["0"].mean[0]
        for shares in (torch.tensor([0.75, 0.25]), None)
    )
    assert abs(float(by_share - own)) < 0.2 < abs(float(even - own))


def test_what_the_guard_cannot_do_is_said(points: Any) -> None:
    """Tasks without a class for each example are not guarded; a layer with several rows for one cannot be weighted."""
    model = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    for task in (REGRESSION, MULTI_LABEL):
        found = guarded_statistics(model, points(8), task, batch_size=0)
        assert (found.kept, found.shares, [*found.statistics]) == (REESTIMATED, {}, [REESTIMATED])
        assert "not guarded" in str(found)
    assert guarded_statistics(model, points(0), CLASSIFICATION, batch_size=0).statistics[REESTIMATED] == {}

    class Pieces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.last = nn.BatchNorm1d(1), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.norm(x.reshape(-1, 1)).reshape(x.shape))

    pieces = Pieces().double()
    with pytest.raises(NormLayerError, match="layer 'norm' gets 40 rows for 8 examples"):
        balanced_statistics(pieces, points(8), torch.full((8,), 0.125), batch_size=0)
    assert [*guarded_statistics(pieces, points(8), CLASSIFICATION, batch_size=0).statistics] == [REESTIMATED]


def test_the_words_of_a_choice() -> None:
    text = str(Guarded(DECLINED, {}, {REESTIMATED: 0.781, BALANCED: 0.5}))
    assert text.startswith("declined (")
    assert "78% with re-estimated statistics, 50% with balanced statistics, limit 25%" in text


@pytest.fixture
def everything() -> Any:
    """``everything(x)``: the inputs as data; the targets do not matter."""

    class All:
        def __init__(self, x: Tensor) -> None:
            self.x = x

        def __len__(self) -> int:
            return len(self.x)

        def batch(self, positions: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
            return self.x[positions], positions

    return All
