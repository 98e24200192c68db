"""FedProx: FedAvg with a proximal term in the local loss.

Li et al. 2020, "Federated Optimization in Heterogeneous Networks", Algorithm 2.

=========  ======================================================
sent down  the whole state, mu
sent up    the whole state
kept       nothing
cost       F floats down, F up per client, as FedAvg
=========  ======================================================

mu -> ``proximal_mu``; w^t -> the trainable parameters as received. Local loss F_k(w) + mu/2 ||w - w^t||^2, over
trainable parameters only (BN statistics have no gradient). Differs from the paper: none known; a client does a fixed
number of steps, so gamma-inexactness is what those steps reach. Law: mu = 0 is FedAvg, bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import TypeVar

from fedbn_flwr.messages.protocol import Key
from fedbn_flwr.server.method import setting
from fedbn_flwr.strategies.fedavg import FedAvg, FedAvgParams
from fedbn_flwr.training.loop import ClientHook

__all__ = ["FedProx", "FedProxParams", "ProximalTerm"]

PROXIMAL_MU = Key("proximal-mu", "float: mu", "server", "client")


class FedProxParams(FedAvgParams):
    """Parameters of FedProx."""

    proximal_mu: float = setting(0.01, "mu >= 0 of the proximal term", ge=0)


P = TypeVar("P", bound=FedProxParams, default=FedProxParams)


class ProximalTerm(ClientHook):
    """Client half: add mu/2 * sum over trainable w of (w - w_received)^2 to the loss."""

    def __init__(self, mu: float) -> None:
        self.mu = mu
        self._received: list[tuple[nn.Parameter, Tensor]] = []

    def begin(self, model: nn.Module) -> None:
        """Store the trainable parameters as received."""
        self._received = [(p, p.detach().clone()) for p in model.parameters() if p.requires_grad]

    def penalty(self, model: nn.Module) -> Tensor | None:
        """Return mu/2 ||w - w_received||^2; None for mu = 0, which keeps FedAvg's bits."""
        if self.mu == 0:
            return None
        return self.mu / 2 * torch.stack([(p - start).square().sum() for p, start in self._received]).sum()


class FedProx(FedAvg[P]):
    """FedAvg whose clients add a proximal term to their loss."""

    name = "fedprox"
    summary_line = "FedAvg with mu/2 ||w - w_global||^2 in the local loss"
    source = "Li 2020, arXiv:1812.06127"
    Params = FedProxParams
    client_hooks = {"proximal": lambda context: ProximalTerm(float(context.config[PROXIMAL_MU]))}
    keys = (PROXIMAL_MU,)

    def hooks_for(self, server_round: int) -> dict[str, dict[str, Any]]:
        """Send mu."""
        return {**super().hooks_for(server_round), "proximal": {PROXIMAL_MU: self.params.proximal_mu}}
