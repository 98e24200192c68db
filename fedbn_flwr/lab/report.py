"""``fedbn-flwr report``: one HTML page of a run or a study, in one file that loads
nothing.

Pictures are matplotlib's SVG, tables those of ``pandas.to_html``. A page of a run that
goes on shows what is there.
"""

from __future__ import annotations

import html
import io
import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from fedbn_flwr.checked_file import write_atomically
from fedbn_flwr.errors import ConfigError, FedBNError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.files import (
    CONFIG_FILE,
    STUDY_FILE,
    ledger_of,
    lost_lines,
    read_json,
    read_metrics,
    refuse_no_results,
)
from fedbn_flwr.lab.finished_runs.saved_model import run_config
from fedbn_flwr.lab.output.folder import DIVERGED_AT, STATISTICS_FILE
from fedbn_flwr.lab.output.global_tests import headlines
from fedbn_flwr.lab.studies.one_run import failure_of, is_done, of_study, summary_of
from fedbn_flwr.lab.studies.results import rows_of, table
from fedbn_flwr.lab.studies.study import Cell, Study
from fedbn_flwr.training.tasks import higher_is_better, in_percent, quantity_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["REPORT_FILE", "RunFiles", "run_warnings", "write_report"]

REPORT_FILE = "report.html"
_GENERATOR = '<meta name="generator" content="fedbn-flwr report">'
_DIAGNOSIS = "doctor.json"
_TESTS = ("test-", "personal-", "validation-", "held-out-", "train-")
# Okabe and Ito, yellow darker
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#8a6d00", "#000000")
_DASHES = ("-", "--", ":", "-.")
_STYLE = Path(__file__).with_name("report.css")


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write the report of a run or a study as it is now; return the file.

    Args:
        folder: the folder of a run or a study, finished or not.
        out: the file; None = ``report.html`` in the folder. An older report is
            replaced.

    Raises:
        ConfigError: the folder is neither, the file is not a report, or it cannot be
            written.
    """
    target = out or folder / REPORT_FILE
    if target.is_dir() or (
        target.is_file() and _GENERATOR.encode() not in target.read_bytes()[:1000]
    ):
        raise ConfigError(
            f"out={str(target)!r} is there and is not a report. Choose another file."
        )
    if (folder / STUDY_FILE).is_file():
        title, parts = _study_page(folder)
    else:
        refuse_no_results(folder)
        title, parts = _run_page(RunFiles.read(folder))
    foot = (
        f"Made by fedbn-flwr {version('fedbn-flwr')} on"
        f" {datetime.now():%Y-%m-%d at %H:%M:%S}."
    )
    head = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{_GENERATOR}'
        '<meta name="viewport" content="width=device-width,'
        f' initial-scale=1"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE.read_text(encoding='utf-8')}</style></head><body>"
    )
    page = "\n".join(
        [
            head,
            f"<h1>{html.escape(title)}</h1>",
            *parts,
            _text(foot),
            "</body></html>\n",
        ]
    )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, page)
    except OSError as error:
        raise ConfigError(f"out={str(target)!r} cannot be written: {error}") from error
    return target


@dataclass(frozen=True)
class RunFiles:
    """What a run's folder holds at one time; a finished run that has lost lines has
    none.
    """

    folder: Path
    config: Config
    lines: list[dict[str, Any]]
    summary: dict[str, Any]
    lost: str

    @classmethod
    def read(cls, folder: Path) -> RunFiles:
        """Read a folder; ConfigError if it is none of a run."""
        config = run_config(folder)
        # before the lines: with a summary they are complete
        summary = read_json(folder / "summary.json")
        lines = read_metrics(folder / "metrics.jsonl")
        lost = lost_lines(summary, lines) if summary else ""
        return cls(folder, config, [] if lost else lines, summary, lost)

    @property
    def headline(self) -> str:
        """The key of the main metric."""
        try:
            return str(self.summary.get("headline") or headlines(self.config)[0])
        except FedBNError:  # its own data are not here
            keys = (
                key
                for line in self.lines
                for key in line
                if key.startswith(("test-", "personal-"))
            )
            return next((key for key in keys if not key.endswith("-loss")), "test-loss")

    @property
    def final(self) -> Mapping[str, Any]:
        """The figures of the result; while the run is not finished those of the last
        line with the main metric.
        """
        measured = [line for line in self.lines if line.get(self.headline) is not None]
        return self.summary.get("final") or (measured[-1] if measured else {})

    @property
    def diverged_at(self) -> int:
        """The first round with a loss that is not finite; 0 = none."""
        return int(
            self.summary.get(DIVERGED_AT, 0)
            or max((line.get(DIVERGED_AT, 0) for line in self.lines), default=0)
        )

    @property
    def divergence(self) -> str:
        """Which losses are not finite in that round."""
        losses: list[str] = next(
            (line["diverged"] for line in self.lines if "diverged" in line), []
        )
        return "; ".join(losses) or "a loss is not finite"

    def curve(self, key: str) -> tuple[list[int], list[float]]:
        """Return the rounds that have a metric, and its values as they are shown."""
        tested = [line for line in self.lines if line.get(key) is not None]
        scale = 100 if in_percent(key) else 1
        return [line["round"] for line in tested], [
            scale * line[key] for line in tested
        ]


def _run_page(run: RunFiles) -> tuple[str, list[str]]:
    config = run.config
    title = f"{config.title} on {config.dataset}, {config.model}"
    parts = [_facts(_headline(run)), *map(_warning, run_warnings(run))]
    parts += ["<h2>Curves</h2>", _run_curves(run)]
    if run.final:
        parts += ["<h2>Result</h2>", _table(_result(run))]
    parts += ["<h2>BatchNorm</h2>", *_findings(run), *_batchnorm(run)]
    if sites := run.summary.get("sites"):
        parts += ["<h2>Sites</h2>", _table(_sites(run, sites))]
    parts += ["<h2>Settings</h2>", _table(_settings(config))]
    parts += [
        _text(
            "Every other setting has its default. To repeat it: fedbn-flwr run"
            " config.yaml --out runs/again"
        )
    ]
    if versions := run.summary.get("versions"):
        same = {
            "SHA-256 of the final state": run.summary["sha256"],
            "seed": run.summary["seed"],
        }
        parts += [_facts({**same, **versions})]
    return title, parts


def _headline(run: RunFiles) -> dict[str, Any]:
    """Return the result and its costs."""
    facts: dict[str, Any] = {}
    rounds, values = run.curve(run.headline)
    if "round" in run.final:
        facts[f"{_named(run.headline)}, round {run.final['round']}"] = _shown(
            run.headline, run.final.get(run.headline)
        )
    if values:
        best = (max if higher_is_better(run.headline) else min)(values)
        facts["best"] = (
            f"{best:{_form(run.headline)}} in round {rounds[values.index(best)]}"
        )
    totals = run.summary.get("ledger") or ledger_of(run.lines)
    facts["rounds"] = (
        f"{run.summary.get('rounds', len(run.lines))} of {run.config.num_server_rounds}"
    )
    facts["exchanges"] = f"{totals.get('exchanges', 0):,}"
    facts["floats sent and received"] = (
        f"{(totals.get('bytes-down', 0) + totals.get('bytes-up', 0)) / 2**20:,.2f} MiB"
    )
    facts["seconds"] = f"{sum(line['seconds'] for line in run.lines):,.1f}"
    facts["BN frozen after round"] = run.summary.get("frozen-after")
    facts["privacy"] = run.summary.get("privacy", {}).get("guarantee")
    return {name: value for name, value in facts.items() if value is not None}


def run_warnings(run: RunFiles) -> Iterator[str]:
    """Yield what a reader must know before the numbers, the worst first."""
    if run.diverged_at:
        yield f"The run diverged in round {run.diverged_at}: {run.divergence}."
    if not run.summary:
        yield (
            f"The run is not finished: {len(run.lines)} of"
            f" {run.config.num_server_rounds} rounds."
        )
    if reasons := Counter(
        reason for line in run.lines for reason in line.get("rejected", ())
    ):
        shown = "; ".join(
            f"{count} times: {reason}" for reason, count in reasons.most_common(3)
        )
        yield f"{reasons.total()} replies of clients were refused ({shown})."
    with suppress(FedBNError):  # its own data are not here
        yield from run.config.warnings()


def _run_curves(run: RunFiles) -> str:
    """Return a picture for each quantity: the main one first, the loss last."""
    keys = dict.fromkeys(
        key for line in run.lines for key in line if not key.endswith("-clients")
    )
    quantities: dict[str, list[str]] = {}
    for key in keys:
        if key.startswith(_TESTS) and run.curve(key)[0]:
            quantities.setdefault(quantity_of(key), []).append(key)
    if not quantities:
        return _text(run.lost or "No round is finished yet.")
    main = quantity_of(run.headline)
    pictures = []
    for quantity in sorted(
        quantities, key=lambda name: (name != main, name == "loss", name)
    ):
        curves = {
            key.removesuffix(f"-{quantity}"): run.curve(key)
            for key in quantities[quantity]
        }
        last = ", ".join(
            f"{test} {values[-1]:{_form(quantity)}}"
            for test, (_, values) in curves.items()
        )
        caption = f"{_named(quantity)}. Last: {last}."
        pictures.append(_curves(curves, _named(quantity), caption, marks=_frozen(run)))
    return _grid(pictures)


def _frozen(run: RunFiles) -> list[int]:
    """Return the rounds after which the phase changes, such as T* of FixBN."""
    return [
        one["round"]
        for one, after in itertools.pairwise(run.lines)
        if one.get("phase") != after.get("phase")
    ]


def _result(run: RunFiles) -> pd.DataFrame:
    """Return the figures of the result."""
    rows = []
    for key, value in run.final.items():
        if key.startswith(_TESTS) and (
            value is None or isinstance(value, (int, float))
        ):
            rows.append({"figure": _named(key), "value": _shown(key, value)})
    for key, by_domain in run.final.get("domains", {}).items():
        for domain, value in by_domain.items():
            rows.append(
                {"figure": f"{_named(key)}: {domain}", "value": _shown(key, value)}
            )
    return pd.DataFrame(rows)


def _sites(run: RunFiles, sites: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return the main metric at each site."""
    metric, rows = quantity_of(run.headline), []
    for row in sites:
        site = f"{row['site']} (never trained)" if row.get("held-out") else row["site"]
        rows.append(
            {
                "site": site,
                "test examples": row["examples"],
                _named(metric): _shown(metric, row["value"]),
            }
        )
    return pd.DataFrame(rows)


