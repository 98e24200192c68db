"""An app of somebody else's on the Message API, driven by our strategies: the same bits as our own client."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.client.model_spec import StateLocation
from fedbn_flwr.client.state_folder import Continuity
from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.errors import ClientPartError, ConfigError, StateError
from fedbn_flwr.messages.records import from_record, to_record
from fedbn_flwr.mods import answer_query, answer_statistics, bn_rules, local_bn
from fedbn_flwr.seeds import torch_generator
from fedbn_flwr.strategies import (
    MTFL,
    FedAvg,
    FedBN,
    FedBS,
    FedDNA,
    FedProx,
    FedTAN,
    FedTAN2,
    FedWon,
    FixBN,
    Scaffold,
    SiloBN,
    Standalone,
    StaticBN,
)
from fedbn_flwr.training import LearningRate, LocalTraining
from fedbn_flwr.transport.polling_grid import PollingGrid

SEED, BATCH = 7, 4
SIZES = (6, 8, 10)
Loop = Callable[[nn.Module, Any, Message, Context], float]


def batches(data: Any, msg: Message, context: Context) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The batches of ``TorchClient``: of the same stream."""
    key = int(context.node_config["partition-id"])
    generator = torch_generator(SEED, "batches", int(msg.content["config"]["server-round"]), key)
    for positions in LocalTraining(learning_rate=LearningRate(0.1), batch_size=BATCH).batches(len(data), generator):
        yield data.batch(positions)


def plain(model: nn.Module, data: Any, msg: Message, context: Context, momentum: float = 0.0) -> float:
    """A loop that has never heard of this package."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=momentum)
    model.train()
    total = 0.0
    for inputs, targets in batches(data, msg, context):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        total += float(loss.detach()) * len(inputs)
    return total / len(data)


def frozen(model: nn.Module, data: Any, msg: Message, context: Context) -> float:
    """FixBN: one line."""
    with bn_rules(model, msg.content["config"]):
        return plain(model, data, msg, context)


def ruled(model: nn.Module, data: Any, msg: Message, context: Context, momentum: float = 0.0) -> float:
    """Everything: the optimizer wrapped, the steps wrapped."""
    total = 0.0
    with bn_rules(model, msg, context) as rules:
        optimizer = rules.wrap(torch.optim.SGD(model.parameters(), 0.1, momentum=momentum))
        model.train()
        for inputs, targets in batches(data, msg, context):
            optimizer.zero_grad()
            with rules.step(len(inputs)):
                loss = F.cross_entropy(model(inputs), targets)
                loss.backward()
            optimizer.step()
            total += float(loss.detach()) * len(inputs)
    return total / len(data)


Make = Callable[..., ClientApp]


@pytest.fixture
def datasets(points) -> list[Any]:
    return [points(n, i) for i, n in enumerate(SIZES)]


@pytest.fixture
def app(mlp, datasets) -> Make:
    """``app(loop, mods, query=False, model=mlp)``: Flower's PyTorch quickstart, with local data and a seeded order."""

    def make(
        loop: Loop = plain, mods: Sequence[Any] = (local_bn,), query: bool = False, model: Callable[[], nn.Module] = mlp
    ) -> ClientApp:
        made = ClientApp(mods=list(mods))

        @made.train()
        def train(msg: Message, context: Context) -> Message:
            net = model()
            net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
            data = datasets[int(context.node_config["partition-id"])]
            loss = loop(net, data, msg, context)
            metrics = MetricRecord({"train_loss": loss, "num-examples": len(data)})
            return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=msg)

        @made.evaluate()
        def evaluate(msg: Message, context: Context) -> Message:
            net = model().eval()
            net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
            data = datasets[int(context.node_config["partition-id"])]
            with torch.no_grad():
                loss = float(F.cross_entropy(net(data.inputs), data.targets))
            metrics = MetricRecord({"loss": loss, "num-examples": len(data)})
            return Message(RecordDict({"metrics": metrics}), reply_to=msg)

        if query:

            @made.query("statistics")
            def statistics(msg: Message, context: Context) -> Message:
                data = datasets[int(context.node_config["partition-id"])]
                loader = DataLoader(TensorDataset(data.inputs, data.targets), BATCH, shuffle=True)
                return answer_statistics(msg, context, model(), loader)

            @made.query()
            def answer(msg: Message, context: Context) -> Message:
                data = datasets[int(context.node_config["partition-id"])]
                return answer_query(msg, context, SimpleNamespace(dataset=data, batch_size=BATCH))

        return made

    return make


