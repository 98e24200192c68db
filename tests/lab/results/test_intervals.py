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
from sklearn.metrics import recall_score
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
from fedbn_flwr.lab.report.words import of_mean, of_mismatch, of_ranking
from fedbn_flwr.lab.results.files import PREDICTIONS_FILES
from fedbn_flwr.lab.results.intervals import (
    CLASSES,
    Comparison,
    Interval,
    Ranking,
    Results,
    _two_classes,
    best_before_end,
    difference,
    interval,
    mean,
    mismatch,
    of_common_sites,
    over_seeds,
    ranking,
    remarks,
    result_of,
    sites_of_run,
)
from fedbn_flwr.lab.results.predictions import (
    BATCH,
    SiteTest,
    read_predictions,
    save_predictions,
)
from fedbn_flwr.lab.results.run_files import RunFiles
from fedbn_flwr.lab.results.saved_model import Choice, saved_model
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
    quick_config, needs, tmp_path: Path, name: str
) -> None:
    """The tested model is the model of all commands.

    These are the table, ``evaluate``, ``--against``, ``personal_state`` and ``saved_model``.
    A run differs from itself by 0, and from another run on the same split by the
    difference of the tests.
    """
    settings = {"eval-on": "personal-own", "partition": "iid", **FINE_TUNED[name]}
    settings = {**needs(settings["strategy"]), **settings}
    workers = 2 if name == "workers" else 0
    values = []
    for steps in (0, 3):
        out = tmp_path / str(steps)
        config = quick_config(**{**settings, "fine-tune": steps})
        summary = run(config, out, workers=workers)
        tested = clients_of(out, summary["final"]["round"])
        wanted = [tested[str(i)]["own-accuracy"] for i in range(3)]
        values.append(np.array(wanted))
        assert [row["value"] for row in summary["sites"]] == wanted
        losses = [row["metrics"]["loss"] for row in _sites(RunFiles.read(out), None)]
        assert losses == [tested[str(i)]["own-loss"] for i in range(3)]
        rows = sites_of_run(out, out).rows
        assert [row["value"] for row in rows] == wanted
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
    assert apart == pytest.approx(values[0] - values[1], abs=1e-12)
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


def patients(seed: int) -> SiteTest:
    """Return three rows of each of 40 patients.

    The scores predict the label weakly.
    """
    draw = np.random.default_rng(seed)
    truth = np.repeat(np.arange(40) % 2, 3)
    scores = torch.from_numpy(truth - 0.5 + draw.normal(size=120))[:, None]
    units = np.repeat(np.arange(40), 3)
    return SiteTest(BINARY, scores, torch.from_numpy(truth.astype(float)), units)


