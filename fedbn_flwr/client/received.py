"""The entries of a model in a message.

The functions determine which entries stay with the client, load the received entries
into the model, and select the entries of the reply.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import numpy as np
from torch import Tensor

from fedbn_flwr.batchnorm.array_types import Array, State
from fedbn_flwr.batchnorm.tied_entries import tied_apart
from fedbn_flwr.client.model_door import LentModel
from fedbn_flwr.errors import ConfigError, StateError
from fedbn_flwr.messages.numpy_client import Config
from fedbn_flwr.messages.protocol import ARRAY_NAMES, MessageConfig
from fedbn_flwr.messages.records import tensors, to_state
from fedbn_flwr.problems import raise_or_warn
from fedbn_flwr.training.client_hook import ClientHook, Extras
from fedbn_flwr.training.model_state import load_state, wrapper_prefix


def entries_that_stay(lent: LentModel, sent: MessageConfig) -> tuple[str, ...]:
    """Return the entries that stay here, under this model's own names.

    The names in messages may have a wrapper's prefix.

    Raises:
        ConfigError: gamma and beta of only some BatchNorm layers stay, although the
            server has not selected layers; or an entry that stays is the same tensor as
            a shared entry.
    """
    prefix = wrapper_prefix(sent.local_entries, lent.parts.names)
    names = tuple([name.removeprefix(prefix) for name in sent.local_entries])
    # If the user selected no layers, the server may have split the model only by names,
    # but the client can find its layers by type.
    affine = () if sent.layers else lent.parts.affine
    personal = {name.removeprefix(prefix) for name in sent.personal}
    affine = tuple([name for name in affine if name not in personal])
    shared = [name for name in affine if name not in names]
    if shared and len(shared) < len(affine):
        raise ConfigError(
            "the strategy leaves gamma and beta of BatchNorm layers with the clients,"
            f" but it shares '{shared[0]}', although it does not select layers. The"
            " name of this entry may not reveal that it belongs to BatchNorm. If the"
            " entry should stay with the clients, pass parts=split_state(model) to the"
            " strategy. If only some layers should stay, pass layers=, or"
            " parts=split_state(model, layers=...)."
        )
    raise_or_warn(tied_apart(lent.parts.tied, names))
    return names


class Received(NamedTuple):
    """The contents of a message in addition to the model's values.

    Attributes:
        extras: entries of further records, by record.
        prefix: the wrapper's prefix in the received names.
    """

    extras: Extras
    prefix: str


def load_received(
    lent: LentModel,
    parameters: list[Array],
    config: Config,
    sent: MessageConfig,
    kept: Mapping[str, Array],
) -> Received:
    """Load the received entries and the local state into the model.

    Local entries replace received entries, and no entry may be missing. The config
    names the arrays (``record/entry`` in further records); without names they are the
    model's own entries in its order. A personal entry with another shape than on the
    server starts with the client's own initial value.

    Raises:
        StateError: an entry is missing, is unknown to the model, or has another shape.
    """
    model = lent.state
    names = json.loads(config[ARRAY_NAMES]) if ARRAY_NAMES in config else list(model)
    if len(names) != len(parameters):
        raise StateError(
            f"received {len(parameters)} arrays for {len(names)} entries; the model has"
            f" {len(model)}. Build the client's model like the server's initial arrays."
        )
    # Separate the further records. An entry of the model may have a "/" in its name.
    received: dict[str, Array] = {}
    further: dict[str, dict[str, Tensor]] = {}
    for name, array in zip(names, parameters, strict=True):
        if name in model or "/" not in name:
            received[name] = array
            continue
        record, _, entry = name.partition("/")
        further.setdefault(record, {}).update(tensors({entry: array}))
    # The server's names may have the prefix of a compiled model, although this model is
    # not compiled.
    prefix = wrapper_prefix(received, model)
    state = {name.removeprefix(prefix): array for name, array in received.items()}
    # Local entries replace the server's values, because these are still from its first
    # message.
    state.update(kept)
    for name in (one.removeprefix(prefix) for one in sent.personal):
        if name in state and name in model and state[name].shape != model[name].shape:
            state[name] = lent.initial[name]
    load_state(lent.plain, tensors(_fitted(state, model)), own=model)
    extras = {}
    for record, entries in further.items():
        extras[record] = {
            name.removeprefix(prefix): entry for name, entry in entries.items()
        }
    return Received(extras, prefix)


def _fitted(state: dict[str, Array], model: Mapping[str, Tensor]) -> dict[str, Array]:
    """Return the state with each array as the model's entry needs it.

    Raises:
        StateError: names or shapes differ from the model's.
    """
    extra = [name for name in state if name not in model]
    if extra:
        raise StateError(
            f"the model lacks {len(extra)} of the received entries ('{extra[0]}', ...)."
            " Build the client's model like the server's initial arrays."
        )
    missing = [name for name in model if name not in state]
    if missing:
        raise StateError(
            f"no value for {len(missing)} of the model's entries ('{missing[0]}', ...):"
            " they were neither sent nor kept by this client; the server will send the"
            " whole state again"
        )
    # Torch casts to the entry's dtype. It would also broadcast, so compare the shapes.
    for name, like in model.items():
        array = state[name]
        if array.shape != like.shape:
            raise StateError(
                f"entry '{name}' has shape {tuple(array.shape)}, but the model has"
                f" {tuple(like.shape)}"
            )
        # Round averaged counters such as 9.999999, because a cast to int64 would give
        # 9.
        is_float = like.is_floating_point() or like.is_complex()
        if array.dtype.kind == "f" and not is_float:
            state[name] = np.asarray(np.rint(array))
    return state


def returned_entries(
    state: State, local: Collection[str], hooks: Iterable[ClientHook], prefix: str
) -> dict[str, Array]:
    """Return the entries of the reply under the server's names.

    They are the shared entries and the records of the hooks.
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
