"""The ends of ``scale.py``: ServerApps that look at the SuperLink, a ClientApp, and
light SuperNodes.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

NAP = 3.0
"""Seconds that a SuperNode sleeps when no message waits for it
(``flwr/supernode/start_client_internal.py``).
"""


def arrays(count: int, size: int, seed: int) -> ArrayRecord:
    """Return ``count`` arrays of ``size`` random bytes each: no two are one object to
    Flower.
    """
    random = np.random.default_rng(seed)
    return ArrayRecord(
        {
            f"{i}": Array(np.frombuffer(random.bytes(size), dtype=np.uint8))
            for i in range(count)
        }
    )


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def make_server_app() -> ServerApp:
    """Return the ServerApp.

    Run config: ``nodes`` to wait for, ``pid`` of the SuperLink, ``idle`` seconds to
    look at it without messages, ``rounds`` of each of the ``shapes`` ("COUNTxBYTES
    ..."), ``times`` for the result.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        from fedbn_flwr.transport.polling_grid import PollingGrid

        config, fast = context.run_config, PollingGrid(grid)
        pid, idle = int(config["pid"]), float(config["idle"])
        while len(node_ids := list(fast.get_node_ids())) < int(config["nodes"]):
            time.sleep(0.5)
        found: dict[str, Any] = {"rounds": []}
        before = cpu_seconds(pid), time.monotonic()
        time.sleep(idle)
        found["idle"] = {
            "cpu": cpu_seconds(pid) - before[0],
            "seconds": time.monotonic() - before[1],
        }
        for shape in str(config["shapes"]).split():
            count, size = map(int, shape.split("x"))
            for server_round in range(int(config["rounds"])):
                record = arrays(count, size, server_round)
                messages = [
                    Message(RecordDict({"arrays": record}), node_id, "train")
                    for node_id in node_ids
                ]
                link, own, wall = (
                    cpu_seconds(pid),
                    time.process_time(),
                    time.monotonic(),
                )
                replies = list(fast.send_and_receive(messages, timeout=600))
                seconds = time.monotonic() - wall
                if len(good := [r for r in replies if r.has_content()]) < len(node_ids):
                    raise RuntimeError(f"{len(good)} of {len(node_ids)} nodes answered")
                cpu = {
                    "superlink": cpu_seconds(pid) - link,
                    "serverapp": time.process_time() - own,
                }
                found["rounds"].append(
                    {"shape": [count, size], "seconds": seconds, **cpu}
                )
                print(found["rounds"][-1], flush=True)
        Path(str(config["times"])).write_text(json.dumps(found))

    return app


def make_rounds_app() -> ServerApp:
    """Return the ServerApp of rounds of FedAvg over real SuperNodes, arrays one by one
    and in one piece.

    Run config: ``nodes``, ``pid`` of the SuperLink, ``rounds`` of each way in each of
    the ``turns``, whose first asks the nodes and is left out, ``models`` ("NAME ..."),
    ``times`` for the result.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        from fedbn_flwr.messages.records import from_record, state_sha256, to_record
        from fedbn_flwr.strategies import FedAvg
        from fedbn_flwr.transport.polling_grid import PollingGrid

        config, found = context.run_config, list[dict[str, Any]]()
        pid, nodes = int(config["pid"]), int(config["nodes"])
        ways = [
            (model, packs)
            for model in str(config["models"]).split()
            for packs in (False, True)
        ]
        for turn in range(int(config["turns"])):
            for model, packs in ways[:: 1 if turn % 2 == 0 else -1]:
                ends: list[dict[str, float]] = []

                def end(
                    server_round: int,
                    arrays: ArrayRecord,
                    metrics: Any,
                    ends: list[Any] = ends,
                ) -> None:
                    spent = {
                        "superlink": cpu_seconds(pid),
                        "serverapp": time.process_time(),
                    }
                    ends.append({"seconds": time.monotonic(), **spent})

                strategy = FedAvg(
                    fraction_evaluate=0.0, min_available_nodes=nodes, on_round_end=end
                )
                initial = to_record(make_model(model).state_dict())
                of_model = ConfigRecord({"model": model})
                rounds = int(config["rounds"])
                result = strategy.start(
                    PollingGrid(grid, packs), initial, rounds, 900.0, of_model
                )
                rejected = [report.rejected for report in strategy.reports]
                if any(rejected):
                    raise RuntimeError(f"replies were refused: {rejected}")
                sha256 = state_sha256(from_record(result.arrays))
                for before, after in pairwise(ends):
                    spent = {key: after[key] - before[key] for key in after}
                    found.append(
                        {"model": model, "packs": packs, "sha256": sha256, **spent}
                    )
                    print(json.dumps(found[-1]), flush=True)
        Path(str(config["times"])).write_text(json.dumps(found))

    return app


def make_model(name: str) -> Any:
    """Return the model for its images: ResNet-20 for CIFAR-10, others for MNIST; the
    same weights at each call.
    """
    import torch

    from fedbn_flwr.lab.models import build_model

    torch.manual_seed(0)
    channels, size = IMAGES.get(name, (1, 28))
    return build_model(name, num_classes=10, channels=channels, size=size)


IMAGES = {"resnet20": (3, 32)}


def make_client_app() -> ClientApp:
    """Return the ClientApp of the same rounds: one step on 32 random images, of the
    model that the config names.
    """
    import torch

    from fedbn_flwr import TorchClient, client_app
    from fedbn_flwr.lab.data import Samples, Subset
    from fedbn_flwr.training import LearningRate, LocalTraining

    class Client(NumPyClient):
        def __init__(self, context: Context) -> None:
            self._context = context

        def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
            return {"num-examples": 32}

        def fit(self, parameters: Any, config: dict[str, Any]) -> Any:
            torch.set_num_threads(1)
            channels, size = IMAGES.get(config["model"], (1, 28))
            pixels = torch.randint(
                256,
                (32, channels, size, size),
                dtype=torch.uint8,
                generator=_generator(),
            )
            every = Samples(pixels, torch.randint(10, (32,), generator=_generator()))
            data = Subset(
                every, torch.arange(32), mean=(0.5,) * channels, std=(0.25,) * channels
            )
            training = LocalTraining(
                learning_rate=LearningRate(0.1), local_steps=1, batch_size=32
            )
            model = lambda: make_model(config["model"])  # noqa: E731
            return TorchClient(model, data, data, training, context=self._context).fit(
                parameters, config
            )

    def _generator() -> torch.Generator:
        return torch.Generator().manual_seed(0)

    return client_app(lambda context: Client(context))


class LightNodes:
    """SuperNodes as threads of this process: Flower's own connection, its 3 s naps, and
    an answer without any app.

    Args:
        address: ``host:port`` of a SuperLink without TLS.
        count: number of nodes.
    """

    def __init__(self, address: str, count: int) -> None:
        self._address, self._over = address, threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(i,), daemon=True)
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the nodes."""
        self._over.set()
        for thread in self._threads:
            thread.join(timeout=60)

    def _run(self, number: int) -> None:
        from flwr.supernode.fleet_http_connection import http_request_response

        self._over.wait(NAP * (number * 0.618 % 1))  # nodes look at different times
        with http_request_response(self._address, insecure=True) as (
            _,
            receive,
            send,
            _,
            _,
            pull,
            push,
            confirm,
        ):
            while not self._over.is_set():
                if (got := receive()) is None:
                    self._over.wait(NAP)
                    continue
                _answer(
                    *got,
                    _patient(send),
                    _patient(pull),
                    _patient(push),
                    _patient(confirm),
                    number,
                )


def _patient(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the call, which is tried again for a minute where the SuperLink answers
    500: its database is locked.
    """
    import httpx

    def tried(*args: Any) -> Any:
        for _ in range(120):
            try:
                return call(*args)
            except httpx.HTTPStatusError as error:
                if error.response.status_code != 500:
                    raise
                time.sleep(0.5)
        return call(*args)

    return tried


def _answer(
    head: Message, tree: Any, send: Any, pull: Any, push: Any, confirm: Any, number: int
) -> None:
    """Pull a message's arrays, and send as many new ones of the same size."""
    from flwr.supercore.inflatable.inflatable_object import (
        get_all_nested_objects,
        get_object_tree,
    )
    from flwr.supercore.inflatable.inflatable_utils import (
        pull_and_inflate_object_from_tree,
        push_objects,
    )

    run_id = head.metadata.run_id
    # Confirm one object at a time, because the SuperLink's database would be locked for
    # many writers at once.
    message = pull_and_inflate_object_from_tree(
        tree,
        partial(pull, run_id),
        partial(confirm, run_id),
        return_type=Message,
        max_concurrent_pulls=1,
    )
    message.metadata.__dict__["_message_id"] = tree.object_id
    received = message.content.array_records["arrays"]
    size = max(array.numpy().nbytes for array in received.values())
    content = RecordDict(
        {"arrays": arrays(len(received), size, time.time_ns() + number)}
    )
    reply = Message(content, reply_to=message)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    own, objects = get_object_tree(reply), get_all_nested_objects(reply)
    wanted, session = send(reply, own, 0.0)
    push_objects(
        {i: objects[i] for i in wanted},
        partial(push, run_id, session),
        max_concurrent_pushes=1,
    )
