"""The table by site: decisions, Holm over the sites, words for too little, and how it is shown."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from fedbn_flwr.lab.sites.intervals import holm
from fedbn_flwr.lab.sites.measured import Measured, gap
from fedbn_flwr.lab.sites.table import Site, columns, decisions, sentences, site_table, unit_of
from fedbn_flwr.training.tasks import BINARY, REGRESSION, Task

AUROC = BINARY.scored_by("auroc")


def scored(task: Task, effect: float, count: int, seed: int, positive: float = 0.5) -> Measured:
    """A model whose scores tell the label by ``effect``; the labels and patients depend on ``count`` alone."""
    truth = np.random.default_rng(count).random(count) < positive
    scores = effect * truth + np.random.default_rng(seed).normal(size=count)
    outputs = scores if task.name == "binary" else truth + scores
    tensors = torch.from_numpy(outputs)[:, None], torch.from_numpy(truth.astype(float))
    return Measured(task, *tensors, np.arange(count), count)


def test_a_site_gains_loses_stays_or_cannot_be_decided() -> None:
    sites = [
        Site("gains", [scored(AUROC, 3, 200, 0)], [scored(AUROC, 0, 200, 1)]),
        Site("loses", [scored(AUROC, 0, 201, 2)], [scored(AUROC, 3, 201, 3)]),
        Site("stays", [scored(AUROC, 1, 100, 4)], [scored(AUROC, 1, 100, 4)]),
        Site("small", [scored(AUROC, 1, 8, 5)], [scored(AUROC, 1, 8, 6)]),
        Site("unclear", [scored(AUROC, 1.0, 60, 7)], [scored(AUROC, 1.6, 60, 8)]),
        Site("one class", [scored(AUROC, 1, 40, 9, positive=1)], [scored(AUROC, 1, 40, 10, positive=1)]),
        Site("empty", [scored(AUROC, 1, 0, 0)], [scored(AUROC, 1, 0, 0)]),
    ]
    table = site_table(sites, "patients", "alone")
    json.dumps(table, allow_nan=False)  # no NaN without a reason
    rows = {row["site"]: row for row in table["sites"]}
    decided = [row["decision"] for row in rows.values()]
    assert decided[:3] == ["better", "worse", "same predictions"]
    assert decided[3].startswith("undecidable with 8 patients, about 1")
    assert decided[4] == f"undecidable with 60 patients, about {rows['unclear']['needed']:,} needed"
    assert decided[5:] == [
        "undecidable with 40 patients: all of one class",
        "undecidable with 0 patients: no test examples",
    ]
    assert (table["better"], table["worse"], table["undecidable"]) == (1, 1, 4)
    gaps = [gap(site.runs, site.against).p for site in sites]
    assert [row["p"] for row in rows.values()] == gaps
    assert [rows[site]["p-holm"] for site in ("gains", "loses", "stays", "unclear")] == holm(
        [p for p in gaps if p is not None]
    )
    assert rows["gains"]["next"] == "use this model here"
    assert rows["one class"]["next"] == "look at the patients of this site"
    assert (
        table["worst"]
        == min((row for row in table["sites"] if row["value"] is not None), key=lambda r: r["value"])["site"]
    )


def test_a_difference_without_variance_is_not_called_the_same() -> None:
    truth = torch.arange(24) % 2

    def always(task: Task, right: bool) -> Measured:
        outputs = (truth - 0.5).double()[:, None] * (1 if right else -1)
        return Measured(task, outputs, truth.double(), np.arange(24), 24)

    for metric, decision in (("accuracy", "better"), ("auroc", "undecidable with 24 patients: no interval of the")):
        task = BINARY.scored_by(metric)
        table = site_table([Site("a", [always(task, True)], [always(task, False)])], "patients", "other")
        assert table["sites"][0]["decision"].startswith(decision)
        assert table["undecidable"] == (decision != "better")


def test_a_lower_error_is_better() -> None:
    close, far = scored(REGRESSION, 0, 100, 1), scored(REGRESSION, 9, 100, 2)
    table = site_table([Site("a", [close], [far]), Site("b", [far], [close])], "examples", "other")
    assert [row["decision"] for row in table["sites"]] == ["better", "worse"]
    assert table["worst"] == "b"


def test_many_sites_that_differ_by_chance_are_corrected_for_each_other() -> None:
    """A p of 0.03 decides at one site, and not among ten."""
    pair = next(
        pair
        for seed in range(200)
        if 0.02 < (gap(*(pair := [[scored(AUROC, e, 80, s)] for e, s in ((1.4, seed), (0.8, 500))])).p or 1) < 0.04
    )
    alone = site_table([Site("a", *pair)], "patients", "other")
    among = site_table([Site(f"{k}", *pair) for k in range(10)], "patients", "other")
    assert alone["sites"][0]["decision"] in ("better", "worse")
    assert {row["decision"].split(" with")[0] for row in among["sites"]} == {"undecidable"}


def test_what_is_shown() -> None:
    sites = [Site(f"site {k}", [scored(AUROC, 1 + k / 10, 50, k)]) for k in range(25)]
    table = site_table(sites, "patients")
    head, rows = columns(table)
    assert head == ["site", "patients", "examples", "auroc (%)", "95% interval"]
    assert len(rows) == 20
    values = {row["site"]: row["value"] for row in table["sites"]}
    assert [row[0] for row in rows] == sorted(values, key=values.__getitem__)[:20]
    first = next(row for row in table["sites"] if row["site"] == rows[0][0])
    assert rows[0][3:] == [f"{100 * first['value']:.1f}", f"{100 * first['low']:.1f} to {100 * first['high']:.1f}"]
    assert decisions(table) == []
    said = " ".join(sentences(table))
    assert f"Worst site: {rows[0][0]}" in said
    assert "5 more sites are left out here" in said
    assert "other patients of the site, not of other seeds" in said


@pytest.mark.parametrize(
    ("column", "has_units", "unit"),
    [
        ("patient", True, "patients"),
        ("", True, "groups"),
        ("pat_id", True, "groups"),
        ("cells", True, "groups"),
        ("patient", False, "examples"),
    ],
)
def test_what_a_group_is_called(column: str, has_units: bool, unit: str) -> None:
    assert unit_of(column, has_units) == unit
