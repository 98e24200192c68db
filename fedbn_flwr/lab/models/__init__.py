"""The models by name, their seeded build and their initial weights.

To add a model, write a file like ``lenet`` and add an entry to ``models_by_name``.

- ``models_by_name``: every model by name; builds one for the inputs of a data set.
- ``info``: the entry of a model with its construction, inputs and outputs.
- ``mlp``, ``lenet``, ``resnet``: the papers' networks, each in its own file. Others are
  in ``studies/networks.py`` of the checkout.
- ``zoo``: torchvision's classifiers, ``torchvision:NAME``.
- ``own``: a user's model, ``module:function``.
- ``initial``: initial weights from a file or a publisher, loaded by name and shape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedbn_flwr.lab.models.info import ModelInfo
from fedbn_flwr.lab.models.models_by_name import (
    MODELS,
    build_model,
    input_shape,
    model_info,
)
from fedbn_flwr.lab.models.own import code_changed, code_sha256
from fedbn_flwr.lazy import imported_when_used

if TYPE_CHECKING:
    from fedbn_flwr.lab.models.initial import InitReport, load_initial
else:
    __getattr__, __dir__ = imported_when_used(
        __name__, {"InitReport": "initial", "load_initial": "initial"}
    )

__all__ = [
    "MODELS",
    "InitReport",
    "ModelInfo",
    "build_model",
    "code_changed",
    "code_sha256",
    "input_shape",
    "load_initial",
    "model_info",
]
