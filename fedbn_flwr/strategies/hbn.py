r"""HBN: BN layers that mix the statistics of the batch with the global statistics.

Chen, Xu, Wu, Kittler 2025, "Hybrid Batch Normalisation: Resolving the Dilemma of Batch
Normalisation in Federated Learning", arXiv:2505.21877.

## When

Use when: batches are small or have few classes, and each client can make one more
forward pass over its data in a round.

Not when: clients must not send statistics of their data, or they train without a
`TorchClient`.

## Problem

The statistics of a batch describe one client. The global statistics describe all
clients, but do not follow the weights during a round.

## Algorithm

In training, a layer has a learnable $\alpha$ for each channel, at first 0. With
$a = \mathrm{sigmoid}(-\alpha)$, the statistics $\mu_B, v_B$ of the batch and the global
statistics $\mu_g, v_g$, it computes

$$\hat\mu = a \mu_B + (1 - a) \mu_g, \qquad \hat v = a v_B + (1 - a) v_g, \qquad
y = \gamma \, \frac{x - \hat\mu}{\sqrt{\hat v + \epsilon}} + \beta$$

Gradients pass through $\mu_B$, $v_B$ and $\alpha$. $\mu_g$ and $v_g$ do not change in
local training, and tests use only them.

In each round, client $i$ does three things:

1. It passes its data once through the received model in train mode, and measures the
   count $n_i$, the mean $m_i$ and the variance $v_i$ of every channel.
2. It trains with the layers above. $\alpha$ has no weight decay, and stays with the
   client.
3. It sends the trained model, with $m_i$ and $v_i$ as running statistics and $n_i$ as
   the counter of the layer.

The server averages all other entries with $p_i$, does not change the counters, and
pools the statistics by count:

$$n = \sum_i n_i, \qquad m = \sum_i \frac{n_i}{n} m_i, \qquad
v = \frac{1}{n - 1} \sum_i n_i \left( v_i + (m_i - m)^2 \right)$$

It takes $\mu_g \leftarrow (1 - \tau) \mu_g + \tau m$ and
$v_g \leftarrow (1 - \tau) v_g + \tau v$.

$\tau$ is `statistics_momentum`. In the first `statistics_warm_up` rounds, BN trains on
the statistics of the batch as in FedAvg, and $\tau$ is 1.

## Differs from the paper

This file follows the figure of the layer and the algorithm of the authors' public code;
we have not read the paper's text. The warm-up, $\tau$ = 0.1 and $\alpha$ without weight
decay are ours. The public code differs from this page: there, $a$ is
$\mathrm{sigmoid}(\alpha)$; the pass reads one batch of at most 64 examples and records
the mixed statistics; $\tau$ is 0.002; tests use statistics that are gathered again;
$\alpha$ is averaged as well.

## Law

With $a = 1$, a layer equals BatchNorm in train mode; with $a = 0$, it equals BatchNorm
in eval mode. The pooled statistics of the first BN layer equal one pass over the union
of the data.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.batchnorm.averaging import fits
from fedbn_flwr.batchnorm.layers import batchnorm_layers, layers_in_training
from fedbn_flwr.batchnorm.parts import Part, entry_name
from fedbn_flwr.batchnorm.reestimation import (
    Moments,
    load_statistics,
    merge,
    reestimate_statistics,
)
from fedbn_flwr.errors import ConfigError, NormLayerError
from fedbn_flwr.messages.protocol import MessageConfig
from fedbn_flwr.server.methods.method import Ask, Facts, Method, Replies
from fedbn_flwr.server.methods.params import Params, setting
from fedbn_flwr.server.methods.phases import TRACKED, Phase
from fedbn_flwr.server.strategy import Strategy
from fedbn_flwr.training.batchnorm_calls import Arguments, forward_with
from fedbn_flwr.training.channels import in_torchs_format, other_axes, per_channel
from fedbn_flwr.training.client_hook import ClientHook, Entries, Extras
from fedbn_flwr.training.layer_calls import replace_attribute
from fedbn_flwr.training.model_state import without_wrappers
from fedbn_flwr.transport.hook_context import HookContext


class HBNParams(Params):
    """Parameters of HBN."""

    statistics_momentum: float = setting(
        0.1, "tau: the share of a round in the global statistics", gt=0, le=1
    )
    statistics_warm_up: int = setting(
        1,
        "number of rounds at the start that train BN as FedAvg does, with tau = 1",
        ge=0,
    )


# --- the clients ----------------------------------------------------------------------
def _trained_layers(
    model: nn.Module, paths: Collection[str] = ()
) -> dict[str, _BatchNorm]:
    """Return the layers of the method that track statistics in training, by path.

    Raises:
        NormLayerError: the forward pass of a layer was replaced.
    """
    chosen = batchnorm_layers(model, paths)
    training = layers_in_training(model)
    layers = {path: layer for path, layer in training.items() if layer in chosen}
    for path, layer in layers.items():
        if "forward" in vars(layer):
            raise NormLayerError(
                f"the forward pass of BatchNorm layer '{path}' was replaced in this"
                " object, and hbn replaces it as well: use a subclass with this forward"
                " pass, or another method."
            )
    return layers


class Survey(ClientHook):
    """Client code that measures the statistics under the received weights.

    At the end of the round, it writes them into the model as running statistics. The
    counter of each layer becomes the number of measured values per channel.
    """

    def __init__(self, context: HookContext) -> None:
        # ``train`` has the data, the batch size and the streams of the client bound.
        second = context.second_model
        if not isinstance(context.train, functools.partial) or second is None:
            raise ConfigError(
                "hbn measures BatchNorm's statistics in a pass over the client's data"
                " before it trains, so it needs a TorchClient"
            )
        self._given, self._paths = context.train.keywords, context.layers
        self._second = second
        fixed = MessageConfig.read(context.config).fixed_entries
        self._fixed = frozenset(map(without_wrappers, fixed))
        self._measured: dict[str, Moments] = {}
        self._received: dict[_BatchNorm, tuple[Tensor, Tensor]] = {}

    def begin(self, model: nn.Module) -> None:
        """Measure the statistics, and store the received statistics."""
        _trained_layers(model, self._paths)
        with self._second() as (measured, task):
            self._measured = reestimate_statistics(
                measured,
                self._given["data"],
                batch_size=self._given["settings"].batch_size,
                seed=self._given["stream"]("statistics").initial_seed(),
                measured=self._paths,
                second=self._second,
                task=task,
            )
        fixed = {
            buffer
            for name, buffer in model.named_buffers(remove_duplicate=False)
            if without_wrappers(name) in self._fixed
        }
        for layer in batchnorm_layers(model, self._paths):
            mean, variance = layer.running_mean, layer.running_var
            if mean is not None and variance is not None and mean not in fixed:
                self._received[layer] = mean.clone(), variance.clone()

    @torch.no_grad()
    def end(self, model: nn.Module) -> dict[str, float]:
        """Write the measured statistics and the counts into the model."""
        # A layer that the pass did not call has the count 0. In a warm-up round, the
        # training may have changed its statistics.
        for layer, (mean, variance) in self._received.items():
            _statistic(layer.running_mean).copy_(mean)
            _statistic(layer.running_var).copy_(variance)
            _statistic(layer.num_batches_tracked).zero_()
        load_statistics(model, self._measured)
        for path, moments in self._measured.items():
            measured = model.get_submodule(path)
            _statistic(measured.num_batches_tracked).fill_(moments.count)
        return {}


def _statistic(buffer: Any) -> Tensor:
    """Return a buffer of a layer that tracks statistics."""
    assert isinstance(buffer, Tensor)
    return buffer


class MixedStatistics(ClientHook):
    """Client code that normalises with a mix of the batch's and global statistics.

    ``paths`` are the paths of the layers; an empty collection means all layers.
    """

    in_batchnorm = True
    of_all_steps = "alpha depends on all steps: return the weights of the last step"

    def __init__(self, paths: Collection[str] = ()) -> None:
        self._paths = paths
        self._kept: Entries = {}
        self._alphas: dict[str, Tensor] = {}
        self._optimizer: torch.optim.Optimizer | None = None
        self._group: dict[str, Any] = {}
        self._undo: list[Callable[[], object]] = []
        # Parameters of the layers, and whether they and alpha have had gradients.
        self._affine: list[nn.Parameter] = []
        self._trained = self._learned = False

    def receive(self, sent: Extras, kept: Entries) -> None:
        """Take alpha of the last round."""
        self._kept = kept

    def begin(self, model: nn.Module) -> None:
        """Replace the forward pass of each layer."""
        for path, layer in _trained_layers(model, self._paths).items():
            like = _statistic(layer.running_mean)
            wide = torch.promote_types(like.dtype, torch.float32)
            alpha = torch.zeros_like(like, dtype=wide)
            name = entry_name(path, "alpha")
            if name in self._kept:
                alpha.copy_(self._kept[name])
            # Use no nn.Parameter, because alpha is not a part of the model.
            self._alphas[name] = alpha.requires_grad_()
            # Use a partial, because a copy of the model then has a pass of its own.
            mixed = functools.partial(mixed_forward, layer, alpha)
            self._undo.append(replace_attribute(layer, "forward", mixed))
            self._affine += layer.parameters()

    def start(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Let the first optimizer step alpha, without weight decay.

        Raises:
            ConfigError: the optimizer takes only one group of parameters.
        """
        if self._optimizer is not None or not self._alphas:
            return
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError(
                "hbn adds a group of parameters for alpha, but"
                f" {type(optimizer).__name__} takes only one group: use another"
                " optimizer."
            )
        self._optimizer = optimizer
        alphas = [*self._alphas.values()]
        rate = optimizer.param_groups[0]["lr"]
        optimizer.add_param_group({"params": alphas, "lr": rate, "weight_decay": 0.0})
        self._group = optimizer.param_groups[-1]
        # A loop may set only the gradients of the model to zero.
        clear = optimizer.register_step_post_hook(self._clear)
        self._undo.append(clear.remove)

    def _clear(self, *_: Any) -> None:
        for alpha in self._alphas.values():
            alpha.grad = None

    def gradients(self, model: nn.Module) -> None:
        """Follow a schedule of the learning rate, and note whether alpha learns."""
        if self._optimizer is not None:
            self._group["lr"] = self._optimizer.param_groups[0]["lr"]
        if not self._learned:
            self._trained |= any(p.grad is not None for p in self._affine)
            alphas = self._alphas.values()
            self._learned = any(alpha.grad is not None for alpha in alphas)

    def end(self, model: nn.Module) -> dict[str, float]:
        """Restore the forward pass and the optimizer.

        Raises:
            ConfigError: the layers had gradients, but alpha had none in any step.
        """
        for undo in self._undo:
            undo()
        if self._optimizer is not None:
            groups = self._optimizer.param_groups
            groups[:] = [group for group in groups if group is not self._group]
        # Gradients by torch.autograd.grad are only of the tensors that the loop names.
        if self._trained and not self._learned:
            raise ConfigError(
                "hbn learns alpha of each BatchNorm layer, but no step had a gradient of"
                " alpha: compute the gradients with loss.backward()."
            )
        return {}

    def keep(self) -> Entries:
        """Return alpha of each layer."""
        return {name: alpha.detach() for name, alpha in self._alphas.items()}


