"""The report: what the page says of a run, finished or not, and that it loads nothing."""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import shutil
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from fedbn_flwr.errors import ConfigError
from fedbn_flwr.lab import report
from fedbn_flwr.lab.cli import app
from fedbn_flwr.lab.config import Config, read_overrides
from fedbn_flwr.lab.files import read_metrics
from fedbn_flwr.lab.output.folder import lock_folder
from fedbn_flwr.lab.partitioned.partitioned_data import partitioned_data
from fedbn_flwr.lab.partitioned.splitting import split_to_json
from fedbn_flwr.lab.report import figures as drawings
from fedbn_flwr.lab.report import follow_report, write_report
from fedbn_flwr.lab.report import page as page_module
from fedbn_flwr.lab.report.files import RunFiles, StudyFiles
from fedbn_flwr.lab.report.page import (
    Code,
    Facts,
    Figure,
    Heading,
    Link,
    Listing,
    More,
    Section,
    Switch,
    Table,
    Text,
)
from fedbn_flwr.lab.report.run import run_warnings
from fedbn_flwr.lab.report.run_figures import split_figures
from fedbn_flwr.lab.report.study import _best, split_section
from fedbn_flwr.lab.report.study_figures import _shared_rounds
from fedbn_flwr.lab.runs.run import run
from fedbn_flwr.lab.studies.comparisons import comparisons
from fedbn_flwr.lab.studies.study_checks import load_study
from fedbn_flwr.lab.studies.sweep import sweep

pytestmark = pytest.mark.xdist_group("report")  # one process, and so one run and one study to report

EVIL = "</script><script>alert(1)</script><b>&amp;"
SETTINGS = {
    **{"strategy": "fixbn", "freeze-at": 2, "num-clients": 3, "num-server-rounds": 4, "local-steps": 2},
    **{
        "batch-size": 8,
        "learning-rate": 0.2,
        "eval-on": "global,personal-own",
    },
}


class Html(HTMLParser):
    """What a browser would make of a page: its texts, its tags with their attributes, and its figures."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.figures: list[dict[str, Any]] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        tag, attributes = self.tags[-1] if self.tags else ("", {})
        if tag == "script" and attributes.get("type") == "application/json" and data.strip():
            self.figures.append(json.loads(data))
        elif tag not in ("script", "style"):
            self.words.append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a phase change, tests of the global model and of clients."""
    out = tmp_path_factory.mktemp("report") / "run"
    run(Config.make(SETTINGS), out)
    (out / "statistics.jsonl").unlink()
    return out


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A copy of the run, to change."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture(scope="module")
def page(finished: Path) -> Html:
    """The page as it is; in other tests a few characters stand for plotly's code."""
    made = write_report(finished)
    assert made.stat().st_size < 1_000_000
    return Html(made)


@pytest.fixture(autouse=True)
def _short(page: Html, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (short := tmp_path / "plotly.gz").write_bytes(gzip.compress(b"Plotly"))
    monkeypatch.setattr(page_module, "PLOTLY", short)


def change(path: Path, **values: Any) -> None:
    """Change entries of a JSON or YAML file."""
    loads, dumps = (json.loads, json.dumps) if path.suffix == ".json" else (yaml.safe_load, yaml.safe_dump)
    path.write_text(dumps(loads(path.read_text()) | {key.replace("_", "-"): value for key, value in values.items()}))


def unfinish(folder: Path, rounds: int) -> None:
    """Make the folder that of a run that has done so many rounds, and writes the next line."""
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:rounds]) + lines[rounds][:40])
    (folder / "summary.json").unlink()


# --- a finished run --------------------------------------------------------------------------------------------------


def test_it_says_what_was_run_and_reached(finished: Path, page: Html) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    final, best = (100 * summary[which]["test-accuracy"] for which in ("final", "best"))
    assert "FixBN on digits, mlp" in page.text
    assert f"The test-accuracy is {final:.2f} % after round 4" in page.text
    assert f"best, in round {summary['best']['round']} {best:.2f} %" in page.text
    assert "4 rounds of 2 local steps on batches of 8" in page.text
    assert "BN frozen after round 2" in page.text
    for word in (summary["sha256"], summary["versions"]["torch"], "pooled over the whole test set, 359 examples"):
        assert word in page.text
    assert "Warning" not in page.text


def test_its_sections_have_their_figures(page: Html) -> None:
    sections = [attributes["id"] for tag, attributes in page.tags if tag == "section"]
    assert sections == [
        "curves",
        "result",
        "sites",
        "clients",
        "batchnorm",
        "split",
        "traffic",
        "settings",
        "reproduce",
    ]
    links = {attributes["href"] for tag, attributes in page.tags if tag == "a"}
    assert links == {f"#{name}" for name in sections}
    curves, losses, clients, split = page.figures
    assert [figure["layout"]["yaxis"]["title"]["text"] for figure in (curves, losses, split)] == [
        "accuracy (%)",
        "loss",
        "class",
    ]
    assert clients["layout"]["xaxis"]["title"]["text"] == "accuracy (%)"
    assert clients["data"][0]["y"] == ["client 0", "client 1", "client 2"]
    labels = [
        attributes["aria-label"]
        for _, attributes in page.tags
        if attributes.get("class") == "plot" and attributes["role"] == "group"
    ]
    assert len(labels) == len(page.figures) == page.count("figcaption")
    assert all(labels)


