"""``to_legacy`` works under ``flwr.server.start_server``.

Its clients have ids that are not numbers, and no node config.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import GetPropertiesIns

from apps.flower_processes import free_port
from fedbn_flwr import TorchClient, to_client_fn
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.mods import bn_mod
from fedbn_flwr.strategies import FedBN
from fedbn_flwr.training import LocalTraining
from tests.support import start_server


def test_fedbn_runs_with_the_mod(run_legacy_loop, tmp_path, at_once) -> None:
    """The final model has the bits of ``ServerAppComponents`` with the same clients."""
    with start_server.processes(tmp_path, free_port(), at_once) as started:
        want = run_legacy_loop(
            FedBN(),
            start_server.project_app("numpy"),
            start_server.model().state_dict(),
            len(start_server.SIZES),
            start_server.ROUNDS,
        )
        # If a client fails, the other clients keep waiting.
        until = time.monotonic() + 600
        codes = [process.poll() for process in started]
        while None in codes and not any(codes) and time.monotonic() < until:
            time.sleep(0.05)
            codes = [process.poll() for process in started]
        assert codes == [0] * len(started), logs(tmp_path)
    found = []
    for name in ("final.npz", f"round-{start_server.ROUNDS}.npz"):
        with np.load(tmp_path / name) as got:
            found.append([array.tobytes() for array in got.values()])
    final, saved = found
    assert saved == final
    assert final == [array.tobytes() for array in want.history[-1]]


def logs(folder: Path) -> str:
    """Return the end of each process's output."""
    return "\n".join(path.read_text()[-2000:] for path in folder.glob("*.log"))


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_a_client_without_id_and_without_partition_id_is_refused(kind: str) -> None:
    """All clients of ``start_client`` have the node id -1.

    They would draw the same batches.
    """
    app = start_server.project_app(kind)
    if kind == "torch":
        app = ClientApp(lambda context: TorchClient(*UNNAMED, context=context))
    client = to_client_fn(app)(Context(0, -1, {}, RecordDict(), {}))  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        client.get_properties(GetPropertiesIns({}))


UNNAMED = (
    start_server.model(),
    start_server.points(0),
    start_server.points(0),
    LocalTraining(learning_rate=0.1, batch_size=4),
)


@pytest.mark.parametrize(
    ("said", "known"),
    [({}, 3), ({"partition-id": 7}, 7), ({"partition-id": 0}, 0)]
    # The server ignores a text or a float.
    + [({"partition-id": other}, 3) for other in ("7", 7.0, True)],
)
def test_a_client_may_say_another_partition_id_than_its_node_config(
    said: dict[str, Any], known: int
) -> None:
    class Speaks(NumPyClient):
        def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
            return said

    app = ClientApp(lambda context: Speaks().to_client(), mods=[bn_mod])
    context = Context(0, -1, {"partition-id": 9}, RecordDict(), {})
    client = to_client_fn(app, {"partition-id": 3})(context)
    assert client.get_properties(GetPropertiesIns({})).properties == {
        "partition-id": known
    }


def test_the_lines_of_the_page_are_those_that_ran() -> None:
    page = Path("docs/flower-projects.md").read_text()
    block = page.partition("### start_server")[2].split("```")[1]
    ran = Path(start_server.__file__).read_text()
    lines = [line.strip() for line in block.splitlines()[1:]]
    lines = [line for line in lines if line and not line.startswith("#")]
    assert [line for line in lines if line not in ran] == []
