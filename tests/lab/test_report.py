"""The report is one file that loads nothing.

It has the numbers of the folder, for finished and unfinished runs.
"""

from __future__ import annotations

import dataclasses
import html
import itertools
import json
import re
import shlex
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from fedbn_flwr.errors import ConfigError, FedBNError
from fedbn_flwr.lab import answer, report, report_pictures
from fedbn_flwr.lab.answer import facts_of, next_step
from fedbn_flwr.lab.cli import app
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.doctor import examine
from fedbn_flwr.lab.output.folder import lock_folder
from fedbn_flwr.lab.references import (
    ALONE,
    Comparison,
    Mean,
    alone_command,
    compare,
    references_of,
)
from fedbn_flwr.lab.report import write_report
from fedbn_flwr.lab.run_files import RunFiles
from fedbn_flwr.lab.runs.run import run
from fedbn_flwr.lab.studies.check_study import load_study
from fedbn_flwr.lab.studies.results import rows_of, table
from fedbn_flwr.lab.studies.sweep import sweep
from tests.support import pictures
from tests.support.fast import fast


class Page(HTMLParser):
    """A page: its attributes, tags, open tags, and counted ids."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str]] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def tables_of(text: str) -> list[pd.DataFrame]:
    """Return the tables of a page, as text."""
    found = []
    for of_table in re.findall(r"<table.*?</table>", text, re.DOTALL):
        rows = [
            re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)
            for row in re.findall(r"<tr.*?</tr>", of_table, re.DOTALL)
        ]
        head, *body = [[html.unescape(cell) for cell in row] for row in rows]
        found.append(pd.DataFrame(body, columns=head))
    return found


def read(path: Path) -> tuple[str, Page]:
    text = path.read_text()
    return text, Page(text)


def loads_nothing(page: Page) -> None:
    """Check that the page has no script and loads no address.

    Allowed are names of formats and links within the page.
    """
    assert not {"script", "link", "iframe", "object"}.intersection(page.tags)
    linked = [
        value
        for name, value in page.attributes
        if name in ("src", "href", "xlink:href")
    ]
    assert all(value.startswith(("#", "data:image/png;base64,")) for value in linked)
    assert page.open == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FixBN in five domains, with BatchNorm's distances and a finding."""
    out = tmp_path_factory.mktemp("report") / "run"
    settings = {
        "dataset": "digits-domains",
        "partition": "domain",
        "num-clients": 5,
        "num-server-rounds": 4,
    }
    settings |= {
        "local-steps": 2,
        "batch-size": 8,
        "strategy": "fixbn",
        "freeze-at": 3,
        "eval-on": "global",
    }
    run(Config.make({**settings, "metrics": "accuracy,balanced-accuracy"}), out)
    remedies = [{"setting": "norm=group", "why": "a < b & c"}]
    finding = {
        "what": "Batches are <small>",
        "evidence": ["2 examples"],
        "remedies": remedies,
    }
    (out / "doctor.json").write_text(
        json.dumps({"findings": [finding], "notes": ["looked at 5 clients"]})
    )
    return out


@pytest.fixture(scope="module")
def shown(folder: Path) -> str:
    """The page of the run, with its pictures."""
    with pictures.drawn():
        return write_report(folder).read_text()


def test_a_site_without_a_value_is_named_if_it_was_tested(folder: Path) -> None:
    """AUROC needs two classes. A site that was not tested has no metric at all."""
    metrics = {"one class": {"loss": 0.1, "accuracy": None}, "away": {}}
    rows = [
        {"site": name, "value": None, "metrics": known}
        for name, known in metrics.items()
    ]
    rows += [{"site": "ok", "value": 0.5, "metrics": {}, "examples": 3}] * 2
    facts = {fact.about: fact for fact in facts_of(RunFiles.read(folder), rows)}
    assert facts["Without accuracy"].value == "1 of 4 sites"
    assert facts["Without accuracy"].more.startswith("one class: ")
    assert "2 of 2 sites, 3 test examples" in facts["Worst site"].more


def test_a_doctor_that_fails_takes_no_report(
    folder: Path, tmp_path: Path, monkeypatch, caplog
) -> None:
    def fails(folder: Path) -> None:
        raise RuntimeError("no layer")

    monkeypatch.setattr("fedbn_flwr.lab.doctor.examine", fails)
    page = tmp_path / "page.html"
    shown = CliRunner().invoke(app, ["report", str(folder), "--out", str(page)])
    assert shown.exit_code == 0, shown.output
    assert page.is_file()
    assert "The doctor failed: RuntimeError: no layer" in caplog.text


