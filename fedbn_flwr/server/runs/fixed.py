"""The entries of the global model that do not change in a run."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import numpy as np
from flwr.app import ArrayRecord

from fedbn_flwr.messages.protocol import FIXED_ENTRIES
from fedbn_flwr.messages.records import select, state_sha256, views


@dataclass(frozen=True)
class Fixed:
    """The fixed entries as a value.

    Attributes:
        names: their names; empty without ``train_only``.
        record: their values.
        sha256: the hash of the values, "" without entries.
    """

    names: frozenset[str] = frozenset()
    record: ArrayRecord = field(default_factory=ArrayRecord)
    sha256: str = ""

    def of(self, arrays: ArrayRecord, names: frozenset[str]) -> Fixed:
        """Return the entries of a model, or this object if the values are equal."""
        if not names:
            return Fixed()
        record = select(arrays, names)
        before, now = views(self.record), views(record)
        # Hash only new values. A user's loop may send another model.
        if [*before] == [*now] and all(np.array_equal(before[n], now[n]) for n in now):
            return self
        return Fixed(names, record, state_sha256(now))

    def naming(self) -> dict[str, str]:
        """Return the config entries that name the entries to a client."""
        return {FIXED_ENTRIES: json.dumps([*self.record])}
