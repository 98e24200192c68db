"""The split of a model's state is made by layer type."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torchvision.models as tv
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm
from torch.nn.utils.parametrize import register_parametrization

from fedbn_flwr.batchnorm.fixed_entries import fixed_entries, learning_parts
from fedbn_flwr.batchnorm.layers import batchnorm_layers
from fedbn_flwr.batchnorm.parts import Parts, split_state, tied_entries
from fedbn_flwr.batchnorm.train_only import fixed_by
from fedbn_flwr.errors import NormLayerError
from fedbn_flwr.training.freezing import force_eval

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class OwnNorm(nn.BatchNorm2d):
    """A subclass with one more entry."""

    def __init__(self) -> None:
        super().__init__(3)
        self.register_buffer("warm_up", torch.zeros(()))


def unnamed() -> nn.Module:
    block = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    return nn.Sequential(block, nn.Flatten(), nn.Linear(4, 2), nn.BatchNorm1d(2))


def sizes(parts: Parts) -> tuple[int, ...]:
    kinds = (parts.affine, parts.statistics, parts.counters, parts.rest)
    return tuple(map(len, kinds))


@pytest.mark.parametrize(
    ("make", "num_layers", "num_rest"),
    [
        (tv.resnet18, 20, 22),
        (tv.densenet121, 121, 122),
        (tv.mobilenet_v2, 52, 54),
        (unnamed, 2, 4),
    ],
)
def test_all_layers_of_known_models(
    make: Callable[[], nn.Module], num_layers: int, num_rest: int
) -> None:
    with torch.device("meta"):
        model = make()
    parts = split_state(model)
    assert len(parts.layers) == num_layers
    assert sizes(parts) == (2 * num_layers, 2 * num_layers, num_layers, num_rest)
    assert parts.names == tuple(model.state_dict())
    assert dict(split_state(model.state_dict()).part_of) == dict(parts.part_of)


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))]
)
def test_a_parametrized_gamma_is_affine(norm: nn.Module) -> None:
    layer = norm if isinstance(norm, nn.BatchNorm1d) else norm[1]
    parametrizations.weight_norm(layer, dim=None)
    register_parametrization(layer, "bias", nn.Softplus(), unsafe=True)
    for parts in (split_state(norm), split_state(norm.state_dict())):
        assert sizes(parts) == (3, 2, 1, 2 * (layer is not norm))
        leaves = [name.rpartition("parametrizations.")[2] for name in parts.affine]
        assert leaves == ["weight.original0", "weight.original1", "bias.original"]


def twice() -> nn.Module:
    norm = nn.BatchNorm1d(2)
    return nn.ModuleDict({"a": norm, "b": nn.Sequential(norm)})


def misnamed() -> nn.Module:
    layers = {"bn1": nn.Linear(2, 2), "running_mean": nn.Linear(2, 1)}
    return nn.ModuleDict({**layers, "conv": nn.BatchNorm1d(2)})


INSTANCE = {"affine": True, "track_running_stats": True}
NO_STATISTICS = {"track_running_stats": False}
KINDS = {
    # The numbers of entries by part, by type and by name.
    **{
        type(one).__name__: (nn.Sequential(nn.Conv2d(3, 3, 1), one), (2, 2, 1, 2), ())
        for one in (nn.SyncBatchNorm(3), nn.LazyBatchNorm2d(), nn.BatchNorm3d(3))
    },
    "names that mislead": (misnamed(), (2, 2, 1, 4), ()),
    "two paths": (twice(), (4, 4, 2, 0), ()),
    "the model itself": (nn.BatchNorm1d(2), (2, 2, 1, 0), ()),
    "no affine": (nn.Sequential(nn.BatchNorm1d(2, affine=False)), (0, 2, 1, 0), ()),
    # Names are not enough here.
    "a subclass with one more entry": (
        nn.Sequential(OwnNorm()),
        (2, 2, 1, 1),
        (0, 0, 0, 6),
    ),
    "no statistics": (
        nn.Sequential(nn.BatchNorm1d(2, **NO_STATISTICS)),
        (2, 0, 0, 0),
        (0, 0, 0, 2),
    ),
    "an instance norm": (
        nn.Sequential(nn.InstanceNorm2d(2, **INSTANCE), nn.BatchNorm2d(2)),
        (2, 2, 1, 5),
        (4, 4, 2, 0),
    ),
    "a prefix of another path": (
        nn.Sequential(*(nn.BatchNorm1d(1) if i == 1 else nn.Tanh() for i in range(12))),
        (2, 2, 1, 0),
        (),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_batch_norm(kind: str) -> None:
    model, by_type, by_name = KINDS[kind]
    parts = split_state(model)
    assert parts.names == tuple(model.state_dict())
    assert sizes(parts) == by_type
    assert sizes(split_state(model.state_dict())) == (by_name or by_type)
    assert len(list(parts.moments())) == by_type[2]


def test_names_that_only_end_alike_are_no_layer() -> None:
    names = ("a.best_running_mean", "a.best_weight", "a.weight")
    assert split_state(dict.fromkeys(names)).layers == ()


def test_fingerprint_sees_names_types_and_shapes() -> None:
    def of(*layers: nn.Module) -> str:
        model = nn.Sequential(*layers)
        return split_state(model).fingerprint(
            {name: tuple(t.shape) for name, t in model.state_dict().items()}
        )

    others = [
        nn.BatchNorm1d(3),
        nn.BatchNorm1d(2, affine=False),
        nn.InstanceNorm1d(2, **INSTANCE),
    ]
    prints = [of(nn.BatchNorm1d(2)), of(nn.Identity(), nn.BatchNorm1d(2))]
    prints += map(of, others)
    assert len({*prints}) == 5
    assert of(nn.BatchNorm1d(2)) == prints[0]


class Windowed(nn.Module):
    """A layer with two constants and with entries that training moves.

    One constant is not in the state.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.ones(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(3), persistent=False)
        instance = nn.InstanceNorm1d(3, track_running_stats=True)
        self.norms = nn.Sequential(nn.BatchNorm1d(3), instance, OwnNorm())
        self.spectral = nn.Sequential(
            parametrizations.spectral_norm(nn.Linear(3, 3)),
            spectral_norm(nn.Linear(3, 3)),
        )


