"""One forward and backward pass in which every BatchNorm of a model sees the batches of all clients as one.

BatchNorm is met where every layer of every architecture ends up, in ``torch.nn.functional.batch_norm``: no layer is
named, replaced or unrolled. Subclasses with a forward of their own, 1d, 2d and 3d, layers without affine parameters or
running statistics, parallel branches and layers used more than once need nothing special; the order of the calls in
the forward pass numbers the exchanges. A call with ``training=False`` is left alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.batchnorm.sync.mode import SynchronisedStep
from fedbn_flwr.batchnorm.sync.reduction import Backward, Exchanges, Reduce, num_exchanges
from fedbn_flwr.errors import ConfigError, NormLayerError

__all__ = ["synchronised"]


@contextmanager
def synchronised(
    model: nn.Module,
    reduce: Reduce,
    *,
    batch_size: int,
    union_batch_size: int,
    exchanges: Exchanges = "3L+1",
    backward: Backward = "global",
) -> Iterator[SynchronisedStep]:
    """Synchronise every BatchNorm call made in the block, forward and backward, with the other clients'.

    ::

        with synchronised(model, reduce, batch_size=len(x), union_batch_size=256):
            loss = functional.cross_entropy(model(x), target)
            loss.backward()
        optimizer.step()

    ``reduce(tag, tensor)`` is called once per exchange (``exchange`` has the tags and shapes), from the thread of the
    forward pass or, backward on an accelerator, from autograd's. What it raises leaves the block unchanged. The model
    is then half-way: running statistics and counters of the layers passed, ``.grad`` of the parameters done. Restore
    the state dict, the gradients and the random state before the step is redone.

    Every client must run the same model from the same state, so that the k-th call of BatchNorm is the same layer on
    all. Calls without gradient (``torch.no_grad``) are synchronised forward too, as a centralised step would see the
    union in them. A loss scale, if any, must be the same on all clients: gradients are averaged as they come.

    Args:
        model: The model; its BatchNorm layers are watched and named in errors. Not changed otherwise.
        reduce: Sends a tensor to the server and returns the answer of all clients of the round.
        batch_size: b_i, the examples of this client's batch.
        union_batch_size: B, the examples of all clients' batches; layers see n_i * B / b_i elements per channel.
        exchanges: Mean and variance one after the other or together.
        backward: ``global`` for FedTAN, ``own`` for FedDNA.

    Yields:
        The step, with the numbers of layers and exchanges met so far.

    Raises:
        ConfigError: An argument is out of range.
        NormLayerError: A layer cannot be synchronised; at once for TorchScript and DataParallel, otherwise when the
            layer is called: one value per channel in the union, activation checkpointing, arithmetic of its own.
    """
    if not 1 <= batch_size <= union_batch_size:
        raise ConfigError(
            f"batch_size {batch_size} must be at least 1, and union_batch_size {union_batch_size} no less."
        )
    num_exchanges(0, exchanges, backward)  # refuses unknown names
    for path, module in model.named_modules():
        if isinstance(module, (torch.jit.ScriptModule, nn.DataParallel)):
            raise NormLayerError(
                f"module {path or 'model'!r} is a {type(module).__name__}: its BatchNorm calls are out of reach and "
                "would not be synchronised. Use the plain module."
            )
    step = SynchronisedStep(reduce, batch_size, union_batch_size, exchanges, backward)
    with ExitStack() as stack:
        stack.callback(step.close)
        for path, module in model.named_modules():
            if isinstance(module, _BatchNorm):
                for handle in step.watch(path, module):
                    stack.callback(handle.remove)
        stack.enter_context(step)
        yield step
