"""An app that records the computed and received arrays of its run.

A search looks for their bytes in the messages.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message
from flwr.serverapp import Grid, ServerApp
from torch import Tensor, nn

from fedbn_flwr.batchnorm.sync import SynchronisedStep
from fedbn_flwr.client import TorchClient, client_app
from fedbn_flwr.errors import NothingTrainedError
from fedbn_flwr.messages.records import from_record
from fedbn_flwr.privacy.masked_sums import MaskedSums, MaskSettings
from fedbn_flwr.strategies import STRATEGIES
from fedbn_flwr.training import LearningRate, LocalTraining
from fedbn_flwr.transport.polling_grid import PollingGrid

SIZES = (11, 6, 17)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 3),
    )


class Points:
    """Random images of a client."""

    def __init__(self, partition: int) -> None:
        generator = torch.Generator().manual_seed(partition)
        size = SIZES[partition]
        self.inputs = (
            torch.randn(size, 1, 6, 6, generator=generator) * (1 + partition)
            + partition
        )
        self.targets = torch.randint(3, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(
        self, positions: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        return self.inputs[positions], self.targets[positions]


class Spied(TorchClient):
    """A client that writes each exchange's tensors, and the model around training."""

    spy: Path
    lost = False

    def _fit(self, cached: Any, parameters: Any, config: Any) -> Any:
        exchange, client = SynchronisedStep.exchange, self

        def spied(step: SynchronisedStep, tag: str, local: Tensor) -> Tensor:
            client._write({tag: local}, {})
            return exchange(step, tag, local)

        SynchronisedStep.exchange = spied  # type: ignore[method-assign]
        before = {name: value.clone() for name, value in cached.state.items()}
        found = super()._fit(cached, parameters, config)
        self._write(dict(cached.state), before)
        if self.lost:
            raise RuntimeError("power cut")
        return found

    def _write(self, after: dict[str, Tensor], before: dict[str, Tensor]) -> None:
        arrays = {
            f"after {name}": value.detach().numpy() for name, value in after.items()
        }
        arrays |= {f"before {name}": value.numpy() for name, value in before.items()}
        np.savez(
            self.spy / f"client-{uuid.uuid4().hex}.npz",
            weight=len(self.data.train),
            **arrays,
        )


def client_fn(context: Context) -> TorchClient:
    data: Any = Points(int(context.node_config["partition-id"]))
    training = LocalTraining(
        learning_rate=LearningRate(0.1), batch_size=0, local_steps=2
    )
    found = Spied(model(), data, data, training, context=context)
    found.spy = Path(str(context.run_config["spy-dir"]))
    found.lost = str(context.node_config["partition-id"]) in str(
        context.run_config["lost"]
    ).split(",")
    return found


class RecordingGrid(PollingGrid):
    """A grid that writes the arrays of each reply."""

    spy: Path

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = list(super().pull_messages(message_ids))
        with (self.spy / "received").open("ab") as file:
            for message in replies:
                for record in (
                    message.content.array_records.values()
                    if message.has_content()
                    else ()
                ):
                    file.writelines(array.data for array in record.values())
        time.sleep(0.2)  # until the search the database keeps the messages
        return replies


client = client_app(client_fn)
server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    method = STRATEGIES[str(context.run_config["method"])]
    strategy = method(fraction_evaluate=0.0, min_train_nodes=3, min_available_nodes=3)
    if context.run_config["masked"]:
        strategy.protect(MaskedSums(MaskSettings(masked_sums=True)))
    recording = RecordingGrid(grid)
    recording.spy = Path(str(context.run_config["spy-dir"]))
    try:
        result = strategy.start(
            recording, ArrayRecord(model().state_dict()), num_rounds=1, timeout=120
        )
        np.savez(recording.spy / "final.npz", **from_record(result.arrays))
    except NothingTrainedError as error:
        (recording.spy / "error").write_text(str(error))
    (report,) = strategy.reports
    (recording.spy / "participants").write_text(str(report.participants))
