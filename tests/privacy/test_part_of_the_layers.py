"""``layers`` under differential privacy.

A BatchNorm layer outside of ``layers`` is shared like any other entry, with noise. The
network is from torchvision, in float64.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest

from fedbn_flwr.batchnorm.parts import Part, Parts, split_state
from fedbn_flwr.privacy import DPWrapper
from fedbn_flwr.privacy.coordinates import Coordinates
from fedbn_flwr.strategies import MTFL, FedBN, FixBN, SiloBN
from tests.support.fast import fast
from tests.support.written_out import network, numbers

LAYERS = "features.norm0,*block1,features.transition1.*"
METHODS = {
    "fedbn": FedBN,
    "silobn": SiloBN,
    "mtfl": MTFL,
    "fixbn": functools.partial(FixBN, freeze_at=1),
}
LOCAL = {
    "fedbn": [Part.AFFINE, Part.STATISTICS, Part.COUNTERS],
    "silobn": [Part.STATISTICS, Part.COUNTERS],
    "mtfl": [Part.AFFINE],
    "fixbn": [],
}


def chosen() -> Parts:
    return split_state(network(), LAYERS)


@pytest.mark.parametrize(
    ("method", "where"),
    [
        *fast([("fedbn", "server"), ("silobn", "client")]),
        *(("mtfl", "client"), ("fixbn", "server")),
    ],
)
def test_the_other_layers_have_the_stated_noise_and_the_chosen_ones_none(
    federate, points, method: str, where
) -> None:
    """The noise is measured in the coordinates of an update.

    The groups are weights, gamma and beta, and means. Shared counters count the round.
    """
    clip, noise, clients = 1e6, 1e-8, 3
    data = [points(6, client, (3, 16, 16)) for client in range(clients)]
    found = []
    for protected in (False, True):
        strategy = METHODS[method](layers=LAYERS)
        if protected:
            DPWrapper(strategy, noise, clip, where=where)
        found.append(federate(strategy, network, data, rounds=1, rate=0.01))
        assert strategy.reports[0].rejected == {}
    plain, ours = found
    parts = chosen()
    own = set(parts.select(LOCAL[method]))
    before = {n: a for n, a in numbers(network()).items() if n not in own}
    for name in own:
        assert np.array_equal(ours.state[name], ours.history[0][name]), name
        for client in range(clients):
            mine, theirs = (run.local_state(client)[name] for run in found)
            assert np.array_equal(mine, theirs), name
    for name in {*parts.whole.counters} - own:
        assert ours.state[name] == before[name] + 1, name
    coordinates = Coordinates(before, parts)
    one, two = coordinates.update(plain.state), coordinates.update(ours.state)
    others = [leaf for layer in parts.averaged for leaf in layer.entries.values()]
    groups = {
        "weights": [name for name in one if name in parts.whole.rest],
        "affine": [name for name in others if name in parts.whole.affine],
        "means": [name for name in others if name.endswith("running_mean")],
    }
    for group, names in groups.items():
        draws = np.concatenate([(two[name] - one[name]).ravel() for name in names])
        bound = 5 / np.sqrt(2 * len(draws))
        assert draws.std() / (noise * clip / clients) == pytest.approx(1, abs=bound), (
            group
        )
