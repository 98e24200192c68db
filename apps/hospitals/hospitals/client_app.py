"""The ClientApp of a hospital: one for every strategy, for what a strategy does not ask
for is not done.
"""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.utils.data import DataLoader

from fedbn_flwr.mods import answer_query, bn_mod, bn_rules, packed
from hospitals.task import Net, hospital_data
from hospitals.task import test as test_fn
from hospitals.task import train as train_fn

app = ClientApp(mods=[packed, bn_mod])


@app.query()
def query(msg: Message, context: Context):
    """Tell how much data there is, and how large the first batch will be."""
    data, _ = own_data(context)
    return answer_query(
        msg, context, DataLoader(data, context.run_config["batch-size"])
    )


@app.query("exchange")
@app.train()
def train(msg: Message, context: Context):
    """Train the received model on the hospital's data."""
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    data, _ = own_data(context)
    settings, config = context.run_config, msg.content["config"]
    seed = (
        1_000_000 * settings["seed"]
        + 1000 * config["server-round"]
        + context.node_config["partition-id"]
    )
    order = torch.Generator().manual_seed(seed)
    with bn_rules(model, msg, context) as rules:
        loss = train_fn(
            model,
            data,
            settings["local-epochs"],
            config["lr"],
            settings["batch-size"],
            order,
            rules,
        )
    metrics = MetricRecord({"train-loss": loss, "num-examples": len(data)})
    return Message(
        RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}),
        reply_to=msg,
    )


@app.evaluate()
def evaluate(msg: Message, context: Context):
    """Test the hospital's model on its own patients."""
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    _, data = own_data(context)
    loss, accuracy = test_fn(model, data)
    metrics = MetricRecord(
        {"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(data)}
    )
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)


def own_data(context):
    """Return the training and test data of this node's hospital."""
    node = context.node_config
    return hospital_data(
        node["partition-id"], node["num-partitions"], context.run_config["seed"]
    )
