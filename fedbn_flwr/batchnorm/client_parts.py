r"""The BN parts of the clients for inputs of a client that did not train: the nearest one, or a blend. Torch only.

Methods such as FedBN leave BatchNorm's entries with each client. A new client has none. It chooses among those of the
others by statistics of its inputs alone, no label is used.

## Algorithm

$(m, v)$ are the mean and the biased variance of the inputs of a layer's channel on the new data
(``reestimate_statistics``), $(\mu_k, s_k)$ the running statistics of client $k$. The distance of client $k$ is the mean
over all channels of all layers of

$$\frac{(\mu_k - m)^2 + (\sqrt{s_k} - \sqrt{v})^2}{v},$$

the squared 2-Wasserstein distance of two normal distributions, in units of the second one's variance. ``nearest`` takes
the BN part of the client with the smallest distance $d_k$. ``blend`` takes the weights

$$w_k = \frac{1 / d_k}{\sum_j 1 / d_j},$$

and of the clients' parts $\gamma = \sum_k w_k \gamma_k$, $\beta = \sum_k w_k \beta_k$, $\mu = \sum_k w_k \mu_k$ and
$s = \sum_k w_k (s_k + (\mu_k - \mu)^2)$, the statistics of inputs of which the share $w_k$ comes from client $k$.

Source: Segu, Tonioni, Tombari 2020, arXiv:2011.12672 (distances of Gaussian BN statistics, weights by their inverse).

## Differs from the paper

The distance is in units of the new data's variance, so that layers count alike; the paper sums over layers without
units. The paper has the statistics of one image, and mixes the predictions of one classifier for each domain; here the
statistics are those of all new inputs, and the parts are mixed: one model, one forward pass.

## Laws

With one client both are its part. Equal parts blend to themselves. A client at distance 0 is the blend alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

import numpy as np

from fedbn_flwr.batchnorm.averaging import Array, State, weighted_sum
from fedbn_flwr.batchnorm.parts import Part, Parts
from fedbn_flwr.batchnorm.reestimation import Moments

__all__ = ["blend_weights", "blended", "distance"]

_SMALLEST = 1e-12  # of a variance by which a distance is divided

Client = TypeVar("Client", bound=Hashable)


def distance(state: State, moments: Mapping[str, Moments]) -> float:
    """Return how far running statistics are from re-estimated ones, see the module; infinity without such statistics.

    Args:
        state: a state, or a part of it, with ``PATH.running_mean`` and ``PATH.running_var``; others are left out.
        moments: as ``reestimate_statistics`` returns them.
    """
    apart = []
    for path, of_layer in moments.items():
        if f"{path}.running_mean" not in state:
            continue
        mean, var = (np.asarray(state[f"{path}.{name}"], np.float64) for name in ("running_mean", "running_var"))
        variance = np.maximum((of_layer.m2 / of_layer.count).cpu().numpy(), _SMALLEST)
        gaps = (mean - of_layer.mean.cpu().numpy()) ** 2 + (np.sqrt(var) - np.sqrt(variance)) ** 2
        apart.append(gaps / variance)
    return float(np.concatenate(apart).mean()) if apart else float("inf")


def blend_weights(distances: Mapping[Client, float]) -> dict[Client, float]:
    """Return the weight of each client, in proportion to 1 / distance; those at distance 0 share all of it.

    Args:
        distances: of one or more clients, 0 or above and finite.
    """
    smallest = min(distances.values())
    closeness = {k: float(d == 0) if smallest == 0 else smallest / d for k, d in distances.items()}
    total = sum(closeness.values())
    return {client: value / total for client, value in closeness.items()}


def blended(states: Mapping[Client, State], weights: Mapping[Client, float], parts: Parts) -> dict[str, Array]:
    """Return gamma, beta and running statistics of the clients' blend, in float64; counters are left out.

    Args:
        states: of each client at least the BN entries that it keeps, all the same names.
        weights: of each client; their sum is 1.
        parts: the split of the model's state.
    """
    shares = [weights[client] for client in states]
    arrays = {name: [np.asarray(state[name]) for state in states.values()] for name in next(iter(states.values()))}
    averaged = {Part.AFFINE, Part.STATISTICS}
    found = {name: weighted_sum(of, shares) for name, of in arrays.items() if parts.part_of.get(name) in averaged}
    for mean, var in parts.moments():
        if mean in found and var in found:
            spread = [(np.asarray(one, np.float64) - found[mean]) ** 2 for one in arrays[mean]]
            found[var] = found[var] + weighted_sum(spread, shares)
    return found
