"""The command ``fedbn-flwr report``, for one HTML page of a run or a study.

The page loads no other file. The module begins with the page, then has the contents for
a run and for a study, then pictures and pieces of HTML. Pictures are matplotlib's SVG,
and tables come from ``pandas.to_html``. The page of an unfinished run shows its present
state.
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
    site_label,
)
from fedbn_flwr.lab.finished_runs.saved_model import run_config
from fedbn_flwr.lab.output.folder import DIVERGED_AT, STATISTICS_FILE
from fedbn_flwr.lab.output.run_tests import headlines
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
# the colours of Okabe and Ito, with a darker yellow
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#8a6d00", "#000000")
_DASHES = ("-", "--", ":", "-.")
_STYLE = Path(__file__).with_name("report.css")


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write the report of a run or a study in its present state, and return the file.

    Args:
        folder: the folder of a run or a study, finished or not.
        out: the file; by default, ``report.html`` in the folder. An older report is
            replaced.

    Raises:
        ConfigError: the folder is neither, the file is not a report, or it cannot be
            written.
    """
    # Another file of this name must not be replaced.
    target = out or folder / REPORT_FILE
    is_other = target.is_dir()
    if target.is_file():
        is_other = _GENERATOR.encode() not in target.read_bytes()[:1000]
    if is_other:
        raise ConfigError(
            f"out={str(target)!r} is there and is not a report. Choose another file."
        )

    if (folder / STUDY_FILE).is_file():
        title, parts = _study_page(folder)
    else:
        refuse_no_results(folder)
        title, parts = _run_page(RunFiles.read(folder))

    # The style is in the page, because a report is sent as one file.
    style = _STYLE.read_text(encoding="utf-8")
    now = f"{datetime.now():%Y-%m-%d at %H:%M:%S}"
    head = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{_GENERATOR}'
        '<meta name="viewport" content="width=device-width,'
        f' initial-scale=1"><title>{html.escape(title)}</title>'
        f"<style>{style}</style></head><body>\n<h1>{html.escape(title)}</h1>"
    )
    foot = _text(f"Made by fedbn-flwr {version('fedbn-flwr')} on {now}.")
    page = "\n".join([head, *parts, foot, "</body></html>\n"])
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, page)
    except OSError as error:
        raise ConfigError(f"out={str(target)!r} cannot be written: {error}") from error
    return target


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


def _run_page(run: RunFiles) -> tuple[str, list[str]]:
    """Return the title and the parts of the page of a run."""
    config = run.config
    title = f"{config.title} on {config.dataset}, {config.model}"
    parts = [_facts(_headline(run)), *map(_warning, run_warnings(run))]
    parts += ["<h2>Curves</h2>", _run_curves(run)]
    if run.final:
        parts += ["<h2>Result</h2>", _table(_result(run))]
    parts += ["<h2>BatchNorm</h2>", *_findings(run), *_batchnorm(run)]
    sites = run.summary.get("sites")
    if sites:
        parts += ["<h2>Sites</h2>", _table(_sites(run, sites))]
    again = (
        "Every other setting has its default. To repeat it: fedbn-flwr run"
        " config.yaml --out runs/again"
    )
    parts += ["<h2>Settings</h2>", _table(_settings(config)), _text(again)]
    versions = run.summary.get("versions")
    if versions:
        sha256, seed = run.summary["sha256"], run.summary["seed"]
        same = {"SHA-256 of the final state": sha256, "seed": seed}
        parts += [_facts({**same, **versions})]
    return title, parts


def _headline(run: RunFiles) -> dict[str, Any]:
    """Return the result and its costs."""
    # The result has the final figures. The best round is only shown, because the same
    # test selected it.
    facts: dict[str, Any] = {}
    headline, final = run.headline, run.final
    rounds, values = run.curve(headline)
    if "round" in final:
        name = f"{_named(headline)}, round {final['round']}"
        facts[name] = _shown(headline, final.get(headline))
    if values:
        best = max(values) if higher_is_better(headline) else min(values)
        at = rounds[values.index(best)]
        facts["best"] = f"{best:{_form(headline)}} in round {at}"

    # The costs of the run.
    done = run.summary.get("rounds", len(run.lines))
    facts["rounds"] = f"{done} of {run.config.num_server_rounds}"
    totals = run.summary.get("ledger") or ledger_of(run.lines)
    facts["exchanges"] = f"{totals.get('exchanges', 0):,}"
    sent = totals.get("bytes-down", 0) + totals.get("bytes-up", 0)
    facts["floats sent and received"] = f"{sent / 2**20:,.2f} MiB"
    facts["seconds"] = f"{sum(line['seconds'] for line in run.lines):,.1f}"
    facts["BN frozen after round"] = run.summary.get("frozen-after")
    facts["privacy"] = run.summary.get("privacy", {}).get("guarantee")
    return {name: value for name, value in facts.items() if value is not None}


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


