"""The model's entries in a message: which stay with the client, how the received ones
get into the model, and which go back.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from fedbn_flwr.batchnorm.averaging import Array, State
from fedbn_flwr.client.lent_models import LentModel
from fedbn_flwr.errors import ConfigError, StateError
from fedbn_flwr.messages.numpy_client import Config
from fedbn_flwr.messages.protocol import ARRAY_NAMES
from fedbn_flwr.messages.records import tensors, to_state
from fedbn_flwr.training.client_hook import ClientHook, Extras
from fedbn_flwr.training.wrappers import wrapper_prefix

__all__ = ["Received", "entries_that_stay", "load_received", "returned_entries"]


def entries_that_stay(lent: LentModel, sent: Sequence[str]) -> tuple[str, ...]:
    """Return the entries that stay here under this model's own names; those that are
    sent may have a wrapper's prefix.

    Raises:
        ConfigError: gamma and beta of some BatchNorm layers stay, and those of others
            do not; or an entry that stays is the same tensor as a shared one.
    """
    prefix = wrapper_prefix(sent, lent.parts.names)
    names = tuple(name.removeprefix(prefix) for name in sent)
    # The server has split the model by names alone, and the client knows its layers.
    affine = lent.parts.affine
    shared = [name for name in affine if name not in names]
    if shared and len(shared) < len(affine):
        raise ConfigError(
            "the strategy leaves gamma and beta of BatchNorm layers with the clients,"
            f" but not '{shared[0]}': names alone do not show it as one of these. Pass"
            " parts=split_state(model) to the strategy."
        )
    if not names:
        return names
    for first, second in lent.tied.items():
        if (first in names) != (second in names):
            stays, other = (first, second) if first in names else (second, first)
            raise ConfigError(
                f"'{stays}' stays with the client, and another name of the same"
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
    # Take the further records out. An entry of the model may have a "/" in its name.
    received: dict[str, Array] = {}
    further: dict[str, dict[str, Tensor]] = {}
    for name, array in zip(names, parameters, strict=True):
        if name in model or "/" not in name:
            received[name] = array
            continue
        record, _, entry = name.partition("/")
        further.setdefault(record, {}).update(tensors({entry: array}))
    # The server may have a compiled model's names, and this model be none.
    prefix = wrapper_prefix(received, model)
    state = {name.removeprefix(prefix): array for name, array in received.items()}
    # What is kept wins: the server's values of these entries are of its first message.
    state.update(kept)
    lent.load(tensors(_fitted(state, model)))
    extras = {}
    for record, entries in further.items():
        extras[record] = {
            name.removeprefix(prefix): entry for name, entry in entries.items()
        }
    return Received(extras, prefix)


def _fitted(state: dict[str, Array], model: Mapping[str, Tensor]) -> dict[str, Array]:
    """Return the state with each array as the model's entry needs it.

    Raises:
        StateError: names or shapes are not the model's.
    """
    extra = [name for name in state if name not in model]
    if extra:
        raise StateError(
            f"received {len(extra)} entries the model does not have ('{extra[0]}',"
            " ...). Build the client's model as the server's initial arrays were"
            " built."
        )
    missing = [name for name in model if name not in state]
    if missing:
        raise StateError(
            f"no value for {len(missing)} entries ('{missing[0]}', ...): they were"
            " neither sent nor kept by this client; the server will send the whole"
            " state again"
        )
    # A cast to the entry's dtype is left to torch; a shape would be broadcast.
    for name, like in model.items():
        array = state[name]
        if array.shape != like.shape:
            raise StateError(
                f"entry '{name}' has shape {tuple(array.shape)}, the model has"
                f" {tuple(like.shape)}"
            )
        # A counter that was averaged, 9.999999: a cast to int64 would cut it to 9.
        is_float = like.is_floating_point() or like.is_complex()
        if array.dtype.kind == "f" and not is_float:
            state[name] = np.asarray(np.rint(array))
    return state


def returned_entries(
    state: State, local: Collection[str], hooks: Iterable[ClientHook], prefix: str
) -> dict[str, Array]:
    """Return the entries of the reply under the server's names: the shared ones, and
    the records of the hooks.
    """
    stay = set(local)
    returned: dict[str, Array] = {}
    for name, array in state.items():
        if name not in stay:
            returned[prefix + name] = array
    for hook in hooks:
        for record, entries in hook.reply().items():
            for name, array in to_state(entries).items():
                returned[f"{record}/{prefix}{name}"] = array
    return returned
