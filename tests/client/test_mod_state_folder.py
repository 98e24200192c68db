"""With a state folder, local state outlives the node's process."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from fedbn_flwr.client.kept import KeptState
from fedbn_flwr.errors import ConfigError, StateError
from fedbn_flwr.messages.protocol import Continuity, MessageConfig
from fedbn_flwr.strategies import FedBN, Scaffold, SiloBN, Standalone
from tests.support.fast import fast
from tests.support.user_loops import hooked_loop

KEEPING = fast([FedBN, SiloBN, Standalone, Scaffold], 1, 3)


@pytest.mark.parametrize("method", KEEPING)
def test_a_resumed_run_continues_on_new_nodes(
    on_disk, run_app, user_app, same_bits, method
) -> None:
    whole = run_app(method(), user_app(hooked_loop, query=True), rounds=3)
    first, after = on_disk(method(), 1), method()
    after.load_state_dict(first.strategy.state_dict(), 1)
    same_bits(on_disk(after, 3, start=first.state).state, whole.state)
    assert after.run.kept.hashes == whole.strategy.run.kept.hashes
    assert [report.rejected for report in after.reports] == [{}] * 2


def test_a_state_folder_needs_a_partition_id_and_an_absolute_path(tmp_path) -> None:
    def opened(partition_id: int | None, folder: str, run: str | None = "r") -> bool:
        """Return whether the client keeps its state in a folder."""
        context = Context(1, 1, {"state-dir": folder}, RecordDict(), {})
        sent = MessageConfig(continuity=Continuity(run) if run else None)
        kept = KeptState(context, sent, partition_id)
        kept.check("")
        kept.keep({"x": np.zeros(1)}, {}, 1)
        return kept.reply_metadata()["fedbn-flwr.local-home"] == "folder"

    assert opened(3, str(tmp_path))
    assert (tmp_path / "r/partition-3").is_dir()
    assert not opened(3, str(tmp_path), run=None)
    assert not opened(3, "")
    with pytest.raises(StateError, match="needs a partition id"):
        opened(None, str(tmp_path))
    with pytest.raises(ConfigError, match="state-dir='x' is relative"):
        opened(3, "x")
