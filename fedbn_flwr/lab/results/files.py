"""Names of the files of runs and studies, and functions that read these files."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbn_flwr.errors import ConfigError, StateError, described

if TYPE_CHECKING:
    import pandas as pd

CONFIG_FILE = "config.yaml"  # the settings of a run, in its folder
CLASS_MOMENTS_FILE = "class_moments.npz"  # read_class_moments reads it
PREDICTIONS_FILE = "predictions.csv"  # predictions.py writes and reads it
PREDICTIONS_FILES = (PREDICTIONS_FILE, "predictions-batch.csv")
TESTS_FILE = "tests.csv"  # tests_table writes and reads it
STUDY_FILE = "study.yaml"  # the study with its final settings, in its folder

COUNTED = (
    "examples",
    "exchanges",
    "bytes-down",
    "bytes-up",
    "counter-bytes-down",
    "counter-bytes-up",
)
"""The keys of ``metrics.jsonl`` in a ledger; tests add ``evaluation-`` before them."""

# An apostrophe gets a further one, so that ``own_text`` returns each text.
_FORMULAS = ("=", "+", "-", "@", "'")
_REPEAT = "Restore the file, or remove the run's folder and repeat the run."


def command(*words: object) -> str:
    """Return a command of the package that a shell can run as it is printed."""
    return shlex.join(["fedbn-flwr", *map(str, words)])


def site_label(row: Mapping[str, Any]) -> str:
    """Return the text for a site in a table: its name, and a remark if there is one.

    The remark is that the site never trained, or why it lacks a model of its own.
    """
    mark = "never trained" if row.get("held-out") else row.get("note", "")
    return f"{row['site']} ({mark})" if mark else str(row["site"])


def safe_cell(value: Any) -> Any:
    """Return a cell of a CSV file that no spreadsheet takes for a formula.

    A text such as ``=1+1`` begins with an apostrophe in the file. ``own_text`` removes
    it.
    """
    is_formula = isinstance(value, str) and value.startswith(_FORMULAS)
    return f"'{value}" if is_formula else value


def own_text(cell: str) -> str:
    """Return the text of a cell that ``safe_cell`` wrote."""
    return cell.removeprefix("'")


def safe_table(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table with ``safe_cell`` in each column of texts."""
    texts = [name for name in table if table[name].dtype.kind == "O"]
    return table.assign(**{name: table[name].map(safe_cell) for name in texts})


def refuse_no_run(run: Path) -> None:
    """Raise ConfigError if a folder does not belong to a run."""
    if (run / STUDY_FILE).is_file():
        raise ConfigError(
            f"{run} is the folder of a study. Name one of its runs:"
            f" {run}/METHOD/SPLIT/seed-N."
        )
    if not (run / CONFIG_FILE).is_file():
        raise ConfigError(
            f"{run} is not the folder of a run, since {CONFIG_FILE} is absent. A run"
            f" writes {CONFIG_FILE} and model.safetensors (a site gets"
            " these two files)."
        )


def refuse_no_results(folder: Path) -> None:
    """Raise ConfigError if a folder belongs neither to a run nor to a study."""
    if not any((folder / name).is_file() for name in (CONFIG_FILE, STUDY_FILE)):
        raise ConfigError(
            f"{str(folder)!r} is not the folder of a run or a study, since it has"
            f" neither {CONFIG_FILE} nor {STUDY_FILE}. Give the --out of `fedbn-flwr"
            " run` or `fedbn-flwr sweep`."
        )


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Raise StateError if a key of a file in the folder is absent or of another type."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise StateError(
            f"a file in {folder} is damaged: {described(error)}. {_REPEAT}"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file of a run's folder, or {} without the file.

    Raises:
        StateError: the file is damaged.
    """
    if not path.is_file():
        return {}
    return _mapping(path.read_bytes(), str(path))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a ``metrics.jsonl``, without an incomplete last line.

    Raises:
        StateError: a complete line is damaged.
    """
    if not path.is_file():
        return []
    lines = [line for line in path.open("rb") if line.endswith(b"\n")]
    return [_mapping(line, f"{path}, line {at},") for at, line in enumerate(lines, 1)]


def ledger_of(lines: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the sums over rounds of traffic and examples, by key of the lines.

    Training and tests have separate keys.
    """
    totals: Counter[str] = Counter()
    for line in lines:
        for key, value in line.items():
            if key.removeprefix("evaluation-") in COUNTED:
                totals[key] += value
    return dict(totals)


def _mapping(text: bytes, where: str) -> dict[str, Any]:
    try:
        content = json.loads(text.decode(errors="replace"))
    except ValueError as error:
        raise StateError(f"{where} is damaged: {error}. {_REPEAT}") from error
    if not isinstance(content, dict):
        raise StateError(f"{where} is damaged: it contains no mapping. {_REPEAT}")
    return content
