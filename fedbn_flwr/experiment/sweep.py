"""A grid of runs, methods x splits x seeds, and its table with mean, standard deviation and the paper's numbers.

A study file::

    name: digits
    base: {dataset: digits, model: lenet, num-clients: 5}
    methods: {FedAvg+BN: {strategy: fedavg}, FedBN: {strategy: fedbn}}
    splits: {iid: {partition: iid}, non-iid: {partition: classes, classes-per-client: 2}}
    seeds: [0, 1, 2]
    skip: [FedBN/iid]
    paper: {FedAvg+BN/iid: 91.35}

The tables show the main metric of each run, the first one of ``eval-on``; ``metrics`` names others, by their keys in
``summary.json``: ``metrics: [personal-own-auroc, held-out-adapted-auroc]``. A metric that a run does not have is left
out there.

The paper's number may also be given by domain, ``{amazon: 61.3, average: 66.3}``: it is then shown in the table by
domain, a second table for data sets with several domains.

``methods`` and ``splits`` override ``base``; a method's settings override those of the split. A key of ``base`` that
has no effect in a run is left out there, and the log says so. Each run has the folder ``OUT/METHOD/SPLIT/seed-N``. A
finished run (with ``summary.json``) is skipped, an unfinished run is resumed from its last checkpoint, and the folder
of a run that cannot be resumed is renamed. Finished runs with other settings than the study's are an error.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedbn_flwr.checked_file import write_atomically
from fedbn_flwr.errors import ConfigError, RunFailedError
from fedbn_flwr.experiment.config import CENTRALIZED, Config, Scalar, from_older, read_overrides
from fedbn_flwr.experiment.curves import draw_curves
from fedbn_flwr.experiment.domain_table import FIELDS, domain_markdown, domain_rows
from fedbn_flwr.experiment.output import (
    DIVERGED_AT,
    PLACES,
    RunFolder,
    changed_settings,
    lock_folder,
    read_metrics,
)
from fedbn_flwr.experiment.recorder import OnRound
from fedbn_flwr.experiment.run import Engine, run
from fedbn_flwr.experiment.serve import reference_config
from fedbn_flwr.experiment.yaml_file import read_yaml
from fedbn_flwr.training.tasks import in_percent

__all__ = ["Cell", "Study", "finished", "sweep"]

logger = logging.getLogger("flwr")

Settings = dict[str, Scalar]


class Study(BaseModel):
    """A study file; the module's docstring has an example."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    base: Settings = Field(default_factory=dict)
    methods: dict[str, Settings]
    splits: dict[str, Settings] = {"all": {}}
    seeds: list[int] = Field(default_factory=lambda: [0])
    skip: list[str] = Field(default_factory=list)
    metrics: list[str] = Field(default_factory=list)
    paper: dict[str, float | dict[str, float]] = Field(default_factory=dict)

    @classmethod
    def load(cls, path: Path, overrides: Sequence[str] = ()) -> Study:
        """Read a study file and check the config of every run in it.

        Args:
            path: the YAML file.
            overrides: ``key=value`` settings that override its ``base``, such as a data folder.

        Raises:
            ConfigError: all problems, each with the name of the run.
        """
        read = read_yaml(path, "study")
        try:
            if overrides and isinstance(read, dict) and isinstance(base := read.get("base") or {}, dict):
                read["base"] = {**base, **read_overrides(overrides)}
            study = cls.model_validate(read)
        except ValidationError as error:
            lines = [f"study {path}: {'.'.join(map(str, e['loc']))}: {e['msg'].lower()}" for e in error.errors()]
            raise ConfigError("\n".join(lines)) from error
        named = [*study.skip, *study.paper]
        problems = [f"study {path}: '{name}' names no METHOD/SPLIT" for name in named if name not in study.names()]
        folders: dict[Path, str] = {}
        for cell in study.cells():
            first = folders.setdefault(cell.folder(Path()), cell.name)
            if first != cell.name:
                problems.append(f"study {path}: {first} and {cell.name} would share a folder; rename one of them")
            try:
                _ = cell.config
            except ConfigError as error:
                problems.append(f"study {path}: {cell.name}: {error}")
        for key in read_overrides(overrides):
            if all(key in cell.settings for cell in study.cells()):
                where = "seeds" if key == "seed" else "methods or splits"
                problems.append(f"study {path}: --set {key} has no effect: every run has its own, in {where}")
        if problems:
            raise ConfigError("\n".join(problems))
        return study

    def names(self) -> list[str]:
        """Return METHOD/SPLIT of every pair, in the order of the file."""
        return [f"{method}/{split}" for method in self.methods for split in self.splits]

    def cells(self) -> Iterator[Cell]:
        """Yield all runs except skipped ones, seed by seed: a stopped study has complete tables for the first seeds."""
        for seed in self.seeds:
            for split, split_settings in self.splits.items():
                for method, method_settings in self.methods.items():
                    if f"{method}/{split}" not in self.skip:
                        settings = {**split_settings, **method_settings, "seed": seed}
                        yield Cell(method, split, seed, settings, self.base)


