"""The norms of the config key ``norm``. They replace BatchNorm layers.

In reading order:

- ``registry``: ``replace_norm``, and the table of norms with their papers; ``batch``
  keeps the model unchanged.
- ``group``, ``group_ws``, ``wsconv``, ``fixup``, ``none``: one norm each (``group``
  also has layer and instance norm).
- ``feature``: the length of the features before the classifier, combined with any norm.
- ``swap``: finds the BatchNorm layers by type, and replaces them.
- ``wiring``: the norm layers that get the output of a convolution.
- ``convolution``: convolutions with derived filters, instead of plain convolutions.
- ``replaced_layers``: the report of a replacement, one row a path.
"""

from __future__ import annotations

from fedbn_flwr.norms.feature import FeatureScale, use_feature_norm
from fedbn_flwr.norms.registry import NORMS, NormInfo, replace_norm
from fedbn_flwr.norms.replaced_layers import NormReport, Replacement
from fedbn_flwr.norms.swap import batchnorm_places

__all__ = [
    "NORMS",
    "FeatureScale",
    "NormInfo",
    "NormReport",
    "Replacement",
    "batchnorm_places",
    "replace_norm",
    "use_feature_norm",
]
