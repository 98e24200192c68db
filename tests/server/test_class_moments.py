"""The class moments of a run equal moments of the sites' models and data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedbn_flwr.batchnorm.class_moments import (
    ClassMoments,
    class_moments,
    encode_class_moments,
    pool_class_moments,
    read_class_moments,
)
from fedbn_flwr.errors import StateError
from fedbn_flwr.messages.records import tensors
from fedbn_flwr.strategies import FedAvg, FedBN, Scaffold, SiloBN
from tests.support.bad_replies import put, spoil_entry, spoil_state, spoiling

SIZES = (6, 13, 9)


def of_site(run: Any, model: Any, data: Any, site: int) -> ClassMoments:
    """Return the moments of a site's data under its own model, from its local state."""
    own = model()
    own.load_state_dict(tensors(run.state | run.local_state(site)))
    return class_moments(own, [(data.inputs, data.targets)])


def assert_same(one: ClassMoments, other: ClassMoments, rtol: float = 1e-12) -> None:
    assert torch.equal(one.counts, other.counts)
    assert one.first.keys() == {"1"}
    for got, want in ((one.first, other.first), (one.second, other.second)):
        torch.testing.assert_close(got, want, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("method", [FedAvg, FedBN, SiloBN, Scaffold])
def test_a_run_pools_the_moments_of_the_sites_own_models(
    federate_mlp, datasets, mlp, same_bits, method
) -> None:
    """They do not change the training, and their traffic is in the last report."""
    run = federate_mlp(method(class_moments=True), rounds=2)
    plain = federate_mlp(method(), rounds=2)
    sites = [of_site(run, mlp, data, site) for site, data in enumerate(datasets)]
    assert_same(run.strategy.run.class_moments, pool_class_moments(sites))
    same_bits(run.state, plain.state)
    reports = [one.reports for one in (run, plain)]
    # counts of 3 classes, and two sums of 3 classes and 4 channels
    sent = len(SIZES) * 8 * (3 + 2 * 3 * 4)
    for number, (now, before) in enumerate(zip(*reports, strict=True)):
        assert now.evaluate.exchanges == before.evaluate.exchanges + number
        assert now.evaluate.up == before.evaluate.up + number * sent
    assert [one.train for one in reports[0]] == [one.train for one in reports[1]]
    assert plain.strategy.run.class_moments is None


@pytest.mark.parametrize(
    "spoil",
    [
        spoil_state(lambda state: state.pop("1.second")),
        spoil_state(lambda state: state.pop("counts")),
        spoil_state(
            lambda s: s.update({"9.first": s["1.first"], "9.second": s["1.second"]})
        ),
        spoil_state(lambda state: state.update({"other": state["counts"]})),
        spoil_entry("1.first", lambda a: a[:2]),
        spoil_entry("1.second", put(-1.0)),
        spoil_entry("1.first", put(np.nan)),
        spoil_entry("counts", put(-1.0)),
    ],
)
def test_bad_moments_are_refused_and_the_others_pooled(
    federate_mlp, datasets, mlp, spoil
) -> None:
    wrap = spoiling(spoil, kind="query.statistics")
    run, few = (
        federate_mlp(FedAvg(class_moments=True, min_replies=n), rounds=1, wrap=wrap)
        for n in (2, 3)
    )
    (why,) = run.reports[0].rejected.values()
    assert "partition 1" in why
    kept = [of_site(run, mlp, datasets[site], site) for site in (0, 2)]
    assert_same(run.strategy.run.class_moments, pool_class_moments(kept))
    assert few.strategy.run.class_moments is None


def test_a_file_of_moments_is_read_again_and_another_file_refused(
    mlp, points, tmp_path: Path
) -> None:
    data = points(9)
    moments = class_moments(mlp(), [(data.inputs, data.targets)])
    path = tmp_path / "class_moments.npz"
    with pytest.raises(StateError):
        read_class_moments(path)
    for content in (b"", b"PK", b"{}"):
        path.write_bytes(content)
        with pytest.raises(StateError, match="class-moments=true"):
            read_class_moments(path)
    path.write_bytes(encode_class_moments(moments))
    assert_same(read_class_moments(path), moments, rtol=0)
