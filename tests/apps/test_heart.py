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
    for age, name in enumerate(("001", "01", "1.1", "1.10")):
        write(tmp_path / f"{name}.csv", 50 + age)
    monkeypatch.setenv("HEART", str(tmp_path))
    for site in range(4):
        train, test = (patients(site, part).tensors for part in ("train", "test"))
        assert (len(train[0]), len(test[0])) == (8, 4)
        inputs, targets = (torch.cat(both) for both in zip(train, test, strict=True))
        assert torch.allclose(inputs[:, 0], torch.tensor((50 + site - 53.5) / 9.4))
        # A missing value is the mean, and no patient is in both parts.
        assert (inputs[:, [*SCALE].index("chol")] == 0).sum() == 2
        assert targets.sum() == 8
    assert patients.input_shape == tuple(inputs.shape[1:])
