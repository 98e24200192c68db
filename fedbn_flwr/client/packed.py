"""The mod ``packed`` lets an app receive and send its arrays in one piece."""

from __future__ import annotations

import logging

from flwr.app import Context, Message, MessageType
from flwr.clientapp.typing import ClientAppCallable

from fedbn_flwr.compat.flower import earlier_mods
from fedbn_flwr.messages.packing import FORMAT, in_one_piece, is_packed, unpacked
from fedbn_flwr.messages.protocol import PACKS, add_info

logger = logging.getLogger("flwr")


def packed(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Return the app's reply, with arrays in one piece if the message has this form.

    This function is a Flower mod. Over a network, each array costs the server as much
    time as two megabytes of data, even if the array is small (docs/performance.md).
    With this mod the server sends and receives all arrays of a message as one array.
    The app and its other mods see ordinary records, with the same bits.

    It must be the first mod of the app: ``ClientApp(mods=[packed, bn_mod])``.
    On a SuperNode, ``client_app`` already includes it. In its answer to the strategies'
    query (``answer_query``), the app reports that it reads such messages. Arrays are
    sent one by one without this answer, in simulation, in process, and in Flower's own
    loops.

    Raises:
        PackingError: the arrays of the message do not fit their manifest.
    """
    if is_packed(message.content):
        message.content = unpacked(message.content)
        reply = call_next(message, context)
        if reply.has_content():
            reply.content = in_one_piece(reply.content)
        return reply
    reply = call_next(message, context)
    # This answer to the server's query informs the server that it may send all arrays
    # in one piece.
    is_answer = message.metadata.message_type == MessageType.QUERY
    # Earlier mods do not read arrays in one piece.
    if is_answer and reply.has_content() and not earlier_mods():
        add_info(reply, {PACKS: FORMAT})
    return reply
