"""The report is one file that loads nothing.

It has the numbers of the folder, for finished and unfinished runs.
"""

from __future__ import annotations

import html
import itertools
import json
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pandas as pd
import pytest

from fedbn_flwr.errors import FedBNError
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.report import page, words
from fedbn_flwr.lab.report.page import write_report
from fedbn_flwr.lab.results.files import PREDICTIONS_FILES
from fedbn_flwr.lab.results.intervals import Interval
from fedbn_flwr.lab.results.ranking import Ranking
from fedbn_flwr.lab.results.sites import sites_of_run
from fedbn_flwr.lab.results.tests_table import HELD_OUT
from fedbn_flwr.lab.runs.run import run
from fedbn_flwr.lab.studies.sweep import sweep
from fedbn_flwr.lab.studies.tables import outcomes, rows_of, table
from tests.support import pictures
from tests.support.commands import call, output_of
from tests.support.fast import fast
from tests.support.runs import QUICK, edited, page_of, summary_of, values_of
from tests.support.studies import load
from tests.support.tables import write_images

EMPTY = ("meta", "br")


class Page(HTMLParser):
    """A page: its attributes, tags, open tags, and counted ids."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.attributes = []
        self.tags = []
        self.open = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag in EMPTY or self.open.pop() == tag


def table_with(column: str, text: str) -> pd.DataFrame:
    """Return the first table of a page with this column, as text."""
    for of_table in re.findall(r"<table.*?</table>", text, re.DOTALL):
        rows = [
            re.findall(r"<t[hd][^>]*>(?:<div>)?(.*?)(?:</div>)?</t[hd]>", row)
            for row in re.findall(r"<tr.*?</tr>", of_table, re.DOTALL)
        ]
        head, *body = [[html.unescape(cell) for cell in row] for row in rows]
        if column in head:
            return pd.DataFrame(body, columns=head)
    raise AssertionError(f"no table has {column}")


def loads_nothing(text: str) -> None:
    """Check that a page has no script, external address or name in braces.

    Allowed are names of formats and links within the page.
    """
    assert "{" not in re.sub("<style.*?</style>", "", text, flags=re.DOTALL)
    page = Page(text)
    assert not {"script", "link", "iframe", "object"}.intersection(page.tags)
    linked = [
        value
        for name, value in page.attributes
        if name in ("src", "href", "xlink:href")
    ]
    assert all(value.startswith(("#", "data:image/png;base64,")) for value in linked)
    assert page.open == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """FixBN in five domains, with BatchNorm's distances and a finding."""
    out = tmp_path_factory.mktemp("report") / "run"
    settings = {
        **QUICK,
        "dataset": "digits-domains",
        "partition": "domain",
        "num-clients": 5,
        "num-server-rounds": 4,
        "strategy": "fixbn",
        "freeze-at": 3,
        "eval-on": "global",
        "metrics": "accuracy,balanced-accuracy",
    }
    run(Config.make(settings), out)
    finding = {
        "what": "Batches are <small>",
        "evidence": ["2 examples"],
        "remedies": [{"setting": "norm=group", "why": "a < b & c"}],
    }
    differ = []
    for client in range(8):
        one = {
            "client": str(client),
            "examples": 9,
            "damage": ["rolled"] * (client >> 2),
            "other_labels": bool(client & 1),
            "labels_in_words": "rare",
            "other_inputs": bool(client & 2),
            "inputs_in_words": "dark",
        }
        differ.append(one)
    found = {
        "findings": [finding],
        "measures": {"sites": differ},
        "notes": ["looked at 5 clients"],
    }
    (out / "doctor.json").write_text(json.dumps(found))
    return out


@pytest.fixture(scope="module")
def shown(folder) -> str:
    """The page of the run, with its pictures."""
    with pictures.drawn():
        return page_of(folder)


