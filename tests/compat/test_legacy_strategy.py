"""``to_legacy``: the same bits in Flower's legacy loop as by messages, refused strategies, and reported failures."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import LegacyContext, Server, ServerApp, ServerAppComponents, ServerConfig, SimpleClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import FedAvg as FlowersFedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.supercore.task_identity import TaskIdentity
from torch import nn

from fedbn_flwr import to_legacy
from fedbn_flwr.batchnorm.averaging import Array
from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.errors import ClientPartError, ConfigError, NothingTrainedError
from fedbn_flwr.messages.records import to_record, to_state
from fedbn_flwr.mods import bn_rules, local_bn
from fedbn_flwr.server.methods import Methods
from fedbn_flwr.strategies import STRATEGIES, FedAvg, FedAvgM, FedBN, FedBS, FedProx, FixBN, Method, Scaffold, Strategy
from fedbn_flwr.training import LearningRate, LocalTraining
from tests.support.federation import LegacyOutcome, torch_clients
from tests.support.points import Points

SIZES = (6, 14, 10)


def fit_and_evaluate_are_enough(methods: Methods) -> bool:
    return methods.whole.exchanges is None and not methods.reestimates


SUPPORTED: dict[str, Callable[[], Strategy]] = {
    **{name: method for name, method in STRATEGIES.items() if fit_and_evaluate_are_enough(method().methods)},
    "sampled": lambda: FedAvg(fraction_train=0.5, fraction_evaluate=0.5, min_train_nodes=1, min_evaluate_nodes=1),
    "pooled": lambda: FedAvg(variance="pooled"),
    "fedprox": lambda: FedProx(proximal_mu=0.3),
    "scaffold": lambda: Scaffold(server_learning_rate=0.7),
    "fedavgm": lambda: FedAvgM(server_momentum=0.9),
    "fixbn": lambda: FixBN(freeze_at=0.5),
    "fedbs": lambda: FedBS(fedbs_eps=10.0, fedbs_rounds=2),
    "global momentum": lambda: FedBN(momentum_scope="global"),
    "local momentum": lambda: FedAvg(momentum_scope="local"),
}
ROUNDS = 3


@pytest.fixture
def run_legacy(run_legacy_loop) -> Callable[..., LegacyOutcome]:
    """``run_legacy(strategy, model, client_fn, num_nodes)``: Flower's ServerApp and ClientApp, both of the old kind."""

    def run(strategy: Strategy, model: Callable[[], nn.Module], client_fn: Any, num_nodes: int, **options: Any) -> Any:
        app = ClientApp(client_fn=client_fn)
        return run_legacy_loop(strategy, app, model().state_dict(), num_nodes, ROUNDS, **options)

    return run


def torch_client_fn(model: Callable[[], nn.Module], datasets: list, **settings: Any) -> Any:
    training = LocalTraining(learning_rate=LearningRate(0.1), **{"batch_size": 4, **settings})
    client_fn = torch_clients(model, datasets, training)
    return lambda context: client_fn(context).to_client()


@pytest.mark.parametrize("name", SUPPORTED)
def test_the_legacy_loop_gives_the_same_bits_as_the_message_api(
    name: str, federate, run_legacy, datasets, mlp, wsconv_net
) -> None:
    settings = {"sgd_momentum": 0.9} if "momentum" in name else {}
    model = wsconv_net if name == "fedwon" else mlp
    want = federate(SUPPORTED[name](), model, datasets, rounds=ROUNDS, **settings)
    got = run_legacy(SUPPORTED[name](), model, torch_client_fn(model, datasets, **settings), len(datasets))
    assert len(got.history) == ROUNDS + 1
    for arrays, state in zip(got.history, want.history, strict=True):
        for array, (entry, value) in zip(arrays, state.items(), strict=True):
            assert (array.dtype, array.shape) == (value.dtype, value.shape), entry
            assert array.tobytes() == value.tobytes(), entry
    reports, expected = got.strategy.reports, want.strategy.reports
    assert all(not report.rejected for report in reports)
    for mine, theirs in zip(reports, expected, strict=True):
        assert (mine.phase, mine.participants) == (theirs.phase, theirs.participants)
        assert (mine.train, mine.evaluate) == (theirs.train, theirs.evaluate), "the same bytes"
        assert (mine.metrics, mine.clients, mine.evaluations) == (theirs.metrics, theirs.clients, theirs.evaluations)
    for (loss, metrics), record in zip(got.evaluations, want.result.evaluate_metrics_clientapp.values(), strict=True):
        assert {"loss": loss, **metrics} == dict(record)


