"""With ``layers``, a method acts on some BatchNorm layers.

FedAvg treats the other layers. The networks are torchvision's in float64, and the
clients have different sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pytest
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.batchnorm.layers import batchnorm_layers
from fedbn_flwr.batchnorm.parts import Parts, split_state
from fedbn_flwr.errors import ConfigError, FedBNError, RunFailedError
from fedbn_flwr.messages.records import from_record, to_record
from fedbn_flwr.strategies import (
    FedBN,
    FedDNA,
    FedTAN,
    FedTAN2,
    FixBN,
)
from tests.support.user_loops import SIZES
from tests.support.written_out import network

TRACKED = ("running_mean", "running_var", "num_batches_tracked")


@pytest.fixture
def datasets(points: Any) -> list[Any]:
    """Return the images of three clients of different sizes."""
    return [points(n, i, shape=(3, 16, 16)) for i, n in enumerate(SIZES)]


def entries_below(
    model: nn.Module, prefixes: tuple[str, ...], leaves: Collection[str]
) -> set[str]:
    """Walk the modules and return the BatchNorm entries at these places."""
    entries = set()
    for path, layer in model.named_modules():
        if isinstance(layer, _BatchNorm) and path.startswith(prefixes):
            own = layer.state_dict().keys() & set(leaves)
            entries |= {f"{path}.{leaf}" for leaf in own}
    return entries


def test_the_automatic_round_follows_the_chosen_layers_alone(
    federate: Any, datasets: Any
) -> None:
    """The oracle computes delta_m from the replies of one round."""
    strategy = FixBN(freeze_at="auto", freeze_window=2, layers="*.denseblock3")
    run = federate(strategy, network, datasets, rounds=3, rate=0.01)
    names = entries_below(network(), ("features.denseblock3",), TRACKED[:2])
    deltas = []
    replies = run.grid.of("train", replies=True)
    for reply in replies[:3]:
        sent = from_record(reply.content["arrays"])
        apart = [np.abs(sent[name] - run.history[0][name]).sum() for name in names]
        entries = sum(sent[name].size for name in names)
        number = run.grid.partition(reply.metadata.src_node_id)
        deltas.append((SIZES[number], sum(apart) / entries))
    wanted = sum(n * delta for n, delta in deltas) / sum(SIZES)
    np.testing.assert_allclose(strategy.state.deltas[0], wanted, rtol=1e-12)


WRONG = {
    "which of two networks": lambda: batchnorm_layers(
        nn.ModuleList([network(), network()]), ["features.norm0"]
    ),
    "no layer": lambda: FedBN(layers="features.norm0,features.nrm5").prepare(
        to_record(network().state_dict()), 2, 1
    ),
    "no layer of the model": lambda: split_state(network(), "classifier"),
    "other layers than the split's": lambda: FedBN(
        parts=split_state(network(), "features.norm5"), layers="features.norm0"
    ).prepare(to_record(network().state_dict()), 2, 1),
}


@pytest.mark.parametrize("make", WRONG.values(), ids=list(WRONG))
def test_layers_that_choose_nothing_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(FedBNError):
        make()


@pytest.mark.parametrize("method", [FedTAN, FedTAN2, FedDNA], ids=lambda m: m.name)
@pytest.mark.parametrize("by_parts", [False, True])
def test_methods_that_measure_all_layers_together_refuse_a_part(
    method: Any, by_parts: bool
) -> None:
    start = to_record(network().state_dict())
    chosen: Any = {"layers": "features.norm0"}
    if by_parts:
        chosen = {"parts": split_state(network(), "features.norm0")}
    with pytest.raises(ConfigError) as caught:
        method(**chosen).prepare(start, 200, 1)
    (problem,) = caught.value.problems
    assert (problem.code, problem.key) == ("all-layers", "layers")


def test_a_split_without_the_other_layers_is_refused_by_a_torch_client(
    federate: Any, datasets: Any
) -> None:
    """A split written by hand does not show whether names hid layers."""
    whole = split_state(network())
    by_hand = Parts(whole.names, whole.layers[:3])
    with pytest.raises((ConfigError, RunFailedError)):
        federate(FedBN(parts=by_hand), network, datasets, rounds=1)
    said = split_state(network(), [layer.path for layer in by_hand.layers])
    run = federate(FedBN(parts=said), network, datasets, rounds=1, rate=0.01)
    assert run.strategy.reports[0].rejected == {}