def _run_curves(run: RunFiles) -> str:
    """Return a picture for each quantity, with the main one first, the loss last."""
    # The tests of each quantity, in the order of the lines.
    curves: dict[str, dict[str, _Curve]] = {}
    for key in dict.fromkeys(itertools.chain.from_iterable(run.lines)):
        # a list of values, one for each client
        if not key.startswith(_TESTS) or key.endswith("-clients"):
            continue
        rounds, values = run.curve(key)
        if rounds:
            quantity = quantity_of(key)
            test = key.removesuffix(f"-{quantity}")
            curves.setdefault(quantity, {})[test] = rounds, values
    if not curves:
        return _text(run.lost or "No round is finished yet.")

    main = quantity_of(run.headline)
    order = sorted(curves, key=lambda name: (name != main, name == "loss", name))
    pictures = []
    for quantity in order:
        last = ", ".join(
            f"{test} {values[-1]:{_form(quantity)}}"
            for test, (_, values) in curves[quantity].items()
        )
        caption = f"{_named(quantity)}. Last: {last}."
        pictures.append(
            _curves(curves[quantity], _named(quantity), caption, marks=_frozen(run))
        )
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
        is_number = value is None or isinstance(value, (int, float))
        if key.startswith(_TESTS) and is_number:
            rows.append((_named(key), _shown(key, value)))
    for key, by_domain in run.final.get("domains", {}).items():
        for domain, value in by_domain.items():
            rows.append((f"{_named(key)}: {domain}", _shown(key, value)))
    return pd.DataFrame(rows, columns=["figure", "value"])


