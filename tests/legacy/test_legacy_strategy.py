"""``to_legacy`` refuses strategies and reports failures.

client/test_user_loops.py compares the bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.common.secure_aggregation.quantization import dequantize, quantize
from flwr.server import (
    LegacyContext,
    Server,
    ServerApp,
    ServerAppComponents,
    ServerConfig,
    SimpleClientManager,
)
from flwr.server.strategy import FedAvg as FlowersFedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from torch import nn

from fedbn_flwr import to_client_fn, to_legacy
from fedbn_flwr.batchnorm.array_types import Array
from fedbn_flwr.compat.flower import TaskIdentity
from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.errors import (
    ClientPartError,
    ConfigError,
    DivergedError,
    NothingTrainedError,
)
from fedbn_flwr.legacy.secure_aggregation import is_unchanged, restored
from fedbn_flwr.messages.records import to_record, to_state
from fedbn_flwr.mods import bn_mod, bn_rules
from fedbn_flwr.server.runs.protection import Protection
from fedbn_flwr.strategies import (
    FedAvg,
    FedAvgM,
    FedBN,
    FedBS,
    FedDNA,
    FedProx,
    FedTAN,
    FedTAN2,
    FixBN,
    Method,
    Scaffold,
    StaticBN,
    Strategy,
)
from fedbn_flwr.training import LocalTraining
from tests.support.fast import fast
from tests.support.federation import LegacyOutcome, torch_clients
from tests.support.points import Points
from tests.support.their_client import TheirClient, numpy_clients

SIZES = (6, 14, 10)


ROUNDS = 3


@pytest.fixture
def run_legacy(run_legacy_loop, datasets, mlp) -> Callable[..., LegacyOutcome]:
    """Provide ``run_legacy(strategy, kind=Stock, **options)``.

    It runs Flower's ServerApp and ClientApp of the old kind.
    """

    def run(strategy: Strategy, kind: Any = Stock, **options: Any) -> Any:
        app = ClientApp(numpy_clients(mlp, datasets, kind))
        start = mlp().state_dict()
        return run_legacy_loop(strategy, app, start, len(datasets), ROUNDS, **options)

    return run


def torch_client_fn(model: Callable[[], nn.Module], datasets: list) -> Any:
    training = LocalTraining(learning_rate=0.1, batch_size=4)
    client_fn = torch_clients(model, datasets, training)
    return lambda context: client_fn(context).to_client()


@pytest.mark.parametrize("other_object", [False, True])
@pytest.mark.parametrize(
    "make",
    [FedBN, lambda: FedBS(fedbs_eps=10.0, fedbs_rounds=2)],
    ids=["fedbn", "fedbs"],
)
def test_a_second_fit_on_the_same_nodes_begins_anew(
    make: Any, other_object: bool, datasets, mlp
) -> None:
    app = ClientApp(client_fn=torch_client_fn(mlp, datasets))
    history = []

    def noted(server_round: int, arrays: Any, config: Any) -> None:
        history.append(arrays)

    start = to_record(mlp().state_dict())
    first, other = (
        to_legacy(make(), start, num_rounds=2, evaluate_fn=noted) for _ in range(2)
    )
    with InProcessGrid(app, len(datasets)) as grid:
        for legacy in (first, other if other_object else first):
            components = ServerAppComponents(
                strategy=legacy, config=ServerConfig(num_rounds=2)
            )
            ServerApp(server_fn=lambda _, components=components: components)(
                grid, Context(0, 0, {}, RecordDict(), {})
            )
            assert [report.server_round for report in legacy.strategy.reports] == [1, 2]
    half = len(history) // 2
    bits = [[array.tobytes() for array in arrays] for arrays in history]
    assert bits[:half] == bits[half:]


def protected() -> FedAvg[Any]:
    """Return a strategy with a protection of the replies."""
    strategy = FedAvg()
    strategy.protect(type("Protected", (Protection,), {})())
    return strategy


EXCHANGES, QUERY = "legacy-loop-exchanges", "legacy-loop-re-estimates"
# The legacy loop has no message for an exchange of statistics in a step or for a query
# of statistics.
REFUSED: list[tuple[Any, str, str]] = [
    (FedTAN(), EXCHANGES, "'fedtan'"),
    (FedTAN2(), EXCHANGES, "'fedtan2'"),
    (FedDNA(), EXCHANGES, "'feddna'"),
    (StaticBN(), QUERY, "'staticbn'"),
    (FedBS(recalibrate=True), QUERY, "'fedbs'"),
    (FedAvg(eval_on="global,recalibrated"), QUERY, "'fedavg'"),
    (FedAvg(class_moments=True), QUERY, "'fedavg'"),
    (FixBN(freeze_at=0.5), "config", "pass num_rounds="),
    (FedBN, "config", r"to_legacy\(FedBN\(\), arrays\)"),
    (FlowersFedAvg(), "config", r"to_legacy\(FedBN\(\), arrays\)"),
    (protected(), "config", "differential privacy"),
]


@pytest.mark.parametrize(("strategy", "code", "words"), REFUSED)
def test_what_the_legacy_loop_cannot_do_is_refused(
    mlp, strategy: Any, code: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        to_legacy(strategy, to_record(mlp().state_dict()))
    assert caught.value.code == code


def test_an_argument_of_another_type_is_refused(mlp) -> None:
    for given in ([*to_state(mlp().state_dict()).values()], mlp().state_dict(), mlp()):
        with pytest.raises(ConfigError, match=r"ArrayRecord\(model\.state_dict\(\)\)"):
            to_legacy(FedBN(), given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        to_client_fn(mlp())  # type: ignore[arg-type]


class Stock(TheirClient):
    """A client without this package or properties that takes one full-batch step."""

    get_properties = NumPyClient.get_properties

    def fit(self, parameters: list[Array], config: dict[str, Any]) -> Any:
        self.set(parameters)
        self.step()
        return self.state(), len(self.data), {"heard": config.get("told", 0)}

    def step(self, wrap: Callable[[Any], Any] = lambda optimizer: optimizer) -> None:
        self.model.train()
        optimizer = wrap(torch.optim.SGD(self.model.parameters(), 0.1))
        nn.functional.cross_entropy(
            self.model(self.data.inputs), self.data.targets
        ).backward()
        optimizer.step()

    def evaluate(self, parameters: list[Array], config: dict[str, Any]) -> Any:
        loss, number, _ = super().evaluate(parameters, config)
        return loss, number, {"told": config.get("told", 0)}


def test_the_projects_own_config_reaches_its_clients(run_legacy, mlp, caplog) -> None:
    """Stock clients train under FedAvg without a warning, and counters stay integers."""
    run = run_legacy(
        FedAvg(),
        on_fit_config_fn=lambda r: {"told": 10 * r},
        on_evaluate_config_fn=lambda r: {"told": r},
    )
    counter = run.history[-1][list(mlp().state_dict()).index("1.num_batches_tracked")]
    assert (counter.dtype, int(counter)) == (np.int64, ROUNDS)
    assert [metrics["told"] for _, metrics in run.evaluations] == [1, 2, 3]
    assert [report.metrics["heard"] for report in run.strategy.reports] == [10, 20, 30]
    assert [record.message for record in caplog.records if record.levelno > 20] == []


def test_the_projects_own_aggregation_of_metrics_is_called(run_legacy) -> None:
    """The function has the interface of Flower's legacy strategies.

    It gets the texts among the metrics, and skips a refused result of each half. It is
    not called without a usable result, as in the tests of the last round.
    """

    class Worded(Stock):
        def fit(self, parameters: list[Array], config: dict[str, Any]) -> Any:
            arrays, number, _ = super().fit(parameters, config)
            return (
                (arrays[:-1] if number == 14 else arrays),
                number,
                {"site": f"site {number}"},
            )

        def evaluate(self, parameters: list[Array], config: dict[str, Any]) -> Any:
            loss, number, _ = super().evaluate(parameters, config)
            counted = -1 if number == 10 or len(seen) == 2 * ROUNDS - 1 else number
            return loss, counted, {"site": f"test {number}"}

    def words(metrics: list[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
        seen.append(sorted((number, said["site"]) for number, said in metrics))
        return {"sites": len(metrics)}

    seen = []
    run = run_legacy(
        FedAvg(),
        Worded,
        fit_metrics_aggregation_fn=words,
        evaluate_metrics_aggregation_fn=words,
    )
    fitted = [(6, "site 6"), (10, "site 10")]
    tested = [(6, "test 6"), (14, "test 14")]
    assert seen == ([fitted, tested] * ROUNDS)[:-1]
    tests = [metrics for _, metrics in run.evaluations]
    assert tests == [*[{"sites": 2}] * (ROUNDS - 1), {}]


def test_the_mod_leaves_the_messages_of_other_strategies_alone(
    run_legacy_loop, datasets, mlp
) -> None:
    start, tests = [*to_state(mlp().state_dict()).values()], []
    for mods in ([], [bn_mod]):
        app = ClientApp(numpy_clients(mlp, datasets, Stock), mods=mods)
        strategy = FlowersFedAvg(initial_parameters=ndarrays_to_parameters(start))
        run = run_legacy_loop(strategy, app, {}, len(datasets), ROUNDS)
        tests.append([loss for loss, _ in run.evaluations])
    assert all(tests[0])
    assert tests[1] == pytest.approx(tests[0]), "replies arrive in any order"


@pytest.mark.parametrize("kind", [float, np.atleast_1d, torch.tensor, lambda x: [x]])
@pytest.mark.parametrize("number", [0, 1])
def test_a_loss_before_the_first_round_is_no_divergence(
    run_legacy, number: int, kind: Callable[[float], Any]
) -> None:
    """The model of round 0 is the project's own. Flower takes a loss of any kind."""

    def test(server_round: int, arrays: list[Array], config: Any) -> Any:
        return kind(np.nan if server_round == number else 1.0), {}

    with nullcontext() if number == 0 else pytest.raises(DivergedError):
        run_legacy(FedAvg(), evaluate_fn=test)