def test_intervals_are_those_of_student_over_patients(monkeypatch) -> None:
    """The accuracy is the patients' mean, so scipy has its interval.

    The two models are alike, so their difference is less uncertain than each of them.
    """
    monkeypatch.setattr("fedbn_flwr.lab.results.intervals._RESAMPLES", 5000)
    one, other = patients(1), patients(2)
    other = replace(other, outputs=0.7 * one.outputs + 0.3 * other.outputs)
    right = [
        (site.outputs[:, 0] > 0)
        .eq(site.targets > 0)
        .double()
        .reshape(40, 3)
        .mean(1)
        .numpy()
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


def test_a_difference_from_outputs_that_are_not_finite_has_the_reason() -> None:
    one = patients(1)
    pair = [one, replace(one, outputs=one.outputs * math.nan)]
    for found in (difference(*pair), difference(*reversed(pair))):
        assert found.error is None
        assert "not finite" in found.why


def only(metric: str) -> Task:
    """Return a yes-or-no task with one metric, as ``test_site`` makes it."""
    return replace(BINARY.scored_by(metric), metrics=(metric,))


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
    outputs, units = truth.double()[:, None], np.arange(len(truth))
    perfect = SiteTest(only("auroc"), outputs, truth.double(), units)
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
    tasks = [*map(only, ("accuracy", "auroc", "auprc", "f1")), BINARY.scored_by("loss")]
    tasks += [REGRESSION, REGRESSION.scored_by("r2")]
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


@pytest.mark.parametrize("seed", range(4))
def test_two_classes_have_the_figures_of_scikit_learn(seed: int) -> None:
    """A reversed order of the examples is named only if it is beyond chance."""
    draw = np.random.default_rng(seed)
    targets = (draw.random(120) < 0.3).astype(np.float32)
    sign = (1, -1)[seed % 2]
    logits = sign * (targets - 0.5) + draw.normal(size=120)
    outputs = torch.tensor(logits, dtype=torch.float32)
    site = SiteTest(BINARY, outputs, torch.tensor(targets), np.arange(120))
    found = _two_classes(site, 1)[CLASSES]
    called = logits > 0
    assert found["sensitivity"] == pytest.approx(recall_score(targets, called))
    specificity = recall_score(targets, called, pos_label=0)
    assert found["specificity"] == pytest.approx(specificity)
    assert found["called positive"] == pytest.approx(called.mean())
    assert found["base rate"] == pytest.approx(1 - targets.mean())
    assert ("reversed" in found) is (sign < 0)
    assert "reversed" not in _two_classes(site, 10**12)[CLASSES], (
        "of so many, by chance"
    )
    rows = [{"site": "Nord", CLASSES: found}]
    plain = Comparison(rows, Interval(0.5, 0.1), Interval(), Interval(), [], {}, 120)
    assert ("beyond chance, at Nord" in of_mean(plain, "auroc", 0)) is (sign < 0)


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


def drawn(draw: np.random.Generator, accuracy: float) -> list[SiteTest]:
    """Return the tests of a model that is right with this probability, at 3 sites."""
    found = []
    for at in range(3):
        truth = torch.arange(40).remainder(2).double()
        right = torch.from_numpy(draw.random(40) < accuracy)
        outputs = torch.where(right, truth, 1 - truth)[:, None] - 0.5
        task, about = BINARY.scored_by("accuracy"), (f"client {at}", at)
        found.append(SiteTest(task, outputs, truth, np.arange(40), *about))
    return found


def written(
    run: Path,
    tests: list[SiteTest],
    headline: str = "personal-own-accuracy",
    **more: Any,
) -> Path:
    """Write the files of a finished run that comparisons read."""
    run.mkdir(parents=True)
    save_predictions(run, tests)
    plain = [one for one in tests if one.bn != BATCH]
    rows = [{"site": one.site, "client": one.client, "examples": 40} for one in plain]
    final = {headline: float(np.mean([one.value for one in plain]))}
    summary = {"task": "binary", "headline": headline, "final": final, "sites": rows}
    (run / "summary.json").write_text(json.dumps(summary | more))
    return run


def test_a_site_of_one_class_has_too_few_examples_for_a_metric_of_classes() -> None:
    test = drawn(np.random.default_rng(0), 0.8)[0].scored_by("f1")
    assert test.too_few == ""
    for positives in (0, 4):
        few = torch.arange(40).lt(positives).double()
        assert f"rarer class: {positives}" in replace(test, targets=few).too_few
        by_example = replace(test, targets=few).scored_by("accuracy")
        assert by_example.too_few == ""
    # A unit counts once, and a site has the examples of its units.
    units = replace(test, units=np.arange(40) // 10)
    assert units.deciding == 4
    unknown = replace(test, targets=torch.full((40,), math.nan))
    assert "none is known" in interval(unknown).why


def test_a_mean_and_its_difference_are_over_the_same_sites_that_trained(
    tmp_path: Path,
) -> None:
    draw = np.random.default_rng(2)
    tests = {name: drawn(draw, 0.8) for name in "ab"}
    held_out = replace(tests["a"][2], site="far", client=None)
    for name, count in (("a", 3), ("b", 2)):
        written(tmp_path / name, [*tests[name][:count], held_out])
    summary = summary_of(tmp_path / "a")
    summary["sites"][3] = {"site": "far", "held-out": True, "examples": 40}
    (tmp_path / "a/summary.json").write_text(json.dumps(summary))
    found = sites_of_run(tmp_path / "a", tmp_path / "b")
    assert (found.sites, len(found.rows)) == (["client 0", "client 1"], 4)
    assert found.left_out == {"client 2": "no model of the site"}
    assert found.mean.value == pytest.approx(np.mean([x.value for x in tests["a"][:2]]))
    assert found.mean.value - found.other.value == pytest.approx(found.gap.value)


@pytest.mark.parametrize("seed", fast(range(20), *range(3)))
def test_the_table_of_predictions_keeps_every_number(seed: int, tmp_path: Path) -> None:
    """float32 outputs of every form, unknown targets, and names that look like others."""
    draw = np.random.default_rng(seed)
    names = list(draw.permutation(["007", "NA", 'a, "b"', "client 3", "nan"]))
    task = [CLASSIFICATION, BINARY, MULTI_LABEL, REGRESSION, SEGMENTATION][seed % 5]
    tests = []
    for at, name in enumerate(names):
        size = int(draw.integers(1, 9))
        outputs = torch.from_numpy(
            draw.normal(size=(size, 3)) * 10.0 ** draw.integers(-9, 9)
        )
        targets = torch.from_numpy(draw.integers(0, 2, (size, 3))).float()
        if task is BINARY:
            outputs, targets = outputs[:, :1], targets[:, 0]
        elif task is CLASSIFICATION:
            targets = targets[:, 0].long()
        elif task is SEGMENTATION:
            outputs = torch.from_numpy(draw.integers(0, 2**31, (size, 3, 3)))
            targets = torch.empty(0)
        else:
            targets[draw.random((size, 3)) < 0.3] = math.nan
        if task is not SEGMENTATION:
            outputs = outputs.float()
        client = None if at == 4 else at
        units = draw.integers(0, 4, size)
        tests.append(SiteTest(task, outputs, targets, units, str(name), client))
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


def variances_of(ours: Mapping[int, Path], theirs: Mapping[int, Path]) -> np.ndarray:
    """Return the squared error of the difference by seed and site."""
    pairs = [[read_predictions(runs[seed]) for runs in (ours, theirs)] for seed in ours]
    found = [
        [difference(*sites).error for sites in zip(*one, strict=True)] for one in pairs
    ]
    return np.array(found) ** 2


@pytest.mark.parametrize("seed", fast(range(10), 0, 1))
def test_a_ranking_has_the_numbers_of_pandas_and_bonferroni_of_pairs(
    seed: int, tmp_path: Path
) -> None:
    """The best minus alone, by site, keeps its sign; four methods are six pairs."""
    draw = np.random.default_rng(seed)
    methods = {"alone": 0.55, "a": 0.75, "b": 0.85, "c": 0.65}
    runs = study_of(tmp_path, draw, methods, 3)
    found = ranking(results_of(runs), "alone")
    values = {name: values_of(own) for name, own in runs.items()}
    means = {name: one.mean() for name, one in values.items()}
    best = max(means, key=means.__getitem__)
    assert (found.best, found.seeds, found.examples) == (best, [0, 1, 2], 120)
    assert {name: one.value for name, one in found.means.items()} == pytest.approx(
        means
    )
    assert found.pairs == 6
    assert "alone" in found.gaps
    for name, gap in found.gaps.items():
        gaps = (values[best] - values[name]).mean(1)
        assert gap.value == pytest.approx(gaps.mean())
        within = variances_of(runs[best], runs[name]).sum(1).mean() / 3**2
        # the errors of seeds and of test examples
        assert gap.error == pytest.approx(np.hypot(stats.sem(gaps), within**0.5))
        low, high = gap.ends(found.pairs)
        level = stats.t.ppf(1 - 0.025 / 6, gap.freedom) * gap.error
        assert (low, high) == pytest.approx((gap.value - level, gap.value + level))
    by_site = (values[best] - values["alone"]).mean(0)
    assert [one.value for one in found.sites.values()] == pytest.approx([*by_site])
    sentences = " ".join(of_ranking(found))
    assert f"{best} has the best accuracy" in sentences
    assert "seeds: 3, 120 test examples each" in sentences


def test_a_diverged_run_is_in_no_mean_of_a_study_and_is_named(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    runs = study_of(tmp_path, draw, {"a": 0.9, "b": 0.6}, 3)
    summary = json.loads((runs["a"][1] / "summary.json").read_text())
    summary |= {"diverged-at": 2, "final": {summary["headline"]: 0.0}}
    (runs["a"][1] / "summary.json").write_text(json.dumps(summary))
    found = ranking(results_of(runs))
    left = values_of({seed: run for seed, run in runs["a"].items() if seed != 1})
    assert found.means["a"].value == pytest.approx(left.mean())
    said = {name: remarks(own) for name, own in results_of(runs).items()}
    assert said == {"a": "diverged and left out (seed 1)", "b": ""}
    assert found.seeds == [0, 2]
    for one in runs["a"].values():
        summary = json.loads((one / "summary.json").read_text())
        (one / "summary.json").write_text(json.dumps(summary | {"diverged-at": 1}))
    assert ranking(results_of(runs)).best == "b"


def test_methods_are_compared_on_the_seeds_that_all_of_them_have(
    tmp_path: Path,
) -> None:
    """Over all its seeds "more" would be best; over the common seeds it is not.

    A method with another test is named.
    """
    draw = np.random.default_rng(5)
    methods = {"alone": 0.5, "more": 0.7, "b": 0.8}
    runs = study_of(tmp_path, draw, methods, 3)
    for seed in range(3, 6):
        folder = tmp_path / "more" / str(seed)
        runs["more"][seed] = written(folder, drawn(draw, 1.0))
    found = ranking(results_of(runs), "alone")
    assert values_of(runs["more"]).mean() > values_of(runs["b"]).mean()
    assert (found.best, found.seeds) == ("b", [0, 1, 2])
    for name, gap in found.gaps.items():
        means = found.means["b"].value - found.means[name].value
        assert gap.value == pytest.approx(means)
    assert not found.at_sites
    for out in runs["b"].values():
        summary = (out / "summary.json").read_text().replace("personal-own", "test")
        (out / "summary.json").write_text(summary)
    found = ranking(results_of(runs), "alone")
    assert {*found.at_sites} == {"alone", "more"}
    assert "Set the same eval-on" in [*of_ranking(found)][-1]
    runs["b"] = {7: runs["b"][0]}
    assert ranking(results_of(runs), "alone") is None


def test_methods_are_compared_on_the_sites_that_all_of_them_have(
    tmp_path: Path,
) -> None:
    """The method "lost" has no model at its worst site, and would be best.

    The client of "one machine" has the examples of all sites.
    """
    draw, runs = np.random.default_rng(5), dict[str, dict[int, Path]]()
    for name, accuracies in {"a": (0.9, 0.9, 0.2), "lost": (0.8, 0.8)}.items():
        tests = [drawn(draw, one)[at] for at, one in enumerate(accuracies)]
        runs[name] = {
            seed: written(tmp_path / name / str(seed), tests) for seed in (0, 1)
        }
    results = results_of(runs)
    found = ranking(results)
    assert found.best == "a"
    for name, own in runs.items():
        assert found.means[name].value == pytest.approx(values_of(own)[:, :2].mean())
        assert results[name][0].examples == 80
    gap = found.gaps["lost"]
    assert gap.value == pytest.approx(
        found.means["a"].value - found.means["lost"].value
    )
    left = "client 2: left out of the mean, lost has no result there"
    assert [remarks(results[name]) for name in runs] == [left, ""]
    whole = [
        torch.cat([one.outputs for one in drawn(draw, 0.7)]),
        torch.arange(120) % 2,
    ]
    test = replace(tests[0], outputs=whole[0], targets=whole[1], units=np.arange(120))
    folder = written(tmp_path / "one machine", [test])
    with_whole = results_of({**runs, "one machine": {0: folder}})
    assert with_whole["one machine"][0].examples == 120
    for name, own in results.items():
        assert with_whole[name][0].left_out == own[0].left_out
    for at, own in enumerate(runs.values()):
        own[0] = written(tmp_path / str(at), drawn(draw, 0.8)[at : at + 1])
    assert ranking(results_of(runs)).seeds == [1], "no common site"


def test_a_site_with_few_examples_of_a_class_is_in_no_mean_of_a_run_or_a_study(
    tmp_path: Path,
) -> None:
    """The site is named, its difference has no interval, and seeds cannot give one."""
    runs: dict[str, dict[int, Path]] = {}
    draw = np.random.default_rng(6)
    for name, accuracy in {"alone": 0.6, "a": 0.9}.items():
        runs[name] = {}
        for seed in range(3):
            tests = [replace(one, task=only("auroc")) for one in drawn(draw, accuracy)]
            targets = tests[2].targets.clone()
            targets[3:] = 0
            targets[:3] = 1
            tests[2] = replace(tests[2], targets=targets)
            folder = tmp_path / name / str(seed)
            runs[name][seed] = written(folder, tests, "personal-own-auroc")
    found = ranking(results_of(runs), "alone")
    for name, own in runs.items():
        values = []
        for folder in own.values():
            page = sites_of_run(folder)
            assert [*page.left_out] == ["client 2"]
            assert result_of(folder).value == pytest.approx(page.mean.value)
            values.append(page.mean.value)
        assert found.means[name].value == pytest.approx(np.mean(values))
        assert "client 2: left out of the mean, test examples" in remarks(
            results_of(runs)[name]
        )
    assert found.sites["client 2"].error is None
    assert found.sites["client 0"].error is not None
    assert found.short == ["client 2"]
    (step,) = _next_steps(found, "")
    assert "test examples at client 2, then repeat" in step


def test_one_difference_that_is_open_asks_for_more_seeds() -> None:
    gaps = {"b": Interval(0.0, 0.1, 20), "c": Interval(0.9, 0.1, 20)}
    found = Ranking("loss", "a", {}, gaps, 3, {}, [0, 1], 100)
    (step,) = _next_steps(found, "")
    assert step.startswith("Add seeds to study.yaml")


@pytest.mark.parametrize("value", [0.05, 0.07, 0.085, 0.2])
def test_sentences_and_rows_are_corrected_for_all_that_is_compared(
    value: float,
) -> None:
    """Of six pairs of methods and three sites, 0.085 is certain only among three."""
    gap = Interval(value, 0.03, 20)
    sites = dict.fromkeys("xyz", gap)
    about = {"a": Interval(0.8)}, {"b": gap, "c": gap}, 6, sites, [0, 1, 2], 100
    found = Ranking("loss", "a", *about)
    for of, texts in (
        (6, [*of_ranking(found)][1:]),
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
    tests, expected = {"small": small}, dict.fromkeys(("near", "worse"), "")
    expected["unfit"] = "running statistics do not fit (seed 0)"
    why = "left out of the mean, only one test example or patient"
    expected["small"] = f"client 0: {why}"
    accuracies = {"unfit": (0.5, 0.95), "worse": (0.95, 0.5), "near": (0.9, 0.92)}
    for name, (plain, by_batch) in accuracies.items():
        batch = [replace(one, bn=BATCH) for one in drawn(draw, by_batch)]
        tests[name] = drawn(draw, plain) + batch
    runs = {name: written(tmp_path / name, own) for name, own in tests.items()}
    found = {name: remarks({0: result_of(out)}) for name, out in runs.items()}
    assert found == expected
    for name, out in runs.items():
        assert ("do not fit the weights" in of_mismatch(out)) == (name == "unfit")


def test_runs_are_compared_on_the_same_examples_only(tmp_path: Path) -> None:
    """The predictions may differ, but targets, patients and sites are equal."""
    tests = drawn(np.random.default_rng(4), 0.8)
    whole = written(tmp_path / "whole", tests[:1])
    changes: dict[str, dict[str, Any]] = {
        "model": {"outputs": -tests[0].outputs},
        "patients": {"units": tests[0].units // 2},
        "targets": {"targets": 1 - tests[0].targets},
        "sites": {"client": 7},
    }
    for name, change in changes.items():
        other = written(tmp_path / name, [replace(tests[0], **change)])
        if name == "model":
            assert sites_of_run(whole, other).gap.value is not None
        else:
            with pytest.raises(ConfigError, match="does not test the examples of"):
                sites_of_run(whole, other)
    # Of a segmentation, the pixels of each class are equal.
    pixels, none = torch.tensor([[[3, 1], [0, 2]]]), torch.empty(0)
    one, swapped, moved = (
        SiteTest(SEGMENTATION, counts, none, np.arange(1))
        for counts in (pixels, pixels.flip(2), pixels.flip(1))
    )
    assert one.fits(swapped)
    assert not one.fits(moved)


def test_the_error_of_few_examples_is_corrected(monkeypatch) -> None:
    monkeypatch.setattr("fedbn_flwr.lab.results.intervals._RESAMPLES", 2000)
    truth, task = torch.zeros(5).double(), BINARY.scored_by("accuracy")
    outputs = torch.tensor([[1.0], [1.0], [-1.0], [-1.0], [-1.0]]).double()
    found = interval(SiteTest(task, outputs, truth, np.arange(5), "a", 0))
    assert found.error == pytest.approx((0.6 * 0.4 / (5 - 1)) ** 0.5, rel=0.05)


@pytest.mark.parametrize(
    ("task", "first", "why"),
    [
        (REGRESSION, 0.5, ""),  # two numbers are not two classes
        (only("auroc"), math.inf, "the outputs are not finite"),
    ],
)
def test_a_site_of_two_examples_has_an_interval_or_a_reason(
    task: Task, first: float, why: str
) -> None:
    truth, outputs = torch.tensor([0.0, 1.0]), torch.tensor([[first], [0.4]])
    found = interval(SiteTest(task, outputs, truth, np.arange(2), "a", 0))
    assert (found.error is None) == bool(why)
    assert found.why.startswith(why)


@pytest.mark.parametrize("harms", [True, False])
def test_a_loss_that_batch_statistics_lower_is_named(harms: bool) -> None:
    truth = torch.randn(40, generator=torch.Generator().manual_seed(0)).double()
    near, far = 0.9 * truth[:, None], 3 * truth[:, None]
    outputs = (far, near) if harms else (near, far)
    about = truth, np.arange(40), "a", 0
    plain, batch = (SiteTest(REGRESSION, one, *about) for one in outputs)
    found = mismatch([plain, replace(batch, bn=BATCH)])
    assert (found is not None) == harms


def test_unfit_statistics_are_beyond_chance_among_all_sites() -> None:
    """The first site loses 6 of 40 examples by running statistics, the others none."""
    truth = torch.arange(40).remainder(2).double()
    tests = []
    for client, bn in itertools.product(range(20), ("running", BATCH)):
        right = torch.arange(40) < (32 if (client, bn) == (0, BATCH) else 26)
        outputs = torch.where(right, truth, 1 - truth)[:, None] - 0.5
        about = (np.arange(40), f"client {client}", client, bn)
        tests.append(SiteTest(BINARY, outputs, truth, *about))
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
