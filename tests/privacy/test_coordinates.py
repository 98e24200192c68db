"""The coordinates of an update are linear.

The way back keeps variances above zero.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedbn_flwr.batchnorm.averaging import average
from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.messages.records import to_state
from fedbn_flwr.privacy.coordinates import Coordinates, norm
from tests.support.written_out import close


def net() -> nn.Module:
    """A net with BatchNorm, an InstanceNorm with statistics, and an integer entry."""
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.BatchNorm2d(3),
        nn.InstanceNorm2d(3, track_running_stats=True),
    ).double()
    model.register_buffer("table", torch.arange(4))
    return model


def moved(seed: int) -> dict[str, np.ndarray]:
    rng, state = np.random.default_rng(seed), to_state(net().state_dict())
    for name, array in state.items():
        if array.dtype.kind != "f":
            continue
        if "var" in name:  # stays above zero
            state[name] = array * rng.lognormal(0, 1, array.shape)
        else:
            state[name] = array + rng.normal(size=array.shape)
    return state | {"1.num_batches_tracked": np.array(7 + seed)}


BEFORE = moved(0)
PARTS = split_state(net())
VARIANCES = ("1.running_var", "2.running_var")


def test_an_average_of_updates_is_the_update_of_the_average() -> None:
    states = [moved(seed) for seed in (1, 2, 3)]
    coordinates = Coordinates(BEFORE, PARTS)
    first, second, third = (coordinates.update(state) for state in states)
    # the weights 2, 1, 1 of the average below, normalised
    mean = {}
    for name in first:
        mean[name] = 0.5 * first[name] + 0.25 * second[name] + 0.25 * third[name]
    expected = average(states, [2, 1, 1], PARTS)
    integers = {name: BEFORE[name] for name in ("1.num_batches_tracked", "table")}
    close(coordinates.state(mean, 0.0), expected | integers)


def test_the_unit_of_statistics_is_that_of_their_layer() -> None:
    state = {name: array.copy() for name, array in BEFORE.items()}
    var = BEFORE["1.running_var"]
    state["1.running_mean"] = BEFORE["1.running_mean"] + np.sqrt(var + 1e-5)
    state["2.running_var"] = BEFORE["2.running_var"] * 2 + 1e-5
    update = Coordinates(BEFORE, PARTS).update(state)
    np.testing.assert_allclose(update["1.running_mean"], 0.1, rtol=1e-12)
    np.testing.assert_allclose(update["2.running_var"], 0.1, rtol=1e-12)
    assert norm(update) == pytest.approx(0.1 * np.sqrt(6), rel=1e-12)
    assert "1.num_batches_tracked" not in update
    assert "table" not in update


@pytest.mark.parametrize("entry", BEFORE)
def test_each_floating_entry_that_clients_change_has_coordinates(entry: str) -> None:
    """The partner of a fixed or local statistic is among them."""
    others = {name: array for name, array in BEFORE.items() if name != entry}
    floating = {name for name, array in others.items() if array.dtype.kind == "f"}
    for arguments in ((BEFORE, PARTS, [entry]), (others, PARTS)):
        assert Coordinates(*arguments).update(BEFORE).keys() == floating


ZERO = Coordinates(BEFORE, PARTS).update(BEFORE)


def noise(rng: np.random.Generator, deviation: float) -> dict[str, np.ndarray]:
    """Return an update of normal noise."""
    return {name: deviation * rng.standard_normal(a.shape) for name, a in ZERO.items()}


@given(st.integers(0, 2**32), st.floats(0, 1e6))
@settings(max_examples=50)
def test_variances_stay_above_zero_under_any_noise(seed: int, deviation: float) -> None:
    update = noise(np.random.default_rng(seed), deviation)
    state = Coordinates(BEFORE, PARTS).state(update, deviation)
    for name in VARIANCES:
        assert (state[name] > 0).all()
        assert np.isfinite(state[name]).all()
    # A variance that stays large enough under noise is exact.
    large, var = update["1.running_var"] > 0, BEFORE["1.running_var"]
    unit = (var + 1e-5) / 0.1
    exact = var + update["1.running_var"] * unit
    kept = large & (exact >= deviation * unit)
    np.testing.assert_allclose(state["1.running_var"][kept], exact[kept], rtol=1e-9)


def test_variances_stay_finite_when_noise_of_their_size_goes_on_for_hundreds_of_rounds() -> (
    None
):
    rng, state = np.random.default_rng(0), layer_at(1.0, 1.0, np.float16)
    for _ in range(600):
        state = Coordinates(state, PARTS).state(noise(rng, 0.3), 0.3)
        assert all(np.isfinite(array).all() for array in state.values())
        assert all((state[name] > 0).all() for name in VARIANCES)


def test_a_variance_that_begins_outside_the_limits_moves_as_it_does_without_them() -> (
    None
):
    before = {**BEFORE, "1.running_var": np.array([1e-30, 1e15, 1.0])}
    coordinates = Coordinates(before, PARTS)
    after = {**before, "1.running_var": np.array([3e-30, 2e15, 2.0])}
    found = coordinates.state(coordinates.update(after), 0.0)["1.running_var"]
    np.testing.assert_allclose(found, after["1.running_var"], rtol=1e-12)


def layer_at(mean: float, deviation: float, kind: type) -> dict[str, np.ndarray]:
    """Return a state whose layer has statistics of this size."""
    sizes = {"mean": mean, "var": deviation**2}
    state = {}
    for name, array in BEFORE.items():
        values = array * sizes.get(name.rpartition("_")[2], 1.0)
        state[name] = values.astype(kind) if array.dtype.kind == "f" else array
    return state


@pytest.mark.parametrize("kind", [np.float32, np.float16])
@pytest.mark.parametrize(
    ("mean", "deviation"), [(1.0, 1.0), (200.0, 0.01), (0.01, 30.0)]
)
def test_rounding_is_a_length_in_the_units_of_the_layers(
    mean: float, deviation: float, kind: type
) -> None:
    """The loss of a clipped state in its dtype stays below the rounding.

    A narrow layer far from zero loses much, and a wide layer nothing.
    """
    before = layer_at(mean, deviation, kind)
    coordinates = Coordinates(before, PARTS)
    # The update is small compared to the values, so the loss is their rounding.
    small = noise(np.random.default_rng(0), 1e-3)
    found = coordinates.update(coordinates.state(small, 0.0))
    lost = norm({name: found[name] - small[name] for name in small})
    assert lost <= coordinates.rounding()


def test_a_complex_entry_is_refused() -> None:
    with pytest.raises(ConfigError, match="entry 'phase' is complex"):
        Coordinates({**BEFORE, "phase": np.ones(2, np.complex128)}, PARTS)
