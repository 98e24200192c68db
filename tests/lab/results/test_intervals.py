"""The table by site of finished runs.

Its figures equal the clients' tests, and its intervals the bootstrap's.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from typer.testing import CliRunner

from fedbn_flwr import personal_state
from fedbn_flwr.client import TorchClient
from fedbn_flwr.client.personal_model import client_file
from fedbn_flwr.errors import ConfigError, StateError
from fedbn_flwr.lab.cli import app
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.partitioned.partitioned_data import partitioned_data
from fedbn_flwr.lab.report.page import (
    _next_steps,
    _sites,
    _sites_of_study,
    write_report,
)
from fedbn_flwr.lab.report.words import of_mismatch, of_ranking
from fedbn_flwr.lab.results.files import PREDICTIONS_FILES
from fedbn_flwr.lab.results.intervals import (
    Interval,
    difference,
    interval,
    mean,
    over_seeds,
    seeds_to_decide,
)
from fedbn_flwr.lab.results.predictions import (
    BATCH,
    SiteTest,
    read_predictions,
    save_predictions,
)
from fedbn_flwr.lab.results.ranking import (
    Ranking,
    Results,
    of_common_sites,
    ranking,
    remarks,
    result_of,
)
from fedbn_flwr.lab.results.run_files import RunFiles
from fedbn_flwr.lab.results.saved_model import Choice, saved_model
from fedbn_flwr.lab.results.sites import best_before_end, mismatch, sites_of_run
from fedbn_flwr.lab.results.tests_table import read_tests
from fedbn_flwr.lab.runs.run import run
from fedbn_flwr.training.evaluation import evaluate
from fedbn_flwr.training.metrics import confusion
from fedbn_flwr.training.tasks import (
    BINARY,
    CLASSIFICATION,
    MULTI_LABEL,
    REGRESSION,
    SEGMENTATION,
    Task,
)
from tests.support.fast import fast
from tests.support.runs import clients_of, model_of, summary_of


@pytest.fixture(autouse=True)
def _few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedbn_flwr.lab.results.intervals._RESAMPLES", 40)


BEST = {"early-stopping": 1, "validation-share": 0.2, "num-server-rounds": 6}
HALF = {"fraction-train": 0.34, "eval-on": "personal-own,averaged-bn"}
FINE_TUNED: Mapping[str, Mapping[str, Any]] = {
    "the best round": {"strategy": "fedbn", **BEST, "learning-rate": 0.3},
    "a part of the clients": {"strategy": "silobn", **HALF},
    "workers": {"strategy": "ditto", "checkpoint-every": 0},
    "what a hook keeps": {"strategy": "hbn", "learning-rate": 1.0},
}


@pytest.mark.parametrize("name", FINE_TUNED)
def test_a_client_has_one_model_fine_tuned_or_not(
    quick_config, tmp_path: Path, name: str
) -> None:
    """The tested model is the model of all commands.

    These are the table, ``evaluate``, ``--against``, ``personal_state`` and ``saved_model``.
    A run differs from itself by 0, and from another run on the same split by the
    difference of the tests.
    """
    settings = {"eval-on": "personal-own", "partition": "iid", **FINE_TUNED[name]}
    workers = 2 if name == "workers" else 0
    values = []
    for steps in (0, 3):
        out = tmp_path / str(steps)
        config = quick_config(**{**settings, "fine-tune": steps})
        summary = run(config, out, workers=workers)
        by_client = clients_of(out, summary["final"]["round"])
        tested = [by_client[name] for name in "012"]
        wanted = [one["own-accuracy"] for one in tested]
        values.append(wanted)
        rows = sites_of_run(out, out).rows
        for found in (summary["sites"], rows):
            assert [row["value"] for row in found] == wanted
        losses = [row["metrics"]["loss"] for row in _sites(RunFiles.read(out), None)]
        assert losses == [one["own-loss"] for one in tested]
        for row in rows:
            # All draws are equal, but a few examples do not make 0 certain.
            ends = (-row["difference-low"], row["difference-high"])
            half = pytest.approx(1 - 0.05 ** (1 / row["examples"]))
            assert (row["difference"], *ends) == (0, half, half)
        for client, value in enumerate(wanted):
            view = partitioned_data(config, 3).test_view(client)
            model = model_of(out, personal_state(out, client))
            exported = saved_model(out, Choice(client)).model
            for one in (model, exported):
                assert evaluate(one, view).metrics["accuracy"] == value
    rows = sites_of_run(tmp_path / "0", out).rows
    apart = [row["difference"] for row in rows]
    assert apart == pytest.approx(np.subtract(*values), abs=1e-12)
    for row in rows:
        assert row["difference-low"] <= row["difference"] <= row["difference-high"]


def test_a_fine_tuned_model_that_is_not_here_is_no_other_model(
    quick_run, tmp_path: Path
) -> None:
    """The global model of FedAvg was not tested, so it cannot be a substitute."""
    settings = {"fine-tune": 3, "eval-on": "personal-own"}
    _, out = quick_run(**settings)
    client_file(out, 1).unlink()
    with pytest.raises(StateError, match="after its 3 steps of fine-tune is not here"):
        personal_state(out, 1)
    run(Config.load(out / "config.yaml", ["resume=true"]), out)
    assert personal_state(out, 1)


def test_recalibrated_models_are_tested_with_the_new_statistics(quick_run) -> None:
    asked = {"eval-on": "recalibrated"}, {"eval-on": "global", "recalibrate": True}
    settings = {"strategy": "fedavg", "model": "mlp", "partition": "classes"}
    sites = [quick_run(**settings, **one)[0]["sites"] for one in asked]
    ours, theirs = ([row["value"] for row in rows] for rows in sites)
    assert ours == theirs


def patients(seed: int, count: int = 40) -> SiteTest:
    """Return three rows of each patient.

    The scores predict the label weakly.
    """
    draw = np.random.default_rng(seed)
    units = np.repeat(np.arange(count), 3)
    truth = units % 2
    scores = torch.from_numpy(truth - 0.5 + draw.normal(size=len(units)))[:, None]
    return SiteTest(BINARY, scores, torch.from_numpy(truth.astype(float)), units)


@pytest.mark.parametrize("count", [11, 40])
def test_intervals_are_those_of_student_over_patients(monkeypatch, count: int) -> None:
    """The accuracy is the patients' mean, so scipy has its interval.

    The two models are alike, so their difference is less uncertain than each of them.
    """
    monkeypatch.setattr("fedbn_flwr.lab.results.intervals._RESAMPLES", 5000)
    one, other = patients(1, count), patients(2, count)
    other = replace(other, outputs=0.7 * one.outputs + 0.3 * other.outputs)
    right = [
        ((site.outputs[:, 0] > 0) == (site.targets > 0))
        .numpy()
        .reshape(count, 3)
        .mean(1)
        for site in (one, other)
    ]
    for found, means in (
        (interval(one), right[0]),
        (difference(one, other), right[0] - right[1]),
    ):
        low, high = stats.ttest_1samp(means, 0).confidence_interval()
        ends = pytest.approx((low, high), abs=0.01 * (high - low))
        assert (found.value, found.ends()) == (pytest.approx(means.mean()), ends)
        assert found.error == pytest.approx(stats.sem(means), rel=0.02)


@pytest.mark.parametrize("metric", ["accuracy", "auroc"])
def test_a_number_from_outputs_that_are_not_finite_has_the_reason(metric: str) -> None:
    one = patients(1).scored_by(metric)
    bad = replace(one, outputs=one.outputs / 0)
    for found in (interval(bad), difference(one, bad), difference(bad, one)):
        assert found.error is None
        assert found.why.startswith("the outputs are not finite")


class Outputs(NamedTuple):
    """Examples whose inputs are the outputs of the model."""

    outputs: torch.Tensor
    targets: torch.Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def batch(self, positions: torch.Tensor, generator: Any = None) -> Any:
        return self.outputs[positions], self.targets[positions]


@pytest.mark.parametrize("task", [CLASSIFICATION, BINARY, MULTI_LABEL, SEGMENTATION])
def test_a_round_and_single_predictions_have_one_accuracy(task: Task) -> None:
    """Batches of a test, the table of predictions and numpy agree to the last bit."""
    task = replace(task.scored_by("accuracy"), plain_test_batch=3)
    draw = torch.Generator().manual_seed(len(task.name))
    shape = {"segmentation": (11, 4, 5, 2), "binary": (11, 1)}.get(task.name, (11, 4))
    outputs = torch.randn(shape, generator=draw)
    if task.in_columns:
        targets = (torch.rand(shape, generator=draw) > 0.5).float()
        targets[2:6] = math.nan
        right = ((outputs > 0).float() == targets)[~targets.isnan()]
    else:
        targets = torch.randint(4, (11, *shape[2:]), generator=draw)
        targets[2:6] = task.ignore
        right = (outputs.argmax(1) == targets)[targets != task.ignore]
    tested = evaluate(torch.nn.Identity(), Outputs(outputs, targets), task=task)
    if task.by_pixel:
        pairs = zip(outputs[:, None], targets[:, None], strict=True)
        outputs = torch.stack([confusion(*pair, task.ignore) for pair in pairs])
    single = SiteTest(task, outputs, targets, np.arange(11)).value
    assert tested.metrics["accuracy"] == single == int(right.sum()) / right.numel()


@pytest.mark.parametrize(("events", "others"), [(5, 10), (6, 40), (8, 8)])
def test_a_model_at_the_end_of_the_interval_is_rarely_perfect(
    events: int, others: int
) -> None:
    """Few events decide how sure an AUROC of 1 is, however many others there are."""
    truth = torch.arange(events + others) < events
    scores, units = truth.double(), np.arange(len(truth))
    perfect = SiteTest(BINARY.scored_by("auroc"), scores[:, None], scores, units)
    found = interval(perfect)
    low, high = found.ends()
    assert (found.value, high) == (1, 1)
    shift = 2**0.5 * stats.norm.ppf(low)  # between normal scores of this AUROC
    draw = np.random.default_rng(0)
    lowest = (shift + draw.normal(size=(20_000, events))).min(1)
    assert (lowest > draw.normal(size=(20_000, others)).max(1)).mean() < 0.05


@pytest.mark.parametrize("seed", fast(range(20), *range(4)))
def test_every_number_has_an_interval_above_0_or_a_reason(seed: int) -> None:
    """This includes sites with one class, with equal predictions and with 1 example."""
    draw = np.random.default_rng(seed)
    size, share = int(draw.integers(0, 16)), draw.choice([0, 0.1, 0.5])
    truth = torch.from_numpy(1.0 * (draw.random(size) < share))
    metrics = ("accuracy", "auroc", "auprc", "f1", "loss")
    tasks = [REGRESSION, REGRESSION.scored_by("r2"), *map(BINARY.scored_by, metrics)]
    units = draw.integers(0, size + 1, size)
    for task in tasks:
        targets = truth if task.name == "binary" else truth[:, None]
        outputs = [torch.from_numpy(draw.normal(size=(size, 1))) for _ in range(2)]
        outputs += outputs[:1]
        one, other, copy = (SiteTest(task, each, targets, units) for each in outputs)
        for found in (interval(one), difference(one, other), difference(one, copy)):
            low, high = found.ends()
            assert (low is None) == bool(found.why)
            if not found.why:
                assert low <= found.value <= high
                assert low < high
        copied = difference(one, copy)
        assert copied.value in (0, None)
        assert copied.side() == 0


@pytest.mark.parametrize("strategy", ["fedbn", "ditto"])
def test_a_site_whose_training_was_always_refused_is_marked_with_the_reason(
    strategy: str, quick_run, monkeypatch
) -> None:
    """Its model has the server's initial entries, and the tables show the reason."""
    fit = TorchClient.fit

    def disk_full(self: TorchClient, *arguments: Any) -> Any:
        if self.partition_id == 1:
            raise RuntimeError("disk full")
        return fit(self, *arguments)

    settings = {"strategy": strategy, "state-dir": "out"}
    _, whole = quick_run(**settings)
    monkeypatch.setattr(TorchClient, "fit", disk_full)
    summary, out = quick_run(**settings)
    for rows in (
        summary["sites"],
        sites_of_run(out).rows,
        sites_of_run(out, whole).rows,
    ):
        assert ["note" in row for row in rows] == [False, True, False]
        assert rows[1]["note"].endswith("disk full")
    if strategy == "fedbn":
        assert sites_of_run(out).left_out == {"client 1": summary["sites"][1]["note"]}
    # Under Ditto, the server has a whole model for this client.
    difference_of_both = sites_of_run(whole, out).rows[1]["difference"]
    assert (difference_of_both is None) == (strategy != "ditto")
    shown = CliRunner().invoke(app, ["evaluate", str(out)])
    assert "no model of its own" in " ".join(shown.output.split())
    assert "no model of its own" in write_report(out).read_text()


