"""A stock NumPyClient: the whole state dict in, the whole state dict out; the mod keeps
what stays with a client.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from flwr.app import Context
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import Config, NDArrays, Scalar

from fedbn_flwr.mods import bn_mod
from numpyclient.task import Net, accuracy_and_loss, load_data, train

__all__ = ["app"]


class DigitsClient(NumPyClient):
    """A client with its share of the digits."""

    def __init__(
        self, partition_id: int, num_partitions: int, learning_rate: float
    ) -> None:
        torch.set_num_threads(1)
        self.partition_id = partition_id
        self.net = Net()
        self.train_data, self.test_data = load_data(partition_id, num_partitions)
        self.learning_rate = learning_rate

    def get_properties(self, config: Config) -> dict[str, Scalar]:
        """Name this client, so that a run repeats bit for bit: node ids are new in
        every run.
        """
        return {"partition-id": self.partition_id}

    def fit(
        self, parameters: NDArrays, config: dict[str, Scalar]
    ) -> tuple[NDArrays, int, dict[str, Scalar]]:
        """Train on the client's digits."""
        self._set(parameters)
        loss = train(self.net, self.train_data, self.learning_rate)
        arrays = [value.cpu().numpy() for value in self.net.state_dict().values()]
        return arrays, len(self.train_data[1]), {"train-loss": loss}

    def evaluate(
        self, parameters: NDArrays, config: dict[str, Scalar]
    ) -> tuple[float, int, dict[str, Scalar]]:
        """Test on the client's digits."""
        self._set(parameters)
        accuracy, loss = accuracy_and_loss(self.net, self.test_data)
        return loss, len(self.test_data[1]), {"accuracy": accuracy}

    def _set(self, parameters: NDArrays) -> None:
        names = self.net.state_dict()
        self.net.load_state_dict(
            OrderedDict(zip(names, map(torch.tensor, parameters), strict=True))
        )


def client_fn(context: Context) -> Client:
    """Make a node's client."""
    partition, total = (
        int(context.node_config[key]) for key in ("partition-id", "num-partitions")
    )
    return DigitsClient(
        partition, total, float(context.run_config["learning-rate"])
    ).to_client()


app = ClientApp(client_fn=client_fn, mods=[bn_mod])
