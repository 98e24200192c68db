r"""FedBS: FedAvg weighted by the clients' losses, then FedProx with equal weights once the losses agree.

Idrissi, Berrada, Noubir 2021, "FEDBS: Learning on Non-IID Data in Federated Learning using Batch Normalization",
ICTAI 2021, Algorithm 1.

## Problem

With different data some clients fall behind, and weights by size do not help them. Clients with a larger loss get more
weight until the losses agree.

## Algorithm

Phase 1: client $k$ reports its loss $F_k$, and the server averages everything, BN included, with the weights

$$\frac{F_k}{\sum_j F_j}$$

When the population standard deviation of the round's $F$ is at most $\epsilon$ in $r$ consecutive rounds, phase 2
begins for good: FedProx with $\mu$ and equal weights. Rounds with fewer than two replies do not count.

$F_k$ is the reply's metric `loss_key`: by default the mean over all examples of the round of the batch losses before
each step, without the proximal term. Where clients have validation data (`validation-share`, or
`loss_key="validation-loss"`), it is the mean loss of the model that the client sends up, in eval mode, on its
validation data. $\epsilon$ is `fedbs_eps`, $r$ is `fedbs_rounds`, $\mu$ is `proximal_mu`.

## What travels

| | per round |
|---|---|
| sent down | the whole state; in phase 2 also $\mu$ |
| sent up | the whole state, and the loss $F_k$ |
| kept | nothing |
| cost | the floats of the model down, the same up per client, as FedAvg |

## Differs from the paper

Algorithm 1 and the text of the paper disagree on $F_k$. The introduction has the empirical risk over the local data,
Algorithm 1 computes it in the loop over the batches, and section IV says both "during training" and "after training".
The mean over the batches is our reading of Algorithm 1. The loss on validation data is our reading of the text: that of
the trained local model, on examples that it has not seen; the paper does not speak of validation data. $\mu$ = 0.01 is
ours. When all $F_k$ are zero the weights are equal.

## Law

Equal losses give the plain mean.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import nn

from fedbn_flwr.batchnorm.averaging import State
from fedbn_flwr.errors import ReplyError
from fedbn_flwr.messages.protocol import TRAIN_LOSS, VALIDATION_LOSS
from fedbn_flwr.server.method import RunSettings
from fedbn_flwr.server.params import setting
from fedbn_flwr.server.replies import Reply
from fedbn_flwr.strategies.fedprox import FedProx, FedProxParams
from fedbn_flwr.training.client_hook import ClientHook

__all__ = ["FedBS", "FedBSParams", "ReportValidationLoss"]

logger = logging.getLogger("flwr")


class FedBSParams(FedProxParams):
    """Parameters of FedBS."""

    fedbs_eps: float = setting(0.1, "eps: losses agree when their standard deviation is at most this", ge=0)
    fedbs_rounds: int = setting(5, "r: consecutive rounds in which the losses agree before phase 2", ge=1)


class ReportValidationLoss(ClientHook):
    """Client half: report the trained model's loss on the client's validation data.

    ``validation_loss`` is None in a training loop of another project, which reports the metric itself.
    """

    def __init__(self, validation_loss: Callable[[nn.Module], float] | None) -> None:
        self._loss = validation_loss

    def end(self, model: nn.Module) -> dict[str, float]:
        """Return F_k."""
        return {} if self._loss is None else {VALIDATION_LOSS: self._loss(model)}


class FedBS(FedProx[FedBSParams]):
    """Loss-weighted averaging until the losses agree (round ``switched_after``), then FedProx with equal weights.

    Args:
        *args: as ``FedAvg``.
        loss_key: the metric of the clients' replies that is F_k. "validation-loss" asks a ``TorchClient`` for the loss
            on its ``validation_data``.
        **kwargs: as ``FedAvg``.
    """

    name = "fedbs"
    summary_line = "weighted by the clients' losses, then FedProx with equal weights"
    source = "Idrissi 2021, ICTAI"
    role = ""
    not_combined_because = "fedbs weighs the clients by their losses, and changes to fedprox by itself"
    Params = FedBSParams
    client_hooks = {"report-validation": lambda context: ReportValidationLoss(context.validation_loss)}
    implicit_hooks = FedProx.implicit_hooks | {"report-validation"}  # the metric shows it
    needs_each_reply = True  # the weights are the losses
    checkpoint_keys = ("switched_after", "agreed")

    switched_after: int | None = None
    agreed = 0

    @classmethod
    def warnings(cls, params: FedBSParams, run: RunSettings) -> list[str]:
        """Warn of a phase 2 that the run is too short for."""
        lines = super().warnings(params, run)
        if params.fedbs_rounds >= run.num_rounds:
            lines.append(
                f"fedbs: phase 2 begins after fedbs-rounds={params.fedbs_rounds} rounds at the earliest, and the run "
                f"has {run.num_rounds}: it never begins, unless a resumed run goes on. Use a smaller fedbs-rounds."
            )
        return lines

    def __init__(self, *args: Any, loss_key: str = TRAIN_LOSS, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loss_key = loss_key

    def beside_updates(self) -> dict[str, str]:
        """Add the losses."""
        return {**super().beside_updates(), "weights": "the clients' losses are the weights of the average"}

    def begin(self) -> None:
        """Start in phase 1."""
        super().begin()
        self.switched_after, self.agreed = None, 0

    def phase(self, server_round: int) -> str:
        """Return "loss-weighted" or "proximal"."""
        return "loss-weighted" if self.switched_after is None else "proximal"

    def hooks_for(self, server_round: int) -> dict[str, dict[str, Any]]:
        """Send mu in phase 2; ask for the loss on validation data if the weights are these."""
        hooks = super().hooks_for(server_round)
        if self.switched_after is None:
            del hooks["proximal"]
        return {**hooks, "report-validation": {}} if self.loss_key == VALIDATION_LOSS else hooks

    def check(self, server_round: int, reply: Reply, before: State) -> None:
        """Refuse a reply without a usable loss."""
        super().check(server_round, reply, before)
        loss = reply.metrics.get(self.loss_key)
        if loss is None or not math.isfinite(loss) or loss < 0:
            raise ReplyError(
                f"metric '{self.loss_key}' is {loss}; FedBS weighs by it (loss_key) and needs a finite number >= 0"
            )

    def weights(self, replies: Sequence[Reply]) -> list[float]:
        """Return the losses in phase 1; equal weights in phase 2 or if all losses are zero."""
        losses = [reply.metrics[self.loss_key] for reply in replies]
        return losses if self.switched_after is None and any(losses) else [1.0] * len(replies)

    def combine(self, server_round: int, replies: Sequence[Reply], before: State) -> dict[str, Any]:
        """Average; in phase 1 count the rounds in which the losses agreed."""
        state = super().combine(server_round, replies, before)
        if self.switched_after is None and len(replies) >= 2:
            spread = float(np.std([reply.metrics[self.loss_key] for reply in replies]))
            self.agreed = self.agreed + 1 if spread <= self.params.fedbs_eps else 0
            if self.agreed >= self.params.fedbs_rounds:
                self.switched_after = server_round
                logger.info(
                    "FedBS: the losses agreed in %d rounds; FedProx from round %d", self.agreed, server_round + 1
                )
        return state
