"""A client's local state between rounds, in Flower's ``Context.state``.

It is checked against the model, and against the state that the server expects. A
context exists as long as the process of its node and the run. Copies in the node's
state folder (``kept_files``) outlast both, so that a run can be resumed on another day
or another machine. The server's counterpart is ``server.runs.kept``: it has the hash of
each client's local state, and sends the hash from which a client continues.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context

from fedbn_flwr.batchnorm.array_types import Array, State
from fedbn_flwr.batchnorm.parts import Parts
from fedbn_flwr.client.kept_files import KeptFiles
from fedbn_flwr.client.permissions import check_path
from fedbn_flwr.compat.flower import filled, values_of
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
from fedbn_flwr.training.client_hook import OWN_MODEL, Extras, NamedHooks, overrides

_VERSION = 1
_RECORDS = (KEPT, KEPT_BY_HOOKS)
# For each record, the name of its copy from before the round.
_ASIDE = {key: f"{KEPT_BEFORE}/{key}" for key in (*_RECORDS, KEPT_ABOUT)}


@dataclass(frozen=True)
class ClientStorage:
    """The place of a ``TorchClient``'s local state.

    Attributes:
        context: Flower's context of the node; None for a client that cannot keep
            entries.
        partition_id: the name of the client in a state folder.
        folder: the state folder; None uses the folder that the context names, if any.
    """

    context: Context | None
    partition_id: int | None
    folder: Path | None

    def open(self, parts: Parts, fingerprint: str, sent: MessageConfig) -> KeptState:
        """Return the client's local state, restored to the state the server expects.

        Raises:
            StateError: a state folder needs a partition id, or the client does not have
                the expected state.
        """
        kept = KeptState(self.context, parts, fingerprint, sent.start_id)
        folder = self.folder
        if folder is None and self.context is not None:
            folder = state_dir(self.context)
        # Use the folder only if the server names the run. Otherwise, the next run would
        # find the files of this run.
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
    """Return the entries of a client's own model, given its kept records.

    They are the entries that stay with the client, and the whole model that a hook
    keeps as ``OWN_MODEL``.
    """
    return {**kept.get(KEPT, {}), **_below(OWN_MODEL, kept.get(KEPT_BY_HOOKS, {}))}


def _below(place: str, entries: State) -> dict[str, Array]:
    """Return the entries kept in this place, by the names that the hook gave them."""
    start = f"{place}/"
    return {n.removeprefix(start): a for n, a in entries.items() if n.startswith(start)}


def state_dir(context: Context, of_run: str | None = None) -> Path | None:
    """Return a node's state folder, or None if there is none.

    The node's own ``state-dir`` takes precedence over the run's.

    Args:
        context: the node's context.
        of_run: the run's folder; None uses the folder that the run config names.

    Raises:
        ConfigError: the path is not absolute, or it comes from the run and the node
            does not allow it.
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
        raise ConfigError(
            f"state-dir={named!r} is relative: write an absolute path",
            code="relative-path",
        )
    return Path(named)


