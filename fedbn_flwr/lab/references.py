"""Runs that a report compares with its run, and the comparison by site."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbn_flwr.errors import ConfigError, FedBNError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.files import CONFIG_FILE
from fedbn_flwr.lab.run_files import RunFiles
from fedbn_flwr.training.tasks import higher_is_better, in_percent, quantity_of

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
        found = [RunFiles.read(folder) for folder in against]
        for one in found:
            reason = _differs(run, one)
            if reason:
                raise ConfigError(
                    f"--against {one.folder}: {reason}. Compare runs with the same data,"
                    " split, seed and test."
                )
        return found
    found = []
    for folder in sorted(run.folder.resolve().parent.iterdir()):
        if folder != run.folder.resolve() and (folder / CONFIG_FILE).is_file():
            try:
                one = RunFiles.read(folder)
            except FedBNError:  # the folder of another version
                continue
            if not _differs(run, one):
                found.append(one)
    return sorted(found, key=lambda one: one.config.strategy != ALONE)[:3]


def alone_command(config: Config, out: Path) -> str:
    """Return the command that trains each site on its own data, with the same test."""
    values = config.to_mapping()
    defaults = {field.alias: field.default for field in Config.model_fields.values()}
    options = [f"--set strategy={ALONE}", "--set eval-on=personal-own"]
    for group in ("data", "clients", "model", "rounds", "local training", "tests"):
        for key in Config.keys(group):
            # a decay at the freeze belongs to the method of the run
            decays = key.startswith("lr-decay") and values["lr-decay-at"] == "freeze"
            if values[key] != defaults[key] and key != "eval-on" and not decays:
                options.append(f"--set {key}={shlex.quote(str(values[key]))}")
    return f"fedbn-flwr run {' '.join(options)} --out {shlex.quote(str(out))}"


def _differs(run: RunFiles, other: RunFiles) -> str:
    """Return the reason why two runs cannot be compared, "" if they can."""
    if not other.summary or other.diverged_at:
        return "the run is not finished, or it diverged"
    if other.headline != run.headline:
        return f"its main metric is {other.headline}, not {run.headline}"
    mine, theirs = run.config.to_mapping(), other.config.to_mapping()
    for key in ("seed", *Config.keys("data"), *Config.keys("clients")):
        if mine[key] != theirs[key]:
            return f"{key}={theirs[key]!r} differs from {mine[key]!r}"
    return ""


@dataclass(frozen=True)
class Comparison:
    """The difference between a run and a reference, as a mean over the sites.

    Values have the unit of the page: per cent, or the metric's own unit.

    Attributes:
        reference: the other run.
        by_site: the difference at each site, by name.
        better: the number of sites at which the run is better.
        worse: the number of sites at which the run is worse.
        difference: the mean over the sites.
        low: the lower end of its 95 % interval, from the sites' paired bootstraps.
        high: the upper end; both are None if a site has no interval.
    """

    reference: RunFiles
    by_site: Mapping[str, float]
    better: int
    worse: int
    difference: float
    low: float | None
    high: float | None

    @property
    def established(self) -> bool:
        """Whether the interval excludes 0."""
        return (
            self.low is not None and self.high is not None and self.low * self.high > 0
        )


def compare(
    run: RunFiles, reference: RunFiles, sites: Sequence[Mapping[str, Any]]
) -> Comparison | None:
    """Return the comparison, or None if no site has a difference.

    Args:
        run: the run.
        reference: the other run.
        sites: rows of ``sites_of_run(run.folder, reference.folder)``.
    """
    metric = quantity_of(run.headline)
    scale = 100 if in_percent(metric) else 1
    paired = [row for row in sites if row.get("difference") is not None]
    if not paired:
        return None
    by_site = {row["site"]: scale * row["difference"] for row in paired}
    sign = 1 if higher_is_better(metric) else -1
    mean = math.fsum(by_site.values()) / len(by_site)
    # The sites are independent, so the squares of half their intervals add up. A site
    # without an interval leaves the mean without one.
    widths = [
        scale * (row["difference-high"] - row["difference-low"])
        for row in paired
        if row.get("difference-low") is not None
        and row.get("difference-high") is not None
    ]
    low = high = None
    if len(widths) == len(paired):
        half = math.hypot(*widths) / (2 * len(widths))
        low, high = mean - half, mean + half
    return Comparison(
        reference,
        by_site,
        sum(sign * value > 0 for value in by_site.values()),
        sum(sign * value < 0 for value in by_site.values()),
        mean,
        low,
        high,
    )
