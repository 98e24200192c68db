"""Runs that a report compares with its run, and the comparison by site."""

from __future__ import annotations

import itertools
import math
import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbn_flwr.errors import ConfigError, FedBNError
from fedbn_flwr.lab.config import Config, read_overrides
from fedbn_flwr.lab.config.fields import PARAMS, config_fields
from fedbn_flwr.lab.files import (
    CONFIG_FILE,
    STUDY_FILE,
    refuse_no_run,
    site_label,
    trained,
)
from fedbn_flwr.lab.output.folder import RunFolder
from fedbn_flwr.lab.run_files import RunFiles
from fedbn_flwr.training.tasks import higher_is_better, in_percent, quantity_of

ALONE = "standalone"
FEW = 30
"""With fewer test examples, a page gives no difference."""

SPREAD, WHY = "difference-spread", "difference-why"
"""The keys of the standard error of a difference, and of the reason without one."""

DECISIONS = tuple(
    f"{number}-{part}"
    for number in ("yes", "called", "excess", "label")
    for part in ("value", "spread")
)
"""The keys of ``SiteTest.decisions``."""
_MANY = 20  # sites whose deviation gives an interval
_ROUNDING = 1e-9


def references_of(run: RunFiles, against: Sequence[Path] = ()) -> list[RunFiles]:
    """Return the finished runs with the same data, split, seed and test.

    Args:
        run: the run of the report.
        against: folders of the runs to compare with. By default, these are all
            comparable runs in the same parent folder or study: first training alone,
            then runs with the same training.

    Raises:
        ConfigError: a folder of ``against`` does not belong to a comparable run.
    """
    if against:
        return [_comparable(run, folder) for folder in against]
    found = []
    here = run.folder.resolve()
    beside = [*here.parent.iterdir()]
    # A study has the same split and seed of its other methods in other folders.
    if (study_of(here) / STUDY_FILE).is_file():
        beside += study_of(here).glob(f"*/{here.parent.name}/{here.name}")
    for folder in sorted({*beside} - {here}):
        if (folder / "summary.json").is_file():
            # not comparable, or written by another version
            with suppress(FedBNError):
                found.append(_comparable(run, folder))

    def order(one: RunFiles) -> tuple[bool, bool]:
        return one.config.strategy != ALONE, bool(
            other_training(run.config, one.config)
        )

    return sorted(found, key=order)


def name_of(run: RunFiles) -> str:
    """Return the name of a reference run."""
    title = "training alone" if run.config.strategy == ALONE else run.title
    if run.folder.name == run.config.strategy:
        return title
    if (study_of(run.folder) / STUDY_FILE).is_file():
        return run.folder.resolve().parts[-3]
    return f"{title} ({run.folder.name})"


def study_of(folder: Path) -> Path:
    """Return where the study is, if ``folder`` is a run of a study."""
    parents = folder.resolve().parents
    return parents[2] if len(parents) > 2 else folder


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
            # out. A model of a site alone is not tested at a site that is held out.
            decays = key.startswith("lr-decay") and values["lr-decay-at"] == "freeze"
            without_effect = decays or key in ("eval-on", "held-out-clients")
            if values[key] != defaults[key] and not without_effect:
                options.append(f"--set {key}={shlex.quote(str(values[key]))}")
    return f"fedbn-flwr run {' '.join(options)} --out {_free(out)}"


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
    return f"fedbn-flwr run {config} --set {options} --out {_free(out)}"


def _free(out: Path) -> str:
    """Return the folder for a command, with a number if ``out`` exists."""
    numbered = (out.with_name(f"{out.name}-{n}") for n in itertools.count(2))
    folders = itertools.chain([out], numbered)
    return shlex.quote(str(next(one for one in folders if not one.exists())))


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
class Mean:
    """A mean over the sites that trained, with its 95 % interval.

    Attributes:
        value: the mean over the sites with an interval; over all sites if there is none.
        half: half of the interval; None if there is no interval.
        why: the reason why there is no interval.
        examples: the test examples of these sites.
        left_out: the sites that are not in the mean, with the reasons.
    """

    value: float
    half: float | None
    why: str
    examples: int
    left_out: Mapping[str, str]

    @property
    def established(self) -> bool:
        """Whether the interval excludes 0.

        Every page, table and sentence calls a difference established by this rule only.
        """
        return self.half is not None and abs(self.value) > self.half


def mean_of(
    rows: Iterable[Mapping[str, Any]], key: str = "value", of: int = 1
) -> Mean | None:
    """Return the mean over the sites that trained, or None if no site has a value.

    A site without an interval of its own is left out, so it does not take the interval
    from the others.

    Args:
        rows: rows of ``site_rows``.
        key: "value" or "difference".
        of: the number of means that are compared. The interval has the level
            1 - 0.05 / of (Bonferroni).
    """
    spread, why = ("spread", "why") if key == "value" else (SPREAD, WHY)
    known = [row for row in trained(rows) if row.get(key) is not None]
    kept = [row for row in known if row.get(spread) is not None]
    reasons = {site_label(row): row.get(why, "") for row in known if row not in kept}
    if not known:
        return None
    used = kept or known
    value = math.fsum(row[key] for row in used) / len(used)
    examples = sum(row.get("examples", 0) for row in used)
    spreads = [row[spread] / len(kept) for row in kept]
    groups = [row["groups"] for row in kept]
    if len(used) > _MANY and not kept:
        # Many sites without an interval of their own are a sample of sites.
        deviation = statistics.stdev(row[key] for row in used)
        spreads, groups, reasons = [deviation / len(used) ** 0.5], [len(used)], {}
    if not any(spreads):
        return Mean(value, None, next(iter(reasons.values()), ""), examples, {})
    by_seed = zip(*(row.get(f"{key}-by-seed", [row[key]]) for row in used), strict=True)
    means = [math.fsum(values) / len(used) for values in by_seed]
    half = half_of(spreads, groups, means, of)
    text = "" if half else "equal with every seed"
    return Mean(value, half, text, examples, reasons)