@pytest.mark.parametrize("other_object", [False, True])
@pytest.mark.parametrize("make", [FedBN, lambda: FedBS(fedbs_eps=10.0, fedbs_rounds=2)], ids=["fedbn", "fedbs"])
def test_a_second_fit_on_the_same_nodes_begins_anew(make: Any, other_object: bool, datasets, mlp) -> None:
    app = ClientApp(client_fn=torch_client_fn(mlp, datasets))
    history: list[list[Array]] = []
    noted = lambda _, arrays, config: history.append(arrays)  # type: ignore[func-returns-value] # noqa: E731

    def new() -> Any:
        return to_legacy(make(), to_record(mlp().state_dict()), num_rounds=2, evaluate_fn=noted)

    legacy = new()
    with InProcessGrid(app, len(datasets)) as grid:
        for _ in range(2):
            legacy = new() if other_object else legacy
            components = ServerAppComponents(strategy=legacy, config=ServerConfig(num_rounds=2))
            ServerApp(server_fn=lambda _, components=components: components)(grid, Context(0, 0, {}, RecordDict(), {}))
            assert [report.server_round for report in legacy.strategy.reports] == [1, 2]
    half = len(history) // 2
    for first, second in zip(history[:half], history[half:], strict=True):
        assert all(a.tobytes() == b.tobytes() for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("call", ["get_properties", "fit"])
def test_a_client_that_leaves_between_two_calls_is_reported(
    call: str, run_legacy_loop, datasets, mlp, monkeypatch
) -> None:
    """The run ended with a KeyError."""
    managers: list[SimpleClientManager] = []
    init = SimpleClientManager.__init__
    monkeypatch.setattr(SimpleClientManager, "__init__", lambda self: managers.append(self) or init(self))
    train = Strategy.configure_train

    def leave() -> None:
        (clients,) = (manager.clients for manager in managers)
        clients.pop(next(iter(clients)), None) if len(clients) == len(datasets) else None

    class Leaving(Stock):
        def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
            if call == "get_properties":
                leave()
            return {}

    class Mine(FedAvg):
        def configure_train(self, *args: Any) -> Any:
            made = train(self, *args)
            if call == "fit":
                leave()
            return made

    app = ClientApp(client_fn=stock_fn(mlp, datasets, Leaving))
    strategy = Mine(min_train_nodes=1, min_evaluate_nodes=1, min_available_nodes=1)
    run_legacy_loop(strategy, app, mlp().state_dict(), len(datasets), 1)
    (report,) = strategy.reports
    assert len(report.participants) == len(datasets) - 1
    assert ["no reply" in why for why in report.rejected.values()] == [True]


def test_a_round_that_trains_nobody_keeps_the_previous_model(run_legacy, datasets, mlp) -> None:
    class Empty(Stock):
        def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
            return {"num-examples": 0}

    run = run_legacy(FedAvg(), mlp, lambda context: Empty(mlp(), datasets[0]).to_client(), len(datasets))
    assert [report.kept_previous for report in run.strategy.reports] == [True] * ROUNDS


@pytest.mark.parametrize("given", ["parameters", "arrays", "state", "model", "class", "flowers"])
def test_an_argument_of_another_type_is_named(given: str, mlp) -> None:
    arrays = list(to_state(mlp().state_dict()).values())
    others = {
        "parameters": ndarrays_to_parameters(arrays),
        "arrays": arrays,
        "state": mlp().state_dict(),
        "model": mlp(),
    }
    if given in others:
        with pytest.raises(ConfigError, match=r"^the arrays are a \w+: pass ArrayRecord\(model\.state_dict\(\)\)$"):
            to_legacy(FedBN(), others[given])
        return
    strategy: Any = FedBN if given == "class" else FlowersFedAvg()
    with pytest.raises(ConfigError, match=r"is none: write to_legacy\(FedBN\(\), arrays\), with the brackets$"):
        to_legacy(strategy, to_record(mlp().state_dict()))


def test_every_strategy_is_supported_or_refused(mlp, wsconv_net) -> None:
    refused = {}
    for name, strategy in STRATEGIES.items():
        try:
            to_legacy(strategy(), to_record((wsconv_net if name == "fedwon" else mlp)().state_dict()), num_rounds=300)
        except ConfigError as error:
            refused[name] = str(error)
    assert refused.keys() == {"fedtan", "fedtan2", "feddna", "staticbn"}
    for name in ("fedtan", "fedtan2", "feddna"):
        assert f"strategy '{name}' exchanges statistics with its clients inside a local step, and" in refused[name]
        assert "num-examples and batch-size" in refused[name]
    assert "strategy 'staticbn' re-estimates BN statistics from its clients before tests, and" in refused["staticbn"]
    assert "TorchClient" in refused["staticbn"]
    assert "answer_statistics" in refused["staticbn"]
    supported = {make().name for make in SUPPORTED.values()}
    assert supported == STRATEGIES.keys() - refused.keys()
    with pytest.raises(ConfigError, match="'fedbs' re-estimates BN statistics"):
        to_legacy(FedBS(recalibrate=True), to_record(mlp().state_dict()))
    with pytest.raises(ConfigError, match="'fedavg' re-estimates BN statistics"):
        to_legacy(FedAvg(eval_on="global,recalibrated"), to_record(mlp().state_dict()))


def test_a_strategy_that_sends_messages_of_its_own_is_refused(mlp, datasets, run_legacy) -> None:
    """A strategy that asks the clients for more than a round's fit and evaluate, and did not say so beforehand."""

    class ChattyMethod(Method):
        name = "chatty"

    class Chatty(Strategy):
        method = ChattyMethod

        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
            messages = list(super().configure_train(server_round, arrays, config, grid))
            return grid.send_and_receive(messages)

    class Pushy(Chatty):
        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
            return grid.push_messages(list(Strategy.configure_train(self, server_round, arrays, config, grid)))

    for strategy in (Chatty(), Pushy()):
        with pytest.raises(ConfigError, match="'chatty' sends messages of its own between the rounds' fit and evaluat"):
            run_legacy(strategy, mlp, torch_client_fn(mlp, datasets), len(datasets))


def test_a_fraction_of_the_rounds_needs_their_number(mlp) -> None:
    arrays = to_record(mlp().state_dict())
    with pytest.raises(ConfigError, match="pass num_rounds="):
        to_legacy(FixBN(freeze_at=0.5), arrays)
    assert to_legacy(FixBN(freeze_at="auto"), arrays).strategy.frozen_after is None  # type: ignore[attr-defined]
    assert to_legacy(FixBN(freeze_at=3), arrays).strategy.frozen_after == 3  # type: ignore[attr-defined]
    assert to_legacy(FixBN(freeze_at=0.5), arrays, num_rounds=9).strategy.frozen_after == 4  # type: ignore[attr-defined]


class Stock(NumPyClient):
    """A client that knows nothing of this package: whole state in, whole state out, no properties."""

    def __init__(self, model: nn.Module, data: Any) -> None:
        self.model, self.data = model, data

    def _set(self, parameters: list[Array]) -> None:
        names = list(self.model.state_dict())
        self.model.load_state_dict({n: torch.tensor(p) for n, p in zip(names, parameters, strict=True)})

    def _loss(self) -> Any:
        return nn.functional.cross_entropy(self.model(self.data.inputs), self.data.targets)

    def fit(self, parameters: list[Array], config: dict[str, Any]) -> Any:
        self._set(parameters)
        self.model.train()
        optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self._loss().backward()
        optimizer.step()
        return (
            list(to_state(self.model.state_dict()).values()),
            len(self.data),
            {"heard": config.get("told", 0)},
        )

    def evaluate(self, parameters: list[Array], config: dict[str, Any]) -> Any:
        self._set(parameters)
        return float(self._loss().detach()), len(self.data), {"told": config.get("told", 0)}


def stock_fn(model: Callable[[], nn.Module], datasets: list, kind: type[Stock] = Stock) -> Any:
    """Each client with its data."""
    return lambda context: kind(model(), datasets[int(context.node_config["partition-id"])]).to_client()


def test_a_stock_client_gets_safe_averaging(run_legacy, datasets, mlp) -> None:
    """Its results averaged by hand; counters are integers, and the project's own config reaches its clients."""
    run = run_legacy(
        FedAvg(),
        mlp,
        stock_fn(mlp, datasets),
        len(datasets),
        on_fit_config_fn=lambda r: {"told": 10 * r},
        on_evaluate_config_fn=lambda r: {"told": r},
    )
    state = to_state(mlp().state_dict())
    for after in run.history[1:]:
        results = [Stock(mlp(), data).fit(list(state.values()), {})[0] for data in datasets]
        total = sum(map(len, datasets))
        for j, name in enumerate(state):
            if name.endswith("num_batches_tracked"):
                assert after[j].dtype == np.int64
                state[name] = after[j]
                continue
            want = sum(len(d) / total * r[j] for d, r in zip(datasets, results, strict=True))
            np.testing.assert_allclose(after[j], want, rtol=1e-12, atol=1e-14, err_msg=name)
            state[name] = after[j]
    assert int(run.history[-1][list(state).index("1.num_batches_tracked")]) == ROUNDS
    assert [metrics["told"] for _, metrics in run.evaluations] == [1, 2, 3]
    assert [report.metrics["heard"] for report in run.strategy.reports] == [10, 20, 30]


def test_the_projects_own_aggregation_of_metrics_is_called(run_legacy, datasets, mlp) -> None:
    """As Flower's legacy strategies take it; text among the metrics arrives, a refused result does not."""

    class Worded(Stock):
        def fit(self, parameters: list[Array], config: dict[str, Any]) -> Any:
            arrays, number, _ = super().fit(parameters, config)
            return (arrays[:-1] if number == 14 else arrays), number, {"site": f"site {number}"}

        def evaluate(self, parameters: list[Array], config: dict[str, Any]) -> Any:
            loss, number, _ = super().evaluate(parameters, config)
            return loss, number, {"site": f"test {number}"}

    def words(metrics: list[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
        seen.append(sorted((number, said["site"]) for number, said in metrics))
        return {"sites": len(metrics)}

    seen: list[Any] = []
    run = run_legacy(
        FedAvg(),
        mlp,
        stock_fn(mlp, datasets, Worded),
        len(datasets),
        fit_metrics_aggregation_fn=words,
        evaluate_metrics_aggregation_fn=words,
    )
    fitted, tested = [(6, "site 6"), (10, "site 10")], [(6, "test 6"), (10, "test 10"), (14, "test 14")]
    assert seen == [fitted, tested] * ROUNDS
    assert [metrics for _, metrics in run.evaluations] == [{"sites": 3}] * ROUNDS
    seen.clear()
    with pytest.raises(NothingTrainedError):
        run_legacy(
            FedAvg(min_replies=3, fraction_evaluate=0.0),
            mlp,
            stock_fn(mlp, datasets, Worded),
            len(datasets),
            fit_metrics_aggregation_fn=words,
        )
    assert seen == [], "no result was used"


def careful() -> Any:
    """Return the class of docs/flower-projects.md."""
    page = (Path(__file__).parents[2] / "docs/flower-projects.md").read_text()
    (program,) = (text for text in re.findall(r"^```python\n((?:.*\n)*?)```$", page, re.M) if "LegacyStrategy" in text)
    names: dict[str, Any] = {}
    exec(program, names)
    return names["Careful"]


def test_a_strategy_of_the_projects_own_gets_another_base(run_legacy_loop, datasets, mlp) -> None:
    """Its rates are the clients', and a result that it leaves out is in no average and named as left out."""
    rounds, worst = 6, len(datasets[1])

    class Rated(Stock):
        def fit(self, parameters: list[Array], config: dict[str, Any]) -> Any:
            self._set(parameters)
            self.model.train()
            self._loss().backward()
            torch.optim.SGD(self.model.parameters(), config["lr"]).step()
            loss = 1e3 if (config["server-round"], len(self.data)) == (2, worst) else 1.0
            return list(to_state(self.model.state_dict()).values()), len(self.data), {"train-loss": loss}

    inner, history = FedAvg(), []
    legacy = careful()(
        inner,
        to_record(mlp().state_dict()),
        num_rounds=rounds,
        evaluate_fn=lambda number, arrays, config: history.append(arrays),
    )
    run = run_legacy_loop(legacy, ClientApp(stock_fn(mlp, datasets, Rated)), mlp().state_dict(), len(datasets), rounds)
    state = to_state(mlp().state_dict())
    floats = [name for name in state if not name.endswith("num_batches_tracked")]
    for number, after in enumerate(history[1:], 1):
        config = {"lr": 0.1 if number < 5 else 0.05, "server-round": number}
        used = [data for data in datasets if (number, len(data)) != (2, worst)]
        results = [Rated(mlp(), data).fit(list(state.values()), config)[0] for data in used]
        got = dict(zip(state, after, strict=True))
        total = sum(map(len, used))
        for name, *own in zip(state, *results, strict=True):
            if name in floats:
                want = sum(len(data) / total * r for data, r in zip(used, own, strict=True))
                np.testing.assert_allclose(got[name], want, rtol=1e-12, atol=1e-14, err_msg=name)
        state = got
    assert len(history) == rounds + 1
    assert [list(report.rejected) for report in inner.reports] == [
        [run.grid.get_node_ids()[1]] if number == 2 else [] for number in range(1, rounds + 1)
    ]
    (why,) = inner.reports[1].rejected.values()
    assert "left out" in why


def test_a_stock_client_under_fedbn_is_refused_by_name_not_run_as_fedavg(run_legacy, datasets, mlp) -> None:
    with pytest.raises(
        ClientPartError, match=r"5 entries that stay with the client under strategy 'fedbn' \('1.weight'"
    ):
        run_legacy(FedBN(), mlp, stock_fn(mlp, datasets), len(datasets))


def test_a_failure_is_reported_with_its_client_and_message(run_legacy, datasets, mlp) -> None:
    """The legacy loop passes only an exception; the report still names its client, and the round continues."""

    class Fails(Stock):
        def fit(self, parameters: list[Array], config: dict[str, Any]) -> Any:
            if len(self.data) == 14:
                raise RuntimeError("out of cheese")
            return super().fit(parameters, config)

        def evaluate(self, parameters: list[Array], config: dict[str, Any]) -> Any:
            if len(self.data) == 6:
                raise RuntimeError("no test data today")
            return super().evaluate(parameters, config)

        def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
            return {"partition-id": {6: 0, 14: 1, 10: 2}[len(self.data)]}

    run = run_legacy(FedAvg(), mlp, stock_fn(mlp, datasets, Fails), len(datasets))
    nodes = run.grid.get_node_ids()
    for report in run.strategy.reports:
        assert report.participants == [0, 2]
        assert report.rejected.keys() == {nodes[0], nodes[1]}
        assert report.rejected[nodes[1]].startswith(f"node {nodes[1]} (partition 1): error 2: ")
        assert "out of cheese" in report.rejected[nodes[1]]
        assert "no test data today" in report.rejected[nodes[0]]


def test_a_result_that_cannot_be_read_is_refused(run_legacy, datasets, mlp) -> None:
    class Short(Stock):
        def fit(self, parameters: list[Array], config: dict[str, Any]) -> Any:
            arrays, number, metrics = super().fit(parameters, config)
            return (arrays[:-1] if len(self.data) == 14 else arrays), number, metrics

    run = run_legacy(FedAvg(), mlp, stock_fn(mlp, datasets, Short), len(datasets))
    for report in run.strategy.reports:
        (why,) = report.rejected.values()
        assert "fit returned 8 arrays for 9 names" in why
        assert len(report.participants) == 2


# --- Flower's workflows -----------------------------------------------------------------------------------------------


class Single(Stock):
    """``Stock`` in float32, with the client hooks around its training; the partition is known."""

    def __init__(self, model: nn.Module, data: Any, context: Context) -> None:
        super().__init__(model.float(), Points(data.inputs.float(), data.targets))
        self.context = context

    def fit(self, parameters: list[Array], config: dict[str, Any]) -> Any:
        self._set(parameters)
        with bn_rules(self.model, config, self.context) as rules:
            self.model.train()
            optimizer = rules.wrap(torch.optim.SGD(self.model.parameters(), 0.1))
            self._loss().backward()
            optimizer.step()
        arrays = list(to_state(self.model.state_dict()).values())
        return arrays, len(self.data), {**rules.metrics, "train-loss": 1.0}

    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        return {"partition-id": int(self.context.node_config["partition-id"])}


@dataclass
class Workflow:
    """A finished run of a workflow: the global state before round 1 and after each, and the strategy."""

    history: list[dict[str, Array]]
    strategy: Strategy


RunWorkflow = Callable[..., Workflow]


@pytest.fixture
def run_workflow(datasets, mlp) -> RunWorkflow:
    """``run_workflow(strategy, secure, client=Single, mods=())``: two rounds under ``DefaultWorkflow``.

    With ``secure`` its fit is ``SecAggPlusWorkflow``. ``wrap`` changes the model, ``change`` its initial state.
    """

    def run(
        strategy: Strategy,
        secure: bool,
        client: Any = Single,
        mods: Sequence[Any] = (),
        wrap: Callable[[nn.Module], nn.Module] = nn.Module.float,
        change: Callable[[dict[str, Any]], Any] = dict,
        **options: Any,
    ) -> Workflow:
        def client_fn(context: Context) -> Any:
            return client(wrap(mlp()), datasets[int(context.node_config["partition-id"])], context).to_client()

        app = ClientApp(client_fn, mods=[*([secaggplus_mod] if secure else []), *mods])
        start, history = wrap(mlp()).float().state_dict(), []
        change(start)
        options = {"num_shares": 3, "reconstruction_threshold": 2, "max_weight": 40.0, **options}
        workflow = DefaultWorkflow(SecAggPlusWorkflow(timeout=20, **options) if secure else None)
        noted = lambda _, arrays, config: history.append(dict(zip(start, arrays, strict=True)))  # noqa: E731
        legacy = to_legacy(strategy, to_record(start), num_rounds=2, evaluate_fn=noted, timeout=60)
        with InProcessGrid(app, len(datasets)) as grid:
            context = Context(grid.run.run_id, 0, {}, RecordDict(), {})
            workflow(grid, LegacyContext(context, ServerConfig(num_rounds=2), legacy))
        return Workflow(history, strategy)

    return run


WORKFLOW_METHODS: dict[str, tuple[Callable[[], Strategy], tuple[Any, ...]]] = {
    "fedavg": (FedAvg, ()),
    "fedbn": (FedBN, (local_bn,)),
    "fedprox": (FedProx, (local_bn,)),
    "fedavgm": (FedAvgM, ()),
}


@pytest.mark.parametrize("name", WORKFLOW_METHODS)
def test_both_workflows_run(run_workflow, run_legacy_loop, datasets, mlp, name: str, same_bits) -> None:
    """The default one gives the bits of the legacy loop; the sum of masked vectors is quantised."""
    make, mods = WORKFLOW_METHODS[name]
    plain, secure = (run_workflow(make(), secure, mods=mods) for secure in (False, True))

    def client_fn(context: Context) -> Any:
        return Single(mlp(), datasets[int(context.node_config["partition-id"])], context).to_client()

    start = mlp().float().state_dict()
    want = run_legacy_loop(make(), ClientApp(client_fn, mods=list(mods)), start, len(datasets), rounds=2)
    assert len(plain.history) == len(secure.history) == len(want.history) == 3
    for state, arrays in zip(plain.history, want.history, strict=True):
        same_bits(state, dict(zip(start, arrays, strict=True)))
    for run in (plain, secure):
        assert [(r.participants, r.rejected) for r in run.strategy.reports] == [([0, 1, 2], {})] * 2
    for entry, exact in plain.history[-1].items():
        if entry.endswith("num_batches_tracked"):
            continue  # secure aggregation cannot carry it
        masked = secure.history[-1][entry]
        assert (masked.dtype, masked.shape) == (exact.dtype, exact.shape), entry
        np.testing.assert_allclose(masked, exact, atol=1e-3, err_msg=entry)
    assert not np.array_equal(plain.history[-1]["3.weight"], plain.history[0]["3.weight"]), "it was trained"


@pytest.mark.parametrize("secure", [False, True])
def test_a_failure_under_a_workflow_is_reported_with_its_client_and_text(run_workflow, secure: bool, datasets) -> None:
    """A workflow passes an error without its client; the one client that is missing has it."""

    class Fails(Single):
        def fit(self, parameters: list[Array], config: dict[str, Any]) -> Any:
            if len(self.data) == 14:
                raise RuntimeError("out of cheese")
            return super().fit(parameters, config)

    for report in run_workflow(FedAvg(), secure, Fails).strategy.reports:
        assert report.participants == [0, 2]
        (why,) = report.rejected.values()
        assert "(partition 1): error 2: " in why
        assert "out of cheese" in why


def test_a_halted_secure_aggregation_is_reported(run_workflow) -> None:
    """It never calls aggregate_fit; the round keeps the previous model, and the report says so."""

    class Fails(Single):
        def fit(self, parameters: list[Array], config: dict[str, Any]) -> Any:
            raise RuntimeError("out of cheese")

    strategy = FedAvg()
    with pytest.raises(NothingTrainedError):
        run_workflow(strategy, True, Fails)
    assert [report.kept_previous for report in strategy.reports] == [True, True]
    assert [len(report.rejected) for report in strategy.reports] == [3, 3]


class MedianMethod(Method):
    """A user's method that says nothing of secure sums."""

    name = "median"

    def aggregate(self, state: None, facts: Any, replies: Any, model: dict[str, Any]) -> tuple[dict[str, Any], None]:
        return {**model}, state


class Median(Strategy):
    method = MedianMethod


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (FedBS, "strategy 'fedbs' needs the arrays of each client"),
        (Scaffold, "strategy 'scaffold' needs the arrays of each client"),
        (lambda: FixBN(freeze_at=1), "strategy 'fixbn' needs the arrays of each client"),
        (lambda: FedAvg(variance="pooled"), "variance=pooled needs the arrays of each client"),
        (lambda: Median(), "strategy 'median' needs the arrays of each client"),
    ],
)
def test_what_a_secure_sum_hides_is_refused_by_name(run_workflow, make: Callable[[], Strategy], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        run_workflow(make(), True, mods=(local_bn,))
    run_workflow(make(), False, mods=(local_bn,))


def test_counters_stay_as_sent_under_secure_aggregation(run_workflow, caplog) -> None:
    """Flower's workflow returns wrong values for arrays without a dimension."""

    def counted(start: dict[str, Any]) -> None:
        start["1.num_batches_tracked"] += 1000

    with caplog.at_level(logging.WARNING, logger="flwr"):
        run = run_workflow(FedAvg(), True, change=counted)
    assert [int(state["1.num_batches_tracked"]) for state in run.history] == [1000] * 3
    assert caplog.text.count("BN's counters ('1.num_batches_tracked', ...) stay as they were sent") == 1


def test_another_entry_without_a_dimension_is_refused_under_secure_aggregation(run_workflow) -> None:
    class Scaled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.scale = inner, nn.Parameter(torch.tensor(1.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scale * self.inner(x)  # type: ignore[no-any-return]

    with pytest.raises(ConfigError, match=r"entry 'scale' \(1 such\) has no dimension, and .* Give it the shape"):
        run_workflow(FedAvg(), True, wrap=Scaled)


def test_a_variance_of_zero_outlives_quantisation(run_workflow) -> None:
    """Quantised, zero may come back below zero, which no variance is."""

    class Dead(Single):
        def fit(self, parameters: list[Array], config: dict[str, Any]) -> Any:
            arrays, number, metrics = super().fit(parameters, config)
            arrays[list(self.model.state_dict()).index("1.running_var")][:] = 0.0
            return arrays, number, metrics

    run = run_workflow(FedAvg(), True, Dead, clipping_range=8.1)
    assert [report.rejected for report in run.strategy.reports] == [{}, {}]
    assert (run.history[-1]["1.running_var"] >= 0).all()


# --- start_simulation -------------------------------------------------------------------------------------------------


class Direct(ClientProxy):
    """A client in this process; as ``start_simulation``'s, it is called in a process without a Flower run."""

    def __init__(self, number: int, client: Any) -> None:
        super().__init__(str(number))
        self.client = client

    def get_properties(self, ins, timeout, group_id):
        return self.client.get_properties(ins)

    def get_parameters(self, ins, timeout, group_id):
        return self.client.get_parameters(ins)

    def fit(self, ins, timeout, group_id):
        return self.client.fit(ins)

    def evaluate(self, ins, timeout, group_id):
        return self.client.evaluate(ins)

    def reconnect(self, ins, timeout, group_id):
        raise NotImplementedError


@pytest.mark.parametrize("make", [FedAvg, FedBN])
def test_it_runs_where_flower_has_set_no_identity(make: Any, run_legacy, datasets, mlp, monkeypatch) -> None:
    client_fn = torch_client_fn(mlp, datasets)
    want = run_legacy(make(), mlp, client_fn, len(datasets))
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, None)
    legacy = to_legacy(make(), to_record(mlp().state_dict()), num_rounds=ROUNDS, timeout=5)
    manager = SimpleClientManager()
    for i in range(len(datasets)):
        context = Context(0, i, {"partition-id": i, "num-partitions": len(datasets)}, RecordDict(), {})
        manager.register(Direct(i + 1, client_fn(context)))
    server = Server(client_manager=manager, strategy=legacy)
    server.fit(ROUNDS, None)
    got = parameters_to_ndarrays(server.parameters)
    assert [array.tobytes() for array in got] == [array.tobytes() for array in want.history[-1]]
