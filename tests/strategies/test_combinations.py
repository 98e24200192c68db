"""Methods in one strategy: lawful pairs against a slow reference in plain torch, every
other pair refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, TensorDataset

from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.client.hooks import Hooks
from fedbn_flwr.errors import ConfigError
from fedbn_flwr.messages.records import tensors
from fedbn_flwr.norms import replace_norm
from fedbn_flwr.server.methods.options import ClipGradients
from fedbn_flwr.server.strategy import Strategy
from fedbn_flwr.strategies import (
    STRATEGIES,
    Ditto,
    FedAdam,
    FedAvg,
    FedBN,
    FedProx,
    FixBN,
    Method,
    Travels,
    combined,
)
from fedbn_flwr.strategies.fedbn import FedBNMethod
from fedbn_flwr.strategies.fedopt import FedAdamMethod
from fedbn_flwr.strategies.fedprox import ProximalTerm
from fedbn_flwr.strategies.fedrep import HeadThenBody
from fedbn_flwr.strategies.hbn import HybridStatistics
from fedbn_flwr.strategies.scaffold import ControlVariates
from fedbn_flwr.training import ClientHook, LearningRate, LocalTraining
from fedbn_flwr.training.loop import train

SIZES = (6, 14, 10, 8)
ROUNDS, STEPS, RATE, T_STAR = 4, 2, 0.1, 2
# none is a default, so a setting that does not arrive shows
MU, AGC, SHARE = 0.3, 0.05, 0.3
SERVER_RATE, MOMENTUM = 0.7, 0.8
ETA, TAU, BETA_1, BETA_2 = 0.07, 2e-3, 0.85, 0.95
SETTINGS: dict[str, dict[str, Any]] = {
    "agc": {"agc": AGC},
    "affine": {"freeze_affine": True},
    "fedprox": {"proximal_mu": MU},
    "scaffold": {"server_learning_rate": SERVER_RATE},
    "fixbn": {"freeze_at": T_STAR},
    "fbn": {"statistics_momentum": SHARE},
    "hbn": {"statistics_momentum": SHARE},
    "fedtan2": {"fedtan_rounds": T_STAR},
    "fedavgm": {"server_learning_rate": SERVER_RATE, "server_momentum": MOMENTUM},
    "fedadam": {"eta": ETA, "tau": TAU, "beta_1": BETA_1, "beta_2": BETA_2},
    "fedyogi": {"eta": ETA, "tau": TAU, "beta_1": BETA_1, "beta_2": BETA_2},
    "fedadagrad": {"eta": ETA, "tau": TAU},
}
LOCAL = ("fedbn", "silobn", "mtfl")
STEP = ("fedavgm", "fedadam", "fedyogi", "fedadagrad")
LAWFUL = [
    *itertools.product(LOCAL, ("fedprox", "scaffold", *STEP)),
    *itertools.product(
        STEP, ("fedprox", "staticbn", "fixbn", "fbn", "hbn", "fedtan", "fedtan2")
    ),
    *itertools.product(
        ("fedprox",),
        ("scaffold", "staticbn", "fixbn", "fbn", "hbn", "fedtan", "fedtan2"),
    ),
    *itertools.product(("scaffold",), ("staticbn", "fixbn", "fbn", "hbn")),
    *itertools.product(("mtfl",), ("fixbn", "fbn", "hbn")),
]
# Hooks of the clients that keep more than BatchNorm; their laws stand in
# test_fedrep_and_ditto.py.
WITH_PERSONAL = [
    *itertools.product(
        ("ditto", "fedrep"),
        (*LOCAL, *STEP, "fedprox", "scaffold", "fixbn", "fbn", "hbn"),
    ),
    *itertools.product(("ditto", "fedrep"), ("fedtan", "fedtan2")),
    ("ditto", "staticbn"),
    ("ditto", "fedrep"),
]
# The server steps share `ServerStep.aggregate`; their own formulas are tested in
# test_server_optimizers.py.
ALIKE = {*STEP} - {"fedadam"}
COMPARED = [
    pair for pair in LAWFUL if not ALIKE & {*pair} or {"fedbn", "fixbn"} & {*pair}
]
MORE = [
    ("hbn",),
    ("fbn",),
    *((step,) for step in STEP),
    ("mtfl", "fixbn", "fedprox"),
    ("fedbn", "fedprox", "fedadam"),
    ("fixbn", "scaffold", "fedprox"),
    ("mtfl", "fixbn", "fedyogi", "fedprox"),
    ("fixbn", "affine", "fedadam"),
    ("mtfl", "fixbn", "affine"),
    *itertools.product(
        ("fedprox", "scaffold", "fixbn", "fedbn", "fedadam", "staticbn"), ("agc",)
    ),
]


def cloned(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.items()}


class Reference:
    """A federation of full local batches, each method one ``if`` of a plain loop."""

    def __init__(
        self, methods: Sequence[str], make: Any, datasets: Sequence[Any]
    ) -> None:
        self.has = set(methods)
        self.make, self.datasets = make, datasets
        model = make()
        parts = split_state(model)
        self.statistics = set(parts.statistics)
        self.counters = set(parts.counters)
        self.affine = set(parts.affine)
        self.trainable = [name for name, _ in model.named_parameters()]
        self.local: set[str] = set()
        if "fedbn" in self.has:
            self.local = self.affine | self.statistics | self.counters
        if "silobn" in self.has:
            self.local = self.statistics | self.counters
        if "mtfl" in self.has:
            self.local = self.affine
        # the global model, and what each client keeps of it
        self.state = cloned(model.state_dict())
        initial = {name: self.state[name] for name in self.local}
        self.own = [cloned(initial) for _ in datasets]
        # SCAFFOLD's variates, of the server and of each client
        shared = [name for name in self.trainable if name not in self.local]
        self.c = {name: torch.zeros_like(self.state[name]) for name in shared}
        self.c_own = [cloned(self.c) for _ in datasets]
        # HBN's share of the batch, which starts at 1/2 in each channel
        self.alpha = [torch.zeros(4).double().requires_grad_() for _ in datasets]
        # the moments of a server optimizer
        self.m: dict[str, Tensor] = {}
        for name, value in self.state.items():
            if value.is_floating_point():
                self.m[name] = torch.zeros_like(value)
        self.v = cloned(self.m)

    def round(self, t: int, chosen: Sequence[int]) -> None:
        frozen = bool(self.has & {"fixbn", "fedtan2"}) and t > T_STAR
        if "fbn" in self.has and t > 1:  # its warm-up is one round
            frozen = True
        fixed = self.affine if frozen and self.has & {"affine"} else set()
        synchronised = bool(self.has & {"fedtan", "fedtan2"}) and not frozen
        # each client starts at the global model with its own entries
        clients = [self.make().train() for _ in chosen]
        starts = [{**self.state, **self.own[i]} for i in chosen]
        for client, start in zip(clients, starts, strict=True):
            client.load_state_dict(start)
            for layer in client.modules():
                if isinstance(layer, _BatchNorm) and frozen:
                    layer.eval()
        # the inputs of the BN layer: FBN's of every step, HBN's of a pass before them
        hidden: list[list[Tensor]] = [[] for _ in chosen]
        for client, values, i in zip(clients, hidden, chosen, strict=True):
            if "fbn" in self.has:
                client[1].register_forward_pre_hook(
                    lambda _, args, values=values: values.append(args[0].detach())
                )
            if "hbn" in self.has:
                values.append(client[0](self.datasets[i].inputs).detach())
        self.hybrid = "hbn" in self.has and t > 1
        total = sum(len(self.datasets[i]) for i in chosen)
        p = [len(self.datasets[i]) / total for i in chosen]
        for step in range(STEPS):
            if synchronised and step == 0:
                gradients = self.synchronised(clients, chosen, p)
            else:
                gradients = [
                    self.gradients(*one)
                    for one in zip(clients, chosen, starts, strict=True)
                ]
            for i, client, found in zip(chosen, clients, gradients, strict=True):
                for name, parameter in client.named_parameters():
                    if name in fixed:
                        continue
                    g = found[name]
                    if "scaffold" in self.has and name in self.c:
                        g = g - self.c_own[i][name] + self.c[name]
                    parameter.data -= RATE * g
        ends = [cloned(client.state_dict()) for client in clients]
        if frozen or self.has & {"staticbn", "fbn", "hbn"}:
            fixed = fixed | self.statistics | self.counters
        self.aggregate(t, fixed, chosen, p, starts, ends)
        if self.has & {"fbn", "hbn"}:
            # after the warm-up the pooled statistics replace the global ones
            share = 1.0 if t == 1 else SHARE
            self.pool(share, p, [torch.cat(values) for values in hidden])

    def mixed(self, client: nn.Module, i: int) -> Tensor:
        """The outputs of Linear, BatchNorm with mixed statistics, ReLU, Linear."""
        h, layer = client[0](self.datasets[i].inputs), client[1]
        a = 1 / (1 + self.alpha[i].exp())
        mean = a * h.mean(0) + (1 - a) * layer.running_mean
        var = a * ((h - h.mean(0)) ** 2).mean(0) + (1 - a) * layer.running_var
        normalised = (h - mean) / (var + layer.eps).sqrt()
        return client[3]((layer.weight * normalised + layer.bias).relu())

    def pool(self, share: float, p: Sequence[float], inputs: Sequence[Tensor]) -> None:
        """Move the statistics towards those of the inputs of all clients' steps."""
        mean = sum(w * h.mean(0) for w, h in zip(p, inputs, strict=True))
        var = sum(w * ((h - mean) ** 2).mean(0) for w, h in zip(p, inputs, strict=True))
        n = sum(map(len, inputs))
        unbiased = var * n / (n - 1)
        for name, new in (("1.running_mean", mean), ("1.running_var", unbiased)):
            self.state[name] = (1 - share) * self.state[name] + share * new

    def gradients(
        self, client: nn.Module, i: int, start: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        alpha = self.alpha[i]
        outputs = (
            self.mixed(client, i) if self.hybrid else client(self.datasets[i].inputs)
        )
        loss = F.cross_entropy(outputs, self.datasets[i].targets)
        if "fedprox" in self.has:
            loss = loss + MU / 2 * sum(
                ((q - start[n]) ** 2).sum() for n, q in client.named_parameters()
            )
        *found, of_alpha = torch.autograd.grad(
            loss, [*client.parameters(), alpha], allow_unused=not self.hybrid
        )
        if self.hybrid:
            alpha.data -= RATE * of_alpha
        gradients = dict(zip(self.trainable, found, strict=True))
        if "agc" in self.has:
            # not the classifier's weight and bias
            for name, q in [*client.named_parameters()][:-2]:
                units = (
                    zip(gradients[name], q.detach(), strict=True)
                    if q.dim() > 1
                    else [(gradients[name], q.detach())]
                )
                for g, w in units:
                    allowed = AGC * max(float(w.norm()), 1e-3)
                    if float(g.norm()) > allowed:
                        g *= allowed / g.norm()
        return gradients

    def synchronised(
        self, clients: Sequence[nn.Module], chosen: Sequence[int], p: Sequence[float]
    ) -> list[Any]:
        """The step of the union, for Linear, BatchNorm, ReLU, Linear: one graph over
        all clients' parameters.
        """
        hidden = [
            client[0](self.datasets[i].inputs)
            for client, i in zip(clients, chosen, strict=True)
        ]
        mean = sum(w * h.mean(0) for w, h in zip(p, hidden, strict=True))
        var = sum(w * ((h - mean) ** 2).mean(0) for w, h in zip(p, hidden, strict=True))
        loss, size = torch.zeros(()).double(), sum(len(h) for h in hidden)
        for w, client, i, h in zip(p, clients, chosen, hidden, strict=True):
            layer = client[1]
            y = layer.weight * (h - mean) / (var + layer.eps).sqrt() + layer.bias
            loss = loss + w * F.cross_entropy(
                client[3](y.relu()), self.datasets[i].targets
            )
            with torch.no_grad():
                layer.running_mean.mul_(0.9).add_(0.1 * mean)
                layer.running_var.mul_(0.9).add_(0.1 * var * size / (size - 1))
                layer.num_batches_tracked += 1
        found = []
        for w, client in zip(p, clients, strict=True):
            gradients = torch.autograd.grad(
                loss, list(client.parameters()), retain_graph=True
            )
            found.append(
                {name: g / w for name, g in zip(self.trainable, gradients, strict=True)}
            )
        return found

    def aggregate(
        self, t: int, fixed: set[str], chosen: Any, p: Any, starts: Any, ends: Any
    ) -> None:
        before = {name: value.clone() for name, value in self.state.items()}
        for i, end in zip(chosen, ends, strict=True):
            self.own[i] = {name: end[name] for name in self.local}
        for name in self.state.keys() - self.local:
            values = [end[name] for end in ends]
            if name in self.counters:
                self.state[name] = torch.stack(values).max()
            else:
                self.state[name] = sum(
                    w * value for w, value in zip(p, values, strict=True)
                )
            if name in fixed:
                self.state[name] = before[name]
            elif self.has & set(STEP) and name not in self.statistics | self.counters:
                self.state[name] = self.server_step(
                    t, name, before[name], self.state[name]
                )
        if "scaffold" not in self.has:
            return
        mean_change = {name: torch.zeros_like(value) for name, value in self.c.items()}
        for name in self.c:
            moves = [
                (end[name] - start[name]) / len(chosen)
                for start, end in zip(starts, ends, strict=True)
            ]
            self.state[name] = before[name] + SERVER_RATE * sum(moves)
            for i, start, end in zip(chosen, starts, ends, strict=True):
                new = (
                    self.c_own[i][name]
                    - self.c[name]
                    + (start[name] - end[name]) / (STEPS * RATE)
                )
                mean_change[name] += (new - self.c_own[i][name]) / len(chosen)
                self.c_own[i][name] = new
        self.c = {
            name: value + len(chosen) / len(SIZES) * mean_change[name]
            for name, value in self.c.items()
        }

    def server_step(self, t: int, name: str, x: Tensor, mean: Tensor) -> Tensor:
        delta = mean - x
        if "fedavgm" in self.has:
            self.m[name] = MOMENTUM * self.m[name] + delta
            return x + SERVER_RATE * self.m[name]
        beta_1 = 0.0 if "fedadagrad" in self.has else BETA_1
        self.m[name] = beta_1 * self.m[name] + (1 - beta_1) * delta
        rate, v, square = ETA, self.v[name], delta**2
        if "fedadagrad" in self.has:
            v = v + square
        elif "fedadam" in self.has:
            v = BETA_2 * v + (1 - BETA_2) * square
            rate = ETA * (1 - BETA_2 ** (t + 1)) ** 0.5 / (1 - BETA_1 ** (t + 1))
        else:
            v = v - (1 - BETA_2) * square * (v - square).sign()
        self.v[name] = v
        return x + rate * self.m[name] / (v.sqrt() + TAU)


def equals_the_reference(
    methods: Sequence[str], make: Any, datasets: Sequence[Any], federate: Any
) -> None:
    settings: dict[str, Any] = {}
    for name in methods:
        settings |= SETTINGS.get(name, {})
    classes = [STRATEGIES[name] for name in methods if name in STRATEGIES]
    strategy = combined(*classes)(
        fraction_train=0.5, min_train_nodes=2, seed=3, **settings
    )
    run = federate(
        strategy,
        make,
        datasets,
        rounds=ROUNDS,
        rate=RATE,
        batch_size=0,
        local_steps=STEPS,
    )
    reference = Reference(methods, make, datasets)
    for report in strategy.reports:
        assert report.rejected == {}
        assert len(report.participants) == 2
        reference.round(report.server_round, report.participants)
    for name, value in tensors(run.state).items():
        # statistics that are re-estimated for the tests have a law of their own
        reestimated = name in reference.statistics and strategy.methods.reestimates
        if name not in reference.local and not reestimated:
            torch.testing.assert_close(
                value, reference.state[name], rtol=1e-9, atol=1e-11, msg=name
            )
    trained: set[int] = set()
    if reference.local:
        trained.update(*(report.participants for report in strategy.reports))
    for client in trained:
        for name, value in tensors(run.local_state(client)).items():
            torch.testing.assert_close(
                value, reference.own[client][name], rtol=1e-9, atol=1e-11, msg=name
            )


@pytest.mark.parametrize("methods", [*COMPARED, *MORE], ids="+".join)
def test_a_combination_equals_a_slow_reference(
    methods: Sequence[str], federate, datasets, mlp
) -> None:
    """Four rounds of two steps, two of four uneven clients a round; every entry, those
    kept by the clients too.
    """
    equals_the_reference(methods, mlp, datasets, federate)


@pytest.mark.parametrize("methods", [("agc",), ("fedprox", "agc")], ids="+".join)
def test_clipping_with_groupnorm_equals_a_slow_reference(
    methods: Sequence[str], federate, datasets, mlp
) -> None:
    """GN + AGC and FedProx + AGC, as in FedWon's ablation."""
    equals_the_reference(
        methods, lambda: replace_norm(mlp(), "group")[0], datasets, federate
    )


@pytest.mark.parametrize(
    "methods",
    [
        ("fixbn", "fedprox"),
        ("fixbn", "scaffold"),
        ("mtfl", "fedadam"),
        ("fedbn", "fedavgm"),
    ],
    ids="+".join,
)
def test_a_combination_equals_a_slow_reference_on_torchvisions_shufflenet(
    methods: Sequence[str],
    federate,
    points,
    torchvision_net,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(globals(), "RATE", 1e-3)
    datasets = [
        points(size, client, (3, 40, 40)) for client, size in enumerate((6, 9, 7, 8))
    ]
    equals_the_reference(methods, torchvision_net, datasets, federate)


@pytest.mark.parametrize(
    "pair", list(itertools.combinations(STRATEGIES, 2)), ids="+".join
)
def test_every_other_pair_is_refused_with_the_reason(pair: tuple[str, str]) -> None:
    first, second = (STRATEGIES[name] for name in pair)
    if "fedavg" in pair:
        assert combined(first, second) is second
    elif frozenset(pair) in {*map(frozenset, (*LAWFUL, *WITH_PERSONAL))}:
        assert combined(first, second) is combined(second, first)
    else:
        with pytest.raises(
            ConfigError,
            match=f"{first.name} and {second.name} cannot be combined: .{{20,}}",
        ):
            combined(first, second)


def test_a_combination_has_the_settings_of_its_methods() -> None:
    strategy = combined(FixBN, FedProx)(
        freeze_at=5, proximal_mu=0.1, fraction_train=0.5
    )
    assert (
        strategy.params.freeze_at,
        strategy.params.proximal_mu,
        strategy.fraction_train,
    ) == (5, 0.1, 0.5)
    assert (strategy.name, type(strategy.params).__name__) == (
        "fedprox+fixbn",
        "FedProxAndFixBNParams",
    )
    with pytest.raises(TypeError, match="eta"):
        combined(FixBN, FedProx)(eta=0.1)


def test_the_own_subclass_of_a_method_can_be_combined() -> None:
    class MineMethod(FedBNMethod):
        name = "mine"

    class Mine(Strategy):
        method = MineMethod

    assert combined(FedAdam, Mine).combination.kinds == (FedAdamMethod, MineMethod)
    assert combined(Mine) is Mine
    assert combined(FedAvg) is FedAvg


def test_the_own_subclass_of_fedavg_adds_nothing_to_a_combination() -> None:
    class Mine(FedAvg):
        _notes = ""

    class Other(FedAvg):
        pass

    for methods in ((FedBN,), (Ditto,), (FedBN, FedProx)):
        for mine in ((Mine,), (Mine, Other), (FedAvg, Mine)):
            assert combined(*mine, *methods) is combined(*methods)
            assert combined(*methods, *mine) is combined(*methods)
    assert combined(Mine, Other) is Mine


def test_a_server_step_of_the_users_own_does_not_move_what_fixbn_has_frozen(
    federate, datasets, mlp, same_bits
) -> None:
    class MomentumMethod(Method):
        name = "momentum"
        role = "server-step"

        def travels(self, num_rounds=None):
            return (Travels(decides=frozenset({"server step"})),)

        def begin(self, facts):
            return {}

        def aggregate(self, state, facts, replies, model):
            v = {}
            for name in (*facts.parts.affine, *facts.parts.rest):
                v[name] = 0.9 * state.get(name, 0.0) + model[name] - facts.before[name]
                model[name] = (facts.before[name] + v[name]).astype(model[name].dtype)
            return model, v

    class Momentum(Strategy):
        method = MomentumMethod

    strategy = combined(FixBN, Momentum)(freeze_at=1, freeze_affine=True)
    assert strategy.name == "momentum+fixbn"
    history = federate(strategy, mlp, datasets, rounds=3).history
    affine = split_state(mlp()).affine
    frozen = {name: history[1][name] for name in affine}
    last = {name: history[3][name] for name in affine}
    same_bits(frozen, last)


def test_a_class_that_overrides_calls_of_flower_is_not_combined_without_a_word(
    federate, datasets, mlp
) -> None:
    asked = []

    class Asking(FedBN):
        def configure_train(self, server_round, *rest):
            asked.append(server_round)
            return super().configure_train(server_round, *rest)

    class AskingAverage(FedAvg):
        configure_train = Asking.configure_train

    class Both(Asking):
        method = combined(FedBN, FedProx)

    assert combined(Asking) is combined(Asking, FedAvg) is Asking
    assert combined(AskingAverage) is AskingAverage
    for pair in ((Asking, FedProx), (FedBN, AskingAverage)):
        with pytest.raises(
            ConfigError, match=r"leaves out what the class overrides: configure_train\."
        ):
            combined(*pair)
    federate(Both(), mlp, datasets, rounds=2)
    assert asked == [1, 2]


class Counts(ClientHook):
    """Notes weights, alpha and gradients as the optimizer will apply them."""

    stage = "count"

    def start(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.seen: list[list[tuple[Tensor, Tensor]]] = []

    def gradients(self, model: nn.Module) -> None:
        groups = [group["params"] for group in self.optimizer.param_groups]
        self.seen.append([])
        for p in itertools.chain(*groups):
            g = torch.zeros_like(p) if p.grad is None else p.grad.clone()
            self.seen[-1].append((p.detach().clone(), g))


def in_our_loop(model: nn.Module, data: Any, hooks: Sequence[ClientHook]) -> None:
    generators = {"stream": lambda purpose: torch.Generator().manual_seed(0)}
    full = LocalTraining(learning_rate=LearningRate(RATE), batch_size=0, local_epochs=3)
    train(model, data, full, learning_rate=RATE, hooks=hooks, **generators)


def in_an_own_loop(model: nn.Module, data: Any, hooks: Sequence[ClientHook]) -> None:
    rules = Hooks(model.train(), {type(hook).__name__: hook for hook in hooks})
    with rules._block():
        rules.survey(DataLoader(TensorDataset(data.inputs, data.targets), 8))
        optimizer = rules.wrap(torch.optim.SGD(model.parameters(), RATE))
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(data.inputs), data.targets).backward()
            optimizer.step()


@pytest.mark.parametrize("head_steps", [1, 2])
@pytest.mark.parametrize("loop", [in_our_loop, in_an_own_loop])
def test_hooks_act_in_the_order_of_their_stages(
    loop: Any, head_steps: int, mlp, points
) -> None:
    """In any order of the methods one that counts sees what the optimizer applies;
    SCAFFOLD's new variate is the mean gradient of the steps in which a parameter moved,
    and alpha trains with the body.
    """
    data, head = points(8, 1), frozenset({"3.weight", "3.bias"})
    common = {name: torch.full_like(p, 0.1) for name, p in mlp().named_parameters()}
    ends = []
    for order in itertools.permutations(range(4)):
        model, counts, scaffold = mlp(), Counts(), ControlVariates(head)
        scaffold.receive({"variates": common}, {})
        hbn = HybridStatistics(False, False)
        rep, clips = HeadThenBody(head, head_steps), ClipGradients(0.02)
        movable: list[ClientHook] = [rep, scaffold, counts, hbn]
        hooks = [movable[at] for at in order]
        loop(model, data, [clips, ProximalTerm(MU), *hooks])
        (alpha,) = hbn.keep().values()
        last = [*(p.detach() for p in model.parameters()), alpha]
        values = [[w for w, _ in step] for step in counts.seen] + [last]
        for step, (before, after) in enumerate(itertools.pairwise(values)):
            for at, (w, new) in enumerate(zip(before, after, strict=True)):
                moves = step < head_steps if at in (4, 5) else step >= head_steps
                torch.testing.assert_close(new, w - RATE * counts.seen[step][at][1])
                assert torch.equal(w, new) != moves
        body = {name: at for at, name in enumerate(common) if name not in head}
        for name, at in body.items():
            applied = torch.stack([step[at][1] for step in counts.seen[head_steps:]])
            variate = applied.mean(0) - common[name]
            torch.testing.assert_close(scaffold.keep()[name], variate)
        ends.append(torch.cat([w.flatten() for w in last]))
    assert all(torch.equal(end, ends[0]) for end in ends)
