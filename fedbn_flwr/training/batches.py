"""Batches of a client's data, and their preparation for the model.

The module defines the data interface of training and evaluation. It also moves the
inputs of a batch to the device, dtype and memory format of the model. Torch only.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils._pytree import tree_leaves

from fedbn_flwr.errors import INPUTS_NOT_FINITE, DataError, coded
from fedbn_flwr.training.borrowed import borrowed
from fedbn_flwr.training.model_state import unwrap
from fedbn_flwr.training.randomness import seeded
from fedbn_flwr.training.run_memory import kept_for_run

__all__ = [
    "Batches",
    "device_of",
    "inputs_for",
    "join_last",
    "map_inputs",
    "memory_format_of",
    "refuse_inputs",
    "refuse_not_finite",
    "set_memory_format",
    "with_positions",
]


# Number of examples per batch in the search of the inputs for non-finite values.
_LOOKED_AT = 256


class Batches(Protocol):
    """The data interface of training and evaluation.

    A data set has a length and returns batches by position. Any object with these two
    methods is a data set, for example ``fedbn_flwr.lab.data.Subset``. ::

        class Memory:
            def __init__(self, inputs, targets):
                self.inputs, self.targets = inputs, targets

            def __len__(self):
                return len(self.inputs)

            def batch(self, positions, generator=None):
                return self.inputs[positions], self.targets[positions]
    """

    def __len__(self) -> int:
        """Return the number of examples."""

    def batch(
        self, positions: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Any, Tensor]:
        """Return (inputs, targets) at the positions (int64, in any order).

        The examples are augmented if a generator is given. The model is called with
        the inputs unchanged: a tensor, or tensors in a list, a tuple or a dict.
        """


def with_positions(
    data: Batches, order: Iterable[Tensor], generator: torch.Generator | None = None
) -> Generator[tuple[Tensor, tuple[Any, Tensor]], None, None]:
    """Yield the positions of each batch and the batch.

    Data with a method ``batches`` may read some batches ahead, in other processes.
    Close the generator after the pass. Otherwise, the traceback of an exception may
    keep it and its worker processes alive.
    """
    if not hasattr(data, "batches"):
        for positions in order:
            yield positions, data.batch(positions, generator)
        return
    # Read the order now, because the data may take positions in advance, in a thread of
    # its own.
    order = list(order)
    # Only this frame refers to the batches, so they are closed when it ends.
    yield from zip(order, data.batches(iter(order), generator), strict=True)


def join_last(batches: Sequence[Tensor]) -> list[Tensor]:
    """Return the batches, with the last two joined.

    Returns an empty list if there is only one batch.
    """
    *others, last = batches
    return [*others[:-1], torch.cat([others[-1], last])] if others else []


def refuse_not_finite(data: Batches, prepared: Callable[[Any], Any]) -> None:
    """Search the inputs of the data for the cause of a non-finite loss.

    ``prepared`` converts the inputs for the model (``inputs_for``).

    Raises:
        DataError: an input is NaN or infinite.
    """
    for positions in torch.split(torch.arange(len(data)), _LOOKED_AT):
        # Pass a generator, because random transforms warn without one.
        with seeded(0):
            inputs, _ = data.batch(positions, torch.Generator())
        first, last = int(positions[0]), int(positions[-1])
        refuse_inputs(prepared(inputs), f"among examples {first} to {last}")


def refuse_inputs(inputs: Any, where: str) -> None:
    """Raise DataError if a number of a batch's inputs is NaN or infinite."""
    for tensor in tree_leaves(inputs):
        is_number = isinstance(tensor, Tensor) and tensor.is_floating_point()
        if is_number and not tensor.isfinite().all():
            text = (
                f"the loss is not finite, because the inputs ({where}) contain NaN or"
                f" infinity after conversion to {tensor.dtype}. Replace these values,"
                " scale the inputs, or drop the examples."
            )
            raise DataError(coded(INPUTS_NOT_FINITE, text))


def inputs_for(model: nn.Module) -> Callable[[Any], Any]:
    """Return the function that prepares a batch's inputs for the model.

    It converts them to the model's device, dtype and memory format. Inputs with several
    parts keep their structure.
    """
    device, dtype = device_of(model), _dtype_of(model)
    # ``set_memory_format`` has given the model one of two formats. A tensor with one
    # channel or with 1x1 kernels is in both formats, so it does not reveal the choice.
    memory_format = torch.contiguous_format
    for p in model.parameters():
        in_channels_last = p.dim() == 4 and p.is_contiguous(
            memory_format=torch.channels_last
        )
        if in_channels_last and not p.is_contiguous():
            memory_format = torch.channels_last
            break

    def prepared(inputs: Any) -> Any:
        if not isinstance(inputs, Tensor):  # such as a packed sequence
            return inputs.to(device)
        wanted = dtype if inputs.is_floating_point() else None
        # A non-blocking copy from a GPU to the CPU may be read before it is complete.
        inputs = inputs.to(device, wanted, non_blocking=device.type != "cpu")
        if inputs.dim() != 4:
            return inputs
        return inputs.contiguous(memory_format=memory_format)

    return functools.partial(map_inputs, prepared)


