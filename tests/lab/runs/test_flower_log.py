"""During the run, Flower's simulation log shows only warnings and errors."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from fedbn_flwr.errors import EngineError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.runs import simulation
from fedbn_flwr.lab.runs.simulation import echo

LOG = """Using SuperLink: private (127.0.0.1:49783)
INFO :      Starting Flower Simulation
WARNING :   Since flwr 1.32, default simulated SuperNodes changed from 10 to 2.
Successfully installed fedbn-simulation to /tmp/a.
WARNING :   fixbn: BN is never frozen.
  Use a smaller freeze-at.
INFO :      [ROUND 1/2]
a line that a user's model prints: WARNING : no
/ray/worker.py:2051: FutureWarning: Tip: In future versions
(ClientAppActor pid=5821) WARNING :   a client's warning [repeated 2x across cluster]
(ClientAppActor pid=5822) printed by another client
(ClientAppActor pid=5821)   and its second line
(ClientAppActor pid=5821, ip=10.0.0.2) INFO 2026-11-22 10:11:12,345:  fine
WARNING 2026-11-22 10:11:12,345:  with a time: and a colon
ERROR :     node 3: refused
CRITICAL :  the end
Traceback (most recent call last):
  File "a.py", line 3
(ClientAppActor pid=5821) WARNING :   Manually terminating ClientAppActor
INFO :"""


def shown(lines: list[str], caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    with caplog.at_level(logging.DEBUG, "flwr"):
        for line in lines:
            echo(line)
    return [(record.levelname, record.getMessage()) for record in caplog.records]


def test_warnings_and_errors_are_echoed(caplog: pytest.LogCaptureFixture) -> None:
    assert shown(LOG.splitlines(), caplog) == [
        ("WARNING", "fixbn: BN is never frozen."),
        (
            "WARNING",
            "(ClientAppActor pid=5821) a client's warning [repeated 2x across cluster]",
        ),
        ("WARNING", "with a time: and a colon"),
        ("ERROR", "node 3: refused"),
        ("CRITICAL", "the end"),
    ]


def test_the_lines_are_those_of_flowers_handler(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Flower's own format, with and without the times of FLWR_LOG_LEVEL=DEBUG."""
    from flwr.common.logger import ConsoleHandler

    record = logging.LogRecord(
        "flwr", logging.WARNING, "a.py", 1, "node %d: refused", (3,), None
    )
    lines = [
        ConsoleHandler(timestamps=timestamps, colored=False).format(record)
        for timestamps in (False, True)
    ]
    assert shown(lines, caplog) == [("WARNING", "node 3: refused")] * 2


def test_a_simulation_shows_warnings_at_once_and_names_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failed(*args, on_line, **kwargs) -> None:
        on_line("WARNING :   refused replies")
        assert "refused replies" in caplog.text, "before the run ends"
        (tmp_path / "out").mkdir()
        raise EngineError("flwr run: finished:failed")

    monkeypatch.setattr(simulation, "flower_run", failed)
    with pytest.raises(
        EngineError,
        match=rf"finished:failed(?s:.*)The whole log: {tmp_path}/out/flower.log",
    ):
        simulation.simulate(Config.make({"num-clients": 2}), tmp_path / "out")
    assert (tmp_path / "out/flower.log").read_text() == "WARNING :   refused replies\n"


def test_what_the_callback_raises_ends_the_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flower_run(*args: object, **options: object) -> None:
        (tmp_path / "metrics.jsonl").write_text('{"round": 1}\n')
        (tmp_path / "summary.json").write_text('{"rounds": 1}')

    def on_round(line: dict[str, object]) -> None:
        raise KeyError(line["round"])

    monkeypatch.setattr(simulation, "flower_run", flower_run)
    config = Config.make({"num-clients": 2, "out": str(tmp_path)})
    assert simulation.simulate(config, tmp_path, lambda line: None) == {"rounds": 1}
    with pytest.raises(KeyError, match="1"):
        simulation.simulate(config, tmp_path, on_round)
