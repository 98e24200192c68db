"""The state of models.

The module loads states. It also removes wrappers that add a prefix to every name
(``torch.compile``, DDP).
"""

from __future__ import annotations

import re
import sys
from collections import OrderedDict
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import suppress
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fedbn_flwr.errors import ConfigError, StateError

# The name of the inner module in torch.compile, and in DistributedDataParallel,
# DataParallel and AveragedModel.
_WRAPPERS = ("_orig_mod", "module")
_OF_TORCH = (
    "torch._dynamo.",
    "torch.nn.parallel.",
    "torch.optim.",
    "torch.distributed.",
)


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the model and, from outside to inside, the modules that it wraps."""
    yield model
    # Stop at a user's own module. It may have one child of such a name, but its forward
    # pass may do more than call the child.
    bases = type(model).__mro__
    if not any(kind.__module__.startswith(_OF_TORCH) for kind in bases):
        with suppress(ConfigError):
            inner = named_by_state(model)
            if inner is not model:
                yield inner
        return
    children = list(model.named_children())
    if len(children) == 1:
        name, inner = children[0]
        if name in _WRAPPERS:
            yield from _layers(inner)


def named_by_state(model: nn.Module) -> nn.Module:
    """Return the module whose tensors have the names of the model's state dict.

    It is the model, or a module inside it if a hook of the state dict removes a prefix.

    Raises:
        ConfigError: the state dict renames entries, and there is no such module.
    """
    hooks = [hook for m in model.modules() for hook in m._state_dict_hooks.values()]
    if type(model).state_dict is not nn.Module.state_dict:
        hooks.append(type(model).state_dict)
    if not hooks:  # save the state dict
        return model
    state = model.state_dict(keep_vars=True)
    for module in model.modules():
        own: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
        own.update(module.named_buffers(remove_duplicate=False))
        tensors = {id(tensor) for tensor in own.values()}
        if all(n in own for n, entry in state.items() if id(entry) in tensors) and (
            module is model or own.keys() >= state.keys()
        ):
            return module
    name = getattr(hooks[0], "__qualname__", hooks[0])
    raise ConfigError(
        f"the state dict of {type(model).__name__} has other names than its parameters,"
        f" because of {name}. Use a module without it, such as the one inside, for the"
        " initial arrays, the client and split_state(inner)"
    )


def load_state(
    model: nn.Module,
    state: Mapping[str, Tensor],
    own: Mapping[str, Tensor] | None = None,
) -> None:
    """Load all entries of a state, like ``load_state_dict``.

    A state dict has the versions of its layers in ``_metadata``, but messages do not
    contain it. Some layers (torchvision's MNASNet) refuse a state without versions, so
    the state gets the versions of the model. ``own`` is the model's state dict, if the
    caller has it.
    """
    shapes = {name: getattr(entry, "shape", None) for name, entry in state.items()}
    places = _places(model)
    if shapes == {name: tensor.shape for name, tensor in places.items()}:
        # ``load_state_dict`` of a small model takes a tenth of the time of a message with
        # one step.
        with torch.no_grad():
            for name, tensor in places.items():
                tensor.copy_(state[name])
        return
    whole, own = OrderedDict(state), own or model.state_dict(keep_vars=True)
    whole._metadata = own._metadata  # type: ignore[attr-defined,union-attr]
    model.load_state_dict(whole)


_COPYING = (nn.Module._load_from_state_dict, _NormBase._load_from_state_dict)


def _places(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors into which ``load_state_dict`` copies the entries, by name.

    The result is empty if it may do more: a class or a hook has its own way to load.
    """
    places: dict[str, Tensor] = {}
    if getattr(model.load_state_dict, "__func__", None) != nn.Module.load_state_dict:
        return {}
    for path, module in model.named_modules(remove_duplicate=False):
        load = getattr(module._load_from_state_dict, "__func__", None)
        hooks = (module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks)
        if load not in _COPYING or any(hooks):
            return {}
        start = f"{path}." if path else ""
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and name not in module._non_persistent_buffers_set:
                places[start + name] = tensor
    return places


_NOT_IN_NUMPY = {torch.bfloat16, torch.float8_e4m3fn, torch.complex32}


def no_tensors(model: nn.Module) -> str:
    """Return why the state of a model cannot be sent, or "" if it can.

    The reason is entries of ``get_extra_state`` that are not tensors, or a dtype that
    NumPy lacks, such as bfloat16.
    """
    state = model.state_dict(keep_vars=True)
    lacking = _NOT_IN_NUMPY.intersection(getattr(e, "dtype", 0) for e in state.values())
    if lacking:
        return (
            f"the model has entries of {lacking.pop()}, which NumPy and Flower's arrays"
            " lack. Keep the model in float32, and train it inside"
            " torch.autocast(device, torch.bfloat16) (amp=True in a TorchClient)."
        )
    bad = [
        f"'{name}' ({type(entry).__name__})"
        for name, entry in state.items()
        if not isinstance(entry, Tensor)
    ]
    if not bad:
        return ""
    more = ", ..." if len(bad) > 3 else ""
    return (
        "some entries of the model's state are not tensors and cannot be sent or kept:"
        f" {', '.join(bad[:3])}{more}. Return a tensor from get_extra_state of"
        " the layer, or make it a buffer."
    )


P = ParamSpec("P")
R = TypeVar("R")


def not_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function`` excluded from compilation.

    A compiled model runs the function uncompiled, between its compiled parts. Values
    that change in every step or round (sums, new parameters) would cause a new
    compilation each time, and torch gives up after some compilations. The function is
    returned unchanged if this process has no compiled model, because the import of the
    compiler takes seconds.
    """
    if "torch._dynamo" not in sys.modules:
        return function
    return torch.compiler.disable(function)  # type: ignore[no-any-return, no-untyped-call]


def compiled_modules(model: nn.Module) -> list[nn.Module]:
    """Return the compiled modules in a model.

    A module is compiled in place, or it is in ``torch.compile``'s wrapper.
    """
    found = []
    for module in model.modules():
        if module._compiled_call_impl is not None:  # module.compile(), in place
            found.append(module)
        inner = module._modules.get("_orig_mod")
        if isinstance(inner, nn.Module):
            found.append(inner)
    return found


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside wrappers, at any depth.

    Wrappers are ``torch.compile`` (``_orig_mod.``), DDP and similar (``module.``). A
    wrapper shares its parameters with the module: train the wrapper, and send
    ``unwrap(model).state_dict()``.
    """
    return list(_layers(model))[-1]


def refuse_waiting(model: nn.Module) -> None:
    """Refuse a DDP wrapper that waits for gradients of frozen parameters.

    Raises:
        ConfigError: parameters were frozen after the wrapper was built.
    """
    for module in _layers(model):
        if not isinstance(module, nn.parallel.DistributedDataParallel):
            continue
        frozen = 0
        if not module.find_unused_parameters:
            for bucket in module.reducer._get_zeros_like_grad_buckets():
                frozen += sum(not p.requires_grad for p in bucket.parameters())
        if frozen:
            raise ConfigError(
                f"{frozen} parameters were frozen after DistributedDataParallel was"
                " built, so it waits for their gradients. Build it inside `with"
                " bn_rules(...)`, or with find_unused_parameters=True"
            )


def view_with_names(model: nn.Module, names: Collection[str]) -> nn.Module:
    """Return the module whose state dict has exactly these names.

    It is ``model``, a module that it wraps, or the network inside a user's module.

    Raises:
        StateError: no module has these names, or two modules have them. The message
            gives the remedy if only a wrapper's prefix differs.
    """
    # The server may have sent the names of the wrapper or of the inner module.
    # A module whose state dict removes a prefix has the names of its inner module.
    wanted = frozenset(names)
    layers = {m: frozenset(m.state_dict(keep_vars=True)) for m in _layers(model)}
    for module, has in reversed(layers.items()):
        if has == wanted:
            return module
    has = [*layers.values()][-1]
    inside = [
        module
        for module in model.modules()
        if frozenset(module.state_dict(keep_vars=True)) == wanted
    ]
    if len(inside) == 1:
        return inside[0]
    # ``has`` now contains the names of the innermost module
    bare = {without_wrappers(name) for name in wanted}
    missing, extra = sorted(has - wanted), sorted(wanted - has)
    message = (
        f"the arrays do not fit the model: {len(missing)} missing and"
        f" {len(extra)} unknown entries"
    )
    if bare == has:
        message += (
            f". They come from a wrapped model ('{extra[0]}'), but this model is not"
            " wrapped. Build the initial arrays from"
            " fedbn_flwr.unwrap(model).state_dict()"
        )
    elif missing or extra:
        message += f" (first: '{(missing or extra)[0]}')"
    raise StateError(message + ".")


def wrapper_prefix(names: Collection[str], model_names: Collection[str]) -> str:
    """Return the wrappers' prefix of ``names``, or "" if they have none.

    ``model_names`` are the names without a wrapper.
    """
    # Check the usual case first, in one pass, because this function runs for every
    # message.
    prefix = ""
    if all(map(model_names.__contains__, names)):
        return prefix
    # Wrappers may be nested: remove one after the other.
    while not all(name.removeprefix(prefix) in model_names for name in names):
        wrapper = next(iter(names)).removeprefix(prefix).partition(".")[0]
        longer = f"{prefix}{wrapper}."
        in_all = all(name.startswith(longer) for name in names)
        if wrapper not in _WRAPPERS or not in_all:
            return ""
        prefix = longer
    return prefix


def without_wrappers(name: str) -> str:
    """Return a name without the prefixes of wrappers."""
    # If all parts are names of wrappers, the last part stays, because no dot follows.
    return re.sub(rf"^(({'|'.join(_WRAPPERS)})\.)+", "", name)


# --- the head -------------------------------------------------------------------------
#
# It is the module that the model calls fc, classifier or head. Client and server find
# the same module, because both read only the names of the entries. A head of another
# name must be given as ``personal=PATH``; it is never guessed.

HEADS = ("fc", "classifier", "head")


def head_of(names: Iterable[str]) -> str:
    """Return the only name of ``HEADS`` at the top level of the entries' names.

    The result is "" if the model has no such module, or several.
    """
    at_top = {without_wrappers(name).partition(".")[0] for name in names}
    found = at_top.intersection(HEADS)
    return found.pop() if len(found) == 1 else ""
