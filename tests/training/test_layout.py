"""A layout finds the entries of a model once and reads them from there.

It notices a changed architecture.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torchvision.models import mnasnet0_5, resnet18

from fedbn_flwr.training.model_state import Layout


class Doubled(nn.Linear):
    """A layer whose entries in the state dict are not its own tensors."""

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        destination[prefix + "double"] = 2 * self.weight.detach()


class Extra(nn.Linear):
    def get_extra_state(self) -> Tensor:
        return torch.ones(2)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    model.append(model[1])
    return model


def with_buffers() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3, affine=False))
    model.register_buffer("window", torch.ones(3), persistent=False)
    model.register_buffer("mask", torch.ones(3))
    model.register_buffer("absent", None)
    model.register_parameter("none", None)
    return model


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_state_dict_post_hook(
        lambda module, state, prefix, metadata: state.update(more=torch.ones(1))
    )
    return model


MAKES: dict[str, Callable[[], nn.Module]] = {
    "resnet18": resnet18,
    "mnasnet": mnasnet0_5,
    "tied": tied,
    "buffers": with_buffers,
    "parametrized": lambda: nn.Sequential(
        parametrizations.weight_norm(nn.Linear(3, 3)), nn.BatchNorm1d(3)
    ),
    "own state dict": lambda: nn.Sequential(nn.BatchNorm1d(3), Doubled(3, 3)),
    "extra state": lambda: nn.Sequential(Extra(3, 3)),
    "hook": hooked,
    "scripted": lambda: torch.jit.script(
        nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    ),
    "BatchNorm alone": lambda: nn.BatchNorm1d(4),
}


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES.keys())
def test_the_state_and_the_parameters_are_those_of_the_model(
    make: Callable[[], nn.Module],
) -> None:
    model = make()
    layout = Layout(model)
    for _ in range(2):
        state, found = model.state_dict(), layout.state
        assert list(found) == list(state)
        for name, entry in state.items():
            assert torch.equal(found[name], entry), name
            assert not found[name].requires_grad
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d):
                # Some layers make another tensor like this.
                module.running_mean = module.running_mean + 2
    assert all(
        one is other
        for one, other in zip(layout.parameters(), model.parameters(), strict=True)
    )
    assert [id(b) for b in layout.buffers()] == [
        id(b) for b in model.buffers()
    ] or isinstance(model, torch.jit.ScriptModule)


def test_writing_to_the_state_changes_the_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    for entry in Layout(model).state.values():
        entry.fill_(7)
    assert all(bool((entry == 7).all()) for entry in model.state_dict().values())


def add_layer(model: nn.Module) -> None:
    model.append(nn.Linear(2, 2))


def remove_layer(model: nn.Module) -> None:
    del model[1]


def replace_layer(model: nn.Module) -> None:
    model[0] = nn.Linear(2, 2)


def replace_parameter(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(torch.ones(2, 2))


def add_buffer(model: nn.Module) -> None:
    model[0].register_buffer("more", torch.ones(1))


def remove_buffer(model: nn.Module) -> None:
    model[1].running_mean = None


def parametrize(model: nn.Module) -> None:
    parametrizations.weight_norm(model[0])


CHANGES = (
    add_layer,
    remove_layer,
    replace_layer,
    replace_parameter,
    add_buffer,
    remove_buffer,
    parametrize,
)


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_architecture_is_noticed(change: Callable[[nn.Module], None]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    layout = Layout(model)
    model(torch.randn(4, 2)).sum().backward()
    assert layout.is_current, "training changes values"
    change(model)
    assert not layout.is_current


class Frozen(nn.Sequential):
    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self[1].eval()
        return self


def test_modes_are_left_alone_only_where_train_would_change_none() -> None:
    usual = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    own = Frozen(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert Layout(usual).in_train_mode()
    assert not Layout(own).in_train_mode(), "its own train() was not called yet"
    usual[1].eval()
    assert not Layout(usual).in_train_mode()