# Means.


@pytest.mark.parametrize("seed", fast(range(20), *range(4)))
def test_a_mean_of_seeds_is_students_and_a_mean_of_sites_welchs(seed: int) -> None:
    draw = np.random.default_rng(seed)
    values = draw.normal(size=int(draw.integers(2, 9)))
    low, high = stats.ttest_1samp(values, 0).confidence_interval()
    assert over_seeds([*map(Interval, values)]).ends() == pytest.approx((low, high))
    # Two sites of n and m values: Welch's test has the interval of their sum.
    a, b = draw.normal(size=5), draw.normal(2, 3, size=int(draw.integers(3, 30)))
    found = mean(
        Interval(sign * x.mean(), stats.sem(x), len(x) - 1)
        for sign, x in ((1, a), (-1, b))
    )
    welch = stats.ttest_ind(a, b, equal_var=False).confidence_interval()
    assert [2 * end for end in found.ends()] == pytest.approx([*welch])


def test_a_mean_leaves_out_sites_without_an_interval_and_has_a_reason_without() -> None:
    known, few = Interval(0.5, 0.1, 9), Interval(1.0, why="only one")
    assert mean([known, few, Interval(why="none")]) == known
    assert mean([few, Interval(why="none")]).why == "only one"
    assert mean([]).value is None
    assert over_seeds([Interval(0.5)]).why == "one seed has no interval"
    assert over_seeds([known]) == known, "the interval over test examples"
    assert over_seeds([Interval(0.5), Interval(0.5)]).why == "equal with every seed"
    assert over_seeds([known, known])[:3] == pytest.approx(known[:3])
    assert over_seeds([known, Interval(0.7, 0.1, 9)]).error > 0.1
    assert over_seeds([known, known._replace(freedom=200)]).ends() == known.ends()