def _settings(config: Config) -> pd.DataFrame:
    """Return the settings that are not the defaults."""
    fields = {field.alias: field for field in Config.model_fields.values()}
    rows = []
    for key, value in config.to_mapping().items():
        if value != fields[key].default:
            meaning = (fields[key].description or "").replace("`", "")
            rows.append({"key": key, "value": str(value), "meaning": meaning})
    return pd.DataFrame(rows)


def _findings(run: RunFiles) -> Iterator[str]:
    """Yield what the doctor has said, if its ``doctor.json`` lies in the run's folder."""
    if not (run.folder / _DIAGNOSIS).is_file():
        return
    diagnosis = read_json(run.folder / _DIAGNOSIS)
    findings = diagnosis.get("findings", [])
    yield _text(
        f"The doctor has {len(findings) or 'no'}"
        f" {'finding' if len(findings) == 1 else 'findings'}."
    )
    for finding in findings:
        yield f"<h3>{html.escape(finding['what'])}</h3>"
        yield _list(finding["evidence"])
        columns = {
            "setting": "what to try, in order",
            "why": "what it does",
            "expected": "gain where measured, cost",
        }
        remedies = pd.DataFrame(
            finding["remedies"], columns=list(columns), dtype=object
        ).fillna("")
        yield _table(remedies.rename(columns=columns))
    if more := [*diagnosis.get("not-measured", []), *diagnosis.get("notes", [])]:
        yield "<h3>What the doctor could not measure, and notes</h3>" + _list(more)


