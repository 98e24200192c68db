"""``client_app`` makes a Message API ``ClientApp`` of any ``NumPyClient``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from flwr.app import Context, Message
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable

from fedbn_flwr.client.fixed import with_fixed
from fedbn_flwr.client.packed import packed
from fedbn_flwr.client.torch_client import TorchClient
from fedbn_flwr.compat.flower import Mod, later_mods, on_network_node, with_mods
from fedbn_flwr.errors import DataError, NamedConfigErrors, NormLayerError
from fedbn_flwr.messages.numpy_client import (
    checked,
    describe,
    open_message,
    reply_to_evaluate,
    reply_to_fit,
)
from fedbn_flwr.messages.protocol import (
    EXCHANGE_QUERY,
    FIXED_SHA256,
    NUM_EXAMPLES,
    NUM_PARTITIONS,
    PARTITION_ID,
    SITE_NAME,
    STATISTICS_QUERY,
    UNUSABLE,
    VERSIONS,
    NodeProperties,
    add_info,
    merged_config,
    message_seed,
    num_partitions_of,
    partition_of,
    site_name_of,
)
from fedbn_flwr.messages.versions import as_text, own_versions
from fedbn_flwr.privacy.coordinates import CLIP
from fedbn_flwr.training.randomness import seed_generators, seed_secretly


class RepeatableApp(ClientApp):
    """A ClientApp whose function draws from seeded generators.

    ``client_app`` gives it the mod ``outermost``. This mod seeds the generators.
    """

    seeds_itself = True


class SizedApp(RepeatableApp):
    """A ClientApp that can report the number of its nodes' training examples.

    Args:
        num_examples: returns the number for a node's context, without a client.
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
        """Return partition id, number of examples and number of partitions.

        Raises:
            NotImplementedError: the query has a config, so the client itself must
                answer.
        """
        if config:
            raise NotImplementedError(
                "the client itself must answer a query with a config"
            )
        return NodeProperties(
            int(context.node_config[PARTITION_ID]),
            self.num_examples(context),
            num_partitions=num_partitions_of(context),
            site_name=site_name_of(context),
        )