class KeptState:
    """The local state of a client, from its model and its hooks.

    Args:
        context: Flower's context of the node; None for a client that cannot keep
            entries.
        parts: the split of the model's state.
        fingerprint: the fingerprint of the split and the model's shapes, which kept
            entries must match.
        start_id: id of the strategy's start. ``restore`` removes the state from any
            other start; None disables this.
    """

    def __init__(
        self,
        context: Context | None,
        parts: Parts,
        fingerprint: str,
        start_id: str | None = None,
    ) -> None:
        self._context = context
        self._without_context: dict[str, Any] = {}
        self._parts = parts
        self._files: KeptFiles | None = None
        self._start_id = start_id
        self._fingerprint = fingerprint

    def attach(self, root: Path, continuity: Continuity, partition_id: int) -> None:
        """Write copies to the state folder ``root`` from now on (``KeptFiles``)."""
        self._files = KeptFiles(root, continuity, partition_id, self._fingerprint)

    # Before the round: continue from the state that the server expects.

    def restore(self, expected: str | None, used: str | None = None) -> None:
        """Restore the expected state, and undo a round whose reply was not used.

        Args:
            expected: the hash of the state that the server expects; empty for no state
                in this run. With None the client takes its newest state.
            used: the hash of the state after the last round whose reply the server
                used; empty if there was none. With None nothing is undone. A client
                that lacks this state starts again, and reports it in its reply.

        Raises:
            StateError: the client does not have the expected state.
        """
        # A context may see several starts of a strategy, as in a notebook: each start
        # begins with its own model.
        if self._start_id is not None and self._is_of_another_start():
            self.replace(None)
        if expected is None:
            # A new process has an empty context: continue from the state folder.
            if self._files is not None and not self._has_any():
                self.replace(self._files.newest())
        else:
            self._continue_from(expected)
        if used is None:
            return
        # The last round may have ended here but not at the server: the reply was lost
        # or late, or the round was not accepted. Then return to the state that the
        # server has used.
        if used != self.sha256():
            self.replace(self._before_last_round(used))
        # Without a state folder, copy the state, so that the server can undo this
        # round. With a state folder, the previous file serves this purpose.
        if self._files is None:
            self._set_aside()

    def _is_of_another_start(self) -> bool:
        return self._has_any() and self._about().get(START_ID) != self._start_id

    def _continue_from(self, expected: str) -> None:
        """Restore the state with this hash. An empty hash means no state of this run.

        Raises:
            StateError: the state is lost.
        """
        if expected and expected == self.sha256():
            return
        # A resumed run may start before a round that the server has not used.
        content, lacks = self._set_aside_with(expected), "no state folder (state-dir)"
        if self._files is not None:
            content = self._files.find(expected)
            lacks = f"no good file with it in {self._files.path}"
        if expected and content is None:
            raise _lost(expected, lacks)
        # Even without a folder, a context may contain the state of an earlier run.
        self.replace(content)

    def _before_last_round(self, used: str) -> dict[str, Any] | None:
        """Return the local state with the hash ``used``, or None if it is lost.

        The state comes from the state folder, or from the copy that was set aside.
        """
        if self._files is not None:
            content = self._files.find(used)  # also removes the files of undone rounds
            # If the server has used no state of this run, the content is from an
            # earlier run. Its hooks' entries belong to the server of that run.
            if content and not used:
                content["kept"].pop(KEPT_BY_HOOKS, None)
            return content
        return self._set_aside_with(used)

    def _set_aside_with(self, sha256: str) -> dict[str, Any] | None:
        """Return the copy that was set aside, or None if it has another hash."""
        about = dict(self._records.get(_ASIDE[KEPT_ABOUT], {}))
        if not sha256 or about.get(LOCAL_SHA256) != sha256:
            return None
        kept = {
            key: from_record(self._records[_ASIDE[key]])
            for key in _RECORDS
            if _ASIDE[key] in self._records
        }
        return {"round": about[SERVER_ROUND], "kept": kept}

    def _set_aside(self) -> None:
        """Store the kept records under a second name, so the round can be undone.

        Both names share the arrays.
        """
        self.sha256()  # puts the hash into the record, so the copy has it
        for key, aside in _ASIDE.items():
            self._records.pop(aside, None)
            if key in self._records:
                self._records[aside] = self._records[key]

    # In the round: the local state, under the names of the model.

    def load(self, names: Collection[str]) -> Mapping[str, Array]:
        """Return the kept entries among ``names``, or none before the first round.

        Raises:
            StateError: the entries belong to another version or another model.
        """
        kept = self._read(KEPT) if names else {}
        return {name: kept[name] for name in names if name in kept}

    def tested(self, names: Collection[str]) -> Mapping[str, Array]:
        """Return the local entries for a test, including a hook's second model."""
        return {**self.load(names), **_below(OWN_MODEL, self._read(KEPT_BY_HOOKS))}

    def hand_over(self, hooks: NamedHooks, sent: Extras) -> None:
        """Give each client hook the server's records and its own kept entries.

        A hook has no entries before its first round. It raises the errors of ``load``.
        """
        kept = self._read(KEPT_BY_HOOKS)
        for hook_name, hook in hooks.items():
            entries = _below(hook.kept_as or hook_name, kept)
            # Earlier versions stored the entries under the name of the class.
            if not entries and type(hook).__name__ not in hooks:
                entries = _below(type(hook).__name__, kept)
            # Copy the arrays: the hook may change them, and the round may be undone.
            copies = {name: array.copy() for name, array in entries.items()}
            hook.receive(sent, tensors(copies))

    # After the round: keep the entries that the next round needs.

    def keep(self, entries: State, server_round: int) -> None:
        """Keep ``entries`` until the client's next round.

        Raises:
            StateError: the context is missing, or an entry is not finite.
        """
        self._write(KEPT, entries, server_round)

    def save_hook_state(self, hooks: NamedHooks, server_round: int) -> None:
        """Keep the entries of the client hooks until the client's next round.

        It raises the errors of ``keep``.
        """
        entries = {}
        for hook_name, hook in hooks.items():
            place = hook.kept_as or hook_name
            for name, array in to_state(hook.keep()).items():
                entries[f"{place}/{name}"] = array
        # A hook that keeps nothing forgets its entries of earlier rounds. A round
        # without such hooks forgets nothing.
        keeps = any(overrides(hook, "keep") for hook in hooks.values())
        if entries or (keeps and self._read(KEPT_BY_HOOKS)):
            self._write(KEPT_BY_HOOKS, entries, server_round)

    def save(self, server_round: int) -> None:
        """Write the local state to the state folder, if there is one.

        Raises:
            StateError: the folder cannot be written.
        """
        sha256 = "" if self._files is None else self.sha256()
        if self._files is None or not sha256:
            return
        kept = {key: dict(self._read(key)) for key in _RECORDS if key in self._records}
        self._files.write({"sha256": sha256, "kept": kept}, server_round)

    def reply_metadata(self, server_round: int) -> dict[str, str]:
        """Return the reply's entries about the local state, or none without state."""
        began = _begun(self._about(), server_round) == server_round
        return ReplyInfo(
            local_sha256=self.sha256(), durable=self._files is not None, began=began
        ).write()

    def sha256(self) -> str:
        """Return the SHA-256 of the local state, or "" if nothing is kept."""
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
        # Hashing takes longer than small trainings: keep the hash until the next write.
        sha256 = state_sha256(kept)
        values_of(self._records[KEPT_ABOUT])[LOCAL_SHA256] = sha256
        return sha256

    def _check(self, about: Mapping[str, Any]) -> None:
        """Check that the kept entries belong to this model and this version."""
        if about[VERSION] != _VERSION or about[FINGERPRINT] != self._fingerprint:
            raise StateError(
                f"the local state of this client (version {about[VERSION]!s}, round"
                f" {about[SERVER_ROUND]!s}) belongs to another model: its names, layer"
                " types or shapes changed (its first entry is now"
                f" '{self._parts.names[0]}'). Start a new run, or use the earlier model"
                " again."
            )

    # The records in the context.

    @property
    def _records(self) -> dict[str, Any]:
        # Read ``Context.state`` each time, because a mod or an app may replace it.
        if self._context is None:
            return self._without_context
        return values_of(self._context.state)

    def _has_any(self) -> bool:
        """Return whether anything is kept."""
        return not self._records.keys().isdisjoint(_RECORDS)

    def _about(self) -> dict[str, Any]:
        """Return the facts about the local state, none if nothing is kept."""
        record = self._records.get(KEPT_ABOUT)
        return {} if record is None else dict(values_of(record))

    def _read(self, key: str) -> Mapping[str, Array]:
        records = self._records
        if key not in records:
            return {}
        self._check(values_of(records[KEPT_ABOUT]))
        return views(records[key])

    def _write(self, key: str, entries: State, server_round: int) -> None:
        if self._context is None:
            raise StateError(
                f"the strategy keeps {len(entries)} of the entries with the client, but"
                " this client has no Context. Pass context= from client_fn(context)."
            )
        _refuse_diverged(entries)
        about = self._about()
        begun = _begun(about, server_round) if about else server_round
        self._records[key] = to_record(entries)
        self._describe(server_round, begun)

    def replace(self, content: Mapping[str, Any] | None) -> None:
        """Replace the local state with the content of a file of the state folder.

        None removes it.
        """
        for key in _ASIDE:
            self._records.pop(key, None)
        if content and content["kept"]:
            for key, entries in content["kept"].items():
                self._records[key] = to_record(entries)
            self._describe(int(content["round"]), begun=0)

    def _describe(self, server_round: int, begun: int) -> None:
        about: dict[str, int | str] = {
            VERSION: _VERSION,
            FINGERPRINT: self._fingerprint,
        }
        if self._start_id is not None:
            about[START_ID] = self._start_id
        about |= {SERVER_ROUND: server_round, BEGUN: begun}
        self._records[KEPT_ABOUT] = filled(ConfigRecord, about)


def _refuse_diverged(entries: State) -> None:
    """Refuse entries that are not finite.

    The engine then restores the context, so the state of the last round remains.
    """
    bad = [
        name
        for name, array in entries.items()
        if array.dtype.kind == "f" and not np.isfinite(array).all()
    ]
    if bad:
        text = (
            f"entry '{bad[0]}' is not finite after training ({len(bad)} of"
            f" {len(entries)} entries). The client keeps its values from the round"
            " before. Look for NaN in the inputs, or use a smaller learning-rate."
        )
        raise StateError(coded(NOT_FINITE, text))


def _begun(about: Mapping[str, Any], server_round: int) -> int:
    """Return the current round if the local state began in it, otherwise 0."""
    if about.get(SERVER_ROUND) != server_round:
        return 0
    return int(about.get(BEGUN, 0))


def _lost(expected: str, why: str) -> StateError:
    return StateError(
        "the server expects the local state of this client with SHA-256"
        f" {expected[:12]}..., but the client has {why}: the local state is lost, and"
        " the server will send the whole state again"
    )
