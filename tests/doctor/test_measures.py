"""Measurements of batches, clients, tests and states equal plain oracles."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn import functional
from torch.utils.data import (
    DataLoader,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from fedbn_flwr.batchnorm.reestimation import merge
from fedbn_flwr.doctor.by_batch import Statistics, batch_moments, distance
from fedbn_flwr.doctor.clients import ClientExamples, read_clients
from fedbn_flwr.doctor.data_rules import small_batch
from fedbn_flwr.doctor.diagnose import default_loss, diagnose
from fedbn_flwr.doctor.measured import Measurements
from fedbn_flwr.doctor.mismatch import mismatch
from fedbn_flwr.errors import DataError


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _model(width: int = 3) -> nn.Module:
    """Return a network in float64 and eval mode, with BatchNorm before its layer."""
    return nn.Sequential(nn.BatchNorm1d(width), nn.Linear(width, 2)).double().eval()


def _client(
    inputs: torch.Tensor, classes: torch.Tensor | None = None, size: int = 4
) -> ClientExamples:
    if classes is None:
        classes = torch.zeros(len(inputs)).long()
    return ClientExamples("0", inputs, classes, size)


# Batches.


def test_batch_statistics_against_plain_torch() -> None:
    layers = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(0.9)
    model = nn.Sequential(*layers).double().eval()
    inputs = torch.randn(10, 1, 6, 6, generator=_generator(), dtype=torch.float64)
    seen = model[0](inputs).detach()
    found = batch_moments(model, _client(inputs))["1"]
    assert [m.count for m in found] == [4 * 16, 4 * 16, 2 * 16]
    for moments, batch in zip(found, seen.split(4), strict=True):
        torch.testing.assert_close(moments.mean, batch.mean((0, 2, 3)))
        torch.testing.assert_close(moments.variance, batch.var((0, 2, 3)))
    together = merge(found)
    torch.testing.assert_close(together.variance, seen.var((0, 2, 3)))


def test_the_pass_that_counts_values_is_no_batch_and_a_client_of_one_example_hides_no_other() -> (
    None
):
    inputs = torch.randn(9, 3, generator=_generator()).double()
    found = batch_moments(_model(), _client(inputs))["0"]
    assert [m.count for m in found] == [4, 5]
    assert batch_moments(_model(), _client(inputs[:1])) == {}


def test_the_noise_and_the_distance_of_a_layer_are_those_of_numpy() -> None:
    """The noise is a mean over the clients that have two batches.

    The running statistics are compared with the examples of all clients.
    """
    model = _model()
    inputs = torch.randn(24, 3, generator=_generator()).double() ** 3
    model[0].running_var += 1
    clients = inputs.split([12, 8, 4])
    zeros = torch.zeros(4).long()
    loaders = [[(x, zeros) for x in client.split(4)] for client in clients]
    found = diagnose(model, loaders).measures
    noise = []
    for client in clients[:2]:
        means = np.array([x.mean(0) for x in client.split(4)])
        noise.append(np.mean(np.std(means, 0, ddof=1) / _deviation(client)))
    assert found["batch-noise"] == {"0": pytest.approx(np.mean(noise))}
    deviation = _deviation(inputs)
    assert found["running"]["0"] == pytest.approx(
        {
            "mean": np.mean(np.abs(inputs.mean(0).numpy()) / deviation),
            "variance": np.mean(np.abs(np.log((2 + 1e-5) / deviation**2))),
        }
    )


def _deviation(x: torch.Tensor) -> np.ndarray:
    return np.sqrt(np.var(x.numpy(), 0, ddof=1) + 1e-5)


@pytest.mark.parametrize("noise", [0.09, 0.1])
def test_batches_are_small_at_half_of_the_clients_or_in_a_larger_client(
    noise: float,
) -> None:
    """Batches of 3 and 4 are small only with noise, and batches of 1 and 2 always."""
    for size in range(7):
        whole, more, large = (
            [_client(torch.zeros(n, 1), size=batch)]
            for n, batch in ((size, size), (9, size), (9, 9))
        )
        small = 0 < size <= (4 if noise >= 0.1 else 2)
        for clients, counts in (
            (whole * 2 + large * 2, small),
            (whole + large * 2, False),
            (whole + more + large * 4, small),
        ):
            found = small_batch(Measurements(clients=clients, noise={"0": noise}))
            assert (found is not None) == counts


def test_a_distance_of_means_is_in_deviations_of_the_reference() -> None:
    wide, narrow = (torch.tensor([[m], [v]]) for m, v in ((0, 100), (1, 1)))
    assert distance(Statistics(*wide), Statistics(*narrow), 0).mean == 1


# Training and test.


def test_the_certainty_of_a_mismatch_is_scipys() -> None:
    """The certainty uses the loss, or correctness with an extra zero difference.

    The mode of the model does not count.
    """
    generator = _generator()
    for number in range(20):
        inputs = torch.randn(40, 3, generator=generator).double()
        classes = torch.randint(2, (40,), generator=generator)
        model = _model()
        with torch.no_grad():
            for entry in (model[0].running_mean, *model[1].parameters()):
                entry.normal_(generator=generator)
        client = _client(inputs, classes, len(inputs))
        model.train(bool(number % 2))
        found = mismatch(model, [client], default_loss, generator)
        losses, right = [], []
        for mode in (False, True):
            outputs = model.train(mode)(inputs).detach()
            losses.append(functional.cross_entropy(outputs, classes, reduction="none"))
            right.append((outputs.argmax(1) == classes).double())
        more = torch.cat([right[1] - right[0], torch.zeros(1)])
        differences = losses[0] - losses[1], more
        expected = max(stats.ttest_1samp(d, 0).statistic for d in differences)
        assert found.z == pytest.approx(expected)


# Loaders.


NUMBERS = TensorDataset(torch.arange(20.0)[:, None], torch.arange(20))


@pytest.mark.parametrize("least", [0, 10])
def test_examples_of_a_sorted_loader_are_drawn_from_all_of_it(least: int) -> None:
    """The first examples of a loader sorted by class would look like skew."""
    subset = SubsetRandomSampler([*range(10, 20)]) if least else None
    (seen,) = read_clients([DataLoader(NUMBERS, batch_size=4, sampler=subset)], 8)
    targets = seen.targets.tolist()
    assert seen.inputs.flatten().tolist() == targets
    assert (len({*targets}), seen.batch_size) == (8, 4)
    assert max(targets) > 10
    assert (min(targets) >= 10) == (least == 10)


@pytest.mark.parametrize("form", [list, torch.tensor])
@pytest.mark.parametrize("limit", [8, 40])
def test_an_example_that_a_sampler_repeats_is_used_once(limit: int, form) -> None:
    """Repeated examples add no information.

    Equal clients that balance their classes would seem to differ.
    """
    drawn = form([*WeightedRandomSampler([1.0] * 10 + [0.1] * 10, 40)])
    loader = DataLoader(NUMBERS, batch_size=8, sampler=drawn)
    seen = read_clients([loader], limit)[0]
    assert len({*seen.targets.tolist()}) == len(seen) == min(limit, len(seen))
    assert (seen.batch_size, seen.first_only) == (8, False)


def test_loaders_are_read_up_to_the_limit_and_leave_the_default_generator_alone() -> (
    None
):
    loader = DataLoader(NUMBERS, batch_size=8, shuffle=True)
    before = torch.get_rng_state()
    first, second = (read_clients({"a": loader, "none": []}, 10) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert [(c.name, len(c), c.batch_size) for c in first] == [("a", 10, 8)]
    assert torch.equal(first[0].inputs, second[0].inputs)
    assert not all(a < b for a, b in pairwise(first[0].targets.tolist())), "shuffled"
    whole = read_clients([loader], 20)[0]
    assert (len(whole), whole.first_only) == (20, False)
    with pytest.raises(
        DataError,
        match=r"the loader of client 0 yields dict, but it must yield \(inputs, targets\)",
    ):
        read_clients([[{"x": torch.zeros(1)}]], 10)


class InPlace(nn.Module):
    """A layer that changes its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sub_(7)


def test_a_model_that_changes_its_input_in_place_changes_no_example() -> None:
    inputs = torch.randn(10, 3, generator=_generator(), dtype=torch.float64)
    client = _client(inputs.clone())
    model = nn.Sequential(InPlace(), *_model()).eval()
    first = batch_moments(model, client)["1"][0].mean
    assert torch.equal(client.inputs, inputs)
    assert torch.equal(batch_moments(model, client)["1"][0].mean, first)
