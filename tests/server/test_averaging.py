"""Averages against exact rational arithmetic, and laws that suit BatchNorm."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from fedbn_flwr.batchnorm import averaging
from fedbn_flwr.batchnorm.array_types import State
from fedbn_flwr.batchnorm.averaging import (
    RunningMean,
    average,
    check_state,
    to_shares,
    weighted_sum,
)
from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.batchnorm.sync import combine
from fedbn_flwr.errors import NOT_FINITE, STATISTICS_NOT_FINITE, ReplyError
from fedbn_flwr.server.methods.phases import TRACKED
from tests.support.fast import fast


def client(seed: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {
        "w": draw.normal(size=(2, 3)),
        "bn.weight": draw.normal(size=3).astype(np.float32),
        "bn.running_mean": draw.normal(size=3) * 10,
        "bn.running_var": draw.exponential(size=3),
        "bn.num_batches_tracked": np.asarray(draw.integers(1, 100)),
        "half": np.asarray(draw.normal(), dtype=np.float16),
    }


def exact_variance(means: Any, variances: Any, weights: Any) -> Fraction:
    """Return the biased variance of a mixture, given rational numbers."""
    centre = sum(w * m for w, m in zip(weights, means, strict=True)) / sum(weights)
    rows = zip(weights, means, variances, strict=True)
    return Fraction(sum(w * (v + (m - centre) ** 2) for w, m, v in rows) / sum(weights))


LAYERS = {
    "half": (np.float16, 0.0),
    "single": (np.float32, 1e4),
    "double": (float, 1e6),
}
"""The dtype of each layer, and a mean whose square would hide the variance."""


def drawn_state(draw: np.random.Generator, sizes: Sequence[int]) -> dict[str, Any]:
    """Return entries of several shapes and types, with zeros of both signs.

    Some are in Fortran order.
    """
    state, dtypes = {}, ("f2", "f4", ">f4", "f8", "c8", "c16")
    for i, (size, dtype) in enumerate(itertools.product(sizes, dtypes)):
        values = draw.normal(size=(size, 2)) * draw.integers(0, 2, (size, 2)) * -1.0
        state[f"{i}"] = np.asarray(values.T if i % 3 else values).astype(dtype)
    for layer, (kind, centre) in LAYERS.items():
        state[f"{layer}.running_mean"] = (centre + draw.normal(size=2)).astype(kind)
        state[f"{layer}.running_var"] = draw.exponential(1e-3, 2).astype(kind)
        state[f"{layer}.num_batches_tracked"] = np.asarray(draw.integers(9))
    return {
        **state,
        "scalar": np.asarray(draw.normal(), "f4"),
        "nothing": np.zeros((0, 3), "f4"),
        "count": np.asarray(2**53 + draw.integers(9)),
        "flag": draw.integers(0, 2, 3).astype(bool),
    }


def summed(states: Sequence[State], p: Sequence[float], name: str) -> Any:
    """Return sum p_i x_i in the order of the clients. Each operation rounds once."""
    wide = np.complex128 if states[0][name].dtype.kind == "c" else np.float64
    total = np.zeros(states[0][name].shape, wide)
    for share, state in zip(p, states, strict=True):
        total += share * state[name].astype(wide)
    return total


@pytest.mark.parametrize(
    ("num_clients", "seed"),
    [*itertools.product((1, 2, 3, 5, 9, 33), range(4)), *fast([(500, 2), (500, 3)], 0)],
)
def test_a_combination_is_the_sum_in_float64_rounded_once(
    monkeypatch, same_bits, num_clients: int, seed: int
) -> None:
    """The bits depend neither on blocks nor on states that are added ahead.

    An unexpected client has no share. If other clients come than those
    with a share, the sum is divided by the shares of all that come.
    """
    draw = np.random.default_rng([seed, num_clients])
    block = draw.choice([1, 7, 64, averaging._BLOCK]) if num_clients < 100 else 64
    monkeypatch.setattr(averaging, "_BLOCK", int(block))
    sizes = [1, 2, 20] if num_clients < 100 else [1]
    every = {9 * i % 1009: drawn_state(draw, sizes) for i in range(num_clients)}
    scale = [1.0, 0.25, 1e6, 1e300][seed % 4]
    weights = {sender: float(draw.integers(1, 1000) * scale) for sender in every}
    kinds = ["came", "never", "late", "unexpected"]
    status = draw.choice(kinds, num_clients, p=[0.4, 0.2, 0.2, 0.2])
    if seed % 4 == 2:  # as many come as were expected, but not the same
        status[status == "late"] = "came"
        status[status == "unexpected"] = "never"
        status[:2] = ["late", "unexpected"][:num_clients]
    if seed % 2 or "came" not in status:
        status[:] = "came"
    is_here = np.isin(status, ["came", "unexpected"])
    had_share = np.isin(status, ["came", "late"])
    come = [*itertools.compress(every, is_here)]
    states = [every[sender] for sender in come]
    own = [weights[sender] for sender in come]
    copies = copy.deepcopy(states)

    expected = [*itertools.compress(every, had_share)]
    of_expected = to_shares([weights[sender] for sender in expected])
    exact = [Fraction(weights[sender]) for sender in expected]
    for share, weight in zip(of_expected, exact, strict=True):
        right = float(weight / sum(exact))
        assert abs(share - right) <= (4e-16 * right if scale > 1e6 else 0)
    unit = of_expected[0] / weights[expected[0]]
    shares = {sender: unit * weight for sender, weight in weights.items()}
    shares.update(zip(expected, of_expected, strict=True))
    early, plain = [shares[sender] for sender in come], to_shares(own)

    parts = split_state(states[0])
    kept = parts.select(TRACKED)
    ahead = RunningMean(weights, {*every} - {*expected})
    for sender, state in zip(come, states, strict=True):
        # The first state defines the order of the entries.
        other_order = dict(reversed(state.items()))
        ahead.add(sender, other_order if ahead.sums else state)
    left = [
        {n: a for n, a in state.items() if n in kept or a.dtype.kind != "f"}
        for state in states[1:]
    ]
    found = {
        "plain": average(states, own, parts),
        "ahead": average([states[0], *left], own, parts, "mean", ahead),
        "pooled": average([states[0], *left], own, parts, "pooled", ahead),
    }
    for way, got in found.items():
        assert list(got) == list(states[0])
        for name, first in states[0].items():
            assert (got[name].dtype, got[name].shape) == (first.dtype, first.shape)
            if first.dtype.kind not in "fc":
                right = np.max([state[name] for state in states], axis=0)
            elif way == "plain" or first.dtype.kind == "c":
                right = summed(states, plain, name)
                sums = weighted_sum([state[name] for state in states], plain)
                assert sums.tobytes() == right.tobytes()
            else:
                right = summed(states, early, name)
                right = right if (is_here == had_share).all() else right / sum(early)
            if way != "pooled" or "running_var" not in name:
                same = got[name].tobytes() == right.astype(first.dtype).tobytes()
                assert same, f"{way}: {name}"
    for name in ("1", "3") if scale <= 1e6 else ():  # of a synchronised step
        sent = [torch.from_numpy(state[name]) for state in states]
        right = summed(states, plain, name).astype(states[0][name].dtype)
        assert combine("gradients/0", sent, own).numpy().tobytes() == right.tobytes()
    for layer, (kind, _) in LAYERS.items():
        for k, value in enumerate(found["pooled"][f"{layer}.running_var"]):
            means, of = (
                [Fraction(float(state[f"{layer}.{leaf}"][k])) for state in states]
                for leaf in ("running_mean", "running_var")
            )
            right_var = exact_variance(means, of, list(map(Fraction, own)))
            # half a step of the dtype, and the roundings of the sum in float64
            most = float(np.spacing(abs(kind(value)))) / 2 + num_clients * 2.0**-50
            assert abs(float(Fraction(float(value)) - right_var)) <= most
    for state, before in zip(states, copies, strict=True):
        same_bits(state, before)


@pytest.mark.parametrize(
    "weights", [[0.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [float("inf"), 1.0], []]
)
def test_weights_that_cannot_be_normalised(weights: list[float]) -> None:
    assert to_shares([0.0, 2.0]) == [0.0, 1.0]
    with pytest.raises(ReplyError, match="cannot be averaged: they must be finite and"):
        to_shares(weights)


NANS = np.full(3, np.nan)


@pytest.mark.parametrize(
    ("changed", "code", "names"),
    [
        ({"bn.num_batches_tracked": np.asarray(9.5)}, "reply", "float64, expected int"),
        ({"bn.running_mean": NANS}, STATISTICS_NOT_FINITE, "nan"),
        ({"bn.running_mean": NANS, "half": np.float16(np.nan)}, NOT_FINITE, "nan"),
        ({"bn.weight": np.asarray([1, -np.inf, 1], "f4")}, NOT_FINITE, "-inf"),
        ({"bn.running_var": np.zeros(3)}, "", ""),
    ],
)
def test_check_state_names_the_entry_and_the_problem(
    changed: dict[str, Any], code: str, names: str
) -> None:
    """A layer without channels and a variance of zero are allowed."""
    empty = dict.fromkeys(("none.running_mean", "none.running_var"), np.zeros(0))
    like, state = {**client(0), **empty}, {**client(1), **empty, **changed}
    parts = split_state(like)
    if not code:
        check_state(state, like, parts)
        return
    with pytest.raises(ReplyError, match=f"entry '{next(iter(changed))}'") as error:
        check_state(state, like, parts)
    assert names in str(error.value)
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
