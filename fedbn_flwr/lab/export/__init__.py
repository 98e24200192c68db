"""Files of models, in formats that need no part of this package.

- ``normalise``: the layer before a model that normalises its inputs.
- ``formats``: torch.export and ONNX, written, loaded and run.

``lab.finished_runs.export`` puts these together for a run.
"""

from __future__ import annotations

from fedbn_flwr.lab.export.formats import (
    encode_onnx,
    encode_torch_export,
    run_onnx,
    run_torch_export,
)
from fedbn_flwr.lab.export.normalise import Normalise, normalised_inside

__all__ = [
    "Normalise",
    "encode_onnx",
    "encode_torch_export",
    "normalised_inside",
    "run_onnx",
    "run_torch_export",
]