def _batchnorm(run: RunFiles) -> Iterator[str]:
    """Yield the pictures of ``statistics.jsonl``, or how to get it."""
    lines = [
        line
        for line in read_metrics(run.folder / STATISTICS_FILE)
        if line.get("layers")
    ]
    if not lines:
        yield _text("The server saw no statistics of single clients.")
        return
    yield _text(
        "Distances of each client's batch statistics from the global ones that it got,"
        " and of the global ones after a round from those before it (L1 norms, FixBN's"
        " Fig. 3). Far apart, BatchNorm normalises with other numbers in training than"
        " in tests."
    )
    recorded, middle, low, high = _distances(lines)
    change = [
        sum(layer["change"]["l1"] or 0 for layer in line["layers"].values())
        for line in lines
    ]
    positive = [
        (line["round"], value)
        for line, value in zip(lines, change, strict=True)
        if value
    ]
    curves = {"clients, median": (recorded, middle)}
    if positive:  # 0 has no logarithm
        curves["change of the global ones"] = (
            [at for at, _ in positive],
            [value for _, value in positive],
        )
    caption = (
        "Sums over the layers. The band reaches from the nearest to the farthest"
        " client."
    )
    bands = {"clients, median": (low, high)}
    yield _grid(
        [
            _curves(
                curves,
                "L1 distance",
                caption,
                marks=_frozen(run),
                bands=bands,
                log=True,
            ),
            _heat_map(lines),
        ]
    )


