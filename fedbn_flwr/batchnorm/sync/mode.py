"""The torch function mode that replaces BatchNorm calls of a synchronised step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fedbn_flwr.batchnorm.sync.layer import (
    BatchNormCall,
    NormaliseTogether,
    elements_per_channel,
)
from fedbn_flwr.batchnorm.sync.reduction import (
    Backward,
    ExchangeScheme,
    Reduce,
    is_finite,
)
from fedbn_flwr.errors import NormLayerError, ReplyError
from fedbn_flwr.training.batches import refuse_inputs
from fedbn_flwr.training.batchnorm_calls import Arguments, BatchNormCalls
from fedbn_flwr.training.layer_calls import add_hook, in_checkpoint
from fedbn_flwr.training.model_state import not_compiled


class SynchronisedStep(BatchNormCalls):
    """The state of one synchronised step, created by ``synchronised``.

    Attributes:
        num_layers: BatchNorm calls synchronised so far; L after the forward pass.
        num_exchanges: Exchanges answered so far, without the exchange of the model. A
            layer whose input needs no gradient (directly on the data, or after a frozen
            backbone) has no exchange in the backward pass.
    """

    def __init__(
        self,
        reduce: Reduce,
        batch_size: int,
        union_batch_size: int,
        exchanges: ExchangeScheme,
        backward: Backward,
    ) -> None:
        super().__init__(self._answer)
        self.num_layers = 0
        self.num_exchanges = 0
        self._reduce = reduce
        self._sizes = batch_size, union_batch_size
        self.fused = exchanges == "2L+1"
        self.keeps_gradients = backward == "own"
        # Path of the BatchNorm module that is being called.
        self._path: str | None = None
        self._closed = False
        # Arguments of the model's calls.
        self._inputs: list[Any] = []
        # Run this function outside of a compiled graph, so that a new compilation does
        # not repeat an exchange.
        self._batch_norm = not_compiled(self._synchronise)

    def close(self) -> None:
        """Refuse every further exchange."""
        self._closed = True
        # The step is part of a reference cycle. Without this line, it would keep the
        # batch in memory until the next garbage collection.
        self._inputs = []

    def noting(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the model's forward pass, extended to save its inputs in the step."""

        @functools.wraps(forward)
        def noted(*args: Any, **kwargs: Any) -> Any:
            self._inputs += (args, kwargs)
            return forward(*args, **kwargs)

        return noted

    def require_a_layer(self) -> None:
        """Check, at the end of a block, that a layer was called in train mode.

        Raises:
            NormLayerError: no layer was called in train mode.
        """
        if self.num_layers == 0:
            raise NormLayerError(
                "no BatchNorm layer was called in train mode in the synchronised step."
                " Nothing was synchronised. Call model.train() before the step. Do not"
                " keep BatchNorm in eval mode or skip it at random or for some inputs."
            )

    def watch(self, path: str, module: nn.Module) -> Iterator[Callable[[], None]]:
        """Add hooks that name a layer in errors and check that it calls batch_norm.

        A layer that does not call it is refused. Yield what removes the hooks.
        """
        # ``before`` is a stack, because the module may be called within itself.
        before: list[int] = []

        def enter(module: nn.Module, args: Any) -> None:
            self._path = path
            before.append(self.num_calls)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if before.pop() == self.num_calls:
                raise NormLayerError(
                    f"BatchNorm layer {path!r} ({type(module).__name__}) cannot be"
                    " synchronised, because it does not call functional.batch_norm. It"
                    " has its own arithmetic, or it is called again in the backward"
                    " pass (activation checkpointing). Use plain BatchNorm without"
                    " checkpointing."
                )
            self._path = None

        yield add_hook(module, enter)
        yield add_hook(module, leave, after=True)

    def _answer(self, arguments: Arguments) -> Tensor | None:
        return self._batch_norm(arguments) if arguments.training else None

    def _synchronise(self, arguments: Arguments) -> Tensor:
        path, number = self._path, str(self.num_layers)
        layer = (
            f"the functional batch_norm of call {number}"
            if path is None
            else f"BatchNorm layer {path!r}"
        )
        if in_checkpoint():
            raise NormLayerError(
                f"{layer} runs inside torch.utils.checkpoint, so it is called again in"
                " the backward pass and cannot be synchronised. Disable activation"
                " checkpointing, or exclude BatchNorm from it."
            )
        batch_size, union_batch_size = self._sizes
        # Number of values per channel in all clients' batches together, if their inputs
        # have the same size.
        union = elements_per_channel(arguments.input) * union_batch_size / batch_size
        if not union:
            raise NormLayerError(
                f"{layer} gets no rows of this client's batch (input"
                f" {tuple(arguments.input.shape)}), such as an expert without examples, so"
                " its statistics cannot be synchronised. Use a method without a"
                " synchronised step, such as fedavg or fedbn."
            )
        if not union > 1:
            raise NormLayerError(
                f"{layer} has {union:g} values per channel in the union of all clients'"
                f" batches (input {tuple(arguments.input.shape)} here). It requires more"
                " than 1. Use larger batches."
            )
        call = BatchNormCall(
            self.exchange,
            f"{number}/{path}" if path else number,
            batch_size,
            layer,
            self.fused,
            self.keeps_gradients,
        )
        self.num_layers += 1
        x: Tensor = NormaliseTogether.apply(
            arguments.input, arguments.weight, arguments.bias, arguments.eps, call
        )
        with torch.no_grad():
            # n is the same float on all clients, so their models stay equal to the bit.
            n = union_batch_size / call.share
            # torch's running variance is unbiased: n / (n - 1).
            _update(arguments.running_mean, call.mean, arguments.momentum)
            _update(arguments.running_var, call.var * (n / (n - 1)), arguments.momentum)
        return x

    def exchange(self, tag: str, local: Tensor) -> Tensor:
        """Return the server's answer to ``local``, in its shape, dtype and device.

        Raises:
            DataError: ``local`` and the model's inputs are not finite.
            NormLayerError: the synchronised block has ended.
            ReplyError: the answer has another shape.
        """
        if self._closed:
            raise NormLayerError(
                f"exchange {tag!r} comes after the synchronised block. Call"
                " loss.backward() in the block."
            )
        # Check the inputs here. The server sees only this tensor, and would blame the
        # learning rate.
        if not is_finite(local):
            refuse_inputs(self._inputs, "in the batch of a synchronised step")
        answer = self._reduce(tag, local)
        if answer.shape != local.shape:
            raise ReplyError(
                f"exchange {tag!r} was answered with shape {tuple(answer.shape)}, but"
                f" {tuple(local.shape)} was sent."
            )
        self.num_exchanges += 1
        return answer.detach().to(local)


def _update(running: Tensor | None, batch: Tensor, momentum: float) -> None:
    if running is not None:
        running.mul_(1 - momentum).add_(batch.to(running.dtype), alpha=momentum)
