"""The model of a message, and the entries of a model in a message.

A process builds a model once, and each message gets a copy of it, so that nothing that
a client's training leaves in a model reaches another client.

The functions for messages determine which entries stay with the client, load the
received entries into the model, and select the entries of the reply.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedbn_flwr.batchnorm.averaging import Array, State
from fedbn_flwr.batchnorm.parts import (
    Parts,
    name_once,
    split_state,
    tied_apart,
)
from fedbn_flwr.batchnorm.sync import try_synchronised_step
from fedbn_flwr.errors import ConfigError, NormLayerError, StateError
from fedbn_flwr.messages.numpy_client import Config
from fedbn_flwr.messages.protocol import ARRAY_NAMES, MessageConfig
from fedbn_flwr.messages.records import tensors, to_state
from fedbn_flwr.problems import tell
from fedbn_flwr.training.batches import Batches, inputs_for, set_memory_format
from fedbn_flwr.training.client_hook import ClientHook, Extras
from fedbn_flwr.training.copying import Template, copied
from fedbn_flwr.training.freezing import force_eval_as_built, unlike_in_tests
from fedbn_flwr.training.model_state import (
    compiled_modules,
    load_state,
    no_tensors,
    unwrap,
    wrapper_prefix,
)
from fedbn_flwr.training.randomness import seeded
from fedbn_flwr.training.run_memory import first_time, is_noted, kept_for_run, note

logger = logging.getLogger("flwr")

BuildModel = Callable[[], nn.Module]


@dataclass
class CachedModel:
    """A model, with values that are derived from it once.

    Attributes:
        model: the model, possibly compiled or wrapped in DDP.
        plain: the module inside such wrappers.
        parts: the split of its state.
        fingerprint: the fingerprint of the parts and the shapes, which local state must
            match.
        build: the function that built the model; None if it was given.
    """

    model: nn.Module
    plain: nn.Module
    parts: Parts
    fingerprint: str
    build: BuildModel | None = None

    @functools.cached_property
    def template(self) -> Template[nn.Module] | None:
        """The template of the model's copies; None if it cannot be copied."""
        try:
            template = Template(self.model)
            template.copy()
            return template
        # Any exception is possible: the layer may contain a generator or a file.
        except Exception:
            return None

    @classmethod
    def of(cls, model: nn.Module, build: BuildModel | None = None) -> CachedModel:
        """Return the model with the values that are derived from it."""
        plain = unwrap(model)
        parts = split_state(plain)
        shapes = {name: tuple(e.shape) for name, e in plain.state_dict().items()}
        return cls(
            model=model,
            plain=plain,
            parts=parts,
            fingerprint=parts.fingerprint(shapes),
            build=build,
        )

    @property
    def state(self) -> Mapping[str, Tensor]:
        """The entries by name. They share memory with the model."""
        return self.plain.state_dict()

    def initial(self) -> State:
        """Return the state of a newly built model, or of a given model as it is now."""
        if self.build is None:
            return to_state(self.state)
        with seeded(0):
            return to_state(unwrap(self.build()).state_dict())

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load all entries."""
        load_state(self.plain, state)

    def try_step(self, data: Batches) -> None:
        """Try a synchronised step with two examples, once for a model.

        Raises:
            NormLayerError: BN layers of this model cannot be synchronised.
        """
        key = ("tried", *map(type, self.plain.modules()))
        if is_noted(*key):
            return
        positions = torch.arange(min(2, len(data)))
        try:
            inputs = inputs_for(self.plain)(data.batch(positions)[0])
            try_synchronised_step(self.plain, inputs, len(positions))
            note(*key)
        except NormLayerError:
            raise
        # The user's code may raise any exception. If training raises it as well, the
        # client reports it to the server then.
        except Exception as error:
            logger.warning(
                "the model could not be tried in a synchronised step: %s: %s",
                type(error).__name__,
                error,
            )


def model_cache(
    model: nn.Module | BuildModel, example: Callable[[], Any] | None = None
) -> Callable[[], AbstractContextManager[CachedModel]]:
    """Return a function that lends a model for a message.

    A model that a function builds is built once in a process. Each message gets a copy
    of it, or of a given model. If it cannot be copied (it has a generator, say), the
    function builds a model for each message. A compiled model is lent
    itself, because each copy would be compiled again; what training leaves outside its
    state dict stays in it. If it was built, one message at a time has it. ``example``
    is the argument of ``set_memory_format``.
    """
    if isinstance(model, nn.Module):
        return lambda: nullcontext(_copied(_prepared(model, example)))
    return functools.partial(_built, model, example)


@contextmanager
def _built(
    build: BuildModel, example: Callable[[], Any] | None
) -> Iterator[CachedModel]:
    # The models that are not in use, by the function that built them.
    models: WeakKeyDictionary[BuildModel, list[CachedModel]] = kept_for_run(
        "models", WeakKeyDictionary
    )
    free = models.setdefault(build, [])
    cached = free.pop() if free else _new(build, example)
    if not compiled_modules(cached.model):
        free.append(cached)
        # Without a template, the function builds a model for each message.
        yield _copied(cached) if cached.template else _new(build, example)
        return
    yield cached
    # The model is not free again after an exception.
    for parameter in cached.plain.parameters():
        parameter.grad = None
    free.append(cached)


def _new(build: BuildModel, example: Callable[[], Any] | None) -> CachedModel:
    # Build the model under a fixed seed, because only some processes build it here.
    with seeded(0):
        return _prepared(build(), example, build)


def _copied(cached: CachedModel) -> CachedModel:
    """Return a copy for one message, or a compiled model itself."""
    if compiled_modules(cached.model):
        return cached
    # The template of a given model would serve only one message.
    template = cached.template if cached.build else None
    model = template.copy() if template else copied(cached.model)
    return replace(cached, model=model, plain=unwrap(model))


def _prepared(
    model: nn.Module,
    example: Callable[[], Any] | None,
    build: BuildModel | None = None,
) -> CachedModel:
    """Return the model with the values that are derived from it.

    Raises:
        StateError: a lazy layer has no shapes yet.
        ConfigError: the state has entries that are not tensors.
    """
    plain = unwrap(model)
    why = no_tensors(plain)
    if why:
        raise ConfigError(why)
    state = plain.state_dict(keep_vars=True)
    lazy = [name for name, entry in state.items() if is_lazy(entry)]
    if lazy:
        raise StateError(
            f"entry '{lazy[0]}' of the model is lazy, and has no shape yet ({len(lazy)}"
            " entries). Run one batch through the model first, in the function that"
            " builds it."
        )
    for warning in (force_eval_as_built(plain), unlike_in_tests(plain)):
        if warning and first_time(warning):
            logger.warning("%s", warning)
    name_once(plain)
    return CachedModel.of(set_memory_format(model, example), build)


def entries_that_stay(cached: CachedModel, sent: MessageConfig) -> tuple[str, ...]:
    """Return the entries that stay here, under this model's own names.

    The names in messages may have a wrapper's prefix.

    Raises:
        ConfigError: gamma and beta of only some BatchNorm layers stay, although the
            server has not selected layers; or an entry that stays is the same tensor as
            a shared entry.
    """
    prefix = wrapper_prefix(sent.local_entries, cached.parts.names)
    names = tuple([name.removeprefix(prefix) for name in sent.local_entries])
    # If the user selected no layers, the server may have split the model only by names,
    # but the client can find its layers by type.
    affine = () if sent.layers else cached.parts.affine
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
    tell(tied_apart(cached.parts.tied, names))
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
    cached: CachedModel,
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
    model = cached.state
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
            state[name] = cached.initial()[name]
    cached.load(tensors(_fitted(state, model)))
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
