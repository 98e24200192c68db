"""The model, the data and the training of the project."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """A small CNN with BatchNorm for pictures of 1 x 8 x 8."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.fc = nn.Linear(16 * 2 * 2, 10)

    def forward(self, x):
        """Return the logits, (batch, 10)."""
        x = torch.max_pool2d(torch.relu(self.bn1(self.conv1(x))), 2)
        x = torch.max_pool2d(torch.relu(self.bn2(self.conv2(x))), 2)
        return self.fc(x.flatten(1))


def load_data(partition, num_partitions, batch_size, server_round):
    """Return training and test batches of one client: its own scanner's contrast and
    brightness, its own digits.
    """
    pictures, labels = load_digits(return_X_y=True)
    images = torch.tensor(pictures, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    own = torch.arange(partition, len(images), num_partitions)
    shift = partition / max(num_partitions - 1, 1)
    data = TensorDataset(
        (1 - 0.5 * shift) * images[own] + 0.5 * shift, torch.tensor(labels)[own]
    )
    parts = torch.utils.data.random_split(
        data, [0.8, 0.2], torch.Generator().manual_seed(partition)
    )
    order = torch.Generator().manual_seed(1000 * server_round + partition)
    return DataLoader(parts[0], batch_size, shuffle=True, generator=order), DataLoader(
        parts[1], batch_size
    )


def train(net, loader, epochs, lr):
    """Train the model; return the mean loss of the batches."""
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net.train()
    running_loss = 0.0
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = criterion(net(images), labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
    return running_loss / (epochs * len(loader))


def test(net, loader):
    """Return mean loss and accuracy; in eval mode, which a model with BatchNorm needs."""
    net.eval()
    loss, correct = 0.0, 0
    with torch.no_grad():
        for images, labels in loader:
            outputs = net(images)
            loss += nn.functional.cross_entropy(outputs, labels, reduction="sum").item()
            correct += (outputs.argmax(1) == labels).sum().item()
    return loss / len(loader.dataset), correct / len(loader.dataset)
