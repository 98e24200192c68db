r"""BN-SCAFFOLD: SCAFFOLD that also corrects the BN statistics in every step.

Quintana, Vancamberg, Jugnon, Mougeot, Desolneux 2024, "BN-SCAFFOLD: controlling the
drift of Batch Normalization statistics in Federated Learning", arXiv:2410.03281. **The
paper's text could not be read.** Only its abstract and a summary were read: SCAFFOLD's
variates are extended to the statistics, with two options for the variates of a client.
No code was found. Every formula below that is not SCAFFOLD's is ours, as the direct
extension, and results with it are not the paper's results.

## When

Use when: SCAFFOLD suits the run, and label skew also moves BatchNorm's statistics. The
method is an experiment.

Not when: the network is deeper than an MLP and clients have two classes each. There it
diverged or stayed behind.

## Problem

SCAFFOLD corrects a client's gradients. Its BatchNorm layers still normalise with the
statistics of the client's own batches, and these batches contain few classes.

## Algorithm

Client $i$ has variates $(u_i, s_i)$ per channel: the mean and the biased variance of the
inputs of a BN layer. The server has $(u, s)$. In a local step, the batch has the
statistics $(\mu_B, v_B)$, with biased $v_B$, and the layer normalises with

$$\tilde\mu = \mu_B - u_i + u, \qquad \tilde v = \max(v_B - s_i + s, \; \rho s)$$

Gradients flow only through $\mu_B$ and $v_B$, and they are corrected as in SCAFFOLD.
$\rho$ is `variance_floor`. Under label skew, $v_B - s_i + s$ falls below zero in some
channels and steps. Without a floor, training ended at chance in our trial. The metric
`variance-floor-share` is the share of channels and steps at the floor: 3 % to 8 % in
our trials under label skew. If it is much higher, try `variance_floor=0.5`. The running
statistics take $\tilde\mu$ and $\tilde v \, n / (n - 1)$ with BN's momentum, and tests
use the running statistics.

The new variates of a client are the merged moments of the inputs of all its local steps
(option II; option I is a pass over its data before the first step).

The server pools the latest variates of every client that ever sent some:

$$u = \sum_i p_i u_i, \qquad s = \sum_i p_i \left( s_i + (u_i - u)^2 \right)$$

In its first round, a client has no variates of its own, so it corrects no statistics.

The server identifies a client by its partition id. A node without a partition id counts
as a new client after a restart, and its old variates keep their weight in $(u, s)$. Give
each node a `partition-id` in its node config.

## Differs from the paper

Unknown, because the paper could not be read. The SCAFFOLD part is the same as in
`scaffold`. There are no variates of the gradients with respect to the statistics,
because stale variates make gradients too large.

## Law

Round 1 equals SCAFFOLD, bit for bit. A later round also equals SCAFFOLD if $u_i = u$
and $s_i = s$ for all clients and no variance is at the floor. With fixed weights and
full batches of any sizes, the corrected statistics of BN layer $l$ equal the statistics
of the union from round $l + 1$ on, if all examples have the same number of elements:
$p_i$ weighs by examples. The mean gradient is **not** the centralized
gradient, because each client still uses its own gradients with respect to the
statistics, as in FedDNA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.batchnorm.averaging import fits
from fedbn_flwr.batchnorm.parts import entry_name
from fedbn_flwr.batchnorm.reestimation import (
    MomentSums,
    batch_statistics,
    mixture,
)
from fedbn_flwr.batchnorm.replaced_forward import (
    layers_in_training,
    normalise,
    replace_forward,
    replaceable_layers,
)
from fedbn_flwr.messages.moment_record import decode_moments, encode_moments
from fedbn_flwr.messages.protocol import Key
from fedbn_flwr.problems import Problem
from fedbn_flwr.server.methods.method import Ask, Facts, Replies
from fedbn_flwr.server.methods.moment_pool import UNMEASURED, by_layer, unmeasured
from fedbn_flwr.server.methods.params import setting
from fedbn_flwr.server.methods.shared_bn import LatestBN
from fedbn_flwr.server.methods.travels import Extra, Travels
from fedbn_flwr.server.strategy import Strategy
from fedbn_flwr.strategies.scaffold import (
    VARIATES,
    ControlVariates,
    ScaffoldMethod,
    ScaffoldParams,
    Variates,
)
from fedbn_flwr.training.client_hook import Entries, Extras


class BNScaffoldParams(ScaffoldParams):
    """Parameters of BN-SCAFFOLD."""

    variance_floor: float = setting(
        0.1,
        "rho: a corrected variance is at least this share of the clients' common"
        " variance; the metric variance-floor-share reports how often it applies",
        group="",
        gt=0,
        le=1,
    )


BN_VARIATES = Key.both(
    "bn-variates", "ArrayRecord: u and s down; count, mean, m2 of client i up"
)
FLOOR = Key.down("fedbn-flwr.variance-floor", "float: rho")
FLOOR_SHARE = Key.up(
    "variance-floor-share", "float: share of channels and steps at the floor"
)


@dataclass(frozen=True)
class _Correction:
    """Correction of a batch's mean and variance in a layer, with the floor.

    ``mean`` and ``var`` are added to the values of the batch. Each tensor has one value
    per channel. ``any`` is False if the correction is zero.
    """

    mean: Tensor
    var: Tensor
    floor: Tensor
    any: bool


class BNControlVariates(ControlVariates):
    """Client code that also corrects the BN statistics of every step.

    In addition to SCAFFOLD's correction, a layer adds u - u_i to the mean of the batch
    and s - s_i to its variance. If nothing is corrected, torch's own forward pass keeps
    SCAFFOLD's bits.
    """

    in_batchnorm = True
    of_all_steps = (
        "the variates depend on all steps: return the weights of the last step"
    )

    def __init__(self, local: frozenset[str] = frozenset(), floor: float = 0.1) -> None:
        super().__init__(local)
        self._floor = floor
        self._common: Entries = {}
        self._before: Entries = {}
        self._corrections: dict[nn.Module, _Correction] = {}
        self._undo: Callable[[], None] = lambda: None
        self._sums = MomentSums()
        self._low: Tensor | float = 0.0
        self._seen = 0
        self._moments: Entries = {}

    def receive(self, sent: Extras, kept: Entries) -> None:
        """Take c and (u, s) of the server, and c_i and (u_i, s_i) of the client."""
        self._common, self._before = sent.get(BN_VARIATES, {}), {}
        c_i = {}
        for name, entry in kept.items():
            if name.startswith(_KEPT):
                self._before[name.removeprefix(_KEPT)] = entry
            else:
                c_i[name] = entry
        super().receive(sent, c_i)

    def begin(self, model: nn.Module) -> None:
        """Replace the forward pass of the BatchNorm layers that track statistics.

        Raises:
            NormLayerError: the forward pass of a layer does more than BatchNorm, and
                this part would be lost; or the layer is in TorchScript.
        """
        self._undo = replace_forward(replaceable_layers(model), self._forward)
        self._corrections = {}
        for path, layer in layers_in_training(model).items():
            correction = self._correction_of(path, layer)
            if correction is not None:
                self._corrections[layer] = correction

    def end(self, model: nn.Module) -> dict[str, float]:
        """Restore the layers, and compute dc_i, moments and the share at the floor."""
        metrics = super().end(model)
        self._undo()
        self._moments = encode_moments(self._sums.by_path(model), model.state_dict())
        return {**metrics, FLOOR_SHARE: float(self._low) / max(self._seen, 1)}

    def reply(self) -> Extras:
        """Return dc_i and the moments."""
        return {**super().reply(), BN_VARIATES: self._moments}

    def keep(self) -> Entries:
        """Return c_i+ and the moments."""
        kept = dict(super().keep())
        for name, entry in self._moments.items():
            kept[_KEPT + name] = entry
        return kept

    def _correction_of(self, path: str, layer: _BatchNorm) -> _Correction | None:
        like = layer.running_mean
        common = [entry_name(path, leaf) for leaf in ("mean", "var")]
        own = [entry_name(path, leaf) for leaf in ("count", "mean", "m2")]
        has_both = {*common} <= self._common.keys() and {*own} <= self._before.keys()
        # In its first round, a client has no variates of its own and corrects nothing.
        if like is None or not has_both:
            return None
        u, s = (self._common[name] for name in common)
        count, u_i, m2 = (self._before[name] for name in own)
        # Compute variates from moments as the server does. Then equal variates differ
        # by exactly zero, and torch's own forward pass is used.
        s_i = (m2.double() / count).to(s.dtype)
        dtype = torch.promote_types(like.dtype, torch.float32)
        mean, var = (u - u_i).to(dtype), (s - s_i).to(dtype)
        floor = (self._floor * s).to(dtype)
        corrects = bool(mean.any() or var.any())
        device = like.device
        return _Correction(mean.to(device), var.to(device), floor.to(device), corrects)

    def _forward(self, layer: _BatchNorm, x: Tensor) -> Tensor:
        correction = self._corrections.get(layer)
        if correction is None or not x.numel():
            self._sums.add(layer, x)
            return _BatchNorm.forward(layer, x)
        mean, var = batch_statistics(x)
        self._sums.add(layer, x, (mean, var))
        # Find the channels in which v_B - s_i + s is below the floor. Under label skew,
        # some are even below zero.
        corrected = var + correction.var
        low = corrected.detach() < correction.floor
        self._low, self._seen = self._low + low.sum(), self._seen + len(low)
        # If nothing is corrected, torch's own pass keeps SCAFFOLD's bits.
        if not correction.any and not bool(low.any()):
            return _BatchNorm.forward(layer, x)
        mean = mean + correction.mean
        var = torch.where(low, correction.floor, corrected)
        _track(layer, mean.detach(), var.detach(), x.numel() // x.shape[1])
        return normalise(layer, x, mean, var)


# prefix of the names of (u_i, s_i) in the hook's state; c_i has the parameters' names
_KEPT = f"{BN_VARIATES}/"


def _track(layer: _BatchNorm, mean: Tensor, var: Tensor, count: int) -> None:
    """Update the running statistics with a batch's mean and biased variance.

    The update is the same as in torch. A cumulative average (``momentum=None``) needs
    the counter: without a counter, torch does not change the statistics.
    """
    if layer.running_mean is None or layer.running_var is None:
        return
    counter = layer.num_batches_tracked
    with torch.no_grad():
        share = layer.momentum or 0.0
        if counter is not None:
            counter.add_(1)
            if layer.momentum is None:
                share = 1 / float(counter)
        layer.running_mean.mul_(1 - share).add_(share * mean)
        # torch normalises with the biased variance and tracks the unbiased one.
        unbiased = var * (count / max(count - 1, 1))
        layer.running_var.mul_(1 - share).add_(share * unbiased)


@dataclass(frozen=True)
class BNVariates(Variates):
    """The state of BN-SCAFFOLD, with each client's last moments and examples."""

    latest_variates: Sequence[Sequence[Any]] = ()


