r"""FedTAN: the first local step of a round is synchronised over all clients.

Wang, Shi, Chang 2023, "Why Batch Normalization Damage Federated Learning on Non-IID
Data?", arXiv:2301.02982, Algorithms 1-3.

## When

Use when: there is label skew with few local steps, and all clients of a round answer at
the same time. With one local step, a round equals a step of one machine.

Not when: each message is expensive and no channel can be opened, or clients often drop
out.

## Problem

With different data in each client, the local statistics differ, and the gradients
through them differ as well. Their average is not the gradient on the union of the data.
Synchronising the statistics is not enough: the gradients with respect to the statistics
must also be synchronised.

## Algorithm

Client $i$ has the weight $p_i = |D_i| / \sum_j |D_j|$ and makes $E$ local steps. It has
$n_i$ elements per channel, $F_i$ is its mean loss over its batch, and
$s = \sqrt{\sigma^2 + \epsilon}$. In the forward pass of the first local step, each BN
layer with input $y$ and normalised output $\hat{x}$ exchanges:

$$\mu = \sum_i p_i \mu_i, \qquad \sigma^2 = \sum_i p_i \, E_i[(y - \mu)^2], \qquad \hat{x} = \frac{y - \mu}{s}$$

In the backward pass, in reverse order, with $g = \partial F_i / \partial \hat{x}$ and
sums over the client's elements, it exchanges:

$$\frac{\partial F_i}{\partial \sigma^2} = -\frac{1}{2} \sum g \, (y - \mu) \, s^{-3}, \qquad
\frac{\partial F_i}{\partial \mu} = -\frac{1}{s} \sum g$$

The server forms $D_{\sigma} = \sum_i p_i \, \partial F_i / \partial \sigma^2$ and
$D_{\mu} = \sum_i p_i \, \partial F_i / \partial \mu$, and each client continues with

$$\frac{\partial F_i}{\partial y} = \frac{g}{s} + D_{\sigma} \frac{2 (y - \mu)}{n_i} + \frac{D_{\mu}}{n_i}$$

Gradients of gamma and beta stay local. Steps $2 \dots E$ are ordinary local steps. Then
the server averages everything, eq. (7).

Examples may have different numbers of elements: graphs, sequences, images of several
sizes. The first batch of client $i$ has $b_i$ examples, so each of them has the weight
$p_i / b_i$, and each of its elements has this weight as well. The statistics and their
gradients then have

$$w_i = \frac{p_i \, n_i / b_i}{\sum_j p_j \, n_j / b_j}$$

instead of $p_i$ in the formulas of $\mu$ and $\sigma^2$, and $n_i p_i / w_i$ instead of
$n_i$ in the formula of $\partial F_i / \partial y$. With equal numbers of elements,
$w_i = p_i$.

`fedtan_exchanges="2L+1"` sends mean and variance together, with the same mathematics in
fewer exchanges: $\sigma^2 = \sum_i w_i (\sigma_i^2 + (\mu_i - \mu)^2)$.
`union_batch_size` is the sum of the first batches.

A BN layer cannot be synchronised if activation checkpointing calls it again. Every
client must call the same BN layers in its first local step, in the same order: a model
that skips layers at random (stochastic depth) is refused. If the inputs determine the
layers, the clients that differ from the majority are dropped in the round.

If a client is lost in the middle of the step, the other clients repeat the step without
it. If a client is lost after its last exchange, the step contains its batch, and only
the client's model is missing in the average.

## Differs from the paper

Running variances use torch's $n/(n-1)$ correction with $n$ of the union; the paper's
(2b) and (6) are biased. One SGD optimizer makes all $E$ steps; the authors' code
restarts it after the first step.

The paper's examples all have the same number of elements. For other examples, a client
sends $b_i / n_i$ in addition to the mean, its examples per element, one number per
layer. All clients use $n = B \sum_i p_i n_i / b_i$, with $B$ examples in the union, so
their running statistics are equal, bit for bit. If the batches have the weights $p_i$,
$n$ is the number of elements in the union.

## Law

With $E = 1$ and plain SGD, the averaged model equals one centralized step on
$\sum_i p_i F_i$. In this step, BatchNorm weighs each element like its example.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, Literal, cast

from torch import nn

from fedbn_flwr.batchnorm.sync import Backward, ExchangeScheme, synchronised
from fedbn_flwr.errors import DataError
from fedbn_flwr.messages.protocol import FIRST_BATCH
from fedbn_flwr.server.methods.method import Ask, Facts, Method
from fedbn_flwr.server.methods.params import Params, setting
from fedbn_flwr.server.methods.phases import Phase
from fedbn_flwr.server.strategy import Strategy
from fedbn_flwr.training.client_hook import ClientHook
from fedbn_flwr.transport import Reducer
from fedbn_flwr.transport.hook_context import HookContext
from fedbn_flwr.transport.step_transport import LinkSettings

_CHANNEL = {"fedtan-transport": ("channel",)}


class FedTANParams(Params):
    """Parameters of FedTAN."""

    fedtan_exchanges: Literal["3L+1", "2L+1"] = setting(
        "3L+1", "exchanges of a round; 2L+1 sends mean and variance together"
    )
    fedtan_transport: Literal["messages", "channel"] = setting(
        "messages",
        "how exchanges travel between processes; in one process, clients wait at a"
        " barrier instead",
    )
    fedtan_timeout: float = setting(
        120.0,
        "seconds that an exchange waits for its last client; in one process, for its"
        " next client",
        group="",
        gt=0,
    )
    fedtan_bind: str = setting(
        "127.0.0.1:0",
        "address of the channel on the server, host:port; port 0 selects a free port",
        only_if=_CHANNEL,
    )
    fedtan_address: str = setting(
        "",
        "host:port for the clients; empty uses fedtan-bind with the port in use",
        only_if=_CHANNEL,
    )
    fedtan_tls_dir: str = setting(
        "",
        "folder with ca.crt, server.crt, server.key; empty allows loopback only",
        only_if=_CHANNEL,
    )


EXCHANGES = "fedbn-flwr.fedtan-exchanges"  # str: 3L+1 or 2L+1
BACKWARD = "fedbn-flwr.fedtan-backward"  # str: global or own


class SynchroniseFirstStep(ClientHook):
    """Client code that synchronises the BN layers of the first step.

    The layers exchange their statistics through ``reducer``. ``batch_size`` is the size
    that this client has reported for its first batch. The other clients rely on this
    size.
    """

    def __init__(
        self,
        reducer: Reducer,
        exchanges: ExchangeScheme,
        backward: Backward,
        batch_size: int | None = None,
    ) -> None:
        self._reducer = reducer
        self._batch_size = batch_size
        self._exchanges: ExchangeScheme = exchanges
        self._backward: Backward = backward

    def synchronises(self, step: int) -> bool:
        """Return True for the first step, because it uses the union of the batches."""
        return step == 0

    @contextmanager
    def around(self, step: int, model: nn.Module, batch_size: int) -> Iterator[None]:
        """Synchronise the first step.

        Raises:
            RetryStep: another client was lost; the client begins the round again.
            StopStep: the step uses messages, and its next exchange has no answer
                yet.
            NormLayerError: a layer cannot be synchronised, or no layer was called in
                train mode.
            DataError: the batch does not have the size that this client has reported.
        """
        if step > 0:
            yield
            return
        if self._batch_size not in (None, batch_size):
            raise DataError(
                f"the size of the first batch is {batch_size}, but this client's answer"
                f" to the query was batch-size {self._batch_size}, and the other"
                " clients rely on it"
            )
        # The first layer needs the number of examples of all clients in this step.
        union = self._reducer.begin()
        with synchronised(
            model,
            self._reducer.reduce,
            batch_size=batch_size,
            union_batch_size=union,
            exchanges=self._exchanges,
            backward=self._backward,
        ) as mode:
            yield
        # Refuse a step without a synchronised layer, because it would silently be a
        # step of FedAvg.
        mode.require_a_layer()
        self._reducer.close()


def _make_hook(context: HookContext) -> ClientHook:
    config, reducer = context.config, cast(Reducer, context.reducer)
    size = int(config[FIRST_BATCH]) if FIRST_BATCH in config else None
    return SynchroniseFirstStep(reducer, config[EXCHANGES], config[BACKWARD], size)


class FedTANMethod(Method[FedTANParams]):
    """FedAvg whose first local step is synchronised layer by layer."""

    name = "fedtan"
    summary_line = "first local step synchronised layer by layer over all clients"
    source = "Wang 2023, arXiv:2301.02982"
    role = "client-hooks"
    Params = FedTANParams
    client_hooks = {"synchronise-first-step": _make_hook}
    backward: ClassVar[Backward] = "global"

    def phases(self) -> tuple[Phase, ...]:
        """Return a phase whose first step exchanges mean, variance and two gradients."""
        p = self.params
        link = LinkSettings(
            p.fedtan_transport,
            p.fedtan_timeout,
            p.fedtan_bind,
            p.fedtan_address,
            p.fedtan_tls_dir,
        )
        return (Phase("synchronised", exchanges=link),)

    def on_clients(self, state: None, facts: Facts) -> list[Ask]:
        """Ask the clients to synchronise their first step."""
        config = {EXCHANGES: self.params.fedtan_exchanges, BACKWARD: self.backward}
        return [Ask("synchronise-first-step", config)]


class FedTAN(Strategy):
    """FedAvg whose first local step is synchronised layer by layer.

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import FedTAN
        >>> strategy = FedTAN()
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
        >>> strategy.reports[1].train.exchanges  # 3L + 1, and L = 1 layer
        4
    """

    method = FedTANMethod
