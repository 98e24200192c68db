"""The stores of a client's kept states: bytes under a round and a hash.

A name is ``ROUND.SHA256``, so the names are in the order of the rounds. The states are
in Flower's ``Context.state``, or in the node's state folder, which outlasts the run and
the process of the node.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context

from fedbn_flwr.atomic_file import remove_leftovers, write_atomically
from fedbn_flwr.checked_file import decode_checked, encode_checked, read_checked
from fedbn_flwr.compat.flower import filled, values_of
from fedbn_flwr.errors import StateError
from fedbn_flwr.messages.protocol import KEPT_STATES

_NAME = re.compile(r"\d{6,}\.[0-9a-f]{64}")
_SUFFIX = ".safetensors"


def hash_of(name: str) -> str:
    """Return the hash in the name of a state."""
    return name.partition(".")[2]


class Store(ABC):
    """The kept states of one client.

    Attributes:
        lacks: why a state may be absent, for messages.
        durable: whether the states outlast the process of the node.
    """

    lacks: str
    durable: bool

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names, oldest round first."""

    @abstractmethod
    def read(self, name: str) -> dict[str, Any]:
        """Return the state under a name.

        Raises:
            StateError: the state is damaged.
        """

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write the bytes of a state under a name.

        Raises:
            StateError: they cannot be written; all other states are still there.
        """

    @abstractmethod
    def keep_only(self, names: Collection[str]) -> None:
        """Remove all other names."""

    def find(self, sha256: str) -> str | None:
        """Return the newest name with this hash, or None."""
        found = [name for name in self.names() if hash_of(name) == sha256]
        return found[-1] if found else None

    def undo_after(self, name: str | None) -> None:
        """Remove the states after ``name``; None removes all."""
        self.keep_only([other for other in self.names() if name and other <= name])

    def put(
        self,
        content: Mapping[str, Any],
        server_round: int,
        needed: Collection[int] = (),
    ) -> str:
        """Write the state after a round, return its hash, and remove other states.

        Args:
            content: the state.
            server_round: the round.
            needed: earlier rounds; the state after each of them is not removed.
        """
        data, sha256 = encode_checked(content)
        new = f"{server_round:06d}.{sha256}"
        # Write first, because a full disk must not destroy the earlier states.
        self.write(new, data)
        stay = [new]
        for last in needed:
            # Other states of this round or a later round belong to undone rounds.
            end = f"{min(last + 1, server_round):06d}"
            stay += [name for name in self.names() if name < end][-1:]
        self.keep_only(stay)
        return sha256


class Memory(Store):
    """States in Flower's ``Context.state``; they end with the process of the node."""

    lacks = "no state folder (state-dir)"
    durable = False

    def __init__(self, context: Context | None) -> None:
        self._context = context

    def names(self) -> list[str]:
        """Return the names, oldest round first."""
        return sorted(self._entries())

    def read(self, name: str) -> dict[str, Any]:
        """Return the state under a name."""
        return decode_checked(self._entries()[name])

    def write(self, name: str, data: bytes) -> None:
        """Write the bytes of a state under a name."""
        if self._context is None:
            raise StateError(
                "the strategy keeps entries with the client, but this client has no"
                " Context. Pass context= from client_fn(context)."
            )
        self._replace({**self._entries(), name: data})

    def keep_only(self, names: Collection[str]) -> None:
        """Remove all other names."""
        entries = self._entries()
        if not entries.keys() <= set(names):
            self._replace({name: entries[name] for name in names})

    @property
    def _records(self) -> dict[str, Any]:
        # Read ``Context.state`` each time, because a mod or an app may replace it.
        return {} if self._context is None else values_of(self._context.state)

    def _entries(self) -> dict[str, bytes]:
        return (
            values_of(self._records[KEPT_STATES])
            if KEPT_STATES in self._records
            else {}
        )

    def _replace(self, entries: dict[str, bytes]) -> None:
        self._records[KEPT_STATES] = filled(ConfigRecord, entries)


class Folder(Store):
    """States in the files ``STATE_DIR/RUN/partition-P/ROUND.SHA256.safetensors``."""

    durable = True

    def __init__(self, root: Path, run: str, partition_id: int) -> None:
        self._path = root / run / f"partition-{partition_id}"
        self.lacks = f"no file with it in {self._path}"

    def names(self) -> list[str]:
        """Return the names, oldest round first.

        Raises:
            StateError: the folder has a file of another version.
        """
        names = []
        for path in self._path.glob(f"*{_SUFFIX}"):
            if not _NAME.fullmatch(path.stem):
                raise StateError(
                    f"{path} was written by another version of the package: finish the"
                    " run with that version, or start a new run"
                )
            names.append(path.stem)
        return sorted(names)

    def read(self, name: str) -> dict[str, Any]:
        """Return the state under a name."""
        return read_checked(self._path / f"{name}{_SUFFIX}")

    def write(self, name: str, data: bytes) -> None:
        """Write the bytes of a state under a name."""
        try:
            self._path.mkdir(parents=True, exist_ok=True, mode=0o700)
            remove_leftovers(self._path)
            write_atomically(self._path / f"{name}{_SUFFIX}", data, mode=0o600)
        except OSError as error:
            raise StateError(
                f"state folder {self._path} cannot be written: {error}. The state of"
                " earlier rounds is kept. Free disk space, or set another folder"
                " (state-dir)."
            ) from error

    def keep_only(self, names: Collection[str]) -> None:
        """Remove all other names."""
        for name in set(self.names()).difference(names):
            (self._path / f"{name}{_SUFFIX}").unlink(missing_ok=True)
