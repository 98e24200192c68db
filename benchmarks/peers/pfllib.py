"""PFLlib, from a checkout: its ``FedBN`` server and clients, which read their images
from files in each round.

Its own loop times its rounds; the first one, which has an evaluation, is not counted.
"""

from __future__ import annotations

import os
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

import numpy as np
import torch
from peers.work import (
    Clock,
    Data,
    Job,
    Setting,
    accuracy,
    contend,
    load_data,
    make_model,
)


def write_data(folder: Path, setting: Setting, data: Data) -> None:
    """Write a file for each client, as PFLlib reads them."""
    for part in ("train", "test"):
        (folder / part).mkdir(parents=True)
    for client in range(setting.clients):
        inputs, targets = data.client(client, setting.examples)
        np.savez(
            folder / "train" / f"{client}.npz",
            data=np.array({"x": inputs.numpy(), "y": targets.numpy()}),
        )
        few = {
            "x": data.test_inputs[:100].numpy(),
            "y": data.test_targets[:100].numpy(),
        }
        np.savez(folder / "test" / f"{client}.npz", data=np.array(few))


def main(job: Job, clock: Clock) -> float:
    """Do the rounds in a temporary folder: PFLlib has its data and results beside its
    working directory.
    """
    setting, data = job.work, load_data(job.data, job.work.dataset)
    sys.path.insert(0, str(Path(job.checkout) / "system"))
    from flcore.servers.serverbn import FedBN

    class Timed(FedBN):  # type: ignore[misc]
        def aggregate_parameters(self) -> None:
            super().aggregate_parameters()
            clock.lap()

    arguments = Namespace(
        model=make_model(setting.model),
        device="cpu",
        dataset="benchmark",
        algorithm="FedBN",
        num_classes=10,
        global_rounds=job.rounds,  # PFLlib does one round more
        local_epochs=1,
        batch_size=setting.batch,
        local_learning_rate=setting.learning_rate,
        learning_rate_decay=False,
        learning_rate_decay_gamma=1.0,
        num_clients=setting.clients,
        join_ratio=1.0,
        random_join_ratio=False,
        client_drop_rate=0.0,
        train_slow_rate=0.0,
        send_slow_rate=0.0,
        time_select=False,
        time_threthold=10000.0,
        few_shot=0,
        goal="benchmark",
        save_folder_name="items",
        top_cnt=100,
        auto_break=False,
        eval_gap=10**9,
        dlg_eval=False,
        dlg_gap=100,
        batch_num_per_client=2,
        num_new_clients=0,
        fine_tuning_epoch_new=0,
    )
    with tempfile.TemporaryDirectory(prefix="pfllib-") as folder:
        write_data(Path(folder) / "dataset" / "benchmark", setting, data)
        (Path(folder) / "system").mkdir()
        os.chdir(Path(folder) / "system")
        torch.manual_seed(0)
        server = Timed(arguments, 0)
        server.train()
        os.chdir("/")
    server.send_models()
    return sum(accuracy(client.model, data) for client in server.clients) / len(
        server.clients
    )


if __name__ == "__main__":
    from peers import pfllib

    contend(pfllib.main, "")
