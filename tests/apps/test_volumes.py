"""The guide to volumes runs MONAI's 3-D UNet, Dice and HD95 on NIfTI files."""

from __future__ import annotations

import pickle
import runpy
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import yaml

from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.diagnose_run import diagnose_run
from fedbn_flwr.lab.results.files import read_metrics
from fedbn_flwr.lab.runs.run import run
from fedbn_flwr.training.metrics import confusion
from tests.support.checkout import ROOT

SETTINGS = yaml.safe_load((ROOT / "apps/volumes/volumes.yaml").read_text())
METHODS = {
    "fedbn": {"strategy": "fedbn"},
    "silobn": {"strategy": "silobn"},
    "fedtan": {"strategy": "fedtan"},
    "gn": {"strategy": "fedavg", "norm": "group"},
}


def test_a_site_has_its_own_pairs_of_volumes(tmp_path, monkeypatch) -> None:
    """Arrays in files of numpy stand for NIfTI files. The ball is brighter or darker."""
    stub = mock.MagicMock(
        Nifti1Image=lambda values, affine: values,
        save=lambda values, path: path.write_bytes(pickle.dumps(values)),
        load=lambda path: SimpleNamespace(dataobj=pickle.loads(path.read_bytes())),
    )
    for name in ("nibabel", "monai", "monai.networks", "monai.networks.nets"):
        monkeypatch.setitem(sys.modules, name, stub)
    made, sites = (
        runpy.run_path(str(ROOT / f"apps/volumes/{name}.py"))
        for name in ("make", "sites")
    )
    made["make"](tmp_path)
    monkeypatch.setenv("VOLUMES", str(tmp_path))
    balls = []
    for site, (contrast, *_) in enumerate(made["SCANNERS"]):
        for part, count in made["COUNTS"].items():
            data = sites["volumes"](site, part)
            assert data.groups == [f"{part}{number}" for number in range(count)]
            assert (
                data.images == sites["volumes"](f"{tmp_path}/site-{site}", part).images
            )
            for at in range(count):
                (image,), label = data[at]
                assert image.mean().abs() < 1e-5
                assert image.std().item() == pytest.approx(1, abs=1e-3)
                ball = image[label == 1].mean() - image[label == 0].mean()
                assert ball * contrast > 1
                balls.append(label.numpy().tobytes())
    assert len({*balls}) == len(balls), "a volume is at two sites, or in two parts"


@pytest.mark.slow
def test_the_guide(tmp_path, monkeypatch) -> None:
    """Four methods learn, and our Dice equals MONAI's.

    ``init`` and the doctor accept the runs.
    """
    pytest.importorskip(
        "monai", reason="the guide to volumes needs pip install '.[volumes]'"
    )
    from apps.volumes.make import make
    from apps.volumes.measure import measured, predictions

    monkeypatch.setenv("VOLUMES", str(tmp_path / "volumes"))
    make(tmp_path / "volumes")
    for name, method in METHODS.items():
        rounds = 8 if name == "fedbn" else 4  # the model of site 2 is measured below
        config = Config.make({**SETTINGS, **method, "num-server-rounds": rounds})
        run(config, tmp_path / name, workers=0)
        lines = read_metrics(tmp_path / name / "metrics.jsonl")
        assert lines[-1]["train-loss"] < 0.7 * lines[0]["train-loss"], name
        # a prediction of only background scores below this
        assert lines[-1]["personal-own-miou"] > 0.5, name

    predicted, labels = predictions(tmp_path / "fedbn", 2)
    dice, hd95 = measured(predicted, labels)
    for at, theirs in enumerate(dice[:, 0].tolist()):
        logits = (
            torch.nn.functional.one_hot(predicted[at : at + 1], 2)
            .movedim(-1, 1)
            .float()
        )
        counts = confusion(logits, labels[at : at + 1], ignore=255).double()
        ours = 2 * counts[1, 1] / (counts[1].sum() + counts[:, 1].sum())
        assert ours.item() == pytest.approx(theirs, abs=1e-6)
    assert 0.3 < dice.mean() < 1
    assert hd95.shape == dice.shape

    start = {"num-server-rounds": 1, "init": str(tmp_path / "gn/model.safetensors")}
    again = Config.make({**SETTINGS, **METHODS["gn"], **start})
    run(again, tmp_path / "again", workers=0)
    first = read_metrics(tmp_path / "gn" / "metrics.jsonl")[0]["train-loss"]
    later = read_metrics(tmp_path / "again" / "metrics.jsonl")[0]["train-loss"]
    assert later < first
    assert diagnose_run(tmp_path / "fedbn").to_json()
