"""A user's own app on the Message API, and runs of our strategies over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedbn_flwr.messages.protocol import Continuity
from fedbn_flwr.mods import answer_query, answer_statistics, bn_mod
from fedbn_flwr.strategies import Strategy
from tests.support.federation import Outcome
from tests.support.user_loops import BATCH, SIZES, Loop, hooked_loop, plain_loop, tested


@pytest.fixture
def datasets(points) -> list:
    """Return the data of three clients of different sizes."""
    return [points(n, i) for i, n in enumerate(SIZES)]


@pytest.fixture
def user_app(mlp, datasets) -> Callable[..., ClientApp]:
    """``user_app(loop, mods, query=False, model=mlp)`` makes Flower's quickstart app.

    The app is Flower's PyTorch quickstart with local data in fixed order. The mods in
    ``train_mods`` belong to the training function only. If ``query`` is true, the app
    also answers the queries of FedTAN and re-estimated statistics, and FedTAN's
    exchanges unless ``exchange`` is false.
    """

    def make(
        loop: Loop = plain_loop,
        mods: Sequence = (bn_mod,),
        query: bool = False,
        model: Callable[[], nn.Module] = mlp,
        train_mods: Sequence = (),
        exchange: bool = True,
    ) -> ClientApp:
        app = ClientApp(mods=list(mods))

        def local_data(context: Context):
            return datasets[int(context.node_config["partition-id"])]

        @app.train(mods=list(train_mods))
        def train(msg: Message, context: Context) -> Message:
            net, data = model(), local_data(context)
            net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
            loss = loop(net, data, msg, context)
            metrics = MetricRecord({"train_loss": loss, "num-examples": len(data)})
            records = {"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}
            return Message(RecordDict(records), reply_to=msg)

        @app.evaluate()
        def evaluate(msg: Message, context: Context) -> Message:
            return tested(model(), local_data(context), msg)

        def loader(context: Context) -> DataLoader:
            data = local_data(context)
            pairs = TensorDataset(data.inputs, data.targets)
            return DataLoader(pairs, BATCH, shuffle=True)

        def statistics(msg: Message, context: Context) -> Message:
            return answer_statistics(msg, context, model(), loader(context))

        def answer(msg: Message, context: Context) -> Message:
            return answer_query(msg, context, loader(context))

        if query:
            app.query()(answer)
            app.query("statistics")(statistics)
            if exchange:
                app.query("exchange")(train)
        return app

    return make


@pytest.fixture
def run_app(run_strategy, mlp) -> Callable[..., Outcome]:
    """``run_app(strategy, app, rounds=3, ...)`` runs a strategy over an app.

    All clients compute at the same time. If ``barrier`` is false, FedTAN's exchanges
    travel by messages.
    """

    def run(
        strategy: Strategy,
        app: ClientApp,
        *,
        start: Any = None,
        model: Callable[[], nn.Module] = mlp,
        barrier: bool = True,
        **options: Any,
    ) -> Outcome:
        start = model().state_dict() if start is None else start
        return run_strategy(
            strategy, app, start, len(SIZES), barrier=barrier, **options
        )

    return run


@pytest.fixture
def on_disk(run_app, user_app, tmp_path) -> Callable[..., Outcome]:
    """``on_disk(strategy, rounds, ...)`` runs a loop over nodes with state folders.

    The loop is a user's loop with the mod, and the experiment does not change.
    """

    def run(
        strategy: Strategy,
        rounds: int,
        *,
        committed: tuple[int, ...] = (),
        query: bool = True,
        start: Any = None,
    ) -> Outcome:
        strategy.continuity = Continuity("first", committed)
        nodes = {"node_configs": [{"state-dir": str(tmp_path)}] * len(SIZES)}
        app = user_app(hooked_loop, query=query)
        return run_app(strategy, app, rounds=rounds, start=start, grid_options=nodes)

    return run
