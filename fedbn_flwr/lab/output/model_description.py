"""What a run's model is built from, what it takes and what it gives.

``model.safetensors`` holds it in its metadata, so that the model can be used where the
data of the run are not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from fedbn_flwr.errors import StateError
from fedbn_flwr.lab.config import Config, data_of
from fedbn_flwr.lab.data import Dataset
from fedbn_flwr.lab.export import Normalise
from fedbn_flwr.lab.models import build_model, code_changed, code_sha256
from fedbn_flwr.lab.setup import build_options

__all__ = ["MODEL_DESCRIPTION", "ModelDescription"]

MODEL_DESCRIPTION = "interface"
"""The key of the description, JSON, in the metadata of ``model.safetensors``."""

_BYTES = 255.0


@dataclass(frozen=True)
class ModelDescription:
    """A model and its inputs, which become (x / scale - mean) / std by channel.

    Attributes:
        build: the arguments of ``build_model``.
        task: the name of the learning task.
        num_classes: classes, labels or target columns of the run's data; the model may
            have more outputs.
        shape: of an input: (C, H, W) of images, (C,) of rows.
        mean: of the training data after the division by ``scale``; () if inputs are
            taken as they are.
        std: in the same way.
        scale: 255 for pixels 0..255, 1 for other numbers, among which a NaN becomes the
            mean.
        classes: names of the classes 0, 1, ...; () if they have none.
        code: ``code_sha256`` of the model.
    """

    build: Mapping[str, Any]
    task: str
    num_classes: int
    shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float = _BYTES
    classes: tuple[str, ...] = ()
    code: str = ""

    @classmethod
    def of(cls, config: Config, data: Dataset | None) -> ModelDescription:
        """Return that of a run; ``data`` None = only their description is here."""
        shape, info = data_of(config).shape, data_of(config).info
        if data:
            mean, std, as_bytes = data.mean, data.std, data.test.as_bytes
        else:
            mean, std, as_bytes = info.mean, info.std, not info.input_shape
            # The model takes other channels than the data set has: gray as colours, or
            # colours as gray.
            if mean and shape[0] == 3 != info.channels:
                mean, std = mean * 3, std * 3
            elif mean and shape[0] != info.channels:
                mean, std = (sum(mean) / len(mean),), (sum(std) / len(std),)
        return cls(
            build=build_options(config),
            task=data_of(config).task.name,
            num_classes=info.num_classes,
            shape=shape,
            mean=mean,
            std=std,
            scale=_BYTES if as_bytes else 1.0,
            classes=info.class_names,
            code=code_sha256(config.model),
        )

    @classmethod
    def read(cls, about: Mapping[str, str]) -> ModelDescription:
        """Return that of the metadata of ``model.safetensors`` or of an exported file.

        Raises:
            StateError: the file has none.
        """
        if MODEL_DESCRIPTION not in about:
            raise StateError(
                "the file of the model does not say what model it is: no run of this"
                " version wrote it."
            )
        values: dict[str, Any] = json.loads(about[MODEL_DESCRIPTION])
        for key, value in values.items():
            if isinstance(value, list):
                values[key] = tuple(value)
        return cls(**values)

    @property
    def as_bytes(self) -> bool:
        """Whether inputs are images, pixels 0..255."""
        return self.scale == _BYTES

    def code_changed(self) -> str:
        """Return a sentence if the file of the user's model has changed; else ""."""
        return code_changed(str(self.build["name"]), self.code)

    def to_json(self) -> str:
        """Return the text for the metadata."""
        return json.dumps(asdict(self))

    def model(self) -> nn.Module:
        """Return the model with its initial weights."""
        return build_model(**self.build)

    def normalise(self) -> Normalise:
        """Return the layer that normalises inputs."""
        return Normalise(self.mean, self.std, self.scale, len(self.shape) - 1)