def client_app(
    client_fn: Callable[[Context], Any],
    mods: Sequence[Mod] = (),
    train_mods: Sequence[Mod] = (),
    *,
    num_examples: Callable[[Context], int] | None = None,
    reason: Callable[[Exception, Context], str] | None = None,
) -> ClientApp:
    """Return a ``ClientApp`` for the Message API, made from ``NumPyClient`` objects.

    The app answers ``train`` and ``evaluate`` with the client's ``fit`` and
    ``evaluate``, and ``query.statistics`` with the ``statistics`` of a ``TorchClient``.
    It answers the strategies' ``query`` with the partition id (from ``get_properties``
    or the node's config), the ``num-partitions`` of the node's config, and the number
    of training examples. ``messages.numpy_client`` describes how arrays and their names
    are sent. In a SuperNode's process they are sent in one piece (``mods.packed``).

    Example, with ``client_fn`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr import client_app
        >>> app = client_app(client_fn)
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = FedBN().start(grid, arrays, num_rounds=1)
        >>> result.train_metrics_clientapp[1]["examples-processed"]
        48

    Args:
        client_fn: called for every message, as in Flower's
            ``ClientApp(client_fn=...)``.
        mods: as in Flower's ``ClientApp(mods=[...])``. With ``bn_mod`` any
            ``NumPyClient`` that takes and returns the whole state dict can have local
            state; a ``TorchClient`` needs no mod.
        train_mods: as in Flower's ``@app.train(mods=[...])``: mods that receive only
            the training messages.
        num_examples: returns the number of a node's training examples, as its client
            would report it. ``InProcessGrid`` then sends no query, because a query
            needs a message and a client for each node. The function is not used with
            ``mods``, or by methods that synchronise the clients' steps.
        reason: returns the text that the server receives for an error of a node's data;
            by default the error's text.
    """
    answers = _ClientMessages(client_fn, reason or _text)
    # List the mods from the outermost to the innermost. The reply is changed after the
    # user's mods, and is packed last.
    every = [outermost, *mods]
    if on_network_node():  # elsewhere, single arrays cost less than the mod
        every.insert(0, packed)
    # A user's mod may read or refuse queries, so each node must be asked.
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
    """The answers to each kind of message, from the client of ``client_fn``."""

    def __init__(
        self,
        client_fn: Callable[[Context], Any],
        reason: Callable[[Exception, Context], str],
    ) -> None:
        self._client_fn = client_fn
        self._reason = reason

    def _client(self, context: Context) -> NumPyClient:
        client = self._client_fn(context)
        # Unwrap the result of ``client.to_client()``, because Flower's own apps return
        # it.
        client = getattr(client, "numpy_client", client)
        if not isinstance(client, NumPyClient):
            raise TypeError(
                f"client_fn returned {type(client).__name__}, but client_app needs a"
                " flwr.client.NumPyClient"
            )
        return client

    @NamedConfigErrors()
    def train(self, message: Message, context: Context) -> Message:
        """Return the trained arrays."""
        client = self._client(context)
        # Our own ``fit`` only reads the arrays that it gets; a subclass may do anything.
        copy = getattr(client.fit, "__func__", None) is not TorchClient.fit
        result = client.fit(*open_message(message, copy))
        return reply_to_fit(message, *checked(result, "fit"))

    @NamedConfigErrors()
    def evaluate(self, message: Message, context: Context) -> Message:
        """Return the metrics of the client's tests."""
        client = self._client(context)
        copy = getattr(client.evaluate, "__func__", None) is not TorchClient.evaluate
        result = client.evaluate(*open_message(message, copy))
        return reply_to_evaluate(message, *checked(result, "evaluate"))

    @NamedConfigErrors()
    def properties(self, message: Message, context: Context) -> Message:
        """Return the client's properties, or the reason why it cannot take part."""
        properties: dict[str, Any] = {
            PARTITION_ID: partition_of(context),
            NUM_PARTITIONS: num_partitions_of(context),
            SITE_NAME: site_name_of(context),
        }
        info: dict[str, Any] = {}
        try:
            client = self._client(context)
            properties |= client.get_properties(merged_config(message))
        # Answer instead of raising the error, so that the server reports the reason and
        # continues with the other clients.
        except (DataError, NormLayerError) as error:
            properties[NUM_EXAMPLES] = 0
            info[UNUSABLE] = self._reason(error, context)
        if on_network_node():
            info[VERSIONS] = as_text(own_versions())
        reply = describe(message, properties)
        if info:
            add_info(reply, info)
        return reply

    @NamedConfigErrors()
    def statistics(self, message: Message, context: Context) -> Message:
        """Return the re-estimated BN statistics of a ``TorchClient``.

        Raises:
            TypeError: the client is not a ``TorchClient``.
        """
        client = cast(TorchClient, self._client(context))
        arrays, num_examples, metrics = client.statistics(*open_message(message))
        return reply_to_fit(message, arrays, num_examples, metrics, of="statistics")


def seeding(
    message: Message, context: Context, call_next: ClientAppCallable
) -> ClientAppCallable:
    """Return ``call_next`` with seeded random draws of the app's function.

    The function seeds the default generators of torch, NumPy and Python with the seed of
    the message (``message_seed``), so that its draws repeat, and are equal in every
    engine. All other mods draw from the operating system's entropy: the mods between the
    calling mod and the function, and after the answer the mods before it. The server has
    the run's seed, and could otherwise subtract noise that depends on it, such as the
    noise of Flower's ``LocalDpMod``.
    """
    seed = message_seed(message, context)
    # Flower passes the later mods and the app's function as one function. Take it apart,
    # so that the seed can be set between the last mod and the app's function.
    mods, function = later_mods(call_next)

    def seeded(message: Message, context: Context) -> Message:
        seed_generators(seed)
        try:
            return function(message, context)
        finally:
            seed_secretly()

    if mods:  # they draw before the function: give them a secret seed
        seed_secretly()
    return with_mods(seeded, mods)


def outermost(
    message: Message, context: Context, call_next: ClientAppCallable
) -> Message:
    """Seed the app's function, and change its messages as the server asks.

    This function is a Flower mod. It clips the update, and completes the model.
    """
    config, inner = merged_config(message), seeding(message, context, call_next)
    if CLIP in config:
        from fedbn_flwr.client.update_clipping import clipped_update

        inner = functools.partial(clipped_update, call_next=inner)
    # The update is clipped before it loses its fixed entries.
    if FIXED_SHA256 in config:
        return with_fixed(message, context, inner)
    return inner(message, context)


def _text(error: Exception, _: Context) -> str:
    return str(error)


def _action(message_type: str) -> str:
    """Return the part of a message type that Flower uses to register a query."""
    return message_type.partition(".")[2]
