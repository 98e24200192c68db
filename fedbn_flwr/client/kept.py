"""A client's local state between rounds.

A store contains it as bytes under a round and a hash. A name is ``ROUND.SHA256``, so
the names are in the order of the rounds. The store is in Flower's ``Context.state``, or
in the node's state folder, which outlasts the run and the process of the node.

``KeptState`` checks it against the model, and against the state that the server
expects. The server's counterpart is ``server.runs.kept``: it has the hash of each
client's local state, and sends the hash of the state with which a client continues.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context

from fedbn_flwr.batchnorm.array_types import Array, State
from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.checked_file import (
    decode_checked,
    encode_checked,
    read_checked,
    remove_leftovers,
    write_atomically,
)
from fedbn_flwr.client.permissions import check_path
from fedbn_flwr.compat.flower import filled, values_of
from fedbn_flwr.errors import (
    NOT_FINITE,
    STATISTICS_NOT_FINITE,
    ConfigError,
    StateError,
    coded,
)
from fedbn_flwr.messages.protocol import (
    FINGERPRINT,
    KEPT,
    KEPT_BY_HOOKS,
    KEPT_STATES,
    PARTITION_ID,
    SHAPES,
    START_ID,
    STATE_DIR,
    MessageConfig,
    ReplyInfo,
)
from fedbn_flwr.messages.records import tensors, to_state
from fedbn_flwr.training.client_hook import OWN_MODEL, Extras, NamedHooks, overrides

_NAME = re.compile(r"\d{6,}\.[0-9a-f]{64}")
_SUFFIX = ".safetensors"


def hash_of(name: str) -> str:
    """Return the hash in the name of a state."""
    return name.partition(".")[2]


class Memory:
    """States in Flower's ``Context.state`` that end with the node's process.

    Attributes:
        lacks: why a state may be absent, for messages.
        durable: whether the states outlast the process of the node.
    """

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
        self._replace(self._context, {**self._entries(), name: data})

    def keep_only(self, names: Collection[str]) -> None:
        """Remove all other names."""
        entries = self._entries()
        if self._context and not entries.keys() <= set(names):
            self._replace(self._context, {name: entries[name] for name in names})

    def _entries(self) -> dict[str, bytes]:
        # Read ``Context.state`` each time, because a mod or an app may replace it.
        if self._context is None or KEPT_STATES not in self._context.state:
            return {}
        return values_of(self._context.state[KEPT_STATES])

    def _replace(self, context: Context, entries: dict[str, bytes]) -> None:
        context.state[KEPT_STATES] = filled(ConfigRecord, entries)


class Folder:
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


Store = Memory | Folder
"""The kept states of one client."""


def find(store: Store, sha256: str) -> str | None:
    """Return the newest name with this hash, or None."""
    found = [name for name in store.names() if hash_of(name) == sha256]
    return found[-1] if found else None


def undo_after(store: Store, name: str | None) -> None:
    """Remove the states after ``name``, or all states if it is None."""
    store.keep_only([other for other in store.names() if name and other <= name])


def put(
    store: Store,
    content: Mapping[str, Any],
    server_round: int,
    needed: Collection[int] = (),
) -> str:
    """Write the state after a round, return its hash, and remove other states.

    Args:
        store: the states of the client.
        content: the state.
        server_round: the round.
        needed: earlier rounds; the state after each of them is not removed.
    """
    data, sha256 = encode_checked(content)
    new = f"{server_round:06d}.{sha256}"
    # Write first, because a full disk must not destroy the earlier states.
    store.write(new, data)
    stay = [new]
    for last in needed:
        # Other states of this round or a later round belong to undone rounds.
        end = f"{min(last + 1, server_round):06d}"
        stay += [name for name in store.names() if name < end][-1:]
    store.keep_only(stay)
    return sha256


def own_entries(content: Mapping[str, Any]) -> dict[str, Array]:
    """Return the entries of a client's own model, given its local state.

    They are the entries that stay with the client, and the whole model that a hook
    keeps as ``OWN_MODEL``.
    """
    return {**content[KEPT], **_below(OWN_MODEL, content[KEPT_BY_HOOKS])}


def _below(place: str, entries: State) -> dict[str, Array]:
    """Return the entries kept in this place, by the names that the hook gave them."""
    start = f"{place}/"
    return {n.removeprefix(start): a for n, a in entries.items() if n.startswith(start)}


def hand_over(hooks: NamedHooks, sent: Extras, kept: State) -> None:
    """Give each client hook the server's records and its own kept entries.

    A hook has no entries before its first round, and may change its entries.
    """
    for hook_name, hook in hooks.items():
        entries = _below(hook.kept_as or hook_name, kept)
        hook.receive(sent, tensors(entries))


def kept_by(hooks: NamedHooks, earlier: State) -> State:
    """Return the entries that the client hooks keep until the client's next round.

    A hook that keeps nothing forgets its entries of earlier rounds. A round without
    hooks that keep entries forgets nothing.
    """
    if not any(overrides(hook, "keep") for hook in hooks.values()):
        return earlier
    entries = {}
    for hook_name, hook in hooks.items():
        for name, array in to_state(hook.keep()).items():
            entries[f"{hook.kept_as or hook_name}/{name}"] = array
    return entries


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

    It begins as the state that the server expects, and ``keep`` replaces it.

    Args:
        context: Flower's context of the node; None for a client without a context.
        sent: the config of the message.
        partition_id: the name of the client in a state folder.
        folder: the state folder; None uses the folder that the context names, if any.

    Attributes:
        shapes: the shapes of the whole model, for a client that lacks the model.

    Raises:
        StateError: the server resumes a run from a state that the client does not
            have, the state is damaged or belongs to another client, or a state folder
            needs a partition id.
    """

    def __init__(
        self,
        context: Context | None,
        sent: MessageConfig,
        partition_id: int | None,
        folder: Path | None = None,
    ) -> None:
        if folder is None and context is not None:
            folder = state_dir(context)
        self._store: Store = Memory(context)
        # If the reply is lost, the server asks for the state before the round. A
        # resumed run asks for the state of a checkpoint; a run whose clients keep their
        # states in memory cannot be resumed.
        self._undoes = sent.used_sha256 is not None
        self._committed: tuple[int, ...] = ()
        # Use the folder only if the server names the run. Otherwise, the next run would
        # find the files of this run.
        if sent.continuity is not None and folder is not None:
            self._store = _folder(folder, sent.continuity.run, partition_id)
            # A run that ends within a round saves the round before.
            self._undoes, self._committed = True, sent.continuity.committed
        self._owner: dict[str, Any] = {
            START_ID: sent.start_id,
            PARTITION_ID: partition_id,
        }
        self._content: Mapping[str, Any] = {}
        self._sha256 = ""
        self._continue_from(sent)
        self._began = not self._sha256
        self.shapes: Mapping[str, Any] = self._content.get(SHAPES, {})

    def _continue_from(self, sent: MessageConfig) -> None:
        """Load the state that the server expects.

        Raises:
            StateError: a resume needs a state that the client does not have.
        """
        store, expected = self._store, sent.local_sha256
        if expected is None:
            expected = sent.used_sha256
        if expected is None:
            # The server does not name a state: continue from the newest. A context may
            # see several starts of a strategy, as in a notebook: each start begins with
            # its own model.
            for name in store.names()[-1:]:
                content = store.read(name)
                if sent.start_id in (None, content[START_ID]):
                    self._content, self._sha256 = content, hash_of(name)
                else:
                    undo_after(store, None)
            return
        found = find(store, expected) if expected else None
        if found:
            self._content, self._sha256 = store.read(found), expected
        elif sent.local_sha256:
            raise StateError(
                "the server expects the local state of this client with SHA-256"
                f" {expected[:12]}..., but the client has {store.lacks}: the local state"
                " is lost, and the server will send the whole state again"
            )
        elif expected:
            return  # the client starts again, and its reply reports this
        # The other states are from rounds that the server has not used: the reply was
        # lost or late, the round was not accepted, or the run was resumed before it.
        undo_after(store, found)

    def check(self, fingerprint: str) -> None:
        """Check that the state belongs to this client and this model.

        Raises:
            StateError: it does not.
        """
        self._owner[FINGERPRINT] = fingerprint
        if not self._content:
            return
        if self._content[PARTITION_ID] != self._owner[PARTITION_ID]:
            raise StateError(
                "the local state belongs to the client"
                f" {self._content[PARTITION_ID]}: remove the files that were copied here"
            )
        if self._content[FINGERPRINT] != fingerprint:
            raise StateError(
                "the local state of this client belongs to another model: its names,"
                " layer types or shapes changed. Start a new run, or use the earlier"
                " model again."
            )

    # In the round: the local state, under the names of the model.

    @property
    def of_hooks(self) -> State:
        """The entries of the client hooks."""
        of_hooks: State = self._content.get(KEPT_BY_HOOKS, {})
        return of_hooks

    def load(self, names: Collection[str]) -> dict[str, Array]:
        """Return the kept entries among ``names``, or none before the first round."""
        kept = self._content.get(KEPT, {})
        return {name: kept[name] for name in names if name in kept}

    def tested(self, names: Collection[str]) -> dict[str, Array]:
        """Return the local entries for a test, including a hook's second model."""
        return {**self.load(names), **_below(OWN_MODEL, self.of_hooks)}

    # After the round: keep the entries that the next round needs.

    def keep(self, own: State, of_hooks: State, server_round: int) -> None:
        """Keep entries until the client's next round.

        Args:
            own: the entries that stay with the client; none keeps the earlier entries.
            of_hooks: the entries of the client hooks.
            server_round: the round.

        Raises:
            StateError: an entry is not finite, or the client cannot store the entry.
        """
        if not own and not of_hooks and not self.of_hooks:
            return
        own = own or self._content.get(KEPT, {})
        _refuse_diverged({**own, **of_hooks})
        entries = {KEPT: own, KEPT_BY_HOOKS: of_hooks}
        self._content = {**self._owner, SHAPES: self.shapes, **entries}
        before = (server_round - 1,) if self._undoes else ()
        needed = (*before, *self._committed)
        self._sha256 = put(self._store, self._content, server_round, needed)

    def reply_metadata(self) -> dict[str, str]:
        """Return the reply's entries about the local state, or none without state."""
        return ReplyInfo(
            local_sha256=self._sha256, durable=self._store.durable, began=self._began
        ).write()


def _folder(root: Path, run: str, partition_id: int | None) -> Folder:
    if partition_id is None:
        raise StateError(
            "state_dir needs a partition id: pass partition_id=, or a context that"
            " names it (--node-config of a SuperNode)"
        )
    return Folder(root, run, partition_id)


def _refuse_diverged(entries: State) -> None:
    """Refuse entries that are not finite.

    The engine then restores the context, so the state of the last round remains.
    """
    bad = [
        name
        for name, array in entries.items()
        if array.dtype.kind in "fc" and not np.isfinite(array).all()
    ]
    if bad:
        text = (
            f"entry '{bad[0]}' is not finite after training ({len(bad)} of"
            f" {len(entries)} entries). The client keeps its values from the round"
            " before. Look for NaN in the inputs, or use a smaller learning-rate."
        )
        # Finite weights beside such statistics have another cause than large steps.
        only_statistics = set(bad).issubset(split_state(entries).statistics)
        code = STATISTICS_NOT_FINITE if only_statistics else NOT_FINITE
        raise StateError(coded(code, text))
