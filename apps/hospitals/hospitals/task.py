"""The model, the hospitals' data and the training."""

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Net(nn.Module):
    """30 measurements of a sample -> benign or malignant; BatchNorm1d first, on the
    measurements as they come.
    """

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.BatchNorm1d(30),
            nn.Linear(30, 32),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Linear(32, 2),
        )

    def forward(self, x):
        """Return the logits, (batch, 2)."""
        return self.layers(x)


def hospital_data(hospital, num_hospitals, seed):
    """Return a hospital's training and test data, 80 to 20.

    The patients of scikit-learn's breast cancer data are dealt out; each hospital's
    devices have a gain between 1/2 and 2 and an offset of up to one standard deviation
    per measurement, and every second hospital sees few malignant cases.
    """
    measurements, labels = load_breast_cancer(return_X_y=True)
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.tensor(measurements, dtype=torch.float32), torch.tensor(labels)
    owner = torch.arange(len(x))[torch.randperm(len(x), generator=draw)] % num_hospitals
    mine = owner == hospital
    devices = torch.Generator().manual_seed(seed * 1000 + hospital + 1)
    if hospital % 2:
        mine &= (y == 1) | (torch.rand(len(y), generator=devices) < 0.3)
    gain = 2 ** (2 * torch.rand(30, generator=devices) - 1)
    offset = (2 * torch.rand(30, generator=devices) - 1) * x.std(0)
    own = TensorDataset(
        gain * ((x[mine] - x.mean(0)) / x.std(0)) + offset / x.std(0), y[mine]
    )
    return random_split(own, [0.8, 0.2], devices)


def train(net, data, epochs, lr, batch_size, generator, rules):
    """Train the model; return the mean loss. A last batch of one is left out:
    BatchNorm1d needs two values.
    """
    optimizer = rules.wrap(torch.optim.SGD(net.parameters(), lr=lr))
    net.train()
    total, seen = 0.0, 0
    for _ in range(epochs):
        for x, y in DataLoader(data, batch_size, shuffle=True, generator=generator):
            if len(x) == 1:
                continue
            optimizer.zero_grad()
            with rules.step(len(x)):
                loss = nn.functional.cross_entropy(net(x), y)
                loss.backward()
            optimizer.step()
            total, seen = total + loss.item() * len(x), seen + len(x)
    return total / seen


def test(net, data):
    """Return mean loss and accuracy."""
    net.eval()
    x, y = next(iter(DataLoader(data, len(data))))
    with torch.no_grad():
        outputs = net(x)
    return (
        nn.functional.cross_entropy(outputs, y).item(),
        (outputs.argmax(1) == y).float().mean().item(),
    )
