"""Averages against exact rational arithmetic, and laws that suit BatchNorm."""

from __future__ import annotations

import warnings
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbn_flwr.batchnorm import averaging
from fedbn_flwr.batchnorm.averaging import (
    SumAhead,
    average,
    check_state,
    to_shares,
    weighted_sum,
)
from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.batchnorm.reestimation import Moments, merge, pool
from fedbn_flwr.errors import NOT_FINITE, STATISTICS_NOT_FINITE, ReplyError
from fedbn_flwr.server.methods.moment_pool import pooled_statistics
from fedbn_flwr.server.methods.travels import TRACKED
from fedbn_flwr.strategies.fbn import trimmed

NAMES = [
    "w",
    "bn.weight",
    "bn.running_mean",
    "bn.running_var",
    "bn.num_batches_tracked",
    "half",
]
PARTS = split_state(dict.fromkeys(NAMES))


def client(seed: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {
        "w": draw.normal(size=(2, 3)),
        "bn.weight": draw.normal(size=3).astype(np.float32),
        "bn.running_mean": draw.normal(size=3) * 10,
        "bn.running_var": draw.exponential(size=3),
        "bn.num_batches_tracked": np.asarray(
            int(draw.integers(1, 100)), dtype=np.int64
        ),
        "half": np.asarray(draw.normal(), dtype=np.float16),
    }


def exact_mean(values: list[float], counts: list[int]) -> Fraction:
    return sum(
        (Fraction(float(v)) * n for v, n in zip(values, counts, strict=True)),
        Fraction(0),
    ) / sum(counts)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    st.sampled_from([np.float16, np.float32]),
    st.lists(
        st.tuples(st.integers(1, 3), *[st.floats(-1, 1, width=16)] * 2), min_size=1
    ),
    st.integers(-8, 0),
)
def test_pooled_statistics_are_finite_or_left_out(
    dtype: Any, drawn: list[tuple[int, float, float]], magnitude: int
) -> None:
    """Statistics are left out only if they exceed the largest number of the type.

    ``drawn`` has count, mean and deviation of each client, as shares of that number.
    """
    largest = float(np.finfo(dtype).max)
    scale = largest ** (1 + magnitude / 16)
    counts = [count for count, _, _ in drawn]
    means = [float(dtype(mean * scale)) for _, mean, _ in drawn]
    variances = [float(dtype(abs(share) * scale)) for _, _, share in drawn]
    centre = exact_mean(means, counts)
    apart = [(Fraction(mean) - centre) ** 2 for mean in means]
    exact = [one + Fraction(v) for one, v in zip(apart, variances, strict=True)]
    biased = sum(n * v for n, v in zip(counts, exact, strict=True)) / sum(counts)
    unbiased = biased * sum(counts) / max(1, sum(counts) - 1)

    sent, states = [], []
    for count, mean, variance in zip(counts, means, variances, strict=True):
        moments = torch.tensor([[mean], [variance * count]], dtype=torch.float64)
        sent.append({"bn": Moments(count, *moments)})
        state = {"bn.running_mean": mean, "bn.running_var": variance}
        states.append({name: np.full(1, x, dtype) for name, x in state.items()})
    for way in (lambda some, _: merge(some), pool, lambda some, _: trimmed(some, 0.0)):
        found = pooled_statistics(PARTS, sent, counts, way, states[0])
        assert all(np.isfinite(values.astype(dtype)).all() for values in found.values())
    # the counts are the weights of the first two ways
    found = pooled_statistics(PARTS, sent, counts, pool, states[0])
    assert sum(counts) == 1 or unbiased > 0.99 * largest or len(found) == 2
    average_of = average(states, counts, PARTS, "pooled")["bn.running_var"]
    assert np.isfinite(average_of).all()
    if biased < 0.99 * largest:
        np.testing.assert_allclose(average_of, float(biased), rtol=1e-3, atol=1e-7)


def test_counters_take_the_maximum_and_stay_int64() -> None:
    states = [{"c": np.asarray(n, dtype=np.int64)} for n in (9, 2**53 + 1, 10)]
    got = average(states, [1.0, 1.0, 1.0], split_state({"c": None}))["c"]
    assert (got.dtype, got.shape, int(got)) == (np.int64, (), 2**53 + 1)
    flags = [{"f": np.asarray([False, True])}, {"f": np.asarray([False, False])}]
    assert average(flags, [1.0, 1.0], split_state({"f": None}))["f"].tolist() == [
        False,
        True,
    ]


