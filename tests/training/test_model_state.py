"""Compiled models, models in DDP or in both, and models of other libraries."""

from __future__ import annotations

import functools
import operator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fedbn_flwr.batchnorm.parts import refuse_other_layers, split_state
from fedbn_flwr.client import TorchClient
from fedbn_flwr.errors import ConfigError, StateError
from fedbn_flwr.strategies import (
    FedBN,
    FedProx,
    FedTAN,
    FixBN,
    Scaffold,
    Standalone,
    StaticBN,
)
from fedbn_flwr.training.model_state import (
    load_state,
    refuse_waiting,
    unwrap,
    view_with_names,
    without_wrappers,
    wrapper_prefix,
)
from tests.support.fast import fast

SIZES = (6, 8)


class Replicated(nn.DataParallel):
    """A wrapper like DistributedDataParallel, without a process group."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
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
    assert [*through.part_of.values()] == [*plain.part_of.values()]
    by_names = split_state(wrapped.state_dict())
    assert by_names.part_of == through.part_of, "the names are enough"
    with pytest.raises(
        StateError,
        match=(
            rf"They come from a wrapped model \('{prefix}0.bias'\), but this model is"
        ),
    ):
        view_with_names(model, through.names)


class Renamed(nn.Module):
    """A model whose hooks remove the prefix of its network in the state dict."""

    def __init__(self, net: nn.Module, prefix: str = "net.") -> None:
        super().__init__()
        self.net, self._prefix = net, prefix
        self._register_state_dict_hook(self.removed)
        self.register_load_state_dict_pre_hook(self.added)

    def removed(self, _: nn.Module, state: Any, *args: Any) -> None:
        for name in [*state]:
            state[name.removeprefix(self._prefix)] = state.pop(name)

    def added(self, _: nn.Module, state: Any, *args: Any) -> None:
        for name in [*state]:
            state[name if name.startswith("net.") else self._prefix + name] = state.pop(
                name
            )

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x)


class Overridden(Replicated):
    """A model that overrides ``state_dict``."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)


RENAMED = {"hooks": Renamed, "a method": Overridden}


def test_a_state_dict_with_other_names_is_split_or_refused_by_name(mlp) -> None:
    model = Renamed(mlp())
    assert split_state(model) == split_state(mlp())
    assert unwrap(model) is view_with_names(model, mlp().state_dict()) is model.net
    model = Renamed(mlp(), "net.1.")
    assert unwrap(model) is model
    assert view_with_names(model, model.state_dict()) is model
    for use in (split_state, functools.partial(refuse_other_layers, named=["x"])):
        with pytest.raises(ConfigError, match=r"because of Renamed\.removed"):
            use(model)


@pytest.mark.parametrize("finds", [True, False])
@pytest.mark.parametrize("freezes", ["before", "after", "never"])
def test_a_wrapper_that_waits_for_frozen_parameters_is_refused_as_torch_does(
    mlp, tmp_path, finds: bool, freezes: str
) -> None:
    dist.init_process_group("gloo", f"file://{tmp_path}/file", rank=0, world_size=1)
    try:
        model = mlp()
        model[1].requires_grad_(freezes != "before")
        wrapped = nn.parallel.DistributedDataParallel(
            model, find_unused_parameters=finds
        )
        model[1].requires_grad_(freezes == "never")
        refused = []
        for use in (lambda: refuse_waiting(compiled(wrapped)), lambda: steps(wrapped)):
            try:
                use()
            except (ConfigError, RuntimeError):
                refused.append(use)
        assert len(refused) == 2 * (freezes == "after" and not finds)
    finally:
        dist.destroy_process_group()


def steps(model: nn.Module) -> None:
    for _ in range(2):
        model(torch.randn(4, 5, dtype=torch.float64)).sum().backward()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.module(x / 255)


