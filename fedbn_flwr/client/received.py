"""The received entries of a message in a client's model: which stay with the client,
and how the others are loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from fedbn_flwr.batchnorm.averaging import Array
from fedbn_flwr.client.lent_models import LentModel
from fedbn_flwr.errors import ConfigError, StateError
from fedbn_flwr.messages.numpy_client import Config
from fedbn_flwr.messages.protocol import ARRAY_NAMES
from fedbn_flwr.messages.records import tensors
from fedbn_flwr.training.client_hook import Extras
from fedbn_flwr.training.wrappers import wrapper_prefix

__all__ = ["Received", "entries_that_stay", "load_received"]


def entries_that_stay(lent: LentModel, sent: Sequence[str]) -> tuple[str, ...]:
    """Return the entries that stay here under this model's own names; those that are
    sent may have a wrapper's prefix.

    Raises:
        ConfigError: gamma and beta of some BatchNorm layers stay, and those of others
            do not; or an entry that stays is the same tensor as a shared one.
    """
    prefix = wrapper_prefix(sent, lent.parts.names)
    names = tuple(name.removeprefix(prefix) for name in sent) if prefix else tuple(sent)
    affine = lent.parts.affine
    shared = [name for name in affine if name not in names]
    if shared and len(shared) < len(affine):
        raise ConfigError(
            "the strategy leaves gamma and beta of BatchNorm layers with the clients,"
            f" but not '{shared[0]}': names alone do not show it as one of these. Pass"
            " parts=split_state(model) to the strategy."
        )
    for pair in lent.tied.items() if names else ():
        if len(stays := [name for name in pair if name in names]) == 1:
            (other,) = {*pair} - {*stays}
            raise ConfigError(
                f"'{stays[0]}' stays with the client, and another name of the same"
                f" tensor, '{other}', is shared: one would overwrite the other. Untie"
                " them in the model, or use a strategy that shares both."
            )
    return names


class Received(NamedTuple):
    """What a message has beside the model's values.

    Attributes:
        extras: entries of further records, by record.
        prefix: the wrapper's prefix in the received names.
    """

    extras: Extras
    prefix: str


def load_received(
    lent: LentModel, parameters: list[Array], config: Config, kept: Mapping[str, Array]
) -> Received:
    """Load the received entries into the model, kept entries in place of received ones;
    check that none is missing.

    The config names the arrays, those of further records ``record/entry``; else they
    are the model's own in its order.

    Raises:
        StateError: an entry is missing, is not the model's, or has another shape.
    """
    model = lent.state
    names = json.loads(config[ARRAY_NAMES]) if ARRAY_NAMES in config else list(model)
    if len(names) != len(parameters):
        raise StateError(
            f"received {len(parameters)} arrays for {len(names)} entries; the model has"
            f" {len(model)}. Build the client's model as the server's initial arrays"
            " were built."
        )
    received = dict(zip(names, parameters, strict=True))
    further: dict[str, dict[str, Tensor]] = {}
    for name in [name for name in received if name not in model and "/" in name]:
        record, _, entry = name.partition("/")
        further.setdefault(record, {})[entry] = tensors({entry: received.pop(name)})[
            entry
        ]
    prefix = wrapper_prefix(received, model)
    if prefix:
        received = {
            name.removeprefix(prefix): array for name, array in received.items()
        }
    state = {**received, **kept}
    if extra := [name for name in state if name not in model]:
        raise StateError(
            f"received {len(extra)} entries the model does not have ('{extra[0]}',"
            " ...). Build the client's model as the server's initial arrays were"
            " built."
        )
    if missing := [name for name in model if name not in state]:
        raise StateError(
            f"no value for {len(missing)} entries ('{missing[0]}', ...): they were"
            " neither sent nor kept by this client; the server will send the whole"
            " state again"
        )
    for name, like in model.items():
        array = state[name]
        if array.shape != like.shape or (
            array.dtype.kind == "f" and not like.is_floating_point()
        ):
            state[name] = _fit(name, array, like)
    lent.load(tensors(state))
    extras = {}
    for record, entries in further.items():
        extras[record] = {
            name.removeprefix(prefix): entry for name, entry in entries.items()
        }
    return Received(extras, prefix)


def _fit(name: str, array: Array, like: Tensor) -> Array:
    """Return the array if it fits the entry; counters that arrive as floats are
    rounded, not truncated.
    """
    if array.shape != tuple(like.shape):
        raise StateError(
            f"entry '{name}' has shape {tuple(array.shape)}, the model has"
            f" {tuple(like.shape)}"
        )
    counts_as_floats = (
        array.dtype.kind == "f"
        and not like.is_floating_point()
        and not like.is_complex()
    )
    return np.asarray(np.rint(array)) if counts_as_floats else array