def test_a_doctor_that_fails_takes_no_report(folder, monkeypatch, caplog) -> None:
    fails = mock.Mock(side_effect=RuntimeError("no layer"))
    monkeypatch.setattr("fedbn_flwr.lab.diagnose_run.examine", fails)
    (folder / "report.html").unlink(missing_ok=True)
    output_of("report", folder)
    assert (folder / "report.html").is_file()
    assert "The doctor failed: RuntimeError: no layer" in caplog.text


def test_the_page_of_a_run_has_its_numbers_in_one_file_that_loads_nothing(
    folder, shown
) -> None:
    loads_nothing(shown)
    assert len(shown) < 400_000
    summary = summary_of(folder)
    final = summary["final"]
    mean = 100 * final["test-accuracy"]
    assert f"Test accuracy after round 4: {mean:.1f} %" in shown
    of_sites = table_with("rounds", shown).set_index("site")
    rows = sites_of_run(folder).rows
    assert len(rows) == 5
    for row in rows:
        name, low, high = row["site"], 100 * row["low"], 100 * row["high"]
        value = 100 * final[f"test-accuracy/{name}"]
        cell = f"{value:.1f} ({low:.1f} to {high:.1f})"
        assert of_sites["accuracy, %"][name] == cell
    odd = table_with("damage", shown)
    for bit, column in enumerate(("labels", "inputs", "damage")):
        differ = [client >> bit & 1 for client in range(1, 8)]
        in_words = odd[column].isin(["rare", "dark", "rolled"])
        assert in_words.tolist() == differ
    settings = table_with("key", shown).set_index("key")["value"].to_dict()
    assert settings.items() >= {"strategy": "fixbn", "freeze-at": "3"}.items()
    for part in (
        "Batches are &lt;small&gt;",
        "a &lt; b &amp; c",
        "looked at 5 clients",
        summary["sha256"],
    ):
        assert part in shown
    captions = re.findall(r'<svg role="img" aria-label="([^"]*)"', shown)
    assert [caption.split(",")[0] for caption in captions] == [
        "Sites: test accuracy with the 95 % interval over the test examples.",
        "Rounds: test accuracy.",
    ]
    drawings = re.findall(r"<svg.*?</svg>", shown, re.DOTALL)
    with_text = [svg for svg in drawings if "<text" in svg]
    assert len(with_text) == 2, "text stays text: it can be read aloud and searched"


def test_a_page_fits_a_screen_of_400_pixels(shown) -> None:
    """The letters of 8.5 points have 11 pixels.

    Tables scroll in their own boxes with a shadow, and commands have several lines.
    """
    assert 'content="width=device-width, initial-scale=1"' in shown
    widths = re.findall(r'<svg[^>]* width="([\d.]+)pt"', shown)
    assert widths
    for width in widths:
        assert 8.5 * 368 / float(width) > 11
    assert "pre { white-space: pre-wrap;" in shown
    assert re.search(r"\.table \{[^}]*local,[^}]*scroll; \}", shown)
    in_boxes = re.findall('<div class="table" [^>]*><table', shown)
    assert shown.count("<table") == len(in_boxes)


@pytest.mark.parametrize("dark", [False, True])
def test_each_text_has_a_contrast_of_4_5(dark: bool) -> None:
    """The formula is from WCAG 2. A browser checks the drawn page."""
    style = Path(words.__file__).with_name("report.css").read_text()
    light = {}
    for block in re.findall(r":root {(.*?)}", style, re.DOTALL)[: 1 + dark]:
        for name, text in re.findall(r"--(\w+): #(\w+);", block):
            digits = text if len(text) == 6 else "".join(one * 2 for one in text)
            parts = np.array([*bytes.fromhex(digits)[:3]]) / 255
            bent = ((parts + 0.055) / 1.055) ** 2.4
            linear = np.where(parts <= 0.03928, parts / 12.92, bent)
            light[name] = linear @ [0.2126, 0.7152, 0.0722] + 0.05
    for text, back in itertools.product(("ink", "dim"), ("back", "soft", "warn")):
        darker, lighter = sorted([light[text], light[back]])
        assert lighter / darker >= 4.5, (text, back)


