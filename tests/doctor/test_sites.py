"""The table of the clients equals pandas and scipy. Chance names hardly any client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fedbn_flwr import diagnose
from fedbn_flwr.doctor import Training
from fedbn_flwr.doctor.clients import ClientExamples
from fedbn_flwr.doctor.data_rules import feature_shift, label_skew
from fedbn_flwr.doctor.sites import (
    LOOKS,
    SiteRow,
    _compared,
    _Comparison,
    _limit,
    compare_sites,
    inputs_of,
    looks_of,
)
from fedbn_flwr.doctor.thresholds import DEALS

ODD = 1  # the client that differs, if one does
COLUMN = 3  # its shifted column


def drawn(
    draw: np.random.Generator,
    sizes: Sequence[int],
    columns: int = 6,
    classes: int = 3,
    odd: str = "",
) -> list[ClientExamples]:
    """Return clients of one distribution, except for one with other inputs or labels.

    The last class is rare, inputs depend on the class, column 0 has a long tail, and
    column 1 is rarely not 0.
    """
    usual = np.array([0.6, 0.38, 0.02][:classes])
    clients = []
    for k, size in enumerate(sizes):
        shares = usual[::-1] if odd == "labels" and k == ODD else usual
        labels = draw.choice(classes, size, p=shares / shares.sum())
        values = draw.normal(size=(size, columns)) + labels[:, None]
        values[:, 0] = np.exp(values[:, 0])
        values[:, 1] = draw.random(size) < 0.02
        if odd == "inputs" and k == ODD:
            values[:, COLUMN] += values[:, COLUMN].std()
        tensors = torch.tensor(values), torch.tensor(labels)
        clients.append(ClientExamples(str(k), *tensors, 8))
    return clients


def compared(clients: Sequence[ClientExamples], seed: int = 0) -> list[SiteRow]:
    inputs = inputs_of(nn.Identity(), clients)
    return compare_sites(clients, inputs, torch.Generator().manual_seed(seed))


def joined(clients: Sequence[ClientExamples]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the inputs, the labels and the client of all examples."""
    owner = [torch.full((len(one),), k) for k, one in enumerate(clients)]
    inputs = torch.cat([one.inputs for one in clients])
    return inputs, torch.cat([one.targets for one in clients]), torch.cat(owner)


@pytest.mark.parametrize("classes", [1, 3])
def test_the_table_is_that_of_pandas_and_least_squares(classes: int) -> None:
    """At equal classes, a difference is a coefficient of a regression on the client."""
    clients = drawn(np.random.default_rng(0), (40, 90, 7, 25), classes=classes)
    values, labels, owner = (one.numpy() for one in joined(clients))
    frame = pd.DataFrame(values).assign(owner=owner)
    freedom = len(frame) - len(clients)
    by_client = frame.groupby("owner")
    pooled = ((by_client.count() - 1).mul(by_client.var())).sum() / freedom
    shares = pd.crosstab(owner, labels, normalize="index")
    for k, site in enumerate(compared(clients)):
        of_class = np.eye(classes)[labels]
        regressors = np.column_stack([of_class, owner == k])
        found = np.linalg.lstsq(regressors, values, rcond=None)[0][-1]
        expected = found / np.sqrt(pooled.to_numpy())
        np.testing.assert_allclose([*site.inputs.values()], expected, atol=1e-12)

        others = pd.Series(labels[owner != k]).value_counts(normalize=True)
        apart = shares.loc[k] - others.reindex(shares.columns, fill_value=0)
        assert site.label_difference == pytest.approx(apart.abs().sum() / 2)
        assert [*site.shares.values()] == pytest.approx(shares.loc[k].tolist())
        assert site.examples == (owner == k).sum()

        of = apart.idxmax()
        usual, far = shares.loc[k, of] - apart[of], np.abs(expected).argmax()
        words = f"class {of}: {shares.loc[k, of]:.2f} (other clients: {usual:.2f})"
        assert site.labels_in_words == words
        assert site.inputs_in_words == f"column {far} {expected[far]:+z.2f}"
        columns = [*site.inputs][: 3 + k]
        left = replace(site, left_out=("ab", "c"), other_inputs=columns)
        words = words.replace("clients", "clients without a, b")
        assert left.labels_in_words == words
        named = [f"column {j} {expected[j]:+z.2f}" for j in range(3)]
        named += [f"{k} more"] * (k > 0)
        assert left.inputs_in_words == f"{', '.join(named)}; other clients without c"