def test_one_client_is_its_own_average(same_bits) -> None:
    state = client(3)
    for variance in ("mean", "pooled"):
        same_bits(average([state], [17.0], PARTS, variance), state)


def test_inputs_are_not_changed(same_bits) -> None:
    states, before = [client(1), client(2)], [client(1), client(2)]
    average(states, [1.0, 2.0], PARTS, "pooled")
    for state, copy in zip(states, before, strict=True):
        same_bits(state, copy)


def mixed(seed: int, sizes: list[int]) -> dict[str, np.ndarray]:
    """Return entries of several shapes and all kinds of floats.

    Some are in Fortran order, and there are zeros of both signs.
    """
    draw, state = np.random.default_rng(seed), {}
    for i, (size, dtype) in enumerate(
        (s, d) for s in sizes for d in ("f2", "f4", ">f4", "f8", "c8", "c16")
    ):
        values = draw.normal(size=(size, 2)) * draw.integers(0, 2, (size, 2)) * -1.0
        state[f"{i}"] = np.asarray(values.T if i % 3 else values).astype(dtype)
    return {
        **state,
        "scalar": np.asarray(draw.normal(), "f4"),
        "nothing": np.zeros((0, 3), "f4"),
        "c": np.asarray(seed),
    }


@pytest.mark.parametrize("block", [1, 7, 64, None])
@pytest.mark.parametrize("num_clients", [1, 9, 33])
def test_sums_have_the_bits_of_one_client_after_the_other(
    monkeypatch, block: int | None, num_clients: int
) -> None:
    """Each product is rounded, then each sum, beginning at zero.

    Blocks do not cause fused operations or sums in pairs.
    """
    monkeypatch.setattr(averaging, "_BLOCK", block or averaging._BLOCK)
    states = [mixed(seed, [1, 2, 20]) for seed in range(num_clients)]
    weights = [1.0 + i % 5 for i in range(num_clients)]
    p, got = to_shares(weights), average(states, weights, split_state(states[0]))
    assert list(got) == list(states[0])
    for name, first in states[0].items():
        if first.dtype.kind == "i":
            continue
        total = np.zeros(
            first.shape, np.complex128 if first.dtype.kind == "c" else np.float64
        )
        for share, state in zip(p, states, strict=True):
            total += share * state[name].astype(total.dtype)
        assert (
            weighted_sum([state[name] for state in states], p).tobytes()
            == total.tobytes()
        ), name
        assert (got[name].dtype, got[name].shape) == (first.dtype, first.shape)
        assert got[name].tobytes() == total.astype(first.dtype).tobytes(), name


@pytest.mark.parametrize("variance", ["mean", "pooled"])
@pytest.mark.parametrize("block", [7, None])
@pytest.mark.parametrize("together", [1, 2, 9])
@pytest.mark.parametrize("lost", [(), (0,), (1, 4)])
def test_sums_made_ahead_need_no_state_again_and_divide_by_the_shares_that_came(
    monkeypatch, block: int | None, variance: str, together: int, lost: tuple[int, ...]
) -> None:
    """The bits are those of one client after the other, and of the plain average."""
    monkeypatch.setattr(averaging, "_BLOCK", block or averaging._BLOCK)
    states = [{**client(seed), **mixed(seed, [1, 20])} for seed in range(5)]
    states[1:] = [dict(reversed(state.items())) for state in states[1:]]
    weights = {7: 3.0, 1: 1.0, 2: 0.5, 3: 7.0, 9: 2.0}
    came = [i for i in range(5) if i not in lost]
    ahead = SumAhead(weights, together)
    for i in came:
        ahead.add(list(weights)[i], states[i])
    whole = [states[i] for i in came]
    of_came = [list(weights.values())[i] for i in came]
    kept = PARTS.select(TRACKED)
    left = [
        {n: a for n, a in state.items() if n in kept or a.dtype.kind != "f"}
        for state in whole[1:]
    ]
    got = average([whole[0], *left], of_came, PARTS, variance, ahead)
    plain = average(whole, of_came, PARTS, variance)
    p = to_shares(list(weights.values()))
    for name, array in got.items():
        if lost and array.dtype.kind == "f" and name not in kept:
            total = np.zeros(array.shape)
            for i in came:
                total += p[i] * states[i][name].astype(np.float64)
            total /= sum(p[i] for i in came)
            assert array.tobytes() == total.astype(array.dtype).tobytes(), name
        if lost and array.dtype.kind == "f":
            near = 4 * float(np.finfo(array.dtype).eps)
            np.testing.assert_allclose(array, plain[name], near, near, err_msg=name)
        else:
            assert array.tobytes() == plain[name].tobytes(), name


