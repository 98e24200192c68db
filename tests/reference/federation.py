"""A federation in plain torch, round after round and client after client.

It imports nothing from the package. Each method is a class of ``methods`` with at most
six places. This module contains the shared steps: the participants, the batches of a
client, a local step, the average, and the tests. Random streams are written out again.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from tests.reference.networks import Network, completed, network

State = dict[str, Tensor]
RATE = 0.05
UNMEASURED = "unmeasured"
"""The fault of a client that does not answer the query of statistics of a round."""
LOST = ("lost", "fails")
"""The faults of a reply that is lost, and of a mod that fails after the training."""


def cloned(state: Mapping[str, Tensor]) -> State:
    return {name: value.detach().clone() for name, value in state.items()}


def stream(seed: int, purpose: str, *keys: int) -> int:
    """Return the seed of a named random stream."""
    name = "/".join(map(str, [seed, purpose, *keys]))
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1


def shares(weights: Sequence[float]) -> list[float]:
    """Return the weights p_i."""
    return [w / sum(weights) for w in weights]


def wide(x: Tensor) -> Tensor:
    """Return the values in float64 or complex128."""
    return x.to(torch.promote_types(x.dtype, torch.float64))


def weighted(weights: Iterable[float], values: Iterable):
    """Return sum_i w_i x_i."""
    return sum(w * x for w, x in zip(weights, values, strict=True))


def total(weights: Sequence[float], values: Sequence[Tensor]) -> Tensor:
    """Compute sum_i w_i x_i in float64 or complex128, and return it in the dtype of x."""
    return weighted(weights, map(wide, values)).to(values[0].dtype)


def moments_of(h: Tensor) -> tuple[int, Tensor, Tensor]:
    """Return count, mean and biased variance of an input by channel, in float64."""
    flat = h.detach().double().transpose(0, 1).flatten(1)
    return flat.shape[1], flat.mean(1), flat.var(1, correction=0)


def union(parts: Sequence[tuple[int, Tensor, Tensor]]) -> tuple[int, Tensor, Tensor]:
    """Return the moments of all values together."""
    count = sum(n for n, _, _ in parts)
    return (count, *mixture([n / count for n, _, _ in parts], parts))


def mixture(p: Sequence[float], parts: Sequence) -> tuple[Tensor, Tensor]:
    """Sum p_i m_i and sum p_i (v_i + (m_i - m)^2)."""
    mean = weighted(p, [m for _, m, _ in parts])
    return mean, weighted(p, [v + (m - mean) ** 2 for _, m, v in parts])


def channels(statistic: Tensor, like: Tensor) -> Tensor:
    return statistic.view(1, -1, *[1] * (like.dim() - 2))


def normalised(layer: Any, h: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """Apply the BatchNorm of a layer with these statistics."""
    y = (h - channels(mean, h)) / (channels(var, h) + layer.eps).sqrt()
    if layer.weight is None:
        return y
    return y * channels(layer.weight, h) + channels(layer.bias, h)


OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


def optimizer_of(
    case: Any, parameters: Iterable[Tensor], rate: float
) -> torch.optim.Optimizer:
    """Return the optimizer of the case."""
    settings = {"weight_decay": case.weight_decay}
    if case.optimizer == "sgd":
        settings["momentum"] = case.momentum
    return OPTIMIZERS[case.optimizer](parameters, rate, **settings)


@dataclass
class Client:
    """A client and its values in a round."""

    number: int
    inputs: Tensor
    targets: Tensor
    own: State = field(default_factory=dict)  # entries that stay, after its first round
    kept: dict = field(default_factory=dict)  # other state, by method
    begun: bool = False
    # in a round
    net: Network = None  # type: ignore[assignment]
    start: State = field(default_factory=dict)
    end: State = field(default_factory=dict)
    p: float = 0.0
    sends: dict = field(default_factory=dict)
    losses: list[tuple[float, int]] = field(default_factory=list)
    optimizer: Any = None

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def loss(self) -> float:
        """Return the mean over examples of the losses before each step."""
        return sum(x * n for x, n in self.losses) / sum(n for _, n in self.losses)


@dataclass
class Turn:
    """The server's half of a round, with a ``model`` that methods change in place.

    Attributes:
        replies: the clients whose replies are used.
        p: their weights p_i.
        before: the global model before the round.
        model: the new model, at first the average.
        fixed: the unchanged entries, frozen or with the clients.
    """

    replies: Sequence[Client]
    p: Sequence[float]
    before: State
    model: State
    fixed: set[str]


class AllRefuse(Exception):
    """Every client that was asked refuses the settings, and none has trained."""


class Lost(Exception):
    """A batch of one example that gives a layer one value per channel."""


class Federation:
    """A run of some methods whose ``round`` changes ``state`` and the clients."""

    def __init__(
        self, case: Any, data: Sequence[tuple[Tensor, Tensor]], methods_of: Any
    ) -> None:
        self.case = case
        self.dtype = getattr(torch, case.dtype)
        net = self.make()
        self.state = cloned(net.state_dict())
        self.clients = [Client(i, x, y) for i, (x, y) in enumerate(data)]
        self.names(net)
        self.methods = methods_of(self)
        self.local = set()
        for method in self.methods:
            self.local |= method.local() - self.fixed
        self.t = 0
        # by client: its entries of the last used round, and its number of examples
        self.latest = {}
        # weights, their statistics, and the clients that were measured
        self.known = ({}, {}, [])
        self.used = False
        self.anybody = False  # whether a client has trained

    def make(self, state: Mapping | None = None) -> Network:
        """Return a network of the case in train mode, with this state if it is given.

        Layers that are built in eval mode stay there.
        """
        net = network(self.case.model, self.dtype, self.case.optimizer != "sgd")
        if self.case.way == "command":
            # ``bn-momentum`` of the config replaces the model's own.
            for layer in net.modules():
                if isinstance(layer, _BatchNorm):
                    layer.momentum = 0.1
        self.in_eval = {name for name, m in net.named_modules() if not m.training}
        self.fixed = self.leave_fixed(net) if self.case.trains else set()
        self.train_mode(net)
        if state:
            net.load_state_dict(state)
        return net

    def leave_fixed(self, net: Network) -> set[str]:
        """Freeze the entries that ``trains`` does not name, and return their names."""
        fixed = set()
        words = self.case.trains.split(",")
        for path, module in net.named_modules():
            norm = isinstance(module, _BatchNorm)
            own = [f"{path}.{leaf}" for leaf, _ in module.named_parameters("", False)]
            chosen = [name for name in own if {name, path} & {*words}]
            if norm and "norms" in words:
                chosen = own
            for name in {*own} - {*chosen}:
                net.get_parameter(name).requires_grad_(False)
                fixed.add(name)
            if norm and not chosen:
                self.in_eval.add(path)
                fixed |= {f"{path}.{leaf}" for leaf in module.state_dict()}
        return fixed

    def train_mode(self, net: Network) -> None:
        """Set train mode, except for layers that are built in eval mode."""
        net.train()
        for path in self.in_eval:
            net.get_submodule(path).eval()

    def names(self, net: Network) -> None:
        """Split the entries of the state by the types of layers."""
        self.layers = {
            path: layer
            for path, layer in net.named_modules()
            if isinstance(layer, _BatchNorm)
        }
        chosen = list(self.layers)[:1] if self.case.layers else list(self.layers)

        def entries(paths: Iterable[str], *starts: str) -> set[str]:
            return {
                f"{path}.{leaf}"
                for path in paths
                for leaf in self.layers[path].state_dict()
                if leaf.startswith(starts)
            }

        self.chosen = set(chosen)
        self.affine = entries(chosen, "weight", "bias")
        self.statistics = entries(chosen, "running")
        self.counters = entries(chosen, "num")
        self.all_tracked = entries(self.layers, "running", "num")
        self.head = {n for n in self.state if n.startswith("head.")}
        # A tied weight has its first name.
        first = {}
        self.first_name = {}
        for name, p in net.named_parameters(remove_duplicate=False):
            self.first_name[name] = first.setdefault(id(p), name)

    def tracks(self, path: str, layer: Any) -> bool:
        """Return whether a layer's running statistics move in training."""
        return layer.running_mean is not None and path not in self.in_eval

    # --- who takes part -----------------------------------------------------------------

    def present(self, t: int) -> list[Client]:
        hidden = {i for r, i in self.case.hidden if r == t}
        return [client for client in self.clients if client.number not in hidden]

    def drawn(self, t: int) -> list[Client]:
        able = self.present(t)
        count = max(math.floor(self.case.fraction * len(able) + 1e-9), 1)
        if count >= len(able):
            return able
        seed = stream(self.case.seed, "sample-train", t)
        chosen = np.random.default_rng(seed).choice(len(able), count, replace=False)
        return [able[i] for i in sorted(chosen)]

    def batches(self, client: Client, t: int, steps: int, epochs: int) -> Iterator:
        """Draw the batches of a client's round."""
        n, size = len(client), self.case.batch_size or len(client)
        generator = torch.Generator().manual_seed(
            stream(self.case.client_seed, "batches", t, client.number)
        )
        order = []
        for _ in range(steps or epochs * math.ceil(n / size)):
            if size >= n:
                rows = torch.arange(n)
            elif steps and self.case.sampling == "with-replacement":
                rows = torch.randint(n, (size,), generator=generator)
            else:
                if not order:
                    order = [*torch.randperm(n, generator=generator).split(size)]
                rows = order.pop(0)
            yield client.inputs[rows], client.targets[rows]

    def num_steps(self, client: Client) -> int:
        """Return the local steps of a round if no batch is dropped."""
        return self.case.steps or math.ceil(
            len(client) / (self.case.batch_size or len(client))
        )

    def rate(self, t: int) -> float:
        """Return eta(t)."""
        decayed = self.case.decay == "round" and t > 1
        if self.case.decay == "freeze":
            decayed = any(method.frozen(t) for method in self.methods)
        return RATE * (0.5 if decayed else 1)

    def optimizer(self, net: nn.Module, t: int) -> torch.optim.Optimizer:
        trainable = [p for p in net.parameters() if p.requires_grad]
        return optimizer_of(self.case, trainable, self.rate(t))

    # --- a client's round ---------------------------------------------------------------

    def forward(
        self, client: Client, x: Tensor, methods: Sequence, notes: bool = True
    ) -> Tensor:
        """Return the outputs.

        A method may compute BatchNorm calls and record their inputs.
        """

        def output(layer: Any, h: Tensor) -> Tensor:
            path = self.path(client.net, layer)
            for method in methods if notes else ():
                method.sees(client, path, h)
            return self.normalise(client, path, layer, h, methods)

        return completed(client.net.calls(x), output)

    @staticmethod
    def path(net: Network, layer: nn.Module) -> str:
        return next(path for path, module in net.named_modules() if module is layer)

    def normalise(
        self, client: Client, path: str, layer: Any, h: Tensor, methods: Sequence
    ) -> Tensor:
        of_batch = layer.training or layer.running_mean is None
        one_value = of_batch and h.numel() == h.shape[1]
        if one_value and not any(method.takes_one_value(path) for method in methods):
            raise Lost
        for method in methods:
            out = method.normalise(client, path, layer, h)
            if out is not None:
                return out
        return layer(h)

    def drops(self, client: Client, x: Tensor, methods: Sequence) -> bool:
        """Return whether a batch is dropped because a layer would see one value."""
        if len(x) > 1:
            return False
        net = client.net
        client.net = copy.deepcopy(net)
        try:
            self.forward(client, x, methods, notes=False)
        except Lost:
            return True
        finally:
            client.net = net
        return False

    def take_step(
        self, client: Client, x: Tensor, y: Tensor, methods: Sequence
    ) -> None:
        """Take an ordinary local step."""
        loss = F.cross_entropy(self.forward(client, x, methods), y)
        objective = loss + sum(method.penalty(client) for method in methods)
        found = self.gradients(client, objective, methods)
        self.descend(client, found, loss, len(x), methods)

    def gradients(
        self, client: Client, objective: Tensor, methods: Sequence, p: float = 1.0
    ) -> dict:
        """Return gradients over p, by name or by a method's parameter."""
        named = {n: q for n, q in client.net.named_parameters() if q.requires_grad}
        further = [q for method in methods for q in method.trains(client)]
        found = torch.autograd.grad(
            objective, [*named.values(), *further], allow_unused=True, retain_graph=True
        )
        keys = [*named, *further]
        return {
            key: None if g is None else g / p
            for key, g in zip(keys, found, strict=True)
        }

    def descend(
        self,
        client: Client,
        found: dict,
        loss: Tensor,
        size: int,
        methods: Sequence,
    ) -> None:
        """Let the methods change the gradients, and take the step."""
        for method in methods:
            method.gradient(client, found)
        named = dict(client.net.named_parameters())
        for key, g in found.items():
            parameter = named[key] if isinstance(key, str) else key
            parameter.grad = g
        client.optimizer.step()
        client.losses.append((float(loss.detach()), size))

    def common_step(self, clients: Sequence[Client], batches: Sequence) -> None:
        """Take the step with all clients as one batch and one graph."""
        (method,) = (method for method in self.methods if method.in_common(self.t))
        passes = [c.net.calls(x) for c, (x, _) in zip(clients, batches, strict=True)]
        waiting = [next(one, None) for one in passes]
        outputs = [None] * len(clients)
        while any(out is None for out in outputs):
            layers = [layer for layer, _ in waiting]
            inputs = [h for _, h in waiting]
            sent = method.normalise_all(clients, layers, inputs)
            for i, (one, h) in enumerate(zip(passes, sent, strict=True)):
                try:
                    waiting[i] = one.send(h)
                except StopIteration as end:
                    outputs[i] = end.value
        losses = [
            F.cross_entropy(out, y)
            for out, (_, y) in zip(outputs, batches, strict=True)
        ]
        penalties = [sum(m.penalty(client) for m in self.methods) for client in clients]
        terms = [loss + more for loss, more in zip(losses, penalties, strict=True)]
        joint = weighted([client.p for client in clients], terms)
        # A client's share of the gradient of sum p_i F_i is p_i times its own.
        found = []
        for client, term in zip(clients, terms, strict=True):
            whole = method.backward == "global"
            target, p = (joint, client.p) if whole else (term, 1.0)
            found.append(self.gradients(client, target, self.methods, p))
        for client, one, loss, (x, _) in zip(
            clients, found, losses, batches, strict=True
        ):
            self.descend(client, one, loss, len(x), self.methods)

    # --- a round ------------------------------------------------------------------------

    def start(self, client: Client) -> None:
        """Give a client the global model with the client's local entries."""
        client.losses, client.sends = [], {}
        client.start = cloned({**self.state, **client.own})
        client.net = self.make(client.start)
        for method in self.methods:
            method.begin(client)
        client.optimizer = self.optimizer(client.net, self.t)
        for method in self.methods:
            method.with_optimizer(client)

    def train(self, clients: Sequence[Client]) -> list[Client]:
        """Train the clients and return the clients that took a step."""
        case = self.case
        batches = {c.number: self.batches(c, self.t, case.steps, 1) for c in clients}
        if any(method.in_common(self.t) for method in self.methods):
            self.common_step(clients, [next(batches[c.number]) for c in clients])
        for client in clients:
            for x, y in batches[client.number]:
                if not self.drops(client, x, self.methods):
                    self.take_step(client, x, y, self.methods)
        usable = [client for client in clients if client.losses]
        return [c for c in usable if not any(m.incomplete(c) for m in self.methods)]

    def round(self) -> None:
        """Run one round."""
        self.t += 1
        case, t = self.case, self.t
        faults = {i: kind for r, i, kind in case.faults if r == t}
        # A step in common needs the clients whose replies the round needs.
        joint = any(method.in_common(t) for method in self.methods)
        least = case.min_replies if joint else 1
        drawn = self.drawn(t)
        able = drawn if len(drawn) >= least else []
        asked = [c for c in able if faults.get(c.number) != "raise"]
        for method in self.methods:
            method.opens(t)
        refusing = [c for c in asked if any(m.refuses(c) for m in self.methods)]
        begun = []
        for client in asked:
            try:
                if client not in refusing:
                    self.start(client)
                    begun.append(client)
            except Lost:
                continue
        for client in begun:
            client.p = len(client) / sum(len(c) for c in begun)
        begun = begun if len(begun) >= least else []
        try:
            trained = self.train(begun) if begun else []
            refusing += [c for c in begun if any(m.incomplete(c) for m in self.methods)]
        except Lost:  # one value in the batches of all clients
            trained, refusing = [], begun
        # The error contains the number of planned steps, or of taken steps at the end.
        # Different numbers are different errors.
        numbers = {len(c.losses) or self.num_steps(c) for c in refusing}
        everybody = len(refusing) == len(drawn) and len(numbers) == 1
        if everybody and not self.anybody:
            raise AllRefuse
        self.anybody |= bool(trained)
        before = {c.number: (c.own, c.kept, c.begun) for c in trained}
        for client in trained:
            client.end = cloned(client.net.state_dict())
            client.own = {name: client.end[name] for name in self.local}
            client.kept, client.begun = dict(client.kept), True
            for method in self.methods:
                method.end(client)
        usable = [c for c in trained if faults.get(c.number) not in ("nan", *LOST)]
        # The mod keeps only finite values, so the client's round fails.
        fails = {c for c, kind in faults.items() if kind == "fails" and not case.folder}
        if case.in_loop and self.keeps_floats():
            fails |= {c for c, kind in faults.items() if kind == "nan"}
        self.used = len(usable) >= case.min_replies
        undo = any(method.undo for method in self.methods)
        for client in trained:
            lost = faults.get(client.number) in LOST
            unused = undo and (client not in usable or not self.used)
            told = (lost or unused) and self.reaches(client, t)
            if told or client.number in fails:
                client.own, client.kept, client.begun = before[client.number]
        if self.used or not undo:
            for client in usable:
                self.latest[client.number] = (client.own, len(client))
        if self.used:
            self.aggregate(usable)

    def reaches(self, client: Client, t: int) -> bool:
        """Return whether a message after the training of a round reaches the client.

        Only such a message can undo the round.
        """
        later = range(t + 1, self.case.rounds + 1)
        absent = {r for r, i in self.case.hidden if i == client.number}
        return self.case.tests_after(t) or not absent.issuperset(later)

    def keeps_floats(self) -> bool:
        return any(self.state[name].is_floating_point() for name in self.local)

    def aggregate(self, usable: Sequence[Client]) -> None:
        """Make the new global model."""
        before, weights = self.state, [float(len(c)) for c in usable]
        for method in self.methods:
            weights = method.weights(usable) or weights
        p = shares(weights)
        stays = self.local | self.fixed
        shared = [name for name in self.state if name not in stays]
        ends = [{name: c.end[name] for name in shared} for c in usable]
        model = {**before, **self.average(p, ends)}
        fixed = set().union(*(method.fixed(self.t) for method in self.methods))
        for name in fixed - self.local:
            model[name] = before[name]
        turn = Turn(usable, p, before, model, fixed | self.local)
        for method in self.methods:
            method.server(turn)
        self.state = {name: model[name] for name in before}

    def average(self, p: Sequence[float], states: Sequence[State]) -> State:
        """Return sum p_i x_i, the maximum of integers, and any pooled variances."""
        averaged = {}
        for name, value in states[0].items():
            values = [state[name] for state in states]
            if not (value.is_floating_point() or value.is_complex()):
                averaged[name] = torch.stack(values).amax(0)
                continue
            averaged[name] = total(p, values)
            if self.case.variance == "pooled" and name in self.all_tracked:
                mean = name.replace("running_var", "running_mean")
                if name.endswith("running_var") and mean in states[0]:
                    means = [state[mean].double() for state in states]
                    centre = weighted(p, means)
                    spread = [
                        v.double() + (m - centre) ** 2
                        for v, m in zip(values, means, strict=True)
                    ]
                    averaged[name] = total(p, spread).to(value.dtype)
        return averaged

    # --- the tests ----------------------------------------------------------------------

    def tested(self) -> State:
        """Return the global model for the test after this round."""
        model = dict(self.state)
        if self.case.eval_on == "averaged-bn" and self.latest:
            latest = [self.latest[i] for i in sorted(self.latest)]
            states, counts = zip(*latest, strict=True)
            model |= self.average(shares(counts), states)
        pools = self.case.recalibrate and not self.case.own_weights
        if pools or any(m.reestimates for m in self.methods):
            model |= self.measured()
        return model

    def survey(self, client: Client, net: Network, paths: set[str]) -> dict:
        """Return the input moments of layers in one pass with batch statistics."""
        size = max(self.case.batch_size, 2) if self.case.batch_size else len(client)
        parts = [*torch.arange(len(client)).split(size)]
        # A single last example joins the previous batch, if there is one.
        if len(parts[-1]) == 1 and self.alone_fails(
            net, client.inputs[parts[-1]], paths
        ):
            parts[-2:] = [torch.cat(parts[-2:])] if len(parts) > 1 else []
        found = {}
        for rows in parts:
            self.pass_of(net, client.inputs[rows], paths, found)
        return {path: union(moments) for path, moments in found.items()}

    def alone_fails(self, net: Network, x: Tensor, paths: set[str]) -> bool:
        try:
            self.pass_of(net, x, paths, {})
        except Lost:
            return True
        return False

    def pass_of(self, net: Network, x: Tensor, paths: set[str], found: Any) -> None:
        """Collect the input moments of layers in one pass."""

        def output(layer: Any, h: Tensor) -> Tensor:
            path = self.path(net, layer)
            tracked = layer.running_mean is not None
            by_batch = path in paths or (layer.training and not tracked)
            if not by_batch:
                return normalised(layer, h, layer.running_mean, layer.running_var)
            if h.numel() == h.shape[1]:
                raise Lost
            moments = moments_of(h)
            if tracked:
                found.setdefault(path, []).append(moments)
            _, mean, var = moments
            return normalised(layer, h, mean.to(h.dtype), var.to(h.dtype))

        with torch.no_grad():
            completed(net.calls(x), output)

    @property
    def measured_paths(self) -> set[str]:
        return {p for p in self.chosen if self.tracks(p, self.layers[p])}

    def measured(self) -> State:
        """Return the statistics of all clients' data under the global weights."""
        lost = {
            i for r, i, kind in self.case.faults if (r, kind) == (self.t, UNMEASURED)
        }
        weights, statistics, numbers = self.known
        present = self.present(self.t)
        # Nobody is asked twice for the same weights, if all have answered.
        if weights is self.state and numbers == [c.number for c in present]:
            return statistics
        sent, numbers = [], []
        for client in present:
            if client.number in lost:
                continue
            net = self.make(self.state)
            try:
                sent.append(self.survey(client, net, self.measured_paths))
                numbers.append(client.number)
            except Lost:
                continue
        # Too few answers: the statistics of the same weights stay, if there are any.
        if len(sent) >= self.case.min_replies:
            self.known = self.state, self.pooled(sent), numbers
        weights, statistics, _ = self.known
        return statistics if weights is self.state else {}

    def pooled(self, sent: Sequence[Mapping]) -> State:
        """Return running statistics by entry, with torch's n / (n - 1)."""
        model = {}
        for path in self.layers:
            parts = [moments[path] for moments in sent if path in moments]
            if not parts:
                continue
            count, mean, var = union(parts)
            if count > 1:
                like = self.state[f"{path}.running_mean"]
                model[f"{path}.running_mean"] = mean.to(like.dtype)
                unbiased = var * count / (count - 1)
                model[f"{path}.running_var"] = unbiased.to(like.dtype)
        return model

    def tuned_model(self, client: Client, tested: State) -> State | None:
        """Return the tested model after its changes, or None if one fails."""
        model = {**tested, **client.own}
        for method in self.methods:
            model |= method.tested(client)
        net = self.make(model)
        if self.case.fine_tune and not self.fine_tune(client, net):
            return None
        state = cloned(net.state_dict())
        if self.case.measures_own_models:
            self.train_mode(net)
            try:
                state |= self.pooled([self.survey(client, net, self.measured_paths)])
            except Lost:
                return None
        return state

    def test(self, client: Client, tested: State) -> float | None:
        """Return the loss of a client's own model on its data, or None."""
        state = self.tuned_model(client, tested)
        if state is None:
            return None
        net = self.make(state).eval()
        try:
            with torch.no_grad():
                return float(F.cross_entropy(net(client.inputs), client.targets))
        except ValueError:  # one example, and a layer without running statistics
            return None

    def fine_tune(self, client: Client, net: Network) -> bool:
        """Take local steps by the client's loss only, on batches of the round."""
        tuned = Client(client.number, client.inputs, client.targets, kept=client.kept)
        tuned.net, tuned.start = net, cloned(net.state_dict())
        # A second model has plain BatchNorm.
        plain = any(method.second_model for method in self.methods)
        chosen = [m for m in self.methods if not plain or m.role == "option"]
        methods = [method for method in chosen if method.tunes(tuned)]
        tuned.optimizer = self.optimizer(net, self.t)
        for method in methods:
            method.with_optimizer(tuned)
        for x, y in self.batches(client, self.t, self.case.fine_tune, 0):
            if not self.drops(tuned, x, methods):
                self.take_step(tuned, x, y, methods)
        return bool(tuned.losses) or len(client) == 1
