"""Inputs in parts. One input is a tuple, a named tuple or a dict."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

Parts = namedtuple("Parts", "first second")


class InParts(Dataset[Any]):
    """The examples of a data set with inputs in two parts.

    The kind is "dict" with an extra text, "pair", or "named".
    """

    def __init__(self, data: Any, form: str) -> None:
        self.data, self.form = data, form

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, number: int) -> Any:
        x, y = self.data.inputs[number], self.data.targets[number]
        if self.form == "dict":
            return {"first": x[:2], "rest": {"second": x[2:], "name": "a text"}}, y
        return (x[:2], x[2:]) if self.form == "pair" else Parts(x[:2], x[2:]), y


class Joined(nn.Sequential):
    """A network that joins the parts."""

    def forward(self, inputs: Any) -> Tensor:
        parts = (
            [inputs["first"], inputs["rest"]["second"]]
            if isinstance(inputs, dict)
            else [*inputs]
        )
        return super().forward(torch.cat(parts, 1))
