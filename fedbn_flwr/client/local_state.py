"""The state that a method keeps with the client, in Flower's ``Context.state``:
versioned and checked.

A context exists as long as its node's process and its run. The copies in a
``StateFolder`` remain after both.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, RecordDict

from fedbn_flwr.batchnorm.averaging import Array, State
from fedbn_flwr.batchnorm.parts import Parts
from fedbn_flwr.client.state_folder import StateFolder
from fedbn_flwr.compat.flower import filled
from fedbn_flwr.errors import NOT_FINITE, StateError, coded
from fedbn_flwr.messages.protocol import (
    BEGUN,
    FINGERPRINT,
    KEPT,
    KEPT_ABOUT,
    KEPT_BEFORE,
    KEPT_BY_HOOKS,
    LOCAL_SHA256,
    SERVER_ROUND,
    START_ID,
    VERSION,
    Continuity,
    ReplyInfo,
)
from fedbn_flwr.messages.records import from_record, state_sha256, to_record, views

__all__ = ["LocalState"]

_VERSION = 1
# before the round
_ASIDE = {key: f"{KEPT_BEFORE}/{key}" for key in (KEPT, KEPT_BY_HOOKS, KEPT_ABOUT)}


class LocalState:
    """A client's own entries between rounds.

    Args:
        context: Flower's context of the node; None for a client that cannot keep
            entries.
        parts: the split of the model's state.
        fingerprint: that of the split with the model's shapes, which kept entries must
            fit.
        start_id: id of the strategy's start: ``restore`` removes what was kept in
            another. None = it does not.
    """

    def __init__(
        self,
        context: Context | None,
        parts: Parts,
        fingerprint: str,
        start_id: str | None = None,
    ) -> None:
        self._context = context
        self._without_context = RecordDict()
        self._parts = parts
        self._folder: StateFolder | None = None
        self._start_id = start_id
        self._fingerprint = fingerprint

    @property
    def _state(self) -> RecordDict:
        """``Context.state``; not stored, because a mod or an app may replace it."""
        return self._without_context if self._context is None else self._context.state

    def attach(self, root: Path, continuity: Continuity, partition_id: int) -> None:
        """Write copies to the state folder ``root`` from now on; see ``StateFolder``."""
        self._folder = StateFolder(root, continuity, partition_id, self._fingerprint)

    def restore(self, expected: str | None, used: str | None = None) -> None:
        """Restore the state that the server expects, and undo a round whose reply it
        has not used.

        Args:
            expected: the hash of the state, "" for no state in this run; None = the
                client takes its newest state.
            used: the hash of the state after the last round whose reply the server
                used, "" if there was none; None = nothing is undone. A client that does
                not have this state begins anew, and its reply says so.

        Raises:
            StateError: the client does not have the expected state.
        """
        if (
            self._start_id is not None
            and self._holds()
            and self._about().get(START_ID) != self._start_id
        ):
            self._replace(None)
        self._restore(expected)
        if used is None:
            return
        if used != self.sha256():
            self._replace(self._earlier(used))
        if self._folder is None:
            self._set_aside()

    def _restore(self, expected: str | None) -> None:
        if expected is None and (self._folder is None or self._holds()):
            return
        if expected and expected == self.sha256():
            return
        if self._folder is None:
            if expected:
                raise StateError(self._lost(expected, "no state folder (state-dir)"))
            return
        content = (
            self._folder.newest() if expected is None else self._folder.find(expected)
        )
        if expected and content is None:
            raise StateError(
                self._lost(expected, f"no good file with it in {self._folder.path}")
            )
        self._replace(content)

    def _earlier(self, used: str) -> dict[str, Any] | None:
        """Return the kept state ``used``, from the state folder or as it was set aside;
        None if it is gone.
        """
        if self._folder is not None:
            content = self._folder.find(used)  # and removes the files of what is undone
            # of an earlier run: the hooks' entries belong to that run's server
            if content and not used:
                content["kept"].pop(KEPT_BY_HOOKS, None)
            return content
        aside: dict[str, Any] = {
            key: self._state[name]
            for key, name in _ASIDE.items()
            if name in self._state
        }
        about = aside.pop(KEPT_ABOUT, {})
        if not used or about.get(LOCAL_SHA256) != used:
            return None
        return {
            "round": about[SERVER_ROUND],
            "kept": {key: from_record(record) for key, record in aside.items()},
        }

    def _set_aside(self) -> None:
        """Name the kept records once more, so that the coming round can be undone; they
        share their arrays.
        """
        self.sha256()  # the copy has it
        for key, name in _ASIDE.items():
            self._state.pop(name, None)
            if key in self._state:
                self._state[name] = self._state[key]

    def save(self, server_round: int) -> None:
        """Write the kept state to the state folder, if there is one.

        Raises:
            StateError: the folder cannot be written.
        """
        if self._folder is not None and (sha256 := self.sha256()):
            kept: dict[str, Any] = {
                key: dict(self._read(key)) for key in (KEPT, KEPT_BY_HOOKS)
            }
            content: dict[str, Any] = {
                "sha256": sha256,
                "kept": {k: v for k, v in kept.items() if v},
            }
            self._folder.write(content, server_round)

    def load(self, names: Collection[str]) -> Mapping[str, Array]:
        """Return the kept entries among ``names``; empty before the first round.

        Raises:
            StateError: the entries belong to another version or another model.
        """
        kept = self._read(KEPT) if names else {}
        return {name: kept[name] for name in names if name in kept}

    def keep(self, entries: State, server_round: int) -> None:
        """Keep ``entries`` until the client's next round.

        Raises:
            StateError: there is no context, or an entry is not finite.
        """
        self._write(KEPT, entries, server_round)

    def hook_state(self, hook: str) -> Mapping[str, Array]:
        """Return the entries that a client hook kept in the client's last round, else
        none. Raises as ``load``.
        """
        kept = self._read(KEPT_BY_HOOKS)
        return {
            name.removeprefix(f"{hook}/"): a.copy()
            for name, a in kept.items()
            if name.startswith(f"{hook}/")
        }

    def save_hook_state(self, kept: Mapping[str, State], server_round: int) -> None:
        """Keep the entries of the client hooks, by hook, until the client's next round.
        Raises as ``keep``.
        """
        entries = {
            f"{hook}/{name}": array
            for hook, state in kept.items()
            for name, array in state.items()
        }
        if entries:
            self._write(KEPT_BY_HOOKS, entries, server_round)

    def sha256(self) -> str:
        """Return the SHA-256 of the kept state; "" if nothing is kept."""
        about = self._about()
        if not about:
            return ""
        self._check(about)
        known = about.get(LOCAL_SHA256)
        if known is None:
            kept = {
                f"{key}/{name}": array
                for key in (KEPT, KEPT_BY_HOOKS)
                for name, array in self._read(key).items()
            }
            self._records[KEPT_ABOUT][LOCAL_SHA256] = known = state_sha256(kept)
        return str(known)

    def reply_metadata(self, server_round: int) -> dict[str, str]:
        """Return the reply's entries about the kept state; empty if nothing is kept."""
        began = _begun(self._about(), server_round) == server_round
        return ReplyInfo(
            local_sha256=self.sha256(), durable=self._folder is not None, began=began
        ).write()

    def _read(self, key: str) -> Mapping[str, Array]:
        records = self._records
        if key not in records:
            return {}
        self._check(records[KEPT_ABOUT])
        return views(records[key])

    def _check(self, about: Mapping[str, Any]) -> None:
        if about[VERSION] != _VERSION or about[FINGERPRINT] != self._fingerprint:
            raise StateError(
                f"what this client kept (version {about[VERSION]!s}, round"
                f" {about[SERVER_ROUND]!s}) belongs to another model: its names, layer"
                " types or shapes changed (its first entry is now"
                f" '{self._parts.names[0]}'). Start a new run, or use the earlier model"
                " again."
            )

    def _write(self, key: str, entries: State, server_round: int) -> None:
        if self._context is None:
            raise StateError(
                f"the strategy keeps {len(entries)} entries with the client, but this"
                " client has no Context. Pass context= from client_fn(context)."
            )
        # Diverged entries are not kept: the engine restores the context, and the part
        # of the round before stays.
        bad = [
            n
            for n, array in entries.items()
            if array.dtype.kind == "f" and not np.isfinite(array).all()
        ]
        if bad:
            text = (
                f"entry '{bad[0]}' is not finite after training ({len(bad)} of"
                f" {len(entries)} entries). The client keeps its values of the round"
                " before. Use a smaller learning-rate."
            )
            raise StateError(coded(NOT_FINITE, text))
        about = self._about()
        begun = _begun(about, server_round) if about else server_round
        self._state[key] = to_record(entries)
        self._describe(server_round, begun)

    def _holds(self) -> bool:
        """Return whether anything is kept."""
        return not self._records.keys().isdisjoint((KEPT, KEPT_BY_HOOKS))

    def _about(self) -> dict[str, Any]:
        """Return what is known of the kept state; empty if nothing is kept."""
        record = self._records.get(KEPT_ABOUT)
        return {} if record is None else dict(record.items())

    @property
    def _records(self) -> dict[str, Any]:
        return dict(self._state.items())

    def _replace(self, content: Mapping[str, Any] | None) -> None:
        """Replace what is kept with the content of a file of the state folder; None =
        nothing.
        """
        for key in _ASIDE:
            self._state.pop(key, None)
        if content and content["kept"]:
            for key, entries in content["kept"].items():
                self._state[key] = to_record(entries)
            self._describe(int(content["round"]), begun=0)

    def _describe(self, server_round: int, begun: int) -> None:
        about: dict[str, int | str] = {
            VERSION: _VERSION,
            FINGERPRINT: self._fingerprint,
        }
        if self._start_id is not None:
            about[START_ID] = self._start_id
        self._state[KEPT_ABOUT] = filled(
            ConfigRecord, {**about, SERVER_ROUND: server_round, BEGUN: begun}
        )

    @staticmethod
    def _lost(expected: str, why: str) -> str:
        return (
            "the server expects the part that this client kept with SHA-256"
            f" {expected[:12]}..., and the client has {why}: the part is lost, and the"
            " server will send the whole state again"
        )


def _begun(about: Mapping[str, Any], server_round: int) -> int:
    """Return the round in which the kept state began, if this is that round, else 0."""
    return int(about.get(BEGUN, 0)) if about.get(SERVER_ROUND) == server_round else 0
