"""Early stopping by the best validation score of a run.

The scores are read from ``metrics.jsonl``, so a resumed run decides like an
uninterrupted run. The result of the run is the state after the best round, even if the
run is not stopped early. For this purpose, the checkpoint of the best round is kept,
together with the clients' local state of this round.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import Any

from fedbn_flwr.lab.config import Config, data_of, method_of
from fedbn_flwr.messages.protocol import VALIDATION
from fedbn_flwr.training.tasks import Score


def validation_metric(config: Config) -> str:
    """Return the name of the validation score in ``metrics.jsonl``."""
    score = Score.after(VALIDATION, data_of(config).task.score)
    # The first test of the run determines which models are scored: the clients' own
    # models, or the global model.
    if method_of(config).tests[0].startswith("personal"):
        return Score.after("personal", score)
    return score


class EarlyStopping:
    """The validation scores of a run.

    The score is the main metric of the task for the global model on the validation
    examples of all clients. If the first entry of ``eval-on`` is a personal test, the
    score is the mean over the clients, each with its own validation examples.

    Args:
        config: the settings; ``early-stopping`` is above 0.
        lines: the lines of ``metrics.jsonl`` so far.

    Attributes:
        metric: the name of the score in ``metrics.jsonl``.
    """

    def __init__(self, config: Config, lines: Iterable[Mapping[str, Any]]) -> None:
        self.metric = validation_metric(config)
        self._patience = config.early_stopping
        # +1 if the highest score is the best; -1 for a loss or an error
        self._sign = 1 if data_of(config).task.higher_is_better else -1
        # each round whose score is better than all scores before it; the last of these
        # rounds is the best round
        self._better: list[int] = []
        # the score of the best round, and the number of tested rounds after it
        self._best = -math.inf
        self._since = 0
        for line in lines:
            self.add(line)

    def add(self, line: Mapping[str, Any]) -> None:
        """Record the score of the next round from its line, if the line has a score."""
        if self.metric not in line:
            return
        self._since += 1
        score = line[self.metric]
        # A non-finite score is never an improvement. In a file, such a score is None.
        if score is None or not math.isfinite(score):
            return
        if self._sign * score > self._best:
            self._best = self._sign * score
            self._since = 0
            self._better.append(line["round"])

    def best(self, upto: float = math.inf) -> int | None:
        """Return the round with the best score among the rounds up to ``upto``.

        Of equal rounds, it is the first. It is None if no round has a score.
        """
        at = bisect_right(self._better, upto)
        if at == 0:
            return None
        return self._better[at - 1]

    @property
    def stops(self) -> bool:
        """Whether the score has not improved for ``early-stopping`` tested rounds."""
        return bool(self._better) and self._since >= self._patience
