"""What a client keeps between rounds, in Flower's ``Context.state``: checked against the
model, and against what the server expects.

A context exists as long as its node's process and its run. Copies in the node's state
folder (``kept_files``) remain after both, so that a run can be resumed on another day or
another machine. The server's half is ``server.runs.kept``: it knows the hash of what
each client kept, and sends the one that a client goes on from.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, RecordDict

from fedbn_flwr.batchnorm.averaging import Array, State
from fedbn_flwr.batchnorm.parts import Parts
from fedbn_flwr.client.kept_files import KeptFiles
from fedbn_flwr.client.permissions import check_path
from fedbn_flwr.compat.flower import filled
from fedbn_flwr.errors import NOT_FINITE, ConfigError, StateError, coded
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
    STATE_DIR,
    VERSION,
    Continuity,
    MessageConfig,
    ReplyInfo,
)
from fedbn_flwr.messages.records import (
    from_record,
    state_sha256,
    tensors,
    to_record,
    to_state,
    views,
)
from fedbn_flwr.training.client_hook import OWN_MODEL, ClientHook, Entries

__all__ = ["ClientStorage", "KeptState", "own_entries", "state_dir"]

_VERSION = 1
_RECORDS = (KEPT, KEPT_BY_HOOKS)
# the records as they were before the round, by the name that they have now
_ASIDE = {key: f"{KEPT_BEFORE}/{key}" for key in (*_RECORDS, KEPT_ABOUT)}


@dataclass(frozen=True)
class ClientStorage:
    """Where a ``TorchClient`` keeps its state.

    Attributes:
        context: Flower's context of the node; None for a client that cannot keep
            entries.
        partition_id: names the client in a state folder.
        folder: the state folder; None = the one that the context names, if any.
    """

    context: Context | None
    partition_id: int | None
    folder: Path | None

    def open(self, parts: Parts, fingerprint: str, sent: MessageConfig) -> KeptState:
        """Return what the client keeps, restored to the state that the server expects.

        Raises:
            StateError: a state folder needs a partition id, or the client does not have
                the expected state.
        """
        kept = KeptState(self.context, parts, fingerprint, sent.start_id)
        folder = self.folder
        if folder is None and self.context is not None:
            folder = state_dir(self.context)
        # Without a name of the run its files would be another run's in the next one.
        if folder is not None and sent.continuity is not None:
            if self.partition_id is None:
                raise StateError(
                    "state_dir needs a partition id: pass partition_id=, or a"
                    " context that names it"
                )
            kept.attach(folder, sent.continuity, self.partition_id)
        kept.restore(sent.local_sha256, sent.used_sha256)
        return kept


def own_entries(kept: Mapping[str, Mapping[str, Array]]) -> dict[str, Array]:
    """Return the entries of a client's own model, given its kept records: those that
    stay with it, and all of the model that a hook keeps as ``OWN_MODEL``.
    """
    return {**kept.get(KEPT, {}), **_below(OWN_MODEL, kept.get(KEPT_BY_HOOKS, {}))}


def _below(place: str, entries: State) -> dict[str, Array]:
    """Return what is kept in this place, by the names that its hook gave."""
    start = f"{place}/"
    return {n.removeprefix(start): a for n, a in entries.items() if n.startswith(start)}


def state_dir(context: Context, of_run: str | None = None) -> Path | None:
    """Return a node's state folder: its own ``state-dir``, or that of the run; None
    without either.

    Args:
        context: the node's context.
        of_run: the run's folder; None = the one that the run config names.

    Raises:
        ConfigError: the path is not absolute, or it is the run's and the node does not
            allow it.
    """
    if of_run is None:
        of_run = str(context.run_config.get(STATE_DIR, ""))
    own = str(context.node_config.get(STATE_DIR, ""))
    if of_run and not own:
        check_path(context, STATE_DIR, of_run)
    named = os.path.expanduser(own or of_run)
    if not named:
        return None
    if not Path(named).is_absolute():
        raise ConfigError(f"state-dir={named!r} is relative; write an absolute path")
    return Path(named)


class KeptState:
    """What one client keeps: its own entries of the model, and those of its hooks.

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
        self._files: KeptFiles | None = None
        self._start_id = start_id
        self._fingerprint = fingerprint

    @property
    def _state(self) -> RecordDict:
        """``Context.state``; not stored, because a mod or an app may replace it."""
        return self._without_context if self._context is None else self._context.state

    def attach(self, root: Path, continuity: Continuity, partition_id: int) -> None:
        """Write copies to the state folder ``root`` from now on; see ``KeptFiles``."""
        self._files = KeptFiles(root, continuity, partition_id, self._fingerprint)

    # Before the round: go on from the state that the server expects.

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
        # A context may see several starts of a strategy, as in a notebook: each begins
        # with the model that it is given.
        if self._start_id is not None and self._is_of_another_start():
            self.replace(None)
        if expected is None:
            # A new process has an empty context, and its state folder is the memory.
            if self._files is not None and not self._has_any():
                self.replace(self._files.newest())
        else:
            self._go_on_from(expected)
        if used is None:
            return
        # The round before may have ended here and not at the server: an answer that was
        # lost or late, a round that was not accepted. The client must not be ahead.
        if used != self.sha256():
            self.replace(self._before_last_round(used))
        # In a state folder the file before this round's is the way back.
        if self._files is None:
            self._set_aside()

    def _is_of_another_start(self) -> bool:
        return self._has_any() and self._about().get(START_ID) != self._start_id

    def _go_on_from(self, expected: str) -> None:
        """Restore the state with this hash; "" = none of this run.

        Raises:
            StateError: it is gone.
        """
        if expected and expected == self.sha256():
            return
        content, lacks = None, "no state folder (state-dir)"
        if self._files is not None:
            content = self._files.find(expected)
            lacks = f"no good file with it in {self._files.path}"
        if expected and content is None:
            raise _lost(expected, lacks)
        # Without a folder, too: a context may have what an earlier run kept.
        self.replace(content)

    def _before_last_round(self, used: str) -> dict[str, Any] | None:
        """Return the kept state ``used``, from the state folder or as it was set aside;
        None if it is gone.
        """
        if self._files is not None:
            content = self._files.find(used)  # and removes the files of what is undone
            # It is of an earlier run, whose server the hooks' entries belong to.
            if content and not used:
                content["kept"].pop(KEPT_BY_HOOKS, None)
            return content
        about = dict(self._records.get(_ASIDE[KEPT_ABOUT], {}))
        if not used or about.get(LOCAL_SHA256) != used:
            return None
        kept = {
            key: from_record(self._records[_ASIDE[key]])
            for key in _RECORDS
            if _ASIDE[key] in self._state
        }
        return {"round": about[SERVER_ROUND], "kept": kept}

    def _set_aside(self) -> None:
        """Name the kept records once more, so that the coming round can be undone; they
        share their arrays.
        """
        self.sha256()  # the copy has it, too
        for key, aside in _ASIDE.items():
            self._state.pop(aside, None)
            if key in self._state:
                self._state[aside] = self._state[key]

    # In the round: what is kept, under the model's names.

    def load(self, names: Collection[str]) -> Mapping[str, Array]:
        """Return the kept entries among ``names``; empty before the first round.

        Raises:
            StateError: the entries belong to another version or another model.
        """
        kept = self._read(KEPT) if names else {}
        return {name: kept[name] for name in names if name in kept}

    def tested(self, names: Collection[str]) -> Mapping[str, Array]:
        """Return what this client is tested with: ``load``, and a second model."""
        return {**self.load(names), **_below(OWN_MODEL, self._read(KEPT_BY_HOOKS))}

    def hook_state(self, hook: ClientHook) -> Entries:
        """Return the entries that a client hook kept in the client's last round, else
        none. Raises as ``load``.
        """
        entries = _below(_place(hook), self._read(KEPT_BY_HOOKS))
        # copies: the hook may change them, and the round may be undone
        return tensors({name: array.copy() for name, array in entries.items()})

    # After the round: keep what the next one needs.

    def keep(self, entries: State, server_round: int) -> None:
        """Keep ``entries`` until the client's next round.

        Raises:
            StateError: there is no context, or an entry is not finite.
        """
        self._write(KEPT, entries, server_round)

    def save_hook_state(self, hooks: Iterable[ClientHook], server_round: int) -> None:
        """Keep the entries of the client hooks until the client's next round. Raises as
        ``keep``.
        """
        entries = {}
        for hook in hooks:
            for name, array in to_state(hook.keep()).items():
                entries[f"{_place(hook)}/{name}"] = array
        if entries:
            self._write(KEPT_BY_HOOKS, entries, server_round)

    def save(self, server_round: int) -> None:
        """Write the kept state to the state folder, if there is one.

        Raises:
            StateError: the folder cannot be written.
        """
        sha256 = "" if self._files is None else self.sha256()
        if self._files is None or not sha256:
            return
        kept = {key: dict(self._read(key)) for key in _RECORDS if key in self._state}
        self._files.write({"sha256": sha256, "kept": kept}, server_round)

    def reply_metadata(self, server_round: int) -> dict[str, str]:
        """Return the reply's entries about the kept state; empty if nothing is kept."""
        began = _begun(self._about(), server_round) == server_round
        return ReplyInfo(
            local_sha256=self.sha256(), durable=self._files is not None, began=began
        ).write()

    def sha256(self) -> str:
        """Return the SHA-256 of the kept state; "" if nothing is kept."""
        about = self._about()
        if not about:
            return ""
        self._check(about)
        known = about.get(LOCAL_SHA256)
        if known is not None:
            return str(known)
        kept = {}
        for key in _RECORDS:
            for name, array in self._read(key).items():
                kept[f"{key}/{name}"] = array
        # Hashing takes longer than small trainings: once, and every write forgets it.
        sha256 = state_sha256(kept)
        self._records[KEPT_ABOUT][LOCAL_SHA256] = sha256
        return sha256

    def _check(self, about: Mapping[str, Any]) -> None:
        """Check that the kept entries are of this model and of this version."""
        if about[VERSION] != _VERSION or about[FINGERPRINT] != self._fingerprint:
            raise StateError(
                f"what this client kept (version {about[VERSION]!s}, round"
                f" {about[SERVER_ROUND]!s}) belongs to another model: its names, layer"
                " types or shapes changed (its first entry is now"
                f" '{self._parts.names[0]}'). Start a new run, or use the earlier model"
                " again."
            )

    # The records in the context.

    @property
    def _records(self) -> dict[str, Any]:
        return dict(self._state.items())

    def _has_any(self) -> bool:
        """Return whether anything is kept."""
        return not self._records.keys().isdisjoint(_RECORDS)

    def _about(self) -> dict[str, Any]:
        """Return what is known of the kept state; empty if nothing is kept."""
        record = self._records.get(KEPT_ABOUT)
        # a copy by items: Flower's record checks types at each look-up
        return {} if record is None else dict(record.items())

    def _read(self, key: str) -> Mapping[str, Array]:
        records = self._records
        if key not in records:
            return {}
        self._check(records[KEPT_ABOUT])
        return views(records[key])

    def _write(self, key: str, entries: State, server_round: int) -> None:
        if self._context is None:
            raise StateError(
                f"the strategy keeps {len(entries)} entries with the client, but this"
                " client has no Context. Pass context= from client_fn(context)."
            )
        _refuse_diverged(entries)
        about = self._about()
        begun = _begun(about, server_round) if about else server_round
        self._state[key] = to_record(entries)
        self._describe(server_round, begun)

    def replace(self, content: Mapping[str, Any] | None) -> None:
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
        about |= {SERVER_ROUND: server_round, BEGUN: begun}
        self._state[KEPT_ABOUT] = filled(ConfigRecord, about)


def _place(hook: ClientHook) -> str:
    return hook.kept_as or type(hook).__name__


def _refuse_diverged(entries: State) -> None:
    """Refuse entries that are not finite: the engine then restores the context, and what
    was kept in the round before stays.
    """
    bad = [
        name
        for name, array in entries.items()
        if array.dtype.kind == "f" and not np.isfinite(array).all()
    ]
    if bad:
        text = (
            f"entry '{bad[0]}' is not finite after training ({len(bad)} of"
            f" {len(entries)} entries). The client keeps its values of the round"
            " before. Look for NaN in the inputs; else use a smaller learning-rate."
        )
        raise StateError(coded(NOT_FINITE, text))


def _begun(about: Mapping[str, Any], server_round: int) -> int:
    """Return the round in which the kept state began, if this is that round, else 0."""
    if about.get(SERVER_ROUND) != server_round:
        return 0
    return int(about.get(BEGUN, 0))


def _lost(expected: str, why: str) -> StateError:
    return StateError(
        "the server expects the part that this client kept with SHA-256"
        f" {expected[:12]}..., and the client has {why}: the part is lost, and the"
        " server will send the whole state again"
    )
