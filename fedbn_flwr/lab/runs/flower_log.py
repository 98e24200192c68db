"""The log of a Flower run, line by line: its warnings and errors are shown."""

from __future__ import annotations

import logging
import re

__all__ = ["LogEcho"]

logger = logging.getLogger("flwr")

_SOURCE = r"(?P<source>\([^()]*\bpid=\d+[^()]*\) ?)?"  # Ray names the process of a client: "(ClientAppActor pid=7) "
_TIME = r"(?: ?\d[\d-]* [\d:,.]+)?"  # with FLWR_LOG_LEVEL=DEBUG
_RECORD = re.compile(rf"{_SOURCE}(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL){_TIME} ?:\s*(?P<text>.*)")
_LINE = re.compile(rf"{_SOURCE}(?P<text>.*)")
_OF_EVERY_RUN = ("Since flwr 1.32, default simulated SuperNodes", "Manually terminating ClientAppActor")
"""Warnings of Flower that each simulation has and that say nothing about the run."""


class LogEcho:
    """Logs the warnings and errors in the lines of a Flower run's log; call it with each line.

    A line without a level belongs to the message before it from the same process. A traceback is left out.
    """

    def __init__(self) -> None:
        self._levels: dict[str, int] = {}  # by process: the level of its last message

    def __call__(self, line: str) -> None:
        """Log the line if it is of a warning or an error."""
        record = _RECORD.match(line)
        parts = record or _LINE.match(line)
        source, text = (parts["source"] or "", parts["text"]) if parts else ("", line)
        if record:
            self._levels[source] = logging.getLevelNamesMapping()[record["level"]]
        if text.startswith((*_OF_EVERY_RUN, "Traceback ")):
            self._levels[source] = logging.NOTSET
        level = self._levels.get(source, logging.NOTSET)
        if level >= logging.WARNING and text.strip():
            logger.log(level, "%s%s", source, text)
