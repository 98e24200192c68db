"""A server that has only names agrees with the clients' types, or is warned."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torchvision.ops import FrozenBatchNorm2d

from fedbn_flwr import split_state
from fedbn_flwr.client import client_app
from fedbn_flwr.errors import ConfigError, NormLayerError
from fedbn_flwr.messages.protocol import TrainConfig
from fedbn_flwr.mods import bn_rules
from fedbn_flwr.strategies import HBN, FedAvg, FedBN, FixBN, Scaffold, SiloBN, StaticBN
from fedbn_flwr.training import LocalTraining
from tests.support.federation import torch_clients
from tests.support.seeds import with_seed

TRACKS = {"affine": True, "track_running_stats": True}
KINDS = {
    "batch": nn.BatchNorm2d,
    "frozen": FrozenBatchNorm2d,
    "instance": partial(nn.InstanceNorm2d, **TRACKS),
    "untracked": partial(nn.BatchNorm2d, track_running_stats=False),
}


class Around(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@with_seed()
def net(kinds: str) -> nn.Module:
    layers = [nn.Conv2d(1, 2, 2)]
    for kind in kinds.split():
        layers.append(layers[-1] if kind == "again" else KINDS[kind](2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 3)).double()


class Renorm(nn.BatchNorm1d):
    """A norm with a second statistic of another name."""

    def __init__(self) -> None:
        super().__init__(2)
        self.register_buffer("running_std", torch.ones(2))


class Gamma(nn.Module):
    """A norm with torch's statistics, and other names of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(2))
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, torch.zeros(2))


class Hetero(nn.Module):
    """A norm with torch's names, as torch_geometric's HeteroBatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2))
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, torch.zeros(3, 2))


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("kind", [Renorm, Gamma, Hetero])
@pytest.mark.parametrize("method", [FedBN, SiloBN, FixBN, FedAvg])
def test_a_norm_of_a_library_stays_as_a_whole_or_is_named(
    method, kind, given: bool, beside: bool, caplog
) -> None:
    """With the advice, the layer is personal, or the warning names it."""
    model = nn.Sequential(kind(), nn.Linear(2, 2))
    if beside:
        model.append(nn.BatchNorm1d(2))
    parts = split_state(model) if given else None
    is_batchnorm = isinstance(model[0], nn.BatchNorm1d)

    def start(**settings: str) -> tuple[str, bool]:
        strategy = method(**settings, parts=parts and split_state(model, **settings))
        caplog.clear()
        try:
            strategy.prepare(ArrayRecord(model.state_dict()), 3, 1.0)
        except NormLayerError as error:
            return error.code, True
        local = strategy.parts.select(strategy.methods.local)
        own = [name in local for name in model.state_dict() if "0.run" in name]
        return "told" if "layer '0'" in caplog.text else "", len({*own}) == 1

    code, whole = start()
    assert whole or (is_batchnorm and given)  # a subclass has entries of its own
    by_names = not given and kind is Hetero
    if method is FedAvg or (is_batchnorm and given) or by_names:
        assert not code
    else:
        assert code == ("told" if given and beside else "other-norm")
    if code and method is not FixBN:
        assert start(personal="0") == ("", True)


METHODS = (FedBN, SiloBN, FixBN, StaticBN, HBN, FedAvg)
FOUND = {
    "batch": (None, None),
    "frozen batch": (None, None),
    "frozen": (NormLayerError, NormLayerError),
    "instance": (ConfigError, NormLayerError),
    "instance batch": (ConfigError, None),
    "untracked batch": (ConfigError, None),
    "instance untracked batch": (ConfigError, None),
}
"""What a server finds by names and by types in a model with these layers."""
PAIRS = [
    pytest.param(kinds, method, (i + j) % 2, id=f"{kinds}-{method.__name__}")
    for i, kinds in enumerate(FOUND)
    for j, method in enumerate(METHODS)
]
"""Each kind with each method, and each of the two with names and with parts."""


@pytest.mark.parametrize(("kinds", "method", "given"), PAIRS)
def test_names_and_types_agree_or_one_sentence_ends_the_run(
    run_strategy, points, kinds: str, method, given: int
) -> None:
    """FedAvg treats BatchNorm like other layers, so it needs no split."""
    model = partial(net, kinds)
    data = [points(8, i, (1, 3, 3)) for i in range(2)]
    app = client_app(torch_clients(model, data, LocalTraining(learning_rate=0.1)))
    strategy = method(parts=split_state(model()) if given else None)
    expected = None if method is FedAvg else FOUND[kinds][given]
    refused = nullcontext()
    if expected:
        words = (
            r"parts=split_state\(model\)" if expected is ConfigError else "BatchNorm"
        )
        refused = pytest.raises(expected, match=words)
    with refused:
        outcome = run_strategy(strategy, app, model().state_dict(), 2, rounds=2)
        assert [len(one.participants) for one in strategy.reports] == [2, 2]
        assert outcome.error is None
    assert len(strategy.reports) == (2 if not expected else expected is ConfigError)


@pytest.mark.parametrize("method", [Scaffold, partial(FedAvg, momentum_scope="global")])
def test_parameters_of_any_name_have_variates_and_momentum(
    federate, points, same_bits, method
) -> None:
    """The parameters are a scale and a parametrized gamma."""

    def model() -> nn.Module:
        model = net("batch")
        model[0].scale = nn.Parameter(torch.ones(3))
        weight_norm(model[1])
        model.register_forward_hook(lambda model, _, out: out * model[0].scale)
        return model

    data = [points(8, i, (1, 3, 3)) for i in range(2)]
    momentum = 0.0 if method is Scaffold else 0.9
    states = []
    for source in (model(), model().state_dict()):
        strategy = method(parts=split_state(source))
        run = federate(strategy, model, data, rounds=2, sgd_momentum=momentum)
        assert not any(one.rejected for one in strategy.reports)
        states.append(run.state)
    same_bits(*states)


@pytest.mark.parametrize("wrap", [lambda model: model, Around, torch.compile])
@pytest.mark.parametrize(
    "kinds",
    ["batch", "batch batch", "batch again", "instance batch", "instance untracked"],
)
def test_a_loop_of_ones_own_tells_the_server_too(kinds: str, wrap) -> None:
    layers = split_state(net(kinds).state_dict()).layers
    config = TrainConfig(batchnorm=tuple(one.path for one in layers)).write()
    refused = nullcontext()
    if "instance" in kinds:
        refused = pytest.raises(ConfigError, match="parts=")
    with refused, bn_rules(wrap(net(kinds)), config):
        pass
