r"""FedWon: FedAvg of a network without normalisation, its convolutions with standardised weights, gradients clipped.

Zhuang, Lyu 2024, "FedWon: Triumphing Multi-domain Federated Learning Without Normalization", arXiv:2306.11879; AGC of
Brock et al. 2021, arXiv:2102.06171.

## Problem

BN statistics differ between domains, and with small batches they are noise. A network without BN has no statistics to
average; standardised weights and clipped gradients keep its training stable.

## Algorithm

The network is made by `model, report = replace_norm(model, "wsconv")`. Each convolution uses, per output channel with
mean $\mu_W$ and standard deviation $\sigma_W$ of its weights,

$$\hat{W} = \text{gain} \cdot \gamma \, \frac{W - \mu_W}{\sigma_W \sqrt{\text{fan-in}}}, \qquad
\gamma = \sqrt{\frac{2}{1 - 1/\pi}} \text{ for ReLU}$$

After the backward pass, and before weight decay and momentum, each gradient $G$ is clipped against its weights $W$,
unit by unit, the classifier's last layer left out:

$$G \leftarrow \lambda \, \frac{\lVert W \rVert_+}{\lVert G \rVert} G \quad \text{if} \quad
\lVert G \rVert > \lambda \lVert W \rVert_+, \qquad \lVert W \rVert_+ = \max(\lVert W \rVert, 10^{-3})$$

$\lambda$ is `agc`, a setting of every strategy. The server averages as FedAvg.

## What travels

| | per round |
|---|---|
| sent down | the whole state, $\lambda$ |
| sent up | the whole state |
| kept | nothing |
| cost | $F$ floats down, $F$ up per client, as FedAvg; $F$ has no BN entries |

## Differs from the paper

The gain per channel of wsconv is Brock's (`wsconv-gain`).

## Law

`agc=0` is FedAvg, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from fedbn_flwr.batchnorm.parts import Parts
from fedbn_flwr.server.method import Misfit, RunSettings
from fedbn_flwr.server.params import setting
from fedbn_flwr.strategies.fedavg import FedAvg, FedAvgParams

__all__ = ["FedWon", "FedWonParams"]


class FedWonParams(FedAvgParams):
    """Parameters of FedWon."""

    agc: float = setting(0.1, "lambda of adaptive gradient clipping in every step; 0 = off", "local training", ge=0)


class FedWon(FedAvg[FedWonParams]):
    """FedAvg with AGC, for a model without BatchNorm."""

    name = "fedwon"
    summary_line = "no normalisation: norm=wsconv and adaptive gradient clipping"
    source = "Zhuang 2024, arXiv:2306.11879"
    Params = FedWonParams
    not_combined_because = "fedwon is norm=wsconv and agc: set these two with the other strategy"

    @classmethod
    def conflicts(cls, params: FedWonParams, run: RunSettings) -> list[str]:
        """Refuse a model with another norm."""
        problems = super().conflicts(params, run)
        if run.norm != "wsconv":
            problems.append(f"strategy=fedwon trains without normalisation: norm={run.norm} must be wsconv")
        return problems

    @classmethod
    def misfits(cls, params: FedWonParams, parts: Parts, shapes: Mapping[str, tuple[int, ...]]) -> list[Misfit]:
        """Add BatchNorm, and a model without filters of more than one weight: it has nothing to standardise."""
        misfits, who = super().misfits(params, parts, shapes), f"strategy {cls.name!r}"
        if parts.layers:
            need, instead = f"{who} trains without normalisation", "model, report = replace_norm(model, 'wsconv')"
            misfits.append(Misfit(need, parts.named_layers(), f"a model without them: {instead}"))
        if not any(len(shape) > 2 and math.prod(shape[1:]) > 1 for shape in shapes.values()):
            need = f"{who} standardises the weights of convolutions"
            misfits.append(Misfit(need, "none", "FedAvg, or a model with convolutions"))
        return misfits

    def divergence_advice(self, server_round: int) -> list[str]:
        """Name gradient clipping, which takes the place of the normalisation."""
        agc = self.params.agc
        clipping = "" if 0 < agc <= 0.1 else "agc=0.1, or "
        cause = (
            f"Likely cause: without normalisation the training steps are too large; agc={agc:g}. What helped in small "
            f"runs: {clipping}a tenth of the learning-rate."
        )
        return [cause, *super().divergence_advice(server_round)[1:]]