def test_pooled_variance_does_not_cancel() -> None:
    """The means have a spread of 2.25, but their squares differ in last digits."""
    states = [
        {"running_mean": np.asarray([1e9 + d]), "running_var": np.asarray([1e-3])}
        for d in (-1.5, 1.5)
    ]
    got = average(states, [1.0, 1.0], split_state(states[0]), "pooled")["running_var"]
    assert got == pytest.approx([2.251], rel=1e-14)


@pytest.mark.parametrize(
    "weights", [[0.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [float("inf"), 1.0], []]
)
def test_weights_that_cannot_be_normalised(weights: list[float]) -> None:
    with pytest.raises(
        ReplyError,
        match="cannot be averaged: they must be finite and not negative",
    ):
        to_shares(weights)


def test_normalise() -> None:
    assert to_shares([1.0, 3.0, 0.0]) == [0.25, 0.75, 0.0]
    assert to_shares([1e308, 1e308, 0.0]) == [0.5, 0.5, 0.0], (
        "their sum is not a float64"
    )


@pytest.mark.parametrize(
    ("entry", "value", "code", "names"),
    [
        ("w", None, "reply", "missing"),
        ("extra", np.zeros(1), "reply", "not asked for"),
        ("w", np.zeros((3, 2)), "reply", "(3, 2), expected (2, 3)"),
        ("w", np.zeros((2, 3), np.float32), "reply", "float32, expected float64"),
        ("bn.num_batches_tracked", np.asarray(9.5), "reply", "float64, expected int64"),
        (
            "bn.running_mean",
            np.asarray([0.0, np.nan, np.inf]),
            STATISTICS_NOT_FINITE,
            "nan",
        ),
        ("bn.weight", np.asarray([1, -np.inf, 1], np.float32), NOT_FINITE, "-inf"),
        ("half", np.asarray(np.nan, np.float16), NOT_FINITE, "nan"),
        ("bn.running_var", np.asarray([1.0, -0.25, 0.0]), "reply", "-0.25"),
    ],
)
def test_check_state_names_the_entry_and_the_problem(
    entry: str, value: Any, code: str, names: str
) -> None:
    like = client(0)
    check_state(client(1), like, PARTS)
    state = {
        name: array
        for name, array in {**like, entry: value}.items()
        if array is not None
    }
    with pytest.raises(ReplyError, match=f"entry '{entry}'") as error:
        check_state(state, like, PARTS)
    assert names in str(error.value)
    assert error.value.code == code


def test_statistics_are_the_cause_where_nothing_else_is_not_finite() -> None:
    like = client(0)
    nan = {name: np.full_like(like[name], np.nan) for name in ("bn.running_mean", "w")}
    for bad, code in ((["bn.running_mean"], STATISTICS_NOT_FINITE), (nan, NOT_FINITE)):
        state = {**like, **{name: nan[name] for name in bad}}
        with pytest.raises(ReplyError) as error:
            check_state(state, like, PARTS)
        assert error.value.code == code


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8", "c16"])
def test_large_values_are_finite_and_one_that_is_not_is_found_anywhere(
    dtype: str,
) -> None:
    """Their squares are not finite."""
    large = np.full(1000, np.finfo(dtype).max, dtype)
    parts = split_state({"x": None})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_state({"x": large}, {"x": large}, parts)
        for index in (0, 500, 999):
            for value in (np.nan, np.inf, -np.inf):
                bad = large.copy()
                bad[index] = value
                with pytest.raises(ReplyError, match="entry 'x' contains "):
                    check_state({"x": bad}, {"x": large}, parts)


def test_check_state_allows_zero_variance_and_empty_entries() -> None:
    state = {"running_mean": np.zeros(0), "running_var": np.zeros(0)}
    check_state(state, state, split_state(state))
    zero = {"running_mean": np.zeros(2), "running_var": np.zeros(2)}
    check_state(zero, zero, split_state(zero))


def test_check_state_refuses_a_negative_variance_of_a_layer_with_one_channel() -> None:
    like = {"running_mean": np.zeros(1), "running_var": np.ones(1)}
    with pytest.raises(ReplyError, match="'running_var'"):
        check_state({**like, "running_var": -np.ones(1)}, like, split_state(like))