@dataclass(frozen=True)
class Cell:
    """One run of a study: its own settings, and those of ``base``."""

    method: str
    split: str
    seed: int
    settings: Mapping[str, Scalar]
    base: Mapping[str, Scalar]

    @property
    def name(self) -> str:
        """METHOD/SPLIT/seed-N."""
        return f"{self.method}/{self.split}/seed-{self.seed}"

    @property
    def config(self) -> Config:
        """The run's config.

        Raises:
            ConfigError: a setting is wrong.
        """
        return Config.make_of_shared(self.base, self.settings)[0]

    @property
    def dropped(self) -> dict[str, str]:
        """The keys of ``base`` that have no effect in this run, with the reason."""
        return Config.make_of_shared(self.base, self.settings)[1]

    def folder(self, out: Path) -> Path:
        """Return the run's folder under ``out``."""
        return out.joinpath(*(re.sub(r"[^A-Za-z0-9._+=-]", "_", part) for part in self.name.split("/")))


def sweep(
    study: Study,
    out: Path,
    engine: Engine = "in-process",
    on_cell: Callable[[Cell, int, int], OnRound | None] | None = None,
) -> str:
    """Do the unfinished runs of a study, write its tables and curves, and return the Markdown table.

    Args:
        study: the grid.
        out: folder of all runs; ``table.md``, ``table.csv`` and ``curves.png`` are written there after each run, and
            ``domains.md`` and ``domains.csv`` if runs were tested by domain.
        engine: as for ``run``.
        on_cell: called before each run with the run, its index and the number of runs; it returns the ``on_round`` of
            the run.

    Raises:
        ConfigError: another process writes to the folder, or finished runs in it have other settings than the study.
        FedBNError: a run could not be done; finished runs stay, and the same call continues with the others.
        RunFailedError: runs trained nothing, or they diverged and their ``on-divergence`` is "stop". All other runs are
            finished, and the error holds the table.
    """
    cells = list(study.cells())
    for cell in (cell for cell in cells if cell.seed == study.seeds[0]):
        for key, why in cell.dropped.items():
            logger.warning("%s/%s: %s of base is left out: %s", cell.method, cell.split, key, why)
    with lock_folder(out, "study"):
        _refuse_changed(cells, out)
        for index, cell in enumerate(cells):
            folder = cell.folder(out)
            if finished(folder):
                continue
            try:
                _do(cell.config, folder, engine, on_cell(cell, index, len(cells)) if on_cell else None)
            except RunFailedError as error:  # the other runs do not depend on it
                logger.error("%s: %s", cell.name, error)
            _write_tables(study, out)
        table = _write_tables(study, out)
    known = {name for cell in cells if finished(cell.folder(out)) for name in _final(cell, out)}
    if absent := [name for name in study.metrics if name not in known]:
        logger.warning("metrics: no run of this study has %s", ", ".join(absent))
    if failed := [cell.name for cell in cells if _failed(cell, out)]:
        message = f"{len(failed)} of {len(cells)} runs diverged or trained nothing: {', '.join(failed)}"
        raise RunFailedError(message, table)
    return table


def finished(folder: Path) -> bool:
    """Return whether the run of the folder is finished: its summary is written last."""
    return (folder / "summary.json").is_file()


def _refuse_changed(cells: Sequence[Cell], out: Path) -> None:
    """Raise ConfigError if finished runs have other settings than the study; the error names all of them."""
    done = [cell for cell in cells if finished(cell.folder(out))]
    changed = {cell.name: _changed(cell.config, cell.folder(out)) for cell in done}
    if lines := [f"{name}: {keys}" for name, keys in changed.items() if keys]:
        raise ConfigError(
            f"out={str(out)!r} has finished runs with other settings than this study:\n" + "\n".join(lines) + "\n"
            "Choose another --out, give the study its old settings, or rename the folders of these runs."
        )


def _changed(config: Config, folder: Path) -> str:
    """Return the settings of the folder's run that differ from the config, as ``changed_settings`` does."""
    now = reference_config(config) if config.strategy == CENTRALIZED else config
    free = PLACES if config.num_clients else PLACES | {"num-clients"}  # 0 follows from the other settings
    saved = Config.make({**from_older(RunFolder.settings(folder)), "resume": False})
    return changed_settings(saved.to_mapping(), now.to_mapping(), free)


def _failed(cell: Cell, out: Path) -> bool:
    """Return whether a run has no summary, or says that it diverged although ``on-divergence`` is "stop"."""
    folder, stop = cell.folder(out), cell.config.on_divergence == "stop"
    return not finished(folder) or (stop and DIVERGED_AT in json.loads((folder / "summary.json").read_text()))


def _final(cell: Cell, out: Path) -> dict[str, Any]:
    final: dict[str, Any] = json.loads((cell.folder(out) / "summary.json").read_text())["final"]
    return final


