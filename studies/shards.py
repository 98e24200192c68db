"""Splits by shards (equal pieces of the examples sorted by class), for FedBS.

``partition=studies.shards:balanced``: McMahan et al. 2017, section 3; Li et al. (FedBS)
V-A, "balanced label distribution skew": 200 shards of 300 (MNIST) or 250 (CIFAR-10)
examples, two for each of 100 clients. ``studies.shards:unbalanced``: FedBS, "unbalanced
label distribution skew": 1200 (MNIST) or 1000 (CIFAR-10) shards of 50 examples, 1 to 30
per client.

Differs from the paper: FedBS does not define how many shards a client draws. Here each
client draws 1 to 30 uniformly, given that together they use every shard (all such draws
are equally likely). If the shard size does not divide the size of a class, a shard
may have two classes, and a client with two shards more than two classes.
"""

from __future__ import annotations

import numpy as np

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab.data import PartitionRequest
from fedbn_flwr.lab.data.splits import Indices
from fedbn_flwr.training.randomness import numpy_generator

_SHARDS_PER_CLIENT = 2
_MOST_SHARDS_PER_CLIENT = 30
_SHARD_SIZE = 50


def balanced(request: PartitionRequest) -> list[Indices]:
    """Give each client two random shards."""
    sizes = [_SHARDS_PER_CLIENT] * request.num_clients
    return _split_shards(request, sizes, "shards")


def unbalanced(request: PartitionRequest) -> list[Indices]:
    """Give each client 1 to 30 shards."""
    clients, most = request.num_clients, _MOST_SHARDS_PER_CLIENT
    shards = len(request.labels) // _SHARD_SIZE
    if not clients <= shards <= clients * most:
        raise ConfigError(
            f"partition studies.shards:unbalanced: {shards} shards of {_SHARD_SIZE} examples"
            f" cannot be split over {clients} clients, 1 to {most} each. Use another"
            " num-clients."
        )
    rng = numpy_generator(request.seed, "partition", "unbalanced-shards-sizes")
    sizes = _drawn_sizes(clients, shards, most, rng)
    return _split_shards(request, sizes, "unbalanced-shards")


def _drawn_sizes(
    clients: int, shards: int, most: int, rng: np.random.Generator
) -> list[int]:
    """Return uniform draws from 1..most, given that their sum is ``shards``."""
    # ways[k][s] is the number of ways to write s as a sum of k numbers from 1..most, in
    # exact integers. Each entry is the entry to its left, plus one term of the row
    # before and minus another term of that row.
    ways = [[1] + [0] * shards]
    for _ in range(clients):
        before, row = ways[-1], [0]
        for total in range(1, shards + 1):
            number = row[-1] + before[total - 1]
            if total > most:
                number -= before[total - 1 - most]
            row.append(number)
        ways.append(row)
    # Draw the number of each client in turn. The chance of a number is the share of the
    # remaining ways that begin with it. Leave at least one shard for each later client.
    sizes = []
    for later in range(clients - 1, -1, -1):
        options = range(1, min(most, shards - later) + 1)
        # Divide integers, because Python rounds their quotient correctly even if they
        # are too large for a float.
        chances = [
            ways[later][shards - option] / ways[later + 1][shards] for option in options
        ]
        sizes.append(int(rng.choice(options, p=np.array(chances) / sum(chances))))
        shards -= sizes[-1]
    return sizes


def _split_shards(
    request: PartitionRequest, sizes: list[int], purpose: str
) -> list[Indices]:
    """Return each client's examples, from as many random shards as ``sizes`` has.

    Args:
        request: the request.
        sizes: number of shards of each client.
        purpose: name of the random stream.
    """
    count = sum(sizes)
    if count > len(request.labels):
        raise ConfigError(
            f"{sizes[0]} shards for each client need {count} shards, but there are only"
            f" {len(request.labels)} training examples."
        )
    # Shuffle before the stable sort by class, so that each shard has random examples of
    # its class. A shard may also reach into the next classes.
    rng = numpy_generator(request.seed, "partition", purpose)
    shuffled = rng.permutation(len(request.labels)).astype(np.int64)
    by_class = shuffled[np.argsort(request.labels[shuffled], kind="stable")]
    shards = np.array_split(by_class, count)
    chosen = np.split(rng.permutation(count), np.cumsum(sizes)[:-1])
    return [
        np.concatenate([shards[number] for number in numbers]) for numbers in chosen
    ]
