"""``masked_update``: a client's mod that masks its numbers, leaving only sums.

It answers the three queries of a round's masks, and masks the update and the tensors of
a synchronised step. ``privacy.masked_sums`` describes its messages, and
``privacy.masks`` its secrets. The secrets stay in ``Context.state``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp.typing import ClientAppCallable
from torch import Tensor

from fedbn_flwr.batchnorm.averaging import Array, State
from fedbn_flwr.batchnorm.check_state import check_state
from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.errors import MaskingError
from fedbn_flwr.messages.protocol import (
    APPLIED,
    EXCHANGE,
    INFO,
    LOCAL_BEGAN,
    LOCAL_HOME,
    LOCAL_SHA256,
    MASK_ANSWERED,
    MASK_EQUAL,
    MASK_KEYS,
    MASK_LOST,
    MASK_NUMBER,
    MASK_NUMBERS,
    MASK_PARTY,
    MASK_PRESENT,
    MASK_REPLY,
    MASK_SECRETS,
    MASK_SHARES,
    MASK_STAGE,
    MASK_THRESHOLD,
    MASK_TOTAL,
    MASK_WEIGHT,
    MASKED,
    METRICS,
    NUM_EXAMPLES,
    PARTITION_ID,
    SERVER_ROUND,
    STEP_MODEL,
    MessageConfig,
    merged_config,
    without_empty,
)
from fedbn_flwr.messages.records import model_record, of_kind, to_record, views
from fedbn_flwr.privacy.coordinates import CLIP, Coordinates
from fedbn_flwr.privacy.masks import Party, PublicKeys, about
from fedbn_flwr.privacy.ring import FixedPoint
from fedbn_flwr.transport import Reducer, wrap_reducers

_IN_THE_CLEAR = (APPLIED, LOCAL_SHA256, LOCAL_HOME, LOCAL_BEGAN, PARTITION_ID)


def masked_update(
    message: Message, context: Context, call_next: ClientAppCallable
) -> Message:
    """Return the app's reply with its update masked, if the server asks for it.

    This function is a Flower mod. It must be the first mod, so that it masks everything
    that leaves the client: ``ClientApp(mods=[masked_update, bn_mod])``. Only the mod
    ``packed`` may come before, because ``packed`` changes no value. Without
    ``masked-sums=true`` nothing changes. The number of examples, the names of the
    client hooks and the hashes are sent unmasked.

    Raises:
        MaskingError: the server's request would reveal more than a sum.
        DataError: a value is outside the range of masked numbers.
    """
    config = merged_config(message)
    if MASK_STAGE in config:
        return _answered(message, context, config)
    if MASK_PRESENT not in config:
        return call_next(message, context)
    party = _party(context, config)
    masking = _Masking(party, config, context)
    # Read the received model now. The update is the difference to this model, and later
    # mods replace it in the message by the whole model.
    key, before = _received(message, context)
    # FedTAN's channel sends tensors during the step instead of in the reply, so mask
    # these tensors when they are sent.
    with wrap_reducers(functools.partial(_MaskedReducer, masking)):
        reply = call_next(message, context)
    if reply.has_content():
        reply.content = _masked(reply.content, key, before, masking)
        _keep(context, party)
    return reply


class _Masking:
    """The masking of this client's numbers in a round."""

    def __init__(
        self, party: Party, config: Mapping[str, Any], context: Context
    ) -> None:
        self.config = config
        self.party = party
        self._context = context
        self.weight = float(config[MASK_WEIGHT])
        self.equal = bool(config[MASK_EQUAL])
        total = float(config[MASK_TOTAL])
        party.set_present(config[MASK_PRESENT], about(total, self.equal))
        self._point = FixedPoint(total)
        # Under dp=client a weight would reveal the number of a client's examples.
        # Otherwise ``check_weight`` compares the weight with that number.
        if self.equal != (CLIP in config) or (self.equal and self.weight != 1):
            raise MaskingError(
                "the server's weights do not fit its dp setting. With dp=client the"
                " server must clip updates and give all clients weight 1. Without it, the"
                " server must do neither. The server has another version of this package,"
                " or other code changes its messages. The client has sent no update."
            )

    def exchange(self, tag: str, array: Array) -> Array:
        """Return the masked tensor of an exchange."""
        vector = self._point.vector({tag: array}, self.weight)
        masked = self.party.exchange(tag, vector).reshape(array.shape)
        # Save the party before the value is sent, because the training may fail later
        # and be requested again.
        _keep(self._context, self.party)
        return masked

    def update(self, state: State, before: State) -> Array:
        """Return the masked update of the shared entries."""
        local = MessageConfig.read(self.config).local_entries
        sent = {name: array for name, array in before.items() if name not in local}
        parts = split_state(sent)
        check_state(state, sent, parts)
        values = Coordinates(sent, parts, scale=1.0).update(state)
        return self.party.masked(self._point.vector(values, self.weight))

    def check_weight(self, counts: Sequence[int]) -> None:
        """Refuse a weight from the server that is not the number of examples.

        Raises:
            MaskingError: the numbers differ.
        """
        if not self.equal and [self.weight] != counts:
            raise MaskingError(
                f"the server gives this client the weight {self.weight:g}, but it has"
                f" trained on {counts} examples"
            )