def test_curves_are_drawn_over_rounds_exchanges_and_bytes(finished: Path, page: Html) -> None:
    lines = read_metrics(finished / "metrics.jsonl")
    figure = page.figures[0]
    assert [trace["name"] for trace in figure["data"]] == ["test", "personal-own", "train"]
    assert figure["data"][0]["y"] == [100 * line["test-accuracy"] for line in lines]
    moved = [sum(line["bytes-down"] + line["bytes-up"] for line in lines[: at + 1]) / 2**20 for at in range(4)]
    over = {unit: found["x"][0] for unit, found in figure["units"].items()}
    assert over == {"rounds": [1, 2, 3, 4], "exchanges": [1, 2, 3, 4], "bytes": pytest.approx(moved, abs=1e-6)}
    for unit, found in figure["units"].items():
        assert [note["text"] for note in found["layout"]["annotations"]] == ["T* = 2"]
        assert found["layout"]["shapes"][0]["x0"] == over[unit][1]
    styles = {(trace["line"]["color"], trace["line"]["dash"]) for trace in figure["data"]}
    assert len({colour for colour, _ in styles}) == len({dash for _, dash in styles}) == 3, "colour is never alone"


def test_its_command_gives_the_settings_of_the_run(finished: Path, page: Html) -> None:
    command = re.search(r"fedbn-flwr run (.*?) --out runs/again", page.text)
    assert command is not None
    words = shlex.split(command[1].replace("\\ ", " "))
    assert words[::2] == ["--set"] * (len(words) // 2)
    made, saved = Config.make(read_overrides(words[1::2])), Config.load(finished / "config.yaml")
    folder = {"out": saved.out, "state_dir": saved.state_dir}
    assert made.model_copy(update=folder) == saved
    assert {word.partition("=")[0] for word in words[1::2]} == set(SETTINGS), "no more than needed"


def test_on_a_phone_a_row_of_many_columns_is_a_block() -> None:
    """Few rows: those of many would make the page long, and scroll in their box."""
    head = ["method", "rounds", "target", "reached by", "<b>"]
    made = Table(head, [["FedAvg", "12", "60", "0", "-"]]).__html__()
    assert 'class="wide stacked"' in made
    assert [f'data-label="{name}"' in made for name in (*head[:4], "&lt;b&gt;")] == [True] * 5
    for table in (Table(head[:4], [["1"] * 4]), Table(head, [["1"] * 5] * 13)):
        assert "stacked" not in table.__html__()
        assert "data-label" not in table.__html__()


def test_it_loads_nothing(page: Html) -> None:
    """No attribute that fetches, no style that does; plotly's code, the only other place of addresses, stands once."""
    fetching = ("src", "srcset", "poster", "action", "formaction", "background", "cite", "ping", "xlink:href")
    assert [a for _, attributes in page.tags for a in attributes if a in fetching] == []
    assert {a["href"] for tag, a in page.tags if tag == "link"} == {"data:,"}
    assert page.count("iframe") + page.count("object") + page.count("img") + page.count("base") == 0
    scripts = [attributes for tag, attributes in page.tags if tag == "script" and not attributes]
    assert len(scripts) == 1, "report.js"
    (packed,) = (a for tag, a in page.tags if tag == "script" and a.get("id") == "plotly")
    assert packed == {"id": "plotly", "type": "application/gzip"}
    assert gzip.decompress(page_module.PLOTLY.read_bytes()), "and nothing else is packed"
    here = Path(drawings.__file__).parent
    assert re.search(r"url\(|@import", (here / "report.css").read_text()) is None
    assert re.search(r"fetch\(|XMLHttp|import\(|https?:", (here / "report.js").read_text()) is None


def test_every_figure_is_one_of_plotly_with_colours_of_the_style(page: Html) -> None:
    css = (Path(drawings.__file__).parent / "report.css").read_text()
    colours = set(re.findall(r"(--[a-z0-9]+):", css))

    def plain(value: Any) -> Any:
        if isinstance(value, str) and value.startswith("--"):
            assert value.partition("/")[0] in colours
            return "#123456"
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list) else value

    check_figures([plain(figure) for figure in page.figures])


def check_figures(figures: list[dict[str, Any]]) -> None:
    """Let plotly check names and values of all entries."""
    import plotly.graph_objects as go

    for figure in figures:
        layouts = [unit["layout"] for unit in figure.get("units", {}).values()] or [{}]
        for layout in layouts:
            go.Figure({"data": figure["data"], "layout": {**figure["layout"], **layout}})


# --- what may be missing, strange or unfinished ----------------------------------------------------------------------


def test_every_name_is_escaped(folder: Path) -> None:
    split = json.loads((folder / "split.json").read_text())
    split["clients"][0] = split["tables"][0]["names"][0] = EVIL
    (folder / "split.json").write_text(json.dumps(split))
    change(folder / "summary.json", model_note=EVIL)
    page = Html(write_report(folder))
    assert page.text.count(EVIL) > 3
    assert page.count("b") == 0
    assert len([1 for tag, attributes in page.tags if tag == "script" and not attributes]) == 1
    assert json.dumps(page.figures).count("&lt;script&gt;") > 1, "plotly reads tags in texts"


def test_every_block_escapes_its_texts() -> None:
    table = Table([EVIL], [[EVIL], [Link(EVIL, EVIL)]], EVIL)
    blocks = (Text(EVIL), Text(EVIL, "lead"), Heading(EVIL), table, Facts([(EVIL, EVIL)]), Listing([EVIL]), Code(EVIL))
    figure = Figure({"data": [{"name": EVIL}]}, EVIL, EVIL)
    for block in (*blocks, Switch([(EVIL, EVIL)]), More(EVIL, (), EVIL), Section(EVIL, EVIL, ()), figure):
        html = block.__html__()
        assert "<script>alert" not in html, block
        assert "<b>" not in html, block
        assert "alert(1)" in html


