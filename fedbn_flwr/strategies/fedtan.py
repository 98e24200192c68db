"""FedTAN: in the first local step of each round all clients act as one batch, layer by layer.

Wang, Shi, Chang 2023, "Why Batch Normalization Damage Federated Learning on Non-IID Data?", arXiv:2301.02982,
Algorithms 1-3.

=========  ================================================================================================
sent down  the whole state; then, per BN layer, the global mean, variance, and the gradients w.r.t. both
sent up    per BN layer the local ones; at the end the whole state
kept       nothing (carried by messages: model and answers of the round, until its end)
cost       per round F + 2 S floats down and up per client, S = running statistics, in 3L + 1 exchanges; or F + 2.5 S
           in 2L + 1, mean and variance together (ResNet-20: F = 271,098, S = 1,376, L = 19)
=========  ================================================================================================

N clients, p_i, E local steps, L BN layers, ``union_batch_size`` = sum of the first batches b_i. Steps 2..E are
ordinary local steps; then everything is averaged, eq. (7). The arithmetic of a synchronised layer is in
``fedbn_flwr.batchnorm.sync``, the carriers of the exchanges in ``fedbn_flwr.transport``.

Differs from the paper: running variances take torch's n/(n-1) correction with n of the union (the paper's (2b) and
(6) are biased); one SGD optimizer for all E steps (the authors' code restarts it after the first). Law: with E = 1
and plain SGD the averaged model equals one centralized step on sum p_i mean_i(loss).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from logging import WARNING
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from torch import nn

from fedbn_flwr.transport import RetryStep, Reducer, reducer_here
from fedbn_flwr.transport.grpc_channel import ChannelReducer, ChannelServer
from fedbn_flwr.transport.barrier import Member
from fedbn_flwr.errors import ConfigError, DataError, NormLayerError, unknown_name
from fedbn_flwr.norms.renorm import BatchRenorm
from fedbn_flwr.server.synchronised_step import StepResult, step_by_channel, step_by_barrier, step_by_messages, with_config
from fedbn_flwr.strategies.fedavg import FedAvg, FedAvgParams, joined
from fedbn_flwr.server.replies import acknowledged
from fedbn_flwr.batchnorm.sync import Backward, Exchanges, synchronised
from fedbn_flwr.training.loop import Compute, ClientHook, StepResult

__all__ = ["FedTAN", "FedTANParams", "SynchroniseFirstStep"]


@dataclass(frozen=True, kw_only=True)
class FedTANParams(FedAvgParams):
    """Parameters of FedTAN.

    Attributes:
        fedtan_exchanges: "3L+1" as in the paper, or "2L+1": mean and variance travel together.
        fedtan_exchange: what carries them where the clients are not in this process: "messages" or "channel".
        fedtan_timeout: seconds an exchange waits for its last client.
        fedtan_bind: where the channel listens, host:port; port 0 = a free one.
        fedtan_address: what clients connect to; "" = where it listens.
        fedtan_tls_dir: folder with ca.crt, server.crt, server.key; "" = plaintext, on loopback only.
    """

    fedtan_exchanges: Exchanges = "3L+1"
    fedtan_exchange: str = "messages"
    fedtan_timeout: float = 120.0
    fedtan_bind: str = "127.0.0.1:0"
    fedtan_address: str = ""
    fedtan_tls_dir: str = ""

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        if self.fedtan_exchanges not in ("3L+1", "2L+1"):
            raise unknown_name("fedtan_exchanges", self.fedtan_exchanges, ["3L+1", "2L+1"])
        if self.fedtan_exchange not in CARRIERS:
            raise unknown_name("fedtan_exchange", self.fedtan_exchange, CARRIERS)
        if not self.fedtan_timeout > 0:
            raise ConfigError(f"fedtan_timeout={self.fedtan_timeout} must be above 0 seconds")


CARRIERS = ("messages", "channel")


class SynchroniseFirstStep(ClientHook):
    """Client half: the first step's BN layers reduce through ``seat``; a lost client makes it begin again.

    ``batch_size`` is what this client said its first batch would hold; the others count on it.
    """

    def __init__(self, seat: Reducer, exchanges: Exchanges, backward: Backward, batch_size: int | None = None) -> None:
        self._seat = seat
        self._batch_size = batch_size
        self._exchanges: Exchanges = exchanges
        self._backward: Backward = backward

    def synchronises(self, step: int) -> bool:
        """Tell that the first step sees the union of the batches."""
        return step == 0

    def run_step(self, step: int, model: nn.Module, batch_size: int, compute: Compute) -> StepResult:
        """Run the first step synchronised, from the same state and batch until it comes through."""
        if step > 0:
            return compute()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        while True:
            try:
                with self.around(step, model, batch_size):
                    return compute()
            except RetryStep:
                model.load_state_dict(before)

    @contextmanager
    def around(self, step: int, model: nn.Module, batch_size: int) -> Iterator[None]:
        """Synchronise the first step.

        Raises:
            RetryStep: a client was lost: the caller begins the step again, from the same state and with the same batch.
            Pending: the step is carried by messages, and the answer to its next exchange is not there yet.
            NormLayerError: a layer cannot be synchronised.
            DataError: the batch has another size than the server was told.
        """
        if step > 0:
            yield
            return
        if self._batch_size not in (None, batch_size):
            raise DataError(
                f"the first batch has {batch_size} examples; this client's answer to the query said batch-size "
                f"{self._batch_size}, which the other clients count on"
            )
        if layers := [path for path, layer in model.named_modules() if isinstance(layer, BatchRenorm)]:
            raise NormLayerError(
                f"layer '{layers[0]}' is batch-renorm, whose correction comes from local statistics: it cannot be "
                "synchronised. Use norm=batch."
            )
        union = self._seat.begin()
        with synchronised(
            model,
            self._seat.reduce,
            batch_size=batch_size,
            union_batch_size=union,
            exchanges=self._exchanges,
            backward=self._backward,
        ):
            yield
        self._seat.close()


def _synchronise(config: Mapping[str, Any]) -> ClientHook:
    seat: Reducer
    if "fedtan-seat" in config:
        seat = config["fedtan-seat"]
    elif "fedtan-address" in config:
        address, token = str(config["fedtan-address"]), str(config["fedtan-token"])
        seat = ChannelReducer(address, token, bytes(config["fedtan-ca"]), float(config["fedtan-timeout"]))
    else:
        seat = reducer_here(str(config["fedtan-meeting"]))
    size = int(config["fedtan-batch-size"]) if "fedtan-batch-size" in config else None
    return SynchroniseFirstStep(seat, config["fedtan-exchanges"], config["fedtan-backward"], size)


class FedTAN(FedAvg):
    """FedAvg whose first local step is synchronised layer by layer."""

    name = "fedtan"
    summary_line = "first local step synchronised layer by layer over all clients"
    source = "Wang 2023, arXiv:2301.02982"
    needs_batchnorm = True
    Params = FedTANParams
    rules = {"synchronise-first-step": _synchronise}
    backward: Backward = "global"

    _carried: StepResult | None = None
    _channel: ChannelServer | None = None

    def start(self, *args: Any, **kwargs: Any) -> Result:
        """Run the rounds; see ``FedAvg.start``. A channel is closed at the end."""
        try:
            return super().start(*args, **kwargs)
        finally:
            if self._channel is not None:
                self._channel.close()
                self._channel = None

    @classmethod
    def exchange_cost(cls, exchanges: str) -> tuple[int, int]:
        """Return exchanges per layer, and rows: mean, variance (fused: and the mean's remainder), two gradients."""
        forward, rows = (2, 2) if exchanges == "3L+1" else (1, 3)
        return (forward + 1, rows + 2) if cls.backward == "global" else (forward, rows)

    def synchronises(self, server_round: int) -> bool:
        """Tell whether the round's first step is synchronised."""
        return True

    def phase(self, server_round: int) -> str:
        """Return "synchronised" where the round's first step is."""
        return "synchronised" if self.synchronises(server_round) else super().phase(server_round)

    def client_config(self, server_round: int) -> dict[str, Any]:
        """Tell the clients to synchronise their first step."""
        if not self.synchronises(server_round):
            return super().client_config(server_round)
        exchanges, backward = self.params.fedtan_exchanges, self.backward
        own = {"rules": "synchronise-first-step", "fedtan-exchanges": exchanges, "fedtan-backward": backward}
        return joined(super().client_config(server_round), own)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Carry the exchanges here, to the last reply: nothing is left to send."""
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self._carried = None
        if not messages or not self.synchronises(server_round):
            return messages
        members = self._members(messages)
        messages = [message for message in messages if message.metadata.dst_node_id in members]
        sizes = {node_id: member.batch_size for node_id, member in members.items()}
        messages = [with_config(m, {"fedtan-batch-size": sizes[m.metadata.dst_node_id]}) for m in messages]
        params: FedTANParams = self.params
        limits = params.fedtan_timeout, max(params.fedtan_timeout, self._post.timeout), params.min_replies
        if callable(getattr(grid, "open_barrier", None)):
            self._carried = step_by_barrier(grid, messages, members, *limits)
        elif params.fedtan_exchange == "channel":
            if self._channel is None:
                self._channel = ChannelServer(params.fedtan_bind, params.fedtan_address, params.fedtan_tls_dir)
            self._carried = step_by_channel(grid, self._channel, messages, members, *limits)
        else:
            self._carried = step_by_messages(grid, messages, members, *limits)
        return []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Note what the exchanges moved and who was dropped in mid-step; then average as FedAvg does."""
        if self._carried is not None:
            report, dropped = self.reports[-1], self._carried.dropped
            moved = self._carried.traffic
            report.train.exchanges += moved.exchanges
            report.train.down += moved.down
            report.train.up += moved.up
            for node_id, reason in dropped.items():
                node = self._post.roster.of(node_id)
                report.reject(node_id, f"{node}: {reason}")
                log(WARNING, "round %d: %s %s; the step was redone without it", server_round, node, reason)
            # A client that was dropped has no part in the round, whatever it trained on its own. One that never took
            # its seat goes on to be refused by what its app lacks.
            replies = [
                r
                for r in self._carried.replies
                if r.has_error() or r.metadata.src_node_id not in dropped or not acknowledged(r)
            ]
        return super().aggregate_train(server_round, replies)

    def _members(self, messages: Iterable[Message]) -> dict[int, Member]:
        """Return who takes part; a node that has not told what the step needs is refused.

        Raises:
            ConfigError: none of them has.
        """
        nodes = [self._post.roster.of(message.metadata.dst_node_id) for message in messages]
        members = {
            n.node_id: Member(n.num_examples, n.batch_size, str(n)) for n in nodes if n.num_examples and n.batch_size
        }
        for node in (node for node in nodes if node.node_id not in members):
            said = (
                f"strategy {self.name!r} needs to know the training examples and the first batch's size of {node} "
                "before the round: answer the query with num-examples and batch-size (fedbn_flwr.client_app around a "
                "TorchClient does; in an app of your own register `@app.query()` and return answer_query(msg, context, "
                "loader))."
            )
            if not members:
                raise ConfigError(said)
            log(WARNING, "%s", said)
            self.reports[-1].reject(node.node_id, said)
        return members
