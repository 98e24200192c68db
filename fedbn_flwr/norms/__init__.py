"""Normalisation: the norms of the config key ``norm``, which replace BatchNorm layers.

In reading order:

- ``registry``: ``replace_norm``, and the table of norms with their papers; ``batch``
  leaves the model as it is.
- ``group``, ``group_ws``, ``renorm``, ``wsconv``, ``fixup``, ``none``: one
  norm each (``group`` has layer and instance norm, too).
- ``feature``: the length of the features before the classifier, besides any norm.
- ``swap``: finds the BatchNorm layers by type, and replaces them.
- ``wiring``: which norm layers get the output of a convolution.
- ``convolution``: convolutions with other filters, in the place of plain ones.
- ``own_forward``: whether a subclass of BatchNorm does more than BatchNorm.
- ``replaced_layers``: what was replaced, one row a path.
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
