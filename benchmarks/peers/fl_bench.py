"""FL-bench, from a checkout: its FedBN, serial, without evaluation.

FL-bench reads its data beside its code, so it runs in a temporary copy of the checkout.
The model takes the place of its ``custom`` one; statistics stay with the client
(``buffers=local``), as in FedBN.
"""

from __future__ import annotations

import json
import os
import pickle
import runpy
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from peers.work import MLP, Clock, Job, accuracy, contend, load_data, make_model


def main(job: Job, clock: Clock) -> float:
    """Do the rounds."""
    setting, data = job.work, load_data(job.data, job.work.dataset)
    with tempfile.TemporaryDirectory(prefix="fl-bench-") as folder:
        copy = Path(folder) / "checkout"
        shutil.copytree(job.checkout, copy, ignore=shutil.ignore_patterns(".git"))
        own = range(setting.clients)
        indices = [
            list(range(k * setting.examples, (k + 1) * setting.examples)) for k in own
        ]
        partition = {
            "separation": {
                "train": list(own),
                "val": [],
                "test": [],
                "total": setting.clients,
            },
            "data_indices": [
                {"train": found, "val": [], "test": []} for found in indices
            ],
        }
        (copy / "data" / "mnist").mkdir(exist_ok=True)
        (copy / "data" / "mnist" / "partition.pkl").write_bytes(pickle.dumps(partition))
        (copy / "data" / "mnist" / "args.json").write_text(
            json.dumps({"split": "sample"})
        )
        os.chdir(copy)
        sys.path.insert(0, str(copy))

        from data.utils.datasets import DATASETS, BaseDataset
        from src.server.fedavg import FedAvgServer
        from src.utils.models import MODELS, DecoupledModel

        class Model(DecoupledModel):  # type: ignore[misc]
            def __init__(self, dataset: str, pretrained: bool) -> None:
                super().__init__()
                model = make_model(setting.model)
                if not isinstance(model, MLP):
                    raise TypeError(f"{setting.model} has no two halves")
                self.base, self.classifier = model.base, model.classifier

        class Images(BaseDataset):  # type: ignore[misc]
            def __init__(self, root: Path, args: Any, **transforms: Any) -> None:
                none: dict[str, Any] = dict.fromkeys(transforms)  # data are normalised
                super().__init__(data.inputs, data.targets, list(range(10)), **none)

            def _rescale_data(self) -> None:
                pass

        servers: list[Any] = []
        one_round = FedAvgServer.train_one_round

        def train_one_round(server: Any) -> None:
            one_round(server)
            clock.lap()
            servers[:] = [server]

        MODELS["custom"], DATASETS["mnist"] = Model, Images
        FedAvgServer.train_one_round = train_one_round
        common = {
            **{
                "join_ratio": 1,
                "global_epoch": job.rounds + 1,
                "local_epoch": 1,
                "batch_size": setting.batch,
            },
            **{
                "buffers": "local",
                "client_side_evaluation": "false",
                "use_cuda": "false",
                "verbose_gap": 10**9,
            },
            **{
                "test.client.interval": -1,
                "save_log": "false",
                "save_metrics": "false",
            },
            "save_learning_curve_plot": "false",
        }
        sys.argv = [
            "main.py",
            "method=fedbn",
            "dataset.name=mnist",
            "model.name=custom",
            "mode=serial",
        ]
        sys.argv += [f"optimizer.lr={setting.learning_rate}", "optimizer.name=sgd"]
        sys.argv += [f"common.{key}={value}" for key, value in common.items()]
        runpy.run_path("main.py", run_name="__main__")
        (server,) = servers
        found = []
        model = Model("mnist", False)
        for client in own:
            parts = server.get_client_model_params(client)
            model.load_state_dict(
                {**parts["regular_model_params"], **parts["personal_model_params"]},
                strict=False,
            )
            found.append(accuracy(model, data))
        os.chdir("/")
    torch.set_num_threads(1)
    return sum(found) / len(found)


if __name__ == "__main__":
    from peers import fl_bench

    contend(fl_bench.main, "")