def _distances(
    lines: Sequence[Mapping[str, Any]],
) -> tuple[list[int], list[float], list[float], list[float]]:
    """Return the rounds in which clients tracked, and the median, lowest and highest
    distance of a client in each.

    A distance is the L1 norm summed over the layers that track.
    """
    rounds, middle, low, high = list[int](), list[float](), list[float](), list[float]()
    for line in lines:
        by_layer = [
            values
            for layer in line["layers"].values()
            if any(values := layer["clients"]["l1"])
        ]
        tracked = [
            sum(values) for values in zip(*by_layer, strict=True) if None not in values
        ]
        if tracked:
            rounds.append(line["round"])
            middle.append(statistics.median(tracked))
            low.append(min(tracked))
            high.append(max(tracked))
    return rounds, middle, low, high


def _heat_map(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the median distance over the clients by layer and recorded round."""
    shown = lines[:: -(-len(lines) // 40)]
    layers = list(dict.fromkeys(path for line in shown for path in line["layers"]))
    values = [[_median(line["layers"].get(path)) for line in shown] for path in layers]
    known = [
        (value, path)
        for path, row in zip(layers, values, strict=True)
        for value in row
        if value == value
    ]
    if not known:
        return _text("No layer tracked its statistics.")
    largest, where = max(known)

    def draw(axes: Axes) -> None:
        image = axes.imshow(
            values, aspect="auto", cmap="cividis", interpolation="nearest"
        )
        axes.figure.colorbar(image, ax=axes, label="L1 distance")
        every = range(0, len(layers), -(-len(layers) // 25))
        axes.set_yticks(every, [layers[at] or "(model)" for at in every], fontsize=7)
        columns = range(0, len(shown), -(-len(shown) // 6))
        axes.set_xticks(columns, [str(shown[at]["round"]) for at in columns])
        axes.set_xlabel("round")

    height = max(2.6, 0.6 + 0.14 * min(len(layers), 25))
    return _picture(
        draw,
        f"By layer, median over the clients. The largest is {largest:.3g}, in {where}.",
        height,
    )


def _median(layer: Mapping[str, Any] | None) -> float:
    known = [
        value
        for value in (layer["clients"]["l1"] if layer else ())
        if value is not None
    ]
    return statistics.median(known) if known else float("nan")


def _study_page(folder: Path) -> tuple[str, list[str]]:
    study = Study.read(folder / STUDY_FILE)
    cells = list(study.cells())
    begun = [
        cell
        for cell in cells
        if (cell.folder(folder) / CONFIG_FILE).is_file() and of_study(cell, folder)
    ]
    runs = [(cell, RunFiles.read(cell.folder(folder))) for cell in begun]
    parts = [
        _facts(
            {
                "methods": len(study.methods),
                "splits": len(study.splits),
                "runs": len(cells),
            }
        )
    ]
    parts += map(_warning, _incomplete(cells, folder))
    parts += ["<h2>Results</h2>", _table(table(rows_of(study, folder)))]
    note = (
        "Means over the seeds ± the sample standard deviation. p is that of the paired"
        " t test over the seeds."
    )
    pictures = []
    for split in study.splits:
        where = f", {split}" if len(study.splits) > 1 else ""
        pictures.append(
            _mean_curves(
                [(cell.method, run) for cell, run in runs if cell.split == split], where
            )
        )
    parts += [_text(note), "<h2>Curves</h2>", _grid(pictures), "<h2>Settings</h2>"]
    for file in (folder / "tuning.md", folder / STUDY_FILE):
        if file.is_file():
            parts += [
                f"<h3>{file.name}</h3>",
                f"<pre>{html.escape(file.read_text(encoding='utf-8'))}</pre>",
            ]
    return study.name, parts


def _incomplete(cells: Sequence[Cell], out: Path) -> Iterator[str]:
    """Yield the runs that the means do not have."""
    lists: dict[str, list[str]] = {"Diverged": [], "Failed": [], "Not finished": []}
    for cell in cells:
        if not is_done(cell, out):
            lists["Failed" if failure_of(cell, out) else "Not finished"].append(
                cell.name
            )
        elif DIVERGED_AT in summary_of(cell.folder(out)):
            lists["Diverged"].append(cell.name)
    for what, names in lists.items():
        if names:
            yield f"{what}, and left out of the means: {', '.join(names)}."


def _mean_curves(runs: Sequence[tuple[str, RunFiles]], where: str) -> str:
    """Return the main metric of each method: the mean over the seeds, in a band from
    the lowest to the highest.
    """
    curves, bands, metrics = {}, {}, dict[str, None]()
    for method in dict.fromkeys(method for method, _ in runs):
        by_round: dict[int, list[float]] = {}
        for run in (
            run for name, run in runs if name == method and not run.diverged_at
        ):
            metrics[_named(quantity_of(run.headline))] = None
            for at, value in zip(*run.curve(run.headline), strict=True):
                by_round.setdefault(at, []).append(value)
        rounds = sorted(by_round)
        curves[method] = rounds, [statistics.fmean(by_round[at]) for at in rounds]
        bands[method] = (
            [min(by_round[at]) for at in rounds],
            [max(by_round[at]) for at in rounds],
        )
    if not any(rounds for rounds, _ in curves.values()):
        return ""
    caption = f"Main metric{where}: mean over the seeds, lowest to highest."
    return _curves(curves, ", ".join(metrics), caption, bands=bands)


_Curve = tuple[Sequence[int], Sequence[float]]
_Band = tuple[Sequence[float], Sequence[float]]


def _curves(
    curves: Mapping[str, _Curve],
    label: str,
    caption: str,
    *,
    marks: Sequence[int] = (),
    bands: Mapping[str, _Band] | None = None,
    log: bool = False,
) -> str:
    """Return curves over the rounds, some with a band from low to high; they differ in
    dashes, too.
    """
    from matplotlib.ticker import MaxNLocator

    def draw(axes: Axes) -> None:
        handles = []
        for at, (name, (rounds, values)) in enumerate(curves.items()):
            colour, dash = _COLOURS[at % len(_COLOURS)], _DASHES[at % len(_DASHES)]
            marker = "o" if len(rounds) == 1 else ""
            handles += axes.plot(
                rounds,
                values,
                color=colour,
                linestyle=dash,
                linewidth=1.4,
                marker=marker,
            )
            if band := (bands or {}).get(name):
                axes.fill_between(rounds, *band, color=colour, alpha=0.15, linewidth=0)
        for mark in marks:
            axes.axvline(mark, color="#888888", linewidth=0.8, linestyle=":")
        if log:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("round")
        axes.set_ylabel(label)
        axes.grid(color="#dddddd", linewidth=0.5)
        # with an underscore matplotlib leaves a name out
        names = [name.lstrip("_") for name in curves]
        axes.figure.legend(
            handles,
            names,
            loc="outside lower center",
            ncols=2,
            fontsize=8,
            frameon=False,
        )

    return _picture(draw, caption, 2.9 + 0.17 * (len(curves) // 2))


def _picture(draw: Callable[[Axes], None], caption: str, height: float) -> str:
    """Return a drawing as inline SVG; its text is text, and it is readable on a screen
    of 400 pixels.
    """
    import matplotlib
    from matplotlib.figure import Figure

    written = io.StringIO()
    # Captions differ, and so do the ids that two pictures of a page refer to.
    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": caption, "text.parse_math": False}
    ):
        figure = Figure(figsize=(4.6, height), layout="constrained")
        draw(figure.subplots())
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    svg = written.getvalue()
    drawing = svg[svg.index("<svg") :].replace(
        "<svg", f'<svg role="img" aria-label="{html.escape(caption)}"', 1
    )
    return f"<figure>{drawing}<figcaption>{html.escape(caption)}</figcaption></figure>"


def _grid(pictures: Iterable[str]) -> str:
    return f'<div class="pictures">{"".join(pictures)}</div>'


def _table(frame: pd.DataFrame) -> str:
    with pd.option_context("display.max_colwidth", None):
        return (
            "<div"
            f' class="table">{frame.to_html(index=False, border=0, na_rep="-")}</div>'
        )


def _facts(facts: Mapping[str, Any]) -> str:
    series = pd.Series(facts, dtype=object).astype(str)
    with pd.option_context("display.max_colwidth", None):
        return (
            "<div"
            f' class="table">{series.to_frame().to_html(header=False, border=0)}</div>'
        )


def _text(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def _warning(text: str) -> str:
    return f'<p class="warning">{html.escape(text)}</p>'


def _list(texts: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{html.escape(text)}</li>' for text in texts)}</ul>"


def _named(key: str) -> str:
    return f"{key}, %" if in_percent(key) else key


def _form(key: str) -> str:
    return ".2f" if in_percent(key) else ".4f"


def _shown(key: str, value: float | None) -> str:
    return (
        "-"
        if value is None
        else f"{value * (100 if in_percent(key) else 1):{_form(key)}}"
    )
