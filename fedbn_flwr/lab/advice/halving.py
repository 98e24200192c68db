"""Do short runs of all candidates and rates, then longer runs of the better half.

Each trial is a complete run. A method that changes during a run, such as FixBN at half
of the rounds, also changes in a short trial, at the same share of the rounds. A trial
that stops in the middle of a long run would favour low rates for such methods.
All trials have one seed, so they have the same data, initial weights and batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedbn_flwr.errors import ConfigError, RunFailedError
from fedbn_flwr.lab.advice.candidates import ALONE, FEDAVG, Candidate, Settings
from fedbn_flwr.lab.config import Scalar, number, split
from fedbn_flwr.lab.studies.one_run import failure_of, is_done
from fedbn_flwr.lab.studies.study import Cell, trial_name
from fedbn_flwr.lab.studies.tuning import score_of
from fedbn_flwr.training.tasks import higher_is_better

SHORTEST = 4
"""The fewest rounds of a trial: FixBN has two rounds before its freeze, and two after."""

LOOK = 5
"""The rounds of FedAvg before the trials."""

_PHASES = {"fixbn": ("freeze-at", 0.5), "fedtan2": ("fedtan-rounds", 0.1)}
"""The key with the end of a method's first phase, and its default."""

SEEDS = 3
# the best methods that are run to the end, in addition to FedAvg and training alone
_FINALISTS = 2


@dataclass(frozen=True, eq=False)
class Point:
    """A candidate with a learning rate."""

    candidate: Candidate
    rate: float

    @property
    def settings(self) -> dict[str, Scalar]:
        """The candidate's settings with the rate."""
        return {**self.candidate.settings, "learning-rate": self.rate}


@dataclass(frozen=True)
class Rung:
    """Trials of one length.

    Attributes:
        rounds: the number of rounds of each trial.
        scores: the score of each point on the validation examples, the best first; None
            if the trial diverged.
    """

    rounds: int
    scores: Mapping[Point, float | None]

    def best_of(self, name: str) -> Point | None:
        """Return the best point of a candidate, or None if all have diverged."""
        for point, score in self.scores.items():
            if point.candidate.name == name and score is not None:
                return point
        return None

    def comparable(self, metric: str) -> list[Point]:
        """Return the points with a score in this metric, the best first."""
        return [
            point
            for point, score in self.scores.items()
            if score is not None and point.candidate.metric == metric
        ]


