"""The methods of the reference, each in the symbols of its paper.

``Method`` is FedAvg. It has a place for each possible change: the normalisation of a
BatchNorm layer, the gradient, a client's kept and sent values, the server's step, and
the tested model. A class has only the places that its paper changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.reference.federation import (
    Client,
    Federation,
    Lost,
    State,
    Turn,
    cloned,
    normalised,
    shares,
    total,
    weighted,
    wide,
)

T_STAR = 1  # after this round FixBN and FedTAN-II freeze
WINDOW, STEADY = 2, 1.5e-4  # W and tau of an automatic T*
MU, SHARE = 0.3, 0.3  # FedProx and Ditto; HBN's tau, the share of a round's statistics
SERVER_RATE, MOMENTUM = 0.7, 0.8
ETA, TAU, BETA_1, BETA_2 = 0.07, 2e-3, 0.85, 0.95
EPS, PATIENCE = 10.0, 1  # FedBS: the losses always agree, so phase 2 begins in round 2


class Method:
    """FedAvg, with places that do nothing."""

    undo = False  # a round that is not used is undone at the client
    reestimates = False
    backward = "global"
    second_model = False
    role = ""

    def __init__(self, fed: Federation) -> None:
        self.fed = fed

    def local(self) -> set[str]:
        return set()

    def opens(self, t: int) -> None: ...

    def frozen(self, t: int) -> bool:
        return False

    def fixed(self, t: int) -> set[str]:
        return set()

    def in_common(self, t: int) -> bool:
        return False

    def begin(self, client: Client) -> None: ...

    def with_optimizer(self, client: Client) -> None: ...

    def sees(self, client: Client, path: str, h: Tensor) -> None: ...

    def takes_one_value(self, path: str) -> bool:
        return False

    def normalise(
        self, client: Client, path: str, layer: Any, h: Tensor
    ) -> Tensor | None:
        return None

    def refuses(self, client: Client) -> bool:
        """Return whether a client refuses the settings before it trains."""
        return False

    def incomplete(self, client: Client) -> bool:
        """Return whether a client refuses the round after it has trained."""
        return False

    def penalty(self, client: Client):
        return 0.0

    def trains(self, client: Client) -> list[Tensor]:
        return []

    def gradient(self, client: Client, g: dict) -> None: ...

    def end(self, client: Client) -> None: ...

    def weights(self, replies: Sequence[Client]) -> list[float] | None:
        return None

    def server(self, turn: Turn) -> None: ...

    def tested(self, client: Client) -> State:
        return {}

    def tunes(self, client: Client) -> bool:
        """Return whether the method acts in the steps before a test.

        It prepares these steps.
        """
        return False


# --- what stays with the clients --------------------------------------------------------
class FedBN(Method):
    def local(self) -> set[str]:
        return self.fed.affine | self.fed.statistics | self.fed.counters


class SiloBN(Method):
    def local(self) -> set[str]:
        return self.fed.statistics | self.fed.counters


class MTFL(Method):
    def local(self) -> set[str]:
        return self.fed.affine


class Standalone(Method):
    def local(self) -> set[str]:
        return {*self.fed.state}


class Personal(Method):
    """Entries that the user names."""

    def local(self) -> set[str]:
        where = self.fed.case.personal
        if where in ("head", "last-layer"):
            return self.fed.head
        return {name for name in self.fed.state if name.startswith(f"{where}.")}


# --- local steps ------------------------------------------------------------------------
class FedProx(Method):
    """+ mu / 2 |w - w_global|^2."""

    def penalty(self, client: Client):
        named = client.net.named_parameters()
        return MU / 2 * sum(((q - client.start[n]).abs() ** 2).sum() for n, q in named)


class AGC(Method):
    """Gradients of at most lambda |W|, unit by unit, except the classifier's."""

    role = "option"

    def tunes(self, client: Client) -> bool:
        return True

    def gradient(self, client: Client, g: dict) -> None:
        weights = dict(client.net.named_parameters())
        for name, gradient in g.items() if self.fed.case.agc else ():
            if gradient is None or name not in weights or name in self.fed.head:
                continue
            w = weights[name].detach()
            rows = zip(gradient, w, strict=True) if w.dim() > 1 else [(gradient, w)]
            for one, unit in rows:
                allowed = self.fed.case.agc * max(float(unit.norm()), 1e-3)
                if float(one.norm()) > allowed:
                    one *= allowed / one.norm()


