"""Local parts stay with the clients under FedBN, SiloBN, MTFL and Standalone."""

from __future__ import annotations

import json

import pytest
import torchvision.models as tv
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.client import TorchClient
from fedbn_flwr.strategies import MTFL, FedAvg, FedBN, SiloBN, Standalone
from tests.support.fast import fast
from tests.support.seeds import with_seed

SIZES = (6, 7, 8)
METHODS = [FedBN, SiloBN, MTFL, Standalone]
LEAVES = {
    "fedbn": {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"},
    "silobn": {"running_mean", "running_var", "num_batches_tracked"},
    "mtfl": {"weight", "bias"},
}


def local_names(method: type[FedAvg], model: nn.Module) -> set[str]:
    """Return the local entries of a method, found by walking the modules."""
    if method is Standalone:
        return set(model.state_dict())
    names = set()
    for path, layer in model.named_modules():
        if isinstance(layer, _BatchNorm):
            own = layer.state_dict().keys() & set(LEAVES.get(method.name, ()))
            names |= {f"{path}.{leaf}" for leaf in own}
    return names


@pytest.mark.parametrize(
    ("method", "personal"),
    [
        *fast([*((method, "") for method in METHODS[1:]), (FedAvg, "fc")], 1),
        (FedBN, "fc"),
    ],
)
def test_no_message_contains_a_local_part(
    federate, points, method, personal: str
) -> None:
    """In the branches of this network, the names of BatchNorm are numbers."""

    @with_seed()
    def build() -> nn.Module:
        return tv.shufflenet_v2_x0_5(num_classes=3)

    datasets = [points(2 + i, i, shape=(3, 32, 32)) for i in range(2)]
    strategy, model = method(fraction_evaluate=0.0, personal=personal), build()
    run = federate(
        strategy, build, datasets, rounds=2, local_steps=1, batch_size=0, rate=1e-3
    )
    everything = list(model.state_dict())
    own = local_names(method, model)
    own |= {n for n in everything if personal and n.startswith(personal)}
    shared = [n for n in everything if n not in own]
    assert [r.rejected for r in strategy.reports] == [{}, {}]
    expected = [everything] * 2 + [shared] * 2
    for (sent, reply), names in zip(run.grid.pairs(), expected, strict=True):
        assert list(sent.content["arrays"]) == names
        assert list(reply.content["arrays"]) == shared
        assert list(reply.content.array_records) == ["arrays"]
    for partition in range(2):
        assert set(run.local_state(partition)) == own


def test_a_client_that_uploads_its_local_part_is_rejected(federate_mlp, mlp) -> None:
    class Chatty(TorchClient):
        def fit(self, parameters, config):
            arrays, count, metrics = super().fit(parameters, config)
            if self.partition_id == 1:
                metrics["fedbn-flwr.array-names"] = json.dumps(list(mlp().state_dict()))
                arrays = self.get_parameters({})
            return arrays, count, metrics

    run = federate_mlp(FedBN(), rounds=1, client=Chatty)
    (reason,) = run.reports[0].rejected.values()
    assert (
        "the reply contains 5 of the entries that stay with the client under strategy"
        " 'fedbn' ('1.weight', ...)" in reason
    )