Drive = Callable[..., SimpleNamespace]


@pytest.fixture
def drive(mlp) -> Iterator[Drive]:
    """``drive(strategy, app, rounds=3)``: run; ``meet=False`` hides the barrier, so that messages carry FedTAN.

    ``workers``: clients that compute at the same time.
    """
    grids: list[InProcessGrid] = []

    def run(
        strategy: FedAvg,
        client_app: ClientApp,
        rounds: int = 3,
        meet: bool = True,
        model: Callable[[], nn.Module] = mlp,
        workers: int = len(SIZES),
    ) -> SimpleNamespace:
        grid = InProcessGrid(client_app, len(SIZES), max_workers=workers)
        grids.append(grid)
        result = strategy.start(
            grid=grid if meet else PollingGrid(grid),
            initial_arrays=to_record(model().state_dict()),
            num_rounds=rounds,
            timeout=60,
        )
        return SimpleNamespace(state=from_record(result.arrays), result=result, strategy=strategy, grid=grid)

    yield run
    for grid in grids:
        grid.close()


def same_reports(one: FedAvg, other: FedAvg) -> None:
    for a, b in zip(one.reports, other.reports, strict=True):
        assert (a.participants, a.rejected, a.train) == (b.participants, b.rejected, b.train)
        assert {k: v["loss"] for k, v in a.evaluations.items()} == pytest.approx(
            {k: v["loss"] for k, v in b.evaluations.items()}
        )


# --- the same bits as our own client ---------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [FedAvg, FedBN, SiloBN, MTFL, Standalone])
def test_an_unchanged_app_with_the_mod_is_our_client(federate, drive, app, datasets, mlp, same_bits, method) -> None:
    ours = federate(method(), mlp, datasets)
    theirs = drive(method(), app())
    same_bits(theirs.state, ours.state)
    same_reports(theirs.strategy, ours.strategy)
    assert theirs.strategy.run.local_hashes.keys() == ours.strategy.run.local_hashes.keys()
    for i in range(len(SIZES)) if method.local else ():
        kept = [from_record(grid.context(i).state["fedbn-flwr.local"]) for grid in (theirs.grid, ours.grid.inner)]
        same_bits(*kept)


def test_fixbn_is_one_line(federate, drive, app, datasets, mlp, same_bits) -> None:
    """``plain`` calls ``model.train()`` inside the block."""
    make = functools.partial(FixBN, freeze_at=1)
    ours = federate(make(), mlp, datasets)
    theirs = drive(make(), app(frozen))
    same_bits(theirs.state, ours.state)
    without_mod = drive(make(), app(frozen, mods=()))
    assert [report.rejected for report in without_mod.strategy.reports] == [{}] * 3, "the arrays prove it"
    for name, array in theirs.state.items():
        np.testing.assert_allclose(without_mod.state[name], array, rtol=1e-12)


CASES: dict[str, tuple[Callable[[], FedAvg], float]] = {
    "fedprox": (functools.partial(FedProx, proximal_mu=0.5), 0.0),
    "scaffold": (functools.partial(Scaffold, server_learning_rate=0.8), 0.0),
    "momentum local": (functools.partial(FedAvg, momentum_scope="local"), 0.9),
    "momentum global": (functools.partial(FedAvg, momentum_scope="global"), 0.9),
    "fedbn and momentum": (functools.partial(FedBN, momentum_scope="global"), 0.9),
    "fixbn, affine too": (functools.partial(FixBN, freeze_at=1, freeze_affine=True), 0.0),
    "fixbn, automatic": (functools.partial(FixBN, freeze_at="auto", freeze_window=2, freeze_tau=1e9), 0.0),
}