def mixed_forward(layer: _BatchNorm, alpha: Tensor, *args: Any, **given: Any) -> Any:
    """Return the output of a layer of the method."""
    act = functools.partial(_mixed, layer, alpha)
    forward = functools.partial(type(layer).forward, layer)
    return forward_with(act, forward, layer, "", *args, **given)


def _mixed(layer: _BatchNorm, alpha: Tensor, call: Arguments) -> Tensor | None:
    """Return the result of a call that normalises with the batch, or None."""
    # A layer in eval mode normalises with the global statistics. A batch without rows
    # has no statistics.
    global_statistics = layer.running_mean, layer.running_var
    if not call.training:
        return None
    if not call.input.numel():
        return nn.functional.batch_norm(call.input, *global_statistics, *call[3:5])
    wide = torch.promote_types(call.input.dtype, torch.float32)
    x = in_torchs_format(call.input).to(wide)
    axes = other_axes(x)
    batch_mean = x.mean(axes)
    batch_var = (x - per_channel(batch_mean, x)).square().mean(axes)
    a = torch.sigmoid(-alpha)
    mean, var = map(_statistic, global_statistics)
    mean = a * batch_mean + (1 - a) * mean
    var = a * batch_var + (1 - a) * var
    y = (x - per_channel(mean, x)) / per_channel((var + call.eps).sqrt(), x)
    if call.weight is not None:
        y = y * per_channel(call.weight, x)
    if call.bias is not None:
        y = y + per_channel(call.bias, x)
    return y.to(call.input.dtype)


