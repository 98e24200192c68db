"""The contents of a run's folder, for the report and the doctor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbn_flwr.errors import FedBNError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.results.files import read_json, read_metrics
from fedbn_flwr.lab.results.folder import DIVERGED_AT, is_locked
from fedbn_flwr.lab.results.saved_model import run_config
from fedbn_flwr.lab.results.tester import headlines
from fedbn_flwr.lab.results.tests_table import CLIENTS, OWN_SCORE, metric_in
from fedbn_flwr.messages.protocol import LOSS
from fedbn_flwr.strategies import STRATEGIES
from fedbn_flwr.training.tasks import Score, quantity_of

_TESTS, _NO_METRIC = ("test-", "personal-"), ("-loss", CLIENTS)
"""The beginnings of the keys of main tests in ``metrics.jsonl``, and ends of others."""


@dataclass(frozen=True)
class RunFiles:
    """The contents of a run's folder at one time.

    Attributes:
        folder: the folder.
        config: the run's settings.
        lines: the lines of ``metrics.jsonl``.
        summary: the summary of a finished run, otherwise empty.
        running: whether a process of this machine still writes the folder.
    """

    folder: Path
    config: Config
    lines: list[dict[str, Any]]
    summary: dict[str, Any]
    running: bool

    @classmethod
    def read(cls, folder: Path) -> RunFiles:
        """Read a folder, or raise ConfigError if it does not belong to a run."""
        config = run_config(folder)
        # Read the summary before the lines: with a summary, the lines are complete.
        running = is_locked(folder)
        summary = read_json(folder / "summary.json")
        lines = read_metrics(folder / "metrics.jsonl")
        return cls(folder, config, lines, summary, running)

    @property
    def done(self) -> int:
        """The number of finished rounds."""
        return int(self.summary.get("rounds", len(self.lines)))

    @property
    def title(self) -> str:
        """The name of the method, as in its paper."""
        name = self.config.strategy
        kind = STRATEGIES.get(name)
        return kind.__name__ if kind else name

    @property
    def headline(self) -> str:
        """The key of the main metric."""
        for saved in (self.summary, read_json(self.folder / "data.json")):
            if "headline" in saved:
                return str(saved["headline"])
        try:
            return headlines(self.config)[0]
        # The folder is from version 0.4.0, and its data are not here. Take the first
        # metric of a test.
        except FedBNError:
            for line in self.lines:
                for key in line:
                    if key.startswith(_TESTS) and not key.endswith(_NO_METRIC):
                        return key
            return "test-loss"

    @property
    def metric(self) -> str:
        """The main metric."""
        for saved in (self.summary, read_json(self.folder / "data.json")):
            if OWN_SCORE in saved:
                return metric_in(saved)
        return metric_in({"headline": self.headline})

    def named(self, metric: str) -> str:
        """Return a further metric, with the facts of a metric of a user's test."""
        own = isinstance(self.metric, Score) and quantity_of(metric) != LOSS
        return Score(metric, True, False) if own else metric

    @property
    def tested(self) -> str:
        """The model of the main test: "own" for those of the sites, or "global"."""
        return "own" if self.headline.startswith("personal") else "global"

    @property
    def final(self) -> Mapping[str, Any]:
        """The figures of the result, or of the last line with the main metric."""
        if self.summary.get("final"):
            return dict(self.summary["final"])
        measured = [line for line in self.lines if line.get(self.headline) is not None]
        return measured[-1] if measured else {}

    @property
    def diverged_at(self) -> int:
        """The first round with a non-finite loss, or 0."""
        if self.summary.get(DIVERGED_AT):
            return int(self.summary[DIVERGED_AT])
        return max((int(line.get(DIVERGED_AT, 0)) for line in self.lines), default=0)

    @property
    def has_model(self) -> bool:
        """Whether the run has a usable model.

        A diverged run has none, unless it continued or its best round came earlier.
        """
        if not self.diverged_at or self.config.on_divergence == "continue":
            return True
        # With early stopping, the model is from the best round.
        best = self.summary.get("best-validation", {}).get("round")
        return best is not None and best < self.diverged_at

    @property
    def divergence(self) -> str:
        """The non-finite losses in that round."""
        for line in self.lines:
            if line.get("diverged"):
                return "; ".join(line["diverged"])
        return "a loss is not finite"

    def curve(self, key: str) -> dict[int, float]:
        """Return the values of a metric by round."""
        return {
            line["round"]: line[key] for line in self.lines if line.get(key) is not None
        }

    def missing(self) -> dict[tuple[str, str], list[int]]:
        """Return the rounds by site and reason of a missing reply."""
        found: dict[tuple[str, str], list[int]] = {}
        for line in self.lines:
            for place in line.get("missing", {}).items():
                found.setdefault(place, []).append(line["round"])
        return found


def run_warnings(run: RunFiles) -> Iterator[str]:
    """Yield the warnings that belong before the numbers, the worst first."""
    if not run.summary:
        state = "The run is still running"
        if not run.running:
            state = "The run is not finished, and no process here continues it"
        yield f"{state}: {len(run.lines)} of {run.config.num_server_rounds} rounds."
    reasons: Counter[str] = Counter()
    for line in run.lines:
        reasons.update(line.get("rejected", ()))
    if reasons:
        shown = "; ".join(
            f"{count} times: {reason}" for reason, count in reasons.most_common(3)
        )
        yield f"{reasons.total()} replies of clients were refused ({shown})."
    yield from read_json(run.folder / "data.json").get("warnings", ())
    with suppress(FedBNError):  # its own data are not here
        yield from run.config.warnings()
