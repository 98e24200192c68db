"""``class-weights``: the loss of torch's own weights, in training alone; BatchNorm's statistics do not know of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr import TorchClient
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.partitioned.partitioned_data import partitioned_data
from fedbn_flwr.lab.runs.run import run
from fedbn_flwr.training import LearningRate, LocalTraining
from fedbn_flwr.training.losses import IGNORED_PIXEL, balanced_weights, weighted_loss

WEIGHTS = (0.25, 1.0, 3.5)


def gradients(loss: Tensor, outputs: Tensor) -> Tensor:
    return torch.autograd.grad(loss, outputs)[0]


@pytest.mark.parametrize("shape", [(), (5, 4), (3, 4, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_loss_and_its_gradient_are_those_of_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Of classes, of pixels and of voxels, some of which do not count."""
    torch.manual_seed(0)
    outputs = torch.randn(6, 3, *shape, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, 3, (6, *shape))
    targets.flatten()[::4] = IGNORED_PIXEL
    ours = weighted_loss(WEIGHTS, IGNORED_PIXEL)(outputs, targets)
    theirs = F.cross_entropy(outputs, targets, torch.tensor(WEIGHTS, dtype=dtype), ignore_index=IGNORED_PIXEL)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(gradients(ours, outputs), gradients(theirs, outputs))
    none = weighted_loss(WEIGHTS, IGNORED_PIXEL)(outputs, torch.full_like(targets, IGNORED_PIXEL))
    assert none == 0
    assert not gradients(none, outputs).any()


@pytest.mark.parametrize("columns", [(), (1,)])
def test_one_logit_has_the_loss_of_two_outputs_of_which_one_is_0(columns: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    logits = torch.randn(8, *columns, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0.0, 1, 1, 0, 1, torch.nan, 0, 0], dtype=torch.float64).view(8, *columns)
    ours = weighted_loss((1.0, 4.0), -100, single=True)(logits, targets)
    known = ~targets.flatten().isnan()
    both = torch.stack([torch.zeros(8, dtype=torch.float64), logits.flatten()], 1)[known]
    weights = torch.tensor([1.0, 4.0], dtype=torch.float64)
    torch.testing.assert_close(ours, F.cross_entropy(both, targets.flatten()[known].long(), weights))


def test_balanced_weights_are_those_of_scikit_learn() -> None:
    targets = torch.tensor([0, 0, 0, 2, 2, IGNORED_PIXEL, 3])
    known = targets[targets != IGNORED_PIXEL].numpy()
    theirs = compute_class_weight("balanced", classes=np.array([0, 2, 3]), y=known)
    assert balanced_weights(targets, 4, IGNORED_PIXEL) == pytest.approx((theirs[0], 0, *theirs[1:]))
    assert balanced_weights(torch.tensor([0.0, 1, torch.nan, 1]), 2, -100) == pytest.approx((1.5, 0.75))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.double()  # as the points are

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu())


def test_a_client_trains_with_the_weights_and_tests_without_them(points) -> None:
    data = points(12, classes=3)
    settings = LocalTraining(learning_rate=LearningRate(0.1), local_steps=1, batch_size=0)
    loss = weighted_loss(WEIGHTS, -100)
    client = TorchClient(Net(), data, data, settings, partition_id=0, seed=0, training_loss=loss)
    start = client.get_parameters({})
    plain = TorchClient(Net(), data, data, settings, partition_id=0, seed=0)
    arrays, _, metrics = client.fit(start, {"server-round": 1})
    inputs, targets = data.batch(torch.arange(12))
    model = Net()
    torch_loss = F.cross_entropy(model(inputs), targets, torch.tensor(WEIGHTS, dtype=torch.float64))
    torch_loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    assert metrics["train-loss"] == pytest.approx(torch_loss.item())
    of_plain = plain.fit(start, {"server-round": 1})[0]
    for array, (name, expected), unweighted in zip(arrays, model.state_dict().items(), of_plain, strict=True):
        np.testing.assert_allclose(array, expected.numpy(), rtol=1e-5, atol=1e-7)
        if "running" in name or "tracked" in name:
            assert np.array_equal(array, unweighted)  # BatchNorm's statistics know no weights
    assert client.evaluate(start, {}) == plain.evaluate(start, {})


SETTINGS = {"num-clients": 2, "num-server-rounds": 1, "local-steps": 1, "batch-size": 0, "partition": "dirichlet"}


@pytest.mark.parametrize("strategy", ["fedavg", "fedtan", "centralized"])
def test_statistics_of_a_run_do_not_change_and_its_weights_do(tmp_path: Path, strategy: str) -> None:
    states = []
    for weights in ("", "balanced"):
        config = Config.make({**SETTINGS, "strategy": strategy, "class-weights": weights})
        run(config, tmp_path / f"w-{weights}", workers=0)
        states.append(load_file(tmp_path / f"w-{weights}" / "model.safetensors"))
    differ = {name for name, entry in states[0].items() if not torch.equal(entry, states[1][name])}
    assert differ
    assert not any("running" in name or "tracked" in name for name in differ)


def test_balanced_counts_each_clients_own_examples(tmp_path: Path) -> None:
    """With one client it is the run with the numbers of its own counts; with two these would be others."""
    one = {**SETTINGS, "num-clients": 1, "partition": "iid"}
    config = Config.make(one)
    weights = balanced_weights(partitioned_data(config, 1).train_view(0).targets, 10, -100)
    texts = {"balanced": "balanced", "numbers": ",".join(map(repr, weights))}
    digests = {}
    for name, text in texts.items():
        settings = Config.make({**one, "class-weights": text})
        digests[name] = run(settings, tmp_path / name, workers=0)["sha256"]
    assert digests["balanced"] == digests["numbers"]
    both = partitioned_data(Config.make(SETTINGS), 2)
    assert balanced_weights(both.train_view(0).targets, 10, -100) != balanced_weights(
        both.train_view(1).targets, 10, -100
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"class-weights": "1,2"},
        {"class-weights": "1,2,3,4,5,6,7,8,9,-1"},
        {"class-weights": "balance"},
        {"class-weights": "balanced", "record-dp": True, "local-steps": 2, "record-dp-noise-multiplier": 1.0},
    ],
)
def test_weights_that_are_none_or_have_no_effect_are_named(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as raised:
        Config.make({**settings, "model": "mlp", "norm": "group" if "record-dp" in settings else "batch"})
    assert "class-weights" in str(raised.value)
