"""The network, its first training, the scanners' images and the training there."""

import torch
from sklearn.datasets import load_digits
from torch import nn


class Net(nn.Module):
    """A small CNN with BatchNorm for images of 1 x 8 x 8."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.head = nn.Linear(32 * 2 * 2, 5)

    def forward(self, x):
        """Return the logits, (batch, 5)."""
        return self.head(self.features(x).flatten(1))


def digits(known):
    """Return images and labels of the digits 0 to 4 (known), or of 5 to 9."""
    pictures, labels = load_digits(return_X_y=True)
    images = torch.tensor(pictures, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    labels = torch.tensor(labels)
    chosen = (labels < 5) == known
    return images[chosen], labels[chosen] % 5


def pretrained(seed):
    """Return the network after training on the digits 0 to 4."""
    torch.manual_seed(seed)
    model = Net()
    images, labels = digits(known=True)
    order = torch.Generator().manual_seed(seed)
    train(model, images, labels, epochs=5, rate=0.1, batch_size=32, order=order)
    return model


def load_data(partition, num_partitions):
    """Return training and test images of a scanner: its own contrast and brightness."""
    images, labels = digits(known=False)
    shift = partition / max(num_partitions - 1, 1)
    own = torch.arange(partition, len(labels), num_partitions)
    images, labels = (1 - 0.6 * shift) * images[own] + 0.6 * shift, labels[own]
    cut = int(0.3 * len(own))
    return (images[:cut], labels[:cut]), (images[cut:], labels[cut:])


def train(model, images, labels, *, epochs, rate, batch_size, order, rules=None):
    """Train the model; return the mean loss of the batches."""
    trainable = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=rate, momentum=0.9)
    if rules:
        optimizer = rules.wrap(optimizer)
    model.train()
    losses = []
    for _ in range(epochs):
        shuffled = torch.randperm(len(labels), generator=order)
        for batch in shuffled.split(batch_size):
            if len(batch) < 2:
                continue
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return sum(losses) / len(losses)


def test(model, images, labels):
    """Return the accuracy."""
    model.eval()
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()
