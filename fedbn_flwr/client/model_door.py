"""The client's model: how a message gets it, and the entries that go in and out.

At the door, a process looks at the model of a user, and refuses unusual models. Behind
it, each message has a model, a task and a loop of its own, so nothing that training
leaves in them reaches another client. See ``Door``.

The second half determines which entries stay with the client, loads the received
entries into the model, and selects the entries of the reply.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from fedbn_flwr.batchnorm.array_types import Array, State
from fedbn_flwr.batchnorm.parts import Parts, split_state, tied_apart
from fedbn_flwr.batchnorm.sync import try_synchronised_step
from fedbn_flwr.batchnorm.train_only import freeze, trained_words
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
from fedbn_flwr.training.client_hook import ClientHook, Extras
from fedbn_flwr.training.copying import (
    NotPlainError,
    Template,
    may_refer_to,
    note_build,
    own_code_refers_to,
    why_not_plain,
)
from fedbn_flwr.training.freezing import (
    force_eval_as_built,
    moving_though_frozen,
    unlike_in_tests,
)
from fedbn_flwr.training.model_state import (
    compiled_modules,
    load_state,
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
    """The model of one message, with its task and its loop.

    Attributes:
        model: the model in its memory format, possibly compiled or wrapped in DDP.
        plain: the module inside wrappers.
        parts: the split of its state.
        fingerprint: the fingerprint of the parts and the shapes, which local state must
            match.
        initial: the state of the model when it was built.
        is_used_again: whether a later message may change the model's tensors.
        task_of: returns the task of this model, or of a second one.
        loop: the user's loop, or None.
        at_end: undoes what the message changed in the model.
    """

    model: nn.Module
    plain: nn.Module
    parts: Parts
    fingerprint: str
    initial: State
    is_used_again: bool
    task_of: TaskOfModel = lambda _: CLASSIFICATION
    loop: Callable[..., Any] | None = None
    at_end: ExitStack = field(default_factory=ExitStack)

    def with_model(self, model: nn.Module) -> LentModel:
        """Return these values for an equal model that no later message uses."""
        return replace(self, model=model, plain=unwrap(model), is_used_again=False)

    def arrays(self) -> State:
        """Return the entries as arrays that no later message changes."""
        state = to_state(self.plain.state_dict())
        if not self.is_used_again:
            return state
        return {name: array.copy() for name, array in state.items()}


def look_at(model: nn.Module, example: Example | None = None) -> LentModel:
    """Return the values that are derived from a model, and put it into its format.

    ``example`` is the argument of ``set_memory_format``. With None, the model keeps the
    format in which it was built, because a user's loop may depend on it.

    Raises:
        StateError: a lazy layer has no shapes yet.
        ConfigError: the state has entries that are not tensors.
        NormLayerError: a module is in TorchScript.
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
    if example is not None:
        model = set_memory_format(model, example)
    initial = {name: one.copy() for name, one in to_state(plain.state_dict()).items()}
    parts = split_state(plain)
    shapes = {name: tuple(array.shape) for name, array in initial.items()}
    return LentModel(model, plain, parts, parts.fingerprint(shapes), initial, True)


class Door:
    """Lends the models of messages, with their tasks and their loops.

    - A function that builds the model is called for each model that a message needs. If
      its model is plain (``training.copying``), copies are used instead.
    - A model, a loss or a loop that this process sees for the first time is used itself.
      If it comes again, it must be plain, and later messages get copies.
    - A compiled model is lent itself, because each copy would be compiled again; what
      training leaves outside its state dict stays in it. If it was built, one message at
      a time has it.

    Args:
        model: the model, or the function that builds it.
        task: the task, or the function that makes it for a model.
        loop: the user's loop, or None.
        example: the argument of ``set_memory_format``.
    """

    def __init__(
        self,
        model: nn.Module | BuildModel,
        task: Task | TaskOfModel = CLASSIFICATION,
        loop: Callable[..., Any] | None = None,
        example: Example | None = None,
    ) -> None:
        self._model, self._task, self._loop = model, task, loop
        self._example = example

    @contextmanager
    def lend(self) -> Iterator[LentModel]:
        """Lend a model for a message.

        Raises:
            StateError: the model, the loss or the loop comes again, and is not plain.
        """
        lends = self._given if isinstance(self._model, nn.Module) else self._built
        with lends() as lent, ExitStack() as at_end:
            task_of = self._task
            if isinstance(task_of, Task):
                task = with_own_losses(task_of)
                task_of = lambda _: task  # noqa: E731
            loop = own("the loop", self._loop)
            yield replace(lent, task_of=task_of, loop=loop, at_end=at_end)

    @contextmanager
    def lend_again(self, lent: LentModel) -> Iterator[LentModel]:
        """Lend a second model for the message of ``lent``.

        If the user gave a model that is not plain, it is lent itself.
        """
        with ExitStack() as stack:
            second = lent
            if not isinstance(self._model, nn.Module):
                second = stack.enter_context(self._built())
            elif _USED.get(self._model):
                second = look_at(_USED[self._model].copy(), self._example)
            yield replace(second, task_of=lent.task_of, loop=lent.loop)

    @contextmanager
    def _given(self) -> Iterator[LentModel]:
        given = cast(nn.Module, self._model)
        if compiled_modules(given):
            yield look_at(given, self._example)
            return
        model = own("the model", given)
        if model is not given:
            others = [self._loop]
            if isinstance(self._task, Task):
                others += [self._task.loss, self._task.training_loss]
            if any(may_refer_to(other, given) for other in others):
                raise _comes_again("the model", "the loss or the loop may refer to it")
            yield look_at(model, self._example).with_model(model)
            return
        look = look_at(given, self._example)
        try:
            yield look
        finally:
            # The user's model keeps its values.
            load_state(look.plain, tensors(look.initial))

    @contextmanager
    def _built(self) -> Iterator[LentModel]:
        # By function: the models that no message uses, with their templates; or None if
        # each message gets a new model.
        unused: WeakKeyDictionary[Any, list[Any] | None] = kept_for_run(
            "models" if self._example else "models as built", WeakKeyDictionary
        )
        free = unused.setdefault(self._model, [])
        look, template = free.pop() if free else self._new(free is not None)
        if template:
            unused[self._model] = [(look, template)]
            lent = look.with_model(template.copy())
            note_build(lent.plain, lambda: unwrap(template.copy()))
            yield lent
        elif compiled_modules(look.model):
            note_build(look.plain, lambda: self._uncompiled(look.plain))
            yield look
            # A compiled model is not used again after an exception.
            for parameter in look.model.parameters():
                parameter.grad = None
            unused[self._model] = [*(unused[self._model] or ()), (look, None)]
        else:
            unused[self._model] = None
            note_build(look.plain, lambda: self._new(False)[0].plain)
            yield look.with_model(look.model)

    def _uncompiled(self, first: nn.Module) -> nn.Module:
        """Return a second model of a compiled model.

        Raises:
            StateError: the function that builds the model uses a layer again.
        """
        with suppress(NotPlainError):
            return Template(first).copy()
        second = self._new(False)[0].plain
        if not {*first.modules()}.isdisjoint(second.modules()):
            raise _comes_again("the model", "its function uses a layer again")
        # Passes of a second model are few, and each model would be compiled again.
        for module in second.modules():
            module._compiled_call_impl = None
            if "_orig_mod" in module._modules:
                vars(module)["forward"] = module._orig_mod
        return second

    def _new(self, may_be_copied: bool) -> tuple[LentModel, Template[nn.Module] | None]:
        """Build a model. Return it with a template if it is plain."""
        template = None
        with seeded(0):  # because only some processes build a model here
            model, probe = cast(BuildModel, self._model)(), nn.Identity()
            outside = sys.getrefcount(model) - sys.getrefcount(probe)
            look = look_at(model, self._example)
        if may_be_copied:
            with suppress(NotPlainError):
                template = Template(model, outside)
        if template is None and not compiled_modules(model):
            _note_used("a layer of the built model", _layers(look.plain))
        return look, template


