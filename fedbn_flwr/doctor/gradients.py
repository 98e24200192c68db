"""FedTAN's gradient deviation B_i and heterogeneity V_i (Assumptions 1 and 4), measured on one batch of each client.

B_i = || g_i(S_i, dS_i) - g_i(S, dS) ||, the norm over all trainable parameters, in one step from the same weights.
g_i is the gradient of client i's own batch loss. S_i are the statistics of its batch, and dS_i the gradients through
them, as in plain training; S and dS are those of all batches together, as in FedTAN's synchronised step (``sync``) with
weights p_i in proportion to the batch sizes. Without BatchNorm B_i is 0; with equal data it is the noise of a batch.

V_i = || g_i(S, dS) - G ||, G = sum p_j g_j(S, dS), the gradient of all batches together. So sum p_i V_i^2 + ||G||^2 =
sum p_i ||g_i(S, dS)||^2.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedbn_flwr.batchnorm.sync import combine, synchronised
from fedbn_flwr.doctor.by_batch import held_layers, layers_of
from fedbn_flwr.doctor.clients import outputs_of
from fedbn_flwr.errors import NormLayerError
from fedbn_flwr.machine import threads
from fedbn_flwr.training.copying import copied
from fedbn_flwr.training.memory_format import inputs_for

__all__ = ["Batch", "Deviation", "deviations", "regrouped"]

Batch = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Deviation:
    """The gradient deviation of one client: B_i, the norm of its synchronised gradient, and V_i."""

    absolute: float
    norm: float
    heterogeneity: float

    @property
    def relative(self) -> float:
        """B_i over that norm; 0 if both are 0."""
        return self.absolute / self.norm if self.norm else 0.0


def deviations(model: nn.Module, batches: Sequence[Batch], loss: Loss) -> list[Deviation]:
    """Return the deviation of each client, given a batch (inputs, targets) of each; the model does not change.

    BatchNorm is in train mode unless its training holds it in eval mode, all other layers (dropout) in eval mode.

    Raises:
        NormLayerError: a layer cannot be synchronised, a batch is too small for it, or the clients call other layers.
    """
    with threads(1):
        local = [_gradient(_training_copy(model), batch, loss) for batch in batches]
        together = _synchronised_gradients(model, batches, loss)
    sizes = torch.tensor([len(inputs) for inputs, _ in batches], dtype=torch.float64)
    union = sizes / sizes.sum() @ torch.stack(together)
    return [
        Deviation(float((alone - shared).norm()), float(shared.norm()), float((shared - union).norm()))
        for alone, shared in zip(local, together, strict=True)
    ]


def regrouped(batches: Sequence[Batch], generator: torch.Generator) -> list[Batch]:
    """Return batches of the same sizes with the examples of all clients, dealt at random."""
    inputs, targets = (torch.cat(column) for column in zip(*batches, strict=True))
    order = torch.split(torch.randperm(len(inputs), generator=generator), [len(batch[0]) for batch in batches])
    return [(inputs[positions], targets[positions]) for positions in order]


def _training_copy(model: nn.Module) -> nn.Module:
    working, held = copied(model).eval(), held_layers(model)
    for path, layer in layers_of(working).items():
        layer.train(path not in held)
    return working


def _gradient(model: nn.Module, batch: Batch, loss: Loss) -> Tensor:
    """Return the gradient of the batch's loss with respect to all trainable parameters, float64 (P,)."""
    inputs, targets = batch
    trained = [p for p in model.parameters() if p.requires_grad]
    with torch.enable_grad():  # the caller may be in torch.no_grad()
        outputs = outputs_of(model, inputs_for(model)(inputs))
        gradients = torch.autograd.grad(loss(outputs, targets.to(outputs.device)), trained, allow_unused=True)
    flat = [torch.zeros_like(p) if g is None else g for p, g in zip(trained, gradients, strict=True)]
    return torch.cat([g.flatten().double().cpu() for g in flat])


def _synchronised_gradients(model: nn.Module, batches: Sequence[Batch], loss: Loss) -> list[Tensor]:
    """Return each client's gradient with the statistics of all batches; the clients run in threads, in step."""
    sizes = [len(inputs) for inputs, _ in batches]
    sent: dict[int, tuple[str, Tensor]] = {}
    barrier = threading.Barrier(len(batches))

    def gather(client: int, tag: str, tensor: Tensor) -> list[Tensor]:
        sent[client] = tag, tensor
        barrier.wait()  # all have sent
        tags, tensors = zip(*(sent[index] for index in range(len(batches))), strict=True)
        if len({*tags}) > 1:
            raise NormLayerError(
                f"the clients' exchanges differ: {', '.join(sorted({*tags}))}. The model must call the same BatchNorm "
                "layers for every batch."
            )
        barrier.wait()  # all have read
        return list(tensors)

    def reducer(client: int) -> Callable[[str, Tensor], Tensor]:
        return lambda tag, tensor: combine(tag, gather(client, tag, tensor), sizes)

    def run(client: int) -> Tensor:
        try:
            working, size = _training_copy(model), sizes[client]
            with synchronised(working, reducer(client), batch_size=size, union_batch_size=sum(sizes)):
                gradient = _gradient(working, batches[client], loss)
            gather(client, "end", gradient)  # so nobody waits for a client that calls fewer layers
            return gradient
        except BaseException:
            barrier.abort()  # the others must not wait
            raise

    with ThreadPoolExecutor(len(batches)) as pool:
        waiting = [pool.submit(run, client) for client in range(len(batches))]
    errors = [error for job in waiting if (error := job.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [job.result() for job in waiting]
