"""Local state is checked against the model and the client that uses it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context
from torch import nn

from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.client.kept import Folder, KeptState, Memory, hand_over, kept_by
from fedbn_flwr.errors import STATISTICS_NOT_FINITE, StateError, code_of
from fedbn_flwr.messages.protocol import Continuity, MessageConfig
from fedbn_flwr.messages.records import to_state
from fedbn_flwr.training.client_hook import ClientHook
from tests.support.in_process import empty_context

TRACKED = ("running_mean", "running_var", "num_batches_tracked")
NAMES = [f"1.{leaf}" for leaf in TRACKED]


def opened(
    context: Context | None,
    model: nn.Module,
    partition_id: int | None = 3,
    folder: Path | None = None,
    **sent: Any,
) -> KeptState:
    kept = KeptState(context, MessageConfig(**sent), partition_id, folder)
    shapes = {n: tuple(e.shape) for n, e in model.state_dict().items()}
    kept.check(split_state(model).fingerprint(shapes))
    return kept


def own(model: nn.Module) -> dict[str, np.ndarray]:
    state = to_state(model.state_dict())
    return {name: array for name, array in state.items() if name.endswith(TRACKED)}


def keep(
    context: Context | None, model: nn.Module, server_round: int = 4, **sent: Any
) -> str:
    """Keep the statistics of the model, and return the hash."""
    kept = opened(context, model, **sent)
    kept.keep(own(model), kept.of_hooks, server_round)
    return kept.reply_metadata()["fedbn-flwr.local-sha256"]


def test_what_is_kept_is_a_copy_and_is_loaded_again(mlp, same_bits) -> None:
    context, model = empty_context(), mlp()
    keep(context, model)
    model[1].running_mean += 1
    same_bits(opened(context, model).load(NAMES), own(mlp()))
    assert opened(context, model).load(["1.weight"]) == {}, "not kept"


class Counting(ClientHook):
    def receive(self, sent, kept) -> None:
        self.found = kept

    def keep(self) -> dict[str, torch.Tensor]:
        return {"count": torch.ones(2)}


def test_a_hook_may_change_the_entries_that_it_gets(mlp) -> None:
    """The kept state does not change, because the round may be undone."""
    context, model, hooks = empty_context(), mlp(), {"counting": Counting()}
    opened(context, model).keep({}, kept_by(hooks, {}), 4)
    for _ in range(2):
        hand_over(hooks, {}, opened(context, model).of_hooks)
        assert hooks["counting"].found["count"].tolist() == [1, 1]
        hooks["counting"].found["count"] += 1


def test_entries_that_a_round_does_not_keep_stay(mlp, same_bits) -> None:
    context, model = empty_context(), mlp()
    keep(context, model, 4)
    opened(context, model).keep({}, kept_by({"counting": Counting()}, {}), 5)
    same_bits(opened(context, model).load(NAMES), own(model))
    keep(context, model, 6)
    of_hooks = opened(context, model).of_hooks
    assert of_hooks.keys() == {"counting/count"}
    assert kept_by({"other": ClientHook()}, of_hooks) == of_hooks


def test_what_is_kept_has_begun_in_the_round_in_which_nothing_was_kept_before(
    mlp,
) -> None:
    """Memory has one state if the server asks for no other."""
    context, model = empty_context(), mlp()
    continuity, began = Continuity("r", (4, 5)), []
    for server_round in (4, 5, 9):
        kept = opened(context, model, continuity=continuity)
        kept.keep(own(model), kept.of_hooks, server_round)
        began.append("fedbn-flwr.local-began" in kept.reply_metadata())
        assert len(Memory(context).names()) == 1
    assert began == [True, False, False]


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_client_continues_from_the_state_that_the_server_names(
    mlp, on_disk: bool, tmp_path
) -> None:
    place = {"folder": tmp_path if on_disk else None}
    place["continuity"] = Continuity("r", (4,)) if on_disk else None
    context, model = empty_context(), mlp()
    hashes = {}
    for server_round in (4, 5):
        model[1].running_mean += 1
        named = {"used_sha256": hashes.get(4, "")}  # the method undoes rounds
        hashes[server_round] = keep(context, model, server_round, **place, **named)

    def mean(**sent) -> float | None:
        kept = opened(context, model, **place, **sent).load(NAMES)
        return float(kept["1.running_mean"][0]) if kept else None

    assert mean() == mean(used_sha256=hashes[5]) == 2
    with pytest.raises(StateError, match="the local state is lost"):
        mean(local_sha256="0" * 64)
    assert mean() == 2, "a refusal loses nothing"
    assert mean(used_sha256="0" * 64) is None, "the client starts again"
    assert mean(local_sha256=hashes[4]) == 1
    assert mean() == 1, "round 5 is undone"
    assert mean(used_sha256="") is None
    assert mean() is None


def test_a_state_that_diverged_is_not_kept(mlp) -> None:
    context, model = empty_context(), mlp()
    keep(context, model)
    model[1].running_mean[0] = torch.nan
    with pytest.raises(StateError) as caught:
        keep(context, model, 5)
    assert code_of(str(caught.value)) == STATISTICS_NOT_FINITE
    with pytest.raises(StateError):
        opened(context, mlp()).keep({}, {"ditto/w": np.array([np.nan])}, 5)
    assert opened(context, model).load(NAMES)["1.running_mean"].tolist() == [0] * 4


def test_a_start_begins_without_the_state_of_an_earlier_start(mlp) -> None:
    context, model = empty_context(), mlp()
    kept = keep(context, model)
    # The server may name a state of an earlier start.
    assert opened(context, model, start_id="1", local_sha256=kept).load(NAMES)
    assert not opened(context, model, start_id="1").load(NAMES)
    assert not opened(context, model).load(NAMES), "no later start finds it again"


KEPT, SHAPE = nn.BatchNorm2d(4), nn.BatchNorm2d(5)
KIND = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)


@pytest.mark.parametrize(
    ("layer", "partition_id", "said"),
    [
        (SHAPE, 3, "belongs to another model"),
        (KIND, 3, "belongs to another model"),
        (KEPT, 2, "belongs to the client 3"),
    ],
    ids=["another shape", "another type", "another client"],
)
def test_what_another_model_or_client_kept_is_refused(
    layer: nn.Module, partition_id: int, said: str
) -> None:
    context, second = empty_context(), nn.BatchNorm2d(4)
    keep(context, nn.Sequential(KEPT, second))
    with pytest.raises(StateError, match=said):
        opened(context, nn.Sequential(layer, second), partition_id)


def test_without_a_context_nothing_can_be_kept(mlp) -> None:
    assert opened(None, mlp()).load(NAMES) == {}
    with pytest.raises(StateError, match=r"no Context\. Pass context="):
        keep(None, mlp())


def test_a_folder_has_each_state_for_which_a_resumed_run_may_ask(mlp, tmp_path) -> None:
    """The server names the state of the last reply that arrived, in any checkpoint."""
    draw = random.Random(0)
    for run in range(20):
        model, known, checkpoints = mlp(), "", {}
        for server_round in range(1, 9):
            saved = tuple(checkpoints)[-2:]
            model[1].running_mean += 1
            if draw.random() < 0.7:
                new = keep(
                    empty_context(),
                    model,
                    server_round,
                    continuity=Continuity(f"r{run}", saved),
                    folder=tmp_path,
                    used_sha256=known,
                )
                known = draw.choice([new, new, known])  # the reply may be lost
            for asked in (known, *(checkpoints[at] for at in saved)):
                names = Folder(tmp_path, f"r{run}", 3).names()
                assert not asked or any(name.endswith(asked) for name in names)
            if draw.random() < 0.5:
                checkpoints[server_round] = known
