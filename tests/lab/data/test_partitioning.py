"""Splits by FedTAN's Appendix D and flwr-datasets, and splits of the test set."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbn_flwr.errors import ConfigError, DataError
from fedbn_flwr.lab.data import PartitionRequest
from fedbn_flwr.lab.data.partitioning import (
    PARTITIONS,
    make_partition,
    partition_counts,
    partition_test_set,
    split_dataset,
)
from fedbn_flwr.lab.data.samples import Dataset, Samples
from fedbn_flwr.training.randomness import derive_seed, numpy_generator
from tests.support.splits import assert_valid, labels_of

MNIST_CLASSES = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]

# Wang, Shi & Chang 2023, Appendix D, tables 1-5: an x for each 1/k in the paper (rows:
# clients, columns: labels 1-10).
APPENDIX_D = {
    2: ["xx........", "..xx......", "....xx....", "......xx..", "........xx"],
    4: ["xxxx......", "..xxxx....", "....xxxx..", "......xxxx", "xx......xx"],
    6: ["xxxxxx....", "..xxxxxx..", "....xxxxxx", "xx....xxxx", "xxxx....xx"],
    8: ["xxxxxxxx..", "..xxxxxxxx", "xx..xxxxxx", "xxxx..xxxx", "xxxxxx..xx"],
    10: ["xxxxxxxxxx"] * 5,
}


EACH_FIVE = labels_of([5] * 10)


@pytest.mark.parametrize(
    "sizes", [[5000] * 10, MNIST_CLASSES], ids=["cifar10", "mnist"]
)
@pytest.mark.parametrize("k", APPENDIX_D)
def test_appendix_d(k: int, sizes: list[int]) -> None:
    """The holders of a class share it evenly.

    With classes of one size, each entry is 1/k of a client's examples.
    """
    labels = labels_of(sizes)
    partition = make_partition("classes", labels, 5, seed=1, classes_per_client=k)
    counts = partition_counts(partition, labels, 10)
    marks = np.array([list(row) for row in APPENDIX_D[k]])
    assert np.array_equal(counts > 0, marks == "x")
    assert_valid(partition, np.arange(sum(sizes)))
    for column, size in zip(counts.T, sizes, strict=True):
        assert column.sum() == size
        assert np.count_nonzero(column) == k // 2
        assert np.ptp(column[column > 0]) <= 1


OWN = ["studies.shards:balanced", "tests.lab.data.test_partitioning:strided"]


def strided(request: PartitionRequest) -> list[np.ndarray]:
    """Return every K-th example, as int32, from a place of the seed."""
    places = np.arange(len(request.labels), dtype=np.int32) - request.seed
    return [
        np.flatnonzero(places % request.num_clients == k)
        for k in range(request.num_clients)
    ]


@pytest.mark.parametrize("name", [*PARTITIONS, *OWN])
def test_a_split_depends_only_on_the_seed_and_uses_every_example(name: str) -> None:
    labels = labels_of([40] * 10)
    groups = np.arange(400) % (4 if name == "natural" else 2)
    given = {"classes_per_client": 5, "groups": groups}
    splits = [make_partition(name, labels, 4, seed=at, **given) for at in (3, 3, 4)]
    first, again, other = ([part.tolist() for part in split] for split in splits)
    assert first == again
    assert (first == other) == (name == "natural")
    assert_valid(splits[0], np.arange(400))
    tests = [partition_test_set(splits[0], labels, labels, seed)[0] for seed in (3, 4)]
    assert not np.array_equal(*tests)


def of_flwr_datasets(
    partitioner, order: np.ndarray, labels: np.ndarray
) -> list[list[int]]:
    """Return the parts by a partitioner of flwr-datasets on examples in this order."""
    import datasets

    partitioner.dataset = datasets.Dataset.from_dict(
        {"index": order, "label": labels[order]}
    )
    return [
        sorted(partitioner.load_partition(client)["index"])
        for client in range(partitioner.num_partitions)
    ]


def test_iid_is_flwr_datasets_partitioner() -> None:
    from flwr_datasets.partitioner import IidPartitioner

    labels = labels_of([20] * 10)
    order = numpy_generator(5, "partition", "iid").permutation(200)
    expected = of_flwr_datasets(IidPartitioner(7), order, labels)
    found = make_partition("iid", labels, 7, seed=5)
    assert [part.tolist() for part in found] == expected


@pytest.mark.parametrize(("min_size", "attempt"), [(0, 0), (15, 0), (20, 1)])
@pytest.mark.filterwarnings("ignore:The specified min_partition_size")
def test_dirichlet_is_flwr_datasets_partitioner(min_size: int, attempt: int) -> None:
    """The redraws are equal, and if a seed fails, the next seed follows."""
    from flwr_datasets.partitioner import DirichletPartitioner

    # Two classes have no examples.
    labels = labels_of([20, 30, 0, 0, 25, 20, 20, 20, 40, 25])
    order = numpy_generator(1, "partition", "dirichlet-order").permutation(200)

    def parts(attempt: int) -> list[list[int]]:
        seed = derive_seed(1, "partition", "dirichlet", attempt)
        return of_flwr_datasets(
            DirichletPartitioner(7, "label", 0.5, min_size, False, False, seed),
            order,
            labels,
        )

    for gives_up in range(attempt):
        with pytest.raises(ValueError, match="max number of attempts"):
            parts(gives_up)
    partition = make_partition(
        "dirichlet", labels, 7, seed=1, alpha=0.5, min_size=min_size
    )
    assert [part.tolist() for part in partition] == parts(attempt)


OF_DOMAINS = labels_of([40, 5, 5])
BALANCED, UNBALANCED = "studies.shards:balanced", "studies.shards:unbalanced"
DOMAINS = {"name": "domain", "labels": 0 * OF_DOMAINS, "groups": OF_DOMAINS}
FEW = {"name": "classes", "num_classes": 2, "classes_per_client": 1}
REFUSED = [
    *(
        (ConfigError, f"partition-alpha={alpha}", {"name": name, "alpha": alpha})
        for name in ("dirichlet", "dirichlet-equal")
        for alpha in (0.0, -1.0, float("nan"), float("inf"))
    ),
    (
        DataError,
        r"220 draws .* 10 examples",
        {"name": "dirichlet", "labels": EACH_FIVE, "num_clients": 5, "alpha": 0.01},
    ),
    (
        DataError,
        "10 .* 6 .* 50.* 5 clients",
        {"name": "dirichlet", "labels": EACH_FIVE, "num_clients": 6},
    ),
    *(
        (ConfigError, f"classes-per-client={k}", {**FEW, "classes_per_client": k})
        for k in (0, 11)
    ),
    (
        DataError,
        "leaves 1 of 4 clients without examples",
        {**FEW, "labels": [0, 0, 0, 1], "num_clients": 4},
    ),
    (DataError, "leaves 1 of 2 clients without", {**FEW, "labels": [0] * 5}),
    (DataError, "num-clients=4.* 3,", {"labels": [0, 1, 2], "num_clients": 4}),
    (DataError, "num-clients=0", {"num_clients": 0}),
    (ConfigError, "'dirichlet'", {"name": "dirichlett"}),
    *(
        (ConfigError, words, {"name": name, "labels": labels_of([n]), "num_clients": k})
        for name, n, k, words in (
            (BALANCED, 100, 60, "120 shards, but there are only 100 "),
            (UNBALANCED, 5000, 3, "100 shards .* 3 clients, 1 to 30 each"),
            (UNBALANCED, 5000, 101, "100 shards .* 101 clients"),
            (UNBALANCED, 49, 2, "0 shards"),
            ("domain", 6, 3, "'domain'.*'digits-domains'"),
            ("natural", 6, 3, "'natural'.*'digits-domains'"),
        )
    ),
    *(
        (error, words, {**DOMAINS, "num_clients": clients, "domain_share": share})
        for clients, share, error, words in (
            (3, 0, ConfigError, "domain-share=0 is not allowed"),
            (3, 1.5, ConfigError, "domain-share=1.5 is not allowed"),
            (3, float("nan"), ConfigError, "domain-share=nan is not allowed"),
            (2, 1.0, ConfigError, "num-clients=2 .* 3 or more"),
            (3, 6, DataError, "domain-share=6: domain 1 .* 5 or fewer"),
            (6, 0.2, DataError, "leaves 1 of the 5 examples of domain 1 for its 2"),
        )
    ),
    (
        ConfigError,
        r"3 .*\(0, 1, 2\), but num-clients=5",
        {**DOMAINS, "name": "natural", "num_clients": 5},
    ),
]


@pytest.mark.parametrize(("error", "words", "arguments"), REFUSED)
def test_an_impossible_split_is_refused_and_names_the_numbers(
    error: type[Exception], words: str, arguments
) -> None:
    usual = {"name": "iid", "labels": labels_of([50] * 10), "num_clients": 2, "seed": 0}
    with pytest.raises(error, match=words):
        make_partition(**{**usual, **arguments})


WRONG = {
    "1 parts": [[0]],
    "an example twice": [[0, 1], [1]],
    "other values": [[0], [4]],
    "other values than": [[0], [-1]],
    "other values than the": [[0.0], [1.0]],
    "leaves 1 of 2": [[0, 1], []],
}


@pytest.mark.parametrize("words", WRONG)
def test_the_parts_of_an_own_split_are_checked(words: str, monkeypatch) -> None:
    """An example at two clients would be a training and a test example."""
    monkeypatch.setattr(f"{__name__}.strided", lambda request: WRONG[words])
    with pytest.raises((ConfigError, DataError), match=words):
        make_partition(OWN[1], np.zeros(4, np.int64), 2, seed=0)


def slow_test_counts(counts: np.ndarray, tests: np.ndarray) -> np.ndarray:
    """Compute largest remainders in rational arithmetic, one client at a time."""
    from fractions import Fraction

    result = np.zeros_like(counts)
    for label in np.flatnonzero(counts.sum(0)):
        available, held = int(tests[label]), counts[:, label].tolist()
        quotas = [Fraction(one * available, sum(held)) for one in held]
        sizes = [int(quota) for quota in quotas]
        order = sorted(range(len(held)), key=lambda at: (sizes[at] - quotas[at], at))
        for client in order[: available - sum(sizes)]:
            sizes[client] += 1
        result[:, label] = sizes
    return result


@settings(max_examples=60)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_the_test_set_is_split_in_proportion_by_largest_remainder(
    clients: int, classes: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, 40)
    owner = rng.integers(-1, clients, 40)  # -1: an example without a client
    partition = [np.flatnonzero(owner == client) for client in range(clients)]
    test_labels = rng.integers(0, classes, int(rng.integers(0, 30)))
    test_parts = partition_test_set(partition, labels, test_labels, seed=1)
    counts = partition_counts(partition, labels, classes)
    expected = slow_test_counts(counts, np.bincount(test_labels, minlength=classes))
    assert np.array_equal(partition_counts(test_parts, test_labels, classes), expected)
    assert_valid(test_parts, np.flatnonzero((counts.sum(0) > 0)[test_labels]))


def test_a_class_that_nobody_trains_goes_to_nobody_in_each_group() -> None:
    """Such a class may be above all classes of training."""
    trained, labels, groups = (
        [np.array([0]), np.array([1])],
        np.zeros(2, int),
        np.arange(2),
    )
    tests, of_tests = np.array([0, 1, 0, 1]), np.array([0, 0, 1, 1])
    found = partition_test_set(trained, labels, tests, 1, groups, of_tests)
    assert [part.tolist() for part in found] == [[0], [2]]


def test_splits_print_nothing(capfd) -> None:
    """The bars and warnings of flwr-datasets are not for the user of a run."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", module="flwr_datasets")
        for name in ("iid", "dirichlet"):
            make_partition(name, np.arange(500) % 10, 20, seed=0, alpha=0.3)
    assert "".join(capfd.readouterr()) == ""


def test_data_of_patients_without_a_training_example_are_refused_like_others() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    empty = Samples(torch.zeros(0, 3), none, units=none)
    with pytest.raises(DataError, match="Use 1 to 0,"):
        split_dataset(Dataset("own", empty, empty, 2, (), ()), "iid", 2, seed=0)