def test_scores_are_in_units_of_their_deviation_over_the_deals() -> None:
    """Without classes, a score is a correlation. Within classes, deals are drawn."""
    draw = np.random.default_rng(1)
    values, labels, owner = joined(drawn(draw, (40, 90, 7)))
    together = torch.zeros_like(owner)
    hidden = values.new_zeros(values.shape[1])
    scores = _compared(values, hidden, owner, together).scores(owner)
    for k, row in enumerate(scores):
        for j, score in enumerate(row.tolist()):
            r = stats.pearsonr(values[:, j], owner == k).statistic
            assert score == pytest.approx(abs(r) * np.sqrt(len(owner) - 1))

    one = _compared(values, hidden, owner, labels)
    counts = torch.bincount(3 * owner + labels)
    found = []

    def note(dealt: Tensor) -> Tensor:
        assert torch.bincount(3 * dealt + labels).equal(counts), "within their class"
        found.append(one.scores(dealt).square())
        return torch.tensor([float(len(found))])

    for seed in range(10):
        noted = _Comparison(torch.empty(0), torch.empty(0), note, owner, labels)
        limit = _limit(noted, torch.Generator().manual_seed(seed))
        assert limit == pytest.approx(len(found) - 1), "one deal may be larger"
    assert len(found) == 10 * DEALS
    mean = torch.stack(found).mean(0)
    torch.testing.assert_close(mean, torch.ones_like(mean), rtol=0.2, atol=0)


SIZES = [(300, 200, 100, 60, 30), (40, 40, 40), (500, 20, 400, 80), (60, 60)]


@pytest.mark.parametrize(
    ("draws", "least", "most"),
    [(60, 0, 0.05), pytest.param(1000, 0.008, 0.032, marks=pytest.mark.slow)],
)
def test_chance_names_a_client_in_two_per_cent_of_the_federations(
    draws: int, least: float, most: float
) -> None:
    draw, named = np.random.default_rng(2), 0
    for seed in range(draws):
        table = compared(drawn(draw, SIZES[seed % len(SIZES)]), seed)
        named += any(site.other_labels or site.other_inputs for site in table)
    assert least <= named / draws <= most


@pytest.mark.parametrize("sizes", SIZES[:3])
@pytest.mark.parametrize("odd", ["inputs", "labels"])
def test_the_client_that_differs_is_named_with_its_column(
    odd: str, sizes: tuple[int, ...]
) -> None:
    draw, right = np.random.default_rng(3), 0
    wanted = [(False, [])] * len(sizes)
    wanted[ODD] = (True, []) if odd == "labels" else (False, [f"column {COLUMN}"])
    for seed in range(10):
        clients = drawn(draw, np.maximum(sizes, 60), odd=odd)
        table = compared(clients, seed)
        found = [(bool(one.other_labels), [*one.other_inputs]) for one in table]
        right += found == wanted
    assert right >= 9


@pytest.mark.parametrize("at", [(0.0, 1.0, 0.0), (0.0, 1.0, 5.0)])
def test_a_column_that_is_constant_at_every_client_is_named(at) -> None:
    """Its deviation within the clients is 0. A constant column makes no difference.

    The last two clients that are left differ from each other, and both are named.
    """
    clients = drawn(np.random.default_rng(5), (50, 50, 50), classes=1)
    for k, client in enumerate(clients):
        client.inputs[:, 2] = at[k]
        client.inputs[:, 4] = 0.1
    table = compared(clients)
    found = [[*site.other_inputs] for site in table]
    assert found == [["column 2"] * (at.count(value) == 1) for value in at]
    assert {site.inputs["column 4"] for site in table} == {0.0}