STUDY = """
name: "small <study>"
base: {num-clients: 2, num-server-rounds: 2, local-steps: 1, batch-size: 4, learning-rate: 0.3}
methods: {"Fed$Avg$ <1>": {strategy: fedavg}, _FedBN: {strategy: fedbn}}
splits: {iid: {partition: iid}, two: {partition: classes}}
seeds: [0, 1]
paper: {_FedBN/iid: 91.35}
"""


@pictures.drawn()
def test_the_page_of_a_study(tmp_path, monkeypatch) -> None:
    """A diverged run is named, and is in no mean and in no curve of the page."""
    study, out = load(tmp_path, STUDY), tmp_path / "out"
    sweep(study, out)
    text = page_of(out)
    loads_nothing(text)
    expected = table(rows_of(study, out, outcomes(study, out)))
    shown = table_with("final", text)
    for split in ("iid", "two"):
        assert f"{split}: " in text
    assert shown["final"].tolist() == expected["final"].tolist()
    assert shown["method"].tolist() == ["Fed$Avg$ <1>", "_FedBN"] * 2
    assert "<1>" not in text
    named = html.unescape(text)
    assert "Fed$Avg$ <1></text>" in named, "a name is not a formula"
    assert ">FedBN</text>" in named, "a name with an underscore is in the legend"

    curves = mock.Mock(return_value="")
    monkeypatch.setattr("fedbn_flwr.lab.report.pictures.curves", curves)
    kept, ends = (out / f"_FedBN/two/seed-{seed}" for seed in (0, 1))
    edited(ends, "summary.json", lambda one: one.update({"diverged-at": 1}))
    text = page_of(out)
    own = values_of(kept, "personal-own-accuracy")
    # Methods with different tests have pictures of their own.
    drawn = curves.call_args_list[2].args[0]
    assert [*drawn["FedBN"].values()] == own
    frame = table_with("final", text)
    marked = frame.set_index(["split", "method"])
    assert "remarks" not in frame, "the findings have the remarks once"
    assert marked["final"]["two", "_FedBN"] == f"{100 * own[-1]:.1f}"
    assert text.index("_FedBN, two: diverged and left out") < text.index("<table")
    shutil.rmtree(ends)
    text = page_of(out)
    assert "Not finished, and left out of the means: _FedBN/two/seed-1." in text
    assert "Do the runs that have no result." in text


@pytest.fixture(scope="module")
def of_fedbn(tmp_path_factory) -> Path:
    """Return the folder of a run of FedBN."""
    own = {"eval-on": "personal-own", "partition": "iid", "strategy": "fedbn"}
    out = tmp_path_factory.mktemp("report") / "fedbn"
    run(Config.make({**QUICK, **own}), out)
    return out


@pytest.fixture
def copied(of_fedbn, tmp_path) -> Path:
    """Return a copy of the folder, for changes."""
    return shutil.copytree(of_fedbn, tmp_path / "run")


def test_the_command_writes_beside_the_results(folder, tmp_path) -> None:
    assert f"report: {folder / 'report.html'}" in output_of("report", folder)
    refused = call("report", tmp_path)
    assert refused.exit_code == 2
    assert "neither config.yaml nor study.yaml" in refused.output


def test_a_page_begins_with_its_result_and_no_template_computes(folder, shown) -> None:
    parts = (
        "Test accuracy after round 4:",
        "<h2>Findings</h2>",
        "All metrics by site",
        "<h2>Sites and rounds</h2>",
        "<h2>Cost</h2>",
    )
    places = [*map(shown.index, parts)]
    assert places == sorted(places)
    page = Path(words.__file__).with_name("report.html").read_text()
    for part in re.findall(r"{[{%](.*?)[%}]}", page):
        said = re.sub(r'"[^"]*"', "", part)
        assert not re.search(r"[-+*/<>]|==|length|number", said.strip("-")), part


def killed(run: Path) -> None:
    (run / "summary.json").unlink()


