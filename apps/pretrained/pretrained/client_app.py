"""The ClientApp of a scanner. The server says what trains."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedbn_flwr.mods import bn_mod, bn_rules, packed
from pretrained.task import Net, load_data
from pretrained.task import test as test_fn
from pretrained.task import train as train_fn

app = ClientApp(mods=[packed, bn_mod])


@app.train()
def train(msg: Message, context: Context):
    """Train the received model on the scanner's images."""
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    (images, labels), _ = own_data(context)
    config, settings = msg.content["config"], context.run_config
    seed = 1000 * config["server-round"] + context.node_config["partition-id"]
    with bn_rules(model, msg, context) as rules:  # it freezes what does not train
        loss = train_fn(
            model,
            images,
            labels,
            epochs=settings["local-epochs"],
            rate=config["lr"],
            batch_size=settings["batch-size"],
            order=torch.Generator().manual_seed(seed),
            rules=rules,
        )
    metrics = MetricRecord({"train-loss": loss, "num-examples": len(labels)})
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}
    return Message(RecordDict(content), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    """Test the scanner's model on its own test images."""
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    _, (images, labels) = own_data(context)
    accuracy = test_fn(model, images, labels)
    metrics = MetricRecord({"eval_acc": accuracy, "num-examples": len(labels)})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)


def own_data(context):
    """Return the training and the test data of this node's scanner."""
    node = context.node_config
    return load_data(node["partition-id"], node["num-partitions"])
