"""The head is the layer that makes the outputs, with all its entries.

Names, sizes and the order of registration do not matter. If the head of a network does
not show, it is refused with the candidates.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from fedbn_flwr.batchnorm.parts import refuse_other_head, split_state
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.messages.records import to_record
from fedbn_flwr.strategies import FedAvg, FedBN, FedRep
from fedbn_flwr.training.head import head_in_shapes, head_of

CLASSES = 3


class Drawn(nn.Module):
    """Layers that the forward pass calls in the order of ``path``."""

    def __init__(
        self, order: list[str], width: int, wrap: Callable[..., nn.Module], asks: bool
    ) -> None:
        super().__init__()
        self.asks = asks
        layers = {
            "hidden": nn.Linear(6, width),
            "norm": nn.BatchNorm1d(width),
            "deep": nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True)),
            "classifier": wrap(nn.Linear(width, CLASSES)),
            "criterion": nn.CrossEntropyLoss(weight=torch.ones(CLASSES)),
            "scale": nn.BatchNorm1d(CLASSES),
        }
        for name in order:
            self.add_module(name, layers[name])

    def forward(self, x: Tensor) -> Tensor:
        if self.asks and bool(x.sum() > 1e9):
            x = -x
        hidden = torch.relu(self.norm(self.hidden(x)))
        out: Tensor = self.scale(self.classifier(self.deep(hidden)))
        return out


@settings(max_examples=40, deadline=None)
@given(
    order=st.permutations(
        ["hidden", "norm", "deep", "classifier", "criterion", "scale"]
    ),
    width=st.sampled_from([8, CLASSES, 6]),
    wrap=st.sampled_from([lambda one: one, spectral_norm, weight_norm]),
    asks=st.booleans(),
)
def test_the_head_makes_the_outputs_whatever_comes_last(
    order: list[str], width: int, wrap: Callable[..., nn.Module], asks: bool
) -> None:
    model = Drawn(order, width, wrap, asks)
    state = {name: entry.clone() for name, entry in model.state_dict().items()}
    own = tuple(name for name in state if name.startswith("classifier."))
    # With inputs always; without them if the pass can be recorded.
    parts = split_state(model, "", "last-layer", lambda: torch.randn(2, 6))
    assert parts.personal == own
    if not asks:
        assert split_state(model, personal="last-layer").personal == own
    # By types or shapes alone it may be unknown, and is never another one.
    for found in (head_of(model), head_in_shapes(state)):
        assert "classifier" in found.paths
        assert not found.known or found.paths == ("classifier",)
    # To look changes nothing.
    assert all(torch.equal(entry, state[n]) for n, entry in model.state_dict().items())


class Product(nn.Module):
    """A network that multiplies by its own matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(4, 3))
        self.body = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) @ self.table  # type: ignore[no-any-return]


def test_a_head_that_does_not_show_is_refused_with_the_candidates() -> None:
    square = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    for state, candidates in (
        (Product(), ["body", "table"]),
        (square.state_dict(), ["0", "2"]),
    ):
        with pytest.raises(ConfigError) as caught:
            split_state(state, personal="last-layer")
        assert all(f"'{one}'" in str(caught.value) for one in candidates)
    # The server of a Flower project, before round 1; a name helps.
    arrays = to_record(square.state_dict())
    with pytest.raises(ConfigError):
        FedRep().prepare(arrays, 1, 1)
    FedRep(personal="2").prepare(arrays, 1, 1)


def test_a_client_compares_the_head_that_shapes_have_shown() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    strategy = FedRep()
    strategy.prepare(to_record(model.state_dict()), 1, 1)
    sent = strategy.run.message_config(1)
    refuse_other_head(model, sent.head)
    assert {*sent.head} == {"2.weight", "2.bias"}
    with pytest.raises(ConfigError):
        refuse_other_head(model, ["0.weight", "0.bias"])
    # A server that has the model does not send a head.
    strategy = FedRep(parts=split_state(model))
    strategy.prepare(to_record(model.state_dict()), 1, 1)
    assert not strategy.run.message_config(1).head


def tied() -> nn.Module:
    """Return a model whose decoder has the encoder's weight."""
    model = nn.Sequential()
    model.encoder = nn.Linear(6, 6, bias=False)
    model.norm = nn.BatchNorm1d(6)
    model.decoder = nn.Linear(6, 6, bias=False)
    model.decoder.weight = model.encoder.weight
    model.last = nn.Linear(6, 3)
    return model


@pytest.mark.parametrize("by_names", [False, True])
@pytest.mark.parametrize("personal", ["encoder", "decoder"])
@pytest.mark.parametrize("method", [FedAvg, FedBN])
def test_one_of_two_names_of_a_tensor_cannot_stay(
    method: type[FedAvg], personal: str, by_names: bool
) -> None:
    model = tied()
    split = None if by_names else split_state(model)
    arrays = to_record(model.state_dict())
    with pytest.raises(ConfigError, match="names of the same tensor"):
        method(personal=personal, parts=split).prepare(arrays, 1, 1)
    method(personal="encoder,decoder", parts=split).prepare(arrays, 1, 1)