def test_an_unfinished_run(folder: Path) -> None:
    unfinish(folder, 2)
    page = Html(write_report(folder))
    assert "Warning. The run is not finished: 2 of 4 rounds, the last one at 20" in page.text
    assert page.figures[0]["units"]["rounds"]["x"][0] == [1, 2]
    (folder / "metrics.jsonl").unlink()
    page = Html(write_report(folder))
    assert "0 of 4 rounds. " in page.text
    assert "No round is finished yet" in page.text


def test_a_run_that_diverged_and_lost_replies(folder: Path) -> None:
    lines = read_metrics(folder / "metrics.jsonl")
    lines[2] |= {"test-loss": None, "diverged-at": 3, "diverged": ["test-loss is nan"], "rejected": ["no model"]}
    lines[3] |= {"test-loss": None, "test-accuracy": None, "kept-previous": True, "dropped-batches": 2}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    change(folder / "summary.json", diverged_at=3, resumed_after=[1])
    page = Html(write_report(folder))
    warnings = page.text.split("Warning. ")[1:]
    assert warnings[0].startswith("The run diverged in round 3: test-loss is nan.")
    assert warnings[1].startswith("1 replies of clients were refused (1 times: no model).")
    assert warnings[2].startswith("Too few replies were usable in 1 rounds (the first is 4)")
    assert warnings[3].startswith("2 batches of one example were left out")
    assert warnings[4].startswith("The run was interrupted and resumed after round 1")
    assert "diverged" in [note["text"] for note in page.figures[0]["units"]["rounds"]["layout"]["annotations"]]
    assert page.figures[1]["data"][0]["y"][2:] == [None, None]


def test_a_finished_run_that_has_lost_lines(folder: Path) -> None:
    """The page showed a shorter run, with a best below its final result, without a word."""
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    final = json.loads((folder / "summary.json").read_text())["final"]["test-accuracy"]
    (folder / "metrics.jsonl").write_text("".join(lines[:2]))
    page = Html(write_report(folder))
    assert "Warning. metrics.jsonl has 2 of 4 rounds: the run's best result" in page.text
    assert f"The test-accuracy is {100 * final:.2f} % after round 4." in page.text
    assert "best, in round" not in page.text
    assert "rounds 4 exchanges 4 floats" in page.text
    assert [figure["data"][0]["type"] for figure in page.figures] == ["heatmap"], "the split alone"


def test_a_long_curve_is_thinned_and_says_so() -> None:
    """Every second round has a test; the first and the last point stay, and the band follows."""
    values = [None if at % 2 else float(at) for at in range(9001)]
    places = {unit: [*range(9001)] for unit in drawings.UNITS}
    drawing = drawings.curves([drawings.Series("a", places, values, 0, values, values)], "accuracy")
    xs, ys = drawing["units"]["bytes"]["x"][1], drawing["data"][1]["y"]
    assert len(xs) == len(ys) < 2100
    assert xs == ys
    assert (xs[0], xs[-1]) == (0, 9000)
    assert len(drawing["data"][0]["y"]) == len(drawing["units"]["rounds"]["x"][0]) == 2 * len(ys)
    assert "at most 2,000 points of a curve are drawn" in Figure(drawing, "label").__html__()
    short = drawings.curves([drawings.Series("a", places, values[:100], 0)], "accuracy")
    assert short["data"][0]["y"] == values[:100]
    assert "points" not in Figure(short, "label").__html__()


def test_a_folder_without_its_split(folder: Path) -> None:
    (folder / "split.json").unlink()
    page = Html(write_report(folder))
    assert len(page.figures) == 3
    assert "The folder has no split.json: there are more than 1,000 clients" in page.text


def test_domains_and_many_clients(folder: Path) -> None:
    lines = read_metrics(folder / "metrics.jsonl")
    lines[-1]["domains"] = {"test-accuracy": {"amazon": 0.5, "dslr": None}, "test-macro-f1": {"amazon": 0.25}}
    lines[-1]["clients"] = {str(at): {"own-accuracy": at / 100, "own-loss": 1.0} for at in range(100)}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = Html(write_report(folder))
    assert page.figures[2]["data"][0]["y"] == ["amazon", "dslr"]
    assert page.figures[2]["data"][0]["x"] == [50.0, None]
    assert page.figures[3]["data"][0]["type"] == "histogram"
    check_figures([{**f, "data": [{**t, "marker": {}} for t in f["data"]]} for f in page.figures[2:4]])


def recorded(server_round: int) -> dict[str, Any]:
    """A line of ``statistics.jsonl``; after T* nothing is tracked."""
    frozen = server_round > 2
    change = dict.fromkeys(("l1", "mean", "variance"), 0.0 if frozen else 0.5)
    clients = dict.fromkeys(change, [None, None] if frozen else [1.5, 2.5])
    layers = {path: {"change": change, "clients": clients} for path in ("norm", "")}
    return {"round": server_round, "phase": "train", "clients": ["0", "1"], "layers": layers}


