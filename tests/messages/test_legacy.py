"""A user's NumPyClient with the mod, by messages and in Flower's legacy loop: the same bits as our own client."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.server.strategy import FedAvg as FlowersFedAvg
from torch import nn
from torch.nn import functional as F

from fedbn_flwr.batchnorm.averaging import Array
from fedbn_flwr.client import TorchClient, client_app
from fedbn_flwr.errors import ClientPartError, NothingTrainedError
from fedbn_flwr.messages.records import to_state
from fedbn_flwr.mods import bn_rules, local_bn
from fedbn_flwr.seeds import torch_generator
from fedbn_flwr.strategies import (
    MTFL,
    FedAvg,
    FedBN,
    FedDNA,
    FedProx,
    FedTAN,
    FixBN,
    Scaffold,
    SiloBN,
    Standalone,
    Strategy,
)
from fedbn_flwr.training import LearningRate, LocalTraining

SEED, ROUNDS, SIZES = 7, 3, (6, 8, 10)


class TheirClient(NumPyClient):
    """Whole state in, whole state out; ``ruled`` has the three lines of this package in its loop."""

    def __init__(self, model: nn.Module, data: Any, context: Context, ruled: bool, momentum: float) -> None:
        self.model, self.data, self.context, self.ruled, self.momentum = model, data, context, ruled, momentum

    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        return {"num-examples": len(self.data), "batch-size": 4}

    def fit(self, parameters: list[Array], config: dict[str, Any]) -> Any:
        self._set(parameters)
        self.model.train()
        with bn_rules(self.model, config if self.ruled else {}, self.context) as rules:
            optimizer = rules.wrap(torch.optim.SGD(self.model.parameters(), 0.1, momentum=self.momentum))
            for inputs, targets in self._batches(int(config["server-round"])):
                optimizer.zero_grad()
                with rules.step(len(inputs)):
                    loss = F.cross_entropy(self.model(inputs), targets)
                    loss.backward()
                optimizer.step()
        return list(to_state(self.model.state_dict()).values()), len(self.data), {"score": 0.5, "word": "fine"}

    def evaluate(self, parameters: list[Array], config: dict[str, Any]) -> Any:
        self._set(parameters)
        self.model.eval()
        loss = F.cross_entropy(self.model(self.data.inputs), self.data.targets)
        return float(loss.detach()), len(self.data), {}

    def _set(self, parameters: list[Array]) -> None:
        own = self.model.state_dict()
        self.model.load_state_dict({n: torch.tensor(p) for n, p in zip(own, parameters, strict=True)})

    def _batches(self, server_round: int) -> Iterator[Any]:
        generator = torch_generator(SEED, "batches", server_round, int(self.context.node_config["partition-id"]))
        settings = LocalTraining(learning_rate=LearningRate(0.1), batch_size=4)
        return (self.data.batch(positions) for positions in settings.batches(len(self.data), generator))


@pytest.fixture
def client_fn(mlp, datasets) -> Callable[..., Any]:
    """``client_fn(ruled=True, momentum=0.0, kind=TheirClient)``: a project's function of that name."""

    def make(ruled: bool = True, momentum: float = 0.0, kind: type[TheirClient] = TheirClient) -> Any:
        def function(context: Context) -> Any:
            data = datasets[int(context.node_config["partition-id"])]
            return kind(mlp(), data, context, ruled, momentum).to_client()

        return function

    return make


@pytest.fixture
def by_messages(run_strategy) -> Callable[..., dict[str, Array]]:
    """``by_messages(strategy, app, start, barrier=True)``: run over the Message API; the last state."""

    def run(strategy: Strategy, app: ClientApp, start: nn.Module, barrier: bool = True, **options: Any) -> Any:
        options |= {"rounds": ROUNDS, "barrier": barrier, "grid_options": {"threads": len(SIZES)}}
        outcome = run_strategy(strategy, app, start.state_dict(), len(SIZES), **options)
        return outcome.state

    return run