def test_a_stock_client_under_fedbn_is_refused_by_name_not_run_as_fedavg(
    run_legacy,
) -> None:
    with pytest.raises(ClientPartError, match=r"strategy 'fedbn' \('1.weight'"):
        run_legacy(FedBN())


class Short(Stock):
    def fit(self, parameters: list[Array], config: dict[str, Any]) -> Any:
        arrays, number, metrics = super().fit(parameters, config)
        return arrays[:-2], number, metrics


@pytest.mark.parametrize(
    ("sends", "named"),
    [("too few arrays", "7 arrays"), ("the Message API", "to_legacy")],
)
def test_a_reply_that_the_mod_cannot_read_is_refused_by_name(
    run_legacy_loop, datasets, mlp, sends: str, named: str
) -> None:
    app = ClientApp(numpy_clients(mlp, datasets, Short), mods=[bn_mod])
    if sends == "the Message API":
        app = ClientApp(mods=[bn_mod])
        app.train()(lambda message, _: Message(RecordDict(), reply_to=message))
    with pytest.raises(NothingTrainedError, match=named):
        run_legacy_loop(FedAvg(), app, mlp().state_dict(), len(datasets), 1)


def fails_to_fit(kind: type[Stock], sizes: Sequence[int]) -> type[Stock]:
    """Return a client kind whose clients with data of these sizes cannot train."""

    class Fails(kind):  # type: ignore[misc, valid-type]
        def fit(self, parameters: list[Array], config: dict[str, Any]) -> Any:
            if len(self.data) in sizes:
                raise RuntimeError("out of cheese")
            return super().fit(parameters, config)

    return Fails