def test_the_batchnorm_pictures(folder: Path, page: Html) -> None:
    assert "The server saw no statistics of single clients." in page.text
    path = folder / "statistics.jsonl"
    path.write_text("".join(json.dumps(recorded(at)) + "\n" for at in (1, 2, 3)))
    found = Html(write_report(folder)).figures[3:-1]
    assert [figure["data"][-1]["type"] for figure in found] == ["scatter", *["heatmap"] * 4]
    band, local, change = found[0]["data"]
    assert (local["y"], change["y"]) == ([4.0, 4.0, None], [1.0, 1.0, None]), "summed over the layers"
    assert band["y"] == [5.0, 5.0, 3.0, 3.0]
    assert found[0]["units"]["rounds"]["x"][0] == [1, 2, 2, 1], "there and back, without the round that has no values"
    assert found[1]["data"][0]["z"] == [[2.0, 2.0, None]] * 2
    assert found[1]["data"][0]["y"] == ["norm", "the model"]


def test_sums_are_over_the_same_layers_in_every_round(folder: Path) -> None:
    """A layer that does not track in a round ends that round's sum; one that never tracks is in none."""
    lines = [recorded(1), recorded(2), recorded(2)]
    for line in lines:
        line["layers"]["held"] = recorded(3)["layers"]["norm"]
    lines[1]["layers"]["norm"] = recorded(3)["layers"]["norm"]
    (folder / "statistics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = Html(write_report(folder))
    assert page.figures[3]["data"][1]["y"] == [4.0, None, 4.0]
    assert "Layers that never have a value are in no sum." in page.text


@pytest.mark.parametrize("name", ["doctor.json", "doctor/doctor.json"])
def test_the_findings_of_the_doctor(folder: Path, name: str) -> None:
    remedy = {"setting": "norm=group", "why": "no BN", "expected": "Cost: less"}
    finding = {"what": "A layer is dead.", "evidence": [EVIL], "remedies": [remedy]}
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps({"findings": [finding]}))
    text = Html(write_report(folder)).text
    table = "what to try, in order what it does gain where measured, cost norm=group no BN Cost: less"
    assert f"The doctor has 1 finding. A layer is dead. {EVIL} {table}" in text
    (folder / name).write_text(json.dumps({"findings": [], "not-measured": ["B_i: no data."], "notes": [EVIL]}))
    said = f"The doctor has no findings. What the doctor could not measure B_i: no data. Notes of the doctor {EVIL}"
    text = Html(write_report(folder)).text
    assert said in text
    assert "older" not in text
    os.utime(folder / name, (0, 0))
    assert f"{name} is older than the last round of the run" in Html(write_report(folder)).text
    (newer,) = {"doctor.json", "doctor/doctor.json"} - {name}
    (folder / newer).parent.mkdir(exist_ok=True)
    (folder / newer).write_text(json.dumps({"findings": [finding]}))
    assert "The doctor has 1 finding." in Html(write_report(folder)).text


# --- a study ---------------------------------------------------------------------------------------------------------

STUDY = f"""
name: {EVIL!r}
base:
  {{num-clients: 2, num-server-rounds: 2, local-steps: 1, batch-size: 8, learning-rate: 0.3, partition: iid,
   }}
methods: {{FedAvg: {{}}, FedBN <b>: {{strategy: fedbn, learning-rate: 0.1}}}}
seeds: [0, 1]
target: 1
paper: {{FedAvg/all: 91.5 ± 0.4}}
"""


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("study") / "study.yaml"
    path.write_text(STUDY)
    sweep(load_study(path), path.parent / "out")
    for lines in path.parent.glob("out/*/*/*/statistics.jsonl"):
        lines.unlink()
    return path.parent / "out"


@pytest.fixture
def study(swept: Path, tmp_path: Path) -> Path:
    """A copy of the study's folder, to change."""
    return Path(shutil.copytree(swept, tmp_path / "study"))


def test_a_study_beside_the_papers_numbers(swept: Path) -> None:
    page = Html(write_report(swept))
    assert page.text.count(EVIL) >= 2
    assert page.count("b") == 0
    assert page.count("script") == 2 + len(page.figures)
    rows = [json.loads(line) for line in (swept / "results.jsonl").read_text().splitlines()]
    finals = [row["final"] for row in rows if row["method"] == "FedAvg"]
    mean, std = statistics.fmean(finals), statistics.stdev(finals)
    assert f"FedAvg {mean:.2f} ± {std:.2f} 2 " in page.text
    assert f" 91.50 ± 0.40 {mean - 91.5:+.2f} test-accuracy" in page.text
    assert "runs finished 4 of 4" in page.text
    curves, results, _, split = page.figures
    seeds, means, paper = results["data"]
    assert seeds["x"][:2] == finals
    assert seeds["text"] == ["seed 0", "seed 1"] * 2
    half = 12.7062 * std / 2**0.5  # t(0.975, 1)
    assert means["x"][0] == pytest.approx(mean)
    assert (means["error_x"]["array"][0], means["error_x"]["arrayminus"][0]) == pytest.approx((half, half), rel=1e-4)
    assert (paper["x"], paper["error_x"]["array"]) == ([91.5], [0.4])
    assert [trace.get("name") for trace in curves["data"]] == [
        *(None, "FedAvg (test)", None, "FedBN &lt;b&gt; (personal-own)"),
    ]
    assert "Accuracy, final result" in page.text
    last = [100 * read_metrics(swept / f"FedAvg/all/seed-{seed}/metrics.jsonl")[-1]["test-accuracy"] for seed in (0, 1)]
    assert curves["data"][1]["y"][-1] == pytest.approx(statistics.fmean(last))
    assert curves["data"][0]["y"][1:3] == pytest.approx([max(last), min(last)])
    assert split["data"][0]["type"] == "heatmap"
    check_figures(json.loads(re.sub(r'"--[^"]*"', '"#123456"', json.dumps(page.figures))))


