"""Splits by class that map a request to one index vector per client.

The vectors may be in any order. ``dirichlet-equal``: Hsu, Qi & Brown 2019, section 2:
each client draws its class mix q and takes remaining examples in these proportions.
Later clients do not use a class that has no examples left.

Differs from the paper: q ~ Dir(alpha, ..., alpha), so ``partition-alpha`` means the
same as in ``dirichlet``. Hsu draws q ~ Dir(alpha p) with p the class shares: Hsu's
alpha is ours times the number of (equally large) classes.

``dirichlet`` is flwr-datasets' partitioner on a table of labels. Its import takes
seconds, so it is in the function. ``iid`` gives the same parts as flwr-datasets'
IidPartitioner, without a table for each client. ``classes``: Wang, Shi & Chang 2023
(FedTAN), Appendix D.

Differs from the paper: its five tables cover all classes. If classes-per-client is
below ceil(classes / clients), the clients' classes leave gaps. The examples of the
classes in these gaps are not used.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fedbn_flwr.errors import ConfigError, DataError
from fedbn_flwr.training.randomness import derive_seed, numpy_generator

if TYPE_CHECKING:
    from flwr_datasets.partitioner import Partitioner

Indices = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# flwr-datasets gives up a seed after 10 redraws. With alpha 0.1 and 100 clients, few
# draws give every client 10 examples, so try several seeds.
_DIRICHLET_SEEDS = 20
_DRAWS_PER_SEED = 11


@dataclass(frozen=True, slots=True)
class PartitionRequest:
    """The arguments of all splits, see ``make_partition``.

    A split returns a list with the numbers of the examples of each client, int64. It
    takes random numbers only from ``seed``, so that every process has the same split.
    """

    labels: Indices
    num_classes: int
    num_clients: int
    seed: int
    alpha: float
    classes_per_client: int
    min_size: int
    domain_share: float = 1.0
    groups: Indices | None = None
    group_names: tuple[str, ...] = ()


def split_iid(request: PartitionRequest) -> list[Indices]:
    """Split at random into sizes that differ by at most 1.

    The first partition ids have the larger parts.
    """
    order, _ = _shuffled(request, "iid")
    return np.array_split(order, request.num_clients)


def split_dirichlet(request: PartitionRequest) -> list[Indices]:
    """Split each class in Dirichlet proportions, with ``min_size`` for each client."""
    _check_alpha(request.alpha)
    if request.num_clients * request.min_size > len(request.labels):
        raise DataError(
            f"partition 'dirichlet' needs {request.min_size} examples for each of"
            f" {request.num_clients} clients, but there are {len(request.labels)}. Use"
            f" at most {len(request.labels) // request.min_size} clients."
        )
    for attempt in range(_DIRICHLET_SEEDS):
        try:
            return _drawn(request, attempt, request.min_size)
        except ValueError as error:
            # Only the text identifies this error, because flwr-datasets raises a plain
            # ValueError.
            if "max number of attempts" not in str(error):
                raise
    raise DataError(
        f"partition 'dirichlet' with partition-alpha={request.alpha} and"
        f" num-clients={request.num_clients}: in each of"
        f" {_DIRICHLET_SEEDS * _DRAWS_PER_SEED} draws some client had fewer than"
        f" {request.min_size} examples. Use a larger partition-alpha or fewer clients."
    )


def _drawn(request: PartitionRequest, attempt: int, min_size: int) -> list[Indices]:
    """Return the Dirichlet split with the seed of one attempt.

    Raises:
        ValueError: flwr-datasets found no draw with ``min_size`` for every client.
    """
    # Import here, because the import takes seconds, and other splits do not need it.
    from flwr_datasets.partitioner import DirichletPartitioner

    partitioner = DirichletPartitioner(
        num_partitions=request.num_clients,
        partition_by="label",
        alpha=float(request.alpha),
        min_partition_size=min_size,
        # ``_shuffled`` has already shuffled the examples.
        shuffle=False,
        seed=derive_seed(request.seed, "partition", "dirichlet", attempt),
    )
    # The partitioner warns of each draw that is too uneven, although it then draws
    # again. Hide these warnings.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The specified min_partition_size")
        return _partitioned(partitioner, *_shuffled(request, "dirichlet-order"))


def split_dirichlet_equal(request: PartitionRequest) -> list[Indices]:
    """Give each client its own class mix, in sizes that differ by at most 1."""
    _check_alpha(request.alpha)
    rng = numpy_generator(request.seed, "partition", "dirichlet-equal")
    order, labels = _shuffled(request, "dirichlet-equal-order")
    pools = [order[labels == label] for label in range(request.num_classes)]
    left = np.array([len(pool) for pool in pools])
    small, larger = divmod(len(order), request.num_clients)
    partition = []
    for client in range(request.num_clients):
        # As in Hsu et al., section 2, draw the class mix q of this client, and then its
        # examples by q.
        mix = rng.dirichlet(np.full(request.num_classes, float(request.alpha)))
        taken = _filled(small + (client < larger), mix, left, rng)
        # Take a client's examples from the end of each class. After the subtraction,
        # they begin at position ``left``.
        left = left - taken
        slices = [
            pool[rest : rest + size]
            for pool, rest, size in zip(pools, left, taken, strict=True)
        ]
        partition.append(np.concatenate(slices))
    return partition


def _filled(size: int, mix: Floats, left: Indices, rng: np.random.Generator) -> Indices:
    """Return the number of examples of each class that a client takes.

    Args:
        size: number of examples of the client.
        mix: the client's class proportions q.
        left: number of remaining examples of each class.
        rng: generator of the draws.
    """
    taken = np.zeros_like(left)
    missing = size
    while missing > 0:
        weights = np.where(taken < left, mix, 0.0)
        # If all classes of the mix are used up, draw from the other classes in
        # proportion to their remaining examples.
        if not weights.sum() > 0:
            weights = (left - taken).astype(np.float64)
        # A class gives at most its remaining examples. The loop draws again for the
        # missing examples.
        drawn = rng.multinomial(missing, weights / weights.sum())
        taken = np.minimum(taken + drawn, left)
        missing = size - int(taken.sum())
    return taken


def _check_alpha(alpha: float) -> None:
    if not 0 < alpha < float("inf"):
        raise ConfigError(
            f"partition-alpha={alpha} is not allowed. Use a number above 0 (0.1 is"
            " skewed, 100 nearly iid)."
        )


def _shuffled(request: PartitionRequest, purpose: str) -> tuple[Indices, Indices]:
    """Return a seeded order of the examples, and the labels in this order."""
    rng = numpy_generator(request.seed, "partition", purpose)
    order = rng.permutation(len(request.labels)).astype(np.int64)
    return order, request.labels[order]


def _partitioned(
    partitioner: Partitioner, order: Indices, labels: Indices
) -> list[Indices]:
    """Return the indices in each part of a flwr-datasets partitioner.

    The partitioner gets a table with the columns index (``order``) and label.
    """
    import datasets

    partitioner.dataset = datasets.Dataset.from_dict({"index": order, "label": labels})
    parts = []
    for client in range(partitioner.num_partitions):
        # Read Arrow's columns as arrays, because a conversion to lists of Python's
        # numbers takes seconds.
        table = partitioner.load_partition(client).with_format("arrow")[:]
        parts.append(table["index"].to_numpy().astype(np.int64))
    return parts


def split_classes(request: PartitionRequest) -> list[Indices]:
    """Give client i of N the k consecutive classes from floor(i * C / N) on, cyclic.

    The clients of a class get equal parts of it, in sizes that differ by at most 1; the
    first partition ids have the larger parts.
    """
    classes, wanted = request.num_classes, request.classes_per_client
    if not 1 <= wanted <= classes:
        raise ConfigError(
            f"classes-per-client={wanted} is not allowed. Use 1 to {classes}, the"
            " number of classes."
        )
    # List the clients of each class. By Appendix D, a client has k consecutive classes
    # from its first class on.
    clients_of = [list[int]() for _ in range(classes)]
    for client in range(request.num_clients):
        start = client * classes // request.num_clients
        for label in range(start, start + wanted):
            clients_of[label % classes].append(client)
    # Shuffle each class separately, so that its parts do not depend on the other
    # classes.
    parts = [list[Indices]() for _ in range(request.num_clients)]
    for label, clients in enumerate(clients_of):
        if not clients:
            continue
        examples = np.flatnonzero(request.labels == label).astype(np.int64)
        rng = numpy_generator(request.seed, "partition", "classes", label)
        shares = np.array_split(rng.permutation(examples), len(clients))
        for client, share in zip(clients, shares, strict=True):
            parts[client].append(share)
    return [np.concatenate(part) for part in parts]