@pytest.mark.parametrize("way", ["loop", "workflow", "secure workflow"])
def test_a_failure_is_reported_with_its_client_and_message(
    run_legacy, run_workflow, way: str
) -> None:
    """The loop and the workflows pass an exception without its client.

    The only missing client is blamed.
    """

    class Named(Stock):
        get_properties = Single.get_properties

    if way == "loop":
        run = run_legacy(FedAvg(), fails_to_fit(Named, SIZES[1:2]))
    else:
        kind = fails_to_fit(Single, SIZES[1:2])
        run = run_workflow(FedAvg(), way == "secure workflow", kind)
    for report in run.strategy.reports:
        assert report.participants == [0, 2]
        (why,) = report.rejected.values()
        assert "(partition 1)" in why
        assert "out of cheese" in why


# Flower's workflows.


class Single(Stock):
    """``Stock`` in float32 with client hooks and a known partition."""

    def __init__(self, model: nn.Module, data: Any, context: Context) -> None:
        super().__init__(model, Points(data.inputs.float(), data.targets), context)

    def fit(self, parameters: list[Array], config: dict[str, Any]) -> Any:
        self.set(parameters)
        with bn_rules(self.model, config, self.context) as rules:
            self.step(rules.wrap)
        return self.state(), len(self.data), {**rules.metrics, "train-loss": 1.0}

    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        return {"partition-id": int(self.context.node_config["partition-id"])}


