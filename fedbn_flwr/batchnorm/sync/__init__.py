"""One BatchNorm over all clients of a round, for FedTAN's first local step.

The step works for any ``nn.Module``. Clients run one forward and backward pass inside
``synchronised``; the server answers each exchange with ``combine``. Source: FedTAN,
Algorithms 1-3, eq. (39)-(41). Law: with one plain SGD step (weight decay allowed) the
p-weighted average of the clients' models equals one centralised step on the loss
``sum p_i * mean_i(loss)``.

In reading order:

- ``step``: ``synchronised``, the block around a forward and a backward pass, and a
  trial at one client.
- ``mode``: replaces every batch_norm call in the block, and numbers the exchanges.
- ``layer``: the arithmetic of one call, with the sent tensors and the answers.
- ``reduction``: the tensors of an exchange, and the server's answer to them.
"""

from fedbn_flwr.batchnorm.sync.mode import SynchronisedStep
from fedbn_flwr.batchnorm.sync.reduction import (
    Backward,
    ExchangeScheme,
    Reduce,
    combine,
    exchange_bytes,
    is_finite,
    refuse_unusable,
)
from fedbn_flwr.batchnorm.sync.step import synchronised, try_synchronised_step

__all__ = [
    "Backward",
    "ExchangeScheme",
    "Reduce",
    "SynchronisedStep",
    "combine",
    "exchange_bytes",
    "is_finite",
    "refuse_unusable",
    "synchronised",
    "try_synchronised_step",
]
