"""An app's draws from the default generators.

They repeat, and they differ by round, client, kind of work and seed.
"""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.messages.records import to_record
from fedbn_flwr.mods import bn_mod
from fedbn_flwr.strategies import FedAvg
from fedbn_flwr.training.run_memory import note
from tests.support.in_process import echo, to

KINDS = ("train", "evaluate", "query.statistics", "query.exchange", "query")


def draw(message: Message, context: Context) -> Message:
    """Draw from the default generators of torch, NumPy and Python."""
    drawn = [float(torch.rand(())), float(np.random.rand()), random.random()]
    message.content["metrics"] = MetricRecord({"num-examples": 1, "drawn": drawn})
    return echo(message)


def app_with(mods) -> ClientApp:
    app = ClientApp(mods=list(mods))
    for register in (app.train(), app.evaluate(), app.query()):
        register(draw)
    for name in ("statistics", "exchange"):
        app.query(name)(draw)
    return app


def drawn(
    grid: InProcessGrid, kind: str, server_round: int, partition: int, seed: int
) -> list[float]:
    config = ConfigRecord({"server-round": server_round})
    if seed:
        config["fedbn-flwr.seed"] = seed
    content = RecordDict({"arrays": to_record({"w": np.zeros(1)}), "config": config})
    (reply,) = grid.send_and_receive(to(grid, partition, kind=kind, content=content))
    return list(reply.content["metrics"]["drawn"])


@pytest.mark.parametrize("mods", [(), (bn_mod,)], ids=["no mod", "bn_mod"])
def test_an_app_draws_anew_in_each_round_client_kind_and_seed(mods) -> None:
    """A training repeats the exchanges of its first step.

    A node answers the query when it joins, so this answer does not depend on the round.
    """
    cases = list(itertools.product(KINDS, (1, 2, 3), (0, 1), (0, 5)))
    streams = []
    for kind, server_round, *others in cases:
        purpose = "train" if kind == "query.exchange" else kind
        streams.append((purpose, server_round if kind != "query" else 0, *others))
    runs = []
    for workers in (0, 2):
        state = torch.get_rng_state()
        # The nodes of the second run have other node ids.
        app = app_with(mods)
        with InProcessGrid(app, 2, workers=workers, seed=workers) as grid:
            runs.append([drawn(grid, *case) for case in cases])
        assert torch.equal(torch.get_rng_state(), state), "the outer generators"
    assert runs[0] == runs[1]
    of_stream = dict(zip(streams, runs[0], strict=True))
    assert runs[0] == [of_stream[stream] for stream in streams]
    numbers = {number for found in of_stream.values() for number in found}
    assert len(numbers) == 3 * len(of_stream)


class Drawn:
    """Four examples, and one draw for a batch."""

    def __init__(self, draw) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 4

    def batch(self, positions: Tensor, generator: Any = None) -> tuple[Tensor, Tensor]:
        inputs = positions[:, None].expand(-1, 5) + float(self.draw())
        return inputs.double(), positions % 3


class Filled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.nan_to_num()


OWN = (
    np.random.default_rng(0).random,
    functools.partial(torch.rand, (), generator=torch.Generator()),
    random.Random(0).random,
    itertools.count().__next__,
)
DEFAULT = (
    *(np.random.random, functools.partial(torch.rand, ()), random.random, int),
    functools.partial(float, "nan"),  # a value that is missing
)


@pytest.mark.parametrize("draws", [OWN, DEFAULT], ids=["own", "default"])
def test_a_run_names_data_with_random_state_of_their_own_once(
    draws, federate, mlp, caplog
) -> None:
    note("own random state")  # by a client outside a run; the run does not remember it
    for draw in draws:
        caplog.clear()
        datasets = [Drawn(draw)] * 2
        federate(FedAvg(), lambda: nn.Sequential(Filled(), mlp()), datasets, rounds=2)
        own = [one for one in caplog.records if one.module == "client_data"]
        assert len(own) == (draws is OWN)


def noisy(message: Message, context: Context, call_next) -> Message:
    """A mod that draws after the app's function, as Flower's ``LocalDpMod`` does."""
    reply = call_next(message, context)
    drawn = [float(torch.rand(())), float(np.random.rand()), random.random()]
    noise = reply.content.get("noise", {"drawn": []})["drawn"]
    reply.content["noise"] = MetricRecord({"drawn": [*noise, *drawn]})
    return reply


@pytest.mark.parametrize(
    "mods", [(noisy, bn_mod), (bn_mod, noisy), (noisy, bn_mod, noisy)], ids=len
)
def test_no_draw_of_a_mod_follows_the_seed_of_the_server(mods) -> None:
    """The server has the seed, and could subtract noise that depends on it."""
    found = []
    for _ in range(2):
        content = RecordDict(
            {"arrays": to_record({"w": np.zeros(1)}), "config": ConfigRecord({})}
        )
        content["config"]["server-round"] = 1
        with InProcessGrid(app_with(mods), 1) as grid:
            (reply,) = grid.send_and_receive(to(grid, 0, kind="train", content=content))
        found.append(
            [list(reply.content[key]["drawn"]) for key in ("metrics", "noise")]
        )
    (app, noise), (same, other) = found
    assert app == same
    assert not {*noise} & {*other}
