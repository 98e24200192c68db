"""``apps/heart.py`` reads tables with pandas in the user's function."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch

from apps.heart import SCALE, patients


# These accuracies are from the CSV reader at commit 6b7d0f17, with the same test
# patients and scales. They count the correct answers after 10 rounds in Cleveland,
# Hungary, Switzerland and VA.
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