def test_links_of_a_study_lead_to_its_runs(swept: Path) -> None:
    page = Html(write_report(swept))
    links = {attributes["href"] for tag, attributes in page.tags if tag == "a"}
    anchors = {f"#{attributes['id']}" for _, attributes in page.tags if attributes.get("id")}
    assert links <= anchors
    assert sum(link.startswith("#runs-") for link in links) == 2
    assert "fedbn-flwr run --set strategy=fedbn --set partition=iid" in page.text


def test_a_run_whose_server_sees_no_statistics(swept: Path, tmp_path: Path) -> None:
    (folder,) = swept.glob("FedBN*/all/seed-0")
    text = Html(write_report(folder, tmp_path / "a.html")).text
    assert "The server saw no statistics of single clients." in text


def test_paired_differences(study: Path) -> None:
    """Of the main metric of each method, both named; a method in no pair is named with the reason."""
    content = yaml.safe_load((study / "study.yaml").read_text())
    change(study / "study.yaml", methods={**content["methods"], "New": {}})
    finals = [92.0, 93.5]  # of one seed each, so that the differences vary
    for path, final in zip(sorted(study.glob("FedBN*/all/*/summary.json")), finals, strict=True):
        summary = json.loads(path.read_text())
        change(path, final=summary["final"] | {"personal-own-accuracy": final / 100})
    page = Html(write_report(study))
    difference = page.figures[2]["data"][0]
    assert (
        difference["y"][0]
        .replace("\N{NO-BREAK SPACE}", " ")
        .startswith("FedAvg (test) \N{MINUS SIGN} FedBN &lt;b&gt; (personal-own)")
    )
    assert "Differences in accuracy" in page.text
    assert "different tests" in page.text
    assert "Left out: New, all: no run has a final result." in page.text
    rows = comparisons(StudyFiles.read(study).rows)
    assert difference["x"] == [rows[0]["difference"]]
    assert "No interval" not in page.text
    for path in study.glob("FedBN*/all/*/summary.json"):  # 1 below that of the other method with the same seed
        other = json.loads((study / "FedAvg/all" / path.parent.name / "summary.json").read_text())["final"]
        final = json.loads(path.read_text())["final"]
        change(path, final=final | {"personal-own-accuracy": other["test-accuracy"] - 0.01})
    text = Html(write_report(study)).text
    assert "+1.00 - - - - 2 -" in text
    assert "- No interval: one seed, or the same difference in every seed." in text
    assert difference["error_x"]["array"] == [pytest.approx(rows[0]["high"] - rows[0]["difference"])]


def test_a_study_that_is_not_finished(study: Path) -> None:
    first, second = (study / f"FedAvg/all/seed-{seed}" for seed in (0, 1))
    (first / "summary.json").unlink()
    (first / "failed.json").write_text(json.dumps({"error": "no memory"}))
    shutil.rmtree(second)
    page = Html(write_report(study))
    assert "Failed, and left out of the means: 1 of 4 runs (FedAvg/all/seed-0)." in page.text
    assert "Not begun: 1 of 4 runs (FedAvg/all/seed-1)." in page.text
    assert "Seed 0: failed: no memory" in page.text
    assert not StudyFiles.read(study).ended
    (first / "failed.json").unlink()
    assert "Begun and not finished: 1 of 4 runs (FedAvg/all/seed-0)." in Html(write_report(study)).text
    for path in study.glob("Fed*"):
        shutil.rmtree(path)
    page = Html(write_report(study))
    assert "No run is finished yet." in page.text
    assert page.figures == []


def test_a_study_whose_runs_have_former_settings(study: Path) -> None:
    """As after a sweep of a changed study was interrupted."""
    base = yaml.safe_load((study / "study.yaml").read_text())["base"]
    change(study / "study.yaml", base={**base, "batch-size": 4})
    files = StudyFiles.read(study)
    assert {files.status(cell) for cell in files.cells} == {"to repeat"}
    assert not files.ended
    assert files.rows == []
    failed = study / "FedAvg/all/seed-0"
    (failed / "summary.json").unlink()
    (failed / "failed.json").write_text(json.dumps({"error": "of the former settings"}))
    files = StudyFiles.read(study)
    assert {files.status(cell) for cell in files.cells} == {"to repeat"}
    assert files.rows == []
    page = Html(write_report(study))
    assert "Begun with other settings than the study's, and left out; a sweep repeats them: 4 of 4 runs" in page.text
    assert page.figures == [], "no curve, no split"


def test_the_best_of_a_loss_is_the_lowest() -> None:
    about = {"split": "all", "metric": "personal-own-loss-weighted", "runs": 1}
    rows = [{**about, "method": "A", "mean": 0.45}, {**about, "method": "B", "mean": 1.94}]
    files: Any = SimpleNamespace(table=rows, rows=[], study=SimpleNamespace(splits={"all": {}}))
    assert list(_best(files)) == [
        "No difference in personal-own-loss-weighted is established. The lowest is 0.4500, of A (mean of 1 run)."
    ]


