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
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary, ref

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
from fedbn_flwr.training.batches import Batches, inputs_for, set_memory_format
from fedbn_flwr.training.borrowed import (
    borrowed,
    hidden_state,
    is_plain,
    key_of,
    outside_state,
    reached,
)
from fedbn_flwr.training.client_hook import ClientHook, Extras
from fedbn_flwr.training.freezing import (
    force_eval_as_built,
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
from fedbn_flwr.training.run_memory import first_time, is_noted, kept_for_run, note
from fedbn_flwr.training.tasks import CLASSIFICATION, Task

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
        is_used_again: whether a later message may change the model's tensors.
        initial: the state when the model was built; of a model that is not used again,
            until another state is loaded.
        task_of: makes a task for passes that are no steps, of this model or a second
            one.
        given: the task that trains, if it was given itself.
        at_end: undoes what the message changed in the model.
        hidden: the layer of a user's model that cannot be used twice in a message.
    """

    model: nn.Module
    plain: nn.Module
    is_used_again: bool
    initial: State = field(default_factory=dict)
    task_of: TaskOfModel = lambda _: CLASSIFICATION
    given: Task | None = None
    at_end: ExitStack = field(default_factory=ExitStack)
    hidden: str = ""

    @functools.cached_property
    def task(self) -> Task:
        """The task of this model; it may read the values that the model has then."""
        return self.given or self.task_of(self.model)

    @functools.cached_property
    def parts(self) -> Parts:
        """The split of the state."""
        return split_state(self.plain)

    def fingerprint(self) -> str:
        """Return what local state must match: the parts and the shapes."""
        shapes = {name: tuple(one.shape) for name, one in self.initial.items()}
        return self.parts.fingerprint(shapes)

    def arrays(self) -> State:
        """Return the entries as arrays that no later message changes."""
        state = to_state(self.plain.state_dict())
        if not self.is_used_again:
            return state
        return {name: array.copy() for name, array in state.items()}


def check_model(plain: nn.Module) -> None:
    """Check a model, and warn of unusual layers.

    Raises:
        StateError: a lazy layer has no shapes yet.
        ConfigError: it is no model, or the state has entries that are not tensors.
        NormLayerError: a module is in TorchScript.
    """
    if not isinstance(plain, nn.Module):
        raise ConfigError(
            f"the function that builds the model returns a {type(plain).__name__}, but"
            " it must return a torch.nn.Module"
        )
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


def _copy_of_task(task: Task, model: nn.Module) -> Task:
    """Return a copy, because only training steps change the state of a loss."""
    try:
        return copy.deepcopy(task)
    except Exception as error:  # of the user's object
        why = f"is needed twice, and cannot be copied ({error})"
        raise _refusal("the loss", why) from error


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
        example: the argument of ``set_memory_format``. With None, a model keeps the
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
        self._task_of: TaskOfModel
        self._given: Task | None = None
        if isinstance(task, Task):
            self._given, self._task_of = task, functools.partial(_copy_of_task, task)
        else:
            self._task_of = task
        self._functions = {"the loop": loop}
        if isinstance(task, Task):
            self._functions["the loss"] = task.loss
            self._functions["the training loss"] = task.training_loss
            self._functions["the test"] = getattr(task, "test", None)

    @contextmanager
    def lend(self, purpose: str = "") -> Iterator[LentModel]:
        """Lend a model for a message.

        The first message of each purpose shows whether models may be used again.

        Raises:
            StateError: the model, the loss or the loop belongs to another client; or
                the message has changed a model outside its state dict, though
                ``reuse`` is true.
        """
        for what, function in self._functions.items():
            if function is not None:
                _own(what, function, ref(self), _may_be_shared(function))
        is_given = isinstance(self._model, nn.Module)
        free = [] if is_given else self._free()
        is_new = not free
        lent = free.pop() if free else self._new()
        again = self._reuse or bool(compiled_modules(lent.model))
        one_client = is_given and not again
        owned: list[Any] = []
        owners = kept_for_run("owners", WeakIdKeyDictionary) if again else _OWNERS
        if is_new:
            owner = ref(self) if one_client else object()
            owned = _own("the model", lent.model, owner, owners=owners)
        if one_client:
            lent = replace(lent, hidden=hidden_state(lent.plain))
        given = self._given if purpose == "training" else None
        checks = self._reuse and not is_noted("outside the state dict", purpose)
        before = outside_state(lent.plain) if checks else {}
        try:
            with ExitStack() as at_end:
                yield replace(lent, task_of=self._task_of, given=given, at_end=at_end)
        finally:
            for parameter in lent.model.parameters():
                parameter.grad = None
            if is_given:
                load_state(lent.plain, tensors(lent.initial))
                for part in owned if again else ():
                    owners.pop(part, None)
        if checks:
            after = outside_state(lent.plain)
            for name in {**before, **after}:
                if name and before.get(name) != after.get(name):
                    raise StateError(
                        f"a message has changed {name}, so the model must not serve"
                        " the next message: leave out reuse_model=True"
                    )
            note("outside the state dict", purpose)
        # After an exception, a model is not used again.
        if again:
            free.append(lent)

    @contextmanager
    def lend_again(self, lent: LentModel) -> Iterator[LentModel]:
        """Lend a second model for the message of ``lent``.

        A model that is used again is lent itself, and is in the end as before.
        """
        if lent.hidden:
            raise _refusal("the model", f"is needed twice, but {lent.hidden}")
        if lent.is_used_again:
            with borrowed(lent.plain), ExitStack() as at_end:
                yield replace(lent, given=None, at_end=at_end)
            return
        with self.lend() as second:
            yield second

    def _new(self) -> LentModel:
        tried: list[bool] = []

        def example() -> Any:
            tried.append(True)
            return cast(Example, self._example)()

        model = self._build()
        if self._example:
            model = set_memory_format(model, example)
        if tried:  # a try may leave traces in hooks
            model = set_memory_format(self._build(), example)
        again = self._reuse or isinstance(self._model, nn.Module)
        lent = LentModel(model, unwrap(model), again or bool(compiled_modules(model)))
        return replace(lent, initial=lent.arrays())

    def _build(self) -> nn.Module:
        if isinstance(self._model, nn.Module):
            model = self._model
        else:
            with seeded(0):  # because only some processes build a model here
                model = self._model()
        check_model(unwrap(model))
        return model

    def _free(self) -> list[LentModel]:
        """Return the models of this or an equal function that are not in use."""
        first: Any = self._model
        with suppress(TypeError, RecursionError):  # the function has other parts
            builders: dict[Hashable, Any] = kept_for_run("builders", dict)
            first = builders.setdefault(key_of(first), first)
        name = f"models, as built: {self._example is None}"
        of_run: WeakKeyDictionary[Any, list[LentModel]] = kept_for_run(
            name, WeakKeyDictionary
        )
        if self._reuse and first not in of_run:
            code: Any = getattr(first, "__code__", type(first))
            if not first_time("builder", code) and first_time("builders", code):
                logger.warning(
                    "reuse_model has no effect, because each message has another"
                    " function that builds its model, and its closure has more than"
                    " plain values: define the function outside the client function"
                )
        return of_run.setdefault(first, [])


# The owners of the modules and tensors of models, of losses and of loops; and the
# version of a shared tensor at its first use, because an operation in place changes it.
# This is module state, because each message may make a client.
_OWNERS: Any = WeakIdKeyDictionary()


def _own(
    what: str,
    given: Any,
    owner: object,
    shared: bool = False,
    owners: Any = _OWNERS,
) -> list[Any]:
    """Note the owner of an object and of all its parts, and return these.

    Raises:
        StateError: it has another owner, and is not shared.
    """
    # Each use of a method as a value is a new object.
    given = getattr(given, "__self__", given)
    owned = [given]
    if isinstance(given, nn.Module):
        owned = [*given.modules(), *given.parameters(), *given.buffers()]
    for part in owned:
        try:
            found = owners.setdefault(part, owner)
        except TypeError:  # has slots, or is a list
            if shared:
                continue
            raise _refusal(what, "cannot be told apart from another object") from None
        if found is not owner and not shared:
            why = "was used by an earlier message of another client"
            if what == "the model":
                why += ", shares a layer or a tensor with such a model"
                why += ", or is used by two messages at once"
            raise _refusal(what, why)
    return owned


def _refusal(what: str, why: str) -> StateError:
    text = (
        f"{what} {why}. It may have state outside its state dict. Give TorchClient a"
        " function that builds a new model in each call; or pass reuse_model=True if a"
        " message changes nothing in a model but its state dict. Make a loss or a loop"
        " with state in the client function, or give a function that makes the task:"
        " task=lambda model: ..."
    )
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
            f" but it shares '{shared[0]}', although it does not select layers. The"
            " name of this entry may not reveal that it belongs to BatchNorm. If the"
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
    for name in (one.removeprefix(prefix) for one in sent.personal):
        if name in state and name in model and state[name].shape != model[name].shape:
            state[name] = lent.initial[name]
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
