r"""SCAFFOLD: local steps corrected by control variates, aware of BatchNorm.

Karimireddy et al. 2020, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", arXiv:1910.06378,
Algorithm 1, option II.

## Problem

With different data each client's gradient points away from the common one, and local steps drift. Each client knows
its own direction $c_i$ and the common one $c$, and corrects every step by the difference.

## Algorithm

Local step, with the gradient $g$ of the client's loss:

$$y \leftarrow y - \eta_l (g - c_i + c)$$

After $K_i$ steps from $x$ to $y_i$:

$$c_i^+ = c_i - c + \frac{x - y_i}{K_i \eta_l}$$

In a training loop with a schedule or with groups of parameters $K_i \eta_l$ is the sum of the rates that the parameter
had in its steps.

The server takes unweighted means over the $S$ of $N$ clients that took part:

$$x \leftarrow x + \eta_g \, \mathrm{mean}(y_i - x), \qquad c \leftarrow c + \frac{S}{N} \, \mathrm{mean}(c_i^+ - c_i)$$

$\eta_l$ is the round's learning rate, $\eta_g$ is `server_learning_rate`, $K_i$ the number of the client's steps. The
variates $c$ and $c_i$ are over trainable parameters only and start at zero. The correction is for plain SGD: momentum
and other optimizers are refused, because $(x - y_i) / (K_i \eta_l)$ is a mean gradient under plain SGD only. With
`gradient-clip-norm` $g$ is the clipped gradient, and the correction is added to it as it is.

## What travels

| | per round |
|---|---|
| sent down | the whole state $x$; the server's variate $c$ |
| sent up | the whole state $y_i$; the change $c_i^+ - c_i$ |
| kept | $c_i$, the client's variate, and the one before the round (in memory, or on disk with a state folder) |
| cost | $F + T$ floats down, $F + T$ up per client, $T$ = trainable parameters |

## Differs from the paper

The paper has no BatchNorm. Running statistics and buffers are averaged with $p_i$ and not corrected.

In the paper no reply is lost, and $N$ is known. Here a client whose reply is refused or comes too late goes back to its
$c_i$ of before that round when the server next calls it, so that $c$ stays the mean of the $c_i$. $N$ is the largest
number of clients with data so far, and $c$ is scaled when it grows. Two cases remain in which $c$ is not the mean: a
client that has lost $c_i$ begins with zero, and the log names it; and a round is not undone at a node that has not said
its partition id. Each run of a `series` begins with all variates at zero.

## Law

With variates at zero, equal clients and $\eta_g = 1$ it is FedAvg.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import field_validator
from torch import Tensor, nn
from typing_extensions import TypeVar

from fedbn_flwr.batchnorm.averaging import State, weighted_sum, wide_type
from fedbn_flwr.errors import ConfigError, ReplyError
from fedbn_flwr.messages.protocol import Key
from fedbn_flwr.server.method import HookFactory, Method, Role, RunSettings
from fedbn_flwr.server.params import setting
from fedbn_flwr.server.replies import Reply, refuse_misshapen
from fedbn_flwr.strategies.fedavg import FedAvg, FedAvgParams
from fedbn_flwr.training.client_hook import ClientHook, Entries, Extras

__all__ = ["ControlVariates", "Scaffold", "ScaffoldParams"]

_NEEDS_SGD = (
    "scaffold corrects plain SGD: its variates are differences of the weights over K * eta, which are mean gradients "
    "under SGD only"
)

VARIATES = Key("variates", "ArrayRecord: c down, dc_i up", "server, client", "client, server")


class ScaffoldParams(FedAvgParams):
    """Parameters of SCAFFOLD."""

    server_learning_rate: float = setting(1.0, "the server's learning rate (eta_g)", gt=0)

    @field_validator("momentum_scope")
    @classmethod
    def _plain_sgd(cls, scope: str) -> str:
        if scope != "none":
            raise ValueError("scaffold corrects plain SGD: momentum_scope must be 'none'")
        return scope


P = TypeVar("P", bound=ScaffoldParams, default=ScaffoldParams)


class ControlVariates(ClientHook):
    """Client half: add c - c_i to every gradient, and compute the new c_i from the change of the parameters.

    Entries that stay with the client have no common direction, and no variates. Tied weights have one variate, under
    the first of their names; the reply has all names.
    """

    def __init__(self, local: frozenset[str] = frozenset()) -> None:
        self._local = local
        self._server: Entries = {}
        self._own: Entries = {}
        self._optimizer: torch.optim.Optimizer | None = None
        self._start: dict[str, Tensor] = {}
        self._correction: dict[str, Tensor] = {}
        self._change: dict[str, Tensor] = {}
        self._first_names: dict[str, str] = {}
        self._rates: dict[str, Counter[float]] = {}  # for each parameter, the number of its steps with each rate
        self._unstepped: set[str] = set()  # parameters with a gradient that the optimizer does not have
        self._foreign = ""  # the first of them that moved

    def receive(self, sent: Extras, kept: Entries) -> None:
        """Take c and c_i; missing entries are zero."""
        self._server, self._own = sent.get(VARIATES, {}), kept

    def start(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Store x and the names of the parameters. One that begins to train later is stored then.

        Raises:
            ConfigError: the optimizer is not SGD, or a group has momentum or is maximised.
        """
        if not isinstance(optimizer, torch.optim.SGD):
            raise ConfigError(
                f"{_NEEDS_SGD}; the client has the optimizer {type(optimizer).__name__.lstrip('_')}. "
                "Use torch.optim.SGD without momentum, or another strategy"
            )
        if momentum := max(float(group["momentum"]) for group in optimizer.param_groups):
            raise ConfigError(f"scaffold corrects plain SGD: sgd-momentum={momentum} must be 0")
        if any(group.get("maximize") for group in optimizer.param_groups):
            raise ConfigError("scaffold corrects plain SGD: the optimizer's maximize=True must be False")
        self._optimizer = optimizer
        names = {p: name for name, p in model.named_parameters() if name not in self._local}
        everywhere = model.named_parameters(remove_duplicate=False)
        self._first_names = {name: names[p] for name, p in everywhere if p in names}
        self._start, self._rates, self._correction, self._unstepped, self._foreign = {}, {}, {}, set(), ""
        for parameter, name in names.items():
            if parameter.requires_grad:
                self._begin_with(name, parameter)

    def _begin_with(self, name: str, parameter: Tensor) -> None:
        """Store x and c - c_i of a parameter that trains."""
        self._start[name] = x = parameter.detach().clone()
        self._rates[name] = Counter()
        self._correction[name] = self._of(self._server, name, x) - self._of(self._own, name, x)

    def gradients(self, model: nn.Module) -> None:
        """Add c - c_i; note the rate of this step, which a schedule may change, and each group of parameters has."""
        groups = self._optimizer.param_groups if self._optimizer else []
        rates = {p: float(group["lr"]) for group in groups for p in group["params"]}
        for name, parameter in model.named_parameters():
            if parameter.grad is None or name in self._local:
                continue
            if name not in self._start and parameter.requires_grad:  # it was frozen until now, so it is still x
                self._begin_with(name, parameter)
            if name in self._start:
                parameter.grad += self._correction[name]
                if parameter in rates:
                    self._rates[name][rates[parameter]] += 1
                else:
                    self._unstepped.add(name)

    def end(self, model: nn.Module) -> dict[str, float]:
        """Compute dc_i = -c + (x - y_i) / sum_k eta_k; 0 for a parameter that took no step."""
        self._change = {}
        for name, parameter in model.named_parameters():
            if name in self._start:
                went = self._start[name] - parameter.detach()
                # K * eta for one rate: a sum of K terms would round differently.
                total = sum(count * rate for rate, count in self._rates[name].items())
                change = (1 / total) * went - self._of(self._server, name, went) if total else torch.zeros_like(went)
                self._change[name] = change
                if name in self._unstepped and bool(went.any()):
                    self._foreign = self._foreign or name
        return {}

    def reply(self) -> Extras:
        """Return dc_i under every name of a parameter, because the server steps each entry.

        Raises:
            ConfigError: another optimizer has trained a parameter.
        """
        if self._foreign:
            raise ConfigError(
                f"parameter '{self._foreign}' was trained, and no group of the wrapped optimizer has it: scaffold "
                "needs the rate of each step. Wrap one optimizer that has all parameters; each group may have its own "
                "rate"
            )
        names = self._first_names.items()
        return {VARIATES: {name: self._change[first] for name, first in names if first in self._change}}

    def keep(self) -> Entries:
        """Return c_i+ = c_i + dc_i."""
        return {name: self._of(self._own, name, change) + change for name, change in self._change.items()}

    @staticmethod
    def _of(variates: Entries, name: str, like: Tensor) -> Tensor:
        return variates[name].to(like) if name in variates else torch.zeros_like(like)


