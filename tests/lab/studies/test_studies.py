"""Each file of a paper's study can run, full and small, and names its commands."""

from __future__ import annotations

import functools
import itertools
import re
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml

from fedbn_flwr.lab.config import data_of
from fedbn_flwr.lab.data import Dataset, DatasetInfo, Samples, loading
from fedbn_flwr.lab.results.columns import column_names
from fedbn_flwr.lab.studies.check_study import load_study
from fedbn_flwr.lab.studies.study import Study
from fedbn_flwr.lab.studies.sweep import in_series, sweep
from studies.data import DOMAINNET10, OFFICE_CALTECH10
from studies.papers import PaperNumber, paper_numbers, table
from tests.support.checkout import ROOT
from tests.support.commands import call, output_of
from tests.support.fast import thinned

FOLDER = ROOT / "studies"
STUDIES = sorted(FOLDER.glob("*.yaml"))
PAGE = (FOLDER / "README.md").read_text()
# training examples of the smallest domain
OF_A_DOMAIN = {"studies.data:digits_five": 7438, "studies.data:office_caltech10": 112}
# as many rounds, tuned
LONGER = {"fedwon-table-1-office", "fedwon-office-agc", "fedwon-table-2"}


def read(path: Path, small: bool = False) -> dict:
    content = Study.read(path, small=small).to_mapping()
    return {"splits": {"all": {}}, "skip": [], "seeds": [0], **content}


def checked(path: Path, small: bool, tmp_path: Path) -> None:
    """Load each method and each split once, with the first seed.

    Other cells have the same keys. This checks that every key is known and has an
    effect, and that `paper` and `skip` name runs.
    """
    content = read(path, small)
    methods, splits = content["methods"], content["splits"]
    left = {f"{one}/" for one in methods} | {f"/{one}" for one in splits}
    left_out = [*content["skip"]]
    for method, split in itertools.product(methods, splits):
        name, here = f"{method}/{split}", {f"{method}/", f"/{split}"}
        if name in content["skip"]:
            continue
        if left.isdisjoint(here):
            left_out.append(name)
        left -= here
        settings = {**content["base"], **splits[split], **methods[method]}
        share = OF_A_DOMAIN.get(settings["dataset"], 1)
        assert float(settings.get("domain-share", 1)) <= share, name
        assert column_names(settings["dataset"]) == []
    assert not left, "a method or split that is never run"
    thin = {**content, "seeds": content["seeds"][:1], "skip": left_out}
    (tmp_path / path.name).write_text(yaml.safe_dump(thin, sort_keys=False))
    load_study(tmp_path / path.name)


def heads_of(path: Path) -> list[str]:
    """Return the comments of a study and those of its section ``small``."""
    return [
        " ".join(re.findall(r"^ *# (.*)$", part, re.MULTILINE))
        for part in path.read_text().split("\nsmall:", 1)
    ]


@pytest.mark.parametrize("path", thinned(STUDIES), ids=lambda path: path.stem)
def test_a_study_can_run_full_and_small_and_says_how(path: Path, tmp_path) -> None:
    for small in (False, True):
        checked(path, small, tmp_path)
        paper_numbers(Study.read(path, small=small))
        option, ending = (" --small", "-small") if small else ("", "")
        command = (
            rf"fedbn-flwr sweep studies/{path.name}{option}( +--\S+ \S+)*"
            rf" +--out runs/{path.stem}{ending} "
        )
        assert re.search(command, " ".join(heads_of(path)))
    assert f"]({path.name})" in PAGE
    differs = f"What differs from {path.name}: "
    of_full = ("Expected: ", "Open in the paper, chosen here: ", "Time: ")
    of_small = (differs, "Expected: ", "The paper's numbers")
    for head, words in zip(heads_of(path), (of_full, of_small), strict=True):
        for word in words:
            assert word in head


CURVES = [f"fedtan-figure-{one}" for one in (3, 4, 11, 12)]
CURVES += [f"fedbs-figure-{one}" for one in (2, 3, 6)]