def _do(config: Config, folder: Path, engine: Engine, on_round: OnRound | None) -> None:
    """Resume a run, or do it from the start if its checkpoints do not fit the study."""
    if config.strategy != CENTRALIZED and (folder / "checkpoint").is_dir():
        try:
            if changed := _changed(config, folder):
                raise ConfigError(f"it belongs to a run with other settings: {changed}")
            run(config.model_copy(update={"resume": True}), folder, engine, on_round)
            return
        except ConfigError as error:
            logger.warning("%s starts from the beginning: %s", folder, error)
    _set_aside(folder)
    run(config, folder, engine, on_round)


def _set_aside(folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()):
        number = 1
        while (kept := folder.with_name(f"{folder.name}.unfinished-{number}")).exists():
            number += 1
        folder.rename(kept)


def _write_tables(study: Study, out: Path) -> str:
    ended = {(m, split): _done(study, out, m, split) for split in study.splits for m in study.methods}
    done = {key: [s for s in summaries if DIVERGED_AT not in s] for key, summaries in ended.items()}
    rows = [
        _row(study, *key, metric, done[key] or summaries, len(summaries) - len(done[key]))
        for key, summaries in ended.items()
        for metric in _metrics(study, summaries)
    ]
    shown = [row for row in rows if row["runs"] or row["diverged"]]
    table = _markdown(study, shown)
    write_atomically(out / "table.md", table)
    write_atomically(out / "table.csv", _csv(list(rows[0]), shown))
    if domains := domain_rows(done, study.paper, study.metrics):
        by_domain = domain_markdown(study.name, domains)
        write_atomically(out / "domains.md", by_domain)
        write_atomically(out / "domains.csv", _csv(FIELDS, domains))
        table += "\n" + by_domain
    first = [cell for cell in study.cells() if cell.seed == study.seeds[0]]
    curves = {f"{c.method}, {c.split}": read_metrics(c.folder(out) / "metrics.jsonl") for c in first}
    score = first[0].config.learning_task().score if first else ""
    write_atomically(out / "curves.png", draw_curves({k: v for k, v in curves.items() if v}, study.name, score))
    return table


def _done(study: Study, out: Path, method: str, split: str) -> list[dict[str, Any]]:
    """Return the summaries of the finished runs."""
    folders = [cell.folder(out) for cell in study.cells() if (cell.method, cell.split) == (method, split)]
    return [json.loads((folder / "summary.json").read_text()) for folder in folders if finished(folder)]


def _csv(fields: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, fieldnames=fields)
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def _metrics(study: Study, done: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the metrics that runs have rows for."""
    main = done[0]["headline"] if done else ""
    return [name for name in study.metrics if any(name in s["final"] for s in done)] or [main]


def _row(
    study: Study, method: str, split: str, metric: str, done: Sequence[Mapping[str, Any]], num_diverged: int
) -> dict[str, Any]:
    """Return a row of the table, from the runs that did not diverge; their numbers are empty if all did."""
    paper = study.paper.get(f"{method}/{split}") if done and metric == done[0]["headline"] else None
    counted = [s for s in done if DIVERGED_AT not in s]
    scale = 100 if in_percent(metric) else 1
    final = [scale * s["final"][metric] for s in counted if s["final"].get(metric) is not None]
    best = [scale * s["best"][metric] for s in counted if s["best"].get(metric) is not None]
    ledger = done[0]["ledger"] if done else {}
    return {
        "method": method,
        "split": split,
        "metric": metric,
        "runs": len(counted),
        "diverged": num_diverged,
        "mean": statistics.fmean(final) if final else None,
        "std": statistics.stdev(final) if len(final) > 1 else None,
        "best-mean": statistics.fmean(best) if best else None,
        "rounds": done[0]["rounds"] if done else 0,
        "megabytes": (ledger.get("bytes-down", 0) + ledger.get("bytes-up", 0)) / 2**20,
        "exchanges": ledger.get("exchanges", 0),
        "paper": None if isinstance(paper, dict) else paper,
    }


def _markdown(study: Study, rows: list[dict[str, Any]]) -> str:
    unit = ", %" if all(in_percent(row["metric"]) for row in rows) else ""
    lines = [
        f"# {study.name}",
        "",
        f"| method | split | metric | final{unit} | best{unit} | rounds | exchanges | MB of floats | runs "
        f"| paper{unit} |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        places = 2 if in_percent(row["metric"]) else 4
        final = "-" if row["mean"] is None else f"{row['mean']:.{places}f}"
        final += f" ± {row['std']:.{places}f}" if row["std"] is not None else ""
        best = "-" if row["best-mean"] is None else f"{row['best-mean']:.{places}f}"
        paper = "" if row["paper"] is None else f"{row['paper']:.2f}"
        runs = f"{row['runs']}, {row['diverged']} diverged" if row["diverged"] else row["runs"]
        cells = [row["method"], row["split"], row["metric"], final, best, row["rounds"], row["exchanges"]]
        lines.append("| " + " | ".join(map(str, [*cells, f"{row['megabytes']:.2f}", runs, paper])) + " |")
    return "\n".join(lines) + "\n"