@dataclass
class Workflow:
    """A finished workflow with its strategy and its states after each round."""

    history: list[dict[str, Array]]
    strategy: Strategy


@pytest.fixture
def run_workflow(datasets, mlp) -> Callable[..., Workflow]:
    """Provide ``run_workflow(strategy, secure, client=Single, mods=())``.

    It runs two rounds under ``DefaultWorkflow``. If ``secure``, the fit is
    ``SecAggPlusWorkflow``. ``wrap`` changes the model.
    """

    def run(
        strategy: Strategy,
        secure: bool,
        client: Any = Single,
        mods: Sequence[Any] = (),
        wrap: Callable[[nn.Module], nn.Module] = nn.Module.float,
        **options: Any,
    ) -> Workflow:
        client_fn = numpy_clients(lambda: wrap(mlp()), datasets, client)
        app = ClientApp(client_fn, mods=[*([secaggplus_mod] if secure else []), *mods])
        start, history = wrap(mlp()).state_dict(), []
        flow = SecAggPlusWorkflow(
            num_shares=3,
            reconstruction_threshold=2,
            max_weight=40.0,
            timeout=20,
            **options,
        )
        workflow = DefaultWorkflow(flow if secure else None)

        def noted(_: Any, arrays: Any, config: Any) -> None:
            history.append(dict(zip(start, arrays, strict=True)))

        legacy = to_legacy(
            strategy, to_record(start), num_rounds=2, evaluate_fn=noted, timeout=60
        )
        with InProcessGrid(app, len(datasets)) as grid:
            context = Context(grid.run.run_id, 0, {}, RecordDict(), {})
            workflow(grid, LegacyContext(context, ServerConfig(num_rounds=2), legacy))
        return Workflow(history, strategy)

    return run


WORKFLOW_METHODS: dict[str, tuple[Callable[[], Strategy], tuple[Any, ...]]] = {
    "fedavg": (FedAvg, ()),
    "fedbn": (FedBN, (bn_mod,)),
    "fedprox": (FedProx, (bn_mod,)),
    "fedavgm": (FedAvgM, ()),
    "fixbn": (functools.partial(FixBN, freeze_at=0.5), (bn_mod,)),
}


@pytest.mark.parametrize("name", fast(WORKFLOW_METHODS, "fedbn", "fixbn"))
def test_both_workflows_run(
    run_workflow, run_legacy_loop, datasets, mlp, name: str, same_bits, caplog
) -> None:
    """The default workflow has the legacy loop's bits.

    Masked sums are quantised.
    """
    make, mods = WORKFLOW_METHODS[name]
    plain, secure = (
        run_workflow(make(), secure, mods=mods) for secure in (False, True)
    )

    start = mlp().float().state_dict()
    app = ClientApp(
        numpy_clients(lambda: mlp().float(), datasets, Single), mods=list(mods)
    )
    want = run_legacy_loop(make(), app, start, len(datasets), rounds=2)
    assert len(plain.history) == len(secure.history) == 3
    for state, arrays in zip(plain.history, want.history, strict=True):
        same_bits(state, dict(zip(start, arrays, strict=True)))
    for run in (plain, secure):
        assert [(r.participants, r.rejected) for r in run.strategy.reports] == [
            ([0, 1, 2], {})
        ] * 2
    for entry, exact in plain.history[-1].items():
        masked = secure.history[-1][entry]
        if entry.endswith("num_batches_tracked"):
            assert masked == start[entry], "secure aggregation does not transmit it"
            continue
        assert (masked.dtype, masked.shape) == (exact.dtype, exact.shape), entry
        np.testing.assert_allclose(masked, exact, atol=1e-3, err_msg=entry)
    assert not np.array_equal(
        plain.history[-1]["3.weight"], plain.history[0]["3.weight"]
    ), "it was trained"
    told = caplog.text.count(
        "('1.num_batches_tracked', ...), such as BN's counters, keep"
    )
    assert told == (name != "fedbn")


