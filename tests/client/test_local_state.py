"""What a client keeps is checked against the model it is used for."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from torch import nn

from fedbn_flwr.batchnorm.parts import Part, split_state
from fedbn_flwr.client.local_state import LocalState
from fedbn_flwr.errors import StateError
from fedbn_flwr.messages.records import to_state

STATISTICS = frozenset({Part.STATISTICS, Part.COUNTERS})
NAMES = ["1.running_mean", "1.running_var", "1.num_batches_tracked"]


def empty_context() -> Context:
    return Context(run_id=1, node_id=2, node_config={}, state=RecordDict(), run_config={})


def store(context: Context | None, model: nn.Module) -> LocalState:
    parts = split_state(model)
    return LocalState(context, parts, parts.fingerprint({n: tuple(e.shape) for n, e in model.state_dict().items()}))


def keep(context: Context | None, model: nn.Module, server_round: int = 4) -> dict[str, np.ndarray]:
    parts = split_state(model)
    kept = {name: array for name, array in to_state(model.state_dict()).items() if parts.part_of[name] in STATISTICS}
    store(context, model).keep(kept, server_round)
    return kept


def test_kept_entries_are_loaded_again(mlp, same_bits) -> None:
    context, model = empty_context(), mlp()
    assert store(context, model).load(NAMES) == {}
    kept = {name: array.copy() for name, array in keep(context, model).items()}
    assert list(kept) == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    model[1].running_mean += 1  # what was kept is a copy
    same_bits(store(context, model).load(NAMES), kept)
    assert list(store(context, model).load(["1.num_batches_tracked"])) == ["1.num_batches_tracked"]
    assert store(context, model).load([]) == {}
    assert store(context, model).load(["1.weight"]) == {}, "nothing of this part was kept"


def test_a_later_round_replaces_an_earlier_one(mlp) -> None:
    context, model = empty_context(), mlp()
    keep(context, model)
    model[1].num_batches_tracked += 5
    keep(context, model, 5)
    assert store(context, model).load(NAMES)["1.num_batches_tracked"] == 5


def test_another_model_is_refused() -> None:
    context = empty_context()
    keep(context, nn.Sequential(nn.BatchNorm1d(4)))
    with pytest.raises(StateError) as error:
        store(context, nn.Sequential(nn.BatchNorm1d(5))).load(NAMES)
    assert str(error.value) == (
        "what this client kept (version 1, round 4) belongs to another model: its names, layer types or "
        "shapes changed (its first entry is now '0.weight'). Start a new run, or use the earlier model again."
    )


def test_another_layer_type_with_the_same_names_is_refused(mlp) -> None:
    context = empty_context()
    keep(context, nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm2d(4)))
    model = nn.Sequential(nn.InstanceNorm2d(4, affine=True, track_running_stats=True), nn.BatchNorm2d(4))
    with pytest.raises(StateError, match="belongs to another model"):
        store(context, model).load(NAMES)


def test_another_version_is_refused(mlp) -> None:
    context, model = empty_context(), mlp()
    keep(context, model)
    context.state["fedbn-flwr.local.about"]["version"] = 2
    with pytest.raises(StateError, match=r"\(version 2, round 4\)"):
        store(context, model).load(NAMES)


def test_without_a_context_nothing_can_be_kept(mlp) -> None:
    assert store(None, mlp()).load(NAMES) == {}
    with pytest.raises(StateError) as error:
        keep(None, mlp())
    assert str(error.value) == (
        "the strategy keeps 3 entries with the client, but this client has no Context. Pass context= from "
        "client_fn(context)."
    )