class FedRep(Method):
    """The first tau_h steps train the head, the others the body."""

    def local(self) -> set[str]:
        return set() if self.fed.case.personal else self.fed.head

    def begin(self, client: Client) -> None:
        client.sends["steps"] = 0

    def gradient(self, client: Client, g: dict) -> None:
        heads = client.sends["steps"] < self.fed.case.head_steps
        client.sends["steps"] += 1
        for name in g:
            if (name in self.fed.local_head) != heads:
                g[name] = None

    def refuses(self, client: Client) -> bool:
        # A user's loop shows its number of steps only at its end.
        too_few = self.fed.num_steps(client) <= self.fed.case.head_steps
        return too_few and not self.fed.case.in_loop

    def incomplete(self, client: Client) -> bool:
        return 0 < client.sends["steps"] <= self.fed.case.head_steps


class Scaffold(Method):
    """The gradient is g - c_i + c, with c_i+ = c_i - c + (x - y) / (K eta)."""

    undo = True

    def __init__(self, fed: Federation) -> None:
        super().__init__(fed)
        self.c: State = {}
        self.seen = set()  # N of them
        self.scaled_to = 0

    def opens(self, t: int) -> None:
        self.seen |= {client.number for client in self.fed.present(t)}

    def begin(self, client: Client) -> None:
        client.sends["eta"] = {}

    def of(self, c: State, name: str, like: Tensor) -> Tensor:
        return c.get(name, torch.zeros_like(like))

    def gradient(self, client: Client, g: dict) -> None:
        c_i, eta = client.kept.get("scaffold", {}), client.sends["eta"]
        rate = client.optimizer.param_groups[0]["lr"]
        for name, gradient in g.items():
            named = isinstance(name, str)
            if gradient is None or not named or name in self.fed.local:
                continue
            more = self.of(self.c, name, gradient) - self.of(c_i, name, gradient)
            g[name] = gradient + more
            eta[name] = eta.get(name, 0.0) + rate

    def end(self, client: Client) -> None:
        c_i, changes = client.kept.get("scaffold", {}), {}
        for name, q in client.net.named_parameters():
            if not q.requires_grad or name in self.fed.local:
                continue
            went = (client.start[name] - client.end[name]).detach()
            eta = client.sends["eta"].get(name, 0.0)
            changes[name] = torch.zeros_like(went)
            if eta:
                changes[name] = went / eta - self.of(self.c, name, went)
        client.sends["dc"] = changes
        new = {name: self.of(c_i, name, dc) + dc for name, dc in changes.items()}
        client.kept["scaffold"] = {**c_i, **new}

    def server(self, turn: Turn) -> None:
        grown = len(self.seen)
        scaled, self.scaled_to = self.scaled_to or grown, grown
        equal = [1 / len(turn.replies)] * len(turn.replies)
        for name, first in self.fed.first_name.items():
            if not any(first in client.sends["dc"] for client in turn.replies):
                continue
            ways = [wide(c.end[name]) - wide(turn.before[name]) for c in turn.replies]
            step = SERVER_RATE * total(equal, ways)
            turn.model[name] = (wide(turn.before[name]) + step).to(
                turn.before[name].dtype
            )
        for name in dict.fromkeys(n for c in turn.replies for n in c.sends["dc"]):
            zero = torch.zeros_like(turn.before[name])
            dc = [c.sends["dc"].get(name, zero) for c in turn.replies]
            old = self.c.get(name, zero) * scaled / grown
            self.c[name] = old + len(turn.replies) / grown * total(equal, dc)


# --- the server's step ------------------------------------------------------------------
class ServerStep(Method):
    """x + step(Delta) for parameters, with averaged buffers."""

    def __init__(self, fed: Federation) -> None:
        super().__init__(fed)
        self.m: State = {}
        self.v: State = {}

    def server(self, turn: Turn) -> None:
        for name, x in turn.before.items():
            if name in turn.fixed or name not in self.fed.first_name:
                continue
            start = self.reals(x)
            ends = [self.reals(client.end[name]) for client in turn.replies]
            delta = weighted(turn.p, ends) - start
            zero = torch.zeros_like(start)
            self.m.setdefault(name, zero), self.v.setdefault(name, zero)
            moved = start + self.step(name, delta)
            turn.model[name] = (
                torch.view_as_complex(moved) if x.is_complex() else moved
            ).to(x.dtype)

    @staticmethod
    def reals(x: Tensor) -> Tensor:
        """Return float64, with two numbers for a complex number."""
        return torch.view_as_real(wide(x)) if x.is_complex() else x.double()

    def step(self, name: str, delta: Tensor) -> Tensor:
        raise NotImplementedError