# The models, layers, losses and loops that messages of this process have used, with the
# templates of the plain objects. This is module state, because each message may make a
# client.
_USED: Any = WeakIdKeyDictionary()


def own(what: str, given: Any) -> Any:
    """Return an object of the user for one message: itself at first, then a copy.

    Raises:
        StateError: it comes again, and is not plain.
    """
    if given is None:
        return None
    # Each use of a method as a value is a new object.
    key = given.__self__ if isinstance(given, MethodType) else given
    is_model, template = isinstance(given, nn.Module), _USED.get(key)
    if template and is_model and not template.is_used:
        template.is_used = True
        if own_code_refers_to(given):
            _USED[key] = template = None
    if template:
        return template.copy()
    if key in _USED:
        why = ""
        if is_model:
            why = why_not_plain(given) or "a global or a class refers to it"
        raise _comes_again(what, why)
    with suppress(NotPlainError):
        template = Template(given, is_new=is_model)
    _note_used(what, _layers(unwrap(given)) if is_model else ())
    _USED[key] = template
    return given


def _layers(model: nn.Module) -> list[Any]:
    return [*model.modules(), *model.parameters(), *model.buffers()]


def _note_used(what: str, objects: Collection[Any]) -> None:
    if any(one in _USED for one in objects):
        raise _comes_again(what, "a part of it was used by an earlier message")
    _USED.update(dict.fromkeys(objects))


def _comes_again(what: str, why: str) -> StateError:
    text = (
        f"{what} comes again with another message, and may have the state of an earlier"
        f" one{why and f': {why}'}. Give TorchClient a function that builds a new model"
        " in each call. If the loss has state or refers to the model, also give it a"
        " function that makes the task: task=lambda model: ... Make a loop with state in"
        " the client function."
    )
    return StateError(coded(COMES_AGAIN, text))


def with_own_losses(task: Task) -> Task:
    """Return the task with losses for one message; the errors are those of ``own``."""
    loss, steps = own("the loss", task.loss), task.training_loss
    steps = loss if steps is task.loss else own("the training loss", steps)
    if loss is task.loss and steps is task.training_loss:
        return task
    return replace(task, loss=loss, training_loss=steps)


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
        inputs = inputs_for(lent.plain)(data.batch(positions)[0])
        try_synchronised_step(lent.plain, inputs, len(positions))
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
    """Freeze the fixed entries, and warn of frozen layers whose statistics move.

    Returns:
        The context whose end undoes this.
    """
    frozen = ExitStack()
    if sent.fixed_entries:
        frozen = freeze(model, sent.fixed_entries)
    # Look once for each kind of model.
    if first_time("moves", str(type(model)), sent.fixed_sha256):
        moving = moving_though_frozen(model)
        if moving:
            logger.warning(
                "all parameters of %d BatchNorm layer(s) are frozen (%s, ...), but"
                " training still changes their running statistics, and so the frozen"
                " part of the model. To keep it as it is, pass train_only='%s' to the"
                " strategy (train-only in a config). To adapt the statistics on"
                " purpose, ignore this warning.",
                len(moving),
                moving[0],
                trained_words(model),
            )
    return frozen


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
    return Received(extras, prefix)


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
