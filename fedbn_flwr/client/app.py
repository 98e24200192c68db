"""``client_app``: any ``NumPyClient`` as a ``ClientApp`` of Flower's Message API."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from flwr.app import ConfigRecord, Context, Message
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable

from fedbn_flwr.client.packed import packed
from fedbn_flwr.client.repeatable import repeatable
from fedbn_flwr.client.torch_client import TorchClient
from fedbn_flwr.compat.flower import Mod, on_network_node
from fedbn_flwr.errors import ConfigError, DataError, NamedConfigErrors, NormLayerError
from fedbn_flwr.messages.numpy_client import (
    checked,
    describe,
    open_message,
    reply_to_evaluate,
    reply_to_fit,
)
from fedbn_flwr.messages.protocol import (
    EXCHANGE_QUERY,
    INFO,
    MASK_PRESENT,
    MASK_STAGE,
    NUM_EXAMPLES,
    NUM_PARTITIONS,
    PARTITION_ID,
    STATISTICS_QUERY,
    UNUSABLE,
    VERSIONS,
    NodeProperties,
    merged_config,
    num_partitions_of,
    partition_of,
)
from fedbn_flwr.messages.versions import as_text, own_versions
from fedbn_flwr.privacy.coordinates import CLIP

__all__ = ["SizedApp", "client_app"]


class RepeatableApp(ClientApp):
    """A ClientApp whose function draws from generators that its mod ``seeded_client``
    has seeded.
    """

    seeds_itself = True


class SizedApp(RepeatableApp):
    """A ClientApp that knows the number of training examples of its nodes.

    Args:
        num_examples: returns it for a node's context, without making the client.
        mods: as in Flower's ``ClientApp(mods=[...])``.
    """

    def __init__(
        self, num_examples: Callable[[Context], int], mods: Sequence[Mod] = ()
    ) -> None:
        super().__init__(mods=list(mods))
        self.num_examples = num_examples

    def node_properties(
        self, config: Mapping[str, Any], context: Context
    ) -> NodeProperties:
        """Return the partition id, the number of examples and that of the partitions.

        Raises:
            NotImplementedError: the query has a config, and the client itself must
                answer.
        """
        if config:
            raise NotImplementedError("the client must try what the method needs")
        return NodeProperties(
            int(context.node_config[PARTITION_ID]),
            self.num_examples(context),
            num_partitions=num_partitions_of(context),
        )


def client_app(
    client_fn: Callable[[Context], Any],
    mods: Sequence[Mod] = (),
    train_mods: Sequence[Mod] = (),
    *,
    num_examples: Callable[[Context], int] | None = None,
    reason: Callable[[Exception, Context], str] | None = None,
) -> ClientApp:
    """Return a ``ClientApp`` for the Message API, made from a function that returns a
    ``NumPyClient``.

    It answers ``train`` and ``evaluate`` with the client's ``fit`` and ``evaluate``,
    the strategies' ``query`` with the partition id (from ``get_properties`` or the
    node's config), the ``num-partitions`` of the node's config and the number of
    training examples, and ``query.statistics`` with the ``statistics`` of a
    ``TorchClient``. ``messages.numpy_client`` describes how arrays and their names are
    sent. In a SuperNode's process they travel in one piece (``mods.packed``).

    Args:
        client_fn: called for every message, as in Flower's
            ``ClientApp(client_fn=...)``.
        mods: as in Flower's ``ClientApp(mods=[...])``. With ``bn_mod`` any
            ``NumPyClient`` that takes and returns the whole state dict can keep its
            part; a ``TorchClient`` needs no mod.
        train_mods: as in Flower's ``@app.train(mods=[...])``: mods that see the
            training messages alone.
        num_examples: returns the number of a node's training examples, as its client
            would report it. ``InProcessGrid`` then sends no query, which takes a
            message and a client for each node. Not used with ``mods``, or by methods
            that synchronise the clients' steps.
        reason: returns what the server is told of an error of a node's data; default:
            the error's text.

    Raises:
        ConfigError: a mod stands in place of a list of mods.
    """
    for name, given in (("mods", mods), ("train_mods", train_mods)):
        if callable(given):
            raise ConfigError(
                f"{name}={given!r:.80} is one mod, and client_app takes a list: write"
                f" {name}=[...]"
            )
    answers = _ClientMessages(client_fn, reason or _text)
    # From outside to inside: what leaves the client is masked or clipped after the
    # user's mods, and in one piece last; what the client draws is seeded innermost, so
    # that the noise of a privacy mod before it is not the server's to subtract.
    every = [protected_if_asked, seeded_client, *mods]
    if on_network_node():  # elsewhere no array has a cost of its own, and a mod has one
        every.insert(0, packed)
    # A user's mod may see or refuse queries: then each node must be asked.
    app: ClientApp
    if num_examples is None or mods:
        app = RepeatableApp(mods=every)
    else:
        app = SizedApp(num_examples, every)
    app.train(mods=list(train_mods))(answers.train)
    app.evaluate()(answers.evaluate)
    app.query()(answers.properties)
    app.query(_action(EXCHANGE_QUERY))(answers.train)
    app.query(_action(STATISTICS_QUERY))(answers.statistics)
    return app


class _ClientMessages:
    """The answers to each kind of message, by the client that ``client_fn`` returns for
    it.
    """

    def __init__(
        self,
        client_fn: Callable[[Context], Any],
        reason: Callable[[Exception, Context], str],
    ) -> None:
        self._client_fn = client_fn
        self._reason = reason

    def _client(self, context: Context) -> NumPyClient:
        client = self._client_fn(context)
        # Flower's own apps return ``client.to_client()``, which wraps it.
        client = getattr(client, "numpy_client", client)
        if not isinstance(client, NumPyClient):
            raise TypeError(
                f"client_fn returned {type(client).__name__}; client_app needs a"
                " flwr.client.NumPyClient"
            )
        return client

    @NamedConfigErrors()
    def train(self, message: Message, context: Context) -> Message:
        """Return the trained arrays."""
        client = self._client(context)
        fit = client.fit
        # Our own ``fit`` needs no copies, neither of the arrays that it gets nor of
        # those that it returns: the reply copies them. A subclass may do anything.
        only_reads = _only_reads(fit, TorchClient.fit)
        if only_reads:
            # of the client that owns ``fit``: a user's object may hand it on
            fit = cast(Any, fit).__self__.fit_uncopied
        result = fit(*open_message(message, copy=not only_reads))
        return reply_to_fit(message, *checked(result, "fit"))

    @NamedConfigErrors()
    def evaluate(self, message: Message, context: Context) -> Message:
        """Return the metrics of the client's tests."""
        client = self._client(context)
        only_reads = _only_reads(client.evaluate, TorchClient.evaluate)
        result = client.evaluate(*open_message(message, copy=not only_reads))
        return reply_to_evaluate(message, *checked(result, "evaluate"))

    @NamedConfigErrors()
    def properties(self, message: Message, context: Context) -> Message:
        """Return the client's properties, or why it cannot take part."""
        properties: dict[str, Any] = {
            PARTITION_ID: partition_of(context),
            NUM_PARTITIONS: num_partitions_of(context),
        }
        info: dict[str, Any] = {}
        try:
            client = self._client(context)
            properties |= client.get_properties(merged_config(message))
        # An answer, and no error: the server reports it and goes on with the others.
        except (DataError, NormLayerError) as error:
            properties[NUM_EXAMPLES] = 0
            info[UNUSABLE] = self._reason(error, context)
        if on_network_node():
            info[VERSIONS] = as_text(own_versions())
        reply = describe(message, properties)
        if info:
            reply.content[INFO] = ConfigRecord(info)
        return reply

    @NamedConfigErrors()
    def statistics(self, message: Message, context: Context) -> Message:
        """Return the re-estimated BN statistics of a ``TorchClient``."""
        client = self._client(context)
        if not isinstance(client, TorchClient):
            raise TypeError(
                f"{type(client).__name__} does not re-estimate BN statistics;"
                " fedbn_flwr.TorchClient does"
            )
        return reply_to_fit(
            message, *client.statistics(*open_message(message)), of="statistics"
        )


def protected_if_asked(
    message: Message, context: Context, call_next: ClientAppCallable
) -> Message:
    """``masked_update`` around ``clipped_update``, each imported where the server asks
    for it: a Flower mod.
    """
    config = merged_config(message)
    if CLIP in config:
        from fedbn_flwr.client.update_clipping import clipped_update

        call_next = functools.partial(clipped_update, call_next=call_next)
    if config.keys().isdisjoint((MASK_PRESENT, MASK_STAGE)):
        return call_next(message, context)
    from fedbn_flwr.client.masking import masked_update

    return masked_update(message, context, call_next)


@repeatable
def seeded_client(
    message: Message, context: Context, call_next: ClientAppCallable
) -> Message:
    """Let what the client draws repeat: a Flower mod."""
    return call_next(message, context)


def _text(error: Exception, _: Context) -> str:
    return str(error)


def _only_reads(method: Callable[..., Any], ours: Callable[..., Any]) -> bool:
    """Return whether a client's method is ``TorchClient``'s own, which does not write
    into the arrays it gets.
    """
    return getattr(method, "__func__", None) is ours


def _action(message_type: str) -> str:
    """Return the part of a message type by which Flower registers a query."""
    return message_type.partition(".")[2]