class _MaskedReducer:
    """A reducer that sends masked tensors through another reducer."""

    def __init__(self, masking: _Masking, reducer: Reducer) -> None:
        self._masking = masking
        self._reducer = reducer

    def begin(self) -> int:
        return self._reducer.begin()

    def reduce(self, tag: str, tensor: Tensor) -> Tensor:
        masked = self._masking.exchange(tag, tensor.detach().cpu().numpy())
        return self._reducer.reduce(tag, torch.from_numpy(masked))

    def close(self) -> None:
        self._reducer.close()


def _received(message: Message, context: Context) -> tuple[str, State]:
    """Return the key of the model's record, and the round's model.

    If the step uses the transport "messages", only its first message has the model.
    """
    key, record = model_record(message)
    if not record:
        kept = of_kind(context.state, ArrayRecord)
        record = kept.get(STEP_MODEL, ArrayRecord())
    return key, views(ArrayRecord(dict(record)))


def _masked(
    content: RecordDict, key: str, before: State, masking: _Masking
) -> RecordDict:
    """Return the part of a reply that the server may see."""
    records, metrics = of_kind(content, ArrayRecord), of_kind(content, MetricRecord)
    # Start with an empty record, and add only values that reveal no more than a sum: an
    # app may have its own records and metrics.
    seen: RecordDict = RecordDict({key: ArrayRecord()})
    if EXCHANGE in records:
        seen[EXCHANGE] = to_record(
            {
                str(tag): masking.exchange(tag, array)
                for tag, array in views(records[EXCHANGE]).items()
            }
        )
    counts = []
    for record in metrics.values():
        if NUM_EXAMPLES in record:
            counts.append(int(record[NUM_EXAMPLES]))  # type: ignore[arg-type]
    if records.get(key):
        masking.check_weight(counts)
        update = masking.update(views(records[key]), before)
        seen[key] = to_record({str(MASKED): update})
    if counts:
        seen[METRICS] = MetricRecord({NUM_EXAMPLES: counts[0]})
    info: Mapping[str, Any] = of_kind(content, ConfigRecord).get(INFO, {})
    in_the_clear: dict[str, Any] = {
        name: info[name] for name in _IN_THE_CLEAR if name in info
    }
    seen[INFO] = ConfigRecord(in_the_clear)
    return seen


def _answered(message: Message, context: Context, config: Mapping[str, Any]) -> Message:
    """Return the answer to a query of the masks, by its stage (``privacy.masks``)."""
    stage = config[MASK_STAGE]
    answer: dict[str, Any]
    if stage == "keys":
        # Make new keys in each round, because the key of a lost client may be revealed.
        party = Party.new(int(config[SERVER_ROUND]))
        answer = {MASK_KEYS: party.publics}
    elif stage == "shares":
        party = _party(context, config)
        # The list of keys has two keys for each client of the round.
        keys = list(config[MASK_KEYS])
        pairs = map(PublicKeys, keys[::2], keys[1::2])
        encrypted = party.shares(
            int(config[MASK_NUMBER]),
            dict(zip(config[MASK_NUMBERS], pairs, strict=True)),
            int(config[MASK_THRESHOLD]),
        )
        answer = {MASK_NUMBERS: list(encrypted), MASK_SHARES: list(encrypted.values())}
    else:
        party = _party(context, config)
        numbers, shares = config.get(MASK_NUMBERS, ()), config.get(MASK_SHARES, ())
        revealed = party.reveal(
            config.get(MASK_ANSWERED, []),
            config.get(MASK_LOST, []),
            dict(zip(numbers, shares, strict=True)),
        )
        answer = {MASK_NUMBERS: list(revealed), MASK_SHARES: list(revealed.values())}
    # Save the party with its stage, because a repeated query must not reveal the other
    # share.
    _keep(context, party)
    content: RecordDict = RecordDict({MASK_REPLY: ConfigRecord(without_empty(answer))})
    return Message(content, reply_to=message)


def _party(context: Context, config: Mapping[str, Any]) -> Party:
    """Return this client's secrets of the round.

    Raises:
        MaskingError: the client has none.
    """
    kept: Mapping[str, Any] = of_kind(context.state, ConfigRecord).get(MASK_PARTY, {})
    party = Party.load(kept[MASK_SECRETS]) if MASK_SECRETS in kept else None
    if party is None or party.server_round != config[SERVER_ROUND]:
        raise MaskingError(
            f"this client has no keys for the masks of round {config[SERVER_ROUND]}:"
            " its node was probably restarted in this round. It takes part again in"
            " the next round"
        )
    return party


def _keep(context: Context, party: Party) -> None:
    context.state[MASK_PARTY] = ConfigRecord({MASK_SECRETS: party.dump()})
