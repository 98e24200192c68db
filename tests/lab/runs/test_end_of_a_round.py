"""The server's test only reads, and a round is written at its end."""

from __future__ import annotations

from typing import Any

import pytest
from flwr.app import ArrayRecord

from fedbn_flwr.lab.output.checkpoint import Checkpoints
from fedbn_flwr.lab.output.folder import RunFolder
from fedbn_flwr.strategies import FedAvg
from tests.support.runs import lines_of


def test_the_files_of_a_round_are_written_after_its_tests(
    quick_run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line is written before the checkpoint.

    A resumed run repeats only rounds after its checkpoint.
    """
    events: list[str] = []
    returned: dict[int, Any] = {}

    def note(kind: type, name: str, what: Any) -> None:
        real = getattr(kind, name)

        def noting(self: Any, *args: Any) -> Any:
            events.append(what(*args))
            return real(self, *args)

        monkeypatch.setattr(kind, name, noting)

    start = FedAvg.start

    def starting(self: Any, *args: Any, evaluate_fn: Any, **named: Any) -> Any:
        def test(server_round: int, arrays: ArrayRecord) -> Any:
            returned[server_round] = evaluate_fn(server_round, arrays)
            events.append(f"tested {server_round}")
            return returned[server_round]

        return start(self, *args, evaluate_fn=test, **named)

    monkeypatch.setattr(FedAvg, "start", starting)
    note(RunFolder, "append", lambda name, line: f"{name} {line['round']}")
    note(
        Checkpoints,
        "save",
        lambda checkpoint, _: f"checkpoint {checkpoint.server_round}",
    )
    _, out = quick_run(**{"eval-every": 2, "checkpoint-every": 1})
    ends = [
        [
            f"tested {n}",
            f"metrics.jsonl {n}",
            f"checkpoint {n}",
        ]
        for n in (1, 2)
    ]
    assert events == ["checkpoint 0", "tested 0", *ends[0], *ends[1]]
    assert returned[0] is None
    assert returned[1] is None, "this round has no test"
    lines = lines_of(out)
    assert dict(returned[2]) == {
        name: lines[1][name] for name in ("test-loss", "test-accuracy")
    }