@pytest.mark.parametrize("name", CURVES)
def test_a_curve_has_five_tests_or_more(name: str) -> None:
    for cell in Study.read(FOLDER / f"{name}.yaml", small=True).cells():
        settings = {**cell.base, **cell.settings}
        rounds, every = settings["num-server-rounds"], settings["eval-every"]
        assert int(rounds) >= 5 * int(every)


GROUPS = {
    "digits-five": ("mnist", "usps", "mnist-m"),
    "office-caltech10": OFFICE_CALTECH10[0],
    "domainnet10": DOMAINNET10[0],
}


# FixBN freezes after a window of 16 rounds.
LEAST = {"fixbn-t-star": 17}


@functools.lru_cache(maxsize=2)
def random_data(info: DatasetInfo, folder: Path, shape, device: str) -> Dataset:
    """Return random examples in the form of a data set, instead of its files."""
    names = GROUPS.get(info.name, ())
    rng = torch.Generator().manual_seed(0)

    def samples(number: int) -> Samples:
        size = (number, shape.channels, shape.height, shape.width)
        images = torch.randint(256, size, dtype=torch.uint8, generator=rng)
        order = torch.arange(number)
        groups = order % len(names) if names else None
        labels = order // max(1, len(names)) % info.num_classes
        return Samples(images, labels, groups)

    # 100 clients have shards of 50 small images.
    train = samples(12_000 if shape.height < 64 else 1_000)
    mean, std = (0.5,) * shape.channels, (0.25,) * shape.channels
    return Dataset(
        info.name, train, samples(120), info.num_classes, mean, std, group_names=names
    )


@pytest.mark.slow
@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_a_study_trains_each_method_and_its_commands_run(
    path: Path, tmp_path, monkeypatch
) -> None:
    """Two rounds of the small study, one step each, on random data.

    The commands of its head, and the doctor, then run on its folder.
    """
    if path.stem == "fixbn-table-3":
        pytest.importorskip("segmentation_models_pytorch")
    monkeypatch.setattr(loading, "_load", random_data)
    study = Study.read(path, [f"data-dir={tmp_path}"], small=True)
    short = {"local-epochs": 0, "local-steps": 1, "batch-size": 4}
    # A quarter of two rounds is none, and untrained statistics that are frozen diverge.
    short["on-divergence"] = "continue"
    study = study.shortened(LEAST.get(path.stem, 2)).with_chosen(
        dict.fromkeys(study.names(), short)
    )
    done: dict[str, str] = {}
    for cell in study.cells():
        done.setdefault(cell.method, cell.split)
    left_out = [
        name for name in study.names() if name not in map("/".join, done.items())
    ]
    update = {"skip": left_out, "seeds": study.seeds[:1]}
    study = study.model_copy(update=update)
    out = tmp_path / "runs" / path.stem
    table = sweep(study, out, partial(in_series, workers=0))
    assert {*table["method"]} == {*study.methods}
    assert not [*out.rglob("checkpoint")]
    cell = next(study.cells())
    assert data_of(cell.config).info
    monkeypatch.chdir(tmp_path)
    for command in re.findall(
        r"^#   fedbn-flwr ((?!sweep).*)$", path.read_text(), re.M
    ):
        output_of(*command.split())
    output_of("doctor", cell.folder(out), "--max-examples", 4, "--trust")


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_the_time_of_a_study(path: Path) -> None:
    """The head of a study counts its runs and gives the same time as the page.

    The first seed of a small study takes two hours of one core at most.
    """
    cells, heads = row_of(path), heads_of(path)
    full = re.search(r"Time: (\d+) runs.*?, some (\d+ \S+) on two cores", heads[0])
    small = re.search(
        r"Time: (\d+) runs a seed.*?, ((?:about )?(\d+) CPU minutes)", heads[1]
    )
    assert full is not None
    assert small is not None
    for found, is_small in ((full, False), (small, True)):
        content = read(path, is_small)
        pairs = len(content["methods"]) * len(content["splits"]) - len(content["skip"])
        seeds = 1 if is_small else len(content["seeds"])
        assert int(found[1]) == pairs * seeds
        assert cells[4 + is_small] == found[2]
    assert path.stem in LONGER or int(small[3]) <= 150


