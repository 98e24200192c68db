"""fluke: its ``FedBN`` with clients and server made by hand, all in memory, and no
evaluation.

``skip_singleton`` and shuffling are on, as in its own configurations.
"""

from __future__ import annotations

import torch
from fluke import DDict, FlukeENV
from fluke.algorithms.fedbn import FedBN, FedBNClient
from fluke.config import OptimizerConfigurator
from fluke.data import FastDataLoader
from fluke.server import Server
from fluke.utils import FederationObserver
from peers.work import Clock, Job, accuracy, contend, load_data, make_model


class Lap(FederationObserver):  # type: ignore[misc]
    """Notes the end of each round."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def end_round(self, round: int) -> None:
        """Note it."""
        self.clock.lap()


def main(job: Job, clock: Clock) -> float:
    """Do the rounds."""
    setting, data = job.work, load_data(job.data, job.work.dataset)
    environment = FlukeENV()
    environment.set_seed(0)
    environment.set_device("cpu")
    environment.set_inmemory(True)
    environment.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    optimizer = OptimizerConfigurator(DDict(name="SGD", lr=setting.learning_rate))
    clients = [
        FedBNClient(
            index,
            FastDataLoader(
                *data.client(index, setting.examples),
                num_labels=10,
                batch_size=setting.batch,
                shuffle=True,
            ),
            None,
            optimizer,
            torch.nn.CrossEntropyLoss(),
            local_epochs=1,
        )
        for index in range(setting.clients)
    ]
    server = Server(make_model(setting.model), None, clients, weighted=True)
    federation = FedBN(setting.clients, None, DDict(), clients=clients, server=server)
    federation.set_callbacks(Lap(clock))
    federation.run(job.rounds + 1, 1.0)
    return sum(accuracy(client.model, data) for client in clients) / len(clients)


if __name__ == "__main__":
    from peers import fluke_fl

    contend(fluke_fl.main, "fluke-fl")