@pytest.fixture
def by_the_loop(run_legacy_loop) -> Callable[..., dict[str, Array]]:
    """``by_the_loop(strategy, app, start)``: run in Flower's legacy loop; the last state, of our strategies."""

    def run(strategy: Any, app: ClientApp, start: nn.Module, **options: Any) -> dict[str, Array]:
        history = run_legacy_loop(strategy, app, start.state_dict(), len(SIZES), ROUNDS, **options).history
        return dict(zip(start.state_dict(), history[-1], strict=True)) if history else {}

    return run


METHODS: dict[str, tuple[Callable[[], Strategy], dict[str, Any]]] = {
    "fedavg": (FedAvg, {"ruled": False}),
    "fedbn": (FedBN, {"ruled": False}),
    "silobn": (SiloBN, {"ruled": False}),
    "mtfl": (MTFL, {"ruled": False}),
    "standalone": (Standalone, {"ruled": False}),
    "fixbn": (lambda: FixBN(freeze_at=1), {}),
    "fixbn auto": (lambda: FixBN(freeze_at="auto", freeze_window=2, freeze_tau=1e9), {}),
    "fedprox": (lambda: FedProx(proximal_mu=0.3), {}),
    "averaged bn": (lambda: FedBN(eval_on="averaged-bn"), {}),
    "scaffold": (Scaffold, {}),
    "global momentum": (lambda: FedAvg(momentum_scope="global"), {"momentum": 0.9}),
    "local momentum": (lambda: FedBN(momentum_scope="local"), {"momentum": 0.9}),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_numpy_client_with_the_mod_equals_our_client(
    by_messages, by_the_loop, federate, client_fn, datasets, mlp, same_bits, name: str
) -> None:
    make, options = METHODS[name]
    ours = federate(make(), mlp, datasets, sgd_momentum=options.get("momentum", 0.0))
    function, one, other = client_fn(**options), make(), make()
    same_bits(by_messages(one, client_app(function, mods=[local_bn]), mlp()), ours.state)
    same_bits(by_the_loop(other, ClientApp(client_fn=function, mods=[local_bn]), mlp()), ours.history[-1])
    for strategy in (one, other):
        assert strategy.run.kept.hashes == ours.strategy.run.kept.hashes
        assert [report.phase for report in strategy.reports] == [report.phase for report in ours.strategy.reports]
        for report in strategy.reports:
            assert (report.participants, report.rejected) == ([0, 1, 2], {})
            assert report.metrics["score"] == 0.5
            assert "partition-id" not in report.metrics


@pytest.mark.parametrize("barrier", [True, False])
@pytest.mark.parametrize("method", [FedTAN, FedDNA])
def test_a_step_of_a_numpy_client_is_synchronised(
    by_messages, federate, client_fn, datasets, mlp, same_bits, method: Any, barrier: bool
) -> None:
    ours = federate(method(), mlp, datasets, grid_options={"threads": len(SIZES)})
    strategy = method()
    same_bits(by_messages(strategy, client_app(client_fn(), mods=[local_bn]), mlp(), barrier), ours.state)
    assert [report.rejected for report in strategy.reports] == [{}] * ROUNDS


def test_the_mod_does_nothing_under_a_strategy_of_flower(by_the_loop, client_fn, mlp) -> None:
    """Flower's own FedAvg tells no names: the mod does nothing, and nothing is kept."""
    rounds: list[dict[str, Any]] = []

    class Told(TheirClient):
        def fit(self, parameters: list[Array], config: dict[str, Any]) -> Any:
            rounds.append(dict(config))
            return parameters, 1, {}

    by_the_loop(FlowersFedAvg(), ClientApp(client_fn=client_fn(kind=Told), mods=[local_bn]), mlp())
    assert rounds == [{}] * (ROUNDS * len(SIZES))


def test_a_client_without_properties_is_known_by_its_partition(by_the_loop, client_fn, mlp) -> None:
    """Node ids change from run to run: by them a sum of the loop would, too."""

    class Silent(TheirClient):
        get_properties = NumPyClient.get_properties

    class Worded(TheirClient):
        def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
            return {"partition-id": str(self.context.node_config["partition-id"])}

    for kind in (Silent, Worded):
        strategy = FedAvg(fraction_evaluate=0.0)
        by_the_loop(strategy, ClientApp(client_fn=client_fn(kind=kind), mods=[local_bn]), mlp())
        assert [report.participants for report in strategy.reports] == [[0, 1, 2]] * ROUNDS


@pytest.mark.parametrize("make", [FedBN, lambda: Scaffold(fraction_evaluate=0.0)], ids=["fedbn", "scaffold"])
def test_a_layer_may_have_a_slash_in_its_name(by_the_loop, client_fn, datasets, mlp, make: Any) -> None:
    """It was taken for a further record of the message."""

    def slashed() -> nn.Module:
        return nn.Sequential(OrderedDict((f"part/{name}", child) for name, child in mlp().named_children()))

    def function(context: Context) -> Any:
        return TheirClient(
            slashed(), datasets[int(context.node_config["partition-id"])], context, True, 0.0
        ).to_client()

    strategy, plain = make(), make()
    got = by_the_loop(strategy, ClientApp(client_fn=function, mods=[local_bn]), slashed())
    assert [report.rejected for report in strategy.reports] == [{}] * ROUNDS
    want = by_the_loop(plain, ClientApp(client_fn=client_fn(), mods=[local_bn]), mlp())
    assert [got[f"part/{name}"].tobytes() for name in want] == [array.tobytes() for array in want.values()]


def test_a_client_that_returns_less_than_the_model_is_rejected_with_advice(by_the_loop, client_fn, mlp) -> None:
    class Short(TheirClient):
        def fit(self, parameters: list[Array], config: dict[str, Any]) -> Any:
            return parameters[:-1], 1, {}

    strategy = FedBN()
    with pytest.raises(NothingTrainedError):
        by_the_loop(strategy, ClientApp(client_fn=client_fn(kind=Short), mods=[local_bn]), mlp())
    assert all("fit returned 8 arrays; the mod takes out" in r for r in strategy.reports[0].rejected.values())
    assert len(strategy.reports[0].rejected) == len(SIZES)


def test_metrics_of_the_mod_do_not_reach_the_projects_aggregation(by_the_loop, client_fn, mlp) -> None:
    seen: list[dict[str, Any]] = []

    class Counting(TheirClient):
        def fit(self, parameters: list[Array], config: dict[str, Any]) -> Any:
            arrays, count, metrics = super().fit(parameters, config)
            return arrays, count, {**metrics, "partition-id": 7, "done": True}

    by_the_loop(
        FedBN(fraction_evaluate=0.0),
        ClientApp(client_fn=client_fn(kind=Counting), mods=[local_bn]),
        mlp(),
        fit_metrics_aggregation_fn=lambda results: seen.extend(metrics for _, metrics in results) or {},
    )
    assert seen == [{"score": 0.5, "word": "fine", "partition-id": 7, "done": True}] * ROUNDS * len(SIZES)


def test_a_client_may_have_its_entries_in_another_order(by_messages, client_fn, federate, datasets, same_bits) -> None:
    """A client that goes by the names it receives; what SCAFFOLD keeps has the server's order."""

    class Ordered(TheirClient):
        def fit(self, parameters: list[Array], config: dict[str, Any]) -> Any:
            arrays, count, metrics = super().fit(parameters, config)
            own = dict(zip(self.model.state_dict(), arrays, strict=True))
            return [own[name] for name in self.names], count, metrics

        def _set(self, parameters: list[Array]) -> None:
            entries = dict(zip(self.names, parameters, strict=True))
            self.model.load_state_dict({name: torch.tensor(array) for name, array in entries.items()})

        names: tuple[str, ...] = ()

    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("1", nn.Linear(4, 3))
            self.add_module("0", nn.Linear(5, 4))
            self.double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.get_submodule("1")(self.get_submodule("0")(x))  # type: ignore[no-any-return]

    start = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)).double()
    Ordered.names = tuple(start.state_dict())

    def function(context: Context) -> Any:
        data = datasets[int(context.node_config["partition-id"])]
        return Ordered(Backwards(), data, context, True, 0.0).to_client()

    strategy = Scaffold(fraction_evaluate=0.0)
    by_messages(strategy, client_app(function, mods=[local_bn]), start)
    assert [report.rejected for report in strategy.reports] == [{}] * ROUNDS


