"""A test result is one number, wherever a run or a study shows it.

Each draw is a study of two methods with two seeds on drawn sites. Its runs are done by
the command. The numbers of ``summary.json``, ``tests.csv``, the terminal, ``evaluate``,
the page of a run, the page of the study and its tables are compared with a few lines of
pandas that read only ``predictions.csv``.
"""

from __future__ import annotations

import html
import re
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from scipy.special import logsumexp
from sklearn.metrics import roc_auc_score
from torch.utils.data import TensorDataset

from fedbn_flwr.training.tasks import in_percent
from tests.support.commands import output_of
from tests.support.fast import fast
from tests.support.runs import lines_of, summary_of

TASKS = ("binary", "classification", "regression")
METHODS = ("fedavg", "fedbn", "silobn", "fixbn", "standalone", "ditto")


def __getattr__(name: str) -> Callable[[int, str], TensorDataset]:
    """Return the data function of a draw, ``rows_SEED_TASK``."""
    kind, _, rest = name.partition("_")
    seed, _, task = rest.partition("_")
    if kind != "rows" or task not in TASKS:
        raise AttributeError(name)

    def rows(site: int, part: str) -> TensorDataset:
        draw = np.random.default_rng([int(seed), int(site), part == "test"])
        # A site may have one class in its test, or no test example.
        count = int(draw.integers(0 if site and part == "test" else 5, 30))
        inputs = draw.normal(int(site), 1, (count, 3))
        signal = inputs.sum(1) + draw.normal(size=count)
        values = {
            "binary": np.digitize(signal, [4]),
            "classification": np.digitize(signal, [0, 4]),
            "regression": signal.astype(np.float32),
        }[task]
        return TensorDataset(torch.tensor(inputs).float(), torch.tensor(values))

    rows.input_shape = (3,)
    if task == "classification":
        rows.num_classes = 3
    return rows


def of_predictions(folder: Path, metric: str, whole: bool) -> tuple[float, pd.Series]:
    """Return results from ``predictions.csv``: of the run, and by site.

    A mean leaves out sites with too few examples, unless all have too few.
    """
    table = pd.read_csv(folder / "predictions.csv", dtype={"site": str})
    outputs = table.filter(regex="^output").to_numpy()
    right = (outputs[:, 0] > 0) == table["target"]
    if outputs.shape[1] > 1:
        right = outputs.argmax(1) == table["target"]
    error = (outputs[:, 0] - table["target"]).abs()
    # the log-probabilities of classes, or the score of yes
    scores = outputs - logsumexp(outputs, 1, keepdims=True)
    scores = scores if outputs.shape[1] > 1 else outputs

    def auroc(rows: pd.DataFrame) -> float:
        areas, classes = [], range(scores.shape[1])
        for at, score in enumerate(scores[rows.index].T):
            one = rows["target"] == (at if len(classes) > 1 else 1)
            if one.nunique() == 2:
                areas.append(roc_auc_score(one, score))
        return float(np.mean(areas)) if areas else np.nan

    def value(rows: pd.DataFrame) -> float:
        if metric == "auroc":
            return auroc(rows)
        return float((right if metric == "accuracy" else error)[rows.index].mean())

    by_site = table.groupby("site", sort=False)
    known = pd.Series({site: value(rows) for site, rows in by_site}).dropna()
    if whole:
        return value(table), known

    def enough(rows: pd.DataFrame) -> bool:
        counts = rows["target"].value_counts()
        by_class = metric == "auroc" and len(counts) == 2
        units = counts.min() if by_class else len(rows)
        return len(rows) > 1 and units >= min(5, len(rows))

    used = [site for site, rows in by_site if enough(rows)]
    counted = known[known.index.isin(used)]
    return (known if counted.empty else counted).mean(), known


def shown(value: float, metric: str, sign: str = "") -> str:
    if in_percent(metric):
        return f"{100 * value:{sign}.1f}"
    return f"{value:{sign}.4f}"


def text_of(page: Path) -> str:
    """Return the words of a page, without tags and pictures."""
    text = re.sub(r"<(style|svg|script).*?</\1>", "", page.read_text(), flags=re.S)
    text = html.unescape(re.sub(r"<[^>]+>", " | ", text))
    return re.sub(r"[\s|]*\|[\s|]*", " | ", text)


