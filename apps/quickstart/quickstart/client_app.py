"""The ClientApp of the project."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from quickstart.task import Net, load_data
from quickstart.task import test as test_fn
from quickstart.task import train as train_fn

app = ClientApp()


@app.train()
def train(msg: Message, context: Context):
    """Train the received model on local data."""
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    trainloader, _ = loaders(msg, context)
    lr = msg.content["config"]["lr"]
    train_loss = train_fn(model, trainloader, context.run_config["local-epochs"], lr)
    metrics = MetricRecord(
        {"train_loss": train_loss, "num-examples": len(trainloader.dataset)}
    )
    content = RecordDict(
        {"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}
    )
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    """Test the received model on local data."""
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    _, testloader = loaders(msg, context)
    loss, accuracy = test_fn(model, testloader)
    metrics = MetricRecord(
        {
            "eval_loss": loss,
            "eval_acc": accuracy,
            "num-examples": len(testloader.dataset),
        }
    )
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)


def loaders(msg, context):
    """Return this client's training and test batches."""
    node, config = context.node_config, msg.content.config_records.get("config", {})
    server_round = config.get("server-round", 0)
    return load_data(
        node["partition-id"],
        node["num-partitions"],
        context.run_config["batch-size"],
        server_round,
    )
