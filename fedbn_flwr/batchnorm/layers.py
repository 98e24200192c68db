"""The BatchNorm layers of a client's model that a method acts on."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.errors import NormLayerError
from fedbn_flwr.training.freezing import layers_of, stays_in_eval
from fedbn_flwr.training.model_state import without_wrappers

__all__ = [
    "batchnorm_layers",
    "layers_in_training",
    "tracking_layers",
]


def batchnorm_layers(model: nn.Module, paths: Collection[str] = ()) -> list[_BatchNorm]:
    """Return the BatchNorm layers with these paths, or all layers, each layer once.

    Args:
        model: the model.
        paths: the paths, with or without a wrapper's prefix. If ``model`` is a user's
            module around the network, paths inside the network are accepted.

    Raises:
        NormLayerError: the model has none of the paths, or has them in two places; or a
            layer has another path as well.
    """
    # A layer that is used twice may be named by its second path.
    layers = layers_of(model, every_path=True)
    at = {without_wrappers(path): layer for path, layer in layers.items()}
    bare = [*dict.fromkeys(map(without_wrappers, paths))]
    chosen = [path for path in at if path in bare or not bare]
    if bare and not chosen:
        ends = [
            path.removesuffix(bare[0]) for path in at if path.endswith(f".{bare[0]}")
        ]
        around = [end for end in ends if at.keys() >= {end + path for path in bare}]
        if len(around) != 1:
            raise NormLayerError(
                f"the strategy treats the BatchNorm layers {', '.join(bare[:3])} of the"
                f" server's model, but a {type(model).__name__} has these paths in"
                f" {len(around)} places. Pass the network whose state dict is sent,"
                " without a module around it."
            )
        chosen = [around[0] + path for path in bare]
    found = list(dict.fromkeys(at[path] for path in chosen))
    others = [path for path in at if at[path] in found and path not in chosen]
    if others:
        raise NormLayerError(
            f"the strategy treats the BatchNorm layers {', '.join(bare[:3])}, but one of"
            f" them has a second path, '{others[0]}'. Name both paths in layers."
        )
    return found


def tracking_layers(model: nn.Module) -> list[_BatchNorm]:
    """Return the BatchNorm layers that update running statistics in a forward pass."""
    layers = []
    for layer in layers_of(model).values():
        tracks = layer.running_mean is not None and layer.track_running_stats
        if layer.training and tracks:
            layers.append(layer)
    return layers


def layers_in_training(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the BatchNorm layers that track statistics in training, by path.

    Layers that the model keeps in eval mode, or that are in eval mode while the model
    is in train mode, are left out. A layer at several paths is listed under the first.
    """
    in_eval = stays_in_eval(model)
    layers = {}
    for path, layer in layers_of(model).items():
        tracks = layer.running_mean is not None and layer.track_running_stats
        if tracks and layer not in in_eval:
            layers[path] = layer
    return layers