def test_the_page_of_a_run_has_its_numbers_in_one_file_that_loads_nothing(
    folder: Path, shown: str
) -> None:
    text = shown
    loads_nothing(Page(text))
    assert len(text) < 400_000
    summary = json.loads((folder / "summary.json").read_text())
    tables = tables_of(text)
    result = next(frame for frame in tables if "figure" in frame).set_index("figure")[
        "value"
    ]
    for key in ("test-accuracy", "test-balanced-accuracy"):
        assert float(result[f"{key}, %"]) == pytest.approx(
            100 * summary["final"][key], abs=0.051
        )
    by_domain = summary["final"]["domains"]["test-accuracy"]
    sites = next(frame for frame in tables if "site" in frame).set_index("site")[
        "accuracy, %"
    ]
    assert dict(sites.str.split().str[0].astype(float)) == pytest.approx(
        {name: 100 * value for name, value in by_domain.items()}, abs=0.051
    )
    settings = next(frame for frame in tables if "key" in frame).set_index("key")[
        "value"
    ]
    assert (settings["strategy"], settings["freeze-at"]) == ("fixbn", "3")
    for part in (
        "Try next:",
        "Batches are &lt;small&gt;",
        "a &lt; b &amp; c",
        "looked at 5 clients",
    ):
        assert part in text
    assert summary["sha256"] in text
    phase = "; dotted vertical line: the phase changes after round 3."
    captions = re.findall(r'<svg role="img" aria-label="([^"]*)"', text)
    assert [caption.split(",")[0] for caption in captions] == [
        "Sites: test accuracy with the 95 % interval over the test examples.",
        f"Rounds: test accuracy{phase}",
        f"Other tests: accuracy{phase}",
        f"Other tests: balanced-accuracy{phase}",
        f"Other tests: loss{phase}",
    ]
    text_of_svg = [
        svg for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL) if "<text" in svg
    ]
    assert len(text_of_svg) == len(captions), (
        "text stays text: it can be read aloud and searched"
    )


@pictures.drawn()
def test_pictures_of_short_runs_are_readable() -> None:
    """Labels of a logarithmic axis are numbers, and rounds are whole numbers."""
    for values in ([60, 70], [0.6, 0.7], [1, 1000], [6]):
        rounds = list(range(1, len(values) + 1))
        text = report_pictures.curves(
            {"a": dict(zip(rounds, values, strict=True))}, "L1", "", log=True
        )
        assert "$" not in text
        (label,) = re.findall(
            r">(\d\S*)</text>", text.partition('id="matplotlib.axis_2"')[0]
        )[:1]
        assert label.isdecimal()


def test_a_page_fits_a_screen_of_400_pixels(shown: str) -> None:
    """The letters of 8.5 points have 11 pixels, in the 368 pixels between the margins.

    Tables scroll in their own boxes with a shadow, and commands have several lines.
    """
    text = shown
    assert 'content="width=device-width, initial-scale=1"' in text
    widths = [
        float(width) for width in re.findall(r'<svg[^>]* width="([\d.]+)pt"', text)
    ]
    assert widths
    assert all(8.5 * 368 / width > 11 for width in widths)
    assert "pre { white-space: pre-wrap;" in text
    assert re.search(r"\.table \{[^}]*local,[^}]*scroll; \}", text)
    assert text.count("<table") == len(
        re.findall('<div class="table" [^>]*><table', text)
    )


def test_a_run_that_is_not_finished_or_diverged_says_so(
    folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "half")
    half = tmp_path / "half"
    (half / "summary.json").unlink()
    lines = (half / "metrics.jsonl").read_text().splitlines()
    (half / "metrics.jsonl").write_text("\n".join(lines[:2]) + "\n")
    text, page = read(write_report(half))
    loads_nothing(page)
    assert "The run is not finished, and no process here continues it: 2 of 4" in text
    assert f"fedbn-flwr run --out {half} --resume" in text
    diverged = {
        **json.loads(lines[1]),
        "diverged-at": 2,
        "diverged": ["test-loss of round 2 is nan"],
    }
    (half / "metrics.jsonl").write_text(f"{lines[0]}\n{json.dumps(diverged)}\n")
    text = write_report(half).read_text()
    assert text.count("diverged in round 2: test-loss of round 2 is nan") == 1
    assert "No usable model" in text
    assert "--set learning-rate=" in text
    assert "Sites and rounds" not in text
    assert "Worst site" not in text
    (half / "metrics.jsonl").write_text("")
    assert "No round is finished yet." in write_report(half).read_text()


