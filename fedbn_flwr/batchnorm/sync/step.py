"""One forward and backward pass that treats all clients' batches as one batch.

Every BatchNorm layer calls ``torch.nn.functional.batch_norm``. This call is replaced,
not the layer. Therefore these cases need no special code: subclasses with their own
forward, 1d, 2d and 3d, layers without affine parameters or running statistics, parallel
branches, layers used more than once. The order of the calls in the forward pass numbers
the exchanges. A call with ``training=False`` does not change.

``try_synchronised_step`` checks at one client that a model can be synchronised.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.batchnorm.sync.mode import SynchronisedStep
from fedbn_flwr.batchnorm.sync.reduction import (
    Backward,
    ExchangeScheme,
    Reduce,
)
from fedbn_flwr.errors import NormLayerError
from fedbn_flwr.training.batches import map_inputs
from fedbn_flwr.training.borrowed import borrowed
from fedbn_flwr.training.layer_calls import replace_attribute
from fedbn_flwr.training.model_state import compiled_modules, not_compiled, unwrap
from fedbn_flwr.training.randomness import seeded

__all__ = ["synchronised", "try_synchronised_step"]

# Number of passes with two examples in a trial. A layer that is skipped in half of the
# passes is missed in one of 128 models, because then all passes agree.
_PASSES = 8
_IN_A_STEP = "_fedbn_flwr_in_a_step"


@contextmanager
def synchronised(
    model: nn.Module,
    reduce: Reduce,
    *,
    batch_size: int,
    union_batch_size: int,
    exchanges: ExchangeScheme = "3L+1",
    backward: Backward = "global",
) -> Iterator[SynchronisedStep]:
    """Synchronise every BatchNorm call in the block with the other clients.

    Both passes are synchronised, forward and backward.

    ::

        with synchronised(model, reduce, batch_size=len(x), union_batch_size=256):
            loss = functional.cross_entropy(model(x), target)
            loss.backward()
        optimizer.step()

    ``reduce(tag, tensor)`` is called once per exchange (``reduction`` lists tags and
    shapes), in the thread that calls the model and ``backward``, even on an
    accelerator. So clients in threads of one process may wait for one another. If they
    take turns (``transport.turns``), a waiting ``reduce`` gives its turn back.
    Exceptions of ``reduce`` pass through the block and leave the model half done: some
    layers have new running statistics and counters, some parameters a new ``.grad``.
    Restore the state dict, the gradients and the random state before you repeat the
    step.

    Every client must run the same model from the same state, so that the k-th BatchNorm
    call is the same layer on all clients. The tag contains the path of the layer. With
    this path, the server detects a client whose k-th call is another layer. A compiled
    model runs uncompiled in the block. Calls without gradient (``torch.no_grad``) are
    synchronised as well, because a centralised step would use the union of the batches
    in these calls. A loss scale must be equal on all clients, because gradients are
    averaged unchanged.

    Args:
        model: The model; its BatchNorm layers are named in tags and errors. The block
            changes nothing else in it.
        reduce: Sends a tensor to the server and returns the answer over all clients of
            the round.
        batch_size: b_i, the number of examples in this client's batch.
        union_batch_size: B, the number of examples in all clients' batches.
        exchanges: Mean and variance one after the other, or together.
        backward: ``global`` for FedTAN, ``own`` for FedDNA.

    Yields:
        The step, with its numbers of layers and exchanges so far.

    Raises:
        NormLayerError: A layer cannot be synchronised. DataParallel and a
            model in another client's step are refused at the start of the block. One
            value per channel in the union, activation checkpointing and a layer's own
            arithmetic are refused when the layer is called.
    """
    _refuse_unfit(model)
    step = SynchronisedStep(reduce, batch_size, union_batch_size, exchanges, backward)
    with ExitStack() as stack:
        # The stack undoes its entries in reverse order, so the step is closed last.
        stack.callback(step.close)
        stack.enter_context(_watched_layers(model, step))
        # Do not compile the forward passes. Some compilers end a graph at each
        # exchange, and then fail in the backward pass of an in-place activation.
        whole = unwrap(model)
        for module in (whole, *compiled_modules(model)):
            forward = module.forward
            if module is whole:
                forward = step.noting(forward)
            stack.callback(replace_attribute(module, "forward", not_compiled(forward)))
        # With multithreading, autograd runs all backward passes on a GPU in one thread.
        # The first client that waits for an exchange would then block this thread.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(step)
        yield step


def _refuse_unfit(model: nn.Module) -> None:
    """Raise NormLayerError for modules whose calls torch's function modes do not see."""
    for path, module in model.named_modules():
        if isinstance(module, nn.DataParallel):
            raise NormLayerError(
                f"module {path or 'model'!r} is a {type(module).__name__}, so its"
                " BatchNorm calls cannot be synchronised. Use the plain module."
            )


