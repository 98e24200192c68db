"""The promise of ``reuse_model`` for the models that the laboratory uses again."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

from fedbn_flwr.batchnorm.array_types import Array
from fedbn_flwr.client import TorchClient
from fedbn_flwr.lab.models import MODELS, build_model, input_shape
from fedbn_flwr.training import LearningRate, LocalTraining

OWN = [name for name in MODELS if ":" not in name]
ZOO = [
    "mnasnet0_5",
    "shufflenet_v2_x0_5",
    "squeezenet1_0",
    "regnet_y_400mf",
    "densenet121",
    "mobilenet_v2",
    "efficientnet_b0",
    "convnext_tiny",
    "vit_b_16",
]
CASES = [
    *(name for name in OWN if name not in ("resnet44", "resnet56", "resnet110")),
    "torchvision:squeezenet1_0",
]
LONG = [
    *(name for name in OWN if name not in CASES),
    *(f"torchvision:{name}" for name in ZOO),
]


def messages(name: str, reuse: bool) -> list[list[Array]]:
    """Return the replies to a training, a test and a training, of two clients."""
    channels, side = input_shape(name, 3, 32)
    inputs = torch.randn(
        4, channels, side, side, generator=torch.Generator().manual_seed(0)
    )
    data = TensorDataset(inputs, torch.arange(4) % 3)
    training = LocalTraining(learning_rate=LearningRate(0.01), local_steps=1)

    def build() -> torch.nn.Module:
        return build_model(
            name=name, num_classes=3, input_shape=(3, side, side), seed=0
        )

    sent = [one.numpy() for one in build().state_dict().values()]
    replies = []
    for number in range(2):
        client = TorchClient(
            *(build, data, data, training), partition_id=number, reuse_model=reuse
        )
        sent, _, _ = client.fit(sent, {"server-round": 1})
        client.evaluate(sent, {"server-round": 1})
        replies.append(sent)
    return replies


@pytest.mark.parametrize(
    "name", [*CASES, *(pytest.param(one, marks=pytest.mark.slow) for one in LONG)]
)
def test_two_messages_of_a_used_model_have_the_bits_of_two_built_ones(name) -> None:
    built, again = (messages(name, reuse) for reuse in (False, True))
    for one, other in zip(built, again, strict=True):
        assert all((a == b).all() for a, b in zip(one, other, strict=True))
