r"""HBN: BN mixes batch and global statistics in a share that each client learns.

Chen, Xu, Wu, Kittler 2025, "Hybrid Batch Normalisation: Resolving the Dilemma of Batch
Normalisation in Federated Learning", ICML, PMLR 267:9500-9515, arXiv:2505.21877.
This module follows the abstract, the figure of the layer and the public code (HybridBN,
commit 1c0e151). The full text was not read.

## When

Use when: there is label skew or small batches, clients take part often, and a further
pass over the data is affordable.

Not when: clients take part only once, because each client learns its own alpha.

## Problem

Batch statistics differ between clients, and they differ from the statistics used in
tests. Pure global statistics, as in FBN and FixBN, lose two things that keep BN stable:
the gradient through the statistics, and values that fit the present weights.

## Algorithm

In training, with the batch's mean $\mu_B$ and biased variance $v_B$, the global $\mu_g$
and $v_g$, and $a = \mathrm{sigmoid}(-\alpha)$ per channel:

$$\hat\mu = a \mu_B + (1 - a) \mu_g, \qquad \hat v = a v_B + (1 - a) v_g, \qquad
y = \gamma \frac{x - \hat\mu}{\sqrt{\hat v + \epsilon}} + \beta$$

$\alpha$ starts at 0, so $a = 1/2$. The client's optimizer trains $\alpha$ together with
the parameters, at the largest learning rate of its groups and without weight decay.
$\alpha$ stays with the client. Gradients flow through $\mu_B$, $v_B$ and $\alpha$. Tests
normalise with $\mu_g$ and $v_g$.

Before it trains, a client passes its data through the received weights. This pass
normalises each batch with its own statistics. The client sends the moments of the pass.
The server merges them by their counts to $(m, v)$, as in StaticBN, and moves the global
statistics with $\mu$ = `statistics-momentum`:

$$(\mu_g, v_g) \leftarrow (1 - \mu) (\mu_g, v_g) + \mu \, (m, v)$$

The first `statistics-warm-up` rounds with a result are rounds of FedAvg, and the pooled
statistics replace the global statistics. For a trained model, use no warm-up (0). If
few clients take part in a round, use a longer warm-up or a larger $\mu$.

## Differs from the paper

These parts are ours: the warm-up, the momentum of 0.1, no weight decay on $\alpha$, and
tests with the unchanged global statistics (`recalibrate=true` re-estimates them before
each test). The public code differs from the figure and the abstract:

1. Its $a$ is sigmoid(+$\alpha$). Both forms of $a$ start at 1/2, but saved values of
   $\alpha$ cannot be exchanged.
2. Its pass records the mixed statistics. At their fixed point, the variance between
   clients is too small by the factor $a$.
3. Its pass reads one batch: the first 64 examples in index order, which are the lowest
   classes of a client. A client counts with at most 64 examples.
4. The momentum in training is 0.002. After 501 rounds, the initial constants 0 and 1
   still weigh 37 % or more.
5. Its tests use statistics that are re-estimated from the participants of that round.
6. Only BatchNorm2d is replaced, without its trained values. Gradients are clipped to
   norm 10, and small batches and small clients are left out.

See [a run of both](../results/which-method.md#hbns-public-code-beside-ours).

## Law

With $a$ = 1, the layer is BatchNorm in train mode. With $a$ = 0, a round equals a round
of FBN with `fbn-measure=pass`. If batch and global statistics are equal, $\alpha$ has no
effect and no gradient. The pooled statistics of the first BN layer equal one pass over
the union. A round of one step is a centralized step with frozen BN only for $a$ = 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.batchnorm.parts import entry_name
from fedbn_flwr.batchnorm.reestimation import batch_statistics
from fedbn_flwr.batchnorm.replaced_forward import (
    normalise,
    replace_forward,
    replaceable_layers,
)
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.messages.protocol import Key
from fedbn_flwr.server.methods.method import Ask, Facts, Replies
from fedbn_flwr.server.methods.params import setting
from fedbn_flwr.server.methods.travels import Extra, Travels
from fedbn_flwr.server.strategy import Strategy
from fedbn_flwr.strategies.fbn import (
    WARM_UP,
    Pooled,
    PooledParams,
    PooledStatisticsMethod,
    SurveyedStatistics,
)
from fedbn_flwr.training.client_hook import Entries, Extras


class HBNParams(PooledParams):
    """Parameters of HBN."""

    share_alpha: bool = setting(
        False,
        "clients share alpha; a client without its own alpha starts from the mean",
    )


ALPHA = Key.both("bn-alpha", "ArrayRecord: alpha of each BN layer")
SHARE_ALPHA = Key.down("fedbn-flwr.share-alpha", "bool: the client sends its alpha")


class HybridStatistics(SurveyedStatistics):
    """Client code that mixes batch and global statistics with a learned alpha.

    The client keeps alpha, and sends a copy if ``share`` is True. In a round of the
    warm-up, BN normalises with the batches' statistics, and alpha does not change. A
    client that took part only in the warm-up has no alpha of its own.
    """

    initial = 0.0
    of_all_steps = (
        "alpha is not in the model and has its value after the last step: return the"
        " weights of the last step"
    )

    def __init__(self, warm_up: bool, share: bool) -> None:
        super().__init__(warm_up)
        # After the warm-up, each pass mixes the batch's statistics into the global ones.
        self.in_batchnorm = True
        self._share = share
        self._given: Entries = {}
        self._before: Entries = {}
        self._alpha: dict[nn.Module, nn.Parameter] = {}
        self._optimizer: torch.optim.Optimizer | None = None
        self._finished: list[Callable[[], None]] = []

    def receive(self, sent: Extras, kept: Entries) -> None:
        """Take the kept alpha of each layer, or else the server's alpha."""
        self._given, self._before = {**sent.get(ALPHA, {}), **kept}, kept

    def begin(self, model: nn.Module) -> None:
        """Prepare the layers for the mixture, each with its alpha."""
        # Do this even in the warm-up, when no layer is replaced, so that an unsuitable
        # layer is refused in round 1.
        self._replaceable = replaceable_layers(model)
        super().begin(model)

    def start(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Let the optimizer train alpha until the end, without weight decay.

        Raises:
            ConfigError: the optimizer takes only one group of parameters, or is a
                second optimizer.
        """
        if self._optimizer is not None:
            raise ConfigError(
                "hbn: alpha learns in one optimizer, but this is a second optimizer. Give"
                " all parameters to one optimizer; each group may have its own rate."
            )
        # torch accepts only one group of parameters for LBFGS.
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError(
                "hbn: LBFGS takes one group of parameters, but alpha needs a second"
                " group without weight decay. Use another optimizer, such as SGD or"
                " Adam."
            )
        self._optimizer = optimizer
        if not self._alpha or self._warm_up:
            return
        groups = optimizer.param_groups
        # Use the largest rate: the first group may be frozen by a rate of 0.
        rate = max(group["lr"] for group in groups)
        alphas = list(self._alpha.values())
        # Weight decay would pull alpha to 0, and both shares to one half.
        optimizer.add_param_group({"params": alphas, "lr": rate, "weight_decay": 0.0})
        own = groups[-1]
        handle = optimizer.register_step_post_hook(self._forget_gradients)

        # Remove the group of alpha at the end, because a client may use its optimizer
        # again and the next round adds its own alpha.
        def finish() -> None:
            handle.remove()
            groups[:] = [group for group in groups if group is not own]
            for alpha in own["params"]:
                optimizer.state.pop(alpha, None)

        self._finished.append(finish)

    def end(self, model: nn.Module) -> dict[str, float]:
        """Restore the layers and the optimizer, because a client may use it again."""
        while self._finished:
            self._finished.pop()()
        return super().end(model)

    def takes_one_value(self, layer: nn.Module) -> bool:
        """Return whether the layer can train on one value per channel.

        It can if it mixes global statistics with batch statistics.
        """
        return not self._warm_up and layer in self._alpha

    def reply(self) -> Extras:
        """Return the moments, and alpha if clients share it."""
        sent = dict(super().reply())
        if self._share:
            sent[ALPHA] = self._by_path()
        return sent

    def keep(self) -> Entries:
        """Return alpha by layer path, or the former alpha during the warm-up."""
        return self._before if self._warm_up else self._by_path()

    def _by_path(self) -> Entries:
        entries = {}
        # A shared layer has an entry under each of its paths, as in the model.
        for path, module in self._model.named_modules(remove_duplicate=False):
            if module in self._alpha:
                entries[entry_name(path, "alpha")] = self._alpha[module].detach()
        return entries

    def _change_layers(self) -> None:
        # Do this once a round, because the pass of ``survey`` does not change alpha.
        if not self._alpha:
            for path, layer in self._model.named_modules():
                if layer in self._layers:
                    self._alpha[layer] = self._start_of(layer, path)
        if self._warm_up:
            super()._change_layers()
        else:
            self._undo = [replace_forward(self._replaceable, self._mixed)]

    def _start_of(self, layer: _BatchNorm, path: str) -> nn.Parameter:
        like: Tensor = layer.running_mean  # type: ignore[assignment]
        # Use at least float32, because a step on alpha in half precision would round to
        # nothing.
        dtype = torch.promote_types(like.dtype, torch.float32)
        start = torch.full_like(like, self.initial, dtype=dtype)
        given = self._given.get(entry_name(path, "alpha"))
        if given is not None:
            start = given.to(start).clone()
        return nn.Parameter(start)

    def _forget_gradients(self, *_: Any) -> None:
        """Drop alpha's gradients after a step.

        A user's loop may zero only the gradients of the model, and alpha is not a part
        of the model.
        """
        for alpha in self._alpha.values():
            alpha.grad = None

    def _mixed(self, layer: _BatchNorm, x: Tensor) -> Tensor:
        old_mean: Tensor = layer.running_mean  # type: ignore[assignment]
        old_var: Tensor = layer.running_var  # type: ignore[assignment]
        # An input without rows has no statistics, and their NaN would reach alpha's
        # gradient.
        if not x.numel():
            return normalise(layer, x, old_mean, old_var)
        a = torch.sigmoid(-self._alpha[layer])
        mean, var = batch_statistics(x)
        mixed_mean = a * mean + (1 - a) * old_mean
        mixed_var = a * var + (1 - a) * old_var
        return normalise(layer, x, mixed_mean, mixed_var)


@dataclass(frozen=True)
class HBNState(Pooled):
    """The state of HBN.

    ``alpha`` is the mean of the clients' alpha by entry, if they share it.
    """

    alpha: Mapping[str, Any] = field(default_factory=dict)


class HBNMethod(PooledStatisticsMethod[HBNParams, HBNState]):
    """FedAvg whose BN trains with a learned mixture of batch and global statistics."""

    name = "hbn"
    summary_line = (
        "BN trains with a learned mixture of batch and pooled global statistics"
    )
    source = "Chen 2025, arXiv:2505.21877 (full text not read)"
    Params = HBNParams
    State = HBNState
    client_hooks = {
        "hybrid-statistics": lambda context: HybridStatistics(
            bool(context.config[WARM_UP]), bool(context.config[SHARE_ALPHA])
        )
    }

    def travels(self, num_rounds: int | None = None) -> tuple[Travels, ...]:
        """Return the phase of pooled statistics, with alpha if clients share it."""
        (pooled,) = super().travels(num_rounds)
        if not self.params.share_alpha:
            return (pooled,)
        alpha = Extra(
            ALPHA,
            "channels",
            "share-alpha=true sends each client's alpha with the model",
            down=True,
        )
        return (replace(pooled, extras=(*pooled.extras, alpha)),)

    def on_clients(self, state: HBNState, facts: Facts) -> list[Ask]:
        """Ask the clients to mix, and send the mean of alpha if they share it."""
        warms_up = self.phase(state, facts.number) == "warm-up"
        config = {WARM_UP: warms_up, SHARE_ALPHA: self.params.share_alpha}
        sends = {ALPHA: state.alpha} if self.params.share_alpha else {}
        return [Ask("hybrid-statistics", config, sends, tunes=True)]

    def aggregate(
        self, state: HBNState, facts: Facts, replies: Replies, model: dict[str, Any]
    ) -> tuple[dict[str, Any], HBNState]:
        """Pool the statistics, and average alpha over the clients that have it."""
        model, state = super().aggregate(state, facts, replies, model)
        if not self.params.share_alpha:
            return model, state
        averaged = replies.average_of(ALPHA, replies.weights)
        # Use the model's order. A layer without a client in this round keeps its mean.
        alpha = dict(state.alpha)
        for name in facts.channel_shapes:
            if name in averaged:
                alpha[name] = averaged[name]
        return model, replace(state, alpha=alpha)


class HBN(Strategy):
    """FedAvg whose BN trains with a learned mixture of batch and global statistics.

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import HBN
        >>> strategy = HBN(share_alpha=True)
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
    """

    method = HBNMethod
