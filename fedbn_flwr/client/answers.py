"""The answers of apps on Flower's Message API to the queries of the strategies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flwr.app import Context, Message, MetricRecord, RecordDict
from torch import nn

from fedbn_flwr.batchnorm.reestimation import reestimate_statistics
from fedbn_flwr.client.model_door import freeze_here
from fedbn_flwr.messages.moment_record import encode_moments
from fedbn_flwr.messages.protocol import (
    METRICS,
    NUM_EXAMPLES,
    MessageConfig,
    NodeProperties,
    merged_config,
    num_partitions_of,
    partition_of,
    site_name_of,
)
from fedbn_flwr.messages.records import (
    from_record,
    model_record,
    tensors,
    to_record,
    to_state,
)
from fedbn_flwr.training.freezing import layers_of
from fedbn_flwr.training.loaded import LoadedBatches, first_batch, num_examples
from fedbn_flwr.training.model_state import (
    load_state,
    unwrap,
    view_with_names,
    wrapper_prefix,
)


def answer_query(message: Message, context: Context, loader: Any) -> Message:
    """Return the answer to the strategies' ``query``.

    The answer has the partition id, the ``site-name`` of the node's config, the number
    of training examples, and the size of the first batch.

    ::

        @app.query()
        def query(msg: Message, context: Context) -> Message:
            return answer_query(msg, context, trainloader(context))

    FedTAN needs the answer before its first round. The other strategies use it to
    sample repeatably and to leave out clients without data.

    Args:
        message: the query.
        context: Flower's context.
        loader: the training data, a ``DataLoader`` or anything with ``dataset`` and
            ``batch_size``.

    Raises:
        ConfigError: the node's ``partition-id`` is not a number, or its ``site-name``
            is not a name.
        DataError: the data set has no length, or the sampler's choice is unknown
            (``LoadedBatches``).
    """
    # Report at most the number of examples as batch size, because a loader's batch size
    # may be larger.
    size = num_examples(loader)
    properties = NodeProperties(
        partition_of(context),
        size,
        min(first_batch(loader) or size, size),
        num_partitions=num_partitions_of(context),
        site_name=site_name_of(context),
    )
    return Message(RecordDict(dict(properties.write())), reply_to=message)


def answer_statistics(
    message: Message,
    context: Context,
    model: nn.Module | Callable[[], nn.Module],
    loader: Any,
    *,
    forward: Callable[[Any, Any], Any] | None = None,
) -> Message:
    """Return the answer to ``query.statistics``.

    It has BN statistics of the training data, measured with the received weights.

    ::

        @app.query("statistics")
        def statistics(msg: Message, context: Context) -> Message:
            return answer_statistics(msg, context, Net(), trainloader(context))

    ``StaticBN``, ``recalibrate=True`` and ``eval_on="recalibrated"`` send this query.

    Args:
        message: the query, with the model's state.
        context: Flower's context.
        model: the model on its device; the received state is loaded into it. If a copy
            of it may differ, pass the function that builds it.
        loader: a ``DataLoader`` whose batches are (inputs, targets), without random
            transforms. There is one pass, in the order of the loader's data set.
        forward: ``forward(model, inputs)`` is called instead of ``model(inputs)``. Pass
            it if the training calls BatchNorm layers that the model's own forward does
            not reach: ``lambda net, x: net.decoder(net.encoder(x))``.

    Raises:
        StateError: the received entries do not fit the model.
        DataError: the data set has no length, or a batch is not a pair.
    """
    if not isinstance(model, nn.Module):
        model = model()
    key, received = model_record(message)
    named = view_with_names(model, received)
    load_state(named, tensors(from_record(received)))
    data, bare, network = LoadedBatches(loader), unwrap(model), unwrap(named)
    sent = MessageConfig.read(merged_config(message))
    with freeze_here(network, sent):
        moments = reestimate_statistics(
            bare,
            data,
            batch_size=data.batch_size,
            measured=sent.layers,
            forward=forward,
        )
    # Use the server's names: they may have the prefix of a wrapper, and the network may
    # be inside a user's module.
    found = {bare.get_submodule(path): one for path, one in moments.items()}
    layers = layers_of(network, every_path=True)
    moments = {path: found[one] for path, one in layers.items() if one in found}
    prefix = wrapper_prefix(received, network.state_dict())
    encoded = encode_moments(moments, network.state_dict())
    entries = {prefix + name: entry for name, entry in encoded.items()}
    content: RecordDict = RecordDict(
        {
            key: to_record(to_state(entries)),
            METRICS: MetricRecord({NUM_EXAMPLES: len(data)}),
        }
    )
    return Message(content, reply_to=message)