class BNScaffoldMethod(ScaffoldMethod[BNScaffoldParams, BNVariates]):
    """SCAFFOLD that also corrects the statistics of BatchNorm in every step."""

    name = "bn-scaffold"
    summary_line = (
        "scaffold that also corrects BN's statistics in every step (our formulas: the"
        " paper could not be read)"
    )
    source = "Quintana 2024, arXiv:2410.03281 (abstract)"
    alone = (
        "bn-scaffold already corrects the gradients and the statistics in every step"
    )
    Params = BNScaffoldParams
    State = BNVariates
    client_hooks = {
        "bn-variates": lambda context: BNControlVariates(
            context.local_entries, float(context.config[FLOOR])
        ),
    }

    def travels(self, num_rounds: int | None = None) -> tuple[Travels, ...]:
        """Return SCAFFOLD's phase, with BN's variates and the share at the floor."""
        (scaffold,) = super().travels(num_rounds)
        why = (
            f"strategy={self.name} sends the moments of BatchNorm's inputs on the"
            " clients' data"
        )
        extras = (
            Extra(BN_VARIATES, "moments", why, down=True),
            Extra(FLOOR_SHARE, "scalar", "", read="log"),
        )
        return (replace(scaffold, extras=(*scaffold.extras, *extras)),)

    def on_clients(self, state: BNVariates, facts: Facts) -> list[Ask]:
        """Send c, (u, s) and rho, and ask for the variates of BN."""
        sends = {VARIATES: state.variates, BN_VARIATES: self._common(state, facts)}
        return [Ask("bn-variates", {FLOOR: self.params.variance_floor}, sends)]

    def aggregate(
        self, state: BNVariates, facts: Facts, replies: Replies, model: dict[str, Any]
    ) -> tuple[dict[str, Any], BNVariates]:
        """Update x and c as in SCAFFOLD, and store the moments for the next (u, s)."""
        sent = []
        for reply in replies:
            moments = reply.extras.get(BN_VARIATES, {})
            sent.append((reply.node.order, moments, reply.num_examples))
        # A client that is not in this round keeps its place in (u, s).
        latest = LatestBN(state.latest_variates).with_latest(sent).tree
        state = replace(state, latest_variates=latest)
        return super().aggregate(state, facts, replies, model)

    def _common(self, state: BNVariates, facts: Facts) -> dict[str, Any]:
        """Return (u, s) of layers with moments, as ``PATH.mean`` and ``PATH.var``."""
        entries: dict[str, Any] = {}
        like, parts = facts.before, facts.parts
        latest = LatestBN(state.latest_variates).latest
        sent = [decode_moments(moments, like, parts) for moments, _ in latest]
        examples = [count for _, count in latest]
        for layer, clients, counts in by_layer(parts, sent, examples):
            # s = sum_i p_i (s_i + (u_i - u)^2) includes the spread of the clients.
            u, s = mixture(clients, counts, spread=True)
            mean = like[layer.entries["running_mean"]]
            dtype = np.promote_types(mean.dtype, np.float32)
            if fits(u.numpy(), dtype) and fits(s.numpy(), dtype):
                entries[entry_name(layer.path, "mean")] = u.numpy().astype(dtype)
                entries[entry_name(layer.path, "var")] = s.numpy().astype(dtype)
        return entries


