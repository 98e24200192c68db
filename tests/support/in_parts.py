"""Inputs in parts. One input is a dict with a text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class InParts(Dataset):
    """The examples of a data set with inputs in two parts and an extra text."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, number: int):
        x, y = self.data.inputs[number], self.data.targets[number]
        return {"first": x[:2], "rest": {"second": x[2:], "name": "a text"}}, y


class Joined(nn.Sequential):
    """A network that joins the parts."""

    def forward(self, inputs: Any) -> Tensor:
        return super().forward(
            torch.cat([inputs["first"], inputs["rest"]["second"]], 1)
        )