def half_of(
    spreads: Sequence[float],
    groups: Sequence[int],
    by_seed: Sequence[float] = (),
    of: int = 1,
) -> float | None:
    """Return half of the 95 % interval of a sum of independent numbers (Welch).

    It is None if the sum is equal with every seed, because then nothing is known of the
    spread over seeds.

    Args:
        spreads: the standard errors over the test examples.
        groups: the numbers of groups that give the standard errors.
        by_seed: the sum with each seed. With several seeds, the interval also covers
            other seeds.
        of: the number of intervals, see ``mean_of``.
    """
    from scipy import stats

    variances = [spread**2 for spread in spreads]
    freedom = [count - 1 for count in groups]
    if len(by_seed) > 1:
        variances.append(statistics.variance(by_seed) / len(by_seed))
        freedom.append(len(by_seed) - 1)
        if max(by_seed) - min(by_seed) <= _ROUNDING:
            return None
    total = math.fsum(variances)
    shares = [
        (one / total) ** 2 / df for one, df in zip(variances, freedom, strict=True)
    ]
    t = stats.t.ppf(1 - 0.025 / of, 1 / math.fsum(shares))
    return float(t * math.sqrt(total))


@dataclass(frozen=True)
class Comparison:
    """The difference between a run and a reference.

    Attributes:
        reference: the other run.
        by_site: the row of each site with a difference, by its name. The intervals are
            corrected for comparing the sites.
        sign: 1 if higher values are better, -1 if lower values are better.
        mean: the mean difference of the sites that trained.
        differs: see ``other_training``.
    """

    reference: RunFiles
    by_site: Mapping[str, Mapping[str, Any]]
    sign: int
    mean: Mean
    differs: str = ""

    @property
    def gain(self) -> float:
        """The difference, positive if the run is better."""
        return self.sign * self.mean.value

    @property
    def too_few(self) -> str:
        """The reason why the page shows no number, or ""."""
        if 0 < self.mean.examples < FEW:
            return f"only {self.mean.examples} test examples; {FEW} are needed"
        return self.mean.why

    @property
    def established(self) -> bool:
        """Whether there are enough examples and the interval excludes 0."""
        return not self.too_few and self.mean.established

    def sites(self, side: int) -> list[str]:
        """Return the trained sites at which the value is higher (1) or lower (-1).

        If there are intervals, these are the sites whose interval excludes 0.
        """
        end = "difference"
        if self.mean.half is not None:
            end += "-low" if side > 0 else "-high"
        rows = trained(self.by_site.values())
        return [row["site"] for row in rows if side * (row.get(end) or 0) > 0]


def compare(
    run: RunFiles,
    reference: RunFiles,
    sites: Sequence[Mapping[str, Any]],
    of: int = 1,
) -> Comparison | None:
    """Return the comparison, or None if no site that trained has a difference.

    Args:
        run: the run.
        reference: the other run.
        sites: rows of ``site_rows(run, reference)``.
        of: the number of comparisons on the page.
    """
    mean = mean_of(sites, "difference", of)
    if mean is None:
        return None
    by_site = {}
    paired = [row for row in sites if row.get("difference") is not None]
    for row in paired:
        about, value = {**row}, row["difference"]
        seeds = row.get("difference-by-seed", ())
        half = None
        if row.get(SPREAD) is not None:
            half = half_of([row[SPREAD]], [row["groups"]], seeds, len(paired))
            if half is None:
                about.setdefault(WHY, "equal with every seed")
        ends: tuple[float | None, ...] = (None, None)
        if half is not None:
            ends = (value - half, value + half)
            if in_percent(quantity_of(run.headline)):
                ends = (max(value - half, -1), min(value + half, 1))
        about["difference-low"], about["difference-high"] = ends
        by_site[row["site"]] = about
    sign = 1 if higher_is_better(run.headline) else -1
    differs = other_training(run.config, reference.config)
    return Comparison(reference, by_site, sign, mean, differs)


def other_training(config: Config, other: Config) -> str:
    """Return the settings of ``other`` whose values differ in ``config``.

    These are the seed and the settings of data, model, rounds and local training.
    """
    mine, theirs = config.to_mapping(), other.to_mapping()
    groups = ("data", "model", "rounds", "local training")
    keys = [key for group in groups for key in Config.keys(group) if key != "data-dir"]
    differs = (f"{key}={theirs[key]}" for key in keys if theirs[key] != mine[key])
    return ", ".join(differs)


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