def killed_elsewhere(run: Path) -> None:
    """Two sites define the metric, and the data are on another machine."""
    killed(run)
    path = run / "config.yaml"
    config = path.read_text()
    path.write_text(config.replace("dataset: digits\n", "dataset: folder:/absent\n"))

    def count(line: dict) -> None:
        known = dict(line)
        line.clear()
        line |= {"round": known["round"], "personal-own-accuracy-clients": 2, **known}

    edited(run, "metrics.jsonl", count)


@pytest.mark.parametrize("metric", ["accuracy", "loss"])
def test_an_unfinished_run_has_its_main_metric_without_its_data(
    metric: str, tmp_path
) -> None:
    data, out = write_images(tmp_path / "data", {"cat": 9, "dog": 9}), tmp_path / "run"
    run(Config.make({**QUICK, "dataset": data, "metrics": metric}), out)
    shutil.rmtree(tmp_path / "data")
    killed(out)
    assert f"Test {metric}" in page_of(out)


def before_round_1(run: Path) -> None:
    killed(run)
    (run / "metrics.jsonl").unlink()


def without_tests(run: Path) -> None:
    def remove(content: dict) -> None:
        for key in [key for key in content if key.startswith("personal")]:
            del content[key]
        content.pop("sites", None)
        if "final" in content:
            content["final"] = {}

    edited(run, "metrics.jsonl", remove)
    edited(run, "summary.json", remove)
    (run / "tests.csv").unlink()


def without_a_site(run: Path) -> None:
    """Remove the tests and the predictions of one site."""
    for name in ("tests.csv", *PREDICTIONS_FILES):
        table = pd.read_csv(run / name)
        table[table["client"] != 1].to_csv(run / name, index=False)


def with_missing_sites(run: Path) -> None:
    lost = {"client 1": "no reply within 3 s", "07": "not connected"}
    edited(run, "metrics.jsonl", lambda line: line.update(missing=lost))


def without_tests_of_sites(run: Path) -> None:
    """Remove the single predictions, and the model that could make them again."""
    (run / "predictions.csv").unlink()
    (run / "model.safetensors").unlink()


def with_sites(names: list[str]) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        rows = [{"site": name, "examples": 9, "value": 0.5} for name in names]
        edited(run, "summary.json", lambda content: content.update(sites=rows))
        without_tests_of_sites(run)
        (run / "tests.csv").unlink()

    return change


def test_a_picture_has_the_ten_lowest_and_highest_of_25_sites(
    copied, monkeypatch
) -> None:
    """Five of them are held out, so 20 sites train."""
    drawn = mock.Mock(return_value="")
    monkeypatch.setattr("fedbn_flwr.lab.report.pictures.rows", drawn)
    with_sites([f"s{at}" for at in range(25)])(copied)

    def change(summary: dict) -> None:
        for at, row in enumerate(summary["sites"]):
            row["value"] = at * 7 % 25 / 25
            if at < 5:
                row[HELD_OUT] = True

    edited(copied, "summary.json", change)
    assert " 20 sites, seed 0" in page_of(copied)
    points, _, caption = drawn.call_args.args
    assert "the 10 lowest and highest of 25 sites" in caption
    values = [value for value, *_ in points.values()]
    assert values == [at / 25 for at in range(25) if at not in range(10, 15)]


def test_methods_and_sites_with_one_short_name_have_their_own_points(
    copied, monkeypatch
) -> None:
    drawn = mock.Mock(return_value="")
    for kind in ("rows", "curves"):
        monkeypatch.setattr(f"fedbn_flwr.lab.report.pictures.{kind}", drawn)
    names = [f"learning-rate-0.{at} FedAvg with GN" for at in range(3)]
    with_sites(names)(copied)
    write_report(copied)
    means = dict.fromkeys(names, Interval(0.5))
    ranked = Ranking("accuracy", names[0], means, {}, 3, {}, [0], 9)
    assert [*page._pictures_of_study(ranked, {name: {1: 0.5} for name in names}, "")]
    shown = [len(call.args[0]) for call in drawn.call_args_list]
    assert shown == [3, 1, 3, 3], "sites, this run, and the methods twice"


