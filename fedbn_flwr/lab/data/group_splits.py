"""Splits by group, where each client has one domain, city or writer.

``domain``: Li et al. 2021 (FedBN), Zhuang & Lyu 2024 (FedWon): a client's examples are
of one domain, and a domain may have several clients. ``natural``: a client for each
group with training examples.

Ours: client i of N has domain i mod D, so additional clients do not change the domain
of the others. The examples of a domain are drawn at random; their classes do not
matter.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from fedbn_flwr.errors import ConfigError, DataError
from fedbn_flwr.lab.data.splits import Indices, PartitionRequest
from fedbn_flwr.messages.site_names import as_list
from fedbn_flwr.training.randomness import numpy_generator
from fedbn_flwr.training.settings import share_of


def split_domain(request: PartitionRequest) -> list[Indices]:
    """Split a share of each domain evenly over the clients of the domain.

    The sizes of these clients differ by at most 1.

    ``domain_share`` up to 1 is the fraction of each domain's examples (rounded down)
    that is used; a whole number above 1 is the number of examples of each domain.
    """
    # Each client has one domain. Refuse fewer clients than domains, because a domain
    # would then be left out silently.
    parts: list[Indices] = [np.empty(0, np.int64)] * request.num_clients
    members = _members("domain", request)
    if request.num_clients < len(members):
        raise ConfigError(
            f"partition 'domain': num-clients={request.num_clients} is fewer than the"
            f" {len(members)} domains ({_named(request, members)}). Use {len(members)}"
            " or more."
        )
    for domain, (group, examples) in enumerate(members.items()):
        name = _named(request, [group])
        used = _used(request.domain_share, len(examples), name)
        # Client i has domain i mod D, so these are the clients of this domain.
        clients = range(domain, request.num_clients, len(members))
        if used < len(clients):
            raise DataError(
                f"partition 'domain': domain-share={request.domain_share} leaves {used}"
                f" of the {len(examples)} examples of domain {name} for its"
                f" {len(clients)} clients. Use a larger share or fewer clients."
            )
        rng = numpy_generator(request.seed, "partition", "domain", group)
        shuffled = rng.permutation(examples)[:used]
        shares = np.array_split(shuffled, len(clients))
        for client, share in zip(clients, shares, strict=True):
            parts[client] = share
    return parts


def split_natural(request: PartitionRequest) -> list[Indices]:
    """Give each client all examples of one group that has examples."""
    members = _members("natural", request)
    if request.num_clients != len(members):
        without = [
            name for at, name in enumerate(request.group_names) if at not in members
        ]
        # A function that returns the data is called once per client and once per
        # held-out client, so its groups without training examples must be named as
        # held-out clients.
        also = f" with held-out-clients={as_list(without)}" if without else ""
        raise ConfigError(
            f"partition 'natural' makes a client of each of the {len(members)} groups"
            f" with training examples ({_named(request, members)}), but"
            f" num-clients={request.num_clients}. Use num-clients={len(members)}{also}."
        )
    return list(members.values())


def _members(name: str, request: PartitionRequest) -> dict[int, Indices]:
    """Return the examples of each group with examples, by number of the group."""
    if request.groups is None:
        raise ConfigError(
            f"partition {name!r} needs a data set with groups (domains, cities,"
            " writers), such as 'digits-domains'. Use another partition or data set."
        )
    members = {}
    for group in np.unique(request.groups).tolist():
        members[group] = np.flatnonzero(request.groups == group).astype(np.int64)
    return members


def _named(request: PartitionRequest, members: Iterable[int]) -> str:
    """Return a text with the names of the groups, or with numbers without names."""
    if not request.group_names:
        return ", ".join(map(str, members))
    return ", ".join(request.group_names[group] for group in members)


def _used(share: float, count: int, domain: str) -> int:
    """Return how many of a domain's ``count`` examples the split uses.

    Args:
        share: ``domain-share``.
        count: number of training examples of the domain.
        domain: name of the domain, for messages.

    Raises:
        ConfigError: the share is neither a fraction in (0, 1] nor a whole number.
        DataError: the domain has fewer examples than the share.
    """
    if 0 < share <= 1:
        return share_of(share, count)
    if not 1 < share < float("inf") or share != int(share):
        raise ConfigError(
            f"domain-share={share} is not allowed. Use a fraction in (0, 1] of each"
            " domain, or a whole number of examples above 1."
        )
    if share > count:
        raise DataError(
            f"domain-share={share}: domain {domain} has only {count} training examples."
            f" Use {count} or fewer, or a fraction."
        )
    return int(share)
