r"""FedBS: FedAvg weighted by the losses, then FedProx with equal weights.

Idrissi, Berrada, Noubir 2021, "FEDBS: Learning on Non-IID Data in Federated Learning
using Batch Normalization", ICTAI 2021, Algorithm 1.

## When

Use when: some of many clients fall behind, and weights by size do not help them.

Not when: clients must not send their losses.

## Problem

Clients with a larger loss get more weight until the losses agree.

## Algorithm

Phase 1: client $k$ reports its loss $F_k$, and the server averages everything,
including BN, with the weights

$$\frac{F_k}{\sum_j F_j}$$

Phase 2 begins for good when the population standard deviation of the round's $F$ is at
most $\epsilon$ in $r$ consecutive rounds. It is FedProx with $\mu$ and equal weights.
Rounds with fewer than two replies do not count.

$F_k$ is the metric `loss_key` of the reply. By default, $F_k$ is the mean of the
round's batch losses, weighted by the examples. Each loss is measured before the step
and without the proximal term. If clients have validation data (`validation-share`, or
`loss_key="validation-loss"`), $F_k$ is the mean loss of the model that the client
sends, in eval mode on the validation data. $\epsilon$ is `fedbs_eps`, $r$ is
`fedbs_rounds`, $\mu$ is `proximal_mu`.

## Differs from the paper

Algorithm 1 and the text of the paper disagree on $F_k$. The mean over the batches is our
reading of Algorithm 1. The loss on validation data is our reading of the text: the loss
of the trained local model, on examples that it has not seen. The paper does not mention
validation data. $\mu$ = 0.01 is ours. If all $F_k$ are zero, the weights are equal.

## Law

Equal losses give the plain mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import nn

from fedbn_flwr.messages.protocol import VALIDATION_LOSS
from fedbn_flwr.server.methods.method import Ask, Facts, Replies
from fedbn_flwr.server.methods.params import setting
from fedbn_flwr.server.methods.phases import Extra, Phase
from fedbn_flwr.server.strategy import Strategy
from fedbn_flwr.strategies.fedprox import LARGE_MU, FedProxMethod, FedProxParams
from fedbn_flwr.training.client_hook import ClientHook


class FedBSParams(FedProxParams):
    """Parameters of FedBS."""

    proximal_mu: float = setting(0.01, "mu >= 0 of the proximal term", ge=0)
    fedbs_eps: float = setting(
        0.1, "eps: losses agree if their standard deviation is at most this", ge=0
    )
    fedbs_rounds: int = setting(
        5, "r: consecutive rounds in which the losses agree before phase 2", ge=1
    )
    loss_key: str = setting(
        "train-loss", "the metric in the clients' replies that is F_k", group=""
    )


class MeasureValidationLoss(ClientHook):
    """Client code that reports the trained model's loss on validation data.

    ``validation_loss`` is None in a training loop of another project, because such a
    loop reports the metric itself.
    """

    def __init__(self, validation_loss: Callable[[nn.Module], float] | None) -> None:
        self._loss = validation_loss

    def end(self, model: nn.Module) -> dict[str, float]:
        """Return F_k."""
        return {} if self._loss is None else {VALIDATION_LOSS: self._loss(model)}


@dataclass(frozen=True)
class FedBSState:
    """The state of FedBS.

    Attributes:
        switched_after: the last round of phase 1; None during phase 1.
        agreed: the number of consecutive rounds with agreeing losses.
    """

    switched_after: int | None = None
    agreed: int = 0


class FedBSMethod(FedProxMethod[FedBSParams, FedBSState]):
    """FedAvg weighted by losses until they agree (``switched_after``), then FedProx."""

    name = "fedbs"
    summary_line = "weighted by the clients' losses, then FedProx with equal weights"
    source = "Idrissi 2021, ICTAI"
    alone = "fedbs weighs the clients by their losses, and then changes to fedprox"
    Params = FedBSParams
    State = FedBSState
    client_hooks = {
        **FedProxMethod.client_hooks,
        "report-validation": lambda context: MeasureValidationLoss(
            context.validation_loss
        ),
    }

    def phases(self) -> tuple[Phase, ...]:
        """Return the two phases, with the losses as weights in phase 1."""
        # Both phases ask for the loss: in phase 2 it only appears in the metrics.
        key = self.params.loss_key
        why = "the clients' losses are the weights of the average"
        loss = (Extra(key, "scalar", why, required=True),)
        return (
            Phase("loss-weighted", weights=key, extras=loss),
            Phase("proximal", weights="equal", extras=loss, after="fedbs_rounds"),
        )

    def phase_name(self, state: FedBSState, number: int) -> str:
        """Return the phase of a round."""
        first = state.switched_after is None or number <= state.switched_after
        return "loss-weighted" if first else "proximal"

    def on_clients(self, state: FedBSState, facts: Facts) -> list[Ask]:
        """Send mu in phase 2. Request the validation loss if it is ``loss_key``."""
        asks: list[Ask] = []
        if state.switched_after is not None:
            asks += super().on_clients(state, facts)
        if self.params.loss_key == VALIDATION_LOSS:
            # The metric in the reply shows that the client applied the hook.
            asks.append(Ask("report-validation", unnamed=True))
        return asks

    def aggregate(
        self, state: FedBSState, facts: Facts, replies: Replies, model: dict[str, Any]
    ) -> tuple[dict[str, Any], FedBSState]:
        """Count the rounds of phase 1 with agreeing losses."""
        # Do not count a round with one reply, because a single loss agrees with itself.
        if state.switched_after is not None or len(replies) < 2:
            return model, state
        losses = [reply.metrics[self.params.loss_key] for reply in replies]
        # The count starts again after a round with losses that disagree.
        agreed = 0
        if float(np.std(losses)) <= self.params.fedbs_eps:
            agreed = state.agreed + 1
        enough = agreed >= self.params.fedbs_rounds
        return model, FedBSState(facts.number if enough else None, agreed)


class FedBS(Strategy):
    """FedAvg weighted by losses until they agree (``switched_after``), then FedProx.

    ``loss_key`` is the name of the metric F_k in the clients' replies. For
    "validation-loss", a ``TorchClient`` reports the loss on its test set "validation".

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import FedBS
        >>> strategy = FedBS(fedbs_rounds=3)
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
        >>> strategy.reports[1].train.down  # bytes of the model, as in FedAvg
        360
    """

    method = FedBSMethod


# --- what may be wrong ----------------------------------------------------------------
FedBSMethod.checks = (
    replace(
        LARGE_MU,
        when=lambda method, known: (
            method.params.proximal_mu
            and method.phase_name(known.state, known.number) == "proximal"
        ),
    ),
)
