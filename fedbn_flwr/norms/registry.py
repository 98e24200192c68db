"""The registry of norms and ``replace_norm``.

A new norm needs one file and one line of ``NORMS``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from fedbn_flwr.errors import NormLayerError
from fedbn_flwr.norms.fixup import use_fixup
from fedbn_flwr.norms.group import use_group, use_instance, use_layer
from fedbn_flwr.norms.group_ws import use_group_ws
from fedbn_flwr.norms.none import remove_batch
from fedbn_flwr.norms.replaced_layers import (
    NormReport,
    described,
    named,
    replaced_layers,
)
from fedbn_flwr.norms.wsconv import use_wsconv
from fedbn_flwr.training.borrowed import copied
from fedbn_flwr.training.freezing import layers_of

__all__ = ["NORMS", "NormBuilder", "NormInfo", "keep_batch", "replace_norm"]


def keep_batch(model: nn.Module) -> nn.Module:
    """Return the unchanged model."""
    return model


NormBuilder = Callable[..., nn.Module]


@dataclass(frozen=True)
class NormInfo:
    """A kind of normalisation.

    ``builder(model, **options)`` may change its model, because ``replace_norm`` passes
    a copy. It returns the model. ``options`` are the names of its keyword options.
    """

    summary: str
    source: str
    builder: NormBuilder
    options: tuple[str, ...] = ()


NORMS: dict[str, NormInfo] = {
    "batch": NormInfo(
        "BatchNorm, the model as it is",
        "Ioffe & Szegedy 2015, arXiv:1502.03167",
        keep_batch,
    ),
    "group": NormInfo(
        "GroupNorm, 2 groups unless told otherwise",
        "Wu & He 2018, arXiv:1803.08494; 2 groups: Zhong et al. 2023, arXiv:2303.06530",
        use_group,
        ("groups",),
    ),
    "layer": NormInfo(
        "GroupNorm of one group", "Ba et al. 2016, arXiv:1607.06450", use_layer
    ),
    "instance": NormInfo(
        "GroupNorm, a group per channel",
        "Ulyanov et al. 2016, arXiv:1607.08022",
        use_instance,
    ),
    "group+ws": NormInfo(
        "GroupNorm, and weight standardisation of the convolutions in front of it",
        "Qiao et al. 2019, arXiv:1903.10520",
        use_group_ws,
        ("groups",),
    ),
    "wsconv": NormInfo(
        "no norm, convolutions with scaled standardised weights",
        "FedWon, eq. (3); Brock et al. 2021, arXiv:2101.08692",
        use_wsconv,
        ("activation", "gain"),
    ),
    "fixup": NormInfo(
        "no norm, Fixup's start and scalar biases; residual networks only",
        "Zhang et al. 2019, arXiv:1901.09321",
        use_fixup,
    ),
    "none": NormInfo(
        "BatchNorm removed, no bias added", "ours (a control)", remove_batch
    ),
}


def replace_norm(
    model: nn.Module | Callable[[], nn.Module],
    kind: str,
    *,
    in_place: bool = False,
    **options: object,
) -> tuple[nn.Module, NormReport]:
    """Return a copy of ``model`` with another norm than BatchNorm, and a report.

    ``in_place=True`` changes ``model`` itself, also if a copy of it may not be exact.

    Example::

        >>> from torch import nn
        >>> from fedbn_flwr import replace_norm
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        >>> changed, report = replace_norm(model, "group")
        >>> [row.path for row in report.replaced]  # print(report) shows the layers
        ['1']

    Layers are found by type (see ``swap``). The copy keeps eps, gamma and beta, device,
    dtype, ``requires_grad``, train/eval mode and sharing inside the model; the given
    model does not change. A layer object at several paths remains one object. Without BatchNorm in the model,
    the result is a copy and an empty report. There are two exceptions: ``wsconv`` still
    changes the convolutions, and ``fixup`` refuses the model.

    Args:
        model: any module, including a BatchNorm layer; or the function that builds it.
        kind: a key of ``NORMS``.
        in_place: whether the model itself changes.
        **options: options of this norm: ``groups`` (2) of ``group`` and ``group+ws``;
            ``activation`` ("relu") and ``gain`` (False) of ``wsconv``.

    Raises:
        KeyError: the kind is unknown.
        StateError: the model cannot be copied.
        NormLayerError: a lazy BatchNorm has not seen a batch, channels are not
            divisible by the groups, a BatchNorm layer does more than torch's, or the
            norm does not fit this model; the message names the layers.
    """
    info = NORMS[kind]
    if not isinstance(model, nn.Module):
        model, in_place = model(), True
    _refuse_uninitialised(model)
    before = described(model)
    new = info.builder(model if in_place else copied(model), **options)
    return new, NormReport(kind, replaced_layers(before, new))


def _refuse_uninitialised(model: nn.Module) -> None:
    """Raise NormLayerError for layers without channels, and name these layers."""
    lazy = []
    for path, layer in layers_of(model, every_path=True).items():
        if isinstance(layer, LazyModuleMixin) or not layer.num_features:
            lazy.append(named(path, layer))
    if lazy:
        raise NormLayerError(
            f"the number of channels is not yet defined for: {', '.join(lazy)}. Run one"
            " batch through the model first, or give BatchNorm its number of channels."
        )
