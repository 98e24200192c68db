"""The client's model: how a message gets it, and the entries that go in and out.

See ``Door``.

The second half determines which entries stay with the client, loads the received
entries into the model, and selects the entries of the reply.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import time
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any, NamedTuple, cast
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from fedbn_flwr.batchnorm.array_types import Array, State
from fedbn_flwr.batchnorm.parts import Parts, split_state, tied_apart
from fedbn_flwr.batchnorm.sync import try_synchronised_step
from fedbn_flwr.batchnorm.train_only import freeze
from fedbn_flwr.errors import (
    COMES_AGAIN,
    ConfigError,
    NormLayerError,
    StateError,
    coded,
)
from fedbn_flwr.messages.numpy_client import Config
from fedbn_flwr.messages.protocol import ARRAY_NAMES, MessageConfig
from fedbn_flwr.messages.records import tensors, to_state
from fedbn_flwr.problems import raise_or_warn
from fedbn_flwr.training.batches import Batches, inputs_for, memory_format_of
from fedbn_flwr.training.borrowed import (
    borrowed,
    is_plain,
    key_of,
    no_other_state,
    reached,
)
from fedbn_flwr.training.client_hook import ClientHook, Extras
from fedbn_flwr.training.freezing import (
    copy_modes,
    force_eval_as_built,
    in_mode,
    unlike_in_tests,
)
from fedbn_flwr.training.model_state import (
    compiled_modules,
    load_state,
    named_by_state,
    no_tensors,
    unwrap,
    wrapper_prefix,
)
from fedbn_flwr.training.randomness import seeded
from fedbn_flwr.training.run_memory import (
    first_time,
    is_due,
    is_noted,
    kept_for_run,
    note,
)
from fedbn_flwr.training.tasks import CLASSIFICATION, TASKS, Task

logger = logging.getLogger("flwr")

BuildModel = Callable[[], nn.Module]
TaskOfModel = Callable[[nn.Module], Task]
Example = Callable[[], Any]
"""Returns the inputs of two examples."""


@dataclass(frozen=True)
class LentModel:
    """The model of one message, with its task.

    Attributes:
        model: the model in its memory format, possibly compiled or wrapped in DDP.
        plain: the module inside wrappers.
        parts: the split of the state.
        fingerprint: what local state must match: the parts and the shapes.
        is_used_again: whether a later message may change the model's tensors.
        initial: the state when the model was built, if the model is used again.
        task_of: makes a task for passes that are no steps, of this model or a second
            one.
        given: the task that trains, if it was given itself.
        at_end: undoes what the message changed in the model.
    """

    model: nn.Module
    plain: nn.Module
    parts: Parts
    fingerprint: str
    is_used_again: bool
    initial: State = field(default_factory=dict)
    task_of: TaskOfModel = lambda _: CLASSIFICATION
    given: Task | None = None
    at_end: ExitStack = field(default_factory=ExitStack)

    @functools.cached_property
    def task(self) -> Task:
        """The task of this model; it may read the values that the model has then."""
        return self.given or self.task_of(self.model)

    def arrays(self) -> State:
        """Return the entries as arrays that no later message changes."""
        state = to_state(self.plain.state_dict())
        if not self.is_used_again:
            return state
        return {name: array.copy() for name, array in state.items()}


def _kind_of(plain: nn.Module) -> Hashable:
    """Return a key with all that the split and the memory format of a model depend on.

    Raises:
        ConfigError: the state has entries that are not tensors.
        StateError: a lazy layer has no shapes yet.
    """
    why = no_tensors(plain)
    if why:
        raise ConfigError(why)
    kind: list[Hashable] = []
    places: dict[int, int] = {}
    for name, one in plain.state_dict(keep_vars=True).items():
        if is_lazy(one):
            raise StateError(
                f"entry '{name}' of the model is lazy, and has no shape yet. Run one"
                " batch through the model first, in the function that builds it."
            )
        tied = places.setdefault(id(one), len(places))
        kind.append((name, type(one), one.shape, one.dtype, one.requires_grad, tied))
    kind += [(path, type(one)) for path, one in plain.named_modules()]
    return tuple(kind)


class Door:
    """Lends the models of messages, with their tasks.

    - A function that builds the model is called for each model that a message needs.
    - A model that is given itself belongs to the first client that uses it, and has its
      values as before after each message. So does a loss or a loop that may have state.
    - If models are used again, later messages get the same models with other values. A
      compiled model is always used again, because each one would be compiled again.

    Args:
        model: the model, or the function that builds it.
        task: the task, or the function that makes it for a model.
        loop: the user's loop, or None.
        example: the argument of ``memory_format_of``. With None, a model keeps the
            format in which it was built, because a user's loop may depend on it.
        reuse: whether models are used again.
    """

    def __init__(
        self,
        model: nn.Module | BuildModel,
        task: Task | TaskOfModel = CLASSIFICATION,
        loop: Callable[..., Any] | None = None,
        example: Example | None = None,
        reuse: bool = False,
    ) -> None:
        self._model, self._example, self._reuse = model, example, reuse
        self._is_given = isinstance(model, nn.Module)
        self._task, self._functions = task, {"loop": loop}
        # The functions of the package have no state.
        if isinstance(task, Task) and not any(task is one for one in TASKS.values()):
            for name in ("loss", "training_loss", "test"):
                self._functions[name] = getattr(task, name, None)

    @contextmanager
    def lend(self, purpose: str = "") -> Iterator[LentModel]:
        """Lend a model for a message.

        Raises:
            StateError: the model, the loss or the loop belongs to another client; or
                the message has changed a model outside its state dict, though
                ``reuse`` is true.
        """
        for name, function in self._functions.items():
            # Each use of a method as a value is a new object.
            given = getattr(function, "__self__", function)
            self._own(name, {"": given}, ref(self), _may_be_shared(function))
        began = time.perf_counter()
        keeps = self._reuse or is_noted("compiled")
        free = self._free() if keeps and not self._is_given else []
        is_new = not free
        lent = free.pop() if free else self._new()
        built = time.perf_counter() - began
        again = self._reuse or bool(compiled_modules(lent.model))
        owner = ref(self) if self._is_given and not again else object()
        parts: dict[str, Any] = {}
        if is_new:
            parts = dict(lent.model.named_modules())
            parts |= lent.model.named_parameters()
        self._own("model", parts, owner)
        # A buffer that no message changes may be shared.
        buffers = dict(lent.plain.named_buffers()) if is_new else {}
        before = {name: one.clone() for name, one in buffers.items()}
        guard: AbstractContextManager[None] = nullcontext()
        if self._reuse and is_due("promised", purpose):
            guard = no_other_state(lent.plain, coded(COMES_AGAIN, _PROMISE))
        trains = purpose == "training"
        task_of = functools.partial(self._task_of, trains)
        given = self._task if trains and isinstance(self._task, Task) else None
        modes = in_mode(lent.plain, True) if again else nullcontext()
        try:
            with modes, guard, ExitStack() as at_end:
                yield replace(lent, task_of=task_of, given=given, at_end=at_end)
                # A given model that breaks the promise stays in use.
                freed, parts = parts, {}
            parts = freed
            note("promised", purpose)
            for name, one in buffers.items():
                if not torch.equal(one, before[name]):
                    parts[name] = one
            self._own("model", parts, owner)
        finally:
            for parameter in lent.model.parameters():
                parameter.grad = None
            if self._is_given:
                other = lent.initial.keys() ^ lent.plain.state_dict().keys()
                if other:
                    why = f"got or lost the entry '{min(other)}'"
                    raise _refusal("model", why, self._reuse)
                load_state(lent.plain, tensors(lent.initial))
                for part in parts.values() if again else ():
                    _OWNERS.pop(part, None)
        # After an exception, a model is not used again.
        if again and not self._is_given:
            note("compiled")
            self._free().append(lent)
        if not again and not self._is_given:
            _note_cost(built, time.perf_counter() - began)

    @contextmanager
    def lend_again(self, lent: LentModel, sent: MessageConfig) -> Iterator[LentModel]:
        """Lend a second model for the message, with a task of its own.

        It has the state and the modes of the first. A model that is used again is lent
        itself, and is in the end as before.

        Raises:
            StateError: a pass changes something that cannot be put back.
        """
        again: AbstractContextManager[LentModel] = self.lend()
        with ExitStack() as stack:
            if lent.is_used_again:
                why = "is needed twice in a message, but a pass changes {}"
                if not self._reuse:
                    text = str(_refusal("model", why))
                    stack.enter_context(no_other_state(lent.plain, text))
                stack.enter_context(borrowed(lent.plain))
                again = nullcontext(replace(lent, at_end=stack))
            task_of = functools.partial(self._task_of, True)
            second = replace(stack.enter_context(again), task_of=task_of, given=None)
            load_state(second.plain, lent.plain.state_dict())
            copy_modes(lent.plain, second.plain)
            second.at_end.enter_context(freeze_here(second.plain, sent))
            yield second

    def _own(
        self, what: str, parts: Mapping[str, Any], owner: object, shared: bool = False
    ) -> None:
        """Note the owner of objects by name.

        Raises:
            StateError: one has another owner, and is not shared.
        """
        for name, part in parts.items():
            found: object = None
            with suppress(TypeError):  # it has slots, or is a list
                found = _OWNERS.setdefault(part, owner)
            if found is not owner and not shared:
                why = "was used by an earlier message of another client object"
                if what == "model":
                    why += ", shares a layer or a tensor with such a model"
                    why += ", is used by two messages at once, or was changed by a"
                    why += " message in spite of reuse_model=True"
                of = f"'{name}' of " if name else ""
                raise _refusal(what, why, self._reuse, of)

    def _task_of(self, again: bool, model: nn.Module) -> Task:
        """Return a task for passes, because only steps change the state of a loss."""
        if not isinstance(self._task, Task):
            return self._task(model)
        copies = {}
        for name, function in self._functions.items():
            if name != "loop" and not _may_be_shared(function):
                copies[name] = _copy_of(name, function, again)
        return replace(self._task, **copies)

    def _new(self) -> LentModel:
        tried: list[bool] = []

        def example() -> Any:
            tried.append(True)
            return cast(Example, self._example)()

        model = self._build()
        plain = unwrap(model)
        looks: dict[Hashable, Any] = kept_for_run("looks", dict)
        kind = _kind_of(plain), self._example is None
        if kind not in looks:
            parts = split_state(plain)
            shapes = {name: one.shape for name, one in plain.state_dict().items()}
            wanted = memory_format_of(plain, example) if self._example else None
            looks[kind] = parts, parts.fingerprint(shapes), wanted
            if tried:  # a try may leave traces in hooks
                model = self._build()
                plain = unwrap(model)
            _warn(unlike_in_tests(plain))
        _warn(force_eval_as_built(plain))
        parts, fingerprint, wanted = looks[kind]
        if wanted:
            model.to(memory_format=wanted)
        again = self._is_given or self._reuse or bool(compiled_modules(model))
        lent = LentModel(model, plain, parts, fingerprint, again)
        return replace(lent, initial=lent.arrays()) if again else lent

    def _build(self) -> nn.Module:
        if isinstance(self._model, nn.Module):
            return self._model
        with seeded(0):  # because only some processes build a model here
            model = self._model()
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"the function that builds the model returns a {type(model).__name__},"
                " but it must return a torch.nn.Module"
            )
        return model

    def _free(self) -> list[LentModel]:
        """Return the models that are not in use, of this or an equal function."""
        found = reached([self._model])
        kept: dict[Hashable, Any] = kept_for_run("models", dict)
        # Each message may have another function, and an object in it may be the data.
        if len(kept) > (99 if all(map(is_plain, found)) else 9):
            kept.clear()
        key = (self._example is None, *map(key_of, found))
        # Keep the parts of the function, because the key has ids of some.
        free: list[LentModel] = kept.setdefault(key, (found, []))[1]
        return free


def _warn(text: str) -> None:
    if text and first_time(text):
        logger.warning("%s", text)


def _note_cost(built: float, whole: float) -> None:
    """Log once in a run that building the models takes long, if it does."""
    spent = kept_for_run("seconds", lambda: [0.0, 0.0])
    spent[0], spent[1] = spent[0] + built, spent[1] + whole
    if spent[0] > max(1.0, spent[1] / 10) and first_time("seconds"):
        logger.info(
            "Building a model for each message takes %.0f %% of the clients' time. Pass"
            " reuse_model=True to TorchClient if a message changes nothing in a model"
            " but its state dict. If you did, the function that builds the model refers"
            " to objects of the client function: define it outside.",
            100 * spent[0] / spent[1],
        )


# The owners of the modules and tensors of models, of losses and of loops; and the
# version of a shared tensor at its first use, because an operation in place changes it.
# This is module state, because each message may make a client.
_OWNERS: Any = WeakIdKeyDictionary()


_PROMISE = (
    "a message has changed {}, so the model must not serve the next message. Leave out"
    " reuse_model=True"
)
_REMEDIES = {
    "model": "Give a function that builds a new model in each call: TorchClient("
    "lambda: Net(), ...)",
    "loop": "Make it in the client function: LocalTraining(loop=MyLoop(), ...)",
}
_OR_PROMISE = (
    ". Or, if a message changes nothing in a model but its state dict, promise this:"
    " TorchClient(..., reuse_model=True)"
)
_REMEDY = (
    "Give a function that makes the task: task=lambda model: replace(your_task,"
    " {}=MyClass()). Or, if a message needs it only once, make it in the client function"
)


def _refusal(what: str, why: str, reuse: bool = False, of: str = "") -> StateError:
    """Return the error about a model, a loss or a loop, or about a part ``of`` it."""
    remedy = _REMEDIES.get(what, _REMEDY.format(what))
    if what == "model" and not reuse:
        remedy += _OR_PROMISE
    text = f"{of}the {what} {why}. It may have state outside its state dict. {remedy}"
    return StateError(coded(COMES_AGAIN, text))


def _may_be_shared(given: Any) -> bool:
    """Return whether several clients may use a loss, a test or a loop.

    It is a function or a loss of torch, or a partial or a closure of these, of plain
    values, and of tensors that have not changed since their first use. A function whose
    state is in a global, or in an attribute of a class, is not recognised.
    """
    for one in reached([given]):
        if isinstance(one, Tensor):
            if _OWNERS.setdefault(one, one._version) != one._version:
                return False
        elif not is_plain(one) and type(one).__module__ != "torch.nn.modules.loss":
            return False
    return True


def _copy_of(what: str, function: Any, again: bool) -> Any:
    """Return a copy of a function with state, or a function that refuses its call.

    ``copy`` returns a function itself, with its closure. This is right if the message
    does not need it ``again``.
    """
    with suppress(Exception):  # of the user's object
        if not any(isinstance(one, FunctionType) for one in reached([function])):
            return copy.deepcopy(function)

    def refuse(*_: Any) -> None:
        raise _refusal(what, "is needed twice in a message, but cannot be copied")

    return refuse if again else function


def try_step(lent: LentModel, data: Batches) -> None:
    """Try a synchronised step with two examples, once for a model.

    Raises:
        NormLayerError: BN layers of this model cannot be synchronised.
    """
    key = ("tried", *map(type, lent.plain.modules()))
    if is_noted(*key):
        return
    positions = torch.arange(min(2, len(data)))
    try:
        inputs, targets = data.batch(positions)
        pair = (inputs_for(lent.plain)(inputs), targets)
        task = lent.task
        try_synchronised_step(
            lent.plain, pair, len(positions), lambda model, pair: task.run(model, *pair)
        )
        note(*key)
    except NormLayerError:
        raise
    # The user's code may raise any exception. If training raises it as well, the client
    # reports it to the server then.
    except Exception as error:
        logger.warning(
            "the model could not be tried in a synchronised step: %s: %s",
            type(error).__name__,
            error,
        )


# --- the entries of a message ----------------------------------------------------------


def entries_that_stay(lent: LentModel, sent: MessageConfig) -> tuple[str, ...]:
    """Return the entries that stay here, under this model's own names.

    The names in messages may have a wrapper's prefix.

    Raises:
        ConfigError: gamma and beta of only some BatchNorm layers stay, although the
            server has not selected layers; or an entry that stays is the same tensor as
            a shared entry.
    """
    if not sent.local_entries:
        return ()
    prefix = wrapper_prefix(sent.local_entries, lent.parts.names)
    names = tuple([name.removeprefix(prefix) for name in sent.local_entries])
    # If the user selected no layers, the server may have split the model only by names,
    # but the client can find its layers by type.
    affine = () if sent.layers else lent.parts.affine
    personal = {name.removeprefix(prefix) for name in sent.personal}
    personal |= {name.removeprefix(prefix) for name in sent.fixed_entries}
    affine = tuple([name for name in affine if name not in personal])
    shared = [name for name in affine if name not in names]
    if shared and len(shared) < len(affine):
        raise ConfigError(
            "the strategy leaves gamma and beta of BatchNorm layers with the clients,"
            f" but it shares '{shared[0]}', although it does not select layers. If"
            " the server has another model, build this node's model like its initial"
            " arrays. Otherwise, the name of this entry may not reveal that it belongs to BatchNorm. If the"
            " entry should stay with the clients, pass parts=split_state(model) to the"
            " strategy. If only some layers should stay, pass layers=, or"
            " parts=split_state(model, layers=...)."
        )
    raise_or_warn(tied_apart(lent.parts.tied, names))
    return names


def freeze_here(model: nn.Module, sent: MessageConfig) -> ExitStack:
    """Freeze the fixed entries. The end of the returned context undoes this."""
    if not sent.fixed_entries:
        return ExitStack()
    note("frozen", sent.fixed_sha256)
    return freeze(named_by_state(model), sent.fixed_entries)


class Received(NamedTuple):
    """The contents of a message in addition to the model's values.

    Attributes:
        extras: entries of further records, by record.
        prefix: the wrapper's prefix in the received names.
        state: the values of the model, received or kept.
    """

    extras: Extras
    prefix: str
    state: Mapping[str, Array]


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
    model = lent.plain.state_dict()
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
    initial = lent.initial or to_state(model)  # before another state is loaded
    for name in (one.removeprefix(prefix) for one in sent.personal):
        if name in state and name in model and state[name].shape != model[name].shape:
            state[name] = initial[name]
    extra = [name for name in state if name not in model]
    missing = [name for name in model if name not in state]
    local = {name.removeprefix(prefix) for name in sent.local_entries}
    more = [name for name in missing if name not in local]
    if extra or more:
        raise StateError(
            f"this node has another model than the server: it lacks {len(extra)}"
            f" entries, {extra[:3]}, and it alone has {len(more)}, {more[:3]}. Build the"
            " client's model like the server's initial arrays."
        )
    if missing:
        raise StateError(
            f"no value for {len(missing)} of the model's entries ('{missing[0]}', ...):"
            " they were neither sent nor kept by this client; the server will send the"
            " whole state again"
        )
    for name, like in model.items():
        array = state[name]
        # Torch casts to the entry's dtype. It would also broadcast, so compare shapes.
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
    load_state(lent.plain, tensors(state), own=model)
    lent.at_end.enter_context(freeze_here(lent.plain, sent))
    extras = {}
    for record, entries in further.items():
        extras[record] = {
            name.removeprefix(prefix): entry for name, entry in entries.items()
        }
    return Received(extras, prefix, state)


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
