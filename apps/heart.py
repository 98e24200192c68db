"""Tables of hospitals, read by pandas: ``dataset=apps.heart:patients``, see
the guide own-data.md.
"""

from __future__ import annotations

import os
from pathlib import Path

import pandas as pd
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedbn_flwr.lab.models.mlp import MLP

# Mean and standard deviation of each column over the 920 patients, rounded. They are
# constants, so that no hospital sends sums of its data.
SCALE = {
    **{
        "age": (53.5, 9.4),
        "sex": (0.79, 0.41),
        "cp": (3.25, 0.93),
        "trestbps": (132, 19),
        "chol": (199, 111),
    },
    **{
        "fbs": (0.17, 0.37),
        "restecg": (0.6, 0.81),
        "thalach": (138, 26),
        "exang": (0.39, 0.49),
    },
    **{
        "oldpeak": (0.88, 1.09),
        "slope": (1.77, 0.62),
        "ca": (0.68, 0.94),
        "thal": (5.1, 1.9),
    },
}


def patients(site: int | str, part: str) -> TensorDataset:
    """Return the "train" or "test" patients of a node's ``data-path``, or of the table
    of a number in ``$HEART``.
    """
    path = (
        Path(site)
        if isinstance(site, str)
        else sorted(Path(os.environ["HEART"]).glob("*.csv"))[site]
    )
    # Read all values as text, because an id such as 01 or 1.10 is not a number.
    table = pd.read_csv(path, dtype=str, na_values="?")
    disease = (table["target"].astype(int) > 0).astype("int64")
    # Use a third of each class as test examples.
    tests = disease.groupby(disease).sample(frac=0.33, random_state=0).index
    rows = table.index.isin(tests) == (part == "test")

    values = table.loc[rows, list(SCALE)].astype("float32")
    mean, std = pd.DataFrame(SCALE).to_numpy("float32")
    # Replace a missing value by the mean, which is 0 after the scaling.
    inputs = ((values - mean) / std).fillna(0.0)
    return TensorDataset(
        torch.tensor(inputs.to_numpy()), torch.tensor(disease[rows].to_numpy())
    )


def hospitals() -> list[str] | None:
    """Return the names of the tables in ``$HEART``, in the order of their numbers."""
    if "HEART" not in os.environ:
        return None
    return [path.stem for path in sorted(Path(os.environ["HEART"]).glob("*.csv"))]


patients.input_shape = (len(SCALE),)  # type: ignore[attr-defined]
patients.site_names = hospitals  # type: ignore[attr-defined]


def net(num_classes: int, features: int) -> nn.Module:
    """Return one hidden layer of 16 with BatchNorm."""
    return MLP(num_classes, features, (16,))
