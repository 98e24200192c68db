"""``flwr run`` that waits for the run: ``run.py APP CONNECTION OPTIONS...``.

It exits with 1 unless the run completes. Flower's own command exits with 0 whatever
becomes of the run, and ends when the SuperLink goes away for a moment.
"""

from __future__ import annotations

import os
import re
import sys
import time

from fedbn_flwr.engines.flower_run import flower_runs, stream
from fedbn_flwr.errors import EngineError

_AWAY_SECONDS = 60.0  # Flower fails a run if the SuperLink is away for longer


def main(app: str, connection: str, *options: str) -> int:
    """Run the app, print its log and its end, and return the exit status."""
    started: list[str] = []

    def show(line: str) -> None:
        print(line, flush=True)
        started.extend(re.findall(r"started run (\d+)", line))

    try:
        stream(["flwr", "run", app, connection, *options], os.environ, show)
        if not started:
            print("flwr run: refused by Flower")
            return 1
        status = _end_of(started[0], connection)
    except KeyboardInterrupt:
        print(f"the run goes on; `flwr stop RUN_ID {connection}` ends it")
        return 130
    print(f"run {started[0]}: {status}")
    return int(status != "finished:completed")


def _end_of(run_id: str, connection: str) -> str:
    """Wait for the end of a run and return Flower's status of it."""
    last_seen = time.monotonic()
    while True:
        try:
            runs = flower_runs(os.environ, connection)
            statuses = {str(run["run-id"]): run["status"] for run in runs}
            status = statuses[run_id]
            last_seen = time.monotonic()
        except EngineError:
            if time.monotonic() > last_seen + _AWAY_SECONDS:
                raise
            status = "unknown"
        if status.startswith("finished"):
            return status
        time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
