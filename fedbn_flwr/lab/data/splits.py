"""Splits by class: each takes a request and returns one index vector per client, in any
order.

``dirichlet-equal``: Hsu, Qi & Brown 2019, section 2: each client draws its class mix q
and takes examples that are left in these proportions. Later clients do not use a class
that has no examples left.

Differs from the paper: q ~ Dir(alpha, ..., alpha), so ``partition-alpha`` means the
same as in ``dirichlet``. Hsu draws q ~ Dir(alpha p) with p the class shares: Hsu's
alpha is ours times the number of (equally large) classes.

``dirichlet`` is flwr-datasets' partitioner on a table of labels; its import takes
seconds, so it is in the function. ``iid`` has the parts of the IidPartitioner there,
which makes a table for every client. ``classes``: Wang, Shi & Chang 2023 (FedTAN),
Appendix D.

Differs from the paper: its five tables cover all classes. If classes-per-client is
below ceil(classes / clients), the classes of all clients leave gaps; the examples of
the classes in the gaps are not used.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fedbn_flwr.errors import ConfigError, DataError
from fedbn_flwr.seeds import derive_seed, numpy_generator

if TYPE_CHECKING:
    from flwr_datasets.partitioner import Partitioner

__all__ = [
    "Indices",
    "PartitionRequest",
    "split_classes",
    "split_dirichlet",
    "split_dirichlet_equal",
    "split_iid",
]

Indices = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# flwr-datasets gives up after 10 redraws. With alpha 0.1 and 100 clients few draws give
# every client 10 examples.
_DIRICHLET_SEEDS = 20
_DRAWS_PER_SEED = 11


@dataclass(frozen=True, slots=True)
class PartitionRequest:
    """The arguments of a split, see ``make_partition``; each kind uses those that it
    needs.
    """

    labels: Indices
    num_classes: int
    num_clients: int
    seed: int
    alpha: float
    classes_per_client: int
    min_size: int
    shards_per_client: int = 0
    domain_share: float = 1.0
    groups: Indices | None = None
    group_names: tuple[str, ...] = ()


def split_iid(request: PartitionRequest) -> list[Indices]:
    """Split at random; sizes differ by at most 1, larger ones at lower partition ids."""
    order, _ = _shuffled(request, "iid")
    return np.array_split(order, request.num_clients)


def split_dirichlet(request: PartitionRequest) -> list[Indices]:
    """Split each class in Dirichlet proportions; draw again until every client has
    ``min_size`` examples.
    """
    _check_alpha(request.alpha)
    if request.num_clients * request.min_size > len(request.labels):
        raise DataError(
            f"partition 'dirichlet' needs {request.min_size} examples for each of"
            f" {request.num_clients} clients; there are {len(request.labels)}. Use at"
            f" most {len(request.labels) // request.min_size} clients."
        )
    for attempt in range(_DIRICHLET_SEEDS):
        try:
            return _drawn(request, attempt, request.min_size)
        except ValueError as error:
            # flwr-datasets has no error of its own for it
            if "max number of attempts" not in str(error):
                raise
    raise DataError(
        f"partition 'dirichlet' with partition-alpha={request.alpha} and"
        f" num-clients={request.num_clients}: in each of"
        f" {_DIRICHLET_SEEDS * _DRAWS_PER_SEED} draws some client had fewer than"
        f" {request.min_size} examples. Use a larger partition-alpha or fewer clients."
    )


def _drawn(request: PartitionRequest, attempt: int, min_size: int) -> list[Indices]:
    """Return the split of one seed; ValueError if no draw of flwr-datasets gives every
    client ``min_size``.
    """
    from flwr_datasets.partitioner import DirichletPartitioner

    partitioner = DirichletPartitioner(
        num_partitions=request.num_clients,
        partition_by="label",
        alpha=float(request.alpha),
        min_partition_size=min_size,
        shuffle=False,  # the table is already shuffled
        seed=derive_seed(request.seed, "partition", "dirichlet", attempt),
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The specified min_partition_size")
        return _partitioned(partitioner, *_shuffled(request, "dirichlet-order"))


def split_dirichlet_equal(request: PartitionRequest) -> list[Indices]:
    """Give every client the same number of examples (sizes differ by at most 1), in
    proportions that it draws.
    """
    _check_alpha(request.alpha)
    rng = numpy_generator(request.seed, "partition", "dirichlet-equal")
    order, labels = _shuffled(request, "dirichlet-equal-order")
    pools = [order[labels == label] for label in range(request.num_classes)]
    left = np.array([len(pool) for pool in pools])
    small, larger = divmod(len(order), request.num_clients)
    partition = []
    for client in range(request.num_clients):
        mix = rng.dirichlet(np.full(request.num_classes, float(request.alpha)))
        before, left = left, left - _filled(small + (client < larger), mix, left, rng)
        taken = [
            pool[start:end]
            for pool, start, end in zip(pools, left, before, strict=True)
        ]
        partition.append(np.concatenate(taken))
    return partition


def _filled(size: int, mix: Floats, left: Indices, rng: np.random.Generator) -> Indices:
    """Return how many examples of each class to take: ``size`` draws from ``mix``, at
    most ``left`` of a class.
    """
    taken = np.zeros_like(left)
    while (missing := size - int(taken.sum())) > 0:
        weights = np.where(taken < left, mix, 0.0)
        # no class of the mix has examples left: draw in proportion to the other classes
        if not weights.sum() > 0:
            weights = (left - taken).astype(np.float64)
        taken = np.minimum(
            taken + rng.multinomial(missing, weights / weights.sum()), left
        )
    return taken


def _check_alpha(alpha: float) -> None:
    if not 0 < alpha < float("inf"):
        raise ConfigError(
            f"partition-alpha={alpha}: a number above 0 needed (0.1 skewed, 100 nearly"
            " iid)."
        )


def _shuffled(request: PartitionRequest, purpose: str) -> tuple[Indices, Indices]:
    """Return a seeded order of the examples, and their labels in it; splits cut this
    table in order.
    """
    order = (
        numpy_generator(request.seed, "partition", purpose)
        .permutation(len(request.labels))
        .astype(np.int64)
    )
    return order, request.labels[order]


def _partitioned(
    partitioner: Partitioner, order: Indices, labels: Indices
) -> list[Indices]:
    """Return the parts of a flwr-datasets partitioner on the table (index, label), in
    memory.
    """
    import datasets

    partitioner.dataset = datasets.Dataset.from_dict({"index": order, "label": labels})
    parts = (
        partitioner.load_partition(client)
        for client in range(partitioner.num_partitions)
    )
    return [
        part.with_format("arrow")[:]["index"].to_numpy().astype(np.int64)
        for part in parts
    ]


def split_classes(request: PartitionRequest) -> list[Indices]:
    """Give client i of N the k consecutive classes from floor(i * C / N) on, cyclic.

    The clients of a class get equal parts of it; sizes differ by at most 1, larger ones
    at lower partition ids.
    """
    classes, wanted = request.num_classes, request.classes_per_client
    if not 1 <= wanted <= classes:
        raise ConfigError(
            f"classes-per-client={wanted}: 1 to {classes} allowed, the number of"
            " classes."
        )
    parts: list[list[Indices]] = [[] for _ in range(request.num_clients)]
    starts = [
        client * classes // request.num_clients for client in range(request.num_clients)
    ]
    for label in range(classes):
        holders = [
            parts[client]
            for client, start in enumerate(starts)
            if (label - start) % classes < wanted
        ]
        examples = np.flatnonzero(request.labels == label).astype(np.int64)
        shuffled = numpy_generator(
            request.seed, "partition", "classes", label
        ).permutation(examples)
        if holders:
            for holder, part in zip(
                holders, np.array_split(shuffled, len(holders)), strict=True
            ):
                holder.append(part)
    return [np.concatenate(part) for part in parts]
