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
from fedbn_flwr.lab.files import lost_lines, read_json, read_metrics
from fedbn_flwr.lab.finished_runs.saved_model import run_config
from fedbn_flwr.lab.output.folder import DIVERGED_AT
from fedbn_flwr.lab.output.run_tests import headlines
from fedbn_flwr.training.tasks import in_percent


@dataclass(frozen=True)
class RunFiles:
    """The contents of a run's folder at one time.

    Attributes:
        folder: the folder.
        config: the run's settings.
        lines: the lines of ``metrics.jsonl``; empty if a finished run has lost some.
        summary: the summary of a finished run, otherwise empty.
        lost: a text on lost lines; "" if there are none.
    """

    folder: Path
    config: Config
    lines: list[dict[str, Any]]
    summary: dict[str, Any]
    lost: str

    @classmethod
    def read(cls, folder: Path) -> RunFiles:
        """Read a folder, or raise ConfigError if it does not belong to a run."""
        config = run_config(folder)
        # Read the summary before the lines: with a summary, the lines are complete.
        summary = read_json(folder / "summary.json")
        lines = read_metrics(folder / "metrics.jsonl")
        lost = lost_lines(summary, lines) if summary else ""
        return cls(folder, config, [] if lost else lines, summary, lost)

    @property
    def headline(self) -> str:
        """The key of the main metric."""
        try:
            return str(self.summary.get("headline") or headlines(self.config)[0])
        # The config's data are not here, so take the first metric of a test.
        except FedBNError:
            for line in self.lines:
                for key in line:
                    is_test = key.startswith(("test-", "personal-"))
                    if is_test and not key.endswith("-loss"):
                        return key
            return "test-loss"

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
    def divergence(self) -> str:
        """The non-finite losses in that round."""
        for line in self.lines:
            if line.get("diverged"):
                return "; ".join(line["diverged"])
        return "a loss is not finite"

    def curve(self, key: str) -> tuple[list[int], list[float]]:
        """Return the rounds that have a metric, and its values in the shown unit."""
        tested = [line for line in self.lines if line.get(key) is not None]
        scale = 100 if in_percent(key) else 1
        rounds = [line["round"] for line in tested]
        return rounds, [scale * line[key] for line in tested]


def run_warnings(run: RunFiles) -> Iterator[str]:
    """Yield the warnings that belong before the numbers, the worst first."""
    if run.diverged_at:
        yield f"The run diverged in round {run.diverged_at}: {run.divergence}."
    if not run.summary:
        yield (
            f"The run is not finished: {len(run.lines)} of"
            f" {run.config.num_server_rounds} rounds."
        )
    reasons: Counter[str] = Counter()
    for line in run.lines:
        reasons.update(line.get("rejected", ()))
    if reasons:
        shown = "; ".join(
            f"{count} times: {reason}" for reason, count in reasons.most_common(3)
        )
        yield f"{reasons.total()} replies of clients were refused ({shown})."
    with suppress(FedBNError):  # its own data are not here
        yield from run.config.warnings()
