r"""FedWon: no normalisation, but standardised convolutions and clipped gradients.

Zhuang, Lyu 2024, "FedWon: Triumphing Multi-domain Federated Learning Without
Normalization", arXiv:2306.05879; AGC of Brock et al. 2021, arXiv:2102.06171.

## When

Use when: the network consists of convolutions, and batches are very small.

Not when: the network is pretrained with BatchNorm or has few convolutions, or the rate
cannot be tuned.

## Problem

BN statistics differ between domains, and with small batches they are noise. A network
without BN has no statistics to average. Standardised weights and clipped gradients keep
its training stable.

## Algorithm

Make the network with `model, report = replace_norm(model, "wsconv")`. For each output
channel with mean $\mu_W$ and standard deviation $\sigma_W$ of its weights, a convolution
uses

$$\hat{W} = \gamma \, \frac{W - \mu_W}{\sigma_W \sqrt{\text{fan-in}}}, \qquad
\gamma = \sqrt{\frac{2}{1 - 1/\pi}} \text{ for ReLU}$$

After the backward pass, and before weight decay and momentum, each gradient $G$ is
clipped against its weights $W$, unit by unit, except in the classifier's last layer:

$$G \leftarrow \lambda \, \frac{\lVert W \rVert_+}{\lVert G \rVert} G \quad \text{if} \quad
\lVert G \rVert > \lambda \lVert W \rVert_+, \qquad \lVert W \rVert_+ = \max(\lVert W \rVert, 10^{-3})$$

$\lambda$ is `agc`, a setting of every strategy. The server averages as FedAvg.

## Differs from the paper

None known. The learnable gain per channel of Brock et al. is an option:
`replace_norm(model, "wsconv", gain=True)`.

## Law

`agc=0` is FedAvg, bit for bit.
"""

from __future__ import annotations

import math
from typing import Any

from fedbn_flwr.errors import NormLayerError
from fedbn_flwr.problems import Problem
from fedbn_flwr.server.methods.method import Method
from fedbn_flwr.server.methods.params import Params, setting
from fedbn_flwr.server.strategy import Strategy


class FedWonParams(Params):
    """Parameters of FedWon."""

    agc: float = setting(
        0.1,
        "lambda of adaptive gradient clipping in every step; 0 disables it",
        "local training",
        ge=0,
    )


class FedWonMethod(Method[FedWonParams]):
    """FedAvg with AGC, for a model without BatchNorm."""

    name = "fedwon"
    summary_line = "no normalisation: norm=wsconv and adaptive gradient clipping"
    source = "Zhuang 2024, arXiv:2306.05879"
    alone = "fedwon is norm=wsconv and agc: set these two with the other strategy"
    Params = FedWonParams


class FedWon(Strategy):
    """FedAvg with AGC, for a model without BatchNorm.

    Example::

        >>> from torch import nn
        >>> from fedbn_flwr import replace_norm
        >>> from fedbn_flwr.strategies import FedWon
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        >>> without_norm, report = replace_norm(model, "wsconv")
        >>> strategy = FedWon(agc=0.1)
        >>> isinstance(without_norm[1], nn.BatchNorm2d)
        False
    """

    method = FedWonMethod


# --- what may be wrong ----------------------------------------------------------------
def _has_filters(known: Any) -> bool:
    """Return whether the model has filters of more than one weight to standardise."""
    # A filter of one weight is 0 once it is standardised.
    shapes = known.shapes.values()
    return any(len(shape) > 2 and math.prod(shape[1:]) > 1 for shape in shapes)


def _what_helped(method: Any, known: Any) -> str:
    """Return the remedies, including clipping if it is off or weak."""
    if 0 < method.params.agc <= 0.1:
        return "a tenth of the learning-rate"
    return "agc=0.1, or a tenth of the learning-rate"


FedWonMethod.checks = (
    Problem(
        "fedwon-norm",
        "strategy=fedwon trains without normalisation: norm={known.norm} must be wsconv",
        "norm",
        needs="norm",
        when=lambda method, known: known.norm != "wsconv",
    ),
    Problem(
        "fedwon-has-batchnorm",
        "{method.title} trains without normalisation, but {known.model} has {found}",
        "strategy",
        stage="model",
        error=NormLayerError,
        remedy="a model without them: model, report = replace_norm(model, 'wsconv')",
        needs="parts",
        when=lambda method, known: known.parts.layers and known.parts.named_layers(),
    ),
    Problem(
        "fedwon-no-convolution",
        "{method.title} standardises the weights of convolutions, but {known.model} has"
        " none",
        "strategy",
        stage="model",
        error=NormLayerError,
        remedy="FedAvg, or a model with convolutions",
        needs="shapes",
        when=lambda method, known: not _has_filters(known),
    ),
    Problem(
        "large-steps-without-norm",
        "Likely cause: without normalisation the training steps are too large;"
        " agc={params.agc:g}. In small runs, this helped: {found}.",
        effect="cause",
        stage="diverged",
        when=_what_helped,
    ),
)