def map_inputs(function: Callable[[Any], Any], inputs: Any) -> Any:
    """Return the inputs with ``function`` applied to each tensor.

    Other objects with a method ``to`` are treated as tensors. Texts and numbers do not
    change. A mapping of another class becomes a dict.
    """
    if isinstance(inputs, Tensor) or hasattr(inputs, "to"):
        return function(inputs)
    if isinstance(inputs, Mapping):
        return {name: map_inputs(function, part) for name, part in inputs.items()}
    if not isinstance(inputs, (list, tuple)):
        return inputs
    parts = [map_inputs(function, part) for part in inputs]
    if hasattr(inputs, "_fields"):  # a named tuple takes separate arguments
        return type(inputs)(*parts)
    return type(inputs)(parts)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's first parameter.

    If the model has no parameters (BatchNorm without affine), its first buffer decides.
    Without buffers, the result is torch's default device.
    """
    first = next(itertools.chain(model.parameters(), model.buffers()), None)
    return torch.get_default_device() if first is None else first.device


def _dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of the model's first real floating-point entry.

    Parameters of layers come before all others, such as a factor of the outputs: a
    single number, or a parameter of a module with children, does not take inputs. If
    there is no such entry, the first trained complex entry decides. If there is
    neither, the result is torch's default dtype.
    """
    # This runs for each message, so look at the tables instead of calling methods.
    for module in model.modules():
        of_layer = () if module._modules else module._parameters.values()
        for p in of_layer:
            if p is not None and p.is_floating_point() and p.numel() > 1:
                return p.dtype
    first_complex = None
    for entry in itertools.chain(model.parameters(), model.buffers()):
        if entry.is_floating_point():
            return entry.dtype
        # a complex table that is not trained does not reveal the dtype of the inputs
        if entry.is_complex() and entry.requires_grad and first_complex is None:
            first_complex = entry.dtype
    return first_complex or torch.get_default_dtype()


_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)
# Packages whose layers work in channels-last.
_KNOWN = ("torch.nn.", "torchvision.", "fedbn_flwr.")


def set_memory_format(
    model: nn.Module, example: Callable[[], Any] | None = None
) -> nn.Module:
    """Give the model the fastest memory format, in place, and return the model.

    Values, shapes and names stay: a state dict is the same in both formats.
    """
    wanted = memory_format_of(unwrap(model), example)
    return model.to(memory_format=wanted) if wanted else model  # type: ignore[call-overload,no-any-return,unused-ignore]


def memory_format_of(
    model: nn.Module, example: Callable[[], Any] | None = None
) -> torch.memory_format | None:
    """Return the fastest memory format of a model, or None if any format suits it.

    Channels-last makes most convolutions faster, and changes the last bits.

    The choice is channels-last for models with 2-d convolutions in float32 or smaller
    types. Models with instance norm do not change, because torch is slow for them in
    channels-last. A model with user-defined layers becomes contiguous if it works only
    in that format: ``x.view(-1, 400)`` needs each image in one piece. The choice
    depends only on the model, so all engines and nodes make the same choice.

    Args:
        model: the model, on its device.
        example: returns inputs of two examples. They are used to try a model with
            user-defined layers, once for all equal models. With None, such a model is
            not tried.
    """
    convolutions = [m for m in model.modules() if isinstance(m, _CONVOLUTIONS)]
    wide = any(m.weight.dtype == torch.float64 for m in convolutions)
    if not convolutions or wide or any(map(_normalises_each_channel, model.modules())):
        return None
    if example is not None and _is_contiguous_only(model, example):
        return torch.contiguous_format
    return torch.channels_last


def _is_contiguous_only(model: nn.Module, example: Callable[[], Any]) -> bool:
    """Return whether the model works only in contiguous format."""
    if all(type(module).__module__.startswith(_KNOWN) for module in model.modules()):
        return False
    # The text of a model has its layers with their sizes.
    kind = (type(model).__module__, type(model).__qualname__, repr(model))
    known: dict[tuple[str, ...], bool] = kept_for_run("contiguous only", dict)
    if kind in known:  # from an earlier client or message
        return known[kind]
    # users' data may raise any exception, and the training will raise it again
    with suppress(Exception), seeded(0):
        inputs = example()
        with borrowed(model) as trial:
            try:
                _pass(trial.to(memory_format=torch.channels_last), inputs)  # type: ignore[call-overload,unused-ignore]
                known[kind] = False
            except Exception:
                known[kind] = True
    return known.get(kind, False)


def _pass(model: nn.Module, inputs: Any) -> None:
    """Make a training pass and a test pass. The model may change its inputs."""
    inputs = inputs_for(model)(inputs)
    with torch.enable_grad():
        outputs = model.train()(map_inputs(copy.deepcopy, inputs))
        if isinstance(outputs, Tensor) and outputs.requires_grad:
            outputs.square().sum().backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        model.eval()(inputs)


def _normalises_each_channel(module: nn.Module) -> bool:
    """Return whether a layer normalises each channel of an example separately.

    Instance norm is such a layer.
    """
    if isinstance(module, nn.GroupNorm):
        return module.num_groups == module.num_channels
    return isinstance(module, _InstanceNorm)
