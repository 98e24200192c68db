"""A FedBN project on Flower's ``start_server`` and ``start_client``, in processes.

::

    python -m tests.support.start_server server PORT FOLDER
    python -m tests.support.start_server client PORT NUMBER

The server writes ``FOLDER/final.npz``.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context
from flwr.client import start_client
from flwr.clientapp import ClientApp
from flwr.common import parameters_to_ndarrays
from flwr.server import ServerConfig, start_server

from fedbn_flwr import LegacyStrategy, TorchClient, to_client_fn
from fedbn_flwr.messages.records import from_record
from fedbn_flwr.mods import bn_mod
from fedbn_flwr.strategies import FedBN
from fedbn_flwr.training import LearningRate, LocalTraining
from tests.support.many_layers import two_layers as model
from tests.support.points import Points
from tests.support.synchronised import client_data
from tests.support.their_client import numpy_clients

SIZES = (6, 14)
ROUNDS = 2


def points(client: int) -> Points:
    return client_data((5,), SIZES)[client]


def torch_client(context: Context):
    data = points(int(context.node_config["partition-id"]))
    training = LocalTraining(learning_rate=LearningRate(0.1), batch_size=4)
    return TorchClient(model(), data, data, training, context=context).to_client()


def project_app(kind: str) -> ClientApp:
    """Return the project's app, ``torch`` or ``numpy`` with the mod."""
    if kind == "torch":
        return ClientApp(torch_client)
    client_fn = numpy_clients(model, client_data((5,), SIZES))
    app = ClientApp(client_fn, mods=[bn_mod])
    return app  # noqa: RET504


@contextmanager
def processes(
    folder: Path, port: int, env: dict[str, str]
) -> Iterator[list[subprocess.Popen]]:
    """Start the server and clients."""
    roles = [("server", str(folder)), *(("client", str(i)) for i in range(len(SIZES)))]
    started = []
    for role, argument in roles:
        command = ["python", "-m", __name__, role, str(port), argument]
        with (folder / f"{role}-{Path(argument).name}.log").open("w") as log:
            started.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


class Saving(LegacyStrategy):  # before: Saving(FedAvg)
    """A project's own strategy writes the model of each round."""

    folder: Path

    def aggregate_fit(
        self, server_round: int, results: Any, failures: Any
    ) -> tuple[Any, Any]:
        """Write the model."""
        parameters, metrics = super().aggregate_fit(server_round, results, failures)
        if parameters is not None:
            arrays = parameters_to_ndarrays(parameters)
            np.savez(self.folder / f"round-{server_round}.npz", *arrays)
        return parameters, metrics


def _serve(address: str, folder: Path) -> None:
    final = {}

    def noted(server_round: int, arrays: ArrayRecord, metrics: Any) -> None:
        final.update(from_record(arrays))

    strategy, net, rounds = FedBN(), model(), ROUNDS
    to_legacy = Saving  # instead of fedbn_flwr.to_legacy
    # the lines of docs/flower-projects.md
    legacy = to_legacy(strategy, ArrayRecord(net.state_dict()), num_rounds=rounds)
    legacy.folder = folder
    config = ServerConfig(num_rounds=rounds)
    strategy.on_round_end = noted
    start_server(server_address=address, config=config, strategy=legacy)
    np.savez(folder / "final.npz", *final.values())


def _join(address: str, number: int) -> None:
    # If the server does not listen yet, Flower's start_client ends with an error.
    host, _, port = address.partition(":")
    while True:
        with socket.socket() as probe:
            if probe.connect_ex((host, int(port))) == 0:
                break
        time.sleep(0.05)
    app = project_app("numpy")
    client_fn = to_client_fn(app, {"partition-id": number})
    start_client(server_address=address, client_fn=client_fn)


if __name__ == "__main__":
    torch.set_num_threads(1)  # as in the tests: two threads give other bits
    role, port, argument = sys.argv[1:]
    if role == "server":
        _serve(f"127.0.0.1:{port}", Path(argument))
    else:
        _join(f"127.0.0.1:{port}", int(argument))