@pytest.mark.parametrize("case", CASES)
def test_rules_in_the_users_loop(federate, drive, app, datasets, mlp, same_bits, case: str) -> None:
    make, momentum = CASES[case]
    ours = federate(make(), mlp, datasets, sgd_momentum=momentum)
    theirs = drive(make(), app(functools.partial(ruled, momentum=momentum)))
    same_bits(theirs.state, ours.state)
    same_reports(theirs.strategy, ours.strategy)
    assert theirs.strategy.phase(3) == ours.strategy.phase(3)


@pytest.mark.parametrize("as_keyword", [True, False])
@pytest.mark.parametrize("case", ["fedprox", "scaffold"])
def test_rules_act_on_gradients_that_a_closure_computes(
    federate, drive, app, datasets, mlp, same_bits, case: str, as_keyword: bool
) -> None:
    """As Lightning's loop: ``optimizer.step(closure)`` with everything inside."""
    make, momentum = CASES[case]

    def loop(model: nn.Module, data: Any, msg: Message, context: Context) -> float:
        with bn_rules(model, msg, context) as rules:
            optimizer = rules.wrap(torch.optim.SGD(model.parameters(), 0.1, momentum=momentum))
            for batch in batches(data, msg, context):

                def closure(inputs: torch.Tensor = batch[0], targets: torch.Tensor = batch[1]) -> torch.Tensor:
                    optimizer.zero_grad()
                    loss = F.cross_entropy(model(inputs), targets)
                    loss.backward()
                    return loss.detach()

                assert float(optimizer.step(closure=closure) if as_keyword else optimizer.step(closure)) > 0
        return 0.0

    ours = federate(make(), mlp, datasets, sgd_momentum=momentum)
    same_bits(drive(make(), app(loop)).state, ours.state)


def test_a_line_search_sees_the_penalty_too() -> None:
    """LBFGS compares losses: under FedProx it must end where the penalised loss, written out, ends."""
    x, y = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)).double(), torch.arange(40.0).double() / 40

    def end(ruled: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1).double()
        start = [p.detach().clone() for p in model.parameters()]
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=20, line_search_fn="strong_wolfe")

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x).flatten(), y)
            if not ruled:
                away = zip(model.parameters(), start, strict=True)
                loss = loss + 2.5 * sum((p - s).square().sum() for p, s in away)  # type: ignore[assignment]
            loss.backward()
            return loss.detach()

        with bn_rules(model, {"rules": "proximal", "proximal-mu": 5.0} if ruled else {}) as rules:
            rules.wrap(optimizer)
            optimizer.step(closure)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.allclose(end(True), end(False), rtol=0, atol=1e-9)


def test_an_optimizer_is_wrapped_once(mlp) -> None:
    """A second one would start SCAFFOLD's count of steps anew, or act twice."""
    model = mlp()
    with bn_rules(model, {}) as rules:
        optimizer = rules.wrap(torch.optim.SGD(model.parameters(), 0.1))
        with pytest.raises(ConfigError, match="wrap was called twice in a block: make and wrap one optimizer"):
            rules.wrap(optimizer)


