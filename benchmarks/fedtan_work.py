"""The work of ``fedtan.py``: ResNet-20, five clients, five steps on batches of 128; in
process and as a Flower app.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import nn

from fedbn_flwr import TorchClient, client_app
from fedbn_flwr.lab.data import Samples, Subset
from fedbn_flwr.lab.models import build_model
from fedbn_flwr.messages.protocol import EXCHANGE_QUERY
from fedbn_flwr.messages.records import to_record
from fedbn_flwr.strategies import STRATEGIES, Strategy
from fedbn_flwr.training import LearningRate, LocalTraining
from fedbn_flwr.training.batches import set_memory_format
from fedbn_flwr.transport.polling_grid import PollingGrid

CLIENTS, STEPS, BATCH = 5, 5, 128
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)
TRAINING = LocalTraining(
    learning_rate=LearningRate(0.1), local_steps=STEPS, batch_size=BATCH
)


def make_model() -> nn.Module:
    """Return ResNet-20 for CIFAR-10, as the package's own clients have it."""
    return set_memory_format(
        build_model("resnet20", num_classes=10, channels=3, size=32)
    )


@cache
def samples(data_dir: str) -> Samples:
    """Return CIFAR-10's training images from torchvision's folder, or random bytes of
    the same kind where it is "".
    """
    if data_dir:
        from torchvision.datasets import CIFAR10

        real = CIFAR10(data_dir, train=True, download=False)
        pixels = torch.from_numpy(np.ascontiguousarray(real.data.transpose(0, 3, 1, 2)))
        return Samples(pixels, torch.tensor(real.targets, dtype=torch.int64))
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(
        256, (2000 * CLIENTS, 3, 32, 32), dtype=torch.uint8, generator=generator
    )
    return Samples(pixels, torch.randint(10, (len(pixels),), generator=generator))


def view(partition_id: int, data_dir: str) -> Subset:
    """Return one client's data: every fifth image."""
    every = samples(data_dir)
    return Subset(
        every, torch.arange(partition_id, len(every), CLIENTS), mean=MEAN, std=STD
    )


def make_client_app(data_dir: str, amp: bool = False) -> ClientApp:
    """Return the clients' app; with ``amp`` they train under bfloat16 autocast."""
    training = replace(TRAINING, amp=amp)

    def client_fn(context: Context) -> TorchClient:
        # Use one thread, because over a network each client has a process, and the
        # processes share the cores.
        torch.set_num_threads(1)
        data = view(int(context.node_config["partition-id"]), data_dir)
        return TorchClient(make_model, data, data, training, context=context)

    app = client_app(client_fn, mods=[stamp])

    @app.query("nothing")
    def nothing(message: Message, context: Context) -> Message:
        return Message(RecordDict(), reply_to=message)

    return app


NOTHING, STAMP = "query.nothing", "benchmark-stamp"
PARTS = (
    "until a process starts",
    "start and imports",
    "the app's work",
    "until the reply is there",
)