def test_a_halted_secure_aggregation_is_reported(run_workflow) -> None:
    """It never calls aggregate_fit, so the model stays, and the report records it."""
    strategy = FedAvg()
    with pytest.raises(NothingTrainedError):
        run_workflow(strategy, True, fails_to_fit(Single, SIZES))
    assert [report.kept_previous for report in strategy.reports] == [True, True]
    assert [len(report.rejected) for report in strategy.reports] == [3, 3]


class MedianMethod(Method):
    """A user's method that does not declare secure sums."""

    name = "median"

    def aggregate(
        self, state: None, facts: Any, replies: Any, model: dict[str, Any]
    ) -> tuple[dict[str, Any], None]:
        return {**model}, state


class Median(Strategy):
    method = MedianMethod


class Scaled(nn.Module):
    """A model with an additional entry, by default without a dimension."""

    def __init__(self, inner: nn.Module, one: Any = 1.0, dtype: Any = None) -> None:
        super().__init__()
        self.inner = inner.float()
        self.scale = nn.Parameter(torch.tensor(one, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale.real.to(x) * self.inner(x)


@pytest.mark.parametrize(
    ("make", "wrap", "why"),
    [
        (FedBS, nn.Module.float, "'fedbs'"),
        (Scaffold, nn.Module.float, "'scaffold'"),
        (lambda: FedAvg(variance="pooled"), nn.Module.float, "variance=pooled"),
        (Median, nn.Module.float, "'median'"),
        (FedAvg, Scaled, "entry 'scale'"),
        (FedAvg, lambda inner: Scaled(inner, [1.0], torch.half), "is float16"),
        (FedAvg, lambda inner: Scaled(inner, [1.0], torch.cfloat), "is complex64"),
    ],
)
def test_what_a_secure_sum_hides_is_refused_by_name_before_anybody_trains(
    run_workflow, make: Callable[[], Strategy], wrap: Any, why: str
) -> None:
    strategy = make()
    with pytest.raises(ConfigError, match=why):
        run_workflow(strategy, True, mods=(bn_mod,), wrap=wrap)
    assert strategy.reports == []
    run_workflow(strategy, False, mods=(bn_mod,), wrap=wrap)


@pytest.mark.parametrize("seed", range(20))
def test_a_secure_average_of_equal_values_is_told_from_a_change(seed: int) -> None:
    """The average is by Flower's own arithmetic, with clipped values as well."""
    draw, levels, limit = np.random.default_rng(seed), 2 ** (18 + seed % 9), 8
    flow = SecAggPlusWorkflow(
        1.0, 0.5, max_weight=draw.uniform(20, 1000), quantization_range=levels
    )
    weights = draw.integers(1, 20, draw.integers(1, 9))
    sent = np.float32(draw.normal(0, [1e-3, 1, 400], (9, 3)))
    ratios = np.round(weights / flow.max_weight * levels) / levels
    scaled = [sent * np.float32(ratio) for ratio in ratios]
    masked = dequantize(quantize(scaled, limit, levels), limit, levels)
    average = sum(masked) / ratios.sum()
    assert is_unchanged(average, sent, weights, flow)
    error = 1 / levels + np.finfo("float32").eps
    average[-1] += 8 * limit * len(ratios) * error / ratios.sum()
    assert not is_unchanged(average, sent, weights, flow)


@pytest.mark.parametrize(
    "make", [FedAvg, functools.partial(FixBN, freeze_at=0.5, layers=["1"])]
)
def test_a_variance_of_zero_outlives_quantisation(run_workflow, make: Any) -> None:
    """Quantisation may turn zero into a negative number, but variances never are.

    Layers that the method does not treat have variances and counters as well, and a
    model may have other integers.
    """

    def two_layers(model: nn.Module) -> nn.Module:
        wide = nn.Sequential(*model, nn.BatchNorm1d(3)).float()
        wide.register_buffer("places", torch.arange(12))
        return wide

    class Dead(Single):
        def fit(self, parameters: list[Array], config: dict[str, Any]) -> Any:
            arrays, number, metrics = super().fit(parameters, config)
            arrays[list(self.model.state_dict()).index("1.running_var")][:] = 0.0
            return arrays, number, metrics

    run = run_workflow(make(), True, Dead, (bn_mod,), two_layers, clipping_range=8.1)
    assert [report.rejected for report in run.strategy.reports] == [{}, {}]
    assert (run.history[-1]["1.running_var"] >= 0).all()
    assert [*run.history[-1]["places"]] == [*range(12)]


# ``start_simulation``.


class Direct:
    """A client in this process, without a Flower run as in ``start_simulation``."""

    def __init__(self, number: int, client: Any) -> None:
        self.cid, self.client = str(number), client

    def get_properties(self, ins, timeout, group_id):
        return self.client.get_properties(ins)

    def fit(self, ins, timeout, group_id):
        return self.client.fit(ins)

    def evaluate(self, ins, timeout, group_id):
        return self.client.evaluate(ins)


@pytest.mark.parametrize("kind", ["torch", "with a mod"])
@pytest.mark.parametrize("make", fast([FedAvg, FedBN], 1))
def test_it_runs_where_flower_has_set_no_identity(
    make: Any, kind: str, run_legacy_loop, datasets, mlp, monkeypatch
) -> None:
    """An app in ``start_simulation`` passes its mods as a ``client_fn``."""
    if kind == "torch":
        client_fn = torch_client_fn(mlp, datasets)
        app = ClientApp(client_fn)
    else:
        app = ClientApp(numpy_clients(mlp, datasets), mods=[bn_mod])
        client_fn = to_client_fn(app)
    start = mlp().state_dict()
    want = run_legacy_loop(make(), app, start, len(datasets), ROUNDS)
    for name in ("_task_id", "_run_id", "_node_id"):
        # older Flower lacks them
        monkeypatch.setattr(TaskIdentity, name, None, raising=False)
    legacy = to_legacy(make(), to_record(start), num_rounds=ROUNDS, timeout=5)
    manager = SimpleClientManager()
    names = {"0": "07", "1": "7", "2": "Köln/Süd, 1"}
    for i, name in enumerate(names.values()):
        node = {"partition-id": i, "num-partitions": len(SIZES), "site-name": name}
        context = Context(0, i, node, RecordDict(), {})
        manager.register(Direct(i + 1, client_fn(context)))
    server = Server(client_manager=manager, strategy=legacy)
    server.fit(ROUNDS, None)
    assert legacy.strategy.run.nodes.names == names
    got = parameters_to_ndarrays(server.parameters)
    assert [array.tobytes() for array in got] == [
        array.tobytes() for array in want.history[-1]
    ]


def test_a_frozen_entry_that_clients_have_changed_is_not_set_back() -> None:
    """The checks of the server refuse it later."""
    flow = SecAggPlusWorkflow(1.0, 0.5, max_weight=100)
    sent = {"frozen": np.float32([1, 2]), "free": np.float32([1, 2])}
    run = SimpleNamespace(
        parts=SimpleNamespace(
            whole=SimpleNamespace(moments=list), select=lambda part: ("frozen",)
        ),
        round=SimpleNamespace(phase=SimpleNamespace(frozen=None), before=sent),
    )
    for change, kept in ((0.0, True), (1.0, False)):
        average = {name: np.float64(array) + change for name, array in sent.items()}
        found = restored(average, run, [10.0, 20.0], flow)
        assert np.array_equal(found["frozen"], sent["frozen"]) == kept