@pytest.mark.parametrize("frozen", [0, 1])
@pytest.mark.parametrize("what", ["weight", "gamma", "layer", "window"])
def test_fixed_entries_are_closed_under_ties(what: str, frozen: int) -> None:
    """Neither the order of the two names nor the frozen name matters."""
    model = nn.Sequential(*(nn.Sequential(Windowed(), nn.Linear(3, 3)) for _ in "ab"))
    one, other = model[1 - frozen], model[frozen]
    norm = other[0].norms[0]
    if what == "weight":
        one[1].weight = other[1].weight.requires_grad_(False)
    elif what == "gamma":
        one[1].bias = norm.weight.requires_grad_(False)
    elif what == "layer":
        one[0].norms[0] = norm
        force_eval(norm)
        norm.bias.requires_grad_(False)
    else:
        one[0].window = other[0].window
    ties, fixed = tied_entries(model), fixed_entries(model)
    assert ties
    for name, first in ties.items():
        assert (name in fixed) == (first in fixed), name
    assert fixed & ties.keys()


def test_buffers_that_no_layer_moves_are_fixed() -> None:
    model = Windowed()
    assert fixed_entries(model) == {"window"}
    assert learning_parts(model) == split_state(model)
    model.norms[0].weight.requires_grad_(False)
    force_eval(model.norms[0])
    fixed = {f"norms.0.{leaf}" for leaf in ("weight", *STATISTICS)}
    assert fixed_entries(model) == {"window"} | fixed


def test_a_name_with_the_signs_of_a_glob_names_its_own_layer() -> None:
    names = ("bn", "bn[0]", "bn[!0]", "bn*", "bn?")
    model = nn.ModuleDict({name: nn.BatchNorm1d(2) for name in names})
    parts = split_state(model)
    for name in names:
        assert name in [layer.path for layer in parts.only(name).layers]
        assert f"{name}.weight" in parts.with_personal(name).personal
    assert [layer.path for layer in parts.only("bn").layers] == ["bn"]


def two_paths() -> nn.Module:
    layer = nn.BatchNorm1d(4)
    return nn.Sequential(layer, nn.Linear(4, 4), layer, nn.BatchNorm1d(4))


def test_a_layer_at_two_paths_is_chosen_by_each() -> None:
    """A client refuses one path of a split by names that lacks the other path."""
    for path in ("0", "2"):
        chosen = split_state(two_paths()).only(path)
        assert [layer.path for layer in chosen.layers] == ["0", "2"]
        assert [layer.path for layer in chosen.averaged] == ["3"]
        with pytest.raises(NormLayerError, match="Name both paths in layers"):
            batchnorm_layers(two_paths(), [path])
    assert len(batchnorm_layers(two_paths(), ["0", "2"])) == 1


def test_a_path_fits_with_and_without_the_prefix_of_a_wrapper() -> None:
    parts = split_state(nn.DataParallel(two_paths()))
    for choose in (parts.only, parts.with_personal, functools.partial(fixed_by, parts)):
        assert choose("3") == choose("module.3") != choose("0")


def test_paths_of_a_network_name_its_layers_in_a_module_around_it(mlp) -> None:
    around = nn.ModuleDict({"one": nn.BatchNorm1d(2), "net": mlp()})
    assert batchnorm_layers(around, ["1"]) == [around["net"][1]]