STUDY = """
name: "small <study>"
base: {num-clients: 2, num-server-rounds: 2, local-steps: 1, batch-size: 4, learning-rate: 0.3}
methods: {"Fed$Avg$ <1>": {strategy: fedavg}, _FedBN: {strategy: fedbn}}
splits: {iid: {partition: iid}, two: {partition: classes}}
seeds: [0, 1]
paper: {_FedBN/iid: 91.35}
"""


@pictures.drawn()
def test_the_page_of_a_study(tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text(STUDY)
    study, out = load_study(tmp_path / "study.yaml"), tmp_path / "out"
    sweep(study, out)
    text, page = read(write_report(out, tmp_path / "page.html"))
    loads_nothing(page)
    expected = table(rows_of(study, out))
    shown = next(frame for frame in tables_of(text) if "p" in frame)
    assert "The same in all rows: metric personal-own-accuracy" not in text
    for split in ("iid", "two"):
        assert f"{split}: " in text
    assert shown["final"].tolist() == expected["final"].tolist()
    assert shown["method"].tolist() == ["Fed$Avg$ <1>", "_FedBN"] * 2
    assert "<1>" not in text
    for split, kind in itertools.product(("iid", "two"), ("final", "rounds")):
        for ending, start in {
            "pdf": b"%PDF",
            "png": b"\x89PNG",
            "svg": b"<?xml",
        }.items():
            file = tmp_path / f"page-{split}-{kind}.{ending}"
            assert file.read_bytes().startswith(start)
    drawn = html.unescape(text)
    assert "Fed$Avg$ <1></text>" in drawn, "a name is not a formula"
    assert ">FedBN</text>" in drawn, "a name with an underscore is in the legend"
    shutil.rmtree(out / "_FedBN/two/seed-1")
    text = write_report(out).read_text()
    assert "Not finished, and left out of the means: _FedBN/two/seed-1." in text
    assert "Do the runs that have no result." in text


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of FedBN, Standalone and another seed in one folder."""
    parent = tmp_path_factory.mktemp("compared")
    base = {"num-clients": 3, "num-server-rounds": 2, "local-steps": 2}
    base |= {"batch-size": 8, "eval-on": "personal-own", "partition": "iid"}
    for name, own in {
        "fedbn": {"strategy": "fedbn"},
        "alone": {"strategy": "standalone"},
        "other": {"strategy": "fedavg", "seed": 1},
    }.items():
        run(Config.make({**base, **own}), parent / name)
    return parent


def test_a_run_is_compared_with_the_runs_of_the_same_data_split_seed_and_test(
    compared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The difference is the mean over the sites.

    Without a Standalone run, the page has the command that makes it.
    """
    text = write_report(compared / "fedbn").read_text()
    sites = [
        json.loads((compared / name / "summary.json").read_text())["sites"]
        for name in ("fedbn", "alone")
    ]
    differences = [
        100 * (mine["value"] - other["value"])
        for mine, other in zip(*sites, strict=True)
    ]
    by_site = next(frame for frame in tables_of(text) if "examples" in frame)
    cells = by_site["against training alone (alone)"]
    shown = [float(cell.split()[0]) for cell in cells]
    assert shown == pytest.approx(differences, abs=0.06)
    assert "Compared with training alone" in text
    assert "other" not in html.unescape(text).split("Settings")[0].split("<style>")[0]
    (found,) = references_of(RunFiles.read(compared / "fedbn"))
    assert found.folder.name == "alone"
    monkeypatch.setattr(report, "_COMPARED", 0)
    fewer = write_report(compared / "fedbn").read_text()
    assert "compares with 0 runs and leaves out training alone (alone)." in fewer
    alone = write_report(compared / "alone").read_text()
    assert "Is it better than training alone?" not in alone
    with pytest.raises(ConfigError, match="seed=1 differs from 0"):
        write_report(compared / "fedbn", against=[compared / "other"])


def test_inputs_that_the_doctor_did_not_measure_are_not_said_to_be_alike(
    compared: Path, tmp_path: Path
) -> None:
    """Only BatchNorm layers show the inputs of a client."""
    config = Config.load(compared / "fedbn/config.yaml").to_mapping()
    whole = {"strategy": "fedavg", "norm": "group"}
    run(Config.make(config | whole, complete=True), tmp_path / "group")
    words = "inputs were not compared, because the model has no BatchNorm layer."
    for folder in (compared / "fedbn", tmp_path / "group"):
        examine(folder)
        text = write_report(folder).read_text()
        assert (words in text) == (folder.name == "group")
        assert not re.search(
            r"\.[.;]", html.unescape(text).partition("Site that differs")[2][:2000]
        )


@pytest.mark.parametrize("seed", range(6))
def test_a_mean_is_over_the_sites_that_it_names(seed: int) -> None:
    """The mean of the round is over its tests, a difference over all that trained."""
    g = np.random.default_rng(seed)
    frame = pd.DataFrame({"site": [*"ABCDEFG"], "own-accuracy": g.random(7)})
    frame["value"], frame["difference"] = frame["own-accuracy"], g.normal(size=7)
    frame["held-out"] = (g.random(7) < 0.6) & (frame.index > 1) & bool(seed % 2)
    trained, held_out = frame[~frame["held-out"]], frame[frame["held-out"]]
    tested = trained.sample(len(trained) - seed // 2, random_state=seed)
    key, mean = "personal-own-accuracy", tested["value"].mean()
    clients = tested.set_index("site")[["own-accuracy"]].to_dict("index")
    line = {"round": 1, key: mean, "clients": clients, "seconds": 1.0}
    summary = {"headline": key, "final": {"round": 1, key: mean}, "rounds": 1}
    one = RunFiles(Path(), Config.make({}), [line], summary, "", False)
    rows = frame.assign(examples=9).to_dict("records")
    found = compare(one, one, rows)
    facts = {fact.about: fact.value for fact in facts_of(one, rows, [found])}
    end = " that trained" if len(held_out) else ""
    sites = "1 site" if len(tested) == 1 else f"{len(tested)} sites"
    shown = facts[f"Mean test accuracy of {sites}{end}"]
    assert shown == f"{100 * mean:.1f} %"
    shown = facts.get("Mean test accuracy of held-out sites", "nan %")
    assert shown == f"{100 * held_out['value'].mean():.1f} %"
    assert found.mean.value == pytest.approx(trained["difference"].mean())


def test_the_next_step_is_one_command_that_can_run(compared: Path) -> None:
    run_files = RunFiles.read(compared / "fedbn")
    remedies = [{"setting": "a lower rate", "why": ""}]
    remedies += [{"setting": "strategy=fixbn lr-decay-at=freeze", "why": "freezes"}]
    findings = [{"what": "Skew.", "remedies": remedies}]
    step = next_step(run_files, [], findings)
    assert step
    words = shlex.split(step.value)
    folder = compared / "fedbn-strategy-fixbn"
    assert words[-1] == str(folder)
    folder.mkdir()
    again = next_step(run_files, [], findings)
    folder.rmdir()
    assert again
    assert again.value.endswith(f"{folder}-2")
    settings = [words[at + 1] for at, word in enumerate(words) if word == "--set"]
    assert settings == ["strategy=fixbn", "lr-decay-at=freeze"]
    Config.load(Path(words[2]), settings)
    step = next_step(run_files, [], [])
    assert step
    assert step.value == alone_command(run_files.config, compared / "standalone")
    # No test has a value if the metric is undefined at each site.
    alone = RunFiles.read(compared / "alone")
    undefined = [{**line, alone.headline: None} for line in alone.lines]
    step = next_step(dataclasses.replace(alone, lines=undefined), [], [])
    assert step
    assert "seed=1" in step.value


@pytest.mark.parametrize("low", [-0.5, 0.5, -4.0])
def test_the_sentence_claims_no_more_than_the_interval(
    compared: Path, monkeypatch: pytest.MonkeyPatch, low: float
) -> None:
    def found(*of: Any) -> Comparison:
        _, reference, *_ = of
        rows = {"client 0": {"site": "0", "examples": 9, "difference": low}}
        mean = Mean(low / 100 + 0.01, 0.01, "", 99, {})
        return Comparison(reference, rows, 1, mean)

    monkeypatch.setattr(report, "compare", found)
    text = write_report(compared / "fedbn").read_text()
    established = "Not decided: " not in text
    assert established == (low > 0 or low + 2 < 0)
    if low > 0:
        assert "is better than training alone (alone) here, by 1.5 points" in text
    if low == -4.0:
        assert "Training alone (alone) is better here, by 3.0 points" in text


def test_the_command_writes_beside_the_results_and_over_no_other_file(
    folder: Path, tmp_path: Path
) -> None:
    done = CliRunner().invoke(app, ["report", str(folder)])
    assert done.exit_code == 0, done.output
    assert f"report: {folder / 'report.html'}" in done.output
    write_report(folder)  # an older report is replaced
    (tmp_path / "mine.html").write_text("mine")
    with pytest.raises(ConfigError, match=r"mine.html' is there and is not a report"):
        write_report(folder, tmp_path / "mine.html")
    refused = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert refused.exit_code == 2
    assert "neither config.yaml nor study.yaml" in refused.output


def test_the_command_that_trains_the_sites_alone_leaves_out_what_has_no_effect(
    tmp_path: Path,
) -> None:
    config = Config.make({"num-clients": 3, "held-out-clients": 1})
    given = shlex.split(alone_command(config, tmp_path))
    alone = Config.load(overrides=[each for each in given if "=" in each])
    assert (alone.strategy, alone.num_clients, alone.held_out_clients) == (ALONE, 3, "")


@pytest.mark.parametrize("test", fast(["personal-own", "global"], "global"))
def test_the_command_that_trains_the_sites_alone_runs_and_is_comparable(
    tmp_path: Path, test: str
) -> None:
    """This includes a method with settings that Standalone refuses.

    It also includes the test of a global model. Standalone does not have it.
    """
    settings = {"num-clients": 3, "num-server-rounds": 2, "local-steps": 2}
    settings |= {"strategy": "fixbn", "freeze-at": 1, "lr-decay-at": "freeze"}
    settings |= {"eval-on": test, "partition": "iid"}
    run(Config.make(settings), tmp_path / "fixbn")
    of_run = RunFiles.read(tmp_path / "fixbn")
    command = alone_command(of_run.config, tmp_path / "standalone")
    assert "agc" not in command  # it has its default
    done = CliRunner().invoke(app, shlex.split(command)[1:])
    assert done.exit_code == 0, done.output
    (found,) = references_of(of_run)
    assert found.folder == tmp_path / "standalone"
    text = write_report(tmp_path / "fixbn").read_text()
    assert "Compared with training alone" in text


def edited(folder: Path, name: str, edit: Callable[[Any], None]) -> None:
    """Change the JSON file, or each line of the file of lines."""
    path = folder / name
    lines = path.read_text().splitlines() if name.endswith("l") else [path.read_text()]
    found = [json.loads(line) for line in lines]
    for content in found:
        edit(content)
    path.write_text("".join(json.dumps(content) + "\n" for content in found))


def killed(run: Path) -> None:
    (run / "summary.json").unlink()


def before_round_1(run: Path) -> None:
    killed(run)
    (run / "metrics.jsonl").unlink()


def without_tests(run: Path) -> None:
    def remove(content: dict[str, Any]) -> None:
        for key in [key for key in content if key.startswith("personal")]:
            del content[key]
        for key in {"clients", "sites"} & content.keys():
            del content[key]
        for key in {"final", "best"} & content.keys():
            content[key] = {}

    edited(run, "metrics.jsonl", remove)
    edited(run, "summary.json", remove)


def without_a_metric_at_one_site(run: Path) -> None:
    def undefine(line: dict[str, Any]) -> None:
        line["clients"]["1"]["own-accuracy"] = None
        line["clients"]["2"].clear()

    edited(run, "metrics.jsonl", undefine)

    def forget(content: dict[str, Any]) -> None:
        content["sites"][1] |= {"value": None}

    edited(run, "summary.json", forget)


def with_missing_sites(run: Path) -> None:
    def lose(line: dict[str, Any]) -> None:
        line["missing"] = {"1": "no reply within 3 s", "2": "not connected"}

    edited(run, "metrics.jsonl", lose)


def without_tests_of_sites(run: Path) -> None:
    """Remove the single predictions, and the model that could make them again."""
    (run / "predictions.safetensors").unlink()
    (run / "model.safetensors").unlink()


def with_sites(names: list[str]) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        rows = [{"site": name, "examples": 9, "value": 0.5} for name in names]
        edited(run, "summary.json", lambda content: content.update(sites=rows))
        without_tests_of_sites(run)

    return change


LONG = [f"{'a long name of a hospital ' * 3}{at:02}" for at in range(3)]
BAD = {
    "killed": (killed, "The run is not finished, and no process here continues it"),
    "killed before round 1": (before_round_1, "No round is finished yet."),
    "no test": (without_tests, "No round has a test with accuracy"),
    "a metric missing": (without_a_metric_at_one_site, "Mean test accuracy of"),
    "missing sites": (with_missing_sites, "no reply within 3 s"),
    "one site": (with_sites(['<b>&"']), '<b>&"'),
    "200 sites": (with_sites([f"site {at}" for at in range(200)]), "of 200 sites"),
    "names of 80 characters": (with_sites(LONG), LONG[2]),
    "lost lines": (lambda run: (run / "metrics.jsonl").unlink(), "has 0 of 2 rounds"),
    "lost model": (
        without_tests_of_sites,
        "the intervals of its sites cannot be computed",
    ),
    "damaged summary": (lambda run: (run / "summary.json").write_text("{"), None),
    "damaged config": (lambda run: (run / "config.yaml").write_text("[1"), None),
    "damaged line": (lambda run: (run / "metrics.jsonl").write_text("{\n{\n"), None),
    "damaged diagnosis": (lambda run: (run / "doctor.json").write_text("{"), None),
}
"""A change of a finished run, and a text of its page; None if there is an error."""


# What is missing or damaged in each file, and names with markup.
QUICK_BAD = ("killed", "no test", "missing sites", "one site", "lost model")
QUICK_BAD += tuple(name for name in BAD if name.startswith("damaged"))


@pytest.mark.parametrize("name", fast(BAD, *QUICK_BAD))
@pictures.drawn()
def test_bad_input_gives_a_page_with_a_sentence_or_a_clear_error(
    compared: Path, tmp_path: Path, name: str
) -> None:
    change, sentence = BAD[name]
    shutil.copytree(compared / "fedbn", tmp_path / "run")
    change(tmp_path / "run")
    if sentence is None:
        with pytest.raises(FedBNError, match=r"run/(summary|config|metrics|doctor)\."):
            write_report(tmp_path / "run")
        return
    text, page = read(write_report(tmp_path / "run"))
    loads_nothing(page)
    assert sentence in html.unescape(text)
    assert len(text) < 1_000_000


def test_watch_writes_the_page_until_the_run_ends(
    compared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page reloads itself while a process has the lock of the folder, and then not
    any more.
    """
    run_folder = tmp_path / "run"
    shutil.copytree(compared / "fedbn", run_folder)
    summary = (run_folder / "summary.json").rename(tmp_path / "summary.json")
    reloads = 'http-equiv="refresh"'
    seen = []
    lock = lock_folder(run_folder)

    def sleep(seconds: float) -> None:
        seen.append((run_folder / "report.html").read_text())
        if len(seen) == 2:
            summary.rename(run_folder / "summary.json")
            lock.__exit__(None, None, None)

    monkeypatch.setattr("fedbn_flwr.lab.cli.report_command.time.sleep", sleep)
    lock.__enter__()
    done = CliRunner().invoke(app, ["report", str(run_folder), "--watch"])
    assert done.exit_code == 0, done.output
    assert len(seen) == 2
    assert all("The run is still running: 2 of 2" in text for text in seen)
    assert all(reloads in text for text in seen)
    assert reloads not in (run_folder / "report.html").read_text()


def test_sites_have_the_names_of_the_lines_before_the_run_ends(
    compared: Path, tmp_path: Path
) -> None:
    shutil.copytree(compared / "fedbn", tmp_path / "run")
    (tmp_path / "run/summary.json").unlink()
    names = {"0": "07", "1": "7", "2": '<b>&"'}
    edited(tmp_path / "run", "metrics.jsonl", lambda line: line.update(sites=names))
    text = write_report(tmp_path / "run").read_text()
    by_site = next(frame for frame in tables_of(text) if "examples" in frame)
    assert by_site["site"].tolist() == [*names.values()]


def test_names_in_backticks_are_code_and_all_other_text_is_escaped() -> None:
    page = answer.template(Path(answer.__file__).with_name("report.html"))
    listed = page.environment.from_string(
        '{% from "macros.html" import listed %}{{ listed([text]) }}'
    )
    shown = listed.render(text="use `a<b` & <i>")
    assert "<li>use <code>a&lt;b</code> &amp; &lt;i&gt;</li>" in shown