@pytest.mark.parametrize("early_stopping", [0, 3])
def test_a_curve_has_the_rounds_of_all_seeds_and_its_fall_is_named(
    early_stopping: int, monkeypatch
) -> None:
    """With early stopping, the result is the best round."""
    monkeypatch.setattr(page.RunFiles, "read", lambda run: run)
    curve = dict(enumerate([0.1, 0.2, 0.3, 0.4, 0.9, 0.2]))
    results = {}
    for seed, own in enumerate(({7: 0.8}, {8: 0.8, 9: 0.8})):
        run = mock.Mock(curve=lambda _, own=own: {**curve, **own})
        run.config.early_stopping = early_stopping
        results[seed] = SimpleNamespace(run=run)
    found = page._curve(results, [0, 1])
    assert found == pytest.approx(curve)
    warned = [*page._falling({"A": found}, "accuracy", {"A": results}, "")]
    assert len(warned) == (not early_stopping)


def test_the_page_of_a_run_that_diverged_says_so(copied) -> None:
    killed(copied)
    fault = {"diverged-at": 2, "diverged": ["test-loss of round 2 is nan"]}
    edited(copied, "metrics.jsonl", lambda line: line.update(fault))
    text = page_of(copied)
    assert text.count("diverged in round 2: test-loss of round 2 is nan") == 1
    assert "No usable model" in text
    assert "Sites and rounds" not in text


LONG = [f"{'a long name of a hospital ' * 3}{at:02}" for at in range(3)]
BAD = {
    "killed": (killed, "is not finished, and no process here continues it: 2 of 2"),
    "killed elsewhere": (killed_elsewhere, "Mean test accuracy after round 2"),
    "killed before round 1": (before_round_1, "No round is finished yet."),
    "no test": (without_tests, "No round has a test with accuracy"),
    "no table of sites": (without_tests, " 3 sites, seed 0"),
    "a lost site": (without_a_site, "Mean test accuracy of 2 sites"),
    "missing sites": (with_missing_sites, "no reply within 3 s"),
    "one site": (with_sites(['<b>&"']), '<b>&"'),
    "names of 80 characters": (with_sites(LONG), LONG[2]),
    "lost predictions": (without_tests_of_sites, "The sites have no intervals: "),
    "damaged summary": (lambda run: (run / "summary.json").write_text("{"), None),
    "damaged config": (lambda run: (run / "config.yaml").write_text("[1"), None),
    "damaged line": (lambda run: (run / "metrics.jsonl").write_text("{\n{\n"), None),
    "damaged diagnosis": (lambda run: (run / "doctor.json").write_text("{"), None),
}
"""A change of a finished run, and a text of its page; None if there is an error."""


# The fast cases have missing or damaged parts of each file, and names with markup.
@pytest.mark.parametrize(
    "name", fast(BAD, *BAD.keys() - {"a lost site", "names of 80 characters"})
)
@pictures.drawn()
def test_bad_input_gives_a_page_with_a_sentence_or_a_clear_error(
    copied, name: str
) -> None:
    change, sentence = BAD[name]
    change(copied)
    if sentence is None:
        with pytest.raises(FedBNError, match=r"run/(summary|config|metrics|doctor)\."):
            write_report(copied)
        return
    text = page_of(copied)
    loads_nothing(text)
    assert sentence in html.unescape(text)
    assert len(text) < 1_000_000


def test_sites_have_their_names_before_the_run_ends(copied) -> None:
    killed(copied)
    names = {"client 0": "07", "client 1": "7", "client 2": '<b>&"'}
    tests = pd.read_csv(copied / "tests.csv")
    tests.replace({"site": names}).to_csv(copied / "tests.csv", index=False)
    text = page_of(copied)
    assert table_with("examples", text)["site"].tolist() == [*names.values()]


def test_names_in_backticks_are_code_and_all_other_text_is_escaped() -> None:
    page = words.template("report.html")
    listed = page.environment.from_string(
        '{% from "macros.html" import listed %}{{ listed([text]) }}'
    )
    shown = listed.render(text="use `a<b` & <i>")
    assert "<li>use <code>a&lt;b</code> &amp; &lt;i&gt;</li>" in shown
