r"""FedWon: FedAvg of a network without normalisation, its convolutions with standardised weights, gradients clipped.

Zhuang, Lyu 2024, "FedWon: Triumphing Multi-domain Federated Learning Without Normalization", arXiv:2306.11879; AGC of
Brock et al. 2021, arXiv:2102.06171.

## Problem

BN statistics differ between domains, and with small batches they are noise. A network without BN has no statistics to
average; standardised weights and clipped gradients keep its training stable.

## Algorithm

The network is `replace_norm(model, "wsconv")`. Each convolution uses, per output channel with mean $\mu_W$ and standard
deviation $\sigma_W$ of its weights,

$$\hat{W} = \text{gain} \cdot \gamma \, \frac{W - \mu_W}{\sigma_W \sqrt{\text{fan-in}}}, \qquad
\gamma = \sqrt{\frac{2}{1 - 1/\pi}} \text{ for ReLU}$$

After the backward pass, and before weight decay and momentum, each gradient $G$ is clipped against its weights $W$,
unit by unit, the classifier's last layer left out:

$$G \leftarrow \lambda \, \frac{\lVert W \rVert_+}{\lVert G \rVert} G \quad \text{if} \quad
\lVert G \rVert > \lambda \lVert W \rVert_+, \qquad \lVert W \rVert_+ = \max(\lVert W \rVert, 10^{-3})$$

$\lambda$ is `agc`. The server averages as FedAvg.

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

from typing import Any

from torch import nn

from fedbn_flwr.errors import NormLayerError
from fedbn_flwr.messages.protocol import Key
from fedbn_flwr.server.method import RunSettings, setting
from fedbn_flwr.strategies.fedavg import FedAvg, FedAvgParams
from fedbn_flwr.training.gradient_clipping import clip_gradients, exclude_head
from fedbn_flwr.training.loop import ClientHook

__all__ = ["ClipGradients", "FedWon", "FedWonParams"]

AGC = Key("agc", "float: lambda", "server", "client")


class FedWonParams(FedAvgParams):
    """Parameters of FedWon."""

    agc: float = setting(0.1, "lambda of adaptive gradient clipping; 0 = off", ge=0)


class ClipGradients(ClientHook):
    """Client half: adaptive gradient clipping in every step."""

    def __init__(self, clipping: float) -> None:
        self._clipping = clipping

    def gradients(self, model: nn.Module) -> None:
        """Clip all gradients except those of the classifier's last layer."""
        clip_gradients(model.parameters(), self._clipping, exclude=exclude_head(model))


class FedWon(FedAvg[FedWonParams]):
    """FedAvg with AGC, for a model without BatchNorm."""

    name = "fedwon"
    summary_line = "no normalisation: norm=wsconv and adaptive gradient clipping"
    source = "Zhuang 2024, arXiv:2306.11879"
    Params = FedWonParams
    client_hooks = {"agc": lambda context: ClipGradients(float(context.config[AGC]))}
    keys = (AGC,)

    @classmethod
    def conflicts(cls, params: FedWonParams, run: RunSettings) -> list[str]:
        """Refuse a model with another norm."""
        found = super().conflicts(params, run)
        if run.norm != "wsconv":
            found.append(f"strategy=fedwon trains without normalisation: norm={run.norm} must be wsconv")
        return found

    def begin(self) -> None:
        """Refuse a model with BatchNorm.

        Raises:
            NormLayerError: the model has BatchNorm; the error names the first layers.
        """
        super().begin()
        if paths := [layer.path for layer in self.run.parts.layers]:
            raise NormLayerError(
                f"strategy 'fedwon' trains without normalisation; the model has {len(paths)} BatchNorm layers "
                f"({', '.join(paths[:2])}, ...). Use replace_norm(model, 'wsconv'), or norm=wsconv."
            )

    def hooks_for(self, server_round: int) -> dict[str, dict[str, Any]]:
        """Send lambda."""
        hooks = super().hooks_for(server_round)
        return {**hooks, "agc": {AGC: self.params.agc}} if self.params.agc else hooks
