"""Runs that a report compares with its run, and the comparison by site."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbn_flwr.errors import ConfigError, FedBNError
from fedbn_flwr.lab.config import Config, read_overrides
from fedbn_flwr.lab.config.fields import PARAMS, config_fields
from fedbn_flwr.lab.files import CONFIG_FILE, refuse_no_run, trained
from fedbn_flwr.lab.output.folder import RunFolder
from fedbn_flwr.lab.run_files import RunFiles
from fedbn_flwr.training.tasks import higher_is_better, quantity_of

ALONE = "standalone"


def references_of(run: RunFiles, against: Sequence[Path] = ()) -> list[RunFiles]:
    """Return the finished runs with the same data, split, seed and test.

    Args:
        run: the run of the report.
        against: folders of the runs to compare with. By default, these are up to three
            comparable runs in the same parent folder, with training alone first.

    Raises:
        ConfigError: a folder of ``against`` does not belong to a comparable run.
    """
    if against:
        return [_comparable(run, folder) for folder in against]
    found = []
    here = run.folder.resolve()
    for folder in sorted(here.parent.iterdir()):
        if folder != here and (folder / "summary.json").is_file():
            # not comparable, or written by another version
            with suppress(FedBNError):
                found.append(_comparable(run, folder))
    return sorted(found, key=lambda one: one.config.strategy != ALONE)[:3]


def name_of(run: RunFiles) -> str:
    """Return the name of a reference run."""
    if run.config.strategy == ALONE:
        return "training alone"
    if run.folder.name == run.config.title:
        return run.title
    return f"{run.title} ({run.folder.name})"


def alone_command(config: Config, out: Path) -> str:
    """Return the command of a run that trains each site only on its own data.

    Its settings of data, clients, model, rounds, local training and tests are the
    settings of ``config``, except that it tests each site's own model.
    """
    values = config.to_mapping()
    defaults = {field.alias: field.default for field in Config.model_fields.values()}
    # A method may have a default of its own.
    alone = PARAMS[ALONE]
    for name, setting in config_fields(alone).items():
        defaults[name.replace("_", "-")] = alone.model_fields[setting].default
    options = [f"--set strategy={ALONE}", "--set eval-on=personal-own"]
    for group in ("data", "clients", "model", "rounds", "local training", "tests"):
        for key in Config.keys(group):
            # A decay that starts at the freeze needs the method of the run, so leave it
            # out.
            decays = key.startswith("lr-decay") and values["lr-decay-at"] == "freeze"
            if values[key] != defaults[key] and key != "eval-on" and not decays:
                options.append(f"--set {key}={shlex.quote(str(values[key]))}")
    return f"fedbn-flwr run {' '.join(options)} --out {shlex.quote(str(out))}"


def changed_command(run: RunFiles, *settings: str) -> str:
    """Return the command of the run with other settings, such as "seed=1".

    Raises:
        ConfigError: these are not settings, or they do not fit the run.
    """
    Config.make({**run.config.to_mapping(), **read_overrides(settings)})
    folder = run.folder if run.folder.name else run.folder.resolve()
    out = folder.with_name(f"{folder.name}-{settings[0].replace('=', '-')}")
    options = " --set ".join(map(shlex.quote, settings))
    config = shlex.quote(str(folder / CONFIG_FILE))
    return f"fedbn-flwr run {config} --set {options} --out {shlex.quote(str(out))}"


def _comparable(run: RunFiles, folder: Path) -> RunFiles:
    """Return the run in a folder, or raise ConfigError if it cannot be compared."""
    refuse_no_run(folder)
    # Compare the files of settings first, because they exclude most folders and a whole
    # run takes longer to read.
    mine, theirs = RunFolder.settings(run.folder), RunFolder.settings(folder)
    reasons = []
    for key in ("seed", *Config.keys("data"), *Config.keys("clients")):
        if mine.get(key) != theirs.get(key):
            reasons.append(f"{key}={theirs.get(key)!r} differs from {mine.get(key)!r}")
    if not reasons:
        other = RunFiles.read(folder)
        # Training alone has no global model, so it tests only each site's own model.
        alone = other.config.strategy == ALONE
        name = quantity_of if alone else str
        same = name(other.headline) == name(run.headline)
        if other.summary and not other.diverged_at and same:
            return other
        reasons.append(f"it diverged, is not finished, or does not test {run.headline}")
    raise ConfigError(
        f"--against {folder}: {reasons[0]}. Compare runs with the same data, split, seed"
        " and test."
    )


@dataclass(frozen=True)
class Comparison:
    """The difference between a run and a reference, as a mean over trained sites.

    Attributes:
        reference: the other run.
        by_site: the row of each site with a difference, by its name.
        sign: 1 if higher values are better, -1 if lower values are better.
        difference: the mean over the sites that trained, in the unit of the metric.
        half: half of its 95 % interval, from the sites' paired bootstraps; None if a
            site has no interval.
    """

    reference: RunFiles
    by_site: Mapping[str, Mapping[str, Any]]
    sign: int
    difference: float
    half: float | None

    @property
    def gain(self) -> float:
        """The difference, positive if the run is better."""
        return self.sign * self.difference

    @property
    def established(self) -> bool:
        """Whether the interval excludes 0."""
        return self.half is not None and abs(self.difference) > self.half

    def sites(self, side: int) -> list[str]:
        """Return the trained sites at which the value is higher (1) or lower (-1).

        If all sites have intervals, these are the sites whose interval excludes 0.
        """
        end = "difference"
        if self.half is not None:
            end += "-low" if side > 0 else "-high"
        rows = trained(self.by_site.values())
        return [row["site"] for row in rows if side * (row.get(end) or 0) > 0]


def compare(
    run: RunFiles, reference: RunFiles, sites: Sequence[Mapping[str, Any]]
) -> Comparison | None:
    """Return the comparison, or None if no site that trained has a difference.

    Args:
        run: the run.
        reference: the other run.
        sites: rows of ``site_rows(run, reference)``.
    """
    paired = {row["site"]: row for row in sites if row.get("difference") is not None}
    in_mean = trained(paired.values())
    if not in_mean:
        return None
    mean = math.fsum(row["difference"] for row in in_mean) / len(in_mean)
    # The sites are independent, so the squares of half their intervals add up. If a
    # site has no interval, the mean has no interval.
    widths = [
        row["difference-high"] - row["difference-low"]
        for row in in_mean
        if row.get("difference-high") is not None
    ]
    half = None
    if len(widths) == len(in_mean):
        half = math.hypot(*widths) / (2 * len(widths))
    sign = 1 if higher_is_better(run.headline) else -1
    return Comparison(reference, paired, sign, mean, half)


def with_alone(comparisons: Iterable[Comparison]) -> list[Comparison]:
    """Return the comparisons with training alone."""
    return [one for one in comparisons if one.reference.config.strategy == ALONE]


def site_rows(
    run: RunFiles, reference: RunFiles | None = None, *, again: bool = True
) -> tuple[list[dict[str, Any]], str]:
    """Return the rows of the sites, and the reason why their intervals are missing.

    A row has the difference from the reference, if both runs have a value.

    Args:
        run: the run.
        reference: a comparable run.
        again: whether the saved models are tested again, for the intervals.
    """
    rows = {row["site"]: row for row in run.sites()}
    for other in reference.sites() if reference else ():
        row, value = rows.get(other["site"], {}), other.get("value")
        if row.get("value") is not None and value is not None:
            row |= {"other": value, "difference": row["value"] - value}
    unknown = ""
    if again and run.summary.get("sites"):
        # torch and the data of the run are needed for this test
        from fedbn_flwr.lab.finished_runs.sites import sites_of_run

        try:
            tested = sites_of_run(run.folder, reference.folder if reference else None)
        except FedBNError as error:
            unknown = (
                "The figures of this run remain valid, but the intervals of its sites"
                f" cannot be computed: {error}"
            )
        else:
            for row in tested:
                known = rows.setdefault(row["site"], {"metrics": {}, "rounds": 0})
                known.update(row)
    return list(rows.values()), unknown