class Slashed(torch.nn.Module):
    """Layers with a slash in their names, which also divides the record from the entry in a NumPyClient's list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleDict({"a/lin": torch.nn.Linear(5, 4), "a/norm": torch.nn.BatchNorm1d(4)})
        self.head = torch.nn.Linear(4, 3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks["a/norm"](self.blocks["a/lin"](x)))  # type: ignore[no-any-return]


def test_slashes_in_names_are_names(client_fn_of_slashes) -> None:
    strategy, start = FedTAN(), Slashed()
    with InProcessGrid(client_fn_of_slashes, len(SIZES)) as grid:
        strategy.start(grid=PollingGrid(grid), initial_arrays=to_record(start.state_dict()), num_rounds=2, timeout=60)
    assert [report.participants for report in strategy.reports] == [[0, 1, 2]] * 2


@pytest.fixture
def client_fn_of_slashes(datasets) -> ClientApp:
    app = ClientApp(mods=[local_bn])

    @app.query()
    def query(msg: Message, context: Context) -> Message:
        return answer_query(msg, context, SimpleNamespace(dataset=range(4), batch_size=4))

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        model, data = Slashed(), datasets[int(context.node_config["partition-id"])]
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        loss = ruled(model, data, msg, context)
        metrics = MetricRecord({"loss": loss, "num-examples": len(data)})
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=msg)

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1})}), reply_to=msg)

    return app


def test_agc_in_the_users_loop(federate, drive, app, datasets, mlp, same_bits) -> None:
    bare = functools.partial(mlp, norm=False)
    ours = federate(FedWon(agc=0.02), bare, datasets)
    theirs = drive(FedWon(agc=0.02), app(ruled, model=bare), model=bare)
    same_bits(theirs.state, ours.state)


@pytest.mark.parametrize("meet", [True, False], ids=["barrier", "messages"])
@pytest.mark.parametrize("method", [FedTAN, FedDNA, functools.partial(FedTAN2, fedtan_rounds=1)])
def test_fedtan_in_the_users_loop(federate, drive, app, datasets, mlp, same_bits, method, meet: bool) -> None:
    ours = federate(method(), mlp, datasets, rounds=2, grid_options={"max_workers": 3})
    theirs = drive(method(), app(ruled, query=True), rounds=2, meet=meet)
    same_bits(theirs.state, ours.state)
    assert [report.rejected for report in theirs.strategy.reports] == [{}] * 2
    exchanges = 1 + (2 if method is FedDNA else 3)
    assert theirs.strategy.reports[0].train.exchanges == exchanges, "2 or 3 for one layer, and the model"
    assert not [key for i in range(3) for key in theirs.grid.context(i).state if "step" in key], "no journal is left"


@pytest.mark.parametrize("make", [StaticBN, functools.partial(SiloBN, recalibrate=True)], ids=["staticbn", "silobn"])
def test_statistics_gathered_from_a_loader(federate, drive, app, datasets, mlp, same_bits, make: Any) -> None:
    ours = federate(make(), mlp, datasets)
    theirs = drive(make(), app(ruled, query=True))
    same_bits(theirs.state, ours.state)
    same_reports(theirs.strategy, ours.strategy)


def test_fedbs_weighs_by_the_users_metric(federate, drive, app, datasets, mlp) -> None:
    ours = federate(FedBS(fedbs_rounds=9), mlp, datasets, rounds=2)
    theirs = drive(FedBS(fedbs_rounds=9, loss_key="train_loss"), app(), rounds=2)
    for name, array in ours.state.items():
        np.testing.assert_allclose(theirs.state[name], array, rtol=1e-9)


# --- a client part that is missing is named --------------------------------------------------------------------------

MOD = "Make the app `ClientApp(mods=[local_bn])`"
RULES = "Its training must run inside `with bn_rules(model, msg, context) as rules:`"
MISSING: dict[str, tuple[Callable[[], FedAvg], int, str]] = {
    "fedbn": (FedBN, 1, MOD),
    "silobn": (SiloBN, 1, MOD),
    "mtfl": (MTFL, 1, MOD),
    "standalone": (Standalone, 1, MOD),
    "fedprox": (FedProx, 1, f"rule 'proximal' of strategy 'fedprox'. {RULES}"),
    "scaffold": (Scaffold, 1, f"rule 'variates' of strategy 'scaffold'. {RULES}"),
    "momentum": (
        functools.partial(FedAvg, momentum_scope="local"),
        1,
        f"rule 'momentum' of strategy 'fedavg'. {RULES}",
    ),
    "fixbn": (functools.partial(FixBN, freeze_at=1), 2, 'inside `with bn_rules(model, msg.content["config"]):`'),
    "fixbn auto": (
        functools.partial(FixBN, freeze_at="auto", freeze_window=2),
        1,
        f"rule 'report-drift' of strategy 'fixbn'. {RULES}",
    ),
    "staticbn": (StaticBN, 1, "under staticbn. The client's training must run inside `with bn_rules(model, msg."),
    "fedtan": (FedTAN, 1, f"rule 'synchronise-first-step' of strategy 'fedtan'. {RULES}"),
    "feddna": (FedDNA, 1, f"rule 'synchronise-first-step' of strategy 'feddna'. {RULES}"),
    "fedtan2": (
        functools.partial(FedTAN2, fedtan_rounds=1),
        1,
        f"rule 'synchronise-first-step' of strategy 'fedtan2'. {RULES}",
    ),
}


@pytest.mark.parametrize("mods", [(), (local_bn,)], ids=["bare", "mod alone"])
@pytest.mark.parametrize("case", MISSING)
def test_a_missing_client_part_ends_the_run_in_the_first_round_it_matters(drive, app, case: str, mods) -> None:
    make, matters, message = MISSING[case]
    strategy = make()
    if mods and strategy.local:
        pytest.skip("the mod is all it needs")
    with pytest.raises(ClientPartError) as error:
        drive(strategy, app(plain, mods, query=True))
    assert message in str(error.value)
    assert len(strategy.reports) == matters
    assert len(strategy.reports[-1].rejected) == len(SIZES)


def test_agc_missing(drive, app, mlp) -> None:
    bare = functools.partial(mlp, norm=False)
    with pytest.raises(ClientPartError, match="rule 'agc' of strategy 'fedwon'"):
        drive(FedWon(), app(model=bare), model=bare)


def test_fedtan_missing_by_messages(drive, app) -> None:
    with pytest.raises(ClientPartError, match="rule 'synchronise-first-step'"):
        drive(FedTAN(), app(plain, query=True), meet=False)


def test_fedtan_without_a_query_handler(drive, app) -> None:
    with pytest.raises(ConfigError, match=r"register `@app.query\(\)` and return answer_query"):
        drive(FedTAN(), app(ruled))


def half(*left_out: str) -> Loop:
    """``ruled`` with a call left out."""

    def loop(model: nn.Module, data: Any, msg: Message, context: Context) -> float:
        with bn_rules(model, msg, context) as rules:
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            if "wrap" not in left_out:
                rules.wrap(optimizer)
            for inputs, targets in batches(data, msg, context):
                optimizer.zero_grad()
                F.cross_entropy(model.train()(inputs), targets).backward()
                optimizer.step()
        return 0.0

    return loop


def test_a_call_left_out_inside_the_block_is_named(drive, app) -> None:
    strategy = FedProx()
    drive(strategy, app(half("wrap")), rounds=1)
    assert all("Write: optimizer = rules.wrap(optimizer)" in r for r in strategy.reports[0].rejected.values())
    tan = FedTAN()
    drive(tan, app(half(), query=True), rounds=1, meet=False)
    assert all("Write: with rules.step(len(inputs))" in r for r in tan.reports[0].rejected.values())
    assert len(tan.reports[0].rejected) == len(SIZES)


def test_rules_that_answer_need_message_and_context(mlp) -> None:
    with pytest.raises(ConfigError, match=r"rule 'variates' sends or keeps arrays: write `with bn_rules\(model, msg"):
        bn_rules(mlp(), {"rules": "variates"}).__enter__()


def test_one_client_without_the_part_is_left_out_and_the_round_goes_on(drive, app) -> None:
    with_mod, without = app(), app(mods=())

    mixed = ClientApp()
    for register in (mixed.train(), mixed.evaluate(), mixed.query()):
        register(lambda msg, ctx: (without if ctx.node_config["partition-id"] == 1 else with_mod)(msg, ctx))
    strategy = FedBN()
    drive(strategy, mixed, rounds=2)
    assert [report.participants for report in strategy.reports] == [[0, 2]] * 2
    assert all(MOD in why for report in strategy.reports for why in report.rejected.values())


# --- what the mod does to messages -----------------------------------------------------------------------------------


def test_the_parts_are_the_servers_where_names_mislead(drive, app, same_bits) -> None:
    """By name an InstanceNorm with statistics is a BatchNorm; the server, which has the model, knows better."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.looks = nn.Linear(5, 4), nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
            self.bn, self.last = nn.BatchNorm1d(4), nn.Linear(4, 3)
            self.double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.looks(self.first(x).unsqueeze(2).repeat(1, 1, 2)).mean(2)
            return self.last(self.bn(x))

    strategy = FedBN(parts=split_state(Mixed()))
    run = drive(strategy, app(model=Mixed), rounds=2, model=Mixed)
    assert [report.rejected for report in strategy.reports] == [{}, {}]
    kept = list(from_record(run.grid.context(0).state["fedbn-flwr.local"]))
    assert {name.split(".")[0] for name in kept} == {"bn"}