# --- the server -----------------------------------------------------------------------
_STATISTICS = ("running_mean", "running_var")
_COUNTER = "num_batches_tracked"


class HBNMethod(Method[HBNParams]):
    """FedAvg whose BN layers mix the batch's statistics with pooled statistics."""

    name = "hbn"
    summary_line = (
        "BN trains with a learned mix of the batch's and the pooled global statistics"
    )
    source = "Chen 2025, arXiv:2505.21877"
    alone = "hbn measures, pools and mixes the statistics of BatchNorm itself"
    Params = HBNParams
    client_hooks = {
        "survey": Survey,
        "mixed-statistics": lambda context: MixedStatistics(context.layers),
    }

    def phases(self) -> tuple[Phase, ...]:
        """Return the phases, each with the measured statistics of single replies."""
        tracked = frozenset({Part.STATISTICS})
        first = Phase("warm-up", each=TRACKED, needs=(tracked,), measures=True)
        mixed = Phase(
            "mixed",
            each=first.each,
            needs=first.needs,
            measures=True,
            keeps="alpha of each BN layer",
            after="statistics_warm_up",
        )
        return (first, mixed) if self.params.statistics_warm_up else (mixed,)

    def phase_name(self, state: None, number: int) -> str:
        """Return the phase of a round."""
        return "warm-up" if number <= self.params.statistics_warm_up else "mixed"

    def on_clients(self, state: None, facts: Facts) -> list[Ask]:
        """Ask for the statistics and, after the warm-up, for mixed statistics."""
        asks = [Ask("survey")]
        if self.phase_name(state, facts.number) == "mixed":
            asks.append(Ask("mixed-statistics", tunes=True))
        return asks

    def aggregate(
        self, state: None, facts: Facts, replies: Replies, model: dict[str, Any]
    ) -> tuple[dict[str, Any], None]:
        """Pool the measured statistics, and move the global statistics to them."""
        warm_up = self.phase_name(state, facts.number) == "warm-up"
        tau = 1.0 if warm_up else self.params.statistics_momentum
        for layer in facts.parts.layers:
            if not layer.entries.keys() >= {*_STATISTICS, _COUNTER}:
                continue
            mean_name, var_name = (layer.entries[leaf] for leaf in _STATISTICS)
            counter = layer.entries[_COUNTER]
            for name in (mean_name, var_name, counter):
                model[name] = facts.before[name]
            pooled = _pooled(replies, mean_name, var_name, counter)
            # One value has no unbiased variance.
            if pooled is None or pooled.count < 2:
                continue
            moved = {mean_name: pooled.mean.numpy(), var_name: pooled.variance.numpy()}
            for name, new in moved.items():
                before = facts.before[name].astype(np.float64)
                moved[name] = (1 - tau) * before + tau * new
            if all(fits(new, facts.before[name].dtype) for name, new in moved.items()):
                for name, new in moved.items():
                    model[name] = new.astype(facts.before[name].dtype)
        return model, state


def _pooled(
    replies: Replies, mean_name: str, var_name: str, counter: str
) -> Moments | None:
    """Return the moments of a layer over all clients, or None without any."""
    moments = []
    for reply in replies:
        count = int(reply.state[counter])
        if count > 0:
            mean = torch.from_numpy(reply.state[mean_name].astype(np.float64))
            var = torch.from_numpy(reply.state[var_name].astype(np.float64))
            moments.append(Moments(count, mean, count * var))
    return merge(moments) if moments else None


class HBN(Strategy):
    """FedAvg whose BN layers mix the batch's statistics with pooled statistics.

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import HBN
        >>> strategy = HBN(statistics_momentum=0.2)
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
        >>> int(result.arrays["1.num_batches_tracked"].numpy())
        0
    """

    method = HBNMethod