class Scaffold(FedAvg[P]):
    """Stochastic controlled averaging; BN statistics are averaged as by FedAvg."""

    name = "scaffold"
    summary_line = "control variates over trainable parameters; BN statistics averaged"
    source = "Karimireddy 2020, arXiv:1910.06378"
    role: ClassVar[Role] = "client-hooks"
    Params: ClassVar[type[Any]] = ScaffoldParams
    client_hooks: ClassVar[Mapping[str, HookFactory]] = {
        "variates": lambda context: ControlVariates(context.local_entries)
    }
    keys: ClassVar[tuple[Key, ...]] = (VARIATES,)
    needs_each_reply = True  # the changes are averaged without weights
    undoes_lost_rounds = True  # c is the mean of the c_i
    checkpoint_keys: ClassVar[tuple[str, ...]] = ("variates", "num_clients")

    variates: dict[str, Any]
    num_clients: int

    @classmethod
    def conflicts(cls, params: P, run: RunSettings) -> list[str]:
        """Refuse momentum and other optimizers."""
        problems = super().conflicts(params, run)
        if run.optimizer != "sgd":
            problems.append(f"{_NEEDS_SGD}: optimizer={run.optimizer} must be sgd")
        if run.sgd_momentum:
            problems.append(f"scaffold corrects plain SGD: sgd-momentum={run.sgd_momentum} must be 0")
        return problems

    @classmethod
    def excludes(cls, other: type[Method[Any]]) -> str:
        """Refuse a second server step, and gradients that are not the client's own."""
        if other.role == "server-step":
            return "scaffold has a server step of its own"
        if reason := super().excludes(other):
            return reason
        if other.synchronises:
            return "scaffold's variates are means of a client's own gradients, which a synchronised step does not give"
        return ""

    @classmethod
    def extra_copies(cls, params: P) -> int:
        """Return one more copy of the shared parameters: their variates."""
        return super().extra_copies(params) + 1

    def beside_updates(self) -> dict[str, str]:
        """Add the changes of the variates."""
        return {**super().beside_updates(), "variates": "the changes of the control variates come beside the model"}

    def begin(self) -> None:
        """Start with c = 0."""
        super().begin()
        self.variates, self.num_clients = {}, 0

    def variates_hook(self) -> str:
        """Return the name of the client hook."""
        return "variates"

    def hooks_for(self, server_round: int) -> dict[str, dict[str, Any]]:
        """Ask the clients to apply the control variates."""
        return {**super().hooks_for(server_round), self.variates_hook(): {}}

    def extras(self, server_round: int) -> Mapping[str, State]:
        """Send c."""
        return {**super().extras(server_round), VARIATES: self.variates}

    def check(self, server_round: int, reply: Reply, before: State) -> None:
        """Refuse a reply whose dc_i is missing or does not fit the model."""
        super().check(server_round, reply, before)
        change = reply.extras.get(VARIATES, {})
        if not change:
            raise ReplyError(
                f"record '{VARIATES}' is missing: the client's training must apply the client hook "
                f"'{self.variates_hook()}'"
            )
        refuse_misshapen(VARIATES, change, self.run.shapes)

    def combine(self, server_round: int, replies: Sequence[Reply], before: State) -> dict[str, Any]:
        """Average; then step x and c with the unweighted means of the clients' changes."""
        self._count_clients(replies)
        state = super().combine(server_round, replies, before)
        shares = [1 / len(replies)] * len(replies)
        changes = [reply.extras[VARIATES] for reply in replies]
        for name in dict.fromkeys(name for change in changes for name in change):
            x = before[name].astype(wide_type(before[name]))
            moved = weighted_sum([reply.state[name].astype(x.dtype) - x for reply in replies], shares)
            state[name] = (x + self.params.server_learning_rate * moved).astype(before[name].dtype)
            zero = np.zeros_like(before[name])  # dc_i where the client does not train this entry
            step = len(replies) / self.num_clients * weighted_sum([c.get(name, zero) for c in changes], shares)
            self.variates[name] = (self.variates.get(name, 0.0) + step).astype(before[name].dtype)
        return state

    def _count_clients(self, replies: Sequence[Reply]) -> None:
        """Count N; if it grows, scale c, which is a mean over N clients, those without a variate included."""
        with_variate = {*self.run.local_hashes, *(reply.node.label for reply in replies)}
        count = max(self.num_clients, self.run.num_able, len(with_variate))
        if count > self.num_clients > 0:
            share = self.num_clients / count
            self.variates = {name: (c * share).astype(c.dtype) for name, c in self.variates.items()}
        self.num_clients = count
