"""Files that version 0.1.0 wrote before its modules moved can be read, and give the same bits.

``tests/fixtures/files_of_0_1_0`` was written by the commit ce002ea: the state folder of two nodes with the mod after
two rounds, and the replay log of a synchronised step after its first exchange. ``expected.json`` holds what that commit
makes of them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from safetensors import safe_open
from safetensors.numpy import load_file
from torch import nn

from fedbn_flwr import InProcessGrid, TorchClient
from fedbn_flwr.messages.protocol import Continuity
from fedbn_flwr.messages.records import from_record, state_sha256, to_record
from fedbn_flwr.mods import bn_rules, local_bn
from fedbn_flwr.strategies import FedBN
from fedbn_flwr.training import LearningRate, LocalTraining

FIXTURES = Path(__file__).parent / "fixtures/files_of_0_1_0"
EXPECTED = json.loads((FIXTURES / "expected.json").read_text())


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def test_the_mods_state_folder_goes_on(tmp_path: Path) -> None:
    app = ClientApp(mods=[local_bn])

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        net = model()
        key = int(context.node_config["partition-id"]) + 10 * int(msg.content["config"]["server-round"])
        x = torch.randn(20, 2, generator=torch.Generator().manual_seed(key))
        net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        with bn_rules(net, msg, context) as rules:
            optimizer = rules.wrap(torch.optim.SGD(net.parameters(), lr=0.1))
            nn.functional.cross_entropy(net(x), (x[:, 0] > 0).long()).backward()
            optimizer.step()
        content = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": 20})}
        return Message(RecordDict(content), reply_to=msg)

    folder = shutil.copytree(FIXTURES / "mod", tmp_path / "mod")
    strategy = FedBN(fraction_evaluate=0.0)
    strategy.continuity = Continuity("fixture", "run-1")
    start = to_record(load_file(FIXTURES / "mod-after-2.safetensors"))
    # The shared entries alone: the nodes take their own from disk, and the model's order from there too.
    whole = {name: start[name] for name in model().state_dict()}
    with InProcessGrid(app, 2, node_configs=[{"state-dir": str(folder)}] * 2) as grid:
        result = strategy.start(grid=grid, initial_arrays=ArrayRecord(whole), num_rounds=1)
    assert strategy.run.kept.hashes == EXPECTED["mod-local"]
    assert state_sha256(from_record(result.arrays)) == EXPECTED["mod"]


class Points:
    """Six labelled points."""

    def __init__(self) -> None:
        self.x = torch.randn(6, 2, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return 6

    def batch(self, positions: torch.Tensor, generator: torch.Generator | None = None) -> Any:
        return self.x[positions], (self.x[positions, 0] > 0).long()


def test_a_replay_log_goes_on() -> None:
    """Exchanges have the layer's path in their names since; a log ends with its process, and none has both."""

    def since(name: str) -> str:
        return f"{name}/1" if name.endswith(("mean/0", "variance/0")) else name

    with safe_open(FIXTURES / "replay-log.safetensors", "np") as file:
        metadata = file.metadata()
    configs, names = json.loads(metadata["configs"]), json.loads(metadata["records"])
    entries = load_file(FIXTURES / "replay-log.safetensors")
    order = list(model().state_dict())
    records: dict[str, Any] = {key: ConfigRecord(value) for key, value in configs.items()}
    for key in names:
        own = {since(k.removeprefix(f"{key}|")): array for k, array in entries.items() if k.startswith(f"{key}|")}
        records[key] = to_record({name: own[name] for name in sorted(own, key=lambda n: n in order and order.index(n))})
    context = Context(1, 1, {"partition-id": 0}, RecordDict(records), {})
    settings = LocalTraining(learning_rate=LearningRate(0.1), local_steps=1, batch_size=0)
    client = TorchClient(model(), Points(), Points(), settings, context=context)
    config = {"server-round": 1, "fedbn-flwr.hooks": "synchronise-first-step", "fedbn-flwr.fedtan-exchanges": "3L+1"}
    config |= {
        "fedbn-flwr.fedtan-backward": "global",
        "fedbn-flwr.fedtan-attempt": 0,
        "fedbn-flwr.fedtan-union": 6,
        "fedbn-flwr.fedtan-batch-size": 6,
    }
    with safe_open(FIXTURES / "replay-answer.safetensors", "np") as file:
        tag, answer = since(file.metadata()["name"]), file.get_tensor("answer")
    (answer,), _, metrics = client.fit([answer], {**config, "fedbn-flwr.array-names": json.dumps([tag])})
    (tag,) = json.loads(metrics["fedbn-flwr.array-names"])
    assert tag == "fedtan/gradients/0/1"
    final, _, _ = client.fit([answer], {**config, "fedbn-flwr.array-names": json.dumps([tag])})
    assert state_sha256(dict(zip(order, final, strict=True))) == EXPECTED["replay"]
