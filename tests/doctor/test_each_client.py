"""One client among many: which one stands out, by which measure, and when none does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fedbn_flwr import diagnose
from tests.support.trained import trained_network

Data = tuple[Tensor, Tensor]


def seed_of(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


@pytest.fixture(scope="module")
def digits() -> Data:
    from sklearn.datasets import load_digits

    inputs, targets = load_digits(return_X_y=True)
    return torch.tensor(inputs, dtype=torch.float32) / 16, torch.tensor(targets)


@pytest.fixture(scope="module")
def trained(digits: Data) -> nn.Module:
    """Two BatchNorm layers, trained on the digits of the sound clients."""
    return trained_network(*digits, epochs=4, batch_size=64)


def split(digits: Data, clients: int, seed: int = 0, alpha: float = 0.0) -> list[Data]:
    """Deal the digits to clients of uneven sizes, with the same classes; or, with
    alpha, by Dirichlet(alpha).
    """
    torch.manual_seed(seed)
    shares = torch.rand(clients).add(0.5).expand(10, clients)
    if alpha:
        shares = torch.distributions.Dirichlet(torch.full((clients,), alpha)).sample(
            (10,)
        )
    owner = torch.multinomial(shares[digits[1]], 1)[:, 0]
    parts = [(digits[0][owner == k], digits[1][owner == k]) for k in range(clients)]
    return [part for part in parts if len(part[1]) > 7]


FAULTS: dict[str, Callable[[Tensor, Tensor, int], Data]] = {
    "permuted pixels": lambda x, y, k: (
        x[:, torch.randperm(64, generator=seed_of(k))],
        y,
    ),
    "reversed pixels": lambda x, y, k: (x.flip(1), y),
    "inputs x 255": lambda x, y, k: (255 * x, y),
    "inputs in other units": lambda x, y, k: (1.8 * x + 32, y),
    "swapped labels": lambda x, y, k: (x, (y + 1 + k % 9) % 10),
    "another class mix": lambda x, y, k: (x[y < 3], y[y < 3]),
}
WANTED = {
    "permuted pixels": "client-inputs",
    "reversed pixels": "client-inputs",
    "inputs x 255": "client-inputs",
    "inputs in other units": "client-inputs",
    "swapped labels": "client-below",
    "another class mix": "client-classes",
}


@pytest.mark.parametrize(
    ("fault", "clients", "odd"),
    [
        *((fault, 5, [3]) for fault in FAULTS),
        *(
            (fault, 20, [1, 3])
            for fault in FAULTS
            if fault not in ("another class mix", "reversed pixels")
        ),
        ("another class mix", 12, [3]),  # of few examples the classes are no evidence
        *(
            (fault, 40, [3])
            for fault in ("permuted pixels", "inputs in other units", "swapped labels")
        ),
    ],
)
def test_a_client_that_differs_from_the_others_is_named(
    fault: str, clients: int, odd: list[int], trained: nn.Module, digits: Data
) -> None:
    parts = split(digits, clients, seed=1)
    for k in odd:
        parts[k] = FAULTS[fault](*parts[k], k)
    found = diagnose(
        trained, {f"site {k}": [part] for k, part in enumerate(parts)}, max_examples=400
    )
    named = [f"site {k}" for k in odd]
    by_id = {finding.id: finding for finding in found.findings}
    wanted = WANTED[fault]
    if fault == "reversed pixels" and wanted not in by_id:
        wanted = "client-below"  # digits look much the same backwards
    assert by_id[wanted].numbers["clients"] == named
    assert by_id[wanted].what.startswith(
        f"Client{'s' if len(odd) > 1 else ''} {', '.join(named)}: "
    )
    about_clients = {
        "client-inputs",
        "client-classes",
        "client-below",
        "feature-shift",
        "label-skew",
    }
    assert {*by_id} & about_clients == {wanted}, "the others are alike"
    assert "label-skew" not in by_id
    assert {*found.measures["each-client"]} == {"mix", "inputs", "below"}


@pytest.mark.parametrize(
    ("clients", "alpha"), [(5, 0.0), (40, 0.0), (5, 0.3), (12, 0.3), (40, 2.0)]
)
def test_no_client_stands_out_where_all_are_alike_or_all_differ(
    clients: int, alpha: float, trained: nn.Module, digits: Data
) -> None:
    parts = split(digits, clients, seed=clients, alpha=alpha)
    found = diagnose(trained, [[part] for part in parts], max_examples=400)
    assert [f.id for f in found.findings if f.id.startswith("client-")] == []


def test_accuracy_of_each_client_stands_in_a_table(
    trained: nn.Module, digits: Data
) -> None:
    parts = split(digits, 3)
    found = diagnose(
        trained, {name: [part] for name, part in zip("abc", parts, strict=True)}
    )
    with torch.no_grad():
        for k, (x, y) in enumerate(parts):
            right = float((trained(x).argmax(1) == y).double().mean())
            assert found.measures["accuracy"][k] == pytest.approx(right)
            assert f"| {'abc'[k]} | {len(y)} | {right:.3f} |" in str(found)
