"""The doctor names one client among many, and the measure that shows it.

It names none among equal clients.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedbn_flwr import diagnose
from fedbn_flwr.doctor.findings import Diagnosis
from tests.support.fast import fast
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
    """Deal the digits to clients of uneven sizes.

    The classes are equally distributed, or follow Dirichlet(alpha) if alpha is given.
    """
    # NumPy draws the numbers, because torch's draws differ between its versions.
    draw = np.random.default_rng(seed)
    shares = np.tile(draw.uniform(0.5, 1.5, clients), (10, 1))
    if alpha:
        shares = draw.dirichlet([alpha] * clients, 10)
    bounds = (shares / shares.sum(1, keepdims=True)).cumsum(1)[digits[1]]
    at = draw.random((len(bounds), 1))
    owner = torch.from_numpy((at > bounds).sum(1).clip(max=clients - 1))
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
    "examples doubled": lambda x, y, k: (torch.cat([x, x]), torch.cat([y, y])),
    "pixels at their mean": lambda x, y, k: (
        torch.cat([x[:, :24], x[:, 24:32].mean(0).expand(len(x), 8), x[:, 32:]], 1),
        y,
    ),
}
WANTED = {
    "permuted pixels": "client-inputs",
    "reversed pixels": "client-inputs",
    "inputs x 255": "client-inputs",
    "inputs in other units": "client-inputs",
    "swapped labels": "client-below",
    "another class mix": "client-classes",
    "examples doubled": "client-repeats",
    "pixels at their mean": "client-inputs",
}


@pytest.mark.parametrize(
    ("fault", "clients", "odd"),
    # The fast cases have each finding once, and once two clients.
    fast(
        [
            *((fault, 5, [3]) for fault in FAULTS),
            *((fault, 20, [1, 3]) for fault in ("inputs x 255", "examples doubled")),
            ("another class mix", 12, [3]),  # a few examples do not prove a class mix
            *((fault, 40, [3]) for fault in ("permuted pixels", "swapped labels")),
        ],
        *("permuted pixels-5", "swapped labels-5", "another class mix-5"),
        "examples doubled-20",
    ),
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
        wanted = "client-below"  # reversed digits look much the same
    assert by_id[wanted].numbers["clients"] == named
    assert by_id[wanted].what.startswith(
        f"Client{'s' if len(odd) > 1 else ''} {', '.join(named)}: "
    )
    about_clients = {
        "client-inputs",
        "client-classes",
        "client-below",
        "client-repeats",
        "feature-shift",
        "label-skew",
    }
    assert {*by_id} & about_clients == {wanted}, "the others are alike"
    assert "label-skew" not in by_id
    assert {*found.measures["each-client"]} == {
        "mix",
        "inputs",
        "repeated",
        "below",
    }


@pytest.mark.parametrize(
    ("clients", "alpha"), fast([(5, 0.0), (40, 0.0), (12, 0.3), (40, 2.0)], 0, 2)
)
def test_no_client_stands_out_where_all_are_alike_or_all_differ(
    clients: int, alpha: float, trained: nn.Module, digits: Data
) -> None:
    parts = split(digits, clients, seed=clients, alpha=alpha)
    found = diagnose(trained, [[part] for part in parts], max_examples=400)
    assert [f.id for f in found.findings if f.id.startswith("client-")] == []


def skewed_table(name: str) -> Data:
    """Return a hospital's table with long-tailed columns without a unit."""
    if name == "breast cancer":
        from sklearn.datasets import load_breast_cancer

        inputs, targets = load_breast_cancer(return_X_y=True)
        return torch.tensor(inputs, dtype=torch.float32), torch.tensor(targets)
    inputs = torch.randn(600, 12, generator=seed_of(0)).exp()
    return inputs, torch.randint(2, (600,), generator=seed_of(1))


def dealt(table: Data, seed: int) -> list[Data]:
    """Deal the examples at random, and a single example to the last of 25 clients.

    The clients differ only by chance.
    """
    order = torch.randperm(len(table[1]), generator=seed_of(seed))
    shares = [*order[1:].tensor_split(24), order[:1]]
    return [(table[0][own], table[1][own]) for own in shares]


