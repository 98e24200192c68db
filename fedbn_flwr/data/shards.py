"""Splits into shards: the examples sorted by class are cut into equal shards, and clients get whole shards.

``shards``: McMahan et al. 2017, section 3; Li et al. (FedBS) V-A, "balanced label distribution skew": 200 shards of 300
(MNIST) or 250 (CIFAR-10) examples, two for each of 100 clients. ``unbalanced-shards``: FedBS, "unbalanced label
distribution skew": 1200 (MNIST) or 1000 (CIFAR-10) shards of 50 examples, 1 to 30 per client.

Differs from the paper: FedBS does not say how many shards a client draws; here each client draws 1 to 30 uniformly,
given that together they use every shard (all such draws are equally likely). Where the size of a class is no multiple
of the shard size, shards lie across two classes, so that a client of two shards can hold more than two classes.
"""

from __future__ import annotations

import numpy as np

from fedbn_flwr.data.splits import Indices, PartitionRequest
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.seeds import numpy_generator

__all__ = ["split_shards", "split_unbalanced_shards"]

_SHARDS_PER_CLIENT = 2
_MOST_SHARDS_PER_CLIENT = 30
_SHARD_SIZE = 50


def split_shards(request: PartitionRequest) -> list[Indices]:
    """Give each client ``shards_per_client`` random shards (0: two) of ``num_shards`` (0: as many as that uses)."""
    each = request.shards_per_client or _SHARDS_PER_CLIENT
    used = each * request.num_clients
    if request.num_shards not in (0, used):
        raise ConfigError(
            f"partition 'shards': shards-per-client={each} for num-clients={request.num_clients} uses {used} shards, "
            f"num-shards={request.num_shards}. Use num-shards={used} (or 0), or other numbers whose product it is."
        )
    return _dealt(request, [each] * request.num_clients, "shards")


def split_unbalanced_shards(request: PartitionRequest) -> list[Indices]:
    """Deal ``num_shards`` (0: of 50 examples), 1 to ``shards_per_client`` (0: 30) to a client, none left over."""
    clients, most = request.num_clients, request.shards_per_client or _MOST_SHARDS_PER_CLIENT
    shards = request.num_shards or len(request.labels) // _SHARD_SIZE
    if not clients <= shards <= clients * most:
        raise ConfigError(
            f"partition 'unbalanced-shards': {shards} shards cannot be dealt to {clients} clients, 1 to {most} each. "
            f"Use num-shards={clients} to {clients * most}"
            + (f", or {-(-shards // most)} to {shards} clients." if shards else ".")
        )
    rng = numpy_generator(request.seed, "partition", "unbalanced-shards-sizes")
    return _dealt(request, _drawn_sizes(clients, shards, most, rng), "unbalanced-shards")


def _drawn_sizes(clients: int, shards: int, most: int, rng: np.random.Generator) -> list[int]:
    """Return uniform draws from 1..most given their sum: each way to write ``shards`` as such a sum is as likely."""
    # ways[k][s]: the number of ways to write s as a sum of k numbers from 1..most, in exact integers; the difference of
    # neighbours needs two terms only.
    ways = [[1] + [0] * shards]
    for _ in range(clients):
        before, row = ways[-1], [0]
        for total in range(1, shards + 1):
            row.append(row[-1] + before[total - 1] - (before[total - 1 - most] if total > most else 0))
        ways.append(row)
    sizes = []
    for rest in range(clients - 1, -1, -1):
        options = range(1, min(most, shards - rest) + 1)
        # Divided as integers: correctly rounded, also where the numbers are beyond the floating point range.
        chances = [ways[rest][shards - option] / ways[rest + 1][shards] for option in options]
        sizes.append(int(rng.choice(options, p=np.array(chances) / sum(chances))))
        shards -= sizes[-1]
    return sizes


def _dealt(request: PartitionRequest, sizes: list[int], purpose: str) -> list[Indices]:
    """Sort by class, shuffled within a class; cut into equal shards (differing by at most 1); deal out ``sizes``."""
    count = sum(sizes)
    if not 1 <= count <= len(request.labels):
        raise ConfigError(f"num-shards={count}: 1 to {len(request.labels)} allowed, the number of training examples.")
    rng = numpy_generator(request.seed, "partition", purpose)
    shuffled = rng.permutation(len(request.labels)).astype(np.int64)
    by_class = shuffled[np.argsort(request.labels[shuffled], kind="stable")]
    shards = np.array_split(by_class, count)
    hands = np.split(rng.permutation(count), np.cumsum(sizes)[:-1])
    return [np.concatenate([shards[number] for number in hand]) for hand in hands]