class BNScaffold(Strategy):
    """SCAFFOLD that also corrects the statistics of BatchNorm in every step.

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import BNScaffold
        >>> strategy = BNScaffold(variance_floor=0.5)
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
    """

    method = BNScaffoldMethod


# --- what may be wrong ----------------------------------------------------------------
def _without_moments(method: Any, known: Any) -> str:
    """Return the number of replies without moments as a text, empty if it is 0."""
    without = sum(not reply.extras.get(BN_VARIATES) for reply in known.replies)
    return f"{without} of {len(known.replies)} replies" if without else ""


def _unmeasured(method: Any, known: Any) -> str:
    """Return the layers that got no variates in the first round with variates."""
    if known.state.latest_variates:
        return ""
    like, parts = known.facts.before, known.facts.parts
    sent = []
    for reply in known.replies:
        sent.append(decode_moments(reply.extras.get(BN_VARIATES, {}), like, parts))
    return unmeasured(parts, sent, "which have no variates")


BNScaffoldMethod.rows = (
    *ScaffoldMethod.rows,
    Problem(
        "variates-without-moments",
        "round {known.number}: {found} have no moments of BatchNorm's inputs (record"
        f" '{BN_VARIATES}'); the last moments of these clients, if any, stay in"
        " the variates",
        effect="warn",
        stage="replies",
        when=_without_moments,
    ),
    replace(UNMEASURED, when=_unmeasured),
)
