r"""Feature normalisation: features of a fixed length, with any norm except fixup.

Zhang, Beitollahi, Bie, Chen 2024, "Understanding the Role of Layer Normalization in
Label-Skewed Federated Learning", TMLR, arXiv:2308.09565 (FN), read in the authors' code
and in notes of a reader; Kim, Lee, Oh, Yun 2023, "FedFN: Feature Normalization for
Alleviating Data Heterogeneity Problem in Federated Learning", arXiv:2311.13267,
abstract.

Under label skew, a client with one class can always lower its loss by longer features;
a fixed length prevents this. With this option, ``norm=none`` is the paper's FN, and
``norm=layer`` its FedLN. Without it, ``norm=layer`` does not bound the features of the
residual networks here, because a ReLU, sum or pooling follows its last layer.

## Algorithm

The vector $x$ of $d$ numbers that enters the last linear layer becomes

$$\sqrt{d} \, \frac{x}{\max(\lVert x \rVert, 10^{-12})}$$

with ``feature-norm=sqrt-d``. With ``1`` the factor is 1 instead of the root. Training
and evaluation are equal. No parameter and no state exist, and nothing additional is
sent. The classifier is the last linear layer of the module that the model calls ``fc``,
``classifier`` or ``head``, or of the model. The option refuses models without a linear
layer, models whose last linear layer has another number of outputs than the model
(register the classifier last), and segmentation.

## Differs from the papers

The scale is $\sqrt{d}$ in the authors' two codes; 1 is another option of one of them.
HybridBN's public code normalises, under the name FedFN, the output of the convolutions
before two linear layers, and removes BN. In the authors' ResNet-18 the first GroupNorm
has the argument ``affine`` instead of ``eps``, so its results with GN, LN and BN are not
results of these norms. The laws apply to networks with ReLU.

## Laws

1. The features have length $\sqrt{d}$, unless they are all zero: they are ``rms_norm``
   of $x$ without eps.
2. Features that are longer by a factor give the same logits.
3. In a ReLU network whose biases are zero from the second layer on, normalising after
   every layer equals normalising only after the last layer (Proposition 1).
4. LN after every layer equals subtracting the mean after every layer, and LN after the
   last layer (Proposition 2).
5. Features that are all zero after a ReLU stay zero, and the ReLU passes on no
   gradient.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedbn_flwr.errors import NormLayerError
from fedbn_flwr.training.model_state import head_of

__all__ = ["FeatureScale", "NormalisedLinear", "use_feature_norm"]

FeatureScale = Literal["sqrt-d", "1"]

# Features are divided by their length, but at least by this number.
_SMALLEST = 1e-12


class NormalisedLinear(nn.Linear):
    """A linear layer on features of a fixed length.

    A Linear layer is converted in place; its entries keep their names.
    """

    feature_scale: FeatureScale = "sqrt-d"

    def forward(self, input: Tensor) -> Tensor:
        """Map features (N, ..., in). Their length is computed in float32 or wider."""
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        length = length.clamp_min(_SMALLEST)
        scale = self.in_features**0.5 if self.feature_scale == "sqrt-d" else 1.0
        return super().forward((wide * (scale / length)).to(input.dtype))


def use_feature_norm(
    model: nn.Module, scale: FeatureScale = "sqrt-d", num_classes: int = 0
) -> None:
    """Normalise the features before the model's linear classifier, in place.

    Args:
        model: changed in place.
        scale: "sqrt-d" for features of length sqrt(d), "1" for length 1.
        num_classes: number of outputs that the classifier must have; 0 means unknown.

    Raises:
        NormLayerError: the model has no linear layer, its classifier is not a plain
            ``nn.Linear``, or the classifier has another number of outputs.
    """
    paths = [at for at, one in model.named_modules() if isinstance(one, nn.Linear)]
    name = type(model).__name__
    named = head_of(paths)
    path = ["", *(at for at in paths if named in ("", at.partition(".")[0]))][-1]
    head: Any = model.get_submodule(path)
    # Accept only a plain Linear. The class of the layer is changed, so a subclass would
    # lose its additional code.
    if type(head) is not nn.Linear:
        raise NormLayerError(
            f"feature-norm: the classifier of {name}, '{path}', is a"
            f" {type(head).__name__}. Only the input of a plain Linear can be"
            " normalised. Use another norm than fixup, a model with a linear"
            " classifier, or do not set feature-norm."
        )
    if num_classes and head.out_features != num_classes:
        raise NormLayerError(
            f"feature-norm: the last linear layer of {name}, '{path}', makes"
            f" {head.out_features} outputs, but the model has {num_classes}. Use a"
            " model with one linear layer that makes all outputs, or do not set"
            " feature-norm."
        )
    head.__class__ = NormalisedLinear
    head.feature_scale = scale  # type: ignore[assignment]