@pytest.mark.parametrize(("behind", "said"), [(0.1, "The best test-accuracy is 80.00"), (0.7999, "No difference in")])
def test_a_best_method_is_named_only_where_a_difference_is_established(behind: float, said: str) -> None:
    seeds = (-0.001, 0.0, 0.0011)
    results = [
        {
            **{"split": "all", "metric": "test-accuracy", "main": True, "status": "finished", "method": method},
            "seed": seed,
            "final": 100 * (accuracy + noise * (1 if method == "A" else -2)),
        }
        for method, accuracy in (("A", 0.8), ("B", behind))
        for seed, noise in enumerate(seeds)
    ]
    rows = [
        {"split": "all", "metric": "test-accuracy", "runs": 3, "method": method, "mean": 100 * accuracy}
        for method, accuracy in (("A", 0.8), ("B", behind))
    ]
    files: Any = SimpleNamespace(table=rows, rows=results, study=SimpleNamespace(splits={"all": {}}))
    (sentence,) = _best(files)
    assert sentence.startswith(said)
    assert ("best" in sentence) == said.startswith("The best")


def test_a_study_without_its_data(study: Path) -> None:
    """A folder that was copied from another machine; one run has not begun."""
    absent = {"dataset": "npz:/nowhere/own.npz"}
    base = yaml.safe_load((study / "study.yaml").read_text())["base"]
    change(study / "study.yaml", base={**base, **absent})
    shutil.rmtree(study / "FedAvg/all/seed-1")
    for path in study.glob("Fed*/all/*/config.yaml"):
        change(path, **absent)
    text = Html(write_report(study)).text
    assert "runs finished 3 of 4" in text
    assert "rounds of a run 2" in text
    assert "Not begun: 1 of 4 runs (FedAvg/all/seed-1)." in text
    (study / "study.yaml").write_text("name: a")
    with pytest.raises(ConfigError, match="methods: field required"):
        write_report(study)


def test_the_difference_from_the_papers_numbers_by_domain(study: Path) -> None:
    change(study / "study.yaml", paper={"FedAvg/all": {"noisy": "40 ± 2.5", "average": 45.0}})
    for path in study.glob("FedAvg/all/*/summary.json"):
        final = json.loads(path.read_text())["final"]
        change(path, final={**final, "domains": {"test-accuracy": {"noisy": 0.4125, "clean": 0.5}}})
    text = Html(write_report(study)).text
    assert "FedAvg, the paper 40.00 ± 2.50 - 45.00 FedAvg, difference +1.25 - +0.62" in text


def test_the_batchnorm_picture_of_a_study(study: Path) -> None:
    """The first seed of each method that has statistics; FedBN's server sees none."""
    assert "batchnorm" not in [attributes.get("id") for _, attributes in Html(write_report(study)).tags]
    for seed, rounds in ((0, (1, 2, 3)), (1, (1, 2))):
        lines = "".join(json.dumps(recorded(at)) + "\n" for at in rounds)
        (study / f"FedAvg/all/seed-{seed}/statistics.jsonl").write_text(lines)
    page = Html(write_report(study))
    assert "batchnorm" in [attributes.get("id") for tag, attributes in page.tags if tag == "section"]
    local, change = page.figures[3:5]
    assert [trace["name"] for trace in local["data"]] == [trace["name"] for trace in change["data"]] == ["FedAvg"]
    assert (local["data"][0]["y"], change["data"][0]["y"]) == ([4.0, 4.0, None], [1.0, 1.0, None])
    assert local["units"]["bytes"]["x"][0] == [1, 2, 3], "recorded by round only"
    assert "of seed 0" in page.text
    assert "Without statistics: FedBN <b>, all." in page.text
    check_figures(json.loads(re.sub(r'"--[^"]*"', '"#123456"', json.dumps([local, change]))))


