"""The split of a model's state is made by layer type."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torchvision.models as tv
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrizations, spectral_norm
from torch.nn.utils.parametrize import register_parametrization

from fedbn_flwr.batchnorm.fixed_entries import fixed_entries, learning_parts
from fedbn_flwr.batchnorm.parts import Parts, split_state, tied_entries
from fedbn_flwr.training.freezing import force_eval

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class OwnNorm(nn.BatchNorm2d):
    """A subclass with one more entry."""

    def __init__(self) -> None:
        super().__init__(3)
        self.register_buffer("warm_up", torch.zeros(()))


def unnamed() -> nn.Module:
    block = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    return nn.Sequential(
        nn.Conv2d(3, 3, 1),
        nn.BatchNorm2d(3),
        block,
        nn.Flatten(),
        nn.Linear(4, 2),
        nn.BatchNorm1d(2),
    )


def sizes(parts: Parts) -> tuple[int, int, int, int]:
    return (
        len(parts.affine),
        len(parts.statistics),
        len(parts.counters),
        len(parts.rest),
    )


@pytest.mark.parametrize(
    ("make", "num_layers", "num_rest"),
    [
        (tv.resnet18, 20, 22),
        (tv.densenet121, 121, 122),
        (tv.mobilenet_v2, 52, 54),
        (unnamed, 3, 6),
    ],
)
def test_all_layers_of_known_models(
    make: Callable[[], nn.Module], num_layers: int, num_rest: int
) -> None:
    with torch.device("meta"):
        model = make()
    parts = split_state(model)
    assert (
        len(parts.layers)
        == num_layers
        == sum(isinstance(m, nn.BatchNorm2d | nn.BatchNorm1d) for m in model.modules())
    )
    assert sizes(parts) == (2 * num_layers, 2 * num_layers, num_layers, num_rest)
    assert parts.names == tuple(model.state_dict())
    assert sorted(
        parts.affine + parts.statistics + parts.counters + parts.rest
    ) == sorted(parts.names)
    assert dict(split_state(model.state_dict()).part_of) == dict(parts.part_of)


def test_the_split_does_not_depend_on_names() -> None:
    model = nn.ModuleDict(
        {
            "bn1": nn.Linear(2, 2),
            "conv": nn.BatchNorm1d(2),
            "running_mean": nn.Linear(2, 1),
        }
    )
    parts = split_state(model)
    assert parts.rest == (
        "bn1.weight",
        "bn1.bias",
        "running_mean.weight",
        "running_mean.bias",
    )
    assert split_state(model.state_dict()).rest == parts.rest
    assert (
        split_state(
            {"a.best_running_mean": 0, "a.best_weight": 0, "a.weight": 0}
        ).layers
        == ()
    )


def test_a_path_that_is_a_prefix_of_another() -> None:
    model = nn.Sequential(*[nn.Linear(1, 1) for _ in range(11)])
    model[1] = nn.BatchNorm1d(1)
    assert all(name.startswith("1.") for name in split_state(model).affine)
    assert "10.weight" in split_state(model).rest


def test_subclass_keeps_its_own_entries_in_rest() -> None:
    parts = split_state(nn.Sequential(OwnNorm()))
    assert sizes(parts) == (2, 2, 1, 1)
    assert parts.rest == ("0.warm_up",)


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))]
)
def test_a_parametrized_gamma_is_affine(norm: nn.Module) -> None:
    layer = norm if isinstance(norm, _BatchNorm) else norm[1]
    parametrizations.weight_norm(layer, dim=None)
    register_parametrization(layer, "bias", nn.Softplus(), unsafe=True)
    rest = [
        name
        for name in norm.state_dict()
        if layer is not norm and name.startswith("0.")
    ]
    for parts in (split_state(norm), split_state(norm.state_dict())):
        assert sizes(parts) == (3, 2, 1, len(rest))
        assert [name.rpartition("weight.")[2] for name in parts.affine[:2]] == [
            "original0",
            "original1",
        ]
        assert parts.affine[2].endswith("parametrizations.bias.original")


@pytest.mark.parametrize(
    "layer",
    [nn.SyncBatchNorm(3), nn.LazyBatchNorm2d(), nn.BatchNorm3d(3), nn.BatchNorm1d(3)],
)
def test_every_kind_of_batch_norm(layer: nn.Module) -> None:
    assert isinstance(layer, _BatchNorm)
    assert sizes(split_state(nn.Sequential(nn.Conv2d(3, 3, 1), layer))) == (2, 2, 1, 2)


def test_a_module_at_two_paths_is_listed_twice() -> None:
    norm = nn.BatchNorm1d(2)
    model = nn.ModuleDict({"a": norm, "b": nn.Sequential(norm)})
    parts = split_state(model)
    assert parts.names == tuple(model.state_dict())
    assert sizes(parts) == (4, 4, 2, 0)
    assert [layer.path for layer in parts.layers] == ["a", "b.0"]


def test_without_affine_or_statistics() -> None:
    assert sizes(split_state(nn.Sequential(nn.BatchNorm1d(2, affine=False)))) == (
        0,
        2,
        1,
        0,
    )
    no_statistics = nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False))
    assert sizes(split_state(no_statistics)) == (2, 0, 0, 0)
    assert list(split_state(no_statistics).moments()) == []
    assert sizes(split_state(no_statistics.state_dict())) == (
        0,
        0,
        0,
        2,
    ), "names are not enough"


def test_the_model_itself_is_the_layer() -> None:
    norm = nn.BatchNorm1d(2)
    for parts in (split_state(norm), split_state(norm.state_dict())):
        assert sizes(parts) == (2, 2, 1, 0)
        assert list(parts.moments()) == [("running_mean", "running_var")]
        assert parts.layers[0].path == ""


def test_instance_norm_is_rest_by_type_and_batch_norm_by_name() -> None:
    model = nn.Sequential(
        nn.InstanceNorm2d(2, affine=True, track_running_stats=True), nn.BatchNorm2d(2)
    )
    assert sizes(split_state(model)) == (2, 2, 1, 5)
    assert sizes(split_state(model.state_dict())) == (4, 4, 2, 0)


def test_fingerprint_sees_names_types_and_shapes() -> None:
    def of(model: nn.Module) -> str:
        return split_state(model).fingerprint(
            {name: tuple(t.shape) for name, t in model.state_dict().items()}
        )

    base = of(nn.Sequential(nn.BatchNorm1d(2)))
    assert base == of(nn.Sequential(nn.BatchNorm1d(2)))
    others = [
        nn.BatchNorm1d(3),
        nn.BatchNorm1d(2, affine=False),
        nn.InstanceNorm1d(2, True, track_running_stats=True),
    ]
    prints = {
        base,
        of(nn.Sequential(nn.Identity(), nn.BatchNorm1d(2))),
        *[of(nn.Sequential(m)) for m in others],
    }
    assert len(prints) == 5


class Windowed(nn.Module):
    """A layer with two constants and with entries that training moves.

    One constant is not in the state.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.ones(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(3), persistent=False)
        self.norms = nn.Sequential(
            nn.BatchNorm1d(3),
            nn.InstanceNorm1d(3, track_running_stats=True),
            OwnNorm(),
        )
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
    if what == "weight":
        one[1].weight = other[1].weight
        other[1].weight.requires_grad_(False)
    elif what == "gamma":
        one[1].bias = other[0].norms[0].weight
        other[0].norms[0].weight.requires_grad_(False)
    elif what == "layer":
        one[0].norms[0] = other[0].norms[0]
        force_eval(other[0].norms[0])
        other[0].norms[0].bias.requires_grad_(False)
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
    assert fixed_entries(model) == {
        "window",
        "norms.0.weight",
        *(f"norms.0.{leaf}" for leaf in STATISTICS),
    }


def test_a_name_with_the_signs_of_a_glob_names_its_own_layer() -> None:
    names = ("bn[0]", "bn[!0]", "bn*", "bn?")
    model = nn.ModuleDict({name: nn.BatchNorm1d(2) for name in names})
    parts = split_state(model)
    for name in names:
        assert name in [layer.path for layer in parts.only(name).layers]
        assert f"{name}.weight" in parts.with_personal(name).personal
