"""``clipped_update``: the mod of a client that clips its own update, for differential
privacy with ``dp=client``.
"""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, MessageType
from flwr.clientapp.typing import ClientAppCallable

from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.errors import StateError
from fedbn_flwr.messages.protocol import merged_config
from fedbn_flwr.messages.records import of_kind, to_record, views
from fedbn_flwr.privacy.coordinates import CLIP, Coordinates, clipped

__all__ = ["clipped_update"]


def clipped_update(
    message: Message, context: Context, call_next: ClientAppCallable
) -> Message:
    """Return the app's reply with its update clipped as the server asks: a Flower mod.

    It must be the first mod, so that it sees what leaves the client:
    ``ClientApp(mods=[clipped_update, bn_mod])``. Before it stands ``packed`` alone,
    which changes no value. Counters leave as they came, since they tell the number of
    batches. Without ``dp=client`` nothing changes. Metrics leave as they are.

    Raises:
        StateError: the reply does not hold the model as it was received; nothing is
            sent.
    """
    config = merged_config(message)
    if CLIP not in config:
        return call_next(message, context)
    if message.metadata.message_type.partition(".")[0] != MessageType.TRAIN:
        return call_next(message, context)
    # Noted before the call: mods further in put the whole model in its place.
    key, received = next(iter(of_kind(message.content, ArrayRecord).items()))
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
                    f"clipped_update: the reply's entry '{name}' is not one that was"
                    " received; nothing is sent"
                )
        # The shared entries: what stays with the client does not leave it.
        sent = {name: before[name] for name in state}
        # Their difference to what was received is the update that dp bounds.
        coordinates = Coordinates(sent, split_state(sent))
        update, _ = clipped(coordinates.update(state), float(config[CLIP]))
        reply.content[key] = to_record(coordinates.state(update, 0.0))
    return reply