def without_tests(run: Path) -> None:
    """Take the main metric out of the lines of a run."""
    lines = [{**line, "test-accuracy": None} for line in read_metrics(run / "metrics.jsonl")]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_mean_curve_is_drawn_at_the_mean_traffic(study: Path) -> None:
    """It was drawn at the traffic of the first seed."""
    path = study / "FedAvg/all/seed-1/metrics.jsonl"
    lines = [line | {"exchanges": 10, "bytes-down": 9 * 2**20, "bytes-up": 0} for line in read_metrics(path)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    first = read_metrics(study / "FedAvg/all/seed-0/metrics.jsonl")[0]
    curves = Html(write_report(study)).figures[0]
    places = {unit: found["x"][1] for unit, found in curves["units"].items()}
    assert (places["rounds"], places["exchanges"]) == ([1, 2], [(first["exchanges"] + 10) / 2, first["exchanges"] + 10])
    moved = (first["bytes-down"] + first["bytes-up"]) / 2**20
    assert places["bytes"][0] == pytest.approx((moved + 9) / 2, abs=1e-6)


def test_rounds_of_long_runs_are_matched_without_a_search() -> None:
    """32,000 rounds were searched for in lists of 32,000: seconds for each method."""
    compared = 0

    class Round(int):
        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return int(self) == other

        __hash__ = int.__hash__

    runs: Any = [SimpleNamespace(measured=[{"round": Round(at)} for at in range(first, 300)]) for first in (0, 100)]
    assert _shared_rounds(runs) == [*range(100, 300)]
    assert compared < 2000


def test_seeds_without_a_common_test_have_no_mean_curve(study: Path) -> None:
    without_tests(study / "FedAvg/all/seed-1")
    curves = Html(write_report(study)).figures[0]
    assert [trace["name"] for trace in curves["data"] if "name" in trace] == ["FedBN &lt;b&gt;"]


def test_diverged_seeds_are_not_in_the_curves(study: Path) -> None:
    good, bad = (study / f"FedAvg/all/seed-{seed}" for seed in (0, 1))
    lines = (bad / "metrics.jsonl").read_text().splitlines(keepends=True)
    (bad / "metrics.jsonl").write_text(lines[0])
    change(bad / "summary.json", diverged_at=1, rounds=1)
    page = Html(write_report(study))
    (curve,) = [trace for trace in page.figures[0]["data"] if str(trace.get("name")).startswith("FedAvg")]
    assert curve["y"] == [100 * line["test-accuracy"] for line in read_metrics(good / "metrics.jsonl")]
    assert "A curve ends with its shortest seed." in page.text
    change(good / "summary.json", diverged_at=2)
    (longest,) = StudyFiles.read(study).of("FedAvg", "all")
    assert longest.folder == good, "all have diverged: the longest"


# --- the command and the live report ---------------------------------------------------------------------------------


def call(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["report", *arguments])
    return result.exit_code, " ".join(result.output.split())


def test_the_command(folder: Path, tmp_path: Path) -> None:
    code, text = call(str(folder), "--out", str(tmp_path / "new/a.html"))
    assert (code, text) == (0, f"report: {tmp_path / 'new/a.html'}")
    assert call(str(folder))[0] == call(str(folder))[0] == 0, "an older report is replaced"
    assert (folder / "report.html").is_file()
    code, text = call(str(tmp_path))
    assert code == 2
    assert "is not the folder of a run or a study: it has neither config.yaml nor study.yaml" in text
    code, text = call(str(folder), "--out", str(folder / "config.yaml"))
    assert (code, text.endswith("is there and is not a report. Choose another file.")) == (2, True)
    assert Config.load(folder / "config.yaml").strategy == "fixbn"
    assert call(str(folder), "--out", str(tmp_path))[0] == 2


@pytest.fixture
def growing(folder: Path) -> Iterator[Callable[[float], None]]:
    """A run of which each wait of the report makes a round more; it checks that the page on the disk is live."""
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    summary = (folder / "summary.json").read_text()
    unfinish(folder, 1)
    waits: list[int] = []

    def wait(seconds: float) -> None:
        page = Html(folder / "report.html")
        assert ("body", {"data-live": "5"}) in page.tags
        assert f"{min(1 + len(waits), 4)} of 4 rounds" in page.text
        waits.append(len(lines))
        assert len(waits) < 6, "it has not ended"
        (folder / "metrics.jsonl").write_text("".join(lines[: 1 + len(waits)]))
        if len(waits) == 3:
            (folder / "summary.json").write_text(summary)

    yield wait
    assert len(waits) == 3


def test_a_live_report_follows_the_run_and_ends_with_it(folder: Path, growing: Callable[[float], None]) -> None:
    page = Html(follow_report(folder, wait=growing))
    assert ("body", {"data-live": "0"}) in page.tags
    assert "not finished" not in page.text
    assert "meta http-equiv" not in (folder / "report.html").read_text()


def test_a_live_report_that_is_interrupted_leaves_a_page_that_is_not_live(folder: Path) -> None:
    unfinish(folder, 1)
    writes = []

    def wait(seconds: float) -> None:
        writes.append((folder / "report.html").stat().st_mtime_ns)
        if len(writes) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        follow_report(folder, wait=wait)
    assert writes[0] == writes[2], "nothing has changed: no new page"
    assert ("body", {"data-live": "0"}) in Html(folder / "report.html").tags
    with pytest.raises(ConfigError, match="neither"):
        follow_report(folder.parent)


def test_a_live_report_of_a_study_waits_for_the_sweep_that_repeats_a_failed_run(study: Path) -> None:
    first = study / "FedAvg/all/seed-0"
    summary = (first / "summary.json").read_text()
    (first / "summary.json").unlink()
    (first / "failed.json").write_text(json.dumps({"error": "no memory"}))
    waits: list[float] = []
    with ExitStack() as sweeping:
        sweeping.enter_context(lock_folder(study, "study"))

        def wait(seconds: float) -> None:
            waits.append(seconds)
            assert len(waits) < 4, "it has not ended"
            if len(waits) == 1:
                (first / "failed.json").unlink()
                (first / "summary.json").write_text(summary)
            else:  # the sweep ends, and no file changes any more
                sweeping.close()

        page = Html(follow_report(study, wait=wait))
    assert len(waits) == 2
    assert "runs finished 4 of 4" in page.text


def test_a_live_report_does_not_take_the_cores_from_the_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that takes 3 s is written every 30 s."""
    unfinish(folder, 1)
    now, waits = [0.0], []

    def write(*_: object, live: int, plain: bool) -> tuple[Path, bool]:
        now[0] += 3
        return folder / "report.html", len(waits) == 2

    def wait(seconds: float) -> None:
        waits.append(seconds)
        assert len(waits) < 5, "it has not ended"
        (folder / f"{len(waits)}.json").write_text("{}")

    monkeypatch.setattr(report, "_write", write)
    monkeypatch.setattr(report, "time", SimpleNamespace(monotonic=lambda: now[0]))
    follow_report(folder, wait=wait)
    assert waits == [30, 30]


def test_a_folder_that_is_renamed_during_a_look_ends_no_live_report(folder: Path, monkeypatch) -> None:
    """A sweep sets folders aside; the walk through them raised FileNotFoundError on Python 3.11."""
    (folder / "away").mkdir()
    scandir = os.scandir

    def renamed(path: Any = ".") -> Any:
        if str(path).endswith("away"):
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", renamed)
    assert str(folder / "summary.json") in [name for name, *_ in report._state(folder)]


# --- in a browser ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_in_a_browser(
    finished: Path, swept: Path, width: int, scheme: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No message, no request beyond the file, no scrolling to the side, and every figure is drawn: also on paper."""
    sync_api = pytest.importorskip("playwright.sync_api")
    monkeypatch.undo()  # plotly's own code
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium)
        for folder in (finished, swept):
            path = write_report(folder, tmp_path / f"{folder.name}.html")
            tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            messages: list[str] = []
            requests: list[str] = []
            tab.on("console", lambda message, said=messages: said.append(message.text))
            tab.on("pageerror", lambda error, said=messages: said.append(str(error)))
            tab.on("request", lambda request, made=requests: made.append(request.url))
            tab.goto(path.as_uri())
            tab.wait_for_function("[...document.querySelectorAll('.plot')].every((one) => one.querySelector('.xtick'))")
            count = len(Html(path).figures)
            assert tab.locator(".plot .main-svg:first-child").count() == count
            assert tab.evaluate("document.documentElement.scrollWidth") == width
            assert tab.evaluate("[...document.querySelectorAll('.plot')].every((p) => p.scrollWidth <= p.clientWidth)")
            tab.locator('input[value="bytes"]').check()
            tab.wait_for_function("[...document.querySelectorAll('.xtitle')].some((t) => /MiB/.test(t.textContent))")
            paper = tab.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
            tab.emulate_media(media="print", color_scheme=scheme)
            assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
            assert tab.locator("details:not([open]):visible").count() == 0, (
                "what cannot be opened on paper is not there"
            )
            assert len(tab.pdf(format="A4")) > 10_000
            assert messages == []
            assert requests == [path.as_uri()]
            old = browser.new_page()
            old.add_init_script("delete globalThis.DecompressionStream")
            old.goto(path.as_uri())
            assert old.get_by_text("This browser is too old to draw").count() == count
            assert old.locator("figure details:not([open])").count() == 0, "the numbers stand there"
            old.goto(write_report(folder, tmp_path / f"{folder.name}-plain.html", plain=True).as_uri())
            old.wait_for_function("[...document.querySelectorAll('.plot')].every((one) => one.querySelector('.xtick'))")
            assert old.locator(".plot .main-svg:first-child").count() == count
        browser.close()