def row_of(path: Path) -> list[str]:
    """Return the cells of the study's row on the page."""
    link = re.escape(f"[{path.stem}]({path.name})")
    (row,) = re.findall(rf"^\| (.* \| {link} \| .*) \|$", PAGE, re.MULTILINE)
    return row.split(" | ")


PAPERS = yaml.safe_load((ROOT / "docs/results/papers.yaml").read_text())["papers"]
SHOWN = [entry for paper in PAPERS for entry in paper["shows"]]


def studies_of(entry: dict) -> list[str]:
    named = entry.get("study", [])
    return [named] if isinstance(named, str) else named


def test_the_state_of_a_table_or_figure_is_that_of_its_studies() -> None:
    """A study without results in its row of the page is not run.

    The numbers of an answer are means of its runs.
    """
    cells = {path.stem: row_of(path)[6] for path in STUDIES}
    for entry in SHOWN:
        state, results = entry.get("state"), [cells[name] for name in studies_of(entry)]
        if results:
            expected = ["not run"]
            if any(cell != "not run" for cell in results):
                # A part of a study may be of another figure.
                others = [studies_of(one) == studies_of(entry) for one in SHOWN]
                expected = ["partly", "not run"][: sum(others)]
            if all(cell.startswith("full, [seeds") for cell in results):
                expected = ["done"]
            assert state in expected, entry["of"]
        shown = "results" in entry or "runs" in entry
        assert shown == (state in ("done", "partly")), entry["of"]
        if "runs" in entry:
            path = ROOT / "docs/results" / entry["runs"] / "results.csv"
            rows = pd.read_csv(path, keep_default_na=False).query("domain == ''")
            finals = rows.groupby(["split", "method"])["final"].mean()
            means = {f"{one:.1f}" for one in finals}
            assert {*re.findall(r"\d+\.\d", entry.get("ours", ""))} <= means
        assert "why" in entry or state == "not run", entry["of"]


def test_every_study_is_of_a_table_or_figure_or_asks_what_our_results_raise() -> None:
    listed = {*itertools.chain.from_iterable(map(studies_of, SHOWN))}
    ours = PAGE.partition("Questions that our results raise")[2]
    for path in STUDIES:
        assert (path.stem in listed) != (f"]({path.name}) | " in ours), path.name


def test_a_study_of_the_package_is_found_by_its_name(tmp_path) -> None:
    result = call("sweep", "which-method", "--method", "FedTam", "--out", tmp_path)
    assert result.exit_code == 2
    assert "FedTAN" in result.output


def test_each_number_of_a_paper_stands_beside_the_results_of_its_domain() -> None:
    stated = {"A/all": {"cat": 20.5, "average": "40.25 ± 1.5"}, "B/all": "70"}
    study = Study(name="pets", methods={"A": {}, "B": {}}, paper=stated)
    rows = [
        ("A", "all", 0, "cat", "finished", 25.0),
        ("B", "all", 0, None, "failed", 1),
    ]
    rows += [("A", "all", at, "average", "finished", 37.0 + at) for at in (0, 2)]
    columns = ["method", "split", "seed", "domain", "status", "final"]
    found = table(study, pd.DataFrame(rows, columns=columns))
    about = ["METHOD/SPLIT", "domain", "runs", "final", "paper", "minus paper"]
    assert found[about].fillna("").to_numpy().tolist() == [
        ["A/all", "cat", 1, 25.0, 20.5, 4.5],
        ["A/all", "average", 2, 38.0, 40.25, -2.25],
        ["B/all", "", 0, "", 70.0, ""],
    ]
    assert paper_numbers(study)["A/all", "average"] == PaperNumber(40.25, 1.5)


@pytest.mark.parametrize("wrong", ["x", "70 ± 1 ± 2", "70 ±", "70 ± -1", "nan", "[1]"])
def test_a_value_that_is_no_number_of_a_paper_is_refused(wrong: str) -> None:
    study = Study(name="pets", methods={"A": {}}, paper={"A/all": wrong})
    with pytest.raises(ValueError, match="is not a number of a paper"):
        paper_numbers(study)