# four runs each, so the slow cases are 300 runs
@pytest.mark.parametrize("seed", fast(range(75), 42))
def test_a_result_is_one_number_on_all_pages(seed: int, tmp_path) -> None:
    draw, out = np.random.default_rng(seed), tmp_path
    task = str(draw.choice(TASKS))
    base = {
        "dataset": f"{__name__}:rows_{seed}_{task}",
        "num-clients": int(draw.integers(1, 5)),
        "num-server-rounds": int(draw.integers(1, 4)),
        "eval-every": int(draw.integers(1, 3)),
        "local-steps": 1,
        "batch-size": 8,
        "eval-on": str(draw.choice(["personal-own", "personal-own,global", "global"])),
        "validation-share": float(draw.choice([0, 0.3])),
    }
    if task != "classification":
        base["task"] = task
    if task != "regression" and draw.random() < 0.6:
        base["metrics"] = "auroc"
    methods = {}
    for name in draw.choice(METHODS, 2, False).tolist():
        methods[name] = {"strategy": name}
        if name in ("fedbn", "silobn", "standalone", "ditto"):
            methods[name]["eval-on"] = "personal-own"
    study = {"name": "drawn", "base": base, "methods": methods, "seeds": [0, 1]}
    (out / "study.yaml").write_text(yaml.safe_dump(study))
    output_of("sweep", out / "study.yaml", "--out", out / "runs")

    results = {}
    for folder in sorted((out / "runs").glob("*/all/seed-*")):
        summary = summary_of(folder)
        headline = summary["headline"]
        metric = re.sub("^(test|personal-own)-", "", headline)
        whole = headline.startswith("test-")
        main, sites = of_predictions(folder, metric, whole)
        results.setdefault(folder.parts[-3], []).append(main)
        defined = not np.isnan(main)
        # summary.json, and the last line of metrics.jsonl
        line = lines_of(folder)[-1]
        for kept in (summary["final"], line):
            expected = pytest.approx(main, rel=1e-5) if defined else None
            assert kept.get(headline) == expected
        # the rows of sites in summary.json, and the rows of a second test
        values = pd.DataFrame(summary["sites"]).set_index("site")["value"].astype(float)
        close = {"check_names": False, "rtol": 1e-5}
        pd.testing.assert_series_equal(values.dropna(), sites, **close)
        tests = pd.read_csv(folder / "tests.csv")
        tests = tests[(tests["part"] == "test") & (tests["metric"] == metric)]
        tests = tests[tests["site"].notna() & (tests["bn"] != "batch")]
        last = tests.drop_duplicates("site", keep="last").set_index("site")["value"]
        pd.testing.assert_series_equal(last.dropna(), sites, **close)
        again = output_of("evaluate", folder).splitlines()
        cells = {line.split()[0]: line.split() for line in again if line.strip()}
        for name, value in values.items():
            assert (shown(value, metric) if value == value else "-") in cells[name]
        # the page: the answer, and the table of the sites
        output_of("report", folder)
        text = text_of(folder / "report.html")
        mean = re.search(rf"(?:Mean t|T)est {metric}[^:|]*: (\S+?)\.?[ |]", text)
        if defined:
            assert mean[1] == shown(main, metric)
        by_site = text.partition("All metrics by site")[2]
        for name, value in values.items():
            cell = re.search(rf"\| {name} \| (\S+)", by_site)
            assert cell[1] == (shown(value, metric) if value == value else "-")

    # the table of the study, and its page
    table = (out / "runs/table.md").read_text()
    output_of("report", out / "runs")
    page = text_of(out / "runs/report.html")
    means = {name: statistics.fmean(own) for name, own in results.items()}
    for name, mean in means.items():
        if np.isfinite(mean):
            cell = shown(mean, metric)
            row = rf"\| {name} \| [^|]+ \| {re.escape(cell)} ±"
            assert re.search(row, table), table
            assert f"| {name} " in page
            assert cell in page
    if np.isfinite([*means.values()]).all():
        other, best = sorted(means, key=means.get, reverse=metric == "mae")
        # The sentence: the best method, its mean, and the difference from the other.
        gap = means[best] - means[other]
        if gap:
            assert f"{best} has the best {metric}" in page
        assert f", {shown(means[best], metric)}" in page
        gap_text = re.escape(shown(gap, metric, sign="+"))
        assert re.search(rf"difference from \w+ is {gap_text} ", page), page[:900]
