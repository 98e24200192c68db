"""``apps/heart.py``: tables read by pandas, in the user's function."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch

from apps.heart import SCALE, patients
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.files import read_metrics
from fedbn_flwr.lab.runs.run import run

ROOT = Path(__file__).parents[2]
FILES = ROOT.parent / "shared/data/heart_disease"
SETTINGS = ROOT / "apps/heart.yaml"
# Of the reader of CSV files at commit 6b7d0f17, with the same test patients and the
# same scales: those right after 10 rounds, in Cleveland, Hungary, Switzerland and VA.
BY_THE_READER = {"fedavg": (79, 76, 24, 49), "fedbn": (81, 76, 24, 46)}
TESTS = (100, 97, 41, 66)


def write(path: Path, age: float) -> None:
    table = pd.DataFrame(dict.fromkeys([*SCALE, "target"], ["1"] * 12))
    table["age"], table["chol"] = age, ["?", "", *["200"] * 10]
    table["target"] = [0, 1, 2] * 4
    table.to_csv(path, index=False)


def test_sites_whose_names_are_one_number_stay_four_sites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("001", "01", "1.1", "1.10")
    for age, name in enumerate(names):
        write(tmp_path / f"{name}.csv", 50 + age)
    monkeypatch.setenv("HEART", str(tmp_path))
    for site, name in enumerate(names):
        for part, count in (("train", 8), ("test", 4)):
            data = patients(site, part)
            age = torch.tensor((50 + site - 53.5) / 9.4)
            assert len(data) == count
            assert torch.allclose(data.tensors[0][:, 0], age)
            own = patients(str(tmp_path / f"{name}.csv"), part).tensors
            assert all(
                torch.equal(a, b) for a, b in zip(data.tensors, own, strict=True)
            )


def test_a_missing_value_is_the_mean_and_no_patient_is_in_both_parts(
    tmp_path: Path,
) -> None:
    write(tmp_path / "a.csv", 60)
    train = patients(str(tmp_path / "a.csv"), "train").tensors
    test = patients(str(tmp_path / "a.csv"), "test").tensors
    chol = torch.cat([train[0], test[0]])[:, [*SCALE].index("chol")]
    assert (chol == 0).sum() == 2
    assert torch.cat([train[1], test[1]]).sum() == 8
    assert patients.input_shape == tuple(train[0].shape[1:])


@pytest.mark.skipif(
    not FILES.is_dir(), reason="the four files of UCI heart disease are absent"
)
@pytest.mark.parametrize("strategy", BY_THE_READER)
def test_the_four_hospitals_have_the_accuracies_of_the_csv_reader(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal where they were measured; other CPUs round differently."""
    monkeypatch.setenv("HEART", str(FILES))
    run(
        Config.load(SETTINGS, [f"strategy={strategy}", "num-server-rounds=10"]),
        tmp_path / "out",
        workers=0,
    )
    *_, last = read_metrics(tmp_path / "out" / "metrics.jsonl")
    found = last["domains"]["personal-own-accuracy"].values()
    right = [accuracy * count for accuracy, count in zip(found, TESTS, strict=True)]
    assert right == pytest.approx(BY_THE_READER[strategy], abs=2)