PROTECTED: list[dict[str, Any]] = [
    {"dp": "server", "dp-noise-multiplier": 1.0},
    {"record-dp": True, "record-dp-noise-multiplier": 1.0, "norm": "group", "local-steps": 2},
    {"masked-sums": True},
]


def write_split(folder: Path, config: Config) -> None:
    counts = split_to_json(partitioned_data(config, config.num_clients))
    (folder / "split.json").write_text(json.dumps(counts))


@pytest.mark.parametrize("keys", [{}, *PROTECTED])
def test_a_protected_run_shows_no_counts_of_clients_and_is_not_repeatable(keys: dict[str, Any], tmp_path: Path) -> None:
    config = Config.make({"dataset": "digits", "num-clients": 4, "eval-on": "global", **keys})
    write_split(tmp_path, config)
    (tmp_path / "data.json").write_text(json.dumps({"warnings": ["no training examples of class 3: client 2"]}))
    run = RunFiles(tmp_path, config, [], {"resumed-after": [2]})
    assert (len(split_figures(run)) == 1 and isinstance(split_figures(run)[0], Text)) == bool(keys)
    warnings = " ".join(run_warnings(run))
    assert "was interrupted and resumed after round 2" in warnings
    for words in ("its bits are those of one run", "class 3: client 2"):
        assert (words in warnings) == (not keys), words


def test_a_study_shows_no_counts_beside_a_protected_run(tmp_path: Path) -> None:
    runs = []
    for keys in ({}, PROTECTED[0]):
        config = Config.make({"dataset": "digits", "num-clients": 4, "eval-on": "global", **keys})
        write_split(tmp_path, config)
        about = SimpleNamespace(split="iid", method=f"method {len(runs)}")
        runs.append((about, RunFiles(tmp_path, config, [], {})))
    files: Any = SimpleNamespace(study=SimpleNamespace(splits=["iid"]), runs=runs)
    section = split_section(files)
    assert section
    assert [type(block) for block in section.blocks] == [Text]
    files.runs = runs[:1]
    section = split_section(files)
    assert section
    assert [type(block) for block in section.blocks] == [Figure]


def test_methods_with_a_split_of_their_own_have_a_picture_of_their_own(tmp_path: Path) -> None:
    runs = []
    for method, keys in (("A", {}), ("B", {"strategy": "fedbn"}), ("Five", {"num-clients": 5})):
        config = Config.make({"dataset": "digits", "num-clients": 4, **keys})
        (folder := tmp_path / method).mkdir()
        write_split(folder, config)
        runs.append((SimpleNamespace(split="iid", method=method), RunFiles(folder, config, [], {})))
    files: Any = SimpleNamespace(study=SimpleNamespace(splits=["iid"]), runs=runs)
    section = split_section(files)
    assert section
    titles = [block.title for block in section.blocks if isinstance(block, Figure)]
    assert [title.partition("client, ")[2] for title in titles] == ["A, B, seed 0", "Five, seed 0"]
