"""Which parts of the state the saved model of a run has, and those that its clients kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fedbn_flwr.batchnorm.averaging import State
from fedbn_flwr.batchnorm.parts import Part
from fedbn_flwr.client.saved_state import ABSENT, AVERAGED, scale_in
from fedbn_flwr.client.state_folder import StateFolder
from fedbn_flwr.lab.config import STATE_IN_OUT, Config, state_in_out
from fedbn_flwr.messages.protocol import INPUT_SCALE, KEPT
from fedbn_flwr.server.shared_bn import SHARED_BN
from fedbn_flwr.server.testing import completing_entries
from fedbn_flwr.strategies import Strategy
from fedbn_flwr.training.input_scale import Scale

__all__ = ["contents_of_model", "kept_by_clients"]


def contents_of_model(strategy: Strategy | None) -> dict[str, str]:
    """Return the content of each part of ``model.safetensors``: its metadata, and ``model`` of the summary."""
    about = {part.value: "global" for part in Part}
    if strategy:
        averaged = completing_entries(strategy.run, SHARED_BN)
        kept = {part for part in strategy.local if strategy.run.parts.select([part])}
        about |= dict.fromkeys(kept, AVERAGED if averaged else ABSENT)
        if strategy.methods.reestimates and strategy.run.reestimated:
            about[Part.STATISTICS.value] = "re-estimated from the clients' data under these weights"
            if about[Part.COUNTERS.value] == ABSENT:
                about[Part.COUNTERS.value] = "initial values"  # a model with statistics is whole with them
    return about


def kept_by_clients(config: Config, strategy: Strategy, model: State) -> Iterator[tuple[str, State, Scale | None]]:
    """Yield (client, entries, mean and std of its inputs) of each client whose part lies on this disk.

    It is as the run left it. Under ``standardise=local`` a client has a part also where a method keeps no entries.
    """
    own_scale = config.standardise == "local"
    if not (strategy.local or own_scale) or strategy.continuity is None or not config.state_dir:
        return
    hashes = dict.fromkeys(map(str, range(config.num_clients)), "") if own_scale else {}
    hashes |= strategy.run.kept.hashes
    fingerprint = strategy.run.parts.fingerprint({name: array.shape for name, array in model.items()})
    root = state_in_out(config) if config.state_dir == STATE_IN_OUT else Path(config.state_dir)
    for client, sha256 in hashes.items():
        folder = StateFolder(root, strategy.continuity, int(client), fingerprint)
        content = folder.look_up(sha256) or {"kept": {}}
        if KEPT in content["kept"] or INPUT_SCALE in content:
            yield client, content["kept"].get(KEPT, {}), scale_in(content)