class FedAvgM(ServerStep):
    def step(self, name: str, delta: Tensor) -> Tensor:
        self.m[name] = MOMENTUM * self.m[name] + delta
        return SERVER_RATE * self.m[name]


class FedAdam(ServerStep):
    beta_1 = BETA_1

    def step(self, name: str, delta: Tensor) -> Tensor:
        self.m[name] = self.beta_1 * self.m[name] + (1 - self.beta_1) * delta
        self.v[name] = self.second(self.v[name], delta**2)
        return self.rate() * self.m[name] / (self.v[name].sqrt() + TAU)

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        return BETA_2 * v + (1 - BETA_2) * square

    def rate(self) -> float:
        t = self.fed.t + 1
        return ETA * (1 - BETA_2**t) ** 0.5 / (1 - BETA_1**t)


class FedYogi(FedAdam):
    def second(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - BETA_2) * square * (v - square).sign()

    def rate(self) -> float:
        return ETA


class FedAdagrad(FedYogi):
    beta_1 = 0.0

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        return v + square


class FedNova(Method):
    """x - (sum p tau) sum p (x - y) / tau, with tau = sum eta v and v <- rho v + 1."""

    def begin(self, client: Client) -> None:
        client.sends |= {"v": 0.0, "tau": 0.0}

    def gradient(self, client: Client, g: dict) -> None:
        shared = [n for n in g if isinstance(n, str) and n not in self.fed.local]
        if any(g[name] is not None for name in shared):
            (group, *_) = client.optimizer.param_groups
            client.sends["v"] = group["momentum"] * client.sends["v"] + 1
            client.sends["tau"] += group["lr"] * client.sends["v"]

    def server(self, turn: Turn) -> None:
        tau = [client.sends["tau"] for client in turn.replies]
        common = weighted(turn.p, tau)
        for name in self.fed.first_name:
            if name in turn.fixed or not common:
                continue
            x, d = wide(turn.before[name]), 0.0
            for p, t, client in zip(turn.p, tau, turn.replies, strict=True):
                d += p * (x - wide(client.end[name])) / t if t else 0.0
            turn.model[name] = (x - common * d).to(turn.before[name].dtype)


# --- the statistics that BatchNorm normalises with --------------------------------------
class FixBN(Method):
    """From round T* + 1 on, BatchNorm is in eval mode."""

    def __init__(self, fed: Federation) -> None:
        super().__init__(fed)
        self.t_star = math.inf if fed.case.freeze_auto else T_STAR
        self.deltas = []

    def frozen(self, t: int) -> bool:
        return t > self.t_star

    def server(self, turn: Turn) -> None:
        super().server(turn)
        if self.t_star == math.inf:
            deltas = [self.delta(client) for client in turn.replies]
            self.deltas.append(weighted(turn.p, deltas))
            last = torch.tensor(self.deltas[-WINDOW:], dtype=torch.float64)
            if len(last) == WINDOW and last.var(correction=0) < STEADY:
                self.t_star = self.fed.t

    def delta(self, client: Client) -> float:
        """Return ||S_m - S||_1 / number of entries."""
        names = sorted(self.fed.statistics)
        moved = [(client.end[n].double() - client.start[n].double()) for n in names]
        return float(torch.cat([one.flatten() for one in moved]).abs().mean())

    def fixed(self, t: int) -> set[str]:
        if not self.frozen(t):
            return set()
        affine = self.fed.affine if self.fed.case.freeze_affine else set()
        return self.fed.statistics | self.fed.counters | affine

    def freeze(self, net: Any) -> None:
        for path in self.fed.chosen:
            layer = net.get_submodule(path)
            layer.eval()
            if self.fed.case.freeze_affine:
                for p in layer.parameters():
                    p.requires_grad_(False)

    def begin(self, client: Client) -> None:
        if self.frozen(self.fed.t):
            self.freeze(client.net)

    def tunes(self, client: Client) -> bool:
        self.begin(client)
        return True


class StaticBN(Method):
    """BatchNorm trains on batch statistics, but tests use re-estimated statistics."""

    reestimates = True

    def fixed(self, t: int) -> set[str]:
        return self.fed.statistics | self.fed.counters

    def tunes(self, client: Client) -> bool:
        return True

    def normalise(
        self, client: Client, path: str, layer: Any, h: Tensor
    ) -> Tensor | None:
        if path not in self.fed.chosen or not self.fed.tracks(path, layer):
            return None
        return F.batch_norm(h, None, None, layer.weight, layer.bias, True, 0, layer.eps)