def test_the_app_sees_the_whole_model_in_order(drive, app, mlp) -> None:
    seen: list[list[str]] = []

    def look(message: Message, context: Context, call_next: Any) -> Message:
        seen.append(list(message.content.array_records.get("arrays", {})))
        return call_next(message, context)

    drive(FedBN(), app(mods=(local_bn, look), query=True), rounds=2)
    assert [names for names in seen if names] == [list(mlp().state_dict())] * 12


def test_partition_ids_are_learnt_from_replies(drive, app) -> None:
    run = drive(FedAvg(), app(query=False), rounds=1)
    assert run.strategy.reports[0].participants == [0, 1, 2]
    assert drive(FedAvg(), app(mods=(), query=False), rounds=1).strategy.reports[0].participants == [None] * 3


def test_a_client_that_lost_its_context_gets_the_start_again(drive, app) -> None:
    def forgets(message: Message, context: Context, call_next: Any) -> Message:
        config = message.content.config_records.get("config", {})
        if config.get("server-round") == 2 and context.node_config["partition-id"] == 1:
            for key in [key for key in context.state if key.startswith("fedbn")]:
                del context.state[key]
        return call_next(message, context)

    strategy = FedBN(fraction_evaluate=0.0)
    drive(strategy, app(mods=(forgets, local_bn)), rounds=3)
    assert [report.participants for report in strategy.reports] == [[0, 1, 2], [0, 2], [0, 1, 2]]
    assert "neither sent nor kept by this client" in next(iter(strategy.reports[1].rejected.values()))


