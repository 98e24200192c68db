"""Calibrate tau of FixBN's window rule, and show which round other taus pick.

    python benchmarks/window_rule.py RUN [RUN ...] --window 16

Each RUN is the folder of a run with ``freeze-at=auto freeze-tau=1e-30``, which never
freezes, on a seed that the study does not have. ``statistics-delta`` of its
``metrics.jsonl`` is the clients' mean of how far the statistics moved in a round; the
rule freezes once the variance of the last W of them is below tau. The calibrated tau is
the median variance of the windows that end between a quarter and a half of the rounds:
the start has left the window, and the run has not yet ended. The table has the round
that a tau picks, for that tau and for others.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from measure import table

from fedbn_flwr.lab.files import read_metrics

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)


def variances(deltas: Sequence[float], window: int) -> dict[int, float]:
    """Return the population variance of the last ``window`` deltas, by the round of the
    last one, counted from 1.
    """
    ends = range(window, len(deltas) + 1)
    return {end: statistics.pvariance(deltas[end - window : end]) for end in ends}


def calibrated(deltas: Sequence[float], window: int) -> float:
    """Return the median variance of the windows that end between a quarter and a half
    of the rounds.

    Raises:
        ValueError: the window is longer than half of the rounds.
    """
    rounds = len(deltas)
    chosen = [
        value
        for end, value in variances(deltas, window).items()
        if rounds / 4 <= end <= rounds / 2
    ]
    if not chosen:
        raise ValueError(
            f"a window of {window} rounds does not end before the middle of {rounds}"
            " rounds"
        )
    return statistics.median(chosen)


def picked(deltas: Sequence[float], window: int, tau: float) -> int | None:
    """Return the first round after which the variance is below tau; None if there is
    none.
    """
    return next(
        (end for end, value in variances(deltas, window).items() if value < tau), None
    )


def main(
    runs: Annotated[list[Path], typer.Argument(help="folders of runs")],
    window: Annotated[int, typer.Option(min=2)] = 16,
) -> None:
    """Print the calibrated tau of each run, and the rounds that taus around it pick."""
    rows = []
    for run in runs:
        deltas = [
            line["statistics-delta"] for line in read_metrics(run / "metrics.jsonl")
        ]
        tau = calibrated(deltas, window)
        shown = [picked(deltas, window, factor * tau) for factor in FACTORS]
        rows.append(
            [
                str(run),
                f"{tau:.3g}",
                *("never" if end is None else str(end) for end in shown),
            ]
        )
    print(table(["run", "tau", *[f"T* at {factor:g} tau" for factor in FACTORS]], rows))


if __name__ == "__main__":
    typer.run(main)
