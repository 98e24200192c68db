"""``train_only`` under the strategies: frozen entries keep their bits, the others equal
a slow plain-torch run.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr.strategies import STRATEGIES, FedAvg, FedBN, FedTAN, FixBN
from fedbn_flwr.training.freezing import FrozenBN, train_only
from tests.support.points import Points
from tests.support.synchronised import client_data, synchronised, trained

TRAINED = ("3", "4", "6")  # the second BatchNorm among them
SIZES, RATE = (5, 3, 4), 0.1
MODES: list[FrozenBN] = ["eval", "train"]


def net(frozen_bn: FrozenBN | None) -> nn.Module:
    """Two layers with BatchNorm and a head, as after some training; with a mode, all
    but ``TRAINED`` is frozen.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        parts = [
            nn.Linear(5, 4),
            nn.BatchNorm1d(4),
            nn.Tanh(),
            nn.Linear(4, 4),
            nn.BatchNorm1d(4),
            nn.Tanh(),
        ]
        model = trained(nn.Sequential(*parts, nn.Linear(4, 3)))
    if frozen_bn is not None:
        train_only(model, TRAINED, frozen_bn)
    return model


def slow_step(
    model: nn.Module,
    data: Points,
    frozen_bn: FrozenBN,
    correction: Any = None,
    fixed: bool = False,
) -> None:
    """One step of plain SGD on all data, in place; the modes are set by hand."""
    model.train()
    model[1].train(frozen_bn == "train" and not fixed)  # type: ignore[index]
    model[4].train(not fixed)  # type: ignore[index]
    named = {
        name: p for name, p in model.named_parameters() if name.startswith(TRAINED)
    }
    gradients = torch.autograd.grad(
        F.cross_entropy(model(data.inputs), data.targets), list(named.values())
    )
    with torch.no_grad():
        for (name, p), gradient in zip(named.items(), gradients, strict=True):
            p -= RATE * (gradient + (correction[name] if correction else 0))


def averaged(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The average by the sizes of the data; counters by their maximum."""
    found = {}
    for name, value in states[0].items():
        stack = torch.stack([state[name] for state in states])
        weights = torch.tensor(SIZES, dtype=torch.float64) / sum(SIZES)
        found[name] = (
            torch.tensordot(weights, stack, 1)
            if value.is_floating_point()
            else stack.amax(0)
        )
    return found


def close(found: Any, wanted: dict[str, Tensor], names: Any = None) -> None:
    for name in names or wanted:
        torch.testing.assert_close(
            torch.as_tensor(found[name]), wanted[name], rtol=1e-9, atol=1e-12, msg=name
        )


@pytest.fixture
def data() -> list[Points]:
    return client_data((5,), SIZES)


def slow_rounds(
    data: list[Points], frozen_bn: FrozenBN, fixed: tuple[bool, ...]
) -> dict[str, Tensor]:
    """FedAvg with one full step a round; in the rounds marked ``fixed`` every BatchNorm
    is in eval mode.
    """
    state = net(None).state_dict()
    for eval_mode in fixed:
        clients = []
        for own in data:
            model = net(None)
            model.load_state_dict(state)
            slow_step(model, own, frozen_bn, fixed=eval_mode)
            clients.append(model.state_dict())
        state = averaged(clients)
    return state


@pytest.mark.parametrize("frozen_bn", MODES)
def test_fedavg_and_fixbn(
    federate: Any, data: list[Points], frozen_bn: FrozenBN
) -> None:
    one = {"local_steps": 1, "batch_size": 0, "rate": RATE, "rounds": 3}
    run = federate(FedAvg(fraction_evaluate=0.0), lambda: net(frozen_bn), data, **one)
    close(run.state, slow_rounds(data, frozen_bn, (False, False, False)))
    run = federate(
        FixBN(freeze_at=1, fraction_evaluate=0.0), lambda: net(frozen_bn), data, **one
    )
    close(run.state, slow_rounds(data, frozen_bn, (False, True, True)))


@pytest.mark.parametrize("frozen_bn", MODES)
def test_fedbn(federate: Any, data: list[Points], frozen_bn: FrozenBN) -> None:
    """Its clients keep the frozen layer's entries too: with ``train`` those adapt to
    each client alone.
    """
    state, kept = net(None).state_dict(), [{}, {}, {}]
    for _ in range(3):
        clients = []
        for index, own in enumerate(data):
            model = net(None)
            model.load_state_dict({**state, **kept[index]})
            slow_step(model, own, frozen_bn)
            clients.append(
                {name: value.clone() for name, value in model.state_dict().items()}
            )
            kept[index] = {
                name: value
                for name, value in clients[-1].items()
                if name.startswith(("1.", "4."))
            }
        state = averaged(clients)
    one = {"local_steps": 1, "batch_size": 0, "rate": RATE, "rounds": 3}
    run = federate(FedBN(fraction_evaluate=0.0), lambda: net(frozen_bn), data, **one)
    shared = [name for name in state if not name.startswith(("1.", "4."))]
    close(run.state, state, shared)
    same = torch.equal(kept[0]["1.running_mean"], kept[1]["1.running_mean"])
    assert same == (frozen_bn == "eval")


@pytest.mark.parametrize("exchanges", ["3L+1", "2L+1"])
@pytest.mark.parametrize("frozen_bn", MODES)
def test_fedtan_is_one_step_on_the_union(
    run_step: Any, data: list[Points], frozen_bn: FrozenBN, exchanges: str
) -> None:
    model = net(None)
    union = Points(
        torch.cat([d.inputs for d in data]), torch.cat([d.targets for d in data])
    )
    slow_step(model, union, frozen_bn)
    run = run_step(
        synchronised(FedTAN, fedtan_exchanges=exchanges),
        net(frozen_bn),
        data,
        rate=RATE,
    )
    close(run.state, model.state_dict())


@pytest.mark.parametrize(
    "strategy",
    [
        *(
            "fedprox",
            "scaffold",
            "bn-scaffold",
            "fedavgm",
            "fedadam",
            "silobn",
            "staticbn",
            "fixbn",
            "fbn",
            "hbn",
        ),
        *("fedtan2", "fedbs"),
    ],
)
def test_frozen_entries_keep_their_bits(run_step: Any, strategy: str) -> None:
    """Momentum, weight decay, clipping, a server step where there is one; float32."""
    model = net("eval").float()
    data = client_data((5,), SIZES, dtype=torch.float32)
    local = {} if strategy.endswith("scaffold") else {"sgd_momentum": 0.9}
    settings: dict[str, Any] = {"agc": 0.1, "fraction_evaluate": 0.0}
    settings |= {} if strategy.endswith("scaffold") else {"momentum_scope": "global"}
    method = STRATEGIES[strategy](**settings)
    run = run_step(
        method, copy.deepcopy(model), data, rounds=3, weight_decay=0.1, **local
    )
    start = model.state_dict()
    for name in run.state:
        same = run.state[name].tobytes() == start[name].numpy().tobytes()
        # BatchNorm that trains stays with the clients under some strategies
        if not name.startswith("4."):
            assert same == (not name.startswith(TRAINED)), name