# --- a state folder: what is kept outlives the node's process ---------------------------------------------------------


@pytest.fixture
def on_disk(app, mlp, tmp_path) -> Any:
    """``on_disk(strategy, ..., run)``: rounds over nodes with a state folder; ``arrays``: go on from there."""

    def go(strategy: FedAvg, mods: Any, rounds: int, run: str = "first", arrays: Any = None, loop: Loop = ruled) -> Any:
        strategy.continuity = Continuity("series", run)
        nodes = [{"state-dir": str(tmp_path)}] * len(SIZES)
        client = app(loop, mods=(*mods, local_bn), query=True)
        with InProcessGrid(client, len(SIZES), node_configs=nodes, max_workers=1) as grid:
            start = arrays or to_record(mlp().state_dict())
            result = strategy.start(grid=grid, initial_arrays=start, num_rounds=rounds, timeout=60)
            return result.arrays, [grid.context(i).state for i in range(len(SIZES))]

    return go


def restarted(message: Message, context: Context, call_next: Any) -> Message:
    """A node whose process is new in round 2: its context is empty."""
    if (config := message.content.config_records.get("config")) and config["server-round"] == 2:
        for key in list(context.state):
            del context.state[key]
    return call_next(message, context)


KEEPING = [FedBN, SiloBN, Standalone, Scaffold]