def lengths(rounds: int) -> list[int]:
    """Return the rounds of the trials for whole runs of ``rounds`` rounds.

    The first trials have a sixteenth of the rounds, and each length is twice the length
    before, up to a third of the rounds.
    """
    found = [max(SHORTEST, rounds // 16)]
    while 2 * found[-1] <= rounds / 3:
        found.append(2 * found[-1])
    return found


def cost(rounds: int, num_points: int) -> int:
    """Return the most rounds that all runs need together."""
    total, left = LOOK, num_points
    for length in lengths(rounds):
        total += length * left
        left = min(left, math.ceil(left / 2) + 2)
    return total + SEEDS * (_FINALISTS + 2) * rounds


def affordable(budget: int, num_points: int, wanted: int) -> int:
    """Return the rounds of the whole runs, at most ``wanted``, within a budget.

    Raises:
        ConfigError: the budget is too small for one halving.
    """
    for rounds in range(wanted, SHORTEST, -1):
        if cost(rounds, num_points) <= budget:
            return rounds
    if wanted <= SHORTEST:
        raise ConfigError(
            f"num-server-rounds={wanted} is too small for trials of {SHORTEST} rounds."
            f" Set {SHORTEST + 1} or more."
        )
    raise ConfigError(
        f"the budget of {budget} rounds is too small for one halving of {num_points}"
        f" trials. Give at least {cost(SHORTEST + 1, num_points)} rounds in total, or"
        " fewer methods."
    )


def of_length(settings: Settings, rounds: int, full: int) -> dict[str, Scalar]:
    """Return the settings of a run of ``rounds`` instead of ``full`` rounds.

    A change after a number of rounds comes after the same share of the rounds.
    """
    changed = {**settings, "num-server-rounds": rounds}
    if "lr-decay-at" in settings:
        decays = split(str(settings["lr-decay-at"]))
        changed["lr-decay-at"] = ",".join(str(_share(text, full)) for text in decays)
    for key in ("freeze-at", "fedtan-rounds"):
        if key in settings:
            changed[key] = _share(str(settings[key]), full)
    # Even in a short trial, the first phase has at least one round.
    key, default = _PHASES.get(str(settings.get("strategy")), ("", "auto"))
    share = changed.get(key, default)
    if isinstance(share, float) and share * rounds < 1:
        changed[key] = 1
    if "auto" in (changed.get("freeze-at"), changed.get("fedtan-rounds")):
        window = int(settings.get("freeze-window", 100))
        changed["freeze-window"] = max(2, window * rounds // full)
    return changed


def _rank(score: float | None, metric: str) -> float:
    """Return the sort key of a score. The best score has the lowest key."""
    if score is None:
        return math.inf
    return -score if higher_is_better(metric) else score


def _share(text: str, full: int) -> Scalar:
    """Return a number of rounds as a share of all rounds, and other texts unchanged."""
    value = number(text)
    if isinstance(value, int):
        return value / full
    return text if value is None else value


def halve(
    points: Sequence[Point],
    base: Settings,
    rounds: int,
    full: int,
    seed: int,
    out: Path,
    do: Callable[[Sequence[Cell]], None],
) -> tuple[list[Rung], dict[str, str]]:
    """Do the trials.

    Returns:
        The rungs from the shortest to the longest, and the error of each trial that
        failed, such as a method whose call the user's loop lacks. A failed trial has no
        score.

    The better half of the points continues, with the best rates of FedAvg and of training
    alone.

    Args:
        points: the candidates with their rates; the first is FedAvg with BatchNorm.
        base: the settings that all trials share.
        rounds: the rounds of a whole run.
        full: the rounds of the user's config.
        seed: the seed of all trials.
        out: the folder of all runs.
        do: does the runs that are not done.

    Raises:
        RunFailedError: trials failed, or all diverged.
    """
    rungs: list[Rung] = []
    failed: dict[str, str] = {}
    metric = points[0].candidate.metric
    for length in lengths(rounds):
        shared = of_length(base, length, full)
        shared["eval-every"] = max(1, length // 8)
        cells = {
            point: Cell(
                point.candidate.name,
                f"rounds-{length}",
                seed,
                {**of_length(point.settings, length, full), "seed": seed},
                shared,
                trial_name({"learning-rate": point.rate}),
            )
            for point in points
        }
        do([*cells.values()])
        lost = {p: cell for p, cell in cells.items() if not is_done(cell, out)}
        left = {point.candidate.name for point in cells.keys() - lost.keys()}
        for point, cell in lost.items():
            method, error = point.candidate.name, failure_of(cell, out)["error"]
            if method in {FEDAVG, ALONE} - left:
                raise RunFailedError(
                    f"all trials of the reference {method} failed: {error}. The same"
                    " command tries them again."
                )
            failed[f"{method}, learning-rate={point.rate}"] = error
            del cells[point]
        scores = {point: score_of(cell, out) for point, cell in cells.items()}
        ranked = sorted(scores, key=lambda point: _rank(scores[point], metric))
        rungs.append(Rung(length, {point: scores[point] for point in ranked}))
        points = _better_half(rungs[-1], metric)
        if not points:
            raise RunFailedError(
                f"all {len(cells)} trials diverged, so there is no advice. Their"
                f" results are in {out / 'tune'}. Give lower --rates."
            )
    return rungs, failed


def _better_half(rung: Rung, metric: str) -> list[Point]:
    """Return the points that continue, the best first."""
    compared = rung.comparable(metric)
    kept = compared[: math.ceil(len(rung.scores) / 2)]
    for name in (FEDAVG, ALONE):
        best = rung.best_of(name)
        if best and best not in kept:
            kept.append(best)
    return kept


def finalists(last: Rung, metric: str) -> list[Point]:
    """Return the best two federated methods, FedAvg and training alone.

    Each method has the best rate of the longest trials.
    """
    names = [point.candidate.name for point in last.comparable(metric)]
    federated = [*dict.fromkeys(name for name in names if name != ALONE)]
    found = map(last.best_of, dict.fromkeys([*federated[:_FINALISTS], FEDAVG, ALONE]))
    return [point for point in found if point]
