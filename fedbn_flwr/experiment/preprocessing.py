"""What the inputs of a run's model are: their mean and standard deviation, and the names of the classes.

``model.safetensors`` holds it in its metadata, since the data may be elsewhere when the model is used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fedbn_flwr.data import Dataset
from fedbn_flwr.experiment.config import Config
from fedbn_flwr.export import Normalise

__all__ = ["INPUTS", "Preprocessing"]

INPUTS = "inputs"
"""The metadata of ``model.safetensors`` with the preprocessing, JSON."""

_BYTES = 255.0


@dataclass(frozen=True)
class Preprocessing:
    """Inputs become (x / scale - mean) / std, per channel or feature.

    Attributes:
        shape: of an input: (C, H, W) of images, (C,) of rows.
        mean: of the training data after the division by ``scale``; () if inputs are taken as they are.
        std: in the same way.
        scale: 255 for pixels 0..255, 1 for other numbers, among which a NaN becomes the mean.
        classes: names of the classes 0, 1, ...; () if they have none.
    """

    shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float = _BYTES
    classes: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: Config, data: Dataset | None) -> Preprocessing:
        """Return that of a run's data; None = the data are not here, and the description of the data set is used."""
        shape, info = config.example_shape(), config.data_info()
        if data is not None:
            return cls(shape, data.mean, data.std, _BYTES if data.test.as_bytes else 1.0, data.class_names)
        mean, std = info.mean, info.std
        if mean and shape[0] != info.channels:
            mean, std = (v * 3 if shape[0] == 3 else (sum(v) / len(v),) for v in (mean, std))
        return cls(shape, mean, std, 1.0 if info.input_shape else _BYTES, info.class_names)

    @classmethod
    def saved(cls, config: Config, about: Mapping[str, str]) -> Preprocessing:
        """Return that of the metadata of ``model.safetensors``; a file of an older version has none."""
        if INPUTS not in about:
            return cls.of(config, None)
        values: dict[str, Any] = json.loads(about[INPUTS])
        values |= {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
        return cls(**values)

    @property
    def as_bytes(self) -> bool:
        """Whether inputs are images, pixels 0..255."""
        return self.scale == _BYTES

    def to_json(self) -> str:
        """Return the text for the metadata."""
        return json.dumps(asdict(self))

    def layer(self) -> Normalise:
        """Return the layer that does it."""
        missing = not self.as_bytes and bool(self.mean)
        return Normalise(self.mean, self.std, self.scale, len(self.shape) - 1, missing=missing)
