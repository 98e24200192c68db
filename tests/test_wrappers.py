"""Models in wrappers: compiled, in DDP, both; and models of other libraries."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.client import TorchClient, client_app
from fedbn_flwr.engines import InProcessGrid
from fedbn_flwr.errors import StateError
from fedbn_flwr.records import from_record, to_record
from fedbn_flwr.state import split_state
from fedbn_flwr.strategies import FedBN, FedProx, FedTAN, FixBN, Scaffold, Standalone
from fedbn_flwr.training import LearningRate, LocalTraining
from fedbn_flwr.wrappers import unwrap, view_with_names, wrapper_prefix


class Replicated(nn.Module):
    """As DistributedDataParallel: the model under the name ``module``; no process group is needed."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> Any:
        return self.module(x)


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


WRAPPERS = {
    "compiled": (compiled, "_orig_mod."),
    "ddp": (Replicated, "module."),
    "both": (lambda model: compiled(Replicated(model)), "_orig_mod.module."),
}


@pytest.mark.parametrize("kind", WRAPPERS)
def test_the_split_works_through_wrappers(mlp, kind: str) -> None:
    wrap, prefix = WRAPPERS[kind]
    model = mlp()
    wrapped = wrap(model)
    plain, through = split_state(model), split_state(wrapped)
    assert through.names == tuple(prefix + name for name in plain.names)
    assert [through.part_of[prefix + name] for name in plain.names] == list(plain.part_of.values())
    assert split_state(wrapped.state_dict()).part_of == through.part_of, "and from the names alone"
    assert unwrap(wrapped) is model
    assert view_with_names(wrapped, plain.names) is model
    assert view_with_names(wrapped, through.names) is wrapped
    assert wrapper_prefix(through.names, plain.names) == prefix
    assert wrapper_prefix(plain.names, plain.names) == ""
    with pytest.raises(StateError, match=rf"they come from a wrapped model \('{prefix}0.bias'\), and this one is not"):
        view_with_names(model, through.names)


def test_a_layer_of_ones_own_called_module_is_no_wrapper() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module, self.head = nn.Linear(2, 2), nn.Linear(2, 2)

    model = Own()
    assert unwrap(model) is model
    names = list(model.state_dict())
    assert wrapper_prefix(names, names) == ""
    assert wrapper_prefix(["module.x", "head.y"], ["x", "y"]) == ""
    with pytest.raises(StateError, match=r"2 entries are missing and 0 unknown \(first: 'head.bias'\)"):
        view_with_names(model, names[:2])


@pytest.mark.parametrize("kind", ["compiled", "both"])
@pytest.mark.parametrize(
    "make",
    [FedBN, functools.partial(FixBN, freeze_at=1), FedProx, Scaffold, FedTAN, Standalone],
    ids=["fedbn", "fixbn", "fedprox", "scaffold", "fedtan", "standalone"],
)
def test_a_wrapped_model_at_the_client_changes_no_bit(federate, points, mlp, same_bits, kind: str, make: Any) -> None:
    datasets = [points(n, i) for i, n in enumerate((6, 8))]
    wrap, _ = WRAPPERS[kind]
    options = {"rounds": 2, "grid_options": {"max_workers": 1}}
    plain = federate(make(), mlp, datasets, **options)

    class Wrapping(TorchClient):
        def __init__(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
            super().__init__(wrap(model), *args, **kwargs)

    wrapped = federate(make(), mlp, datasets, client=Wrapping, **options)
    same_bits(wrapped.state, plain.state)
    assert wrapped.strategy.local_hashes == plain.strategy.local_hashes
    assert [report.rejected for report in wrapped.strategy.reports] == [{}, {}]


@pytest.mark.parametrize("make", [FedBN, Scaffold], ids=["fedbn", "scaffold"])
def test_a_wrapped_model_at_the_server_alone(federate, points, mlp, make: Any) -> None:
    """The server's names come back as it sent them; what is kept has the names of the module inside."""
    datasets = [points(n, i) for i, n in enumerate((6, 8))]
    plain = federate(make(), mlp, datasets, rounds=2)
    settings = LocalTraining(learning_rate=LearningRate(0.1), batch_size=4)

    def client_fn(context: Any) -> TorchClient:
        data = datasets[int(context.node_config["partition-id"])]
        return TorchClient(mlp(), data, data, settings, context=context, seed=7)

    strategy = make()
    with InProcessGrid(client_app(client_fn), 2, max_workers=1) as grid:
        start = to_record(Replicated(mlp()).state_dict())
        state = from_record(strategy.start(grid=grid, initial_arrays=start, num_rounds=2).arrays)
    assert [report.rejected for report in strategy.reports] == [{}, {}]
    assert list(state) == [f"module.{name}" for name in plain.state]
    for name, array in plain.state.items():
        assert (state[f"module.{name}"] == array).all(), name


# --- models of other libraries ---------------------------------------------------------------------------------------


def bn_names(model: nn.Module) -> set[str]:
    layers = [(path, m) for path, m in model.named_modules() if isinstance(m, _BatchNorm)]
    return {f"{path}.{leaf}" for path, layer in layers for leaf in layer.state_dict()}


@pytest.mark.parametrize("name", ["resnet18", "mobilenetv2_100", "efficientnet_b0", "densenet121"])
def test_timm(name: str) -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model(name, pretrained=False, num_classes=3)
    for parts in (split_state(model), split_state(model.state_dict())):
        assert set(parts.affine + parts.statistics + parts.counters) == bn_names(model)
        assert len(parts.layers) > 19


@pytest.mark.parametrize(
    ("config", "model"),
    [("ResNetConfig", "ResNetForImageClassification"), ("MobileNetV2Config", "MobileNetV2ForImageClassification")],
)
def test_transformers(config: str, model: str) -> None:
    transformers = pytest.importorskip("transformers")
    net = getattr(transformers, model)(getattr(transformers, config)())
    parts = split_state(net)
    assert set(parts.affine + parts.statistics + parts.counters) == bn_names(net)
    assert parts.layers


def test_lightning(mlp) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

    parts = split_state(Module())
    assert parts.statistics == ("net.1.running_mean", "net.1.running_var")


def test_a_wrapped_copy_is_another_model(mlp) -> None:
    model = mlp()
    assert unwrap(copy.deepcopy(Replicated(model))) is not model
