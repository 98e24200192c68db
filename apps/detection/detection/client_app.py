"""The ClientApp of a site, for each strategy."""

from flwr.app import Context
from torch.utils.data import DataLoader

from detection.task import DETECTION, detector, images, lists
from fedbn_flwr import TorchClient, client_app
from fedbn_flwr.training import LearningRate, LocalTraining, batches_of


def client_fn(context: Context) -> TorchClient:
    """Return the client of this node's site."""
    site, config = context.node_config["partition-id"], context.run_config
    train, test = (
        batches_of(DataLoader(images(site, part), collate_fn=lists))
        for part in ("train", "test")
    )
    training = LocalTraining(
        learning_rate=LearningRate(config["learning-rate"]),
        batch_size=config["batch-size"],
        local_epochs=1,
        sgd_momentum=0.9,
    )
    return TorchClient(detector, train, test, training, context=context, task=DETECTION)


app = client_app(client_fn)