def test_arrays_without_names_need_none_where_no_hook_does(run_strategy, client_fn, mlp) -> None:
    strategy = FedAvg(fraction_evaluate=0.0)
    numbered = ArrayRecord(list(to_state(mlp().state_dict()).values()))
    run_strategy(strategy, client_app(client_fn(), mods=[local_bn]), numbered, len(SIZES), rounds=1)
    assert strategy.reports[0].participants == [0, 1, 2]


@pytest.mark.parametrize("way", ["messages", "loop"])
def test_client_hooks_work_in_each_round_without_the_mod(by_messages, by_the_loop, client_fn, mlp, way: str) -> None:
    """The client itself returns what the block reports. From round 2 on it was refused as a second block."""

    class Reporting(TheirClient):
        def fit(self, parameters: list[Array], config: dict[str, Any]) -> Any:
            arrays, count, _ = super().fit(parameters, config)
            return arrays, count, {"fedbn-flwr.hooks-applied": "proximal"}

    strategy, function = FedProx(proximal_mu=0.3, fraction_evaluate=0.0), client_fn(kind=Reporting)
    if way == "messages":
        by_messages(strategy, client_app(function), mlp())
    else:
        by_the_loop(strategy, ClientApp(client_fn=function), mlp())
    assert [report.rejected for report in strategy.reports] == [{}] * ROUNDS