@pytest.mark.parametrize("method", KEEPING)
def test_a_restarted_node_goes_on_with_its_part(on_disk, drive, app, same_bits, method: Any) -> None:
    plain, strategy = drive(method(), app(ruled, query=True)), method(fraction_evaluate=0.0)
    arrays, _ = on_disk(strategy, (restarted,), rounds=3)
    same_bits(from_record(arrays), plain.state)
    assert strategy.run.local_hashes == plain.strategy.run.local_hashes != {}
    assert [report.participants for report in strategy.reports] == [[0, 1, 2]] * 3
    assert strategy.run.volatile == []
    assert plain.strategy.run.volatile == ["0", "1", "2"]


@pytest.mark.parametrize("method", KEEPING)
def test_a_run_goes_on_with_new_nodes(on_disk, drive, app, same_bits, method: Any) -> None:
    whole, before, after = drive(method(), app(ruled, query=True), rounds=3), method(), method()
    arrays, _ = on_disk(before, (), rounds=1)
    after.load_state_dict(before.state_dict(), 1)
    arrays, _ = on_disk(after, (), rounds=3, arrays=arrays)
    same_bits(from_record(arrays), whole.state)
    assert after.run.local_hashes == whole.strategy.run.local_hashes
    assert [report.rejected for report in after.reports] == [{}] * 2


def test_the_next_run_of_a_series_begins_with_the_parts_of_the_one_before(on_disk, same_bits) -> None:
    _, kept = on_disk(FedBN(), (), rounds=2)
    seen: dict[int, dict[str, Any]] = {}

    def look(model: nn.Module, data: Any, msg: Message, context: Context) -> float:
        seen[int(context.node_config["partition-id"])] = from_record(msg.content["arrays"])
        return 0.0

    on_disk(FedBN(), (), rounds=1, run="second", loop=look)
    for i, state in enumerate(kept):
        own = from_record(state["fedbn-flwr.local"])
        same_bits({name: seen[i][name] for name in own}, own)


def test_a_home_needs_a_series_a_full_path_and_a_partition_id(tmp_path) -> None:
    told = Continuity("series", "run")

    def home(node: Any, run: Any = None, told: Any = told) -> StateLocation | None:
        return StateLocation.of(Context(1, 1, node, RecordDict(), run or {}), told)

    own = {"partition-id": 3, "state-dir": str(tmp_path)}
    found = [home(own), home({"partition-id": 3}, {"state-dir": str(tmp_path)}), home(own, {"state-dir": "/other"})]
    assert [h and h.path.parent for h in found] == [tmp_path / "series/partition-3"] * 3
    assert home(own, told=None) is home({"partition-id": 3}) is home({"state-dir": "x"}, told=None) is None
    with pytest.raises(StateError, match="needs a partition id: give the SuperNode one"):
        home({"state-dir": str(tmp_path)})
    with pytest.raises(ConfigError, match="state-dir='x' of node 1 is relative; write an absolute path"):
        home({"partition-id": 3, "state-dir": "x"})


def test_a_part_that_diverged_is_not_kept(drive, app) -> None:
    def diverge(model: nn.Module, data: Any, msg: Message, context: Context) -> float:
        loss = plain(model, data, msg, context)
        if context.node_config["partition-id"] == 0 and msg.content["config"]["server-round"] == 2:
            model[1].running_mean[0] = torch.nan
        return loss

    strategy = FedBN()
    run = drive(strategy, app(diverge), rounds=2)
    assert strategy.reports[1].participants == [1, 2]
    assert np.isfinite(from_record(run.grid.context(0).state["fedbn-flwr.local"])["1.running_mean"]).all()


def test_an_app_that_replies_with_less_than_the_model_is_told(drive, app) -> None:
    def cut(message: Message, context: Context, call_next: Any) -> Message:
        reply = call_next(message, context)
        if "arrays" in reply.content:
            state = from_record(reply.content["arrays"])
            reply.content["arrays"] = to_record({k: v for k, v in state.items() if not k.startswith("1.")})
        return reply

    strategy = FedBN()
    drive(strategy, app(mods=(local_bn, cut)), rounds=1)
    assert all("Reply with the whole state dict" in why for why in strategy.reports[0].rejected.values())