def test_a_users_layer_named_module_is_not_a_wrapper() -> None:
    scaled = Scaled()
    assert unwrap(scaled) is scaled, "its own forward pass is not left out"
    model = nn.ModuleDict({"module": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    assert unwrap(model) is model
    names = list(model.state_dict())
    assert wrapper_prefix(["module.x", "head.y"], ["x", "y"]) == ""
    assert without_wrappers("module._orig_mod.module") == "module"
    with pytest.raises(
        StateError,
        match=r"2 missing and 0 unknown entries \(first: 'head.bias'\)",
    ):
        view_with_names(model, names[:2])


@pytest.mark.parametrize(
    ("kind", "make"),
    fast(
        [
            ("compiled", FixBN),
            ("compiled", FedProx),
            ("both", Scaffold),
            ("both", FedTAN),
            ("both", Standalone),
            ("server", functools.partial(FedBN, class_moments=True)),
            ("server", Scaffold),
            ("server", StaticBN),
            ("hooks", Scaffold),
            ("hooks", StaticBN),
            ("hooks", functools.partial(FedBN, train_only="1,3")),
            ("a method", FedBN),
        ],
        *(0, 3, 5, 6, 7, 8, 10),
    ),
)
def test_a_wrapped_model_of_the_client_or_the_server_changes_no_bit(
    federate_mlp, mlp, same_bits, kind: str, make
) -> None:
    """The result has the server's names, but local entries have inner names."""
    options = {"rounds": 2, "grid_options": {"threads": 1}}
    plain = federate_mlp(make(), **options)
    at_server, prefix = kind == "server", "module." if kind == "server" else ""

    first = {name: wrap for name, (wrap, _) in WRAPPERS.items()}

    class Other(TorchClient):
        def __init__(self, model, *args, **kwargs) -> None:
            wrap = {**RENAMED, "server": None, **first}[kind]
            own = model.module if at_server else wrap(model)
            super().__init__(own, *args, **kwargs)

    model = (lambda: Replicated(mlp())) if at_server else mlp
    wrapped = federate_mlp(make(), model=model, client=Other, **options)

    same_bits(
        wrapped.state, {prefix + name: array for name, array in plain.state.items()}
    )
    assert wrapped.strategy.run.kept.hashes == plain.strategy.run.kept.hashes
    assert [report.rejected for report in wrapped.reports] == [{}, {}]


class _Doubles(nn.Linear):
    """Loads twice the values that are sent."""

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        state[f"{prefix}bias"] = 2 * state[f"{prefix}bias"]
        super()._load_from_state_dict(state, prefix, *rest)


class _Whole(nn.Sequential):
    def load_state_dict(self, state, *rest, **named):
        return super().load_state_dict(
            {n: -e for n, e in state.items()}, *rest, **named
        )


class _Clones(nn.Linear):
    """Its state has copies, so nothing may be loaded into the tensors of its state."""

    def _save_to_state_dict(self, to: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(to, prefix, keep_vars)
        to[f"{prefix}bias"] = to[f"{prefix}bias"].clone()


class _Extra(nn.Linear):
    more = 1.0

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(self.more)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.more = float(state)


def _hooked(before: bool) -> nn.Module:
    layer = nn.Linear(2, 3)

    def double(module: Any, state: Any, prefix: str, *rest: Any) -> None:
        state[f"{prefix}weight"] = 2 * state[f"{prefix}weight"]

    def reset(module, keys) -> None:
        nn.init.zeros_(module.bias)

    if before:
        layer.register_load_state_dict_pre_hook(double)
    else:
        layer.register_load_state_dict_post_hook(reset)
    return layer


def _tied() -> nn.Module:
    first = nn.Linear(3, 3)
    return nn.Sequential(first, nn.BatchNorm1d(3), first)


_KINDS = {
    "batchnorm": lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)),
    "lstm": lambda: nn.LSTM(2, 3, num_layers=2),
    "tied": _tied,
    "channels-last": lambda: nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last),
    "half": lambda: nn.Linear(2, 3).half(),
    "parametrized": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 3)),
    "own way": lambda: nn.Sequential(_Doubles(2, 3)),
    "whole": lambda: _Whole(nn.Linear(2, 3)),
    "clones": lambda: nn.Sequential(_Clones(2, 3)),
    "extra": lambda: nn.Sequential(_Extra(2, 3)),
    "pre hook": lambda: nn.Sequential(_hooked(True)),
    "post hook": lambda: nn.Sequential(_hooked(False)),
}


@pytest.mark.parametrize("kind", _KINDS)
def test_a_state_is_loaded_as_torch_loads_it(kind: str) -> None:
    """Values, and that they are in the tensors that the forward pass uses."""
    torch.manual_seed(0)
    ours, torchs, sent = (_KINDS[kind]() for _ in range(3))
    state = {name: 3 * entry for name, entry in sent.state_dict().items()}
    tensors = [*ours.parameters(), *ours.buffers()]
    load_state(ours, dict(state))
    torchs.load_state_dict(dict(state))
    exactly = functools.partial(torch.testing.assert_close, rtol=0, atol=0)
    exactly(ours.state_dict(), torchs.state_dict())
    now = [*ours.parameters(), *ours.buffers()]
    assert all(map(operator.is_, tensors, now))
    exactly(now, [*torchs.parameters(), *torchs.buffers()])
