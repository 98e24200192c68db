"""With a state folder, local state outlives the node's process."""

from __future__ import annotations

from typing import Any

import pytest
from flwr.app import Context, Message, RecordDict
from torch import nn

from fedbn_flwr.client.kept_files import Continuity
from fedbn_flwr.client.model_spec import StateLocation
from fedbn_flwr.errors import ConfigError, StateError
from fedbn_flwr.messages.records import from_record
from fedbn_flwr.strategies import FedBN, Scaffold, SiloBN, Standalone
from tests.support.fast import fast
from tests.support.user_loops import SIZES, hooked_loop


def restarted(message: Message, context: Context, call_next: Any) -> Message:
    """Empty the context in round 2, as for a node with a new process."""
    if (config := message.content.config_records.get("config")) and config[
        "server-round"
    ] == 2:
        for key in list(context.state):
            del context.state[key]
    return call_next(message, context)


KEEPING = fast([FedBN, SiloBN, Standalone, Scaffold], 1, 3)


@pytest.mark.parametrize("method", KEEPING)
def test_a_restarted_node_continues_with_its_part(
    on_disk, run_app, user_app, same_bits, method: Any
) -> None:
    plain, strategy = (
        run_app(method(), user_app(hooked_loop, query=True)),
        method(fraction_evaluate=0.0),
    )
    same_bits(on_disk(strategy, 3, mods=(restarted,)).state, plain.state)
    assert strategy.run.kept.hashes == plain.strategy.run.kept.hashes != {}
    assert [report.participants for report in strategy.reports] == [[0, 1, 2]] * 3
    assert strategy.run.kept.volatile == set()
    assert plain.strategy.run.kept.volatile == {"0", "1", "2"}


@pytest.mark.parametrize("method", KEEPING)
def test_a_resumed_run_continues_on_new_nodes(
    on_disk, run_app, user_app, same_bits, method: Any
) -> None:
    whole, before, after = (
        run_app(method(), user_app(hooked_loop, query=True), rounds=3),
        method(),
        method(),
    )
    first = on_disk(before, 1)
    after.load_state_dict(before.state_dict(), 1)
    same_bits(on_disk(after, 3, start=first.state).state, whole.state)
    assert after.run.kept.hashes == whole.strategy.run.kept.hashes
    assert [report.rejected for report in after.reports] == [{}] * 2


def test_the_next_run_of_an_experiment_starts_from_the_parts_of_the_last_run(
    on_disk, same_bits
) -> None:
    first = on_disk(FedBN(), 2)
    seen: dict[int, dict[str, Any]] = {}

    def look(model: nn.Module, data: Any, msg: Message, context: Context) -> float:
        seen[int(context.node_config["partition-id"])] = from_record(
            msg.content["arrays"]
        )
        return 0.0

    on_disk(FedBN(), 1, run_id="second", loop=look)
    for i in range(len(SIZES)):
        own = first.local_state(i)
        same_bits({name: seen[i][name] for name in own}, own)


def test_a_state_folder_needs_a_partition_id_and_an_absolute_path(tmp_path) -> None:
    experiment = Continuity("experiment", "run")

    def location(node: Any, run: Any = None, continuity: Any = experiment) -> Any:
        return StateLocation.of(
            Context(1, 1, node, RecordDict(), run or {}), continuity
        )

    own = {"partition-id": 3, "state-dir": str(tmp_path)}
    assert (
        location(own, {"state-dir": "/other"}).path.parent
        == tmp_path / "experiment/partition-3"
    )
    assert location(own, continuity=None) is None
    assert location({"partition-id": 3}) is None
    with pytest.raises(StateError, match="needs a partition id"):
        location({"state-dir": str(tmp_path)})
    with pytest.raises(ConfigError, match="state-dir='x' is relative"):
        location({"partition-id": 3, "state-dir": "x"})