class HBN(Method):
    """BatchNorm mixes the batch's and the global statistics by alpha, after a warm-up.

    The global statistics move to the pooled statistics of the received weights.
    """

    @property
    def warm(self) -> bool:
        return self.fed.t <= self.fed.case.statistics_warm_up

    def fixed(self, t: int) -> set[str]:
        return self.fed.statistics | self.fed.counters

    def takes_one_value(self, path: str) -> bool:
        return not self.warm and path in self.fed.measured_paths

    def begin(self, client: Client) -> None:
        moments = self.fed.survey(client, client.net, self.fed.measured_paths)
        client.sends["moments"] = moments
        self.tunes(client)

    def tunes(self, client: Client) -> bool:
        """Let the steps begin with the client's alpha, at first 0."""
        alpha = client.sends["alpha"] = {}
        for path in () if self.warm else self.fed.measured_paths:
            zero = torch.zeros_like(self.fed.state[f"{path}.running_mean"])
            start = client.kept.get("alpha", {}).get(path, zero)
            alpha[path] = start.clone().requires_grad_()
        return not self.warm

    def trains(self, client: Client) -> list[Tensor]:
        return [*client.sends["alpha"].values()]

    def with_optimizer(self, client: Client) -> None:
        group = {"params": self.trains(client), "weight_decay": 0.0}
        client.optimizer.add_param_group(group)

    def normalise(
        self, client: Client, path: str, layer: Any, h: Tensor
    ) -> Tensor | None:
        alpha = client.sends["alpha"].get(path)
        if alpha is None:
            return None
        a = torch.sigmoid(-alpha)
        flat = h.transpose(0, 1).flatten(1)
        mean = a * flat.mean(1) + (1 - a) * layer.running_mean
        var = a * flat.var(1, correction=0) + (1 - a) * layer.running_var
        return normalised(layer, h, mean, var)

    def end(self, client: Client) -> None:
        if not self.warm:
            client.kept["alpha"] = cloned(client.sends["alpha"])

    def server(self, turn: Turn) -> None:
        tau = 1.0 if self.warm else SHARE
        sent = [client.sends["moments"] for client in turn.replies]
        for name, new in self.fed.pooled(sent).items():
            turn.model[name] = (1 - tau) * turn.before[name] + tau * new