def test_a_failing_client_is_reported_with_its_own_message(by_the_loop, mlp) -> None:
    app = ClientApp(client_fn=lambda context: NumPyClient().to_client(), mods=[local_bn])
    strategy = FedBN(fraction_evaluate=0.0)
    with pytest.raises(NothingTrainedError):
        by_the_loop(strategy, app, mlp())
    assert all("does not implement `fit`" in why for why in strategy.reports[0].rejected.values())
    assert len(strategy.reports[0].rejected) == len(SIZES)


def test_an_app_for_the_message_api_is_rejected_with_advice(by_the_loop, client_fn, mlp) -> None:
    strategy = FedAvg(fraction_evaluate=0.0)
    with pytest.raises(NothingTrainedError):
        by_the_loop(strategy, client_app(client_fn(), mods=[local_bn]), mlp())
    assert all("there it is ClientApp(client_fn, mods=[local_bn])" in w for w in strategy.reports[0].rejected.values())


@pytest.mark.parametrize("make", [FedBN, Scaffold])
def test_our_own_client_with_the_mod_is_rejected_with_advice(by_messages, make: Any, mlp, datasets) -> None:
    settings = LocalTraining(learning_rate=LearningRate(0.1), batch_size=4)

    def function(context: Context) -> TorchClient:
        data = datasets[int(context.node_config["partition-id"])]
        return TorchClient(mlp(), data, data, settings, context=context)

    strategy = make(fraction_evaluate=0.0)
    by_messages(strategy, client_app(function, mods=[local_bn]), mlp(), fails=NothingTrainedError)
    why = strategy.reports[0].rejected.values()
    assert all("which keeps and sends its part itself. Leave the mod out" in reason for reason in why)
    assert len(strategy.reports[0].rejected) == len(SIZES)


def test_a_missing_client_hook_ends_the_run(by_the_loop, client_fn, mlp) -> None:
    with pytest.raises(ClientPartError, match="did not apply the client hook 'proximal'"):
        by_the_loop(FedProx(), ClientApp(client_fn=client_fn(ruled=False), mods=[local_bn]), mlp())