def test_a_first_batch_that_does_not_repeat_itself_is_refused(drive, app, datasets) -> None:
    """By messages the training function is called again for every exchange."""
    calls = iter(range(1000))

    def restless(model: nn.Module, data: Any, msg: Message, context: Context) -> float:
        with bn_rules(model, msg, context) as rules:
            positions = (torch.arange(4) + next(calls)) % len(data)
            inputs, targets = data.batch(positions)
            with rules.step(4):
                F.cross_entropy(model(inputs), targets).backward()
        return 0.0

    strategy = FedTAN()
    drive(strategy, app(restless, query=True), rounds=1, meet=False)
    assert all("the first batch must be the same each time" in why for why in strategy.reports[0].rejected.values())
    assert len(strategy.reports[0].rejected) == len(SIZES)


def test_a_first_batch_of_another_size_is_refused(drive, app) -> None:
    def short(model: nn.Module, data: Any, msg: Message, context: Context) -> float:
        with bn_rules(model, msg, context) as rules, rules.step(3):
            F.cross_entropy(model(data.inputs[:3]), data.targets[:3]).backward()
        return 0.0

    strategy = FedTAN()
    drive(strategy, app(short, query=True), rounds=1, meet=False)
    said = "has 3 examples; this client's answer to the query said batch-size 4"
    assert all(said in why for why in strategy.reports[0].rejected.values())


def test_a_start_of_the_users_own_begins_the_method(app, mlp) -> None:
    """As in Flower's advanced example: a subclass whose ``start`` calls the hooks itself."""

    class Own(FixBN):
        def start(self, grid, initial_arrays, num_rounds=3, **_: Any) -> Any:
            arrays = initial_arrays
            for current in range(1, num_rounds + 1):
                replies = grid.send_and_receive(self.configure_train(current, arrays, self.told, grid), timeout=60)
                arrays, _ = self.aggregate_train(current, replies)
            return arrays

    from flwr.app import ConfigRecord

    with InProcessGrid(app(frozen), len(SIZES)) as grid:
        strategy = Own(freeze_at=1)
        strategy.told = ConfigRecord()
        strategy.start(grid, to_record(mlp().state_dict()))
        assert [report.phase for report in strategy.reports] == ["train", "frozen", "frozen"]
        unknown = Own(freeze_at=0.5)
        unknown.told = ConfigRecord()
        with pytest.raises(ConfigError, match="needs the number of rounds"):
            unknown.start(grid, to_record(mlp().state_dict()))


@pytest.mark.parametrize("loses", [True, False])
def test_a_client_that_lost_what_a_rule_kept_is_named(drive, app, caplog, loses: bool) -> None:
    """SCAFFOLD's variate is kept by the training's rules, not by the mod that answers."""

    def forget(message: Message, context: Context, call_next: Any) -> Message:
        train = message.metadata.message_type == "train"
        if loses and train and context.node_config["partition-id"] == 1 and told(message)["server-round"] == 3:
            context.state = RecordDict()
        return call_next(message, context)

    def told(message: Message) -> Any:
        return next(iter(message.content.config_records.values()))

    with caplog.at_level("WARNING", "flwr"):
        drive(Scaffold(), app(ruled, mods=(forget, local_bn), query=True), rounds=4)
    lost = [text for text in caplog.messages if "had lost what it kept between rounds" in text]
    assert len(lost) == loses
    assert all("(partition 1)" in text for text in lost)


@pytest.mark.parametrize("method", [Scaffold, FixBN, FedTAN])
def test_a_compiled_model_in_the_users_loop(drive, app, same_bits, method: Any) -> None:
    def loop(model: nn.Module, data: Any, msg: Message, context: Context) -> float:
        return ruled(torch.compile(model, backend="eager"), data, msg, context)

    plainly = drive(method(), app(ruled, query=True), rounds=2, meet=False)
    # torch's compiler parses Python, which in 3.11 is not safe in several threads ("AST constructor recursion depth").
    compiled = drive(method(), app(loop, query=True), rounds=2, meet=False, workers=1)
    assert not any(report.rejected for report in compiled.strategy.reports)
    same_bits(compiled.state, plainly.state)