class FedTAN(Method):
    """In the first step, all clients are one batch."""

    def in_common(self, t: int) -> bool:
        return not self.frozen(t)

    def normalise_all(
        self, clients: Sequence[Client], layers: Sequence, inputs: Sequence[Tensor]
    ) -> list[Tensor]:
        """The statistics are mu = sum p_i mu_i and sum p_i E_i (y - mu)^2."""
        one = layers[0]
        if not one.training:
            return [layer(h) for layer, h in zip(layers, inputs, strict=True)]
        p = [client.p for client in clients]
        flat = [h.transpose(0, 1).flatten(1) for h in inputs]
        mean = weighted(p, [y.mean(1) for y in flat])
        var = weighted(p, [((y - mean[:, None]) ** 2).mean(1) for y in flat])
        count = sum(y.shape[1] for y in flat)
        if count == 1:
            raise Lost
        outputs = []
        for layer, h, y in zip(layers, inputs, flat, strict=True):
            self.track(layer, mean.detach(), var.detach() * count / (count - 1))
            m, v = self.used(mean, var, y)
            outputs.append(normalised(layer, h, m, v))
        return outputs

    def used(self, mean: Tensor, var: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return mean, var

    @staticmethod
    def track(layer: Any, mean: Tensor, var: Tensor) -> None:
        if layer.running_mean is None:
            return
        layer.num_batches_tracked += 1
        share = layer.momentum or 1 / float(layer.num_batches_tracked)
        layer.running_mean.mul_(1 - share).add_(share * mean)
        layer.running_var.mul_(1 - share).add_(share * var)


class FedDNA(FedTAN):
    """FedTAN's forward pass with each client's own gradients of the statistics."""

    backward = "own"

    def used(self, mean: Tensor, var: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        mean, var = mean.detach(), var.detach()
        own = y.mean(1)
        spread = ((y - mean[:, None]) ** 2).mean(1)
        return mean + own - own.detach(), var + spread - spread.detach()


class FedTAN2(FedTAN, FixBN):
    """FedTAN for M rounds, then frozen BatchNorm."""

    def fixed(self, t: int) -> set[str]:
        return self.fed.statistics | self.fed.counters if self.frozen(t) else set()


class FedBS(FedProx):
    """Weights F_k / sum F, then FedProx with equal weights."""

    def __init__(self, fed: Federation) -> None:
        super().__init__(fed)
        self.agreed = 0
        self.second = False

    def opens(self, t: int) -> None:
        self.second = self.agreed >= PATIENCE

    def penalty(self, client: Client):
        return super().penalty(client) if self.second else 0.0

    def weights(self, replies: Sequence[Client]) -> list[float] | None:
        if self.second:
            return [1.0] * len(replies)
        losses = [client.loss for client in replies]
        if len(replies) > 1:
            self.agreed += 1
        return losses if any(losses) else [1.0] * len(replies)


# --- a second model, and momentum -------------------------------------------------------
class Ditto(Method):
    """v_k trains near w before w trains."""

    second_model = True

    def begin(self, client: Client) -> None:
        fed = self.fed
        net = fed.make({**client.start, **client.kept.get("own-model", {})})
        optimizer = fed.optimizer(net, fed.t)
        near = Client(client.number, client.inputs, client.targets)
        near.net, near.start, near.optimizer = net, client.start, optimizer
        for x, y in fed.batches(client, fed.t, fed.case.steps, 1):
            if not fed.drops(near, x, []):
                fed.take_step(near, x, y, [FedProx(fed), AGC(fed)])
        if not near.losses:
            raise Lost
        client.sends["own-model"] = cloned(net.state_dict())

    def end(self, client: Client) -> None:
        client.kept["own-model"] = client.sends["own-model"]

    def tested(self, client: Client) -> State:
        return client.kept.get("own-model", {})


class MomentumScope(Method):
    """SGD's buffers stay with the client, or their average starts the next round."""

    def __init__(self, fed: Federation) -> None:
        super().__init__(fed)
        self.common: State = {}

    def with_optimizer(self, client: Client) -> None:
        start = {**self.common, **client.kept.get("momentum", {})}
        for name, p in client.net.named_parameters():
            if name in start and p.requires_grad:
                client.optimizer.state[p]["momentum_buffer"] = start[name].clone()

    def end(self, client: Client) -> None:
        buffers = {}
        for name, p in client.net.named_parameters():
            state = client.optimizer.state.get(p)
            if state and state.get("momentum_buffer") is not None:
                buffers[name] = state["momentum_buffer"].clone()
        stay = {*buffers}
        if self.fed.case.momentum_scope == "global":
            stay &= self.fed.local
        earlier = client.kept.get("momentum", {})
        client.kept["momentum"] = {**earlier, **{name: buffers[name] for name in stay}}
        client.sends["momentum"] = {n: b for n, b in buffers.items() if n not in stay}

    def server(self, turn: Turn) -> None:
        self.common = {}
        for name in {n for client in turn.replies for n in client.sends["momentum"]}:
            have = [
                (w, c.sends["momentum"][name])
                for w, c in zip(turn.p, turn.replies, strict=True)
                if name in c.sends["momentum"]
            ]
            weights, buffers = zip(*have, strict=True)
            self.common[name] = total(shares(weights), buffers)


REFERENCES = {
    "fedavg": Method,
    "fedprox": FedProx,
    "ditto": Ditto,
    "fedrep": FedRep,
    "scaffold": Scaffold,
    "fedavgm": FedAvgM,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "fedadagrad": FedAdagrad,
    "fednova": FedNova,
    "fedbn": FedBN,
    "silobn": SiloBN,
    "mtfl": MTFL,
    "staticbn": StaticBN,
    "fixbn": FixBN,
    "hbn": HBN,
    "fedtan": FedTAN,
    "fedtan2": FedTAN2,
    "feddna": FedDNA,
    "fedbs": FedBS,
    "fedwon": AGC,
    "standalone": Standalone,
}
"""The reference of each strategy, in the order in which they act on a gradient."""


def methods_of(fed: Federation) -> list[Method]:
    """Return the options of the case, then its methods."""
    case, methods = fed.case, []
    if case.personal:
        methods.append(Personal(fed))
    if case.agc and "fedwon" not in case.methods:
        methods.append(AGC(fed))
    if case.momentum_scope != "none":
        methods.append(MomentumScope(fed))
    methods += [kind(fed) for name, kind in REFERENCES.items() if name in case.methods]
    fed.local_head = Personal(fed).local() if case.personal else fed.head
    return methods
