"""``layers`` under differential privacy.

A BatchNorm layer outside of ``layers`` is shared like any other entry, with noise. The
network is from torchvision, in float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedbn_flwr.batchnorm.parts import Part, Parts, split_state
from fedbn_flwr.privacy import DPWrapper
from fedbn_flwr.privacy.coordinates import Coordinates
from fedbn_flwr.strategies import MTFL, FedBN, FixBN, SiloBN
from tests.support.fast import fast
from tests.support.written_out import network

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


def private(strategy: Any, noise: float, clip: float, where: Any) -> Any:
    DPWrapper(strategy, noise, clip, where=where)
    return strategy


@pytest.fixture
def runs(federate: Any, points: Any) -> Callable[..., Any]:
    """Provide ``runs(protect, method, sizes, rounds)`` to run with and without it."""

    def both(
        protect: Callable[[Any], Any], method: str, sizes: tuple[int, ...], rounds: int
    ) -> list[Any]:
        data = [points(size, client, (3, 16, 16)) for client, size in enumerate(sizes)]
        found = []
        for act in (lambda strategy: strategy, protect):
            strategy = act(METHODS[method](layers=LAYERS))
            run = federate(strategy, network, data, rounds=rounds, rate=0.01)
            assert [one.rejected for one in run.strategy.reports] == [{}] * rounds
            found.append(run)
        return found

    return both


AT_SERVER, AT_CLIENTS = (
    functools.partial(private, noise=0.0, clip=1e9, where=where)
    for where in ("server", "client")
)


@pytest.mark.parametrize(
    ("method", "protect"),
    [
        ("fedbn", AT_SERVER),
        *fast([("mtfl", AT_CLIENTS), ("fixbn", AT_SERVER)], 0),
    ],
)
def test_without_noise_it_is_the_unprotected_run(
    runs: Any, method: str, protect: Any
) -> None:
    """Shared counters count rounds, as always under protection."""
    sizes = (6, 6, 6)
    plain, ours = runs(protect, method, sizes, 2)
    parts = chosen()
    own = set(parts.select(LOCAL[method]))
    counters = {name for name in parts.names if name.endswith("num_batches_tracked")}
    frozen = set(parts.counters) if method == "fixbn" else set()
    for name, array in plain.state.items():
        if name in counters - own:
            assert ours.state[name] == (1 if name in frozen else 2), name
        else:
            np.testing.assert_allclose(
                ours.state[name], array, rtol=1e-8, atol=1e-8, err_msg=name
            )
    for client in range(len(sizes)):
        if not own:
            continue
        mine = ours.local_state(client)
        assert set(mine) == own
        for name, array in plain.local_state(client).items():
            np.testing.assert_allclose(mine[name], array, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    ("method", "where"),
    [
        *fast([("fedbn", "server"), ("silobn", "client")]),
        *(("mtfl", "client"), ("fixbn", "server")),
    ],
)
def test_the_other_layers_have_the_stated_noise_and_the_chosen_ones_none(
    runs: Any, method: str, where: Any
) -> None:
    """The noise is measured in the coordinates of an update.

    The groups are weights, gamma and beta, and means.
    """
    clip, noise, clients = 1e6, 1e-8, 3
    protect = functools.partial(private, noise=noise, clip=clip, where=where)
    plain, ours = runs(protect, method, (6, 6, 6), 1)
    parts = chosen()
    own = set(parts.select(LOCAL[method]))
    before = {
        name: value.numpy()
        for name, value in network().state_dict().items()
        if name not in own
    }
    for name in own:
        assert np.array_equal(ours.state[name], ours.history[0][name]), name
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