def normalised_first(table: Data) -> nn.Module:
    """Return a model that normalises the raw table by its statistics."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(table[0].shape[1], momentum=1.0)
    norm(table[0])
    return nn.Sequential(norm, nn.Linear(table[0].shape[1], 2)).eval()


@pytest.mark.parametrize("name", ["breast cancer", "log-normal"])
def test_random_splits_of_long_tailed_columns_accuse_nobody(name: str) -> None:
    table = skewed_table(name)
    parts = dealt(table, 0)
    found = diagnose(normalised_first(table), [[part] for part in parts])
    assert [f.id for f in found.findings if f.id.startswith("client-")] == []


@pytest.mark.parametrize("name", fast(["breast cancer", "log-normal"], 1))
@pytest.mark.parametrize(
    "fault",
    fast(
        [
            lambda x: 255 * x,
            lambda x: 1.8 * x + 32,
            lambda x: -x,
            # Only one column of a table with many is changed.
            lambda x: torch.cat([x[:, :1].mean(0).expand(len(x), 1), x[:, 1:]], 1),
            lambda x: torch.cat([10 * x[:, :1], x[:, 1:]], 1),
        ],
        1,
        3,
    ),
    ids=["x 255", "other units", "negated", "a column at its mean", "a column x 10"],
)
def test_a_fault_among_long_tailed_columns_is_the_clients_alone(
    name: str, fault: Callable[[Tensor], Tensor]
) -> None:
    table = skewed_table(name)
    parts = dealt(table, 1)
    parts[3] = fault(parts[3][0]), parts[3][1]
    found = diagnose(normalised_first(table), [[part] for part in parts])
    by_id = {finding.id: finding.numbers for finding in found.findings}
    assert by_id["client-inputs"]["clients"] == ["3"]
    assert [id_ for id_ in by_id if id_.startswith("client-")] == ["client-inputs"]


def test_small_batches_of_one_client_are_named_where_it_has_more_examples(
    trained: nn.Module, digits: Data
) -> None:
    parts = [[part] for part in split(digits, 8)]
    # Client 1 has only three examples; client 5 chooses batches of one example.
    parts[1] = [tuple(values[:3] for values in parts[1][0])]
    parts[5] = [*zip(*(values.split(1) for values in parts[5][0]), strict=True)]
    found = diagnose(trained, parts)
    small = [f.numbers["clients"] for f in found.findings if f.id == "small-batch"]
    assert small == [["5"]]
    found = diagnose(trained, [*parts[:5], *parts[6:]])
    assert "small-batch" not in {f.id for f in found.findings}


def test_names_and_order_of_clients_change_only_names_and_order(
    trained: nn.Module, digits: Data
) -> None:
    """One client has other units, and the inputs of the others differ by design."""
    parts = [(x + 0.1 * k, y) for k, (x, y) in enumerate(split(digits, 8))]
    parts[1] = FAULTS["inputs x 255"](*parts[1], 1)

    def found(order: Sequence[int], word: str = "site") -> Diagnosis:
        return diagnose(trained, {f"{word} {k}": [parts[k]] for k in order})

    one, turned = found(range(8)), found(range(8)[::-1])
    renamed = json.dumps(found(range(8), "clinic").to_json())
    assert renamed.replace("clinic", "site") == json.dumps(one.to_json())
    wanted = {"client-inputs": ["site 1"], "feature-shift": ["site 0", "site 7"]}
    with torch.no_grad():
        right = [float((trained(x).argmax(1) == y).double().mean()) for x, y in parts]
    for diagnosis, step in ((one, 1), (turned, -1)):
        by_id = {
            each.id: each.numbers.get("clients", ()) for each in diagnosis.findings
        }
        assert {id_: sorted(by_id[id_]) for id_ in wanted} == wanted
        assert by_id.keys() == {*wanted, "train-test-mismatch"}
        figures, mixes = diagnosis.measures, one.measures["each-client"]["mix"]
        assert figures["accuracy"] == pytest.approx(right[::step])
        assert figures["each-client"]["mix"]["values"] == mixes["values"][::step]
        assert (
            f"accuracy on its training examples is {right[1]:.3f}"
            in diagnosis.findings[0].evidence[0]
        )
        assert f"| site 2 | {len(parts[2][1])} | {right[2]:.3f} |" in str(diagnosis)
