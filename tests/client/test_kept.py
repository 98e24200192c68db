"""Local state is checked against the model that uses it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from torch import nn

from fedbn_flwr.batchnorm.parts import Part, split_state
from fedbn_flwr.client.kept import KeptState
from fedbn_flwr.errors import StateError
from fedbn_flwr.messages.records import to_state
from fedbn_flwr.training.client_hook import ClientHook

STATISTICS = frozenset({Part.STATISTICS, Part.COUNTERS})
NAMES = ["1.running_mean", "1.running_var", "1.num_batches_tracked"]


def empty_context() -> Context:
    return Context(
        run_id=1, node_id=2, node_config={}, state=RecordDict(), run_config={}
    )


def store(context: Context | None, model: nn.Module) -> KeptState:
    parts = split_state(model)
    return KeptState(
        context,
        parts,
        parts.fingerprint({n: tuple(e.shape) for n, e in model.state_dict().items()}),
    )


def keep(
    context: Context | None, model: nn.Module, server_round: int = 4
) -> dict[str, np.ndarray]:
    parts = split_state(model)
    kept = {
        name: array
        for name, array in to_state(model.state_dict()).items()
        if parts.part_of[name] in STATISTICS
    }
    store(context, model).keep(kept, server_round)
    return kept


def test_what_is_kept_is_a_copy_and_is_loaded_again(mlp, same_bits) -> None:
    context, model = empty_context(), mlp()
    kept = {name: array.copy() for name, array in keep(context, model).items()}
    model[1].running_mean += 1
    same_bits(store(context, model).load(NAMES), kept)
    assert store(context, model).load(["1.weight"]) == {}, (
        "nothing of this part was kept"
    )


class Counting(ClientHook):
    def receive(self, sent: Any, kept: Any) -> None:
        self.found = kept

    def keep(self) -> dict[str, torch.Tensor]:
        return {"count": torch.ones(2)}


def test_a_hook_may_change_the_entries_that_it_gets(mlp) -> None:
    """The kept state does not change, because the round may be undone."""
    context, model, hook = empty_context(), mlp(), Counting()
    store(context, model).save_hook_state({"counting": hook}, 4)
    for _ in range(2):
        store(context, model).hand_over({"counting": hook}, {})
        assert hook.found["count"].tolist() == [1, 1]
        hook.found["count"] += 1


def test_entries_of_an_earlier_version_are_found_by_the_class_of_the_hook(mlp) -> None:
    context, model, hook = empty_context(), mlp(), Counting()
    store(context, model).save_hook_state({"Counting": hook}, 4)
    store(context, model).hand_over({"one": hook}, {})
    assert hook.found["count"].tolist() == [1, 1]
    store(context, model).hand_over({"Counting": Counting(), "one": hook}, {})
    assert not hook.found, "the entries belong to the hook of this name"


@pytest.mark.parametrize("hook_too", [False, True])
def test_what_is_kept_has_begun_in_the_round_in_which_nothing_was_kept_before(
    mlp, hook_too: bool
) -> None:
    """The number of records in a round does not matter."""
    context, model = empty_context(), mlp()
    began = []
    for server_round in (4, 5, 9):
        keep(context, model, server_round)
        if hook_too:
            store(context, model).save_hook_state(
                {"counting": Counting()}, server_round
            )
        about = store(context, model).reply_metadata(server_round)
        began.append("fedbn-flwr.local-began" in about)
    assert began == [True, False, False]


KEPT = nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm2d(4))
OTHERS = {
    "another shape": nn.Sequential(nn.BatchNorm2d(5), nn.BatchNorm2d(4)),
    "another layer type": nn.Sequential(
        nn.InstanceNorm2d(4, affine=True, track_running_stats=True), nn.BatchNorm2d(4)
    ),
    "another version": KEPT,
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_another_model_or_version_kept_is_refused(other: str) -> None:
    context = empty_context()
    keep(context, KEPT)
    if other == "another version":
        context.state["fedbn-flwr.local.about"]["version"] = 2
    with pytest.raises(StateError, match=r"\(version [12], round 4\)"):
        store(context, OTHERS[other]).load(NAMES)


def test_without_a_context_nothing_can_be_kept(mlp) -> None:
    assert store(None, mlp()).load(NAMES) == {}
    with pytest.raises(StateError, match=r"no Context\. Pass context="):
        keep(None, mlp())
