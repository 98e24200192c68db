"""Conversion between messages and a NumPyClient's arguments and results.

A NumPyClient takes a list of arrays and a config, so the config contains the names of
the arrays: ``config["fedbn-flwr.array-names"]`` (a JSON list). Entries of additional
ArrayRecords follow the entries of the model and are named ``record/entry``. A client
that returns other arrays than it received returns a JSON list of their names in its
metrics.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedbn_flwr.batchnorm.array_types import Array
from fedbn_flwr.compat.flower import filled, values_of
from fedbn_flwr.errors import StateError
from fedbn_flwr.messages.protocol import (
    ARRAY_NAMES,
    INFO,
    LOSS,
    METRICS,
    NUM_EXAMPLES,
    SITE_NAME,
    add_info,
    merged_config,
)
from fedbn_flwr.messages.records import decode, of_kind, to_record, view

Config = dict[str, Any]


def open_message(message: Message, copy: bool = True) -> tuple[list[Array], Config]:
    """Return the arrays and the config of a message, with the model's arrays first.

    ``copy=False`` returns read-only views of the message, for a client that does not
    write to them.
    """
    read = decode if copy else view
    named = _named(message)
    names = json.dumps([name for name, _ in named])
    config = {**merged_config(message), ARRAY_NAMES: names}
    return [read(array) for _, array in named], config


def checked(returned: Any, of: str) -> tuple[Any, float, Config]:
    """Return the result of a client's method ``of``, with Python's numbers.

    Raises:
        TypeError: the number of examples is not a number.
    """
    values, num_examples, metrics = returned
    # num_examples may come from NumPy or torch
    count = num_examples.tolist() if hasattr(num_examples, "tolist") else num_examples
    if not isinstance(count, (int, float)):
        raise TypeError(
            f"{of} returned num_examples={num_examples!r:.80}, which is not a number"
        )
    return values, count, dict(metrics)


def reply_to_fit(
    message: Message,
    arrays: Sequence[Array],
    num_examples: float,
    metrics: Config,
    of: str = "fit",
) -> Message:
    """Return the reply to a training message from the result of the method ``of``.

    Raises:
        StateError: more or fewer arrays than names, or a metric cannot be sent.
    """
    # A client that returns other arrays than it received also returns their names.
    metrics = dict(metrics)
    if ARRAY_NAMES in metrics:
        names = json.loads(str(metrics.pop(ARRAY_NAMES)))
    else:
        names = [name for name, _ in _named(message)]
    if len(names) != len(arrays):
        raise StateError(
            f"{of} returned {len(arrays)} arrays for {len(names)} names. To return"
            " other arrays than the received arrays, return their names in"
            f" metrics['{ARRAY_NAMES}'] (a JSON list)."
        )

    # Return the records of the message in its order, even records that have no arrays
    # now.
    first, *others = of_kind(message.content, ArrayRecord)
    sent = to_records(first, dict(zip(names, arrays, strict=True)), others)
    records: dict[str, Any] = {}
    for key in (first, *others):
        records[key] = sent.get(key) or ArrayRecord()
    records |= _metrics(num_examples, metrics, of)
    return Message(filled(RecordDict, records), reply_to=message)


def reply_to_evaluate(
    message: Message, loss: float, num_examples: float, metrics: Config
) -> Message:
    """Return the reply to an evaluation message from the result of ``evaluate``.

    Raises:
        StateError: a metric cannot be sent.
    """
    # put the loss first, and let it replace a metric of that name
    metrics = {LOSS: loss, **metrics} | {LOSS: loss}
    records = _metrics(num_examples, metrics, "evaluate")
    return Message(filled(RecordDict, records), reply_to=message)


def describe(message: Message, properties: Config) -> Message:
    """Return the reply to the strategies' query, with values of ``get_properties``.

    The reply has the numbers among the values, and the name of the site.

    Raises:
        StateError: a value cannot be sent.
    """
    numbers, texts = _split(properties, "get_properties")
    metrics = filled(MetricRecord, numbers)
    reply = Message(filled(RecordDict, {METRICS: metrics}), reply_to=message)
    if texts.get(SITE_NAME):
        add_info(reply, {SITE_NAME: texts[SITE_NAME]})
    return reply


def to_records(
    first: str, entries: Mapping[str, Array], further: Collection[str]
) -> dict[str, ArrayRecord]:
    """Return the records of named arrays.

    ``first`` is the name of the model's record, ``further`` has the names of the
    others. ``record/entry`` is an entry of another record. The name of a layer may have
    a slash as well: ``fc/1.weight`` is an entry of the model, unless there is a record
    ``fc``.
    """
    records: dict[str, dict[str, Array]] = {first: {}}
    for name, array in entries.items():
        for key in further:
            if name.startswith(f"{key}/"):
                records.setdefault(key, {})[name.removeprefix(f"{key}/")] = array
                break
        else:
            records[first][name] = array
    return {key: to_record(record) for key, record in records.items()}


def _named(message: Message) -> list[tuple[str, FlowerArray]]:
    """Return the arrays of a message with their names, in the form of ``to_records``."""
    named = []
    for index, (key, record) in enumerate(
        of_kind(message.content, ArrayRecord).items()
    ):
        prefix = f"{key}/" if index else ""
        named += [(prefix + name, array) for name, array in values_of(record).items()]
    return named


def _metrics(
    num_examples: float, metrics: Config, of: str
) -> dict[str, MetricRecord | ConfigRecord]:
    """Return the records for the numbers and texts returned by ``of``."""
    numbers, texts = _split(metrics, of)
    # put num-examples first, and let it replace a metric of that name
    numbers = {NUM_EXAMPLES: num_examples, **numbers} | {NUM_EXAMPLES: num_examples}
    records: dict[str, MetricRecord | ConfigRecord] = {}
    records[METRICS] = filled(MetricRecord, numbers)
    if texts:
        records[INFO] = filled(ConfigRecord, texts)
    return records


def _split(values: Config, of: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the numbers and lists of numbers, and the texts and bytes.

    All values are Python objects.

    Raises:
        StateError: a value has another type.
    """
    numbers: dict[str, Any] = {}
    texts: dict[str, Any] = {}
    for key, value in values.items():
        if not isinstance(key, str):
            raise StateError(
                f"{of} returned a value with the key {key!r}; the keys of metrics must"
                " be texts"
            )
        # The value is a scalar or an array of NumPy or torch. A bool counts as a
        # number.
        if hasattr(value, "tolist"):
            value = value.tolist()
        if isinstance(value, (str, bytes)):
            texts[key] = value
        elif isinstance(value, (int, float)):
            numbers[key] = +value  # +True is 1
        elif isinstance(value, (list, tuple)) and all(
            isinstance(number, (int, float)) for number in value
        ):
            # a MetricRecord refuses lists that mix int and float
            if any(isinstance(number, float) for number in value):
                numbers[key] = [float(number) for number in value]
            else:
                numbers[key] = [int(number) for number in value]
        elif value is not None:
            raise StateError(
                f"{of} returned {key}={value!r:.80}, a {type(value).__name__}. Only"
                " numbers, lists of numbers, text and bytes can be sent."
            )
    return numbers, texts