@contextmanager
def _watched_layers(model: nn.Module, step: SynchronisedStep) -> Iterator[None]:
    """Let the step watch every BatchNorm layer in the block.

    Each layer is marked as used by one client, because two steps would mix their hooks.

    Raises:
        NormLayerError: a layer is in the step of another client.
    """
    with ExitStack() as stack:
        # Use paths without wrappers, so that they are equal at all clients.
        for path, module in unwrap(model).named_modules():
            if isinstance(module, _BatchNorm):
                if vars(module).get(_IN_A_STEP):
                    raise NormLayerError(
                        f"layer {path!r} is in the synchronised step of another client"
                        " in this process at the same time. Build a model in each call"
                        " instead of sharing one model between clients."
                    )
                stack.callback(replace_attribute(module, _IN_A_STEP, True))
                for undo in step.watch(path, module):
                    stack.callback(undo)
        yield


def try_synchronised_step(
    model: nn.Module,
    inputs: Any,
    batch_size: int,
    forward: Callable[[nn.Module, Any], Any] = lambda model, inputs: model(inputs),
) -> None:
    """Check at one client that a model can take part in a synchronised step.

    The passes of such a step run without other clients. Passes with other random numbers
    find layers that are skipped at random, with high probability.

    Args:
        model: the model; it makes the passes, and does not change.
        inputs: a batch on the model's device.
        batch_size: the number of examples in the batch.
        forward: makes the forward passes of a training step.

    Raises:
        NormLayerError: a layer cannot be synchronised, none is called in train mode, or
            the passes call different layers.
    """
    with borrowed(model):
        model.train()
        passed = functools.partial(forward, model)
        first = _pass(model, passed, inputs, batch_size, seed=0)
        for seed in range(1, _PASSES):
            with torch.no_grad():
                again = _pass(model, passed, inputs, batch_size, seed)
            if again != first:
                odd = sorted({*first} ^ {*again}) or first
                raise NormLayerError(
                    f"BatchNorm layer {odd[0]!r} is called at random, such as in"
                    " stochastic depth: two passes of one batch call different layers,"
                    " or in another order. In a synchronised step every client must"
                    " call the same layers in the same order. Disable this for"
                    " training, or use a method without a synchronised step, such as"
                    " fedavg or fedbn."
                )


def _pass(
    model: nn.Module,
    forward: Callable[[Any], Any],
    inputs: Any,
    batch_size: int,
    seed: int,
) -> list[str]:
    """Run a forward pass, and a backward pass if gradients are on.

    Returns:
        The paths of the BatchNorm calls in order, "" for a functional call.

    Raises:
        NormLayerError: a layer cannot be synchronised, or none is called in train mode.
    """
    called = []

    def reduce(tag: str, tensor: Tensor) -> Tensor:
        # The tag is kind/k/path. A layer makes one exchange of moments in each call.
        kind, _, *path = tag.split("/")
        if kind == "moments":
            called.append("/".join(path))
        return tensor

    with (
        seeded(seed),
        # Pretend that two clients take part, because the batches together must be large
        # enough for every layer.
        synchronised(
            model,
            reduce,
            batch_size=batch_size,
            union_batch_size=2 * batch_size,
            exchanges="2L+1",
            backward="global",
        ) as step,
    ):
        loss = forward(map_inputs(copy.deepcopy, inputs)).sum()
        if torch.is_grad_enabled():
            loss.backward()
    step.require_a_layer()
    return called