class _Windows(nn.Module):
    """Each example has four rows for BatchNorm. The inputs change in place."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.norm = nn.BatchNorm1d(3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.mul_(2).reshape(-1, 3))


def test_the_first_layer_that_is_called_shows_the_inputs() -> None:
    """The unit is what BatchNorm divides by, sqrt(var + eps) of all positions."""
    inputs = torch.randn(2, 30, 12, generator=torch.Generator().manual_seed(0)).double()
    clients = [
        ClientExamples(str(k), x[:, :, None], x[:, 0], 8) for k, x in enumerate(inputs)
    ]
    found = inputs_of(_Windows().double(), clients)
    rows = 2 * inputs.reshape(60, 4, 3)
    torch.testing.assert_close(found.values, rows.mean(1))
    hidden = rows.var(1, correction=0).mean(0) + 1e-5
    torch.testing.assert_close(found.hidden, hidden)
    assert [*found.columns] == [f"channel {j} of layer norm" for j in range(3)]
    assert torch.equal(clients[1].inputs[:, :, 0], inputs[1]), "a copy of the batch"
    left = inputs_of(
        nn.Sequential(nn.BatchNorm1d(12), _Windows()).double(), clients, ["0"]
    )
    assert left.columns[0] == "channel 0 of layer 1.norm"
    plain = inputs_of(nn.Identity(), clients)
    assert plain.columns[11] == "channel 11 of the inputs"
    assert torch.equal(plain.values, inputs.reshape(60, 12))


def loaders_of(cause: str, columns: Sequence[str] = ()) -> list[DataLoader[Any]]:
    """Return three clients whose inputs depend on the class."""
    draw, loaders = torch.Generator().manual_seed(0), []
    for k in range(3):
        classes = torch.randint(3, (200,), generator=draw)
        if cause in ("labels", "both"):
            classes = torch.where(torch.rand(200, generator=draw) < 0.6, k, classes)
        inputs = torch.randn(200, 8, generator=draw) + classes[:, None]
        if cause in ("inputs", "both", "numbers") and k == ODD:
            inputs[:, COLUMN] += 1
        targets = classes + 0.5 if cause == "numbers" else classes
        data = TensorDataset(inputs, targets)
        data.columns = columns  # type: ignore[attr-defined]
        loaders.append(DataLoader(data, 32))
    return loaders


def normed() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3)).eval()


CAUSES = {
    "none": set(),
    "labels": {"label-skew"},
    "inputs": {"feature-shift"},
    "both": {"label-skew", "feature-shift"},
    "numbers": {"feature-shift"},
}


@pytest.mark.parametrize("cause", CAUSES)
def test_other_labels_and_other_inputs_are_told_apart(cause: str) -> None:
    names = [f"value {j}" for j in range(8)]
    found = diagnose(normed(), loaders_of(cause, names))
    by_id = {finding.id: finding for finding in found.findings}
    assert by_id.keys() & {"label-skew", "feature-shift"} == CAUSES[cause]
    if "feature-shift" in by_id:
        numbers = by_id["feature-shift"].numbers
        assert numbers["clients"] == [str(ODD)]
        assert numbers["columns"] == [f"value {COLUMN}"]
    assert len(found.measures["sites"]) == 3
    assert "| client | examples | labels | inputs |" in str(found)
    # Without BatchNorm the table is the same, and no remedy is for BatchNorm.
    other = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 3))
    plain = diagnose(other, loaders_of(cause, names))
    assert plain.measures["sites"] == found.measures["sites"]
    assert [(one.id, one.remedies) for one in plain.findings] == [
        (name, []) for name in by_id if name in CAUSES[cause]
    ]


def test_the_examples_of_a_unit_say_as_much_as_one() -> None:
    clients = drawn(np.random.default_rng(3), (40, 90, 25), odd="labels")
    thrice = []
    for one in clients:
        at = torch.arange(len(one)).repeat(3)
        again = {"inputs": one.inputs[at], "targets": one.targets[at], "units": at}
        thrice.append(replace(one, **again))
    for mine, theirs in zip(compared(clients), compared(thrice), strict=True):
        assert mine == replace(theirs, examples=mine.examples, damage=mine.damage)


def test_protected_clients_have_no_table() -> None:
    protected = Training(protected=True)
    found = diagnose(normed(), loaders_of("both"), training=protected)
    assert "sites" not in found.measures
    assert found.findings == []
    assert "differences between clients" in found.not_measured[0]
    assert "| client |" not in str(found)


def test_inputs_that_are_not_finite_are_no_table() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2), nn.BatchNorm1d(2)).eval()
    with torch.no_grad():
        model[1].bias.fill_(torch.inf)
    data = [(torch.zeros(4, 2, 2), torch.zeros(4).long())]
    lacking = diagnose(model, [data, data]).not_measured
    assert any("inputs of BatchNorm are not finite" in line for line in lacking)


@pytest.mark.parametrize("steps", [0, 1, 49, 50])
def test_the_largest_difference_is_first_and_fedtan_is_for_few_steps(
    steps: int,
) -> None:
    """A shift counts in either direction, and the evidence has three clients."""
    rows = []
    for client, shift in enumerate((1.0, -5.0, 2.0, 3.0)):
        columns = {f"column {client}": shift}
        about = {"inputs": columns, "other_inputs": [*columns], "inputs_in_words": ""}
        about |= {"label_difference": abs(shift), "labels_in_words": ""}
        rows.append(SimpleNamespace(client=str(client), other_labels=1, **about))
    m = SimpleNamespace(sites=rows, training=Training(steps))
    shifted, skewed = feature_shift(m), label_skew(m)
    assert shifted.numbers["columns"] == ["column 1"]
    assert shifted.numbers["clients"] == skewed.numbers["clients"] == [*"1320"]
    assert (len(shifted.evidence), len(skewed.evidence)) == (3, 3 + (steps > 0))
    assert ("fedtan" in skewed.remedies[0].setting) == (0 < steps < 50)


def test_of_several_layers_the_first_one_shows_the_inputs() -> None:
    inputs = torch.randn(30, 2, 5, generator=torch.Generator().manual_seed(0)).double()
    net = nn.Sequential(
        nn.BatchNorm1d(2), nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    )
    found = inputs_of(net.double(), [ClientExamples("0", inputs, inputs[:, 0, 0], 8)])
    assert [*found.columns] == [f"channel {j} of layer 0" for j in range(2)]
    torch.testing.assert_close(found.values, inputs.mean(2))


def test_the_looks_of_images_change_with_their_scale_and_not_with_their_place() -> None:
    draw = torch.Generator().manual_seed(0)
    images = torch.rand(5, 3, 6, 7, generator=draw, dtype=torch.float64)
    looks = looks_of(images)
    assert torch.allclose(looks[:, 0], images.mean((1, 2, 3)))
    scaled = looks * torch.tensor([0.5, 0.5, 0.5, 1])
    scaled[:, 0] += 2
    torch.testing.assert_close(looks_of(0.5 * images + 2), scaled)
    torch.testing.assert_close(looks_of(images.rot90(1, (2, 3)).flip(3)), looks)
    torch.testing.assert_close(looks_of(images[:, [2, 0, 1]]), looks)
    # A sum of neighbours has less sharpness, and grey has no colour.
    assert (looks_of(nn.AvgPool2d(2, 1)(images))[:, 3] < looks[:, 3]).all()
    assert (
        looks_of(images.mean(1, keepdim=True).expand(-1, 3, -1, -1))[:, 2].max() < 1e-9
    )


@pytest.mark.parametrize(("column", "change"), [(0, 0.2), (1, 1.5)])
def test_a_site_with_other_images_is_named_by_what_a_person_sees(
    column: int, change: float
) -> None:
    draw, clients = torch.Generator().manual_seed(1), []
    for k in range(3):
        x = torch.rand(60, 1, 5, 5, generator=draw)
        if k == ODD:
            x = x + change if column == 0 else 0.5 + change * (x - 0.5)
        clients.append(ClientExamples(str(k), x, torch.arange(60) % 2, 8))
    inputs = inputs_of(nn.Flatten(), clients)
    rows = compare_sites(clients, inputs, torch.Generator().manual_seed(0))
    named = {row.client: row.other_inputs[0] for row in rows if row.other_inputs}
    assert named == {str(ODD): LOOKS[column]}
