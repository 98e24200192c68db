"""In this project, a class trains a copy of the model and keeps its best.

``PROJECT`` is the project. ``CHANGES`` has the lines that a method changes in it.
"""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
from flwr.app import ArrayRecord

from fedbn_flwr import InProcessGrid
from fedbn_flwr.messages.records import from_record
from fedbn_flwr.strategies import FedAvg, FedBN, FedTAN, FixBN

PROJECT = """
import copy
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).double()

def loader_of(site):
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(site)).double()
    return DataLoader(TensorDataset(x * (site + 1) + site, torch.arange(24) % 2), 8)

class Trainer:
    def __init__(self, model, loader):
        self.model, self.loader, self.best = model, loader, None

    def fit(self):
        model = copy.deepcopy(self.model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for epoch in range(2):
            model.train()
            for x, y in self.loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
            self.best = copy.deepcopy(model)
        self.model.load_state_dict(model.state_dict())

app = ClientApp()

@app.train()
def train(msg, context):
    net, loader = build(), loader_of(int(context.node_config["partition-id"]))
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    trainer = Trainer(net, loader)
    trainer.fit()
    assert not trainer.best.training or trainer.best[1].training
    record = ArrayRecord(net.state_dict())
    metrics = MetricRecord({"num-examples": 24})
    return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=msg)
"""
MOD = [
    ("import copy\n", "import copy\nfrom fedbn_flwr.mods import bn_mod\n"),
    ("app = ClientApp()", "app = ClientApp(mods=[bn_mod])"),
]
RULES = [
    ("import bn_mod\n", "import answer_query, bn_mod, bn_rules\n"),
    ("    def fit(self):\n", "    def fit(self, msg, context):\n"),
    ("trainer.fit()", "trainer.fit(msg, context)"),
]
QUERY = """
@app.query()
def query(msg, context):
    loader = loader_of(int(context.node_config["partition-id"]))
    return answer_query(msg, context, loader)

@app.query("exchange")
@app.train()
"""
STEP = [
    (
        "        for epoch",
        "        with bn_rules(model, msg, context) as rules:\n         for epoch",
    ),
    (
        "                loss = nn",
        "                with rules.step(len(x)):\n                 loss = nn",
    ),
    ("                loss.backward()", "                 loss.backward()"),
    ("\n@app.train()\n", QUERY),
]
BLOCK = [
    (
        "        for epoch",
        "        with bn_rules(model, msg, context):\n         for epoch",
    ),
]
CHANGES: dict[Any, tuple[list[tuple[str, str]], int]] = {
    FedAvg: ([], 0),
    FedBN: (MOD, 2),
    FixBN: ([*MOD, *RULES, *BLOCK], 5),
    FedTAN: ([*MOD, *RULES, *STEP], 11),
}
"""The changes, and the number of new or changed lines, without indented ones."""


def changed(method: Any) -> tuple[str, int]:
    """Return the changed project, and the number of new lines."""
    source = PROJECT
    for old, new in CHANGES[method][0]:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    before = {line.strip() for line in PROJECT.splitlines()}
    lines = [line.strip() for line in source.splitlines()]
    return source, sum(bool(line) and line not in before for line in lines)


@pytest.mark.parametrize("method", CHANGES)
def test_a_trainer_that_copies_the_model(method: Any) -> None:
    source, number = changed(method)
    assert number == CHANGES[method][1]
    names: dict[str, Any] = {}
    if method in (FixBN, FedTAN):  # the body of the block is one space deeper
        head, _, rest = source.partition("         for epoch")
        body, _, tail = rest.partition("        self.model.load")
        body = textwrap.indent(body, " ").removeprefix(" ")
        source = f"{head}         for epoch{body}        self.model.load{tail}"
    exec(source, names)
    arrays = ArrayRecord(names["build"]().state_dict())
    strategy = method(
        fraction_evaluate=0.0, **({"freeze_at": 1} if method is FixBN else {})
    )
    with InProcessGrid(names["app"], num_nodes=2) as grid:
        result = strategy.start(grid, arrays, num_rounds=2)
    assert [report.rejected for report in strategy.reports] == [{}, {}]
    moved = from_record(result.arrays)["1.num_batches_tracked"]
    assert int(moved) == {FedBN: 0, FixBN: 6}.get(method, 12)
