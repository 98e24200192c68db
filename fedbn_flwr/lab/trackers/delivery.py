"""Bringing the rounds of a run to a tracker without waiting for it."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from fedbn_flwr.lab.trackers.interface import Tracker, numbers_of, summary_of_run

__all__ = ["Delivery"]

logger = logging.getLogger("flwr")

SECONDS_TO_END = 20.0  # that the end of a run waits for its trackers

_Call = tuple[bool, Mapping[str, float | str] | None]  # whether the run has ended, and its summary


class Delivery:
    """Gives one tracker each round once, in order, from a thread of its own.

    A tracker that is slow, or that fails because its network is down, neither ends nor slows the run: there is one
    warning, the rounds are kept, and they are tried again with each later round and at the end.

    Args:
        tracker: where the rounds go.
        lines: the rounds that a resumed run has already; what the tracker lacks of them is sent.
    """

    def __init__(self, tracker: Tracker, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self._tracker = tracker
        self._last: int | None = None  # the last round that the tracker has; None: it is not open yet
        self._waiting: deque[Mapping[str, Any]] = deque(lines)
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._deadline: float | None = None
        self._thread: threading.Thread | None = threading.Thread(target=self._work, daemon=True, name=tracker.key)
        self._thread.start()

    def add_round(self, line: Mapping[str, Any]) -> None:
        """Take a line of ``metrics.jsonl``; returns at once."""
        self._waiting.append(line)
        self._calls.put((False, None))

    def end(self, summary: Mapping[str, Any] | None) -> None:
        """Send what is left and end the run there; returns at once. Without effect on a run that has ended.

        Args:
            summary: the content of ``summary.json``; None for a run that failed or was interrupted.
        """
        if self._deadline is None:
            self._deadline = time.monotonic() + SECONDS_TO_END
            self._calls.put((True, summary and summary_of_run(summary)))

    def wait(self) -> None:
        """Wait until all is sent, but not past the time after ``end``; a second call does nothing."""
        if self._thread is None or self._deadline is None:
            return
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        still_at_work, self._thread = self._thread.is_alive(), None
        if self._waiting or still_at_work:
            logger.warning(
                "%s lacks the last %d of the run's rounds, or its end. metrics.jsonl has all of them; a resume of the "
                "run sends them.",
                self._tracker.key,
                len(self._waiting),
            )

    def _work(self) -> None:
        ended, warned = False, False
        while not ended:
            ended, summary = self._calls.get()
            try:
                self._deliver()
                warned = False
            except Exception as error:  # whatever a service, its package or the network raises
                if not warned:
                    self._warn("does not take the run's rounds", error, "The run goes on; they are sent again later.")
                warned = True
        if self._waiting:  # `wait` says so
            return
        try:
            self._tracker.close(summary)
        except Exception as error:  # as above
            what = "has all rounds of the run and did not take its end"
            self._warn(what, error, "There it may look as if it still ran.")

    def _deliver(self) -> None:
        if self._last is None:
            self._last = self._tracker.open()
        while self._waiting:
            line = self._waiting[0]
            if line["round"] > self._last:
                self._tracker.add_round(line["round"], numbers_of(line))
                self._last = line["round"]
            self._waiting.popleft()

    def _warn(self, what: str, error: Exception, then: str) -> None:
        logger.warning("%s %s: %s: %s. %s", self._tracker.key, what, type(error).__name__, error, then)
