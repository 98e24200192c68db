"""``flwr run`` that waits for the run: ``run.py APP CONNECTION OPTIONS...``.

It shows the run's log until the run ends, even if the SuperLink is away for a while,
and exits with 1 unless the run completes. Flower's own command exits with 0 even if the
run fails, and ends if the SuperLink is away for a moment.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping

from apps.flower_processes import flower_runs, stream, why_not_reached
from fedbn_flwr.errors import EngineError

_AWAY_SECONDS = 60.0  # Flower fails a run if the SuperLink is away longer


def main(app: str, connection: str, *options: str) -> int:
    """Run the app, print its log and its end, and return the exit status."""
    run = _Run(connection)
    try:
        run.show("run", app, connection, *options)
        if not run.id:
            reason = why_not_reached(connection)
            print(f"flwr run: {reason or 'refused by Flower'}")
            return 1
        end = _end_of(run)
    except KeyboardInterrupt:
        print(f"the run continues; to end it: flwr stop RUN_ID {connection}")
        return 130
    if end["status"] == "finished:completed":
        print(f"run {run.id}: {end['status']}")
        return 0
    print(f"run {run.id}: {end['status']}: {end['status-details']}")
    if run.how_to_resume:
        print(run.how_to_resume)
    return 1


class _Run:
    """A run, as Flower's commands show it.

    Attributes:
        id: Flower's number of the run; "" until the run has started.
        how_to_resume: the line of the app's log on how to resume the run; "" if the
            log has no such line.
        connection: the SuperLink's name in Flower's config.
    """

    def __init__(self, connection: str) -> None:
        self.id = ""
        self.how_to_resume = ""
        self.connection = connection
        # the lines of the log that the last command has shown, and the lines of this
        # command
        self._before: list[str] = []
        self._now: list[str] = []
        self._repeats = False

    def show(self, *words: str) -> None:
        """Show the output of a ``flwr`` command without lines that were shown before."""
        stream(["flwr", *words], os.environ, self._show_line)

    def show_log(self) -> None:
        """Show the log until the run ends, or the SuperLink goes away."""
        self.show("log", self.id, self.connection, "--stream")

    def _show_line(self, line: str) -> None:
        # Flower begins the log again, from its first line.
        if "Starting logstream for run_id" in line:
            self._before, self._now, self._repeats = self._now, [], True
        place = len(self._now)
        self._now.append(line)
        self._repeats = self._repeats and self._before[place : place + 1] == [line]
        if self._repeats:
            return
        print(line, flush=True)
        started = re.search(r"started run (\d+)", line)
        if started:
            self.id = started[1]
        if "resume=true" in line:
            self.how_to_resume = line.partition(":")[2].strip()

    def status(self) -> Mapping[str, str] | None:
        """Return Flower's entry of the run; None if the SuperLink does not answer."""
        try:
            runs = flower_runs(os.environ, self.connection)
        except EngineError:
            return None
        return {run["run-id"]: run for run in runs}.get(self.id)


def _end_of(run: _Run) -> Mapping[str, str]:
    """Wait for the end of a run, and return Flower's last entry of it."""
    gone_at: float | None = None
    while True:
        status = run.status()
        now = time.monotonic()
        if status is None:
            if gone_at is None:
                gone_at = now
                _say(
                    "the SuperLink does not answer; the run continues if the SuperLink"
                    f" is back in {_AWAY_SECONDS:.0f} s"
                )
            elif now > gone_at + _AWAY_SECONDS:
                why = f"no answer from the SuperLink for {_AWAY_SECONDS:.0f} s"
                why = f"{why}. {why_not_reached(run.connection)}"
                return {"status": "unknown", "status-details": why}
        elif gone_at is None and status["status"].startswith("finished"):
            return status
        else:
            if gone_at is not None:
                _say(f"the SuperLink is back after {now - gone_at:.0f} s")
                gone_at = None
            run.show_log()
        time.sleep(0.5)


def _say(text: str) -> None:
    print(time.strftime("%X"), text, flush=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
