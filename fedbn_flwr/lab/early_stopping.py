"""Early stopping: which round has the best score on the validation examples, and
whether the run ends.

The scores are those of ``metrics.jsonl``, so a resumed run decides as an uninterrupted
one. The result of the run is the state after the best round, also if the run is not
stopped. That round's checkpoint is kept for it, with what each client kept in that
round.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import Any

from fedbn_flwr.lab.config import Config, data_of, method_of
from fedbn_flwr.messages.protocol import VALIDATION

__all__ = ["EarlyStopping", "validation_metric"]


def validation_metric(config: Config) -> str:
    """Return the name of the main score on the validation examples, in
    ``metrics.jsonl``.
    """
    personal = method_of(config).tests[0].startswith("personal")
    return f"{'personal-' if personal else ''}{VALIDATION}-{data_of(config).task.score}"


class EarlyStopping:
    """The validation scores of a run.

    The score is the main metric of the task: of the global model on the validation
    examples of all clients, or, if the first entry of ``eval-on`` is a personal test,
    the mean over the clients, each with its own part.

    Args:
        config: the settings; ``early-stopping`` is above 0.
        lines: the lines of ``metrics.jsonl`` so far.

    Attributes:
        metric: the name of the score in ``metrics.jsonl``.
    """

    def __init__(self, config: Config, lines: Iterable[Mapping[str, Any]]) -> None:
        self.metric = validation_metric(config)
        self._patience, self._sign = (
            config.early_stopping,
            1 if data_of(config).task.higher_is_better else -1,
        )
        # the rounds with a better score than all before: its last one is the best
        self._better: list[int] = []
        # the score of that round, and the tested rounds after it
        self._best, self._since = -math.inf, 0
        for line in lines:
            self.add(line)

    def add(self, line: Mapping[str, Any]) -> None:
        """Note the score in the line of the next round; a score that is not finite
        improves nothing.
        """
        if self.metric not in line:
            return
        score, self._since = line[self.metric], self._since + 1
        if (
            score is not None
            and math.isfinite(score)
            and self._sign * score > self._best
        ):
            self._best, self._since = self._sign * score, 0
            self._better.append(line["round"])

    def best(self, upto: float = math.inf) -> int | None:
        """Return the first round with the best score, among the rounds up to ``upto``;
        None without a score.
        """
        at = bisect_right(self._better, upto)
        return self._better[at - 1] if at else None

    @property
    def stops(self) -> bool:
        """Whether the score has not improved for as many tested rounds as
        ``early-stopping`` says.
        """
        return bool(self._better) and self._since >= self._patience