def stamp(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """Add to the reply of an exchange, or of an empty query, when this process began,
    and the app's work.
    """
    entered = time.time()
    reply = call_next(message, context)
    if (
        message.metadata.message_type in (EXCHANGE_QUERY, NOTHING)
        and reply.has_content()
    ):
        reply.content[STAMP] = MetricRecord(
            {"began": process_began(), "entered": entered, "left": time.time()}
        )
    return reply


def process_began() -> float:
    """Return when this process was started, in seconds of ``time.time()``, to a
    hundredth.
    """
    ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    since_boot = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf(
        "SC_CLK_TCK"
    )
    return time.time() - since_boot


class FloorGrid(PollingGrid):
    """A grid that sends an empty query to the same nodes before every n-th exchange,
    times both and writes the times.

    Attributes:
        seconds: message type -> the seconds from pushing the messages to the last
            reply.
        parts: message type -> the seconds of ``PARTS`` of each reply.
    """

    def __init__(self, grid: Grid, every: int, out: Path) -> None:
        super().__init__(grid)
        self._out = out
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.parts: dict[str, list[list[float]]] = defaultdict(list)
        self._every, self._exchanges, self._left, self._pushed = every, 0, 0, 0.0

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        batch = list(messages)
        if batch[0].metadata.message_type == EXCHANGE_QUERY:
            self._exchanges += 1
            if self._exchanges % self._every == 0:
                nodes = [message.metadata.dst_node_id for message in batch]
                list(
                    self.send_and_receive(
                        [Message(RecordDict(), node, NOTHING) for node in nodes]
                    )
                )
        self._left, self._pushed = len(batch), time.time()
        return super().push_messages(batch)

    def pull_messages(self, *args: Any, **kwargs: Any) -> Iterator[Message]:
        for reply in super().pull_messages(*args, **kwargs):
            kind = reply.metadata.message_type
            self._left -= 1
            now = time.time()
            if reply.has_content() and STAMP in reply.content.metric_records:
                own = reply.content.metric_records[STAMP]
                moments = [self._pushed]
                for key in ("began", "entered", "left"):
                    moments.append(float(own[key]))  # type: ignore[arg-type]
                moments.append(now)
                self.parts[kind].append(
                    [after - before for before, after in pairwise(moments)]
                )
            if self._left == 0:
                self.seconds[kind].append(now - self._pushed)
                self._out.write_text(
                    json.dumps({"seconds": self.seconds, "parts": self.parts})
                )
            yield reply


def make_strategy(name: str, clients: int = CLIENTS, **settings: Any) -> Strategy:
    """Return a strategy over all clients, without evaluation."""
    return STRATEGIES[name](
        fraction_evaluate=0.0,
        min_train_nodes=clients,
        min_available_nodes=clients,
        min_replies=clients,
        **settings,
    )


def round_seconds(strategy: Strategy, grid: Grid, rounds: int) -> list[float]:
    """Run rounds and return the seconds each took, without the first, which also gets
    to know the nodes.

    With ``rounds`` = 0 the first alone is run and counted.

    Raises:
        RuntimeError: a client was refused: the figures would not be those of the whole
            work.
    """
    times: list[float] = []

    def note(server_round: int, arrays: ArrayRecord) -> None:
        times.append(time.perf_counter())

    strategy.start(
        grid=grid,
        initial_arrays=to_record(make_model().state_dict()),
        num_rounds=rounds + 1,
        evaluate_fn=note,
    )
    if refused := [
        reason for report in strategy.reports for reason in report.rejected.values()
    ]:
        raise RuntimeError(f"a client was refused: {refused[0]}")
    return [
        after - before for before, after in pairwise(times[1:] if rounds else times)
    ]


def bare_steps(count: int, threads: int, data_dir: str = "") -> int:
    """Do ``count`` steps of plain torch, as a client does them; return ``count``."""
    torch.set_num_threads(threads)
    model, data = make_model(), view(0, data_dir)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        inputs, targets = data.batch(
            torch.randint(len(data), (BATCH,), generator=generator)
        )
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return count


def make_server_app() -> ServerApp:
    """Return a ServerApp that times a strategy.

    Run config: ``strategy``, ``exchange`` and ``exchanges``, ``bind`` and ``tls-dir``
    of the channel, ``clients``, ``rounds``, ``times``, ``floor`` (an empty query before
    every n-th exchange; 0: none).
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        config = context.run_config
        settings = {}
        if config["exchange"]:
            names = {"fedtan_transport": "exchange", "fedtan_exchanges": "exchanges"}
            # Set the address only for the channel, because without the channel these
            # settings have no effect and are refused.
            if config["exchange"] == "channel":
                names |= {"fedtan_bind": "bind", "fedtan_tls_dir": "tls-dir"}
            settings = {field: str(config[key]) for field, key in names.items()}
        strategy = make_strategy(
            str(config["strategy"]), int(config["clients"]), **settings
        )
        times = Path(str(config["times"]))
        if every := int(config["floor"]):
            grid = FloorGrid(grid, every, times.with_suffix(".floor"))
        seconds: Sequence[float] = round_seconds(strategy, grid, int(config["rounds"]))
        if isinstance(grid, FloorGrid):
            seconds = [sum(seconds) - sum(grid.seconds[NOTHING])]
        times.write_text(json.dumps(list(seconds)))

    return app
