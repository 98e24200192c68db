"""What a method keeps with the client, in Flower's ``Context.state``: versioned, and checked against the model.

A context lives as long as its node's process and its run. A ``StateFolder`` holds copies that outlive both.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context

from fedbn_flwr.batchnorm.averaging import Array, State
from fedbn_flwr.batchnorm.parts import Parts
from fedbn_flwr.client.state_folder import StateFolder
from fedbn_flwr.errors import StateError
from fedbn_flwr.messages.protocol import (
    BEGUN,
    FINGERPRINT,
    KEPT,
    KEPT_ABOUT,
    KEPT_BY_HOOKS,
    SERVER_ROUND,
    VERSION,
    Continuity,
    ReplyInfo,
)
from fedbn_flwr.messages.records import from_record, state_sha256, to_record

__all__ = ["LocalState"]

_VERSION = 1


class LocalState:
    """A client's own entries between rounds.

    Args:
        context: Flower's context of the node; None for a client that may not keep anything.
        parts: the split of the model's state.
        state: the model's state, tensors or arrays, of which only the shapes are looked at: kept entries must fit them.
    """

    def __init__(self, context: Context | None, parts: Parts, state: Mapping[str, Any]) -> None:
        self._context = context
        self._parts = parts
        self._folder: StateFolder | None = None
        self._fingerprint = parts.fingerprint({name: tuple(entry.shape) for name, entry in state.items()})

    def attach(self, root: Path, continuity: Continuity, partition_id: int) -> None:
        """Keep copies in the state folder ``root`` from now on; see ``StateFolder``."""
        self._folder = StateFolder(root, continuity, partition_id, self._fingerprint)

    def restore(self, told: str | None) -> None:
        """Restore the state that the server expects, where the context does not hold it.

        Args:
            told: its hash, "" for nothing kept in this run; None where the server leaves it to the client, which then
                goes on with what was kept last.

        Raises:
            StateError: what the server knows of is not here.
        """
        held = self.sha256()
        if (told is None and (held or self._folder is None)) or (told and told == held):
            return
        if self._folder is None:
            if told:
                raise StateError(self._lost(told, "no state folder (state-dir)"))
            return
        found = self._folder.newest() if told is None else self._folder.find(told)
        if told and found is None:
            raise StateError(self._lost(told, f"no good file with it in {self._folder.path}"))
        if self._context is not None:
            for key in (KEPT, KEPT_BY_HOOKS, KEPT_ABOUT):
                if key in self._context.state:
                    del self._context.state[key]
            for key, record in (found or {}).get("kept", {}).items():
                self._context.state[key] = to_record(record)
            if found:
                self._tell(int(found["round"]), begun=0)

    def save(self, server_round: int) -> None:
        """Write what is kept to the state folder, where there is one.

        Raises:
            StateError: it could not be written.
        """
        if self._folder is not None and (sha256 := self.sha256()):
            kept: dict[str, Any] = {key: dict(self._read(key)) for key in (KEPT, KEPT_BY_HOOKS)}
            self._folder.write({"sha256": sha256, "kept": {k: v for k, v in kept.items() if v}}, server_round)

    def load(self, names: Collection[str]) -> Mapping[str, Array]:
        """Return those of the entries ``names`` that are kept; empty before the first round.

        Raises:
            StateError: the entries were kept by another version or for another model.
        """
        kept = self._read(KEPT) if names else {}
        return {name: kept[name] for name in names if name in kept}

    def keep(self, entries: State, server_round: int) -> None:
        """Keep ``entries`` until the client's next round.

        Raises:
            StateError: there is no context to keep them in, or an entry is not finite.
        """
        self._write(KEPT, entries, server_round)

    def hook_state(self, hook: str) -> Mapping[str, Array]:
        """Return what a client hook kept in the client's last round; empty before. Raises as ``load``."""
        kept = self._read(KEPT_BY_HOOKS)
        return {name.removeprefix(f"{hook}/"): a for name, a in kept.items() if name.startswith(f"{hook}/")}

    def save_hook_state(self, kept: Mapping[str, State], server_round: int) -> None:
        """Keep what the client hooks want back in the client's next round, by hook. Raises as ``keep``."""
        entries = {f"{hook}/{name}": array for hook, state in kept.items() for name, array in state.items()}
        if entries:
            self._write(KEPT_BY_HOOKS, entries, server_round)

    def sha256(self) -> str:
        """Return the SHA-256 of what is kept, "" for nothing."""
        kept = {f"{key}/{name}": array for key in (KEPT, KEPT_BY_HOOKS) for name, array in self._read(key).items()}
        return state_sha256(kept) if kept else ""

    def reply_metadata(self, server_round: int) -> dict[str, str]:
        """Return what a reply tells of what is kept; nothing where nothing is kept."""
        began = self._begun(server_round) == server_round
        return ReplyInfo(local_sha256=self.sha256(), durable=self._folder is not None, began=began).write()

    def _read(self, key: str) -> Mapping[str, Array]:
        if self._context is None or key not in self._context.state:
            return {}
        about = self._context.state.config_records[KEPT_ABOUT]
        if about[VERSION] != _VERSION or about[FINGERPRINT] != self._fingerprint:
            raise StateError(
                f"what this client kept (version {about[VERSION]!s}, round {about[SERVER_ROUND]!s}) belongs to "
                f"another model: its names, layer types or shapes changed (first of ours: '{self._parts.names[0]}'). "
                "Start a new run, or give the model back."
            )
        return from_record(self._context.state.array_records[key])

    def _write(self, key: str, entries: State, server_round: int) -> None:
        if self._context is None:
            raise StateError(
                f"the strategy keeps {len(entries)} entries with the client, but this client has no Context. Pass "
                "context= from client_fn(context)."
            )
        # What diverged is not kept: the engine puts the context back, and the part of the round before stays.
        bad = [n for n, array in entries.items() if array.dtype.kind == "f" and not np.isfinite(array).all()]
        if bad:
            raise StateError(
                f"entry '{bad[0]}' is not finite after training ({len(bad)} such); not kept. Lower the rate."
            )
        begun = self._begun(server_round) if self.sha256() else server_round
        self._context.state[key] = to_record(entries)
        self._tell(server_round, begun)

    def _begun(self, server_round: int) -> int:
        """Return the round in which what is kept began where it was written in that round alone, else 0."""
        about: Any = self._context.state.get(KEPT_ABOUT, {}) if self._context is not None else {}
        return int(about.get(BEGUN, 0)) if about.get(SERVER_ROUND) == server_round else 0

    def _tell(self, server_round: int, begun: int) -> None:
        if self._context is not None:
            about: dict[str, int | str] = {VERSION: _VERSION, FINGERPRINT: self._fingerprint}
            self._context.state[KEPT_ABOUT] = ConfigRecord({**about, SERVER_ROUND: server_round, BEGUN: begun})

    @staticmethod
    def _lost(told: str, why: str) -> str:
        return (
            f"this client shall go on from the part it kept with SHA-256 {told[:12]}..., and has {why}: it is "
            "lost, and the server will let it begin again"
        )
