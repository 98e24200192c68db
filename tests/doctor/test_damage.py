"""Damage in the data of a client is named at this client, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression
from torch import Tensor

from fedbn_flwr.doctor.clients import ClientExamples
from fedbn_flwr.doctor.damage import _correlations, _labels_of, _table, damage

ODD = 1  # the damaged client
NAMES = ["age", "crp", "hb", "sex", "dose", "lesion"]


def drawn(seed: int, *, numbers: bool = False) -> list[ClientExamples]:
    """Return clients with related columns, other sizes, scanners and case mixes."""
    draw, clients = np.random.default_rng(seed), []
    for k, size in enumerate((300, 150, 90, 200)):
        labels = (draw.random(size) < (0.2, 0.5, 0.7, 0.4)[k]).astype(int)
        factors = draw.normal(size=(size, 2)) + labels[:, None] * [1, 0.5]
        ways = np.array([[1, 0.3, 0.8, 1, 0.1, 0.6], [0, 1, -0.7, 0.4, 0.9, 0.2]])
        values = factors @ ways + draw.normal(size=(size, 6))
        values[:, 3] = values[:, 3] > 0.3
        values = values * (1, 1.5, 1, 0.7)[k] + 0.5 * k
        targets = torch.tensor(values[:, 0] + labels if numbers else labels)
        clients.append(ClientExamples(str(k), torch.tensor(values), targets, 8))
    return clients


def columns(change: Callable[[Tensor], Tensor]) -> Callable[..., ClientExamples]:
    return lambda one, _: replace(one, inputs=change(one.inputs))


def target(one: ClientExamples, _: ClientExamples) -> ClientExamples:
    inputs = one.inputs.clone()
    inputs[:, 4] = one.targets
    return replace(one, inputs=inputs)


def copies(own: int, of_other: int) -> Callable[..., ClientExamples]:
    """Return a change to some own examples and some of the other client."""

    def change(one: ClientExamples, other: ClientExamples) -> ClientExamples:
        inputs = torch.cat([one.inputs[:own], other.inputs[:of_other]])
        targets = torch.cat([one.targets[:own], other.targets[:of_other]])
        return replace(one, inputs=inputs, targets=targets)

    return change


FAULTS = {
    "copies": (copies(150, 60), "60 of", {ODD, ODD + 1}),
    "copies of few": (copies(0, 4), "4 of", {ODD, ODD + 1}),
    "twice": (
        lambda one, _: replace(
            one,
            inputs=torch.cat([one.inputs, one.inputs[:30]]),
            targets=torch.cat([one.targets, one.targets[:30]]),
        ),
        "30 examples are there twice",
        {ODD},
    ),
    "reversed": (columns(lambda x: x.flip(1)), "Compare their order", {ODD}),
    "rolled": (columns(lambda x: x.roll(1, 1)), "Compare their order", {ODD}),
    "flipped": (
        lambda one, _: replace(one, targets=-one.targets + one.targets.max()),
        "Compare the labels",
        {ODD},
    ),
    "target": (target, "dose: nearly the target", {ODD}),
    "not scaled": (columns(lambda x: x * 30), "Scale the columns", {ODD}),
    "constant": (
        columns(lambda x: x.index_fill(1, torch.tensor([2]), 0.1)),
        "hb: constant here",
        {ODD},
    ),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_each_damage_is_named_at_its_client(fault: str, seed: int) -> None:
    clients = drawn(seed, numbers=seed % 2 == 1)
    said, where = "", set()
    if fault:
        change, said, where = FAULTS[fault]
        clients[ODD] = change(clients[ODD], clients[ODD + 1])
    found = damage(clients, NAMES)
    assert {k for k, texts in enumerate(found) if texts} == where, found
    assert all(said in text for texts in found for text in texts)
    # With two clients, either may have another order or reversed labels.
    if "Compare" in said:
        assert all(damage(clients[:2], NAMES))


def test_rows_that_are_equal_by_chance_and_images_of_one_client_are_not_named() -> None:
    """A table of codes has equal rows everywhere. A copied image is at two clients."""

    def of_clients(inputs: list[Tensor], *names: str) -> list[list[str]]:
        clients = [
            ClientExamples(str(k), x, torch.arange(len(x)) % 2, 8)
            for k, x in enumerate(inputs)
        ]
        return damage(clients, [*names])

    draw = torch.Generator().manual_seed(1)
    codes = [torch.randint(3, (200, 5), generator=draw).double() for _ in range(3)]
    assert of_clients(codes, *NAMES[:5]) == [[], [], []]
    images = [torch.rand(50, 1, 4, 4, generator=draw) for _ in range(3)]
    images[0] = torch.cat([images[0], images[0][:2], images[2][:30]])
    found = of_clients(images, "channel")
    assert found[0] == [
        "30 of 82 examples are also at client 2. Keep each example at one client."
    ]
    assert [len(texts) for texts in found] == [1, 0, 1]


@pytest.mark.parametrize("codes", [False, True])
def test_test_examples_that_are_training_examples_are_named(codes: bool) -> None:
    """In a table of codes, as many test examples are equal by chance."""
    draw = torch.Generator().manual_seed(2)
    rows = [torch.rand(200, 4, generator=draw) for _ in range(3)]
    rows = [(2 * one).round() for one in rows] if codes else rows
    whole = [ClientExamples(str(k), x, x[:, 0] > 0.5, 8) for k, x in enumerate(rows)]
    train = [replace(x, inputs=x.inputs[:150], targets=x.targets[:150]) for x in whole]
    tests = [replace(x, inputs=x.inputs[150:], targets=x.targets[150:]) for x in whole]
    tests[ODD] = replace(tests[ODD], inputs=train[ODD].inputs[:50])
    found = damage(train, NAMES[:4], tests)
    named = {k for k, texts in enumerate(found) if "test examples" in " ".join(texts)}
    assert named == (set() if codes else {ODD})


@pytest.mark.parametrize("numbers", [False, True])
def test_the_correlations_are_those_of_the_libraries(numbers: bool) -> None:
    """Within the classes, they are the correlations of the residuals of a regression."""
    client = drawn(7, numbers=numbers)[0]
    values, labels = client.inputs.double(), _labels_of([client])[0].double()
    found = _table(values, labels)
    known = LinearRegression().fit(labels.numpy(), values.numpy())
    rest = values.numpy() - known.predict(labels.numpy())
    np.testing.assert_allclose(_correlations(found.within), np.corrcoef(rest.T))
    together = np.corrcoef(np.hstack([values, labels]).T)
    np.testing.assert_allclose(_correlations(found.products), together)
