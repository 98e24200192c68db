"""The codec between the strategies' messages and a NumPyClient's arguments: a list of
arrays, names in a config.

``config["fedbn-flwr.array-names"]`` (a JSON list) holds the array names. Entries of
further ArrayRecords follow the model's, named ``record/entry``. A client that returns
other arrays than it received names them in its metrics in the same way.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedbn_flwr.batchnorm.averaging import Array
from fedbn_flwr.compat.flower import answer, filled
from fedbn_flwr.errors import StateError
from fedbn_flwr.messages.kinds import of_kind
from fedbn_flwr.messages.protocol import (
    ARRAY_NAMES,
    INFO,
    LOSS,
    METRICS,
    NUM_EXAMPLES,
    merged_config,
)
from fedbn_flwr.messages.records import decode, to_record, view

__all__ = [
    "Config",
    "checked",
    "describe",
    "open_message",
    "reply_to_evaluate",
    "reply_to_fit",
    "to_records",
]

Config = dict[str, Any]


def open_message(message: Message, copy: bool = True) -> tuple[list[Array], Config]:
    """Return arrays and config of a message for a NumPyClient; the first ArrayRecord is
    the model's.

    ``copy=False`` gives read-only views of the message, for a client that only reads
    them.
    """
    read = decode if copy else view
    arrays = [
        read(array)
        for record in of_kind(message.content, ArrayRecord).values()
        for array in record.values()
    ]
    return arrays, {**merged_config(message), ARRAY_NAMES: json.dumps(_names(message))}


def checked(returned: Any, of: str) -> tuple[Any, float, Config]:
    """Return what a client's method ``of`` returned: arrays or a loss, the number of
    examples, and metrics.

    Raises:
        TypeError: it returned something else.
    """
    first = "loss" if of == "evaluate" else "arrays"
    wanted = f"{of} must return ({first}, num_examples, metrics)"
    if not isinstance(returned, (tuple, list)) or len(returned) != 3:
        what = (
            f"{len(returned)} values"
            if isinstance(returned, (tuple, list))
            else type(returned).__name__
        )
        raise TypeError(f"{wanted}; it returned {what}")
    values, num_examples, metrics = returned
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"{wanted}; its metrics are no dict, but {type(metrics).__name__}"
        )
    # of NumPy or torch
    count = num_examples.tolist() if hasattr(num_examples, "tolist") else num_examples
    if not isinstance(count, (int, float)):
        raise TypeError(f"{wanted}; its num_examples={num_examples!r:.80} is no number")
    return values, count, dict(metrics)


def reply_to_fit(
    message: Message,
    arrays: Sequence[Array],
    num_examples: float,
    metrics: Config,
    of: str = "fit",
) -> Message:
    """Return the reply to a training message, given the result of ``fit`` or of the
    method ``of``.

    Raises:
        StateError: more or fewer arrays than names, or a metric cannot be sent.
    """
    metrics = dict(metrics)
    names = (
        json.loads(str(metrics.pop(ARRAY_NAMES)))
        if ARRAY_NAMES in metrics
        else _names(message)
    )
    if len(names) != len(arrays):
        raise StateError(
            f"{of} returned {len(arrays)} arrays for {len(names)} names; if they differ"
            f" from those received, return their names in metrics['{ARRAY_NAMES}'] (a"
            " JSON list)"
        )
    first, *others = of_kind(message.content, ArrayRecord)
    sent = to_records(first, dict(zip(names, arrays, strict=True)), others)
    # the message's order
    records: dict[str, Any] = {
        key: sent.get(key) or ArrayRecord() for key in (first, *others)
    }
    records |= _metrics(num_examples, metrics, of)
    return answer(message, filled(RecordDict, records))


def reply_to_evaluate(
    message: Message, loss: float, num_examples: float, metrics: Config
) -> Message:
    """Return the reply to an evaluation message, given the result of ``evaluate``.

    Raises:
        StateError: a metric cannot be sent.
    """
    # in front, and whatever the client's metrics call a loss
    metrics = {LOSS: loss, **metrics} | {LOSS: loss}
    return answer(
        message, filled(RecordDict, _metrics(num_examples, metrics, "evaluate"))
    )


def describe(message: Message, properties: Config) -> Message:
    """Return the reply to the strategies' query: the numbers that ``get_properties``
    returned.

    Raises:
        StateError: a value cannot be sent.
    """
    numbers, _ = _split(properties, "get_properties")
    return answer(message, filled(RecordDict, {METRICS: filled(MetricRecord, numbers)}))


def to_records(
    first: str, entries: Mapping[str, Array], further: Collection[str]
) -> dict[str, ArrayRecord]:
    """Return the records of named arrays: the model's, named ``first``, and those in
    ``further``, of ``record/entry``.

    A layer's name may have a slash, too: ``fc/1.weight`` is an entry of the model,
    unless there is a record ``fc``.
    """
    records: dict[str, dict[str, Array]] = {first: {}}
    for name, array in entries.items():
        record = next((key for key in further if name.startswith(f"{key}/")), None)
        if record is None:
            records[first][name] = array
        else:
            records.setdefault(record, {})[name.removeprefix(f"{record}/")] = array
    return {key: to_record(record) for key, record in records.items()}


def _names(message: Message) -> list[str]:
    names: list[str] = []
    for index, (key, record) in enumerate(
        of_kind(message.content, ArrayRecord).items()
    ):
        names += [f"{key}/{name}" if index else name for name in record]
    return names


def _metrics(
    num_examples: float, metrics: Config, of: str
) -> dict[str, MetricRecord | ConfigRecord]:
    """Return what the method ``of`` returned: numbers in a MetricRecord, text and bytes
    in a ConfigRecord.
    """
    numbers, texts = _split(metrics, of)
    numbers = {NUM_EXAMPLES: num_examples, **numbers} | {NUM_EXAMPLES: num_examples}
    records: dict[str, MetricRecord | ConfigRecord] = {
        METRICS: filled(MetricRecord, numbers)
    }
    if texts:
        records[INFO] = filled(ConfigRecord, texts)
    return records


def _split(values: Config, of: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the numbers and lists of numbers, and text and bytes; those of NumPy and
    torch become Python's.

    Raises:
        StateError: a value is neither.
    """
    numbers: dict[str, Any] = {}
    texts: dict[str, Any] = {}
    for key, value in values.items():
        if not isinstance(key, str):
            raise StateError(
                f"{of} returned a value with the key {key!r}: the keys of metrics are"
                " texts"
            )
        # a scalar or an array of NumPy or torch; a bool is a number, too
        if hasattr(value, "tolist"):
            value = value.tolist()
        if isinstance(value, (str, bytes)):
            texts[key] = value
        elif isinstance(value, (int, float)):
            numbers[key] = +value  # +True is 1
        elif isinstance(value, (list, tuple)) and all(
            isinstance(number, (int, float)) for number in value
        ):
            # a MetricRecord mixes none
            kind = float if any(isinstance(number, float) for number in value) else int
            numbers[key] = [kind(number) for number in value]
        elif value is not None:
            raise StateError(
                f"{of} returned {key}={value!r:.80}, a {type(value).__name__}: only"
                " numbers, lists of numbers, text and bytes can be sent"
            )
    return numbers, texts
