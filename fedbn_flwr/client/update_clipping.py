"""The mod ``clipped_update`` clips a client's own update, for ``dp=client``."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, MessageType
from flwr.clientapp.typing import ClientAppCallable

from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.errors import StateError
from fedbn_flwr.messages.protocol import merged_config
from fedbn_flwr.messages.records import model_record, of_kind, to_record, views
from fedbn_flwr.privacy.coordinates import CLIP, Coordinates, clipped


def clipped_update(
    message: Message, context: Context, call_next: ClientAppCallable
) -> Message:
    """Return the app's reply with its update clipped to the server's bound.

    This function is a Flower mod. It must be the first mod, so that it clips everything
    that leaves the client: ``ClientApp(mods=[clipped_update, bn_mod])``. Only the mod
    ``packed`` may come before, because ``packed`` changes no value. Counters return as
    they came, because changed counters would reveal the number of batches. Metrics are
    unchanged, and without ``dp=client`` nothing changes.

    Raises:
        StateError: the reply does not contain the received model; nothing is sent.
    """
    config = merged_config(message)
    if CLIP not in config:
        return call_next(message, context)
    if message.metadata.message_type.partition(".")[0] != MessageType.TRAIN:
        return call_next(message, context)
    # Note the received model before the call, because later mods replace it in the
    # message by the whole model.
    key, received = model_record(message)
    before = views(ArrayRecord(dict(received)))
    reply = call_next(message, context)
    if reply.has_content():
        records = of_kind(reply.content, ArrayRecord)
        if key not in records:
            raise StateError(
                f"clipped_update: the reply has no ArrayRecord '{key}'; nothing is sent"
            )
        state = views(records[key])
        for name, array in state.items():
            if name not in before or array.shape != before[name].shape:
                raise StateError(
                    f"clipped_update: the reply's entry '{name}' was not received in"
                    " this shape; nothing is sent"
                )
        # Use only the shared entries, because local state does not leave the client.
        sent = {name: before[name] for name in state}
        # The update that dp bounds is the difference between the new and the received
        # values of these entries.
        coordinates = Coordinates(sent, split_state(before))
        update, _ = clipped(coordinates.update(state), float(config[CLIP]))
        reply.content[key] = to_record(coordinates.state(update, 0.0))
    return reply