def answered(at: int, right: torch.Tensor, **more: Any) -> SiteTest:
    """Return the test of a model at site ``at`` that has these of 40 examples right."""
    truth = torch.arange(40).remainder(2).double()
    outputs = torch.where(right, truth, 1 - truth)[:, None] - 0.5
    return SiteTest(BINARY, outputs, truth, np.arange(40), f"client {at}", at, **more)


def drawn(draw: np.random.Generator, accuracy: float) -> list[SiteTest]:
    """Return the tests of a model that is right with this probability, at 3 sites."""
    return [
        answered(at, torch.from_numpy(draw.random(40) < accuracy)) for at in range(3)
    ]


def written(
    run: Path, tests: list[SiteTest], headline: str = "personal-own-accuracy"
) -> Path:
    """Write the files of a finished run that comparisons read."""
    run.mkdir(parents=True)
    save_predictions(run, tests)
    plain = [one for one in tests if one.bn != BATCH]
    rows = []
    for one in plain:
        trained = {"held-out": True} if one.client is None else {"client": one.client}
        rows.append({"site": one.site, "examples": 40, **trained})
    final = {headline: float(np.mean([one.value for one in plain]))}
    summary = {"task": "binary", "headline": headline, "final": final, "sites": rows}
    (run / "summary.json").write_text(json.dumps(summary))
    return run