def _sites(run: RunFiles, sites: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return the main metric at each site."""
    metric = quantity_of(run.headline)
    rows = []
    for row in sites:
        site = site_label(row)
        value = row.get("error") or _shown(metric, row["value"])
        rows.append((site, row["examples"], value))
    return pd.DataFrame(rows, columns=["site", "test examples", _named(metric)])


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
    """Yield the doctor's findings, if ``doctor.json`` is in the run's folder."""
    if not (run.folder / _DIAGNOSIS).is_file():
        return
    diagnosis = read_json(run.folder / _DIAGNOSIS)
    findings = diagnosis.get("findings", [])
    word = "finding" if len(findings) == 1 else "findings"
    yield _text(f"The doctor has {len(findings) or 'no'} {word}.")
    columns = {
        "setting": "what to try, in order",
        "why": "what it does",
        "expected": "gain where measured, cost",
    }
    for finding in findings:
        yield f"<h3>{html.escape(finding['what'])}</h3>"
        yield _list(finding["evidence"])
        # a remedy that was not measured has no gain
        remedies = pd.DataFrame(finding["remedies"], columns=list(columns))
        yield _table(remedies.astype(object).fillna("").rename(columns=columns))
    more = [*diagnosis.get("not-measured", []), *diagnosis.get("notes", [])]
    if more:
        yield "<h3>Notes, and measurements that were impossible</h3>" + _list(more)


def _batchnorm(run: RunFiles) -> Iterator[str]:
    """Yield the pictures of ``statistics.jsonl``, or the reason why it is absent."""
    recorded = read_metrics(run.folder / STATISTICS_FILE)
    lines = [line for line in recorded if line.get("layers")]
    if not lines:
        yield _text("The server saw no statistics of single clients.")
        return
    yield _text(
        "Distances of each client's batch statistics from the global statistics that it"
        " got, and of the global statistics after a round from the statistics before it"
        " (L1 norms, FixBN's Fig. 3). If they are far apart, BatchNorm normalises with"
        " other numbers in training than in tests."
    )

    # The clients' distances, with a band, and the change of the global statistics.
    clients = _distances(lines)
    rounds = list(clients.index)
    curves = {"clients, median": (rounds, list(clients["median"]))}
    bands = {"clients, median": (list(clients["min"]), list(clients["max"]))}
    change = {}
    for line in lines:
        of_layers = [layer["change"]["l1"] or 0 for layer in line["layers"].values()]
        # Frozen BatchNorm has the distance 0, but 0 has no logarithm.
        if sum(of_layers):
            change[line["round"]] = sum(of_layers)
    if change:
        curves["change of the global statistics"] = list(change), list(change.values())
    caption = (
        "Sums over the layers. The band reaches from the nearest to the farthest"
        " client."
    )
    frozen = _frozen(run)
    picture = _curves(
        curves, "L1 distance", caption, marks=frozen, bands=bands, log=True
    )
    yield _grid([picture, _heat_map(lines)])


def _distances(lines: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return the median, min and max distance of a client, by round.

    A distance is the L1 norm summed over the layers that track.
    """
    rows = {}
    for line in lines:
        layers = [layer["clients"]["l1"] for layer in line["layers"].values()]
        # zip gives the distances of one client in all layers that any client tracks
        by_client = zip(*filter(any, layers), strict=True)
        tracked = [sum(values) for values in by_client if None not in values]
        if tracked:
            middle = statistics.median(tracked)
            rows[line["round"]] = [middle, min(tracked), max(tracked)]
    columns = ["median", "min", "max"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns)


def _heat_map(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the median distance over the clients by layer and recorded round."""
    # A row for each layer, a column for each of about forty rounds.
    shown = lines[:: _step(lines, 40)]
    cells: dict[int, dict[str, float]] = {}
    for line in shown:
        cells[line["round"]] = {}
        for path, layer in line["layers"].items():
            known = [value for value in layer["clients"]["l1"] if value is not None]
            if known:
                cells[line["round"]][path] = statistics.median(known)
    layers = list(dict.fromkeys(path for line in shown for path in line["layers"]))
    values = pd.DataFrame(cells, index=layers, dtype=float)
    # A round without a tracked distance would be a white column.
    values = values.dropna(axis="columns", how="all")
    largest = values.max().max()
    if pd.isna(largest):
        return _text("No layer tracked its statistics.")
    where = values.max(axis="columns").idxmax()

    def draw(axes: Axes) -> None:
        image = axes.imshow(
            values, aspect="auto", cmap="cividis", interpolation="nearest"
        )
        axes.figure.colorbar(image, ax=axes, label="L1 distance")
        # Show as many names as the height allows.
        rows = range(0, len(layers), _step(layers, 25))
        axes.set_yticks(rows, [layers[at] or "(model)" for at in rows], fontsize=7)
        columns = range(0, values.shape[1], _step(values.columns, 6))
        axes.set_xticks(columns, [str(values.columns[at]) for at in columns])
        axes.set_xlabel("round")

    height = max(2.6, 0.6 + 0.14 * min(len(layers), 25))
    return _picture(
        draw,
        f"By layer, median over the clients. The largest is {largest:.3g}, in {where}.",
        height,
    )


def _step(many: Sequence[Any], most: int) -> int:
    """Return the step that leaves at most this number of elements."""
    return -(-len(many) // most)


def _study_page(folder: Path) -> tuple[str, list[str]]:
    """Return the title and the parts of the page of a study."""
    # Use the begun runs of this study, since another study's may be in the folder.
    study = Study.read(folder / STUDY_FILE)
    cells = list(study.cells())
    runs = []
    for cell in cells:
        if (cell.folder(folder) / CONFIG_FILE).is_file() and of_study(cell, folder):
            runs.append((cell, RunFiles.read(cell.folder(folder))))
    facts = {"methods": study.methods, "splits": study.splits, "runs": cells}
    parts = [_facts({name: len(values) for name, values in facts.items()})]
    parts += map(_warning, _incomplete(cells, folder))

    # The table of the sweep, and a picture for each split.
    note = (
        "Means over the seeds ± the sample standard deviation. p is the p value of the"
        " paired t test over the seeds."
    )
    parts += ["<h2>Results</h2>", _table(table(rows_of(study, folder))), _text(note)]
    pictures = []
    for split in study.splits:
        where = f", {split}" if len(study.splits) > 1 else ""
        of_split = [(cell.method, run) for cell, run in runs if cell.split == split]
        pictures.append(_mean_curves(of_split, where))
    parts += ["<h2>Curves</h2>", _grid(pictures), "<h2>Settings</h2>"]
    for file in (folder / "tuning.md", folder / STUDY_FILE):
        if file.is_file():
            text = html.escape(file.read_text(encoding="utf-8"))
            parts += [f"<h3>{file.name}</h3>", f"<pre>{text}</pre>"]
    return study.name, parts


def _incomplete(cells: Sequence[Cell], out: Path) -> Iterator[str]:
    """Yield the runs that the means lack."""
    lists: dict[str, list[str]] = {"Diverged": [], "Failed": [], "Not finished": []}
    for cell in cells:
        if not is_done(cell, out):
            what = "Failed" if failure_of(cell, out) else "Not finished"
            lists[what].append(cell.name)
        elif DIVERGED_AT in summary_of(cell.folder(out)):
            lists["Diverged"].append(cell.name)
    for what, names in lists.items():
        if names:
            yield f"{what}, and left out of the means: {', '.join(names)}."


def _mean_curves(runs: Sequence[tuple[str, RunFiles]], where: str) -> str:
    """Return the main metric of each method, with the seeds' mean and range."""
    # The values of each method and round, over the seeds. Methods may have their own
    # metrics. A diverged run has no place in a mean.
    metrics: dict[str, None] = {}
    values: dict[str, dict[int, list[float]]] = {}
    for method, run in runs:
        by_round = values.setdefault(method, {})
        if run.diverged_at:
            continue
        metrics[_named(quantity_of(run.headline))] = None
        for at, value in zip(*run.curve(run.headline), strict=True):
            by_round.setdefault(at, []).append(value)

    curves, bands = {}, {}
    for method, by_round in values.items():
        rounds = sorted(by_round)
        of_seeds = [by_round[at] for at in rounds]
        curves[method] = rounds, [statistics.fmean(seeds) for seeds in of_seeds]
        bands[method] = list(map(min, of_seeds)), list(map(max, of_seeds))
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
    """Return a picture of curves over the rounds.

    Args:
        curves: rounds and values by name.
        label: label of the axis of values.
        caption: the text below.
        marks: rounds that get a vertical line.
        bands: the lowest and highest values of some curves, by name.
        log: whether the axis of values is logarithmic.
    """
    # Imported here, because a command without pictures does not need matplotlib.
    from matplotlib.ticker import LogFormatter, MaxNLocator

    def draw(axes: Axes) -> None:
        # Curves also differ in dashes, because not everybody sees colours. A short
        # curve shows its points, because a single point has no line.
        handles = []
        for at, (name, (rounds, values)) in enumerate(curves.items()):
            colour = _COLOURS[at % len(_COLOURS)]
            handles += axes.plot(
                rounds,
                values,
                color=colour,
                linestyle=_DASHES[at % len(_DASHES)],
                linewidth=1.4,
                marker="o" if len(rounds) < 4 else "",
            )
            if bands and name in bands:
                low, high = bands[name]
                axes.fill_between(
                    rounds, low, high, color=colour, alpha=0.15, linewidth=0
                )
        for mark in marks:
            axes.axvline(mark, color="#888888", linewidth=0.8, linestyle=":")
        if log:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            # Labels between the powers of ten, without mathtext, if there is room.
            axes.yaxis.set_minor_formatter(LogFormatter())
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("round")
        axes.set_ylabel(label)
        axes.grid(color="#dddddd", linewidth=0.5)

        # The legend is below the picture, so that it covers nothing. matplotlib would
        # leave out a name with an underscore.
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
    """Return a drawing as inline SVG, even for a screen of 400 pixels."""
    # imported here as in ``_curves``
    import matplotlib
    from matplotlib.figure import Figure

    settings: dict[Any, Any] = {
        # Text stays text, so that readers can search it, and "$" in a name stays "$".
        "svg.fonttype": "none",
        "text.parse_math": False,
        # Captions differ, so the ids of two pictures on a page differ as well.
        "svg.hashsalt": caption,
    }
    written = io.StringIO()
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(4.6, height), layout="constrained")
        draw(figure.subplots())
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})

    # Remove the XML's own head, and add a name for screen readers.
    text = html.escape(caption)
    _, _, svg = written.getvalue().partition("<svg")
    drawing = f'<svg role="img" aria-label="{text}"{svg}'
    return f"<figure>{drawing}<figcaption>{text}</figcaption></figure>"


def _grid(pictures: Iterable[str]) -> str:
    return f'<div class="pictures">{"".join(pictures)}</div>'


def _table(frame: pd.DataFrame) -> str:
    return _html_of(frame, index=False, na_rep="-")


def _facts(facts: Mapping[str, Any]) -> str:
    """Return a table of two columns."""
    return _html_of(pd.Series(facts, dtype=object).astype(str).to_frame(), header=False)


def _html_of(frame: pd.DataFrame, **how: Any) -> str:
    # pandas would cut long texts; the block scrolls if the screen is narrow
    with pd.option_context("display.max_colwidth", None):
        return f'<div class="table">{frame.to_html(border=0, **how)}</div>'


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
    """Return a value of a metric in the form of the page."""
    if value is None:
        return "-"
    scale = 100 if in_percent(key) else 1
    return f"{scale * value:{_form(key)}}"
