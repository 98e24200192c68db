"""The numbers of a paper beside the results of a study.

::

    python studies/papers.py runs/fedtan-table-1-small

A study file states them under ``paper``, by METHOD/SPLIT, with or without ±, and maybe
by domain: ``{amazon: 61.3, average: 66.3 ± 0.7}``. "average" is the plain mean over the
domains.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from fedbn_flwr.lab.results.files import STUDY_FILE
from fedbn_flwr.lab.studies.study import WHOLE, Study

__all__ = ["PaperNumber", "paper_numbers", "table"]


class PaperNumber(NamedTuple):
    """A number of a paper, in the unit of ``results.csv``.

    Attributes:
        mean: the number.
        std: the number after ±; None without ±.
    """

    mean: float
    std: float | None = None

    @classmethod
    def read(cls, value: Any) -> PaperNumber:
        """Read a number of a study file, such as 53.97 or "53.97 ± 4.18".

        Raises:
            ValueError: the value has another form.
        """
        parts = []
        with suppress(ValueError):
            parts = [float(part) for part in str(value).split("±")]
        finite = all(math.isfinite(part) for part in parts)
        if not finite or len(parts) not in (1, 2) or min(parts[1:], default=0) < 0:
            raise ValueError(
                f"'{value}' is not a number of a paper. Write 53.97 or 53.97 ± 4.18"
            )
        return cls(*parts)


def paper_numbers(study: Study) -> dict[tuple[str, str], PaperNumber]:
    """Return the numbers of a study file, by METHOD/SPLIT and domain ("" for all).

    Raises:
        ValueError: a value is no number.
    """
    found = {}
    for name, stated in study.paper.items():
        by_domain = stated if isinstance(stated, Mapping) else {WHOLE: stated}
        for domain, value in by_domain.items():
            found[name, domain] = PaperNumber.read(value)
    return found


def table(study: Study, results: pd.DataFrame) -> pd.DataFrame:
    """Return mean and deviation over the finished runs beside each number.

    Args:
        study: the study.
        results: the content of ``results.csv``.
    """
    rows = []
    done = results[results["status"] == "finished"].fillna({"domain": WHOLE})
    for (name, domain), paper in paper_numbers(study).items():
        here = (done["method"] + "/" + done["split"] == name) & (
            done["domain"] == domain
        )
        finals = done[here]["final"]
        row = {"METHOD/SPLIT": name, "domain": domain, "runs": finals.count()}
        row |= {"final": finals.mean(), "±": finals.std(), "paper": paper.mean}
        rows.append(
            {**row, "paper ±": paper.std, "minus paper": finals.mean() - paper.mean}
        )
    return pd.DataFrame(rows)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    shown = table(Study.read(folder / STUDY_FILE), pd.read_csv(folder / "results.csv"))
    print(shown.round(2).to_string(index=False, na_rep=""))