def change(run: Path, more: Mapping[str, Any]) -> None:
    """Change entries in the summary of a run."""
    (run / "summary.json").write_text(json.dumps({**summary_of(run), **more}))


def test_a_site_of_one_class_has_too_few_examples_for_a_metric_of_classes() -> None:
    test = drawn(np.random.default_rng(0), 0.8)[0].scored_by("f1")
    assert test.too_few == ""
    for positives in (0, 4):
        few = replace(test, targets=torch.arange(40).lt(positives).double())
        assert f"rarer class: {positives}" in few.too_few
        assert few.scored_by("accuracy").too_few == ""
    # A unit counts once, and a site has the examples of its units.
    units = replace(test, units=np.arange(40) // 10)
    assert units.deciding == 4
    unknown = replace(test, targets=torch.full((40,), math.nan))
    assert "none is known" in interval(unknown).why


def test_a_mean_and_its_difference_are_over_the_same_sites_that_trained(
    tmp_path: Path,
) -> None:
    draw = np.random.default_rng(2)
    one, other = drawn(draw, 0.8), drawn(draw, 0.8)
    held_out = replace(one[2], site="far", client=None)
    run = written(tmp_path / "a", [*one, held_out])
    found = sites_of_run(run, written(tmp_path / "b", [*other[:2], held_out]))
    assert (found.sites, len(found.rows)) == (["client 0", "client 1"], 4)
    assert found.left_out == {"client 2": "no model of the site"}
    assert found.mean.value == pytest.approx(np.mean([x.value for x in one[:2]]))
    assert found.mean.value - found.other.value == pytest.approx(found.gap.value)


@pytest.mark.parametrize("seed", fast(range(20), *range(3)))
def test_the_table_of_predictions_keeps_every_number(seed: int, tmp_path: Path) -> None:
    """float32 outputs of every form, unknown targets, and names that look like others."""
    draw = np.random.default_rng(seed)
    names = list(draw.permutation(["007", "NA", 'a, "b"', "client 3", "nan"]))
    task = [CLASSIFICATION, BINARY, MULTI_LABEL, REGRESSION, SEGMENTATION][seed % 5]
    columns, tests = 1 if task is BINARY else 3, []
    for at, name in enumerate(names):
        size = int(draw.integers(1, 9))
        scale = 10.0 ** draw.integers(-9, 9)
        outputs = torch.from_numpy(draw.normal(0, scale, (size, columns))).float()
        targets = torch.from_numpy(draw.integers(0, 2, (size, columns))).float()
        targets[draw.random((size, columns)) < 0.3] = math.nan
        if task is CLASSIFICATION:
            targets = torch.from_numpy(draw.integers(0, 3, (size, 1)))
        elif task is SEGMENTATION:
            outputs = torch.from_numpy(draw.integers(0, 2**31, (size, 3, 3)))
            targets = torch.empty(0, 3)
        client = None if at == 4 else at
        about = draw.integers(0, 4, size), str(name), client
        tests.append(SiteTest(task, outputs, targets.squeeze(1), *about))
    summary = {"task": task.name, "headline": f"test-{task.score}"}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    for saved in (tests, *zip(tests)):
        save_predictions(tmp_path, saved)
        assert (tmp_path / "predictions.csv").stat().st_mode & 0o777 == 0o600
        for one, read in zip(saved, read_predictions(tmp_path), strict=True):
            assert (one.site, one.client, one.bn) == (read.site, read.client, read.bn)
            assert torch.equal(one.outputs, read.outputs)
            assert one.fits(read)


def test_a_run_that_protects_its_clients_has_no_table(quick_run) -> None:
    """No file has a prediction, a test or a name of a single client."""
    plain = quick_run(strategy="fedavg")[1]
    protected = quick_run(strategy="fedavg", dp="server")[1]
    files = [{path.name for path in run.iterdir()} for run in (plain, protected)]
    assert files[0] - files[1] == {*PREDICTIONS_FILES}
    for out, count in ((plain, 3), (protected, 0)):
        assert read_tests(out)["client"].nunique() == count
        assert len(summary_of(out).get("sites", [])) == count
    with pytest.raises(ConfigError, match="dp is off"):
        sites_of_run(protected)


# Studies.


def study_of(
    folder: Path, draw: np.random.Generator, accuracies: Mapping[str, float], seeds: int
) -> dict[str, dict[int, Path]]:
    """Write the runs of methods that are right with these probabilities."""
    return {
        name: {
            seed: written(folder / name / str(seed), drawn(draw, accuracy))
            for seed in range(seeds)
        }
        for name, accuracy in accuracies.items()
    }


def results_of(runs: Mapping[str, Mapping[int, Path]]) -> Results:
    """Return the results of runs, as the tables of a study use them."""
    return of_common_sites(
        {
            name: {seed: result_of(run) for seed, run in own.items()}
            for name, own in runs.items()
        }
    )


def values_of(runs: Mapping[int, Path]) -> np.ndarray:
    """Return the accuracy by seed and site, from the table of predictions."""
    rows = []
    for out in runs.values():
        table = pd.read_csv(out / "predictions.csv")
        right = (table["output"] > 0) == (table["target"] > 0)
        rows.append(right.groupby(table["site"]).mean())
    return np.array(rows)


def variance_of(one: Path, other: Path) -> float:
    """Return the squared error of the mean difference of two runs at two sites."""
    tests = [read_predictions(run)[:2] for run in (one, other)]
    errors = [difference(*pair).error for pair in zip(*tests, strict=True)]
    return np.square(errors).sum() / 2**2


@pytest.mark.parametrize("seed", fast(range(10), 0, 1))
def test_a_ranking_has_the_numbers_of_pandas_and_bonferroni_of_pairs(
    seed: int, tmp_path: Path
) -> None:
    """Methods are compared on the seeds and the sites that all of them have.

    A run of "a" diverged. The method "lost" has no model at a site, and one seed more.
    The best minus alone, by site, keeps its sign; four methods are six pairs.
    """
    draw = np.random.default_rng(seed)
    runs = study_of(tmp_path, draw, {"alone": 0.55, "a": 0.75, "b": 0.85}, 4)
    change(runs["a"][1], {"diverged-at": 2})
    runs["lost"] = {
        at: written(tmp_path / f"lost/{at}", drawn(draw, 0.65)[:2]) for at in range(5)
    }
    results, seeds = results_of(runs), [0, 2, 3]
    left = "client 2: left out of the mean, lost has no result there"
    assert {name: remarks(own) for name, own in results.items()} == {
        "alone": left,
        "a": f"diverged and left out (seed 1); {left}",
        "b": left,
        "lost": "",
    }
    found = ranking(results, "alone")
    values = {name: values_of(own)[seeds] for name, own in runs.items()}
    means = {name: one[:, :2].mean() for name, one in values.items()}
    best = max(means, key=means.__getitem__)
    assert (found.best, found.seeds, found.examples) == (best, seeds, 80)
    assert {name: one.value for name, one in found.means.items()} == pytest.approx(
        means
    )
    assert found.pairs == 6
    assert "alone" in found.gaps
    for name, gap in found.gaps.items():
        gaps = (values[best][:, :2] - values[name][:, :2]).mean(1)
        assert gap.value == pytest.approx(gaps.mean())
        pairs = [(runs[best][at], runs[name][at]) for at in seeds]
        within = np.mean([variance_of(*pair) for pair in pairs])
        # the errors of seeds and of test examples
        assert gap.error == pytest.approx(np.hypot(stats.sem(gaps), within**0.5))
        low, high = gap.ends(found.pairs)
        level = stats.t.ppf(1 - 0.025 / 6, gap.freedom) * gap.error
        assert (low, high) == pytest.approx((gap.value - level, gap.value + level))
    by_site = (values[best] - values["alone"]).mean(0)
    assert [one.value for one in found.sites.values()] == pytest.approx([*by_site])
    assert not found.at_sites
    sentences = " ".join(of_ranking(found))
    assert f"{best} has the best accuracy" in sentences
    assert "seeds: 3, 80 test examples each" in sentences
    for out in runs["a"].values():
        change(out, {"diverged-at": 1})
    assert {*ranking(results_of(runs)).means} == {"alone", "b", "lost"}


def test_methods_with_another_test_are_named_and_a_common_seed_is_needed(
    tmp_path: Path,
) -> None:
    draw = np.random.default_rng(5)
    runs = study_of(tmp_path, draw, {"alone": 0.5, "b": 0.8}, 1)
    of_all = {"headline": "test-accuracy", "final": {"test-accuracy": 0.8}}
    change(runs["b"][0], of_all)
    found = ranking(results_of(runs))
    assert found.at_sites == ["alone"]
    # No method is the best, and the only sentence names the setting.
    assert (found.best, found.gaps, found.sites, found.needed) == ("", {}, {}, {})
    (sentence,) = of_ranking(found)
    assert "Set eval-on=personal-own" in sentence
    runs["b"] = {7: runs["b"][0]}
    assert ranking(results_of(runs)) is None


def test_only_clients_with_the_same_examples_are_common_sites(tmp_path: Path) -> None:
    """The only client of "one machine" has other examples than those of the sites."""
    draw = np.random.default_rng(5)
    runs = study_of(tmp_path, draw, {"a": 0.9, "b": 0.6}, 2)
    tests = drawn(draw, 0.7)
    other = replace(tests[0], targets=1 - tests[0].targets)
    machine = {0: written(tmp_path / "one machine", [other])}
    results = results_of({**runs, "one machine": machine})
    assert [own[0].left_out for own in results.values()] == [{}, {}, {}]
    for at, own in enumerate(runs.values()):
        own[0] = written(tmp_path / str(at), tests[at : at + 1])
    assert ranking(results_of(runs)).seeds == [1], "no common site"


def test_a_site_with_few_examples_of_a_class_is_in_no_mean_of_a_run_or_a_study(
    tmp_path: Path,
) -> None:
    """The site is named, its difference has no interval, and seeds cannot give one."""
    runs: dict[str, dict[int, Path]] = {"alone": {}, "a": {}}
    draw = np.random.default_rng(6)
    few = torch.arange(40).lt(3).double()
    for name, seed in itertools.product(runs, range(3)):
        accuracy = {"alone": 0.6, "a": 0.9}[name]
        tests = [one.scored_by("auroc") for one in drawn(draw, accuracy)]
        tests[2] = replace(tests[2], targets=few)
        folder = tmp_path / name / str(seed)
        runs[name][seed] = written(folder, tests, "personal-own-auroc")
    found = ranking(results_of(runs), "alone")
    for name, own in runs.items():
        pages = [sites_of_run(folder) for folder in own.values()]
        assert [[*page.left_out] for page in pages] == [["client 2"]] * 3
        means = [page.mean.value for page in pages]
        of_runs = [result_of(folder).value for folder in own.values()]
        assert of_runs == pytest.approx(means)
        assert found.means[name].value == pytest.approx(np.mean(means))
    assert [one.error is None for one in found.sites.values()] == [False, False, True]
    assert found.short == ["client 2"]
    (step,) = _next_steps(found, "")
    assert "test examples at client 2, then repeat" in step


@pytest.mark.parametrize("value", [0.05, 0.07, 0.085, 0.2])
def test_sentences_and_rows_are_corrected_for_all_that_is_compared(
    value: float,
) -> None:
    """A difference of 0.085 is beyond chance in three comparisons, but not in six.

    One difference that is open asks for more seeds.
    """
    gap = Interval(value, 0.03, 20)
    gaps, sites = {"b": gap, "c": Interval(9.0, 0.03, 20)}, dict.fromkeys("xyz", gap)
    about = {"a": Interval(0.8)}, gaps, 6, sites, [0, 1, 2], 100
    open_ = {"b": 9} if value < 0.085 else {}
    found = Ranking("loss", "a", *about, needed=open_)
    steps = [*_next_steps(found, "")]
    assert [text[:11] for text in steps] == ["Use 9 seeds"][: len(open_)]
    for of, texts in (
        (6, [*of_ranking(found)][1:2]),
        (3, [" ".join(row) for row in _sites_of_study(found, "")]),
    ):
        half = stats.t.ppf(1 - 0.025 / of, 20) * 0.03
        decided = ": established" if value > half else ": not established"
        if of == 3:
            decided = " worse" if value > half else " not decided"
        ends = f"95 % interval {value - half:+.4f} to {value + half:+.4f}"
        for text in texts:
            assert ends in text
            assert decided in text


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("within", [None, 0.004])
def test_the_named_number_of_seeds_decides_and_one_fewer_does_not(
    seed: int, within: float | None
) -> None:
    """Seeds with the same mean and spread are added to the three that were done."""
    draw = np.random.default_rng(seed)
    values = draw.normal(0.03, 0.02, 3)
    one = Interval(error=within, freedom=50 if within else math.inf)
    done = [one._replace(value=float(value)) for value in values]
    found = seeds_to_decide(done, 3)
    if over_seeds(done).side(3) or not found:
        return
    for count in (found, found - 1):
        more = draw.normal(size=count)
        more = (more - more.mean()) / more.std(ddof=1) * values.std(ddof=1)
        both = [one._replace(value=float(mean)) for mean in more + values.mean()]
        assert bool(over_seeds(both).side(3)) == (count == found)


def test_no_number_of_seeds_decides_without_test_examples_or_a_spread() -> None:
    short = [Interval(value, 0.1, 20) for value in (0.02, 0.03)]
    assert seeds_to_decide(short, 1) == 0
    assert seeds_to_decide(short[:1], 1) == 0
    assert seeds_to_decide([Interval(0.1), Interval(0.3, why="few")], 1) == 0
    assert seeds_to_decide([Interval(0.1), Interval(0.3)], 1) > 2


def test_two_seeds_give_no_interval_outside_of_the_metric(tmp_path: Path) -> None:
    runs = study_of(tmp_path, np.random.default_rng(3), {"a": 0.8, "b": 0.8}, 2)
    found = ranking(results_of(runs))
    for one in (*found.means.values(), *found.gaps.values()):
        low, high = one.ends(found.pairs)
        assert -1 <= low <= one.value <= high <= 1


def test_a_row_names_unfit_statistics_and_too_few_examples(tmp_path: Path) -> None:
    draw = np.random.default_rng(4)
    small = drawn(draw, 0.8)
    one = {"outputs": small[0].outputs[:1], "targets": small[0].targets[:1]}
    small[0] = replace(small[0], **one, units=np.arange(1))
    why = "left out of the mean, only one test example or patient"
    expected = {"small": f"client 0: {why}", "near": "", "worse": ""}
    expected["unfit"] = "running statistics do not fit (seed 0)"
    tests = {"small": small}
    accuracies = {"unfit": (0.5, 0.95), "worse": (0.95, 0.5), "near": (0.9, 0.92)}
    for name, (plain, by_batch) in accuracies.items():
        batch = [replace(one, bn=BATCH) for one in drawn(draw, by_batch)]
        tests[name] = drawn(draw, plain) + batch
    for name, own in tests.items():
        out = written(tmp_path / name, own)
        assert remarks({0: result_of(out)}) == expected[name]
        assert ("do not fit the weights" in of_mismatch(out)) == (name == "unfit")
    two = [result_of(tmp_path / name) for name in ("small", "near")]
    assert remarks(dict(enumerate(two))) == expected["small"]


def test_runs_are_compared_on_the_same_examples_only(tmp_path: Path) -> None:
    """The predictions may differ, but targets, patients and sites are equal."""
    test = drawn(np.random.default_rng(4), 0.8)[0]
    whole = written(tmp_path / "whole", [test])
    model = written(tmp_path / "model", [replace(test, outputs=-test.outputs)])
    assert sites_of_run(whole, model).gap.value is not None
    changes: dict[str, dict[str, Any]] = {
        "patients": {"units": test.units // 2},
        "targets": {"targets": 1 - test.targets},
        "sites": {"client": 7},
    }
    for name, changed in changes.items():
        other = written(tmp_path / name, [replace(test, **changed)])
        with pytest.raises(ConfigError, match="does not test the examples of"):
            sites_of_run(whole, other)
    # Of a segmentation, the pixels of each class are equal.
    pixels, none = torch.tensor([[[3, 1], [0, 2]]]), torch.empty(0)
    one = SiteTest(SEGMENTATION, pixels, none, np.arange(1))
    assert one.fits(replace(one, outputs=pixels.flip(2)))
    assert not one.fits(replace(one, outputs=pixels.flip(1)))


def test_two_numbers_are_not_two_classes() -> None:
    truth, outputs = torch.tensor([0.0, 1.0]), torch.tensor([[0.5], [0.4]])
    found = interval(SiteTest(REGRESSION, outputs, truth, np.arange(2)))
    assert found.error is not None


@pytest.mark.parametrize("harms", [True, False])
def test_a_loss_that_batch_statistics_lower_is_named(harms: bool) -> None:
    truth = torch.randn(40, generator=torch.Generator().manual_seed(0)).double()
    near, far = 0.9 * truth[:, None], 3 * truth[:, None]
    outputs = (far, near) if harms else (near, far)
    plain, batch = (SiteTest(REGRESSION, one, truth, np.arange(40)) for one in outputs)
    found = mismatch([plain, replace(batch, bn=BATCH)])
    assert (found is not None) == harms


def test_unfit_statistics_are_beyond_chance_among_all_sites() -> None:
    """The first site loses 6 of 40 examples by running statistics, the others none."""
    tests = []
    for client, bn in itertools.product(range(20), ("running", BATCH)):
        right = 32 if (client, bn) == (0, BATCH) else 26
        tests.append(answered(client, torch.arange(40) < right, bn=bn))
    assert mismatch(tests[:2]).sites == ["client 0"]
    assert mismatch(tests) is None


@pytest.mark.parametrize("metric", ["accuracy", "loss"])
def test_a_falling_curve_is_named_with_its_best_round_and_noise_is_not(
    metric: str,
) -> None:
    """At most 3 % of 300 curves without a trend fall by the rule."""
    draw, sign = np.random.default_rng(0), 1 if metric == "accuracy" else -1
    rounds, falls = range(5, 65, 5), []
    for _ in range(300):
        flat = dict(zip(rounds, 0.8 + draw.normal(0, 0.02, 12), strict=True))
        falls.append(best_before_end(flat, metric) is not None)
    assert sum(falls) <= 9
    smooth = {number: 0.9 - sign * number / 500 for number in rounds}
    assert best_before_end(smooth, metric) == 5
